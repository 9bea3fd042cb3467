"""LSG-style training: clients send a few coordinates of low-rank products of their updates.

A shorter vector receives less noise at the same norm, and costs fewer bytes; see :mod:`fedcomp.privacy.lsg` for what is
read and what is derived (Ito et al. 2022, abstract; Yu et al. 2021, their code). The server makes the carriers of every
matrix from the model it is about to send, which is private already, and sends them along: a seed could name them, but
floating point differs between machines, and a client that projected onto slightly other carriers would be undone by the
wrong ones. Which coordinates are kept, a public seed says. A client answers with those, one vector clipped as a whole:
after the mask, or noise would be paid for mass that never leaves. Sum, noise and release lie on the kept coordinates
alone; what they stand for is reconstructed afterwards, which is post-processing. With ``rank=0`` nothing is factored:
the random mask alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp import wire
from fedcomp.codecs import Identity, State
from fedcomp.codecs.base import norm
from fedcomp.layout import Layout, Update, Vector
from fedcomp.privacy import lsg
from fedcomp.privacy.bounds import clip_arrays
from fedcomp.privacy.errors import Unbounded
from fedcomp.privacy.lsg import MASKS, SCHEDULES, Carriers, LowRankPlan, count_kept, fraction, remembered
from fedcomp.privacy.mechanism import GridGaussian
from fedcomp.program import Answer, AnswerError, Ask, Given, Me, Now, Released, Round, System
from fedcomp.rng import Key
from fedcomp.rules import AboveZero, Int, OneOf, Positive, Text
from fedcomp.systems.private.rule import Contribution, Private
from fedcomp.wire import Expected, Frame
from fedcomp.wire.limits import DENSE, SPARSE

SLACK: Final = 1e-5
"""How far beyond the clip norm an update may be, relatively: float32 rounds what a client has clipped."""

SHORT: Final = Identity()
"""How kept coordinates travel: in their order, each as a float32."""


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class LowRank(System, id="lsg"):
    """Clients send some coordinates of their update's products with low-rank carriers.

    Parameters
    ----------
    clip : float
        Largest L2 norm of one client's kept coordinates, over all tensors and both products.
    rank : int
        Of the carriers; 0 factors nothing.
    keep : float
        Fraction of the coordinates that is kept, at the end of the schedule.
    schedule : {"constant", "linear", "cosine"}
    schedule_rounds : int
        Rounds that the schedule runs over; not needed for "constant".
    mask : {"random", "noisy_magnitude"}
        Drawn by the seed alone, or half of them where earlier noisy updates were large; the server then sends these
        positions.
    whole_tensors : str
        Patterns of names of tensors that stay whole, separated by spaces: the last layer, for one.
    history : int
        After this many rounds the carriers are derived from the model's change since round 1; 0: always from the model
        itself.

    Raises
    ------
    ConfigError
        For a value out of range.

    Examples
    --------
    >>> LowRank(clip=1.0, rank=8, keep=0.5)
    LowRank(clip=1.0, rank=8, keep=0.5)
    """

    RULES: ClassVar[tuple[type, ...]] = (Released,)
    KEEPS: ClassVar[bool] = True

    clip: Positive
    rank: Annotated[int, Int(most=1 << 20)]
    keep: AboveZero = 1.0
    schedule: Annotated[str, OneOf(*SCHEDULES)] = "constant"
    schedule_rounds: Annotated[int, Int()] = 0
    mask: Annotated[str, OneOf(*MASKS)] = "random"
    whole_tensors: Annotated[str, Text(4096)] = ""
    history: Annotated[int, Int()] = 0

    def conflict(self) -> str:
        """A schedule has to end."""
        if self.schedule == "constant" or self.schedule_rounds:
            return ""
        return f"schedule={self.schedule!r} needs schedule_rounds >= 1, the rounds that it runs over"

    def plan(self, layout: Layout) -> LowRankPlan:
        """Return how the model of ``layout`` is shortened."""
        return LowRankPlan.of({t.name: t.shape for t in layout.tensors}, self.rank, self.whole_tensors.split())

    def share(self, number: int) -> float:
        """Return the fraction of the coordinates that a round keeps."""
        # Rounds count from 1, the steps of a schedule from 0.
        return fraction(self.schedule, number - 1, self.schedule_rounds, self.keep)

    def released(self, layout: Layout, number: int) -> Layout:
        """Return the layout of what a round releases."""
        return Layout.flat(count_kept(self.plan(layout).short, self.share(number)))

    def drawn(self, size: int, number: int, seed: int, magnitude: NDArray[Any] | None = None) -> NDArray[np.int64]:
        """Return which of ``size`` coordinates a round keeps, ascending: by the seed, or half of them where
        ``magnitude`` is large."""
        word = Key(seed, "lsg", number).u64() >> 1
        return lsg.kept(size, self.share(number), Key(word, "lsg/kept"), magnitude)

    def round(self, now: Now) -> Round:
        plan, model = self.plan(now.layout), now.model.astype(np.float64)
        if self.history:
            now.state.setdefault("first", model)
        before = now.state["first"] if self.history and now.number > self.history else None
        pairs = plan.carriers(model, Key(now.seed, "lsg/carriers", now.number), before)
        frames, former = carried(pairs), now.state.get("former")
        if self.mask == "random" or former is None:
            # A draw that both sides repeat takes no bytes. Before the first noisy update there is nothing to look at.
            chosen = self.drawn(plan.short, now.number, now.seed)
        else:
            magnitude = np.concatenate(plan.project(former, pairs))
            chosen = self.drawn(plan.short, now.number, now.seed, magnitude)
            # Positions alone: ones take no bytes as values.
            frames["kept"] = wire.encode([wire.sparse((plan.short,), chosen, wire.Ones(chosen.size))])
        answers = yield [Ask(node, frames=frames, dense=True) for node in now.nodes]
        given = [self._shortened(each, now, plan, pairs, chosen) for each in now.give(answers)]
        part = Layout.flat(int(chosen.size))
        step = replace(now, layout=part, start=lambda: np.zeros(part.size, np.float32)).total(SHORT, given)
        if step is None:
            return None
        short = np.zeros(plan.short)
        # What grew from zeros is what changed.
        short[chosen] = step.model if step.change is None else step.change
        change = plan.reconstruct(short, pairs)
        if self.mask == "noisy_magnitude":
            now.state["former"] = remembered(former, change)
        return replace(step, change=change.astype(np.float32), model=None)

    def _shortened(
        self, given: Given, now: Now, plan: LowRankPlan, pairs: Carriers, chosen: NDArray[np.int64]
    ) -> Given:
        """Return a dense update reduced as the client half would have done; the server is trusted."""
        return given if given.update is None else given._replace(update=self.kept(given.update, plan, pairs, chosen))

    def kept(self, update: Vector, plan: LowRankPlan, pairs: Carriers, chosen: NDArray[np.int64]) -> Vector:
        """Return the kept coordinates of an update, clipped."""
        # What overflows is refused by the clip, as not finite.
        with np.errstate(over="ignore", invalid="ignore"):
            short = np.concatenate(plan.project(update, pairs))[chosen].astype(np.float32)
        (clipped,), _ = clip_arrays([short], self.clip)
        return np.asarray(clipped, np.float32)

    def client(self, memory: State, ask: Ask, me: Me) -> tuple[State, Answer]:
        plan = self.plan(me.layout)
        # Before the app trains in vain.
        pairs = carriers_in(ask, plan)
        chosen = self._chosen(ask, plan.short, me)
        short = Update(self.kept(me.update().vector, plan, pairs, chosen), Layout.flat(int(chosen.size)))
        frame, _ = SHORT.encode(short, {}, me.key)
        return memory, Answer(me.node, frames={"values": frame})

    def _chosen(self, ask: Ask, size: int, me: Me) -> NDArray[np.int64]:
        """Return the coordinates that a client keeps, drawn from the seed or received; refuse a wrong number."""
        if "kept" not in ask.frames:
            return self.drawn(size, me.number, me.seed)
        count = count_kept(size, self.share(me.number))
        expect = Expected("", (size,), max_k=count, kinds=frozenset({SPARSE}), value_codecs=frozenset({"ones"}))
        indices = wire.decode(ask.frames["kept"], (expect,)).tensors[0].indices
        if indices is None or len(indices) != count:
            raise AnswerError(f"{0 if indices is None else len(indices)} coordinates are to be kept, expected {count}")
        return np.asarray(indices, np.int64)


def carried(pairs: Carriers) -> dict[str, Frame]:
    """Return the carriers as a frame; nothing where no tensor is factored."""
    carriers = [carrier for pair in pairs if pair is not None for carrier in pair]
    return {"carriers": wire.encode([wire.dense(carrier) for carrier in carriers])} if carriers else {}


def carriers_in(ask: Ask, plan: LowRankPlan) -> Carriers:
    """Return the carriers that ``plan`` needs.

    Raises
    ------
    AnswerError, WireError
        When there are none, or others.
    """
    shapes = [shape for p in plan.factored for shape in ((p.matrix[0], p.rank), (p.rank, p.matrix[1]))]
    if not shapes:
        return tuple(None for _ in plan.pieces)
    if "carriers" not in ask.frames:
        raise AnswerError("the message holds no carriers, but the model has matrices to factor")
    # Shapes follow from the receiver's own plan, never from the frame.
    expect = tuple(Expected("", shape, kinds=frozenset({DENSE})) for shape in shapes)
    tensors = wire.decode(ask.frames["carriers"], expect).tensors
    found = [np.asarray(t.values.decode(), np.float32).reshape(t.shape) for t in tensors]
    # Left and right carriers alternate, as carried() writes them.
    pairs = iter(zip(found[::2], found[1::2], strict=True))
    return tuple(next(pairs) if piece.rank else None for piece in plan.pieces)


class KeptCoordinates(Private):
    """The noisy sum of kept coordinates, over the public number of clients.

    An update that is longer than the clip norm allows did not come from the client half, and is refused, as one that is
    not finite; the mechanism clips once more in any case. The sensitivity is the clip norm; twice that with "replace".

    Parameters
    ----------
    settings : LowRank
    **promise
        As :class:`fedcomp.systems.private.rule.Private`.
    """

    def __init__(self, settings: LowRank, **promise: Any) -> None:
        self.settings = settings
        super().__init__(**promise)

    def mechanism(self, layout: Layout, server_round: int) -> GridGaussian:
        """Return the grid Gaussian for as many coordinates as are kept."""
        return GridGaussian(
            clip=self.settings.clip,
            size=layout.size,
            noise_multiplier=self.noise_multiplier,
            adjacency=self.adjacency,
            noise=self.noise,
        )

    def contribution(self, update: Vector, layout: Layout, server_round: int) -> Contribution:
        """Return a client's kept coordinates.

        Raises
        ------
        Unbounded
            When they are longer than the client half would have left them, or not finite.
        """
        length = norm(update)
        # Not ``>``, which is false for NaN.
        if not length <= self.settings.clip * (1.0 + SLACK):
            raise Unbounded(f"an update has norm {length:.6g}, a client clips it to {self.settings.clip:g}")
        return update

    def released(self, noisy: NDArray[np.float64], layout: Layout, server_round: int) -> Any:
        """Return the noisy mean in float64: it is multiplied out before it is rounded."""
        return noisy / self.expected

    def describe(self) -> str:
        """Return how an update is shortened and clipped."""
        own = self.settings
        factors = f"products with carriers of rank {own.rank} of the public model" if own.rank else "coordinates"
        how = "a public seed" if own.mask == "random" else "a public seed and former noisy updates"
        share = f"{own.keep:g} of them" if own.schedule == "constant" else f"down to {own.keep:g} of them"
        return f"{factors}, {share} kept by {how}, clipped together to L2 norm {own.clip:g}"

    def describe_settings(self) -> str:
        """Return the parameters."""
        return repr(self.settings)
