"""What the tests of coded sums share: a recorded run, an oracle in Python's integers, what the server saw."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from message_examples import fields_of
from toy import client_app, fedavg, model

from fedcomp.clients.coded.mod import coded
from fedcomp.clients.compressed import compression
from fedcomp.codecs import Codec, FixedPoint, RandomK, fixed_point_of
from fedcomp.flower.coded import CODED
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import has_frame, take_frame
from fedcomp.flower.protocol import UPDATE, Announcement
from fedcomp.layout import NONE_DENSE, Layout
from fedcomp.strategies.coded.strategy import CodedFedAvg
from fedcomp.strategies.compressed import Compressed

SIZE = 1212
LAYOUT = Layout.of({name: array.numpy() for name, array in model().items()}, NONE_DENSE)
CODEC = FixedPoint(RandomK(0.3), clip=2.0**12, levels=2**11)  # steps of 2: integers stay integers
NODES = 6
ROUNDS = 14
PARCEL = 36 + 48 + 48
"""Bytes of a parcel beside residues: its header, the seal, the shard's header."""
TRANSPORTS = pytest.mark.parametrize("transport", ["hub", "peers"])
MODES = pytest.mark.parametrize("mode", ["share", "mask"])


class Recorder:
    """A mod between coding and compression: keeps every client's frame, in a list as messages may come twice."""

    def __init__(self) -> None:
        self.frames: dict[tuple[int, int], list[bytes]] = defaultdict(list)

    def __call__(self, msg: Message, context: Context, call_next) -> Message:
        round_ = fields_number(msg)
        reply = call_next(msg, context)
        if not reply.has_error() and has_frame(reply.content, UPDATE):
            self.frames[round_, int(context.node_config["partition-id"])].append(take_frame(reply.content, UPDATE))
        return reply


def fields_number(msg: Message) -> int:
    return int(next(iter(msg.content.config_records.values())).get("server-round", 0))


class Tap(MeteredGrid):
    """A grid that keeps what the server receives, and lets a test change it."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.sent: list[Message] = []
        self.received: list[Message] = []

    def send_and_receive(self, messages, **options):
        batch = list(messages)
        self.sent += batch
        replies = super().send_and_receive(batch, **options)
        self.received += replies
        return replies


def grid_of(nodes: int = NODES, *, client=None, recorder=None, fault=None, **options) -> Tap:
    mods = [coded(), *([recorder] if recorder else []), compression()]
    return Tap(InProcessGrid(client or client_app(mods), nodes, seed=4, fault=fault, **options), TrafficLedger())


def coded_sum(codec: Codec = CODEC, inner=None, **options) -> CodedFedAvg:
    given = {"symbols": 3, "threshold": 1, **options}
    around = inner or Compressed(fedavg(fraction_evaluate=0.0), codec)
    return CodedFedAvg(around, construction="sumcode", **given)


def run(strategy: CodedFedAvg, grid: Tap, rounds: int = 3, start=None):
    return strategy.start(grid, model() if start is None else start, num_rounds=rounds, timeout=9)


def oracle(strategy: CodedFedAvg, grid: Tap, recorder: Recorder, rounds: int, *, weighted: bool = True) -> np.ndarray:
    """Return the model that Python's integers and one rounding a round give, over the contributors of the reports."""
    codec = fixed_point_of(strategy.inner.codec)
    vector = np.zeros(SIZE, np.float32)
    for round_ in range(1, rounds + 1):
        included = [grid.partition_of(node) for node in strategy.reports[round_].coded.included]
        weights = {p: 10 * (p + 1) if weighted else 1 for p in included}
        if not included:
            continue
        total = np.zeros(SIZE, object)
        for p in included:
            decoded = codec.decode(recorder.frames[round_, p][0], LAYOUT).astype(np.float64)
            total += np.array([int(v) for v in np.rint(decoded / codec.step)], object) * weights[p]
        mean = np.array([float(t) * (codec.step / sum(weights.values())) for t in total]).astype(np.float32)
        vector = vector + mean
    return np.concatenate([v.reshape(-1) for v in LAYOUT.unflatten(vector).values()])


def included(strategy: CodedFedAvg, grid: Tap, round_: int = 1) -> list[int]:
    return sorted(grid.partition_of(node) for node in strategy.reports[round_].coded.included)


def json_of(fields: dict) -> dict:
    return json.loads(fields["plan"])


def sender(reply: Message, grid: Tap) -> int:
    by_id = {m.metadata.message_id: m.metadata.dst_node_id for m in grid.sent}
    return by_id[reply.metadata.reply_to_message_id]


def train_replies(grid: Tap) -> list[Message]:
    return [m for m in grid.received if m.has_content() and "tag" in fields_of(m.content)]


def after_restart(asked: Message, restarts: int = 1, **others) -> RecordDict:
    """Return what a training message holds under the number that a restarted server gives it, but for the plan."""
    content = RecordDict({k: v for k, v in asked.content.items() if k != CODED})
    for name, found in list(content.config_records.items()):
        announcement = Announcement.read(found)
        if announcement is not None:
            record = ConfigRecord(dict(found))
            replace(announcement, sequence=announcement.sequence + restarts * (1 << 32), **others).write(record)
            content[name] = record
    return content
