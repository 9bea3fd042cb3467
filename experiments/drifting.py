"""A part of the experiment ``flare``: sensors of one edge whose surroundings change, tick by tick."""

from __future__ import annotations

import math


def nominal_threshold(reference: int, window: int, level: float) -> float:
    """Return the textbook's threshold of the two-sample Kolmogorov-Smirnov test.

    Its level is that of one comparison of two fresh samples. A deployed sensor compares window after window with one
    and the same finite reference; false alarms then follow how lucky that reference was.
    """
    return math.sqrt(-math.log(level / 2) / 2) * math.sqrt((reference + window) / (reference * window))
