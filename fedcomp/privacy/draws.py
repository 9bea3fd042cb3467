"""What a model draws while it looks at records, as dropout does: from a secret state of torch's generators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch

from fedcomp.privacy.entropy import Entropy

_TWISTER: Final = slice(24, 24 + 8 * 624)
"""Where torch's state of the processor's generator has the 624 words of the Mersenne twister, each in eight bytes."""


@contextmanager
def secret_draws(entropy: Entropy) -> Iterator[None]:
    """Let torch's global generators draw from a state that ``entropy`` gives; afterwards they are as they were.

    What a model draws for its records, as dropout does, is dealt in the order of the batch. One record more exchanges
    the coins of all behind it, which moves a sum by far more than its bound. So the bound is on sums of equal coins for
    equal records, which says something about released sums only if nobody knows the coins and none is used twice
    (derived: they are independent of each other and of everything else, so that any way to deal them gives the same
    distribution of the sum).
    """
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        # Makes a state that is about to be twisted. A seed alone would not do: the processor's generator takes 32 bits.
        torch.manual_seed(0)
        state = torch.get_rng_state()
        words = entropy.words(624) & np.uint64(0xFFFFFFFF)
        state[_TWISTER] = torch.from_numpy(words.astype("<u8").view(np.uint8))
        torch.set_rng_state(state)
        if devices:
            torch.cuda.manual_seed_all(int(entropy.words(1)[0] >> np.uint64(1)))
        yield
