"""Distributed noise: clients add the noise, and the server decodes only a sum that is already private. The server half.

Coded sums (:mod:`fedcomp.systems.coded.sums`) show the server the sum of what its clients sent and nobody's own
update. Here every client clips, rounds under a bound on the norm, and adds a share of integer noise before it shares;
so what is decoded is a noisy sum, and the server is trusted with the protocol, not with updates
(:mod:`fedcomp.privacy.distributed`).

A round
-------
As that of a coded sum. Between the freezing of the set and the first question for its sum, the event is written into
the ledger. Everybody weighs the same, no metric and no count of cut values travels, and the sum is divided by the
number of clients that are asked, which is public. With fewer contributors than the noise was dimensioned for the round
is void: relays do not add, and nothing was released.

Error feedback may be put around the codec: memories hold what was clipped and rounded off, never noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import asdict
from typing import Any, ClassVar, Final

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedcomp.codecs import Codec, FixedPoint, RandomK, get_codec
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.errors import ConfigError, NoUsableReply, require_installed
from fedcomp.flower.records import to_arrays
from fedcomp.flower.rounds import Exchanges
from fedcomp.layout import NONE_DENSE, Layout
from fedcomp.plain import Count
from fedcomp.privacy.bounded import BoundedFixedPoint
from fedcomp.privacy.distributed import DistributedSum
from fedcomp.privacy.statement import Statement, make_statement
from fedcomp.program import Now, Round, Step, Wait
from fedcomp.rng import Key
from fedcomp.strategies.coded.settings import CodedSettings
from fedcomp.strategies.coded.strategy import CodedServer
from fedcomp.strategies.private.settings import ShareSettings
from fedcomp.strategies.private.strategy import NOT_COVERED, Outcome, PrivateStrategy
from fedcomp.strategies.round_log import require_learnt
from fedcomp.strategies.server import Exchange, Running
from fedcomp.systems.coded.sums import AddUp
from fedcomp.systems.private.distributed import NoisySum

# Settings that cannot work are then refused by the constructor, and not in the first round.
_UNKNOWN: Final = 1 << 20
"""Number of coordinates that is assumed of a model that was not seen yet."""

_TRUST: Final = (
    "the server follows the protocol: it asks for one sum a round, with the parameters it announced and the clients' "
    "own keys. It then sees no update, only sums with the noise in them, also together with any {threshold} of the "
    "clients; clients add the noise they are told to add. The noise of {telling} of {asked} clients is taken to be "
    "known; a participant, who also knows its own noise, faces {left:.3g} times the noise multiplier"
)


class NoisyMean(PrivateStrategy):
    """The private half of :class:`DistributedDp`: who takes part, what a sum costs, what may be said.

    Parameters
    ----------
    inner : Strategy
        One of Flower's weighted means, with ``fraction_evaluate=0.0``.
    shares : ShareSettings
    **promise
        As :class:`fedcomp.strategies.private.strategy.PrivateStrategy`.
    """

    takes_plain: ClassVar[bool] = False
    bounds_updates: ClassVar[bool] = False

    def __init__(self, inner: Strategy, shares: ShareSettings, **promise: Any) -> None:
        super().__init__(inner, **promise)
        if self.adjacency == "add_remove":
            raise ConfigError(
                "an absent client adds no noise, so the amount of noise shows how many clients took part; shares of "
                "noise work with adjacency='zero_out' and 'replace'"
            )
        if self.sampling.kind == "poisson":
            raise ConfigError(
                "shares of noise are sized for a known number of contributors, but Poisson sampling draws another "
                "number each round; use Sampling('capped') or everyone"
            )
        self.shares = shares
        # A public word of the run; rotations of one norm are all alike, so it costs nothing that everybody knows it.
        self.rotation = 1 + Key(self.seed, "privacy/rotation").u64() % (1 << 31) if shares.rotate else 0
        if self.population:
            # Settings that cannot work are refused now, at a size that stands in for the model's.
            self.sum_of(_UNKNOWN, self.contributors)

    def sum_of(self, size: int, contributors: int) -> DistributedSum:
        """Return the mechanism for ``size`` coordinates of each of ``contributors`` clients."""
        return DistributedSum(
            noise_multiplier=self.noise_multiplier,
            adjacency=self.adjacency,
            noise=self.noise,
            clip=self.shares.clip,
            size=size,
            contributors=contributors,
            tolerated=self.shares.tolerated,
            honest=self.shares.honest,
            scale=self.shares.scale,
            rotation=self.rotation,
        )

    @property
    def contributors(self) -> int:
        """Clients asked in a round, n: public, and what sums are divided by."""
        self.require_population()
        return int(self.expected)

    def mechanism(self, layout: Layout, server_round: int) -> DistributedSum:
        """Return the sum of shares over as many coordinates as are released."""
        return self.sum_of(layout.size, self.contributors)

    def check_codec(self, codec: Codec) -> None:
        """Refuse a codec whose updates the server could read."""
        super().check_codec(codec)
        summed = codec.codec if isinstance(codec, ErrorFeedback) else codec
        if not isinstance(summed, BoundedFixedPoint):
            raise ConfigError(f"{codec!r} shows the server single updates; make the strategy with DistributedDp(...)")

    def may_be_coded(self, construction: str) -> bool:
        """Whether other clients may hold what a client sends: shards of noised integers, of which they learn sums."""
        return construction == "noisysum"

    def release(self, *arguments: Any) -> None:
        """Return nothing: no sum is made of single updates."""

    def pay(self, number: int) -> None:
        """Record the event of a sum, and all who were asked; called before any relay is asked for it.

        Raises
        ------
        BudgetExceeded, PrivacyLedgerError
            No sum may be asked for.
        """
        assert self._layout is not None
        size = self._layout.size
        cost = self.event(self.mechanism(self._layout, number), size)
        self.privacy.record(cost, round=number, participants=self.chosen)

    def describe(self) -> str:
        """Return what a client does with its update."""
        turned = "turned by a public rotation, " if self.rotation else ""
        clip = f"clips its update to L2 norm {self.shares.clip:g}"
        return f"every client {clip}; {turned}rounded at random with the norm checked"

    def describe_settings(self) -> str:
        """Return all that must not change within a run."""
        own = asdict(self.shares) | {"rotation": self.rotation}
        named = ("clip", "tolerated", "honest", "scale", "rotation", "threshold")
        return ", ".join(f"{name}={own[name]!r}" for name in named)

    def statement(self) -> Statement:
        """Return what may be said about the run so far."""
        layout = Layout.flat(_UNKNOWN) if self._layout is None else self._layout
        mechanism = self.mechanism(layout, 1)
        return make_statement(
            self.privacy,
            mechanism=mechanism,
            trust=_TRUST.format(
                threshold=self.shares.threshold,
                telling=mechanism.contributors - mechanism.counted - mechanism.tolerated,
                asked=mechanism.contributors,
                # A client knows its own share: against it one of those that are counted on is missing.
                left=math.sqrt(1.0 - 1.0 / mechanism.counted),
            ),
            protects="every decoded sum, from the server, too; so every model",
            not_covered=NOT_COVERED,
            clip=self.describe(),
            dropouts=(
                f"the noise of {mechanism.counted} of {mechanism.contributors} clients makes up the promised one; with "
                f"fewer than {mechanism.least} contributors a round is void and nothing is decoded"
            ),
            entropy=self.entropy("statement", 0),
        )


class DistributedDp(CodedServer):
    """Federated averaging with distributed noise: clients add it, and updates are summed in a prime field.

    Parameters
    ----------
    inner : Strategy
        One of Flower's weighted means, with ``fraction_evaluate=0.0``; it gets the noisy mean.
    shares : ShareSettings
        The clip norm, and how the noise is shared.
    codec : Codec or dict, optional
        The values that are summed: ``RandomK`` or ``RandomBlock`` with ``shared=True``. Default: all values.
    feedback : bool
        Error feedback for what was clipped, rounded or not chosen. With a clip that is always too small, the memory
        grows without bound.
    transport, share_timeout, collect_timeout, max_store_bytes, spool
        As :class:`fedcomp.strategies.coded.strategy.CodedFedAvg`.
    seed : int
    **promise
        As :class:`~fedcomp.strategies.private.strategy.PrivateStrategy`: noise_multiplier (of the sum when the
        tolerated number of clients vanishes), adjacency ("zero_out" or "replace"), noise ("discrete_gaussian",
        "skellam") and others.

    Raises
    ------
    MissingExtra
        Where galois, which decodes sums, is not installed.
    ConfigError
        For settings that cannot keep the guarantee; those that depend on the population or the model are checked before
        the first round.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> shares = ShareSettings(clip=1.0, tolerated=2)
    >>> strategy = DistributedDp(FedAvg(fraction_evaluate=0.0), shares, noise_multiplier=2.0, population=20)
    """

    STATE: ClassVar[Mapping[str, Any]] = {"_made": tuple[Count, Count]}

    def __init__(
        self,
        inner: Strategy,
        shares: ShareSettings,
        *,
        codec: Codec | dict[str, Any] | None = None,
        feedback: bool = False,
        transport: str = "hub",
        share_timeout: float | None = None,
        collect_timeout: float | None = None,
        seed: int = 0,
        **promise: Any,
    ) -> None:
        require_installed("decoding a sum", "galois")
        # Handed on where they were given: their defaults are the coded strategy's.
        links = {name: promise.pop(name) for name in ("max_store_bytes", "spool") if name in promise}
        self.settings = CodedSettings(
            threshold=shares.threshold,
            transport=transport,
            share_timeout=share_timeout,
            collect_timeout=collect_timeout,
            seed=seed,
            **links,
        )
        self.summed = RandomK(1.0) if codec is None else get_codec(codec)
        self.feedback = feedback
        self._made = (0, 0)
        # Grid and room depend on the model and the number of clients; the real codec is made when both are known.
        unknown = BoundedFixedPoint(self.summed, clip=shares.clip, levels=64)
        self._noisy = NoisyMean(inner, shares, seed=seed, **promise)
        system = self._system(unknown, symbols=1, min_contributors=2, contributors=1)
        super().__init__(system, self._noisy, policy=NONE_DENSE, links=self.settings.links(), seed=seed)
        self._rule.check(self.codec, None)
        self._rule.within(self._released)

    @property
    def codec(self) -> Codec:
        """What is summed, as it is encoded for this model and number of clients."""
        assert isinstance(self.system, NoisySum)
        return self.system.codec

    def _system(self, codec: BoundedFixedPoint, **numbers: int) -> NoisySum:
        of_code = self.settings.of_code() | {"threshold": self.settings.threshold}
        remembering = ErrorFeedback(codec) if self.feedback else codec
        return NoisySum(codec=remembering, **{**of_code, **numbers})

    def _released(self, arrays: ArrayRecord, server_round: int) -> Layout:
        """Return the layout of what clients send of an update: all of it, or a support that is drawn for all."""
        layout = Layout.of(to_arrays(arrays, copy=False), self.policy, cast_floats=True)
        support = self.codec.common_support(layout, Key(self.seed, "uplink", server_round))
        return layout if support is None else Layout.flat(int(support.size))

    def round(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Exchanges[Outcome]:
        """Make the codec for this model and number of clients, then run the round of a coded sum."""
        layout = Layout.of(to_arrays(arrays), self.policy, cast_floats=True)
        self._prepare(FixedPoint(self.summed, clip=1.0).count(layout), self._noisy.contributors)
        self._require_connected(len(list(grid.get_node_ids())))
        return (yield from super().round(server_round, arrays, config, grid))

    def _require_connected(self, nodes: int) -> None:
        """Refuse a first round with fewer clients than any sum needs: how many are connected is no secret.

        Raises
        ------
        NoUsableReply
        """
        assert isinstance(self.system, NoisySum)
        least = self.system.min_contributors
        if nodes < least and not self.reports:
            raise NoUsableReply(
                f"{nodes} clients are connected, a sum needs {least} of the {self._noisy.contributors} that are asked: "
                "connect more clients before the run starts, or set a smaller population"
            )

    def _play(
        self, x: Running, now: Now, program: Round, begun: Exchange | None = None
    ) -> Generator[Iterable[Message], list[Message], Step | None]:
        return (yield from super()._play(x, now, paid(program, lambda: self._noisy.pay(now.number)), begun))

    def _prepare(self, size: int, contributors: int) -> None:
        """Take the codec for ``size`` integers of each of ``contributors`` clients, and as many pieces as leave the
        tolerated losses.

        Raises
        ------
        ConfigError
            When decoding would need more relays than may be left, or clients that tell could read a share.
        """
        mechanism, threshold = self._noisy.sum_of(size, contributors), self.settings.threshold
        insecure = self._noisy.insecure_deterministic
        bounded = BoundedFixedPoint.of(mechanism, self.summed, insecure_deterministic=insecure)
        telling = mechanism.contributors - mechanism.counted - mechanism.tolerated
        if threshold < max(1, telling):
            raise ConfigError(
                f"threshold={threshold}: {telling} clients may reveal what they hold; threshold={max(1, telling)} "
                "keeps "
                "single updates from them"
            )
        if mechanism.least < max(2, threshold + 1):
            raise ConfigError(
                f"{mechanism.least} contributors may be left, too few to keep a sum secret from {threshold} of them; "
                "lower tolerated or threshold, or ask more clients"
            )
        # As many sums decode as there are symbols and private ones together: exactly the least number of contributors.
        symbols = mechanism.least - threshold
        self.system = self._system(
            bounded, symbols=symbols, min_contributors=mechanism.least, contributors=mechanism.contributors
        )
        self._made = (size, contributors)

    def check_state(self, values: Mapping[str, Any]) -> None:
        """Prepare the codec that the rest of the state is for."""
        size, contributors = values["_made"]
        if size:
            self._prepare(size, contributors)

    def finish(self) -> None:
        """Refuse to end a run that has decoded no sum; one that withholds who took part does not say.

        Raises
        ------
        NoUsableReply
        """
        # Noise alone is never released here.
        if not self._noisy.withholds:
            require_learnt(self.reports)

    def identity(self) -> dict[str, str]:
        """Return what must not change within a run; grid and room follow from it and from the model."""
        return {"summed": repr(self.summed), "feedback": repr(self.feedback)}


def paid(program: Round, pay: Callable[[], None]) -> Round:
    """Drive a coded sum, and pay between the freezing of its set and the first ask for a sum over it."""
    owed = True
    try:
        asks = next(program)
        while True:
            wanted = asks.asks if isinstance(asks, Wait) else asks
            if owed and any(isinstance(ask.say, AddUp) for ask in wanted):
                pay()
                owed = False
            asks = program.send((yield asks))
    except StopIteration as end:
        step: Step | None = end.value
        return step
