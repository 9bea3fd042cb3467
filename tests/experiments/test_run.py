"""The command line of the experiments: what it prints, what it writes, how it ends."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import flwr
import pytest
from fake_engine import CATALOG, MEASURED, TINY, FakeEngine, measure

from fedcomp.errors import ConfigError
from fedcomp.experiments.experiment import Experiment, Studied
from fedcomp.experiments.findings import Say
from fedcomp.experiments.run import RunnerSetup, main
from fedcomp.experiments.tables import Found

ROOT = Path(__file__).parents[2]


class Caller:
    """Calls the command line in this process with a fake engine and keeps what it printed."""

    def __init__(self, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.out = out
        self.capsys = capsys
        self.stdout = self.stderr = ""

    def __call__(self, *arguments: str, engine: FakeEngine | None = None, experiment: Experiment = TINY) -> int:
        catalog = {**CATALOG, experiment.name: experiment}
        setup = RunnerSetup(catalog, engine or FakeEngine(), check=lambda spec: None)
        code = main([*arguments, "--out", str(self.out)], setup=setup)
        self.stdout, self.stderr = self.capsys.readouterr()
        return code

    @property
    def folders(self) -> list[Path]:
        return sorted(path for path in self.out.glob("*") if path.is_dir())


@pytest.fixture
def call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Caller:
    return Caller(tmp_path / "runs", capsys)


def python(*arguments: str, cwd: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, env=environment, timeout=timeout
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tinny"], ["'tinny'", "'tiny'"]),
        (["tiny", "--engine", "rai"], ["'rai'", "'ray'"]),
        (["tiny", "--set", "codec.densty=0.1"], ["'codec.densty'", "'codec.density'"]),
        (["tiny", "--set", "density=0.1"], ["'density'", "'codec.density'"]),
        (["tiny", "--set", "codec.density"], ["key=value", "'codec.density'"]),
        (["tiny", "--set", "=3"], ["no setting ''"]),
        (["tiny", "--set", "codec.density=much"], ["codec.density", "a number in (0, 1]", "'much'"]),
        (["tiny", "--set", "codec.density=nan"], ["a number in (0, 1] (default 0.1)", "nan"]),
        (["tiny", "--set", "train.lr=inf"], ["a positive finite number", "inf"]),
        (["tiny", "--set", "train.epochs=1.5"], ["an integer >= 1", "'1.5'"]),
        (["tiny", "--set", "feedback=maybe"], ["True or False (default true)", "'maybe'"]),
        (["tiny", "--set", "task.model=mpl"], ["one of 'mlp', 'cnn' (default mlp), not 'mpl'; did you mean 'mlp'?"]),
        (["tiny", "--rounds", "-1"], ["--rounds", "at least 0", "-1"]),
        (["tiny", "--rounds", "0"], ["--rounds must be at least 1, not 0"]),
        (["tiny", "--rounds", "many"], ["--rounds", "'many'"]),
        (["tiny", "--clients", "0"], ["--clients", "at least 1", "0"]),
        (["tiny", "--seed", "-3"], ["--seed", "-3"]),
        (["tiny", "--round", "3"], ["--round"]),
        (["tiny", "extra"], ["extra"]),
        (["--resume", "last"], ["no run"]),
        (["--resume", "20250101-tiny"], ["'20250101-tiny'"]),
    ],
)
def test_wrong_input_is_one_line_that_helps(call: Caller, arguments: list[str], words: list[str]) -> None:
    assert call(*arguments) == 2
    assert call.stdout == ""
    assert call.stderr.startswith("error: ")
    assert call.stderr.count("\n") == 1
    for word in words:
        assert word in call.stderr
    assert call.folders == []


def test_a_row_that_cannot_run_is_refused_before_any_row_has_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine()

    def check(spec: object) -> None:
        if spec.label == "sparse":  # type: ignore[attr-defined]
            raise ConfigError("task.partition 'dirichlett' is unknown; did you mean 'dirichlet'?")

    assert main(["tiny", "--out", str(tmp_path / "runs")], setup=RunnerSetup(CATALOG, engine, check)) == 2
    assert engine.ran == []
    assert not (tmp_path / "runs").exists()
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_json_is_the_whole_of_standard_output(call: Caller) -> None:
    assert call("tiny", "--json", "--rounds", "3", "--clients", "2", "--seed", "5") == 0
    document = json.loads(call.stdout)
    assert document["experiment"] == "tiny"
    assert {key: document["config"][key] for key in ("engine", "rounds", "clients", "seed")} == {
        "engine": "inprocess",
        "rounds": 3,
        "clients": 2,
        "seed": 5,
    }
    dense, sparse = document["rows"]
    assert dense["label"] == "dense"
    # Three rounds, two clients, 40 000 bytes each; a tenth of it at density 0.1.
    assert dense["uplink_payload_bytes"] == 240_000
    assert dense["uplink_wire_bytes"] == 241_500
    assert dense["downlink_wire_bytes"] == 4 * 80_600
    assert sparse["uplink_payload_bytes"] == 24_000
    assert sparse["uplink_ratio"] == 10.0
    assert sparse["accuracy"] == pytest.approx(0.405)
    assert sparse["failures"] == 1
    assert document["claims"][0] == {
        "name": "fewer bytes",
        "value": 10.0,
        "bound": 5.0,
        "op": ">=",
        "ok": True,
        "gate": True,
        "source": "derived: 1 / density",
        "skipped": "",
    }
    assert document["data"] == "numbers made by formula (nothing downloaded)."
    assert document["environment"]["flwr"] == flwr.__version__
    (folder,) = call.folders
    assert document["run"] == str(folder)
    assert json.loads((folder / "summary.json").read_text()) == document


@pytest.mark.slow
def test_json_stays_pure_when_everybody_below_prints(tmp_path: Path) -> None:
    script = tmp_path / "noisy.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "from fake_engine import CATALOG, FakeEngine\n"
        "from fedcomp.experiments.run import RunnerSetup, main\n"
        "class Noisy(FakeEngine):\n"
        "    def __call__(self, spec, **options):\n"
        "        print('print')\n"
        "        os.write(1, b'descriptor\\n')\n"
        "        subprocess.run(['echo', 'child'], check=True)\n"
        "        from flwr.common.logger import log\n"
        "        log(20, 'flower says hello')\n"
        "        return super().__call__(spec, **options)\n"
        "sys.exit(main(['tiny', '--json'], setup=RunnerSetup(CATALOG, Noisy(), lambda spec: None)))\n"
    )
    done = python(str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["experiment"] == "tiny"
    for word in ("print", "descriptor", "child"):
        assert word in done.stderr
    assert "flower says hello" not in done.stderr
    assert "flower says hello" in next((tmp_path / "runs").glob("*/log.txt")).read_text()


@pytest.mark.slow
def test_the_closing_table_and_the_report(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert call("tiny") == 0
    assert "proxy: connections to this machine go past that of the environment" in call.stdout
    assert "offline: Flower's telemetry and update check are off" in call.stdout
    sparse = next(line for line in call.stdout.splitlines() if line.startswith("sparse"))
    assert re.split(r" {2,}", sparse.strip())[1:] == ["60.0 %", "80 kB", "82.5 kB", "967 kB", "10x", "64 ms", "1"]
    (folder,) = call.folders
    assert str(folder / "report.html") in call.stdout
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "rounds.jsonl", "summary.json", "report.html", "systems"} <= names
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert [(line["label"], line["round"]) for line in lines] == [
        (label, index) for label in ("dense", "sparse") for index in range(6)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120])
def test_tables_fit_the_terminal(call: Caller, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert call("tiny") == 0
    table = [line for line in call.stdout.splitlines() if not line.startswith(("Report:", "tiny:"))]
    assert max(len(line) for line in table) <= columns
    heads = call.stdout[: call.stdout.index("sparse")]
    assert heads.count("wire") == 2, "up and down, in narrow tables, too"
    assert heads.count("payload") == (2 if columns == 120 else 1)
    assert "…" not in call.stdout


@pytest.mark.slow
def test_a_failing_claim_is_exit_code_1_and_a_missed_goal_is_not(call: Caller) -> None:
    assert call("tiny", "--set", "codec.density=0.5") == 1
    assert "FAILED" in call.stdout
    assert "codec.density=0.5" in call.stdout  # a reader must see that the bound was set for other values
    assert call("tiny") == 0
    assert "missed" in call.stdout


@pytest.mark.slow
def test_e4_the_answer_and_what_was_missed_stand_above_the_tables(call: Caller) -> None:
    assert call("tiny", "--set", "codec.density=0.5", "--json") == 1
    assert json.loads(call.stdout)["answer"] == "Sparse sends 400000 bytes <in all>."
    assert call("tiny", "--set", "codec.density=0.5") == 1
    answer, failed, missed, table = (
        call.stdout.index(text) for text in ("Sparse sends 400000", "FAILED: fewer bytes: 2,", "missed: very", "uplink")
    )
    assert answer < failed < missed < table
    end = " ".join(call.stdout.split()).rpartition("Report:")[0]
    assert end.endswith("Sparse sends 400000 bytes <in all>; the one claim failed, 1 goal missed. ")


@pytest.mark.slow
def test_e2_a_quick_run_is_small_and_decides_nothing(call: Caller) -> None:
    assert call("tiny", "--quick", "--json") == 0  # at a density of 0.5 the claim does not hold
    document = json.loads(call.stdout)
    assert (document["config"]["rounds"], document["config"]["clients"], document["config"]["quick"]) == (1, 2, True)
    assert document["config"]["settings"]["codec.density"] == 0.5
    assert call("tiny", "--quick", "--rounds", "2", "--set", "codec.density=0.25") == 0
    assert "2 systems, 2 rounds, 2 clients" in call.stdout
    assert "no figure of this run answers the question" in call.stdout
    assert "Sparse sends" not in call.stdout
    page = (call.folders[-1] / "report.html").read_text()
    assert 'class="verdict plain"' in page
    assert "shortfalls" not in re.sub("<style>.*</style>", "", page, flags=re.DOTALL)


@pytest.mark.slow
def test_e2_a_quick_run_is_resumed_as_one(call: Caller) -> None:
    engine = FakeEngine({("sparse", 1): KeyboardInterrupt()})
    assert call("tiny", "--quick", engine=engine) == 130
    assert call("--resume", "last", "--json", engine=engine) == 0
    assert json.loads(call.stdout)["config"]["quick"] is True


@pytest.mark.slow
def test_e2_a_user_is_told_how_long_it_takes(call: Caller) -> None:
    assert call("tiny") == 0
    assert "takes about 30 s on two idle cores" in call.stdout
    assert call("tiny", "--rounds", "2") == 0
    assert "takes about" not in call.stdout, "measured at the defaults only"
    assert call("--list") == 0
    assert re.search(r"tiny +about 30 s +Does", call.stdout)
    assert call("--list", "--json") == 0
    assert {"experiment": "tiny", "minutes": 0.5, "question": TINY.question} in json.loads(call.stdout)["list"]


@pytest.mark.slow
def test_an_interrupted_run_resumes_to_the_same_rows(call: Caller) -> None:
    assert call("tiny", "--json", "--seed", "3") == 0
    whole = json.loads(call.stdout)
    whole_lines = (call.folders[0] / "rounds.jsonl").read_text()

    # Round 4 breaks off; the checkpoint is of round 2, so round 3 is recorded twice.
    engine = FakeEngine({("sparse", 4): KeyboardInterrupt()})
    assert call("tiny", "--json", "--seed", "3", engine=engine) == 130
    assert call.stdout == ""
    interrupted = call.folders[-1]
    assert f"--resume {interrupted.name} --out {call.out}" in call.stderr
    assert not (interrupted / "summary.json").exists()
    with (interrupted / "rounds.jsonl").open("a") as file:
        file.write('{"label": "sparse", "round": 4, "accu')  # a crash in the middle of a line

    engine.ran.clear()
    assert call("--resume", interrupted.name, "--json", engine=engine) == 0
    assert engine.ran == [("sparse", 3), ("sparse", 4), ("sparse", 5)]
    resumed = json.loads(call.stdout)
    assert resumed["config"] == whole["config"]
    assert resumed["claims"] == whole["claims"]
    assert resumed["rows"] == whole["rows"]
    assert resumed["run"] == str(interrupted)

    engine.ran.clear()
    assert call("--resume", "last", engine=engine) == 0
    assert engine.ran == []  # everything was finished
    assert (interrupted / "rounds.jsonl").read_text() == whole_lines
    assert not list(interrupted.rglob("checkpoint*"))


@pytest.mark.slow
def test_a_resumed_run_is_of_the_definition_it_began_with(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first rows were made by that, and a book that took it for one of today would call them today's."""
    monkeypatch.setattr("fedcomp.experiments.run.definition", lambda experiment: "then")
    assert call("tiny", engine=FakeEngine({("sparse", 2): KeyboardInterrupt()})) == 130
    monkeypatch.setattr("fedcomp.experiments.run.definition", lambda experiment: "today")
    assert call("--resume", "last", "--json") == 0
    assert json.loads(call.stdout)["definition"] == "then"


@pytest.mark.slow
def test_resume_refuses_another_configuration(call: Caller) -> None:
    engine = FakeEngine({("dense", 2): KeyboardInterrupt()})
    assert call("tiny", "--set", "train.lr=0.5", engine=engine) == 130
    for arguments, word in (
        (["--rounds", "9"], "--rounds=5"),
        (["--seed", "1"], "--seed=0"),
        (["--engine", "ray"], "--engine=inprocess"),
        (["--set", "train.lr=0.1"], "train.lr=0.5"),
        (["quickstart"], "'tiny'"),
    ):
        assert call(*arguments, "--resume", "last", engine=engine) == 2
        assert word in call.stderr
        assert call.stderr.count("\n") == 1
    # Saying again what was said before is no change.
    assert call("tiny", "--resume", "last", "--set", "train.lr=0.5", "--rounds", "5", engine=engine) == 0


def test_an_interruption_before_the_first_round_leaves_nothing(call: Caller) -> None:
    assert call("tiny", engine=FakeEngine({("dense", 0): KeyboardInterrupt()})) == 130
    assert "nothing was saved" in call.stderr
    assert call.folders == []


@pytest.mark.slow
def test_a_broken_run_is_one_line_and_resumes(call: Caller) -> None:
    engine = FakeEngine({("sparse", 2): RuntimeError("the roof\nfell in")})
    assert call("tiny", engine=engine) == 3
    assert call.stderr.splitlines()[-1].startswith("error: the run failed: RuntimeError: the roof fell in")
    (folder,) = call.folders
    assert "Traceback" in (folder / "error.txt").read_text()
    assert call("--resume", folder.name, engine=engine) == 0


@pytest.mark.slow
def test_an_experiment_may_only_measure(call: Caller) -> None:
    assert call("measured", experiment=MEASURED) == 0
    assert "4 rounds, 2 clients, seed 0" in call.stdout
    assert "Measured <losses>" in call.stdout
    assert "cell 3" in call.stderr
    (folder,) = call.folders
    assert call("measured", "--json", "--rounds", "2", experiment=MEASURED) == 0
    document = json.loads(call.stdout)
    assert document["rows"] == []
    assert document["claims"][0]["value"] == 1.0
    assert document["data"] == "numbers made by formula (nothing downloaded)."
    assert "Measured &lt;losses&gt;" in (folder / "report.html").read_text()


def test_an_experiment_without_rounds_is_measured_all_the_same(call: Caller) -> None:
    def look(found: Found) -> Studied:
        return Studied({"the last loss": 3.0})

    assert call("measured", experiment=dataclasses.replace(MEASURED, rounds=0, study=look)) == 1


@pytest.mark.slow
def test_an_interrupted_measurement_keeps_its_finished_cells(call: Caller) -> None:
    assert call("measured", "--json", experiment=MEASURED) == 0
    whole = json.loads(call.stdout)
    made: list[str] = []

    def interrupted(at: int) -> Experiment:
        def look(found: Found) -> Studied:
            def tell(text: str) -> None:
                if text == f"cell {at}":
                    raise KeyboardInterrupt
                made.append(text)

            found.say = Say(tell, found.say._kept, found.say._keep)
            return measure(found)

        return dataclasses.replace(MEASURED, study=look)

    assert call("measured", "--json", experiment=interrupted(0)) == 130
    assert "nothing was saved" in call.stderr
    assert call("measured", "--json", experiment=interrupted(2)) == 130
    assert "2 parts of the measurement" in call.stderr
    folder = call.folders[-1]
    assert len((folder / "cells.jsonl").read_text().splitlines()) == 2
    assert call("--resume", folder.name, "--json", experiment=MEASURED) == 0
    resumed = json.loads(call.stdout)
    assert resumed["findings"] == whole["findings"]
    assert len((folder / "cells.jsonl").read_text().splitlines()) == 4


@pytest.mark.slow
def test_flowers_logger_is_as_before_after_a_run(call: Caller) -> None:
    from flwr.common.logger import FLOWER_LOGGER

    before = list(FLOWER_LOGGER.handlers)
    assert call("tiny") == 0
    assert before == FLOWER_LOGGER.handlers


def test_settings_of_an_experiment_are_listed(call: Caller) -> None:
    assert call("tiny", "--list") == 0
    for key, option in TINY.options.items():
        assert any(key in line and option.help in line for line in call.stdout.splitlines())
    assert call("--list", "--json") == 0
    listed = json.loads(call.stdout)["list"]
    assert {entry["experiment"] for entry in listed} == set(CATALOG)


@pytest.mark.long
def test_ctrl_c_in_the_middle_of_a_real_run_then_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["quickstart", "--json", "--rounds", "3", "--clients", "3"]
    arguments += ["--set", "task.hidden=16", "--set", "link="]
    code = main([*arguments, "--out", str(tmp_path / "whole")])
    assert code in {0, 1}
    expected = json.loads(capsys.readouterr().out)

    out = tmp_path / "broken"
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.run", *arguments, "--out", str(out)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for_rounds(process, out, 7)  # a round or so into the second row
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    assert stdout == ""
    assert "Traceback" not in stderr
    assert "--resume" in stderr

    # By another process than the one that was interrupted.
    assert main(["--resume", "last", "--json", "--out", str(out)]) == code
    document = json.loads(capsys.readouterr().out)
    assert document["claims"] == expected["claims"]
    for row, other in zip(document["rows"], expected["rows"], strict=True):
        assert row.pop("seconds") > 0
        assert other.pop("seconds") > 0
        assert row == other


def wait_for_rounds(process: subprocess.Popen[str], out: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        files = list(out.glob("*/rounds.jsonl"))
        if files and files[0].read_text().count("\n") >= count:
            return
        time.sleep(0.01)
    pytest.fail(f"the run did not reach {count} recorded rounds; exit code {process.poll()}")
