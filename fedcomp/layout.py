"""Update and Layout: one flat float32 vector, and the map from tensors to its slices.

The vector holds the tensors a codec may compress first and the tensors that travel dense after them, so that a
codec that ranks the whole model sees one contiguous stretch and the dense rest is one slice. Per-tensor views are
slices, never copies. Integer and boolean buffers and normalisation statistics are not in the vector at all: they
travel beside it, as values, exactly (``Layout.exact``).
"""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Annotated, Any, Final, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fedcomp.device import room_beside
from fedcomp.errors import ConfigError, LayoutError, nearest
from fedcomp.factors.outer import OuterProducts
from fedcomp.rules import Configured, Int, Share
from fedcomp.wire import DTYPES

Vector = NDArray[np.float32]

DENSE: Final = 1.0
"""The density that means "send every element, uncompressed"."""

_PIECE: Final = 1 << 16

EXACT: Final = "exact"
"""The answer of a policy that keeps a float tensor out of the vector: it travels beside it, as a value of its own."""

Density = float | Literal["exact"] | None
DensityPolicy = Callable[[str, tuple[int, ...], str], Density]
"""``policy(name, shape, dtype) -> density``: ``None`` leaves the choice to the codec, ``1.0`` sends the tensor dense,
a number between asks a per-tensor codec for that density, ``"exact"`` sends the value itself instead of a change."""


@dataclass(frozen=True, slots=True)
class TensorShape:
    """What a policy may know of a tensor: its shape and the name of its dtype."""

    shape: tuple[int, ...]
    dtype: str


@runtime_checkable
class ModelPolicy(Protocol):
    """A density policy that needs the whole model before it can decide about one tensor."""

    def fit(self, model: Mapping[str, TensorShape]) -> DensityPolicy:
        """Return the policy for this model. It must depend on names, shapes and dtypes alone, never on values."""
        ...


def fitted(policy: DensityPolicy | None, model: Mapping[str, TensorShape]) -> DensityPolicy:
    """Return what decides about the tensors of ``model``, given in its own order: :class:`SmallDense` for None."""
    policy = SmallDense() if policy is None else policy
    return policy.fit(model) if isinstance(policy, ModelPolicy) else policy


@dataclass(frozen=True, slots=True)
class SmallDense(Configured):
    """A density policy: small tensors are sent dense while they cost little, and statistics are sent as values.

    Sparsification harms a small tensor (bias, scale) more than a large one, but the cost of sending it dense depends on
    the model: a thousand values are negligible beside a million, but not in a model of adapters. So the smallest
    tensors are sent dense, in ascending order of size and with all tensors of one size or none, as long as together
    they hold at most ``share`` of the model's values and each has fewer than ``min_size``.

    Tensors whose name matches one of ``patterns`` are running statistics, not gradients: error feedback would apply a
    lost change twice, which can turn a variance negative. If names are only positions ("0", "1", ...), torch's batch
    normalisation is recognised by its shapes: two vectors of equal length followed by an integer scalar. Other
    frameworks' statistics cannot be recognised then.

    Parameters
    ----------
    min_size : int
        Tensors of at least this many values are never sent dense.
    patterns : tuple of str
        Shell patterns of the names of statistics.
    share : float
        The largest fraction of all values, not counting statistics, that may be sent dense, in [0, 1]. With 1.0 only
        ``min_size`` decides.

    Examples
    --------
    >>> model = {"weight": TensorShape((300, 300), "float32"), "bias": TensorShape((300,), "float32")}
    >>> SmallDense().fit(model)("bias", (300,), "float32")
    1.0
    >>> adapters = {f"lora_{i}": TensorShape((4, 192), "float32") for i in range(48)}
    >>> SmallDense().fit(adapters)("lora_0", (4, 192), "float32") is None
    True
    """

    min_size: Annotated[int, Int()] = 1024
    patterns: tuple[str, ...] = (
        "*running_mean",  # torch
        "*running_var",
        "*num_batches_tracked",
        "*moving_mean",  # Keras, MXNet
        "*moving_var",
        "*moving_variance",
        "*batch_stats*",  # Flax
        "*mean_ema*",  # Haiku
        "*var_ema*",
        "*._mean",  # Paddle
        "*._variance",
    )
    share: Share = 0.01

    def fit(self, model: Mapping[str, TensorShape]) -> SmallDense:
        """Return the policy whose ``min_size`` and ``patterns`` are those of this model; its share is 1."""
        return _fitted(self, tuple(model.items()))

    def _fit(self, model: Mapping[str, TensorShape]) -> SmallDense:
        known = replace(self, patterns=self.patterns + _positional_statistics(model), share=1.0)
        sizes = Counter(
            math.prod(t.shape)
            for name, t in model.items()
            if np.dtype(t.dtype).kind == "f" and known(name, t.shape, t.dtype) != EXACT
        )
        allowed = self.share * sum(size * count for size, count in sizes.items())
        limit, dense = 0, 0
        for size in sorted(sizes):
            dense += size * sizes[size]
            if size >= self.min_size or dense > allowed:
                break
            limit = size + 1
        return replace(known, min_size=limit)

    def __call__(self, name: str, shape: tuple[int, ...], dtype: str) -> Density:
        """Return "exact" for statistics, 1.0 for tensors below ``min_size``, else None; ``share`` needs :meth:`fit`."""
        if _fits_any(name, self.patterns):
            return EXACT
        return DENSE if math.prod(shape) < self.min_size else None


NONE_DENSE: Final = SmallDense(share=0.0)
"""The default of the drop-in pair: the codec gets every tensor but the statistics. One value in a
hundred sent dense would be a fourth of a frame of one bit per value, and three fourths of one that lists a hundredth of
the values in two bits each."""


# Every message of a run asks again for the same model. Bounded, since a server may announce any.
@lru_cache(64)
def _fitted(policy: SmallDense, model: tuple[tuple[str, TensorShape], ...]) -> SmallDense:
    return policy._fit(dict(model))


@lru_cache(4096)
def _fits_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def finite(array: NDArray[Any]) -> bool:
    """Whether an array of floats holds neither NaN nor infinity; one fast pass when it does not."""
    with np.errstate(over="ignore", invalid="ignore"):
        # The sum of finite values may overflow, and is not finite where one of them is not.
        return bool(np.isfinite(array.sum()) or np.isfinite(array).all())


def named_by_position(names: Iterable[str]) -> bool:
    """Whether tensors are called "0", "1", ..., as in an ArrayRecord made of a list: names that say nothing."""
    names = list(names)
    return bool(names) and all(name.isdecimal() for name in names)


def may_be_variance(tensor: TensorSpec) -> bool:
    """Whether a tensor may be a running variance: a vector with such a name, or with one that says nothing."""
    last = tensor.name.replace("/", ".").rpartition(".")[2].lower()
    return len(tensor.shape) == 1 and (tensor.name.isdecimal() or "var" in last)


def hold_variances(before: Mapping[str, NDArray[Any]], after: Mapping[str, NDArray[Any]]) -> list[str]:
    """Put back the old value of variances that are no longer positive; return the names of their tensors.

    A variance that is compressed like a weight can turn negative: what error feedback kept back arrives after the
    variance has moved on. A vector without negative values, more than half of them positive, is taken for one (a dead
    unit's variance is exactly zero); if it is not, its values that would cross zero stay for a round.

    Parameters
    ----------
    before, after : mapping of name to array
        What :func:`may_be_variance` selects, before and after an aggregation; arrays of ``after`` are written to.
    """
    held = []
    for name, new in after.items():
        old = before[name]
        crossed = (new < 0) | ((new == 0) & (old > 0))
        if (old >= 0).all() and 2 * np.count_nonzero(old) > old.size and crossed.any():
            new[crossed] = old[crossed]
            held.append(name)
    return held


def hold_in_step(step: Vector, layout: Layout, model: Vector) -> list[str]:
    """Set to 0 what a ``step``, to be added to ``model``, would do to variances; return the names of their tensors."""
    suspects = [t for t in layout.compressed if may_be_variance(t)]
    before = {t.name: model[t.slice] for t in suspects}
    after = {t.name: model[t.slice] + step[t.slice] for t in suspects}
    held = hold_variances(before, after)
    for t in suspects:
        if t.name in held:
            step[t.slice][after[t.name] == before[t.name]] = 0.0
    return held


def note_of_held(held: list[str]) -> str:
    """Return what a report says of variances that were held."""
    return (
        f"values of {', '.join(held[:5])}{' ...' if len(held) > 5 else ''} would no longer have been positive and keep "
        "what they were: if these are running variances, name them so that they travel as values (see SmallDense), or "
        "pass a policy that returns 'exact' for them"
    )


def _positional_statistics(model: Mapping[str, TensorShape]) -> tuple[str, ...]:
    """Return the names of torch's running means and variances for a model without names."""
    if not named_by_position(model):
        return ()
    found: list[str] = []
    items = list(model.items())
    for (mean, first), (variance, second), (_, counter) in zip(items, items[1:], items[2:], strict=False):
        vectors = len(first.shape) == 1 and first == second and np.dtype(first.dtype).kind == "f"
        if vectors and counter.shape == () and np.dtype(counter.dtype).kind == "i":
            found += [mean, variance]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class EndsDense(Configured):
    """A density policy that sends the model's first and last layers dense.

    Parameters
    ----------
    first, last : int
        Number of tensors at either end of the model that are sent dense, not counting statistics. A layer's weights and
        its bias are two tensors.
    others : density policy, optional
        Decides about all other tensors; default :class:`SmallDense`.

    Examples
    --------
    >>> shape = TensorShape((300, 300), "float32")
    >>> policy = EndsDense(first=1).fit({"first": shape, "second": shape})
    >>> [policy(name, shape.shape, shape.dtype) for name in ("first", "second")]
    [1.0, None]
    """

    first: Annotated[int, Int()] = 1
    last: Annotated[int, Int()] = 0
    others: DensityPolicy | None = None

    def fit(self, model: Mapping[str, TensorShape]) -> TablePolicy:
        """Return the decisions for this model."""
        decide = fitted(self.others, model)
        table = {name: decide(name, t.shape, t.dtype) for name, t in model.items() if np.dtype(t.dtype).kind == "f"}
        weights = [name for name, density in table.items() if density != EXACT]
        last = weights[max(0, len(weights) - self.last) :]
        return TablePolicy({**table, **dict.fromkeys((*weights[: self.first], *last), DENSE)})

    def __call__(self, name: str, shape: tuple[int, ...], dtype: str) -> Density:
        """Refused: which tensors are the first is known of the whole model only, see :meth:`fit`."""
        raise ConfigError("EndsDense decides about whole models; use fit(model)")


@dataclass(frozen=True, slots=True)
class TablePolicy:
    """A density policy spelled out by name: what a custom policy of the server becomes when it travels to clients."""

    table: Mapping[str, Density]

    def __call__(self, name: str, shape: tuple[int, ...], dtype: str) -> Density:
        """Return the tensor's density, None for tensors the table leaves to the codec."""
        return self.table.get(name)


def policy_config(policy: DensityPolicy | None, layout: Layout) -> dict[str, Any]:
    """Return the JSON-able form of ``policy`` for the model of ``layout``; empty for ``SmallDense()``, and for None."""
    if policy is None:
        return {}
    if type(policy) is SmallDense:  # a subclass may decide otherwise, and travels as its decisions
        default = SmallDense()
        settings = {"min_size": policy.min_size, "patterns": list(policy.patterns), "share": policy.share}
        # It is in every message of a run.
        return {name: value for name, value in settings.items() if getattr(policy, name) != getattr(default, name)}
    # Asked again instead of read from the layout, which also knows reasons of its own to keep a tensor exact.
    decide = fitted(policy, layout.shapes)
    floats = [t for t in (*layout.tensors, *layout.exact) if np.dtype(t.dtype).kind == "f"]
    decided = {t.name: decide(t.name, t.shape, t.dtype) for t in floats}
    return {"table": {name: density for name, density in decided.items() if density is not None}}


def _texts(given: Iterable[Any]) -> tuple[str, ...]:
    return tuple(map(str, given))


def policy_from_config(config: Mapping[str, Any]) -> DensityPolicy:
    """Recreate the policy that :func:`policy_config` described.

    Raises
    ------
    ConfigError
        When the description is not one that :func:`policy_config` writes.
    """
    try:
        if "table" in config:
            return TablePolicy({str(n): EXACT if d == EXACT else float(d) for n, d in config["table"].items()})
        read: dict[str, Callable[[Any], Any]] = {"min_size": int, "patterns": _texts, "share": float}
        return SmallDense(**{name: read[name](value) for name, value in config.items()})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"cannot read a density policy from {dict(config)!r}; expected 'table', or any of 'min_size', 'patterns' "
            "and 'share'"
        ) from error


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the vector: its position and its treatment."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    size: int
    density: float | None = None

    @property
    def slice(self) -> slice:
        """The tensor's stretch of the flat vector."""
        return slice(self.offset, self.offset + self.size)

    @property
    def is_dense(self) -> bool:
        """Whether the tensor travels uncompressed."""
        return self.density == DENSE


# A dtype works its name out at every access.
@lru_cache(64)
def _name_of(dtype: np.dtype[Any]) -> str:
    return dtype.name


# One object for equal layouts, which every message makes anew: what it has worked out is there for the next one, and
# so is what codecs keep for the layout they saw last.
@lru_cache(64)
def _shared(layout: Layout) -> Layout:
    return layout


@dataclass(frozen=True)
class Layout:
    """Names, shapes and offsets of a model's tensors in one flat float32 vector.

    Parameters
    ----------
    tensors : tuple of TensorSpec
        Compressible tensors first, dense ones after, each group in the model's own order, offsets contiguous.
    exact : tuple of TensorSpec
        Integer and boolean buffers and statistics, carried beside the vector as they are, in their own dtype; their
        offsets are meaningless (0).
    order : tuple of str
        All names in the model's own order.

    Examples
    --------
    >>> model = {"weight": np.ones((300, 300), np.float32), "bias": np.zeros(300, np.float32), "steps": np.array(3)}
    >>> layout = Layout.of(model)
    >>> layout.size, layout.compressed_size, [t.name for t in layout.exact]
    (90300, 90000, ['steps'])
    >>> layout.unflatten(layout.flatten(model))["weight"].shape
    (300, 300)
    """

    tensors: tuple[TensorSpec, ...]
    exact: tuple[TensorSpec, ...] = ()
    order: tuple[str, ...] = field(default=())

    @classmethod
    def of(
        cls,
        arrays: Mapping[str, NDArray[Any]],
        policy: DensityPolicy | None = None,
        *,
        cast_floats: bool = True,
    ) -> Layout:
        """Lay out the named ``arrays``.

        Parameters
        ----------
        arrays : mapping of name to ndarray
            A model's tensors, in order.
        policy : DensityPolicy, optional
            Decides per tensor; default :class:`SmallDense`.
        cast_floats : bool
            Whether float16 and float64 tensors are carried in the float32 vector (True) or exactly, beside it (False,
            for lossless codecs). A tensor with non-finite values is always carried exactly.

        Raises
        ------
        ConfigError
            When a dtype cannot travel, or the policy returns a density outside (0, 1].
        """
        shapes = {n: TensorShape(tuple(a.shape), _name_of(a.dtype)) for n, a in arrays.items()}
        # Before any policy looks at them: of some dtypes numpy cannot read the name.
        for name, shape in shapes.items():
            dtype = shape.dtype
            if dtype not in DTYPES.values():
                raise ConfigError(
                    f"tensor {name!r} is {dtype}, which cannot travel; supported: {', '.join(DTYPES.values())}. "
                    "Convert it before it is sent (bfloat16 to float32, complex numbers to pairs of floats)"
                )
            if dtype == "uint16":
                # numpy has no bfloat16: its bits travel as these, and the mean of bits is no mean of values.
                raise ConfigError(
                    f"tensor {name!r} is uint16, which cannot be averaged: the bits of bfloat16 look like that. "
                    "Convert it before it is sent (bfloat16 to float32, whole numbers to int32)"
                )
        decide = fitted(policy, shapes)
        compressed: list[tuple[str, NDArray[Any], float | None]] = []
        dense: list[tuple[str, NDArray[Any], float | None]] = []
        exact: list[TensorSpec] = []
        for name, array in arrays.items():
            dtype = shapes[name].dtype
            # Infinities in a model are constants (attention masks), not something to take differences of.
            in_vector = dtype == "float32" or (cast_floats and array.dtype.kind == "f")
            in_vector = in_vector and finite(array)
            density = decide(name, tuple(array.shape), dtype) if in_vector else EXACT
            if density == EXACT:
                exact.append(TensorSpec(name, tuple(array.shape), dtype, 0, int(array.size), DENSE))
                continue
            if density is not None and not 0.0 < density <= 1.0:
                raise ConfigError(
                    f"density policy returned {density!r} for tensor {name!r}; "
                    "expected None, 'exact' or a number in (0, 1]"
                )
            (dense if density == DENSE else compressed).append((name, array, density))
        tensors: list[TensorSpec] = []
        offset = 0
        for name, array, density in compressed + dense:
            tensors.append(TensorSpec(name, shapes[name].shape, shapes[name].dtype, offset, int(array.size), density))
            offset += int(array.size)
        return _shared(cls(tuple(tensors), tuple(exact), tuple(arrays)))

    @classmethod
    def flat(cls, size: int, name: str = "vector", density: float | None = None) -> Layout:
        """Return the layout of a single 1-D float32 tensor of ``size`` elements (tests, benchmarks, examples)."""
        return cls((TensorSpec(name, (size,), "float32", 0, size, density),), (), (name,))

    @cached_property
    def size(self) -> int:
        """Number of elements of the vector."""
        return sum(t.size for t in self.tensors)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a model whose vector travels as float32, with what travels exactly."""
        return 4 * self.size + sum(t.size * np.dtype(t.dtype).itemsize for t in self.exact)

    @cached_property
    def compressed(self) -> tuple[TensorSpec, ...]:
        """The tensors a codec may compress."""
        return tuple(t for t in self.tensors if not t.is_dense)

    @cached_property
    def compressed_size(self) -> int:
        """Number of elements a codec may compress; they are ``vector[:compressed_size]``."""
        return sum(t.size for t in self.compressed)

    @property
    def dense_size(self) -> int:
        """Number of elements that travel dense; they are ``vector[compressed_size:]``."""
        return self.size - self.compressed_size

    @cached_property
    def by_name(self) -> dict[str, TensorSpec]:
        """All tensors and exact buffers by name."""
        return {t.name: t for t in (*self.tensors, *self.exact)}

    @property
    def shapes(self) -> dict[str, TensorShape]:
        """Shape and dtype of every tensor and buffer, in the model's own order."""
        return {name: TensorShape(self.by_name[name].shape, self.by_name[name].dtype) for name in self.order}

    @cached_property
    def digest(self) -> bytes:
        """Eight bytes that both ends can compare: SHA-256 over names, shapes, dtypes, densities, groups and order."""
        # Against mistakes: two ends that hold different models. Eight bytes do not stop somebody who looks for a
        # collision.
        return hashlib.sha256(self.text.encode()).digest()[:8]

    @cached_property
    def text(self) -> str:
        """All that the layout consists of, as :meth:`from_text` reads it."""
        groups = [[[t.name, t.shape, t.dtype, t.density] for t in group] for group in (self.tensors, self.exact)]
        return json.dumps([*groups, self.order])

    @classmethod
    def from_text(cls, text: str) -> Layout:
        """Return the layout whose :attr:`text` this is."""
        tensors, exact, order = json.loads(text)
        sizes = [math.prod(shape) for _, shape, _, _ in tensors]
        offsets = itertools.accumulate(sizes, initial=0)
        return _shared(
            cls(
                tuple(
                    TensorSpec(name, tuple(shape), dtype, offset, size, density)
                    for (name, shape, dtype, density), offset, size in zip(tensors, offsets, sizes, strict=False)
                ),
                tuple(TensorSpec(n, tuple(shape), dtype, 0, math.prod(shape), d) for n, shape, dtype, d in exact),
                tuple(order),
            )
        )

    def flatten(self, arrays: Mapping[str, NDArray[Any]], out: Vector | None = None) -> Vector:
        """Copy the float tensors of ``arrays`` into one float32 vector of shape ``(size,)``.

        Raises
        ------
        LayoutError
            When a tensor is missing, unknown, or has another shape than laid out.
        """
        self.check(arrays)
        vector = np.empty(self.size, np.float32) if out is None else out
        for t in self.tensors:
            vector[t.slice] = np.asarray(arrays[t.name]).reshape(-1)
        return vector

    def add_model(self, arrays: Mapping[str, NDArray[Any]], change: Vector) -> int:
        """Add a model's tensors to a ``change`` of it, in place, as :meth:`flatten` would lay them out.

        Returns
        -------
        int
            How many values of the compressed part the change was not zero at.
        """
        changed = 0
        for t in self.tensors:
            own, part = np.asarray(arrays[t.name]).reshape(-1), change[t.slice]
            # Piece by piece: the second look finds it in the processor's cache.
            for start in range(0, t.size, _PIECE):
                piece = part[start : start + _PIECE]
                if not t.is_dense:
                    changed += int(np.count_nonzero(piece != 0.0))
                np.add(own[start : start + _PIECE].astype(np.float32, copy=False), piece, out=piece)
        return changed

    @cached_property
    def wide(self) -> tuple[TensorSpec, ...]:
        """The tensors of the vector whose own dtype holds more than float32 does: changes of them are added to the
        model as it is, which the vector only rounds."""
        return tuple(t for t in self.tensors if t.dtype == "float64")

    def difference(
        self, after: Mapping[str, NDArray[Any]], before: Mapping[str, NDArray[Any]], out: Vector | None = None
    ) -> Vector:
        """Return ``after - before``, formed in each tensor's own dtype and only then rounded to float32; where the
        tensors of ``after`` are, on the host or on a device.

        Raises
        ------
        LayoutError
            As :meth:`flatten`.
        """
        self.check(after)
        vector: Vector = room_beside(after.values(), self.size) if out is None else out
        with np.errstate(over="ignore", invalid="ignore"):
            for t in self.tensors:
                wide = np.float64 if t.dtype == "float64" else np.float32
                part = vector[t.slice].reshape(t.shape)
                np.subtract(after[t.name], before[t.name], out=part, dtype=wide, casting="unsafe")
        return vector

    def difference_of_wide(
        self, vector: Vector, after: Mapping[str, NDArray[Any]], before: Mapping[str, NDArray[Any]]
    ) -> None:
        """Set the elements of :attr:`wide` tensors in ``vector`` to what changed of them."""
        for t in self.wide:
            change = np.subtract(after[t.name], before[t.name], dtype=np.float64)
            with np.errstate(over="ignore"):
                vector[t.slice] = change.reshape(-1)

    def added(
        self,
        model: Mapping[str, NDArray[Any]],
        changes: Mapping[str, NDArray[Any]],
        vector: Vector,
        exact: Mapping[str, NDArray[Any]],
    ) -> dict[str, NDArray[Any]]:
        """Return the tensors of ``vector``, but of those in ``changes`` the model's own with these added."""
        wide = {name: np.asarray(model[name] + change.reshape(model[name].shape)) for name, change in changes.items()}
        found = self.unflatten(vector, exact)
        return {name: wide.get(name, array) for name, array in found.items()}

    def unflatten(self, vector: Vector, exact: Mapping[str, NDArray[Any]] | None = None) -> dict[str, NDArray[Any]]:
        """Return the named tensors in the model's own order and dtypes; float32 ones are views of ``vector``.

        Exact buffers are taken from ``exact``; they are left out when it is None.
        """
        if vector.shape != (self.size,):
            raise LayoutError(f"vector has shape {vector.shape}, the layout needs ({self.size},)")
        out: dict[str, NDArray[Any]] = {}
        beside = {t.name for t in self.exact}
        for name in self.order:
            t = self.by_name[name]
            if name in beside:
                if exact is not None:
                    out[name] = exact[name]
            else:
                view = vector[t.slice].reshape(t.shape)
                out[name] = view if t.dtype == "float32" else view.astype(t.dtype)
        return out

    def round_to_dtypes(self, vector: Vector) -> None:
        """Round the elements of ``vector`` in place to what the tensors' own dtypes can hold (float16)."""
        for t in self.tensors:
            if t.dtype == "float16":
                vector[t.slice] = vector[t.slice].astype(np.float16)

    def view(self, vector: Vector, name: str) -> Vector:
        """Return the named tensor as a view of ``vector`` in its own shape."""
        t = self.by_name.get(name)
        if t is None:
            raise LayoutError(f"no tensor {name!r} in the layout{nearest(name, self.by_name)}")
        return vector[t.slice].reshape(t.shape)

    def check(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Raise :class:`LayoutError` unless ``arrays`` has exactly the laid out names and shapes."""
        missing = [n for n in self.order if n not in arrays]
        extra = [n for n in arrays if n not in self.by_name]
        if missing or extra:
            raise LayoutError(
                f"the model's tensors changed: missing {missing[:5]}, unexpected {extra[:5]}; "
                "sender and receiver must hold the same model"
            )
        for t in (*self.tensors, *self.exact):
            if tuple(arrays[t.name].shape) != t.shape:
                raise LayoutError(
                    f"tensor {t.name!r} has shape {tuple(arrays[t.name].shape)}, expected {t.shape}; "
                    "sender and receiver must hold the same model"
                )


@dataclass(frozen=True, slots=True)
class Update:
    """One flat float32 vector plus its layout. The vector belongs to its creator; codecs never write to it, unless
    ``given`` is set.

    Attributes
    ----------
    vector : float32 array, shape (layout size,)
    layout : Layout
    outer : mapping of name to OuterProducts
        For matrices where it is known: the outer products whose sum they are, up to float32 rounding. Code that changes
        the vector must drop it.
    given : bool
        The vector is finite, and the encoding codec may overwrite it, because it is not used afterwards.
    """

    vector: Vector
    layout: Layout
    outer: Mapping[str, OuterProducts] = field(default_factory=dict)
    given: bool = False

    def __post_init__(self) -> None:
        if self.vector.dtype != np.float32 or self.vector.shape != (self.layout.size,):
            raise LayoutError(
                f"update vector is {self.vector.dtype}{self.vector.shape}, "
                f"the layout needs float32({self.layout.size},)"
            )
