"""The compressed example is the plain one plus two changed lines and their imports, and it really saves the bytes."""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "quickstart_pytorch"


def sources(app: str) -> dict[str, list[str]]:
    folder = EXAMPLE / app
    files = sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".toml"))
    return {str(p.relative_to(folder)): p.read_text().splitlines() for p in files}


def test_the_apps_differ_by_two_lines_and_their_imports():
    plain, compressed = sources("plain"), sources("compressed")
    assert list(plain) == list(compressed)
    removed, added = [], []
    for name, lines in plain.items():
        changes = difflib.ndiff(lines, compressed[name])
        for change in changes:
            if change.startswith("- "):
                removed.append(change[2:].strip())
            elif change.startswith("+ "):
                added.append(change[2:].strip())
    assert removed == ["app = ClientApp()", 'strategy = FedAvg(fraction_evaluate=config["fraction-evaluate"])']
    imports = [line for line in added if line.startswith("import ")]
    assert [line for line in added if line not in imports] == [
        "app = ClientApp(mods=[fc.compression()])",
        'strategy = fc.Compressed(FedAvg(fraction_evaluate=config["fraction-evaluate"]), fc.EDEN(bits=1))',
    ]
    assert imports == ["import fedcomp as fc"] * 2


def test_the_plain_app_knows_nothing_of_this_project():
    words = "\n".join("\n".join(lines) for name, lines in sources("plain").items() if name.endswith(".py"))
    assert not any(name in words for name in ("fedcomp", "strategies", "fedcomp.clients.compressed"))


def test_the_readme_shows_the_diff_and_the_command():
    readme = (EXAMPLE / "README.md").read_text()
    for name, lines in sources("compressed").items():
        new = set(lines) - set(sources("plain")[name])
        assert all(f"+{line}" in readme for line in new), f"README.md does not show {name} as it is"
    assert "python examples/quickstart_pytorch/compare.py" in readme


@pytest.fixture(scope="module")
def figures() -> dict[str, dict]:
    command = [sys.executable, str(EXAMPLE / "compare.py"), "--rounds", "3", "--clients", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {row["app"]: row for row in json.loads(done.stdout)}


@pytest.mark.slow
def test_both_apps_learn_and_the_compressed_one_sends_a_fraction(figures):
    plain, compressed = figures["plain"], figures["compressed"]
    # Three rounds and three clients: 9 models up, 9 down for training and 6 for evaluation (half of three, at least 2).
    assert plain["messages"] == compressed["messages"] == 2 * (9 + 6)
    assert plain["payload_up"] > 20 * compressed["payload_up"]
    assert plain["wire_up"] > 10 * compressed["wire_up"]
    assert compressed["payload_down"] == plain["payload_down"]
    for row in figures.values():
        assert float(row["final"].rpartition("accuracy': ")[2].rstrip("}")) > 0.5
