"""Error feedback where few clients return is warned of, once; everything else is not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
from flwr.serverapp.strategy import FedAvg
from toy import client_app, fedavg, model

from fedcomp.clients.compressed import compression
from fedcomp.codecs import DGC, EDEN, QSGD, Codec, ErrorFeedback, TopK
from fedcomp.flower.faults import ScriptedFaults
from fedcomp.flower.grid import InProcessGrid
from fedcomp.rng import Key
from fedcomp.strategies.compressed import FEW_RETURN, Compressed
from fedcomp.strategies.returning import WINDOW, Returning

ROUNDS = 12


def warnings_of(strategy: Compressed, caplog: pytest.LogCaptureFixture, nodes: int = 9, **options) -> list[str]:
    """Run; return the warnings of the kind that the log holds."""
    with caplog.at_level(logging.WARNING), InProcessGrid(client_app([compression()]), nodes, seed=4, **options) as grid:
        strategy.start(grid, model(), num_rounds=ROUNDS, timeout=9.0)
    return [r.getMessage() for r in caplog.records if FEW_RETURN in r.getMessage()]


def a_third() -> FedAvg:
    return fedavg(fraction_train=1 / 3, fraction_evaluate=0.0)


@pytest.mark.parametrize("codec", [TopK(density=0.1), DGC(density=0.1)], ids=repr)
def test_memories_of_a_third_of_the_clients_are_warned_of_once(codec: Codec, caplog) -> None:
    strategy = Compressed(a_third(), codec)
    (said,) = warnings_of(strategy, caplog)
    assert "EDEN" in said
    noted = [number for number, report in strategy.reports.items() if FEW_RETURN in report.notes]
    assert len(noted) == 1
    assert f"round {noted[0]}: " in said
    assert noted[0] >= WINDOW


@pytest.mark.parametrize(
    "make",
    [
        lambda: Compressed(a_third(), EDEN()),
        lambda: Compressed(a_third(), QSGD(levels=7)),
        lambda: Compressed(a_third(), TopK(density=0.1), feedback=False),
        lambda: Compressed(fedavg(fraction_evaluate=0.0), ErrorFeedback(TopK(density=0.1))),
        lambda: Compressed(fedavg(fraction_train=2 / 3, fraction_evaluate=0.0), TopK(density=0.1)),
    ],
    ids=["EDEN", "QSGD", "no memory", "everybody", "two thirds"],
)
def test_nothing_is_said_without_memory_or_where_most_return(make: Callable[[], Compressed], caplog) -> None:
    strategy = make()
    assert warnings_of(strategy, caplog) == []
    assert all(FEW_RETURN not in report.notes for report in strategy.reports.values())


def test_lost_replies_are_no_absence(caplog) -> None:
    lost = ScriptedFaults({(number, number % 9): "lost_reply" for number in range(1, ROUNDS)})
    assert warnings_of(Compressed(fedavg(fraction_evaluate=0.0), TopK(density=0.1)), caplog, fault=lost) == []


def rounds(asked: Callable[[int], Iterator[int]]) -> list[bool]:
    counted = Returning()
    return [counted.few(asked(number)) for number in range(40)]


def test_ten_of_thirty_are_few_whoever_is_drawn() -> None:
    for seed in range(20):
        found = rounds(lambda n, seed=seed: Key(seed, "cohort", n).generator().permutation(30)[:10].tolist())
        assert any(found[: 2 * WINDOW])
    assert any(rounds(lambda n: range(n % 3, 30, 3)))


def test_all_or_the_same_ones_or_halves_by_turns_are_not_few() -> None:
    assert not any(rounds(lambda n: range(10)))
    assert not any(rounds(lambda n: range(3)))
    assert not any(rounds(lambda n: range(n % 2, 20, 2)))
    # One node a round comes back under another id.
    assert not any(rounds(lambda n: range(n, n + 10)))
    assert not any(rounds(lambda n: ()))
