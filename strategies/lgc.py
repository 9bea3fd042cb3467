"""LGC over Flower's messages: :class:`fedcomp.systems.lgc.LearnedGradients` with a cohort of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fedcomp.codecs.lgc import LGC
from fedcomp.layout import EndsDense
from fedcomp.strategies.averaging import Averaging, averaging_system
from fedcomp.systems import lgc
from fedcomp.systems.autoencoder import AutoencoderTraining

PUBLISHED: Final[Mapping[str, Any]] = {
    "codec": {"id": LGC.codec_id, "density": 0.001, "innovation": 0.00001, "instance": "server", "raw": 0},
    "policy": EndsDense(first=1, last=2),
    "warmup_rounds": 200,
    "training_rounds": 300,
    "training": AutoencoderTraining(optimizer="sgd", lr=0.001),
}
"""Arguments of :class:`LearnedGradients` with the values of the third party's implementation (read). It does not
normalise, which does not work (measured) and cannot be selected."""


class LearnedGradients(Averaging):
    """LGC: average updates that are sent as latents of an autoencoder trained on the updates of earlier rounds.

    Parameters
    ----------
    codec : LGC or dict, optional
        Instance, densities, error feedback.
    warmup_rounds, training_rounds, common, training
        As of :class:`fedcomp.systems.lgc.LearnedGradients`.
    **options
        As of :class:`~fedcomp.strategies.averaging.Averaging`; the policy's default is
        :class:`fedcomp.layout.EndsDense`, with which the first tensor travels dense.

    Notes
    -----
    Clients need numpy only; the server needs torch for the training.

    Examples
    --------
    >>> from fedcomp.codecs import LGC
    >>> strategy = LearnedGradients(LGC(density=0.01), warmup_rounds=5, training_rounds=50)
    >>> published = LearnedGradients(**PUBLISHED)
    """

    CODEC = LGC
    SYSTEM = lgc.LearnedGradients

    def __init__(
        self,
        codec: LGC | dict[str, Any] | None = None,
        *,
        warmup_rounds: int = 5,
        training_rounds: int = 50,
        common: str = "turn",
        **options: Any,
    ) -> None:
        given: Any = {"policy": EndsDense(), **options}
        super().__init__(codec, warmup_rounds=warmup_rounds, training_rounds=training_rounds, common=common, **given)


SYSTEM: Final = averaging_system(
    "lgc",
    "LGC",
    "Abrahamyan et al. 2022, Learned gradient compression for distributed deep learning",
    "entries that a leader chose, as latents of an autoencoder that the server trained on the first rounds; or one "
    "client's latents, and of all others a few values",
    LearnedGradients,
    ("density", "innovation", "instance", "ef"),
    ("training_rounds", "common"),
)
