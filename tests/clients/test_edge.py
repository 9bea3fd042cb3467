"""The edge entry point builds the right SuperNode command and refuses what cannot work with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedcomp.clients.edge import prepare

GOOD = ["--superlink", "127.0.0.1:8000", "--partition", "1", "--of", "4", "--insecure"]


def test_the_node_configuration_is_what_the_client_app_reads():
    command, env = prepare(GOOD)
    assert Path(command[0]).name == "flower-supernode"
    assert command[command.index("--node-config") + 1] == "partition-id=1 num-partitions=4"
    assert command[command.index("--superlink") + 1] == "127.0.0.1:8000"
    assert "--insecure" in command
    assert env["FLWR_TELEMETRY_ENABLED"] == "0"
    assert env["FLWR_DISABLE_UPDATE_CHECK"] == "1"


def test_files_are_passed_as_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ca.crt").write_text("")
    (tmp_path / "node.key").write_text("")
    arguments = ["--superlink", "edge.example:8000", "--partition", "0", "--of", "1"]
    arguments += ["--root-certificates", "ca.crt", "--key", "node.key", "--home", "home", "--max-wait", "5"]
    command, env = prepare(arguments)
    assert command[command.index("--root-certificates") + 1] == str(tmp_path / "ca.crt")
    assert command[command.index("--auth-supernode-private-key") + 1] == str(tmp_path / "node.key")
    assert command[command.index("--max-wait-time") + 1] == "5.0"
    assert "--insecure" not in command
    assert env["FLWR_HOME"] == str(tmp_path / "home")
    assert (tmp_path / "home").is_dir()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"--superlink": "http://127.0.0.1:8000"}, "expected HOST:PORT without a scheme"),
        ({"--superlink": "127.0.0.1"}, "expected HOST:PORT"),
        ({"--superlink": "127.0.0.1:99999"}, "expected HOST:PORT"),
        ({"--partition": "4"}, "with --of 4 it must be 0 to 3"),
        ({"--partition": "-1"}, "with --of 4 it must be 0 to 3"),
        ({"--of": "0"}, "at least one partition"),
        ({"--port": "0"}, "expected 1 to 65535"),
        ({"--max-wait": "0"}, "positive number of seconds"),
        ({"--key": "/nowhere/node.key"}, "no file /nowhere/node.key"),
    ],
)
def test_wrong_arguments_say_what_to_change(change, said, capsys):
    values = {"--superlink": "127.0.0.1:8000", "--partition": "1", "--of": "4", **change}
    arguments = [f"{option}={value}" for option, value in values.items()]
    with pytest.raises(SystemExit) as leaving:
        prepare([*arguments, "--insecure"])
    assert leaving.value.code == 2
    assert said in capsys.readouterr().err


def test_trust_must_be_decided(capsys):
    with pytest.raises(SystemExit):
        prepare(GOOD[:-1])
    assert "--insecure" in capsys.readouterr().err


def test_what_a_node_keeps_to_is_in_its_configuration(tmp_path):
    command, _ = prepare([*GOOD, "--privacy-budget", "1.5", "--privacy-ledger", str(tmp_path / "spent")])
    config = command[command.index("--node-config") + 1]
    assert config == f"partition-id=1 num-partitions=4 privacy-budget=1.5 privacy-ledger='{tmp_path / 'spent'}'"


@pytest.mark.parametrize("budget", ["0", "-1", "nan", "inf"])
def test_a_nodes_budget_is_an_epsilon(budget, capsys):
    with pytest.raises(SystemExit):
        prepare([*GOOD, f"--privacy-budget={budget}"])
    assert "expected an epsilon above 0" in capsys.readouterr().err
