"""Layers that clients keep to themselves, and tensors with two names, spoil nothing of what is trained together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, RecordDict
from flwr.serverapp.strategy import FedAvg, FedMedian, Strategy
from numpy.typing import NDArray
from private_runs import forged
from toy import by_partition, fedavg, training

from fedcomp.clients.client import client
from fedcomp.clients.compressed import compression
from fedcomp.clients.half import ClientHalf
from fedcomp.clients.personal import SAMPLE, Followed, equal_tensors
from fedcomp.codecs import DGC, EDEN, QSGD, AdaComp, Codec, Identity, PowerSGD, RandomK, ScaledSign, TopK
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.codecs.scalecom import ScaleCom
from fedcomp.errors import NoUsableReply
from fedcomp.flower.grid import InProcessGrid
from fedcomp.layout import EXACT, NONE_DENSE, Layout, Update
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.power_sgd import SharedBasis
from fedcomp.strategies.shared_support import SharedSupport

Arrays = dict[str, NDArray[np.float32]]
Step = Callable[[Arrays, int], Arrays]
"""Of what came, and the node's partition."""

NODES = 4
ROUNDS = 40
_RNG = np.random.default_rng(0)
TARGET = _RNG.standard_normal((30, 40)).astype(np.float32)
HEADS = [_RNG.standard_normal((30, 40)).astype(np.float32) for _ in range(NODES)]
RANGE = max(float(np.abs(head).max()) for head in HEADS)
ZERO = {"body": np.zeros((30, 40), np.float32), "head": np.zeros((30, 40), np.float32)}


def keeping(arrays: Arrays, partition: int) -> Arrays:
    """Train the body, and return the node's own head whatever came."""
    return {"body": arrays["body"] - np.float32(0.1) * (arrays["body"] - TARGET), "head": HEADS[partition]}


def sharing(arrays: Arrays, partition: int, pace: float = 0.1) -> Arrays:
    """Train body and head from what came, the head towards the node's own."""
    head = arrays["head"] - np.float32(pace) * (arrays["head"] - HEADS[partition])
    return {"body": arrays["body"] - np.float32(0.1) * (arrays["body"] - TARGET), "head": head}


def app_of(step: Step, *halves: ClientHalf) -> Any:
    """Return an app that trains by ``step``."""
    return client(training(lambda arrays, number, partition: step(arrays, partition), None), *halves)


def run(strategy: Strategy, app: Any, model: Mapping[str, NDArray[np.float32]], rounds: int) -> Arrays:
    """Return the model after ``rounds``."""
    record = ArrayRecord({key: Array(array.copy()) for key, array in model.items()})
    with InProcessGrid(app, NODES, seed=3) as grid:
        result = strategy.start(grid, record, num_rounds=rounds)
    return {key: array.numpy() for key, array in result.arrays.items()}


def error(model: Arrays) -> float:
    return float(np.linalg.norm(model["body"] - TARGET) / np.linalg.norm(TARGET))


def said(strategy: Compressed) -> list[tuple[int, int, str]]:
    """Return what nodes remarked: round, node, text."""
    return [(n, node, text) for n, report in strategy.reports.items() for node, text in report.remarks.items()]


LONG = pytest.mark.long
CODECS = [
    TopK(density=0.05),
    EDEN(bits=1),
    pytest.param(RandomK(density=0.1), marks=LONG),
    pytest.param(DGC(density=0.05, warmup=0, momentum=0.0), marks=LONG),
    pytest.param(ErrorFeedback(TopK(density=0.1), momentum=0.9), marks=LONG),
    pytest.param(ScaledSign(), marks=LONG),
    pytest.param(AdaComp(), marks=LONG),
]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_a_kept_head_spoils_neither_the_body_nor_itself(codec: Codec) -> None:
    shared = run(Compressed(fedavg(), codec), app_of(sharing), ZERO, ROUNDS)
    strategy = Compressed(fedavg(), codec)
    kept = run(strategy, app_of(keeping), ZERO, ROUNDS)

    # Within a tenth: where both are trained, the head takes some of the frames as well.
    assert error(kept) < error(shared) + 0.1
    assert np.abs(kept["head"]).max() < 1.5 * RANGE
    remarks = said(strategy)
    assert len({node for _, node, _ in remarks}) == len(remarks) == NODES
    assert all("does not train head from the model" in text for _, _, text in remarks)


@pytest.mark.parametrize("codec", [TopK(density=0.05), pytest.param(EDEN(bits=1), marks=LONG)], ids=repr)
@pytest.mark.parametrize(
    "step",
    [
        # Nodes that have settled where their updates cancel: each returns the same again and again, but follows.
        pytest.param(sharing, id="unlike"),
        pytest.param(lambda arrays, node: sharing(arrays, node, 0.5), id="far-apart", marks=LONG),
        pytest.param(
            lambda arrays, node: {k: v + np.float32(0.001) for k, v in arrays.items()}, id="constant", marks=LONG
        ),
        pytest.param(lambda arrays, node: {**sharing(arrays, node), "head": arrays["head"]}, id="frozen", marks=LONG),
    ],
)
def test_layers_that_follow_the_server_are_never_called_kept(codec: Codec, step: Step) -> None:
    strategy = Compressed(fedavg(), codec)
    run(strategy, app_of(step), ZERO, ROUNDS)
    assert not said(strategy)


@LONG
def test_noise_is_not_taken_for_a_will_of_its_own() -> None:
    model = {"large": np.zeros((20, 30), np.float32), "bias": np.zeros(3, np.float32), "scale": np.zeros(1, np.float32)}
    rng = np.random.default_rng(5)

    def noisy(arrays: Arrays, partition: int) -> Arrays:
        return {k: v + rng.standard_normal(v.shape).astype(np.float32) for k, v in arrays.items()}

    strategy = Compressed(fedavg(), QSGD(levels=7))
    run(strategy, app_of(noisy), model, 300)
    assert not said(strategy)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(lambda: SharedSupport(ScaleCom(density=0.05)), id="SharedSupport", marks=LONG),
        pytest.param(lambda: SharedBasis(PowerSGD(rank=2)), id="SharedBasis", marks=LONG),
    ],
)
def test_a_kept_head_is_kept_out_of_the_memory_of_shared_supports_and_bases(
    strategy: Callable[[], SharedSupport | SharedBasis],
) -> None:
    shared, kept = strategy(), strategy()
    trained = run(shared, app_of(sharing), ZERO, ROUNDS)
    alone = run(kept, app_of(keeping), ZERO, ROUNDS)
    assert error(alone) < error(trained) + 0.1
    assert np.abs(alone["head"]).max() < 1.5 * RANGE
    assert any(
        "does not train head from the model" in text for r in kept.reports.values() for text in r.remarks.values()
    )


@LONG
def test_an_app_that_ignores_the_message_is_told_that_nothing_is_learnt_together() -> None:
    own = [dict(ZERO) for _ in range(NODES)]

    def alone(arrays: Arrays, partition: int) -> Arrays:
        own[partition] = sharing(own[partition], partition)
        return own[partition]

    strategy = Compressed(fedavg(), TopK(density=0.05))
    run(strategy, app_of(alone), ZERO, 80)
    assert len({node for _, node, text in said(strategy) if "nothing is learnt together" in text}) == NODES


@pytest.mark.parametrize("remedy", ["left out", "exact"])
def test_the_remedies_train_as_without_compression(remedy: str) -> None:
    def policy(name: str, shape: tuple[int, ...], dtype: str) -> object:
        return EXACT if name == "head" else NONE_DENSE(name, shape, dtype)

    model = {k: v for k, v in ZERO.items() if remedy == "exact" or k != "head"}

    def step(arrays: Arrays, partition: int) -> Arrays:
        return {k: v for k, v in keeping(arrays, partition).items() if k in arrays}

    strategy = Compressed(fedavg(), TopK(density=0.3), policy=policy if remedy == "exact" else None)
    out = run(strategy, app_of(step), model, ROUNDS)
    assert error(out) < 0.1
    assert not said(strategy)
    if remedy == "exact":
        np.testing.assert_allclose(out["head"], np.mean(HEADS, axis=0), rtol=1e-5, atol=1e-6)


# --- tensors with two names ---

EMBEDDING = _RNG.standard_normal((40, 30)).astype(np.float32)
TIED = {"embed": EMBEDDING * 0, "body": ZERO["body"], "head": EMBEDDING * 0}


def tied(arrays: Arrays, partition: int) -> Arrays:
    """Train as an app that loads both names into one tensor: the last one stays."""
    table = arrays["head"] - np.float32(0.1) * (arrays["head"] - EMBEDDING - np.float32(0.1 * partition))
    return {"embed": table, "body": sharing({**arrays, "head": ZERO["head"]}, partition)["body"], "head": table}


@pytest.mark.parametrize(
    ("codec", "inner"),
    [
        pytest.param(RandomK(density=0.1), FedAvg, id="RandomK"),
        pytest.param(TopK(density=0.1), FedAvg, id="TopK", marks=LONG),
        pytest.param(EDEN(bits=1), FedAvg, id="EDEN", marks=LONG),
        pytest.param(QSGD(levels=7), FedMedian, id="FedMedian"),
        pytest.param(ScaledSign(), FedAvg, id="ScaledSign", marks=LONG),
    ],
)
def test_two_names_of_one_tensor_stay_one(codec: Codec, inner: type[FedAvg]) -> None:
    def strategy() -> Compressed:
        return Compressed(inner(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1), codec)

    both, one = strategy(), strategy()
    out = run(both, app_of(tied), TIED, ROUNDS)
    np.testing.assert_array_equal(out["embed"], out["head"])

    def under_one(arrays: Arrays, partition: int) -> Arrays:
        done = tied({**arrays, "embed": arrays["head"]}, partition)
        return {"body": done["body"], "head": done["head"]}

    single = run(one, app_of(under_one), {k: TIED[k] for k in ("body", "head")}, ROUNDS)
    wanted = EMBEDDING + np.float32(0.1 * (NODES - 1) / 2)

    def off(model: Arrays) -> float:
        return float(np.linalg.norm(model["head"] - wanted) / np.linalg.norm(wanted))

    # Untied it is hundreds off, and grows.
    assert off(out) < 1.5 * off(single) + 0.1
    # Each node says it once, when names that came unlike were returned alike. Signs bring both names the same.
    assert (
        len({node for _, node, _ in said(both)}) == len(said(both)) == (0 if isinstance(codec, ScaledSign) else NODES)
    )
    assert all("two names (head is embed)" in text for _, _, text in said(both))


# As they are after a round that brought one of them something and the other nothing.
UNLIKE = {**TIED, "embed": EMBEDDING * np.float32(0.01)}


def test_no_place_of_a_sparse_frame_is_spent_on_a_second_name() -> None:
    model = {name: UNLIKE[name] for name in ("embed", "head")}

    def step(arrays: Arrays, partition: int) -> Arrays:
        return {"embed": EMBEDDING, "head": EMBEDDING}

    strategy = Compressed(fedavg(), TopK(density=0.05))
    out = run(strategy, app_of(step), model, 1)
    # All nodes choose the same places: a twentieth of all values, all under the first name.
    assert np.count_nonzero(out["embed"] != model["embed"]) == 0.05 * 2 * EMBEDDING.size
    np.testing.assert_allclose(out["head"], out["embed"], rtol=1e-6)


def test_tensors_that_are_equal_and_trained_each_by_itself_are_not_two_names() -> None:
    """As the two biases of a recurrent layer are, which begin at zero and have one gradient."""

    def step(arrays: Arrays, partition: int) -> Arrays:
        return {name: array - np.float32(0.1) * (array - EMBEDDING) for name, array in arrays.items()}

    strategy = Compressed(fedavg(), RandomK(density=0.1))
    run(strategy, app_of(step), {name: TIED[name] for name in ("embed", "head")}, 10)
    assert not said(strategy)


def test_where_some_nodes_send_both_names_the_mean_is_theirs_and_the_others() -> None:
    apps = [app_of(tied), app_of(tied, compression(accept=["identity"]))]
    mixed = by_partition(lambda partition: apps[partition % 2])
    dense = run(fedavg(fraction_evaluate=0.0), app_of(tied), UNLIKE, 1)
    out = run(Compressed(fedavg(fraction_evaluate=0.0), TopK(density=1.0)), mixed, UNLIKE, 1)
    for name, array in dense.items():
        np.testing.assert_allclose(out[name], array, rtol=1e-5, atol=1e-6)


def test_copies_that_cannot_be_are_not_believed() -> None:
    """A hostile header moves nothing but its own share."""
    model = {"a": ZERO["body"], "b": ZERO["head"], "c": np.zeros(7, np.float32)}
    wrong = [[1, 1], [0, 1], [2, 0], [9, 0], [-1, 0], ["b", "a"], [1.0, 0], [1], [True, False], "10", {"1": 0}]

    def claiming(claim: object) -> Arrays:
        def lie(content: RecordDict) -> None:
            try:
                content["fedcomp.node"]["copies"] = claim
            except (TypeError, ValueError):
                content["fedcomp.node"]["copies"] = "unwritable"

        app = app_of(lambda arrays, node: {k: v + np.float32(1 + i) for i, (k, v) in enumerate(arrays.items())})
        return run(Compressed(fedavg(fraction_evaluate=0.0), TopK(density=1.0)), forged(app, lie), model, 1)

    for claim in wrong[:4]:
        for i, (name, array) in enumerate(claiming(claim).items()):
            np.testing.assert_array_equal(array, model[name] + np.float32(1 + i), err_msg=f"{claim!r}, {name}")
    for claim in wrong[4:]:
        with pytest.raises(NoUsableReply, match="copies"):
            claiming(claim)


# --- what a node remembers ---


def _layout(**sizes: int) -> Layout:
    return Layout.of({k: np.zeros(size, np.float32) for k, size in sizes.items()}, NONE_DENSE)


def _context() -> Context:
    return Context(0, 1, {}, RecordDict(), {})


def test_another_model_is_followed_from_the_beginning() -> None:
    first, other = _layout(a=10), _layout(b=10)
    context = _context()
    followed = Followed.load(context.state, first)
    assert np.isnan(followed.returned).all()
    followed.judge(Update(np.ones(10, np.float32), first), {"a": np.zeros(10, np.float32)})
    followed.save(context.state)
    assert not np.isnan(Followed.load(context.state, first).returned).any()
    assert np.isnan(Followed.load(context.state, other).returned).all()


def test_what_is_remembered_does_not_grow_with_the_model() -> None:
    layout, context = _layout(a=1_000_000), _context()
    Followed.load(context.state, layout).save(context.state)
    assert sum(len(a.data) for r in context.state.array_records.values() for a in r.values()) < 20 * SAMPLE + 1000


def test_equal_constants_are_not_two_names() -> None:
    ones, rest = np.ones(20, np.float32), np.arange(20, dtype=np.float32)
    arrays = {"a": ones, "b": ones.copy(), "c": rest, "d": rest + np.float32([0] * 19 + [1]), "e": rest.copy()}
    assert equal_tensors(arrays, Layout.of(arrays, NONE_DENSE)) == {4: 2}


def test_a_lossless_codec_needs_none_of_it() -> None:
    strategy = Compressed(fedavg(), Identity())
    out = run(strategy, app_of(keeping), ZERO, 20)
    np.testing.assert_allclose(out["head"], np.mean(HEADS, axis=0), rtol=1e-5, atol=1e-6)
    assert not said(strategy)
