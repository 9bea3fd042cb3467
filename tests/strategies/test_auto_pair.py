"""What ``Auto`` decides by itself: bits and form by the first cohort, less on slow links; and what is reported."""

from __future__ import annotations

import itertools
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import FedAvg, FedMedian
from toy import training

from fedcomp.clients.compressed import compression
from fedcomp.codecs import Auto, ErrorFeedback, get_codec
from fedcomp.codecs.auto import at_link
from fedcomp.errors import ConfigError, NoUsableReply
from fedcomp.flower import checkpoint
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.rounds import fit
from fedcomp.kernels import contexts
from fedcomp.layout import Layout, TensorSpec, Update
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.private.dp_fedavg import DpFedAvg

ROWS, COLUMNS = 60, 500
SIZE = ROWS * COLUMNS
LAYOUT = Layout((TensorSpec("w", (ROWS, COLUMNS), "float32", 0, SIZE),))
ONE = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1, "fraction_evaluate": 0.0}


def change(number: int, node: int) -> np.ndarray:
    """Return an update whose rows and columns are unlike, much of it common to all nodes."""
    rng, own = np.random.default_rng(number), np.random.default_rng((number, node))
    scales = np.exp(rng.normal(size=(ROWS, 1)) + rng.normal(size=(1, COLUMNS)))
    return (scales * (rng.normal(size=(ROWS, COLUMNS)) + own.normal(size=(ROWS, COLUMNS)))).astype(np.float32)


def begun(nodes: int, examples: int = 10, **grid: object) -> tuple[InProcessGrid, ArrayRecord]:
    step = lambda arrays, *place: {"w": arrays["w"] + change(*place)}  # noqa: E731
    app = training(step, [compression()], examples=lambda partition: examples)
    return InProcessGrid(app, nodes, **grid), ArrayRecord({"w": Array(np.zeros((ROWS, COLUMNS), np.float32))})


def run(strategy: Compressed, nodes: int, rounds: int = 1, examples: int = 10, **grid: object) -> None:
    strategy.start(*begun(nodes, examples, **grid), num_rounds=rounds, timeout=60)


def bits(strategy: Compressed, number: int = 1) -> list[float]:
    return sorted(strategy.reports[number].frames["bits"].values())


@pytest.mark.parametrize(
    ("auto", "nodes", "share", "form"),
    [
        (Auto(), 8, 1.0, "unbiased"),
        (Auto(), 1, 1.0, "unbiased"),
        (Auto(bits=0.1), 8, 1.0, "unbiased"),
        (Auto(bits=0.1), 4, 1.0, "memory"),
        (Auto(bits=0.1), 16, 0.25, "rounded"),
        (Auto(bytes=400), 8, 1.0, "unbiased"),
        (Auto(bytes=400), 5, 1.0, "memory"),
        (Auto(bits=0.1, feedback=False), 4, 1.0, "unbiased"),
        (Auto(bits=2.0, feedback=True), 8, 1.0, "memory"),
    ],
)
def test_the_form_follows_from_bits_and_cohort(auto: Auto, nodes: int, share: float, form: str) -> None:
    """Unbiased from 1.3/(2N + 1) bits on: 0.077 for eight replies, 0.144 for four; 400 bytes are 0.107 bits."""
    strategy = Compressed(FedAvg(**{**ONE, "fraction_train": share}), auto)
    run(strategy, nodes)
    codec = strategy.system.codec
    found = "memory" if isinstance(codec, ErrorFeedback) else "rounded" if codec.rounded else "unbiased"
    assert found == form
    budget = 8 * auto.budget(SIZE) / SIZE
    assert all(0.5 * budget < each <= budget for each in bits(strategy))


@pytest.mark.parametrize(
    ("bits", "replies", "rounded"), [(0.43, 1, True), (0.44, 1, False), (0.02, 50, False), (0.012, 50, True)]
)
def test_one_reply_needs_nearly_half_a_bit_and_fifty_a_fiftieth(bits: float, replies: int, rounded: bool) -> None:
    assert Auto(bits).settled(1_000_000, replies, True).feedback is rounded


@pytest.mark.parametrize("auto", [Auto(bits=0.5, feedback=False), Auto(bits=0.5, feedback=True)], ids=repr)
def test_clients_with_and_without_compiled_code_are_served_in_one_round(
    auto: Auto, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other client sends signs, or top-k, within the same budget."""
    installed = itertools.cycle((True, False))
    monkeypatch.setattr(contexts, "compiled", lambda: next(installed))
    strategy = Compressed(FedAvg(**ONE), auto)
    run(strategy, 8)
    assert strategy.reports[1].used == 8
    assert not strategy.reports[1].refused
    assert next(installed), "each client has asked once"
    assert all(0.4 < each <= 0.5 for each in bits(strategy))


def test_what_was_settled_stays_after_a_restart_with_another_cohort() -> None:
    """With eight replies 0.1 bit is unbiased, with two it would not be."""
    first = Compressed(FedAvg(**ONE), Auto(bits=0.1))
    run(first, 8)
    second = Compressed(FedAvg(**ONE), Auto(bits=0.1))
    second.load_state_dict(first.state_dict())
    run(second, 2)
    assert second.settled == first.settled == second.system.codec.to_config()
    assert not isinstance(second.system.codec, ErrorFeedback)
    fresh = Compressed(FedAvg(**ONE), Auto(bits=0.1))
    run(fresh, 2)
    assert isinstance(fresh.system.codec, ErrorFeedback)


def test_every_client_keeps_to_the_seconds_of_its_own_link(caplog: pytest.LogCaptureFixture) -> None:
    """Half a second of 4 and 8 kB/s; the third node is told nothing of its link, and says so."""
    links = {0: {"uplink": "32kbit"}, 1: {"uplink": "64kbit"}, 2: {}}
    strategy = Compressed(FedAvg(**ONE), Auto(seconds=0.5))
    with caplog.at_level(logging.WARNING):
        run(strategy, 3, node_config=links.__getitem__)
    unknown, slow, fast = (each * SIZE / 8 for each in bits(strategy))
    assert 0.85 * SIZE / 16 < unknown <= SIZE / 16
    assert 0.85 * 2000 < slow <= 2000
    assert 0.85 * 4000 < fast <= 4000
    assert "does not know the rate of its uplink" in caplog.text


def test_a_slow_link_takes_a_fifth_of_the_time_of_training_and_not_less_than_the_form_needs() -> None:
    """With eight replies the least are 2.6/17 bits; the budget of half a bit is never exceeded."""
    auto = Auto().settled(SIZE, 8, True)
    assert auto.least == pytest.approx(2.6 / 17)
    for seconds, expected in ((0.0, 2.6 / 17), (1e9, 0.5), (1.0, 8 * 0.2 * 5000 / SIZE)):
        found = at_link(auto, SIZE, lambda: 5000.0, lambda s=seconds: s)
        assert found.budget(SIZE) * 8 / SIZE == pytest.approx(expected, abs=8 / SIZE)
    assert at_link(auto, SIZE, lambda: 0.0, lambda: 1e-3).budget(SIZE) == SIZE // 16
    said = Auto(bits=0.3).settled(SIZE, 8, True)
    assert at_link(said, SIZE, lambda: 1.0, lambda: 1e-3) is said, "a budget that was said is no link's business"
    strategy = Compressed(FedAvg(**ONE), Auto())
    run(strategy, 8, node_config={"uplink": "1kbit"})
    assert 0.8 * 2.6 / 17 < bits(strategy)[0] <= bits(strategy)[-1] <= 2.6 / 17


def test_an_uplink_that_is_no_rate_is_refused_by_the_node() -> None:
    with pytest.raises(Exception, match="is not a bandwidth"):
        run(Compressed(FedAvg(**ONE), Auto()), 2, node_config={"uplink": "fast"})


def test_memory_and_link_go_together() -> None:
    """A memory under a budget that shrinks holds what was not sent: nothing is lost."""
    update = Update(change(1, 0).reshape(-1), LAYOUT)
    codec = ErrorFeedback(Auto(seconds=1.0, feedback=True))
    memory, sent = codec.init(LAYOUT), np.zeros(SIZE, np.float64)
    for number, rate in enumerate((4000.0, 500.0, 9000.0)):
        limited = at_link(codec, SIZE, lambda rate=rate: rate, lambda: 0.0)
        frame, memory = limited.encode(update, memory, Key(0, "uplink", number, 0))
        assert len(frame) <= rate + 64
        sent += codec.decode(frame, LAYOUT)
    np.testing.assert_allclose(sent + memory["memory"], 3.0 * update.vector, atol=1e-3)


def test_downwards_every_error_is_sent_later() -> None:
    strategy = Compressed(FedAvg(**ONE), Auto(), downlink=Auto())
    assert strategy.downlink == Auto(bits=1.0, feedback=True)
    assert Compressed(FedAvg(**ONE), downlink=Auto(bits=0.25)).downlink == Auto(bits=0.25, feedback=True)
    assert Compressed(FedAvg(**ONE), downlink=Auto(bytes=4000)).downlink.budget(SIZE) == 4000
    with pytest.raises(ConfigError, match="larger than what it sends"):
        Compressed(FedAvg(**ONE), downlink=Auto(feedback=False))
    run(strategy, 4, rounds=3)
    assert [report.used for report in strategy.reports.values()] == [4, 4, 4]


def test_a_restarted_server_goes_on_with_the_very_copy_that_its_nodes_have(tmp_path: Path) -> None:
    """Every step down is one of the server's memory to the copy of the nodes, who refuse it for a bit of difference."""

    def made() -> Compressed:
        return Compressed(FedAvg(**ONE), Auto(bits=0.5), downlink=Auto())

    def ended(strategy: Compressed, grid: InProcessGrid, arrays: ArrayRecord, **more: Any) -> bytes:
        ledger = TrafficLedger()
        done = fit(strategy, MeteredGrid(grid, ledger), arrays, 4, timeout=60, **more)
        assert not any(report.refused for report in strategy.reports.values())
        assert ledger.total("payload", round=4, direction="down") < SIZE
        return done.arrays["w"].numpy().tobytes()

    grid, start = begun(3)
    expected = ended(made(), grid, start)
    first, (grid, start) = made(), begun(3)

    def keep(number: int, arrays: ArrayRecord, outcome: Any) -> None:
        checkpoint.save(tmp_path / "run", server_round=number, arrays=arrays, strategy=first)
        if number == 2:
            raise KeyError("interrupted")

    with pytest.raises(KeyError, match="interrupted"):
        fit(first, grid, start, 4, timeout=60, on_round=keep)
    stored, second = checkpoint.load(tmp_path / "run"), made()
    stored.apply(second)
    assert ended(second, grid, stored.arrays, start_round=3) == expected


def test_where_single_updates_are_looked_at_they_have_a_bit_each(caplog: pytest.LogCaptureFixture) -> None:
    strategy = Compressed(FedMedian(**ONE), Auto())
    run(strategy, 4)
    assert strategy.system.codec == Auto(bits=1.0, feedback=False)
    assert bits(strategy)[0] > 0.9
    with caplog.at_level(logging.WARNING):
        run(Compressed(FedMedian(**ONE), Auto(bits=0.5)), 4)
    assert "less than a bit a value tells it little" in caplog.text


def test_a_private_round_is_as_long_for_a_slow_link_as_for_a_fast_one() -> None:
    inner = DpFedAvg(FedAvg(**ONE), clip=1.0, noise_multiplier=1.0, population=4, insecure_deterministic=True)
    strategy = Compressed(inner, Auto(seconds=2.0))
    run(strategy, 4, node_config=lambda partition: {"uplink": ("2kbit", "1mbit")[partition % 2]})
    assert strategy.system.codec == Auto(bits=0.5, feedback=False)
    assert strategy.reports[1].used == 4
    longest = strategy.system.codec.longest(LAYOUT)
    assert longest < strategy.reports[1].padded_bytes < longest + 32, "one length for all, or they had been refused"


@pytest.mark.parametrize("budget", [2.0, 1.0, 0.3])
def test_the_noise_that_is_reported_is_that_of_the_frames(budget: float) -> None:
    """Of many draws: the mean squared error over the energy of the update, whole or of a part of the columns."""
    codec, update = Auto(bits=budget, feedback=False), Update(change(3, 0).reshape(-1), LAYOUT)
    energy = float(np.dot(update.vector, update.vector))
    true, said = [], []
    for number in range(24):
        frame, _ = codec.encode(update, {}, Key(1, "uplink", number, 0))
        error = codec.decode(frame, LAYOUT).astype(np.float64) - update.vector
        true.append(float(np.dot(error, error)) / energy)
        said.append(codec.figures(frame, LAYOUT, codec.norm(frame, LAYOUT))["noise"])
    assert np.mean(said) == pytest.approx(np.mean(true), rel=0.12)


def test_noise_beyond_twice_the_signal_is_said_once() -> None:
    strategy = Compressed(FedAvg(**ONE), Auto(bits=0.05, feedback=False))
    run(strategy, 2, rounds=2)
    shares = [each / 4 for each in strategy.reports[1].frames["noise"].values()]
    assert strategy.reports[1].noise.over_signal == pytest.approx(math.fsum(shares))
    assert math.fsum(shares) > 2.0
    said = ["error is about" in note for report in strategy.reports.values() for note in report.notes]
    assert said.count(True) == 1
    quiet = Compressed(FedAvg(**ONE), Auto())
    run(quiet, 8)
    assert 0.0 < quiet.reports[1].noise.over_signal < 0.5
    assert not quiet.reports[1].notes


def test_two_budgets_are_refused_and_settings_survive_a_message() -> None:
    with pytest.raises(ConfigError, match="bits and bytes of Auto both set the budget"):
        Auto(bits=1.0, bytes=1000)
    for codec in (Auto(), Auto(bytes="3.5 kB"), Auto(seconds=2), Auto(bits=1.5, feedback=True)):
        assert get_codec(codec.to_config()) == codec
    assert Auto(bytes="3.5 kB").bytes == 3500


def test_clients_without_examples_are_refused_and_end_no_run() -> None:
    """A mean of no weight has no noise, either."""
    with pytest.raises(NoUsableReply, match="weight"):
        run(Compressed(FedAvg(**ONE), Auto()), 3, examples=0)
