"""Looks for replies: one that a cut off reply holds up holds up no deadline, and nothing comes twice."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from fedcomp.flower import metered
from fedcomp.flower.metered import poll
from fedcomp.rng import Key


def reply(to: str, error: str = "") -> SimpleNamespace:
    """Return what :func:`poll` sees of a reply."""
    return SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=to), error=error)


class Link:
    """A SuperLink: hands each reply to one look, in which ``stuck`` ones hold up those behind them."""

    def __init__(self, stuck: Iterable[str] = ()) -> None:
        self.ready: dict[str, Any] = {}
        self.stuck = set(stuck)
        self.lock, self.whole = threading.Lock(), threading.Event()
        self.looks = 0
        self.held_up: list[str] = []

    def arrive(self, *ids: str, error: str = "") -> None:
        with self.lock:
            self.ready |= {i: reply(i, error) for i in ids}

    def pull_messages(self, ids: Iterable[str]) -> list[Any]:
        self.looks += 1
        with self.lock:
            mine = {i: self.ready.pop(i) for i in sorted(ids) if i in self.ready}
        for i in mine:
            if i in self.stuck:
                self.stuck.discard(i)
                self.whole.wait(300.0)
                self.held_up.append(i)
        return list(mine.values())


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metered, "GRACE_SECONDS", 0.05)


def ids(found: Iterable[Any]) -> list[str]:
    return sorted(each.metadata.reply_to_message_id for each in found)


def later(link: Link, seconds: float, *names: str, error: str = "") -> None:
    threading.Timer(seconds, link.arrive, names, {"error": error}).start()


def test_a_reply_that_is_cut_off_holds_up_no_deadline(caplog: pytest.LogCaptureFixture) -> None:
    class Later(Link):
        def pull_messages(self, ids: Iterable[str]) -> list[Any]:
            found = super().pull_messages(ids)
            self.arrive("b")
            return found

    link = Later(stuck=["b"])
    link.arrive("a")
    with caplog.at_level(logging.WARNING):
        assert ids(poll(link, {"a", "b"}, 0.6, seconds=0.01, final=True)) == ["a"]
    assert link.held_up == [], "the look for b was given up, not waited for"
    assert "a reply was cut off" in caplog.text
    link.whole.set()


def test_there_is_one_look_at_a_time() -> None:
    """A SuperLink answers a second one with errors for the replies that the first has."""
    link = Link(stuck=["a"])
    link.arrive("a")
    threading.Timer(0.5, link.whole.set).start()
    assert ids(poll(link, {"a"}, None, seconds=0.01, final=True)) == ["a"]
    assert link.looks == 1


def test_a_slow_reply_is_taken_when_it_is_whole() -> None:
    link = Link(stuck=["a"])
    link.arrive("a", "b")
    threading.Timer(0.3, link.whole.set).start()
    assert ids(poll(link, {"a", "b"}, 20.0, seconds=0.01, final=True)) == ["a", "b"]


def test_whoever_asks_again_loses_no_reply_that_is_under_way() -> None:
    link = Link(stuck=["a"])
    link.arrive("a")
    threading.Timer(0.5, link.whole.set).start()
    assert ids(poll(link, {"a", "c"}, 0.3, seconds=0.01)) == ["a"]


def test_every_reply_comes_once_whatever_the_order() -> None:
    names = [f"{i:02}" for i in range(40)]
    link = Link(stuck=names[::13])
    for i, name in enumerate(names):
        later(link, float(Key(1, "looks", i).uniform(1)[0]) * 0.5, name)
    threading.Timer(0.4, link.whole.set).start()
    shown: list[Any] = []
    found = poll(link, set(names), 20.0, seconds=0.005, arrive=shown.append, final=True)
    assert ids(found) == ids(shown) == names


def test_however_short_the_time_there_is_one_look() -> None:
    link = Link()
    link.arrive("a")
    assert ids(poll(link, {"a", "b"}, 0.0, seconds=0.01, final=True)) == ["a"]
    assert link.looks == 1


def test_an_end_of_the_program_is_raised_where_it_is_waited_for() -> None:
    class Ending(Link):
        def pull_messages(self, ids: Iterable[str]) -> list[Any]:
            raise SystemExit(3)

    with pytest.raises(SystemExit):
        poll(Ending(), {"a"}, None, final=True)


def test_what_a_look_raises_is_raised_and_what_it_raises_too_late_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Link):
        def pull_messages(self, ids: Iterable[str]) -> list[Any]:
            first = self.looks == 0
            found = super().pull_messages(ids)
            if first:
                raise ConnectionError("no route")
            return found

    with pytest.raises(ConnectionError, match="no route"):
        poll(Failing(), {"a"}, 1.0, final=True)
    link = Failing(stuck=["a"])
    link.arrive("a")
    with caplog.at_level(logging.WARNING):
        assert poll(link, {"a"}, 0.2, seconds=0.01, final=True) == []
        link.whole.set()
        deadline = time.monotonic() + 100.0
        while "fetching a late reply failed: no route" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
