"""PowerGossip: neighbours exchange low-rank approximations of the difference of their models.

After Vogels, Karimireddy and Jaggi, "PowerGossip: Practical Low-Rank Communication Compression in Decentralized Deep
Learning", NeurIPS 2020, arXiv:2008.01425 (abstract and the authors' code were read). Every edge {i, j} has, per matrix
M (m x p) of the model, one factor that both ends hold, and each of its power steps sends the matrix through it:

    even step:  U <- orthonormal basis of U;  a_i = M_i' U;  send a_i;  V <- a_large - a_small
    odd step:   V <- orthonormal basis of V;  a_i = M_i  V;  send a_i;  U <- a_large - a_small
    both ends:  M_large -= rate * W[i, j] * U V';  M_small += rate * W[i, j] * U V'

``large`` is the end with the larger node id. The factor that came of a step is where the next one begins: a power
iteration on the difference of the two models, which goes on while they learn (warm start). There is nothing to tune:
``rate`` is 1, or the number :func:`auto_rate` computes from the graph.

Both ends compute from the same bytes by the same arithmetic (:mod:`fedcomp.codecs.matrices`), so that what one adds
the other subtracts, bit for bit, and the mean of the models stays. Only a step's one new factor has to be
remembered, ``r * m`` or ``r * p`` numbers per matrix and edge; and because it is a difference of two messages, a
rounding error in it does not live longer than one step.

Beyond the authors' code, whose edge cases are worked out here: a direction in which the two ends agree to 1e-12 is
redrawn, at both ends, from a stream that both know, since zero times anything would stay zero for ever; streams are
named by both node ids, so that no two edges share one; an edge that appears begins without a byte, from that stream;
ends whose steps do not match apply nothing and restart. Vectors (biases, normalisation) travel whole and are mixed
with the same W. Nothing is skipped at the start: from equal models the first message says that nothing differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray

from fedcomp import rules
from fedcomp.codecs.matrices import add_product, orthonormal, product
from fedcomp.errors import ConfigError
from fedcomp.gossip.base import (
    Algorithm,
    GossipMessage,
    Gradient,
    KnownGraph,
    Multicast,
    Outbox,
    Real,
    State,
    View,
    real,
)
from fedcomp.gossip.errors import MessageError
from fedcomp.gossip.packet import MessageFlag, MessageHeader, pack, put_real, take_real, unpack
from fedcomp.gossip.steps import (
    BEGUN,
    begun,
    descent,
    finite,
    incoming,
    settled,
    velocity,
)
from fedcomp.layout import Layout
from fedcomp.rng import Key
from fedcomp.rules import BelowOne, Int, Maybe, NotNegative, OneOf, Switch

_DIGEST_BYTES: Final = 8
_TURNS: Final = 2**16


@dataclass(frozen=True, repr=False, eq=False)
class PowerGossip(Algorithm):
    """Gossip over undirected graphs, fixed or time-varying, with rank-r power steps per edge and matrix.

    Parameters
    ----------
    rank : int
        Columns of a factor, at most ``min(m, p)`` of them per matrix. Square matrices of full rank are averaged as if
        they had been sent whole; of others only the step through the shorter side sees all of the difference.
    steps : int
        Power steps per gradient, ``num_iterations`` of the authors' code: a gradient is taken in every ``steps``-th
        iteration and the others only gossip. A training step then costs ``steps`` round trips.
    rate : float or "auto"
        Of the gossip, in (0, 2): 1, or :func:`auto_rate` of the graph, which :meth:`fitted` fills in. Vectors are
        always mixed at 1.
    warm_start : bool
        Whether a step starts from the previous factor, or from a new random one.
    overlap : bool
        Whether messages are made of the model as it was before the local step (the gradient is computed while they
        travel, as the authors do), or of the one after.
    values : {"model", "float32"}
        How numbers travel: in the model's own dtype, or as float32. No memory holds what rounding leaves out, so that
        nodes with float64 models agree to about 1e-7 only when float32 travels.
    digest_every : int
        Power steps of an edge between two messages that carry 8 bytes of a digest of the factor; 0 for never.
    lr, momentum : float
        Of the local step, heavy ball.

    Notes
    -----
    State: ``"x"``; ``"v"`` with momentum; ``"matrices"``, int64 (count, 3): offset, m, p; ``"turn/<j>"`` the power
    steps of the edge to j and ``"factor/<j>"`` the factor the last of them gave, all matrices one after the other;
    ``"restarts"`` how often an edge restarted because its ends were out of step.

    The message after its header: the digest if there is one, ``r * p`` values per matrix in an even step or ``r * m``
    in an odd one, then the vectors.

    Examples
    --------
    >>> from fedcomp.gossip.topology import Ring
    >>> round(PowerGossip(rank=1, rate="auto").fitted(Ring(8)).rate, 3)
    1.308
    """

    name: ClassVar[str] = "power-gossip"
    time_varying: ClassVar[bool] = True

    rank: Annotated[int, Int(1)] = 1
    steps: Annotated[int, Int(1)] = 1
    rate: Annotated[float | Literal["auto"], Maybe(rules.Real(above=0.0, below=2.0), "auto")] = 1.0
    warm_start: Switch = True
    overlap: Switch = True
    values: Annotated[Literal["model", "float32"], OneOf("model", "float32")] = "model"
    digest_every: Annotated[int, Int()] = 50
    lr: NotNegative = 0.1
    momentum: BelowOne = 0.0

    def fitted(self, graph: KnownGraph) -> PowerGossip:
        """Return the algorithm with the rate of the graph, where it is "auto"; raises as :func:`auto_rate`."""
        return replace(self, rate=auto_rate(graph)) if self.rate == "auto" else self

    def init(self, model: Real, layout: Layout, *, common: Real | None = None) -> State:
        """Return the state of a node without edges; ``common`` is not used, for there are no estimates."""
        x = real(model)
        # Kernels of more dimensions become output channels times all the rest, as in the authors' code.
        matrices = [
            (t.offset, t.shape[0], t.size // t.shape[0]) for t in layout.compressed if len(t.shape) > 1 and t.size
        ]
        return {
            "x": x,
            "matrices": np.array(matrices, np.int64).reshape(-1, 3),
            "restarts": np.array(0, np.int64),
            **velocity(x, self.momentum),
        }

    def model(self, state: State) -> Real:
        """Return x."""
        return state["x"]

    def reset(self, state: State, layout: Layout) -> State:
        """Return the state without edges; they restart, without a byte. Momentum is the node's own and stays."""
        return {**self.init(state["x"], layout), **{key: state[key] for key in ("v", "restarts") if key in state}}

    def send(self, state: State, gradient: Gradient | None, view: View) -> tuple[State, Outbox]:
        """Begin an iteration: one message per neighbour, through that edge's factor."""
        # Raises now if the rate is still "auto", and not after messages have left.
        _ = self._rate
        state = settled(state)
        if view.iteration % self.steps:
            gradient = None
        x = state["x"]
        step, moved = descent(state, gradient, x, self.lr, self.momentum)
        after = x if step is None else x - step
        announced = finite(x if self.overlap else after, "the model")
        state = {**state, **moved, "x": finite(after, "the model after the local step")}
        matrices = Matrices(state["matrices"], len(x), self.rank)
        travels = x.dtype if self.values == "model" else np.dtype(np.float32)
        vectors = announced[matrices.rest].astype(travels)
        multicasts: list[Multicast] = []
        more: State = {}
        for j in view.row:
            turn, factor = self._edge(state, j, view)
            basis = matrices.bases(factor, turn, _stream(view, j), x.dtype)
            projected = matrices.project(announced, basis, turn).astype(travels)
            # An end that restarts shows it by the flag: both ends compare flags before they apply a step.
            check, flags = b"", MessageFlag.RESYNC if turn == 0 else MessageFlag(0)
            # A factor that is drawn is the same at both ends by construction; only a remembered one can differ.
            if factor is not None and self.digest_every and turn % self.digest_every == 0:
                check, flags = _digest(factor), flags | MessageFlag.DIGEST
            body = check + put_real(projected) + put_real(vectors)
            payload = pack(view.iteration, turn % _TURNS, flags, travels, body)
            multicasts.append(Multicast((j,), payload))
            more |= {
                f"turn/{j}": np.array(turn, np.int64),
                f"{BEGUN}basis/{j}": basis,
                # The own message as it was sent: both ends compute from the same two payloads, rounding included.
                f"{BEGUN}message/{j}": np.frombuffer(payload, np.uint8),
            }
        return {**state, **more, **begun(view)}, tuple(multicasts)

    @property
    def _rate(self) -> float:
        if self.rate == "auto":
            raise ConfigError("rate='auto' was not filled in: a node does not know the graph; use fitted(graph)")
        return self.rate

    def _edge(self, state: State, j: int, view: View) -> tuple[int, Real | None]:
        """Return the current power step of the edge to ``j``, and its initial factor; None means to draw one."""
        factor = state.get(f"factor/{j}")
        # Step 0 carries the flag RESYNC: if the other end went on, both see it and restart.
        if factor is None or j in view.resync:
            return 0, None
        turn = int(state[f"turn/{j}"])
        return turn, factor if self.warm_start else None

    def receive(self, state: State, messages: Sequence[GossipMessage]) -> State:
        """Finish the iteration: what both ends found moves them towards each other by equal amounts."""
        received = incoming(state, messages)
        if BEGUN + "ids" not in state:
            return state
        rate = self._rate
        x = state["x"].copy()
        matrices = Matrices(state["matrices"], len(x), self.rank)
        travels = x.dtype if self.values == "model" else np.dtype(np.float32)
        node = int(state[BEGUN + "node"])
        rest = matrices.rest
        changes: State = {}
        dropped: set[str] = set()
        for j, weight, payload in received:
            own = _read(state[f"{BEGUN}message/{j}"].tobytes(), matrices, travels, node)
            other = _read(payload, matrices, travels, j)
            if other.header.iteration != own.header.iteration:
                raise MessageError(f"node {j} sent a message of iteration {other.header.iteration}")
            # Of what travelled, not of x itself: the other end then finds the same difference with the opposite sign.
            x[rest] += weight * (other.vectors.astype(x.dtype) - own.vectors.astype(x.dtype))
            # Each end has both messages, so both see this and neither applies the step: one alone would move the mean.
            if not other.matches(own):
                dropped |= {f"turn/{j}", f"factor/{j}"}
                continue
            turn = int(state[f"turn/{j}"])
            # By the nodes' numbers: both ends have to subtract in the same order to find the same bits.
            large, small = (own, other) if node > j else (other, own)
            factor = large.projected.astype(x.dtype) - small.projected.astype(x.dtype)
            toward = -weight * rate if node > j else weight * rate
            matrices.add(x, state[f"{BEGUN}basis/{j}"], factor, turn, toward)
            changes |= {f"turn/{j}": np.array(turn + 1, np.int64), f"factor/{j}": factor}
        # Two keys were dropped per edge.
        restarts = np.array(int(state["restarts"]) + len(dropped) // 2, np.int64)
        kept = {key: value for key, value in settled(state).items() if key not in dropped}
        return {**kept, **changes, "x": x, "restarts": restarts}

    def facts(self, state: State) -> dict[str, float]:
        """Return how often an edge restarted, and the largest norm of a factor: how far neighbours are apart."""
        norms = [float(np.linalg.norm(value)) for key, value in state.items() if key.startswith("factor/")]
        return {"restarts": float(state["restarts"]), "difference": max(norms, default=0.0)}


def auto_rate(graph: KnownGraph) -> float:
    """Return ``2 / (λ_max + λ_min⁺)`` of ``I - W``, the best rate of plain gossip; 1.308 on the ring of 8 nodes.

    λ_min⁺ is the smallest eigenvalue above 0. The authors used this number for their ring (read in their
    configuration; that it is this expression is derived).

    Raises
    ------
    ConfigError
        For a time-varying graph, whose W has no one spectrum, or a directed one.
    """
    if graph.time_varying or graph.directed:
        raise ConfigError(f"no rate follows from {graph.name}: its W must be symmetric and stay the same; use 1.0")
    spectrum = 1.0 - np.linalg.eigvalsh(graph.mixing_matrix(0, symmetric=True))
    # The eigenvalue 0 of the constant vector comes out as rounding.
    positive = spectrum[spectrum > 1e-12]
    return float(2.0 / (positive.max() + positive.min()))


@dataclass(frozen=True, slots=True)
class Matrices:
    """The matrices of a model: where they lie in the vector, and what is done to all of them."""

    places: NDArray[np.int64]
    """(count, 3): offset, m, p; ascending offsets."""
    size: int
    rank: int

    @property
    def rest(self) -> NDArray[np.bool_]:
        """Which coordinates are in no matrix; shape ``(d,)``."""
        outside = np.ones(self.size, np.bool_)
        for offset, m, p in self.places.tolist():
            outside[offset : offset + m * p] = False
        return outside

    @property
    def rest_size(self) -> int:
        """How many coordinates are in no matrix."""
        return self.size - int((self.places[:, 1] * self.places[:, 2]).sum())

    def columns(self, m: int, p: int) -> int:
        """Return the rank used for an m x p matrix."""
        return min(m, p, self.rank)

    def projected_size(self, turn: int) -> int:
        """Return how many numbers all projections of step ``turn`` have."""
        return sum(self.columns(m, p) * (m if turn % 2 else p) for _, m, p in self.places.tolist())

    def bases(self, factor: Real | None, turn: int, stream: Key, dtype: np.dtype[Any]) -> Real:
        """Return orthonormal bases of all factors, one after the other: ``(m, r)`` in even steps, ``(p, r)`` in odd."""
        found, start = [], 0
        for index, (_, m, p) in enumerate(self.places.tolist()):
            shape = (p if turn % 2 else m, self.columns(m, p))
            size = shape[0] * shape[1]
            # Columns of zeros count as dead, so orthonormal draws them all.
            given = np.zeros(shape) if factor is None else factor[start : start + size].reshape(shape)
            # A stream per matrix: matrices of one shape would otherwise share their draws.
            found.append(orthonormal(given, stream.at(partition=index)).astype(dtype).reshape(-1))
            start += size
        return np.concatenate(found) if found else np.zeros(0, dtype)

    def project(self, x: Real, bases: Real, turn: int) -> Real:
        """Return ``M' U`` in even steps, ``M V`` in odd ones, of all matrices, one after the other."""
        found, start = [], 0
        for offset, m, p in self.places.tolist():
            matrix = x[offset : offset + m * p].reshape(m, p)
            shape = (p if turn % 2 else m, self.columns(m, p))
            basis = bases[start : start + shape[0] * shape[1]].reshape(shape)
            start += shape[0] * shape[1]
            found.append(product(matrix if turn % 2 else matrix.T, basis).reshape(-1))
        return np.concatenate(found) if found else np.zeros(0, x.dtype)

    def add(self, x: Real, bases: Real, factors: Real, turn: int, scale: float) -> None:
        """Add ``scale * U V'`` to every matrix of ``x`` in place, the columns of the factors in their order."""
        at_basis = at_factor = 0
        for offset, m, p in self.places.tolist():
            r = self.columns(m, p)
            before, after = (p, m) if turn % 2 else (m, p)
            basis = bases[at_basis : at_basis + before * r].reshape(before, r)
            factor = factors[at_factor : at_factor + after * r].reshape(after, r)
            at_basis, at_factor = at_basis + before * r, at_factor + after * r
            u, v = (factor, basis) if turn % 2 else (basis, factor)
            add_product(x[offset : offset + m * p].reshape(m, p), u, v, scale)


def _stream(view: View, j: int) -> Key:
    """Return the random stream of the edge to ``j`` in this iteration: the same at both ends, and different for every
    edge."""
    low, high = min(view.node, j), max(view.node, j)
    # With a comma: run together, the names of edges (1, 112) and (11, 12) would be one, and so would their streams.
    return Key(view.seed, f"gossip/power-gossip/{low},{high}", view.iteration)


def _digest(factor: Real) -> bytes:
    return hashlib.sha256(factor.tobytes()).digest()[:_DIGEST_BYTES]


@dataclass(frozen=True, slots=True)
class _StepMessage:
    """A parsed message."""

    header: MessageHeader
    check: bytes
    projected: Real
    vectors: Real

    def matches(self, other: _StepMessage) -> bool:
        """Whether both ends made the same power step with the same factor, as far as messages show."""
        mine, theirs = self.header, other.header
        return (mine.seq, mine.flags, self.check) == (theirs.seq, theirs.flags, other.check)


def _read(payload: bytes, matrices: Matrices, dtype: np.dtype[Any], source: int) -> _StepMessage:
    vectors = matrices.rest_size
    # The message itself says whether the step is even or odd: both sizes are possible.
    most = (max(matrices.projected_size(0), matrices.projected_size(1)) + vectors) * dtype.itemsize + _DIGEST_BYTES
    header, body = unpack(payload, most=most, dtype=dtype)
    if header.flags & ~(MessageFlag.DIGEST | MessageFlag.RESYNC):
        raise MessageError(f"node {source} sent {header}, which is not a power step")
    start = _DIGEST_BYTES if header.flags & MessageFlag.DIGEST else 0
    # The header's number is modulo 65536, which is even: it still tells even steps from odd ones.
    count = matrices.projected_size(header.seq)
    values = take_real(body[start:], count + vectors, dtype)
    return _StepMessage(header, bytes(body[:start]), values[:count], values[count:])
