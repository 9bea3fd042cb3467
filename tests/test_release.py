"""What a release says of itself in several places is the same in all of them."""

from __future__ import annotations

import functools
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import fedcomp

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@functools.cache
def tracked(*patterns: str) -> tuple[str, ...]:
    done = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(name for name in done.stdout.split("\0") if (ROOT / name).is_file())


def test_the_version_stands_where_the_page_on_releases_says() -> None:
    assert "version" in PROJECT["dynamic"]
    said = re.compile(rf'["\']{re.escape(fedcomp.__version__)}["\']')
    # Apps have versions of their own.
    places = [name for name in tracked("*.py", "*.cff", "pyproject.toml") if said.search(text(name))]
    assert places == ["experiments/app/fedcomp_app/__init__.py", "fedcomp/__init__.py"]
    assert all(f"`{name}`" in text("RELEASING.md") for name in places)


def test_every_placeholder_is_listed_and_every_listed_one_is_there() -> None:
    listed = re.findall(r"^ +\| `([^`]+)` \|", text("RELEASING.md"), re.M)
    pages = [name for name in tracked() if name.startswith(".github/") or ("/" not in name and name != "RELEASING.md")]
    assert sorted(listed) == sorted(name for name in pages if "example.org" in text(name))


def test_files_and_targets_that_the_page_on_releases_names_exist() -> None:
    named = re.findall(r"`((?:\.?[\w-]+/)*[\w.-]+\.(?:py|toml|md|cff|yml))`", text("RELEASING.md"))
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []
    commands = re.findall(r"^make ([\w-]+)$", text("RELEASING.md"), re.M)
    assert "dist" in commands
    assert set(commands) <= targets()


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):(?!=)", text("Makefile"), re.M))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_of_make_and_nothing_else(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    commands = [step["run"].split() for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands
    assert [words for words in commands if words[0] != "make" or words[1] not in targets()] == []


def test_hooks_are_what_make_lint_runs() -> None:
    (recipe,) = re.findall(r"^lint:.*\n((?:\t.*\n)+)", text("Makefile"), re.M)
    (local,) = yaml.safe_load(text(".pre-commit-config.yaml"))["repos"]
    hooks = [hook["entry"] for hook in local["hooks"]]
    assert hooks == [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]


def test_one_list_of_pythons() -> None:
    pythons = [found[1] for name in PROJECT["classifiers"] if (found := re.search(r":: (3\.\d+)$", name))]
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    assert versions("Python") == pythons
    assert (
        yaml.safe_load(text(".github/workflows/tests.yml"))["jobs"]["tests"]["strategy"]["matrix"]["python"] == pythons
    )


def test_the_table_of_flowers_is_what_ci_tries() -> None:
    (tried,) = re.findall(r"^stable=\((.*)\)$", text(".ci/flowers"), re.M)
    assert versions("Flower") == [version.rpartition(".")[0] for version in tried.split()]
    assert f"flwr>={versions('Flower')[0]}" in PROJECT["dependencies"]
    assert f"flwr=={tried.split()[-1]}" in text("constraints.txt").splitlines()


def versions(column: str) -> list[str]:
    """Return what the newest row of the table in SUPPORT.md says of a column."""
    lines = [line for line in text("SUPPORT.md").splitlines() if line.startswith("|")]
    header, _, row, *_older = (line.strip("| ").split(" | ") for line in lines)
    newest = dict(zip(header, row, strict=True))
    assert newest["fedcomp"] == fedcomp.__version__.rpartition(".")[0]
    return newest[column].split(", ")


def test_no_app_declares_a_name_that_is_not_ours_yet() -> None:
    apps = [tomllib.loads(text(name))["project"] for name in tracked("*/pyproject.toml")]
    assert len(apps) > 5
    declared = [re.split(r"[^\w.-]", wanted)[0] for app in apps for wanted in app["dependencies"]]
    assert "flwr" in declared
    assert "fedcomp" not in declared
