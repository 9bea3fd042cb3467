"""An edge node's listener: the app is told where it is, and it leaves with the SuperNode, however that ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args
from peer_key_files import make_key, make_list
from running_listener import free_port, open_files, wait_until

from fedcomp.clients.edge import PEER_ADDRESS, PEER_STORE, prepare
from fedcomp.clients.edge.node_config import PEER_KEY, PEER_KEYS
from fedcomp.coding.transport import DeliveryFailed, Parcel, Spool, TcpTransport, transport_of
from fedcomp.experiments.engines.processes import processes_with

HERE = Path(__file__).parents[2]
GOOD = ["--superlink", "127.0.0.1:8000", "--partition", "1", "--of", "4", "--insecure"]


def node_config(*options: str) -> dict[str, object]:
    """Return the node configuration as SuperNode itself reads it from the command line."""
    command, _ = prepare([*GOOD, *options])
    return parse_config_args([command[command.index("--node-config") + 1]])


# What the app is told.


@pytest.mark.slow
def test_the_app_finds_address_and_store_under_the_names_it_looks_for(tmp_path: Path) -> None:
    config = node_config("--peer", "127.0.0.1:9100", "--peer-store", str(tmp_path / "with space"))
    assert config == {
        "partition-id": 1,
        "num-partitions": 4,
        PEER_ADDRESS: "tcp://127.0.0.1:9100",
        PEER_STORE: str(tmp_path / "with space"),
    }
    transport = transport_of(str(config[PEER_ADDRESS]), Path(str(config[PEER_STORE])))
    assert isinstance(transport, TcpTransport)


def test_the_app_finds_the_nodes_key_and_the_list_of_all(tmp_path: Path) -> None:
    key, other = make_key(tmp_path / "node-1"), make_key(tmp_path / "node-3")
    listed = make_list(tmp_path / "peers.txt", {1: key, 3: other})
    (tmp_path / "ca.crt").write_text("")
    secured = ["--root-certificates", str(tmp_path / "ca.crt"), "--key", str(key), "--peer-keys", str(listed)]
    command, _ = prepare([*[word for word in GOOD if word != "--insecure"], *secured])
    config = parse_config_args([command[command.index("--node-config") + 1]])
    assert config[PEER_KEY] == str(key)
    assert config[PEER_KEYS] == str(listed)


def test_a_list_that_cannot_work_is_refused_before_anything_is_started(tmp_path: Path, capsys) -> None:
    key, other = make_key(tmp_path / "node-1"), make_key(tmp_path / "node-3")
    (tmp_path / "ca.crt").write_text("")
    trusted = [*[word for word in GOOD if word != "--insecure"], "--root-certificates", str(tmp_path / "ca.crt")]
    swapped = make_list(tmp_path / "swapped", {3: key, 1: other})
    alone = make_list(tmp_path / "alone", {3: other})
    for options, said in [
        (["--peer-keys", str(swapped)], "--peer-keys needs --key"),
        (["--key", str(key), "--peer-keys", str(swapped)], "is listed for partition 3, not 1"),
        (["--key", str(key), "--peer-keys", str(alone)], "is not in the list of peer keys"),
        (["--key", str(key), "--peer-keys", str(tmp_path / "none")], "--peer-keys: no file"),
        (["--key", str(key), "--peer-keys", str(key)], "expected a partition and an ECDSA public key"),
    ]:
        with pytest.raises(SystemExit):
            prepare([*trusted, *options])
        assert said in capsys.readouterr().err


def test_without_peer_nothing_of_it_is_said() -> None:
    assert set(node_config()) == {"partition-id", "num-partitions"}


def test_the_store_lies_below_the_home_or_in_a_folder_of_its_own(tmp_path: Path, monkeypatch) -> None:
    assert node_config("--peer", "127.0.0.1:9100", "--home", str(tmp_path))[PEER_STORE] == str(tmp_path / "peer-store")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = Path(str(node_config("--peer", "127.0.0.1:9100")[PEER_STORE]))
    assert store.parent == tmp_path
    assert store.stat().st_mode & 0o077 == 0


def test_a_node_that_listens_everywhere_says_where_it_is_reached(tmp_path: Path) -> None:
    config = node_config("--peer", "0.0.0.0:9100", "--peer-announce", "edge-7.lan:9107", "--peer-store", str(tmp_path))
    assert config[PEER_ADDRESS] == "tcp://edge-7.lan:9107"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--peer", "9100"], "--peer: address '9100'; expected HOST:PORT"),
        (["--peer", "127.0.0.1:0"], "expected HOST:PORT with a port from 1 to 65535"),
        (["--peer", "tcp://127.0.0.1:9100"], "expected HOST:PORT"),
        (["--peer", "0.0.0.0:9100"], "which others cannot reach; give an address they can reach with --peer-announce"),
        (["--peer", "[::]:9100"], "which others cannot reach"),
        (["--peer", "[0:0::0]:9100"], "which others cannot reach"),
        (["--peer", "0:9100"], "which others cannot reach"),
        (["--peer", "127.0.0.1:9100", "--peer-announce", "0.0.0.0:9100"], "--peer-announce is 0.0.0.0:9100"),
        (["--peer", "127.0.0.1:9100", "--peer-announce", "nowhere"], "--peer-announce: address 'nowhere'"),
        (["--peer", "127.0.0.1:9100", "--peer-store", "/tmp/it's"], "a name with a quote"),
        (["--peer-store", "/tmp"], "no effect without --peer"),
        (["--peer-announce", "10.0.0.1:1"], "no effect without --peer"),
    ],
)
def test_wrong_peer_arguments_say_what_to_change(options: list[str], said: str, capsys) -> None:
    with pytest.raises(SystemExit) as leaving:
        prepare([*GOOD, *options])
    assert leaving.value.code == 2
    assert said in capsys.readouterr().err


# Coming and going, with a program in the SuperNode's place that starts a helper of its own, as SuperNode does.

SUPERNODE = """#!{python}
import os, subprocess, sys, time
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("supernode", os.getpid(), helper.pid, sys.argv[sys.argv.index("--node-config") + 1], flush=True)
if {ends}:
    sys.exit(3)
time.sleep(60)
"""

ENTRY = """
import sys
from fedcomp.clients.edge import node
node.program = lambda name: sys.argv[1]
node._executor = lambda *_: ([], "not here")
sys.exit(node.main(sys.argv[2:]))
"""


class Node:
    """The entry point with a stand-in for SuperNode."""

    def __init__(self, folder: Path, *options: str, ends: bool = False, port: int | None = None) -> None:
        self.mark = str(folder / "mark")
        self.port = free_port() if port is None else port
        program = folder / "flower-supernode"
        program.write_text(SUPERNODE.format(python=sys.executable, ends=ends))
        program.chmod(0o755)
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-c", ENTRY, str(program), *GOOD, "--port", str(free_port())),
                *("--peer", f"127.0.0.1:{self.port}", *options),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=HERE,
            env={**os.environ, "NODE_MARK": self.mark, "TMPDIR": str(folder)},
        )

    def started(self) -> tuple[int, int, dict[str, object]]:
        """Return the ids of SuperNode and its helper, and the node configuration."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("supernode | supernode "):
                _, pid, helper, config = line.removeprefix("supernode | ").split(" ", 3)
                return int(pid), int(helper), parse_config_args([config])
        raise AssertionError(self.process.communicate()[1])

    def listeners(self) -> list[int]:
        found = processes_with("NODE_MARK", self.mark)
        return [pid for pid, command in found.items() if "fedcomp.coding.listener" in command]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def begin(*options: str, **settings: object) -> Node:
        nodes.append(Node(tmp_path, *options, **settings))  # type: ignore[arg-type]
        return nodes[-1]

    yield begin
    for node in nodes:
        for pid in processes_with("NODE_MARK", node.mark):
            os.kill(pid, signal.SIGKILL)
        node.process.communicate()


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_listener_leaves_with_the_node(start, tmp_path, number) -> None:
    node = start()
    pid, helper, config = node.started()
    assert len(node.listeners()) == 1
    store = Path(str(config[PEER_STORE]))
    sender = TcpTransport("tcp://127.0.0.1:9", Spool(tmp_path / "other"))
    parcel = Parcel(b"run-0001", 1, 0, 0, 1, b"shard")
    assert sender.send(str(config[PEER_ADDRESS]), parcel) == 41
    assert Spool(store).list(b"run-0001", 1) == [parcel]

    node.process.send_signal(number)
    wait_until(lambda: node.listeners() == [] and not alive(pid))
    node.process.wait()
    # The kernel kills what the supervisor started. What that started must watch its own parent, as Flower's helpers do.
    assert number == signal.SIGKILL or not alive(helper)
    assert not store.exists()  # a folder made for this node goes with it
    with pytest.raises(DeliveryFailed, match="refused"):
        sender.send(str(config[PEER_ADDRESS]), parcel)


@pytest.mark.slow
def test_the_listener_stays_when_the_supernode_is_restarted(start, tmp_path) -> None:
    node = start("--peer-store", str(tmp_path / "store"), ends=True)
    first, *_ = node.started()
    before = node.listeners()
    second, *_ = node.started()
    assert first != second
    assert node.listeners() == before
    node.process.terminate()
    node.process.communicate()
    assert node.process.returncode == 0
    assert node.listeners() == []
    assert (tmp_path / "store").is_dir()  # a folder that was named stays


@pytest.mark.slow
def test_nothing_but_the_node_holds_the_pipe(start) -> None:
    node = start()
    _, helper, _ = node.started()
    (listener,) = node.listeners()
    command = Path(f"/proc/{listener}/cmdline").read_bytes().split(b"\0")
    assert command[command.index(b"--until-closed") + 1] == b"0"
    pipe = os.readlink(f"/proc/{listener}/fd/0")

    def holds(process: int) -> int:
        return open_files(process).count(pipe)

    assert (holds(node.process.pid), holds(listener), holds(helper)) == (1, 1, 0)


@pytest.mark.slow
def test_a_node_whose_port_is_taken_does_not_start(start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        node = start(port=port)
        out, _ = node.process.communicate(timeout=20)
    assert node.process.returncode == 78
    assert "supernode |" not in out
    assert f"cannot listen on 127.0.0.1:{port}" in out
    assert f"the listener on 127.0.0.1:{port} did not start" in out
    assert node.listeners() == []


@pytest.mark.long
def test_a_real_supernode_takes_its_listener_along(tmp_path: Path) -> None:
    port, own = free_port(), free_port()
    arguments = ["--superlink", f"127.0.0.1:{free_port()}", "--partition", "0", "--of", "1", "--insecure"]
    arguments += ["--port", str(own), "--home", str(tmp_path), "--peer", f"127.0.0.1:{port}"]
    command = [sys.executable, "-m", "fedcomp.clients.edge", *arguments]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=HERE, stdout=log, stderr=log, start_new_session=True)

    def family() -> dict[int, str]:
        return processes_with("FLWR_HOME", str(tmp_path))

    try:
        wait_until(lambda: any("flower-supernode" in command for command in family().values()), 300)
        # Its helper has started, which could have taken over the pipe.
        wait_until(lambda: any("superexec" in command for command in family().values()), 300)
        (listener,) = [pid for pid, command in family().items() if "fedcomp.coding.listener" in command]
        socket.create_connection(("127.0.0.1", port), timeout=100).close()
        process.kill()
        process.wait()
        wait_until(lambda: not alive(listener))
        # The SuperNode is killed with its supervisor; its helper sees that its parent is gone, and leaves.
        wait_until(lambda: family() == {}, 300)
    finally:
        for pid in family():
            os.kill(pid, signal.SIGKILL)
        process.wait()
