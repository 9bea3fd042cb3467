"""A node that is killed, at every point that matters, owes and has delivered what it has made: the state folder.

Each client runs in a child process that is killed with a real SIGKILL; its SuperNode is the in-process grid, whose
contexts are thrown away where the SuperNode is killed as well.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import shutil
import signal
import stat
import traceback
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from toy import client_app, fedavg, model, stack, update

from fedcomp import files
from fedcomp.clients import kept, memory
from fedcomp.clients.client import client
from fedcomp.clients.compressed import compression
from fedcomp.clients.edge import STATE_FOLDER
from fedcomp.clients.memory import KEEP, MEMORY, kept_in
from fedcomp.clients.private.node_ledger import node_ledger
from fedcomp.codecs import TopK
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.errors import ConfigError
from fedcomp.flower import folder as folders
from fedcomp.flower._private import content_from_bytes, content_to_bytes
from fedcomp.flower.folder import FolderError, StateFolder
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.payload import put_frame
from fedcomp.strategies.compressed import Compressed
from fedcomp.systems.pair import Pair
from fedcomp.systems.private.record import DpSgdPlan

Rounds = dict[int, str]

BEFORE, RENAMED, FLUSHED, DELIVERED = "before rename", "renamed", "renamed and flushed", "delivered, no context"


class Sum(FedAvg):
    """Adds every decoded update to the model, unweighted."""

    def __init__(self) -> None:
        super().__init__(min_train_nodes=1, min_available_nodes=1, min_evaluate_nodes=1, fraction_evaluate=0.0)
        self.delivered = np.zeros(1212)
        self.base = np.zeros(1212)

    def configure_train(self, server_round, arrays, config, grid):
        self.base = stack(arrays)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        for reply in replies:
            if not reply.has_error():
                self.delivered += stack(next(iter(reply.content.array_records.values()))) - self.base
        # Without an aggregate nothing would be acknowledged.
        return model(), None


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point: str) -> None:
    """Let this process kill itself where the state is written."""
    replace, flush = os.replace, files.flush_folder
    if point == BEFORE:
        os.replace = die
    elif point == RENAMED:
        os.replace = lambda a, b: (replace(a, b), die())
    elif point == FLUSHED:
        files.flush_folder = lambda path: (flush(path), die())
    elif point == "full":
        # A child of its own: the limit is the process's, and cannot be raised again.
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))


class Process:
    """A client whose every message is a process of its own, killed in some rounds at some point."""

    def __init__(self, app: ClientApp, kills: Rounds | None = None) -> None:
        self.app, self.kills, self.round, self.deaths = app, kills or {}, 0, 0

    def __call__(self, msg: Message, context: Context) -> Message:
        self.round += 1
        point = self.kills.get(self.round, "")
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                self._handle(msg, context, point, write)
            except BaseException:
                traceback.print_exc()
            finally:
                # Never back into the test that was copied with this process.
                os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            try:
                error, content = pickle.load(pipe)
                said = Message(content_from_bytes(content), reply_to=msg) if content else refused(msg, error)
            except EOFError:
                said = None
            with contextlib.suppress(EOFError):
                context.state = content_from_bytes(pickle.load(pipe))
        _, status = os.waitpid(child, 0)
        self.deaths += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if said is None:
            raise SystemExit("killed")  # error 8, and the context as it was, as in a deployment
        return said

    def _handle(self, msg: Message, context: Context, point: str, write: int) -> None:
        arm(point)
        reply = self.app(msg, context)
        error = (reply.error.code, reply.error.reason) if reply.has_error() else None
        with os.fdopen(write, "wb") as pipe:
            pickle.dump((error, None if error else content_to_bytes(reply.content)), pipe)
            pipe.flush()
            if point == DELIVERED:
                die()
            pickle.dump(content_to_bytes(context.state), pipe)


def refused(msg: Message, error: tuple[int, str]) -> Message:
    return Message(Error(*error), reply_to=msg)


def stack_of_round(round_: int) -> np.ndarray:
    parts = [update(round_, 0, array.shape, i) for i, array in enumerate(model().values())]
    return np.concatenate([each.astype(np.float64).reshape(-1) for each in parts])


class Node:
    """One client of a server, and what can happen to both."""

    def __init__(self, folder: Path | None, kills: Rounds | None = None, app: ClientApp | None = None, seed: int = 3):
        self.process = Process(app or client_app([compression()]), kills)
        config = {} if folder is None else {STATE_FOLDER: str(folder)}
        self.grid = InProcessGrid(self.process, 1, seed=seed, node_config=config)
        self.id = next(iter(self.grid.get_node_ids()))
        self.inner = Sum()
        self.strategy = Compressed(self.inner, ErrorFeedback(TopK(density=0.02)))
        self.round = 0
        self.made = np.zeros(1212)

    def go(self, rounds: int, *, restarts: Iterable[int] = (), lost: Iterable[int] = ()) -> None:
        """Train; before the rounds ``restarts`` the SuperNode is killed, of the rounds ``lost`` no state remains."""
        for _ in range(rounds):
            self.round += 1
            if self.round in restarts:
                self.grid.wipe(self.id)
            messages = self.strategy.configure_train(self.round, model(), ConfigRecord({}), self.grid)
            with contextlib.suppress(Exception):
                self.strategy.aggregate_train(self.round, self.grid.send_and_receive(messages, timeout=9))
            if self.round not in lost:
                self.made += stack_of_round(self.round)

    @property
    def report(self):
        return self.strategy.reports[self.round]

    def settle(self) -> None:
        """Send all that is owed: one more round at full density."""
        self.strategy.system = Pair(ErrorFeedback(TopK(density=1.0)))
        self.go(1)
        assert not self.report.refused
        assert not self.report.lost

    def require_conserved(self) -> None:
        self.settle()
        np.testing.assert_array_equal(self.inner.delivered, self.made)


POINTS = [
    # Kills by round; rounds before which the SuperNode is killed too; rounds whose work is in no state at all.
    pytest.param({3: BEFORE}, [4], [3], id="before the rename: the old state, and the round was never answered"),
    pytest.param({3: RENAMED}, [4], [], id="after the rename: not acknowledged, rolled back"),
    pytest.param({3: FLUSHED}, [4], [], id="on the disk: not acknowledged, rolled back"),
    pytest.param({3: DELIVERED}, [], [], id="delivered without the context: the disk is newer"),
    pytest.param({3: DELIVERED}, [4], [], id="delivered, then the SuperNode"),
    pytest.param({3: RENAMED}, [], [], id="after the rename, the SuperNode lives"),
    pytest.param({3: BEFORE}, [], [3], id="before the rename, the SuperNode lives"),
    pytest.param({}, range(1, 9), [], id="a SuperNode killed before every round"),
    pytest.param({2: BEFORE, 3: RENAMED, 4: DELIVERED, 5: FLUSHED, 6: DELIVERED}, [3, 6], [2], id="all in a row"),
    pytest.param({1: BEFORE}, [2], [1], id="in the first round before the rename"),
    pytest.param({1: DELIVERED}, [2], [], id="in the first round, delivered"),
]


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """No message carries the memory of 4,848 bytes: it is in the folder alone."""
    for module in (kept, memory):
        monkeypatch.setattr(module, "MOST_BYTES", 3000)


@pytest.mark.parametrize("where", ["context and file", "file alone"])
@pytest.mark.parametrize(("kills", "restarts", "lost"), POINTS)
def test_a_killed_node_loses_nothing(request, tmp_path: Path, where: str, kills: Rounds, restarts, lost) -> None:
    if where == "file alone":
        request.getfixturevalue("apart")
    node = Node(tmp_path, kills)
    node.go(8, restarts=restarts, lost=lost)
    assert node.process.deaths == len(kills)
    fresh = [round_ for round_, report in node.strategy.reports.items() if report.fresh]
    assert fresh == [min(round_ for round_ in range(1, 9) if kills.get(round_) in (None, DELIVERED))][: len(fresh)]
    assert (MEMORY in node.grid.context(0).state) == (where != "file alone")
    node.require_conserved()
    assert not list(tmp_path.glob(".*")), "what a killed process left is removed"


@pytest.mark.parametrize("wrapped", [True, False], ids=["client(app)", "mods=[compression()]"])
def test_both_ways_of_using_the_library_keep_the_state(tmp_path: Path, wrapped: bool) -> None:
    app = ClientApp() if wrapped else ClientApp(mods=[compression()])
    app = client(app, only=["compression"]) if wrapped else app
    inner = client_app()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        return inner(msg, context)

    node = Node(tmp_path, {3: DELIVERED}, app)
    node.go(6, restarts=[5])
    assert len([r for r in node.strategy.reports.values() if r.fresh]) == 1
    node.require_conserved()


def test_a_full_disk_is_an_error_reply_and_loses_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path, {3: "full", 4: "full"})
    node.go(3)
    # The limit is a process's: a full disk looks the same to the node, but for the number of the error.
    assert "keeps its state on disk" in next(iter(node.report.refused.values()), "") or node.report.lost == 0
    before = {path: path.read_bytes() for path in tmp_path.glob("*.state")}
    node.go(1)
    assert {path: path.read_bytes() for path in tmp_path.glob("*.state")} == before
    node.go(3)
    assert not any(report.fresh for number, report in node.strategy.reports.items() if number > 1)
    node.require_conserved()


def test_a_full_disk_leaves_a_state_that_is_in_the_file_alone_as_it_was(apart: None, tmp_path: Path) -> None:
    node = Node(tmp_path, {3: "full"})
    node.go(3, lost=[3])
    assert "keeps its state on disk" in next(iter(node.report.refused.values()), "") or node.report.lost == 0
    assert MEMORY not in node.grid.context(0).state
    node.go(3)
    assert not any(report.fresh for number, report in node.strategy.reports.items() if number > 1)
    node.require_conserved()


@pytest.mark.parametrize("gone", ["removed", "an older file", "damaged"])
def test_a_node_whose_file_is_gone_begins_a_new_memory_and_says_so(apart: None, tmp_path: Path, gone: str) -> None:
    node = Node(tmp_path)
    node.go(2)
    (path,) = tmp_path.glob("*.state")
    older = path.read_bytes()
    node.go(2)
    delivered = node.inner.delivered.copy()
    if gone == "removed":
        path.unlink()
    else:
        path.write_bytes(older if gone == "an older file" else path.read_bytes()[:-1])
    node.go(1)
    assert node.report.fresh == [node.id]
    assert not node.report.rolled_back
    assert "records of this node's state, which are lost" in node.report.remarks[node.id]
    node.go(2)
    assert not node.report.fresh
    node.settle()
    np.testing.assert_array_equal(node.inner.delivered - delivered, sum(stack_of_round(r) for r in (5, 6, 7, 8)))


def test_an_error_of_the_app_leaves_a_state_that_is_in_the_file_alone_as_it_was(apart: None, tmp_path: Path) -> None:
    app, inner = client(ClientApp(), only=["compression"]), client_app()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        context.state["own"] = ConfigRecord({"n": 1})
        if node.round == 3:
            raise ValueError("broken")
        return inner(msg, context)

    node = Node(tmp_path)
    # In this process: a child's context would be lost with the error.
    node.grid = InProcessGrid(app, 1, seed=3, node_config={STATE_FOLDER: str(tmp_path)})
    node.id = next(iter(node.grid.get_node_ids()))
    node.go(3, lost=[3])
    assert "broken" in next(iter(node.report.refused.values()))
    assert MEMORY not in node.grid.context(0).state
    node.go(2)
    assert [number for number, report in node.strategy.reports.items() if report.fresh] == [1]
    node.require_conserved()


def test_a_state_that_the_disk_has_no_room_for_is_refused_before_training(
    apart: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: usage._replace(free=4847))
    trained: list[int] = []
    app = client(ClientApp(), only=["compression"])
    app.train()(lambda msg, context: trained.append(1))
    node.grid = InProcessGrid(app, 1, seed=3, node_config={STATE_FOLDER: str(tmp_path)})
    node.id = next(iter(node.grid.get_node_ids()))
    node.go(1)
    assert "keep 4,848 bytes" in next(iter(node.report.refused.values()))
    assert "room for 4,847" in next(iter(node.report.refused.values()))
    assert not trained


def test_a_message_that_changes_nothing_of_a_state_in_the_file_writes_nothing(apart: None, tmp_path: Path) -> None:
    app, config = client_app([compression()]), {STATE_FOLDER: str(tmp_path)}
    with InProcessGrid(app, 1, seed=1, node_config=config) as grid:
        Compressed(fedavg(), ErrorFeedback(TopK(density=0.02))).start(grid, model(), num_rounds=1, timeout=9)
        (path,), state = tmp_path.glob("*.state"), content_to_bytes(grid.context(0).state)
        written = path.stat().st_mtime_ns
        content = RecordDict({"arrays": model(), "config": ConfigRecord({"server-round": 1})})
        (reply,) = grid.send_and_receive([Message(content, grid.node_id_of(0), "evaluate")], timeout=9)
        assert not reply.has_error()
        assert path.stat().st_mtime_ns == written
        assert content_to_bytes(grid.context(0).state) == state


def test_a_new_server_begins_a_new_memory_and_says_why(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.go(3)
    other = Node(tmp_path, seed=4)
    other.go(1)
    assert other.report.fresh == [other.id]
    assert other.report.remarks == {other.id: "the state folder holds the state of other runs and sessions only"}
    other.go(3, restarts=[3])
    other.require_conserved()
    # The first server's run goes on with what it had.
    node.go(2, restarts=[4])
    assert not node.report.fresh
    node.require_conserved()


def test_a_server_that_resumes_in_another_run_finds_its_session(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.go(3)
    later = Node(tmp_path, seed=4)
    later.strategy.load_state_dict(node.strategy.state_dict())
    later.inner.delivered, later.made, later.round = node.inner.delivered, node.made, node.round
    # Registered keys: the node's id is the same in both runs.
    later.strategy.roster.peers[later.id] = later.strategy.roster.peers.pop(node.id)
    later.go(3, restarts=[6])
    assert not any(report.fresh for number, report in later.strategy.reports.items() if number > 3)
    later.require_conserved()


def test_the_folder_of_another_partition_is_not_taken(tmp_path: Path) -> None:
    Node(tmp_path).go(2)
    (made,) = tmp_path.glob("0-*.state")
    os.replace(made, made.with_name(made.name.replace("0-", "7-", 1)))
    node = Node(tmp_path)
    node.go(1)
    assert node.report.fresh == [node.id]
    assert node.report.remarks == {node.id: "the state folder holds the state of partitions 7, not of 0"}


def test_a_renamed_file_is_not_believed(tmp_path: Path) -> None:
    Node(tmp_path).go(2)
    (made,) = tmp_path.glob("0-*.state")
    os.replace(made, made.with_name("0-1.state"))
    node = Node(tmp_path)
    node.go(1)
    assert "was damaged and was set aside: it is of partition 0" in node.report.remarks[node.id]


def test_an_old_backup_sends_nothing_twice(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.go(2)
    (path,) = tmp_path.glob("*.state")
    backup = path.read_bytes()
    node.go(2)
    before = node.inner.delivered.copy()
    # While the SuperNode lives, what it holds is newer.
    path.write_bytes(backup)
    node.go(1)
    assert not node.report.fresh
    # When it is restarted, the server has consumed frames that the backup knows nothing of: a new memory.
    path.write_bytes(backup)
    node.go(1, restarts=[6])
    assert node.report.fresh == [node.id]
    assert not node.report.rolled_back
    delivered = node.inner.delivered
    node.settle()
    made = sum(stack_of_round(r) for r in (6, 7))
    assert not np.array_equal(before, node.made)
    np.testing.assert_array_equal(node.inner.delivered - delivered_until(node, 5), made)
    assert delivered is node.inner.delivered


def delivered_until(node: Node, round_: int) -> np.ndarray:
    """Return what the same node, never disturbed, has delivered by then."""
    undisturbed = Node(None)
    undisturbed.go(round_)
    return undisturbed.inner.delivered


def test_a_backup_of_a_life_before_the_last_one_is_not_taken_for_newer(tmp_path: Path) -> None:
    """Numbers of another life are higher, and mean nothing."""
    node = Node(tmp_path)
    node.go(5)
    (path,) = tmp_path.glob("*.state")
    backup = path.read_bytes()
    path.unlink()
    node.go(2, restarts=[6])
    path.write_bytes(backup)
    node.go(1)
    assert not node.report.fresh, "the SuperNode lives and has what it answered with"
    path.write_bytes(backup)
    node.go(1, restarts=[9])
    assert node.report.fresh == [node.id], "its last frame was consumed long ago"
    assert not node.report.rolled_back


@pytest.mark.parametrize("damage", ["cut", "bit of the head", "bit of the records", "text", "newer", "empty"])
def test_a_damaged_file_is_set_aside_and_said(tmp_path: Path, damage: str) -> None:
    node = Node(tmp_path)
    node.go(3)
    (path,) = tmp_path.glob("*.state")
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[-100:]
    elif damage.startswith("bit"):
        data[40 if "head" in damage else -1000] ^= 1
    elif damage == "newer":
        data[len(b"fedcomp.state\n")] = folders.VERSION + 1
    else:
        data = bytearray(b"hello\n" * 100 if damage == "text" else b"")
    path.write_bytes(data)
    delivered = node.inner.delivered.copy()
    node.go(1, restarts=[4])
    assert node.report.fresh == [node.id]
    assert "damaged and was set aside" in node.report.remarks[node.id]
    assert (tmp_path / "0.damaged").read_bytes() == bytes(data)
    node.go(2, restarts=[6])
    assert not node.report.fresh
    node.settle()
    np.testing.assert_array_equal(node.inner.delivered - delivered, sum(stack_of_round(r) for r in (4, 5, 6, 7)))


def test_every_cut_and_every_flipped_bit_of_a_small_file_is_noticed(tmp_path: Path) -> None:
    folder, records = StateFolder(tmp_path, 0), RecordDict({"c": ConfigRecord({"a": 1, "b": b"xyz"})})
    data, digest = folders.pack(records)
    stamp = folders.Stamp(0, 5, ("ab",), "life", 1, digest, sum(map(len, data)))
    folder.save(stamp, *data)
    (path,) = folder.stamps()
    whole = path.read_bytes()
    assert content_to_bytes(folder.load(path)) == content_to_bytes(records)
    damaged = [whole[:n] for n in range(len(whole))]
    damaged += [whole[:n] + bytes([whole[n] ^ 1 << n % 8]) + whole[n + 1 :] for n in range(len(whole))]
    for each in damaged:
        path.write_bytes(each)
        assert not folder.stamps() or folder.load(path) is None
        assert (tmp_path / "0.damaged").read_bytes() == each


def test_the_folder_and_its_files_are_the_owners(tmp_path: Path) -> None:
    home = tmp_path / "deep" / "state"
    before = os.umask(0)
    try:
        Node(home).go(1)
    finally:
        os.umask(before)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in home.iterdir()} == {0o600}
    home.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write"):
        StateFolder(home, 0)
    with pytest.raises(ConfigError, match="absolute"):
        StateFolder(Path("state"), 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match="cannot be made"):
        StateFolder(tmp_path / "file", 0)


def test_two_processes_of_one_node_do_not_interleave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "LOCK_SECONDS", 0.0)
    node = Node(tmp_path)
    node.go(1)
    with StateFolder(tmp_path, 0).locked():
        node.go(1, lost=[2])
    assert "another process of this node" in next(iter(node.report.refused.values()), "another process of this node")
    with StateFolder(tmp_path, 1).locked():
        node.go(1)
    node.require_conserved()


def test_a_message_that_changes_nothing_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app, config = client_app([compression()]), {STATE_FOLDER: str(tmp_path)}
    strategy = Compressed(fedavg(), ErrorFeedback(TopK(density=0.02)))
    written: list[Path] = []
    write = files.write
    monkeypatch.setattr(files, "write", lambda path, *data: (written.append(path), write(path, *data)))
    with InProcessGrid(app, 2, seed=1, node_config=config) as grid:
        strategy.start(grid, model(), num_rounds=3, timeout=9)
    assert len(written) == 2 * 3, "one for each training, none for evaluations"


def test_only_the_latest_runs_keep_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(6):
        Node(tmp_path, seed=seed).go(1)
    assert len(list(tmp_path.glob("*.state"))) == folders.SERIES_KEPT
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: usage._replace(free=100))
    before = {path: path.read_bytes() for path in tmp_path.glob("*.state")}
    node = Node(tmp_path, seed=9)
    node.go(1)
    assert "No space left" in next(iter(node.report.refused.values()))
    assert {path: path.read_bytes() for path in tmp_path.glob("*.state")} == before, "no other run's state goes for it"


def test_the_whole_state_is_kept_the_apps_own_records_too(tmp_path: Path) -> None:
    app = ClientApp(mods=[compression()])

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        own = context.state.get("mine", ConfigRecord({"n": 0}))
        context.state["mine"] = ConfigRecord({"n": own["n"] + 1})
        context.state["best"] = MetricRecord({"x": [1.0, float("nan")]})
        content = RecordDict({"arrays": next(iter(msg.content.array_records.values()))})
        content["m"] = MetricRecord({"num-examples": 1, "n": own["n"]})
        return Message(content, reply_to=msg)

    grid = InProcessGrid(app, 1, seed=1, node_config={STATE_FOLDER: str(tmp_path)})
    (node,) = grid.get_node_ids()
    seen = []
    for _ in range(4):
        content = RecordDict({"arrays": ArrayRecord(), "config": ConfigRecord({"server-round": 1})})
        (reply,) = grid.send_and_receive([Message(content, node, "train")], timeout=9)
        seen.append(reply.content["m"]["n"])
        grid.wipe(node)
    assert seen == [0, 1, 2, 3]


def test_a_spent_budget_is_not_given_back_by_an_older_file(tmp_path: Path) -> None:
    plan = DpSgdPlan(noise_multiplier=2.0, rate=0.1, steps=1, delta=1e-5)
    app = client(ClientApp(), only=["compression"])

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        with node_ledger(context, plan, 1000, kept_in(context.state)) as book:
            spent = book.ledger.epsilon()
            book.ledger.record(plan.event(10), round=len(book.ledger.entries) + 1, times=1)
        for name, data in book.keep.items():
            put_frame(context.state, KEEP + name, data)
        return Message(RecordDict({"m": MetricRecord({"spent": spent})}), reply_to=msg)

    grid = InProcessGrid(app, 1, seed=1, node_config={STATE_FOLDER: str(tmp_path)})
    (node,) = grid.get_node_ids()

    def ask() -> float:
        (reply,) = grid.send_and_receive([Message(RecordDict(), node, "train")], timeout=9)
        return reply.content["m"]["spent"]

    first, second = ask(), ask()
    (path,) = tmp_path.glob("*.state")
    older = path.read_bytes()
    third = ask()
    path.write_bytes(older)
    fourth = ask()
    grid.wipe(node)
    fifth = ask()
    assert first < second < third < fourth < fifth


def test_damage_in_what_the_disk_says_is_no_error_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that cannot be read is not a damaged file: nothing is set aside, and the message is refused."""
    node = Node(tmp_path)
    node.go(2)

    def unreadable(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(folders, "read", unreadable)
        node.go(1, restarts=[3], lost=[3])
    assert not (tmp_path / "0.damaged").exists()
    node.require_conserved()
