"""The server app as Flower calls it: a flat run configuration in, a stored result or a table out."""

from __future__ import annotations

import json
import logging

import pytest
from flwr.app import Context, RecordDict

from fedcomp.clients.app import app as client_app
from fedcomp.errors import ConfigError
from fedcomp.experiments.server_app import app
from fedcomp.experiments.spec import ROUNDS_FILE, RoundRecord, RunResult, RunSpec
from fedcomp.flower.grid import InProcessGrid

SPEC = RunSpec("topk", rounds=2, clients=3, settings={"task.hidden": "16", "codec.density": 0.1})


def call(server, **config) -> None:
    with InProcessGrid(client_app, SPEC.clients) as grid:
        server(grid, Context(grid.run.run_id, 0, {}, RecordDict(), {**SPEC.to_run_config(), **config}))


@pytest.mark.slow
def test_the_result_and_its_rounds_are_stored_in_the_folder(tmp_path):
    out = tmp_path / "new" / "folder"
    call(app, out=str(out))
    result = RunResult.load(out)
    assert result.spec == SPEC
    lines = [json.loads(line) for line in (out / ROUNDS_FILE).read_text().splitlines()]
    assert [RoundRecord.from_json(line).to_json() for line in lines] == [r.to_json() for r in result.rounds]


@pytest.mark.slow
def test_without_a_folder_a_table_is_logged(caplog):
    caplog.set_level(logging.INFO, logger="flwr")
    call(app, out="")
    rows = [r.getMessage().split() for r in caplog.records if r.getMessage()[:1].isdigit()]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert any(r.getMessage().startswith("topk: accuracy") for r in caplog.records)


@pytest.mark.parametrize("out", ["relative/folder", 3])
def test_only_absolute_folders_are_taken(out):
    with pytest.raises(ConfigError, match="expected an absolute path"):
        call(app, out=out)


def test_the_run_configuration_of_the_bundle_is_complete():
    import tomllib

    from fedcomp.experiments.engines.superlink import APP
    from fedcomp.experiments.systems import check

    project = tomllib.loads((APP / "pyproject.toml").read_text())
    config = project["tool"]["flwr"]["app"]["config"]
    places = {"out", "privacy", "checkpoint", "checkpoint_every"}
    # Flower refuses overrides of keys that are missing here, and the superlink engine overrides all of them.
    assert set(config) == {*RunSpec().to_run_config(), *places}
    for place in places:
        config.pop(place)
    check(RunSpec.from_run_config(config))
