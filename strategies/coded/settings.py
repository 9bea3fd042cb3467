"""Settings of the coded strategies, in groups: of all constructions, of each of them alone, of coded descent.

Strategies take all of these as keyword arguments: ``CodedFedAvg(inner, code="mds", symbols=7)``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, TypeVar

from fedcomp import params
from fedcomp.coding.encodings import encoding_matrix
from fedcomp.coding.gradcode import SCHEMES
from fedcomp.coding.gradvalues import ARITHMETICS, values_of
from fedcomp.coding.linearloss import LOSSES
from fedcomp.coding.sumcode import MODES
from fedcomp.errors import ConfigError, nearest
from fedcomp.flower.coded import MAX_STORE_BYTES
from fedcomp.flower.linear import VECTOR_TYPES

# As text: every construction imports this module, and some bring libraries that others do without.
CONSTRUCTIONS: Final[Mapping[str, str]] = {
    "relay": "fedcomp.strategies.coded.relay:RelayedShards",
    "sumcode": "fedcomp.strategies.coded.sums:SumCode",
    "gradcode": "fedcomp.strategies.coded.gradients:GradientCode",
    "noisysum": "fedcomp.strategies.private.distributed_dp:NoisySum",
}
"""Where each construction's class stands; imported when it is first used."""

TRANSPORTS: Final = ("hub", "peers")
CODES: Final = ("rlnc", "mds")

Options = TypeVar("Options")


@dataclass(frozen=True, kw_only=True)
class CodedSettings:
    """Settings of every construction of :class:`fedcomp.strategies.coded.strategy.CodedFedAvg`.

    Parameters
    ----------
    construction : {"relay", "sumcode", "gradcode"}
        What is coded and who adds; see the modules named in :data:`CONSTRUCTIONS`.
    code : {"rlnc", "mds"}
        Random linear network code, or systematic Cauchy Reed-Solomon code.
    symbols : int
        K: pieces of an update; K + ``threshold`` shards decode. 0 chooses it.
    shards : int
        N: shards that are made, one per relay. 0: one for every client of the round.
    loss, target : float
        Fraction of relays that is expected to vanish, and the probability with which decoding must still succeed; K or
        N follows from them where it is not given.
    threshold : int
        T, the privacy threshold of secret sharing: any T relays together learn nothing of an update, and K + T shards
        decode (not T). 0 hides nothing. Construction ``relay`` needs the code ``mds`` for it.
    transport : {"hub", "peers"}
        Shards travel through the server's messages, or from client to client.
    seal : bool, optional
        Encrypt each shard for its relay. Default: the construction's choice.
    share_timeout, collect_timeout : float, optional
        Seconds for training and sharing, and for each exchange after it. Default: the run's timeout.
    max_store_bytes : int
        What one client may be asked to keep for others.
    spool : path, optional
        Folder of the simulated links between nodes of one machine that have no address of their own; for the transport
        ``peers``. Default: one that is removed with the strategy.
    seed : int
        Seed of coefficients and samples.
    options : mapping
        Options of the chosen construction alone.

    Raises
    ------
    ConfigError
        For values that are not valid by themselves.
    """

    construction: str = "relay"
    code: str = "rlnc"
    symbols: int = 0
    shards: int = 0
    loss: float | None = None
    target: float = 0.999
    threshold: int = 0
    transport: str = "hub"
    seal: bool | None = None
    share_timeout: float | None = None
    collect_timeout: float | None = None
    max_store_bytes: int = MAX_STORE_BYTES
    spool: str | os.PathLike[str] | None = None
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> CodedSettings:
        """Return the settings of keyword arguments; those without a field of that name are the construction's own."""
        # Without the field itself: an option of that name is unknown, like any other.
        known = {f.name for f in fields(cls)} - {"options"}
        options = {name: value for name, value in given.items() if name not in known}
        return cls(**{name: value for name, value in given.items() if name in known}, options=options)

    def __post_init__(self) -> None:
        params.choice("construction", self.construction, CONSTRUCTIONS)
        params.choice("code", self.code, CODES)
        params.choice("transport", self.transport, TRANSPORTS)
        _require_counts(self, "symbols", "shards", "threshold", "max_store_bytes")
        if self.loss is not None:
            params.number("loss", self.loss, rule="a fraction of relays in [0, 1)", ok=lambda v: 0.0 <= v < 1.0)
        params.number("target", self.target, rule="a probability of decoding in (0, 1)", ok=lambda v: 0.0 < v < 1.0)
        for name in ("share_timeout", "collect_timeout"):
            _require_timeout(name, getattr(self, name))
        _require_spool(self.transport, self.spool)
        params.assign(self, seed=params.seed(self.seed))

    def own(self, kind: type[Options]) -> Options:
        """Return the construction's own options as ``kind``, a dataclass.

        Raises
        ------
        ConfigError
            For an option that ``kind`` does not have, or whose value is not valid.
        """
        names = [f.name for f in fields(kind)]  # type: ignore[arg-type]
        for name in self.options:
            if name not in names:
                raise ConfigError(f"construction {self.construction!r} has no option {name!r}{nearest(name, names)}")
        return kind(**self.options)


@dataclass(frozen=True)
class NoOptions:
    """Of a construction without options of its own: any is refused."""


@dataclass(frozen=True, kw_only=True)
class SumOptions:
    """Options of coded sums alone.

    Parameters
    ----------
    mode : {"share", "mask"}
        What is coded: the updates, or masks of updates that go to the server in full (LightSecAgg).
    weighted : bool
        Weigh by the inner strategy's metric, number of examples; False gives everybody weight 1, which needs a smaller
        field.
    max_weight : int
        The largest weight there is room for; 0 takes as much as 2^31 - 1 leaves. The smallest field that holds
        clients * max_weight * levels is used.
    metrics : bool
        Let the clients' training metrics travel, in the clear and with them their weights. False: the server learns
        sums only.
    min_contributors : int
        Contributors below which a sum is neither asked for nor given: 2 for every sum, 1 only where the point is not
        secrecy. With more than 2 a client whose update is zero in more than half of its coordinates shares nothing and
        says why; with 2 it warns in its log.
    """

    mode: str = "share"
    weighted: bool = True
    max_weight: int = 0
    metrics: bool = False
    min_contributors: int = 2

    def __post_init__(self) -> None:
        params.choice("mode", self.mode, MODES)
        params.boolean("weighted", self.weighted)
        params.boolean("metrics", self.metrics)
        _require_counts(self, "max_weight")
        _require_counts(self, "min_contributors", low=1)


@dataclass(frozen=True, kw_only=True)
class GradientOptions:
    """Options of gradient codes alone.

    Parameters
    ----------
    losses : int
        s, how many clients of a round may be lost; every client trains on s + 1 partitions.
    scheme : {"auto", "fractional", "cyclic"}
        Fractional repetition needs s + 1 to divide the number of clients; "auto" takes it where it fits.
    arithmetic : {"float64", "gf65521", "gf31"}
        Numbers of the answers: floating point, or fixed point over a prime field.
    limit : float
        In a field, the largest change of one coordinate times its weight (number of examples); the step follows from it
        and the number of clients. A client whose update is larger says so, and its answer is missing.
    approximate : bool
        When too many are lost use the least-squares combination of what came, and report its residual. False: the round
        is skipped.
    quorum : int
        With ``approximate``: the training exchange ends after this many answers, even if they do not determine the sum.
        0 waits for all or for ``collect_timeout``. With ``losses=0`` this is a server that ignores stragglers.
    """

    losses: int = 1
    scheme: str = "auto"
    arithmetic: str = "float64"
    limit: float = 128.0
    approximate: bool = False
    quorum: int = 0

    def __post_init__(self) -> None:
        params.choice("scheme", self.scheme, SCHEMES)
        params.choice("arithmetic", self.arithmetic, ARITHMETICS)
        params.boolean("approximate", self.approximate)
        _require_counts(self, "losses", "quorum")
        if self.quorum and not self.approximate:
            raise ConfigError(
                f"quorum={self.quorum} ends a round with answers that may not determine the sum; allow that with "
                "approximate=True, or leave it out"
            )
        # Made for its checks, with the fewest rows there can be: what no field has room for is refused before any
        # round.
        values_of(self.arithmetic, 2, self.limit)
        if self.approximate and self.arithmetic != "float64" and self.scheme != "fractional":
            raise ConfigError(
                "a cyclic code over a field cannot be decoded approximately; use arithmetic='float64', or "
                "scheme='fractional'"
            )


@dataclass(frozen=True, kw_only=True)
class LinearSettings:
    """Settings of :class:`fedcomp.strategies.coded.linear.CodedLinearGD`.

    Parameters
    ----------
    partitions : int
        k; 0 takes the entry "clients" of the training configuration, less ``parities``.
    parities : int
        r = n - k.
    code : str
        One of :data:`fedcomp.coding.encodings.CODES`.
    density : float
        Density of nonzero coefficients.
    loss : str
        "logistic", "squares" (least squares) or "hinge" (linear SVM); must be that of the clients' task.
    lr, l2 : float
        Step size; coefficient of |w|^2/2 (the bias is not regularised).
    approximate : bool
        Go on with the partitions that are determined instead of skipping a round. What is lost in phase 2 alone is
        given up only from the third retry on.
    retries : int
        How often phase 2 may be repeated in a round. With a fifth of all messages lost 3 leave a seventh of the rounds
        undone, 7 hardly any.
    timeout : float, optional
        Seconds for the replies of each exchange; default: the driver's timeout alone.
    payload : str
        "float64", exact, or "float32": type of the vectors of both phases. Solves are in float64 anyway.
    transport : str
        "hub": partitions pass this server. "peers": they go from device to device, by the nodes' own peer addresses or,
        where these have none, by simulated links on this machine.
    spool : path, optional
        Folder of the simulated links; default a temporary one.
    seed : int
        Names the draw of the encoding matrix.
    configrecord_key : str
        Name of the training configuration in the messages of the set-up.

    Raises
    ------
    ConfigError
        For a value out of range, or a code and a density that do not fit.
    """

    partitions: int = 0
    parities: int = 2
    code: str = "balanced"
    density: float = 0.5
    loss: str = "logistic"
    lr: float = 0.1
    l2: float = 0.0
    approximate: bool = False
    retries: int = 7
    timeout: float | None = None
    payload: str = "float64"
    transport: str = "hub"
    spool: str | os.PathLike[str] | None = None
    seed: int = 0
    configrecord_key: str = "config"

    def __post_init__(self) -> None:
        _require_counts(self, "partitions", "parities", "retries")
        # Says what is wrong with a code or density before any node is asked.
        encoding_matrix(self.code, self.parities + 1, 1, density=self.density)
        params.choice("loss", self.loss, LOSSES)
        params.choice("payload", self.payload, VECTOR_TYPES)
        params.choice("transport", self.transport, TRANSPORTS)
        params.positive("lr", self.lr)
        params.number("l2", self.l2, rule="a finite number >= 0", ok=lambda v: 0.0 <= v < float("inf"))
        _require_timeout("timeout", self.timeout)
        _require_spool(self.transport, self.spool)
        params.assign(self, seed=params.seed(self.seed))


def _require_counts(settings: Any, *names: str, low: int = 0) -> None:
    # Written back: whole floats and numpy's numbers became plain integers.
    params.assign(settings, **{name: params.integer(name, getattr(settings, name), low=low) for name in names})


def _require_timeout(name: str, value: float | None) -> None:
    if value is not None:
        params.number(name, value, rule="seconds > 0, or None for the run's timeout", ok=lambda v: v > 0)


def _require_spool(transport: str, spool: str | os.PathLike[str] | None) -> None:
    if spool is not None and transport != "peers":
        raise ConfigError("spool is the folder of simulated links between peers; it needs transport='peers'")
