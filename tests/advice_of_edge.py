"""Advice of edge nodes: of their command line, their processes, and their executor."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import io
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from advice import Row, row
from flwr.supercore.auth import load_superexec_auth_secret

from fedcomp.clients.edge import executor, node, prepare
from fedcomp.clients.edge.events import EventLog
from fedcomp.clients.edge.executor import read_list, refusal
from fedcomp.clients.edge.node import program
from fedcomp.clients.edge.options import parse
from fedcomp.flower._private import NodeTasks

NODE = ("--superlink", "localhost:9092", "--partition", "0", "--of", "2")
GOOD = (*NODE, "--insecure")


def executed(*words: str) -> bool:
    """Whether an executor that is told to stop at once leaves as it should."""
    with (
        open(os.devnull) as closed,
        patch.object(executor, "gc"),
        patch.object(executor, "keep_freed_memory"),
        patch.object(executor.signal, "signal"),
    ):
        asked = ["--runtime", "127.0.0.1:1", "--until-closed", str(closed.fileno()), "--preload", "", *words]
        return executor.main(asked) == executor.OK


@contextmanager
def threaded(folder: Path) -> Iterator[str]:
    """Yield the name of a module that starts a thread when it is imported."""
    (folder / "of_threads.py").write_text(
        "import threading\ndone = threading.Event()\nthread = threading.Thread(target=done.wait)\nthread.start()\n"
    )
    with patch.object(sys, "path", [str(folder), *sys.path]):
        yield "of_threads"
    if module := sys.modules.pop("of_threads", None):
        module.done.set()
        module.thread.join()


def with_threads(path: Path, *, preloaded: bool) -> bool:
    with threaded(path) as name:
        return executed(*(["--preload", name] if preloaded else []))


def elsewhere() -> bool:
    with patch.object(sys, "platform", "plan9"):
        return executed()


def written(path: Path, text: bytes) -> Path:
    path.write_bytes(text)
    return path


def asked(path: Path, ours: bytes, theirs: bytes) -> bool:
    """Whether a SuperNode lets an executor look for a message; each has a file with its secret."""
    # Only what asks it needs all of Flower's servers.
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.supernode.main import create_app
    from flwr.supernode.nodestate import NodeStateFactory
    from starlette.testclient import TestClient

    secret = load_superexec_auth_secret(str(written(path / "theirs", theirs)))
    supernode = create_app(NodeStateFactory(ObjectStoreFactory()), secret)
    with patch("flwr.supercore.protobuf.client.httpx.Client", lambda **_: TestClient(supernode)):
        tasks = NodeTasks("127.0.0.1:9094", executor._secret(written(path / "ours", ours)))
    while True:
        try:
            return tasks.acquire() is None
        except ConnectionError:
            continue


def listed(path: Path) -> bool:
    """Whether the list takes what sha256sum prints of two bundles, and allows these alone."""
    for name in ("a.fab", "b of mine.fab"):
        (path / name).write_bytes(name.encode())
    with open(path / "allowed", "w") as file:
        subprocess.run(["sha256sum", "a.fab", "b of mine.fab"], cwd=path, stdout=file, check=True)
    refused = [
        bool(refusal(hashlib.sha256(name).hexdigest(), path / "allowed")) for name in (b"a.fab", b"b of mine.fab", b"c")
    ]
    return refused == [False, False, True]


def no_hash(path: Path) -> frozenset[str]:
    (path / "allowed").write_text("a.fab\n")
    return read_list(path / "allowed")


def without_flower(path: Path) -> str:
    with patch.object(sys, "executable", str(path / "python")), patch.dict(os.environ, {"PATH": str(path)}):
        return program("flower-supernode")


def with_flower() -> bool:
    """Whether the program is beside this very Python, and came with what this project requires."""
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="flower-supernode")
    needs = importlib.metadata.requires("fedcomp") or []
    assert entry.dist is not None
    there = Path(program("flower-supernode")).parent == Path(sys.executable).parent
    return there and any(need.startswith(entry.dist.name) for need in needs)


def homed(path: Path) -> bool:
    command, env = prepare([*GOOD, "--home", str(path)])
    return (path / "state").is_dir() and env["FLWR_HOME"] == str(path) and str(path) in command[-1]


def below_a_file(path: Path) -> bool:
    return homed(written(path / "file", b"") / "home")


def beside(path: Path, *words: str) -> bool:
    """Whether a node is made on a machine on which another one has the usual port; its executor is not asked for."""
    with (
        patch.object(node, "port_is_free", lambda host, port: port != 9094),
        patch.object(node, "_executor", lambda *_: (["executor"], "")),
    ):
        supernode, _ = node.services(parse([*GOOD, *words]), path / "secret", EventLog(stream=io.StringIO()))
    return supernode.command[supernode.command.index("--port") + 1] == "9095"


def with_key(path: Path, *trust: str) -> bool:
    """Whether the SuperNode is given the key, and what it verifies the other end with."""
    key, ca = written(path / "key", b""), written(path / "ca.crt", b"")
    words = [word.format(ca=ca) for word in trust]
    command, _ = prepare([*NODE, *words, "--key", str(key)])
    given = dict(itertools.pairwise(command))
    return given["--auth-supernode-private-key"] == str(key) and given["--root-certificates"] == str(ca)


def own_executor() -> bool:
    """Whether Flower's SuperNode, as a node starts it without an executor, handles messages in processes of its own."""
    flower = importlib.import_module("flwr.supernode.cli.flower_supernode")
    command = prepare(GOOD)[0]
    return flower._parse_args_run_supernode().parse_args(command[1:]).isolation == "subprocess"


EXECUTOR: tuple[Row, ...] = (
    Row(
        "is empty; give it and the SuperNode the same secret",
        lambda path: executed("--secret-file", str(written(path / "secret", b""))),
        lambda path: asked(path, b"one", b"one"),
        long=True,
    ),
    Row(
        "refuses this executor (HTTP {}); give both the same secret file",
        lambda path: asked(path, b"one", b"another"),
        lambda path: asked(path, b"one", b"one"),
        long=True,
    ),
    Row("is not the SHA-256 of a bundle; take what sha256sum prints of the .fab file", no_hash, listed),
    Row(
        "{}; leave it out of --preload",
        lambda path: with_threads(path, preloaded=True),
        lambda path: with_threads(path, preloaded=False),
    ),
    row("{}; start the SuperNode without --isolation process", elsewhere, own_executor),
)


NODES: tuple[Row, ...] = (
    Row("cannot make {}: {}; name another folder", below_a_file, homed),
    Row("found neither beside {} nor on PATH; it comes with flwr: install ", without_flower, lambda _: with_flower()),
    Row("choose another with --port, one per node and machine", beside, lambda path: beside(path, "--port", "9095")),
    Row(
        "--key needs TLS: give --root-certificates instead of --insecure",
        lambda path: with_key(path, "--insecure"),
        lambda path: with_key(path, "--root-certificates", "{ca}"),
    ),
)


ROWS: tuple[Row, ...] = (*EXECUTOR, *NODES)
