"""A graph run among all else a client does: who hands out rows, and who does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from graph_federation import averaging, graph, grid, learner, run, strategy
from toy import with_halves

from fedcomp.clients.compressed import compression
from fedcomp.clients.edge import OWN_BUDGET
from fedcomp.clients.gcn import graph_owner
from fedcomp.clients.private.local_dp import local_privacy
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.records import to_record
from fedcomp.flower.rounds import fit
from fedcomp.graphs.settings import RoundSettings, RowSettings, SamplerSettings
from fedcomp.privacy.local import LocalPolicy
from fedcomp.strategies.gcn.strategy import SkewedGCN
from fedcomp.strategies.round_log import NoUsableReply

OPTIONS = {"nodes": "60", "parts": "3", "hidden": "4", "columns": "150"}
CONFIG = {"task": "synthetic-graph", "clients": 3, **{f"task.{name}": value for name, value in OPTIONS.items()}}


def test_who_sends_nothing_without_noise_hands_out_no_rows_either() -> None:
    parts = graph()
    owner = graph_owner(lambda message, context: parts[context.node_config["partition-id"]], learner)
    guarded = with_halves([local_privacy(LocalPolicy(noise_multiplier=1.0, releases=3)), owner, compression()])
    with pytest.raises(NoUsableReply, match="private training messages only"):
        run(strategy(), grid(parts, guarded), 1)


def generic(budget: int = -1, options: Mapping[str, Any] = CONFIG) -> tuple[SkewedGCN, ArrayRecord, ArrayRecord]:
    """Run a round of the generic app on a graph task; return the strategy, and the model before and after it."""
    from fedcomp.clients.app import app
    from fedcomp.tasks import get_task
    from fedcomp.tasks.arrays import to_arrays

    start = to_record(to_arrays(get_task("synthetic-graph", **OPTIONS).model(2)))
    of = SkewedGCN(
        averaging(), SamplerSettings(sampler="full"), rows=RowSettings(), rounds=RoundSettings(batch_size=0), seed=2
    )

    def node(partition: int) -> dict[str, Any]:
        known = {"partition-id": partition, "num-partitions": 3}
        return known | ({OWN_BUDGET: 1.0} if partition == budget else {})

    with InProcessGrid(app, 3, seed=2, node_config=node) as over:
        given = ConfigRecord({**options, "lr": 0.5, "weight_decay": 0.1, "seed": 2})
        result = fit(of, over, start, 1, timeout=60.0, train_config=given)
    return of, start, result.arrays


@pytest.mark.slow
def test_the_generic_app_owns_a_part_of_the_tasks_graph_and_trains_its_model() -> None:
    from fedcomp.tasks import get_task

    of, start, after = generic()
    assert of.reports[1].gcn.train.clients == 3
    assert of.reports[1].gcn.train.rows_fetched > 0
    task = get_task("synthetic-graph", **OPTIONS)
    model, wanted, total = task.model(2), {}, 0
    for index in range(3):
        data = task.client(index, 3)
        loss = task.objective(model, task.outputs(model, data.tensors[0]), data.tensors[1])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        total += len(data)
        for (name, p), g in zip(model.named_parameters(), gradients, strict=True):
            step = (p - 0.5 * (g + 0.1 * p)).detach().numpy()
            wanted[name] = wanted.get(name, 0.0) + len(data) * step
    for name, value in wanted.items():
        np.testing.assert_allclose(after[name].numpy(), value / total, rtol=0, atol=1e-6)
        assert not np.array_equal(after[name].numpy(), start[name].numpy())


@pytest.mark.slow
def test_the_generic_app_refuses_tasks_without_a_graph_and_rows_of_guarded_nodes() -> None:
    with pytest.raises(NoUsableReply, match=r"'digits' has no graph.*'digits-graph'"):
        generic(options={"task": "digits", "clients": 3})
    of, *_ = generic(budget=1)
    assert list(of.reports[1].gcn.absent) == [1]
    assert any("budget of its own" in reason for reason in of.reports[1].refused.values())
