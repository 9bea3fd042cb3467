"""A codec applied after a linear transform: encode and add in the transformed domain, invert once per round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.codecs.base import Codec, State, norm, require_finite
from fedcomp.codecs.fixedpoint import FixedPoint
from fedcomp.codecs.orthonormal import Orthonormal, bases
from fedcomp.codecs.registry import codecs
from fedcomp.codecs.wrapper import Wrapper
from fedcomp.errors import ConfigError, NonFiniteUpdate
from fedcomp.kernels import add_scaled
from fedcomp.layout import Layout, Update, Vector
from fedcomp.rng import Key
from fedcomp.rules import Made
from fedcomp.wire import Bundle, Frame

_LONGEST: Final = 2.0**126


@dataclass(frozen=True, repr=False, eq=False)
class Domain(Wrapper):
    """Apply an orthonormal ``transform`` to the compressed part of the update, and encode the result with ``codec``.

    The frame is the codec's. A receiver adds frames in the transformed coordinates (:meth:`gather`) and inverts the
    transform once per round (:meth:`conclude`), for any number of clients, because weighted sums commute with the
    transform. :meth:`decode` and :meth:`accumulate` invert it for each frame; aggregators that need single updates,
    such as a median, use these. Tensors sent dense are not transformed.

    All clients and rounds share the transform. The codec's declared properties that depend only on norms carry over, up
    to float32 rounding. The coordinates sent are not coordinates of the update: the decoded update of a sparse codec is
    dense.

    Parameters
    ----------
    transform : Orthonormal or config mapping
        :class:`~fedcomp.codecs.Rotation` or :class:`~fedcomp.codecs.DCT`.
    codec : Codec or config mapping
        Any codec of one exchange. Error feedback may be inside (its memory is then kept in the transformed
        coordinates, which saves the client a transform) or around the domain; both send the same up to rounding.

    Raises
    ------
    ConfigError
        When ``codec`` needs several exchanges, or rounds to integers that are summed elsewhere: put the domain into
        :class:`~fedcomp.codecs.FixedPoint`, not around it.

    Examples
    --------
    >>> from fedcomp.codecs import DCT, TopK
    >>> smooth = np.cos(np.arange(8) * 0.3)
    >>> Domain(DCT(chunk=8), TopK(density=0.25)).preview(smooth).round(2)
    array([ 1.11,  1.  ,  0.79,  0.53,  0.25, -0.02, -0.22, -0.33],
          dtype=float32)
    """

    codec_id: ClassVar[str] = "domain"

    transform: Annotated[Orthonormal, Made(bases.get)]
    codec: Annotated[Codec, Made(codecs.get)]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.codec.phases != 1:
            raise ConfigError(f"{self.codec!r} needs {self.codec.phases} exchanges and has no domain")
        inner: Any = self.codec
        while isinstance(inner, Wrapper):
            # Who adds up integers asks the fixed-point codec for the mean, and would miss the way back.
            if isinstance(inner, FixedPoint):
                raise ConfigError(
                    f"{self.codec!r} sends integers that may be summed in coded form; put the domain inside: "
                    "FixedPoint(Domain(transform, codec), ...)"
                )
            inner = inner.codec
        params.assign(
            self,
            linear=self.codec.linear,
            unbiased=self.codec.unbiased,
            remembers=self.codec.remembers,
            never_enlarges=self.codec.never_enlarges,
            votes=self.codec.votes,
            gain=self.codec.gain,
            # Of the frames, whose supports are those of the transformed coordinates.
            shared=getattr(self.codec, "shared", False) is True,
            index=str(getattr(self.codec, "index", "auto")),
        )

    def init(self, layout: Layout) -> State:
        return self.codec.init(layout)

    def encode(self, update: Update, state: State, key: Key) -> tuple[Frame, State]:
        """Transform, then encode; see :meth:`fedcomp.codecs.base.Codec.encode`. Copies the vector.

        Raises
        ------
        NonFiniteUpdate
            Also when a transformed coordinate, or one that is transformed back, may overflow float32: from a norm of
            2^126 on.
        """
        # Before the transform, which would carry a NaN into every tensor.
        require_finite(update)
        turned = Update(update.vector.copy(), update.layout)
        with np.errstate(over="ignore", invalid="ignore"):
            self.enter(turned)
        # Not finite either; and on the way back sums may be twice as large as the norm.
        if not norm(turned.vector) <= _LONGEST:
            raise NonFiniteUpdate(
                "the update overflows float32 when it is transformed; nothing was sent and no state was changed. Lower "
                "the learning rate or clip gradients before communicating"
            )
        return self.codec.encode(turned, state, key)

    def rollback(self, state: State, frame: Frame, layout: Layout) -> State:
        """Roll back the inner codec."""
        return self.codec.rollback(state, frame, layout)

    def residual(self, state: State) -> Vector | None:
        """Return the inner codec's, in the transformed coordinates: as long as in the update's."""
        return self.codec.residual(state)

    def sparse(self, layout: Layout) -> bool:
        """False: what arrives is dense, whatever travels."""
        return False

    def support(self, frame: Frame | Bundle, layout: Layout) -> NDArray[np.int64]:
        """Return no coordinates: none of the update's is chosen."""
        return np.zeros(0, np.int64)

    def common_support(self, layout: Layout, key: Key) -> NDArray[np.int64] | None:
        return None

    def enter(self, update: Update) -> None:
        """Transform the update in place."""
        self.transform.apply(update.vector, update.layout)
        self.codec.enter(update)

    def conclude(self, total: Update) -> None:
        """Let the inner codec conclude, then transform back."""
        self.codec.conclude(total)
        self.transform.apply(total.vector, total.layout, inverse=True)

    def accumulate(self, frame: Frame | Bundle, weight: float, out: Update) -> None:
        add_scaled(out.vector, self.decode(frame, out.layout), weight)

    def decode(self, frame: Frame | Bundle, layout: Layout) -> Vector:
        """Decode with the inner codec and transform back."""
        out = self.codec.decode(frame, layout)
        with np.errstate(over="ignore", invalid="ignore"):  # of a hostile frame; receivers look at their sums
            self.transform.apply(out, layout, inverse=True)
        # Signs make -0.0 of zeros, and a vector of which nothing arrived is +0.0.
        out[: layout.compressed_size] += np.float32(0.0)
        return out

    def contraction(self, layout: Layout) -> float | None:
        """Return the inner codec's δ: an orthonormal transform changes no error."""
        return self.codec.contraction(layout)

    def variance(self, layout: Layout) -> float | None:
        return self.codec.variance(layout)
