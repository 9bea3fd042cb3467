"""LSG-style training of a model by clients: what they learnt comes back as a few kept coordinates of low-rank products.

A shorter vector receives less noise at the same norm, and costs fewer bytes; see :mod:`fedcomp.privacy.lsg` for what is
read and what is derived. The server makes the carriers of every matrix from the model it is about to send, which is
private already, and sends them along; which coordinates are kept, a public seed says. A client answers with those, one
vector clipped as a whole. Sum, noise and release lie on the kept coordinates alone; what they stand for is
reconstructed afterwards, which is post-processing. With ``rank=0`` nothing is factored: the random mask alone.

An update that is longer than the clip norm allows did not come from the client half, and is refused, as one that is not
finite; the mechanism clips once more in any case.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedcomp.codecs import Codec
from fedcomp.codecs.base import norm
from fedcomp.errors import ConfigError
from fedcomp.flower.lsg import SLACK, UPDATE, LsgRequest, drawn, put_carriers, put_kept, unpack
from fedcomp.flower.payload import take_frame
from fedcomp.flower.records import to_arrays
from fedcomp.layout import Layout, Vector
from fedcomp.privacy.bounds import clip_arrays
from fedcomp.privacy.errors import Unbounded
from fedcomp.privacy.lsg import Carriers, LowRankPlan, count_kept, fraction, kept, remembered
from fedcomp.privacy.mechanism import GridGaussian
from fedcomp.rng import Key
from fedcomp.strategies.intake import Intake
from fedcomp.strategies.private.settings import LsgSettings
from fedcomp.strategies.private.strategy import Contribution, PrivateStrategy
from fedcomp.strategies.replies import Arrival, SentMessage


@dataclass
class KeptIntake(Intake):
    """Replies that hold kept coordinates; of a client without the mod a dense model, shortened and clipped here.

    Attributes
    ----------
    plan, pairs, kept, clip
        The round's: how tensors are factored, the carriers, which coordinates are kept, and the clip norm.
    """

    plan: LowRankPlan = field(kw_only=True)
    pairs: Carriers = field(kw_only=True)
    kept: NDArray[np.int64] = field(kw_only=True)
    clip: float = field(kw_only=True)

    @property
    def summed(self) -> Layout:
        """Layout of the kept coordinates."""
        return Layout.flat(int(self.kept.size))

    def read(self, sent: SentMessage, reply: Message, *, measured: bool = True, takes_plain: bool = True) -> Arrival:
        """Check ``reply`` and return it; see :meth:`Intake.read`."""
        frame = take_frame(reply.content, UPDATE)
        if frame is None:
            return super().read(sent, reply, measured=measured, takes_plain=takes_plain)
        # Read here, so that a damaged frame is refused with its reply; decoded again when it is added.
        unpack(frame, self.kept.size)
        return Arrival(sent, reply, RecordDict(), self.record, {}, frame)

    def update(self, arrival: Arrival) -> Vector:
        """Return the kept coordinates."""
        if arrival.frame is not None:
            return unpack(arrival.frame, self.kept.size)
        # What overflows is refused by the clip, as not finite.
        with np.errstate(over="ignore", invalid="ignore"):
            short = np.concatenate(self.plan.project(super().update(arrival), self.pairs))
        # In float32, as the client half would have sent it.
        (update,), _ = clip_arrays([short[self.kept].astype(np.float32)], self.clip)
        return update


class Lsg(PrivateStrategy):
    """Federated averaging of clipped, low-rank and masked updates with noise.

    Not to be put inside ``Compressed``: it has bytes of its own. A client without the mod answers with a dense model;
    the server, which is trusted, then shortens and clips it as that client would have.

    Parameters
    ----------
    inner : Strategy
        One of Flower's weighted means, with ``fraction_evaluate=0.0``.
    settings : LsgSettings
    **promise
        As :class:`fedcomp.strategies.private.strategy.PrivateStrategy`. The sensitivity is the clip norm; twice that
        with "replace".

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> settings = LsgSettings(clip=1.0, rank=8, keep=0.5)
    >>> strategy = Lsg(FedAvg(fraction_evaluate=0.0), settings, noise_multiplier=1.0, population=1000)
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "_first": NDArray[np.float64] | None,
        "_former": NDArray[np.float64] | None,
    }

    def __init__(self, inner: Strategy, settings: LsgSettings, **promise: Any) -> None:
        self.settings = settings
        self._first: NDArray[np.float64] | None = None
        self._former: NDArray[np.float64] | None = None
        self._plan: LowRankPlan | None = None
        self._pairs: Carriers = ()
        self.kept: NDArray[np.int64] = np.zeros(0, np.int64)
        super().__init__(inner, **promise)
        self._request: LsgRequest | None = None
        # No pair around this tells what is released: it is always the kept coordinates.
        self._released = self._shorten

    def check_codec(self, codec: Codec) -> None:
        """Refuse any codec: what is sent is decided here."""
        raise ConfigError("Lsg sends bytes of its own; use it without Compressed, or DpFedAvg with a codec")

    def _shorten(self, arrays: ArrayRecord, server_round: int) -> Layout:
        """Make the round's carriers and mask from public data; return the layout of the coordinates that are kept."""
        arrays_now = to_arrays(arrays)
        layout = Layout.of(arrays_now)
        # Factors and shares are of the round; only the model is the run's.
        request = self._request = LsgRequest(
            rank=self.settings.rank,
            whole=self.settings.whole,
            # Rounds count from 1, the steps of a schedule from 0.
            share=fraction(self.settings.schedule, server_round - 1, self.settings.schedule_rounds, self.settings.keep),
            # Below 2^63: integers in a message are signed.
            draw=Key(self.seed, "lsg", server_round).u64() >> 1,
            clip=self.settings.clip,
            # Before the first noisy update there is nothing to look at, and the seed alone decides.
            chosen=self.settings.mask == "noisy_magnitude" and self._former is not None,
        )
        plan = self._plan = request.plan(layout)
        model = layout.flatten(arrays_now).astype(np.float64)
        if self.settings.history and self._first is None:
            self._first = model
        before = self._first if self.settings.history and server_round > self.settings.history else None
        self._pairs = plan.carriers(model, Key(self.seed, "lsg/carriers", server_round), before)
        self.kept = drawn(request, plan.short)
        if request.chosen:
            assert self._former is not None
            magnitude = np.concatenate(plan.project(self._former, self._pairs))
            self.kept = kept(plan.short, request.share, Key(request.draw, "lsg/kept"), magnitude)
        return Layout.flat(count_kept(plan.short, request.share))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the clients that were drawn, and tell them what to keep."""
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for content in {id(message.content): message.content for message in messages}.values():
            assert self._request is not None
            assert self._plan is not None
            self._request.put(content)
            put_carriers(content, self._pairs)
            if self._request.chosen:
                put_kept(content, self._plan.short, self.kept)
        return messages

    def mechanism(self, layout: Layout, server_round: int) -> GridGaussian:
        """Return the grid Gaussian for as many coordinates as are kept."""
        return GridGaussian(
            clip=self.settings.clip,
            size=layout.size,
            noise_multiplier=self.noise_multiplier,
            adjacency=self.adjacency,
            noise=self.noise,
        )

    def _intake(self, server_round: int, layout: Layout) -> Intake:
        assert self._plan is not None
        plain = super()._intake(server_round, layout)
        return KeptIntake(**vars(plain), plan=self._plan, pairs=self._pairs, kept=self.kept, clip=self.settings.clip)

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

    def released(self, noisy: NDArray[np.float64], layout: Layout, server_round: int) -> Vector:
        """Return the update of the model that the noisy kept coordinates stand for."""
        assert self._plan is not None
        short = np.zeros(self._plan.short)
        short[self.kept] = noisy / self.expected
        step = self._plan.reconstruct(short, self._pairs)
        if self.settings.mask == "noisy_magnitude":
            self._former = remembered(self._former, step)
        return step.astype(np.float32)

    def describe(self) -> str:
        """Return how an update is shortened and clipped."""
        own = self.settings
        factors = f"products with carriers of rank {own.rank} of the public model" if own.rank else "coordinates"
        how = "a public seed" if own.mask == "random" else "a public seed and former noisy updates"
        share = f"{own.keep:g} of them" if own.schedule == "constant" else f"down to {own.keep:g} of them"
        return f"{factors}, {share} kept by {how}, clipped together to L2 norm {own.clip:g}"

    def describe_settings(self) -> str:
        """Return the parameters."""
        return repr(asdict(self.settings))
