"""Graphs of several owners: rows as if everybody had all, what fetching takes, and owners that are away or lie."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from graph_toys import CLASSES, toy_features, toy_parts

from fedcomp.codecs import ErrorFeedback, Identity, TopK
from fedcomp.errors import ConfigError, FedcompError, StateError
from fedcomp.graphs.base import GraphPart, MissingRows
from fedcomp.graphs.ids import decode_ids, encode_ids, encode_norms
from fedcomp.graphs.rowcodecs import get_row_codec
from fedcomp.graphs.settings import RoundSettings, RowSettings, SamplerSettings
from fedcomp.graphs.structure_rows import encode_structure
from fedcomp.layout import Layout, Vector
from fedcomp.local import Local, Reply
from fedcomp.program import Answer, Ask, Me, Now
from fedcomp.systems.graphs.conversation import Conversation
from fedcomp.systems.graphs.kept import Kept, NodeValues, hidden_of, remembered
from fedcomp.systems.graphs.owner import Steps, planned
from fedcomp.systems.graphs.system import Graphs
from fedcomp.systems.graphs.words import Fetch, Needs, Owner, Plan, Planned, Refused, Turn, Who, by_part

NODES, PARTS, FEATURES, SEED = 40, 4, 6, 3
LAYOUT = Layout.flat(FEATURES * CLASSES)
EXACT = RowSettings(codec="dense-f64")
FEW = SamplerSettings(n=12)
FULL = SamplerSettings(sampler="full")
MEASURED = SamplerSettings(n=12, mode="measured")


class Node:
    """An owner that fits a linear model by least squares on what two hops bring."""

    def __init__(self, part: GraphPart) -> None:
        self.part = part
        self.steps: Steps | None = None
        self.seen: Sequence[NodeValues] = ()

    def load(self, steps: Steps) -> None:
        self.steps = steps
        hidden = [NodeValues(layer.columns, np.ones(len(layer.columns))) for layer in steps.plans[-1].layers[1:]]
        self.seen = hidden if steps.measures else ()

    def features(self, ids: Any) -> Any:
        assert self.steps is not None
        table = dict(zip(self.part.ids.tolist(), self.part.features, strict=True))
        for held, rows in self.steps.rows:
            table |= dict(zip(held.tolist(), rows, strict=True))
        return np.array([table[i] for i in ids.tolist()]).reshape(len(ids), FEATURES)

    def train(self, model: Vector) -> Vector:
        assert self.steps is not None
        weight = model.reshape(FEATURES, CLASSES).astype(np.float64)
        for plan in self.steps.plans:
            values = self.features(plan.inputs)
            for layer in plan.layers:
                dense = np.zeros((len(layer.rows), len(layer.columns)))
                dense[np.repeat(np.arange(len(layer.rows)), np.diff(layer.indptr)), layer.positions] = layer.values
                values = dense @ values
            wanted = np.eye(CLASSES)[self.part.labels[self.part.positions(plan.batch)]]
            weight = weight - 0.1 * values.T @ (values @ weight - wanted) / len(wanted)
        return weight.astype(np.float32).reshape(-1)


class Everything(Node):
    """An owner that looks all rows up in the whole graph's."""

    def features(self, ids: Any) -> Any:
        return toy_features(NODES, FEATURES, SEED)[ids]


@dataclass
class Meddled(Local):
    """A driver in which answers are altered: ``meddle(ask, answer)`` returns the answer that arrives."""

    meddle: Callable[[Ask, Answer], Answer] = lambda ask, answer: answer

    def _receive(self, client: Any, now: Now, stamped: Any, *, crash: bool) -> Reply | None:
        reply = super()._receive(client, now, stamped, crash=crash)
        return None if reply is None else reply._replace(answer=self.meddle(stamped.ask, reply.answer))


def local(system: Graphs, kind: type[Node] = Node, structure: str = "full", **options: Any) -> Meddled:
    parts = toy_parts(NODES, PARTS, seed=SEED, features=FEATURES, structure=structure)
    nodes = {part.index: kind(part) for part in parts}
    start = np.zeros(LAYOUT.size, np.float32)
    given = {"data": nodes, "seed": SEED, **options}
    return Meddled(system, LAYOUT, start, lambda t, n, at: nodes[n].train(at), lambda n: 1.0 + n, PARTS, **given)


def of(driver: Local) -> Conversation:
    """Return the last turn."""
    found: Conversation = driver.told["graph"]
    return found


def rows(driver: Local, rounds: int, first: int = 1) -> list[int]:
    """Run rounds; return how many feature rows each of them fetched."""
    found = []
    for number in range(first, first + rounds):
        driver.step(number)
        found.append(of(driver).traffic.rows_fetched)
    return found


def bits(driver: Local) -> bytes:
    return driver.model.tobytes()


@pytest.mark.parametrize("codec", [Identity(), ErrorFeedback(TopK(0.25))], ids=["whole", "feedback"])
@pytest.mark.parametrize("structure", ["full", "halo"])
@pytest.mark.parametrize("sampler", [FULL, FEW, SamplerSettings(sampler="node", fanout=2)], ids=["full", "few", "node"])
def test_a_run_is_that_of_nodes_that_have_all_rows(sampler: SamplerSettings, structure: str, codec: Any) -> None:
    system = Graphs(codec, sampler, EXACT, RoundSettings(2, 5), structure)
    one, other = local(system, structure=structure), local(system, Everything, structure)
    assert min(rows(one, 4)) > 0
    rows(other, 4)
    assert bits(one) == bits(other)
    assert one.model.any()


def test_what_is_known_of_the_edges_changes_no_plan() -> None:
    full, halo = (
        local(Graphs(sampler=FEW, rows=EXACT)),
        local(Graphs(sampler=FEW, rows=EXACT, structure="halo"), structure="halo"),
    )
    assert rows(full, 4) == rows(halo, 4)
    assert bits(full) == bits(halo)
    assert of(halo).traffic.structure_bytes > 0 == of(full).traffic.structure_bytes


@pytest.mark.parametrize("shared", [False, True])
def test_a_cached_row_is_never_asked_for_again_and_changes_no_result(shared: bool) -> None:
    bare = local(Graphs(sampler=FEW, rows=EXACT))
    cached = local(Graphs(sampler=FEW, rows=replace(EXACT, cache="all", dedupe=shared)))
    fetched, once = sum(rows(bare, 8)), sum(rows(cached, 8))
    assert bits(bare) == bits(cached)
    remote = sum(NODES - len(node.part.ids) for node in cached.data.values())
    assert once < fetched
    assert once <= remote
    small = local(Graphs(sampler=FEW, rows=replace(EXACT, cache="lru", cache_bytes=200)))
    assert once < sum(rows(small, 8)) < fetched
    assert bits(small) == bits(bare)


@pytest.mark.parametrize("sampler", [FEW, MEASURED], ids=["few", "measured"])
@pytest.mark.parametrize("structure", ["full", "halo"])
def test_bytes_are_those_of_the_frames(sampler: SamplerSettings, structure: str) -> None:
    driver, counted, updates = (
        local(Graphs(sampler=sampler, rows=EXACT, structure=structure), structure=structure),
        0,
        0,
    )
    for number in range(1, 5):
        driver.step(number)
        traffic = of(driver).traffic
        counted += traffic.feature_bytes_link + traffic.id_bytes + traffic.setup_bytes + traffic.structure_bytes
        updates += sum(len(answer.frames.get("values", b"")) for answer in driver.answers)
        # Rows cross two links.
        assert traffic.feature_bytes_link == 2 * traffic.feature_bytes_logical
        assert sum(traffic.rows_sent.values()) == sum(traffic.rows_received.values()) == traffic.rows_fetched
    assert driver.bytes_up + driver.bytes_down == counted + updates


def test_a_row_that_several_want_is_sent_once() -> None:
    each = local(Graphs(sampler=FULL, rows=EXACT))
    once = local(Graphs(sampler=FULL, rows=replace(EXACT, dedupe=True)))
    assert rows(once, 3)[0] <= NODES < rows(each, 3)[0]
    assert bits(once) == bits(each)


# Owners that are away, or lie.


def test_others_go_on_without_an_owner_and_it_comes_back() -> None:
    driver = local(Graphs(sampler=FULL, rows=EXACT), fault=lambda r, n, x: "silent" if n == 2 and 2 <= r < 5 else "")
    trips = []
    for number in range(1, 7):
        step = driver.step(number)
        assert step is not None
        away = number in (2, 3, 4)
        assert step.consumed == ((0, 1, 3) if away else (0, 1, 2, 3))
        assert sorted(of(driver).absent) == sorted(of(driver).lost) == ([2] if away else [])
        assert (of(driver).traffic.lost_mass > 0) == away
        trips.append(of(driver).traffic.trips)
        # Nobody is asked for rows of an owner that is known to be away.
        assert of(driver).traffic.replans <= (3 if number == 2 else 0)
    # Once a round somebody is waited for in vain: at its plan, then when it is asked whether it is there.
    assert trips == [4, 4, 4, 4, 4, 3], trips


def test_rows_of_an_owner_that_is_away_are_used_where_they_are_held() -> None:
    system = Graphs(sampler=FULL, rows=replace(EXACT, cache="all"), rounds=RoundSettings(batch_size=0))
    driver = local(system, fault=lambda r, n, x: "silent" if n == 2 and r > 1 else "")
    driver.step(1)
    driver.step(2)
    assert sorted(of(driver).absent) == [2]
    assert of(driver).traffic.lost_mass == 0.0


def test_an_evaluation_does_without_whom_the_training_missed() -> None:
    asked: list[int] = []
    driver = local(
        Graphs(sampler=FULL, rows=EXACT), fault=lambda r, n, x: asked.append(n) or "silent" if n == 2 and r == 2 else ""
    )
    for number in (1, 2):
        driver.step(number)
        before = len(asked)
        answers = driver.evaluate(number)
        assert len(asked) == before
    assert sorted({answer.node for answer in answers}) == [0, 1, 3]
    assert sorted(of(driver).absent) == [2]


LIAR = 2


def each(kind: str, make: Callable[[Any, bytes], bytes]) -> Callable[[Ask, Answer], Answer]:
    """Return what alters all frames that the liar hands out; ``make`` is given the ids that were asked for, and one."""

    def change(ask: Ask, answer: Answer) -> Answer:
        asked = by_part(ask.frames, PARTS, "ids")["ids"]
        frames = by_part(answer.frames, PARTS, kind)[kind]
        return answer._replace(frames={f"{kind}/{p}": make(decode_ids(asked[p]), data) for p, data in frames.items()})

    return change


def more(name: str) -> Callable[[Ask, Answer], Answer]:
    return lambda ask, answer: answer._replace(frames={**answer.frames, name: b"x"})


def flipped(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 16]) + data[-8:]


def infinite(ids: Any, data: bytes) -> bytes:
    """Return a frame with a good checksum around a value that is not finite."""
    broken = data[:-12] + np.array([np.inf], "<f8").tobytes()
    return broken + zlib.crc32(broken).to_bytes(4, "little")


def ones(ids: Any, width: int = FEATURES, codec: str = "dense-f64") -> bytes:
    return get_row_codec(codec).encode(ids, np.ones((len(ids), width)))


WRONG_ROWS: dict[str, tuple[Callable[[Ask, Answer], Answer], str]] = {
    "damaged": (each("rows", lambda ids, data: flipped(data)), "ChecksumMismatch"),
    "not finite": (each("rows", infinite), "NonFinite"),
    "too large": (
        each("rows", lambda ids, _: get_row_codec("dense-f64").encode(ids, np.full((len(ids), FEATURES), 1e300))),
        "too large for float32",
    ),
    "nothing": (each("rows", lambda ids, data: b""), "Truncated"),
    "ids for rows": (each("rows", lambda ids, data: encode_ids(ids)), "expected rows"),
    "other nodes": (each("rows", lambda ids, _: ones(ids + 1)), "were asked for"),
    "fewer nodes": (each("rows", lambda ids, _: ones(ids[:-1])), "were asked for"),
    "more nodes": (each("rows", lambda ids, _: ones(np.arange(len(ids) + 1))), "LimitExceeded"),
    "another width": (each("rows", lambda ids, _: ones(ids, 99)), "SchemaMismatch"),
    "another codec": (each("rows", lambda ids, _: ones(ids, codec="int8")), "UnsupportedCodec"),
    "no frames": (lambda ask, answer: answer._replace(frames={}), "expected"),
    "one more": (more("rows/2"), "expected"),
    "another kind": (more("norms/0"), "expected were rows"),
    "not a part": (more("rows/x"), "not a number"),
    "no such part": (more("rows/4"), "there are 4 parts"),
}


@pytest.mark.parametrize(("change", "said"), WRONG_ROWS.values(), ids=WRONG_ROWS)
def test_an_owner_with_wrong_rows_is_done_without_for_that_round_and_trains(change: Any, said: str) -> None:
    driver = local(Graphs(sampler=FULL, rows=EXACT))
    for number in range(1, 4):
        # What is wrong is wrong once.
        driver.meddle = lambda ask, answer, now=number: (
            change(ask, answer) if now == 2 and answer.node == LIAR and isinstance(ask.say, Fetch) else answer
        )
        assert driver.step(number).consumed == (0, 1, 2, 3)
        assert sorted(of(driver).absent) == ([LIAR] if number == 2 else [])
        assert not of(driver).lost
        assert (LIAR in of(driver).traffic.rows_sent) == (number != 2)
        assert of(driver).traffic.rows_received[LIAR] > 0
        assert (of(driver).traffic.lost_mass > 0) == (number == 2)
        (reason,) = driver.refused[number] or [""]
        assert said in reason or number != 2


def other_structure(ids: Any, data: bytes) -> bytes:
    structure = toy_parts(NODES, PARTS, seed=SEED)[0].structure
    found = structure.rows(ids[:-1])
    return encode_structure(found, structure.owner_of(found.columns))


@pytest.mark.parametrize(
    ("kind", "make", "said"),
    [
        ("structure", lambda ids, data: flipped(data), "ChecksumMismatch"),
        ("structure", other_structure, "were asked for"),
        ("norms", lambda ids, data: encode_norms(ids[:-1], np.ones(len(ids) - 1)), "were asked for"),
    ],
)
def test_norms_and_rows_of_the_adjacency_are_looked_at_too(kind: str, make: Any, said: str) -> None:
    structure = "halo" if kind == "structure" else "full"
    sampler = FULL if kind == "structure" else MEASURED
    driver = local(Graphs(sampler=sampler, rows=EXACT, structure=structure), structure=structure)
    change = each(kind, make)
    wrong = [True]
    driver.meddle = lambda ask, answer: (
        change(ask, answer) if wrong[0] and answer.node == LIAR and getattr(ask.say, "kind", "") == kind else answer
    )
    assert driver.step(1).consumed == (0, 1, 2, 3)
    assert said in of(driver).absent[LIAR]
    # Norms that were lacking are asked for again.
    wrong[0] = False
    driver.step(2)
    assert not of(driver).absent
    assert (of(driver).traffic.setup_bytes > 0) == (kind == "norms")


def test_an_owner_that_refuses_an_honest_client_is_absent_for_it_alone() -> None:
    driver = local(Graphs(sampler=FULL, rows=EXACT))
    driver.step(1)
    before = of(driver).traffic

    def refuse(ask: Ask, answer: Answer) -> Answer:
        if answer.node != LIAR or not isinstance(ask.say, Fetch):
            return answer
        rest = {name: data for name, data in answer.frames.items() if name != "rows/0"}
        return answer._replace(say=Refused((0,), "I do not like it"), frames=rest)

    driver.meddle = refuse
    assert driver.step(2).consumed == (0, 1, 2, 3)
    assert not of(driver).absent
    after = of(driver).traffic
    assert after.replans == 1
    assert after.rows_received[0] < before.rows_received[0]
    assert after.rows_received[1] == before.rows_received[1]


WISHES = {
    "rows of its own": {"ids/2": encode_ids(np.array([20]))},
    "rows of no part": {"ids/9": encode_ids(np.array([1]))},
    "rows of a part 01": {"ids/01": encode_ids(np.array([1]))},
    "no list": {"ids/1": b"\x00\x01"},
    "more than there are": {"ids/1": encode_ids(np.arange(30))},
    "other frames": {"rows/1": encode_ids(np.array([1]))},
}


def wishing(wish: dict[str, bytes]) -> Callable[[Ask, Answer], Answer]:
    """Return what has node 2 ask for other rows than it plans with."""
    return lambda ask, answer: answer._replace(frames=wish) if answer.node == 2 and type(ask.say) is Plan else answer


@pytest.mark.parametrize("wish", WISHES.values(), ids=WISHES)
def test_an_impossible_plan_costs_its_client_the_round_alone(wish: dict[str, bytes]) -> None:
    driver = local(Graphs(sampler=FULL, rows=EXACT), meddle=wishing(wish))
    assert driver.step(1).consumed == (0, 1, 3)
    # It hands out its own rows.
    assert not of(driver).absent
    assert sorted(of(driver).lost) == [2]
    assert of(driver).traffic.rows_sent[2] > 0


@pytest.mark.parametrize("dedupe", [False, True])
def test_nodes_that_their_owner_has_not_cost_the_others_nothing(dedupe: bool) -> None:
    """Whom an owner refuses does without it, and is given up where it asks for them again."""
    # Owner 1 is asked for node 0, which is part 0's; whose list it is is found out where one stands for many.
    driver = local(Graphs(sampler=FULL, rows=replace(EXACT, dedupe=dedupe)))
    driver.step(1)
    before = of(driver).traffic
    driver.meddle = wishing({"ids/1": encode_ids(np.array([0]))})
    assert driver.step(2).consumed == (0, 1, 3)
    assert not of(driver).absent
    for node in (0, 1, 3):
        assert of(driver).traffic.rows_received[node] == before.rows_received[node] > 0


@pytest.mark.parametrize("kind", ["structure", "norms"])
def test_who_asks_for_ever_is_given_up(kind: str) -> None:
    class Insatiable(Graphs):
        def client(self, memory: Any, ask: Ask, me: Me) -> Any:
            if me.node != 2 or type(ask.say) is not Plan:
                return super().client(memory, ask, me)
            return memory, Answer(2, say=Needs(kind), frames={"ids/1": encode_ids(np.array([10]))})

    driver = local(Insatiable(sampler=MEASURED, rows=EXACT, structure="halo"), structure="halo")
    assert driver.step(1).consumed == (0, 1, 3)
    assert "times and has none" in of(driver).lost[2]


# Who owns what.


def other(**changes: Any) -> Callable[[Ask, Answer], Answer]:
    """Return what has owners, by node, say something else of themselves."""

    def meddle(ask: Ask, answer: Answer) -> Answer:
        if not isinstance(ask.say, Who) or answer.node not in changes["nodes"]:
            return answer
        assert isinstance(answer.say, Owner)
        return answer._replace(say=replace(answer.say, **{k: v for k, v in changes.items() if k != "nodes"}))

    return meddle


@pytest.mark.parametrize("change", [{"digest": "another"}, {"features": 7}, {"index": 1}])
def test_one_that_holds_a_part_of_another_graph_is_left_out(change: dict[str, Any]) -> None:
    """Also in the first round: what most say is the run's."""
    driver = local(Graphs(sampler=FULL, rows=EXACT), meddle=other(nodes=(2,), **change))
    for number in (1, 2):
        assert driver.step(number).consumed == (0, 1, 3)
        assert sorted(of(driver).absent) == [2]
    assert len(driver.refused[1]) == 1
    # It is not asked again.
    assert not driver.refused[2]


def test_nodes_of_which_no_most_agree_are_refused() -> None:
    driver = local(Graphs(sampler=FULL, rows=EXACT), meddle=other(nodes=(2, 3), digest="another"))
    with pytest.raises(ConfigError, match=r"the nodes do not hold parts of one graph: parts \[0, 1\] are of"):
        driver.step(1)


def test_nodes_that_know_other_edges_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"know structure 'full'.*set structure='full'"):
        local(Graphs(sampler=FULL, rows=EXACT, structure="halo")).step(1)


# What is kept.


@pytest.mark.parametrize("structure", ["full", "halo"])
def test_norms_are_fetched_once_and_again_by_those_alone_that_have_lost_them(structure: str) -> None:
    driver = local(Graphs(sampler=MEASURED, rows=EXACT, structure=structure), structure=structure)
    spent = []
    for number in range(1, 5):
        if number == 3:
            # As by a new device in its place.
            driver.clients.pop(2)
            driver.kept.pop(2)
        driver.step(number)
        spent.append(of(driver).traffic.setup_bytes)
    assert spent[0] > spent[2] > 0 == spent[1] == spent[3]


def test_measured_norms_are_those_of_the_rows() -> None:
    driver = local(Graphs(sampler=MEASURED, rows=EXACT))
    driver.step(1)
    norms = np.linalg.norm(toy_features(NODES, FEATURES, SEED), axis=1)
    for node, owner in driver.data.items():
        kept = Kept.of(driver.kept[node], owner.part, EXACT)
        assert len(kept.norms.ids)
        np.testing.assert_allclose(kept.norms.values, norms[kept.norms.ids], rtol=1e-6)
    # Of hidden layers a client knows what it has seen, from the next turn on.
    memory = driver.clients[0].memory
    assert hidden_of(memory, 2) == ()
    assert len(hidden_of(memory, 3)) == 1


def test_a_client_that_has_forgotten_everything_plans_without_it() -> None:
    system = Graphs(sampler=FEW, rows=replace(EXACT, cache="all"))
    whole, driver = local(system), local(system)
    rows(whole, 6)
    rows(driver, 3)
    driver.kept.clear()
    assert sum(rows(driver, 3, 4)) > 0
    assert bits(driver) == bits(whole)


def test_rows_that_were_lost_between_plan_and_training_cost_one_round() -> None:
    driver = local(Graphs(sampler=FULL, rows=replace(EXACT, cache="all")))
    driver.step(1)

    def meddle(ask: Ask, answer: Answer) -> Answer:
        if answer.node == 2 and type(ask.say) is Plan and driver.kept:
            driver.kept.pop(2, None)
        return answer

    driver.meddle = meddle
    assert driver.step(2).consumed == (0, 1, 3)
    assert any("let this node plan again" in reason for reason in driver.refused[2])
    driver.meddle = lambda ask, answer: answer
    assert driver.step(3).consumed == (0, 1, 2, 3)  # type: ignore[union-attr]


def test_noise_is_the_owners_own_and_the_same_each_time() -> None:
    noisy = Graphs(sampler=FULL, rows=replace(EXACT, noise=0.1))
    one, two = local(noisy), local(noisy)
    sent: list[dict[str, bytes]] = []

    def note(ask: Ask, answer: Answer) -> Answer:
        if isinstance(ask.say, Fetch) and answer.node == 1:
            sent.append(dict(answer.frames))
        return answer

    one.meddle = note
    rows(one, 2)
    two.meddle = note
    rows(two, 1)
    assert sent[0] == sent[1] != sent[2]


def test_what_is_damaged_is_not_gone_on_with() -> None:
    driver = local(Graphs(sampler=MEASURED, rows=replace(EXACT, cache="all")))
    driver.step(1)
    part = driver.data[1].part
    held = driver.kept[1]
    for name in ("norms", "cache/ids", "cache/rows"):
        with pytest.raises(StateError, match="restart the node"):
            Kept.of({**held, name: held[name][:-1]}, part, replace(EXACT, cache="all"))
    # Of another graph it is no damage: it begins anew.
    other_part = replace(part, digest="another")
    assert not len(Kept.of(held, other_part, replace(EXACT, cache="all")).norms.ids)
    assert not len(Kept.of(held, part, replace(EXACT, cache="all", noise=1.0)).cache)


def test_norms_of_hidden_layers_join_the_rest_with_another_turn() -> None:
    seen = NodeValues(np.array([1, 2]), np.array([1.0, 2.0]))
    memory: Any = remembered((), [seen], 4)
    assert hidden_of(memory, 4) == ()
    (table,) = hidden_of(memory, 5)
    assert table.values.tolist() == [1.0, 2.0]
    later: Any = remembered((table,), [NodeValues(np.array([2, 3]), np.array([5.0, 6.0]))], 6)
    assert hidden_of(later, 6)[0].values.tolist() == [1.0, 2.0]
    assert hidden_of(later, 8)[0].values.tolist() == [1.0, 5.0, 6.0]


# A client half by itself.


def me_of(part: GraphPart) -> Me:
    return Me(
        part.index, 1, SEED, LAYOUT, lambda: pytest.fail("no model"), lambda *_: pytest.fail("trained"), Node(part)
    )


def test_an_ask_with_other_rows_than_the_plan_uses_is_refused() -> None:
    part, system = toy_parts(NODES, PARTS, seed=SEED)[0], Graphs(sampler=FULL, rows=EXACT)
    me = me_of(part)
    wants = planned(system, {}, Ask(0, "query"), me, Plan("train")).frames
    assert wants
    with pytest.raises(MissingRows, match="rows of other owners that the plan uses are neither"):
        system.client({}, Ask(0, say=Turn("train")), me)
    some = get_row_codec("dense-f64").encode(np.array([11]), np.ones((1, FEATURES)))
    for frames in ({"rows/0": some}, {"rows/1": some[:-1]}, {"ids/1": some}, {"rows/1": some * 2}):
        with pytest.raises(FedcompError):
            system.client({}, Ask(0, say=Turn("train"), frames=frames), me)
    for ask in (Ask(0, "query"), Ask(0, "query", Planned())):
        with pytest.raises(FedcompError, match="asked for nothing"):
            system.client({}, ask, me)


def test_who_brings_no_part_is_told_what_to_wrap() -> None:
    with pytest.raises(FedcompError, match=r"graph_owner\(\.\.\.\)"):
        Graphs().client({}, Ask(0, "query", Who()), replace(me_of(toy_parts()[0]), data=None))


def test_an_owner_gives_its_own_rows_and_refuses_who_asks_for_others() -> None:
    part, system = toy_parts(NODES, PARTS, seed=SEED)[1], Graphs(rows=EXACT)
    lists = {"ids/0": encode_ids(part.ids[:2]), "ids/2": encode_ids(np.array([0])), "ids/3": b"none"}
    _, answer = system.client({}, Ask(1, "query", Fetch("rows"), lists), me_of(part))
    assert list(answer.frames) == ["rows/0"]
    assert answer.say.requesters == (2, 3)
    assert "ask their owner" in answer.say.reason
    ids, values = get_row_codec("dense-f64").decode(answer.frames["rows/0"], features=FEATURES, dtype=np.float64)
    np.testing.assert_array_equal(ids, part.ids[:2])
    np.testing.assert_array_equal(values, part.features[:2])


@pytest.mark.parametrize("name", ["rows/4", "rows/-1", "rows/1 ", "rows/01", "rows/1/2", "rows", "norms/1"])
def test_a_frame_of_another_kind_or_of_no_part_is_refused(name: str) -> None:
    assert by_part({"rows/3": b"c", "rows/0": b"a"}, 4, "rows") == {"rows": {0: b"a", 3: b"c"}}
    with pytest.raises(FedcompError):
        by_part({name: b""}, 4, "rows")
