"""What an app brings for a graph run: its steps are those of the plan, its evaluation that of the whole graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from graph_federation import (
    DEGREE,
    ENOUGH,
    FEATURES,
    HIDDEN,
    NODES,
    PARTS,
    SEED,
    averaging,
    bits,
    graph,
    grid,
    learner,
    network,
    reports,
    run,
    strategy,
)
from graph_toys import CLASSES, toy_adjacency, toy_features
from torch.nn.functional import cross_entropy
from toy import with_halves

from fedcomp.clients.client import client
from fedcomp.clients.compressed import compression
from fedcomp.clients.edge import OWN_BUDGET
from fedcomp.clients.gcn import Learner, graph_owner
from fedcomp.clients.half import ClientHalf
from fedcomp.clients.private.dpsgd import Trainee, record_dp
from fedcomp.clients.private.local_dp import local_privacy
from fedcomp.clients.private.topagg import votes_only
from fedcomp.flower._private import adopt_identity
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.payload import PayloadError, models, round_of
from fedcomp.flower.records import to_record
from fedcomp.flower.rounds import fit
from fedcomp.graphs.base import GraphPart
from fedcomp.graphs.layers import GraphConvolutions, whole
from fedcomp.graphs.settings import RoundSettings, RowSettings, SamplerSettings
from fedcomp.privacy.local import LocalPolicy
from fedcomp.strategies.gcn.strategy import SkewedGCN
from fedcomp.strategies.round_log import NoUsableReply
from fedcomp.systems.graphs.words import EVALUATE_TYPE, TRAIN_TYPE

LearnerOf = Callable[[Message, Context], Learner]


def mine(parts: Sequence[GraphPart], message: Message, context: Context) -> GraphPart:
    return parts[int(context.node_config["partition-id"])]


def app(parts: Sequence[GraphPart], learner_of: LearnerOf = learner) -> ClientApp:
    return with_halves([graph_owner(partial(mine, parts), learner_of), compression()])


def built(kind: type[GraphConvolutions], dropout: float, message: Message, context: Context) -> Learner:
    """Return the message's model in a network of some kind."""
    usual = learner(message, context)
    made = kind(FEATURES, HIDDEN, CLASSES, dropout=dropout).to(torch.float64)
    made.load_state_dict(usual.model.state_dict())
    return replace(usual, model=made)


def test_evaluation_is_that_of_the_whole_graph_on_the_owned_test_nodes() -> None:
    parts, found = graph(), {}
    of = strategy(averaging(evaluate=True))
    model = run(of, grid(parts), 1, on_round=lambda number, arrays, outcome: found.update(outcome.evaluate))
    operators = whole(toy_adjacency(NODES, PARTS, DEGREE, SEED), 2, torch.float64)
    outputs = network(model)(torch.from_numpy(toy_features(NODES, FEATURES, SEED)), operators).detach()
    test = np.concatenate([part.test for part in parts])
    labels = torch.from_numpy(np.concatenate([part.labels[part.positions(part.test)] for part in parts]))
    assert found["loss"] == pytest.approx(cross_entropy(outputs[test], labels).item(), abs=1e-12)
    assert found["accuracy"] == pytest.approx((outputs[test].argmax(1) == labels).double().mean().item())


def test_parts_without_examples_isolated_nodes_and_a_batch_of_one() -> None:
    none = np.zeros(0, np.int64)
    parts = graph()
    parts[0] = replace(parts[0], train=none, memo={})
    parts[1] = replace(parts[1], test=none, memo={})
    parts[3] = replace(parts[3], train=parts[3].ids[-1:], memo={})
    of = strategy(averaging(evaluate=True), batch_size=1, local_steps=3)
    model = run(of, grid(parts), 2)
    for report in reports(of):
        assert report.lost == {0: "its part has no node to learn from"}
        # One without test nodes answers, and weighs nothing.
        assert (report.train.clients, report.evaluate.clients) == (PARTS - 1, PARTS)
    assert all(np.isfinite(value).all() for value in model.values())


class Plain(GraphConvolutions):
    """A module of the documented form, ``model(x, operators)``, and nothing more."""

    def forward(self, x: Any, operators: Any) -> Any:
        return super().forward(x, operators)


@pytest.mark.parametrize("mode", ["fixed", "measured"])
def test_c5_a_module_without_generator_and_visit_trains(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """It failed on every client. Without ``visit`` no norms of hidden layers are kept, which is logged."""
    parts, options = graph(), {"n": ENOUGH, "mode": mode, "scale": 1.0}
    usual = run(strategy(**options), grid(parts), 1)
    with caplog.at_level(logging.WARNING, logger="flwr.fedcomp"):
        plain = run(strategy(**options), grid(parts, app(parts, partial(built, Plain, 0.0))), 1)
    assert bits(plain) == bits(usual)
    assert ("takes no 'visit'" in caplog.text) == (mode == "measured")


def test_dropout_comes_from_the_runs_seed() -> None:
    parts = graph()
    dropping = app(parts, partial(built, GraphConvolutions, 0.5))
    first = run(strategy(n=ENOUGH, local_steps=2), grid(parts, dropping), 1)
    torch.rand(3)
    assert bits(run(strategy(n=ENOUGH, local_steps=2), grid(parts, dropping), 1)) == bits(first)
    assert bits(run(strategy(n=ENOUGH, local_steps=2), grid(parts), 1)) != bits(first)


def test_an_app_with_graph_halves_travels_to_other_processes() -> None:
    import cloudpickle

    parts = graph()
    usual = run(strategy(), grid(parts), 1)
    assert bits(run(strategy(), grid(parts, cloudpickle.loads(cloudpickle.dumps(app(parts)))), 1)) == bits(usual)


@pytest.mark.parametrize("kind", [TRAIN_TYPE, EVALUATE_TYPE])
def test_a_message_without_an_ask_is_refused(kind: str) -> None:
    adopt_identity((1, 1, 1))
    context = Context(1, 100, {"partition-id": 0, "num-partitions": PARTS}, RecordDict(), {})
    message = Message(RecordDict({"config": ConfigRecord({"server-round": 1})}), 2, kind)
    with pytest.raises(PayloadError, match="does not say which graph steps to run"):
        app(graph())(message, context)
    assert not context.state


def test_a_learner_is_asked_for_once_all_rows_are_there() -> None:
    """With the model that the server sent, and what of the message is the app's."""
    parts, asked = graph(), []

    def watched(message: Message, context: Context) -> Learner:
        asked.append((round_of(message), message.metadata.message_type, sorted(message.content)))
        assert list(models(message.content)) == ["arrays"]
        return learner(message, context)

    run(strategy(averaging(evaluate=True)), grid(parts, app(parts, watched)), 1)
    assert asked == [(1, TRAIN_TYPE, ["arrays", "config"])] * PARTS + [(1, EVALUATE_TYPE, ["arrays", "config"])] * PARTS


# A graph run among all else a client does: who hands out rows, and who does not.

OPTIONS = {"nodes": "60", "parts": "3", "hidden": "4", "columns": "150"}
CONFIG = {"task": "synthetic-graph", "clients": 3, **{f"task.{name}": value for name, value in OPTIONS.items()}}


def no_trainee(message: Message, context: Context) -> Trainee:
    raise AssertionError("nobody asks for a training with noise")


@pytest.mark.parametrize(
    ("guard", "said"),
    [
        (local_privacy(LocalPolicy(noise_multiplier=1.0, releases=3)), "private training messages only"),
        (votes_only(), "only answers requests for private votes"),
        (record_dp(no_trainee), "uses its records for nothing else"),
    ],
    ids=["local privacy", "votes", "own budget"],
)
def test_who_sends_nothing_without_noise_hands_out_no_rows_either(guard: ClientHalf, said: str) -> None:
    parts, asked = graph(), list[int]()

    def owned(message: Message, context: Context) -> GraphPart:
        asked.append(int(context.node_config["partition-id"]))
        return parts[asked[-1]]

    guarded = client(ClientApp(), guard, graph_owner(owned, learner))
    with pytest.raises(NoUsableReply, match=said):
        run(strategy(), grid(parts, guarded, node_config={OWN_BUDGET: 1.0}), 1)
    assert not asked


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
