"""The study of sparse communication: the grid is complete, and every place of it another codec."""

from __future__ import annotations

from itertools import product

import pytest

from fedcomp.experiments.catalog.sparse_study import EXPERIMENT
from fedcomp.experiments.studies import sparse_study


def test_the_grid_is_complete_and_without_memory_is_another_codec() -> None:
    names, axes = zip(*sparse_study.axes(EXPERIMENT.configure(quick=True)).items(), strict=True)
    grid = [dict(zip(names, place, strict=True)) for place in product(*axes)]
    assert len(grid) == 4 * 2 * 2 * 2 * 2
    assert len({repr(sparse_study.codec_of(**place)) for place in grid}) == len(grid)


def test_densities_are_checked_before_anything_runs() -> None:
    option = EXPERIMENT.options["densities"]
    assert option.parse("densities", "0.1, 0.01") == "0.1, 0.01"
    for wrong in ("", "0", "2", "0.1;0.2", "nan"):
        with pytest.raises(ValueError, match="densities"):
            option.parse("densities", wrong)
