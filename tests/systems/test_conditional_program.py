"""Conditional rounds as a program: those over messages bit for bit, who is quiet and why, and drift below a node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from beside_product import Toy
from flwr.app import Context, Message
from over_messages import Fault, product
from toy import SHAPES, client_app, fedavg

from fedcomp.clients.client import HALVES
from fedcomp.clients.conditional import conditional
from fedcomp.codecs import Auto, Codec, ErrorFeedback, Identity, TopK
from fedcomp.drift.schedule import ScheduleSettings
from fedcomp.drift.sensor import Upload
from fedcomp.errors import FedcompError, StateError
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.payload import round_of
from fedcomp.flower.records import to_arrays
from fedcomp.layout import NONE_DENSE, Layout, Update, Vector
from fedcomp.local import Local
from fedcomp.program import HELLO, Answer, Ask, Me, Now
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.conditional import Conditional, Quietness
from fedcomp.systems.conditional import DECIDES, ConditionalRounds, Decision, Offer, Status
from fedcomp.systems.pair import Pair

TOY = Toy(SHAPES, NONE_DENSE)
LAYOUT = TOY.layout
NODES = 4
SETTLED = ScheduleSettings(window=2, low=0.15, consecutive=1, patience=1)
SPARSE = ErrorFeedback(TopK(density=0.2))


def loss_of(vector: Vector, node: int, number: int) -> float:
    """A loss that jumps with the model, so that it says which one was looked at; nodes settle now and then."""
    jump = abs(float(vector.astype(np.float64).sum())) * 0.618 % 1.0
    moving = 2.0**-number if (node + number // 6) % 3 == 0 else 1.0
    return moving * (1.0 + 0.3 * jump * (node % 2))


@dataclass
class Watched:
    """A node whose sensors, if it has any, are played by hand."""

    settings: ScheduleSettings = SETTLED
    came: dict[int, Upload] = field(default_factory=dict)
    absorbed: list[int] = field(default_factory=list)
    deployed: list[int] = field(default_factory=list)

    def loss(self, me: Me, update: Update | None = None) -> float:
        return loss_of(me.start if update is None else trained(me.number, me.node, me.start), me.node, me.number)

    def windows(self) -> dict[int, Upload]:
        return dict(self.came)

    def forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.came.pop(number, None)

    def absorb(self, windows: Sequence[Upload]) -> None:
        self.absorbed += [window.version for window in windows]

    def deploy(self, me: Me) -> None:
        self.deployed.append(me.number)


class Still(Watched):
    """A node whose losses settle at once, and whose training helps nobody."""

    def loss(self, me: Me, update: Update | None = None) -> float:
        return 1.0


def trained(number: int, node: int, start: Vector) -> Vector:
    return start + TOY.made(number, node)


def local(system: ConditionalRounds, watch: Any = Watched, **options: Any) -> Local:
    return TOY.local(system, NODES, **{"data": {node: watch() for node in range(NODES)}, **options})


def app() -> Any:
    def watch(msg: Message, context: Context) -> float:
        (record,) = msg.content.array_records.values()
        return loss_of(LAYOUT.flatten(to_arrays(record)), int(context.node_config["partition-id"]), round_of(msg))

    return client_app([*(make() for make in HALVES.values()), conditional(watch, settings=SETTLED)])


def faulty(number: int, node: int, exchange: int) -> str:
    drawn = Key(3, "faults", number, node, exchange).uniform(1)[0]
    return "silent" if drawn < 0.1 else "lost" if drawn < 0.2 else ""


@pytest.mark.long
@pytest.mark.parametrize("query", [True, False])
@pytest.mark.parametrize("codec", [SPARSE, Identity()], ids=["sparse", "whole"])
@pytest.mark.parametrize("fault", [faulty, Local.fault], ids=["faults", "none"])
def test_rounds_are_those_over_messages(query: bool, codec: Codec, fault: Fault) -> None:
    strategy = Conditional(Compressed(fedavg(fraction_evaluate=0.0), codec), max_skip=3, query=query)
    here = local(ConditionalRounds(codec, max_skip=3, query=query), fault=fault)
    expected = product(strategy, app(), NODES, LAYOUT, here.model, 24, fault)
    with InProcessGrid(app(), NODES, seed=4) as grid:
        addresses = [grid.node_id_of(node) for node in range(NODES)]
    counts = []
    for number, seen in enumerate(expected, start=1):
        here.step(number)
        assert here.model.tobytes() == seen.model, number
        assert {a.node: [a.frames["values"]] for a in here.answers if a.frames} == seen.frames, number
        report = strategy.reports[number]
        said, mine = report.section(Quietness), here.told["round"]
        assert {addresses[node] for node in mine["quiet"]} == {*said.quiet}, number
        assert {addresses[node] for node in mine["due"]} == {*said.due}, number
        assert mine["queried"] == said.queried, number
        assert report.used == len(seen.frames)
        counts.append([len(said.quiet), len(said.due)])
    quiet, due = np.sum(counts, axis=0)
    assert quiet > 12
    assert due > 2


@pytest.mark.parametrize("query", [True, False])
def test_mass_stays_while_a_node_is_quiet(query: bool) -> None:
    """Made = delivered + residual, with losses and crashes between; nobody is quiet for longer than allowed."""
    made, delivered, alone = 0.0, 0.0, {"weights": 1.0}
    here = local(ConditionalRounds(SPARSE, max_skip=2, query=query))
    here.weight = lambda node: alone["weights"]

    def train(number: int, node: int, start: Vector) -> Vector:
        nonlocal made
        found = trained(number, node, start)
        made = made + (found - start).astype(np.float64)
        return found

    here.train, here.fault = train, lambda number, node, exchange: "lost" if (number + node) % 5 == 4 else ""
    skipped, longest = dict.fromkeys(range(NODES), 0), 0
    for number in range(1, 25):
        before = here.model.astype(np.float64)
        step = here.step(number)
        used = 0 if step is None else len(step.consumed)
        delivered = delivered + (here.model.astype(np.float64) - before) * used
        owed = sum(here.system.residual(here.settled(node), LAYOUT).astype(np.float64) for node in here.clients)
        assert np.abs(delivered + owed - made).max() <= 1e-2
        quiet = here.told["round"]["quiet"]
        skipped = {node: skipped[node] + 1 if node in quiet else 0 for node in skipped}
        longest = max(longest, *skipped.values())
    assert longest == 2


def test_drift_below_a_node_makes_it_speak_until_losses_have_settled_again() -> None:
    here = local(ConditionalRounds(SPARSE, max_skip=100), Still)
    window = Upload(7, np.zeros((1, 1), np.float32), np.zeros(0, np.int64), None)
    said = []
    for number in range(1, 13):
        if number == 7:
            here.data[1].came[5] = window
        here.step(number)
        said.append([a.node for a in here.answers if a.frames])
    everybody = [*range(NODES)]
    # Two losses that are alike, after each of which a training has not helped.
    assert said[5] == []
    assert said[6] == [1]
    assert said[:3] == [everybody] * 3
    assert said[-1] == []
    # Known as used before it is dropped, and absorbed once.
    assert here.data[1].absorbed == [7]
    assert here.data[1].came == {}
    assert here.data[1].deployed[0] == 1
    assert len(here.data[1].deployed) == len(here.data[0].deployed) + 1


def test_windows_of_a_round_that_failed_are_taken_again() -> None:
    """The app breaks after they were absorbed: they are still there, and so is the node's reason to speak."""
    here = local(ConditionalRounds(SPARSE, max_skip=100), Still, fault=lambda n, node, x: "crash" * ((n, x) == (7, 2)))
    for number in range(1, 9):
        if number == 7:
            here.data[1].came[5] = Upload(7, np.zeros((1, 1), np.float32), np.zeros(0, np.int64), None)
        step = here.step(number)
        assert (step is None) == (number in (5, 6, 7))
    assert here.data[1].absorbed == [7, 7]


def test_a_hello_needs_no_loss_and_leaves_everything() -> None:
    class Never(Watched):
        def loss(self, me: Me, update: Update | None = None) -> float:
            raise AssertionError("a hello needs no loss")

    system, memory = ConditionalRounds(SPARSE), {DECIDES: settled().to_array()}
    me = Me(0, 3, 0, Layout(()), lambda: pytest.fail("a model"), lambda *_: pytest.fail("trained"), Never())
    for held, quiet in (({}, False), (memory, True)):
        kept, answer = system.client(held, Ask(0, HELLO), me)
        assert kept is held
        assert answer == Answer(0, say=Status(quiet=quiet))
    me.data.came[4] = Upload(0, np.zeros((1, 1), np.float32), np.zeros(0, np.int64), None)
    assert system.client(memory, Ask(0, HELLO), me)[1].say == Status(quiet=False)


def settled(settings: ScheduleSettings = SETTLED) -> Decision:
    decision = Decision(settings)
    for _ in range(5):
        decision.scheduler.note(1.0)
        decision.scheduler.tried(1.0, 1.0)
    assert decision.scheduler.stable
    return decision


def test_what_a_node_decides_by_survives_as_bytes_and_is_of_its_settings() -> None:
    held = settled()
    held.round, held.used = 9, [4, 6]
    again = Decision.of({DECIDES: held.to_array()}, SETTLED)
    assert again.state_dict() == held.state_dict()
    assert not again.anew
    other = Decision.of({DECIDES: held.to_array()}, ScheduleSettings())
    assert other.anew
    assert other.state_dict() == Decision(ScheduleSettings()).state_dict()
    for damage in (b"", b"{", b"[1]", b'{"round": 3}'):
        with pytest.raises(FedcompError):
            Decision.of({DECIDES: np.frombuffer(damage, np.uint8)}, SETTLED)


def test_other_settings_are_noted_and_count_from_that_round_on() -> None:
    notes: list[str] = []
    now = Now(4, (0,), LAYOUT, lambda: np.zeros(LAYOUT.size, np.float32), note=notes.append)
    system = ConditionalRounds(SPARSE)
    me = Me(0, 4, 0, LAYOUT, lambda: now.model, lambda *_: Update(now.model + 1.0, LAYOUT), Still(ScheduleSettings()))
    memory = {**system.start(LAYOUT), DECIDES: settled().to_array()}
    rounds = system.round(now)
    (hello,) = next(rounds)
    (ask,) = rounds.send([system.client(memory, hello, me)[1]])
    memory, answer = system.client(memory, ask, me)
    with pytest.raises(StopIteration):
        rounds.send([answer._replace(weight=1.0)])
    assert len(notes) == 1
    assert "node 0 decides by other settings" in notes[0]
    assert not Decision.of(memory, ScheduleSettings()).anew


def test_a_node_that_must_send_and_does_not_is_refused() -> None:
    refused: dict[int, str] = {}
    now = Now(2, (0, 1), LAYOUT, lambda: np.zeros(LAYOUT.size, np.float32), refuse=refused.__setitem__)
    now.state["skipped"] = {"0": 10}
    rounds = ConditionalRounds(SPARSE, query=False).round(now)
    assert [ask.say for ask in next(rounds)] == [Offer(must=True), Offer()]
    with pytest.raises(StopIteration) as end:
        rounds.send([Answer(0, say=Status(quiet=True)), Answer(1, say=Status(quiet=True))])
    assert end.value.value is None
    assert refused == {0: "it was asked to send, and has nothing to send"}
    assert now.told["round"] == {"quiet": [1], "queried": 0, "due": [0], "unaware": []}
    assert now.state["skipped"] == {"0": 11, "1": 1}


@pytest.mark.parametrize("query", [True, False])
def test_a_node_that_is_lost_when_it_must_send_must_send_again(query: bool) -> None:
    """Without that a node whose link fails in the wrong rounds would never send."""
    here = local(ConditionalRounds(SPARSE, max_skip=2, query=query), Still)
    due: list[int] = []

    def fault(number: int, node: int, exchange: int) -> str:
        # Lost once, as soon as it is due.
        if node == 0 and here.state["skipped"].get("0", 0) >= 2 and number not in due:
            due.append(number)
        return "silent" if node == 0 and due == [number] else ""

    used = []
    here.step(1)
    here.fault = fault
    for number in range(2, 12):
        step = here.step(number)
        used += [number] if step is not None and 0 in step.consumed else []
    first = due[0]
    assert first not in used
    assert first + 1 in used


@pytest.mark.parametrize("query", [True, False])
def test_nodes_to_which_nothing_is_brought_train_in_every_round(query: bool) -> None:
    here = local(ConditionalRounds(SPARSE, query=query), Still, data={0: Still()})
    for number in range(1, 8):
        step = here.step(number)
        assert step is not None
        assert set(step.consumed) == ({1, 2, 3} if number > 4 - (not query) else {*range(NODES)})
        assert here.told["round"]["unaware"] == [1, 2, 3]


def test_an_ask_without_an_offer_and_a_damaged_memory_are_refused() -> None:
    me = Me(0, 3, 0, LAYOUT, lambda: pytest.fail("a model"), lambda *_: pytest.fail("trained"), Still())
    with pytest.raises(ValueError, match="does not say whether"):
        ConditionalRounds(SPARSE).client({}, Ask(0), me)
    with pytest.raises(StateError, match="damaged"):
        ConditionalRounds(SPARSE).client({DECIDES: np.zeros(3, np.uint8)}, Ask(0, say=Offer()), me)


class Falling(Watched):
    """A node that has something to send in every round."""

    def loss(self, me: Me, update: Update | None = None) -> float:
        return 2.0**-me.number


@pytest.mark.parametrize("watch", [None, Falling()], ids=["unaware", "aware"])
def test_what_a_node_sends_over_a_slow_link_is_what_the_pair_sends(watch: Falling | None) -> None:
    codec, layout = Auto(seconds=1.0), Layout.flat(20_000)
    made = Key(0, "update").generator().normal(size=layout.size).astype(np.float32)
    me = Me(0, 3, 0, layout, lambda: made, lambda *_: Update(made, layout), watch, uplink=lambda: 1000.0)
    frames = [
        system.client(system.start(layout), Ask(0, say=Offer(must=True)), me)[1].frames["values"]
        for system in (Pair(codec), ConditionalRounds(codec))
    ]
    assert frames[0] == frames[1]
    assert len(frames[0]) < 1200 < len(codec.encode(Update(made, layout), {}, me.key)[0])
