"""What the contract does not say of coded sums: the integer oracle, who may vanish when, what a server may try."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from registry import Entry
from test_contract import Books, altered, local

from fedcomp import wire
from fedcomp.asks import mark_of
from fedcomp.codecs import FixedPoint, RandomBlock, RandomK, fixed_point_of
from fedcomp.coding.errors import CodingError, NotDecodable
from fedcomp.coding.sumcode import SumPlan, contribution
from fedcomp.coding.sumshards import Shard, make_tag, read_tag, set_digest
from fedcomp.errors import ConfigError, FedcompError
from fedcomp.program import Answer, Ask, Me
from fedcomp.systems.coded import sums
from fedcomp.systems.coded.sums import AddUp, CodedSum, HeldBy, Report, ShareUp, Tagged, plan_of

CODEC = FixedPoint(RandomK(0.3), clip=2.0**12, levels=2**11)  # steps of 2: integers stay integers
NODES = 6
MODES = pytest.mark.parametrize("mode", ["share", "mask"])


def summed(codec: Any = CODEC, **options: Any) -> Books:
    """Return coded sums of six clients; K = 3, T = 1 unless others are given."""
    given = {"symbols": 3, "threshold": 1, "weight": "num-examples", **options}
    fault = given.pop("fault", lambda number, node, exchange: "")
    nodes = given.pop("nodes", NODES)
    return local(Entry(CodedSum(codec=codec, **given)), nodes=nodes, fault=fault)


def noted(driver: Books) -> list[str]:
    """Return the list to which the notes of rounds go."""
    notes: list[str] = []
    make = driver._now
    driver._now = lambda *args: replace(make(*args), note=notes.append)
    return notes


def oracle(driver: Books, used: list[tuple[int, ...]]) -> np.ndarray:
    """Return the model that Python's integers and one rounding a round give, over who was used in each round."""
    codec = fixed_point_of(driver.system.codec)
    vector = np.zeros(driver.layout.size, np.float32)
    frames = {(ask.node, reply.sequence): reply.answer.sent for ask, reply in driver.passed if reply.answer.sent}
    sequences = sorted({sequence for _, sequence in frames})
    for members, sequence in zip(used, sequences, strict=True):
        weights = {node: node + 1 if driver.system.weight else 1 for node in members}
        total = np.zeros(codec.count(driver.layout), object)
        for node in members:
            integers = codec.grid.integers(wire.decode(frames[node, sequence]))
            total += np.array([int(each) for each in integers], object) * weights[node]
        mean = np.array([float(each) * (codec.step / sum(weights.values())) for each in total]).astype(np.float32)
        vector = vector + codec.spread(mean, driver.layout, round_key(driver, sequences.index(sequence) + 1))
    return vector


def round_key(driver: Books, number: int) -> Any:
    return driver._now(number, None, driver.mailbox.copy(), {}).key("uplink")


def stepped(driver: Books, rounds: int = 3) -> list[tuple[int, ...]]:
    """Run rounds; return who is in each sum."""
    steps = [driver.step(number) for number in range(1, rounds + 1)]
    return [() if step is None else step.consumed for step in steps]


# The sum.


@MODES
@pytest.mark.parametrize("weight", ["num-examples", ""])
def test_the_model_is_the_integer_oracles_bit_for_bit(mode: str, weight: str) -> None:
    driver = summed(mode=mode, weight=weight)
    used = stepped(driver)
    assert used == [tuple(range(NODES))] * 3
    np.testing.assert_array_equal(driver.model, oracle(driver, used))
    assert np.count_nonzero(driver.model) > 300


@pytest.mark.parametrize(
    ("codec", "options", "prime"),
    [
        (FixedPoint(RandomK(1.0), clip=1024.0, levels=1), {"weight": ""}, 251),
        (FixedPoint(RandomBlock(0.2), clip=2048.0, levels=127), {"weight": ""}, 65521),
        (
            FixedPoint(RandomK(0.2, scope="layer"), clip=1024.0, levels=32767),
            {"max_weight": 6, "symbols": 5},
            2**31 - 1,
        ),
    ],
    ids=["ternary", "bytes", "16 bits"],
)
def test_every_prime_and_every_linear_codec(codec: FixedPoint, options: dict[str, Any], prime: int) -> None:
    driver = summed(codec, **options)
    used = stepped(driver, 2)
    np.testing.assert_array_equal(driver.model, oracle(driver, used))
    plan = next(plan_of(ask.say.plan) for ask, _ in driver.passed if isinstance(ask.say, ShareUp))
    assert plan.field.order == prime


def test_fewer_relays_than_clients_take_turns() -> None:
    driver = summed(shards=4, symbols=2)
    used = stepped(driver)
    np.testing.assert_array_equal(driver.model, oracle(driver, used))
    asked = [ask.node for ask, _ in driver.passed if isinstance(ask.say, AddUp)]
    assert len(asked) == 9
    assert len(set(asked)) > 4


def test_of_more_clients_than_a_plan_has_relays_some_take_turns() -> None:
    driver = summed(symbols=0)
    plan = driver.system.plan(1500, driver._now(1, None, driver.mailbox, {}))
    assert (plan.contributors, plan.relays) == (1500, 1024)
    assert len({client for number in (1, 2) for client in sums.relays_of(plan, number)}) == 1500


def test_the_server_receives_as_much_of_many_clients_as_of_few() -> None:
    """K + T sums of one K-th of an update each, and of each client the name of what it shared."""

    def came(nodes: int) -> tuple[int, int]:
        driver = summed(nodes=nodes, weight="")
        driver.step(1)
        frames = sum(len(frame) for _, reply in driver.passed for frame in reply.answer.frames.values())
        said = [reply.answer.say for _, reply in driver.passed if isinstance(reply.answer.say, HeldBy)]
        return frames, max(len(say.bitmap) + len(say.tags) for say in said)

    few, many = came(6), came(14)
    assert few[0] == many[0]
    assert many[1] - few[1] == 1  # a bit for each client


# Who vanishes.


@pytest.mark.parametrize("kind", ["silent", "lost", "crash", "late"])
@pytest.mark.parametrize("exchange", [1, 2, 3])
def test_two_of_six_clients_may_drop_out_at_any_point(exchange: int, kind: str) -> None:
    """K + T = 4 of 6. Who vanished before sharing is not in the sum, who vanished after is."""
    driver = summed(fault=lambda number, node, x: kind if (number, x) == (1, exchange) and node in (1, 4) else "")
    used = stepped(driver, 2)
    assert used == [(0, 2, 3, 5) if exchange == 1 else tuple(range(NODES)), tuple(range(NODES))]


@pytest.mark.parametrize("exchange", [1, 2, 3])
def test_with_three_of_six_gone_the_round_is_skipped(exchange: int) -> None:
    driver = summed(fault=lambda number, node, x: "silent" if number == 1 and x >= exchange and node < 3 else "")
    notes = noted(driver)
    assert driver.step(1) is None
    assert not driver.model.any()
    assert not driver.consumed
    assert "the round is skipped, the model is unchanged" in notes[-1]
    # Six are enough when none is lost: the run goes on.
    assert "too_few" not in driver.told
    assert driver.step(2) is not None


@pytest.mark.parametrize(
    ("options", "needed"), [({}, 4), ({"symbols": 1, "min_contributors": 5}, 5), ({"symbols": 2, "shards": 6}, 6)]
)
def test_fewer_clients_than_decode_skip_the_round_without_training_for_nothing(options: Any, needed: int) -> None:
    driver = summed(nodes=3, **options)
    notes = noted(driver)
    assert driver.step(1) is None
    assert not driver.passed
    assert f"3 clients take part, the code needs {needed}" in notes[0]
    assert driver.told["too_few"] in notes[0]
    assert summed(nodes=needed, **options).step(1) is not None


def test_clients_whose_keys_are_not_known_yet_are_not_too_few() -> None:
    driver = summed()
    make = driver._now
    driver._now = lambda *args: replace(make(*args), keys={0: make(*args).keys[0]})
    assert driver.step(1) is None
    assert "too_few" not in driver.told


def test_a_sum_of_fewer_contributors_than_asked_is_not_released() -> None:
    """Three of six share: fewer than four, although as many relays as decode are there. No relay is asked for a sum."""
    away = lambda number, node, exchange: "silent" if node < 3 and exchange == 1 else ""  # noqa: E731
    driver = summed(symbols=2, min_contributors=4, fault=away)
    notes = noted(driver)
    assert driver.step(1) is None
    assert not any(isinstance(ask.say, AddUp) for ask, _ in driver.passed)
    assert "3 contributors; at least 4 are needed (min_contributors)" in notes[-1]
    assert summed(symbols=2, min_contributors=3, fault=away).step(1).consumed == (3, 4, 5)


def test_a_code_that_cannot_reach_the_target_says_so() -> None:
    few, many = summed(symbols=0, loss=0.3, nodes=4), summed(symbols=0, nodes=10)
    said, none = noted(few), noted(many)
    few.step(1), many.step(1)
    assert few.told["coded"]["symbols"] == 1
    assert "4 relays decode with probability 0.916" in said[0]
    assert many.told["coded"]["symbols"] == 4
    assert none == []


def test_a_share_that_is_the_update_itself_is_refused_or_said() -> None:
    with pytest.raises(ConfigError, match="symbols=1 with threshold=0"):
        summed(symbols=1, threshold=0)
    driver = summed(symbols=0, threshold=0, loss=0.9, nodes=3)
    notes = noted(driver)
    driver.step(1)
    assert any("a share is the update itself" in note for note in notes)


# What the server sees, and what relays refuse.


@MODES
def test_the_server_holds_nothing_it_can_read(mode: str) -> None:
    driver = summed(mode=mode)
    driver.step(1)
    shared = [reply.answer for ask, reply in driver.passed if isinstance(ask.say, ShareUp)]
    for answer in shared:
        assert answer.bare
        assert answer.weight == 0.0
        assert set(answer.frames) == ({"masked"} if mode == "mask" else set())
        assert isinstance(answer.say, Tagged)
        assert len(answer.post) == NODES - 1
        for post in answer.post:
            # Sealed: neither a shard nor anything of the frame.
            assert post.data[:2] != b"FS"
            assert answer.sent[40:80] not in post.data


def relay_of(driver: Books) -> tuple[Ask, Any]:
    """Return an ask for a sum, and a function that asks its relay again, in other ways."""
    ask = next(ask for ask, _ in driver.passed if isinstance(ask.say, AddUp))
    node, plan = ask.node, plan_of(ask.say.plan)
    memory, tags = driver.clients[node].memory, tags_of(driver)

    def again(sources: list[int], *, number: int = 1, run: bytes = b"local", memory: Any = memory) -> Answer:
        bits = np.zeros(plan.contributors, np.bool_)
        bits[sources] = True
        name = set_digest(plan, number, {source: tags[source] for source in sources})
        me = Me(
            node,
            number,
            0,
            driver.layout,
            lambda: driver.model,
            lambda whole, collect: None,
            kept=dict(driver.kept[node]),
            run=run,
            identity=driver.identity(node),
        )
        say = AddUp(ask.say.plan, np.packbits(bits).tobytes(), name)
        return driver.system.client(memory, ask._replace(say=say), me)[1]

    return ask, again


def tags_of(driver: Books) -> dict[int, bytes]:
    """Return what was shared last, by contributor."""
    said = [(reply.answer.node, reply.answer.say) for _, reply in driver.passed]
    return {node: say.tag for node, say in said if isinstance(say, Tagged)}


def test_a_relay_answers_once_a_round_whatever_memory_run_or_number_the_server_names() -> None:
    driver = summed()
    driver.step(1)
    ask, again = relay_of(driver)
    everybody = list(range(NODES))
    # The same set again is the same sum.
    first = next(reply.answer for each, reply in driver.passed if each is ask)
    assert again(everybody).frames == first.frames
    with pytest.raises(CodingError, match="answered for another set"):
        again(everybody[:-1])
    # The memory begins anew, and the server sends the shards again.
    posts = {post.source: post.data for _, reply in driver.passed for post in reply.answer.post if post.to == ask.node}
    held = {f"shard/1/{source}": np.frombuffer(data, np.uint8) for source, data in posts.items()}
    with pytest.raises(CodingError, match="answered for another set"):
        again([source for source in everybody if source != ask.node], memory=held)
    # Shards open in no other run and round.
    with pytest.raises(NotDecodable, match="lacks the shards of"):
        again(everybody[:-1], run=b"other")
    with pytest.raises(NotDecodable, match="lacks the shards of"):
        again(everybody[:-1], number=2)


def test_a_round_before_the_last_answer_is_over_and_runs_are_counted() -> None:
    driver = summed()
    driver.step(1)
    ask, again = relay_of(driver)
    kept = json.loads(driver.kept[ask.node][sums.BOOK])
    assert kept == {b"local".hex(): [1, kept[b"local".hex()][1]]}
    driver.kept[ask.node][sums.BOOK] = json.dumps({b"local".hex(): [2, kept[b"local".hex()][1]]}).encode()
    with pytest.raises(CodingError, match="added up round 2 of this run; round 1 is over"):
        again(list(range(NODES)))
    driver.kept[ask.node][sums.BOOK] = json.dumps({f"{i:02x}": [1, ""] for i in range(64)}).encode()
    with pytest.raises(CodingError, match="added up for 64 runs"):
        again(list(range(NODES)))


def test_a_set_of_others_encodings_is_refused_before_the_answer_is_spent() -> None:
    driver = summed()
    driver.step(1)
    ask, again = relay_of(driver)
    driver.kept[ask.node].clear()
    key, say = driver.identity(ask.node), AddUp(ask.say.plan, ask.say.chosen, bytes(24))
    asked = Me(ask.node, 1, 0, driver.layout, lambda: driver.model, lambda w, c: None, run=b"local", identity=key)
    with pytest.raises(NotDecodable, match="other encodings"):
        driver.system.client(driver.clients[ask.node].memory, ask._replace(say=say), asked)
    assert again(list(range(NODES - 1))).frames


def tampered(change: Any, kind: type, liar: int = 3, **options: Any) -> Books:
    """Return sums of which one client's answers to asks of one kind are changed."""
    driver = summed(**options)
    system = driver.system

    def client(self: CodedSum, memory: Any, ask: Ask, me: Me) -> Any:
        memory, answer = system.client(memory, ask, me)
        return memory, change(ask, answer) if me.node == liar and isinstance(ask.say, kind) else answer

    driver.system = altered(system, client=client)
    return driver


def another_set(ask: Ask, answer: Answer) -> Answer:
    """What a relay answers that left one contributor out: some other residues, under the right name."""
    plan = plan_of(ask.say.plan)
    shard = Shard.from_bytes(answer.frames["sum"], plan)
    body = plan.field.subtract(shard.body, plan.field.residues(np.arange(shard.body.size) * 7 + 5))
    return answer._replace(frames={"sum": replace(shard, body=body).to_bytes(plan)})


@pytest.mark.parametrize("liar", range(NODES))
def test_a_relay_that_added_another_set_is_found_out_and_left_out(liar: int) -> None:
    honest = summed()
    honest.step(1)
    driver = tampered(another_set, AddUp, liar)
    notes = noted(driver)
    driver.step(1)
    np.testing.assert_array_equal(driver.model, honest.model)
    asked = {ask.node for ask, _ in driver.passed if isinstance(ask.say, AddUp)}
    if liar in asked:
        assert "a check symbol of the sum is violated" in notes[0]
        assert asked == set(range(NODES))
        assert f"the sum of relay {liar} contradicts the others" in notes[-1]
    else:
        assert notes == []


def test_without_a_relay_to_spare_the_round_is_skipped_instead_of_wrong() -> None:
    driver = tampered(another_set, AddUp, symbols=5)
    notes = noted(driver)
    assert driver.step(1) is None
    assert "check symbol" in notes[-1]


REPORTS = {
    "another digest": lambda say: replace(say, digest=bytes(8)),
    "all bits": lambda say: replace(say, bitmap=b"\xff"),
    "no bits": lambda say: replace(say, bitmap=b""),
    "tags without sources": lambda say: replace(say, tags=bytes(24)),
    "contributors that are not there": lambda say: replace(say, sources=(99,), tags=bytes(24)),
}


@pytest.mark.parametrize("how", REPORTS)
def test_one_lying_report_costs_one_relay(how: str) -> None:
    honest = summed()
    honest.step(1)
    change = REPORTS[how]
    driver = tampered(lambda ask, answer: answer._replace(say=change(answer.say)), Report)
    driver.step(1)
    np.testing.assert_array_equal(driver.model, honest.model)
    assert 3 not in {ask.node for ask, _ in driver.passed if isinstance(ask.say, AddUp)}


@pytest.mark.parametrize("numbers", [(1, 2**60), (2**40, 1)], ids=["a memory from the future", "another message"])
def test_the_tag_of_another_message_or_memory_is_refused(numbers: tuple[int, int], monkeypatch: Any) -> None:
    """Acknowledged, its numbers would make the client roll back an update that was used."""
    made: list[int] = []

    def lying(sequence: int, generation: int) -> bytes:
        made.append(sequence)
        return make_tag(*numbers) if len(made) == 4 else make_tag(sequence, generation)

    monkeypatch.setattr(sums, "make_tag", lying)
    driver = summed()
    assert driver.step(1).consumed == (0, 1, 2, 4, 5)
    assert any("its shards" in reason for reason in driver.refused[1] if reason.startswith("3: "))


def test_a_masked_update_under_another_tag_than_its_shards_costs_its_client_alone() -> None:
    """Its tag is refused, and relays hold shards of it under one that is right: the round goes on without it."""

    def other_tag(ask: Ask, answer: Answer) -> Answer:
        plan, tag = plan_of(ask.say.plan), make_tag(2**40, 1)
        shard = replace(Shard.from_bytes(answer.frames["masked"], plan), tag=tag)
        return answer._replace(say=Tagged(tag), frames={"masked": shard.to_bytes(plan)})

    driver = tampered(other_tag, ShareUp, mode="mask")
    assert driver.step(1).consumed == (0, 1, 2, 4, 5)
    assert any("its shards" in reason for reason in driver.refused[1] if reason.startswith("3: "))


def test_a_client_that_shares_what_no_update_holds_spoils_the_round_and_not_the_model(monkeypatch: Any) -> None:
    """Residues of half the field, with true check symbols: the mean would be thousands of clips."""
    made: list[int] = []

    def lying(plan: SumPlan, integers: Any, weight: int, extras: Any) -> Any:
        vector = contribution(plan, integers, weight, extras)
        made.append(weight)
        if len(made) == 3:
            data = vector[: plan.length - plan.checks]
            data[:10] = plan.field.half
            vector[plan.length - plan.checks :] = plan.field.dot(plan.challenge(), data)
        return vector

    monkeypatch.setattr(sums, "contribution", lying)
    driver = summed()
    notes = noted(driver)
    assert driver.step(1) is None
    assert "contributor exceeded them" in notes[-1]


# What a client says of its own.


def test_values_at_the_clip_show_in_the_sum() -> None:
    """The updates reach 1000: with a clip of 100 most of them are cut, and the server is told how many."""
    step = summed(FixedPoint(RandomK(1.0), clip=100.0, levels=50)).step(1)
    assert 0.85 < step.metrics["coded.cut"] < 0.95
    assert step.metrics["coded.contributors"] == NODES
    assert step.metrics["coded.weight"] == 21


def test_a_client_beyond_the_largest_weight_is_left_out_and_its_weight_stays_with_it() -> None:
    driver = summed(max_weight=5)
    assert driver.step(1).consumed == (0, 1, 2, 3, 4)
    (reason,) = driver.refused[1]
    assert "more than the 5 for which the sum has room" in reason
    assert "6" not in reason.replace("65521", "")
    driver = summed()
    driver.weight = lambda node: 1.5 if node == 2 else 1.0
    assert driver.step(1).consumed == (0, 1, 3, 4, 5)
    assert "is not a whole number >= 0" in driver.refused[1][0]


def lone(number: int, node: int, start: Any) -> Any:
    """Client 0 changes one coordinate, the others all of them."""
    change = (
        np.full(start.size, 100.0 * (node + 1), np.float32)
        if node
        else 100 * np.eye(1, start.size, dtype=np.float32)[0]
    )
    return start + change


def test_a_client_is_warned_that_a_sum_shows_what_it_alone_has_changed() -> None:
    driver = summed(FixedPoint(RandomK(1.0), clip=2.0**12, levels=2**11))
    driver.train = lone
    with pytest.warns(UserWarning, match="changes 1 of 1212 coordinates: what no other client changes"):
        assert len(driver.step(1).consumed) == NODES
    strict = summed(FixedPoint(RandomK(1.0), clip=2.0**12, levels=2**11), min_contributors=4)
    strict.train = lone
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert strict.step(1).consumed == (1, 2, 3, 4, 5)
    assert "min_contributors=4 are asked for" in strict.refused[1][0]
    assert "use a finer grid (a smaller clip, more levels), or add noise (DistributedDp)" in strict.refused[1][0]


def test_a_sum_that_could_wrap_around_or_has_buffers_is_refused_before_anybody_trains() -> None:
    driver = summed(max_weight=10**6)
    with pytest.raises(ConfigError, match="would wrap around"):
        driver.step(1)
    assert not driver.passed


@pytest.mark.parametrize("change", [{"contributors": 7}, {"bound": 7}, {"relays": 0}, {"p": 12}, {"size": 3}])
def test_another_plan_than_the_messages_list_is_refused(change: dict[str, Any]) -> None:
    driver = summed()
    system = driver.system

    def client(self: CodedSum, memory: Any, ask: Ask, me: Me) -> Any:
        if isinstance(ask.say, ShareUp):
            plan = json.dumps({**json.loads(ask.say.plan), **change})
            ask = ask._replace(say=replace(ask.say, plan=plan))
        return system.client(memory, ask, me)

    driver.system = altered(system, client=client)
    assert driver.step(1) is None
    assert not driver.consumed


def test_a_mark_is_what_a_tag_says() -> None:
    assert mark_of(*read_tag(make_tag(5, 3))) == mark_of(5, 3)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"p": 251}'])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(FedcompError):
        plan_of(text)
