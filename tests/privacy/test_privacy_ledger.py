"""The ledger: budgets, participation, and what survives which crash."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedcomp.errors import ConfigError
from fedcomp.flower import store
from fedcomp.privacy import journal
from fedcomp.privacy.accounting import compose
from fedcomp.privacy.errors import BudgetExceeded, PrivacyLedgerError
from fedcomp.privacy.events import Event
from fedcomp.privacy.ledger import PrivacyLedger
from fedcomp.privacy.sampling import Sampling
from fedcomp.privacy.statement import make_statement

EVENT = Event("discrete_gaussian", 10.0, grid_sigma=1e4)


def make(**changes: Any) -> PrivacyLedger:
    arguments: dict[str, Any] = {
        "delta": 1e-5,
        "population": 100,
        "adjacency": "zero_out",
        "sampling": Sampling("everyone"),
    }
    return PrivacyLedger(**{**arguments, **changes})


def filled(path: Path, rounds: int, **changes: Any) -> PrivacyLedger:
    ledger = make(path=path, **changes)
    for number in range(1, rounds + 1):
        ledger.record(EVENT, round=number, participants=[number, 2**61 + number])
    return ledger


def reopened(path: Path, **changes: Any) -> PrivacyLedger:
    ledger = make(path=path, **changes)
    ledger.close()
    return ledger


def test_what_is_recorded_is_what_it_costs() -> None:
    ledger = make()
    assert ledger.epsilon() == 0.0
    for number in range(1, 6):
        ledger.record(EVENT, round=number, participants=[7, number])
    assert ledger.epsilon() == compose([EVENT] * 5, 1e-5).epsilon
    assert ledger.cost().accountant == "Gaussian, closed form"
    assert (ledger.rounds, ledger.releases) == (5, 5)
    assert ledger.participations == {1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 7: 5}


def test_the_budget_refuses_before_anything_is_recorded() -> None:
    budget = compose([EVENT] * 3, 1e-5).epsilon
    ledger = make(budget=budget)
    for number in range(1, 4):
        assert ledger.affords(EVENT)
        ledger.record(EVENT, round=number)
    assert ledger.epsilon() == budget
    assert not ledger.affords(EVENT)
    with pytest.raises(BudgetExceeded, match="cross the budget"):
        ledger.record(EVENT, round=4)
    assert len(ledger.events) == 3
    assert ledger.epsilon() == budget


def test_affords_looks_ahead() -> None:
    ledger = make(budget=compose([EVENT] * 10, 1e-5).epsilon)
    ledger.record(EVENT, round=1)
    assert ledger.affords(EVENT, times=9)
    assert not ledger.affords(EVENT, times=10)
    assert not ledger.affords([EVENT, EVENT], times=5), "a round with two events costs two"
    with pytest.raises(BudgetExceeded):
        ledger.record(EVENT, round=2, times=10)
    ledger.record(EVENT, round=2, times=9)
    assert (ledger.rounds, ledger.releases, len(ledger.events)) == (10, 10, 2)


def test_nobody_takes_part_more_often_than_the_cap() -> None:
    ledger = make(sampling=Sampling("capped", cap=2))
    ledger.record(EVENT, round=1, participants=[1, 2])
    ledger.record(EVENT, round=2, participants=[1])
    assert not ledger.may_take_part(1)
    assert ledger.may_take_part(2)
    with pytest.raises(BudgetExceeded, match="participant 1 was in 2 rounds"):
        ledger.record(EVENT, round=3, participants=[2, 1])
    assert ledger.participations == {1: 2, 2: 1}
    ledger.record(EVENT, round=2, participants=[1])
    assert ledger.participations[1] == 2, "two events of one round are one participation"


def test_under_a_cap_rounds_are_free_once_it_is_charged() -> None:
    ledger = make(sampling=Sampling("capped", cap=3), budget=compose([EVENT] * 3, 1e-5).epsilon)
    for number in range(1, 50):
        ledger.record(EVENT, round=number, participants=[number])
    assert ledger.affords(EVENT, times=10**6)
    assert not ledger.affords(EVENT, round=7), "a second event of a round makes that round dearer"
    assert not ledger.affords([EVENT, EVENT])
    with pytest.raises(BudgetExceeded):
        ledger.record(EVENT, round=7)


@pytest.mark.slow
def test_poisson_is_amplified_and_says_what_it_would_cost_otherwise() -> None:
    event = Event("discrete_gaussian", 1.0, grid_sigma=1e4, rate=0.01)
    ledger = make(sampling=Sampling("poisson", rate=0.01), budget=2.0)
    ledger.record(event, round=1, times=40)
    assert ledger.epsilon() == compose([event] * 40, 1e-5).epsilon < 2.0
    assert ledger.epsilon(amplified=False) == compose([replace(event, rate=1.0)] * 40, 1e-5).epsilon > 40.0
    assert ledger.affords(event, times=100)
    assert not ledger.affords(event, times=2000)


@pytest.mark.parametrize("sampling", [Sampling("everyone"), Sampling("capped", cap=3), Sampling("poisson", rate=0.2)])
def test_an_event_cannot_claim_more_sampling_than_there_is(sampling: Sampling) -> None:
    ledger = make(sampling=sampling)
    with pytest.raises(ConfigError, match=r"claims rate=0\.1"):
        ledger.record(Event("gaussian", 3.0, rate=0.1), round=1)
    assert ledger.events == []
    ledger.record(Event("gaussian", 3.0, rate=max(0.2, sampling.event_rate)), round=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"delta": 0.01},
        {"delta": 0.0},
        {"delta": 1e-2, "population": 100},
        {"population": -3},
        {"adjacency": "replace", "sampling": Sampling("poisson", rate=0.1)},
        {"adjacency": "swap"},
        {"budget": 0.0},
        {"budget": float("inf")},
    ],
)
def test_what_cannot_be_promised_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make(**changes)


def test_the_population_is_declared_once_and_before_the_first_event(tmp_path: Path) -> None:
    ledger = make(population=0, delta=1e-3)
    with pytest.raises(ConfigError, match="not declared"):
        ledger.record(EVENT, round=1)
    with pytest.raises(ConfigError, match="declare"):
        ledger.open(tmp_path / "early.jsonl")
    with pytest.raises(ConfigError, match="not below 1/1000"):
        ledger.declare(1000)
    ledger.declare(900)
    ledger.declare(900)
    with pytest.raises(ConfigError, match="cannot become 901"):
        ledger.declare(901)
    ledger.record(EVENT, round=1)


@pytest.mark.parametrize(
    "call",
    [
        lambda ledger: ledger.record(EVENT, round=-1),
        lambda ledger: ledger.record(EVENT, round=1, times=0),
        lambda ledger: ledger.record(EVENT, round=1, participants=[3, 3]),
        lambda ledger: ledger.record(EVENT, round=5, times=10),
        lambda ledger: ledger.record(EVENT, round=22),
    ],
)
def test_rounds_are_numbered_on(call: Callable[[PrivacyLedger], None]) -> None:
    """A round inside a span would be charged as another sample of the same units."""
    ledger = make()
    ledger.record(EVENT, round=8)
    ledger.record(EVENT, round=20, times=5)
    with pytest.raises(ConfigError):
        call(ledger)
    assert len(ledger.events) == 2


def test_the_next_round_is_after_all_rounds_also_of_draws_before() -> None:
    ledger = make()
    assert (ledger.next_round(), ledger.next_round(3)) == (0, 3)
    ledger.record(EVENT, round=20, times=5)
    ledger.record(EVENT, round=8)
    assert ledger.next_round(3) == 25
    ledger.drawn(8)
    ledger.record(EVENT, round=8)
    ledger.record(EVENT, round=20)
    assert ledger.next_round() == 25, "of another draw, in which the rounds of the span were not"
    ledger.record(EVENT, round=ledger.next_round(), times=2)
    again = make()
    again.load_state_dict(ledger.state_dict())
    assert again.next_round() == 27


def test_spans_of_rounds_one_behind_the_other_are_all_kept() -> None:
    ledger = make()
    for _ in range(3):
        ledger.record(EVENT, round=ledger.next_round(), times=4)
    ledger.record(EVENT, round=30, times=2)
    assert ledger.next_round() == 32
    for round, times in ((0, 1), (3, 2), (11, 1), (11, 30), (31, 1)):
        with pytest.raises(ConfigError, match="number rounds on"):
            ledger.record(EVENT, round=round, times=times)
    ledger.record(EVENT, round=12, times=18)
    assert (ledger.rounds, ledger.next_round()) == (32, 32)


# The file.


def test_every_event_comes_back(tmp_path: Path) -> None:
    first = filled(tmp_path / "privacy.jsonl", 5)
    first.close()
    again = reopened(tmp_path / "privacy.jsonl")
    assert again.entries == first.entries
    assert again.run == first.run
    assert again.epsilon() == first.epsilon()
    assert again.participations == first.participations


def test_a10_every_state_that_a_kill_leaves_is_read_and_nothing_that_was_paid_for_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event counts exactly if its whole line had been written; the head may be one event behind."""
    path, states = tmp_path / "whole.jsonl", {b"": 0}
    real, events = os.pwrite, 0

    def watched(handle: int, data: Any, at: int) -> int:
        nonlocal events
        before, data = path.read_bytes(), bytes(data)
        assert at in (0, len(before)), "the head is written over, all else is appended"
        if at == len(before):  # any part of it may be on the disk
            for size in {*range(1, len(data), 37), len(data) - 2, len(data) - 1}:
                states[before + data[:size]] = events + (size == len(data) - 1 and at > 0)
        events += at > 0
        states[data + before[len(data) :] if at == 0 else before + data] = events
        return real(handle, data, at)

    monkeypatch.setattr(journal.os, "pwrite", watched)
    filled(path, 3).close()
    monkeypatch.undo()
    assert path.read_bytes() in states
    assert len(states) > 40
    for number, (data, expected) in enumerate(states.items()):
        left = tmp_path / "left.jsonl"
        left.write_bytes(data)
        again = make(path=left)
        assert len(again.events) == expected
        if number % 7 == 0:
            again.record(EVENT, round=9)
        again.close()
        assert len(reopened(left).events) == expected + (number % 7 == 0)
        assert json.loads(left.read_bytes().splitlines()[0])["events"] == expected + (number % 7 == 0)


@pytest.mark.parametrize("rounds", [1, 2, 12])
def test_a10_a_file_that_was_cut_off_is_refused_wherever(rounds: int, tmp_path: Path) -> None:
    """Without a checkpoint; before, every line less was an event less, and nobody noticed."""
    path = tmp_path / "privacy.jsonl"
    filled(path, rounds).close()
    data = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for size in sorted({*ends[:-1], *(end - 3 for end in ends), *range(40, len(data), 97)}):
        path.write_bytes(data[:size])
        with pytest.raises(PrivacyLedgerError, match="cut off"):
            make(path=path)
        assert path.read_bytes() == data[:size], "and left as it is"
    # Nothing but the end of the last line is missing.
    path.write_bytes(data[:-1])
    assert len(reopened(path).events) == rounds
    assert path.read_bytes() == data


@pytest.mark.parametrize("rounds", [2, 3])
def test_a10_a_head_of_another_time_is_refused(rounds: int, tmp_path: Path) -> None:
    path = tmp_path / "privacy.jsonl"
    ledger = filled(path, 1)
    old = path.read_bytes().splitlines(keepends=True)[0]
    for number in range(2, rounds + 1):
        ledger.record(EVENT, round=number)
    ledger.close()
    head, *lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([old, *lines]))
    if rounds == 2:  # what a kill between the two writes leaves
        assert len(reopened(path).events) == 2
        assert path.read_bytes() == b"".join([head, *lines])
    else:
        with pytest.raises(PrivacyLedgerError, match="another time"):
            make(path=path)
    filled(tmp_path / "other.jsonl", rounds).close()
    other = (tmp_path / "other.jsonl").read_bytes().splitlines(keepends=True)[0]
    for wrong, said in ((other, "another time"), (b"", "lacks its head"), (head.replace(b"  ", b" 1", 1), "damaged")):
        path.write_bytes(b"".join([wrong, *lines]))
        with pytest.raises(PrivacyLedgerError, match=said):
            make(path=path)


GOLDEN = Path(__file__).parent / "golden"


def golden(path: Path) -> PrivacyLedger:
    """Write the stored ledger with this release."""
    ledger = make(sampling=Sampling("capped", cap=3), budget=8.0)
    ledger.run = "0123456789abcdef0123456789abcdef"
    ledger.open(path)
    for number in (1, 2, 3):
        event = Event("discrete_gaussian", 2.0, grid_sigma=1e4, delta=1e-12)
        ledger.record(event, round=number, participants=[5, 2**61 + number])
    return ledger


def test_a10_the_stored_file_is_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "privacy.jsonl"
    golden(path).close()
    assert path.read_bytes() == (GOLDEN / "ledger_v2.jsonl").read_bytes()


@pytest.mark.parametrize("version", [1, 2])
def test_a10_stored_files_are_read_and_say_what_is_unknown(
    version: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "privacy.jsonl"
    stored = (GOLDEN / f"ledger_v{version}.jsonl").read_bytes()
    path.write_bytes(stored)
    ledger = make(sampling=Sampling("capped", cap=4), path=None)
    with pytest.raises(PrivacyLedgerError, match="sampling"):
        ledger.open(path)
    ledger = make(sampling=Sampling("capped", cap=3), path=path)
    assert ledger.run == "0123456789abcdef0123456789abcdef"
    assert ledger.participations == {5: 3, **{2**61 + n: 1 for n in (1, 2, 3)}}
    assert ledger.counted == (version == 2)
    assert ("cut off at the end of the ledger's file" in said_of(ledger)) == (version == 1)
    assert bool(caplog.records) == (version == 1)
    ledger.record(EVENT, round=4)
    ledger.close()
    after = path.read_bytes()
    assert len(after.splitlines()) == len(stored.splitlines()) + 1
    assert after.startswith(stored) == (version == 1)
    again = make(sampling=Sampling("capped", cap=3), path=path)
    assert len(again.events) == 4
    # A checkpoint of either release fits.
    state = json.loads(json.dumps(again.state_dict()))
    state["header"]["version"] = version
    again.load_state_dict(state)
    again.close()


def test_a1_an_earlier_ledger_that_may_have_drawn_fixed_numbers_under_add_remove_is_refused() -> None:
    def state_of(sampling: Sampling) -> tuple[dict[str, Any], PrivacyLedger]:
        ledger = make(adjacency="add_remove", sampling=sampling)
        ledger.record(EVENT, round=1)
        state = ledger.state_dict()
        state["header"]["version"] = 1
        return state, make(adjacency="add_remove", sampling=sampling)

    for sampling in (Sampling("everyone"), Sampling("capped", cap=2)):
        state, again = state_of(sampling)
        with pytest.raises(PrivacyLedgerError, match="two bounds"):
            again.load_state_dict(state)
        state["entries"].clear()
        again.load_state_dict(state)
    state, again = state_of(Sampling("poisson", rate=1.0))
    again.load_state_dict(state)
    assert again.rounds == 1


@pytest.mark.slow
@pytest.mark.parametrize("line", range(4))
@pytest.mark.parametrize("damage", ["flip", "drop", "twice", "swap"])
def test_a_damaged_file_is_refused(line: int, damage: str, tmp_path: Path) -> None:
    path = tmp_path / "privacy.jsonl"
    filled(path, 5).close()
    lines = path.read_bytes().splitlines(keepends=True)
    if damage == "flip":
        # The first digit or letter of a value, which the checksum covers: whether there is a given one hangs on chance.
        at = next(i for i in range(10, len(lines[line])) if chr(lines[line][i]).isalnum())
        lines[line] = lines[line][:at] + (b"0" if lines[line][at : at + 1] != b"0" else b"1") + lines[line][at + 1 :]
    elif damage == "drop":
        del lines[line]
    elif damage == "twice":
        lines.insert(line, lines[line])
    else:
        lines[line], lines[line + 1] = lines[line + 1], lines[line]
    path.write_bytes(b"".join(lines))
    with pytest.raises(PrivacyLedgerError):
        make(path=path)
    assert path.read_bytes() == b"".join(lines), "and left as it is"


def test_lines_of_another_run_do_not_fit(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine.jsonl", tmp_path / "theirs.jsonl"
    filled(mine, 3).close()
    filled(theirs, 3).close()
    lines, others = (path.read_bytes().splitlines(keepends=True) for path in (mine, theirs))
    mine.write_bytes(b"".join([*lines[:3], others[3], lines[4]]))
    with pytest.raises(PrivacyLedgerError, match="line 4"):
        make(path=mine)


@pytest.mark.parametrize("content", [b"\n", b"[]\n", b"not a ledger\n", b'{"a":1}\n', b"\x00" * 64 + b"\n"])
def test_a_foreign_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "privacy.jsonl"
    path.write_bytes(content)
    with pytest.raises(PrivacyLedgerError):
        make(path=path)


@pytest.mark.parametrize(
    "changes",
    [
        {"delta": 1e-6},
        {"population": 99},
        {"adjacency": "replace"},
        {"sampling": Sampling("capped", cap=5)},
        {"unit": "record"},
    ],
)
def test_what_was_promised_at_the_first_release_stands(changes: dict[str, Any], tmp_path: Path) -> None:
    filled(tmp_path / "privacy.jsonl", 1).close()
    with pytest.raises(PrivacyLedgerError, match=next(iter(changes))):
        make(path=tmp_path / "privacy.jsonl", **changes)


def test_two_writers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "privacy.jsonl"
    first = filled(path, 1)
    with pytest.raises(PrivacyLedgerError, match="open elsewhere"):
        make(path=path)
    child = os.fork()
    if child == 0:
        try:
            make(path=path)
        except PrivacyLedgerError:
            os._exit(42)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    first.close()
    assert len(reopened(path).events) == 1


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_what_cannot_be_written_is_not_released(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = filled(tmp_path / "privacy.jsonl", 2)

    def fails(*arguments: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal.os, call, fails)
    with pytest.raises(PrivacyLedgerError, match="No space left"):
        ledger.record(EVENT, round=3)
    monkeypatch.undo()
    with pytest.raises(PrivacyLedgerError, match="could not be written before"):
        ledger.record(EVENT, round=3)
    assert len(ledger.events) == 2
    ledger.close()
    assert len(reopened(tmp_path / "privacy.jsonl").events) == (2 if call == "pwrite" else 3), (
        "at least what was released"
    )


@pytest.mark.parametrize("change", [lambda p: p.write_bytes(p.read_bytes() + b"x"), lambda p: p.unlink()])
def test_a_file_that_somebody_else_touches_stops_the_run(change: Callable[[Path], None], tmp_path: Path) -> None:
    ledger = filled(tmp_path / "privacy.jsonl", 1)
    change(tmp_path / "privacy.jsonl")
    with pytest.raises(PrivacyLedgerError, match="somebody else"):
        ledger.record(EVENT, round=2)


def test_the_event_is_on_the_disk_before_record_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync = os.fsync
    monkeypatch.setattr(
        journal.os, "fsync", lambda handle: (done.append(os.readlink(f"/proc/self/fd/{handle}")), sync(handle))
    )
    ledger = make(path=tmp_path / "privacy.jsonl")
    assert str(tmp_path) in done, "the name of the file, in its folder"
    done.clear()
    ledger.record(EVENT, round=1)
    assert done == [str(tmp_path / "privacy.jsonl")] * 2, "the event, and then the head that counts it"
    ledger.close()


def test_a_file_that_was_moved_away_is_not_written_to(tmp_path: Path) -> None:
    """Who resumes finds the copy that took its place, and would not find what was written to the moved one."""
    path = tmp_path / "privacy.jsonl"
    ledger = filled(path, 2)
    copy = path.read_bytes()
    path.rename(tmp_path / "moved.jsonl")
    path.write_bytes(copy)
    with pytest.raises(PrivacyLedgerError, match="moved or deleted"):
        ledger.record(EVENT, round=3)
    ledger.close()
    assert len(reopened(path).events) == 2
    assert (tmp_path / "moved.jsonl").read_bytes() == copy


@pytest.mark.slow
def test_a_killed_server_has_paid_for_everything_it_released(tmp_path: Path) -> None:
    """SIGKILL at many points of: record, then release. What the parent saw released is in the file."""
    for kill_after in range(16):
        path = tmp_path / f"{kill_after}.jsonl"
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                ledger = make(path=path)
                for number in range(1, 1_000_000):
                    ledger.record(EVENT, round=number, participants=[number])
                    os.write(into, number.to_bytes(4, "big"))
            finally:
                os._exit(1)
        os.close(into)
        seen = b""
        while len(seen) < 4 * kill_after:
            part = os.read(out, 4 * kill_after - len(seen))
            assert part, "the writer ended on its own"
            seen += part
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        while more := os.read(out, 65536):
            seen += more
        os.close(out)
        released = len(seen) // 4
        assert released >= kill_after
        again = make(path=path)
        paid = [entry.round for entry in again.entries]
        assert paid[:released] == list(range(1, released + 1))
        assert len(paid) <= released + 1, "at most the one that was about to be released"
        again.record(EVENT, round=released + 1)
        again.close()


# Checkpoints.


def test_a_checkpoint_older_than_the_file_drops_nothing(tmp_path: Path) -> None:
    path = tmp_path / "privacy.jsonl"
    ledger = filled(path, 3)
    state = store.loads(store.dumps(ledger.state_dict(), "test"), "test")
    for number in (4, 5):
        ledger.record(EVENT, round=number, participants=[number])
    ledger.close()
    restored_first, opened_first = make(), make()
    restored_first.load_state_dict(state)
    assert len(restored_first.events) == 3
    restored_first.open(path)
    assert restored_first.entries == ledger.entries
    restored_first.close()
    opened_first.open(path)
    opened_first.load_state_dict(state)
    assert opened_first.entries == ledger.entries
    assert opened_first.epsilon() == ledger.epsilon()
    assert opened_first.run == ledger.run
    opened_first.close()


def test_a_checkpoint_newer_than_the_file_is_written_into_it(tmp_path: Path) -> None:
    path, copy = tmp_path / "privacy.jsonl", tmp_path / "copy.jsonl"
    ledger = filled(path, 2)
    copy.write_bytes(path.read_bytes())
    ledger.record(EVENT, round=3)
    state = ledger.state_dict()
    for order in ("load", "open"):
        target = tmp_path / f"{order}.jsonl"
        target.write_bytes(copy.read_bytes())
        again = make()
        if order == "load":
            again.load_state_dict(state)
        again.open(target)
        if order == "open":
            again.load_state_dict(state)
        again.close()
        assert reopened(target).entries == ledger.entries
    ledger.close()


@pytest.mark.parametrize("order", ["load", "open"])
def test_a_run_kept_in_memory_may_get_a_file_later(order: str, tmp_path: Path) -> None:
    ledger = make()
    ledger.record(EVENT, round=1, participants=[5])
    again, path = make(), tmp_path / "privacy.jsonl"
    if order == "load":
        again.load_state_dict(ledger.state_dict())
        again.open(path)
    else:
        again.open(path)
        again.load_state_dict(ledger.state_dict())
    again.record(EVENT, round=2)
    again.close()
    found = reopened(path)
    assert [entry.round for entry in found.entries] == [1, 2]
    assert found.run == ledger.run


def test_two_files_of_one_run_are_refused(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "privacy.jsonl", 1)
    with pytest.raises(PrivacyLedgerError, match="a run has one ledger"):
        ledger.open(tmp_path / "other.jsonl")
    ledger.open(tmp_path / "privacy.jsonl")
    state = ledger.state_dict()
    ledger.close()
    again = make()
    again.load_state_dict(state)
    with pytest.raises(PrivacyLedgerError, match="put the run's file back"):
        again.open(tmp_path / "new.jsonl")
    filled(tmp_path / "foreign.jsonl", 1).close()
    with pytest.raises(PrivacyLedgerError, match="another run"):
        again.open(tmp_path / "foreign.jsonl")
    new = make(path=tmp_path / "another.jsonl")
    with pytest.raises(PrivacyLedgerError, match="two different runs"):
        new.load_state_dict(state)
    new.close()


def test_a_checkpoint_that_says_something_else_is_refused(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "privacy.jsonl", 3)
    for change in (
        lambda state: state["entries"][1]["event"].update(noise_multiplier=99.0),
        lambda state: state["entries"].pop(1),
        lambda state: state["entries"][0].pop("event"),
        lambda state: state["entries"][0].update(times="1"),
        lambda state: state["header"].update(delta=1e-7),
        lambda state: state["header"].update(version=3),
        lambda state: state.pop("header"),
    ):
        state = json.loads(json.dumps(ledger.state_dict()))
        change(state)
        with pytest.raises(PrivacyLedgerError):
            ledger.load_state_dict(state)
    assert len(ledger.events) == 3
    ledger.close()


def test_a5_more_participants_than_the_population_are_refused(tmp_path: Path) -> None:
    """Fifty ids of four units: with a cap of one each epsilon stayed at that of one round."""
    sampling = Sampling("capped", cap=1)
    ledger = make(population=4, sampling=sampling, path=tmp_path / "a")
    for number in range(4):
        ledger.record(EVENT, round=number, participants=[number])
    with pytest.raises(PrivacyLedgerError, match="5 different participants, the population was declared as 4"):
        ledger.record(EVENT, round=4, participants=[4])
    assert ledger.rounds == 4
    assert ledger.surplus([0, 4, 5]) == [4, 5]
    ledger.close()
    # What a former release wrote is refused as well: what a unit spent under several ids is unknown.
    wrong = make(population=50, delta=1e-3, sampling=sampling)
    for number in range(50):
        wrong.record(EVENT, round=number, participants=[number])
    state = wrong.state_dict()
    state["header"]["population"] = 4
    with pytest.raises(PrivacyLedgerError, match="50 different participants"):
        make(population=4, delta=1e-3, sampling=sampling).load_state_dict(state)


@pytest.mark.parametrize("sampling", [Sampling("everyone"), Sampling("capped", cap=3)])
def test_a5_one_round_has_no_more_participants_than_the_population(sampling: Sampling) -> None:
    ledger = make(population=4, sampling=sampling)
    with pytest.raises(PrivacyLedgerError, match="5 participants"):
        ledger.record(EVENT, round=1, participants=range(5))
    ledger.record(EVENT, round=1, participants=range(4))
    assert ledger.rounds == 1


def test_a5_without_a_cap_other_ids_cost_nothing_and_are_named() -> None:
    ledger = make(population=4, sampling=Sampling("everyone"))
    ledger.record(EVENT, round=1, participants=[1, 2, 3, 4])
    assert "more ids than were declared" not in said_of(ledger)
    ledger.record(EVENT, round=2, participants=[5, 6])
    assert ledger.epsilon() == compose([EVENT] * 2, ledger.delta).epsilon
    assert "more ids than were declared" in said_of(ledger)
    assert ledger.surplus([7, 8]) == []


def said_of(ledger: PrivacyLedger) -> str:
    figures = {"name": "sum", "bound": 1.0, "sensitivity": 1.0, "noise": "gaussian", "sigma": 1.0}
    return make_statement(ledger, trust="the server", protects="models", **figures).prose()


def test_a_round_made_again_after_a_crash_is_another_participation(tmp_path: Path) -> None:
    """Its units and its noise are redrawn, so it is not a second event on the same units."""
    path, sampling = tmp_path / "privacy.jsonl", Sampling("capped", cap=2)
    ledger = make(path=path, sampling=sampling)
    ledger.record(EVENT, round=1, participants=[1, 2])
    ledger.close()
    again = make(path=path, sampling=sampling)
    again.record(EVENT, round=1, participants=[1])
    assert again.participations == {1: 2, 2: 1}
    assert again.rounds == 2
    assert not again.may_take_part(1)
    again.record(EVENT, round=1, participants=[1])
    assert again.participations[1] == 2, "the second event of the round that is being made"
    again.close()
    third = make(path=path, sampling=sampling)
    with pytest.raises(BudgetExceeded):
        third.record(EVENT, round=1, participants=[1])
    third.close()


def test_a_budget_may_be_changed_and_what_was_spent_stands(tmp_path: Path) -> None:
    filled(tmp_path / "privacy.jsonl", 3, budget=5.0).close()
    spent = compose([EVENT] * 3, 1e-5).epsilon
    again = make(path=tmp_path / "privacy.jsonl", budget=spent)
    assert again.epsilon() == spent
    assert not again.affords(EVENT)
    again.close()
