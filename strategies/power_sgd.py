"""The server half of PowerSGD: every client sends its matrices in the round's basis, and one low-rank step comes down.

In the alternating form a round has one exchange. The basis follows from the last step, which every node has had: both
ends make it of the same bytes (:func:`fedcomp.codecs.matrices.orthonormal`), and the messages carry its digest alone. A
node that does not find that digest (it was away, was sent a whole model, or computes in another way) keeps its update
waiting and is sent the basis in a second exchange. In the two-exchange form that exchange is everybody's: the first
brings the projections of which the server makes the basis.

Frames name the basis they are in, and one of another basis is refused: factors of two bases must never be added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedcomp.codecs import Codec
from fedcomp.codecs.lowrank import Basis, Projection
from fedcomp.codecs.power_sgd import PowerSGD, basis_key
from fedcomp.errors import ConfigError
from fedcomp.flower.logs import log
from fedcomp.flower.payload import has_frame, put_frame, take_frame
from fedcomp.flower.protocol import PROBE, SUPPORT, UPDATE
from fedcomp.flower.rounds import Exchanges
from fedcomp.layout import DensityPolicy, Update
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.replies import SentMessage
from fedcomp.strategies.shared_replies import Client, WaitingRound
from fedcomp.strategies.waiting import WaitingStrategy, waiting_system
from fedcomp.wire import Bundle, Frame


@dataclass
class BasisRound(WaitingRound[PowerSGD]):
    """The moving parts of one round in a common basis.

    Attributes
    ----------
    start : Basis
        What clients can make of the last step; the basis itself in the alternating form.
    basis : Basis or None
        What values are sent in, None until it is known.
    firsts : dict of int to Bundle
        By node: its projection on ``start``, in the two-exchange form.
    made : bytes
        The mean's factors, once they are there.
    """

    half = "shared_basis"

    start: Basis = field(default_factory=lambda: Basis(0, ()))
    basis: Basis | None = None
    firsts: dict[int, Bundle] = field(default_factory=dict)
    made: Frame = b""

    @property
    def fixed(self) -> Projection:
        """The codec of the values in the basis."""
        assert self.basis is not None
        return self.codec.on(self.basis)

    @property
    def name_of_block(self) -> int:
        """The id of the basis, or of what comes before it."""
        return (self.basis or self.start).id

    def step(self, total: Update) -> tuple[Frame, Codec]:
        """Return the mean's factors, and form its matrices: once, whatever the number of clients."""
        self.made = self.fixed.sum_frame(total)
        self.fixed.conclude(total)
        assert self.basis is not None
        return self.made, self.codec.mean(self.basis)

    def note_trained(self, client: Client, reply: Message) -> None:
        """Take the first projection, if one came: a client that could not make it still sends values later."""
        frame = take_frame(reply.content, PROBE)
        if frame is not None and self.basis is None:
            self.firsts[client.sent.node] = self.codec.mean(self.start).open(frame, self.layout)

    def find_basis(self) -> None:
        """Make the basis of the mean of the first projections; without any there is none."""
        found = [(self.firsts[c.sent.node], c.weight) for c in self.clients if c.sent.node in self.firsts]
        total = sum(weight for _, weight in found)
        if total <= 0:
            return
        codec, mean = self.codec.mean(self.start), Update(np.zeros(self.layout.size, np.float32), self.layout)
        with np.errstate(over="ignore", invalid="ignore"):
            for bundle, weight in found:
                codec.gather(bundle, weight / total, mean)
        # A sum that overflows makes no basis; the round ends without one.
        if np.isfinite(mean.vector).all():
            factors = codec.coefficients(codec.sum_frame(mean), self.layout)
            self.basis = self.codec.between(factors, self.layout, basis_key(self.seed, self.version))


class SharedBasis(WaitingStrategy[BasisRound]):
    """Average updates in a low-rank basis that all clients share.

    Parameters
    ----------
    codec : PowerSGD or dict, optional
        Rank, form, memory; default rank 2, one exchange.
    server_lr : float
        Step size of the server: model += server_lr * mean. 1 with the aggregated memory, which takes the step for the
        mean.
    warmup_rounds : int
        The first rounds are sent dense. The authors' package begins with 100 steps of this kind, PyTorch's hook with
        1000 (read).
    policy : DensityPolicy, optional
        Per tensor: what travels dense; default :class:`fedcomp.layout.SmallDense`.
    guard : Norms, optional
        Refuses values that are far larger, or weigh far more, than is usual; default nobody does.
    seed : int
        Seed of the random streams.
    **cohort
        Who takes part and how metrics are averaged, as in :class:`fedcomp.strategies.cohort.CohortSettings`.

    Attributes
    ----------
    reception : Reception
        What is known of the clients.
    announcer : Announcer
        The session, and the versions of the model.

    Raises
    ------
    ConfigError
        For another codec, and for a step size that does not fit the memory.

    Examples
    --------
    >>> from fedcomp.codecs import PowerSGD
    >>> strategy = SharedBasis(PowerSGD(rank=4), warmup_rounds=1, fraction_train=0.5)
    """

    CODEC = PowerSGD
    ROUND = BasisRound

    STATE: ClassVar[Mapping[str, Any]] = {**WaitingStrategy.STATE, "_last": tuple[bytes, bytes, int] | None}

    def __init__(
        self,
        codec: PowerSGD | dict[str, Any] | None = None,
        *,
        server_lr: float = 1.0,
        warmup_rounds: int = 0,
        policy: DensityPolicy | None = None,
        guard: Norms | None = None,
        seed: int = 0,
        **cohort: Any,
    ) -> None:
        super().__init__(
            codec,
            server_lr=server_lr,
            warmup_rounds=warmup_rounds,
            policy=policy,
            guard=guard,
            seed=seed,
            **cohort,
        )
        if self.codec.memory == "aggregated" and self.server_lr != 1.0:
            raise ConfigError(
                f"server_lr={self.server_lr} makes another step than the mean, which memory='aggregated' subtracts; "
                "use 1, or memory='local'"
            )
        # The last step, and the basis it is in with its id: what the next basis is made of.
        self._last: tuple[Frame, Frame, int] | None = None

    def summary(self) -> None:
        """Log the codec."""
        log.info("\t├──> SharedBasis: %r", self.codec)

    def _exchanges(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[tuple[ArrayRecord | None, MetricRecord | None]]:
        report = self.reports.begin(server_round)
        now, nodes = self._begin("train", report, arrays, config, grid)
        if server_round <= self.warmup_rounds:
            now.codec = replace(self.codec, dense=True)
            now.start = self._start(now)
        now.basis = None if now.codec.two_exchanges else now.start
        sent = self._messages(dict.fromkeys(nodes, 0), now, config, "train")
        replies = yield [each.message for each in sent]

        def read(each: SentMessage, reply: Message) -> Client:
            client = now.trained(each, reply)
            if has_frame(reply.content, UPDATE):
                now.take_values(client, reply)
            return client

        arrived = [(c, "", c.content) for c in self.reception.received(sent, replies, report, read)]
        now.clients = self.reception.agreeing(arrived, report, lambda client: client.sent.node, "train")
        if now.basis is None:
            now.find_basis()
        if now.basis is None:
            report.notes.append("no projection came of which a basis could be made: the model is unchanged")
            return None, None
        now.block = now.basis.frame()
        yield from self._gather(now, {SUPPORT: now.block})
        if not now.codec.two_exchanges:
            # It follows from the step before, or came in a message: with the step it would travel twice.
            now.block = b""
        out = self._aggregate(now)
        if out[0] is not None:
            self._last = (now.made, now.basis.frame(), now.basis.id)
        return out

    def _begin(self, *args: Any) -> tuple[BasisRound, list[int]]:
        now, nodes = super()._begin(*args)
        now.start = self._start(now)
        return now, nodes

    def _start(self, now: BasisRound) -> Basis:
        """Return what clients can make of the last step."""
        mean = None
        if self._last is not None:
            step, block, number = self._last
            basis = self.codec.open_basis(block, number, now.layout)
            mean = basis, self.codec.mean(basis).coefficients(step, now.layout)
        return now.codec.start(mean, now.layout, basis_key(self.seed, now.version))

    def _beside(self, node: int, content: RecordDict, fields: dict[str, Any], now: BasisRound) -> None:
        fields["support"] = now.name_of_block
        # No step leads to a whole model, so that nothing follows from it.
        if self._last is not None and not fields.get("base", 1):
            put_frame(content, SUPPORT, now.start.frame())


SYSTEM: Final = waiting_system(
    "power-sgd",
    "PowerSGD",
    "Vogels et al. 2019, PowerSGD: practical low-rank gradient compression for distributed optimization",
    "one low-rank factor per matrix, in a basis that all clients share and a power iteration improves, so that the sum "
    "is as short as one update; the rest is remembered",
    SharedBasis,
    ("rank", "form"),
)
