"""Distributed noise: clients add it, the server decodes a sum that is private already. The server half.

Coded sums (:mod:`fedcomp.strategies.coded.sums`) show the server the sum of what its clients sent and nobody's own
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
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, ClassVar, Final

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedcomp.codecs import Codec, FixedPoint, RandomK, get_codec
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.coding.sumcode import Summed, SumPlan
from fedcomp.errors import ConfigError
from fedcomp.flower.records import to_arrays
from fedcomp.flower.rounds import Exchanges
from fedcomp.layout import Layout
from fedcomp.plain import Count
from fedcomp.privacy.bounded import BoundedFixedPoint
from fedcomp.privacy.distributed import DistributedSum
from fedcomp.privacy.statement import Statement, make_statement
from fedcomp.rng import Key
from fedcomp.strategies.coded.settings import CodedSettings
from fedcomp.strategies.coded.strategy import CodedFedAvg
from fedcomp.strategies.coded.sums import SumCode
from fedcomp.strategies.hooked import Hooked
from fedcomp.strategies.private.settings import ShareSettings
from fedcomp.strategies.private.strategy import NOT_COVERED, Outcome, PrivateRule, PrivateStrategy

# Settings that cannot work are then refused by the constructor, and not in the first round.
_UNKNOWN: Final = 1 << 20
"""Number of coordinates that is assumed of a model that was not seen yet."""

_TRUST: Final = (
    "the server follows the protocol: it asks for one sum a round, with the parameters it announced and the clients' "
    "own keys. It then sees no update, only sums with the noise in them, also together with any {threshold} of the "
    "clients; clients add the noise they are told to add. The noise of {telling} of {asked} clients is taken to be "
    "known; who knows one more, as a client that takes part knows its own, faces {left:.3g} times the noise multiplier"
)


class NoisyRule(PrivateRule):
    """A sum with the noise in it: post-processing, once it is paid for."""

    @property
    def mean(self) -> Strategy:
        """The weighted mean that takes the sum."""
        return self.strategy.inner


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
                "a client that is not there brings no noise, and how much there is shows how many brought it; shares "
                "of noise keep adjacency='zero_out' and 'replace'"
            )
        if self.sampling.kind == "poisson":
            raise ConfigError(
                "shares of noise are dimensioned for a number of contributors that is known, Poisson sampling draws "
                "another one each round; use Sampling('capped') or everyone"
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

    def update_rule(self) -> PrivateRule:
        """Return what this strategy needs: a sum that was made elsewhere.

        Updates of single clients never get here, and a round without a sum is void.
        """
        return NoisyRule(self)

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


class NoisySum(SumCode):
    """The construction ``"noisysum"``: a coded sum of noised integers, paid for before it is asked for."""

    inner: Hooked

    @property
    def noisy(self) -> NoisyMean:
        """The strategy that owns the promise."""
        assert isinstance(self.inner.inner, NoisyMean)
        return self.inner.inner

    def __init__(self, settings: CodedSettings, inner: Strategy) -> None:
        held = getattr(inner, "inner", inner)
        if not isinstance(held, NoisyMean):
            raise ConfigError(f"construction='noisysum' is part of DistributedDp, not of {type(held).__name__}")
        super().__init__(settings, inner)
        own = self.options
        # All of these would show the server something beside the sum that has no noise.
        if own.weighted or own.metrics or own.mode != "share" or not self.seal:
            raise ConfigError("a noisy sum has no weights and no metrics, is not masked, and its shards are sealed")

    def prepare(self, codec: BoundedFixedPoint, mechanism: DistributedSum) -> None:
        """Take the round's codec, and as many pieces as leave the tolerated losses.

        Raises
        ------
        ConfigError
            When decoding would need more relays than may be left, or clients that tell could read a share.
        """
        telling = mechanism.contributors - mechanism.counted - mechanism.tolerated
        threshold = self.settings.threshold
        if threshold < max(1, telling):
            raise ConfigError(
                f"threshold={threshold}: {telling} clients may tell what they hold; threshold={max(1, telling)} keeps "
                "single updates from them"
            )
        if mechanism.least < max(2, threshold + 1):
            raise ConfigError(
                f"{mechanism.least} contributors may be left, too few for a sum of which {threshold} learn nothing; "
                "lower tolerated or threshold, or ask more clients"
            )
        self.codec = codec
        self.options = replace(self.options, min_contributors=mechanism.least)
        # As many sums decode as there are symbols and private ones together: exactly the least number of contributors.
        self.settings = replace(self.settings, symbols=mechanism.least - threshold)

    def plan(self, clients: int, number: int) -> SumPlan:
        """Return the plan of a round: without the number of cut values, which would be released as it is."""
        return replace(super().plan(clients, number), extras=())

    def frozen(self, number: int, nodes: list[int]) -> None:
        """Pay for the sum."""
        self.noisy.pay(number)

    def divisor(self, summed: Summed) -> float:
        """Return the public number of clients."""
        return float(self.noisy.contributors)


class DistributedDp(CodedFedAvg):
    """Federated averaging whose noise comes from the clients, summed in a prime field.

    Parameters
    ----------
    inner : Strategy
        One of Flower's weighted means, with ``fraction_evaluate=0.0``; it gets the noisy mean.
    shares : ShareSettings
        The clip norm, and how the noise is shared.
    codec : Codec or dict, optional
        What is summed: ``RandomK`` or ``RandomBlock`` with ``shared=True``. Default: everything.
    feedback : bool
        Remember what was clipped, rounded or not chosen, and send it later. A clip that is always too small fills the
        memory without bound.
    transport, share_timeout, collect_timeout, max_store_bytes, spool
        As :class:`fedcomp.strategies.coded.strategy.CodedFedAvg`. Shards are always sealed: the server passes them on.
    seed : int
    **promise
        As :class:`~fedcomp.strategies.private.strategy.PrivateStrategy`: noise_multiplier (of the sum when as many
        clients vanish as may), adjacency ("zero_out" or "replace"), noise ("discrete_gaussian", "skellam") and others.

    Raises
    ------
    ConfigError
        For anything that cannot keep the promise; what depends on the population or the model, before the first round.

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
        # Handed on where they were given: their defaults are the coded strategy's.
        links = {name: promise.pop(name) for name in ("max_store_bytes", "spool") if name in promise}
        self.summed = RandomK(1.0) if codec is None else get_codec(codec)
        self.feedback = feedback
        self._made = (0, 0)
        noisy = NoisyMean(inner, shares, seed=seed, **promise)
        # Grid and room depend on the model and the number of clients; the real codec is made when both are known.
        unknown = BoundedFixedPoint(self.summed, clip=shares.clip, levels=64)
        super().__init__(
            Hooked(noisy, unknown, feedback=feedback, seed=seed),
            construction="noisysum",
            threshold=shares.threshold,
            transport=transport,
            share_timeout=share_timeout,
            collect_timeout=collect_timeout,
            seed=seed,
            # A weight would be a number of examples, which has no noise.
            weighted=False,
            **links,
        )

    def round(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Exchanges[Outcome]:
        """Make the codec for this model and number of clients, then run the round of a coded sum."""
        layout = Layout.of(to_arrays(arrays), self._pair.policy, cast_floats=True)
        self._prepare(FixedPoint(self.summed, clip=1.0).count(layout), self._noisy.contributors)
        return (yield from super().round(server_round, arrays, config, grid))

    def _prepare(self, size: int, contributors: int) -> None:
        """Take the codec for ``size`` integers of each of ``contributors`` clients."""
        assert isinstance(self.construction, NoisySum)
        mechanism = self._noisy.sum_of(size, contributors)
        insecure = self._noisy.insecure_deterministic
        bounded = BoundedFixedPoint.of(mechanism, self.summed, insecure_deterministic=insecure)
        self.construction.prepare(bounded, mechanism)
        self._pair.codec = ErrorFeedback(bounded) if self.feedback else bounded
        self._made = (size, contributors)

    @property
    def _pair(self) -> Hooked:
        assert isinstance(self.inner, Hooked)
        return self.inner

    @property
    def _noisy(self) -> NoisyMean:
        assert isinstance(self._pair.inner, NoisyMean)
        return self._pair.inner

    def check_state(self, values: Mapping[str, Any]) -> None:
        """Prepare the codec that the rest of the state is for."""
        size, contributors = values["_made"]
        if size:
            self._prepare(size, contributors)
