"""PowerSGD: clients send their matrices in the round's basis, and the server broadcasts one low-rank step.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS
2019, arXiv:1905.13727; what a client does with its update is in :mod:`fedcomp.codecs.power_sgd`.

In the alternating form a round has one exchange: its basis follows from the last step, which both ends make of the
same bytes, so that it travels to nodes alone that did not apply that step. In the two-exchange form the first brings
the projections of which the server makes the basis, and the second the values in it. Frames name the basis they are in,
and one of another basis is refused: factors of two bases must never be added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Final

from fedcomp.codecs import Codec, State, get_codec
from fedcomp.codecs.base import all_finite
from fedcomp.codecs.coefficients import basis_id_of
from fedcomp.codecs.lowrank import LEFT, RIGHT, Basis
from fedcomp.codecs.positional import stretches
from fedcomp.codecs.power_sgd import PowerSGD, basis_key, basis_of_last_frame
from fedcomp.layout import Layout, Update, Vector
from fedcomp.program import Answer, Ask, Encoded, Frames, Me, Mean, Now, Round, Step
from fedcomp.rng import Key
from fedcomp.rules import Int, Made, Real
from fedcomp.wire import Frame

SIDES: Final = ("left", "right")


@dataclass(frozen=True, repr=False, eq=False)
class SharedBasis(Encoded, id="power-sgd"):
    """PowerSGD: average updates in a low-rank basis shared by all clients.

    Parameters
    ----------
    codec : PowerSGD or dict
        Rank, form, memory.
    warmup_rounds : int
        The first rounds are sent dense. The authors' package begins with 100 steps of this kind, PyTorch's hook with
        1000 (read).
    server_lr : float
        Step size of the server: model += server_lr * mean. Must be 1 with the aggregated memory, which treats the step
        as the mean.
    """

    KEEPS: ClassVar[bool] = True

    codec: Annotated[PowerSGD, Made(get_codec)]
    warmup_rounds: Annotated[int, Int()] = 0
    server_lr: Annotated[float, Real(above=0.0)] = 1.0

    def conflict(self) -> str:
        if not isinstance(self.codec, PowerSGD):
            return f"SharedBasis needs PowerSGD as its codec, got {self.codec!r}; Pair takes the others"
        if self.codec.memory == "aggregated" and self.server_lr != 1.0:
            return (
                f"server_lr={self.server_lr} makes another step than the mean, which memory='aggregated' subtracts; "
                "use 1, or memory='local'"
            )
        return ""

    def at(self, number: int) -> PowerSGD:
        """Return the codec of a round."""
        return replace(self.codec, dense=True) if number <= self.warmup_rounds else self.codec

    @property
    def several(self) -> bool:
        return self.codec.form == "two-exchange"

    def round(self, now: Now) -> Round:
        codec, layout = self.at(now.number), now.layout
        basis = self._follows(now.state.get("last"), now.number, now.seed, layout)
        # The first basis is drawn, by clients, too.
        begun, means = blobs_of(basis) if "last" in now.state else {}, self._means(now)
        answers = yield [Ask(node, blobs={**begun, **means.get(node, {})}) for node in now.nodes]
        if codec.two_exchanges:
            # Projections are not contributions: whatever becomes of these, a basis is made of a plain mean.
            sent = now.give(answers, "first")
            first = codec.mean(basis)
            mean = Mean().total(now, first, now.verified(first, sent), raw=True)
            if mean is None or mean.change is None or not all_finite(mean.change):
                now.note("no projection arrived to make a basis of: the model is unchanged")
                return None
            factors = first.coefficients(first.sum_frame(Update(mean.change, layout)), layout)
            basis = codec.between(factors, layout, _key(now.state.get("last"), now.seed))
            answers = yield [Ask(node, "query", blobs=blobs_of(basis)) for node in mean.consumed]
        fixed = codec.on(basis)
        total = now.mean_of(fixed, answers, raw=True)
        if total is None or (change := now.downward(total, self.server_lr)) is None:
            return None
        frame, blobs = fixed.sum_frame(change), blobs_of(basis)
        now.state["last"] = {"frame": frame, "basis": blobs, "number": now.number}
        if self.codec.memory == "aggregated":
            self._keep_mean(now, frame, total.consumed)
        return Step(total.consumed, frame=frame, blobs=blobs, codec=codec.mean(basis))

    def client(self, memory: State, ask: Ask, me: Me) -> tuple[State, Answer]:
        codec, layout = self.at(me.number), me.layout
        mean = ask.blobs.get("mean")
        named = ask.blobs.keys() & set(SIDES)
        basis = basis_of(codec, ask.blobs, layout) if named else self._follows(None, me.number, me.seed, layout)
        if ask.kind == "train":
            if mean is not None and basis_id_of(mean, stretches(layout, "layer"), layout) == basis_of_last_frame(
                memory
            ):
                memory = codec.correct(memory, mean, layout)
            memory = codec.begin(me.update(), memory, me.key)
            if codec.two_exchanges:
                return memory, Answer(me.node, frames={"first": codec.first(memory, basis, layout, me.key)})
        frame, memory = codec.send(memory, basis, layout, me.key)
        return memory, Answer(me.node, frames={"values": frame})

    def reads(self, blobs: Frames, number: int, layout: Layout) -> Codec:
        codec = self.at(number)
        return codec.mean(basis_of(codec, blobs, layout))

    def after(self, frame: Frame, blobs: Frames, number: int, seed: int, layout: Layout) -> Frames:
        last = {"frame": frame, "basis": blobs, "number": number}
        found = blobs_of(self._follows(last, number + 1, seed, layout))
        return {**found, "mean": frame} if self.codec.memory == "aggregated" else found

    def residual(self, memory: State, layout: Layout) -> Vector | None:
        # The aggregated memory holds what a client deviates from the mean, too: only the sum over clients is conserved.
        return None if self.codec.memory == "aggregated" else self.codec.settle(memory, layout)["memory"]

    def _follows(self, last: Mapping[str, Any] | None, number: int, seed: int, layout: Layout) -> Basis:
        """Return the initial basis of round ``number``, which follows from the last step at both ends."""
        mean = None
        if last is not None:
            codec = self.at(last["number"])
            basis = basis_of(codec, last["basis"], layout)
            mean = basis, codec.mean(basis).coefficients(last["frame"], layout)
        return self.at(number).start(mean, layout, _key(last, seed))

    def _keep_mean(self, now: Now, mean: Frame, consumed: tuple[int, ...]) -> None:
        """Keep the means that will still correct nodes' memories, in at most the bytes of one model."""
        sent = {**now.state.get("sent", {}), **{str(node): str(now.number) for node in consumed}}
        means = {number: kept for number, kept in now.state.get("means", {}).items() if number in sent.values()}
        means[str(now.number)] = mean
        while len(means) > 1 and sum(map(len, means.values())) > 4 * now.layout.size:
            del means[min(means, key=int)]
        now.state["means"] = means
        now.state["sent"] = {node: number for node, number in sent.items() if number in means}

    def _means(self, now: Now) -> dict[int, Frames]:
        """Return by node, as a blob, the mean that contains its last frame."""
        sent, means = now.state.get("sent", {}), now.state.get("means", {})
        return {node: {"mean": means[sent[str(node)]]} for node in now.nodes if str(node) in sent}


def blobs_of(basis: Basis) -> Frames:
    """Return a basis as a blob that is called by the side on which it stands."""
    return {SIDES[basis.side]: basis.frame()}


def basis_of(codec: PowerSGD, blobs: Frames, layout: Layout) -> Basis:
    """Return the basis that is among blobs; raise WireError where it is not one of the codec's and the layout's."""
    side = LEFT if SIDES[LEFT] in blobs else RIGHT
    return Basis.read(blobs[SIDES[side]], side, codec.ranks, layout)


def _key(last: Mapping[str, Any] | None, seed: int) -> Key:
    """Return the key for drawing columns without a direction, from the last step, which both ends know."""
    return basis_key(seed, 1 if last is None else last["number"] + 1)
