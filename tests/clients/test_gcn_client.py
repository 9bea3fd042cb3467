"""The client half of a graph run: asks for the rows it uses, uses the rows it was sent, and remembers in one stroke."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import graph_nodes
import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from graph_nodes import (
    FULL,
    HIDDEN,
    SEED,
    Nodes,
    asking,
    client,
    initial,
    message,
    network,
    node,
    ready,
    teaches,
    values,
)
from graph_toys import toy_adjacency, toy_features, toy_parts
from message_examples import all_damages
from torch.nn.functional import cross_entropy
from toy import with_halves

import fedcomp.clients.gcn
from fedcomp.clients.gcn import graph_owner
from fedcomp.errors import ConfigError, StateError
from fedcomp.flower import gcn, gcn_state
from fedcomp.flower._private import adopt_identity
from fedcomp.flower.gcn import Fetch, Figures, GraphHello, Refused, take_frames
from fedcomp.flower.payload import NODE_RECORD, PayloadError
from fedcomp.graphs.base import GraphError, GraphPart, MissingRows
from fedcomp.graphs.ids import decode_ids, decode_norms, encode_ids
from fedcomp.graphs.layers import GraphConvolutions, whole
from fedcomp.graphs.plan import draw_batch
from fedcomp.graphs.rowcodecs import get_row_codec
from fedcomp.graphs.settings import SamplerSettings
from fedcomp.rng import Key
from fedcomp.tasks.base import EmptyPartition
from fedcomp.wire import WireError

CODEC, CSR = get_row_codec("dense-f64"), get_row_codec("csr")
SOME = SamplerSettings(n=16, mode="fixed", scale=1.0)


@pytest.fixture(autouse=True)
def identity() -> None:
    adopt_identity((1, 1, 1))


def same(a: Message, b: Message) -> bool:
    """Whether two replies are the same model with the same metrics, bit for bit."""
    models_equal = all(np.array_equal(x, values(b)[name]) for name, x in values(a).items())
    return models_equal and dict(a.content["metrics"]) == dict(b.content["metrics"])


def ids_in(frames: dict[int, bytes]) -> dict[int, list[int]]:
    return {owner: decode_ids(frame).tolist() for owner, frame in frames.items()}


def snapshot(context: Context) -> str:
    return repr({name: list(record.items()) for name, record in context.state.items()})


def centrally(index: int, steps: int, batch_size: int, momentum: float, weight_decay: float) -> dict[str, np.ndarray]:
    """Train on the whole graph, every neighbour used, with nothing of the client's code: what it has to come to."""
    parts = toy_parts()
    model = network(parts[0])
    features = torch.from_numpy(toy_features(40, 6, 0))
    operators = whole(toy_adjacency(40, 4, 5.0), 2, torch.float64)
    labels = torch.from_numpy(np.concatenate([part.labels for part in parts]))
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    for step in range(steps):
        batch = draw_batch(parts[index].train, batch_size, Key(SEED, f"gcn/train/{step}/batch", 1, index))
        at = torch.from_numpy(batch)
        gradients = torch.autograd.grad(
            cross_entropy(model(features, operators)[at], labels[at]), list(model.parameters())
        )
        with torch.no_grad():
            for v, p, g in zip(velocity, model.parameters(), gradients, strict=True):
                v.mul_(momentum).add_(g + weight_decay * p)
                p.sub_(0.5 * v)
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["full", "halo"])
@pytest.mark.parametrize(
    "settings", [SamplerSettings(n=40, mode="fixed", scale=4.0), SamplerSettings(sampler="node", fanout=40), FULL]
)
def test_7_06_with_enough_columns_steps_are_those_on_the_whole_graph(settings: Any, structure: str) -> None:
    ask = asking(settings, steps=3, batch_size=5)
    reply = Nodes(toy_parts(structure=structure)).turn(2, ask, lr=0.5, momentum=0.9, weight_decay=0.01)
    for name, wanted in centrally(2, 3, 5, 0.9, 0.01).items():
        np.testing.assert_allclose(values(reply)[name], wanted, rtol=0, atol=1e-10)
    assert reply.content["metrics"]["num-examples"] == 15


def test_7_07_an_owner_of_everything_asks_for_nothing() -> None:
    nodes = Nodes(toy_parts(parts=1))
    ask, wants, reply = nodes.plan(0, asking(SOME, steps=2, batch_size=4))
    assert not wants
    assert Figures.take(reply).remote_inputs == Figures.take(reply).wanted == 0
    assert Figures.take(reply).inputs > 0
    trained = nodes.carry_out(0, ask, {})
    assert trained.content["metrics"]["num-examples"] == 8
    assert [kind for kind, *_ in nodes.log] == [gcn.PLAN_TYPE, gcn.TRAIN_TYPE]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fixed", "measured"])
def test_7_07_a_cached_row_is_never_asked_for_again_and_changes_no_result(mode: str) -> None:
    settings = SamplerSettings(n=16, mode=mode)
    parts = toy_parts()
    forgetful, keeping = Nodes(parts), Nodes(parts)
    asked: dict[str, list[int]] = {"none": [], "all": []}
    for number in (1, 2, 3, 4):
        replies = []
        for nodes, policy in ((forgetful, "none"), (keeping, "all")):
            ask = asking(settings, round=number, steps=2, batch_size=4, cache=policy)
            ask, wants, _ = nodes.plan(1, ask, nodes.norms(1) if number == 1 and mode == "measured" else None)
            asked[policy] += [one for ids in ids_in(wants).values() for one in ids]
            replies.append(nodes.carry_out(1, ask, nodes.rows(1, ask, wants)))
        assert same(*replies)
    assert len(asked["all"]) == len(set(asked["all"]))
    assert set(asked["all"]) == set(asked["none"])
    assert len(asked["none"]) > len(asked["all"])


class Spied(np.ndarray):
    """Rows that tell which of them were read."""

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, np.ndarray):
            self.read += self.ids[at].tolist()
        return np.asarray(self)[at]


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["full", "halo"])
@pytest.mark.parametrize("cache", ["none", "all"])
def test_7_11_the_rows_that_are_read_are_the_rows_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, structure: str, cache: str
) -> None:
    read: list[int] = []
    plain = fedcomp.clients.gcn.row_reader

    def spying(part: GraphPart, ask: gcn.PlanRequest) -> Any:
        def reader(frame: bytes, **options: Any) -> Any:
            ids, rows = plain(part, ask)(frame, **options)
            spied = rows.view(Spied)
            spied.ids, spied.read = ids, read
            return ids, spied

        return reader

    nodes = Nodes(toy_parts(structure=structure))
    for number in (1, 2):
        ask, wants, _ = nodes.plan(0, asking(SOME, round=number, steps=3, batch_size=4, cache=cache))
        rows = nodes.rows(0, ask, wants)
        read.clear()
        with monkeypatch.context() as patched:
            patched.setattr(fedcomp.clients.gcn, "row_reader", spying)
            nodes.carry_out(0, ask, rows)
        asked = ids_in(wants)
        assert asked
        assert set(read) == {one for ids in asked.values() for one in ids}
        assert all(nodes.parts[owner].owned(np.array(ids)).all() for owner, ids in asked.items())


def recoded(frame: bytes, change: Any) -> bytes:
    return CODEC.encode(*change(*CODEC.decode(frame, features=6, dtype=np.float64)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda rows, of: rows.pop(of), MissingRows, "neither in the message nor kept here"),
        (lambda rows, of: rows.update({of: recoded(rows[of], lambda i, r: (i[1:], r[1:]))}), MissingRows, "1 rows"),
        (lambda rows, of: rows.update({of: recoded(rows[of], lambda i, r: (i[:-1], r[:-1]))}), MissingRows, "1 rows"),
        (
            lambda rows, of: rows.update(
                {of: recoded(rows[of], lambda i, r: (np.append(i, 39), np.vstack([r, r[:1]])))}
            ),
            WireError,
            "were agreed on",
        ),
        (
            lambda rows, of: rows.update({of: recoded(rows[of], lambda i, r: (np.append(i[:-1], 39), r))}),
            MissingRows,
            "1 rows",
        ),
        (lambda rows, of: rows.update({1: rows[of], of: rows[1]}), (MissingRows, WireError), "rows|agreed"),
        (lambda rows, of: rows.update({0: rows[of]}), GraphError, r"parts \[0\], of which the plan uses none"),
        (lambda rows, of: rows.update({of: rows[of][:-1]}), WireError, "checksum"),
        (lambda rows, of: rows.update({of: encode_ids([20])}), WireError, "holds ids, expected rows"),
        (lambda rows, of: rows.update({of: CSR.encode([20], np.ones((1, 6)))}), WireError, "expected .dense-f64"),
        (lambda rows, of: rows.update({of: CODEC.encode([20], np.ones((1, 7)))}), WireError, "7 features, expected 6"),
    ],
)
def test_7_11_other_rows_than_the_plan_uses_are_refused_and_change_nothing(change: Any, error: Any, said: str) -> None:
    nodes = Nodes(toy_parts())
    ask, rows = ready(nodes, 0, asking(SamplerSettings(n=20), batch_size=4, cache="all"))
    assert set(rows) == {1, 2, 3}
    state = snapshot(nodes.contexts[0])
    wrong = dict(rows)
    change(wrong, 2)
    with pytest.raises(error, match=said):
        nodes.carry_out(0, ask, wrong)
    assert snapshot(nodes.contexts[0]) == state
    assert nodes.carry_out(0, ask, rows).content["metrics"]["num-examples"] == 4


def test_7_11_missing_rows_are_named() -> None:
    nodes = Nodes(toy_parts())
    ask, wants, _ = nodes.plan(0, asking(FULL))
    with pytest.raises(MissingRows) as missing:
        nodes.carry_out(0, ask, {})
    assert missing.value.ids.tolist() == sorted(one for ids in ids_in(wants).values() for one in ids)


@pytest.mark.parametrize("structure", ["full", "halo"])
def test_what_other_owners_have_reaches_a_client_in_messages_only(structure: str) -> None:
    nodes = Nodes(toy_parts(structure=structure))
    ask, rows = ready(nodes, 0, asking(SamplerSettings(n=20), steps=2, batch_size=4))
    before = nodes.carry_out(0, ask, rows)
    for part in nodes.parts[1:]:
        part.features[:] = np.nan
        part.labels[:] = -1
    assert same(nodes.carry_out(0, ask, rows), before)

    # The bytes that were relayed are what counts, down to one number in one row.
    def nudged(ids: np.ndarray, found: np.ndarray) -> Any:
        found = found.copy()
        found[0, 3] += 0.125
        return ids, found

    assert not same(nodes.carry_out(0, ask, {**rows, 2: recoded(rows[2], nudged)}), before)


def test_a_message_that_arrives_again_makes_the_same_update() -> None:
    nodes = Nodes(toy_parts())
    settings = SamplerSettings(n=8, mode="measured")
    norms = nodes.norms(0)
    for number in (1, 2, 3):
        ask, wants, _ = nodes.plan(0, asking(settings, round=number, steps=2, batch_size=4, cache="all"), norms)
        norms = {}
        rows = nodes.rows(0, ask, wants)
        first = nodes.carry_out(0, ask, rows)
        state = snapshot(nodes.contexts[0])
        assert same(nodes.carry_out(0, ask, rows), first)
        assert snapshot(nodes.contexts[0]) == state
        # A plan that is asked for again is the same plan, too.
        assert nodes.plan(0, replace(ask, hop=0))[1] == wants
    old, of_it = ask, rows
    assert of_it
    nodes.plan(0, asking(settings, round=4, cache="all"))
    with pytest.raises((MissingRows, GraphError)):
        nodes.carry_out(0, old, of_it)


def test_a_client_that_lost_its_cache_says_so_and_recovers_by_planning() -> None:
    nodes, whole_time = Nodes(toy_parts()), Nodes(toy_parts())
    ask = asking(FULL, cache="all")
    for one in (nodes, whole_time):
        one.turn(0, ask)
    ask = replace(ask, round=2)
    planned, wants, _ = nodes.plan(0, ask)
    assert not wants
    nodes.contexts[0] = node(0)
    with pytest.raises(MissingRows):
        nodes.carry_out(0, planned, {})
    assert same(nodes.turn(0, ask), whole_time.turn(0, ask))


def test_a_client_that_lost_the_structure_of_its_plan_says_so() -> None:
    nodes = Nodes(toy_parts(structure="halo"))
    ask, rows = ready(nodes, 0, asking(FULL))
    assert ask.hop == 1
    nodes.contexts[0] = node(0)
    with pytest.raises(MissingRows, match="no longer has the adjacency rows"):
        nodes.carry_out(0, ask, rows)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [SOME, SamplerSettings(n=12, layers=3), SamplerSettings(n=12, favour="halo")])
def test_who_is_sent_the_structure_trains_as_who_always_had_it(settings: SamplerSettings) -> None:
    layers = settings.layers
    replies = []
    for structure in ("full", "halo"):
        parts = toy_parts(structure=structure)
        nodes = Nodes(parts, client(parts, layers=layers))
        replies.append(nodes.turn(3, asking(settings, steps=2, batch_size=5), initial(parts, layers=layers)))
        hops = sum(kind == gcn.PLAN_TYPE for kind, *_ in nodes.log)
        assert hops == 1 if structure == "full" else 1 < hops <= layers
    assert same(*replies)


def test_measured_norms_travel_as_bytes_and_are_those_of_the_rows() -> None:
    nodes = Nodes(toy_parts())
    norms = nodes.norms(1)
    for owner, frame in norms.items():
        ids, found = decode_norms(frame)
        part = nodes.parts[owner]
        np.testing.assert_allclose(found, np.linalg.norm(part.features[part.positions(ids)], axis=1), rtol=1e-6)
    settings = SamplerSettings(n=8, mode="measured")
    ask = asking(settings, batch_size=4)
    with_norms = Figures.take(nodes.plan(1, ask, norms)[2])
    assert with_norms != Figures.take(Nodes(nodes.parts).plan(1, ask)[2])
    # OwnerState, so that the training message need not bring them.
    assert Figures.take(nodes.plan(1, ask)[2]) == with_norms
    with pytest.raises(GraphError, match="norms come from part 3"):
        nodes.plan(1, ask, {3: norms[2]})


def test_norms_of_hidden_layers_are_those_that_training_saw() -> None:
    nodes = Nodes(toy_parts())
    settings = SamplerSettings(n=40, mode="measured", scale=1.0)
    ask, wants, _ = nodes.plan(0, asking(settings))
    nodes.carry_out(0, ask, nodes.rows(0, ask, wants))
    kept = gcn_state.OwnerState.load(
        nodes.contexts[0], replace(ask, round=2), nodes.parts[0], fedcomp.clients.gcn.row_reader(nodes.parts[0], ask)
    )
    (table,) = kept.hidden
    model = network(nodes.parts[0])
    hidden: list[torch.Tensor] = []
    operators = whole(toy_adjacency(40, 4, 5.0), 2, torch.float64)
    model(torch.from_numpy(toy_features(40, 6, 0)), operators, visit=lambda level, h: hidden.append(h.detach()))
    assert hidden[1].shape == (40, HIDDEN)
    np.testing.assert_allclose(table.values, hidden[1].norm(dim=1).numpy()[table.ids], rtol=1e-12)
    # They decide what the next plan favours.
    again = replace(asking(settings, batch_size=4), round=2, sampler=json.dumps(replace(settings, n=6).to_config()))
    fresh = Nodes(nodes.parts)
    assert Figures.take(nodes.plan(0, again)[2]).scale != Figures.take(fresh.plan(0, again)[2]).scale


def test_noise_stays_the_same_from_fetch_to_fetch_and_is_the_owners_own() -> None:
    nodes = Nodes(toy_parts())
    ids = nodes.parts[1].ids[:4]

    def fetched(context: int = 1, noise: float = 0.5, ids: np.ndarray = ids) -> np.ndarray:
        said = Fetch("s", "rows", "dense-f64", noise)
        reply = nodes.tell(context, message(gcn.ROWS_TYPE, said, {"ids": {0: encode_ids(ids)}}))
        return CODEC.decode(take_frames(reply, 4, "rows")["rows"][0], features=6, dtype=np.float64)[1]

    plain = fetched(noise=0.0)
    assert np.array_equal(plain, nodes.parts[1].features[:4])
    assert not nodes.contexts[1].state
    noisy = fetched()
    assert 0.1 < np.std(noisy - plain) < 1.5
    assert np.array_equal(fetched(), noisy)
    assert np.array_equal(fetched(ids=ids[2:]), noisy[2:])
    nodes.contexts[1] = node(1)
    assert not np.array_equal(fetched(), noisy)


def test_an_owner_gives_its_own_rows_and_refuses_who_asks_for_others() -> None:
    nodes = Nodes(toy_parts())
    mine, others = encode_ids(nodes.parts[1].ids[:2]), encode_ids(nodes.parts[2].ids[:2])
    for said, kind in ((Fetch("s", "rows", "csr"), "rows"), (Fetch("s", "structure"), "structure")):
        reply = nodes.tell(1, message(gcn.ROWS_TYPE, said, {"ids": {0: mine, 2: others, 3: b"damaged"}}))
        assert list(take_frames(reply, 4, kind)[kind]) == [0]
        refused = Refused.find(reply)
        assert refused is not None
        assert refused.requesters == (2, 3)
        assert "part 2" in refused.reason
        assert Refused.find(nodes.tell(1, message(gcn.ROWS_TYPE, said, {"ids": {0: mine}}))) is None


def test_a_hello_says_what_an_owner_has() -> None:
    nodes = Nodes(toy_parts(structure="halo"))
    reply = nodes.hello(3)
    part = nodes.parts[3]
    assert GraphHello.take(reply) == GraphHello(part.digest, 3, 4, 40, 10, 8, 2, 6, "halo")
    assert dict(reply.content[NODE_RECORD]) == {"partition-id": 3}
    assert not take_frames(reply, 4)
    assert not nodes.contexts[3].state


class Broken(RuntimeError):
    pass


def breaking(parts: list[GraphPart]) -> ClientApp:
    """Return an app whose learners break at the first loss."""

    def learner(msg: Message, context: Context) -> Any:
        def objective(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            raise Broken("out of memory")

        return replace(teaches(parts)(msg, context), objective=objective)

    return with_halves([graph_owner(lambda msg, context: parts[context.node_config["partition-id"]], learner)])


def test_a_handler_that_fails_leaves_its_state_as_it_was() -> None:
    nodes = Nodes(toy_parts(structure="halo"))
    settings = SamplerSettings(n=20, mode="measured")
    ask, rows = ready(nodes, 0, asking(settings, batch_size=4, cache="all"))
    nodes.carry_out(0, ask, rows)
    ask, rows = ready(nodes, 0, asking(settings, round=2, batch_size=4, cache="all"))
    state = snapshot(nodes.contexts[0])

    working, nodes.app = nodes.app, breaking(nodes.parts)
    for purpose in ("train", "evaluate"):
        with pytest.raises((Broken, MissingRows)):
            nodes.carry_out(0, replace(ask, purpose=purpose), rows if purpose == "train" else {})
        assert snapshot(nodes.contexts[0]) == state
    nodes.app = working
    # A plan that is sent rubbish after what is right.
    later, other = replace(ask, round=3, hop=0), Nodes(nodes.parts)
    needed = take_frames(other.tell(0, message(gcn.PLAN_TYPE, later)), 4, "ids")["ids"]
    structure = other.fetch(0, needed, Fetch("s", "structure"))
    assert 3 in structure
    for sent in ({"structure": {**structure, 3: b"rubbish"}}, {"norms": {1: b"rubbish"}}, {"ids": {1: b""}}):
        with pytest.raises((WireError, PayloadError)):
            nodes.tell(0, message(gcn.PLAN_TYPE, later, sent))
        assert snapshot(nodes.contexts[0]) == state
    assert nodes.carry_out(0, ask, rows).content["metrics"]["num-examples"] == 4


def test_what_the_last_turn_left_behind_stays_until_a_handler_has_done_its_work() -> None:
    nodes = Nodes(toy_parts())
    for purpose in ("train", "evaluate"):
        nodes.turn(0, asking(FULL, cache="all", purpose=purpose))
    state, working, nodes.app = snapshot(nodes.contexts[0]), nodes.app, breaking(nodes.parts)
    # All rows are held: a message needs no plan before it.
    for purpose in ("train", "evaluate"):
        with pytest.raises(Broken):
            nodes.carry_out(0, asking(FULL, round=2, cache="all", purpose=purpose), {})
        assert snapshot(nodes.contexts[0]) == state
    nodes.app = working
    assert same(nodes.carry_out(0, asking(FULL, round=2, cache="all"), {}), Nodes(nodes.parts).turn(0, asking(FULL)))
    assert snapshot(nodes.contexts[0]) != state


def test_adjacency_rows_of_another_owner_or_for_one_who_knows_all_are_refused() -> None:
    halo, full = Nodes(toy_parts(structure="halo")), Nodes(toy_parts())
    ask = asking(FULL)
    wants = take_frames(halo.tell(0, message(gcn.PLAN_TYPE, ask)), 4, "ids")["ids"]
    found = halo.fetch(0, wants, Fetch("s", "structure"))
    with pytest.raises(GraphError, match="come from part 2 for nodes of other owners"):
        halo.tell(0, message(gcn.PLAN_TYPE, ask, {"structure": {2: found[1]}}))
    with pytest.raises(GraphError, match="knows all of them"):
        full.tell(0, message(gcn.PLAN_TYPE, ask, {"structure": found}))


def altered(part: GraphPart, **changes: Any) -> GraphPart:
    return replace(part, memo={}, **changes)


def test_7_14_parts_without_examples_isolated_nodes_and_a_batch_of_one() -> None:
    none = np.zeros(0, np.int64)
    parts = toy_parts(isolated=3)
    lonely = parts[3].ids[-3:]
    parts = [altered(parts[0], train=none), altered(parts[1], test=none), parts[2], altered(parts[3], train=lonely)]
    nodes = Nodes(parts)
    ask, wants, reply = nodes.plan(0, asking(SOME))
    assert not wants
    assert Figures.take(reply).examples == 0
    with pytest.raises(EmptyPartition, match="part 0"):
        nodes.carry_out(0, ask, {})
    empty = dict(nodes.turn(1, asking(FULL, purpose="evaluate")).content["metrics"])
    assert empty == {"loss": 0.0, "accuracy": 0.0, "num-examples": 0}
    one = nodes.turn(2, asking(SOME, batch_size=1, steps=3))
    assert one.content["metrics"]["num-examples"] == 3
    ask, wants, reply = nodes.plan(3, asking(SOME))
    assert not wants
    assert Figures.take(reply).inputs == len(lonely)
    assert np.isfinite(values(nodes.carry_out(3, ask, {}))["layers.0.weight"]).all()


@pytest.mark.parametrize("structure", ["full", "halo"])
def test_7_14_absent_owners_are_done_without_and_their_share_is_told(structure: str) -> None:
    nodes = Nodes(toy_parts(structure=structure))
    ask = asking(FULL, absent=(1, 3))
    ask, wants, reply = nodes.plan(0, ask)
    assert set(wants) == {2}
    assert 0.0 < Figures.take(reply).lost_mass < 1.0
    assert not any(kind == gcn.ROWS_TYPE and index in (1, 3) for kind, index, *_ in nodes.log)
    without = nodes.carry_out(0, ask, nodes.rows(0, ask, wants))
    assert not same(without, nodes.turn(0, asking(FULL, round=2)))


def test_7_14_rows_of_an_absent_owner_that_are_held_are_used() -> None:
    nodes = Nodes(toy_parts())
    ask = asking(FULL, cache="all")
    nodes.turn(0, ask)
    ask, wants, reply = nodes.plan(0, replace(ask, round=2, absent=(1, 2, 3)))
    assert not wants
    assert Figures.take(reply).lost_mass == 0.0
    assert same(nodes.carry_out(0, ask, {}), Nodes(nodes.parts).turn(0, asking(FULL, round=2)))


def test_evaluation_is_that_of_the_whole_graph_on_the_owned_test_nodes() -> None:
    nodes = Nodes(toy_parts())
    features, operators = torch.from_numpy(toy_features(40, 6, 0)), whole(toy_adjacency(40, 4, 5.0), 2, torch.float64)
    outputs = network(nodes.parts[0])(features, operators).detach()
    for part in nodes.parts:
        found = nodes.turn(part.index, asking(FULL, purpose="evaluate")).content["metrics"]
        labels = torch.from_numpy(part.labels[part.positions(part.test)])
        mine = outputs[torch.from_numpy(part.test)]
        assert found["loss"] == pytest.approx(cross_entropy(mine, labels).item(), abs=1e-12)
        assert found["accuracy"] == pytest.approx((mine.argmax(1) == labels).double().mean().item())
        assert found["num-examples"] == len(part.test)


class Plain(GraphConvolutions):
    """A module of the documented form, ``model(x, operators)``, and nothing more."""

    def forward(self, x, operators):
        return super().forward(x, operators)


@pytest.mark.parametrize("mode", ["fixed", "measured"])
def test_c5_a_module_without_generator_and_visit_trains(
    mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It failed on every client. Without ``visit`` no norms of hidden layers are kept, which is logged."""
    settings = SamplerSettings(n=40, mode=mode, scale=1.0)
    usual = Nodes(toy_parts()).turn(2, asking(settings))
    monkeypatch.setattr(graph_nodes, "GraphConvolutions", Plain)
    with caplog.at_level(logging.WARNING, logger="flwr.fedcomp"):
        assert same(Nodes(toy_parts()).turn(2, asking(settings)), usual)
    assert ("takes no 'visit'" in caplog.text) == (mode == "measured")


def test_dropout_comes_from_the_runs_seed() -> None:
    parts = toy_parts()
    nodes = Nodes(parts, client(parts, dropout=0.5))
    ask, rows = ready(nodes, 0, asking(FULL, steps=2))
    first = nodes.carry_out(0, ask, rows)
    torch.rand(3)
    assert same(nodes.carry_out(0, ask, rows), first)
    assert not same(first, Nodes(parts).turn(0, asking(FULL, steps=2)))


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"purpose": "evaluate"}, PayloadError, "a message to train is one to evaluate"),
        ({"sampler": "no json"}, PayloadError, "which is no JSON"),
        ({"sampler": "[1]"}, PayloadError, "expected an object"),
        ({"sampler": "[" * 4000}, PayloadError, "which is no JSON"),
        ({"sampler": '{"layers": 1000000}'}, ConfigError, r"\[1, 64\]"),
        ({"sampler": '{"fanout": %s}' % ("9" * 400)}, ConfigError, r"\[1, 2147483648\]"),
        ({"sampler": '{"estimator": "multinomial", "n": 100000000}'}, ConfigError, "100000000 draws with replacement"),
        ({"sampler": '{"sampler": "fastgcn", "n": 100000000}'}, ConfigError, "100000000 draws with replacement"),
        (
            {"sampler": '{"sampler": "node", "estimator": "multinomial", "fanout": 100000000}'},
            ConfigError,
            "draws with",
        ),
        ({"sampler": '{"sampler": [%s]}' % ("1," * 1900 + "1")}, ConfigError, "sampler must be one of"),
        ({"sampler": '{"samper": "node"}'}, ConfigError, "did you mean 'sampler'"),
        ({"row_codec": "cs"}, ConfigError, "row_codec='cs' is not valid: .*did you mean 'csr'"),
        ({"scale": 2.0}, ConfigError, "only 'adaptive' takes one"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused(change: dict[str, Any], error: Any, said: str) -> None:
    nodes = Nodes(toy_parts())
    ask = replace(asking(FULL), **change)
    with pytest.raises(error, match=said) as refused:
        nodes.tell(0, message(gcn.TRAIN_TYPE, ask, arrays=initial(nodes.parts)))
    # It travels back, and is logged.
    assert len(str(refused.value)) < 300
    assert not nodes.contexts[0].state


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (gcn.SETUP_TYPE, gcn.GraphSetup("s", "hello")),
        (gcn.PLAN_TYPE, asking(FULL, absent=(2,))),
        (gcn.ROWS_TYPE, gcn.Fetch("s", "rows", "dense-f64")),
        (gcn.TRAIN_TYPE, asking(FULL, absent=(2,))),
        (gcn.EVALUATE_TYPE, asking(FULL, purpose="evaluate")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_request_is_refused_and_changes_nothing(kind: str, said: Any) -> None:
    nodes = Nodes(toy_parts())
    for what, content in all_damages(said):
        with pytest.raises(PayloadError):
            print(what, nodes.tell(0, Message(content, 2, kind)))
    assert not nodes.contexts[0].state


def test_who_asks_for_steps_does_not_decide_how_much_memory_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(toy_parts())
    monkeypatch.setattr("fedcomp.graphs.plan.MOST_ENTRIES", 1000)
    with pytest.raises(ConfigError, match="of 60000 steps of a round take more than 1000 entries"):
        nodes.plan(0, asking(FULL, steps=60_000))
    # One step is as large as the graph makes it.
    monkeypatch.setattr("fedcomp.graphs.plan.MOST_ENTRIES", 1)
    assert nodes.plan(0, asking(FULL))[1]


@pytest.mark.parametrize("structure", ["full", "halo"])
def test_a_client_that_lost_its_norms_says_so_and_plans_as_before_when_it_has_them_again(structure: str) -> None:
    nodes = Nodes(toy_parts(structure=structure))
    norms = nodes.norms(1)
    sent = sum(len(decode_norms(frame)[0]) for frame in norms.values())
    ask, wants, reply = nodes.plan(1, asking(SamplerSettings(n=8, mode="measured"), batch_size=4, norms=sent), norms)
    rows = nodes.rows(1, ask, wants)
    nodes.contexts[1] = node(1)
    with pytest.raises(MissingRows, match="norms it planned with"):
        nodes.carry_out(1, ask, rows)
    lost = nodes.tell(1, message(gcn.PLAN_TYPE, replace(ask, hop=0)))
    assert gcn.Needs.take(lost) == gcn.Needs("norms", 0)
    assert not nodes.contexts[1].state
    ask, again, after = nodes.plan(1, replace(ask, hop=0), norms)
    assert (again, Figures.take(after)) == (wants, Figures.take(reply))
    assert nodes.carry_out(1, ask, rows).content["metrics"]["num-examples"] == 4


def test_a_state_that_cannot_be_read_is_not_gone_on_with() -> None:
    nodes = Nodes(toy_parts())
    nodes.turn(0, asking(FULL, cache="all"))
    held = nodes.contexts[0].state.config_records[gcn_state.KEPT]
    (name, data), *_ = held.items()
    assert isinstance(data, bytes)
    # One bit in the middle.
    at = len(data) // 2
    held[name] = data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :]
    with pytest.raises(StateError, match="restart the node"):
        nodes.plan(0, asking(FULL, round=2, cache="all"))
