"""Modular sums in rounds: the drop-in pair, and sums in a prime field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from coded_runs import run
from toy import SHAPES, client_app, fedavg, model, stack, update

from fedcomp.clients.compressed import compression
from fedcomp.codecs import FixedPoint, ModularSum, RandomK
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.errors import ConfigError
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.rounds import fit
from fedcomp.strategies.coded.strategy import CodedFedAvg
from fedcomp.strategies.compressed import Compressed

NODES = 6
WEIGHT = 10 * NODES * (NODES + 1) // 2
"""Of all clients together: the toy's have 10, 20, ... examples."""


def pair(summands: int = WEIGHT, *, memory: bool = False, levels: int = 1024, **options: Any) -> Compressed:
    codec = ModularSum(RandomK(1.0), clip=1024.0, levels=levels, summands=summands)
    return Compressed(fedavg(**options), ErrorFeedback(codec) if memory else codec, feedback=memory)


def test_the_pair_takes_every_clients_dither_off() -> None:
    """Clients' own integers are on the grid of whole steps: what is left of an update is half a step at most."""
    with InProcessGrid(client_app([compression()]), 3, seed=4) as grid:
        found = stack(fit(pair(1, fraction_evaluate=0.0), MeteredGrid(grid), model(), 1).arrays)
    with InProcessGrid(client_app([compression()]), 3, seed=4) as grid:
        exact = stack(fit(fedavg(fraction_evaluate=0.0), MeteredGrid(grid), model(), 1).arrays)
    error = found - exact
    assert 0 < np.abs(error).max() <= 0.5 + 1e-4
    # Weights 1, 2 and 3 of 6, each error uniform: what a server that forgot the dithers would not have.
    assert error.var() == pytest.approx((1 + 4 + 9) / 36 / 12, rel=0.15)


def test_memory_keeps_what_the_dither_left() -> None:
    """Under error feedback nothing is lost: after many rounds the sum of all updates is there, within a step."""
    with InProcessGrid(client_app([compression()]), 1, seed=4) as grid:
        strategy = pair(1, memory=True, fraction_evaluate=0.0)
        found = stack(fit(strategy, MeteredGrid(grid), model(), 20).arrays)
        (node,) = grid.get_node_ids()
        made = grid.context(node).state.array_records["toy.sum"]["sum"].numpy()
    assert np.abs(found - made).max() <= 0.5 + 1e-2


@pytest.mark.slow
def test_a_sum_in_a_prime_field_takes_the_contributors_dithers_off() -> None:
    """Of equal weights, since the server of a coded sum knows no single one."""
    # Steps of which the toy's whole numbers are no multiples: of those the dither would be all of the error.
    inner = pair(NODES, levels=100, fraction_evaluate=0.0)
    coded = CodedFedAvg(inner, construction="sumcode", symbols=2, threshold=1, weighted=False)
    there, _ = run(coded, NODES, rounds=1)
    assert len(coded.reports[1].coded.included) == NODES
    parts = [[update(1, c, shape, i).reshape(-1) for i, shape in enumerate(SHAPES.values())] for c in range(NODES)]
    exact = np.mean([np.concatenate(part) for part in parts], axis=0)
    # Without the dithers it would be twice as much, with others' three times.
    assert (stack(there.arrays) - exact).var() == pytest.approx(10.24**2 / 12 / NODES, rel=0.2)


def test_a_coded_sum_of_weights_that_nobody_knows_is_refused() -> None:
    options = {"construction": "sumcode", "symbols": 2, "threshold": 1}
    with pytest.raises(ConfigError, match="knows no single weight"):
        CodedFedAvg(pair(), **options)
    CodedFedAvg(Compressed(fedavg(), FixedPoint(RandomK(1.0), clip=1.0)), **options)


def test_a_run_whose_sums_never_fit_ends_in_its_first_round() -> None:
    coded = CodedFedAvg(pair(NODES - 1), construction="sumcode", symbols=2, threshold=1, weighted=False)
    with pytest.raises(ConfigError, match=f"raise summands={NODES - 1} to {NODES}"):
        run(coded, NODES, rounds=2)
