"""Codecs around another codec: the inner codec defines the frame and the receiver's part."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fedcomp.codecs.base import Codec
from fedcomp.layout import Layout, Update, Vector
from fedcomp.rng import Key
from fedcomp.wire import Bundle, Frame, Limits, Schema


class Wrapper(Codec):
    """Base of codecs that change what is encoded, not how: the server half is ``codec``'s.

    Attributes
    ----------
    codec : Codec
    """

    codec: Codec

    def schema(self, layout: Layout) -> Schema:
        return self.codec.schema(layout)

    def sparse(self, layout: Layout) -> bool:
        """Return the inner codec's: what it does with its frames decides, not what they list."""
        return self.codec.sparse(layout)

    def limits(self, layout: Layout) -> Limits:
        return self.codec.limits(layout)

    def longest(self, layout: Layout) -> int | None:
        return self.codec.longest(layout)

    def unwrapped(self, frame: Frame | Bundle, layout: Layout) -> Frame | Bundle:
        """Return what the inner codec reads in place of ``frame``: the frame itself, unless its values were changed."""
        return frame

    def open(self, frame: Frame | Bundle, layout: Layout) -> Bundle:
        return self.codec.open(frame, layout)

    def verify(self, frame: Frame | Bundle, layout: Layout, key: Key) -> Bundle:
        return self.codec.verify(frame, layout, key)

    def support(self, frame: Frame | Bundle, layout: Layout) -> NDArray[np.int64]:
        return self.codec.support(self.unwrapped(frame, layout), layout)

    def common_support(self, layout: Layout, key: Key) -> NDArray[np.int64] | None:
        return self.codec.common_support(layout, key)

    def accumulate(self, frame: Frame | Bundle, weight: float, out: Update) -> None:
        self.codec.accumulate(self.unwrapped(frame, out.layout), weight, out)

    def enter(self, update: Update) -> None:
        self.codec.enter(update)

    def gather(self, frame: Frame | Bundle, weight: float, total: Update) -> None:
        self.codec.gather(self.unwrapped(frame, total.layout), weight, total)

    def conclude(self, total: Update) -> None:
        self.codec.conclude(total)

    def tensor_names(self, layout: Layout) -> tuple[str, ...]:
        return self.codec.tensor_names(layout)

    def decode(self, frame: Frame | Bundle, layout: Layout) -> Vector:
        return self.codec.decode(self.unwrapped(frame, layout), layout)

    def norm(self, frame: Frame | Bundle, layout: Layout) -> float:
        return self.codec.norm(self.unwrapped(frame, layout), layout)

    def figures(self, frame: Frame | Bundle, layout: Layout, length: float) -> Mapping[str, float]:
        return self.codec.figures(self.unwrapped(frame, layout), layout, length)
