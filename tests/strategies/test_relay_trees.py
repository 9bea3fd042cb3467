"""Trees of aggregators: whatever the tree, the bits are those of the flat sum; who is lost costs its subtree.

In round 1 of eight clients in ``groups=(4, 2)`` the aggregators are 0, 2, 4, 6 and, above them, 0 and 4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from coded_runs import after_sharing, before_sharing, bits, coded_app, either, run
from flwr.app import Context, Message
from toy import SHAPES, client_app, fedavg, stack, update

from fedcomp.clients.coded import groups as aggregators
from fedcomp.clients.coded.mod import coded
from fedcomp.clients.compressed import compression
from fedcomp.codecs import Codec, FixedPoint, ModularSum, RandomK
from fedcomp.coding.partial import PartialSum, empty_sum
from fedcomp.coding.transport import Parcel, SpoolTransport
from fedcomp.errors import ConfigError
from fedcomp.experiments.systems import get_system
from fedcomp.flower.coded import CODED, GROUP, SUM, pack_content
from fedcomp.flower.faults import Delivery
from fedcomp.strategies.coded.groups import tree_of
from fedcomp.strategies.coded.settings import CodedSettings
from fedcomp.strategies.coded.strategy import CodedFedAvg
from fedcomp.strategies.compressed import Compressed

NODES = 8
TREE = (4, 2)
SIZE = sum(int(np.prod(shape)) for shape in SHAPES.values())
WEIGHT = 10 * NODES * (NODES + 1) // 2
"""Of all clients together: the toy's have 10, 20, ... examples."""

FIXED = FixedPoint(RandomK(1.0), clip=1024.0, levels=1024)
MODULAR = ModularSum(RandomK(1.0), clip=1024.0, levels=1024, summands=WEIGHT)
COARSE = replace(MODULAR, levels=100)
"""Steps of 10.24: of the toy's whole numbers, which are multiples of MODULAR's step, the dither would be all error."""

CODECS = pytest.mark.parametrize("codec", [FIXED, MODULAR], ids=["fixed point", "modular"])
TRANSPORTS = pytest.mark.parametrize("transport", ["hub", "peers"])


def one(msg: Message, context: Context, call_next: Any) -> Message:
    """A mod that lets every client weigh the same."""
    reply = call_next(msg, context)
    for record in reply.content.metric_records.values() if reply.has_content() else ():
        record["one"] = 1
    return reply


def pair(codec: Codec, **options: Any) -> Compressed:
    return Compressed(fedavg(fraction_evaluate=0.0, **options), codec, feedback=False)


def tree(groups: Any = TREE, codec: Codec = MODULAR, key: str = "num-examples", **options: Any) -> CodedFedAvg:
    settings = {"code": "mds", "symbols": 2, "groups": groups, "collect_timeout": 5.0, **options}
    return CodedFedAvg(pair(codec, weighted_by_key=key), **settings)


def included(strategy: CodedFedAvg, round_: int = 1) -> list[int]:
    return strategy.reports[round_].coded.partitions


def alone(*lost: int, codec: Codec = MODULAR) -> bytes:
    """Return the bits of the flat sum without some clients: everybody is its own group."""
    return bits(run(tree(NODES, codec), NODES, fault=before_sharing(lost))[0])


def fails(partition: int, kind: str = "silent", *, asked: str = SUM, level: int | None = None) -> Callable[..., Any]:
    """Let messages of one type to one client fail; of an aggregator's, the first or second of a round."""
    seen: list[int] = []

    def plan(delivery: Delivery) -> str | None:
        if (delivery.partition, delivery.message_type) != (partition, asked):
            return None
        seen.append(delivery.exchange)
        return kind if level in (None, sorted(set(seen)).index(delivery.exchange)) else None

    return plan


@pytest.mark.long
@CODECS
@TRANSPORTS
def test_whatever_the_tree_the_model_has_the_bits_of_the_flat_sum(codec: Codec, transport: str) -> None:
    """Relays vanish once they have shared; two rounds, so that everybody's turn at adding is another one's."""
    app = client_app([coded(), compression(), one])
    flat, _ = run(pair(codec, weighted_by_key="one"), NODES, rounds=2, app=app)
    found = {}
    for groups in (1, 4, (4,), (8, 4, 2), (5, 3), (7, 1), (50, 6, 5, 2)):
        strategy = tree(groups, codec, "one", transport=transport, seal=groups != (5, 3))
        result, _ = run(strategy, NODES, rounds=2, app=app, fault=after_sharing([0, 3]))
        assert [len(included(strategy, r)) for r in (1, 2)] == [NODES, NODES], groups
        found[groups] = bits(result)
    assert len(set(found.values())) == 1
    if codec is FIXED:
        # Whole steps of 1 and a weight of 8: every float of the uncoded mean is exact.
        assert set(found.values()) == {bits(flat)}
    # Of a modular sum the single frames were rounded to float32, with their dithers taken off one by one.
    np.testing.assert_allclose(stack(result.arrays), stack(flat.arrays), rtol=1e-5, atol=1e-3)


@pytest.mark.long
def test_the_sum_in_a_prime_field_is_the_same_one() -> None:
    app = client_app([coded(), compression(), one])
    there, _ = run(tree(TREE, key="one"), NODES, app=app)
    field = CodedFedAvg(pair(MODULAR), construction="sumcode", symbols=2, threshold=1, weighted=False)
    assert bits(run(field, NODES, app=app)[0]) == bits(there)


@pytest.mark.long
def test_a_sum_may_wrap_at_any_level_where_that_is_allowed() -> None:
    """Residues are kept at every level; the true sum would be another one, and take more bits."""
    small = 2 * 1024 * 20 + 1
    codec = replace(MODULAR, modulus=small, allow_wrap=True)
    found = {}
    for groups in (1, TREE):
        strategy = tree(groups, codec)
        found[groups] = bits(run(strategy, NODES)[0])
        assert strategy.reports[1].coded.sum_bytes["vectors"] <= 2 * (12 + -(-SIZE * small.bit_length() // 8))
    assert found[1] == found[TREE] != alone()


@pytest.mark.long
@CODECS
def test_what_leaves_the_tree_is_as_long_however_many_are_below(codec: Codec) -> None:
    """Two vectors, and an entry with its metrics for each member; the modulus bounds the bits of a modular sum."""
    counted = {}
    for nodes in (4, NODES):
        strategy = tree((3, 2), codec, transport="peers", seal=False)
        _, grid = run(strategy, nodes)
        report = strategy.reports[1].coded
        counted[nodes] = report.sum_bytes
        sums = sum(report.sum_bytes.values())
        # K shards of each sum cross the server's link, and nothing else that was coded.
        assert sums < report.payload_bytes["hub_up"] < sums + 2 * 2 * 200
        assert grid.ledger.total("wire", link="peer") == report.payload_bytes["peer"]
    few, many = counted.values()
    assert many["members"] == pytest.approx(2 * few["members"], rel=0.01)
    bits_each = (MODULAR.m - 1).bit_length()
    assert 12 + SIZE < few["vectors"] / 2 <= many["vectors"] / 2 <= 12 + -(-SIZE * bits_each // 8)


# Who is lost.


@pytest.mark.long
@TRANSPORTS
@pytest.mark.parametrize(
    ("partition", "level", "subtree"), [(2, 0, [2, 3]), (6, 0, [6, 7]), (4, 1, [4, 5, 6, 7])], ids=str
)
def test_an_aggregator_lost_before_it_hands_its_sum_on_costs_its_subtree(
    transport: str, partition: int, level: int, subtree: list[int]
) -> None:
    strategy = tree(transport=transport)
    result, _ = run(strategy, NODES, fault=fails(partition, level=level))
    assert included(strategy) == [p for p in range(NODES) if p not in subtree]
    reasons = set(strategy.reports[1].coded.excluded.values())
    assert len(strategy.reports[1].coded.excluded) == len(subtree)
    assert all(f"its group, of aggregator {partition}: no reply in time" in reason for reason in reasons), reasons
    assert bits(result) == alone(*subtree)


@pytest.mark.long
@TRANSPORTS
def test_an_aggregator_that_raises_costs_its_subtree_and_no_other_sum(transport: str) -> None:
    """Between peers its sum has arrived, and must not be used: what it remembers may be as it was before."""
    strategy = tree(transport=transport)
    result, _ = run(strategy, NODES, fault=fails(2, "raise"))
    assert included(strategy) == [0, 1, 4, 5, 6, 7]
    assert bits(result) == alone(2, 3)


@pytest.mark.long
def test_a_sum_whose_senders_answer_is_lost_has_arrived_between_peers() -> None:
    strategy = tree(transport="peers")
    result, _ = run(strategy, NODES, fault=fails(2, "lost_reply"))
    assert included(strategy) == list(range(NODES))
    assert strategy.reports[1].coded.excluded == {}
    assert bits(result) == alone()
    # Through the hub the sum was in the answer.
    strategy = tree()
    assert bits(run(strategy, NODES, fault=fails(2, "lost_reply"))[0]) == alone(2, 3)


@pytest.mark.long
@TRANSPORTS
def test_members_and_aggregators_that_vanish_at_any_point_cost_no_more_than_theirs(transport: str) -> None:
    """A member before it trains, aggregators of both levels once they have shared."""
    strategy = tree(transport=transport)
    result, _ = run(strategy, NODES, fault=either(before_sharing([5]), after_sharing([0, 2, 4])))
    assert included(strategy) == [0, 1, 2, 3, 4, 6, 7]
    assert list(strategy.reports[1].coded.excluded.values()) == ["no reply in time"]
    assert bits(result) == alone(5)


# What is wrong.


ORIGINAL = PartialSum.to_bytes


def liar(lie: Callable[[PartialSum], bytes], partition: int = 2) -> Callable[[Message, Context], Message]:
    """Return an app one of whose aggregators puts other bytes in place of its sum."""
    app = coded_app()

    def lying(msg: Message, context: Context) -> Message:
        if msg.metadata.message_type != SUM or context.node_config["partition-id"] != partition:
            return app(msg, context)
        PartialSum.to_bytes = lie  # type: ignore[method-assign]
        try:
            return app(msg, context)
        finally:
            PartialSum.to_bytes = ORIGINAL  # type: ignore[method-assign]

    return lying


def changed(**fields: Any) -> Callable[[PartialSum], bytes]:
    """Change fields of every part of a sum."""
    return lambda s: ORIGINAL(replace(s, parts=tuple(replace(part, **fields) for part in s.parts)))


LIES: dict[str, tuple[Callable[[PartialSum], bytes], str]] = {
    "cut": (lambda s: ORIGINAL(s)[:-3], "bytes for 1212 integers"),
    "no sum": (lambda s: b"x" * 99, "no partial sum"),
    "other's member": (changed(index=0), "member 0 is not of this group"),
    "twice": (lambda s: ORIGINAL(replace(s, parts=s.parts + s.parts)), "in the sum twice"),
    "stale": (changed(sequence=99), "answers message 99"),
    "too large": (lambda s: ORIGINAL(replace(s, integers=s.integers + 10**9)), "levels each"),
    "too heavy": (changed(weight=2**40), "has weight"),
    "of another model": (lambda s: ORIGINAL(replace(s, integers=s.integers[1:])), "this receiver expects 1212"),
}


@pytest.mark.long
@pytest.mark.parametrize("lie", LIES)
def test_a_damaged_sum_is_refused_by_name_and_costs_its_own_subtree(lie: str) -> None:
    damage, reason = LIES[lie]
    strategy = tree(transport=("hub", "peers")[len(lie) % 2])
    result, _ = run(strategy, NODES, app=liar(damage))
    report = strategy.reports[1].coded
    assert included(strategy) == [0, 1, 4, 5, 6, 7]
    assert any("the sum of member 2: " in refused and reason in refused for refused in report.refused), report.refused
    assert list(report.excluded.values()) == ["its aggregator did not get its update"] * 2
    assert bits(result) == alone(2, 3)


@pytest.mark.long
def test_what_others_put_in_an_aggregators_name_is_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Client 7 sends aggregator 0 rubbish and sums of other rounds and runs as 2's, and 2's own sum once more."""
    original, sums, sent = SpoolTransport.send, [], []

    def to_bytes(self: PartialSum) -> bytes:
        sums.append(self)
        return ORIGINAL(self)

    def send(self: SpoolTransport, address: str, parcel: Parcel, partition: int | None = None) -> Any:
        if parcel.kind == GROUP + 1 and parcel.source == 2:
            (sound,) = [s for s in sums if [part.index for part in s.parts] == [2, 3]]
            doubled = ORIGINAL(replace(sound, integers=2 * sound.integers))
            for change in (
                {"body": b""},
                {"body": b"FPS2" + bytes(90)},
                {"body": parcel.body + b"\0"},
                {"body": doubled, "round": parcel.round + 1},
                {"body": doubled, "run": b"another!"},
                {"body": doubled, "kind": 2},
                {"body": doubled, "source": 5},
                {},
            ):
                original(self, address, dataclasses.replace(parcel, **change))
            sent.append(address)
        return original(self, address, parcel)

    monkeypatch.setattr(SpoolTransport, "send", send)
    monkeypatch.setattr(PartialSum, "to_bytes", to_bytes)
    strategy = tree(transport="peers", seal=False)
    result, _ = run(strategy, NODES)
    assert len(sent) == 1
    assert included(strategy) == list(range(NODES))
    assert bits(result) == alone()


@pytest.mark.long
@TRANSPORTS
def test_what_is_delivered_twice_is_added_once(transport: str) -> None:
    """Each of them hands its sum, or reply, over twice; sealed, two times the same is two parcels."""
    fault = either(fails(2, "duplicate"), fails(4, "duplicate"), fails(7, "duplicate", asked="train"))
    strategy = tree(transport=transport)
    assert bits(run(strategy, NODES, fault=fault)[0]) == alone()


@pytest.mark.long
def test_sums_pass_the_server_sealed() -> None:
    """Unless that is not wanted: then what an aggregator hands on is there to be read."""
    app = coded_app()
    for seal in (True, False):
        read: list[bool] = []

        def watching(msg: Message, context: Context, read: list[bool] = read) -> Message:
            reply = app(msg, context)
            if msg.metadata.message_type == SUM and "aggregator" in msg.content[CODED]:
                read.append(b"FPS2" in pack_content(reply.content))
            return reply

        run(tree(seal=seal), NODES, app=watching)
        # Aggregators 0 and 4 keep their own.
        assert (len(read), read.count(True)) == (4, 0 if seal else 2)


# Incorrect variants.


def error_of(strategy: CodedFedAvg) -> float:
    """Return the variance of a model's error over the one derived: uniform within half a step."""
    result, _ = run(strategy, NODES)
    weights = [10 * (p + 1) for p in range(NODES)]
    parts = [[update(1, p, shape, i).reshape(-1) for i, shape in enumerate(SHAPES.values())] for p in range(NODES)]
    exact = sum(w * np.concatenate(part).astype(np.float64) for w, part in zip(weights, parts, strict=True)) / WEIGHT
    expected = sum(w**2 for w in weights) / WEIGHT**2 * COARSE.step**2 / 12
    return float((stack(result.arrays) - exact).var()) / expected


@pytest.mark.long
def test_an_aggregator_that_takes_dithers_off_itself_doubles_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert error_of(tree(codec=COARSE)) == pytest.approx(1.0, rel=0.15)
    original = aggregators._Replies.read

    def read(self: Any, source: int, body: bytes) -> PartialSum:
        found = original(self, source, body)
        (part,) = found.parts
        dithers = self.fixed.dithers(self.layout, self.key, {source: part.weight})
        return replace(found, integers=found.integers - np.rint(dithers).astype(np.int64))

    monkeypatch.setattr(aggregators._Replies, "read", read)
    # The root takes them off once more.
    assert error_of(tree(codec=COARSE)) == pytest.approx(2.0, rel=0.15)


@pytest.mark.long
def test_dithers_of_another_round_triple_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ModularSum.place

    def place(self: ModularSum, integers: Any, divisor: float, layout: Any, key: Any, contributors: Any = None) -> Any:
        return original(self, integers, divisor, layout, key.at(round=key.round + 1), contributors)

    monkeypatch.setattr(ModularSum, "place", place)
    assert error_of(tree(codec=COARSE)) == pytest.approx(3.0, rel=0.15)


@pytest.mark.long
def test_a_sum_that_is_merged_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever merges; and by the root where an aggregator does it all the same."""

    def careless(self: Any) -> PartialSum:
        total, bodies = empty_sum(self.handed.count), self._bodies()
        for source in self.handed.sources:
            part = self.handed.read(source, bodies[source][0])
            for _ in range(2 if source == 2 and self.handed.kind > GROUP else 1):
                total = PartialSum(total.integers + part.integers, total.parts + part.parts)
        return total

    monkeypatch.setattr(aggregators._Aggregation, "run", careless)
    strategy = tree()
    result, _ = run(strategy, NODES)
    assert included(strategy) == [4, 5, 6, 7]
    assert any(
        "member 2 is not of this group, or is in the sum twice" in why
        for why in strategy.reports[1].coded.excluded.values()
    )
    assert bits(result) == alone(0, 1, 2, 3)


# The tree itself, and how it is asked for.


def test_every_level_has_all_members_once_and_everybody_has_a_turn() -> None:
    for members, counts in ((8, (4, 2)), (20, (7, 3, 1)), (3, (8, 2)), (5, (5, 4)), (1, (3, 2, 1))):
        owners: set[int] = set()
        for turn in range(60):
            leaves, *levels = tree_of(range(members), counts, turn)  # type: ignore[arg-type]
            assert [group.owner for group in leaves] == list(range(members))
            assert [len(level) for level in levels] == sorted({min(c, members) for c in counts}, reverse=True)
            for below, level in zip([leaves, *levels], levels, strict=False):
                assert [child for group in level for child in group.below] == below
                assert [m for group in level for m in group.members] == list(range(members))
                # Its own sum never leaves an aggregator's node: it is one of those that hand in.
                assert all(group.owner in [child.owner for child in group.below] for group in level)
            owners |= {group.owner for group in levels[-1]}  # type: ignore[arg-type]
        assert owners == set(range(members))


def test_groups_are_one_number_or_falling_ones() -> None:
    assert [CodedSettings(groups=g).levels for g in (0, (), 3, (3,), [8, 4, 2])] == [(), (), (3,), (3,), (8, 4, 2)]
    for wrong, reason in (
        ((2, 8), "fewer aggregators"),
        ((4, 4), "fewer aggregators"),
        ((4, 0), r"groups=0 .* an integer >= 1"),
        (-1, "an integer >= 0"),
        ("8,2", "an integer"),
        (2.5, "an integer"),
    ):
        with pytest.raises(ConfigError, match=reason):
            CodedSettings(groups=wrong)
    system = get_system("relay-mds")
    integers = {"codec": "fixedpoint", "codec.codec": "randomk", "codec.density": 1.0, "codec.clip": 1.0}
    for text, levels in (("8,2", (8, 2)), (3, (3,)), ("0", ())):
        strategy: Any = system.build(system.resolve({**integers, "groups": text}), 0)
        assert strategy.settings.levels == levels
    for text in ("8;2", "2,8", ""):
        with pytest.raises(ConfigError, match="groups"):
            system.build(system.resolve({**integers, "groups": text}), 0)
