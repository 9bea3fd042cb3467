"""Private runs from the command line down: the budget holds, over interruptions too, and no epsilon stands alone."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict
from pages import make
from private_experiment import EXPERIMENT
from private_rows import small

from fedcomp.clients.app import app as client_app
from fedcomp.errors import ConfigError
from fedcomp.experiments import console, engines, server_app
from fedcomp.experiments.findings import Findings
from fedcomp.experiments.page import render_report
from fedcomp.experiments.report import promises
from fedcomp.experiments.run import RunnerSetup, main
from fedcomp.experiments.store import RunFolder
from fedcomp.experiments.tables import specs_of
from fedcomp.flower.grid import InProcessGrid
from fedcomp.privacy.accounting import releases_for
from fedcomp.privacy.errors import PrivacyLedgerError
from fedcomp.privacy.statement import Statement

DELTA = 1e-5
SETUP = RunnerSetup(catalog={"guarded": EXPERIMENT})


def entries(path: Path) -> list[dict]:
    """Return what a ledger file holds below its head and header."""
    return [json.loads(line) for line in path.read_text().splitlines()[2:]]


class Interrupted(Exception):
    pass


def broken(*args, **kwargs):
    raise Interrupted


def interrupt(after: int):
    def on_round(record):
        if record.round == after:
            raise Interrupted

    return on_round


@pytest.mark.slow
@pytest.mark.parametrize("budget", [2.0, 3.2, 5.0])
def test_a_run_ends_before_the_budget_is_crossed_and_its_last_model_is_evaluated(budget, tmp_path):
    spec = small("dp-fedavg", rounds=9, budget=budget, evaluate_every=100)
    allowed = releases_for(budget, DELTA, 2.0)
    assert 0 < allowed < 9
    result = engines.run(spec, privacy=tmp_path / "ledger")
    assert [record.round for record in result] == list(range(allowed + 1))
    assert result.final.metrics["privacy.releases"] == allowed
    assert result.final.metrics["privacy.epsilon"] <= budget
    assert [math.isnan(record.accuracy) for record in result] == [False] + [True] * (allowed - 1) + [False]
    assert f"the budget of epsilon {budget:g}" in result.notes["ended"]
    assert len(entries(tmp_path / "ledger")) == allowed


def test_a_budget_that_pays_for_nothing_makes_no_round():
    result = engines.run(small("dp-fedavg", budget=0.1))
    assert [record.round for record in result] == [0]
    assert not math.isnan(result.accuracy)
    assert result.notes["ended"]
    assert Statement.from_json(result.notes["privacy"]).epsilon == 0.0


@pytest.mark.slow
def test_a_run_that_is_not_interrupted_and_one_that_is_end_in_the_same_model(tmp_path):
    spec = small("dp-fedavg", rounds=4)
    whole = engines.run(spec, checkpoint=tmp_path / "whole" / "checkpoint")
    with pytest.raises(Interrupted):
        engines.run(spec, on_round=interrupt(2), checkpoint=tmp_path / "cut" / "checkpoint")
    resumed = engines.run(spec, checkpoint=tmp_path / "cut" / "checkpoint")
    assert {k: v.tobytes() for k, v in resumed.arrays.items()} == {k: v.tobytes() for k, v in whole.arrays.items()}
    assert resumed.notes["privacy"]["epsilon"] == whole.notes["privacy"]["epsilon"]
    assert len(entries(tmp_path / "cut" / "privacy.jsonl")) == 4


@pytest.mark.slow
def test_a_round_that_is_made_again_is_paid_for_again(tmp_path, monkeypatch):
    from fedcomp.experiments import serve

    spec = small("dp-fedavg", rounds=3, budget=5.0)
    allowed = releases_for(5.0, DELTA, 2.0)
    folder = tmp_path / "row"
    with monkeypatch.context() as patch:
        # The noisy model of round 1 exists, and the checkpoint that would know of it does not.
        patch.setattr(serve.checkpoints.CheckpointFile, "save", broken)
        with pytest.raises(Interrupted):
            engines.run(spec, checkpoint=folder / "checkpoint")
    assert [entry["round"] for entry in entries(folder / "privacy.jsonl")] == [1]
    result = engines.run(spec, checkpoint=folder / "checkpoint")
    paid = entries(folder / "privacy.jsonl")
    assert [entry["round"] for entry in paid] == [1, *range(1, min(3, allowed - 1) + 1)]
    assert result.final.metrics["privacy.releases"] == len(paid) <= allowed


@pytest.mark.slow
def test_a_lower_budget_ends_a_resumed_run_at_once_and_a_higher_one_lets_it_go_on(tmp_path):
    spec = small("dp-fedavg", rounds=6, evaluate_every=100)
    with pytest.raises(Interrupted):
        engines.run(spec, on_round=interrupt(3), checkpoint=tmp_path / "checkpoint")
    seen = []
    lower = small("dp-fedavg", rounds=6, evaluate_every=100, budget=2.0)
    ended = engines.run(lower, on_round=seen.append, checkpoint=tmp_path / "checkpoint")
    assert [record.round for record in ended] == [0, 1, 2, 3]
    assert "the budget of epsilon 2" in ended.notes["ended"]
    # The last record is told again, with the accuracy of the model that the run ends with.
    assert [record.round for record in seen] == [3]
    assert seen[0].accuracy == ended.accuracy
    assert not math.isnan(ended.final.accuracy)
    assert len(entries(tmp_path / "privacy.jsonl")) == 3
    higher = small("dp-fedavg", rounds=6, evaluate_every=100, budget=50.0)
    assert engines.run(higher, checkpoint=tmp_path / "checkpoint").final.round == 6


def test_another_promise_does_not_continue_a_run(tmp_path):
    engines.run(small("dp-fedavg", rounds=1), checkpoint=tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="resume with the same specification"):
        engines.run(small("dp-fedavg", rounds=2, noise_multiplier=4.0), checkpoint=tmp_path / "checkpoint")
    (tmp_path / "checkpoint").unlink()
    with pytest.raises(PrivacyLedgerError, match="delta"):
        engines.run(small("dp-fedavg", rounds=2, delta=1e-6), checkpoint=tmp_path / "checkpoint")


def guarded(tmp_path, *arguments, capsys):
    code = main([*arguments, "--out", str(tmp_path), "--json"], setup=SETUP)
    printed = capsys.readouterr().out
    return code, json.loads(printed) if printed else None


@pytest.mark.slow
def test_the_command_line_keeps_a_budget_and_says_why_a_row_ended(tmp_path, capsys):
    code, summary = guarded(tmp_path, "guarded", "--budget", "3.2", capsys=capsys)
    plain, private = summary["rows"]
    allowed = releases_for(3.2, DELTA, 2.0)
    assert code == 0
    assert plain["rounds"] == 4
    assert "privacy" not in plain
    assert private["rounds"] == allowed < 4
    assert "the budget of epsilon 3.2" in private["ended"]
    assert private["privacy"]["epsilon"] <= 3.2
    assert private["privacy"]["budget"] == 3.2
    assert "differential" in private["privacy"]["prose"]
    assert "budget=3.2" in summary["changed"]
    folder = RunFolder.find(tmp_path, "last")
    # The ledger outlives the checkpoint of the finished row.
    assert len(entries(folder.row(folder.specs[1]).privacy)) == allowed
    assert not folder.row(folder.specs[1]).checkpoint.exists()
    # Of the run that is resumed, nothing is asked again.
    again, same = guarded(tmp_path, "--resume", "last", capsys=capsys)
    assert again == 0
    assert same["rows"] == summary["rows"]
    assert same["config"]["budget"] == 3.2


@pytest.mark.slow
def test_the_budget_of_a_resumed_run_can_be_set_anew(tmp_path, capsys, monkeypatch):
    """Ended by a lower budget between two rounds; the stored one holds where none is given."""
    from fedcomp.experiments.run import RunFolder as Folder

    append = Folder.append

    def cut(self, spec, record):
        append(self, spec, record)
        if spec.system == "dp-fedavg" and record.round == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "append", cut)
        assert main(["guarded", "--out", str(tmp_path), "--budget", "50"], setup=SETUP) == 130
    capsys.readouterr()
    # What is no epsilon is refused before the run's folder remembers it.
    for wrong in ("-1", "inf", "nan"):
        assert main(["--resume", "last", "--budget", wrong, "--out", str(tmp_path)], setup=SETUP) == 2
        assert "--budget must be an epsilon greater than 0" in capsys.readouterr().err
        assert RunFolder.find(tmp_path, "last").config.budget == 50.0
    code, summary = guarded(tmp_path, "--resume", "last", "--budget", "2", capsys=capsys)
    assert code == 0
    assert summary["rows"][1]["rounds"] == 2
    assert "the budget of epsilon 2 " in summary["rows"][1]["ended"]
    assert summary["rows"][1]["privacy"]["epsilon"] > 2.0
    assert RunFolder.find(tmp_path, "last").config.budget == 2.0


@pytest.mark.parametrize(("budget", "said"), [("0", "greater than 0"), ("-1", "greater than 0"), ("nan", "greater")])
def test_a_budget_is_an_epsilon(budget, said, tmp_path, capsys):
    assert main(["guarded", "--budget", budget, "--out", str(tmp_path)], setup=SETUP) == 2
    assert said in capsys.readouterr().err


def test_a_rows_own_smaller_budget_stays():
    config = EXPERIMENT.configure(budget=3.0)
    tight, loose = (
        dataclasses.replace(EXPERIMENT, rows={"DP-FedAvg": f"dp-fedavg budget={own}"}) for own in (1.0, 8.0)
    )
    assert [specs_of(e, config)[0].settings["budget"] for e in (tight, loose)] == [1.0, 3.0]


def test_a_run_that_released_something_is_kept_though_no_round_was_finished(tmp_path):
    config = EXPERIMENT.configure()
    folder = RunFolder.create(tmp_path, config, specs_of(EXPERIMENT, config))
    ledger = folder.row(folder.specs[1]).privacy
    ledger.write_text("header\nevent\n")
    assert not folder.discard_if_empty()
    ledger.write_text("header\n")
    assert folder.discard_if_empty()
    assert not folder.path.exists()


@pytest.mark.slow
def test_no_epsilon_is_shown_without_its_statement(tmp_path, capsys):
    assert main(["guarded", "--out", str(tmp_path), "--rounds", "2"], setup=SETUP) == 0
    shown = " ".join(capsys.readouterr().out.split())
    folder = RunFolder.find(tmp_path, "last")
    summary = json.loads((folder.path / "summary.json").read_text())
    ((_, said, ended),) = promises(summary)
    report = (folder.path / "report.html").read_text()
    assert ended == ""
    for line in said.prose().splitlines():
        name, _, text = line.partition(": ")
        words = " ".join((text or name).split())
        assert words in shown, line
        assert words.replace("'", "&#39;") in report, line


def test_statements_of_measurements_are_shown_as_those_of_rows_are():
    result = engines.run(small("dp-fedavg", rounds=1))
    document = result.notes["privacy"]
    findings = Findings(statements={"trained centrally": document})
    assert Findings.from_json(json.loads(json.dumps(findings.to_json()))).statements == findings.statements
    summary = {"rows": [], "findings": findings.to_json(), "config": {"rounds": 1}}
    ((label, said, ended),) = promises(summary)
    assert (label, said.to_json(), ended) == ("trained centrally", document, "")
    printed = io.StringIO()
    for part in console.promise_parts(summary):
        console.make_console(printed).print(part)
    assert "Privacy of trained centrally" in printed.getvalue()


@pytest.mark.slow
def test_two_promises_share_what_is_the_same_of_both():
    document = engines.run(small("dp-fedavg", rounds=1)).notes["privacy"]
    other = engines.run(small("dp-fedavg", rounds=2)).notes["privacy"]
    summary = {"rows": [], "findings": Findings(statements={"a": document, "b": other}).to_json(), "config": {}}
    summary["config"]["rounds"] = 1
    printed = io.StringIO()
    for part in console.promise_parts(summary):
        console.make_console(printed).print(part)
    text = printed.getvalue()
    assert text.count("zero_out: leaving") == 1
    assert text.count("releases in") == 2


@pytest.mark.slow
def test_the_server_app_keeps_the_ledger_in_its_folder_and_logs_the_promise(tmp_path, caplog):
    spec = small("dp-fedavg", rounds=1)

    def run(**config):
        with InProcessGrid(client_app, spec.clients, seed=spec.seed) as grid:
            server_app.app(grid, Context(grid.run.run_id, 0, {}, RecordDict(), {**spec.to_run_config(), **config}))

    run(out=str(tmp_path / "out"))
    assert len(entries(tmp_path / "out" / "privacy.jsonl")) == 1
    run(out=str(tmp_path / "other"), privacy=str(tmp_path / "elsewhere" / "ledger"))
    assert len(entries(tmp_path / "elsewhere" / "ledger")) == 1
    assert not (tmp_path / "other" / "privacy.jsonl").exists()
    with caplog.at_level("INFO", logger="flwr"):
        run()
    assert "-differential privacy under zero-out adjacency" in caplog.text
    with pytest.raises(ConfigError, match="privacy is 'ledger'; expected an absolute path"):
        run(privacy="ledger")


def test_the_report_folds_many_statements():
    document = engines.run(small("dp-fedavg", rounds=1)).notes["privacy"]
    summary, _ = make()
    summary["findings"]["statements"] = {"<b>one</b>": document}
    few = render_report(summary, {})
    assert "<b>one</b>" not in few
    assert '<details class="statement" open>' in few
    summary["findings"]["statements"] = {f"run {i}": document for i in range(3)}
    assert '<details class="statement" open>' not in render_report(summary, {})
