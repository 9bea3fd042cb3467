"""Export to TensorBoard: one curve per system and metric, one point per round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from fedcomp.errors import optional
from fedcomp.experiments.spec import RoundRecord
from fedcomp.experiments.store import slug


def require() -> None:
    """Raise :class:`~fedcomp.errors.MissingExtra` unless TensorBoard is installed: before a run, not after it."""
    with optional("--tensorboard"):
        import tensorboard  # noqa: F401


def export(directory: Path, rounds: Mapping[str, Sequence[RoundRecord]]) -> None:
    """Write event files for ``tensorboard --logdir DIRECTORY``, one folder below ``directory`` for each label: every
    finite figure of a round, client metrics and a strategy's own among them.

    Parameters
    ----------
    directory : Path
    rounds : mapping of str to sequence of RoundRecord
        By label. What a record of a private system leaves out is not exported either.
    """
    with optional("--tensorboard"):
        from torch.utils.tensorboard import SummaryWriter

    for place, (label, records) in enumerate(rounds.items()):
        with SummaryWriter(directory / f"{place:02d}-{slug(label)}") as writer:
            for record in records:
                figures = asdict(record)
                metrics = {f"metrics/{key}": value for key, value in figures.pop("metrics").items()}
                for tag, value in (figures | metrics).items():
                    if tag != "round" and isinstance(value, int | float) and math.isfinite(value):
                        writer.add_scalar(tag, float(value), record.round)
