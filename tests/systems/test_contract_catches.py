"""Deliberately wrong systems, and the check of the contract that catches each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import numpy as np
import pytest
import test_contract as contract
from registry import ENTRIES, Entry

from fedcomp.codecs import Codec
from fedcomp.errors import FedcompError
from fedcomp.flower import store
from fedcomp.layout import Update
from fedcomp.program import Answer, Ask, Given, Now, Step, System
from fedcomp.rng import Key
from fedcomp.rules import Int
from fedcomp.systems.pair import Pair
from fedcomp.systems.power_sgd import SharedBasis
from fedcomp.systems.shared_support import SharedSupport
from fedcomp.wire import WireError

Check = Callable[[Entry], None]
WRONG: dict[str, tuple[type[System], str, Check, type[Exception]]] = {}


def caught(
    by: Check, example: str = "pair-topk", *, error: type[Exception] = AssertionError
) -> Callable[[type[System]], type[System]]:
    """Put a wrong system on the list: the check that catches it, by which error, and the entry whose options it has."""

    def add(kind: type[System]) -> type[System]:
        WRONG[kind.__name__] = kind, example, by, error
        return kind

    return add


def under(fault: str) -> Check:
    return lambda entry: contract.conserves(entry, fault)


def attacked(how: str) -> Check:
    return lambda entry: contract.attacked(entry, dict(contract.spoilt())[how])


@pytest.mark.parametrize("name", ["silent", "lost", "crash", "wiped", "restart", "damaged", "all"])
def test_the_right_system_passes(name: str) -> None:
    """The wrong ones fail for what is wrong with them."""
    contract.conserves(ENTRIES["pair-topk"], name)


# Memory


@caught(under("lost"))
class ForgetsRollback(Pair):
    def rollback(self, memory, frame, layout):
        return memory


@caught(under("silent"))
class DropsResidual(Pair):
    def client(self, memory, ask, me):
        memory, answer = super().client(memory, ask, me)
        return {**memory, "memory": np.zeros_like(memory["memory"])}, answer


@caught(under("silent"))
class HidesResidual(Pair):
    def residual(self, memory, layout):
        return np.zeros(layout.size, np.float32)


@caught(under("lost"))
class RollsBackTwice(Pair):
    def rollback(self, memory, frame, layout):
        return super().rollback(super().rollback(memory, frame, layout), frame, layout)


@caught(under("silent"))
class RemembersInHalfPrecision(Pair):
    def client(self, memory, ask, me):
        memory, answer = super().client(memory, ask, me)
        return {**memory, "memory": memory["memory"].astype(np.float16).astype(np.float32)}, answer


@caught(contract.test_halves_are_pure, error=ValueError)
class WritesIntoItsMemory(Pair):
    def client(self, memory, ask, me):
        memory["memory"] += me.update().vector
        return super().client(memory, ask, me)


@caught(contract.test_halves_are_pure)
class AddsToItsMemorysDictionary(Pair):
    def client(self, memory, ask, me):
        after, answer = super().client(memory, ask, me)
        memory["threshold"] = np.float32(me.number)
        return after, answer


@caught(under("crash"))
class RemembersInAttributes(Pair):
    def client(self, memory, ask, me):
        held = self.__dict__.setdefault("held", {}).get(me.node, memory)
        after, answer = super().client(held, ask, me)
        self.__dict__["held"][me.node] = after
        return after, answer


@caught(contract.test_resumes_from_bytes_at_every_round)
class RemembersInTheProcess(Pair):
    def client(self, memory, ask, me):
        process = self.__dict__.setdefault("held", {})
        first = process.setdefault(me.node, me.number)
        update = Update(me.update().vector * np.float32(first), me.layout)
        frame, memory = self.codec.encode(update, memory, me.key)
        return memory, Answer(me.node, frames={"values": frame})


@caught(contract.test_a_client_half_that_refuses_leaves_everything_as_it_was)
class HalfCommits(Pair):
    def client(self, memory, ask, me):
        try:
            return super().client(memory, ask, me)
        except FedcompError:
            return self.start(me.layout), Answer(me.node)


# Randomness


@caught(contract.test_two_runs_are_equal_whoever_comes_first, "pair-own-randomk")
class DrawsByArrival(Pair):
    calls = itertools.count()

    def client(self, memory, ask, me):
        update = me.update()
        order = next(self.calls) % 5
        frame, memory = self.codec.encode(Update(update.vector * np.float32(order + 1), me.layout), memory, me.key)
        return memory, Answer(me.node, frames={"values": frame})


@caught(contract.test_newcomers_absentees_and_nobody, "pair-own-randomk")
class DrawsByAnothersKey(Pair):
    def client(self, memory, ask, me):
        frame, memory = self.codec.encode(me.update(), memory, Key(me.seed, "uplink", me.number, 0))
        return memory, Answer(me.node, frames={"values": frame})


@caught(contract.test_newcomers_absentees_and_nobody, "pair-randomk")
class DrawsByTheLastRound(Pair):
    def client(self, memory, ask, me):
        frame, memory = self.codec.encode(me.update(), memory, Key(me.seed, "uplink", me.number - 1, me.node))
        return memory, Answer(me.node, frames={"values": frame})


# The server half


@caught(under("silent"))
class CountsANodeTwice(Pair):
    def round(self, now):
        answers = yield [Ask(node) for node in now.nodes]
        return now.mean_of(self.codec, [*answers, *answers[:1]])


@caught(under("damaged"))
class ConsumesWhoeverAnswered(Pair):
    def round(self, now):
        answers = yield [Ask(node) for node in now.nodes]
        step = now.mean_of(self.codec, answers)
        return step and replace(step, consumed=tuple(answer.node for answer in answers))


@caught(under("silent"))
class ConsumesNobody(Pair):
    def round(self, now):
        step = yield from super().round(now)
        return step and replace(step, consumed=())


@caught(contract.test_equals_its_reference)
class IgnoresWeights(Pair):
    def round(self, now):
        answers = yield [Ask(node) for node in now.nodes]
        return now.mean_of(self.codec, [answer._replace(weight=1.0) for answer in answers])


@caught(contract.test_equals_its_reference)
class SendsWholeModels(Pair):
    def client(self, memory, ask, me):
        frame, memory = self.codec.encode(me.update(whole=True), memory, me.key)
        return memory, Answer(me.node, frames={"values": frame})


@caught(contract.test_without_any_weight_nothing_moves_and_nothing_is_lost)
class DividesByNothing(Pair):
    def round(self, now):
        answers = yield [Ask(node) for node in now.nodes]
        step = now.mean_of(self.codec, answers)
        return step or Step(tuple(answer.node for answer in answers), change=np.zeros(now.layout.size, np.float32))


@caught(contract.test_newcomers_absentees_and_nobody, error=IndexError)
class NeedsSomebody(Pair):
    def round(self, now):
        first = now.nodes[0]
        step = yield from super().round(now)
        return step if first >= 0 else None


@caught(contract.test_newcomers_absentees_and_nobody)
class NeverTakesNewcomers(Pair):
    def round(self, now):
        known = now.state.setdefault("nodes", list(now.nodes))
        answers = yield [Ask(node) for node in now.nodes if node in known]
        return now.mean_of(self.codec, answers)


@caught(under("restart"))
class ChangesItsStateInPlace(Pair):
    def round(self, now):
        now.state["rounds"] = now.state.get("rounds", [])
        now.state["rounds"].append(now.number)
        return (yield from super().round(now))


@caught(contract.test_resumes_from_bytes_at_every_round, error=store.StoreError)
class KeepsWhatIsNotPlain(Pair):
    def round(self, now):
        now.state["nodes"] = set(now.nodes)
        return (yield from super().round(now))


@caught(contract.test_resumes_from_bytes_at_every_round)
class CountsRoundsByItself(Pair):
    def round(self, now):
        self.__dict__["rounds"] = self.__dict__.get("rounds", 0) + 1
        step = yield from super().round(now)
        return step and replace(step, change=step.change * np.float32(self.__dict__["rounds"]))


@caught(contract.test_two_runs_are_equal_whoever_comes_first, error=ValueError)
class MovesTheModelItself(Pair):
    def round(self, now):
        step = yield from super().round(now)
        now.model += step.change
        return replace(step, change=np.zeros_like(step.change))


# Hostile answers


def decoded(now: Now, codec: Codec, answers: list[Answer]) -> Step:
    total = Update(np.zeros(now.layout.size, np.float32), now.layout)
    for answer in answers:
        codec.accumulate(answer.frames["values"], answer.weight / 15, total)
    return Step(tuple(answer.node for answer in answers), change=total.vector)


@caught(attacked("nothing"), error=KeyError)
class ExpectsFrames(Pair):
    def round(self, now):
        answers = yield [Ask(node) for node in now.nodes]
        return now.total(self.codec, [Given(a.node, a.weight, a.frames["values"]) for a in answers])


@caught(attacked("flipped"), error=WireError)
class TakesFramesAsTheyCome(Pair):
    def round(self, now):
        answers = yield [Ask(node) for node in now.nodes]
        return decoded(now, self.codec, answers)


@caught(attacked("nan"))
class TakesWeightsAsTheyCome(Pair):
    def round(self, now):
        answers = yield [Ask(node) for node in now.nodes]
        return decoded(now, self.codec, answers)


@caught(attacked("cut"))
class GivesUpForOneBadAnswer(Pair):
    def round(self, now):
        answers = yield [Ask(node) for node in now.nodes]
        try:
            return decoded(now, self.codec, answers)
        except FedcompError:
            return None


@caught(attacked("noise"))
class RefusesTheWrongNode(Pair):
    def round(self, now):
        wrong = replace(now, refuse=lambda node, reason: now.refuse((node + 1) % 5, reason))
        return (yield from super().round(wrong))


@caught(attacked("empty"))
class LosesTheOthersToo(Pair):
    def round(self, now):
        answers = yield [Ask(node) for node in now.nodes]
        good = list(itertools.takewhile(lambda answer: answer.frames.get("values"), answers))
        return now.mean_of(self.codec, good)


# Several exchanges


@caught(under("second"), "shared-support")
class ForgetsWhatWaits(SharedSupport):
    def client(self, memory, ask, me):
        waits = ask.kind == "train" and not ask.say.lead
        after, answer = super().client(memory, ask, me)
        # Its update is made again when it is asked again, which may be never.
        return (memory if waits else after), answer


@caught(under("lost"), "shared-support")
class ForgetsWhatItSentOnASupport(SharedSupport):
    def rollback(self, memory, frame, layout):
        return memory


@caught(attacked("others"), "shared-support")
class TakesTheLastSupport(SharedSupport):
    def round(self, now):
        program = super().round(now)
        asks = next(program)
        try:
            while True:
                answers = yield asks
                support = [answer.frames["support"] for answer in answers if "support" in answer.frames][-1:]
                # Whoever sent it, and whatever it holds.
                asks = [
                    ask._replace(blobs=dict.fromkeys(ask.blobs, *support)) if support else ask
                    for ask in program.send(answers)
                ]
        except StopIteration as end:
            if end.value is not None:
                self.reads(end.value.blobs, now.number, now.layout)
            return end.value


@caught(attacked("empty"), "power-sgd-two", error=WireError)
class AddsProjectionsAsTheyCome(SharedBasis):
    def round(self, now):
        class Trusting(Now):
            def verified(self, codec, given):
                return list(given)

        return (yield from super().round(Trusting(**vars(now))))


@caught(contract.test_resumes_from_bytes_at_every_round, "power-sgd")
class KeepsTheBasisInItself(SharedBasis):
    def round(self, now):
        kept = self.__dict__.setdefault("last", {})
        now.state.update(kept)
        step = yield from super().round(now)
        kept.update(now.state)
        now.state.clear()
        return step


@caught(contract.test_equals_its_reference, "shared-support")
class AlwaysLetsTheFirstLead(SharedSupport):
    def round(self, now):
        return (yield from super().round(replace(now, number=1)))


# Options


@caught(contract.test_every_field_has_a_rule)
@dataclass(frozen=True, repr=False, eq=False)
class HasAFieldWithoutARule(Pair):
    scale: float = 1.0


@caught(contract.test_options_survive_json_and_repr)
@dataclass(frozen=True, repr=False, eq=False)
class ForgetsAnOption(Pair):
    scale: Annotated[int, Int(1)] = 1

    def get_config(self):
        return {"codec": self.codec.to_config()}


def options(system: System) -> dict[str, Any]:
    """Return what a system is made of."""
    return {each.name: getattr(system, each.name) for each in fields(system)}


@pytest.mark.parametrize("name", WRONG)
def test_caught(name: str) -> None:
    kind, example, check, error = WRONG[name]
    entry = ENTRIES[example]
    wrong = replace(entry, system=kind(**options(entry.system)))
    with pytest.raises(error):
        check(wrong)
