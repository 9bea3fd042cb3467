"""Schedules of faults follow from their seed, and the judge finds what a wrong deployment would do."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from fedcomp.errors import ConfigError
from fedcomp.experiments.chaos import (
    CALM,
    MAX_EXCUSED,
    NODE_FAULTS,
    SERVER_FAULTS,
    judge,
    projected,
    schedule,
)
from fedcomp.rng import Key

SIZE, SEED = 50, 5


def test_a_schedule_follows_from_its_seed() -> None:
    assert schedule(3, 60, 4) == schedule(3, 60, 4)
    assert schedule(3, 60, 4) != schedule(4, 60, 4)


@pytest.mark.parametrize("seed", range(20))
def test_a_schedule_has_all_kinds_and_room_for_each(seed: int) -> None:
    found = schedule(seed, 60, 4, each=4, server=3)
    assert list(found) == sorted(found)
    assert {kind: sum(f.kind == kind for f in found) for kind in NODE_FAULTS} == dict.fromkeys(NODE_FAULTS, 4)
    servers = [fault for fault in found if fault.kind in SERVER_FAULTS]
    assert {kind: sum(f.kind == kind for f in servers) for kind in SERVER_FAULTS} == dict.fromkeys(SERVER_FAULTS, 3)
    assert all(b.round - a.round >= CALM for a, b in itertools.pairwise(servers))
    for fault in found:
        assert 2 <= fault.round <= 58
        assert fault.round + fault.lasts <= 60
        assert 0.0 <= fault.after < 1.0
        assert (fault.node == -1) == (fault.kind in SERVER_FAULTS)
    # A node that is down cannot be hit again.
    for node in range(4):
        own = [fault for fault in found if fault.node == node]
        assert all(b.round > a.round + a.lasts for a, b in itertools.pairwise(own))


def test_too_few_rounds_are_refused() -> None:
    with pytest.raises(ConfigError, match="too few"):
        schedule(0, 6, 4)
    with pytest.raises(ConfigError, match="no room"):
        schedule(0, 20, 1, each=4, server=1)


def test_projections_are_linear_and_tell_vectors_apart() -> None:
    a, b = (Key(1, "test", layer=i).generator().standard_normal(SIZE).astype(np.float32) for i in range(2))
    both = np.array(projected(a, SEED)) + np.array(projected(b, SEED))
    np.testing.assert_allclose(projected(a + b, SEED), both, rtol=1e-5, atol=1e-5)
    assert np.abs(np.array(projected(a, SEED)) - np.array(projected(b, SEED))).min() > 0.0


@dataclass
class Node:
    """A client with error feedback and a state folder, as the deployment has it; ``wrong`` ones forget or repeat."""

    number: int
    wrong: str = ""
    memory: Any = field(default_factory=lambda: np.zeros(SIZE, np.float32))
    pending: Any = None
    journal: list[dict[str, Any]] = field(default_factory=list)

    def train(self, sequence: int, acknowledged: int, fault: str = "") -> bool:
        """Handle a message; return whether a reply left."""
        self.settle(acknowledged)
        drawn = Key(SEED, "update", sequence, self.number).generator()
        update = drawn.standard_normal(SIZE).astype(np.float32)
        whole = self.memory + update
        frame = np.where(np.abs(whole) >= np.sort(np.abs(whole))[-5], whole, 0).astype(np.float32)
        made = {"update": projected(update, SEED), "frame": projected(frame, SEED)}
        self.journal.append({"node": self.number, "sequence": sequence, **made})
        if fault == "before":
            # The disk has the state from before: the update is gone, nothing else.
            return False
        self.memory, self.pending = whole - frame, (sequence, frame)
        return fault != "after"

    def settle(self, acknowledged: int) -> None:
        """Take back what was not delivered."""
        if self.pending is not None and self.pending[0] != acknowledged and self.wrong != "forgets":
            self.memory = self.memory + self.pending[1]
        self.pending = None


def run(rounds: int = 12, nodes: int = 3, *, wrong: str = "", faults: dict[tuple[int, int], str] | None = None) -> Any:
    """Return what is seen of a run whose nodes are killed before or after their state is written, or unheard."""
    given = {(4, 0): "before", (6, 1): "after", (7, 2): "after", (8, 0): "before"} if faults is None else faults
    each = [Node(number, wrong) for number in range(nodes)]
    used: list[tuple[int, int]] = []
    acknowledged = dict.fromkeys(range(nodes), 0)
    for sequence in range(1, rounds + 1):
        for node in each:
            if node.train(sequence, acknowledged[node.number], given.get((sequence, node.number), "")):
                used.append((node.number, sequence))
                acknowledged[node.number] = sequence
    for node in each:
        node.settle(acknowledged[node.number])
    return {
        "made": [line for node in each for line in node.journal],
        "used": used,
        "owed": {node.number: projected(node.memory, SEED) for node in each},
        "hit": [(node, sequence) for (sequence, node), kind in given.items() if kind in ("before", "after")],
        "rounds": rounds,
        "finished": rounds,
    }


def wrong(seen: Any, **changes: Any) -> list[str]:
    """Return all that the judge says is wrong."""
    verdict = judge(**{**seen, **changes})
    return [said for name in ("twice", "mass", "unfinished", "left") for said in verdict[name]]


def test_a_run_that_keeps_all_is_innocent_and_what_was_abandoned_is_named() -> None:
    assert wrong(run()) == []
    assert judge(**run())["abandoned"] == [(0, 4), (0, 8)]
    assert judge(**run(faults={}))["abandoned"] == []


def test_a_reply_that_was_lost_excuses_nothing_and_needs_no_excuse() -> None:
    """A pulled link: the mass is in the memory, and a node that forgets it is found without any fault of its own."""
    lost = {(5, 1): "after"}
    assert wrong(run(faults=lost), hit=()) == []
    assert len(wrong(run(faults=lost, wrong="forgets"), hit=())) == 1


def test_a_node_that_forgets_what_was_not_delivered_is_found_though_it_was_hit() -> None:
    """Mass of a frame is no update: being killed excuses the one, not the other."""
    assert [line.split(":")[0] for line in wrong(run(wrong="forgets"))] == ["node 1", "node 2"]


def test_an_update_that_vanishes_without_a_fault_is_found() -> None:
    seen = run(faults={(4, 0): "before"})
    assert wrong(seen) == []
    assert wrong(seen, hit=())[0].startswith("node 0: ")
    assert wrong(seen, hit=[(0, 5), (1, 4)])


def test_a_double_count_is_found_twice_over() -> None:
    """By its number, and by the mass: also where the server's own list does not show it."""
    seen = run()
    node, sequence = seen["used"][3]
    found = wrong(seen, used=[*seen["used"], (node, sequence)])
    assert found[0] == f"update {sequence} of node {node} is in the model 2 times"
    assert len(found) == 2
    # The reply of the killed process had left after all, and the server has it, but not in its list.
    silent = wrong(seen, used=[pair for pair in seen["used"] if pair != (2, 5)])
    assert [line.split(":")[0] for line in silent] == ["node 2"]


def test_what_nobody_made_runs_without_an_end_and_processes_that_stay_are_found() -> None:
    seen = run()
    more = {"used": [*seen["used"], (1, 99)], "finished": 7, "processes": ("flower-supernode --superlink",)}
    assert wrong(seen, **more) == [
        "update 99 of node 1 is in the model, and the node never made it",
        "7 of 12 rounds are in the model",
        "still running: flower-supernode --superlink",
    ]


def test_too_many_excuses_prove_nothing() -> None:
    hits = {(sequence, 0): "after" for sequence in range(1, MAX_EXCUSED + 2)}
    with pytest.raises(ConfigError, match="prove nothing"):
        judge(**run(rounds=20, faults=hits))
