"""The study of sparse communication: the grid is complete, and every place of it another codec."""

from __future__ import annotations

import pytest

from fedcomp.experiments.catalog.sparse_study import EXPERIMENT
from fedcomp.experiments.studies import sparse_study
from fedcomp.experiments.tables import Training, planned


def test_the_grid_is_complete_and_without_memory_is_another_codec() -> None:
    config = EXPERIMENT.configure(quick=True)
    training = Training.of(EXPERIMENT, config)
    assert len(list(sparse_study.grid(config))) == len(training.rows) - 1 == 4 * 2 * 2 * 2 * 2
    assert len({repr(planned(training.spec(label), training)[1].to_config()) for label in training.rows}) == 65


def test_densities_are_checked_before_anything_runs() -> None:
    option = EXPERIMENT.options["densities"]
    assert option.parse("densities", "0.1, 0.01") == "0.1, 0.01"
    for wrong in ("", "0", "2", "0.1;0.2", "nan"):
        with pytest.raises(ValueError, match="densities"):
            option.parse("densities", wrong)
