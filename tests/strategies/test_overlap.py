"""Several rounds in flight as a driver of programs: what it shares with no other driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian, Result
from round_paths import Personal, quiet
from toy import client_app, model

from fedcomp.clients.compressed import compression
from fedcomp.codecs import Codec, ErrorFeedback, Identity, ScaleCom, SignSGD, TopK
from fedcomp.errors import ConfigError, StateError
from fedcomp.flower import checkpoint
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.rounds import fit
from fedcomp.layout import NONE_DENSE
from fedcomp.program import System
from fedcomp.strategies.overlap import Buffered, PipelinedStrategy
from fedcomp.strategies.server import Server
from fedcomp.strategies.shared_support import SharedSupport
from fedcomp.systems.pair import Pair

NODES, ROUNDS = 6, 9
FEW = ErrorFeedback(TopK(0.05))


def run(strategy: Any, half: Any | list[Any], start: ArrayRecord | None = None, rounds: int = ROUNDS) -> Result:
    pace = lambda delivery: 1.0 + 0.37 * delivery.partition  # noqa: E731
    with InProcessGrid(
        client_app(half if isinstance(half, list) else [half]), NODES, seed=4, compute_seconds=pace
    ) as grid:
        return fit(strategy, MeteredGrid(grid), model(counter=True) if start is None else start, rounds)


def bits(result: Result) -> dict[str, bytes]:
    return {name: array.numpy().tobytes() for name, array in result.arrays.items()}


def server(system: System, inner: FedAvg | None = None, **options: Any) -> Server:
    return Server(system, inner or quiet(), policy=NONE_DENSE, **options)


def test_a_buffer_leaves_integers_that_nobody_changed() -> None:
    """What is averaged, and no step, does not count less for its age."""

    def seven(message: Message, context: Context, call_next: Any) -> Message:
        reply = call_next(message, context)
        (name,) = reply.content.array_records
        reply.content[name]["num_batches_tracked"] = Array(np.array(7))
        return reply

    start = model(counter=True)
    start["num_batches_tracked"] = Array(np.array(7))
    strategy = Buffered(server(Pair(FEW)), concurrency=4, buffer=2)
    assert run(strategy, [compression(), seven], start, 20).arrays["num_batches_tracked"].numpy() == 7
    assert max(max(strategy.reports[number].overlap.staleness.values()) for number in range(1, 21)) > 0


@pytest.mark.parametrize("codec", [Identity(), ErrorFeedback(TopK(1.0))], ids=["identity", "topk"])
@pytest.mark.parametrize("overlap", ["pipelined", "buffered"])
@pytest.mark.parametrize("kind", [FedAvg, FedMedian])
def test_models_of_float64_end_where_those_of_float32_do(codec: Codec, overlap: str, kind: type[FedAvg]) -> None:
    """And keep what they hold beyond float32: the mean of models would be two trainings, and no step."""
    ends = {}
    for dtype in ("float32", "float64"):
        made = server(Pair(codec), quiet(kind))
        strategy = PipelinedStrategy(made) if overlap == "pipelined" else Buffered(made, concurrency=4, buffer=2)
        # What float32 has no room for.
        offset = 0.0 if dtype == "float32" else 2.0**-40
        start = ArrayRecord({name: Array(array.numpy().astype(dtype) + offset) for name, array in model().items()})
        ends[dtype] = {name: array.numpy() for name, array in run(strategy, compression(), start).arrays.items()}
        assert strategy.steps == ROUNDS
    for name, array in ends["float64"].items():
        assert array.dtype == np.float64
        np.testing.assert_allclose(array, ends["float32"][name], rtol=1e-6, atol=1e-3)
        assert np.abs(array).max() > 100
        assert np.any(array != array.astype(np.float32))


def test_systems_of_two_exchanges_are_piped_and_owe_nothing() -> None:
    """ScaleCom keeps nothing on the server: each cohort has a leader, and steps are the oldest round's."""
    alone = SharedSupport(ScaleCom(0.05), policy=NONE_DENSE)
    strategy = PipelinedStrategy(SharedSupport(ScaleCom(0.05), policy=NONE_DENSE))
    run(strategy, compression(), model())
    run(alone, compression(), model())
    reports = [strategy.reports[number] for number in range(1, ROUNDS + 1)]
    assert [max(report.overlap.staleness.values()) for report in reports] == [0, *[1] * (ROUNDS - 1)]
    assert {report.used for report in reports} == {NODES // 2}
    assert all(not report.rolled_back and not report.refused for report in reports)
    # Once a node knows the model it is sent steps, which lead over those of the rounds in between.
    assert {peer.version for peer in strategy.inner.roster.peers.values()} == {ROUNDS - 2, ROUNDS - 1}
    assert set(strategy.inner.leaders) == set(range(1, ROUNDS + 1))


@pytest.mark.long
def test_width_one_is_the_servers_own_loop_bit_for_bit() -> None:
    for make in (lambda: SharedSupport(ScaleCom(0.05), policy=NONE_DENSE), lambda: server(Pair(FEW), quiet(FedAdam))):
        assert bits(run(PipelinedStrategy(make(), 1), compression(), model())) == bits(
            run(make(), compression(), model())
        )


def test_models_of_nodes_own_are_piped_and_in_no_checkpoint(tmp_path: Path) -> None:
    strategy = PipelinedStrategy(server(Pair(FEW), quiet(Personal)))
    run(strategy, compression(), model())
    assert {report.used for report in strategy.reports.values()} == {NODES // 2}

    def keep(number: int, arrays: ArrayRecord, _: Any) -> None:
        checkpoint.save(tmp_path / "run", server_round=number, arrays=arrays, strategy=strategy)

    with (
        InProcessGrid(client_app([compression()]), NODES, seed=4) as grid,
        pytest.raises(StateError, match="node's own"),
    ):
        fit(strategy, grid, model(), 4, timeout=9, on_round=keep)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: PipelinedStrategy(quiet(), 0), "width"),
        (lambda: Buffered(quiet(), 0, 1), "concurrency"),
        (lambda: Buffered(quiet(), 1, 0), "buffer"),
        (lambda: Buffered(quiet(), 1, 1, weight="none"), "weight"),
        (lambda: Buffered(quiet(), 1, 1, server_lr=0.0), "server_lr"),
    ],
)
def test_what_cannot_overlap_is_refused_by_name(make: Any, match: str) -> None:
    """What is refused with an advice: tests/advice_of_pair.py."""
    with pytest.raises(ConfigError, match=match):
        run(make(), compression(), model())


@pytest.mark.long
@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("codec", [FEW, SignSGD(0.5)], ids=["memory", "votes"])
def test_a_server_that_crashes_with_rounds_in_flight_counts_no_round_twice(
    codec: Codec, width: int, tmp_path: Path
) -> None:
    """The nodes go on as they are: they answer rounds that they had answered as they did, and train in none again."""

    def build() -> PipelinedStrategy:
        return PipelinedStrategy(server(Pair(codec)), width)

    whole, path = run(build(), compression(), model()), tmp_path / "run.ckpt"
    with InProcessGrid(client_app([compression()]), NODES, seed=4) as inner:
        grid, first = MeteredGrid(inner), build()

        def keep(number: int, arrays: ArrayRecord, outcome: Any) -> None:
            if number == 5:
                checkpoint.save(path, server_round=5, arrays=arrays, strategy=first)

        fit(first, grid, model(), 6, on_round=keep)
        second, held = build(), checkpoint.load(path)
        held.apply(second)
        assert len(second.flights) == width - 1
        end = fit(second, grid, held.arrays, ROUNDS, start_round=6)
        rolled = [second.reports[number].rolled_back for number in range(5, ROUNDS + 1)]
    assert bits(end) == bits(whole)
    assert not any(rolled)


@pytest.mark.parametrize("overlap", ["pipelined", "buffered"])
def test_nodes_are_sent_steps_from_the_model_that_they_were_sent(overlap: str) -> None:
    """Which is not that of now when they answer."""
    made = server(Pair(FEW), downlink=TopK(0.1))
    strategy = PipelinedStrategy(made, 3) if overlap == "pipelined" else Buffered(made, concurrency=4, buffer=2)
    run(strategy, compression(), model(), 20)
    versions = {peer.version for peer in made.roster.peers.values()}
    assert min(versions) > 0
    assert len(versions) > 1
