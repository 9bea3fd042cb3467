"""The cost of messages in a training on one machine: serialised, by reference, and in a bare loop.

Three ways to the same model, in one run, at the sizes of the catalogue's grids. The bare loop
(:mod:`fedcomp.experiments.central`) trains, encodes and adds up, and makes no record and no message.
:class:`ByReference` is what an in-process grid would be if it serialised nothing, counted no bytes and kept no client's
state apart: less than any fast mode of a grid could do. Processor time of one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from flwr.app import Context, Message, RecordDict

from fedcomp.clients.app import app as client_app
from fedcomp.experiments.central import Plan, simulate, simulate_private
from fedcomp.experiments.findings import different_bytes
from fedcomp.experiments.serve import serve
from fedcomp.experiments.spec import RunSpec
from fedcomp.flower._private import acting_as, set_message_id
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.logs import quiet
from fedcomp.measuring import Bound, Case, Found, Row, Times

TRAININGS: Final[Mapping[str, RunSpec]] = {
    "top-k with feedback, 8 clients, a step a round": RunSpec(
        "topk",
        rounds=40,
        clients=8,
        settings={"task.hidden": "256", "lr": 0.05, "max_steps": 1, "feedback": True, "evaluate_every": 40},
    ),
    "private votes, 200 clients, four passes a round": RunSpec(
        "topagg",
        rounds=5,
        clients=200,
        settings={
            "task.hidden": "32",
            "lr": 0.5,
            "batch_size": 8,
            "epochs": 4,
            "delta": 1e-3,
            "noise_multiplier": 2.0,
            "insecure_deterministic": True,
            "evaluate_every": 5,
        },
    ),
}
"""Trainings of the experiments ``sparsifiers`` and ``topagg``, over fewer rounds."""

REPETITIONS: Final = 3


class ByReference(InProcessGrid):
    """Hands messages, replies and contexts over as they are; nothing goes wrong here, and nothing is counted."""

    def __init__(self, num_nodes: int, seed: int) -> None:
        super().__init__(client_app, num_nodes, seed=seed)
        self._contexts: dict[int, Context] = {}
        self._replies: dict[str, Message] = {}
        self._pushed = 0

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Run the clients on the messages themselves."""
        ids = []
        for message in messages:
            self._pushed += 1
            # Flower's ids are hashes of the content, which is what is not computed here.
            name = f"{self._pushed:064x}"
            set_message_id(message, name)
            node = message.metadata.dst_node_id
            context = self._contexts.setdefault(node, self.context(node))
            # Clients take records out of what they are sent; the records themselves they leave alone.
            own, content = message.content, RecordDict(dict(message.content))
            message.content = content
            with acting_as(self.run.run_id, node):
                reply = client_app(message, context)
            message.content = own
            set_message_id(reply, f"re{name[2:]}")
            self._replies[name] = reply
            ids.append(name)
        return ids

    def send_and_receive(
        self,
        messages: Iterable[Message],
        *,
        timeout: float | None = None,
        enough: Callable[[Sequence[Message]], bool] | None = None,
    ) -> list[Message]:
        """Return every reply at once."""
        return [self._replies.pop(name) for name in self.push_messages(messages)]

    def wire_bytes(self, message: Message) -> int:
        """Count nothing."""
        return 0


WAYS: Final = ("messages", "by reference", "bare loop")
"""To one model."""


def cases(quick: bool) -> Iterator[Case]:
    """Yield every training in the three ways."""
    for name, spec in TRAININGS.items():
        asked = replace(spec, rounds=2, clients=3) if quick else spec
        yield _training(name, asked, 1 if quick else REPETITIONS)


def _training(name: str, asked: RunSpec, repetitions: int) -> Case:
    models: dict[str, Any] = {}

    def train(way: str) -> None:
        models[way] = _trained(way, asked)

    def measure(found: Found) -> list[Row]:
        with quiet():
            times = found.times = Times({way: partial(train, way) for way in WAYS}, repetitions)
        each, bare = 1000 / (asked.rounds * asked.clients), times.median("bare loop")
        return [
            {
                "training": name,
                "way": way,
                "ms per client and round": round(each * times.median(way), 2),
                "over the bare loop": round(times.median(way) / bare, 2),
            }
            for way in WAYS
        ]

    bounds = [
        # Three ways to one model, or the times would compare different work.
        Bound(
            f"{name}: bytes of the models that differ",
            lambda found: sum(different_bytes(models["messages"], models[way]) for way in WAYS),
            "== 0",
            "theory: the same arithmetic",
            sure=True,
        ),
        Bound(
            f"{name}: time by reference over that of the bare loop",
            lambda found: found.times.median("by reference") / found.times.median("bare loop"),
            "<= 1.3",
            "goal: with it a grid of trainings could go through the real client and the real server",
            gate=False,
        ),
    ]
    return Case(name, measure, bounds)


def _trained(way: str, spec: RunSpec) -> Any:
    if way == "bare loop":
        return (simulate_private(spec) if spec.system == "topagg" else simulate(*Plan.of(spec))).arrays
    if way == "by reference":
        grid: InProcessGrid = ByReference(spec.clients, spec.seed)
    else:
        grid = InProcessGrid(client_app, spec.clients, seed=spec.seed)
    with grid:
        return serve(spec, grid).arrays
