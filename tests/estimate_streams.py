"""Small streams of estimates for tests: what nodes send, who hears it, and states through bytes."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.gossip.base import GossipMessage, State, View, messages_of
from fedcomp.gossip.compressor import Compressor, get_compressor
from fedcomp.gossip.dyna_cold import Sign
from fedcomp.gossip.estimates import WrittenMessages, broadcast, open_estimates
from fedcomp.rng import Key

D, SPLIT, N = 40, 34, 5


def comp(name: str, density: float | None = None, **options: Any) -> Compressor:
    """Return the compressor of a codec's id and parameters."""
    return get_compressor({"id": name} | ({} if density is None else {"density": density}) | options)


SIGN = Compressor(Sign())
IDENTITY = comp("identity")
TOP = comp("topk", 0.2)
RANDOM = comp("randomk", 0.3, shared=False)
DITHER = comp("dithering", bits=2)


EVERY = [
    IDENTITY,
    TOP,
    comp("topk", 3 / SPLIT, values="float64", index="fixed"),
    comp("topk", 9 / SPLIT, values="fp16", index="bitmap"),
    comp("topk", 0.2, index="elias-fano"),  # in a frame
    RANDOM,
    comp("scaledsign"),
    comp("normsign"),
    SIGN.scaled(0.125),
    DITHER,
    comp("qsgd", levels=4),
    comp("terngrad"),
    comp("stc", 0.2),
]


def draw(purpose: str, node: int = 0, iteration: int = 0, dtype: str = "float64") -> NDArray[Any]:
    return Key(3, purpose, iteration, node).generator().standard_normal(D).astype(dtype)


def ring_view(node: int, iteration: int, n: int = N, resync: Iterable[int] = ()) -> View:
    shares = dict.fromkeys(sorted({(node - 1) % n, (node + 1) % n}), 1.0 / 3.0)
    return View(node, iteration, shares, shares, seed=11, resync=frozenset(resync))


def pair_view(node: int, iteration: int, resync: Iterable[int] = (), seed: int = 11) -> View:
    return View(node, iteration, {1 - node: 0.5}, {1 - node: 0.5}, seed=seed, resync=frozenset(resync))


def fresh(dtype: str = "float64", names: tuple[str, ...] = ("z",), **options: Any) -> State:
    return open_estimates({}, {name: np.zeros(D, dtype) for name in names}, SPLIT, **options)


def stored(state: State) -> State:
    """Return the state after a way through bytes."""
    file = io.BytesIO()
    np.savez(file, **state)  # type: ignore[arg-type]  # every array by its name
    file.seek(0)
    with np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def frozen(state: State) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in state.items()}


def message(sent: WrittenMessages, source: int = 0, to: int = 1) -> GossipMessage:
    return next(one for one in messages_of(source, sent.outbox) if one.destination == to)


def write(state: State, iteration: int, compressor: Compressor = TOP, **options: Any) -> WrittenMessages:
    view = options.pop("view", None) or pair_view(0, iteration, options.pop("resync", ()))
    target = draw("target", 0, iteration, str(state["z.start"].dtype))
    return broadcast(state, {"z": target}, compressor, view, **options)
