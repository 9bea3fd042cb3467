"""The study of clients that die: shards vanish with them, sums are exact, and the model foretells who is in."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from flwr.app import Message, RecordDict

from fedcomp.coding.transport import Parcel, SpoolRoot
from fedcomp.errors import NoUsableReply
from fedcomp.experiments import engines
from fedcomp.experiments.catalog.coded_dropout import EXPERIMENT
from fedcomp.experiments.findings import different_bytes
from fedcomp.experiments.studies import coded_dropout
from fedcomp.experiments.studies.coded_dropout import COPIES, MDS, PLAIN, RESUME, RLNC, Sizes, spec_of, world
from fedcomp.experiments.tables import Training
from fedcomp.experiments.vanishing import Life, live, relive, share
from fedcomp.flower import asks
from fedcomp.flower.grid import InProcessGrid
from fedcomp.timing import Link
from fedcomp.timing.dropout import ALWAYS, Compute, Presence, Situation

SMALL = ("task.model=cnn", "max_steps=1", "symbols=2", "model_rounds=2", "life=6", "share_by=4", "end=30")


def trained(rounds: int = 1, *more: str) -> Training:
    return Training.of(EXPERIMENT, EXPERIMENT.configure(rounds=rounds, clients=6, assignments=(*SMALL, *more)))


def dying(**ends: float):
    """Return failures in which the clients named stay until the second given, and all others stay."""
    known = {int(name.removeprefix("c")): end for name, end in ends.items()}
    return lambda r, client: Presence(((0.0, known[client]),)) if client in known else ALWAYS


def lived(training: Training, scheme: str, failures) -> Life:
    there = dataclasses.replace(world(training.config), failures=failures, compute=Compute(1.0))
    return live(spec_of(training, scheme, "QSGD-8", 6.0), there)


@pytest.mark.long
@pytest.mark.parametrize("scheme", [MDS, RLNC, COPIES])
def test_who_dies_after_sharing_is_in_the_sum_and_who_dies_before_is_not(scheme: str) -> None:
    training = trained(2)
    # Trained at about 1.1 s; shards of a kilobyte or so land within a hundredth of a second of that.
    life = lived(training, scheme, dying(c1=1.5, c3=0.9))
    assert life.included == {1: (0, 1, 2, 4, 5), 2: (0, 1, 2, 4, 5)}
    assert life.log[1].trained == set(range(6))
    assert life.fraction == pytest.approx(5 / 6)
    assert life.result.peer_wire_bytes > 0
    # Plain upload takes longer than client 1 has.
    assert lived(training, PLAIN, dying(c1=1.5, c3=0.9)).included[1] == (0, 2, 4, 5)
    pair = spec_of(training, PLAIN, "QSGD-8", 0.0)
    assert different_bytes(life.result.arrays, relive(pair, life).arrays) == 0
    all_in = dataclasses.replace(life, included={1: tuple(range(6)), 2: tuple(range(6))})
    assert different_bytes(life.result.arrays, relive(pair, all_in).arrays) > 0


@pytest.mark.long
def test_too_few_relays_that_live_leave_nobody() -> None:
    training = trained(1, "symbols=4")
    fleeting = dying(c0=1.5, c1=1.5, c2=1.5)
    with pytest.raises(NoUsableReply, match="no update was used"):
        lived(training, MDS, fleeting)
    assert lived(training, PLAIN, fleeting).included == {1: (3, 4, 5)}


def test_shards_that_did_not_land_are_taken_from_the_spools(tmp_path: Path) -> None:
    run = bytes(8)
    root = SpoolRoot.create(tmp_path)
    for client in range(3):
        for holder in range(3):
            root.spool(holder).put(Parcel(run, 1, 1, client, holder, bytes(964)))
    there = [Presence(((0.0, 1.15),)), ALWAYS, Presence(((0.0, 1.05),))]
    link = Link(8e4, 8e4)  # a parcel of 1000 bytes in a tenth of a second
    situation = Situation(there, [1.0] * 3, link, link, 5.0, 9.0)

    with InProcessGrid(lambda message, context: message, 3) as grid:
        asked = {}
        for client in range(3):
            content = RecordDict()
            asks.put(content, asks.AskHead(number=1, seed=0, session=run, sequence=1))
            asked[client] = (1.0, Message(content, grid.node_id_of(client), "train"))
        left = share(tmp_path, situation, asked)
    # Client 0 dies in its second shard. Client 2 is gone before its first has left, and is not there for client 1's.
    assert left == {0: math.inf, 1: pytest.approx(1.2), 2: math.inf}
    held = {holder: [p.source for p in root.spool(holder).list(run, 1)] for holder in range(3)}
    assert held == {0: [0], 1: [0, 1], 2: [2]}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "scheme"), [("QSGD-8", MDS), ("top-1 %", COPIES), ("QSGD-8", PLAIN), ("QSGD-8", RESUME)]
)
def test_the_model_foretells_who_is_in_the_sum(name: str, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded_dropout, "CHUNK", 512)
    monkeypatch.setattr(coded_dropout, "STAY", 1.5)
    monkeypatch.setattr(coded_dropout, "AWAY", 9.0)
    sizes = Sizes.of(engines.run(trained().spec(f"{name}, nobody vanishes")))
    training = trained(3)
    chosen = coded_dropout.schemes(training.config)[scheme]
    there = world(training.config, back=scheme == RESUME)
    life = live(spec_of(training, scheme, name, sizes.patience), there, chunk=chosen.chunk)
    fates = coded_dropout.predicted(training.config, chosen, sizes, (1, 2, 3), there)
    told = [tuple(client for client, at in enumerate(fate.known) if math.isfinite(at)) for fate in fates]
    assert list(life.included.values()) == told
    assert any(0 < len(included) < 6 for included in told), "somebody vanished"
