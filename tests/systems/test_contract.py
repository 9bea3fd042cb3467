"""The contract of systems: what holds for each of them on the driver in memory. An entry of the registry is enough.

A test takes an entry and nothing else, so that ``test_contract_catches.py`` can show that a wrong system fails it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from typing import Any

import numpy as np
import pytest
import registry
from registry import ENTRIES, NODES, Entry

from fedcomp import codecs, systems
from fedcomp.errors import ConfigError, FedcompError
from fedcomp.flower import store
from fedcomp.layout import Layout, Update, Vector
from fedcomp.local import Local, Node, Reply
from fedcomp.mailbox import Mailbox, Stamped
from fedcomp.program import (
    Answer,
    AnswerError,
    Ask,
    Given,
    Me,
    Mean,
    Now,
    Round,
    Rule,
    Said,
    Single,
    Step,
    System,
    Wait,
)
from fedcomp.rng import Key
from fedcomp.rules import REQUIRED, rules_of
from fedcomp.systems.graphs.words import Refused
from fedcomp.wire import Bundle


def among(holds: Callable[[Entry], bool] = lambda entry: True) -> pytest.MarkDecorator:
    """Run a test for all entries, or for those of which something holds."""
    chosen = [(name, entry) for name, entry in ENTRIES.items() if holds(entry)]
    params = [pytest.param(entry, id=name, marks=[pytest.mark.long] * entry.another) for name, entry in chosen]
    return pytest.mark.parametrize("entry", params)


every = among()
sums = among(lambda entry: entry.sums)


class Sum:
    """A rule: the sum of all contributions, whatever their weights. Integers stay integers."""

    adds = False

    def total(self, now: Now, codec: codecs.Codec, given: list[Given], *, raw: bool = False) -> Step | None:
        out = Update(np.full(now.layout.size, -0.0, np.float32), now.layout)
        for g in given:
            codec.gather(g.frame, 1.0, out)
        if not raw:
            codec.conclude(out)
        return Step(tuple(g.node for g in given), change=out.vector) if given else None


@dataclass
class Books(Local):
    """A driver that keeps books of what was made, by clients that remember that they made it."""

    made: Any = 0.0
    delivered: Any = 0.0
    learnt: Vector | None = None
    damaged: bool = False
    broken: tuple[tuple[int, int], ...] = ()
    passed: list[tuple[Ask, Reply]] = field(default_factory=list)

    def _receive(self, client: Node, now: Now, stamped: Stamped, *, crash: bool) -> Reply | None:
        self.learnt = None
        reply = super()._receive(client, now, stamped, crash=crash)
        if reply is not None and self.learnt is not None:
            self.made = self.made + self.learnt.astype(np.float64)
        if reply is None:
            return None
        self.passed.append((stamped.ask, reply))
        if not self.damaged:
            return reply
        frames = {name: f[:-1] + bytes([f[-1] ^ 255]) if f else b"x" for name, f in reply.answer.frames.items()}
        return reply._replace(answer=reply.answer._replace(frames=frames))

    def _move(self, step: Step, number: int) -> None:
        before = self.model.astype(np.float64)
        super()._move(step, number)
        # A mean of equal weights is a sum divided by their number.
        shares = 1 if isinstance(self.rule, Sum) else len(step.consumed)
        self.delivered = self.delivered + (self.model.astype(np.float64) - before) * shares

    def owed(self, node: int) -> Any:
        """Return what a client has made and the model has not."""
        left = self.system.residual(self.settled(node), self.layout)
        return 0.0 if left is None else left.astype(np.float64)

    def missing(self) -> float:
        """Return how far what was delivered and what is owed is from what was made."""
        owed = sum(self.owed(node) for node in list(self.clients))
        return float(np.abs(self.delivered + owed - self.made).max())


def local(entry: Entry, rule: Rule | None = None, dtype: str = "float32", **options: Any) -> Books:
    """Return a driver of an entry's system, from a model of zeros; node n has weight n + 1."""
    arrays = entry.arrays(dtype)
    layout = Layout.of(arrays)

    def work(number: int, node: int) -> None:
        if (number, node) in driver.broken:
            raise FedcompError("the app broke")

    def train(number: int, node: int, start: Vector) -> Update:
        work(number, node)
        made = entry.made(number, node, layout)
        driver.learnt = made.vector
        return replace(made, vector=start + made.vector)

    def data(me: Me, *args: Any) -> Any:
        work(me.number, me.node)
        return entry.data(me, *args)

    given = {"train": train, "weight": lambda node: node + 1.0, "nodes": NODES, "rule": rule or Mean()}
    brought = data if callable(entry.data) else entry.data
    alike = {} if brought is None else dict.fromkeys(range(NODES), brought)
    given["brought"] = entry.brought
    given |= {"data": brought if isinstance(brought, Mapping) else alike} | options
    # Made anew: what a system kept in itself would not survive a restart.
    driver = Books(altered(entry.system), layout, layout.flatten(arrays), **given)
    return driver


def counted(entry: Entry, **options: Any) -> Books:
    """Return a driver whose books can be compared: equal weights, and no division where nothing is rounded."""
    return local(entry, Sum() if entry.law == 0.0 else Mean(), **{"weight": lambda node: 1.0} | options)


def altered(system: System, **methods: Any) -> System:
    """Return the system with some methods of its class replaced."""
    kind: Any = type(type(system).__name__, (type(system),), methods)
    return kind(**{each.name: getattr(system, each.name) for each in fields(system)})


def refusals(driver: Local, number: int) -> list[str]:
    """Return who was refused in a round and why, without those who were not waited for."""
    return [reason for reason in driver.refused[number] if ": late" not in reason]


def bits(driver: Local) -> dict[str, bytes]:
    """Return all that a driver holds: the model, and the memory of each client."""
    found = {"model": driver.model.tobytes(), "state": store.dumps(driver.state, "state")}
    for node, client in sorted(driver.clients.items()):
        for name, array in sorted(client.memory.items()):
            # What is sealed for somebody is other bytes each time.
            sealed = driver.system.KEYS and name.startswith("shard/")
            found[f"{node}.{name}"] = b"%d" % array.size if sealed else array.tobytes()
        found[f"{node}.pending"] = client.pending or b""
    return found


def shape(answer: Answer, secret: bool) -> Any:
    """Return an answer without what is drawn of the operating system, of which the length stays: what is sealed, and
    with ``secret`` all but what left the memory."""
    plain = answer._replace(post=tuple((post.to, post.name, len(post.data)) for post in answer.post))
    if not secret:
        return plain
    return plain._replace(say=type(answer.say), frames={k: len(v) for k, v in answer.frames.items()}, keep={})


def run(driver: Books, rounds: int = 5, first: int = 1) -> Books:
    for number in range(first, first + rounds):
        driver.step(number)
    return driver


# Options


@every
def test_options_survive_json_and_repr(entry: Entry) -> None:
    system = entry.system
    config = json.loads(json.dumps(system.to_config()))
    again = systems.get_system(config)
    assert type(again) is type(system)
    assert again == system
    assert again.to_config() == config
    parts = [system, *(getattr(system, each.name) for each in fields(system))]
    names = {**vars(codecs), **vars(registry), **{type(part).__name__: type(part) for part in parts}}
    assert eval(repr(system), names) == system
    with pytest.raises(ConfigError):
        systems.get_system({**config, "no_such_option": 1})


@every
def test_every_field_has_a_rule(entry: Entry) -> None:
    for kind in (type(entry.system), *entry.system.SAYS):
        assert list(rules_of(kind)) == [each.name for each in fields(kind)]


# Determinism, purity


@every
def test_two_runs_are_equal_whoever_comes_first(entry: Entry) -> None:
    """Also with asks that are delivered in reverse, and with halves that are made anew for each call."""

    def backwards(self: System, now: Now) -> Round:
        program = type(self).__mro__[1].round(self, now)
        try:
            asks = next(program)
            while True:
                waits = isinstance(asks, Wait)
                asks = program.send((yield replace(asks, asks=list(asks.asks)[::-1]) if waits else list(asks)[::-1]))
        except StopIteration as end:
            return end.value

    def anew(self: System, memory: Any, ask: Ask, me: Me) -> Any:
        return type(entry.system)(**self.get_config()).client(memory, ask, me)

    one, two = run(local(entry)), local(entry)
    two.system = altered(entry.system, round=backwards, client=anew)
    assert bits(run(two)) == bits(one)
    assert np.isfinite(one.model).all()
    assert one.model.any()


@every
def test_halves_are_pure(entry: Entry) -> None:
    """A client half changes neither memory nor ask nor model; equal arguments give equal answers."""
    seen = 0

    def twice(self: System, memory: Any, ask: Ask, me: Me) -> Any:
        nonlocal seen
        before, start, asked = copy.deepcopy(memory), me.start.copy(), copy.deepcopy(ask)
        one, answer = type(self).__mro__[1].client(self, memory, ask, me)
        two, again = type(self).__mro__[1].client(self, memory, ask, me)
        assert memory.keys() == before.keys()
        assert all(memory[name].tobytes() == before[name].tobytes() for name in before)
        assert ask == asked
        assert np.array_equal(me.start, start)
        assert shape(answer, entry.secret) == shape(again, entry.secret)
        for name in {*one, *two}:
            sealed = self.KEYS and name.startswith("shard/")
            assert one[name].size == two[name].size if sealed else one[name].tobytes() == two[name].tobytes()
        seen += 1
        return one, answer

    driver = local(entry)
    driver.system = altered(entry.system, client=twice)
    run(driver)
    assert seen >= 5 * NODES


@sums
def test_a_client_half_that_refuses_leaves_everything_as_it_was(entry: Entry) -> None:
    """And nobody else notices but by its absence. What breaks is the app."""
    driver, broken = counted(entry), (2, 3)
    driver.broken = tuple((number, 2) for number in broken)
    for number in range(1, 6):
        before = bits(driver)
        step = driver.step(number)
        assert step is not None
        expected = {0, 1, 3, 4} | ({2} - ({2} if number in broken else set()))
        assert set(step.consumed) == expected or (entry.early and set(step.consumed) < expected)
        assert all(reason.startswith("2: FedcompError") for reason in refusals(driver, number))
        assert bool(refusals(driver, number)) == (number in broken)
        if number in broken:
            assert {k: v for k, v in bits(driver).items() if k[0] == "2"} == {
                k: v for k, v in before.items() if k[0] == "2"
            }
    require_law(entry, driver)


@every
def test_a_damaged_ask_is_answered_or_refused(entry: Entry) -> None:
    """It breaks by no other error, and leaves memory as it was."""
    refused = 0

    def damaged(ask: Ask) -> Iterator[Ask]:
        for each in ("frames", "blobs"):
            for name, data in getattr(ask, each).items():
                held = dict(getattr(ask, each))
                for wrong in (b"", data[:-1], data + b"x", data[::-1]):
                    yield ask._replace(**{each: {**held, name: wrong}})
                yield ask._replace(**{each: {k: v for k, v in held.items() if k != name}})
        if ask.say is not None:
            yield ask._replace(say=None)

    def client(self: System, memory: Any, ask: Ask, me: Me) -> Any:
        nonlocal refused
        before = copy.deepcopy(memory)
        for wrong in damaged(ask):
            try:
                type(self).__mro__[1].client(self, memory, wrong, me)
            except FedcompError:
                refused += 1
            assert memory.keys() == before.keys()
            assert all(memory[name].tobytes() == before[name].tobytes() for name in before)
        return type(self).__mro__[1].client(self, memory, ask, me)

    driver = local(entry)
    driver.system = altered(entry.system, client=client)
    run(driver, 7)
    assert refused > 0 or not any(ask.frames or ask.blobs for ask, _ in driver.passed)


# Resuming


def frozen(driver: Books) -> bytes:
    """Return the run as bytes: what a server saves, and what each client does."""
    clients = {
        str(node): {"memory": c.memory, "generation": c.generation, "pending": c.pending, "sent": c.sent}
        for node, c in driver.clients.items()
    }
    server = {"state": driver.state, "model": driver.model, "sequence": driver.sequence}
    consumed = {str(node): list(mark) for node, mark in driver.consumed.items()}
    kept = {str(node): dict(kept) for node, kept in driver.kept.items()}
    run = {"server": server, "consumed": consumed, "clients": clients, "kept": kept, "mail": driver.mailbox.to_plain()}
    return store.dumps(run, "a run")


def thawed(entry: Entry, data: bytes, **options: Any) -> Books:
    held = store.loads(data, "a run")
    driver = local(entry, **options)
    driver.state, driver.model, driver.sequence = (held["server"][name] for name in ("state", "model", "sequence"))
    driver.consumed = {int(node): tuple(mark) for node, mark in held["consumed"].items()}
    driver.clients = {int(node): Node(**client) for node, client in held["clients"].items()}
    driver.held = {node: set() for node in driver.clients}
    driver.kept = {int(node): kept for node, kept in held["kept"].items()}
    driver.mailbox = Mailbox.of(held["mail"], entry.system.SAYS)
    return driver


@every
def test_resumes_from_bytes_at_every_round(entry: Entry) -> None:
    """With answers that were lost before and after."""
    lost = {"fault": lambda number, node, exchange: "lost" if (number + node) % 4 == 0 else ""}
    driver, saved = local(entry, **lost), []
    for number in range(1, 7):
        saved.append(frozen(driver))
        driver.step(number)
    for number, data in enumerate(saved, 1):
        assert bits(run(thawed(entry, data, **lost), 7 - number, number)) == bits(driver)


# Against references


@among(lambda entry: entry.reference is not None)
def test_equals_its_reference(entry: Entry) -> None:
    driver = run(local(entry), 6)
    layout = driver.layout
    expected = entry.reference(lambda t, n: entry.made(t, n, layout).vector.astype(np.float64), 6, layout)
    np.testing.assert_allclose(driver.model, expected, atol=2e-3, rtol=1e-5)
    assert np.abs(expected).max() > 100


@among(lambda entry: Single in entry.system.RULES)
def test_single_updates_have_the_mean(entry: Entry) -> None:
    """What is handed on one by one is what was added up."""

    class Alone(Books):
        def _move(self, step: Step, number: int) -> None:
            self.step_made = step

    driver, whole = local(entry, Single()), local(entry)
    driver.__class__ = Alone
    # From another model than zeros.
    driver.model += entry.made(9, 0, driver.layout).vector
    whole.model += driver.model
    driver.step(1), whole.step(1)
    single = driver.step_made.single
    assert list(single) == list(range(NODES)) == list(driver.step_made.consumed)
    mean = sum((n + 1.0) * single[n].astype(np.float64) for n in single) / 15
    # Of models, where clients send these.
    np.testing.assert_allclose(
        mean, whole.model - (0 if driver.step_made.whole else driver.model), rtol=1e-5, atol=2e-3
    )
    # What becomes of them is a strategy's to say.
    with pytest.raises(NotImplementedError):
        local(entry, Single()).step(1)


@sums
def test_a_step_says_in_one_way_how_the_model_moves(entry: Entry) -> None:
    """And a system says whether clients send whole models."""
    step = local(entry).step(1)
    assert step is not None
    assert (step.model is not None) == entry.system.whole
    assert step.frame is None or entry.system.makes_steps
    ways = [each is not None for each in (step.model, step.change, step.single, step.tensors)]
    assert sum(ways) == 1 or (step.frame is not None and not any(ways))
    with pytest.raises(FrozenInstanceError):
        step.consumed = ()


def test_parsed_frames_take_no_more_memory_than_a_quarter_of_the_model() -> None:
    """Whatever the number of clients; those beyond it stay bytes, and all of them where the sum is taken already."""

    class Watching(Mean):
        adds = False

        def total(self, now: Now, codec: codecs.Codec, given: list[Given], *, raw: bool = False) -> Step | None:
            parsed = [g.frame.held_bytes() for g in given if isinstance(g.frame, Bundle)]
            assert 0 < len(parsed) < len(given)
            assert sum(parsed) <= now.layout.size < sum(parsed) + max(parsed)
            return super().total(now, codec, given, raw=raw)

    class Added(Mean):
        def total(self, now: Now, codec: codecs.Codec, given: list[Given], *, raw: bool = False) -> Step | None:
            assert not any(isinstance(g.frame, Bundle) for g in given)
            return super().total(now, codec, given, raw=raw)

    changes = []
    for rule in (Watching(), Added()):
        step = local(ENTRIES["pair-topk"], rule, nodes=40).step(1)
        assert step is not None
        assert len(step.consumed) == 40
        changes.append(step.change)
    np.testing.assert_array_equal(*changes)


@every
def test_bytes_are_those_of_frames(entry: Entry) -> None:
    """Blobs count where a node lacks them: never twice, and all of them for one that comes later."""
    driver, newcomer = local(entry), 3
    for number in range(1, 6):
        driver.step(number, range(NODES) if number == 5 else [0, 1, 2, 4])
    up = sum(len(frame) for _, reply in driver.passed for frame in reply.answer.frames.values())
    up += sum(len(post.data) for _, reply in driver.passed for post in reply.answer.post)
    down = sum(len(frame) for ask, _ in driver.passed for frame in ask.frames.values())
    down += sum(len(post.data) for ask, _ in driver.passed for post in ask.mail)
    blobs = {(ask.node, blob) for ask, _ in driver.passed for blob in ask.blobs.values()}
    assert driver.bytes_up == up > 0
    # Each ask came once.
    assert len({(ask.node, reply.sequence) for ask, reply in driver.passed}) == len(driver.passed)
    least, most = (sum(len(blob) for node, blob in blobs if node in who) for who in ((newcomer,), range(NODES)))
    assert least <= driver.bytes_down - down <= most
    assert bool(least) == bool(blobs)


@every
def test_says_whether_a_round_takes_several_exchanges(entry: Entry) -> None:
    """A buffer, which answers one exchange with parts of several rounds, refuses those."""
    exchanges: set[int] = set()
    driver = local(entry)
    driver.fault = lambda number, node, exchange: exchanges.add(exchange) or ""
    run(driver, 8)
    assert (max(exchanges) > 1) == entry.system.several


@every
def test_says_whether_it_keeps_something_between_rounds(entry: Entry) -> None:
    """A driver with several rounds in flight refuses those that do."""
    assert bool(run(local(entry), 6).state) == entry.system.KEEPS


# Conservation

FAULTS = (
    "silent",
    "lost",
    "crash",
    "second",  # breaks in the second exchange only
    "twice",
    "wiped",
    "late",
    "stale",
    "restored",  # from an older copy of its memory
    "restart",  # of the server, in the midst of a round
    "damaged",  # on the way, so that the server refuses it
)


class RestartError(Exception):
    """The server ends."""


@dataclass
class Faults:
    """A plan of faults for a driver, which keeps its books right where a fault makes a client forget."""

    driver: Books
    kinds: tuple[str, ...]
    rate: float
    happened: dict[str, int] = field(default_factory=dict)
    copies: dict[int, tuple[Any, Node, Any]] = field(default_factory=dict)
    wiped: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    began: int = 0

    def __call__(self, number: int, node: int, exchange: int) -> str:
        self.driver.damaged = False
        kinds = [kind for kind in self.kinds if kind != "restored" and (kind != "second" or exchange == 2)]
        draw = Key(3, "faults", number, node, exchange).uniform(1)[0]
        which = int(draw // self.rate)
        if which >= len(kinds):
            return ""
        kind = kinds[which]
        if kind == "restart":
            if self.happened.setdefault(f"restart in {number}", 0):
                return ""
            self.happened[f"restart in {number}"] = 1
        self.happened[kind] = self.happened.get(kind, 0) + 1
        if kind == "restart":
            raise RestartError
        self.driver.damaged = kind == "damaged"
        if kind == "wiped" and node in self.driver.clients:
            owed, client = self.driver.owed(node), self.driver.clients[node]
            if client.sent <= self.began:
                self.driver.made = self.driver.made - owed
            else:
                # What it has sent in this round may still be delivered, by others.
                left = self.driver.system.residual(client.memory, self.driver.layout)
                self.wiped.setdefault(node, (owed, 0.0 if left is None else left.astype(np.float64)))
        return {"second": "crash", "damaged": ""}.get(kind, kind)

    def step(self, number: int) -> Step | None:
        """Run a round; a server that ended goes on from what it had before it."""
        driver = self.driver
        if "restored" in self.kinds:
            self._restore(number)
        before = {"model": driver.model.tobytes(), "state": store.dumps(driver.state, ""), "known": {**driver.consumed}}
        try:
            return self._stepped(number)
        except RestartError:
            after = {"model": driver.model.tobytes(), "state": store.dumps(driver.state, ""), "known": driver.consumed}
            assert after == before
            driver.late = []
            return self._stepped(number)

    def _stepped(self, number: int) -> Step | None:
        """Run a round; what was forgotten in it was never made, but for what was delivered all the same."""
        step, self.began = None, self.driver.sequence
        try:
            step = self.driver.step(number)
        finally:
            for node, (lost, left) in self.wiped.items():
                used = step is not None and node in step.consumed
                self.driver.made = self.driver.made - (left if used else lost)
            self.wiped = {}
        return step

    def _restore(self, number: int) -> None:
        driver = self.driver
        for node in list(driver.clients):
            known = driver.consumed.get(node)
            if (number + node) % 5 == 0:
                self.copies[node] = driver.owed(node), copy.deepcopy(driver.clients[node]), known
            elif (number + node) % 5 == 2 and node in self.copies:
                owed, former, then = self.copies[node]
                # A memory to which something consumed is unknown is of no use any more.
                driver.made = driver.made - driver.owed(node) + (owed if known == then else 0.0)
                driver.clients[node] = copy.deepcopy(former)
                self.happened["restored"] = self.happened.get("restored", 0) + 1


def require_law(entry: Entry, driver: Books, magnitude: float = 1e5) -> None:
    """Require that made = delivered + residual."""
    if entry.law is not None:
        assert driver.missing() <= entry.law * magnitude


def conserves(entry: Entry, kind: str) -> None:
    """Require the law after every round under a fault, or under all of them."""
    driver = counted(entry)
    kinds = FAULTS if kind == "all" else (kind,)
    plan = Faults(driver, kinds, 0.05 if kind == "all" else 0.2)
    driver.fault = plan
    steps = 0
    for number in range(1, 17):
        steps += plan.step(number) is not None
        require_law(entry, driver)
    assert steps >= (5 if entry.least == 1 else 3)
    assert np.isfinite(driver.model).all()
    assert all(plan.happened.get(each, 0) > 0 for each in kinds if each != "second" or entry.exchanges > 1)


@among(lambda entry: not entry.another)
@pytest.mark.parametrize("kind", [kind for kind in FAULTS if kind != "second"])
def test_conserves_what_was_made(entry: Entry, kind: str) -> None:
    """Made = delivered + residual."""
    conserves(entry, kind)


@every
def test_conserves_what_was_made_under_all_faults(entry: Entry) -> None:
    conserves(entry, "all")


@among(lambda entry: entry.exchanges > 1)
def test_conserves_what_was_made_when_the_second_exchange_breaks(entry: Entry) -> None:
    conserves(entry, "second")


@sums
def test_what_comes_twice_late_or_again_is_not_used(entry: Entry) -> None:
    """Twice changes nothing; answers that are late or to earlier exchanges are as good as lost."""
    once, twice = run(local(entry)), run(local(entry, fault=lambda number, node, exchange: "twice"))
    assert bits(twice) == bits(once)
    # The second time it is the same answer.
    assert twice.passed[::2] == twice.passed[1::2]
    assert len(twice.passed) == 2 * len(once.passed)
    lost = run(local(entry, fault=lambda number, node, exchange: "lost" if node == 2 else ""))
    for kind in ("late", "stale"):
        # The first answer to an ask is needed for there to be an earlier one.
        other = run(local(entry, fault=lambda n, node, x, kind=kind: kind if node == 2 else ""))
        assert other.model.tobytes() == lost.model.tobytes()


# Weights, and who takes part


@among(lambda entry: entry.sums and entry.weighs)
def test_a_weight_of_zero_counts_for_nothing(entry: Entry) -> None:
    driver = local(entry, weight=lambda node: 0.0 if node == 2 else node + 1.0)
    step = driver.step(1)
    assert step is not None
    assert {0, 1, 3, 4} <= set(step.consumed)
    # It is no fault.
    assert not any(driver.refused.values())
    if entry.exchanges == 1:
        without = local(entry, fault=lambda number, node, exchange: "lost" if node == 2 else "")
        without.step(1)
        np.testing.assert_array_equal(driver.model, without.model)


@among(lambda entry: entry.sums and entry.weighs)
def test_without_any_weight_nothing_moves_and_nothing_is_lost(entry: Entry) -> None:
    weights = {"all": 0.0}
    # A mean of four integers is exact.
    driver = local(entry, nodes=4, weight=lambda node: weights["all"])
    assert driver.step(1) is None
    assert not driver.model.any()
    assert not driver.consumed
    weights["all"] = 1.0
    for number in range(2, 5):
        assert driver.step(number) is not None
    require_law(entry, driver)


@sums
def test_newcomers_absentees_and_nobody(entry: Entry) -> None:
    driver = counted(entry)
    for number, nodes in enumerate(([0, 1, 2], [0, 1, 2, 3], [], [1, 3], [4, 2, 0], [3], [], [0, 1, 2, 3, 4]), 1):
        before = driver.model.copy()
        step = driver.step(number, nodes)
        assert (step is not None) == (len(nodes) >= entry.least)
        if step is None:
            assert np.array_equal(driver.model, before)
        else:
            assert sorted(step.consumed) == sorted(nodes) or (entry.early and set(step.consumed) < set(nodes))
        require_law(entry, driver)
    assert not any(refusals(driver, number) for number in driver.refused)


# Hostile answers

Spoil = Callable[[Answer, int], Answer]


def spoilt() -> Iterator[tuple[str, Spoil]]:
    """Yield ways of answering wrongly, by name; the number is that of the round."""
    earlier: dict[str, bytes] = {}

    def frames(change: Callable[[bytes], bytes]) -> Spoil:
        return lambda answer, number: answer._replace(frames={k: change(v) for k, v in answer.frames.items()})

    def again(answer: Answer, number: int) -> Answer:
        was = dict(earlier)
        earlier.update(answer.frames)
        return answer._replace(frames={name: was.get(name, frame) for name, frame in answer.frames.items()})

    yield "nothing", lambda answer, number: answer._replace(frames={})
    yield "noise", frames(lambda frame: np.random.default_rng(len(frame)).bytes(len(frame)))
    yield "cut", frames(lambda frame: frame[: len(frame) // 2])
    yield "longer", frames(lambda frame: frame + b"\0")
    yield "flipped", frames(lambda frame: frame[:-1] + bytes([frame[-1] ^ 255]) if frame else frame)
    yield "empty", frames(lambda frame: b"")
    yield "newer", frames(lambda frame: frame[:4] + bytes([2]) + frame[5:])
    yield "huge", frames(lambda frame: frame + bytes(1 << 20))
    yield (
        "others",
        lambda answer, number: answer._replace(
            frames={**answer.frames, **dict.fromkeys(("support", "basis", "x"), b"x")}
        ),
    )
    yield "misnamed", lambda answer, number: answer._replace(frames={f"{k}.": v for k, v in answer.frames.items()})
    yield (
        "one frame for all",
        lambda answer, number: answer._replace(
            frames=dict.fromkeys(answer.frames, next(iter(answer.frames.values()), b""))
        ),
    )
    yield "earlier", again
    yield "wordless", lambda answer, number: answer._replace(say=None)
    yield "infinite", lambda answer, number: answer._replace(weight=float("inf"))
    yield "negative", lambda answer, number: answer._replace(weight=-1.0)
    yield "nan", lambda answer, number: answer._replace(weight=float("nan"))
    yield "heavy", lambda answer, number: answer._replace(weight=2.0**63)


class Hostile(Books):
    """Node 2 answers what ``spoil`` makes of its answers."""

    spoil: Spoil

    def _receive(self, client: Node, now: Now, stamped: Stamped, *, crash: bool) -> Reply | None:
        reply = super()._receive(client, now, stamped, crash=crash)
        if reply is None or stamped.ask.node != 2:
            return reply
        return reply._replace(answer=self.spoil(reply.answer, now.number))


def attacked(entry: Entry, spoil: Spoil, rounds: int = 5) -> set[int]:
    """Require that what node 2 answers harms nobody else; return the rounds in which it was used."""
    driver = local(entry)
    driver.__class__, driver.spoil = Hostile, spoil
    used: set[int] = set()
    for number in range(1, rounds + 1):
        step = driver.step(number)
        assert np.isfinite(driver.model).all()
        assert all(reason.startswith("2: ") for reason in refusals(driver, number))
        assert step is not None
        assert entry.early or {0, 1, 3, 4} <= set(step.consumed)
        assert set(step.consumed) <= {0, 1, 2, 3, 4}
        used |= {number} if 2 in step.consumed else set()
    if entry.exchanges == 1 and not used:
        # What is refused is as good as lost, for the model and for all others.
        lost = run(local(entry, fault=lambda number, node, exchange: "lost" if node == 2 else ""), rounds)
        assert bits(driver) == bits(lost)
    return used


WEIGHTS = ("infinite", "negative", "nan", "heavy")


def useless(entry: Entry, how: str) -> bool:
    """Whether nothing of an answer that was spoilt like this can be used."""
    # What travels by way of others is not in its sender's answer to spoil.
    return not entry.posts and how in ("nothing", "empty", "misnamed", *(WEIGHTS if entry.weighs else ()))


@among(lambda entry: entry.sums and not entry.another)
@pytest.mark.parametrize("how", [name for name, _ in spoilt()])
def test_hostile_answers_harm_nobody_else(entry: Entry, how: str) -> None:
    used = attacked(entry, dict(spoilt())[how])
    assert not used or not useless(entry, how)


@among(lambda entry: entry.sums and entry.another)
def test_hostile_answers_of_all_kinds_in_turn_harm_nobody_else(entry: Entry) -> None:
    """In every second round one, so that there are honest answers between them."""
    ways = list(spoilt())

    def spoil(answer: Answer, number: int) -> Answer:
        return answer if number % 2 else ways[number // 2 - 1][1](answer, number)

    used = attacked(entry, spoil, 2 * len(ways))
    assert not any(number % 2 == 0 and useless(entry, ways[number // 2 - 1][0]) for number in used)


@sums
def test_absurd_updates_leave_the_others_a_model(entry: Entry) -> None:
    """One client learns as much as float32 holds, once; the model stays finite, and the others stay in."""
    driver = local(entry)
    usual = driver.train

    def train(number: int, node: int, start: Vector) -> Vector:
        trained = usual(number, node, start).vector
        return np.where(trained > start, np.float32(3e38), np.float32(-3e38)) if (number, node) == (2, 2) else trained

    driver.train = train
    for number in range(1, 7):
        step = driver.step(number)
        assert np.isfinite(driver.model).all()
        assert all(reason.startswith("2: ") for reason in refusals(driver, number))
        assert step is None or entry.early or {0, 1, 3, 4} <= set(step.consumed)
        assert step is not None or number == 2


def extremes(rule: Any) -> list[Any]:
    """Return values that a rule takes and that are as far out as it allows."""
    tries: list[Any] = [0, 1, -1, 2**62, -(2**62), 2**63 - 1, 0.0, 1.0, -1.0, 1e308, -1e308, 5e-324, True, False]
    tries += [None, "", "x" * 512, b"", *getattr(rule, "choices", ())]
    tries += [getattr(rule, name) for name in ("least", "most", "absent") if hasattr(rule, name)]

    def taken(value: Any) -> bool:
        try:
            rule.read(value)
        except ValueError:
            return False
        return True

    found = [value for value in tries if taken(value)]
    numbers = sorted({value for value in found if isinstance(value, (int, float)) and value not in (0, 1)})
    near = [value for value in dict.fromkeys(found) if value not in numbers]
    outer = [*numbers[:1], *[value for value in numbers if abs(value) < 1][:1], *numbers[-1:]]
    return list(dict.fromkeys([*outer, *near]))


SPEAKING = {type(entry.system): entry for entry in sorted(ENTRIES.values(), key=lambda entry: entry.another)[::-1]}
"""One entry of each system, of every day where there is one: others say the same words."""


@among(lambda entry: entry.sums and SPEAKING[type(entry.system)] is entry)
def test_extreme_words_harm_nobody_else(entry: Entry) -> None:
    """Whatever a client says that the rules allow."""
    said = {type(reply.answer.say): None for _, reply in run(local(entry)).passed if reply.answer.say is not None}
    for kind in said:
        for name, rule in rules_of(kind).items():
            for value in extremes(rule):

                def spoil(answer: Answer, number: int, kind: Any = kind, change: Any = {name: value}) -> Answer:  # noqa: B006
                    say = replace(answer.say, **change) if isinstance(answer.say, kind) else answer.say
                    return answer._replace(say=say)

                attacked(entry, spoil)


def invalid(rule: Any) -> list[Any]:
    """Return values that a rule refuses, whatever it is."""
    tries = [None, True, 2, -(2**63), 2**62 + 0.0, "", "no such thing", b"", b"x" * 10**6, [], [1, 0], [[[]]], {}]
    tries += [float("nan"), float("inf"), "x" * 10**6]

    def refused(value: Any) -> bool:
        try:
            rule.read(value)
        except ValueError:
            return True
        return False

    return [value for value in tries if refused(value)]


def words(entry: Entry) -> dict[type[Said], Said]:
    """Return one of each kind of words that pass in a run."""
    driver = run(local(entry), 7)
    said = [each for ask, reply in driver.passed for each in (ask.say, reply.answer.say) if each is not None]
    return {type(each): each for each in said}


@every
def test_words_are_read_by_their_rules(entry: Entry) -> None:
    """They survive as plain entries; what is missing, unknown or against its rule is refused by name."""
    found = words(entry)
    assert found.keys() <= set(entry.system.SAYS)
    for kind, each in found.items():
        entries = copy.deepcopy(each.entries())
        assert kind.of(entries) == each
        with pytest.raises(AnswerError, match="has no entries"):
            kind.of({**entries, "no such entry": 1})
        for name, rule in rules_of(kind).items():
            for value in invalid(rule):
                with pytest.raises(AnswerError, match=name):
                    kind.of({**entries, name: value})
            if rule.missing is REQUIRED:
                with pytest.raises(AnswerError, match=f"'{name}' of {kind.__name__} is missing"):
                    kind.of({key: value for key, value in entries.items() if key != name})


@pytest.mark.long
def test_all_words_are_said_by_some_entry() -> None:
    # What an owner says where it does not take an ask is said in none of these runs.
    said = {kind for entry in ENTRIES.values() for kind in words(entry)} | {Refused}
    assert said == {kind for entry in ENTRIES.values() for kind in entry.system.SAYS}


# Kinds of models


def bfloat16(vector: Vector) -> Vector:
    """Return the vector without what bfloat16 does not hold."""
    return (vector.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


@among(lambda entry: entry.sums and not entry.another)
@pytest.mark.parametrize("kind", ["float64", "float16", "bfloat16"])
def test_models_of_other_dtypes(entry: Entry, kind: str) -> None:
    dtype = "float32" if kind == "bfloat16" else kind

    def start() -> Books:
        driver = local(entry, dtype=dtype)
        usual = driver.train

        def train(number: int, node: int, start: Vector) -> Vector | Update:
            trained = usual(number, node, start)
            if kind == "float64":
                return trained
            return bfloat16(trained.vector) if kind == "bfloat16" else trained.vector.astype(dtype).astype(np.float32)

        driver.train = train
        return driver

    one = run(start())
    assert bits(one) == bits(run(start()))
    assert np.isfinite(one.model).all()
    assert one.model.any()
    if kind == "float16":
        assert np.array_equal(one.model, one.model.astype(np.float16))
    if kind == "float64":
        assert one.model.tobytes() == run(local(entry)).model.tobytes()


@sums
def test_frozen_tensors_stay(entry: Entry) -> None:
    """What nobody changes stays as near to what it was as the system says."""
    driver = local(entry)
    frozen = driver.layout.by_name[next(iter(entry.shapes))]
    half = slice(frozen.offset, frozen.offset + frozen.size // 2)
    usual = driver.train

    def train(number: int, node: int, start: Vector) -> Vector:
        trained = usual(number, node, start).vector
        trained[half] = start[half]
        return trained

    driver.train = train
    driver.model[half] = np.float32(0.1)
    run(driver)
    if entry.frozen is not None:
        assert np.abs(driver.model[half] - np.float32(0.1)).max() <= entry.frozen
    assert np.isfinite(driver.model).all()


@sums
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_the_smallest_models_are_served_or_refused(entry: Entry, shape: tuple[int, ...]) -> None:
    driver = local(replace(entry, shapes={"weight": shape}, outer=0))
    try:
        driver.client(0)
    except FedcompError:
        return
    run(driver)
    assert not any(refusals(driver, number) for number in driver.refused)
    assert driver.model.any()
