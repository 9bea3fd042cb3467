"""The edge entry point builds the right SuperNode command and refuses what cannot work with a reason."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from fedcomp.clients.edge import node, prepare
from fedcomp.clients.edge.events import EventLog
from fedcomp.clients.edge.links import Link
from fedcomp.clients.edge.options import parse

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
    arguments += ["--root-certificates", "ca.crt", "--key", "node.key", "--home", "home", "--data", "."]
    command, env = prepare(arguments)
    assert command[command.index("--root-certificates") + 1] == str(tmp_path / "ca.crt")
    assert command[command.index("--auth-supernode-private-key") + 1] == str(tmp_path / "node.key")
    config = command[command.index("--node-config") + 1]
    assert config.endswith(f" state-dir='{tmp_path / 'home' / 'state'}' data-path='{tmp_path}'")
    assert (tmp_path / "home" / "state").stat().st_mode & 0o777 == 0o700
    # The SuperNode that gives up leaves a process that never connects again.
    assert "--max-wait-time" not in command
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
        ({"--give-up": "0"}, "positive number of seconds"),
        ({"--give-up": "inf"}, "positive number of seconds"),
        ({"--link": "fast"}, "expected the rate of the uplink"),
        ({"--link": "100bit"}, "at least 1kbit"),
        ({"--data": "/nowhere"}, "there is no /nowhere"),
        ({"--state-dir": "/tmp/it's"}, "a name with a quote"),
        ({"--allow-bundles": "/nowhere/list"}, "no file /nowhere/list"),
        ({"--key": "/nowhere/node.key"}, "no file /nowhere/node.key"),
        *(({"--privacy-budget": wrong}, "expected an epsilon above 0") for wrong in ("0", "-1", "nan", "inf")),
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


def test_a_nodes_budget_needs_a_place_that_outlives_runs(tmp_path, capsys):
    with pytest.raises(SystemExit):
        prepare([*GOOD, "--privacy-budget", "1.5"])
    assert "add --privacy-ledger FILE, or --state-dir DIR" in capsys.readouterr().err
    for place in (["--state-dir", str(tmp_path / "state")], ["--home", str(tmp_path / "home")]):
        command, _ = prepare([*GOOD, "--privacy-budget", "1.5", *place])
        config = command[command.index("--node-config") + 1]
        assert "privacy-budget=1.5 state-dir=" in config


@pytest.mark.parametrize(
    ("rate", "piece", "at_once"),
    [
        ("64kbit", 32768, 1),
        ("200kbit", 131072, 1),
        ("1mbit", 524288, 2),
        ("1Mbit", 524288, 2),
        ("0.5mbit", 262144, 1),
        ("10mbit", 4194304, 2),
        ("1gbit", 5242880, 2),
        ("1kbit", 512, 1),
    ],
)
def test_pieces_fit_the_uplink(rate, piece, at_once):
    link = Link.of(rate)
    assert (link.piece_bytes, link.at_once) == (piece, at_once)
    # Also where all that are on the way share it, a piece takes less than a third of Flower's 30 s.
    assert link.piece_bytes * link.at_once * 8 / link.rate < 10 or link.piece_bytes == 5242880
    assert link.reply_bytes == int(link.rate / 8 * 180)


def test_a_link_is_told_to_flower_whatever_the_environment_says(monkeypatch):
    monkeypatch.setenv("FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", "77")
    assert prepare(GOOD)[1]["FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE"] == "77"
    env = prepare([*GOOD, "--link", "64kbit"])[1]
    assert env["FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE"] == "32768"
    assert env["FLWR_PRIVATE_MAX_CONCURRENT_OBJ_PUSHES"] == "1"


def test_the_log_says_what_was_chosen_and_training_gives_way_to_the_supernode(tmp_path, monkeypatch):
    monkeypatch.setattr(node, "_executor", lambda *_: (["executor"], ""))
    monkeypatch.setattr(node, "port_is_free", lambda *_: True)
    said = io.StringIO()
    options = parse([*GOOD, "--link", "64kbit"])
    supernode, executor = node.services(options, tmp_path / "secret", EventLog(stream=said))
    assert (supernode.nice, executor.nice) == (0, 5)
    assert supernode.command[supernode.command.index("--superexec-auth-secret-file") + 1] == str(tmp_path / "secret")
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert "link: 64 kbit/s: replies in pieces of 32768 bytes, 1 at once" in said.getvalue()
    assert "within 180 s has 1440000 bytes" in said.getvalue()
    assert "state: no --state-dir: client memory, such as residuals, is lost" in said.getvalue()
    said.truncate(0)
    node.services(parse([*GOOD, "--state-dir", str(tmp_path)]), tmp_path / "secret", EventLog(stream=said))
    assert "state-dir" not in said.getvalue()


@pytest.mark.slow
def test_flower_reads_the_variables_that_are_set():
    code = "from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE as a;"
    code += "from flwr.supercore.constant import FLWR_PRIVATE_MAX_CONCURRENT_OBJ_PUSHES as b; print(a, b)"
    env = prepare([*GOOD, "--link", "64kbit"])[1]
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["32768", "1"]


@pytest.mark.slow
def test_a_node_needs_none_of_the_experiments() -> None:
    code = """
import sys
from fedcomp.experiments.program import main
try: main(["node", "--help"])
except SystemExit as leaving: assert leaving.code == 0
assert not {"typer", "click", "torch", "flwr", "rich"} & set(sys.modules), sorted(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--preflight" in done.stdout
