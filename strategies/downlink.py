"""The downlink: versions of the model, the steps between them, and the steps that each node lacks."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from flwr.app import ArrayRecord, RecordDict
from numpy.typing import NDArray

from fedcomp.codecs import Codec, Replay
from fedcomp.codecs.factors import wanted_by
from fedcomp.factors.collect import Captured
from fedcomp.factors.outer import OuterProducts
from fedcomp.flower.asks import OwnStep, data_in, digest_of
from fedcomp.flower.logs import log
from fedcomp.flower.payload import BLOB, STEP
from fedcomp.flower.records import to_record
from fedcomp.layout import DensityPolicy, Layout, Update, Vector
from fedcomp.program import Given, Step, System
from fedcomp.rng import Key
from fedcomp.stateful import Stateful, nested, within_epoch
from fedcomp.strategies.replies import SentMessage
from fedcomp.strategies.roster import Peer
from fedcomp.strategies.running import Start
from fedcomp.versions import Broadcast, Summands
from fedcomp.wire import Frame

Arrays = Mapping[str, NDArray[Any]]


@dataclass
class OwnSteps:
    """What reads a step of the model that the program made.

    Attributes
    ----------
    number : int
        Of the round.
    blobs : dict of str to bytes
    derived : set of str
        Digests of the blobs that follow from the step (:meth:`fedcomp.program.System.after`).
    """

    number: int
    blobs: dict[str, bytes]
    derived: set[str]


class Downlink(Stateful):
    """Sends the model as the steps that a node lacks, or whole.

    Parameters
    ----------
    codec : Codec
    system : System
        Reads its steps itself where it makes such, which are changes in the layout of what clients send.
    policy : DensityPolicy or None
    seed : int

    Attributes
    ----------
    broadcast : Broadcast
        The versions of the model.
    lossless : bool
        Whether models go down as they are.
    own_steps : dict of int to OwnSteps
        By version, those of the program.
    layout : Layout
        Of the model that was published last.
    """

    STATE: ClassVar[Mapping[str, Any]] = {"broadcast": nested("broadcast"), "own_steps": dict[int, OwnSteps]}

    def __init__(self, codec: Codec, system: System, policy: DensityPolicy | None, seed: int) -> None:
        self._codec, self._system, self._policy, self._seed = codec, system, policy, seed
        self.broadcast = Broadcast(codec)
        self.lossless = codec.lossless
        self.own_steps: dict[int, OwnSteps] = {}
        self.layout = Layout(())
        self._following: list[weakref.ref[Start]] = []
        self._whole: tuple[int, ArrayRecord] | None = None
        self._captured: Captured | None = None
        self._summands: Summands = ()

    def publish(self, model: Arrays, layout: Layout | None = None) -> None:
        """Make ``model`` the current one; ``layout`` is that of its steps, where it is known."""
        broadcast = self.broadcast
        # The reference moves in place: rounds that are still open take what they began with.
        for each in self._following:
            if (start := each()) is not None:
                _ = start.vector
        self._following = []
        # By the downlink's codec: its layout need not be the uplink's.
        down = self.layout = layout or Layout.of(model, self._policy, cast_floats=not self.lossless)
        # Its own, since what is published is written to.
        vector = down.flatten(model)
        exact = {t.name: model[t.name] for t in down.exact}
        if self._system.makes_steps:
            if not broadcast.is_current(vector, exact):
                broadcast.adopt(vector, exact, down)
            return
        # By version, not by round: evaluation publishes a model too, and an unchanged one not at all.
        key = Key(self._seed, "downlink", within_epoch(broadcast.version) + 1)
        explain = partial(_explained, self._captured, broadcast.reference)
        broadcast.publish(vector, exact, down, key, explain, self._summands)
        self._captured, self._summands = None, ()

    def follow(self, start: Start) -> None:
        """Let a round take its start from the reference before that moves, if it has not until then."""
        # By a weak reference: what the round came to must not be kept by who waits for its model to move.
        self._following = [each for each in self._following if each() is not None] + [weakref.ref(start)]

    def note(self, codec: Codec, given: Sequence[Given], scales: Mapping[int, float], layout: Layout) -> None:
        """Take what a mean was summed of, where the downlink's codec repeats it or is made of its outer products."""
        captured, replays = Captured(wanted_by(self._codec)), isinstance(self._codec, Replay)
        if not (captured.useful or replays):
            return
        total = sum(each.weight for each in given)
        parts = [
            (each.frame, each.weight / total * scales.get(each.node, 1.0)) for each in given if each.update is None
        ]
        self._captured, self._summands = captured if captured.useful else None, parts if replays else ()
        for frame, factor in parts if captured.useful else ():
            for name, outer in codec.outer(frame, layout).items():
                captured.stack(name, outer.scaled(factor))

    def push(self, step: Step, model: Arrays, number: int, layout: Layout) -> None:
        """Let a step go down as the program has it, in place of a difference that would be encoded again."""
        assert step.frame is not None
        assert step.codec is not None
        exact = {t.name: model[t.name] for t in layout.exact}
        version = self.broadcast.push(step.frame, step.codec, exact, layout)
        derived = self._system.after(step.frame, step.blobs, number, self._seed, layout)
        self.own_steps[version] = OwnSteps(number, dict(step.blobs), set(map(digest_of, derived.values())))
        # As many as there are steps: what no step needs any more nobody is sent.
        for old in [v for v in self.own_steps if self.broadcast.steps_from(v - 1) is None]:
            del self.own_steps[old]

    def reference(self, layout: Layout) -> Vector | None:
        """Return what clients train from where the downlink brings them something else than the model."""
        broadcast = self.broadcast
        if broadcast.version == 0 or broadcast.codec.lossless or self._system.makes_steps:
            return None
        # By way of the tensors: the two layouts may differ in which of them are in the vector.
        return layout.flatten(self.layout.unflatten(broadcast.reference, broadcast.exact))

    def fill(
        self, content: RecordDict, record: str, peer: Peer, data: dict[str, Frame]
    ) -> tuple[dict[str, Any], set[str]]:
        """Put the model into a message as the steps that a node lacks, or whole.

        Returns
        -------
        dict
            What the head says of it.
        set of str
            Digests of the blobs that follow from the steps in the message.
        """
        broadcast = self.broadcast
        # The model leaves the message: steps take its place, or the reference does, which is what replicas hold.
        content.pop(record, None)
        steps = broadcast.steps_from(peer.version)
        if steps is None:
            # One full model for all nodes that need it: copies would cost a model for each.
            if self._whole is None or self._whole[0] != broadcast.version:
                model = self.layout.unflatten(broadcast.reference, broadcast.exact)
                self._whole = broadcast.version, to_record(model)
            content[record] = self._whole[1]
        named: list[str] = []
        for each in steps or ():
            data[f"{STEP}{each.version}"] = each.frame
            if each.exact is not None:
                data[f"{STEP}{each.version}.exact"] = each.exact
            if (own := self.own_steps.get(each.version)) is not None:
                digests = {name: digest_of(blob) for name, blob in own.blobs.items()}
                data |= {BLOB + digests[name]: b for name, b in own.blobs.items() if digests[name] not in peer.blobs}
                named.append(OwnStep(each.version, own.number, digests).to_text())
        fields = {
            "model": record,
            "steps": tuple(named),
            "downlink": broadcast.codec.to_config(),
            "version": broadcast.version,
            "base": 0 if steps is None else peer.version,
            "digest": broadcast.digest,
        }
        last = self.own_steps.get(broadcast.version) if steps else None
        return fields, set() if last is None else last.derived

    def held(self, peer: Peer, version: int, sent: SentMessage) -> None:
        """Note which model a node says it holds, and the blobs that follow from the step that it was sent."""
        # Only the version that it was sent is trusted; with a wrong one it would get steps it cannot apply.
        peer.version = version if version == sent.version else 0
        # From a whole model nothing follows.
        if peer.version in self.own_steps and str(version) in data_in(sent.message.content, STEP):
            peer.take(sorted(self.own_steps[peer.version].derived))

    def renumber(self) -> None:
        """Number versions so that none is taken for one that was sent after the state was saved."""
        super().renumber()
        # No step leads to the renumbered version.
        self.own_steps = {}


def _explained(captured: Captured | None, reference: Vector, change: Update) -> dict[str, OuterProducts]:
    """Return the outer products of which a step is the sum, where the last mean brought such."""
    if captured is None:
        return {}
    tensors = change.layout.tensors
    found = captured.explaining(
        {t.name: change.vector[t.slice] for t in tensors}, {t.name: reference[t.slice] for t in tensors}
    )
    for note in captured.notes:
        log.info("what goes down is not made of factors: %s", note)
    return found
