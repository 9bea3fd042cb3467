"""The decentralised example runs as its README says, learns what no single node could, and counts its messages."""

from __future__ import annotations

import logging
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gossip_pytorch"


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    level = logging.getLogger("flwr").level
    yield
    logging.getLogger("flwr").setLevel(level)


@pytest.mark.long
def test_every_node_learns_classes_it_has_never_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--rounds", "60", "--nodes", "4", "--topology", "complete"])
    runpy.run_path(str(EXAMPLE / "run.py"), run_name="__main__")
    printed = capsys.readouterr().out
    found = re.search(r"nodes (\S+) to (\S+); (\S+) bytes in 720 messages, and (\S+) in the (\d) closing", printed)
    assert found is not None, printed
    worst, best = float(found[1]), float(found[2])
    sparse, dense = (int(found[i].replace(",", "")) for i in (3, 4))
    # Three classes of ten are 0.3 at most.
    assert 0.4 < worst <= best
    size = 4 * (64 * 64 + 64 + 64 * 10 + 10)
    assert dense == int(found[5]) * 12 * (size + 16)
    assert sparse < 720 * size / 15


def test_the_readme_shows_the_apps_as_they_are() -> None:
    readme = (EXAMPLE / "README.md").read_text()
    apps = [(EXAMPLE / "gossip_digits" / f"{name}.py").read_text() for name in ("client_app", "server_app")]
    shown = re.findall(r"```python fragment\n(.*?)```", readme, re.S)
    assert len(shown) == 2
    for app, block in zip(apps, shown, strict=True):
        assert all(line in app for line in block.splitlines())
    assert "python examples/gossip_pytorch/run.py" in readme
