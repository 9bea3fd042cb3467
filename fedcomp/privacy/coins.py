"""Secret random numbers for models that draw them (dropout): fresh seeds for torch's global generators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fedcomp.privacy.entropy import Entropy

_WORDS: Final = 624
_STATE: Final = np.dtype(
    [
        ("seed", "<u8"),
        ("left", "<i4"),
        ("seeded", "<i4"),
        ("next", "<u8"),
        ("words", "<u8", (_WORDS,)),
        ("normals", "u1", (40,)),
    ]
)
"""State of torch's CPU generator, in the form of torch.get_rng_state(): a Mersenne twister, and stored normal deviates
(none here)."""


@contextmanager
def secret_draws(entropy: Entropy) -> Iterator[None]:
    """Let torch's global generators draw from states that ``entropy`` gives; afterwards they are as they were.

    What a model draws is dealt in the order of the batch. One record more exchanges the coins of all behind it, which
    moves a sum by far more than its bound. So the bound is on sums of equal coins for equal records, which says
    something about released sums only if nobody knows the coins and none is used twice (derived: they are independent
    of each other and of everything else, so that any way to deal them gives the same distribution of the sum).
    """
    cuda = torch.cuda.is_initialized()
    before, others = torch.get_rng_state(), torch.cuda.get_rng_state_all() if cuda else []
    try:
        torch.set_rng_state(_twister(entropy))
        if cuda:
            torch.cuda.manual_seed_all(int(entropy.words(1)[0] >> np.uint64(1)))
        yield
    finally:
        torch.set_rng_state(before)
        if cuda:
            torch.cuda.set_rng_state_all(others)


def _twister(entropy: Entropy) -> Tensor:
    """Return a state of 624 random words before their next twist. A seed would give the generator only 32 bits."""
    state = np.zeros((), _STATE)
    state["left"], state["seeded"] = 1, 1
    state["words"] = entropy.words(_WORDS) & np.uint64(0xFFFFFFFF)
    return torch.from_numpy(np.frombuffer(state.tobytes(), np.uint8).copy())
