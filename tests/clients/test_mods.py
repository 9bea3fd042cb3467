"""A mod works in a list of mods with and without its parentheses: Flower checks nothing when an app is built."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import numpy as np
import pytest
from flwr.app import Context, Message
from toy import client_app, fedavg, model

from fedcomp import clients
from fedcomp.clients.coded.mod import answer_coded
from fedcomp.clients.compressed import compression
from fedcomp.clients.messages import Mod
from fedcomp.clients.private.mod import private
from fedcomp.codecs import TopK
from fedcomp.errors import ConfigError
from fedcomp.flower.grid import InProcessGrid
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.private.dp_fedavg import DpFedAvg


def factories() -> dict[str, object]:
    """Return everything public in ``clients`` that is annotated to return a mod."""
    found = {}
    for info in pkgutil.walk_packages(clients.__path__, "fedcomp.clients."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            made_here = getattr(value, "__module__", "") == info.name
            if callable(value) and made_here and not name.startswith("_"):
                returns = getattr(inspect.unwrap(value), "__annotations__", {}).get("return")
                if returns in ("Mod", Mod):
                    found[name] = value
    return found


FACTORIES = factories()


def test_b2_all_mods_of_the_package_are_tested_here() -> None:
    known = {"compression", "private", "coded", "shared_support", "local_privacy", "lsg"}
    assert known <= FACTORIES.keys()


@pytest.mark.long
@pytest.mark.parametrize("name", FACTORIES)
def test_b2_a_run_with_the_mod_without_parentheses_is_the_run_with_them(name: str) -> None:
    """Before, every reply was "compression() takes from 0 to 1 positional arguments but 3 were given"."""
    make = FACTORIES[name]
    models = []
    for mod in (make(), make):
        strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(0.1))
        mods = [mod] if name == "compression" else [mod, compression()]
        grid = InProcessGrid(client_app(mods), 3, seed=2)
        result = strategy.start(grid, model(), num_rounds=2, timeout=9)
        assert [report.compressed for report in strategy.reports.values()] == [3, 3]
        models.append(result.arrays)
    assert all(np.array_equal(models[0][k].numpy(), models[1][k].numpy()) for k in models[0])


def test_b2_a_private_round_is_as_private_without_parentheses() -> None:
    """The mod that is not called does its work, instead of standing there for nothing."""
    replies: list[Message] = []
    honest = client_app([compression, private])

    def app(msg: Message, context: Context) -> Message:
        replies.append(honest(msg, context))
        return replies[-1]

    inner = DpFedAvg(fedavg(fraction_evaluate=0.0), clip=1.0, noise_multiplier=1.0, population=100)
    strategy = Compressed(inner, TopK(0.1))
    strategy.start(InProcessGrid(app, 3, seed=2), model(), num_rounds=1, timeout=9)
    assert strategy.reports[1].compressed == 3
    assert not any(reply.content.metric_records for reply in replies)
    assert sorted(replies[0].content) == ["fedcomp.node", "fedcomp.update"]


def test_b2_arguments_reach_the_mod_as_before() -> None:
    strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(0.1))
    grid = InProcessGrid(client_app([compression(["qsgd"])]), 2, seed=2)
    strategy.start(grid, model(), num_rounds=1, timeout=9)
    assert len(strategy.reports[1].unsupported) == 2
    assert list(inspect.signature(compression).parameters) == ["accept"]
    with pytest.raises(ConfigError, match="max_store_bytes"):
        FACTORIES["coded"](max_store_bytes=-1)  # type: ignore[operator]
    assert answer_coded(client_app([FACTORIES["coded"], compression])) is not None
