"""The study of coded sums: the oracle notices a wrong sum."""

from __future__ import annotations

import numpy as np
import pytest

from fedcomp.experiments.catalog.sumcode import EXPERIMENT
from fedcomp.experiments.studies import sumcode
from fedcomp.experiments.tables import Training
from fedcomp.local import Local
from fedcomp.program import Step


@pytest.mark.long
@pytest.mark.parametrize("mode", ["share", "mask"])
def test_the_oracle_notices_a_wrong_model(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one coordinate of one round."""
    config = EXPERIMENT.configure(assignments=("task.hidden=32", "max_steps=1", "exact_rounds=3"))
    training = Training.of(EXPERIMENT, config)
    assert sumcode.exact_rounds(mode, 5, training=training) == {"share": 1.0}
    move = Local._move

    def off(self: Local, step: Step, number: int) -> None:
        move(self, step, number)
        if number == 2:
            self.model[7] = np.nextafter(self.model[7], np.float32(9))

    monkeypatch.setattr(Local, "_move", off)
    assert sumcode.exact_rounds(mode, 5, training=training) == {"share": pytest.approx(2 / 3)}


def test_rows_say_how_many_may_be_lost() -> None:
    assert [sumcode.shape(n) for n in (5, 50)] == ["symbols=3 threshold=1", "symbols=30 threshold=10"]
