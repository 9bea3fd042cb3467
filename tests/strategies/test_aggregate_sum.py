"""An average that was made elsewhere makes the same step as one made of frames, and acknowledges the same clients."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvgM, FedMedian
from toy import client_app, fedavg, model, stack

from fedcomp.clients.compressed import compression
from fedcomp.codecs import TopK
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.errors import ConfigError, LayoutError
from fedcomp.flower.grid import InProcessGrid
from fedcomp.layout import Update
from fedcomp.strategies.hooked import Hooked

ONE = {"min_train_nodes": 1, "min_available_nodes": 1, "fraction_evaluate": 0.0}


def frames(strategy: Hooked, grid: InProcessGrid, arrays, number: int):
    """Run one training exchange; return the replies, their weighted mean update, the weights and who sent them."""
    replies = grid.send_and_receive(list(strategy.configure_train(number, arrays, ConfigRecord(), grid)))
    replies.sort(key=lambda r: int(r.content["metrics"]["partition"]))
    layout, total = strategy.layout, sum(int(r.content["metrics"]["num-examples"]) for r in replies)
    out = Update(np.full(layout.size, -0.0, np.float32), layout)
    members = []
    for reply in replies:
        from fedcomp.flower.payload import take_frame
        from fedcomp.flower.protocol import UPDATE

        frame = take_frame(reply.content, UPDATE)
        assert frame is not None
        strategy.codec.accumulate(frame, int(reply.content["metrics"]["num-examples"]) / total, out)
        header = reply.content["fedcomp.node"]
        members.append((reply.metadata.src_node_id, header["sequence"], header["generation"]))
    contents = [RecordDict({"metrics": r.content["metrics"]}) for r in replies]
    return replies, out.vector, float(total), members, contents


@pytest.mark.slow
@pytest.mark.parametrize(
    "inner",
    [lambda: fedavg(**ONE), lambda: FedAvgM(server_momentum=0.9, **ONE), lambda: FedAdam(**ONE)],
    ids=["avg", "momentum", "adam"],
)
@pytest.mark.parametrize("downlink", [None, TopK(density=0.2)], ids=["plain", "downlink"])
def test_it_is_the_step_of_aggregate_train(inner, downlink) -> None:
    arrays = {"frames": model(), "sum": model()}
    metrics = {}
    for way in arrays:
        with InProcessGrid(client_app([compression()]), 4, seed=3) as grid:
            strategy = Hooked(inner(), ErrorFeedback(TopK(density=0.1)), downlink)
            for number in (1, 2, 3):
                replies, mean, weight, members, contents = frames(strategy, grid, arrays[way], number)
                if way == "frames":
                    new, metrics[way] = strategy.aggregate_train(number, replies)
                else:
                    new, metrics[way] = strategy.aggregate_sum(number, mean, weight, members, contents)
                assert new is not None
                arrays[way] = new
                assert strategy.reports[number].compressed == 4
                assert strategy.reports[number].rolled_back == []
            # Everybody was acknowledged: nobody puts its last frame back.
            assert {p.acknowledged for p in strategy.reception.peers.values()} == {s for _, s, _ in members}
            assert strategy.sequences == {node: sequence for node, sequence, _ in members}
    np.testing.assert_array_equal(stack(arrays["frames"]), stack(arrays["sum"]))
    assert metrics["frames"] == metrics["sum"]


def test_who_is_not_in_the_sum_is_not_acknowledged() -> None:
    with InProcessGrid(client_app([compression()]), 3, seed=3) as grid:
        strategy = Hooked(fedavg(**ONE), ErrorFeedback(TopK(density=0.1)))
        _, mean, weight, members, _ = frames(strategy, grid, model(), 1)
        strategy.aggregate_sum(1, mean, weight, members[1:])
        assert strategy.reports[1].lost == 1
        replies, *_ = frames(strategy, grid, model(), 2)
        strategy.aggregate_train(2, replies)
        assert strategy.reports[2].rolled_back == [members[0][0]]


def test_what_is_no_mean_changes_nothing() -> None:
    with InProcessGrid(client_app([compression()]), 2, seed=3) as grid:
        strategy = Hooked(fedavg(**ONE), ErrorFeedback(TopK(density=0.1)))
        _, mean, weight, members, _ = frames(strategy, grid, model(), 1)
        for wrong in (mean[:-1], mean.astype(np.float64)):
            with pytest.raises(LayoutError, match="expected float32"):
                strategy.aggregate_sum(1, wrong, weight, members)
        assert strategy.aggregate_sum(1, mean, 0.0, members) == (None, None)
        assert strategy.aggregate_sum(1, mean, 1.0, []) == (None, None)
        infinite = mean.copy()
        infinite[0] = np.inf
        assert strategy.aggregate_sum(1, infinite, weight, members) == (None, None)
        assert "not finite" in strategy.reports[1].notes[0]
        assert all(p.acknowledged == 0 for p in strategy.reception.peers.values())
        new, metrics = strategy.aggregate_sum(1, mean, weight, members)
        assert new is not None
        assert metrics == MetricRecord()
        median = Hooked(FedMedian(**ONE), TopK(density=0.1))
        frames(median, grid, model(), 1)
        with pytest.raises(ConfigError, match="looks at single updates"):
            median.aggregate_sum(1, mean, weight, members)
