"""A real deployment in which each thing is killed, pulled or filled once: everything is accounted for."""

from __future__ import annotations

import pytest

from fedcomp.experiments.chaos import CLOCK, DISK, LINK, NODE, SERVER_APP, SUPERLINK, Fault
from fedcomp.experiments.faulted import faulted
from fedcomp.experiments.studies.chaos import unavailable

REASON = unavailable()

pytestmark = [pytest.mark.engines, pytest.mark.long, pytest.mark.skipif(bool(REASON), reason=REASON)]

FAULTS = (
    Fault(2, NODE, 1, after=0.5),
    Fault(3, LINK, 2, after=0.2),
    Fault(4, CLOCK, 0, after=0.5),
    Fault(5, SERVER_APP, after=0.6),
    Fault(6, DISK, 2, after=0.1),
    Fault(8, SUPERLINK, after=0.4),
)


def test_one_fault_of_each_kind_loses_nothing_and_leaves_nothing() -> None:
    # A busy machine makes rounds longer, and some of them empty: that is accounted for, too.
    found = faulted(5, FAULTS, rounds=9, nodes=3, deadline=20.0, pause=0.3, state=True)
    assert found["twice"] == found["mass"] == found["unfinished"] == found["left"] == []
    assert found["lost"] < 1e-5
    assert [each["fault"]["kind"] for each in found["done"]] == [fault.kind for fault in FAULTS]
    killed = {each["fault"]["kind"]: each["processes"] for each in found["done"]}
    # The node's supervisor, SuperNode, executor and what handles messages; server app and SuperLink are one each.
    assert killed[NODE] >= 3
    assert killed[SERVER_APP] == killed[SUPERLINK] == 1
    assert [each["round"] for each in found["ended"]] == list(range(1, 10))
    # Only nodes that were killed may have abandoned anything, and only the message they had. Where the run ends before
    # the node with the full disk has written again, what it could not write went with its process.
    killed_nodes = [node for node, _ in found["abandoned"] if node != 2]
    assert len({*killed_nodes}) == len(killed_nodes)
    assert {*killed_nodes} <= {0, 1}
    assert found["noticed"] == 1
    assert any("keeps its state on disk" in reason for each in found["ended"] for reason in each["refused"])
    # After the app was killed numbers go on where no message of it can have been.
    epochs = [each["sequence"] >> 32 for each in found["ended"]]
    # On a busy machine the round in which it is killed may have ended before.
    assert epochs in ([0] * 4 + [1] * 5, [0] * 5 + [1] * 4)
