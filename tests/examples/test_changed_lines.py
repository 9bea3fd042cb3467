"""Compressed apps of examples are the plain ones plus the lines that their pages show."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
REMOVED = {
    "quickstart_pytorch": ["app = ClientApp()", 'strategy = FedAvg(fraction_evaluate=config["fraction-evaluate"])'],
    "lora_transformers": ["app = ClientApp()", "strategy = TrackedFedAvg()"],
}
ADDED = {
    "quickstart_pytorch": [
        "app = ClientApp(mods=[fc.compression()])",
        'strategy = fc.Compressed(FedAvg(fraction_evaluate=config["fraction-evaluate"]), fc.EDEN(bits=1))',
    ],
    "lora_transformers": [
        "app = ClientApp(mods=[fc.compression()])",
        "fc.freeze(model)",
        "strategy = fc.Adapters(TrackedFedAvg())",
    ],
}


def sources(example: str, app: str) -> dict[str, list[str]]:
    folder = EXAMPLES / example / app
    files = sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".toml"))
    return {str(p.relative_to(folder)): p.read_text().splitlines() for p in files}


@pytest.mark.parametrize("example", ADDED)
def test_the_apps_differ_by_these_lines_and_their_imports(example: str) -> None:
    plain, compressed = sources(example, "plain"), sources(example, "compressed")
    assert list(plain) == list(compressed)
    changes = [change for name in plain for change in difflib.ndiff(plain[name], compressed[name])]
    assert [change[2:].strip() for change in changes if change.startswith("- ")] == REMOVED[example]
    new = [change[2:] for change in changes if change.startswith("+ ")]
    readme = (EXAMPLES / example / "README.md").read_text()
    assert [line for line in new if f"+{line}" not in readme] == []
    assert f"python examples/{example}/compare.py" in readme
    imports = [line for line in new if line.startswith("import ")]
    assert imports == ["import fedcomp as fc"] * 2
    assert [line.strip() for line in new if line not in imports] == ADDED[example]


@pytest.mark.parametrize("example", ADDED)
def test_the_plain_app_knows_nothing_of_this_project(example: str) -> None:
    words = "\n".join("\n".join(lines) for name, lines in sources(example, "plain").items() if name.endswith(".py"))
    assert "fedcomp" not in words
