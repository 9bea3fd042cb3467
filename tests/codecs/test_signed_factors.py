"""Frames of inputs and slopes: what a step by perturbed activities sends as dAD, and what a server makes of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedcomp import wire
from fedcomp.codecs import Factors
from fedcomp.factors.collect import collecting
from fedcomp.factors.outer import OuterProducts
from fedcomp.factors.signed import SignedRows
from fedcomp.forward.activity import activity_gradients
from fedcomp.layout import Layout, SmallDense, Update
from fedcomp.rng import Key
from fedcomp.systems.factors import joined, layers, split
from fedcomp.wire import SEED, Bundle, SchemaMismatch

KEY = Key(5, "uplink", round=3, partition=1)
OWN = Key(8, "the app's own")
DAD = Factors(mode="dad", i_know_inputs_are_visible=True)
SIZES = (60, 48, 40, 5)
ROWS = 12
LAYERS = ("0.weight", "2.weight", "4.weight")


def mlp(sizes: tuple[int, ...] = SIZES) -> nn.Module:
    torch.manual_seed(3)
    modules = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*modules[:-1])


def losses(model: nn.Module, rows: int = ROWS, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    first = next(model.parameters())
    x, y = torch.randn(rows, first.shape[1], generator=generator), torch.randint(0, 5, (rows,), generator=generator)
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def estimate(codec: Factors = DAD, *, key: Key = KEY, count: int = 3, steps: int = 1, rows: int = ROWS) -> Update:
    """What a client would send that takes ``steps`` estimates at one model: their sum, captured."""
    model, total = mlp(), {}
    with collecting(codec.takes_outer, key.u64()) as collected:
        for step in range(steps):
            of = partial(losses, rows=rows, seed=step)
            found = activity_gradients(model, of, OWN, count=count).gradients()
            total = {name: total.get(name, 0.0) + array for name, array in found.items()}
    layout = Layout.of(total, SmallDense(min_size=0))
    return Update(layout.flatten(total), layout, dict(collected.outer))


def sent(codec: Factors, update: Update, key: Key = KEY) -> tuple[Bundle, np.ndarray]:
    frame, state = codec.encode(update, {}, key)
    assert state == {}
    return codec.verify(frame, update.layout, key), codec.decode(frame, update.layout)


def shape_of(bundle: Bundle, update: Update, name: str) -> tuple[int, ...]:
    return bundle.tensors[[t.name for t in update.layout.tensors].index(name)].shape


def numbers(bundle: Bundle) -> int:
    return sum(tensor.values.k for tensor in bundle.tensors)


def plain(update: Update) -> Update:
    """The same factors, of which nobody knows how the left ones came about."""
    outer = {name: replace(found, signed=None) for name, found in update.outer.items()}
    return Update(update.vector, update.layout, outer)


def test_a_frame_is_shorter_than_dads_by_the_left_sides_less_the_slopes() -> None:
    forced, count = replace(DAD, per_layer="factors"), 3
    update = estimate(forced, count=count)
    slopes, dad = (sent(forced, given)[0] for given in (update, plain(update)))
    assert numbers(dad) == ROWS * sum(SIZES[:-1] + SIZES[1:])
    assert numbers(dad) - numbers(slopes) == ROWS * (sum(SIZES[1:]) - count * len(LAYERS))
    # Beside the numbers a seed of ten bytes, lengths in the table that are a byte shorter, and up to nine of alignment.
    saved = len(forced.encode(plain(update), {}, KEY)[0]) - len(forced.encode(update, {}, KEY)[0])
    assert abs(saved + 10 - 4 * ROWS * (sum(SIZES[1:]) - count * len(LAYERS))) < 20
    # The inputs are all there: nothing but the left sides was saved, and nothing is hidden.
    assert numbers(slopes) == ROWS * (sum(SIZES[:-1]) + count * len(LAYERS))
    assert DAD.exposes


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("steps", [1, 2])
def test_server_and_client_hold_the_same_estimate_to_the_bit(count: int, steps: int) -> None:
    update = estimate(replace(DAD, per_layer="factors"), count=count, steps=steps, rows=4)
    for factor in (None, -0.3):
        outer = {name: found if factor is None else found.scaled(factor) for name, found in update.outer.items()}
        given = Update(update.vector * np.float32(factor or 1.0), update.layout, outer)
        bundle, found = sent(replace(DAD, per_layer="factors"), given)
        for name in LAYERS:
            assert shape_of(bundle, update, name) == (4 * steps, count + given.layout.by_name[name].shape[1])
            assert update.layout.view(found, name).tobytes() == outer[name].matrix().tobytes()
            if factor is None and steps == 1:
                assert update.layout.view(found, name).tobytes() == update.layout.view(update.vector, name).tobytes()
        if factor is None and steps == 1:
            assert found.tobytes() == update.vector.tobytes()
        assert np.linalg.norm(found - given.vector) <= 1e-5 * np.linalg.norm(given.vector)


def test_steps_of_a_round_have_signs_of_their_own() -> None:
    """The same batch at the same model twice, and the app's key never changes: two estimates, not one counted twice."""
    model = mlp()
    with collecting(DAD.takes_outer, KEY.u64()) as collected:
        first, second = (activity_gradients(model, losses, OWN).outer["0.weight"] for _ in range(2))
    assert 0.3 < np.mean(np.sign(first.left * second.left) > 0) < 0.7
    joined_ = collected.outer["0.weight"]
    assert joined_.signed is not None
    assert joined_.signed.start == 0
    assert joined_.left.tobytes() == joined_.signed.matrix().tobytes()


def test_signs_of_another_round_or_sender_are_refused_and_would_be_another_estimate() -> None:
    update = estimate()
    frame, _ = DAD.encode(update, {}, KEY)
    own = DAD.open(frame, update.layout)
    assert own.tlv(SEED) == KEY.u64().to_bytes(8, "little")
    for other in (KEY.at(round=4), KEY.at(partition=2), replace(KEY, seed=6)):
        with pytest.raises(SchemaMismatch, match="not that of this round and sender"):
            DAD.verify(frame, update.layout, other)
        wrong = wire.encode(own.tensors, tlvs=((SEED, other.u64().to_bytes(8, "little")),))
        with pytest.raises(SchemaMismatch, match="not that of this round and sender"):
            DAD.verify(wrong, update.layout, KEY)
        weights = update.layout.by_name["0.weight"].slice
        found = DAD.decode(wrong, update.layout)[weights]
        assert np.linalg.norm(found - update.vector[weights]) > np.linalg.norm(update.vector[weights])
    # A client whose signs are of another key sends all of its left sides, and names no seed.
    foreign = estimate(key=KEY.at(round=4))
    bundle, found = sent(DAD, foreign)
    assert bundle.tlv(SEED) is None
    assert shape_of(bundle, foreign, "0.weight") == (ROWS, 108)
    assert np.linalg.norm(found - foreign.vector) <= 1e-6 * np.linalg.norm(foreign.vector)


def test_a_left_side_that_is_not_what_its_slopes_say_arrives_as_the_slopes_say() -> None:
    """Why a multiple has multiplied slopes: scaled on one side only, the server would take another step."""
    update = estimate()
    wrong = {
        n: OuterProducts(found.left * np.float32(0.5), found.right, signed=found.signed)
        for n, found in update.outer.items()
    }
    found = sent(DAD, Update(0.5 * update.vector, update.layout, wrong))[1]
    first = update.layout.by_name["0.weight"].slice
    assert np.linalg.norm(found[first] - 0.5 * update.vector[first]) > 0.4 * np.linalg.norm(update.vector[first])


@pytest.mark.long
def test_the_mean_of_many_frames_is_the_gradient() -> None:
    model = mlp()
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(losses(model).mean(), parameters)
    layout = Layout.of({n: g.numpy() for n, g in zip(names, gradients, strict=True)}, SmallDense(min_size=0))
    gradient = layout.flatten({n: g.numpy() for n, g in zip(names, gradients, strict=True)}).astype(np.float64)
    total, wrong = np.zeros(layout.size), np.zeros(layout.size)
    for round_ in range(300):
        key = KEY.at(round=round_)
        with collecting(DAD.takes_outer, key.u64()) as collected:
            found = activity_gradients(model, losses, OWN).gradients()
        bundle, vector = sent(DAD, Update(layout.flatten(found), layout, dict(collected.outer)), key)
        total += vector
        wrong += DAD.decode(replace(bundle, tlvs=((SEED, bytes(8)),)), layout)
    # The last layer travels whole.
    for part in (layout.by_name[name].slice for name in LAYERS[:2]):
        cosine, apart = (v[part] @ gradient[part] / np.linalg.norm(v[part]) for v in (total, wrong))
        assert cosine > 0.9 * np.linalg.norm(gradient[part]) > 0.3 * np.linalg.norm(gradient[part]) > apart


def test_every_tensor_has_its_shortest_form_and_figures_say_which() -> None:
    update = estimate()
    bundle, _ = sent(DAD, update)
    # 12 rows of 3 slopes and 40 inputs are more numbers than the last layer has.
    assert [shape_of(bundle, update, name) for name in LAYERS] == [(12, 63), (12, 51), (200,)]
    assert DAD.figures(bundle, update.layout, 1.0) == {
        "matrices whole": 1.0,
        "rows of 0.weight": 12.0,
        "slopes of 0.weight": 3.0,
        "rows of 2.weight": 12.0,
        "slopes of 2.weight": 3.0,
    }
    # As many slopes as outputs save nothing.
    forced = replace(DAD, per_layer="factors")
    many = estimate(forced, count=5, rows=8)
    bundle, found = sent(forced, many)
    assert shape_of(bundle, many, "4.weight") == (8, 45)
    assert "slopes of 4.weight" not in forced.figures(bundle, many.layout, 1.0)
    assert np.linalg.norm(found - many.vector) <= 1e-6 * np.linalg.norm(many.vector)
    # Where dAD would be longer than the matrix, slopes may still be shorter.
    rows = 30
    assert not DAD.takes_outer(rows, 48, 60)
    assert DAD.takes_outer(rows, 48, 60, 3)
    assert not DAD.takes_outer(60, 48, 60, 3)
    bundle, _ = sent(DAD, long := estimate(rows=rows))
    assert shape_of(bundle, long, "0.weight") == (rows, 63)


def test_other_forms_of_values_and_other_modes() -> None:
    update = estimate()
    half = replace(DAD, values="bf16")
    bundle, found = sent(half, update)
    assert shape_of(bundle, update, "0.weight") == (12, 63)
    assert np.linalg.norm(found - update.vector) <= 0.01 * np.linalg.norm(update.vector)
    # Beside inputs of ten times their size, slopes in blocks of 8 bits would be zeros.
    assert not replace(DAD, values="q8").takes_slopes(12, 3, 48, 60)
    assert sent(replace(DAD, values="q8"), update)[0].tlv(SEED) is None
    reduced = Factors(mode="rank", rank=4)
    assert sent(reduced, update)[0].tlv(SEED) is None
    # A chain explains no estimate: factors of every layer travel, of which slopes are the shorter ones.
    chain = Factors(mode="edad", chain=("0.weight:tanh", "2.weight:tanh", "4.weight"), i_know_inputs_are_visible=True)
    bound = chain.at_model({name: p.detach().numpy() for name, p in mlp().named_parameters()})
    bundle, found = sent(bound, update)
    assert shape_of(bundle, update, "0.weight") == (12, 63)
    assert np.linalg.norm(found - update.vector) <= 1e-6 * np.linalg.norm(update.vector)


def test_with_the_first_layer_as_gradient_no_example_is_in_the_frame() -> None:
    update = estimate()
    hidden, found = sent(replace(DAD, first_layer="gradient"), update)
    assert [name for name, outer in update.outer.items() if outer.at_input] == ["0.weight"]
    assert shape_of(hidden, update, "0.weight") == (48 * 60,)
    assert shape_of(hidden, update, "2.weight") == (12, 51)
    assert np.linalg.norm(found - update.vector) <= 1e-6 * np.linalg.norm(update.vector)


def test_hostile_frames_are_refused_before_anything_is_added() -> None:
    update = estimate()
    layout = update.layout
    bundle, _ = sent(DAD, update)
    place = [t.name for t in layout.tensors].index("0.weight")
    bias = [t.name for t in layout.tensors].index("0.bias")
    seed = (SEED, KEY.u64().to_bytes(8, "little"))

    def tampered(at: int, shape: tuple[int, ...], value: float = 1.0) -> list[wire.Tensor]:
        tensors = list(bundle.tensors)
        values = wire.Raw(np.full(int(np.prod(shape)), value, np.float32))
        tensors[at] = replace(tensors[at], values=values, shape=shape)
        return tensors

    bad = {
        "no seed": wire.encode(bundle.tensors),
        "seven bytes": wire.encode(bundle.tensors, tlvs=((SEED, seed[1][:7]),)),
        "no slopes": wire.encode(tampered(place, (12, 60)), tlvs=(seed,)),
        "more than a left side": wire.encode(tampered(place, (12, 109)), tlvs=(seed,)),
        "signs without end": wire.encode(tampered(place, (11, 60 + 47)), tlvs=(seed,)),
        "slopes of a bias": wire.encode(tampered(bias, (8, 3)), tlvs=(seed,)),
        "not finite": wire.encode(tampered(place, (12, 63), np.inf), tlvs=(seed,)),
        "sums that are not": wire.encode(tampered(place, (12, 63), 2e38), tlvs=(seed,)),
    }
    for what, frame in bad.items():
        out = Update(np.zeros(layout.size, np.float32), layout)
        with pytest.raises(wire.WireError):
            DAD.accumulate(frame, 1.0, out)
        assert not out.vector.any(), what
    with pytest.raises(SchemaMismatch):
        Factors().open(wire.encode(bundle.tensors, tlvs=(seed,)), layout)
    # What is huge, and finite, has a norm for guards to see.
    huge = wire.encode(tampered(place, (12, 63), 1e30), tlvs=(seed,))
    assert DAD.norm(huge, layout) > 1e60


def test_layer_by_layer_a_frame_that_names_a_seed_comes_whole() -> None:
    update = estimate()
    frame, _ = DAD.encode(update, {}, KEY)
    assert split(frame, layers(update.layout)) == [frame]
    other, _ = DAD.encode(plain(update), {}, KEY)
    assert joined(split(other, layers(update.layout))) == other


def golden_example() -> Update:
    """Small integers, of which float32 rounds nothing."""
    right = np.float32([[1, -2, 0, 3], [2, 1, -1, 0]])
    signed = SignedRows(np.float32([[0.5], [-2.0]]), KEY.u64(), "a.weight", 6)
    outer = OuterProducts.of_signed(signed, right, at_input=True)
    changes = {"a.weight": outer.matrix(), "a.bias": outer.left.sum(axis=0)}
    layout = Layout.of(changes, SmallDense(min_size=0))
    return Update(layout.flatten(changes), layout, {"a.weight": outer})


GOLDEN = (
    "464357310100000002000000360000000408a1a44fc539a0a597000000020205000a0000000000002800000100000000"
    "0000000000000000003f0000803f000000c00000000000004040000000c0000000400000803f000080bf000000008258"
    "e263"
)
"""Slopes 0.5 and -2, each before its inputs; a bias that follows."""


def test_golden_bytes() -> None:
    """Written once, decoded for ever."""
    update = golden_example()
    assert DAD.encode(update, {}, KEY)[0].hex() == GOLDEN
    assert DAD.decode(bytes.fromhex(GOLDEN), update.layout).tobytes() == update.vector.tobytes()
    assert update.layout.view(update.vector, "a.weight")[0].tolist() == [-4.5, -1.0, 2.0, -1.5]
    assert update.layout.view(update.vector, "a.bias").tolist() == [-2.5, -1.5, 1.5, 2.5, 1.5, 2.5]
