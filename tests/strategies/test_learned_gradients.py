"""LGC over messages; the algorithm itself: ``tests/systems/test_lgc_program.py``."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from toy import client_app, fedavg, update, with_halves
from waiting_runs import number_of

from fedcomp.clients.programs import programs
from fedcomp.codecs import LGC, Codec, ErrorFeedback, ScaleCom, TopK
from fedcomp.codecs.lgc import Innovation, LatentSupport
from fedcomp.errors import ConfigError
from fedcomp.flower import asks
from fedcomp.flower.faults import Delivery
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import NODE_RECORD
from fedcomp.flower.rounds import drive, fit
from fedcomp.flower.wrapper import GridWrapper
from fedcomp.layout import EndsDense, Layout, SmallDense, TensorShape
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.lgc import PUBLISHED, LearnedGradients
from fedcomp.strategies.shared_support import SharedSupport

SCALE = asks.SAY + "scale"
SHAPES = {"first": (20, 20), "second": (40, 30), "third": (30, 30), "last": (20, 30), "bias": (12,)}
STAGES = {"warmup_rounds": 2, "training_rounds": 3}
"""Rounds 1 and 2 are dense, 3 to 5 train the autoencoder, latents travel from round 6 on."""


def model(value: float = 0.0) -> ArrayRecord:
    return ArrayRecord({name: Array(np.full(shape, value, np.float32)) for name, shape in SHAPES.items()})


LAYOUT = Layout.of({name: array.numpy() for name, array in model().items()}, EndsDense())
SIZE, CODED = LAYOUT.size, 1200 + 900
VARIANTS = [
    {"instance": "ring", "ef": "mask"},
    {"instance": "ring", "ef": "decoded"},
    {"instance": "server", "ef": "mask"},
    {"instance": "server", "ef": "decoded"},
]


def codec(**options) -> LGC:
    return LGC(**{"density": 0.05, "innovation": 0.005, **options})


def app() -> ClientApp:
    return client_app([programs()])


def metered(nodes: int, *, fault=None, client=None, **options) -> MeteredGrid:
    return MeteredGrid(InProcessGrid(client or app(), nodes, seed=4, fault=fault, **options), TrafficLedger())


def run(strategy, nodes: int = 4, rounds: int = 8, **options):
    grid = metered(nodes, **options)
    return fit(strategy, grid, model(), rounds, timeout=9), grid


def flat(arrays: ArrayRecord) -> np.ndarray:
    """Return a model as updates are laid out: tensors that travel dense come last."""
    return LAYOUT.flatten({name: array.numpy() for name, array in arrays.items()})


class Watched(LearnedGradients):
    """Keeps per round whose values are in the model, and what they were read by."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **{**STAGES, "fraction_evaluate": 0.0, **options})
        self.taken: dict[int, list[int]] = {}
        self.read_by: dict[int, Codec] = {}

    def _take(self, x, now, step):
        out = super()._take(x, now, step)
        if out[0] is not None:
            self.taken[now.number], self.read_by[now.number] = sorted(step.consumed), x.given[0]
        return out


def partition(context: Context) -> int:
    return int(context.node_config["partition-id"])


# Stages.


@pytest.mark.parametrize("instance", ["ring", "server"])
def test_stages_switch_at_their_rounds_and_the_first_two_are_scalecom(instance: str) -> None:
    """Everything travels until R1, values until R1 + R2; bit for bit ScaleCom's models."""
    strategy = Watched(codec(instance=instance))
    grid = metered(3)
    arrays, models = model(), {}
    for number in range(1, 9):
        arrays, _ = drive(strategy.round(number, arrays, ConfigRecord(), grid), grid, timeout=9)
        models[number] = flat(arrays)
    last = Innovation if instance == "server" else LatentSupport
    assert [isinstance(read_by, last) for read_by in strategy.read_by.values()] == [False] * 5 + [True] * 3
    plain = SharedSupport(ScaleCom(0.05), warmup_rounds=2, policy=EndsDense(), fraction_evaluate=0.0)
    halves = client_app([programs()])
    np.testing.assert_array_equal(models[5], flat(run(plain, 3, rounds=5, client=halves)[0].arrays))
    after = flat(run(SharedSupport(ScaleCom(0.05), warmup_rounds=2, policy=EndsDense()), 3, 6, client=halves)[0].arrays)
    assert not np.array_equal(models[6], after)


def test_one_client_in_the_second_stage_is_top_k_with_error_feedback() -> None:
    strategy = Watched(codec(), warmup_rounds=0, training_rounds=9)
    alone = Compressed(fedavg(fraction_evaluate=0.0), ErrorFeedback(TopK(0.05, scope="layer")), policy=EndsDense())
    np.testing.assert_array_equal(flat(run(strategy, 1)[0].arrays), flat(run(alone, 1)[0].arrays))


# What arrives.


def scaled(factor: float) -> ClientApp:
    """Return an app whose updates are the toy's times ``factor``."""
    learns = with_halves([programs()])

    @learns.train()
    def train(msg: Message, context: Context) -> Message:
        (record,) = msg.content.array_records.values()
        p, number = partition(context), number_of(msg)
        out = {
            name: Array(array.numpy() + np.float32(factor) * update(number, p, array.numpy().shape, i))
            for i, (name, array) in enumerate(record.items())
        }
        metrics = MetricRecord({"num-examples": 10})
        return Message(RecordDict({"arrays": ArrayRecord(out), "m": metrics}), reply_to=msg)

    return learns


@pytest.mark.long
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_updates_of_another_scale_give_a_model_of_that_scale(options: dict) -> None:
    """Times 2⁻¹³, about 1e-4, every number of a run is 2⁻¹³ of what it was: exactly, since values are divided by their
    root mean square before they are trained with and encoded. Without it nothing would be learnt."""
    large, _ = run(Watched(codec(**options)), client=scaled(1.0))
    small, _ = run(Watched(codec(**options)), client=scaled(2.0**-13))
    # Where a model is about 1000 and an update 1e-4 of it, additions round: from zero on they are equal in every step.
    np.testing.assert_allclose(flat(small.arrays) * 2.0**13, flat(large.arrays), rtol=1e-5, atol=1e-2)
    assert np.abs(flat(large.arrays)).max() > 1000


@pytest.mark.long
def test_the_order_in_which_replies_come_does_not_matter() -> None:
    class Turned(GridWrapper):
        def send_and_receive(self, messages, *, timeout=None):
            return list(super().send_and_receive(messages, timeout=timeout))[::-1]

    result, _ = run(Watched(codec()))
    turned = fit(Watched(codec()), Turned(metered(4)), model(), 8, timeout=9)
    np.testing.assert_array_equal(flat(result.arrays), flat(turned.arrays))


@pytest.mark.long
def test_a_server_step_scales_what_is_decoded() -> None:
    """Not latents: a decoder of half the latents is not half of what is decoded."""
    whole, half = Watched(codec()), Watched(codec(), server_lr=0.5)
    assert np.abs(flat(run(whole)[0].arrays) * 0.5 - flat(run(half)[0].arrays)).max() < 0.05


# Bytes.


# Who is lost, and what.


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "kind"),
    [*((options, "lost_reply") for options in VARIANTS), *((VARIANTS[-1], k) for k in ("offline", "raise", "corrupt"))],
    ids=str,
)
def test_another_client_stands_by_for_a_lost_leader(options: dict, kind: str) -> None:
    """Round 7 is led by the third of four; a lost one is replaced by the next, which is sent the encoder if it must."""

    def fault(delivery: Delivery):
        lost = delivery.round == 7 and delivery.partition == 2 and delivery.message_type == "train"
        return kind if lost else None

    strategy = Watched(codec(**options))
    run(strategy, 4, rounds=8, fault=fault)
    assert strategy.taken[7] == [0, 1, 3]
    assert strategy.taken[8] == [0, 1, 2, 3]


def changed(change) -> ClientApp:
    """Return an app whose replies ``change(reply, message, context)`` alters."""
    inner = app()

    def client(msg: Message, context: Context) -> Message:
        asked = Message(RecordDict(dict(msg.content.items())), msg.metadata.dst_node_id, msg.metadata.message_type)
        reply = inner(msg, context)
        if not reply.has_error():
            change(reply, asked, context)
        return reply

    return client


@pytest.mark.long
@pytest.mark.parametrize("loud", [1, 2])
def test_a_guard_sees_the_scale_that_a_client_names(loud: int) -> None:
    """In the server instance a scale multiplies what is decoded: ten times the usual one is an outlier, of the common
    node (2, which leads round 7) as of others. Without a guard it moves the model."""

    def change(reply, msg, context) -> None:
        words = reply.content.config_records[NODE_RECORD]
        if partition(context) == loud and asks.find_ask(msg.content).number == 7 and SCALE in words:
            words[SCALE] *= 1e4

    guarded = Watched(codec(instance="server"), guard=Norms(times_median=10), common="turn")
    run(guarded, 4, rounds=7, client=changed(change))
    outliers = [reason for reason in guarded.reports[7].refused.values() if "norm" in reason]
    assert len(outliers) == 1
    # Without the common node's latents nobody's values can be decoded.
    assert guarded.taken.get(7, []) == ([] if loud == 2 else [0, 2, 3])


# Rounds that go on, and those that do not.


@pytest.mark.long
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_a_node_that_joins_in_the_last_stage_works_in_its_first_round(options: dict) -> None:
    away = lambda d: "offline" if d.partition == 3 and d.round < 8 else None  # noqa: E731
    strategy = Watched(codec(**options))
    run(strategy, 4, rounds=9, fault=away)
    assert strategy.taken[7] == [0, 1, 2]
    assert [strategy.taken[n] for n in (8, 9)] == [[0, 1, 2, 3]] * 2


@pytest.mark.long
def test_partial_participation() -> None:
    strategy = Watched(codec(instance="server", ef="decoded"), fraction_train=0.5)
    run(strategy, 6, rounds=12)
    assert {len(found) for found in strategy.taken.values()} == {3}


@pytest.mark.long
def test_clients_of_other_systems_are_served_beside_it() -> None:
    one = client_app([programs()])
    plain, _ = run(SharedSupport(ScaleCom(0.05), policy=EndsDense()), client=one)
    alone, _ = run(SharedSupport(ScaleCom(0.05), policy=EndsDense()), client=client_app([programs()]))
    np.testing.assert_array_equal(flat(plain.arrays), flat(alone.arrays))
    with pytest.raises(Exception, match="its app cannot take part in LearnedGradients"):
        run(Watched(codec()), client=client_app())


def test_what_it_does_not_take() -> None:
    with pytest.raises(ConfigError, match="needs LGC"):
        LearnedGradients(ScaleCom(0.1))
    with pytest.raises(ConfigError, match="set by the server"):
        LearnedGradients(LGC(encoder=5))
    for options in ({"common": "last"}, {"training_rounds": -1}):
        with pytest.raises(ConfigError):
            LearnedGradients(**options)
    published = LearnedGradients(**PUBLISHED)
    assert (published.warmup_rounds, published.system.training_rounds) == (200, 300)
    assert (published.codec.density, published.codec.innovation) == (1e-3, 1e-5)
    assert (published.system.training.optimizer, published.system.training.lr) == ("sgd", 1e-3)


def test_the_policy_leaves_the_ends_dense() -> None:
    shapes = {name: TensorShape(shape, "float32") for name, shape in SHAPES.items()}
    found = EndsDense(first=1, last=2, others=SmallDense(share=0.0)).fit(shapes)
    decided = {name: found(name, t.shape, t.dtype) for name, t in shapes.items()}
    assert decided == {"first": 1.0, "second": None, "third": None, "last": 1.0, "bias": 1.0}
    # A first layer that is small anyway is the first one still; statistics are no weights.
    small = {"mean.running_mean": TensorShape((9,), "float32"), "tiny": TensorShape((2, 2), "float32"), **shapes}
    found = EndsDense().fit(small)
    decided = {name: found(name, t.shape, t.dtype) for name, t in small.items()}
    assert decided["mean.running_mean"] == "exact"
    assert [name for name, density in decided.items() if density is None] == ["first", "second", "third", "last"]
    with pytest.raises(ConfigError):
        EndsDense(first=-1)
