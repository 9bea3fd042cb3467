"""Gradients from scalars: directions that both sides draw, and how far along each of them the loss changes."""

from typing import Final, Literal, get_args

Oracle = Literal["jvp", "differences"]
"""How a slope is measured: forward-mode differentiation, or central differences of the loss."""

ORACLES: Final[tuple[str, ...]] = get_args(Oracle)
