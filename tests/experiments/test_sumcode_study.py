"""The study of coded sums: the oracle notices a wrong sum."""

from __future__ import annotations

import numpy as np
import pytest

from fedcomp.experiments.catalog.sumcode import EXPERIMENT
from fedcomp.experiments.studies import sumcode
from fedcomp.experiments.tables import Training


@pytest.mark.long
def test_the_oracle_notices_a_wrong_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one coordinate of one round."""
    config = EXPERIMENT.configure(assignments=("task.hidden=32", "max_steps=1", "exact_rounds=2"))
    training = Training.of(EXPERIMENT, config)
    kept: list[sumcode.Witness] = []

    class Keeping(sumcode.Witness):
        def __init__(self) -> None:
            super().__init__()
            kept.append(self)

    monkeypatch.setattr(sumcode, "Witness", Keeping)
    assert sumcode.exact_rounds("share", 5, training=training) == {"share": 1.0}
    (witness,) = kept
    spec = training.spec("coded sum, 5 clients")
    assert witness.exact(spec, 2) == 2
    name = next(iter(witness.models[3]))
    changed = witness.models[3][name].copy()
    flat = changed.reshape(-1)
    flat[7] = np.nextafter(flat[7], np.float32(9))
    witness.models[3] = {**witness.models[3], name: changed}
    assert witness.exact(spec, 2) == 1
    # A client that was forgotten: its memory is another one from then on.
    del witness.trained[1][0]
    assert witness.exact(spec, 2) == 0


def test_rows_say_how_many_may_be_lost() -> None:
    assert [sumcode.shape(n) for n in (5, 50)] == ["symbols=3 threshold=1", "symbols=30 threshold=10"]
