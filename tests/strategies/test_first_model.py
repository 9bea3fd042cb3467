"""A first model that the nodes make themselves: named by its digest, sent only to those that made another one."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message
from toy import client_app, fedavg, model, stack

from fedcomp.clients.compressed import compression
from fedcomp.codecs import Identity, TopK
from fedcomp.errors import ConfigError
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.strategies.compressed import Compressed

DENSE = 4 * 1212


def first(msg: Message, context: Context) -> ArrayRecord:
    return model(0.5, counter=True)


def start(make, *, rounds=3, at_nodes=True, downlink=None, fault=None, state=None, seed=3):
    """Train with four nodes that have ``make`` for a first model, by partition where it is a dictionary."""
    by_partition = make if isinstance(make, dict) else {}
    apps = {i: client_app([compression(first_model=by_partition.get(i, first))]) for i in range(4)}
    if not isinstance(make, dict):
        apps = dict.fromkeys(range(4), client_app([compression(first_model=make)]))

    def app(msg: Message, context: Context) -> Message:
        return apps[int(context.node_config["partition-id"])](msg, context)

    strategy = Compressed(
        fedavg(fraction_evaluate=0.0),
        TopK(density=0.02),
        downlink=downlink or TopK(density=0.02),
        first_model_at_nodes=at_nodes,
    )
    if state is not None:
        strategy.load_state_dict(state)
        # As whoever resumes from a file does: nodes may have got later versions since.
        strategy.renumber()
    ledger = TrafficLedger()
    grid = InProcessGrid(app, 4, seed=seed, fault=fault)
    result = strategy.start(MeteredGrid(grid, ledger), first(None, None), num_rounds=rounds, timeout=9)
    down = [ledger.total(round=r, direction="down", value="payload") for r in range(1, rounds + 1)]
    versions = [int(grid.context(n).state.config_records["fedcomp.replica"]["version"]) for n in grid.get_node_ids()]
    return strategy, result.arrays, down, versions


@pytest.mark.parametrize("downlink", [TopK(density=0.02), Identity()], ids=repr)
def test_the_training_is_the_same_without_the_first_models_bytes(downlink) -> None:
    sent, with_model, paid, _ = start(None, at_nodes=False, downlink=downlink)
    strategy, without, down, versions = start(first, downlink=downlink)
    assert stack(with_model).tobytes() == stack(without).tobytes()
    assert paid[0] >= 4 * DENSE
    assert down[0] == 0
    assert down[1:] == paid[1:]
    assert versions == [3] * 4
    assert [report.used for report in strategy.reports.values()] == [report.used for report in sent.reports.values()]


def one_bit_off(msg: Message, context: Context) -> ArrayRecord:
    arrays = {name: array.numpy().copy() for name, array in first(msg, context).items()}
    arrays["bias"].view(np.uint32)[3] ^= 1
    return ArrayRecord({name: Array(value) for name, value in arrays.items()})


def shorter(msg: Message, context: Context) -> ArrayRecord:
    return ArrayRecord({"weight": first(msg, context)["weight"]})


def other_buffer(msg: Message, context: Context) -> ArrayRecord:
    arrays = dict(first(msg, context).items())
    return ArrayRecord({**arrays, "num_batches_tracked": Array(np.array(7, np.int64))})


@pytest.mark.parametrize("make", [one_bit_off, shorter, other_buffer, None], ids=["bit", "tensor", "buffer", "none"])
def test_a_node_that_makes_another_model_is_refused_once_and_sent_the_servers(make) -> None:
    strategy, _, down, versions = start({2: make})
    refused = [report.refused for report in strategy.reports.values()]
    assert [len(each) for each in refused] == [1, 0, 0]
    (reason,) = refused[0].values()
    assert "fedcomp.resync" in reason
    assert down[0] == 0
    assert DENSE <= down[1] < 2 * DENSE, "the whole model to this node, steps to the others"
    assert down[2] < DENSE
    assert versions == [3] * 4


def test_a_node_that_comes_later_is_sent_the_steps_since_the_first_model() -> None:
    def away(delivery):
        return "offline" if delivery.partition == 1 and delivery.round < 3 else None

    strategy, _, down, versions = start(first, rounds=4, fault=away)
    assert [report.used for report in strategy.reports.values()] == [3, 3, 4, 4]
    assert max(down) < DENSE
    assert versions == [4] * 4


def test_nodes_make_no_model_where_it_is_sent_or_held() -> None:
    made = []

    def counted(msg: Message, context: Context) -> ArrayRecord:
        made.append(int(context.node_config["partition-id"]))
        return first(msg, context)

    start(counted, at_nodes=False)
    assert made == []
    start(counted)
    assert sorted(made) == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", [3, 4], ids=["the same nodes", "nodes it has not met"])
def test_a_resumed_server_sends_its_model_and_not_the_first_ones_name(seed: int) -> None:
    """No steps lead from the first model to that of the checkpoint."""
    before, _, _, _ = start(first, rounds=2)
    strategy, _, down, _ = start(first, rounds=1, state=before.state_dict(), seed=seed)
    assert down[0] >= 4 * DENSE
    assert not strategy.reports[1].refused


def test_without_a_downlink_there_is_no_first_model_to_leave_out() -> None:
    with pytest.raises(ConfigError, match="Identity"):
        Compressed(fedavg(), TopK(density=0.1), first_model_at_nodes=True)
