"""``python -m fedcomp.tasks`` prints what the tasks hold."""

from __future__ import annotations

import pytest

from fedcomp.tasks import TASKS
from fedcomp.tasks.__main__ import main


@pytest.mark.slow
def test_all_tasks_are_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(f"{name}: " in out for name in TASKS)
    assert out.count("used instead") == 10
    assert "1,442 train, 355 test, 10 classes, 85,002 parameters" in out


def test_partition_and_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["digits", "partition=shards:2", "hidden=32", "--clients", "10", "--epochs", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [[int(n) for n in line.split()] for line in lines[3:13]]
    assert [row[0] for row in table] == list(range(10))
    assert sum(row[1] for row in table) == 1442
    assert all(sum(row[2:]) == row[1] and sum(n > 0 for n in row[2:]) <= 2 for row in table)
    assert float(lines[13].split()[-1]) > 0.85


@pytest.mark.slow
def test_a_graph_is_cut_and_trained_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["digits-graph", "hidden=16", "--clients", "4", "--epochs", "30", "--lr", "0.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "digits-graph: 1,438 train, 359 test, 10 classes, 1,210 parameters"
    assert lines[2].startswith("  metis over 4: 44")
    assert lines[2].endswith(" of 12,339 edges cut")
    assert sum(int(line.split()[1]) for line in lines[3:7]) == 1438
    assert float(lines[7].split()[-1]) > 0.9


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["digit"]) == 2
    assert capsys.readouterr().err == "error: unknown task 'digit'; did you mean 'digits'?\n"
