"""Frames of factors: forms, lengths, what the server makes of them, and what it refuses (the spec's list B7: 1, 3, 6, 7
and 10)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from fedcomp import wire
from fedcomp.codecs import Clip, ErrorFeedback, Factors, chain, get_codec
from fedcomp.codecs.factors import wanted_by
from fedcomp.errors import ConfigError
from fedcomp.factors.outer import OuterProducts
from fedcomp.layout import Layout, SmallDense, Update
from fedcomp.rng import Key
from fedcomp.wire import Bundle, LimitExceeded, SchemaMismatch, Tensor

KEY = Key(5, "factors")
KNOWN = {"i_know_inputs_are_visible": True}
SIZES = (784, 256, 128, 10)
CHAIN = ("a.weight:relu", "b.weight:tanh", "c.weight")
NAMES = ("a", "b", "c")


def network(sizes: tuple[int, ...] = SIZES, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    model = {}
    for name, p, m in zip(NAMES, sizes, sizes[1:], strict=False):
        model[f"{name}.weight"] = (rng.normal(size=(m, p)) / np.sqrt(p)).astype(np.float32)
        model[f"{name}.bias"] = (0.1 * rng.normal(size=m)).astype(np.float32)
    return model


def gradient(model: dict[str, np.ndarray], rows: int, seed: int = 1) -> Update:
    """One step of SGD on ``rows`` examples, by hand: relu, then tanh, then squares; the weights' sums are known."""
    rng = np.random.default_rng(seed)
    weight = {n: model[f"{n}.weight"].astype(np.float64) for n in NAMES}
    bias = {n: model[f"{n}.bias"].astype(np.float64) for n in NAMES}
    x = rng.normal(size=(rows, weight["a"].shape[1]))
    hidden = np.maximum(x @ weight["a"].T + bias["a"], 0.0)
    second = np.tanh(hidden @ weight["b"].T + bias["b"])
    back = {"c": -0.1 / rows * (second @ weight["c"].T + bias["c"] - rng.normal(size=(rows, weight["c"].shape[0])))}
    back["b"] = back["c"] @ weight["c"] * (1.0 - second**2)
    back["a"] = back["b"] @ weight["b"] * (hidden > 0.0)
    entered = {"a": x, "b": hidden, "c": second}
    changes = {f"{n}.weight": back[n].T @ entered[n] for n in NAMES} | {f"{n}.bias": back[n].sum(0) for n in NAMES}
    layout = Layout.of(model)
    outer = {
        f"{n}.weight": OuterProducts(back[n].astype(np.float32), entered[n].astype(np.float32), n == "a") for n in NAMES
    }
    return Update(layout.flatten({k: v.astype(np.float32) for k, v in changes.items()}), layout, outer)


def sent(codec: Factors, update: Update) -> tuple[Bundle, np.ndarray]:
    frame, state = codec.encode(update, codec.init(update.layout), KEY)
    assert state == {}
    bundle = codec.open(frame, update.layout)
    return bundle, codec.decode(frame, update.layout)


def numbers(bundle: Bundle) -> int:
    return sum(tensor.values.k for tensor in bundle.tensors)


def off(found: np.ndarray, update: Update) -> float:
    return float(np.linalg.norm(found - update.vector) / np.linalg.norm(update.vector))


def codecs(**options) -> dict[str, Factors]:
    # edAD refuses values of which small ones lose their precision.
    edad = {} if options.get("values") in ("q8", "fp16") else {"chain": CHAIN, **KNOWN, **options}
    return {
        "dad": Factors(mode="dad", **KNOWN, **options),
        **({"edad": Factors(mode="edad", **edad)} if edad else {}),
        "rank": Factors(mode="rank", rank=64, theta=0.0, **options),
    }


@pytest.mark.parametrize("mode", ["dad", "edad", "rank"])
@pytest.mark.parametrize("rows", [1, 13, 32])
def test_1_what_arrives_is_the_gradient_weights_and_biases(mode: str, rows: int) -> None:
    model = network()
    update = gradient(model, rows)
    codec = codecs()[mode].at_model(model)
    _, found = sent(codec, update)
    assert off(found, update) <= 1e-5
    for t in update.layout.tensors:
        assert np.linalg.norm((found - update.vector)[t.slice]) <= 1e-5 * np.linalg.norm(update.vector[t.slice])


def test_1_two_clients_with_unequal_batches_are_one_batch_of_both() -> None:
    """And the authors' rule, the sum of mean gradients, is not, nor is their plain mean."""
    model = network()
    parts = {rows: gradient(model, rows, seed=rows) for rows in (32, 13)}
    for codec in (c.at_model(model) for c in codecs().values()):
        total = Update(np.zeros(parts[32].layout.size, np.float32), parts[32].layout)
        for rows, update in parts.items():
            codec.gather(codec.encode(update, {}, KEY)[0], rows / 45, total)
        pooled = sum(rows / 45 * update.vector.astype(np.float64) for rows, update in parts.items())
        assert np.linalg.norm(total.vector - pooled) <= 1e-5 * np.linalg.norm(pooled)
        for wrong in ((1.0, 1.0), (0.5, 0.5)):
            added = sum(w * u.vector.astype(np.float64) for w, u in zip(wrong, parts.values(), strict=True))
            assert np.linalg.norm(added - pooled) > 0.1 * np.linalg.norm(pooled)


def test_3_as_many_as_there_are_rows_are_all_of_it() -> None:
    update = gradient(network(), 20)
    _, few = sent(Factors(mode="rank", rank=4), update)
    _, all_of_it = sent(Factors(mode="rank", rank=20, theta=0.0), update)
    assert off(all_of_it, update) <= 1e-5 < 0.1 < off(few, update) < 1.0


def test_6_a_bias_is_exact_however_few_factors_are_left() -> None:
    """The sum of the rows of reduced factors is something else."""
    update = gradient(network(), 32)
    bundle, found = sent(Factors(mode="rank", rank=2), update)
    for t, tensor in zip(update.layout.tensors, bundle.tensors, strict=True):
        if t.name.endswith("bias"):
            assert found[t.slice].tobytes() == update.vector[t.slice].tobytes()
            weight = update.layout.by_name[t.name.replace("bias", "weight")]
            factors = bundle.tensors[update.layout.tensors.index(weight)].dense()
            wrong = factors[:, : t.size].sum(axis=0)
            assert np.linalg.norm(wrong - update.vector[t.slice]) > 0.2 * np.linalg.norm(update.vector[t.slice])
        assert tensor.kind is wire.DENSE


def test_7_bytes_are_those_of_the_formulas() -> None:
    n, model = 32, network()
    update = gradient(model, n)
    assert update.layout.size == 235_146
    pairs = list(pairwise(SIZES))
    forced = codecs(per_layer="factors")
    dad, _ = sent(forced["dad"], update)
    edad, _ = sent(forced["edad"].at_model(model), update)
    rank, _ = sent(Factors(mode="rank", rank=4, theta=0.0, per_layer="factors"), update)
    assert numbers(dad) == sum(n * (p + m) for p, m in pairs) == 49_984
    assert numbers(edad) == n * sum(SIZES[:-1]) + n * SIZES[-1] == 37_696
    assert numbers(rank) == sum(4 * (p + m) + m for p, m in pairs)
    assert round(235_146 / numbers(dad), 2) == 4.70
    assert round(235_146 / numbers(edad), 2) == 6.24
    # Beside the numbers a frame has its table: a few bytes for each tensor.
    for codec, bundle in ((forced["dad"], dad), (forced["edad"].at_model(model), edad)):
        assert 0 < len(codec.encode(update, {}, KEY)[0]) - 4 * numbers(bundle) < 200


@pytest.mark.parametrize("values", ["float32", "bf16", "q8"])
@pytest.mark.parametrize("rows", [1, 8, 32, 100, 300, 2000])
def test_7_the_shortest_form_is_never_longer_than_the_gradient(rows: int, values: str) -> None:
    model = network((120, 60, 40, 10))
    update = gradient(model, rows)
    for codec in codecs(values=values).values():
        frame = codec.at_model(model).encode(update, {}, KEY)[0]
        assert len(frame) <= 4 * update.layout.size + 300
        assert numbers(codec.at_model(model).open(frame, update.layout)) <= update.layout.size


@pytest.mark.parametrize(("values", "most"), [("float32", 1e-6), ("fp16", 1e-3), ("bf16", 5e-3), ("q8", 0.03)])
@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_left_sides_that_are_much_smaller_than_inputs_arrive(values: str, most: float, scale: float) -> None:
    """A scale shared with inputs, or fp16, would round them to 0, and the update with them."""
    update = gradient(network(), 16)
    layout = update.layout
    outer = {n: OuterProducts(o.left * np.float32(scale), o.right) for n, o in update.outer.items()}
    small = Update(update.vector * np.float32(scale), layout, outer)
    for codec in codecs(values=values, per_layer="factors").values():
        bundle, found = sent(codec.at_model(network()), small)
        assert all(len(bundle.tensors[i].shape) == 2 for i, t in enumerate(layout.tensors) if codec.is_matrix(t))
        assert off(found, small) <= most, codec


@pytest.mark.parametrize("values", ["q8", "fp16"])
def test_edad_refuses_values_of_which_small_ones_are_lost(values: str) -> None:
    with pytest.raises(ConfigError, match="use bf16"):
        Factors(mode="edad", chain=CHAIN, values=values, **KNOWN)


def test_forced_factors_that_exceed_the_model_give_way() -> None:
    model = network((12, 10, 8, 4))
    update = gradient(model, 500)
    for codec in codecs(per_layer="factors").values():
        _, found = sent(codec.at_model(model), update)
        assert off(found, update) <= 1e-5


def test_layers_that_were_not_captured_travel_whole_or_reduced() -> None:
    update = gradient(network(), 32)
    partial = Update(update.vector, update.layout, {"b.weight": update.outer["b.weight"]})
    bundle, found = sent(codecs()["dad"], partial)
    assert off(found, update) <= 1e-5
    assert bundle.tensors[0].shape == (784 * 256,)
    bare = Update(update.vector, update.layout)
    assert off(sent(codecs()["rank"], bare)[1], update) <= 1e-5
    assert numbers(sent(codecs()["rank"], bare)[0]) < 0.3 * update.layout.size
    # In a chain with a gap nothing can be worked out: factors of each layer travel, or gradients.
    gap = Update(update.vector, update.layout, {n: update.outer[n] for n in ("a.weight", "c.weight")})
    assert off(sent(codecs()["edad"].at_model(network()), gap)[1], update) <= 1e-5


def test_a_chain_that_does_not_explain_the_update_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    update = gradient(model, 16)
    wrong = Factors(mode="edad", chain=("a.weight:relu", "b.weight:sigmoid", "c.weight"), **KNOWN).at_model(model)
    with caplog.at_level("WARNING", "flwr.fedcomp"):
        bundle, found = sent(wrong, update)
    assert "does not follow" in caplog.text
    assert off(found, update) <= 1e-5
    assert bundle.tensors[0].shape == (16, 784 + 256)


def test_rows_that_are_zero_do_not_travel() -> None:
    """Of an embedding those of words that were not there."""
    model = {"words.weight": np.zeros((500, 16), np.float32), "more.weight": np.zeros((40, 30), np.float32)}
    layout = Layout.of(model)
    vector = np.zeros(layout.size, np.float32)
    rows = np.array([3, 4, 77, 499])
    layout.view(vector, "words.weight")[rows] = np.random.default_rng(0).normal(size=(4, 16))
    bundle, found = sent(codecs()["dad"], Update(vector, layout))
    assert found.tobytes() == vector.tobytes()
    assert numbers(bundle) == 4 * 16
    assert np.array_equal(codecs()["dad"].support(bundle, layout) // 16, np.repeat(rows, 16))


def holds(bundle: Bundle, row: np.ndarray) -> bool:
    """Whether the values of a row of the data stand anywhere in a frame, in this order."""
    wanted = row.astype(np.float32)
    for tensor in bundle.tensors:
        values = tensor.values.decode()
        starts = np.flatnonzero(values == wanted[0])
        if any(np.array_equal(values[s : s + wanted.size], wanted) for s in starts):
            return True
    return False


@pytest.mark.parametrize("mode", ["dad", "edad"])
def test_10_with_the_first_layer_as_gradient_no_example_is_in_the_frame(mode: str) -> None:
    model = network()
    update = gradient(model, 8)
    examples = update.outer["a.weight"].right
    shown, _ = sent(codecs()[mode].at_model(model), update)
    hidden, found = sent(codecs(first_layer="gradient")[mode].at_model(model), update)
    assert all(holds(shown, row) for row in examples)
    assert not any(holds(hidden, row) for row in examples)
    assert off(found, update) <= 1e-5


def test_10_rank_dad_shows_no_example() -> None:
    update = gradient(network(), 8)
    bundle, _ = sent(Factors(mode="rank", rank=8, theta=0.0), update)
    assert not any(holds(bundle, row) for row in update.outer["a.weight"].right)
    # Not even in another order: what travels follows from the product alone.
    turned = {
        name: OuterProducts(outer.left[::-1].copy(), outer.right[::-1].copy()) for name, outer in update.outer.items()
    }
    again, _ = sent(Factors(mode="rank", rank=8, theta=0.0), Update(update.vector, update.layout, turned))
    for one, other in zip(bundle.tensors, again.tensors, strict=True):
        if len(one.shape) == 2:
            assert np.allclose(np.abs(one.dense()), np.abs(other.dense()), atol=1e-4)


def test_the_norm_is_that_of_what_arrives_and_figures_are_the_ranks() -> None:
    model = network()
    update = gradient(model, 32)
    for name, codec in codecs().items():
        bound = codec.at_model(model)
        bundle, found = sent(bound, update)
        assert np.isclose(bound.norm(bundle, update.layout), np.linalg.norm(found.astype(np.float64)), rtol=1e-5)
        figures: Mapping[str, float] = bound.figures(bundle, update.layout, 1.0)
        assert figures["rank of b.weight" if name == "rank" else "rows of b.weight"] == 32


def test_what_nobody_uses_is_not_captured() -> None:
    dad, edad, rank = codecs().values()
    assert dad.takes_outer(10, 100, 50)
    assert not dad.takes_outer(40, 100, 50)
    assert edad.takes_outer(4000, 100, 50)
    assert rank.takes_outer(40, 100, 50)
    assert not rank.takes_outer(50, 100, 50)
    assert wanted_by(rank) == rank.takes_outer
    assert wanted_by(ErrorFeedback(rank)) is None


def tampered(bundle: Bundle, position: int, **changes) -> bytes:
    tensors = list(bundle.tensors)
    tensors[position] = replace(tensors[position], **changes)
    return wire.encode(tensors)


def test_frames_of_other_shapes_are_refused_before_anything_is_added() -> None:
    model = network()
    update = gradient(model, 8)
    layout = update.layout
    dad, edad = codecs()["dad"], codecs()["edad"].at_model(model)
    bundle, _ = sent(dad, update)
    chained, _ = sent(edad, update)
    names = [t.name for t in layout.tensors]
    first, bias = names.index("a.weight"), names.index("a.bias")
    raw = wire.Raw
    absent = Tensor(raw(np.zeros(0, np.float32)), (0,))
    bad = {
        "too few tensors": wire.encode(bundle.tensors[:-1]),
        "columns": tampered(bundle, first, values=raw(np.ones(8 * 1039, np.float32)), shape=(8, 1039)),
        "a bias of its own": tampered(bundle, first, values=raw(np.ones(784 * 256, np.float32)), shape=(784 * 256,)),
        "a bias as a matrix": tampered(bundle, bias, values=raw(np.ones(4, np.float32)), shape=(2, 2)),
        "values": tampered(bundle, first, values=wire.Bf16(np.ones(8 * 1040, np.float32))),
        "too large": tampered(bundle, first, values=raw(np.ones(400 * 1040, np.float32)), shape=(400, 1040)),
        "another dtype": tampered(bundle, bias, values=raw(np.ones(256)), shape=(256,), dtype="float64"),
        "a name": tampered(bundle, first, name="a.weight"),
        "inputs alone": wire.encode(chained.tensors),
    }
    for what, frame in bad.items():
        out = Update(np.zeros(layout.size, np.float32), layout)
        with pytest.raises((SchemaMismatch, LimitExceeded)):
            dad.accumulate(frame, 1.0, out)
        assert not out.vector.any(), what
    # A reduced frame may leave out no bias.
    rank, _ = sent(codecs()["rank"], update)
    with pytest.raises(SchemaMismatch):
        codecs()["rank"].open(wire.encode([*rank.tensors[:bias], absent, *rank.tensors[bias + 1 :]]), layout)


def test_a_bias_that_is_no_sum_of_left_sides_cannot_be_left_out() -> None:
    """A transposed convolution has a bias for each output, and its weight a row for each input."""
    layout = Layout.of({"up.weight": np.zeros((4, 6), np.float32), "up.bias": np.zeros(6, np.float32)})
    codec = Factors(mode="dad", **KNOWN)
    row, bias = Tensor(wire.Raw(np.ones(10, np.float32)), (1, 10)), Tensor(wire.Raw(np.ones(6, np.float32)), (6,))
    absent = Tensor(wire.Raw(np.zeros(0, np.float32)), (0,))
    assert codec.decode(wire.encode([row, bias]), layout).sum() == 4 * 6 + 6
    out = Update(np.zeros(layout.size, np.float32), layout)
    with pytest.raises(SchemaMismatch, match=r"up\.bias"):
        codec.accumulate(wire.encode([row, absent]), 1.0, out)
    assert not out.vector.any()


def test_inputs_that_no_chain_connects_are_refused() -> None:
    model = network()
    update = gradient(model, 8)
    layout = update.layout
    edad = codecs()["edad"].at_model(model)
    chained, _ = sent(edad, update)
    names = [t.name for t in layout.tensors]
    second, last = names.index("b.weight"), names.index("c.weight")
    raw = wire.Raw
    for position, shape in ((second, (9, 256)), (second, (256 * 128,)), (last, (10 * 128,)), (last, (9, 138))):
        changed = tampered(chained, position, values=raw(np.ones(int(np.prod(shape)), np.float32)), shape=shape)
        with pytest.raises(SchemaMismatch):
            edad.open(changed, layout)


def test_what_inputs_show_has_to_be_acknowledged() -> None:
    for options in ({"mode": "dad"}, {"mode": "edad", "chain": CHAIN}):
        with pytest.raises(ConfigError, match="i_know_inputs_are_visible"):
            Factors(**options)
        codec = Factors(**options, **KNOWN)
        assert codec.exposes
        assert chain(Clip(1e9), codec).exposes == codec.exposes
        assert get_codec(codec.to_config()) == codec
    assert not Factors().exposes


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "edad", **KNOWN},
        {"chain": CHAIN},
        {"mode": "edad", "chain": ("a.weight:softsign", "b.weight"), **KNOWN},
        {"mode": "edad", "chain": ("a.weight", "a.weight"), **KNOWN},
    ],
)
def test_wrong_parameters_are_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError):
        Factors(**wrong)


def test_a_chain_may_be_one_text_as_on_a_command_line() -> None:
    assert Factors(mode="edad", chain=", ".join(CHAIN), **KNOWN) == Factors(mode="edad", chain=CHAIN, **KNOWN)


def test_small_matrices_are_reduced_only_where_the_policy_lets_them() -> None:
    model = network((60, 50, 40, 4))
    update = gradient(model, 8)
    layout = Layout.of(model, SmallDense(min_size=10**6, share=1.0))
    dense = Update(layout.flatten(update.layout.unflatten(update.vector, {})), layout, update.outer)
    assert sent(Factors(rank=1), dense)[1].tobytes() == dense.vector.tobytes()
    assert numbers(sent(codecs()["dad"], dense)[0]) < dense.layout.size


def golden_example() -> tuple[dict[str, np.ndarray], Update]:
    """A chain of two layers in small integers, of which float32 rounds nothing."""
    model = {
        "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4) % 5 - 2,
        "a.bias": np.zeros(3, np.float32),
        "b.weight": np.arange(6, dtype=np.float32).reshape(2, 3) - 3,
        "b.bias": np.zeros(2, np.float32),
    }
    x, last = np.float32([[1, -2, 0, 3]]), np.float32([[4, -1]])
    entered, back = x @ model["a.weight"].T, last @ model["b.weight"]
    changes = {
        "a.weight": back.T @ x,
        "a.bias": back[0],
        "b.weight": last.T @ entered,
        "b.bias": last[0],
    }
    layout = Layout.of(model, SmallDense(min_size=0))
    outer = {"a.weight": OuterProducts(back, x, True), "b.weight": OuterProducts(last, entered)}
    return model, Update(layout.flatten(changes), layout, outer)


GOLDEN = {
    "dad": (
        "4643573101000000040000004700000000000002010700070000000000001c0000010000000000000000000000000201"
        "0500050000000000001400000100000000000000000000000040c1000010c10000c0c00000803f000000c00000000000"
        "00404000008040000080bf000040400000c0400000c0c0fe290c20"
    ),
    "edad": (
        "464357310100000004000000470000000000000201040004000000000000100000010000000000000000000000000201"
        "05000500000000000014000001000000000000000000000000803f000000c0000000000000404000008040000080bf00"
        "0040400000c0400000c0c0bf18fb28"
    ),
}


@pytest.mark.parametrize("mode", GOLDEN)
def test_golden_bytes_of_captured_factors(mode: str) -> None:
    """Written once, decoded for ever."""
    model, update = golden_example()
    chain = ("a.weight", "b.weight") if mode == "edad" else ()
    codec = Factors(mode=mode, chain=chain, per_layer="factors", **KNOWN).at_model(model)
    frame = bytes.fromhex(GOLDEN[mode])
    assert codec.encode(update, {}, KEY)[0].hex() == GOLDEN[mode]
    assert codec.decode(frame, update.layout).tobytes() == update.vector.tobytes()
    first = codec.open(frame, update.layout).tensors[0]
    assert first.shape == ((1, 7) if mode == "dad" else (1, 4))
