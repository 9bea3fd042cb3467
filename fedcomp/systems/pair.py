"""The drop-in pair: every client encodes by itself; frames are added into one buffer, or handed on one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedcomp.codecs import Codec, State, get_codec
from fedcomp.layout import Layout, Vector
from fedcomp.program import Answer, Ask, Me, Mean, Now, Round, Single, System
from fedcomp.rules import Made
from fedcomp.wire import Frame


@dataclass(frozen=True, repr=False, eq=False)
class Pair(System, id="pair"):
    """Clients send what ``codec`` makes of their updates.

    Parameters
    ----------
    codec : Codec or dict
        With the memory that it needs: :class:`fedcomp.codecs.ErrorFeedback` around a biased one.
    """

    RULES: ClassVar[tuple[type, ...]] = (Mean, Single)

    codec: Annotated[Codec, Made(get_codec)]

    @property
    def whole(self) -> bool:
        return self.codec.lossless

    def start(self, layout: Layout) -> State:
        return self.codec.init(layout)

    def round(self, now: Now) -> Round:
        answers = yield [Ask(node) for node in now.nodes]
        return now.mean_of(self.codec, answers)

    def client(self, memory: State, ask: Ask, me: Me) -> tuple[State, Answer]:
        update = me.update(whole=self.whole, collect=self.codec.takes_outer)
        frame, memory = self.codec.encode(update, memory, me.key)
        return memory, Answer(me.node, frames={"values": frame})

    def rollback(self, memory: State, frame: Frame, layout: Layout) -> State:
        return self.codec.rollback(memory, frame, layout)

    def residual(self, memory: State, layout: Layout) -> Vector | None:
        return self.codec.residual(memory)
