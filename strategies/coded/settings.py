"""Settings of the coded strategies, in groups: common ones, those of each construction, those of coded descent.

Strategies take all of these as keyword arguments: ``CodedFedAvg(inner, code="mds", symbols=7)``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Final, TypeVar

from flwr.serverapp.strategy import Strategy

from fedcomp.coding.sumcode import MODES
from fedcomp.errors import ConfigError, nearest
from fedcomp.flower.coded import MAX_STORE_BYTES
from fedcomp.flower.privacy import find_private
from fedcomp.rules import (
    TIMEOUT,
    Configured,
    Inside,
    Int,
    Maybe,
    OneOf,
    Real,
    Seed,
    Switch,
)
from fedcomp.strategies.links import Links
from fedcomp.strategies.private.flower_dp import promises

GRADIENT_CODE: Final = "gradcode"
"""The construction that is :class:`fedcomp.strategies.coded.gradients.GradientCoded`."""

CONSTRUCTIONS: Final = ("relay", "sumcode", GRADIENT_CODE)

TRANSPORTS: Final = ("hub", "peers")
CODES: Final = ("rlnc", "mds")

Options = TypeVar("Options")


@dataclass(frozen=True, kw_only=True)
class CodedSettings(Configured):
    """Settings of every construction of :class:`fedcomp.strategies.coded.strategy.CodedFedAvg`.

    Parameters
    ----------
    construction : {"relay", "sumcode", "gradcode"}
        What is coded, and who adds.
    code : {"rlnc", "mds"}
        Random linear network code, or systematic Cauchy Reed-Solomon code.
    symbols : int
        K: pieces of an update; K + ``threshold`` shards decode. 0 chooses it.
    shards : int
        N: shards that are made, one per relay. 0: one for every client of the round, as many as the code has.
    loss, target : float
        Fraction of relays that is expected to vanish, and the probability with which decoding must still succeed; K or
        N follows from them where it is not given.
    threshold : int
        T, the privacy threshold of secret sharing: any T relays together learn nothing of an update, and K + T shards
        decode (not T). 0 hides nothing. Construction ``relay`` needs the code ``mds`` for it.
    transport : {"hub", "peers"}
        Shards travel through the server's messages, or from client to client.
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
    share_timeout: Annotated[float | None, TIMEOUT] = None
    collect_timeout: Annotated[float | None, TIMEOUT] = None
    max_store_bytes: Annotated[int, Int()] = MAX_STORE_BYTES
    spool: str | os.PathLike[str] | None = None
    seed: Seed = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def of_code(self) -> dict[str, Any]:
        """Return what a coded system takes of these, whatever its construction."""
        names = ("symbols", "shards", "threshold", "loss", "target", "share_timeout", "collect_timeout")
        found = {name: getattr(self, name) for name in names}
        # No time at all is the run's own.
        return {name: None if value == math.inf else value for name, value in found.items()}

    def links(self) -> Links | None:
        """Return what brings shards from client to client; None where they pass the server."""
        if self.transport == "hub":
            return None
        return Links(self.spool, max_store_bytes=self.max_store_bytes)

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
        return kind(**self.among([f.name for f in fields(kind)]))  # type: ignore[arg-type]

    def among(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the construction's own options; raise :class:`ConfigError` for one that is not among ``names``."""
        for name in self.options:
            if name not in names:
                raise ConfigError(f"construction {self.construction!r} has no option {name!r}{nearest(name, names)}")
        return dict(self.options)


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


def spool_conflict(transport: str, spool: str | os.PathLike[str] | None) -> str:
    """Return why a folder of simulated links does not fit a transport; empty where it does."""
    if spool is None or transport == "peers":
        return ""
    return "spool is the folder of simulated links between peers; it needs transport='peers'"


def require_may_be_coded(inner: Strategy, construction: str) -> None:
    """Refuse a strategy whose clients may hand what they send to nobody but the server.

    Raises
    ------
    ConfigError
    """
    promise = find_private(inner)
    # Without a promise there is none that coding could break.
    may_be_coded = getattr(promise, "may_be_coded", lambda construction: True)
    if not may_be_coded(construction) or promises(inner):
        raise ConfigError(
            f"{type(promise or inner).__name__} trusts the server with updates but not other clients, which act as "
            f"relays in construction {construction!r} are; use distributed_dp() or local_dp()"
        )
