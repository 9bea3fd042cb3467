"""Factors instead of gradients: a layer's inputs and output gradients are sent in place of their product.

Baker, Khanal, Calhoun, Pearlmutter, Plis, "Peering Beyond the Gradient Veil with Distributed Auto Differentiation"
(first version: "Efficient Distributed Auto-Differentiation"), arXiv:2102.09631. Abstracts and the authors' code were
read, the body was not. Weights by the number of examples, the bias rule, the choice per layer, and what is refused are
derived here: the authors' code adds gradients of mean losses without dividing (read).

A gradient of n rows is the sum of n outer products, so a layer of h outputs and p inputs needs n (h + p) numbers in
place of h p. *dAD* sends these, *edAD* the inputs of all layers and what came back to the last one, from which the
server works out the rest, *rank-dAD* the nearest sum of fewer outer products.

What a layer saw is in :attr:`fedcomp.layout.Update.outer`; :mod:`fedcomp.factors.capture` finds it during training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcomp import params, wire
from fedcomp.codecs.base import Codec, State, norm, require_finite
from fedcomp.codecs.forms import FORMS, ValueForm, rest_form
from fedcomp.codecs.positional import without_densities
from fedcomp.errors import ConfigError
from fedcomp.factors.backprop import ChainLayer, explained, lefts, parse_chain
from fedcomp.factors.collect import Wanted
from fedcomp.factors.outer import SOLVERS, STOPS, OuterProducts, Reduction, add_outer, inner
from fedcomp.factors.signed import SignedRows
from fedcomp.kernels import add_scaled, scatter_add
from fedcomp.layout import Layout, TensorSpec, Update, Vector
from fedcomp.logs import log
from fedcomp.rng import Key
from fedcomp.rules import BelowOne, Int, Made, OneOf, Switch
from fedcomp.wire import DENSE, SEED, SPARSE, Bundle, Expected, Frame, LimitExceeded, Schema, SchemaMismatch, Tensor

MODES: Final = ("dad", "edad", "rank")

PER_LAYER: Final = ("auto", "factors")

FIRST: Final = ("factors", "gradient")

VALUES: Final = ("float32", "fp16", "bf16", "q8")
"""How factors may travel."""

EXPOSED: Final = (
    "the inputs of every layer for every example, of the first layer the examples themselves, and from what came back "
    "to the last one their labels"
)
"""What dAD and edAD show a server. Rank-dAD sends a function of the gradient, and shows no more than the gradient."""

_BYTES: Final = {"float32": 4.0, "fp16": 2.0, "bf16": 2.0, "q8": 1.02}
_INDEX_BYTES: Final = 0.2
"""Bytes of a listed index when whole rows are listed; most gaps are 0 then."""

_ENTRY: Final = 64
"""Maximum number of bytes by which the entry of a divided tensor exceeds that of a whole one: a dimension, a scale, an
index."""

_CLOSE: Final = 1e-3
"""Relative difference up to which the change of a bias follows from its layer's factors. Otherwise the bias is sent."""

_MOST_SIGNS: Final = 8
"""Maximum number of signs for each entry of a matrix, so a short frame cannot make its receiver draw and hold very
many."""

_LARGEST: Final = 0.5 * float(np.finfo(np.float32).max)
"""Largest allowed magnitude of sums of slopes; they stay finite for any rounding."""

_BIAS = "bias"
_WEIGHT = "weight"


class _Change(NamedTuple):
    """The change that one tensor of a frame adds."""

    tensor: TensorSpec
    values: Vector | None = None
    indices: NDArray[np.int64] | None = None
    outer: OuterProducts | None = None


def _names(chain: Any) -> tuple[str, ...]:
    """Return the layers of a chain; in a text they are separated by commas."""
    named = chain.split(",") if isinstance(chain, str) else chain
    return tuple(str(name).strip() for name in named if str(name).strip())


@dataclass(frozen=True, repr=False, eq=False)
class Factors(Codec):
    """Send matrices of an update as outer products: as they were captured ("dad"), so that the server finishes
    back-propagation ("edad"), or as the nearest sum of few ("rank").

    Each tensor is sent in its shortest form, and a frame is never longer than the model. The forms: whole; only the
    nonzero rows (embeddings); factors; nothing for a bias that follows from its layer's factors. The shape in the frame
    identifies the form. Tensors that were not captured (attention in one fused layer, fused recurrent cells, kernels of
    many positions) are sent whole, or reduced.

    "dad" and "edad" are exact, up to the rounding of float32; with weights in proportion to the number of examples the
    mean of the clients' updates is that of one batch of all examples (tested, with batches of unequal sizes). They show
    the server every example, see :data:`EXPOSED`: they save bytes where clients trust the server, and protect no
    privacy. Rank-dAD has no memory of what it leaves out, like the authors' code; error feedback around it works on
    whole matrices and needs no capture.

    Parameters
    ----------
    mode : {"dad", "edad", "rank"}
    rank : int
        For "rank": the largest number of outer products per matrix.
    iterations, theta, solver, stop
        As of :class:`fedcomp.factors.outer.Reduction`.
    per_layer : {"auto", "factors"}
        "factors": send factors even where the whole tensor is shorter, as long as the frame is shorter than the model.
    first_layer : {"factors", "gradient"}
        "gradient": layers that see the examples themselves, at any depth (:mod:`fedcomp.factors.following`), send only
        the sum over all rows. Labels, and the inputs of the other layers, are still shown.
    values : {"float32", "fp16", "bf16", "q8"}
        The format of factors; "q8" also applies to whole tensors.
    chain : sequence of str, or str
        For "edad", with commas if given as one text: the layers from the input on, ``"name of the weight:activation"``
        each, as :func:`fedcomp.factors.capture.chain_of` finds them. A client whose output gradients do not match this
        chain sends factors instead, and logs it.
    i_know_inputs_are_visible : bool
        Must be True for "dad" and "edad", as a confirmation of :data:`EXPOSED`.

    Raises
    ------
    ConfigError
        For parameters out of range, a chain without "edad" or "edad" without one, and a missing confirmation of what is
        shown.

    Notes
    -----
    A client's weight must be the number of examples that its factors come from. If a client takes several
    steps of plain SGD, its factors are those of all steps, and the update is their sum (derived). After steps with
    momentum, weight decay or clipping this fails; the client notices and sends the update whole, or reduced.

    In a frame every tensor has one entry, whose shape states its form. One axis: the tensor whole; kind sparse holds
    the rows that are not zero, kind dense without elements is a bias that follows from its layer's factors. Two axes:
    outer products with left and right side by side, slopes and right, or inputs alone. A frame with slopes names the
    seed of their signs (field 4), which must be that of the round and sender. Row i of pass k of the matrix ``w`` with
    h outputs has the signs of the words from i ceil(h / 64) on of the stream ``Key(seed, "signs/w", layer=k)``; a set
    bit is -1.

    Examples
    --------
    >>> from fedcomp.layout import TensorSpec, Update
    >>> layout = Layout((TensorSpec("w", (8, 9), "float32", 0, 72),), (), ("w",))
    >>> outer = OuterProducts(np.ones((1, 8), np.float32), np.arange(9, dtype=np.float32)[None])
    >>> update = Update(outer.matrix().reshape(-1), layout, {"w": outer})
    >>> codec = Factors(mode="dad", i_know_inputs_are_visible=True)
    >>> bundle = codec.open(codec.encode(update, {}, Key(0))[0], layout)
    >>> bundle.tensors[0].shape, bool(np.array_equal(codec.decode(bundle, layout), update.vector))
    ((1, 17), True)
    """

    codec_id: ClassVar[str] = "factors"

    mode: Annotated[str, OneOf(*MODES)] = "rank"
    rank: Annotated[int, Int(1)] = 10
    iterations: Annotated[int, Int(1)] = 3
    theta: BelowOne = 1e-3
    solver: Annotated[str, OneOf(*SOLVERS)] = "auto"
    stop: Annotated[str, OneOf(*STOPS)] = "sigma"
    per_layer: Annotated[str, OneOf(*PER_LAYER)] = "auto"
    first_layer: Annotated[str, OneOf(*FIRST)] = "factors"
    values: Annotated[str, OneOf(*VALUES)] = "float32"
    chain: Annotated[Sequence[str] | str, Made(_names)] = ()
    i_know_inputs_are_visible: Switch = False
    # Weights of the chain, of a codec that :meth:`at_model` has made.
    model: ClassVar[Mapping[str, NDArray[Any]] | None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.chain) != (self.mode == "edad"):
            raise ConfigError(
                f"mode={self.mode!r} with chain={list(self.chain)!r}: edad needs a chain, others have none"
            )
        _ = self.layers
        if self.mode == "edad" and not FORMS[self.values].relative:
            raise ConfigError(
                f"in values={self.values!r} little would be left of the last layer's gradients, which are much "
                "smaller than inputs, and the server computes the others from them; use bf16"
            )
        if self.exposes and not self.i_know_inputs_are_visible:
            raise ConfigError(
                f"mode={self.mode!r} shows the server {EXPOSED}. If all who train have agreed to that, say "
                "i_know_inputs_are_visible=True; if not, mode='rank' shows no more than a gradient does"
            )

    @property
    def reduction(self) -> Reduction:
        """How matrices are reduced."""
        return Reduction(self.rank, self.iterations, self.theta, self.solver, self.stop)

    @property
    def layers(self) -> tuple[ChainLayer, ...]:
        """The layers of the chain; none without one."""
        return parse_chain(self.chain) if isinstance(self.chain, tuple) and self.chain else ()

    @property
    def exposes(self) -> str:  # type: ignore[override]  # an attribute of most classes, here of the mode
        """What frames show of single examples; nothing for "rank"."""
        return "" if self.mode == "rank" else EXPOSED

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        """Whether nothing is left out."""
        return self.mode != "rank" and FORMS[self.values].exact

    @property
    def linear(self) -> bool:  # type: ignore[override]
        """Whether what arrives adds up like what was sent: where nothing is left out."""
        return self.unbiased

    @property
    def rest_form(self) -> ValueForm:
        """How what is whole travels: in 8 bits beside factors of 8 bits."""
        return rest_form(self.values)

    @property
    def never_enlarges(self) -> bool:  # type: ignore[override]
        """Whether what arrives is never longer: a reduction is a projection."""
        return FORMS[self.values].exact

    def variance(self, layout: Layout) -> float | None:
        """Return 0 where nothing is left out."""
        return 0.0 if self.unbiased else None

    def contraction(self, layout: Layout) -> float | None:
        """Return nearly 1 where nothing is reduced; else ``1 / min(h, p)`` of the matrix where it is smallest, on
        average over the draw: one direction of a power iteration keeps no less than the mean of the squared singular
        values (derived, as for :class:`~fedcomp.codecs.LowRank`). None where factors are rounded.
        """
        if not FORMS[self.values].exact:
            return None
        sides = [min(_sides(t)) for t in layout.tensors if self.mode == "rank" and self.is_matrix(t)]
        return min((1.0 / side for side in sides), default=1.0) * (1.0 - 2.0**-20)

    def at_model(self, model: Mapping[str, NDArray[Any]]) -> Factors:
        """Return the codec with the weights through which the server back-propagates."""
        if not self.chain:
            return self
        bound = replace(self)
        params.assign(
            bound,
            model={
                name: np.asarray(model[name])
                for layer in self.layers
                for name in (layer.weight, layer.bias)
                if name in model
            },
        )
        return bound

    def takes_outer(self, count: int, rows: int, columns: int, slopes: int = 0) -> bool:
        """Whether a matrix that is known as ``count`` outer products is used as such: where they are shorter than it,
        or thinner for the mode that reduces them.

        With ``slopes``, so many numbers and signs that both ends draw make the left side of each.
        """
        if self.mode == "rank":
            return count < min(rows, columns)
        # For back-propagation a layer's inputs are needed whatever they cost.
        forced = self.per_layer == "factors" or self.mode == "edad"
        left = slopes if self.takes_slopes(count, slopes, rows, columns) else rows
        return forced or count * (left + columns) < rows * columns + rows

    def takes_slopes(self, count: int, slopes: int, rows: int, columns: int) -> bool:
        """Whether so many slopes may travel in place of each left side, for receivers to draw the signs."""
        # Of slopes fp16 or a scale shared with inputs would leave nothing; "rank" shows nothing of examples.
        possible = self.mode != "rank" and FORMS[self.values].relative
        return possible and 0 < slopes < rows and count * slopes <= _MOST_SIGNS * columns

    def schema(self, layout: Layout) -> Schema:
        """Return every tensor whole: what no frame exceeds. :meth:`open` says which other forms there are.

        Densities of single tensors are refused.
        """
        without_densities(layout, "layer", self)
        names = frozenset({self.rest_form.values.name})
        kinds = frozenset({DENSE, SPARSE})
        return tuple(Expected("", (t.size,), "float32", t.size, kinds, value_codecs=names) for t in layout.tensors)

    def longest(self, layout: Layout) -> int:
        """Return the length of a frame in which all is whole, and what entries of other forms may take beside it."""
        whole = [replace(expected, kinds=frozenset({DENSE})) for expected in self.schema(layout)]
        forms = [self.rest_form.form for _ in whole]
        # Beside the entries a seed.
        return wire.longest(tuple(whole), "auto", *forms) + _ENTRY * (len(whole) + 1)

    def tensor_names(self, layout: Layout) -> tuple[str, ...]:
        return tuple(t.name for t in layout.tensors)

    def encode(self, update: Update, state: State, key: Key) -> tuple[Frame, State]:
        require_finite(update)
        sender = _Sender(self, update, key)
        forms = sender.forms(self.per_layer)
        # What receivers are ready for is the size of the model: in 16 bits more numbers could still be fewer bytes.
        if sum(tensor.size for tensor in forms.values()) > update.layout.size:
            forms = sender.forms("auto") if self.per_layer == "factors" else forms
        if sum(tensor.size for tensor in forms.values()) > update.layout.size:
            forms = sender.undivided()
        drawn = any(_slopes(t, forms[t.name]) for t in update.layout.tensors)
        fields = ((SEED, _seed(key)),) if drawn else ()
        return wire.encode([forms[t.name] for t in update.layout.tensors], tlvs=fields), state

    def open(self, frame: Frame | Bundle, layout: Layout) -> Bundle:
        """Parse ``frame``, and require a form of this codec of every tensor.

        Raises
        ------
        fedcomp.wire.WireError
            For any other frame, one that is larger than the model included.
        """
        bundle = frame if isinstance(frame, Bundle) else wire.decode(frame, limits=self.limits(layout))
        if len(bundle) != len(layout.tensors):
            raise SchemaMismatch(f"the codec expects {len(layout.tensors)} tensors, the bundle holds {len(bundle)}")
        if sum(tensor.size for tensor in bundle.tensors) > layout.size:
            raise LimitExceeded(f"the frame holds more than the {layout.size} values of the model")
        whole, thin = self.rest_form, FORMS[self.values]
        received = _Received.of(self, bundle, layout)
        for spec, tensor in zip(layout.tensors, bundle.tensors, strict=True):
            if tensor.name or tensor.dtype != "float32":
                raise SchemaMismatch(f"{spec.name}: expected a float32 tensor without a name")
            form = thin if len(tensor.shape) == 2 else whole
            if not isinstance(tensor.values, form.values):
                raise SchemaMismatch(f"{spec.name}: {type(tensor.values).__name__} values were not agreed on")
            form.check(tensor.values, spec.name)
            if not received.fits(spec):
                raise SchemaMismatch(
                    f"{spec.name}: a {tensor.kind.name.lower()} tensor of shape {tensor.shape} is not a form of shape "
                    f"{spec.shape} in mode {self.mode!r}"
                )
        received.require_chain()
        received.require_signs()
        return bundle

    def verify(self, frame: Frame | Bundle, layout: Layout, key: Key) -> Bundle:
        """Open, and require the seed that ``key`` gives: a sender who picks its signs picks its estimate."""
        bundle = self.open(frame, layout)
        if bundle.tlv(SEED) not in (None, _seed(key)):
            raise SchemaMismatch("the seed of the frame's signs is not that of this round and sender")
        return bundle

    def accumulate(self, frame: Frame | Bundle, weight: float, out: Update) -> None:
        """Add ``weight`` times the update into ``out.vector``; products of factors are summed in float64."""
        for change in _Received.of(self, self.open(frame, out.layout), out.layout).changes():
            into = out.vector[change.tensor.slice]
            if change.outer is not None:
                add_outer(into.reshape(_sides(change.tensor)), change.outer.left, change.outer.right, weight)
            elif change.indices is not None:
                assert change.values is not None
                scatter_add(into, change.indices, change.values, weight)
            elif change.values is not None:
                add_scaled(into, change.values, weight)

    def decode(self, frame: Frame | Bundle, layout: Layout) -> Vector:
        """Return the decoded vector; what did not travel is +0.0."""
        out = Update(np.zeros(layout.size, np.float32), layout)
        self.accumulate(frame, 1.0, out)
        return out.vector

    def norm(self, frame: Frame | Bundle, layout: Layout) -> float:
        """Return the norm of the update; no matrix is formed."""
        squares = 0.0
        for change in _Received.of(self, self.open(frame, layout), layout).changes():
            if change.outer is not None:
                squares += max(0.0, inner(change.outer, change.outer))
            elif change.values is not None:
                squares += norm(change.values) ** 2
        return math.sqrt(squares)

    def support(self, frame: Frame | Bundle, layout: Layout) -> NDArray[np.int64]:
        """Return the coordinates of the rows that were listed."""
        listed = [
            t.slice.start + tensor.indices
            for t, tensor in zip(layout.tensors, self.open(frame, layout).tensors, strict=True)
            if tensor.indices is not None
        ]
        return np.sort(np.concatenate(listed)) if listed else np.zeros(0, np.int64)

    def outer(self, frame: Frame | Bundle, layout: Layout) -> Mapping[str, OuterProducts]:
        """Return the outer products that travelled, those that the server worked out included."""
        changes = _Received.of(self, self.open(frame, layout), layout).changes()
        return {change.tensor.name: change.outer for change in changes if change.outer is not None}

    def figures(self, frame: Frame | Bundle, layout: Layout, length: float) -> Mapping[str, float]:
        """Return the number of outer products of each matrix, in mode "rank" its effective rank, how many slopes stand
        for a left side where they do, and how many matrices travelled whole."""
        found: dict[str, float] = {"matrices whole": 0.0}
        word = "rank" if self.mode == "rank" else "rows"
        for spec, tensor in zip(layout.tensors, self.open(frame, layout).tensors, strict=True):
            if len(tensor.shape) == 2:
                found[f"{word} of {spec.name}"] = float(tensor.shape[0])
                if slopes := _slopes(spec, tensor):
                    found[f"slopes of {spec.name}"] = float(slopes)
            elif self.is_matrix(spec) and tensor.kind is DENSE:
                found["matrices whole"] += 1.0
        return found

    def is_matrix(self, spec: TensorSpec) -> bool:
        """Whether a tensor may travel in parts: its first dimension times the rest."""
        # What a policy leaves whole is meant to lose nothing, and factors that are not reduced lose nothing.
        return len(spec.shape) >= 2 and spec.size > 0 and not (spec.is_dense and self.mode == "rank")


@dataclass(frozen=True, slots=True)
class _Sender:
    """The forms in which the tensors of one update are sent."""

    codec: Factors
    update: Update
    key: Key

    @property
    def given(self) -> dict[str, OuterProducts]:
        """The captured outer products that may be used."""
        hidden = self.codec.first_layer == "gradient"
        return {name: outer for name, outer in self.update.outer.items() if not (outer.at_input and hidden)}

    def forms(self, per_layer: str) -> dict[str, Tensor]:
        """Return every tensor of the frame by name."""
        codec, layout, given = self.codec, self.update.layout, self.given
        forms = self.undivided()
        for index, spec in enumerate(layout.tensors):
            if not codec.is_matrix(spec):
                continue
            bias = layout.by_name.get(_bias_name(spec.name))
            # What follows is a sum of left sides as they are.
            follows = codec.mode != "rank" and FORMS[codec.values].relative
            saved = bias.size if bias is not None and follows else 0
            if codec.mode == "rank":
                outer = self._reduced(spec, self.key.at(layer=index))
                # A sum of few has larger entries than the matrix: what receivers could not hold travels whole.
                if not _holds(outer):
                    continue
            elif spec.name in given:
                outer = given[spec.name]
            else:
                continue
            tensor = self._thin(self._left(spec, outer), outer.right)
            if per_layer == "factors" or self._cost(tensor) < self._cost(forms[spec.name]) + _BYTES["float32"] * saved:
                forms[spec.name] = tensor
                if follows and bias is not None and self._follows(bias, outer):
                    forms[bias.name] = self._absent()
        if codec.model is not None:
            self._shorten_chain(codec.model, forms, per_layer)
        return forms

    def undivided(self) -> dict[str, Tensor]:
        """Return every tensor whole, or only its non-zero rows."""
        return {t.name: self._undivided(t) for t in self.update.layout.tensors}

    def _shorten_chain(self, model: Mapping[str, NDArray[Any]], forms: dict[str, Tensor], per_layer: str) -> None:
        """Send only the inputs of the layers of the chain if this is shorter and the server can compute the rest."""
        given, layout = self.given, self.update.layout
        layers = [layer for layer in self.codec.layers if not self._left_out(layer)]
        if reason := "fewer than two layers are left" if len(layers) < 2 else explained(layers, model, given):
            log.warning("edAD sends factors of every layer: %s", reason)
            return
        pairs = [(layout.by_name.get(_bias_name(layer.weight)), given[layer.weight]) for layer in layers]
        last = layers[-1].weight
        chain = {layer.weight: self._coded(given[layer.weight].right) for layer in layers[:-1]}
        chain[last] = self._thin(given[last].left, given[last].right)
        biases = [bias.name for bias, outer in pairs if bias is not None and self._follows(bias, outer)]
        before = sum(self._cost(forms[name]) for name in (*chain, *biases))
        if per_layer == "factors" or sum(map(self._cost, chain.values())) < before:
            forms |= chain | {name: self._absent() for name in biases}

    def _follows(self, bias: TensorSpec, outer: OuterProducts) -> bool:
        """Whether a bias changed by the sum of its layer's left sides; a frozen or shared bias does not."""
        change = self.update.vector[bias.slice]
        sums = outer.left.sum(axis=0, dtype=np.float64)
        if sums.shape != change.shape:
            return False
        allowed = _CLOSE * max(float(np.linalg.norm(sums)), float(np.linalg.norm(change)))
        return float(np.linalg.norm(change - sums)) <= allowed

    def _left_out(self, layer: ChainLayer) -> bool:
        # The first layers of a chain may travel as gradients: nothing is worked out from what they saw.
        return layer.weight in self.update.outer and layer.weight not in self.given

    def _undivided(self, spec: TensorSpec) -> Tensor:
        values = self.update.vector[spec.slice]
        whole = Tensor(self.codec.rest_form.code(values), values.shape)
        if not self.codec.is_matrix(spec):
            return whole
        rows, columns = _sides(spec)
        used = np.flatnonzero(values.reshape(rows, columns).any(axis=1))
        if used.size * columns * (_BYTES["float32"] + _INDEX_BYTES) >= self._cost(whole):
            return whole
        indices = (used[:, None] * columns + np.arange(columns)).reshape(-1)
        return Tensor(self.codec.rest_form.code(values[indices]), values.shape, kind=SPARSE, indices=indices)

    def _reduced(self, spec: TensorSpec, key: Key) -> OuterProducts:
        reduction = self.codec.reduction
        if (outer := self.given.get(spec.name)) is not None:
            return reduction.of(outer, key)
        return reduction.of_matrix(self.update.vector[spec.slice].reshape(_sides(spec)), key)

    def _left(self, spec: TensorSpec, outer: OuterProducts) -> NDArray[Any]:
        """Return the left sides as they are sent: only slopes if the server draws the signs."""
        signed = outer.signed
        if signed is None or (signed.name, signed.start) != (spec.name, 0) or signed.seed != self.key.u64():
            return outer.left
        count, slopes = signed.slopes.shape
        return signed.slopes if self.codec.takes_slopes(count, slopes, *_sides(spec)) else outer.left

    def _thin(self, left: NDArray[Any], right: NDArray[Any]) -> Tensor:
        if not FORMS[self.codec.values].relative:
            # Beside inputs, which are thousands of times as large, left sides would be rounded to nothing. A power of
            # two from one side to the other changes no bit of their product.
            shift = np.rint(0.5 * (_exponent(right) - _exponent(left))).astype(np.int64)[:, None]
            left, right = np.ldexp(left, shift), np.ldexp(right, -shift)
        return self._coded(np.concatenate([left, right], axis=1))

    def _coded(self, array: NDArray[Any]) -> Tensor:
        return Tensor(FORMS[self.codec.values].code(np.ascontiguousarray(array).reshape(-1)), array.shape)

    def _absent(self) -> Tensor:
        """Return the placeholder of a bias that follows from its layer's factors."""
        return Tensor(self.codec.rest_form.code(np.zeros(0, np.float32)), (0,))

    def _cost(self, tensor: Tensor) -> float:
        """Return the approximate number of bytes of a tensor."""
        if len(tensor.shape) == 2:
            return tensor.values.k * _BYTES[self.codec.values]
        index = _INDEX_BYTES if tensor.indices is not None else 0.0
        return tensor.values.k * (_BYTES["q8" if self.codec.values == "q8" else "float32"] + index)


def _holds(outer: OuterProducts) -> bool:
    """Whether float32 certainly holds every entry of the matrix."""
    left, right = (np.abs(side).max(axis=1, initial=0.0).astype(np.float64) for side in (outer.left, outer.right))
    return float(left @ right) <= float(np.finfo(np.float32).max)


def _exponent(rows: NDArray[Any]) -> NDArray[np.float64]:
    """Return the exponent of each row's largest magnitude, 0 for a row of zeros, shape (k,)."""
    return np.frexp(np.abs(rows).max(axis=1, initial=0.0))[1].astype(np.float64)


@dataclass(frozen=True, slots=True)
class _Received:
    """The tensors of one frame, by the names of the tensors that they represent."""

    codec: Factors
    layout: Layout
    found: Mapping[str, Tensor]
    seed: bytes

    @classmethod
    def of(cls, codec: Factors, bundle: Bundle, layout: Layout) -> _Received:
        """Return the tensors of a bundle, which must have as many as the layout."""
        names = (t.name for t in layout.tensors)
        return cls(codec, layout, dict(zip(names, bundle.tensors, strict=True)), bundle.tlv(SEED) or b"")

    def fits(self, spec: TensorSpec) -> bool:
        """Whether the tensor of ``spec`` is in one of its forms."""
        codec, tensor = self.codec, self.found[spec.name]
        if tensor.kind is SPARSE:
            return codec.is_matrix(spec) and tensor.shape == (spec.size,) and _whole_rows(tensor, _sides(spec)[1])
        if tensor.kind is not DENSE:
            return False
        if len(tensor.shape) == 2 and codec.is_matrix(spec):
            rows, columns = _sides(spec)
            inputs = codec.model is not None and spec.name in [layer.weight for layer in codec.layers[:-1]]
            if codec.takes_slopes(tensor.shape[0], _slopes(spec, tensor), rows, columns):
                return True
            return tensor.shape[1] == rows + columns or (inputs and tensor.shape[1] == columns)
        if tensor.shape == (0,) and spec.size:
            # The sum of left sides has a value for each row: of a transposed convolution these are no outputs.
            weight = self.layout.by_name.get(_weight_name(spec.name))
            if codec.mode == "rank" or weight is None or not codec.is_matrix(weight):
                return False
            return len(self.found[weight.name].shape) == 2 and _sides(weight)[0] == spec.size
        return tensor.shape == (spec.size,)

    @property
    def chain(self) -> list[ChainLayer]:
        """The layers for which only the inputs arrived."""
        if self.codec.model is None:
            return []
        return [layer for layer in self.codec.layers if self._inputs_alone(layer)]

    def require_chain(self) -> None:
        """Require that the layers with only inputs are followed by other layers up to the last one."""
        if not (sent := self.chain):
            return
        layers, found = self.codec.layers, self.found
        part, last = layers[-1 - len(sent) : -1], found[layers[-1].weight]
        rows = {tensor.shape[:1] for tensor in (last, *(found[layer.weight] for layer in sent))}
        if tuple(sent) != part or len(last.shape) != 2 or len(rows) != 1:
            raise SchemaMismatch("the frame holds inputs of layers that no chain to the last one connects")

    def require_signs(self) -> None:
        """Require a seed if slopes represent left sides, and slopes with finite sums."""
        for spec in self.layout.tensors:
            tensor = self.found[spec.name]
            if not (slopes := _slopes(spec, tensor)):
                continue
            if len(self.seed) != 8:
                raise SchemaMismatch("the frame lacks the eight bytes of seed by which the signs of slopes were drawn")
            # Infinities would cancel to a norm that no guard refuses.
            given = tensor.values.decoded().reshape(tensor.shape)[:, :slopes]
            if np.abs(given).sum(axis=1, dtype=np.float64).max(initial=0.0) > _LARGEST:
                raise SchemaMismatch(f"{spec.name}: slopes whose sums exceed {_LARGEST:g}")

    def _inputs_alone(self, layer: ChainLayer) -> bool:
        tensor = self.found.get(layer.weight)
        if tensor is None or len(tensor.shape) != 2:
            return False
        return tensor.shape[1] == _sides(self.layout.by_name[layer.weight])[1]

    def changes(self) -> Iterator[_Change]:
        """Yield the change of every tensor; the frame has been checked."""
        found, layout = self.found, self.layout
        outer: dict[str, OuterProducts] = {}
        for spec in layout.tensors:
            tensor = found[spec.name]
            if len(tensor.shape) == 2 and tensor.shape[1] != _sides(spec)[1]:
                outer[spec.name] = self._outer(spec, tensor)
        if chain := self.chain:
            outer |= self._propagated([*chain, self.codec.layers[-1]], outer)
        for spec in layout.tensors:
            tensor = found[spec.name]
            if spec.name in outer:
                yield _Change(spec, outer=outer[spec.name])
            elif tensor.shape == (0,) and spec.size:
                yield _Change(
                    spec, outer[_weight_name(spec.name)].left.sum(axis=0, dtype=np.float64).astype(np.float32)
                )
            else:
                yield _Change(spec, tensor.values.decoded(), tensor.indices)

    def _outer(self, spec: TensorSpec, tensor: Tensor) -> OuterProducts:
        array, rows = tensor.values.decoded().reshape(tensor.shape), _sides(spec)[0]
        if slopes := _slopes(spec, tensor):
            signed = SignedRows(array[:, :slopes], int.from_bytes(self.seed, "little"), spec.name, rows)
            return OuterProducts.of_signed(signed, array[:, slopes:])
        return OuterProducts(array[:, :rows], array[:, rows:])

    def _propagated(self, layers: Sequence[ChainLayer], outer: Mapping[str, OuterProducts]) -> dict[str, OuterProducts]:
        model, found = self.codec.model, self.found
        assert model is not None
        last = outer[layers[-1].weight]
        inputs = [found[layer.weight].values.decoded().reshape(found[layer.weight].shape) for layer in layers[:-1]]
        inputs.append(last.right)
        with np.errstate(over="ignore", invalid="ignore"):  # of a hostile frame; receivers look at their sums
            back = lefts(layers, model, inputs, last.left)
        return {layer.weight: OuterProducts(b, a) for layer, b, a in zip(layers, back, inputs, strict=True)}


def _sides(spec: TensorSpec) -> tuple[int, int]:
    """Return rows and columns of a tensor as a matrix: its first dimension, and all others."""
    return spec.shape[0], spec.size // spec.shape[0]


def _slopes(spec: TensorSpec, tensor: Tensor) -> int:
    """Return the number of slopes that represent the left side of each outer product; 0 in every other form."""
    if len(tensor.shape) != 2:
        return 0
    rows, columns = _sides(spec)
    return found if 0 < (found := tensor.shape[1] - columns) < rows else 0


def _seed(key: Key) -> bytes:
    """Return the eight bytes by which a frame names its signs."""
    return key.u64().to_bytes(8, "little")


def _whole_rows(tensor: Tensor, columns: int) -> bool:
    """Whether a sparse tensor that lists one column of a row lists all columns of that row."""
    found = tensor.indices
    if found is None or found.size % columns:
        return False
    rows = found.reshape(-1, columns)
    return not (rows[:, 0] % columns).any() and bool((rows[:, -1] - rows[:, 0] == columns - 1).all())


def _bias_name(weight: str) -> str:
    return f"{weight.removesuffix(_WEIGHT)}{_BIAS}" if weight.endswith(_WEIGHT) else ""


def _weight_name(bias: str) -> str:
    return f"{bias.removesuffix(_BIAS)}{_WEIGHT}" if bias.endswith(_BIAS) else ""


def wanted_by(codec: Codec) -> Wanted | None:
    """Return of which matrices a codec makes use as outer products, which a client then captures while it trains."""
    return codec.takes_outer if isinstance(codec, Factors) else None


def at_model(codec: Codec, model: Callable[[], Mapping[str, NDArray[Any]]]) -> Codec:
    """Return the codec for updates of ``model()``, from which senders train: :class:`Factors` need it, others not."""
    return codec.at_model(model()) if isinstance(codec, Factors) and codec.chain else codec
