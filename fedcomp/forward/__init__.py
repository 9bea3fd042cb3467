"""Gradients from scalars: random directions known to both ends, and the loss's derivative along each."""

from typing import Final, Literal, get_args

Oracle = Literal["jvp", "differences"]
"""How a slope is measured: forward-mode differentiation, or central differences of the loss."""

ORACLES: Final[tuple[str, ...]] = get_args(Oracle)
