"""Every command of the pages is run as it is written, at tiny settings.

Commands are collected from the pages (:mod:`page_reading`) and parsed as a shell would. Each runs in this process,
through the function its program starts with. Tiny means, and every rule stands in this file:

- ``experiments.run``: the arguments are checked as they are written. To run, ``--quick`` is added; the sizes that a
  command gives itself (``--rounds``, ``--clients``, ``seeds``) and settings that change no figure (``workers``) are
  left out, and no other processes are started; the engine is ``inprocess`` (Ray and the SuperLink have their own tests
  of the same rows); a training makes three steps at most; and lists that no setting shortens are cut as in
  :data:`FEWER`. A command whose options are all among another's is run with that one. ``full=true`` and ``tune=true``,
  which take long at any size, and what is for the files of ``FEDCOMP_DATA``, which are not there, are checked but not
  run: tests of their experiments do so with fewer parts.
- ``fedcomp.tasks``: one epoch, and one task where the command has none. ``fedcomp.coding.plan --measure``: 20 draws.
- ``make``: ``make -n``. ``pytest``: there are tests that it would select.
- ``pip``: what it names is declared. ``fedcomp.clients.edge``, its executor and ``fedcomp.coding.listener``: what they
  would start is prepared.
- What has a test that runs it is named in :data:`RUN_BY`; here its arguments are checked. ``flwr run`` is in
  ``test_flwr_commands``.

Another command that needs such files has to say so.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import pickle
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from page_reading import PAGES, ROOT, Command, commands

from fedcomp.errors import ConfigError
from fedcomp.experiments.bench import BENCHMARKS
from fedcomp.experiments.book import app as book
from fedcomp.experiments.catalog import CATALOG, get_experiment
from fedcomp.experiments.options import Config
from fedcomp.experiments.run import Request, app
from fedcomp.experiments.run import main as run_experiment
from fedcomp.experiments.tables import specs_of
from fedcomp.tasks.base import Task

ALL = [command for page in PAGES for command in commands(page)]
PLACEHOLDERS = {
    "FILE": "tests/test_rng.py",
    "EXPERIMENT": "quickstart",
    "TASK": "digits-graph",
    "cut=METHOD": "cut=greedy",
    "HOST:PORT": "127.0.0.1:0",
    "DIR": "spool",
}
"""Words that stand for what a reader puts in their place."""

RUN_BY = {
    "coding.bench": "tests/coding/test_coding_bench.py",
    "experiments.run chaos": "tests/deployment/test_faulted.py",
    "experiments.run datalens_mnist": "tests/experiments/test_datalens_mnist_study.py",
    "experiments.run slow_link": "tests/experiments/test_slow_link_study.py",
    "experiments.run sparsifiers": "tests/experiments/test_sparse_experiments.py",
    "experiments.run topagg_dpsgd": "tests/experiments/test_topagg_dpsgd_study.py",
    "experiments.bench gossip": "tests/experiments/test_quick_benches.py",
    "experiments.bench graphs": "tests/experiments/test_quick_benches.py",
    "experiments.bench node": "tests/experiments/test_node_bench.py",
    "experiments.bench fleet": "tests/experiments/test_fleet_bench.py",
    "experiments.bench state": "tests/experiments/test_quick_benches.py",
    "experiments.bench server": "tests/experiments/test_quick_benches.py",
    "experiments.bench upkeep": "tests/experiments/test_quick_benches.py",
    "experiments.bench peers": "tests/experiments/test_peers_bench.py",
    "experiments.bench graph_rows": "tests/experiments/test_quick_benches.py",
    "examples/quickstart_pytorch/compare.py": "tests/examples/test_quickstart_pytorch.py",
    "examples/gossip_pytorch/run.py": "tests/examples/test_gossip_pytorch.py",
    "examples/lora_transformers/compare.py": "tests/examples/test_lora_transformers.py",
    "docs/site/figures.py": "tests/docs/test_site.py",
    "docs/site/notebooks.py": "tests/docs/test_notebooks.py",
}
"""Programs that a test of their own runs at tiny sizes."""

FEWER: dict[str, dict[str, Any]] = {
    "fedcomp.experiments.catalog.scalecom": {"FEDERATIONS": (2, 8)},
    "fedcomp.experiments.studies.coded_dropout": {"LIVES": (12.0, 40.0), "SIZES": (2_000, 5_000)},
    "fedcomp.experiments.studies.compressors": {"LOOKED": 1, "REPETITIONS": 1, "POWERS": (0,), "REACH": 0},
    "fedcomp.experiments.studies.gradiveq": {"EARLY": 3, "LATE": 6, "WIDTH": 64},
    "fedcomp.experiments.studies.lgc": {"HELD_OUT": 3},
}
"""Lists of an experiment that no setting shortens: module, names and what they are while it is tested."""


def distinct(program: str) -> list[Command]:
    """Return the commands whose words begin with ``program``, each once."""
    start = tuple(program.split())
    found: dict[tuple[Any, ...], Command] = {}
    for command in ALL:
        if command.words[: len(start)] == start:
            found.setdefault((command.environment, command.words), command)
    return list(found.values())


def at(value: object) -> str:
    return f"{value.at} {' '.join(value.words[:8])}" if isinstance(value, Command) else str(value)


def arguments(command: Command, skip: int) -> list[str]:
    return [PLACEHOLDERS.get(word, word) for word in command.words[skip:]]


@pytest.fixture(autouse=True)
def without_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDCOMP_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


# Experiments


def asked(command: Command) -> tuple[str | None, frozenset[str]]:
    """Return the experiment of a command and its options, each with its value."""
    name, options, words = None, [], arguments(command, 3)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            name = word
        elif word in ("--list", "--json", "--quick"):
            options.append(word)
        else:
            options.append(f"{word} {words.pop(0)}")
    return name, frozenset(options)


BOOK = distinct("python -m experiments.run book")
EXPERIMENTS = [command for command in distinct("python -m experiments.run") if command not in BOOK]


@pytest.mark.parametrize("command", BOOK, ids=at)
def test_e1_the_book_is_asked_for_as_its_command_takes_it(command: Command) -> None:
    """``tests/experiments/test_book.py`` writes one."""
    typer.main.get_command(book).make_context("page", arguments(command, 4))


def tiny(command: Command) -> list[str]:
    """Return the arguments of ``experiments.run`` at the smallest size."""
    name, options = asked(command)
    experiment = get_experiment(name or "quickstart")
    kept: list[str] = [] if name is None else [name]
    for option in sorted(options):
        key = option.partition(" ")[2].partition("=")[0]
        neutral = key == "seeds" or (key in experiment.options and experiment.options[key].neutral)
        if not option.startswith(("--rounds", "--clients", "--engine", "--ray-address", "--quick")) and not neutral:
            kept += option.split(" ", 1)
    return kept if "--list" in options or "--resume last" in options else [*kept, "--quick"]


def largest() -> list[Command]:
    """Return the commands that are not covered by another of the same experiment, each tiny form once."""
    parts = {command: asked(command) for command in EXPERIMENTS}
    plain = {command: (name or "quickstart", options) for command, (name, options) in parts.items()}
    kept = {
        (*tiny(command), *command.environment): command
        for command, (name, options) in reversed(plain.items())
        if not any(name == other and options < more for other, more in plain.values())
    }
    return list(kept.values())[::-1]


def written(command: Command) -> Config:
    """Return what a command asks for as it is written, by the program's own parser."""
    given = typer.main.get_command(app).make_context("page", arguments(command, 3)).params
    request = Request(**given)
    return request.configure(get_experiment(request.name or "quickstart"))


@pytest.mark.parametrize("command", EXPERIMENTS, ids=at)
def test_e1_the_arguments_of_an_experiment_are_valid_as_written(command: Command) -> None:
    """What the tiny run below leaves out or replaces is looked at here."""
    config = written(command)
    name, options = asked(command)
    assert config.experiment == (name or "quickstart")
    assert ("--quick" in options) == config.quick


@pytest.mark.parametrize(
    "words", ["--engine superlnik", "--rounds many", "--clients 0", "--set workers=lots", "--sed 3", "--budget -1"]
)
def test_e1_a_wrong_argument_on_a_page_would_be_found(words: str) -> None:
    """Before: the first four were dropped unread, and the tiny run passed."""
    command = Command("page.md", 1, (), ("python", "-m", "experiments.run", "gcn", *words.split()), "")
    with pytest.raises((ConfigError, click.UsageError)):
        written(command)


@pytest.mark.long
@pytest.mark.parametrize("command", largest(), ids=at)
def test_e1_an_experiment_runs_at_its_smallest_size(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module, fewer in FEWER.items():
        for name, value in fewer.items():
            monkeypatch.setattr(f"{module}.{name}", value)
    monkeypatch.setattr("fedcomp.experiments.kit._in_processes", one_by_one)
    leave_few_steps(monkeypatch)
    if asked(command)[0] == "privacy_audit":
        leave_few_subjects(monkeypatch)
    unshortened = {"--set full=true", "--set tune=true"} & asked(command)[1]
    if unshortened or command.environment or f"experiments.run {asked(command)[0]}" in RUN_BY:
        name, options = asked(command)
        experiment = get_experiment(str(name))
        specs_of(experiment, experiment.configure(assignments=[o.split()[1] for o in options if o.startswith("--set")]))
        return
    if "--resume last" in asked(command)[1]:
        assert run_experiment(["--quick"]) == 0
    code = run_experiment(tiny(command))
    out, err = capsys.readouterr()
    if code == 2 and "FEDCOMP_DATA" in err:
        return
    assert code == 0, err
    if "--list" in command.words:
        assert (command.words[3] if command.words[3] != "--list" else "quickstart") in out or "codec.density" in out
        return
    (summary,) = [json.loads(file.read_text()) for file in Path("runs").glob("*/summary.json")][-1:]
    assert summary["experiment"] == (
        asked(command)[0] or "quickstart" if "--resume" not in command.words else "quickstart"
    )
    assert summary["config"]["quick"] is True
    assert re.search(r"\d", summary["answer"]), "the answer is made of figures"
    if "--json" in command.words:
        assert json.loads(out)["answer"] == summary["answer"]


def one_by_one(calls: Mapping[str, Callable[[], Any]], workers: int) -> Iterator[tuple[str, Any]]:
    """Run what would go to other processes in this one, pickled as for them: each of theirs would import torch."""
    return ((name, pickle.loads(pickle.dumps(call))()) for name, call in calls.items())


def leave_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a training of a task make three steps at most: a quick run checks no claim."""
    whole = Task.train

    def train(self: Task, *args: Any, max_steps: int | None = None, **options: Any) -> dict[str, float]:
        return whole(self, *args, max_steps=min(max_steps or 3, 3), **options)

    monkeypatch.setattr(Task, "train", train)


def leave_few_subjects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the audit have two systems and two mutants: all of them are tests of their own (``-m audit``)."""
    from fedcomp.experiments.audits import cases, mutants, systems

    monkeypatch.setattr(cases, "SUBJECTS", {"votes": cases.votes_sum})
    monkeypatch.setattr(systems, "SUBJECTS", {"message": systems.message})
    monkeypatch.setattr(mutants, "MUTANTS", {name: mutants.MUTANTS[name] for name in ("no clip", "no root of k")})


def test_e1_every_experiment_stands_on_a_page() -> None:
    assert {asked(command)[0] for command in EXPERIMENTS} >= set(CATALOG) - {"quickstart"}


# Other programs of the project


@pytest.mark.long
@pytest.mark.parametrize("command", distinct("python -m experiments.bench"), ids=at)
def test_e1_a_benchmark_runs_at_its_smallest_size(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``wire``, ``kernels`` and ``engine`` take long even so: here they are found, and measure nothing."""
    from fedcomp.experiments.bench.__main__ import main

    monkeypatch.chdir(tmp_path)  # where a run leaves its line
    name = next((word for word in command.words[3:] if not word.startswith("--")), None)
    if name is None and "--list" not in command.words:
        assert main([]) == 2  # on the page it stands for all of them
        assert all(benchmark in capsys.readouterr().err for benchmark in list(BENCHMARKS)[:1])
    elif name in ("wire", "kernels", "engine") or f"experiments.bench {name}" in RUN_BY:
        module, text = BENCHMARKS[str(name)]
        assert importlib.util.find_spec(module) is not None
        idle = {str(name): ("idle_benchmark", text)}
        sys.modules["idle_benchmark"] = type(sys)("idle_benchmark")
        sys.modules["idle_benchmark"].cases = lambda quick: ()  # type: ignore[attr-defined]
        try:
            assert main(arguments(command, 3), benchmarks=idle) == 0
        finally:
            del sys.modules["idle_benchmark"]
    else:
        assert main([*arguments(command, 3), "--quick"]) == 0


@pytest.mark.long
@pytest.mark.parametrize("command", distinct("python -m fedcomp.tasks"), ids=at)
def test_e1_a_task_is_described_and_trained_for_one_epoch(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    from fedcomp.tasks.__main__ import main

    words = arguments(command, 3)
    if "--epochs" in words:
        words[words.index("--epochs") + 1] = "1"
    if not words:
        words = ["digits"]
    code = main(words)
    out, err = capsys.readouterr()
    assert code == 0 or (code == 2 and "FEDCOMP_DATA" in err), err
    if code == 0:
        assert f"{words[0]}:" in out
        assert ("accuracy" in out) == ("--epochs" in words)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [*distinct("python -m fedcomp.privacy"), *distinct("python -m fedcomp.coding.plan")], ids=at
)
def test_e1_tables_are_printed(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    from fedcomp.coding import plan
    from fedcomp.privacy.__main__ import main

    words = arguments(command, 3)
    if "--measure" in words:
        words[words.index("--measure") + 1] = "20"
    run: Callable[[list[str]], int | None] = main if command.words[2] == "fedcomp.privacy" else plan.main
    assert not run(words)
    assert re.search(r"\d\.\d", capsys.readouterr().out)


@pytest.mark.parametrize(
    "command", [*distinct("python -m fedcomp.kernels"), *distinct("python -m fedcomp.coding.kernels")], ids=at
)
def test_e1_kernels_are_made_ready(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_module(f"{command.words[2]}.__main__", run_name="__main__")
    assert command.words[2] in capsys.readouterr().out


@pytest.mark.parametrize("command", distinct("python -m fedcomp.clients.edge"), ids=at)
def test_e1_a_node_would_start(command: Command, tmp_path: Path) -> None:
    from fedcomp.clients.edge import prepare

    words = arguments(command, 3)
    for i, word in enumerate(words):
        if word == "ca.crt":
            (tmp_path / word).touch()
        elif word.startswith("/"):
            words[i] = str(tmp_path / Path(word).name)
    line, _ = prepare(words)
    assert line[1:3] == ["--superlink", "10.0.0.1:9092"]


@pytest.mark.parametrize("command", distinct("python -m fedcomp.clients.edge.executor"), ids=at)
def test_e1_an_executor_would_start(command: Command) -> None:
    from fedcomp.clients.edge.executor import _parser

    # The page also names it alone.
    given = arguments(command, 3) or ["--runtime", "127.0.0.1:9094", "--secret-file", "secret"]
    given += [] if "--allow" in given else ["--allow", "bundles.txt"]
    parsed = _parser().parse_args(given)
    assert (parsed.runtime, str(parsed.secret_file), str(parsed.allow)) == ("127.0.0.1:9094", "secret", "bundles.txt")


@pytest.mark.parametrize("command", distinct("python -m fedcomp.coding.listener"), ids=at)
def test_e1_a_listener_would_start(command: Command) -> None:
    from fedcomp.coding.listener import _parser

    parsed = _parser().parse_args(arguments(command, 3))
    assert (parsed.listen, str(parsed.store)) == ("127.0.0.1:0", "spool")


# Everything around


@pytest.mark.parametrize("command", distinct("make"), ids=at)
def test_e1_make_has_the_target(command: Command) -> None:
    done = subprocess.run(["make", "-n", *command.words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def recipe(*words: str) -> list[list[str]]:
    """Return the words of every ``pip install`` that ``make`` would run in a checkout without an environment."""
    done = subprocess.run(
        ["make", "-n", "quickstart", "VENV=/nowhere", *words], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [line.split() for line in done.stdout.splitlines() if " pip install " in line]


def test_e3_torch_and_torch_alone_comes_from_another_index() -> None:
    assert not [line for line in recipe() if "--index-url" in line]
    first, *others = recipe("TORCH_INDEX=somewhere")
    assert first[-3:] == ["--index-url", "somewhere", "torch"]
    assert others
    assert not [line for line in others if "--index-url" in line or "torch" in line]
    assert "TORCH_INDEX=" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_e2_the_pages_activate_the_environment_that_make_sets_up() -> None:
    (folder,) = re.findall(r"^VENV := (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    said = {(command.page, command.words) for command in ALL if command.words[0] == "."}
    assert {page for page, _ in said} >= {"README.md", "docs/README.md"}
    assert {words for _, words in said} == {(".", f"{folder}/bin/activate")}


@pytest.mark.slow
@pytest.mark.parametrize("command", [*distinct("pytest"), *distinct("python -m pytest")], ids=at)
def test_e1_pytest_would_select_tests(command: Command) -> None:
    words = arguments(command, 1 if command.words[0] == "pytest" else 3)
    chosen: dict[str, str] = {}
    files = []
    while words:
        word = words.pop(0)
        if word in ("-k", "-m"):
            chosen[word] = words.pop(0)
        else:
            files.append(ROOT / word)
    assert next(selected(files or [ROOT / "tests"], chosen), None) is not None


def selected(files: list[Path], chosen: Mapping[str, str]) -> Iterator[str]:
    """Yield the names of the tests in ``files`` whose names and marks are those asked for."""
    mark = chosen.get("-m", "")
    for file in (f for top in files for f in ([top] if top.is_file() else sorted(top.rglob("test_*.py")))):
        text = file.read_text(encoding="utf-8")
        whole = re.search(r"^pytestmark = .*", text, re.M)
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            marks = " ".join(map(ast.unparse, node.decorator_list)) + (whole[0] if whole else "")
            wanted = (f"mark.{mark.removeprefix('not ')}" in marks) != mark.startswith("not ") if mark else True
            if any(part in node.name for part in chosen.get("-k", "").split(" or ")) and wanted:
                yield node.name


@pytest.mark.parametrize("command", distinct("pip"), ids=at)
def test_e1_pip_installs_what_is_declared(command: Command) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert command.words[:2] == ("pip", "install") or command.words[1:] == ("uninstall", "flwr")
    # The pre-release of Flower is the one that CI tries.
    assert "prerelease=flwr-nightly\n" in (ROOT / ".ci" / "flowers").read_text(encoding="utf-8")
    apps = [tomllib.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "examples").glob("**/pyproject.toml")]
    of_apps = {need for app in apps for need in app["project"].get("dependencies", ())}
    for word in set(command.words[2:]) - {"--pre", "--force-reinstall", "flwr-nightly", "flwr"} - of_apps:
        wanted = re.fullmatch(r"(-e )?(\.|fedcomp|\./FILE\.whl)(\[(?P<extra>\w+)\])?", word)
        assert wanted is not None
        assert wanted["extra"] is None or wanted["extra"] in project["optional-dependencies"]


@pytest.mark.parametrize("command", [c for c in ALL if c.words[0] == "python" and c.words[1] != "-m"], ids=at)
def test_e1_a_script_is_there_and_knows_its_options(command: Command) -> None:
    text = (ROOT / command.words[1]).read_text(encoding="utf-8")
    assert all(f'"{word}"' in text for word in command.words[2:] if word.startswith("--"))
    assert command.words[1] in RUN_BY or command.words[1].startswith("tests/")


def test_e1_what_is_run_elsewhere_is_run_there() -> None:
    for program, file in RUN_BY.items():
        last = program.rpartition("/")[2].rpartition(" ")[2]
        assert last in (ROOT / file).read_text(encoding="utf-8"), program


@pytest.mark.slow
def test_e1_no_command_escapes() -> None:
    """Whatever looks like a command anywhere on a page is one of those that were collected, and has a test."""
    for page in PAGES:
        text = " ".join(page.read_text(encoding="utf-8").split())
        known = [" ".join(command.words) for command in commands(page)]
        for program in ("python -m", "flwr run experiments/app", "make test", "make quickstart", "python examples"):
            assert len(re.findall(re.escape(program) + r"[ `]", text)) <= sum(k.startswith(program) for k in known), (
                f"{page}: {program}"
            )
    tested = ("experiments.run", "experiments.bench", "fedcomp.tasks", "fedcomp.privacy", "fedcomp.coding.plan")
    tested += ("fedcomp.kernels", "fedcomp.coding.kernels", "fedcomp.clients.edge", "fedcomp.coding.listener", "pytest")
    tested += ("fedcomp.clients.edge.executor", "fedcomp.experiments.audits.accountants")
    modules = {command.words[2] for command in ALL if command.words[:2] == ("python", "-m")}
    assert modules <= {*tested, *RUN_BY}
    assert {command.words[0] for command in ALL} <= {"python", "flwr", "make", "pytest", "pip", "cd", "source", "."}
