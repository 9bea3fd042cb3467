"""How a step size falls over a run: by the number of a step, which follows from the server's round number alone."""

from __future__ import annotations

import math
from typing import Final

WARM_UP: Final = 20
"""Steps over which a step size rises first."""

LEAST: Final = 0.1
"""What is left of it in the end."""


def falling(number: int, steps: int) -> float:
    """Return the factor of a step size at step ``number``, from 0, of a run of ``steps``.

    It rises over :data:`WARM_UP` steps, falls along half a cosine to :data:`LEAST` and stays there.

    Examples
    --------
    >>> [round(falling(number, 360), 3) for number in (0, 19, 180, 360, 1000)]
    [0.05, 0.994, 0.55, 0.1, 0.1]
    """
    done = min(1.0, number / steps)
    return min(1.0, (number + 1) / WARM_UP) * (LEAST + (1.0 - LEAST) * 0.5 * (1.0 + math.cos(math.pi * done)))
