"""The server half of GradiVeQ: sample dense rounds, fit a basis, let clients send in it, and begin again.

A basis is fitted here and nowhere else, and travels with the next message to every node that does not have it: in the
round after the fit to all, later to those that join. Messages name it by its id. A node that turns out to lack it keeps
its update waiting, and is sent the basis in a second exchange. With ``levels`` that exchange is everybody's: the first
brings the largest coefficients, of which the server makes one grid for all.

Frames name the basis they are in, and one of another basis is refused: coefficients in two bases must never be added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedcomp import params
from fedcomp.codecs import Codec
from fedcomp.codecs.cycle import COMPRESSION, SAMPLING, Cycle
from fedcomp.codecs.fixedpoint import IntegerGrid
from fedcomp.codecs.gradiveq import GradiVeQ, SliceProjection, open_steps, steps_frame
from fedcomp.codecs.subspace import Moments, SliceBasis
from fedcomp.errors import ConfigError
from fedcomp.flower.logs import log
from fedcomp.flower.payload import has_frame, put_frame, take_frame
from fedcomp.flower.protocol import PROBE, SUPPORT, UPDATE
from fedcomp.flower.report import Report
from fedcomp.flower.rounds import Exchanges
from fedcomp.layout import DensityPolicy, Layout, Update, Vector
from fedcomp.stateful import StatePart, nested
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.loans import Loans
from fedcomp.strategies.replies import Rejected, SentMessage
from fedcomp.strategies.shared_replies import Client, WaitingRound
from fedcomp.strategies.waiting import WaitingStrategy, waiting_system
from fedcomp.wire import Frame


@dataclass
class FittedRound(WaitingRound[GradiVeQ]):
    """The moving parts of one round in a fitted basis, or of one in which everything travels.

    Attributes
    ----------
    basis : SliceBasis
    peaks : dict of int to Vector
        By node: its largest coefficients, where grids are to be made of them.
    grids : tuple of IntegerGrid
        On which values are, where clients round to grids.
    drifts : dict of int to float
        By node: the share of its update that the basis misses, as it says itself.
    moved : Vector or None
        The mean update, once it is there.
    """

    half = "fitted_basis"

    basis: SliceBasis = field(default_factory=lambda: SliceBasis.nothing(Layout(())))
    peaks: dict[int, Vector] = field(default_factory=dict)
    grids: tuple[IntegerGrid, ...] = ()
    drifts: dict[int, float] = field(default_factory=dict)
    moved: Vector | None = None

    @property
    def fixed(self) -> SliceProjection:
        """The codec of the values in the basis."""
        return self.codec.on(self.basis, self.grids)

    @property
    def name_of_block(self) -> int:
        """The id of the basis."""
        return self.basis.id

    def step(self, total: Update) -> tuple[Frame, Codec]:
        """Return the mean's coefficients, and form its tensors: once, whatever the number of clients."""
        frame = self.fixed.sum_frame(total)
        self.fixed.conclude(total)
        self.moved = total.vector
        return frame, self.codec.mean(self.basis)

    def note_trained(self, client: Client, reply: Message) -> None:
        """Take the largest coefficients where grids are made of them."""
        frame = take_frame(reply.content, PROBE)
        if frame is not None and self.codec.rounds(self.basis):
            self.peaks[client.sent.node] = open_steps(frame, len(self.basis.subspaces))

    def _note_header(self, client: Client, header: ConfigRecord) -> None:
        super()._note_header(client, header)
        drift = header.get("drift")
        if isinstance(drift, float) and drift >= 0.0:
            # Nobody misses more than everything: one client's word counts for its weight and no more.
            self.drifts[client.sent.node] = min(drift, 1.0)

    @property
    def drift(self) -> float | None:
        """The weighted mean share that the basis misses, over clients whose values were used; None where none say."""
        found = [
            (self.drifts[c.sent.node], c.weight)
            for c in self.senders
            if not c.outlier and c.weight > 0 and c.sent.node in self.drifts
        ]
        total = sum(weight for _, weight in found)
        return sum(drift * (weight / total) for drift, weight in found) if found else None

    def metrics(self) -> dict[str, float]:
        """Return coefficients of a slice, mean over tensors, and the share of updates that the basis misses."""
        found = {}
        if self.basis.subspaces:
            found["basis-dimension"] = float(np.mean(self.basis.dimensions))
        if self.drift is not None:
            found["basis-drift"] = self.drift
        return found


class FittedBasis(WaitingStrategy[FittedRound]):
    """Average updates in a basis that is fitted to former averages.

    Rounds run in cycles: ``sampling`` rounds in which everything travels and whose mean updates are sampled, then
    ``compression`` rounds in the basis that fits them. A round that makes no step is counted for nothing.

    Parameters
    ----------
    codec : GradiVeQ or dict, optional
        Slices, basis, form of the coefficients; default slices of 512 and one basis for all slices of a tensor.
    sampling, compression : int
        Rounds of each phase, at least 3 and 1. The last fifth of the samples, one at least, is held out to choose the
        dimension: chosen on the samples that the basis was fitted to, it is far too small (measured).
    server_lr : float
        Step size of the server: model += server_lr * mean. 1 where the codec centres: a mean cannot be scaled without
        the constant in it.
    warmup_rounds : int
        Rounds before the first sample, in which everything travels: first updates resemble none of the later ones.
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
    cycle : Cycle
        The phase of the next round.

    Raises
    ------
    ConfigError
        For another codec, and for a step size that does not fit it.

    Examples
    --------
    >>> from fedcomp.codecs import GradiVeQ
    >>> strategy = FittedBasis(GradiVeQ(width=256), sampling=10, compression=40, fraction_train=0.5)
    """

    CODEC = GradiVeQ
    ROUND = FittedRound

    STATE: ClassVar[Mapping[str, Any]] = {
        **WaitingStrategy.STATE,
        "cycle": nested("cycle"),
        "_frame": bytes,
        "_read_until": int,
        "_loans": nested("_loans"),
        "_samples": StatePart(lambda owner: owner._saved_samples(), lambda owner, state: owner._load_samples(state)),
    }

    def __init__(
        self,
        codec: GradiVeQ | dict[str, Any] | None = None,
        *,
        sampling: int = 20,
        compression: int = 130,
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
        if self.codec.center and self.server_lr != 1.0:
            raise ConfigError(
                f"server_lr={self.server_lr} would scale coefficients without the mean that they are measured from; "
                "use 1, or center=False"
            )
        sampling = params.integer("sampling", sampling, low=3)
        self.cycle = Cycle(self.warmup_rounds, sampling, params.integer("compression", compression, low=1))
        self._moments: Moments | None = None
        # Sums that were restored: what they are of follows from the next model.
        self._restored: Mapping[str, Any] | None = None
        # The last basis that was fitted, and the version of the model to which the last step in it leads.
        self._frame: Frame = b""
        self._read_until = 0
        self._loans = Loans()
        self._opened: SliceBasis | None = None

    def summary(self) -> None:
        """Log the codec and the phases."""
        log.info("\t├──> FittedBasis: %r, %r", self.codec, self.cycle)

    def _exchanges(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[tuple[ArrayRecord | None, MetricRecord | None]]:
        report = self.reports.begin(server_round)
        now, nodes = self._begin("train", report, arrays, config, grid)
        sent = self._messages(dict.fromkeys(nodes, 0), now, config, "train")
        replies = yield [each.message for each in sent]
        rounds = now.codec.rounds(now.basis)

        def read(each: SentMessage, reply: Message) -> Client:
            client = now.trained(each, reply)
            if has_frame(reply.content, UPDATE):
                if rounds:
                    raise Rejected("the reply holds values before there are grids")
                now.take_values(client, reply)
            return client

        arrived = [(c, "", c.content) for c in self.reception.received(sent, replies, report, read)]
        now.clients = self.reception.agreeing(arrived, report, lambda client: client.sent.node, "train")
        for client in now.clients:
            node = client.sent.node
            if client.values is None and node not in now.peaks:
                # It said nothing in the basis: it has lost it, and is sent it again with the next message.
                self._loans.forget(node)
                if rounds:
                    now.silent.add(node)
                    report.refuse(node, "it lacked the basis, and cannot join grids that were made without it")
        frames = {}
        if rounds and now.peaks:
            now.grids = now.codec.grids([now.peaks[c.sent.node] for c in now.clients if c.sent.node in now.peaks])
            frames = {PROBE: steps_frame(np.array([grid.step for grid in now.grids], np.float32))}
        yield from self._gather(now, frames)
        out = self._aggregate(now)
        if out[0] is not None:
            self._count(now)
        return out

    def _begin(self, *args: Any) -> tuple[FittedRound, list[int]]:
        now, nodes = super()._begin(*args)
        self._fit_to(now.layout, now.report)
        if self.cycle.phase == COMPRESSION:
            now.basis = self._basis(now.layout)
        else:
            now.basis = SliceBasis.nothing(now.layout)
        return now, nodes

    def _fit_to(self, layout: Layout, report: Report) -> None:
        """Take up the sums of a layout; those of another one, and the basis of it, are of no use."""
        slices = self.codec.slices(layout)
        if self._moments is not None and self._moments.slices.layout == layout:
            return
        if self._moments is not None:
            report.notes.append("the model has other tensors than before: sampling begins again")
            self.cycle.restart()
            self._frame = b""
        self._moments, self._opened = self._empty(layout), None
        if self._restored is not None:
            self._moments.load_state_dict(self._restored)
            self._restored = None
        if not slices.parts:
            report.notes.append(
                f"no tensor of the model has two slices of {slices.width}: everything travels as it is; lower width"
            )

    def _empty(self, layout: Layout) -> Moments:
        sampling = self.cycle.sampling
        return Moments(self.codec.slices(layout), self.codec.fit, sampling - max(1, sampling // 5))

    def _basis(self, layout: Layout) -> SliceBasis:
        """Return the last basis that was fitted."""
        if self._opened is None:
            self._opened = self.codec.read_basis(self._frame, layout)
        return self._opened

    def _beside(self, node: int, content: RecordDict, fields: dict[str, Any], now: FittedRound) -> None:
        fields["support"] = now.name_of_block
        if not self._frame:
            return
        base = fields.get("base")
        # A node that is sent steps may have to read some in the last basis; one that is sent a model has lost it all.
        reads = bool(now.basis.subspaces) or (base is not None and 0 < base < self._read_until)
        number = self._basis(now.layout).id
        if reads and (base == 0 or not self._loans.holds(node, number, self.reception.peers[node].version)):
            put_frame(content, SUPPORT, self._frame)
            self._loans.lend(node, number, now.version)

    def _count(self, now: FittedRound) -> None:
        """Count a round that made a step: sample it, fit a basis after the last sample, give one up that drifts."""
        assert self._moments is not None
        assert now.moved is not None
        phase, refit = self.cycle.phase, False
        if phase == SAMPLING:
            self._moments.add(now.moved)
        if now.basis.subspaces:
            self._read_until = self.announcer.version
            drift, most = now.drift, self.codec.refresh_tol
            refit = most is not None and drift is not None and drift > most
            if refit:
                now.report.notes.append(
                    f"the basis misses {drift:.3g} of the updates, more than {most}: sampling begins again"
                )
        self.cycle.advance(refit=refit)
        if phase == SAMPLING and self.cycle.phase == COMPRESSION:
            basis = self._moments.basis()
            self._frame, self._opened, self._loans = basis.frame(), basis, Loans()
            self._moments = self._empty(now.layout)
            log.info(
                "round %d: fitted a basis of %d bytes; of %d numbers %d travel (slices of %d in %s dimensions)",
                now.number,
                len(self._frame),
                now.layout.size,
                basis.size,
                self.codec.width,
                ", ".join(map(str, basis.dimensions)) or "no",
            )

    def _saved_samples(self) -> Any:
        return self._restored if self._moments is None else self._moments.state_dict()

    def _load_samples(self, state: Any) -> None:
        self._restored, self._moments, self._opened = state, None, None


SYSTEM: Final = waiting_system(
    "gradiveq",
    "GradiVeQ",
    "Yu et al. 2018, GradiVeQ: vector quantization for bandwidth-efficient gradient aggregation in distributed CNN "
    "training",
    "slices of convolutions in a basis that the server fitted to former averages, so that the sum is as short as one "
    "update",
    FittedBasis,
    ("width", "loss"),
    ("sampling", "compression"),
)
