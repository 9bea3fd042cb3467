"""The experiment on clients that die: shards vanish with them, sums are exact, and the model foretells who is in."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from experiment_runs import Ran, ran
from flwr.app import Message, RecordDict

from fedcomp.coding.transport import Parcel, SpoolRoot
from fedcomp.experiments.catalog import coded_dropout
from fedcomp.experiments.catalog.coded_dropout import COPIES, MDS, PLAIN, RESUME, RLNC, Sizes
from fedcomp.experiments.findings import different_bytes
from fedcomp.experiments.kit import Record, Records
from fedcomp.experiments.options import Config
from fedcomp.experiments.vanishing import Life, PeerShards, live, relive
from fedcomp.flower import asks
from fedcomp.flower.grid import InProcessGrid
from fedcomp.timing import Link
from fedcomp.timing.dropout import ALWAYS, Compute, Presence, Situation, World

SMALL = (
    "task.model=cnn",
    "max_steps=1",
    "symbols=2",
    "model_rounds=2",
    "life=6",
    "share_by=4",
    "end=30",
)


def configured(rounds: int = 1, clients: int = 6, *more: str) -> Config:
    return coded_dropout.EXPERIMENT.configure(rounds=rounds, clients=clients, assignments=(*SMALL, *more))


@pytest.fixture(scope="module")
def run() -> Ran:
    """Every row and every measurement, very small."""
    return ran(coded_dropout.EXPERIMENT, *SMALL, rounds=1, clients=6, judging=coded_dropout, unread=["period"])


def dying(**ends: float):
    """Return failures in which the clients named stay until the second given, and all others stay."""
    known = {int(name.removeprefix("c")): end for name, end in ends.items()}
    return lambda r, client: Presence(((0.0, known[client]),)) if client in known else ALWAYS


def lived(config: Config, scheme: str, failures, codec: str = "QSGD-8") -> Life:
    there = dataclasses.replace(coded_dropout.world(config), failures=failures, compute=Compute(1.0))
    return live(coded_dropout.spec_of(config, coded_dropout.schemes(config)[scheme], codec, 6.0), there)


@pytest.mark.long
@pytest.mark.parametrize("scheme", [MDS, RLNC, COPIES])
def test_who_dies_after_sharing_is_in_the_sum_and_who_dies_before_is_not(scheme: str) -> None:
    config = configured(2)
    # Trained at about 1.1 s; shards of a kilobyte or so land within a hundredth of a second of that.
    life = lived(config, scheme, dying(c1=1.5, c3=0.9))
    assert life.included == {1: (0, 1, 2, 4, 5), 2: (0, 1, 2, 4, 5)}
    assert life.log[1].trained == set(range(6))
    assert life.fraction == pytest.approx(5 / 6)
    assert life.result.peer_wire_bytes > 0
    # Plain upload takes longer than client 1 has.
    assert lived(config, PLAIN, dying(c1=1.5, c3=0.9)).included[1] == (0, 2, 4, 5)
    uncoded = relive(coded_dropout.spec_of(config, coded_dropout.schemes(config)[PLAIN], "QSGD-8", 0.0), life)
    assert different_bytes(life.result.arrays, uncoded.arrays) == 0
    everybody = relive(
        coded_dropout.spec_of(config, coded_dropout.schemes(config)[PLAIN], "QSGD-8", 0.0),
        dataclasses.replace(life, included={1: tuple(range(6)), 2: tuple(range(6))}),
    )
    assert different_bytes(life.result.arrays, everybody.arrays) > 0


@pytest.mark.long
def test_too_few_relays_that_live_leave_nobody() -> None:
    config = configured(1, 6, "symbols=4")
    fleeting = dying(c0=1.5, c1=1.5, c2=1.5)
    assert lived(config, MDS, fleeting).included == {1: ()}
    assert lived(config, PLAIN, fleeting).included == {1: (3, 4, 5)}


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
        trained = {}
        for client in range(3):
            content = RecordDict()
            asks.put(content, asks.AskHead(number=1, seed=0, session=run, sequence=1))
            trained[client] = (1.0, Message(content, grid.node_id_of(client), "train"))
        left = PeerShards(tmp_path)(situation, trained)
    # Client 0 dies in its second shard. Client 2 is gone before its first has left, and is not there for client 1's.
    assert left == {0: math.inf, 1: pytest.approx(1.2), 2: math.inf}
    held = {holder: [p.source for p in root.spool(holder).list(run, 1)] for holder in range(3)}
    assert held == {0: [0], 1: [0, 1], 2: [2]}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "scheme"), [("QSGD-8", MDS), ("top-1 %", COPIES), ("QSGD-8", PLAIN), ("QSGD-8", RESUME)]
)
def test_the_model_foretells_who_is_in_the_sum(name: str, scheme: str, run: Ran) -> None:
    config = configured(3, 6, "chunk=512", "stay=1.5", "away=9")
    sizes = Sizes.of(run.results[coded_dropout.UNDISTURBED[name]])
    chosen = coded_dropout.schemes(config)[scheme]
    there = coded_dropout.world(config, back=scheme == RESUME)
    spec = coded_dropout.spec_of(config, chosen, name, sizes.patience(config))
    life = live(spec, there, chunk=512 if scheme == RESUME else 0)
    fates = coded_dropout.predicted(config, chosen, sizes, (1, 2, 3), there)
    told = [tuple(client for client, at in enumerate(fate.known) if math.isfinite(at)) for fate in fates]
    assert list(life.included.values()) == told
    assert any(0 < len(included) < 6 for included in told), "somebody vanished"


def test_a_trace_takes_the_place_of_drawn_failures(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("0,0,15\n1,3,9\n")
    world: World = coded_dropout.world(configured(1, 2, f"trace={file}", "period=10"))
    assert world.failures(1, 0) == Presence(((0.0, 15.0),))
    assert world.failures(2, 0) == Presence(((0.0, 5.0),))
    assert world.failures(1, 1) == Presence(((3.0, 9.0),))


@pytest.mark.long
def test_all_is_measured(run: Ran) -> None:
    findings = run.findings
    who, sizes, back, hub = findings.tables
    assert len(who.rows) == len(sizes.rows) == 10
    assert len(back.rows) == 5
    assert [row[0] for row in hub.rows] == [
        "plain upload",
        "RLNC relay, between clients",
        "RLNC relay, through the server",
    ]
    links = {row[0]: row for row in sizes.rows}
    assert links["QSGD-8, plain"][3] == 0
    assert links["QSGD-8, MDS relay"][3] > 0
    assert len(findings.figures) == 4


@pytest.mark.long
def test_sums_are_exact_and_the_hub_saves_nothing(run: Ran) -> None:
    claims = run.findings.claims
    assert [claim.value for claim in claims if "differ from averaging" in claim.name] == [0.0] * 4
    (extra,) = [claim for claim in claims if claim.name.startswith("through the server")]
    assert extra.value > 1.0


@pytest.mark.long
def test_every_claim_has_a_source_and_can_fail(run: Ran) -> None:
    findings, (config, still, *sweeps) = run.findings, run.judged
    assert len({claim.name for claim in findings.claims}) == len(findings.claims)
    assert all(claim.source for claim in findings.claims)

    def forged():
        """What the claims are made of, with one figure at a time out of all bounds."""
        for i, sweep in enumerate(sweeps):
            for record in sweep:
                for name in {"fraction", "model", "different", "up", "accuracy"} & record.keys():
                    for wrong in (1e9, -1e9) if record[name] is not None else ():
                        value = [wrong] * len(record.accuracy) if name == "accuracy" else wrong
                        changed = Records(Record({**r, name: value}) if r is record else r for r in sweep)
                        yield [*sweeps[:i], changed, *sweeps[i + 1 :]]

    lost = {claim.name for other in forged() for claim in coded_dropout.claims(config, still, *other) if not claim.ok}
    assert lost == {claim.name for claim in findings.claims}
