"""Advice of frames and of codecs whose messages need something beside them: a basis, a support, dithers."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from advice import KEY, LAYOUT, VALUES, Row, points_the_same_way, row
from frame_mutants import seal
from torch import nn

from fedcomp import wire
from fedcomp.codecs import Factors, ModularSum, PowerSGD, RandomK, RandomProjection, ScaleCom, projection
from fedcomp.codecs.scalecom import open_support, support_frame
from fedcomp.codecs.subspace import BasisFit, Moments, Slices
from fedcomp.codecs.waiting import id_of_basis
from fedcomp.factors import outer
from fedcomp.factors.capture import capture, chain_of
from fedcomp.factors.collect import collecting
from fedcomp.factors.outer import Reduction
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key
from fedcomp.tasks.arrays import to_arrays

THREE = np.float32([1.0, -2.0, 3.0])
PLACES = np.array([1, 4, 6])
LARGEST = float(np.finfo(np.float32).max)
WIDE = (np.array([1.0, -1.49 / 5.51]) * LARGEST).astype(np.float32)


def read(*tensors: wire.Tensor, **options: Any) -> Any:
    """Return the first tensor of a frame, as an array."""
    return wire.decode(wire.encode(tensors), **options)[0].dense()


def holds(found: Any) -> bool:
    """Whether an array is zero but for the three values at their places."""
    expected = np.zeros(9, np.float32)
    expected[PLACES] = THREE
    return bool(np.array_equal(found, expected))


def newer() -> bytes:
    frame = bytearray(wire.encode([wire.dense(THREE)]))
    frame[4] += 1
    return seal(bytes(frame[:-4]))


def drawn(**options: Any) -> bool:
    """Whether a support that is drawn from a seed arrives, and its values on it."""
    found = read(wire.seeded((9,), 7, 3, THREE, **options))
    return bool(np.array_equal(found[wire.seeded_support(7, 9, 3)], THREE) and np.count_nonzero(found) == 3)


def shared(**supports: Any) -> Any:
    return wire.decode(wire.encode([wire.shared((9,), 5, THREE)]), **supports)[0].dense()


def framed(values: wire.Values) -> bool:
    return read(wire.sparse((9,), PLACES, values)).nonzero()[0].tolist() == PLACES.tolist()


WIRE = (
    row("seed; pass index=Seeded(seed)", lambda: wire.INDEX_BY_NAME["seeded"].encode(wire.Support(PLACES, 9)), drawn),
    row(
        "a shared support is encoded by its id; pass index=SharedSupport(id)",
        lambda: wire.INDEX_BY_NAME["shared"].encode(wire.Support(PLACES, 9)),
        lambda: holds(
            read(
                wire.Tensor(wire.Raw(THREE), (9,), kind=wire.SHARED, index=wire.SharedSupport(5)), supports={5: PLACES}
            )
        ),
    ),
    row("update the older end", lambda: wire.decode(newer()), lambda: read(wire.dense(THREE))[2] == 3.0),
    row(
        "the outermost code would overflow float32; clip the values or send them raw",
        lambda: wire.Uniform.quantise(WIDE, 3),
        lambda: (
            np.isfinite(wire.Uniform.quantise(WIDE / 2, 3).decode()).all()
            and np.array_equal(read(wire.dense(WIDE)), WIDE)
        ),
    ),
    row(
        "put them into a frame",
        lambda: wire.Section(9, wire.Natural, "rice", params=None),
        lambda: framed(wire.Natural.quantise(THREE)),
    ),
    row(
        "only sparse tensors have indices; pass kind=SPARSE",
        lambda: wire.Tensor(wire.Raw(np.ones(9, np.float32)), (9,), indices=np.arange(9)),
        lambda: holds(read(wire.Tensor(wire.Raw(THREE), (9,), kind=wire.SPARSE, indices=PLACES))),
    ),
    row("on a shared support; pass it to decode(supports=...)", shared, lambda: holds(shared(supports={5: PLACES}))),
)


def update(scale: float = 1.0) -> Update:
    return Update(VALUES * np.float32(scale), LAYOUT)


def started(codec: Any, scale: float = 1.0) -> Any:
    """Return the state of a client that has trained."""
    return codec.begin(update(scale), codec.init(LAYOUT), KEY)


LEADER = ScaleCom(0.1)
SUPPORT = LEADER.choose(started(LEADER), LAYOUT, KEY)


def sent(state: Any) -> bool:
    """Whether what a client sends on a support are its values there."""
    frame, _ = LEADER.send(state, SUPPORT, 3, LAYOUT, KEY)
    found = LEADER.on(SUPPORT, 3).decode(frame, LAYOUT)
    places = found.nonzero()[0]
    return len(places) == sum(map(len, SUPPORT)) and bool(np.array_equal(found[places], VALUES[places]))


def block_arrives() -> bool:
    found = open_support(support_frame(SUPPORT, LEADER, LAYOUT), LEADER, LAYOUT)
    return all(map(np.array_equal, found, SUPPORT))


POWER = PowerSGD(2, form="two-exchange")


def basis() -> Any:
    return POWER.start(None, LAYOUT, Key(5, "basis", 1))


def basis_arrives() -> bool:
    made = basis()
    return POWER.open_basis(made.frame(), made.id, LAYOUT).id == made.id


def moments(most: int | None, fitted: int) -> Any:
    """Return a basis of some random updates."""
    fit = BasisFit("shared_first", most=most)
    found = Moments(Slices.of(Layout.flat(64), 8), fit, fitted)
    for number in range(fitted + 2):
        found.add(np.random.default_rng(number).standard_normal(64).astype(np.float32))
    return found.basis()


def modular(summands: int) -> ModularSum:
    return ModularSum(RandomK(1.0), clip=8.0, levels=1000, summands=summands)


def mean_of_two(codec: ModularSum, *, decode: bool = False) -> bool:
    """Whether the sum of two clients' frames is twice the values."""
    frames = [codec.encode(update(), codec.init(LAYOUT), KEY.at(partition=p))[0] for p in (0, 1)]
    both = codec.add(frames, LAYOUT)
    if decode:
        return bool(codec.decode(both, LAYOUT).size)
    found = codec.place(codec.total(both, LAYOUT), 2, LAYOUT, KEY, {0: 1, 1: 1})
    return bool(np.abs(found - VALUES).max() < 0.02)


def projected(directions: int) -> bool:
    with patch.object(projection, "MOST_SIGNS", 64 * LAYOUT.size):
        return points_the_same_way(RandomProjection(directions))


def reduced(**options: Any) -> bool:
    """Whether power iterations find most of a matrix of rank one."""
    matrix = np.outer(np.arange(1.0, 41.0), np.arange(1.0, 31.0))
    with patch.object(outer, "MOST_PRODUCTS", 20 * matrix.size):
        found = Reduction(**{"rank": 4, "iterations": 4, "solver": "power", **options}).of_matrix(matrix, KEY)
    return bool(np.allclose(found.matrix(), matrix, rtol=1e-3))


def explained(mode: str, between: nn.Module | None = None, values: str = "float32") -> bool:
    """Whether a step of SGD arrives as factors."""
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(12, 8), between or nn.ReLU(), nn.Linear(8, 3))
    x, before = torch.randn(7, 12), {name: array.copy() for name, array in to_arrays(network).items()}
    chain = chain_of(network, x) if mode == "edad" else ()
    codec = Factors(mode=mode, chain=chain, values=values, i_know_inputs_are_visible=True).at_model(before)
    layout = Layout.of(before)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    with collecting(codec.takes_outer) as collected, capture(network, optimizer):
        nn.functional.cross_entropy(network(x), torch.arange(7) % 3).backward()
        optimizer.step()
    change = layout.flatten(to_arrays(network)) - layout.flatten(before)
    outer = collected.explaining({t.name: change[t.slice] for t in layout.tensors}, before)
    frame, _ = codec.encode(Update(change, layout, outer), {}, KEY)
    return bool(np.linalg.norm(codec.decode(frame, layout) - change) <= 0.01 * np.linalg.norm(change))


CODECS = (
    row(
        "has no configuration that can be sent; send its basis", lambda: POWER.mean(basis()).get_config(), basis_arrives
    ),
    row(
        "configuration that can be sent; send its index block",
        lambda: LEADER.on(SUPPORT, 3).get_config(),
        block_arrives,
    ),
    row("update waits to be sent here; train first", lambda: sent(LEADER.init(LAYOUT)), lambda: sent(started(LEADER))),
    row(
        "the state's basis id is damaged; start from init(layout)",
        lambda: id_of_basis({"basis-id": np.zeros(3)}),
        lambda: id_of_basis(POWER.init(LAYOUT)) is None and points_the_same_way(POWER),
    ),
    row(
        "samples are too few for {} directions; lower most or fit longer",
        lambda: moments(6, 3),
        lambda: moments(2, 3).dimensions[0] <= 2 and moments(6, 8).dimensions[0] <= 6,
    ),
    row("sum, use total() and place()", lambda: mean_of_two(modular(2), decode=True), lambda: mean_of_two(modular(2))),
    row("raise summands=", lambda: mean_of_two(modular(1)), lambda: mean_of_two(modular(2))),
    row("signs; lower directions", lambda: projected(65), lambda: projected(64)),
    row(
        "computes the others from them; use bf16",
        lambda: explained("edad", values="q8"),
        lambda: explained("edad", values="bf16"),
    ),
    row("of {}; use mode='dad'", lambda: explained("edad", nn.LayerNorm(8)), lambda: explained("dad", nn.LayerNorm(8))),
    row("products; lower them", lambda: reduced(rank=6), lambda: reduced(rank=5) and reduced(rank=6, iterations=3)),
)


ROWS: tuple[Row, ...] = (*WIRE, *CODECS)
