"""Settings of the coded strategies, in groups: of all constructions, of each of them alone, of coded descent.

Strategies take all of these as keyword arguments: ``CodedFedAvg(inner, code="mds", symbols=7)``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Final, TypeVar

from fedcomp.coding.encodings import CODES as ENCODINGS
from fedcomp.coding.encodings import encoding_matrix
from fedcomp.coding.gradcode import SCHEMES
from fedcomp.coding.gradvalues import ARITHMETICS, values_of
from fedcomp.coding.linearloss import LOSSES
from fedcomp.coding.sumcode import MODES
from fedcomp.errors import ConfigError, nearest
from fedcomp.flower.coded import MAX_STORE_BYTES
from fedcomp.flower.linear import VECTOR_TYPES
from fedcomp.rules import (
    TIMEOUT,
    Configured,
    Density,
    Flag,
    Inside,
    Int,
    Maybe,
    NotNegative,
    OneOf,
    Positive,
    Real,
    Seed,
    Switch,
    Text,
)

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
class CodedSettings(Configured):
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

    construction: Annotated[str, OneOf(*CONSTRUCTIONS)] = "relay"
    code: Annotated[str, OneOf(*CODES)] = "rlnc"
    symbols: Annotated[int, Int()] = 0
    shards: Annotated[int, Int()] = 0
    loss: Annotated[float | None, Maybe(Real(least=0.0, below=1.0))] = None
    target: Inside = 0.999
    threshold: Annotated[int, Int()] = 0
    transport: Annotated[str, OneOf(*TRANSPORTS)] = "hub"
    seal: Annotated[bool | None, Maybe(Flag())] = None
    share_timeout: Annotated[float | None, TIMEOUT] = None
    collect_timeout: Annotated[float | None, TIMEOUT] = None
    max_store_bytes: Annotated[int, Int()] = MAX_STORE_BYTES
    spool: str | os.PathLike[str] | None = None
    seed: Seed = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> CodedSettings:
        """Return the settings of keyword arguments; those without a field of that name are the construction's own."""
        # Without the field itself: an option of that name is unknown, like any other.
        known = {f.name for f in fields(cls)} - {"options"}
        options = {name: value for name, value in given.items() if name not in known}
        return cls(**{name: value for name, value in given.items() if name in known}, options=options)

    def conflict(self) -> str:
        """Only peers have simulated links."""
        return spool_conflict(self.transport, self.spool)

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
class SumOptions(Configured):
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

    mode: Annotated[str, OneOf(*MODES)] = "share"
    weighted: Switch = True
    max_weight: Annotated[int, Int()] = 0
    metrics: Switch = False
    min_contributors: Annotated[int, Int(1)] = 2


@dataclass(frozen=True, kw_only=True)
class GradientOptions(Configured):
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

    losses: Annotated[int, Int()] = 1
    scheme: Annotated[str, OneOf(*SCHEMES)] = "auto"
    arithmetic: Annotated[str, OneOf(*ARITHMETICS)] = "float64"
    limit: Annotated[float, Real(finite=False)] = 128.0
    approximate: Switch = False
    quorum: Annotated[int, Int()] = 0

    def conflict(self) -> str:
        """Answers that do not determine the sum are of use to approximate decoding alone, which not every code has."""
        if self.quorum and not self.approximate:
            return (
                f"quorum={self.quorum} ends a round with answers that may not determine the sum; allow that with "
                "approximate=True, or leave it out"
            )
        # Made for its checks, with the fewest rows there can be: what no field has room for is refused before any
        # round.
        values_of(self.arithmetic, 2, self.limit)
        if self.approximate and self.arithmetic != "float64" and self.scheme != "fractional":
            return (
                "a cyclic code over a field cannot be decoded approximately; use arithmetic='float64', or "
                "scheme='fractional'"
            )
        return ""


@dataclass(frozen=True, kw_only=True)
class LinearSettings(Configured):
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

    partitions: Annotated[int, Int()] = 0
    parities: Annotated[int, Int()] = 2
    code: Annotated[str, OneOf(*ENCODINGS)] = "balanced"
    density: Density = 0.5
    loss: Annotated[str, OneOf(*LOSSES)] = "logistic"
    lr: Positive = 0.1
    l2: NotNegative = 0.0
    approximate: Switch = False
    retries: Annotated[int, Int()] = 7
    timeout: Annotated[float | None, TIMEOUT] = None
    payload: Annotated[str, OneOf(*VECTOR_TYPES)] = "float64"
    transport: Annotated[str, OneOf(*TRANSPORTS)] = "hub"
    spool: str | os.PathLike[str] | None = None
    seed: Seed = 0
    configrecord_key: Annotated[str, Text()] = "config"

    def conflict(self) -> str:
        """Code and density have to fit, which shows before any node is asked; only peers have simulated links."""
        encoding_matrix(self.code, self.parities + 1, 1, density=self.density)
        return spool_conflict(self.transport, self.spool)


def spool_conflict(transport: str, spool: str | os.PathLike[str] | None) -> str:
    """Return why a folder of simulated links does not fit a transport; empty where it does."""
    if spool is None or transport == "peers":
        return ""
    return "spool is the folder of simulated links between peers; it needs transport='peers'"
