"""Settings of graph learning: the sampler, the transport of feature rows, and a client's work per round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final

from fedcomp.errors import ConfigError
from fedcomp.graphs.cache import POLICIES
from fedcomp.graphs.inclusion import WEIGHTS
from fedcomp.graphs.rowcodecs import ROW_CODECS
from fedcomp.graphs.scale import MODES
from fedcomp.params import shown, similar
from fedcomp.rules import TIMEOUT, AboveZero, Configured, Int, Made, Many, NotNegative, OneOf, Real, Switch, checked

SAMPLERS: Final = ("skewed", "node", "ladies", "fastgcn", "boundary", "local", "full")
ESTIMATORS: Final = ("poisson", "multinomial")
FAVOURED: Final = ("owned", "halo")
EVALUATIONS: Final = ("full", "sampled")

CACHE_BYTES: Final = 64 * 1024 * 1024
"""Default limit of a client's cache of the policy "lru"."""

MOST_STEPS: Final = 65_536
"""Steps a round may ask for: plans of all of them are in memory at once."""

_LARGEST: Final = 1e9
"""Largest budget or scale; less favoured nodes keep a probability that 53 random bits can distinguish from 0."""

MOST_LAYERS: Final = 64
"""Layers of a network."""

_MOST: Final = 1 << 31
"""Largest n and fanout; no layer has more candidates."""

_Columns = Annotated[int, Int(1, _MOST)]

_Scale = Annotated[float, Real(least=1.0, most=_LARGEST)]


def _columns(n: Any) -> Any:
    return checked("n", n, Many(Int(1, _MOST), MOST_LAYERS) if isinstance(n, list | tuple) else Int(1, _MOST))


@dataclass(frozen=True)
class SamplerSettings(Configured):
    """How the columns of every layer are chosen. Immutable and comparable; travels as :meth:`to_config`.

    A setting applies to the samplers that are named with it and has no effect on the others, so that samplers can be
    compared by changing one word. "skewed" is after Jiang and Rumi (arXiv 2101.07706, abstract); the rules of ``mode``
    are derived here. The unskewed sampler is ``mode="fixed", scale=1``.

    Parameters
    ----------
    sampler : str
        "skewed": layer-wise, owned candidates favoured. "node": every row draws among its own neighbours, owned ones
        favoured. "ladies" and "fastgcn": as published, nothing favoured. "boundary": all owned candidates, and each
        remote one with probability ``q``. "local": owned candidates only. "full": all.
    n : int or tuple of int
        skewed, ladies, fastgcn: columns per layer, input layer first; one number is for all of them. Expected number
        kept (Poisson), number of draws (multinomial, fastgcn) or number kept (ladies).
    fanout : int
        node: the same for one row.
    estimator : str
        skewed, node: "poisson" keeps each column at most once and weighs by the inverse inclusion probability, and is
        exact once ``n`` reaches the number of candidates; "multinomial" draws with replacement, and never is.
    weight : str
        skewed: base weight of a column, "l1", "count" or "l2sq" (:func:`~fedcomp.graphs.inclusion.base_weight`).
        Lost mass is reported in it for every sampler.
    mode : str
        skewed, node: rule of the scale (:func:`~fedcomp.graphs.scale.scale`).
    budget : float
        D >= 1 of the modes that have a budget.
    scale : float
        s >= 1 of mode "fixed".
    s_max : float
        Largest scale of any mode.
    keep_self : bool
        skewed, ladies, fastgcn, node: the own columns of owned rows are always kept, with weight 1, and count neither
        towards ``n`` nor in the weights. A kept column that other rows of the batch use has weight 1 there too (node:
        there each row draws for itself).
    favour : str
        skewed, node: who is favoured j layers above the input layer. "owned": owned nodes at every layer. "halo":
        nodes within j hops of an owned one, along rows of P.
    q : float
        boundary: probability of a remote candidate, in (0, 1].
    renormalise : bool
        ladies: whether every row is scaled to the sum that P's row has. The published code scales rows of a P with row
        sums 1 to sum 1, which is the same.
    layers : int
        Layers of the network, at least 1.

    Raises
    ------
    ConfigError
        For an unknown name, a number out of range, or a tuple ``n`` of another length than ``layers``.

    Examples
    --------
    >>> SamplerSettings(n=(512, 256), budget=1.5).draws(1)
    256
    >>> SamplerSettings(sampler="ladies").biased
    'draws without replacement and weighs as if it were with replacement'
    """

    sampler: Annotated[str, OneOf(*SAMPLERS)] = "skewed"
    n: Annotated[int | tuple[int, ...], Made(_columns)] = 512
    fanout: _Columns = 5
    estimator: Annotated[str, OneOf(*ESTIMATORS)] = "poisson"
    weight: Annotated[str, OneOf(*WEIGHTS)] = "l1"
    mode: Annotated[str, OneOf(*MODES)] = "matched"
    budget: _Scale = 1.5
    scale: _Scale = 1.0
    s_max: _Scale = 16.0
    keep_self: Switch = False
    favour: Annotated[str, OneOf(*FAVOURED)] = "owned"
    q: AboveZero = 0.1
    renormalise: Switch = False
    layers: Annotated[int, Int(1, MOST_LAYERS)] = 2

    def conflict(self) -> str:
        """Several numbers of columns are one for each layer."""
        if isinstance(self.n, int) or len(self.n) == self.layers:
            return ""
        return (
            f"n={shown(self.n)} has {len(self.n)} numbers for {self.layers} layers; give one per layer, input layer "
            "first, or one number for all"
        )

    def draws(self, layer: int) -> int:
        """Return ``n`` of a layer; 0 is the input layer."""
        return self.n[layer] if isinstance(self.n, tuple) else self.n

    @property
    def skews(self) -> bool:
        """Whether the sampler favours anything, so that ``mode`` and ``favour`` have an effect."""
        return self.sampler in ("skewed", "node")

    @property
    def measures(self) -> bool:
        """Whether the sampler uses norms of what nodes contribute to a layer."""
        return self.skews and self.mode == "measured"

    @property
    def biased(self) -> str:
        """Why the expectation of a layer differs from the sum over all neighbours; empty when it does not."""
        if self.sampler == "ladies":
            also = ", and divides by a random row sum" if self.renormalise else ""
            return f"draws without replacement and weighs as if it were with replacement{also}"
        if self.sampler == "local":
            return "leaves out every neighbour that another owner has"
        return ""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SamplerSettings:
        """Return the settings that :meth:`to_config` described; what is not named has its default.

        Raises
        ------
        ConfigError
            For an unknown name or a value out of range.
        """
        known = [one.name for one in fields(cls)]
        for name in config:
            if name not in known:
                raise ConfigError(f"a sampler has no setting {shown(name)}{similar(str(name), known)}")
        return cls(**config)


@dataclass(frozen=True)
class RowSettings(Configured):
    """How feature rows travel between owners, and which of them a client keeps.

    Parameters
    ----------
    codec : str
        How rows are written; see :func:`fedcomp.graphs.rowcodecs.get_row_codec`.
    cache : {"none", "lru", "all"}
        Which rows of other owners a client keeps.
    cache_bytes : int
        Limit of "lru", in bytes; no effect on the others.
    dedupe : bool
        Fetch a row once for all clients that want it in the same round. The server then reads frames and takes rows out
        of them.
    noise : float
        Standard deviation of the Gaussian noise that an owner adds to its rows. This is not differential privacy:
        nothing is clipped or accounted for.

    Raises
    ------
    ConfigError
        For an unknown name or a number out of range.

    Examples
    --------
    >>> RowSettings(codec="auto", cache="lru", cache_bytes=1 << 20).limit
    1048576
    """

    codec: Annotated[str, OneOf(*ROW_CODECS)] = "dense-f32"
    cache: Annotated[str, OneOf(*POLICIES)] = "none"
    cache_bytes: Annotated[int, Int(1)] = CACHE_BYTES
    dedupe: Switch = False
    noise: NotNegative = 0.0

    @property
    def limit(self) -> int:
        """Bytes that a client's cache may hold; 0 where there is no limit."""
        return self.cache_bytes if self.cache == "lru" else 0


@dataclass(frozen=True)
class RoundSettings(Configured):
    """What a round asks of a client.

    Parameters
    ----------
    local_steps : int
        SGD steps. With one step, and updates weighted by batch sizes, training is synchronous data-parallel SGD on the
        union of the batches; with more it is local SGD.
    batch_size : int
        Training nodes of a step; 0 takes all.
    evaluate : {"full", "sampled"}
        Whether clients evaluate with all neighbours, or with the sampler of training.
    timeout : float, optional
        Seconds to wait for the replies of each exchange; default: the driver's timeout alone.

    Raises
    ------
    ConfigError
        For an unknown name or a number out of range.

    Examples
    --------
    >>> RoundSettings(local_steps=4).method
    'local SGD, 4 steps a round'
    """

    local_steps: Annotated[int, Int(1, MOST_STEPS)] = 1
    batch_size: Annotated[int, Int()] = 128
    evaluate: Annotated[str, OneOf(*EVALUATIONS)] = "full"
    timeout: Annotated[float | None, TIMEOUT] = None

    @property
    def method(self) -> str:
        """What training is equivalent to."""
        if self.local_steps == 1:
            return "synchronous data-parallel SGD"
        return f"local SGD, {self.local_steps} steps a round"
