"""The drop-in pair: clients encode independently; frames are summed into one buffer or passed on one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedcomp.codecs import Codec, State, get_codec
from fedcomp.codecs.auto import at_link
from fedcomp.codecs.base import padded
from fedcomp.codecs.factors import at_model, wanted_by
from fedcomp.layout import Update
from fedcomp.program import Answer, Ask, Encoded, Me, Mean, Now, Released, Round, Single, Step
from fedcomp.rules import Made
from fedcomp.wire import Frame


@dataclass(frozen=True, repr=False, eq=False)
class Pair(Encoded, id="pair"):
    """Clients send their updates encoded by ``codec``.

    Parameters
    ----------
    codec : Codec or dict
        With the memory that it needs: :class:`fedcomp.codecs.ErrorFeedback` around a biased one.
    """

    APP: ClassVar[str] = "app = ClientApp(mods=[fc.compression()])"
    RULES: ClassVar[tuple[type, ...]] = (Mean, Single, Released)

    codec: Annotated[Codec, Made(get_codec)]

    @property
    def whole(self) -> bool:
        return self.codec.lossless

    @property
    def on_device(self) -> bool:
        return self.codec.on_device

    def round(self, now: Now) -> Round:
        answers = yield [Ask(node, dense=True) for node in now.nodes]
        return self.summed(now, answers)

    def summed(self, now: Now, answers: Sequence[Answer]) -> Step | None:
        """Return what the updates in answers come to."""
        codec = at_model(self.codec, lambda: now.layout.unflatten(now.model))
        return now.mean_of(codec, [self._voting(now, answer) for answer in answers])

    def _voting(self, now: Now, answer: Answer) -> Answer:
        """Return an answer with the vote that this client would have cast with the client half installed."""
        if answer.update is None or not self.codec.votes:
            return answer
        update = Update(answer.update, now.layout)
        frame, _ = self.codec.encode(update, self.codec.init(now.layout), now.key("uplink", answer.node))
        return answer._replace(frames={"values": frame})

    def client(self, memory: State, ask: Ask, me: Me) -> tuple[State, Answer]:
        frame, memory = self.encoded(me.update(whole=self.whole, collect=wanted_by(self.codec)), memory, me)
        return memory, Answer(me.node, frames={"values": frame})

    def encoded(self, update: Update, memory: State, me: Me) -> tuple[Frame, State]:
        """Return the frame of an update, and the codec's memory after it."""
        codec = at_model(self.codec, lambda: me.layout.unflatten(me.start))
        if not me.padded:
            # Where lengths must not tell of the update they do not tell of the time it took, either.
            codec = at_link(codec, me.layout.compressed_size, me.uplink, me.spent)
        frame, memory = codec.encode(update, memory, me.key)
        return (padded(frame, codec, me.layout, me.key) if me.padded else frame), memory
