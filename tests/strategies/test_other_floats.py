"""Models of float64: what nobody trains comes back bit for bit, and small steps of large values arrive."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gossip_toy
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian, FedTrimmedAvg
from toy import fedavg, in_bfloat16, training

import fedcomp as fc
from fedcomp.codecs import Codec
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.flower.rounds import fit
from fedcomp.wire import Bf16

NODES = 4
EVERYBODY = {"fraction_evaluate": 0.0, "min_train_nodes": NODES, "min_available_nodes": NODES}

MODEL = {
    "coef": np.zeros((20, 50)),
    "origin": np.array([1.7e9 + 0.123456, 123456789.0, -1e30 / 3.0]),
    "tiny": np.array([1e-300, 3e-46]),
    "intercept": np.full(40, 1e8),
    "half": np.full(30, 0.1, np.float16),
    "weight": np.full((30, 30), 0.1, np.float32),
}
UNTRAINED = ("origin", "tiny", "half")
INTERCEPT, COEF = 0.5, 0.25


def app(*, modded: bool = True) -> ClientApp:
    moved = {"intercept": INTERCEPT, "coef": COEF, "weight": np.float32(COEF)}
    found = training(lambda arrays, *_: {k: a + moved[k] if k in moved else a for k, a in arrays.items()}, None)
    return fc.client(found) if modded else found


def average(**options: Any) -> FedAvg:
    return FedAvg(**EVERYBODY, **options)


def compressed(
    codec: Codec, downlink: Codec | None = None, inner: Callable[..., FedAvg] = FedAvg, **options: Any
) -> Any:
    return fc.Compressed(inner(**EVERYBODY), codec, downlink, **options)


INTEGERS = fc.FixedPoint(fc.RandomK(1.0, shared=True), clip=8.0, levels=4096)

REPLICAS: dict[str, Callable[..., Any]] = {
    "low rank": lambda **options: fc.SharedBasis(fc.PowerSGD(rank=2), **options),
    "shared support": lambda **options: fc.SharedSupport(fc.ScaleCom(density=0.3), **options),
    "fitted basis": lambda **options: fc.FittedBasis(fc.GradiVeQ(width=20), sampling=3, compression=2, **options),
    "latents": lambda **options: fc.LearnedGradients(fc.LGC(density=0.3), **options),
}
"""Systems in which every node's replica is the model, which is one of float32."""

SYSTEMS: dict[str, Callable[[], Any]] = {
    "top-k": lambda: compressed(fc.TopK(density=0.3)),
    "all": lambda: compressed(fc.TopK(density=1.0)),
    "random-k": lambda: compressed(fc.RandomK(density=0.5)),
    "qsgd": lambda: compressed(fc.QSGD(levels=127), policy=fc.SmallDense(share=0.3)),
    "dense rest": lambda: compressed(fc.TopK(density=0.3), policy=fc.SmallDense(share=1.0)),
    "median": lambda: compressed(fc.TopK(density=1.0), inner=FedMedian),
    "trimmed": lambda: compressed(fc.TopK(density=1.0), inner=FedTrimmedAvg),
    "downlink": lambda: compressed(fc.TopK(density=0.3), fc.TopK(density=0.5)),
    "pipelined": lambda: fc.PipelinedStrategy(
        fc.Compressed(fedavg(fraction_evaluate=0.0), fc.TopK(density=1.0), feedback=False)
    ),
    "buffered": lambda: fc.Buffered(compressed(fc.TopK(density=1.0), feedback=False), concurrency=NODES, buffer=2),
    "layer by layer": lambda: fc.LayerByLayer(compressed(fc.Factors())),
    "relay": lambda: fc.CodedFedAvg(compressed(fc.TopK(density=0.3)), code="rlnc"),
    "coded sum": lambda: fc.CodedFedAvg(compressed(INTEGERS), construction="sumcode"),
    "gradient code": lambda: fc.CodedFedAvg(average(), construction="gradcode"),
    "modular sum": lambda: compressed(fc.ModularSum(fc.RandomK(1.0, shared=True), clip=8.0, levels=4096)),
    "factors": lambda: compressed(fc.Factors()),
    "eden": lambda: compressed(fc.EDEN(bits=4)),
    **REPLICAS,
}

ADAPTIVE: dict[str, Callable[[], Any]] = {
    "adaptive": lambda: compressed(fc.TopK(density=0.3), inner=partial(FedAdam, eta=1.0)),
}
"""Flower's adaptive strategies compute with what numpy reads, which of bfloat16 is no number."""

MOVED: dict[str, tuple[str, ...]] = {"modular sum": UNTRAINED}
"""What comes back within a rounding step, as the dither of a sum's frames is drawn for zeros, too."""

ROUNDS = 6


def trained(strategy: Any, rounds: int = ROUNDS, *, modded: bool = True) -> dict[str, np.ndarray]:
    model = ArrayRecord({name: Array(array) for name, array in MODEL.items()})
    with InProcessGrid(app(modded=modded), NODES, seed=3) as inner:
        result = fit(strategy, MeteredGrid(inner), model, rounds)
    return {name: array.numpy() for name, array in result.arrays.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long) if n == "coded sum" else n for n in {**SYSTEMS, **ADAPTIVE}]
)
def test_what_nobody_trains_comes_back_bit_for_bit_and_small_steps_arrive(name: str) -> None:
    found = trained({**SYSTEMS, **ADAPTIVE}[name]())
    for key in UNTRAINED:
        assert found[key].dtype == MODEL[key].dtype
        if key not in MOVED.get(name, ()):
            assert found[key].tobytes() == MODEL[key].tobytes(), key
    moved = found["intercept"] - MODEL["intercept"]
    if name not in REPLICAS:
        # Of a sparse codec what error feedback still keeps.
        assert moved.mean() >= 0.3 * INTERCEPT * ROUNDS, moved
    assert found["coef"].mean() > 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", REPLICAS)
def test_steps_that_float32_replicas_cannot_hold_are_named_and_the_advice_works(name: str) -> None:
    strategy = REPLICAS[name]()
    found = trained(strategy)
    assert not (found["intercept"] - MODEL["intercept"]).any()
    for report in strategy.reports.values():
        (note,) = [note for note in report.notes if "float32" in note]
        assert note.startswith("intercept: every node keeps the model as float32 here")
    small = fc.SmallDense()
    strategy = REPLICAS[name](policy=lambda t, *rest: "exact" if t == "intercept" else small(t, *rest))
    found = trained(strategy)
    np.testing.assert_allclose(found["intercept"] - MODEL["intercept"], INTERCEPT * ROUNDS)
    assert not [note for report in strategy.reports.values() for note in report.notes if "float32" in note]


@pytest.mark.slow
@pytest.mark.parametrize("overlapped", [fc.PipelinedStrategy, partial(fc.Buffered, concurrency=NODES, buffer=2)])
def test_rounds_that_overlap_say_which_tensors_of_whole_models_are_rounded(overlapped: Callable[..., Any]) -> None:
    strategy = overlapped(fedavg(fraction_evaluate=0.0))
    trained(strategy, 2)
    assert [note.partition(":")[0] for note in strategy.reports[1].notes] == ["coef, origin, tiny, intercept"]
    changes = overlapped(fc.Compressed(fedavg(fraction_evaluate=0.0), fc.TopK(density=1.0), feedback=False))
    trained(changes, 2)
    assert not any("float32" in note for report in changes.reports.values() for note in report.notes)


@pytest.mark.parametrize("shares", [False, pytest.param(True, marks=pytest.mark.long)])
def test_private_rounds_move_large_values_by_small_steps(shares: bool) -> None:
    """All but the noise, which is on every tensor: 4 of a population of 5 that sends .5."""
    noise = {"population": 5, "delta": 1e-3, "insecure_deterministic": True, "seed": 7, "noise_multiplier": 0.01}
    if shares:
        strategy = fc.DistributedDp(average(), fc.ShareSettings(clip=20.0, tolerated=2), **noise)
    else:
        strategy = compressed(fc.TopK(density=1.0), inner=lambda **o: fc.DpFedAvg(FedAvg(**o), clip=20.0, **noise))
    moved = trained(strategy)["intercept"] - MODEL["intercept"]
    assert abs(moved.mean() - 0.8 * INTERCEPT * ROUNDS) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("modded", [True, False])
def test_dense_frames_and_whole_models_give_what_plain_averaging_gives(modded: bool) -> None:
    """A client without the mod answers with its model: what it changed is formed in float64 as well."""
    plain = trained(average(), modded=False)
    found = trained(compressed(fc.TopK(density=1.0), feedback=False), modded=modded)
    for key, array in plain.items():
        np.testing.assert_allclose(found[key], array, rtol=1e-6 if array.dtype == np.float32 else 1e-12, err_msg=key)


SPACING = 2.0**-7
"""Of bfloat16 from 1 to 2."""

HALVES = {"w": np.full((30, 40), 1.0, np.float32), "bias": np.zeros(20, np.float32), "mask": np.full(3, -np.inf)}


def app_in_bfloat16(seen: set[str], *, modded: bool = True) -> ClientApp:
    """Every node keeps its model in bfloat16, and every other one moves ``w``, by one spacing a round."""
    found = ClientApp()

    @found.train()
    def train(msg: Message, context: Context) -> Message:
        (name, record) = next(iter(msg.content.array_records.items()))
        seen.update(array.dtype for array in record.values())
        arrays = {key: array.numpy() for key, array in to_record(to_arrays(record)).items()}
        if context.node_config["partition-id"] % 2:
            arrays["w"] = Bf16(arrays["w"]).decode().reshape(arrays["w"].shape) + np.float32(SPACING)
        content = RecordDict({name: ArrayRecord({k: in_bfloat16(v) for k, v in arrays.items()})})
        content["metrics"] = MetricRecord({"num-examples": 1})
        return Message(content, reply_to=msg)

    return fc.client(found) if modded else found


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n == "coded sum" else n for n in SYSTEMS])
def test_models_in_bfloat16_train_in_float32_and_small_means_add_up(name: str) -> None:
    """Means half of bfloat16's spacing: in bfloat16 all but the first would round to nothing."""
    seen: set[str] = set()
    rounds = 8
    with InProcessGrid(app_in_bfloat16(seen), NODES, seed=3) as grid:
        strategy = SYSTEMS[name]()
        # A coded sum has no place for what travels as values.
        given = {key: array for key, array in HALVES.items() if key != "mask" or name != "coded sum"}
        model = ArrayRecord({key: in_bfloat16(array) for key, array in given.items()})
        found = {k: a.numpy() for k, a in fit(strategy, MeteredGrid(grid), model, rounds).arrays.items()}
    assert seen == {"float32"}
    assert {array.dtype for array in found.values()} == {np.dtype(np.float32)}
    moved = found["w"].mean() - 1.0
    # Of a sparse codec what error feedback still keeps.
    assert 0.3 * rounds * SPACING / 2 < moved < 1.1 * rounds * SPACING / 2
    np.testing.assert_allclose(found["bias"], 0.0, atol=1e-3 if name in MOVED else 0.0)
    assert np.all(found.get("mask", -np.inf) == -np.inf)


def test_a_dense_answer_in_bfloat16_is_read_as_float32() -> None:
    with InProcessGrid(app_in_bfloat16(set(), modded=False), NODES, seed=3) as grid:
        strategy = compressed(fc.TopK(density=0.5))
        model = ArrayRecord({key: in_bfloat16(array) for key, array in HALVES.items()})
        found = fit(strategy, MeteredGrid(grid), model, 1).arrays
    assert strategy.reports[1].used == NODES
    np.testing.assert_array_equal(found["w"].numpy(), HALVES["w"] + np.float32(SPACING / 2))


@pytest.mark.parametrize("shares", [False, pytest.param(True, marks=pytest.mark.long)])
def test_private_rounds_take_models_in_bfloat16(shares: bool) -> None:
    noise = {"population": 5, "delta": 1e-3, "insecure_deterministic": True, "seed": 7, "noise_multiplier": 1e-3}
    if shares:
        strategy = fc.DistributedDp(average(), fc.ShareSettings(clip=1.0, tolerated=2), **noise)
    else:
        strategy = compressed(fc.TopK(density=1.0), inner=lambda **o: fc.DpFedAvg(FedAvg(**o), clip=1.0, **noise))
    model = ArrayRecord({"w": in_bfloat16(HALVES["w"])})
    with InProcessGrid(app_in_bfloat16(set()), NODES, seed=3) as grid:
        found = fit(strategy, MeteredGrid(grid), model, ROUNDS).arrays["w"].numpy()
    # Two of four nodes move; the sum is divided by the population.
    assert abs(found.mean() - 1.0 - 2 * ROUNDS * SPACING / 5) < 0.2 * ROUNDS * SPACING


def test_gossip_takes_models_in_bfloat16() -> None:
    model = ArrayRecord(
        {n: in_bfloat16(a.numpy()) if a.dtype == "float32" else a for n, a in gossip_toy.model().items()}
    )
    found = gossip_toy.strategy("choco").start(gossip_toy.grid(), model, num_rounds=2).arrays
    assert {array.dtype for array in found.values()} == {"float32", "int64"}
