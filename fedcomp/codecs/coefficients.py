"""Tensors as coefficients in an orthonormal basis, either sent with the frame or known to both ends.

A codec says how many coefficients stand for a stretch, how they are found and what they stand for. Frames, checks and
sums are here, once for factors of matrices (:mod:`fedcomp.codecs.lowrank`) and for slices in a fitted basis
(:mod:`fedcomp.codecs.gradiveq`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedcomp import wire
from fedcomp.codecs.base import all_finite
from fedcomp.codecs.forms import FORMS, ValueForm
from fedcomp.codecs.positional import FormedCodec, PositionalCodec, Stretch, expected_dense, require_values
from fedcomp.errors import ConfigError, NonFiniteUpdate
from fedcomp.kernels import add_scaled
from fedcomp.layout import Layout, Update, Vector
from fedcomp.rng import Key
from fedcomp.wire import BASIS_ID, COEFFICIENTS, DENSE, Bundle, Expected, Frame, SchemaMismatch, Tensor, Values

VALUES: Final = ("float32", "bf16", "q8", "q4")
"""How coefficients may travel. The other forms round so coarsely that what is left of a factor is another basis."""

ID_BYTES: Final = 8
"""Bytes of a basis id in a frame: an integer of 63 bits, little-endian."""


def id_bytes(number: int) -> bytes:
    """Return the content of the optional field that names a basis."""
    return number.to_bytes(ID_BYTES, "little")


def id_of(bundle: Bundle) -> int | None:
    """Return the id of the basis that a frame names; None when it names none."""
    content = bundle.tlv(BASIS_ID)
    return int.from_bytes(content, "little") if content is not None and len(content) == ID_BYTES else None


def basis_id_of(frame: Frame, parts: Sequence[Stretch], layout: Layout) -> int:
    """Return the id of the basis in which a frame for ``layout`` is, whose tensors stand for ``parts``.

    Raises
    ------
    fedcomp.wire.WireError
        When it names none, or is larger than any such frame.
    """
    whole = [expected_dense(stretch.size, wire.Raw) for stretch in parts]
    rest = expected_dense(layout.size - layout.compressed_size, wire.Raw)
    # The basis decides what else to expect.
    named = id_of(wire.decode(frame, limits=wire.Limits.for_schema((*whole, rest))))
    if named is None:
        raise SchemaMismatch("the frame does not name the basis that it is in")
    return named


class Coefficients(PositionalCodec):
    """Base of codecs whose frames hold coefficients: one tensor of them per stretch, other stretches whole."""

    scope = "layer"
    takes_densities = False

    @property
    def value_form(self) -> ValueForm:
        """How coefficients travel."""
        return FORMS["float32"]

    @abstractmethod
    def count(self, stretch: Stretch) -> int | None:
        """Return how many coefficients stand for a stretch; None for one that travels whole."""

    @abstractmethod
    def project(self, values: Vector, stretch: Stretch, key: Key) -> Vector:
        """Return the coefficients of a stretch, flat."""

    @abstractmethod
    def add(self, out: Vector, values: Vector, stretch: Stretch) -> None:
        """Add that for which coefficients stand into ``out``, the stretch's place."""

    def write(self, found: Vector, stretch: Stretch, key: Key) -> Values:
        """Return finite coefficients as they travel."""
        return self.value_form.code(found)

    def value_class(self, stretch: Stretch) -> type[Values]:
        """Return the wire's class of a stretch's coefficients."""
        return self.value_form.values

    def check_values(self, tensor: Tensor, stretch: Stretch) -> None:
        """Require the parameters with which :meth:`write` writes; the class is checked already."""
        self.value_form.check(tensor.values, stretch.name)

    def pack(self, values: Vector, stretch: Stretch, key: Key) -> Tensor:
        if self.count(stretch) is None:
            return wire.dense(values)
        # What overflows is refused below, with the tensor's name.
        with np.errstate(over="ignore", invalid="ignore"):
            found = self.project(values, stretch, key)
        if not all_finite(found):
            raise NonFiniteUpdate(f"{stretch.name}: the projections of its values overflow float32")
        return Tensor(self.write(found, stretch, key), (stretch.size,), kind=COEFFICIENTS)

    def expect(self, stretch: Stretch) -> Expected:
        count = self.count(stretch)
        if count is None:
            return expected_dense(stretch.size, wire.Raw)
        return Expected(
            "",
            (stretch.size,),
            "float32",
            count,
            frozenset({COEFFICIENTS}),
            value_codecs=frozenset({self.value_class(stretch).name}),
        )

    def check(self, tensor: Tensor, stretch: Stretch) -> None:
        count = self.count(stretch)
        if count is None:
            require_values(tensor, wire.Raw, sparse=False)
            return
        if tensor.kind is not COEFFICIENTS or tensor.values.k != count:
            raise SchemaMismatch(
                f"{stretch.name}: expected {count} coefficients of shape {stretch.shape}, the frame holds "
                f"{tensor.values.k} values of a {tensor.kind.name.lower()} tensor"
            )
        if not isinstance(tensor.values, self.value_class(stretch)):
            raise SchemaMismatch(f"{stretch.name}: {type(tensor.values).__name__} coefficients were not agreed on")
        self.check_values(tensor, stretch)

    def placed(self, bundle: Bundle, layout: Layout) -> Iterator[tuple[Tensor, slice]]:
        """Yield the frame's tensors with their places, every stretch in full."""
        parts = self.stretches(layout)
        for index, (tensor, where) in enumerate(super().placed(bundle, layout)):
            if index < len(parts) and self.count(parts[index]) is not None:
                full = np.zeros(tensor.size, np.float32)
                with np.errstate(over="ignore", invalid="ignore"):  # of a hostile frame; receivers look at their sums
                    self.add(full, tensor.values.decoded(), parts[index])
                tensor = replace(tensor, values=wire.Raw(full), kind=DENSE)
            yield tensor, where

    def support(self, frame: Frame | Bundle, layout: Layout) -> NDArray[np.int64]:
        """Return no coordinates: none is chosen."""
        return np.zeros(0, np.int64)


class SharedCoefficients(FormedCodec, Coefficients):
    """Base of codecs that send in a basis both ends hold; frames carry its id, and those of another id are refused.

    Sending is linear, up to a constant that all clients share: coefficients of a mean are the mean of coefficients. So
    a receiver adds up coefficients (:meth:`gather`) and forms tensors once (:meth:`conclude`), whatever the number of
    clients. Such a codec is made per round; its basis travels as a frame of its own, never in a configuration.
    """

    @property
    @abstractmethod
    def basis_id(self) -> int:
        """The id of the basis, 63 bits."""

    @property
    def linear(self) -> bool:  # type: ignore[override]  # an attribute of most classes, here of the form
        """Whether coefficients travel as they are, so that what arrives adds up like what was sent."""
        return FORMS[self.values].exact

    def get_config(self) -> dict[str, object]:
        """Refused: a basis travels as a frame of its own."""
        raise ConfigError(f"{self!r} has no configuration that can be sent; send its basis")

    def fields(self, key: Key) -> tuple[tuple[int, bytes], ...]:
        return ((BASIS_ID, id_bytes(self.basis_id)),)

    def open(self, frame: Frame | Bundle, layout: Layout) -> Bundle:
        """Parse and check ``frame``, and require the id of this basis."""
        bundle = super().open(frame, layout)
        if (named := id_of(bundle)) != self.basis_id:
            said = "no basis" if named is None else f"the basis {named:x}"
            raise SchemaMismatch(
                f"the frame names {said}, expected {self.basis_id:x}: coefficients in two bases do not add"
            )
        return bundle

    def enter(self, update: Update) -> None:
        """Put the coefficients of every stretch in its place, from its beginning on."""
        for stretch in self.stretches(update.layout):
            if self.count(stretch) is not None:
                values = update.vector[stretch.slice]
                found = self.project(values, stretch, Key(0))
                values[: found.size] = found
                values[found.size :] = 0.0

    def gather(self, frame: Frame | Bundle, weight: float, total: Update) -> None:
        """Add ``weight`` times the coefficients, where :meth:`enter` puts them."""
        bundle = self.open(frame, total.layout)
        # As one for each stretch and the rest: not those of the class above, which are whole tensors.
        for tensor, where in PositionalCodec.placed(self, bundle, total.layout):
            values = tensor.values.decoded()
            add_scaled(total.vector[where][: values.size], values, weight)

    def conclude(self, total: Update) -> None:
        """Form the tensors for which the summed coefficients stand."""
        for stretch in self.stretches(total.layout):
            if (count := self.count(stretch)) is not None:
                values = total.vector[stretch.slice]
                sent = values[:count].copy()
                values[...] = 0.0
                self.add(values, sent, stretch)

    def sum_frame(self, total: Update) -> Frame:
        """Return the frame of what was gathered, before it is concluded: float32, in this basis."""
        layout, tensors, end = total.layout, [], 0
        for stretch in self.stretches(layout):
            count, end = self.count(stretch), stretch.stop
            values = total.vector[stretch.slice]
            if count is None:
                tensors.append(wire.dense(values))
            else:
                tensors.append(Tensor(wire.Raw(values[:count].copy()), (stretch.size,), kind=COEFFICIENTS))
        exact = FORMS["float32"]
        rest = total.vector[end:]
        dense = [Tensor(exact.code(rest), rest.shape)] if rest.size else []
        return wire.encode([*tensors, *dense], tlvs=self.fields(Key(0)))
