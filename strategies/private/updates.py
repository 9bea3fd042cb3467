"""From the checked replies of a private round to one vector each, decoded one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fedcomp.codecs import Codec
from fedcomp.layout import Layout, Vector
from fedcomp.strategies.replies import Arrival


def decoded_updates(
    arrivals: Sequence[Arrival], codec: Codec, layout: Layout, start: Vector
) -> Iterator[tuple[int, Vector]]:
    """Yield node and update of each arrival; no two decoded updates exist at the same time.

    Parameters
    ----------
    start : float32 array, (layout.size,)
        What clients trained from. Plain arrays, and frames of a lossless codec, hold whole models; the update is what
        they changed. It may overflow to infinity, which the sum then refuses.
    """
    for arrival in arrivals:
        base = start if arrival.sent.base is None else layout.flatten(arrival.sent.base)
        with np.errstate(over="ignore", invalid="ignore"):
            if arrival.frame is not None:
                vector = codec.decode(arrival.frame, layout)
                yield arrival.sent.node, vector - base if codec.lossless else vector
            elif arrival.plain is not None:
                yield arrival.sent.node, layout.flatten(arrival.plain) - base
