"""The apps of the experiment ``chaos`` in one process: their books balance, and those of wrong variants do not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from plain_grid import PlainGrid

import fedcomp.experiments.faulted as module
from fedcomp.clients.edge.node_config import DATA_PATH, STATE_FOLDER
from fedcomp.experiments.chaos import NODE, PROJECTIONS, judge
from fedcomp.experiments.engines.processes import DeploymentError
from fedcomp.experiments.faulted import Faulted, hits, remembered, seen_of
from fedcomp.experiments.journal import HIDDEN, JOURNAL, ROUNDS, Kept, Patient, client, read_lines, serve, strategy
from fedcomp.experiments.slow import begin
from fedcomp.flower.faults import Delivery
from fedcomp.flower.grid import InProcessGrid
from fedcomp.program import Now, Step
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.running import Running

NODES, SEED, ROUNDS_ASKED = 3, 4, 6


@dataclass
class Run:
    """What is left of a run in this process."""

    path: Path
    state: bool

    def lines(self) -> dict[int, list[dict[str, Any]]]:
        return {node: read_lines(self.path / f"data-{node}" / JOURNAL) for node in range(NODES)}

    def kept(self) -> Kept:
        return Kept(self.path, SEED)

    def seen(self) -> dict[str, Any]:
        states = [self.path / "state"] * NODES if self.state else None
        return {**seen_of(self.kept(), self.lines(), (), states), "rounds": ROUNDS_ASKED}

    def verdict(self, **changes: Any) -> dict[str, Any]:
        return judge(**{**self.seen(), **changes})


def wrong(verdict: Mapping[str, Any]) -> list[str]:
    return [said for name in ("twice", "mass", "unfinished", "left") for said in verdict[name]]


def asked_of(path: Path, rounds: int = ROUNDS_ASKED, deadline: float = 60.0) -> dict[str, Any]:
    what = {"seed": SEED, "nodes": NODES, "rounds": rounds, "deadline": deadline, "pause": 0.0}
    return {**what, "out": str(path)}


def killed(node: int, at: float, kind: str = NODE) -> dict[str, Any]:
    return {"fault": {"kind": kind, "node": node}, "at": at, "processes": 1}


class Gone(Exception):
    """Stands for SIGKILL."""


def run(
    path: Path,
    *,
    state: bool = True,
    ours: Compressed | None = None,
    restarts: Mapping[int, int] | None = None,
    fault: Callable[[Delivery], str | None] | None = None,
    killed: int = 0,
) -> Run:
    """Run in this process; before a round of ``restarts`` a node loses what it has in memory; in round ``killed`` the
    server's app is gone when it has all replies, and another one goes on."""

    def config(partition: int) -> dict[str, Any]:
        data = path / f"data-{partition}"
        data.mkdir(exist_ok=True)
        return {DATA_PATH: str(data)} | ({STATE_FOLDER: str(path / "state")} if state else {})

    (path / "state").mkdir(exist_ok=True)
    ours = strategy(SEED) if ours is None else ours
    asked = asked_of(path)
    with InProcessGrid(client, NODES, seed=SEED, node_config=config, fault=fault) as grid:
        ask, nodes = ours._ask, list(grid.get_node_ids())

        def before(number: int, *rest: Any) -> Any:
            if restarts and number in restarts:
                grid.wipe(nodes[restarts[number]])
            return ask(number, *rest)

        ours._ask = before  # type: ignore[method-assign]
        if killed:
            # What does not know its clients cannot set them back, as in a deployment.
            plain, take = PlainGrid(grid), ours._take

            def gone(x: Running, now: Now, step: Step | None) -> Any:
                model = take(x, now, step)
                if now.number == killed:
                    raise Gone
                return model

            ours._take = gone  # type: ignore[method-assign]
            with pytest.raises(Gone):
                serve(plain, asked, ours)
            serve(plain, asked, strategy(SEED))
        else:
            serve(grid, asked, ours)
    return Run(path, state)


def lost(delivery: Delivery) -> str | None:
    return "lost_reply" if (delivery.round, delivery.partition) == (3, 1) else None


@pytest.mark.parametrize("state", [True, False])
def test_the_books_of_a_calm_run_balance_and_the_model_is_what_its_updates_make_of_it(
    tmp_path: Path, state: bool
) -> None:
    made = run(tmp_path, state=state)
    verdict = made.verdict()
    assert wrong(verdict) == verdict["abandoned"] == []
    assert max(verdict["lost"].values()) < 1e-5
    seen = made.seen()
    assert len(seen["used"]) == len(seen["made"]) == NODES * ROUNDS_ASKED
    # Without the memories nothing adds up: what is owed is a good part of it.
    assert len(made.verdict(owed={})["mass"]) == NODES


def test_a_lost_reply_and_a_restarted_node_lose_nothing_with_a_state_folder(tmp_path: Path) -> None:
    made = run(tmp_path, restarts={4: 0, 6: 2}, fault=lost)
    assert wrong(made.verdict()) == []
    assert (1, 3) not in made.seen()["used"]
    rounds = made.kept().rounds
    assert [each["round"] for each in rounds if each["rolled_back"] == [1]] == [4]
    assert [each["round"] for each in rounds if each["fresh"]] == [1]


def test_a_server_app_that_is_killed_with_all_replies_in_its_hands_counts_nothing_twice(tmp_path: Path) -> None:
    made = run(tmp_path, killed=4)
    assert wrong(made.verdict()) == made.verdict()["abandoned"] == []
    rounds = made.kept().rounds
    assert [each["round"] for each in rounds] == list(range(1, ROUNDS_ASKED + 1))
    assert [each["sequence"] >> 32 for each in rounds] == [0, 0, 0, 1, 1, 1]
    # What the dead app had summed is in no model; the nodes have it still.
    assert {sequence for _, sequence in made.seen()["used"]}.isdisjoint({4})
    assert 4 in {line["sequence"] for line in made.seen()["made"]}


def test_a_server_that_keeps_the_model_of_a_round_and_forgets_whose_it_is_counts_twice(tmp_path: Path) -> None:
    """A checkpoint of the model with the books of the round before."""
    made = run(tmp_path, killed=4)
    seen = made.seen()
    moved = np.array(seen["moved"]) + np.mean([line["frame"] for line in seen["made"] if line["sequence"] == 4], axis=0)
    assert len(made.verdict(moved=tuple(moved))["twice"]) == 1


def test_a_message_that_came_twice_has_two_lines_and_one_update(tmp_path: Path) -> None:
    made = run(tmp_path, fault=lambda d: "duplicate" if (d.round, d.partition) == (3, 1) else None)
    assert wrong(made.verdict()) == []
    lines = [line for line in made.lines()[1] if line["sequence"] == 3]
    assert [any(line["update"]) for line in lines] == [True, False]
    assert lines[0]["frame"] == lines[1]["frame"]


def test_a_client_that_forgets_loses_mass_and_is_named(tmp_path: Path) -> None:
    made = run(tmp_path, state=False, restarts={4: 0})
    verdict = made.verdict()
    assert [line.split(":")[0] for line in verdict["mass"]] == ["node 0"]
    assert verdict["lost"][0] > 1e-3 > 1e-5 > verdict["lost"][1]
    rounds = made.kept().rounds
    assert [(each["round"], each["fresh"]) for each in rounds if each["fresh"]] == [(1, [0, 1, 2]), (4, [0])]


def test_a_frame_that_is_summed_twice_is_found_in_the_model_alone(tmp_path: Path) -> None:
    """The server's own list is that of an innocent one."""
    ours = strategy(SEED)
    take = ours._take

    def twice(x: Running, now: Now, step: Step | None) -> Any:
        model, metrics = take(x, now, step)
        if now.number == 3 and model is not None:
            moved = {name: 2 * array.numpy() - x.model[name] for name, array in model.items()}
            model = ArrayRecord({name: Array(value) for name, value in moved.items()})
        return model, metrics

    ours._take = twice  # type: ignore[method-assign]
    verdict = run(tmp_path, ours=ours).verdict()
    assert len(verdict["twice"]) == 1
    assert verdict["twice"][0].startswith("the model is not what its updates make of it")
    assert verdict["mass"] == []


def test_a_memory_is_owed_by_what_the_server_heard_last(tmp_path: Path) -> None:
    """The last reply was lost: the folder's memory, and the frame that nobody got."""
    made = run(tmp_path, fault=lambda d: "lost_reply" if (d.round, d.partition) == (ROUNDS_ASKED, 2) else None)
    assert wrong(made.verdict()) == []
    kept, line = made.kept(), made.lines()[2][-1]
    whole = np.array(line["memory"]) + np.array(line["frame"])
    np.testing.assert_allclose(kept.owed(tmp_path / "state", 2), whole, atol=1e-5)
    np.testing.assert_allclose(remembered(made.lines()[2], (), kept), whole, atol=1e-5)
    # Killed since, and without a folder: nothing is left of it.
    assert remembered(made.lines()[2], [killed(2, line["at"] + 1.0)], kept) == (0.0,) * PROJECTIONS


def test_messages_during_which_a_node_was_killed_are_those_that_it_had_begun(tmp_path: Path) -> None:
    lines = run(tmp_path).lines()
    last = lines[1][-1]
    assert hits(lines, [killed(1, last["at"] + 0.1)], 0.3) == [(1, last["sequence"])]
    assert hits(lines, [killed(1, last["at"] + 60.0)], 0.3) == []
    # Full for a while, and written since.
    full = {**killed(1, last["at"] - 60.0, "disk"), "over": last["at"] - 0.1}
    assert hits(lines, [full], 0.3) == []


def test_what_a_full_disk_kept_out_of_the_folder_is_excused_until_the_node_writes_again() -> None:
    lines = {1: [{"sequence": number, "at": 10.0 * number} for number in range(1, 6)]}
    full = killed(1, 29.9, "disk")
    assert hits(lines, [{**full, "over": 49.0}], 0.3) == []
    assert hits(lines, [{**full, "over": 51.0}], 0.3) == [(1, 3), (1, 4), (1, 5)]
    # Nothing was made since, and all that was made before is in the folder.
    assert hits(lines, [{**killed(1, 55.0, "disk"), "over": 60.0}], 0.3) == []


def test_a_line_that_is_cut_off_is_no_line(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL
    run(tmp_path)
    whole = (tmp_path / "data-0" / JOURNAL).read_text()
    path.write_text(whole[:-20])
    assert len(read_lines(path)) == ROUNDS_ASKED - 1
    assert read_lines(tmp_path / "none") == []


@pytest.mark.parametrize(("silent", "timeout"), [(set(), 1.5), ({2}, 300.0), ({0, 1, 2}, 1.5)])
def test_who_did_not_answer_last_time_is_asked_and_not_waited_for(silent: set[int], timeout: float) -> None:
    """A dead node costs one deadline; where nobody answered there is nobody else to wait for."""
    with InProcessGrid(client, NODES, fault=lambda d: "silent" if d.partition == 2 else None) as engine:
        nodes = list(engine.get_node_ids())
        grid = Patient(PlainGrid(engine), lambda: [nodes[place] for place in silent])
        asked = [Message(RecordDict(), node, "query") for node in nodes]
        began = time.monotonic()
        replies = grid.send_and_receive(asked, timeout=timeout)
        waited = time.monotonic() - began
    assert {reply.metadata.src_node_id for reply in replies} == set(nodes[:2])
    # The whole of a deadline where somebody may still answer, and not of one that nobody needs.
    assert (waited >= timeout) == (silent != {2})


def test_messages_end_with_their_round() -> None:
    ours = strategy(SEED, deadline=7.0)
    with InProcessGrid(client, NODES) as grid:
        arrays = begin(SEED, HIDDEN)
        config = ConfigRecord({"seed": SEED, "nodes": NODES, "pause": 0.0})
        assert {message.metadata.ttl for message in ours.configure_train(1, arrays, config, grid)} == {7.0}


class Away:
    """A deployment with a round for each submission, whose SuperLink says ``status`` of the run, or nothing."""

    def __init__(self, folder: Path, status: str) -> None:
        self.folder = folder
        self.status = status
        self.submitted = 0

    def submit(self, config: Any, *, limit: float, project: Path) -> int:
        self.submitted += 1
        with (self.folder / ROUNDS).open("a") as file:
            file.write(json.dumps({"round": self.submitted, "at": time.time()}) + "\n")
        return self.submitted

    def runs(self) -> list[dict[str, str]]:
        if self.status:
            return [{"status": self.status}]
        raise DeploymentError("nobody answers")

    def require_running(self) -> None:
        pass


@pytest.mark.parametrize(("status", "again"), [("finished:failed", 1), ("running", 0), ("", 0)])
def test_a_run_that_is_over_before_its_last_round_is_submitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, again: int
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(module, "STALLED", 1.0)
    deployment = Away(tmp_path, status)
    found = Faulted(deployment, asked_of(tmp_path, 2, 0.1), [])  # type: ignore[arg-type]
    assert [each["round"] for each in found.run()] == list(range(1, 2 + again))
    assert found.again == again
