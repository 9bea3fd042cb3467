"""Adapters: what travels, what is drawn at both ends, what is refused by name; the mean is the mean of the products."""

from __future__ import annotations

import logging
import re
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian, Result
from numpy.typing import NDArray
from round_paths import accounted
from toy import in_bfloat16, with_halves

import fedcomp as fc
from fedcomp.adapters import AdapterNames, Halves, draw, nearest, partner_of, returned
from fedcomp.errors import LayoutError
from fedcomp.flower import checkpoint
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.records import completed, to_arrays, to_record, without
from fedcomp.flower.rounds import fit
from fedcomp.rng import Key

Named = dict[str, NDArray[Any]]

RANK, NODES = 8, 4
LAYERS = {"q_proj": (24, 16), "v_proj": (12, 16), "up": (32, 32)}
PREFIX = "base_model.model.model.layers.0."
EVERYBODY = {"fraction_evaluate": 1.0, "min_train_nodes": NODES, "min_available_nodes": NODES, "min_evaluate_nodes": 1}


def adapters(spelling: str = ".{}.weight", rank: int = RANK) -> Named:
    """Return what PEFT begins with: A random, B zero."""
    rng = Key(3, "start").generator()
    found: Named = {}
    for layer, (out, inputs) in LAYERS.items():
        found[PREFIX + layer + spelling.format("lora_A")] = rng.standard_normal((rank, inputs)).astype(np.float32)
        found[PREFIX + layer + spelling.format("lora_B")] = np.zeros((out, rank), np.float32)
    return found


def is_a(name: str) -> bool:
    return "lora_A" in name


class App:
    """An app that adds to B what a function says, in float32, and keeps what it was given."""

    def __init__(self, change: Callable[[int, int, str, tuple[int, ...]], Any], *, mods: Any = None) -> None:
        self.given: dict[tuple[int, int], Named] = {}
        self.evaluated: list[Named] = []
        self.answer: Callable[[Named], Mapping[str, Any] | ArrayRecord] = lambda arrays: arrays
        self.node = self.number = 0
        self.app = found = ClientApp(mods=[fc.compression()] if mods is None else mods)

        @found.train()
        def train(msg: Message, context: Context) -> Message:
            name, record = next(iter(msg.content.array_records.items()))
            number = int(next(iter(msg.content.config_records.values()))["server-round"])
            node = int(context.node_config["partition-id"])
            arrays = to_arrays(record)
            self.number, self.node = number, node
            self.given[number, node] = {k: v.copy() for k, v in arrays.items()}
            for key in arrays:
                if not is_a(key):
                    arrays[key] = arrays[key] + change(number, node, key, arrays[key].shape)
            reply = self.answer(arrays)
            content = RecordDict({name: reply if isinstance(reply, ArrayRecord) else fc.record(reply)})
            content["metrics"] = MetricRecord({"num-examples": node + 1})
            return Message(content, reply_to=msg)

        @found.evaluate()
        def evaluate(msg: Message, context: Context) -> Message:
            self.evaluated.append(to_arrays(next(iter(msg.content.array_records.values()))))
            return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "loss": 0.5})}), reply_to=msg)

    def run(
        self, strategy: Any, start: Named | ArrayRecord | None = None, rounds: int = 2, nodes: int = NODES
    ) -> tuple[Named, TrafficLedger]:
        ledger = TrafficLedger()
        grid = MeteredGrid(InProcessGrid(self.app, nodes), ledger)
        record = start if isinstance(start, ArrayRecord) else fc.record(adapters() if start is None else start)
        return to_arrays(strategy.start(grid, record, num_rounds=rounds).arrays), ledger


def change(number: int, node: int, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    drawn = Key(5, name, number, node).uniform(int(np.prod(shape))).reshape(shape)
    return (drawn - 0.5).astype(np.float32)


def product(model: Named, layer: str) -> NDArray[np.float64]:
    a, b = (next(v for k, v in model.items() if layer in k and word in k) for word in ("lora_A", "lora_B"))
    return b.astype(np.float64) @ a.astype(np.float64)


def exact(inner: Any = None, **options: Any) -> fc.Adapters:
    return fc.Adapters(FedAvg(**EVERYBODY) if inner is None else inner, fc.Identity(), None, **options)


# What travels.


@pytest.mark.parametrize("downlink", [None, fc.Identity(), fc.EDEN(4, scale="least")])
def test_the_app_has_the_whole_model_in_its_own_order_and_the_first_half_never_travels(downlink: Any) -> None:
    app, start = App(change), adapters()
    seen: list[list[str]] = []

    class Watching(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            seen.append(list(arrays))
            return super().configure_train(server_round, arrays, config, grid)

    end, _ = app.run(fc.Adapters(Watching(**EVERYBODY), fc.Identity(), downlink), start)
    drawn = {name: draw(0, name, start[name].shape, 1 / np.sqrt(start[name].shape[1])) for name in start if is_a(name)}
    for model in (end, *app.given.values(), *app.evaluated):
        assert list(model) == list(start)
        for name, values in drawn.items():
            np.testing.assert_array_equal(model[name], values)
    assert seen == [[name for name in start if not is_a(name)]] * 2
    assert len(app.given) == 2 * NODES
    assert len(app.evaluated) == 2 * NODES
    # Not what the app began with: that would have to be sent.
    assert not any(np.array_equal(start[name], values) for name, values in drawn.items())


def test_messages_hold_half_of_the_model_and_with_one_bit_a_thirtieth_of_that() -> None:
    sizes = {}
    start = {k: np.repeat(v, 40, axis=int(is_a(k))) for k, v in adapters().items()}
    halves = sum(v.nbytes for k, v in start.items() if not is_a(k))
    for label, strategy in {"half": exact(), "bits": fc.Adapters(FedAvg(**EVERYBODY))}.items():
        _, ledger = App(change).run(strategy, start)
        sizes[label] = strategy.reports[2].payload_bytes / NODES
        sizes[label + " down"] = ledger.total("payload", round=2, direction="down", message_type="train") / NODES
    assert sizes["half"] == pytest.approx(halves, rel=0.02)
    assert sizes["bits"] < halves / 25
    assert sizes["half down"] < 1.1 * halves
    assert sizes["bits down"] < halves / 10


def test_what_is_left_out_is_in_the_log_and_in_every_report(caplog: pytest.LogCaptureFixture) -> None:
    strategy = exact()
    with caplog.at_level(logging.INFO):
        App(change).run(strategy)
    drawn = sum(v.size for k, v in adapters().items() if is_a(k))
    (line,) = [r.getMessage() for r in caplog.records if "never travel" in r.getMessage()]
    assert f"{drawn} values" in line
    assert [r.sections["adapters"].drawn for r in strategy.reports.values()] == [drawn] * 2


def test_a_first_half_is_uniform_as_torch_begins_and_another_for_each_name_and_seed() -> None:
    values = draw(1, "x.lora_A.weight", (64, 400), 0.05)
    assert values.dtype == np.float32
    assert np.abs(values).max() <= np.float32(0.05)
    assert values.std() == pytest.approx(0.05 / np.sqrt(3), rel=0.02)
    assert abs(values.mean()) < 0.001
    # A stream that every version must draw again: the server and its clients need not be of one.
    assert draw(0, "a.lora_A.weight", (1, 4), 1.0).ravel().tolist() == [
        0.682344377040863,
        0.13794994354248047,
        -0.8796730041503906,
        0.8679952025413513,
    ]
    others = [draw(2, "x.lora_A.weight", (64, 400), 0.05), draw(1, "y.lora_A.weight", (64, 400), 0.05)]
    assert all(abs(np.corrcoef(values.ravel(), other.ravel())[0, 1]) < 0.03 for other in others)


# The mean.


def test_the_mean_of_frames_is_the_mean_of_products_with_unequal_ranks_weights_and_one_client_missing() -> None:
    ranks = {0: 2, 1: 2, 2: 4, 3: 8}

    def trained(number: int, node: int, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        if node == 1:
            raise RuntimeError("gone")
        step = change(number, node, name, shape)
        step[:, ranks[node] :] = 0.0
        return step

    app = App(trained)
    end, _ = app.run(exact(), rounds=2)
    weights = {node: node + 1 for node in ranks if node != 1}
    for layer in LAYERS:
        start = app.given[2, 0]
        models = {n: {k: v + (0 if is_a(k) else trained(2, n, k, v.shape)) for k, v in start.items()} for n in weights}
        means = sum(w * product(models[n], layer) for n, w in weights.items()) / sum(weights.values())
        np.testing.assert_allclose(product(end, layer), means, atol=1e-6)
        # Of factors that are padded, in place of differences, a client of rank 2 takes the other columns away.
        cut = {
            n: {k: v if is_a(k) else np.where(np.arange(RANK) < ranks[n], v, 0) for k, v in m.items()}
            for n, m in models.items()
        }
        padded = sum(w * product(cut[n], layer) for n, w in weights.items()) / sum(weights.values())
        assert np.abs(padded - means).max() > 1e-2


def test_a_mean_of_both_halves_lacks_the_covariance_of_their_changes() -> None:
    """What the drop-in pair does with an app that trains both: sum of w_i (b_i - b)(a_i - a) is missing."""
    app = App(change)

    def both(arrays: Named) -> Named:
        return {k: v + change(app.number, app.node, k, v.shape) if is_a(k) else v for k, v in arrays.items()}

    app.answer = both
    end, _ = app.run(fc.Compressed(FedAvg(**EVERYBODY), fc.Identity()), rounds=2)
    start = {k: v.astype(np.float64) for k, v in app.given[2, 0].items()}
    weights = np.arange(1, NODES + 1) / 10
    steps = [{k: change(2, node, k, v.shape).astype(np.float64) for k, v in start.items()} for node in range(NODES)]
    for layer in LAYERS:
        a, b = (next(k for k in start if layer in k and word in k) for word in ("lora_A", "lora_B"))
        exact_mean = sum(w * (start[b] + s[b]) @ (start[a] + s[a]) for w, s in zip(weights, steps, strict=True))
        means = {k: sum(w * s[k] for w, s in zip(weights, steps, strict=True)) for k in (a, b)}
        missing = sum(w * (s[b] - means[b]) @ (s[a] - means[a]) for w, s in zip(weights, steps, strict=True))
        np.testing.assert_allclose(product(end, layer) + missing, exact_mean, atol=1e-5)
        assert np.abs(missing).max() > 1e-2


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_all_clients_train_from_one_replica_whatever_they_missed(fraction: float) -> None:
    """With one bit down it is not the server's model, and what it lacks comes with the next step."""
    models: list[Named] = []

    class Watching(FedAvg):
        def aggregate_train(self, server_round, replies):
            found = super().aggregate_train(server_round, replies)
            assert found[0] is not None
            models.append(to_arrays(found[0]))
            return found

    still = 12

    def until(number: int, node: int, name: str, shape: tuple[int, ...]) -> Any:
        # Never quite still: of a model that did not change there is no step.
        return change(number, node, name, shape) * (1.0 if number < still else 1e-6)

    options = {**EVERYBODY, "fraction_train": fraction, "min_train_nodes": 2, "fraction_evaluate": 0.0}
    app = App(until)
    app.run(fc.Adapters(Watching(**options), fc.Identity()), rounds=3 * still)
    far = {}
    for number in range(2, 3 * still + 1):
        replicas = [model for (at, _), model in app.given.items() if at == number]
        assert len(replicas) == fraction * NODES
        for name, values in replicas[0].items():
            assert all(np.array_equal(other[name], values) for other in replicas)
        halves = {k: v for k, v in replicas[0].items() if not is_a(k)}
        far[number] = max(float(np.abs(v - models[number - 2][k]).max()) for k, v in halves.items())
    assert far[still] > 0.05
    assert far[3 * still] < 0.01 * far[still]


def test_signs_of_rows_and_columns_do_not_matter() -> None:
    """Where A's rows and B's columns change sign together, the same model is trained, in the same bytes."""
    flip = np.where(Key(9, "signs").uniform(RANK) < 0.5, -1, 1).astype(np.float32)
    ends, sizes = [], []
    for signs in (np.ones(RANK, np.float32), flip):
        strategy = exact()
        app = App(lambda n, i, k, shape, signs=signs: change(n, i, k, shape) * signs)
        end, _ = app.run(strategy)
        ends.append({k: v * signs[:, None] if is_a(k) else v for k, v in end.items()})
        sizes.append(strategy.reports[2].payload_bytes)
    for layer in LAYERS:
        np.testing.assert_allclose(product(ends[0], layer), product(ends[1], layer), atol=1e-6)
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("codec", [fc.EDEN(1), fc.ErrorFeedback(fc.TopK(0.1)), fc.QSGD(levels=7), fc.Auto()], ids=repr)
def test_zero_halves_and_clients_that_do_not_train_are_no_trouble(codec: Any) -> None:
    def trained(number: int, node: int, name: str, shape: tuple[int, ...]) -> Any:
        return 0.0 if number == 1 or node == 0 or "v_proj" in name else change(number, node, name, shape)

    end, _ = App(trained).run(fc.Adapters(FedAvg(**EVERYBODY), codec), rounds=3)
    assert all(np.isfinite(v).all() for v in end.values())
    assert any(v.any() for k, v in end.items() if "lora_B" in k)


@pytest.mark.parametrize("inner", [FedMedian, FedAdam])
def test_other_strategies_see_what_travels(inner: Any) -> None:
    end, _ = App(change).run(exact(inner(**EVERYBODY)))
    assert list(end) == list(adapters())
    assert all(v.any() for v in end.values())


def test_a_run_goes_on_with_its_own_result_and_no_other_seed_s() -> None:
    end, _ = App(change).run(exact())
    again, _ = App(change).run(exact(), end)
    for name, values in end.items():
        assert is_a(name) == np.array_equal(values, again[name])
    with pytest.raises(fc.ConfigError, match="nor drawn from seed=1"):
        App(change).run(exact(seed=1), end)


@pytest.mark.parametrize("working", ["bfloat16", "float16"])
def test_a_run_goes_on_from_what_an_app_of_sixteen_bits_has_saved(working: str) -> None:
    end, _ = App(change).run(exact())
    saved = {k: nearest(v, working) for k, v in end.items()}
    record = ArrayRecord(
        {k: in_bfloat16(v) if working == "bfloat16" else Array(v.astype(working)) for k, v in saved.items()}
    )
    app = App(change)
    app.run(exact(), record, rounds=1)
    for name, values in app.given[1, 0].items():
        np.testing.assert_array_equal(values, end[name] if is_a(name) else saved[name])
    with pytest.raises(fc.ConfigError, match="nor drawn from seed=1"):
        App(change).run(exact(seed=1), record)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: fc.Adapters(FedAdam(**EVERYBODY), fc.TopK(density=0.2)),
        lambda: fc.PipelinedStrategy(fc.Adapters(FedAvg(fraction_evaluate=0.0), fc.EDEN(2)), width=2),
    ],
    ids=["one round", "rounds in flight"],
)
def test_an_interrupted_run_continues_exactly(make: Callable[[], Any], tmp_path: Path) -> None:
    def begun() -> tuple[Any, MeteredGrid]:
        return make(), MeteredGrid(InProcessGrid(App(change).app, 2 * NODES, seed=4))

    strategy, grid = begun()
    expected = to_arrays(fit(strategy, grid, to_record(adapters()), 5, timeout=9).arrays)
    strategy, grid = begun()

    def keep(number: int, arrays: ArrayRecord, outcome: Any) -> None:
        checkpoint.save(tmp_path / "run", server_round=number, arrays=arrays, strategy=strategy, grid=grid)
        if number == 3:
            raise KeyError("interrupted")

    with pytest.raises(KeyError, match="interrupted"):
        fit(strategy, grid, to_record(adapters()), 5, timeout=9, on_round=keep)
    strategy, grid = begun()
    stored = checkpoint.load(tmp_path / "run")
    stored.apply(strategy, grid)
    end = to_arrays(fit(strategy, grid, stored.arrays, 5, start_round=4, timeout=9).arrays)
    for name, values in expected.items():
        np.testing.assert_array_equal(end[name], values)


class OwnLoop(FedAvg):
    """A strategy as hubs have them: a loop of its own, which looks at the model."""

    seen: list[list[str]]

    def start(self, grid, initial_arrays, num_rounds=3, **options):
        self.seen, arrays = [], initial_arrays
        for number in range(1, num_rounds + 1):
            messages = self.configure_train(number, arrays, self.config, grid)
            arrays, _ = self.aggregate_train(number, list(grid.send_and_receive(list(messages))))
            self.seen.append(list(arrays))
        found = Result()
        found.arrays = arrays
        return found


def test_a_loop_of_the_strategy_s_own_has_the_whole_model() -> None:
    inner = OwnLoop(**EVERYBODY)
    inner.config = ConfigRecord()
    app = App(change)
    end, _ = app.run(exact(inner))
    straight, _ = App(change).run(exact())
    assert inner.seen == [list(adapters())] * 2
    for name, values in end.items():
        np.testing.assert_array_equal(values, straight[name])


@pytest.mark.parametrize(
    "around",
    [
        lambda pair: fc.PipelinedStrategy(pair, width=2),
        lambda pair: fc.Buffered(pair, concurrency=4, buffer=2),
        lambda pair: fc.Conditional(pair),
        lambda pair: fc.CodedFedAvg(pair, symbols=2),
    ],
    ids=["pipelined", "buffered", "conditional", "relayed"],
)
def test_strategies_around_the_pair_carry_it(around: Callable[[Any], Any]) -> None:
    app = App(change, mods=[])
    app.app = fc.client(app.app, fc.conditional(lambda msg, context: 1.0))
    few = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    end, _ = app.run(around(exact(few)), rounds=3)
    start = adapters()
    assert list(end) == list(start)
    assert len(app.given) > NODES
    for model in (end, *app.given.values()):
        assert set(model) == set(end)
        assert all(np.array_equal(model[name], end[name]) for name in end if is_a(name))
    assert all(end[name].any() for name in end)


def test_differential_privacy_counts_what_travels() -> None:
    private = fc.DpFedAvg(
        FedAvg(**{**EVERYBODY, "fraction_evaluate": 0.0}), clip=1.0, noise_multiplier=1.0, population=NODES
    )
    app = App(change)
    end, _ = app.run(fc.Adapters(private, fc.Identity(), None))
    start = adapters()
    for name in start:
        drawn = [model[name] for model in app.given.values()] + [end[name]]
        assert is_a(name) == all(np.array_equal(values, drawn[0]) for values in drawn)


@pytest.mark.slow
@pytest.mark.parametrize("codec", [fc.TopK(density=1.0), fc.EDEN(4)], ids=repr)
def test_privacy_of_records_covers_what_travels(codec: Any) -> None:
    app = with_halves([accounted(), fc.compression()])
    given: list[Named] = []

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        name, record = next(iter(msg.content.array_records.items()))
        given.append(to_arrays(record))
        moved = {k: v if is_a(k) else v + 1 for k, v in given[-1].items()}
        return Message(RecordDict({name: to_record(moved)}), reply_to=msg)

    plan = fc.DpSgdPlan(noise_multiplier=1.5, rate=0.1, steps=3, delta=1e-5)
    mean = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    strategy = fc.RecordDp(fc.Adapters(mean, codec, None, feedback=False), plan, records=1000)
    with InProcessGrid(app, 3) as grid:
        end = to_arrays(strategy.start(grid, to_record(adapters()), num_rounds=2).arrays)
    assert strategy.privacy.releases == 6
    for name, values in end.items():
        assert is_a(name) == all(np.array_equal(model[name], values) for model in given)
        assert is_a(name) or values.mean() == pytest.approx(2.0, abs=0.3)


# Names.


def test_the_other_half_of_a_name() -> None:
    for spelling in ("x.lora_{}.weight", "x.lora_{}.default.weight", "lora_{}", "a/b/lora_{}"):
        assert partner_of(spelling.format("A")) == (spelling.format("B"), "lora_B", True)
        assert partner_of(spelling.format("B")) == (spelling.format("A"), "lora_A", False)
    assert partner_of("x.lora_embedding_A.default") == ("x.lora_embedding_B.default", "lora_embedding_B", False)
    for other in ("x.weight", "x.lora_Ab.weight", "x.lora_magnitude_vector", "my_lora_A.weight"):
        assert partner_of(other) == ("", "", False)


def layout_of(model: Named, **options: Any) -> list[str]:
    """Return the names that are drawn."""
    return sorted(AdapterNames(**options).halves(model, 0).names(list(model)))


@pytest.mark.parametrize("spelling", [".{}.weight", ".{}.default.weight", ".{}"])
def test_pairs_are_found_by_name_in_any_order(spelling: str) -> None:
    model = adapters(spelling)
    expected = [name for name in sorted(model) if is_a(name)]
    names = list(model)
    for seed in range(10):
        order = Key(seed, "order").generator().permutation(len(names))
        shuffled = {names[i]: model[names[i]] for i in order}
        assert layout_of(shuffled) == expected
        halves = AdapterNames().halves(shuffled, 0)
        assert Halves.from_config(halves.to_config()) == halves
        travels = without(to_record(shuffled), halves)
        assert list(travels) == [name for name in shuffled if not is_a(name)]
        assert list(completed(travels, halves, 0)) == list(shuffled)


@pytest.mark.parametrize(
    ("prefix", "layers"),
    [
        # Llama, with a rank of its own for one module; a square layer, and one whose rank is its width.
        (
            "base_model.model.model.layers.0.",
            {
                "self_attn.q_proj": (64, 64, 8),
                "self_attn.v_proj": (16, 64, 4),
                "mlp.down_proj": (64, 172, 8),
                "mlp.gate_proj": (172, 64, 64),
            },
        ),
        # GPT-2: Conv1D keeps its weight transposed and PEFT its adapters not; one B for queries, keys and values.
        (
            "base_model.model.transformer.h.0.",
            {"attn.c_attn": (192, 64, 8), "attn.c_proj": (64, 64, 8), "mlp.c_proj": (64, 256, 8)},
        ),
    ],
    ids=["Llama", "GPT-2"],
)
def test_halves_of_known_models_are_drawn_as_they_begin(prefix: str, layers: dict[str, tuple[int, int, int]]) -> None:
    model: Named = {}
    for layer, (out, inputs, rank) in layers.items():
        model[f"{prefix}{layer}.lora_A.weight"] = np.ones((rank, inputs), np.float32)
        model[f"{prefix}{layer}.lora_B.weight"] = np.zeros((out, rank), np.float32)
    halves = AdapterNames().halves(model, 3)
    drawn = halves.drawn({k: v.shape for k, v in model.items() if not is_a(k)}, 3)
    assert list(drawn) == [name for name in model if is_a(name)]
    for layer, (_, inputs, rank) in layers.items():
        values = drawn[f"{prefix}{layer}.lora_A.weight"]
        assert values.shape == (rank, inputs)
        # By its inputs, not by its outputs or rank.
        assert np.abs(values).max() == pytest.approx(1 / np.sqrt(inputs), rel=0.03)


def test_the_half_that_is_zero_travels_whatever_it_is_called() -> None:
    embedding = {
        "embed.lora_embedding_A": np.zeros((RANK, 65), np.float32),
        "embed.lora_embedding_B": np.ones((32, RANK), np.float32),
    }
    swapped = {k: v.T.copy() for k, v in adapters().items() if "q_proj" in k}
    swapped = {k: v if is_a(k) else np.zeros_like(v) for k, v in swapped.items()}
    turned = {
        k.replace("lora_A", "x").replace("lora_B", "lora_A").replace("x", "lora_B"): v for k, v in adapters().items()
    }
    assert layout_of(embedding) == ["embed.lora_embedding_B"]
    assert layout_of(turned) == [name for name in sorted(turned) if "lora_B" in name]
    assert layout_of({**swapped, **embedding}) == [*sorted(k for k in swapped if is_a(k)), "embed.lora_embedding_B"]
    halves = AdapterNames().halves(embedding, 0)
    # As PEFT begins: of unit variance, since one row of the other half is looked up.
    (values,) = halves.drawn({"embed.lora_embedding_A": (RANK, 65)}, 0).values()
    assert values.std() == pytest.approx(1.0, rel=0.1)


def test_names_of_other_libraries_and_convolutions() -> None:
    own = {
        "block/down/kernel": np.ones((16, 4), np.float32),
        "block/up/kernel": np.zeros((4, 24), np.float32),
        "conv/down/kernel": np.ones((4, 3, 5, 5), np.float32),
        "conv/up/kernel": np.zeros((8, 4, 1, 1), np.float32),
    }
    assert layout_of(own, pairs=(("down", "up"),)) == ["block/down/kernel", "conv/down/kernel"]
    halves = AdapterNames(pairs=(("down", "up"),)).halves(own, 0)
    drawn = halves.drawn({k: v.shape for k, v in own.items() if "up" in k}, 0)
    assert np.abs(drawn["block/down/kernel"]).max() == pytest.approx(1 / 4, rel=0.2)
    assert np.abs(drawn["conv/down/kernel"]).max() == pytest.approx(1 / np.sqrt(75), rel=0.05)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"model.embed_tokens.base_layer.weight": np.ones((65, 16))}, "model.embed_tokens.base_layer.weight"),
        # PEFT's name of a module in modules_to_save, and the one in torch's own state dict.
        ({"base_model.model.lm_head.weight": np.ones((65, 16))}, "base_model.model.lm_head.weight"),
        ({"lm_head.modules_to_save.default.weight": np.ones((65, 16))}, "lm_head.modules_to_save.default.weight"),
        ({"q.base_layer.bias": np.ones(16)}, "q.base_layer.bias"),
        ({"k.lora_A.weight": np.ones((4, 16))}, "k.lora_A.weight"),
        ({"k.lora_B.bias": np.ones(16)}, r"allow a bias of its own with also=['k.lora_B.bias']"),
        ({"base_model.model." + PREFIX + "k.lora_A.weight": np.ones((4, 16))}, "prefix twice"),
        ({"k.lora_A.weight": np.ones((4, 16)), "k.lora_B.weight": np.ones((8, 4))}, "neither 'k.lora_A.weight' nor"),
        ({"k.lora_A.weight": np.ones((4, 16)), "k.lora_B.weight": np.zeros((8, 5))}, "share no axis"),
        ({"k.lora_A.weight": np.ones(4), "k.lora_B.weight": np.zeros((8, 4))}, "not a matrix"),
        ({"k.lora_A.weight": np.ones((4, 16), int), "k.lora_B.weight": np.zeros((8, 4))}, "int64"),
    ],
)
def test_what_is_no_half_is_refused_by_name_unless_it_is_allowed(more: Named, text: str) -> None:
    with pytest.raises(fc.ConfigError, match=re.escape(text)):
        App(change).run(
            exact(), {**adapters(), **{k: v.astype(np.float32) if v.dtype.kind == "f" else v for k, v in more.items()}}
        )


def test_what_is_allowed_and_the_magnitudes_of_dora_are_ordinary_tensors() -> None:
    more = {
        PREFIX + "q_proj.lora_magnitude_vector": np.ones(24, np.float32),
        "base_model.model.lm_head.weight": np.ones((5, 16), np.float32),
        "q.lora_B.bias": np.zeros(7, np.float32),
        "['head'][0]": np.zeros(6, np.float32),
    }
    start = {**more, **adapters()}
    app = App(change)
    end, _ = app.run(exact(also=("*.lm_head.weight", "*.bias", "['head'][0]")), start)
    assert list(end) == list(start)
    for name in more:
        weights = np.arange(1, NODES + 1) / 10
        step = sum(w * change(n, i, name, start[name].shape) for n in (1, 2) for i, w in enumerate(weights))
        np.testing.assert_allclose(end[name], start[name] + step, atol=1e-5)


# Replies.


def refusals(answer: Callable[[Named], Named], **options: Any) -> str:
    """Return why the reply of one client of two is not used."""
    app = App(change)
    app.answer = answer
    with pytest.raises(fc.NoUsableReply) as found:
        app.run(exact(), rounds=1, **options)
    return str(found.value)


def test_a_first_half_that_was_trained_is_refused_by_name() -> None:
    text = refusals(lambda arrays: {k: v + (0.01 if "v_proj.lora_A" in k else 0) for k, v in arrays.items()})
    assert PREFIX + "v_proj.lora_A.weight" in text
    assert "fc.freeze(model)" in text


def test_an_adapter_that_was_not_loaded_is_refused_by_name() -> None:
    """A wrong prefix loads nothing, and PEFT raises nothing: the app trains the halves that it began with."""
    assert "came back changed" in refusals(lambda arrays: adapters())


def test_a_reply_under_other_names_is_refused_by_name() -> None:
    text = refusals(lambda arrays: {"base_model.model." + k: v for k, v in arrays.items()})
    assert f"lacks '{PREFIX}q_proj.lora_A.weight'" in text
    assert "lacks" in refusals(lambda arrays: {k: v for k, v in arrays.items() if not is_a(k)})
    text = refusals(lambda arrays: {k.replace("up.lora_B", "up.lora_C"): v for k, v in arrays.items()})
    assert "up.lora_B" in text


def test_apps_without_the_mod_are_refused_whatever_they_return() -> None:
    for keep in (lambda name: True, lambda name: not is_a(name)):
        app = App(change, mods=[])
        app.answer = lambda arrays, keep=keep: {k: v for k, v in arrays.items() if keep(k)}
        with pytest.raises(fc.NoUsableReply, match=r"lacks the client half of Adapters; write app = ClientApp\(mods="):
            app.run(exact(), rounds=1)


def test_a_server_s_description_is_bounded() -> None:
    for at in (((0, 1 << 20, 1 << 20),), ((0, -1, 3),), (("x",),)):
        with pytest.raises(fc.ConfigError):
            Halves(at)
    for config in ({}, {"at": [], "more": 1}, {"at": "x"}):
        with pytest.raises(fc.ConfigError):
            Halves.from_config(config)
    good = AdapterNames().halves(adapters(), 0)
    with pytest.raises(LayoutError):
        good.drawn({"x.lora_B.weight": (3, 8)}, 0)
    for shapes in (((0, 8),), ((0, 8, 16),)):
        with pytest.raises(fc.ConfigError, match="share no axis"):
            Halves(shapes).drawn({"x.lora_B.weight": (8,)}, 0)
    far = Halves(((500, 8, 16), *good.at[1:]))
    shapes = {k: v.shape for k, v in adapters().items() if not is_a(k)}
    with pytest.raises(LayoutError, match="do not fit"):
        far.placed(shapes, far.drawn(shapes, 0))


def test_nodes_can_make_the_first_model_themselves() -> None:
    start = adapters()
    app = App(change, mods=[fc.compression(first_model=lambda msg, context: fc.record(start))])
    strategy = fc.Adapters(FedAvg(**EVERYBODY), first_model_at_nodes=True)
    sent = []
    for made in (strategy, fc.Adapters(FedAvg(**EVERYBODY))):
        _, ledger = app.run(made, start, rounds=1)
        sent.append(ledger.total("payload", direction="down", message_type="train"))
        assert not made.reports[1].refused
    assert sent[1] - sent[0] > 0.9 * NODES * sum(v.nbytes for k, v in start.items() if not is_a(k))


# Sixteen bits.


@pytest.mark.parametrize("codec", [fc.Identity(), fc.TopK(density=1.0)], ids=repr)
@pytest.mark.parametrize("view", ["bfloat16", "float32", "float16"])
def test_steps_below_the_spacing_of_sixteen_bits_add_up(view: str, codec: Any) -> None:
    """One client of weight 1 in 10 moves by one unit in the last place, ten times: together they are one."""
    working = "float16" if view == "float16" else "bfloat16"
    unit = 2.0**-10 if working == "float16" else 2.0**-7

    def answer(arrays: Named) -> Mapping[str, Any] | ArrayRecord:
        step = 1.0 if app.number == 1 else unit if app.node == 0 else 0.0
        given = app.given[app.number, app.node]
        loaded = {k: nearest(v, working) + (0 if is_a(k) else np.float32(step)) for k, v in given.items()}
        if view == "bfloat16":
            return ArrayRecord({k: in_bfloat16(v) for k, v in loaded.items()})
        return {k: v.astype(view) for k, v in loaded.items()}

    app = App(lambda *_: 0.0)
    app.answer = answer
    strategy = fc.Adapters(FedAvg(**EVERYBODY), codec, None, feedback=False) if not codec.lossless else exact()
    end, _ = app.run(strategy, rounds=11)
    assert {v.dtype for v in end.values()} == {np.dtype(np.float32)}
    for name in end:
        if not is_a(name):
            np.testing.assert_allclose(end[name], 1 + unit, atol=1e-6)
            np.testing.assert_array_equal(nearest(end[name], working), np.float32(1 + unit))


def test_a_model_of_sixteen_bits_is_kept_in_thirty_two() -> None:
    start = ArrayRecord(
        {k: in_bfloat16(v) if "q_proj" in k else Array(v.astype(np.float16)) for k, v in adapters().items()}
    )
    app = App(change)
    end, _ = app.run(exact(), start)
    assert {v.dtype for model in (end, *app.given.values()) for v in model.values()} == {np.dtype(np.float32)}


def test_what_an_app_of_thirty_two_bits_returns_is_taken_as_it_is() -> None:
    drawn, given = {"lora_A": np.float32([[0.1, 0.3]])}, np.float32([[1.0 + 2.0**-10]])
    after = {"lora_A": drawn["lora_A"], "lora_B": np.float32([[1.0]])}
    assert returned({"lora_B": given, **drawn}, drawn, after)["lora_B"].item() == 1.0
    after = {"lora_A": nearest(drawn["lora_A"], "bfloat16"), "lora_B": np.float32([[1.0]])}
    # Its model of 16 bits did not move.
    assert returned({"lora_B": given, **drawn}, drawn, after)["lora_B"].item() == given.item()


@pytest.mark.parametrize("view", ["bfloat16", "float16", "float32"])
def test_every_adapter_may_have_a_dtype_of_its_own(view: str) -> None:
    """As in a model of 16 bits of which one kind of layer, and with it its adapters, stays in float32."""
    short, step = "float16" if view == "float16" else "bfloat16", np.float32(2.0**-12)

    def answer(arrays: Named) -> Mapping[str, Any] | ArrayRecord:
        given = app.given[app.number, app.node]
        loaded = {k: v if "v_proj" in k else nearest(v, short) for k, v in given.items()}
        trained = {k: v if is_a(k) or "v_proj" not in k else v + step for k, v in loaded.items()}
        if app.number == 1:
            # Values of which 16 bits do not hold the sum of all clients' means.
            trained = {k: v if is_a(k) else v + np.float32(app.node == 0) for k, v in trained.items()}
        shorter = [] if view == "float32" else [k for k in trained if "v_proj" not in k]
        found = {k: Array(v) for k, v in trained.items()}
        return ArrayRecord(
            found
            | {k: in_bfloat16(trained[k]) if short == "bfloat16" else Array(trained[k].astype(short)) for k in shorter}
        )

    app = App(lambda *_: 0.0)
    app.answer = answer
    end, _ = app.run(exact(), rounds=3)
    for name, values in end.items():
        if not is_a(name):
            # Weights are 1 to 4: the first client's is a tenth.
            wanted = 0.1 + (3 * step if "v_proj" in name else 0.0)
            np.testing.assert_allclose(values, wanted, atol=2e-8)


def test_two_names_of_one_tensor_travel_once() -> None:
    """An output table tied to the input's is trained under one name and returned under both."""
    tied = ("embed.modules_to_save.weight", "head.modules_to_save.weight")
    table = np.repeat(np.arange(60, dtype=np.float32), 50).reshape(60, 50)
    start = {tied[0]: table, tied[1]: table + 1, **adapters()}
    app = App(lambda number, node, name, shape: change(number, 0, name, shape))
    app.answer = lambda arrays: {**arrays, tied[1]: arrays[tied[0]]}
    strategy = fc.Adapters(FedAvg(**EVERYBODY), fc.TopK(density=0.2), None, also=("*.modules_to_save.*",))
    end, _ = app.run(strategy, start, rounds=8)
    assert (end[tied[0]] != table).any()
    np.testing.assert_array_equal(end[tied[0]], end[tied[1]])


# What an app's model is told, with torch.


def test_records_of_torch_tensors_bfloat16_included() -> None:
    torch = pytest.importorskip("torch")
    state = {k: torch.tensor(v) for k, v in adapters().items()}
    half = {k: v.to(torch.bfloat16) for k, v in state.items()}
    with pytest.raises(TypeError):
        ArrayRecord(half)
    found = fc.record(half)
    assert {array.dtype for array in found.values()} == {"bfloat16"}
    assert sum(len(a.data) for a in found.values()) < 0.8 * sum(len(a.data) for a in fc.record(state).values())
    for name, values in to_arrays(found).items():
        np.testing.assert_array_equal(values, half[name].float().numpy())
    for name, values in to_arrays(fc.record(state)).items():
        np.testing.assert_array_equal(values, adapters()[name])
    assert len(fc.record({"steps": torch.tensor(3)})["steps"].numpy().shape) == 0


def lora(torch: Any, *, swap: bool = False) -> Any:
    class Layer(torch.nn.Module):
        def __init__(self, out: int, inputs: int) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(out, inputs), requires_grad=False)
            a, b = torch.randn(RANK, inputs) * 0.1, torch.zeros(out, RANK)
            self.lora_A = torch.nn.ParameterDict({"default": a * 0 if swap else a})
            self.lora_B = torch.nn.ParameterDict({"default": b + 0.1 if swap else b})

        def forward(self, x: Any) -> Any:
            return x @ self.weight.T + x @ self.lora_A["default"].T @ self.lora_B["default"].T

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(Layer(12, 6), torch.nn.ReLU(), Layer(6, 12))


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("rank", [None, 3])
def test_what_is_frozen_is_not_trained_nor_are_columns_beyond_the_rank(swap: bool, rank: int | None) -> None:
    torch = pytest.importorskip("torch")
    model = lora(torch, swap=swap)
    assert fc.freeze(model, rank) == [f"{i}.lora_{'B' if swap else 'A'}.default" for i in (0, 2)]
    before = {k: v.detach().clone() for k, v in model.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.0)
    for _ in range(4):
        optimizer.zero_grad()
        (model(torch.ones(5, 6)) - 1).square().sum().backward()
        optimizer.step()
    for name, values in model.named_parameters():
        moved = (values != before[name]).float()
        if ("lora_A" in name) != swap or "lora" not in name:
            assert not moved.any()
            continue
        columns = moved if swap else moved.T
        assert columns[:rank].any()
        assert rank is None or not columns[rank:].any()


def test_freezing_what_has_no_adapters_or_not_so_many_columns_is_an_error() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(fc.ConfigError, match="no parameters"):
        fc.freeze(torch.nn.Linear(3, 3))
    with pytest.raises(fc.ConfigError, match="rank=9"):
        fc.freeze(lora(torch), 9)


# The base model.


def test_another_base_model_is_refused_before_anything_is_trained() -> None:
    asked: list[int] = []

    def base() -> str:
        asked.append(1)
        return "b" * 32

    for named in ("b" * 32, ""):
        app = App(change, mods=[fc.compression(base=base)])
        app.run(exact(base=named))
        assert len(app.given) == 2 * NODES
    # Once, whoever is asked: it may read gigabytes; and not where the server compares nothing.
    assert asked == [1]
    app = App(change, mods=[fc.compression(base=base)])
    with pytest.raises(fc.NoUsableReply, match=f"adapts the base model {'c' * 32}, and this node has {'b' * 32}"):
        app.run(exact(base="c" * 32), rounds=1)
    assert not app.given


def test_a_base_model_has_one_digest_with_adapters_and_without_and_others_have_others() -> None:
    torch = pytest.importorskip("torch")

    def wrapped(layer: str = "q.base_layer.weight", **changed: Any) -> Any:
        weight = torch.arange(12.0).reshape(3, 4)
        more = {f"base_model.model.{layer}": weight, "base_model.model.q.lora_A.default.weight": torch.ones(2, 4)}

        class Model:
            def state_dict(self) -> dict[str, Any]:
                return {**more, **changed}

        return Model()

    plain = torch.nn.ModuleDict({"q": torch.nn.Linear(4, 3, bias=False)})
    with torch.no_grad():
        plain["q"].weight.copy_(torch.arange(12.0).reshape(3, 4))
    digest = fc.base_digest(plain)
    assert len(digest) == 32
    assert fc.base_digest(wrapped()) == digest
    assert fc.base_digest(wrapped(**{"base_model.model.q.lora_A.default.weight": torch.zeros(2, 4)})) == digest
    assert fc.base_digest(plain.to(torch.bfloat16)) != digest
    # Of embeddings of which PEFT trains single rows.
    rows = {"base_model.model.q.token_adapter.trainable_tokens_delta.default": torch.ones(2, 4)}
    assert fc.base_digest(wrapped("q.token_adapter.base_layer.weight", **rows)) == digest
    assert fc.base_digest(wrapped("k.base_layer.weight")) != digest
    assert fc.base_digest(wrapped(**{"base_model.model.bias": torch.zeros(3)})) != digest
    # A tensor that lies in another order in memory is the same one.
    turned = plain.float()["q"].weight.detach().t().contiguous().t()
    assert fc.base_digest(wrapped(**{"base_model.model.q.base_layer.weight": turned})) == digest


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_base_model_is_read_where_it_lies(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Its digest makes no float32 of a table of bfloat16, and no copy of a table at all."""
    torch = pytest.importorskip("torch")
    table = torch.zeros(3000, 100, dtype=getattr(torch, dtype))

    class Model:
        def state_dict(self) -> dict[str, Any]:
            return {"tokens": table}

    def copied(self: Any, *_: object, **__: object) -> None:
        raise AssertionError("a table was copied")

    for name in ("float", "to", "clone"):
        monkeypatch.setattr(torch.Tensor, name, copied)
    tracemalloc.start()
    try:
        digest = fc.base_digest(Model())
        assert tracemalloc.get_traced_memory()[1] < table.numel() / 10
    finally:
        tracemalloc.stop()
    table[-1, -1] = 1
    assert fc.base_digest(Model()) != digest


def test_a_record_holds_the_bits_of_bfloat16() -> None:
    torch = pytest.importorskip("torch")
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    (array,) = fc.record({"w": bits.view(torch.bfloat16).reshape(256, 256)}).values()
    assert array.shape == (256, 256)
    assert np.frombuffer(array.data, np.int16)[-(2**16) :].tobytes() == bits.numpy().tobytes()
