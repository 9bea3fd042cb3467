"""Compressors as they are often written, wrong in one place each. The checks of section 7 must find every one of them.

None is registered. :func:`caught` says that a check fails for a wrong variant, and by which of its assertions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from fedcomp import wire
from fedcomp.codecs import QSGD, STC, AdaComp, RandomK, ScaleCom, ScaledSign, SIDCo, TernGrad, TopK
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.codecs.positional import PositionalCodec, Stretch, expected_dense, expected_sparse
from fedcomp.kernels import select_above
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key
from fedcomp.wire import Expected, Tensor


def caught(check: Callable[..., Any], *wrong: Any, match: str, **options: Any) -> None:
    """``check`` raises AssertionError for the wrong variant, with a message that ``match`` finds."""
    with pytest.raises(AssertionError, match=match):
        check(*wrong, **options)


class ClearsSent(ErrorFeedback):
    """Zeroes the memory on the support, also where beta < 1 keeps a share of it there."""

    def encode(self, update: Update, state: dict, key: Key) -> tuple[bytes, dict]:
        frame, after = super().encode(update, state, key)
        after["memory"][self.support(frame, update.layout)] = 0.0
        return frame, after


class ForgetsRounding(ErrorFeedback):
    """Takes the values it selected out of the memory, not those the bytes delivered."""

    def encode(self, update: Update, state: dict, key: Key) -> tuple[bytes, dict]:
        frame, after = super().encode(update, state, key)
        sent = self.support(frame, update.layout)
        after["memory"][sent] = np.float32(1.0 - self.beta) * state["memory"][sent]
        return frame, after


class NeverClears(ErrorFeedback):
    """Sends, and remembers all of it nevertheless."""

    def encode(self, update: Update, state: dict, key: Key) -> tuple[bytes, dict]:
        frame, after = super().encode(update, state, key)
        return frame, after | {"memory": state["memory"] + update.vector}


class AddsInPlace(ErrorFeedback):
    """Adds to the memory before it knows whether the update can be sent."""

    def encode(self, update: Update, state: dict, key: Key) -> tuple[bytes, dict]:
        before = state["memory"].copy()
        state["memory"] += update.vector
        return super().encode(update, state | {"memory": before}, key)


class ScaleComClearsSent(ScaleCom):
    """ScaleCom around :class:`ClearsSent`."""

    def around(self, codec: Any) -> ErrorFeedback:
        return ClearsSent(codec, beta=self.beta)


class DropsWaiting(ScaleCom):
    """A client that missed the indices forgets what it had to send."""

    def settle(self, state: dict, layout: Layout) -> dict:
        return {name: array for name, array in state.items() if name != "update"}


class ForgetsQuantisation(AdaComp):
    """AdaComp whose residue is zero where something was sent, as if the layer's scale were exact."""

    def encode(self, update: Update, state: dict, key: Key) -> tuple[bytes, dict]:
        frame, after = super().encode(update, state, key)
        after["memory"][self.support(frame, update.layout)] = 0.0
        return frame, after


class SendsRawValues(AdaComp):
    """AdaComp that sends what it selected as it is, not at the layer's scale."""

    def _step(self, residue: np.ndarray, update: np.ndarray, stretch: Stretch, out: np.ndarray) -> Tensor:
        chosen = super()._step(residue, update, stretch, out)
        total = residue + update
        out[:] = total
        out[chosen.indices] = 0.0
        return wire.sparse((stretch.size,), chosen.indices, total[chosen.indices])

    def expect(self, stretch: Stretch) -> Expected:
        return expected_sparse(stretch.size, wire.Raw, stretch.size, (*wire.PLAIN, "complement"))

    def check(self, tensor: Tensor, stretch: Stretch) -> None:
        """Takes what it sends."""


class ComparesG(AdaComp):
    """AdaComp that holds G, not the look-ahead H, against the bin's largest magnitude."""

    def _step(self, residue: np.ndarray, update: np.ndarray, stretch: Stretch, out: np.ndarray) -> Tensor:
        return AdaComp(self.bin, self.conv_bin, factor=1.0)._step(residue, update, stretch, out)


class ClipsInSecret(TernGrad):
    """TernGrad that clips at 2.5 standard deviations and says it is unbiased."""

    def pack(self, values: np.ndarray, stretch: Stretch, key: Key) -> Tensor:
        return TernGrad(clip=2.5).pack(values, stretch, key)


class SharesSearch(SIDCo):
    """SIDCo whose adaptation belongs to the class: one for all layers and clients of the process."""

    shared: ClassVar[dict[str, np.ndarray]] = {}

    def pack_next(self, values: np.ndarray, stretch: Stretch, state: dict, key: Key) -> tuple[Tensor, dict]:
        mine = {name: self.shared.get(name, array) for name, array in state.items()}
        tensor, after = super().pack_next(values, stretch, mine, key)
        self.shared.update({name: after[name] for name in ("search", "ratios")})
        return tensor, after


class CutsInOrder(SIDCo):
    """A threshold estimate whose surplus is cut in the order of the indices: the last layers lose."""

    def pack_next(self, values: np.ndarray, stretch: Stretch, state: dict, key: Key) -> tuple[Tensor, dict]:
        tensor, after = super().pack_next(values, stretch, state, key)
        above = select_above(values, 0.5 * float(np.abs(values[tensor.indices]).min()))
        first = above[: self.count(stretch)]
        return self.listed(first, values[first], stretch), after


@dataclass(frozen=True, repr=False, eq=False)
class CutBlock(PositionalCodec):
    """A random block that ends where the vector ends: the first coordinates get fewer chances."""

    codec_id: ClassVar[str] = "cut-block"
    unbiased = True
    scope = "layer"

    density: float

    def pack(self, values: np.ndarray, stretch: Stretch, key: Key) -> Tensor:
        b = max(1, int(self.density * stretch.size))
        start = key.u64() % stretch.size
        block = np.arange(start, min(stretch.size, start + b))
        return wire.sparse((stretch.size,), block, values[block] * np.float32(stretch.size / b))


class SeedsByName(RandomK):
    """Random-k seeded with the sum of the bytes of the layer's name, plus the round."""

    def _seed(self, stretch: Stretch, key: Key) -> int:
        return sum(stretch.name.encode()) + key.round


class SharesInNameOnly(RandomK):
    """Random-k that calls its support shared and draws it from the client's own key."""

    def _seed(self, stretch: Stretch, key: Key) -> int:
        return key.u64()


class ReseedsAll(RandomK):
    """Random-k that sets the process's generator to get its draw."""

    def _seed(self, stretch: Stretch, key: Key) -> int:
        np.random.seed(key.u64() % 2**32)  # noqa: NPY002  # the mistake
        return int(np.random.randint(2**31))  # noqa: NPY002


class OneNorm(QSGD):
    """QSGD with one norm for the whole vector, which declares the bound of its buckets."""

    def pack(self, values: np.ndarray, stretch: Stretch, key: Key) -> Tensor:
        draws = key.uniform(values.size)
        return Tensor(wire.QsgdLevels.quantise(values, self.levels, 0, draws), (stretch.size,))

    def check(self, tensor: Tensor, stretch: Stretch) -> None:
        """Takes what it sends."""


class MeanOverAll(STC):
    """STC whose magnitude is the mean over all entries of the ternary vector, the zeros among them."""

    def pack(self, values: np.ndarray, stretch: Stretch, key: Key) -> Tensor:
        right = super().pack(values, stretch, key)
        kept = values[right.indices]
        scale = np.full(1, np.abs(kept).sum() / values.size, np.float32)
        return wire.sparse((stretch.size,), right.indices, wire.SignScale(kept < 0, scale))


class DropsZeros(ScaledSign):
    """The sign of zero is zero, and the scale is still the mean over all."""

    def pack(self, values: np.ndarray, stretch: Stretch, key: Key) -> Tensor:
        scale = float(np.abs(values).mean(dtype=np.float64))
        return Tensor(wire.Ternary(np.sign(values).astype(np.int8), scale), (stretch.size,))

    def expect(self, stretch: Stretch) -> Expected:
        return expected_dense(stretch.size, wire.Ternary)

    def check(self, tensor: Tensor, stretch: Stretch) -> None:
        """Takes what it sends."""


class RoundsDown(TopK):
    """k is the floor of d n, and that may be nothing at all."""

    def count(self, stretch: Stretch, key: Key | None = None) -> int:
        return int(self.density * stretch.size)


class LetsNaNPass(TopK):
    """Ranks whatever comes, as a comparison sort does: NaN compares false and is passed over in silence."""

    def encode(self, update: Update, state: dict, key: Key) -> tuple[bytes, dict]:
        return super().encode(Update(np.nan_to_num(update.vector), update.layout), state, key)
