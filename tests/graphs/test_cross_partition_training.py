"""Training where the label stands in rows of other owners: the one task on which a wrong sampler shows."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import torch

from fedcomp.graphs.layers import gather, operators_of
from fedcomp.graphs.plan import plan_round, wanted
from fedcomp.graphs.settings import SamplerSettings
from fedcomp.tasks import get_task
from fedcomp.tasks.base import single_thread
from fedcomp.tasks.graph import GraphTask

PARTS = 4
STEPS = 45


@pytest.fixture(scope="module")
def task() -> GraphTask:
    return cast(GraphTask, get_task("cross-partition", parts=PARTS))


def trained(task: GraphTask, settings: SamplerSettings) -> tuple[float, float]:
    """Accuracy with all neighbours after synchronous Adam, and remote input nodes of a batch; rows come from owners."""
    parts = [task.shared(PARTS).part(index) for index in range(PARTS)]
    model = task.model(0)
    descent, remote = torch.optim.Adam(model.parameters(), lr=0.1), 0
    with single_thread():
        for step in range(1, STEPS + 1):
            descent.zero_grad()
            for part in parts:
                (plan,) = plan_round(part, settings, seed=0, round=step, steps=1, batch_size=64)
                sent = {
                    owner: (ids, parts[owner].features[parts[owner].positions(ids)])
                    for owner, ids in wanted([plan], np.zeros(0, np.int64)).items()
                }
                x = gather(part, plan, sent)
                labels = torch.from_numpy(part.labels[part.positions(plan.batch)])
                task.objective(model, model(x, operators_of(plan, x.dtype)), labels).backward()
                remote += len(plan.remote)
            descent.step()
    return task.evaluate(model, task.test)["accuracy"], remote / (STEPS * PARTS)


@pytest.mark.long
def test_7_12_skew_learns_what_stands_in_remote_rows_from_a_third_of_them_and_local_only_does_not(
    task: GraphTask,
) -> None:
    unskewed, before = trained(task, SamplerSettings(n=200, mode="fixed", layers=1))
    skewed, after = trained(task, SamplerSettings(n=200, mode="fixed", scale=8.0, layers=1))
    local, nothing = trained(task, SamplerSettings(n=200, sampler="local", layers=1))
    assert unskewed >= 0.93
    assert skewed >= 0.93
    assert before >= 3 * after > 0
    assert local <= 0.5
    assert nothing == 0
