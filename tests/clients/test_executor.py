"""The executor of an edge node, with what Flower does to a message replaced; processes are forked for real."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import flwr
import httpx
import numpy as np
import pytest

from fedcomp.clients.edge import executor, zygote
from fedcomp.clients.edge.executor import Executor, read_list
from fedcomp.errors import ConfigError
from fedcomp.flower import _private
from fedcomp.flower._private import NodeTask

HASHES = ("a" * 64, "b" * 64)


class Fakes:
    """A folder that stands for an unpacked bundle, and what was done with its messages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes = folder / "notes.txt"
        self.notes.touch()

    def app(self, code: str, name: str = "bundle_app") -> None:
        (self.folder / f"{name}.py").write_text(code)

    def said(self) -> list[str]:
        return self.notes.read_text().split()


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """Messages whose token is the code that they run, with ``app`` loaded and ``note`` to write with."""
    made = Fakes(tmp_path)

    def note(text: object) -> None:
        with made.notes.open("a") as file:
            file.write(f"{text}\n")

    def load(*ids: str) -> Any:
        import importlib

        note("imported")
        if str(tmp_path) not in sys.path:
            sys.path.insert(0, str(tmp_path))
        return importlib.import_module(ids[0])

    def run(address: str, token: str, unpack: Callable[[bytes], Path], loader: Callable[..., Any]) -> None:
        assert address == "here"
        unpack(b"content")
        exec(token, {"app": loader("bundle_app", "1", "hash"), "note": note, "os": os, "np": np, "pause": pause})
        raise SystemExit(0)

    def pause() -> None:
        note("waits")
        threading.Event().wait(60)

    monkeypatch.setattr(zygote, "run_task", run)
    monkeypatch.setattr(zygote, "unpack_bundle", lambda content: note("unpacked") or tmp_path)
    monkeypatch.setattr(zygote, "load_bundle", load)
    # What runs the tests may have threads that hold no lock for long.
    monkeypatch.setattr(zygote, "require_one_thread", lambda what: None)
    monkeypatch.setattr(executor, "abandon_task", lambda runtime, token: note("abandoned"))
    monkeypatch.setattr(executor, "refuse_task", lambda runtime, token, reason: note("refused"))
    made.app("count = 0")
    return made


BUNDLE = hashlib.sha256(b"content").hexdigest()


class Waiting:
    """Hands out ``found`` one by one; what is an exception is raised."""

    def __init__(self, *found: NodeTask | Exception | None) -> None:
        self.found = list(found)

    def acquire(self) -> NodeTask | None:
        first = self.found.pop(0)
        if isinstance(first, Exception):
            raise first
        return first

    def close(self) -> None:
        self.found = []


@pytest.fixture
def runs(fakes: Fakes) -> Iterator[Executor]:
    made = Executor("here", Waiting())
    yield made
    made.close()


def test_an_app_is_unpacked_and_imported_once_and_every_message_starts_from_that(runs: Executor, fakes: Fakes) -> None:
    for _ in range(3):
        assert runs.handle(NodeTask("app.count += 1; note(app.count); note(os.getpid())", BUNDLE))
    said = fakes.said()
    # By the first message's process, and by the one that is kept.
    assert (said.count("unpacked"), said.count("imported")) == (1, 2)
    numbers = [word for word in said if word.isdigit()]
    assert numbers[::2] == ["1", "1", "1"], "a message sees what another has left behind"
    assert len(set(numbers[1::2])) == 3
    assert str(os.getpid()) not in numbers


def test_what_a_message_imports_is_there_for_those_that_follow(runs: Executor, fakes: Fakes) -> None:
    fakes.app("", "of_a_handler")
    token = "import sys; note('there' if 'of_a_handler' in sys.modules else 'missing'); import of_a_handler"
    for _ in range(3):
        assert runs.handle(NodeTask(token, BUNDLE))
    assert [word for word in fakes.said() if word in ("there", "missing")] == ["missing", "there", "there"]
    # Also when it is the app itself that has been kept for long; and a module that has no file is left out.
    other = "import sys, types; sys.modules['made.up'] = types.ModuleType('made.up'); note(len(sys.modules))"
    for _ in range(2):
        assert runs.handle(NodeTask(other, BUNDLE))
    assert fakes.said()[-1].isdigit()


def test_a_report_longer_than_a_pipe_holds_is_received(runs: Executor, fakes: Fakes) -> None:
    token = "import sys; sys.modules.update({f'{n:01000d}': None for n in range(300)}); note('ran')"
    for _ in range(2):
        assert runs.handle(NodeTask(token, BUNDLE))
    assert fakes.said().count("ran") == 2
    assert fakes.said().count("imported") == 2


def test_the_bundles_own_modules_stand_over_those_of_the_executor(
    runs: Executor, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.app("import shadowed\nvalue = shadowed.VALUE")
    fakes.app("VALUE = 'bundle'", "shadowed")
    ours = type(sys)("shadowed")
    ours.VALUE = "executor"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shadowed", ours)
    for _ in range(2):
        runs.handle(NodeTask("note(app.value)", BUNDLE))
    assert fakes.said().count("bundle") == 2
    # The wrong variant: with the names kept, the bundle's code is ignored.
    monkeypatch.setattr(zygote, "forget", lambda folder: None)
    other = Executor("here", Waiting())
    other.handle(NodeTask("note(app.value)", BUNDLE))
    other.close()
    assert "executor" in fakes.said()


DRAWS = """
import random, torch
from torch.utils.data import DataLoader
note(f"python={random.random()}")
note(f"numpy={np.random.random()}")
note(f"torch={torch.rand(()).item()}")
note(f"noise={torch.normal(0.0, 1.0, (2,)).tolist()}".replace(" ", ""))
note(f"dropout={torch.nn.functional.dropout(torch.ones(64)).nonzero().flatten().tolist()}".replace(" ", ""))
note(f"order={[int(each) for each in DataLoader(range(64), shuffle=True)]}".replace(" ", ""))
"""


def drawn(fakes: Fakes) -> dict[str, list[str]]:
    """Return what was drawn since the last look, by generator, a value for each message."""
    found: dict[str, list[str]] = {}
    for word in fakes.said():
        name, there, value = word.partition("=")
        if there:
            found.setdefault(name, []).append(value)
    fakes.notes.write_text("")
    return found


@pytest.mark.slow
def test_global_random_numbers_do_not_repeat_from_message_to_message(
    runs: Executor, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    # numpy imports it when it is first used, and here that is before the fork; so it is with torch, in the executor.
    assert np.random is sys.modules["numpy.random"]
    import torch

    assert torch is sys.modules["torch"]
    for _ in range(3):
        runs.handle(NodeTask(DRAWS, BUNDLE))
    found = drawn(fakes)
    assert {name: len(set(values)) for name, values in found.items()} == dict.fromkeys(found, 3)
    assert list(found) == ["python", "numpy", "torch", "noise", "dropout", "order"]
    # The wrong variant: all but Python's repeat.
    monkeypatch.setattr(zygote, "reseed", lambda: None)
    other = Executor("here", Waiting())
    for _ in range(3):
        other.handle(NodeTask(DRAWS, BUNDLE))
    other.close()
    found = drawn(fakes)
    assert {name: len(set(values)) for name, values in found.items()} == {**dict.fromkeys(found, 1), "python": 3}


def test_torch_is_not_imported_to_reseed_it(runs: Executor, fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    runs.handle(NodeTask("import sys; note('there' if 'torch' in sys.modules else 'missing')", BUNDLE))
    assert fakes.said()[-2:] in (["missing", "imported"], ["imported", "missing"])


def test_what_is_not_the_bundle_of_its_name_is_not_run(runs: Executor, fakes: Fakes) -> None:
    runs.handle(NodeTask("note('ran')", HASHES[0]))
    assert "ran" not in fakes.said()
    assert "unpacked" not in fakes.said()


def test_a_killed_message_is_left_to_expire_and_said_once(
    runs: Executor, fakes: Fakes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "flwr"):
        assert runs.handle(NodeTask("os.kill(os.getpid(), 9)", BUNDLE))
        assert runs.handle(NodeTask("note('next')", BUNDLE))
    said = fakes.said()
    assert said[said.index("abandoned") + 1 :][-1] in {"next", "imported"}
    assert "next" in said
    assert said.count("abandoned") == 1
    lines = [record.message for record in caplog.records]
    assert len(lines) == 1
    assert "SIGKILL" in lines[0]
    assert "error 8" in lines[0]


def test_a_message_that_the_supernode_has_given_up_holds_up_no_other(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One whose content never comes waits for ever; SuperNode hands out the next, which it does not otherwise."""
    monkeypatch.setattr(executor, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(executor, "OVERTAKEN_SECONDS", 3.0)

    stuck, first, second = (NodeTask(code, BUNDLE) for code in ("pause()", "note('first')", "note('second')"))
    made = Executor("here", Waiting(stuck, None, first, second, *[None] * 100))
    handled = made.handle
    # The last one ends the executor, as a signal would.
    monkeypatch.setattr(made, "handle", lambda task: handled(task) and task is not second)
    with contextlib.closing(made), caplog.at_level(logging.WARNING, logger="fedcomp"):
        made.run(0.0)
    # All of them, each once, and in their order.
    assert [word for word in fakes.said() if word in ("waits", "abandoned", "first", "second")] == [
        "waits",
        "abandoned",
        "first",
        "second",
    ]
    assert "abandoned the message under way" in caplog.text


def test_a_message_that_is_done_soon_after_the_next_one_is_there_is_not_ended(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it remembers is handed over after its reply, when the SuperNode may have the next message already."""
    monkeypatch.setattr(executor, "LOOK_SECONDS", 0.05)
    code = "import threading; threading.Event().wait(0.5); note('whole')"
    waiting = Waiting(NodeTask("note('next')", BUNDLE))
    made = Executor("here", waiting)
    with contextlib.closing(made):
        assert made.handle(NodeTask(code, BUNDLE))
        assert waiting.found == []
    assert "whole" in fakes.said()
    assert "abandoned" not in fakes.said()


def test_an_app_that_cannot_be_kept_is_imported_for_every_message(
    runs: Executor, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(what: str) -> None:
        if "app" in what:
            raise zygote.Unforkable(f"{what} started 2 threads")

    monkeypatch.setattr(zygote, "require_one_thread", refuse)
    for _ in range(3):
        assert runs.handle(NodeTask("note('ran')", BUNDLE))
    assert fakes.said().count("ran") == 3
    assert fakes.said().count("imported") == 3 + 1


def test_an_idle_process_that_was_killed_is_replaced(runs: Executor, fakes: Fakes) -> None:
    runs.handle(NodeTask("note(os.getppid())", BUNDLE))
    warm = int(next(word for word in fakes.said() if word.isdigit()))
    os.kill(warm, 9)
    # Until it is dead, which is not at once.
    os.waitid(os.P_PID, warm, os.WEXITED | os.WNOWAIT)
    runs.handle(NodeTask("note('after')", BUNDLE))
    assert "after" in fakes.said()


def test_bundles_are_kept_apart_and_the_oldest_goes(
    runs: Executor, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygote.hashlib, "sha256", lambda content: SimpleNamespace(hexdigest=lambda: ANY))
    unpacked = []
    for bundle in ("1", "2", "1", "3", "1", "2"):
        assert runs.handle(NodeTask("", bundle))
        unpacked.append(fakes.said().count("unpacked"))
    assert unpacked == [1, 2, 2, 3, 3, 4]


def test_only_bundles_on_the_list_run(fakes: Fakes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "allowed"
    path.write_text(f"# ours\n{BUNDLE}  # the first\n\n")
    made = Executor("here", Waiting(), path)
    made.handle(NodeTask("note('ran')", BUNDLE))
    with caplog.at_level(logging.INFO, "flwr"):
        made.handle(NodeTask("note('not this')", HASHES[0]))
    assert fakes.said().count("ran") == 1
    assert "refused" in fakes.said()
    assert "this" not in fakes.said()
    (line,) = [record.message for record in caplog.records]
    assert HASHES[0] in line
    assert str(path) in line
    # Struck off while it runs, and a list that is gone allows nothing.
    path.write_text("")
    made.handle(NodeTask("note('again')", BUNDLE))
    path.unlink()
    made.handle(NodeTask("note('again')", BUNDLE))
    assert "again" not in fakes.said()
    made.close()


@pytest.mark.parametrize("text", ["cafe", "A" * 64, "a" * 64 + " " + "b" * 64, "x  " + "a" * 64, "*"])
def test_a_list_with_something_else_in_it_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "allowed"
    path.write_text(f"{HASHES[0]}\n{text}\n")
    with pytest.raises(ConfigError, match=r"line 2: .* is not the SHA-256"):
        read_list(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_list(tmp_path / "nowhere")


def test_a_closed_pipe_ends_the_executor_and_the_message_it_handles(fakes: Fakes) -> None:
    end, held = os.pipe()
    made = Executor("here", Waiting(NodeTask("note(os.getpid()); pause()", BUNDLE)), None, end)

    def close() -> None:
        while "waits" not in fakes.said():
            pass
        # Closing it here would leave the copies that the forks have.
        os.write(held, b"!")

    closer = threading.Thread(target=close)
    closer.start()
    made.run(0.01)
    closer.join()
    made.close()
    os.close(end)
    os.close(held)
    child = int(next(word for word in fakes.said() if word.isdigit()))
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert "abandoned" not in fakes.said()


def test_a_supernode_that_is_away_is_said_once_and_tried_again(fakes: Fakes, caplog: pytest.LogCaptureFixture) -> None:
    end, held = os.pipe()

    class Last(Waiting):
        def acquire(self) -> NodeTask | None:
            if len(self.found) == 1:
                os.close(held)
            return super().acquire()

    gone = ConnectionError("refused")
    made = Executor("here", Last(gone, gone, None, gone, None), None, end)
    with caplog.at_level(logging.INFO, "flwr"):
        made.run(0.001)
    made.close()
    os.close(end)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"] * 2


def test_flower_as_it_is_installed_has_all_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert executor.unsupported() == ""
    runner = _private._runner()
    for name in ("install_from_fab", "get_load_client_app_fn", "RuntimeHttpClient", "push_message"):
        with monkeypatch.context() as patch:
            patch.delattr(runner, name)
            assert name in executor.unsupported()
    with monkeypatch.context() as patch:
        patch.setattr(runner, "run_clientapp", lambda address: None)
        assert "other arguments: address" in executor.unsupported()
    with monkeypatch.context() as patch:
        # What is called by position may grow at its end, by what need not be given.
        patch.setattr(runner, "push_message", lambda client, message, context, later=None: None)
        assert executor.unsupported() == ""
        patch.setattr(runner, "push_message", lambda client, message, context, later: None)
        assert "push_message() with other arguments: client, message, context, later" in executor.unsupported()
    # A version says nothing: a later one that has all of it is used.
    monkeypatch.setattr(flwr, "__version__", "2.7.0")
    assert executor.unsupported() == ""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "need Linux" in executor.unsupported()


def test_a_message_that_is_not_there_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A SuperNode hands out a task before it stores the message."""
    answers = [[], [], ["message"]]

    class Response:
        def __init__(self, found: list[str]) -> None:
            self.messages_list = found

    parts = _private._runtime()
    monkeypatch.setattr(parts.client.__mro__[1], "PullMessages", lambda self, request: Response(answers.pop(0)))
    monkeypatch.setattr(_private, "_MESSAGE_WAIT", (5, 0.0))
    assert parts.client("http://nowhere").PullMessages(None).messages_list == ["message"]
    answers += [[]] * 5
    assert parts.client("http://nowhere").PullMessages(None).messages_list == []


@pytest.mark.parametrize(
    ("raised", "wanted"),
    [
        (httpx.ConnectError("refused"), ConnectionError),
        (httpx.ReadTimeout("late"), ConnectionError),
        (httpx.HTTPStatusError("", request=Any, response=httpx.Response(401)), ConnectionError),
        (httpx.HTTPStatusError("", request=Any, response=httpx.Response(503)), ConnectionError),
        (SystemExit(1), ConfigError),
        # A signal that comes while the SuperNode is asked.
        (SystemExit(0), SystemExit),
    ],
)
def test_what_a_supernode_answers_is_temporary_or_not(
    raised: BaseException, wanted: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, request: Any) -> Any:
        raise raised

    monkeypatch.setattr(_private._runtime().client, "AcquireTask", refuse)
    with pytest.raises(wanted):
        _private.NodeTasks("127.0.0.1:1", b"secret").acquire()


def test_a_supernode_that_goes_on_refusing_has_another_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the clock is set while a request is under way, its time is wrong, and the next one's is not."""
    refused = httpx.HTTPStatusError("", request=Any, response=httpx.Response(401))
    found = SimpleNamespace(HasField=lambda name: False, token="")
    answers: list[Any] = [refused] * 4 + [found] + [refused] * 5

    def answer(self: Any, request: Any) -> Any:
        if isinstance(answers[0], Exception):
            raise answers.pop(0)
        return answers.pop(0)

    monkeypatch.setattr(_private._runtime().client, "AcquireTask", answer)
    tasks = _private.NodeTasks("127.0.0.1:1", b"secret")
    for _ in range(4):
        with pytest.raises(ConnectionError, match="401"):
            tasks.acquire()
    assert tasks.acquire() is None
    for _ in range(4):
        with pytest.raises(ConnectionError):
            tasks.acquire()
    with pytest.raises(ConfigError, match="the same secret file"):
        tasks.acquire()


def test_a_process_with_threads_is_not_forked() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with pytest.raises(ConfigError, match=r"started \d+ threads?, and a process with threads cannot be forked"):
            zygote.fork(lambda: None)
    finally:
        done.set()
        thread.join()


def start(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    command = [*executor.command("127.0.0.1:1", preload=()), *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, **options)


@pytest.mark.long
def test_it_ends_with_sigterm_and_with_its_pipe_and_says_what_is_wrong(tmp_path: Path) -> None:
    end, held = os.pipe()
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    told = start()
    left = start("--until-closed", str(end), pass_fds=(end,))
    empty = start("--secret-file", os.devnull)
    missing = start("--allow", str(tmp_path / "nowhere"))
    threaded = start("--preload", "threaded", env=env)
    os.close(end)
    assert told.stderr is not None
    assert left.stderr is not None
    # It is at work when it has found nobody.
    assert b"no answer from the SuperNode" in told.stderr.readline()
    told.terminate()
    assert b"no answer from the SuperNode" in left.stderr.readline()
    os.close(held)
    assert (told.wait(), left.wait()) == (0, 0)
    for process, said in ((empty, b"is empty"), (missing, b"cannot be read"), (threaded, b"leave it out of --preload")):
        assert said in process.communicate()[1]
        assert process.returncode == executor.CONFIGURATION
    for process in (told, left):
        process.communicate()
