"""Conditional rounds: who is quiet is not averaged, keeps memory and model, and costs little; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from toy import client_app, fedavg, model, stack, update

from fedcomp.clients.compressed import compression
from fedcomp.clients.conditional import conditional
from fedcomp.codecs import Identity, TopK, chain
from fedcomp.drift.schedule import ScheduleSettings
from fedcomp.errors import ConfigError
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.rounds import fit
from fedcomp.gossip import get_algorithm
from fedcomp.privacy.local import Privatise
from fedcomp.program import HELLO
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.conditional import Conditional, Quietness
from fedcomp.strategies.gossip.strategy import GossipRelay
from fedcomp.strategies.private.dp_fedavg import DpFedAvg

SETTLED = ScheduleSettings(window=2, low=0.1, consecutive=1, patience=0)
"""Losses that are alike twice are stable: a constant loss is from the second round on."""

EMPTY = 560
"""Bytes of a reply of this type without a record, on a deployment's connection: ids, metadata, the tree of objects."""


Loss = Callable[[int, int], float]


def app(loss: Loss, *, settings: ScheduleSettings = SETTLED) -> ClientApp:
    """Return the toy app with a loss of each partition and round."""

    def watch(msg: Message, context: Context) -> float:
        number = int(msg.content.config_records["config"]["server-round"])  # type: ignore[arg-type]
        return loss(int(context.node_config["partition-id"]), number)

    return client_app([compression(), conditional(watch, settings=settings)])


def still(partition: int, number: int) -> float:
    return 1.0


def moving(partition: int, number: int) -> float:
    return 2.0**-number


def odd_move(partition: int, number: int) -> float:
    """Partitions 0, 2, ... settle at once; the others do not."""
    return moving(partition, number) if partition % 2 else 1.0


def made(inner: Any = None, **options: Any) -> Conditional:
    return Conditional(inner or Compressed(fedavg(fraction_evaluate=0.0), TopK(density=0.2)), **options)


def run(
    strategy: Any, client: Any, rounds: int = 4, nodes: int = 3, fault: Any = None
) -> tuple[np.ndarray, MeteredGrid]:
    with InProcessGrid(client, nodes, seed=4, fault=fault) as inner:
        grid = MeteredGrid(inner)
        found = stack(fit(strategy, grid, model(), rounds).arrays)
    return found, grid


def said(strategy: Conditional, number: int) -> Quietness:
    return strategy.reports[number].section(Quietness)


@pytest.mark.parametrize("query", [True, False])
def test_nodes_that_are_never_quiet_give_what_the_inner_strategy_gives_bit_for_bit(query: bool) -> None:
    plain, _ = run(Compressed(fedavg(fraction_evaluate=0.0), TopK(density=0.2)), app(moving))
    found, _ = run(made(query=query), app(moving))
    assert found.tobytes() == plain.tobytes()


@pytest.mark.parametrize("query", [True, False])
def test_quiet_nodes_are_left_out_of_the_mean_not_averaged_as_zero(query: bool) -> None:
    """1.7, sixth: the average is that of the others. A mean over all would be three halves of it, or less."""
    strategy = made(Compressed(fedavg(fraction_evaluate=0.0), Identity()), query=query)
    # The second round settles partitions 0 and 2: in the third they are quiet, without a query in the second already.
    first = 3 if query else 2
    found, _ = run(strategy, app(odd_move), rounds=first)
    before, _ = run(made(Compressed(fedavg(fraction_evaluate=0.0), Identity()), query=query), app(odd_move), first - 1)
    own = np.concatenate([update(first, 1, shape, i).reshape(-1) for i, shape in enumerate([(40, 30), (12,)])])
    assert np.allclose(found - before, own)
    report = strategy.reports[first]
    assert len(said(strategy, first).quiet) == 2
    assert (report.asked, report.used, report.lost, report.refused) == (1, 1, 0, {})


@pytest.mark.parametrize("query", [True, False])
def test_a_quiet_answer_takes_less_than_300_bytes(query: bool) -> None:
    """1.7, fourth: the real serialised size, as the ledger counts it."""
    strategy = made(query=query)
    _, grid = run(strategy, app(still), rounds=6)
    kind = HELLO if query else "train"
    assert len(said(strategy, 6).quiet) == 3
    assert grid.ledger.total("messages", round=6, direction="up") == 3
    # Flower's own frame around an empty message takes EMPTY bytes; what stands in it is the node's.
    assert 0 < grid.ledger.total("wire", round=6, direction="up", message_type=kind) < 3 * (EMPTY + 300)


def test_a_query_spares_the_model_too() -> None:
    _, grid = run(made(query=True), app(still), rounds=6)
    assert grid.ledger.total("payload", round=6, direction="down") == 0
    assert 0 < grid.ledger.total("wire", round=6, direction="down") < 3 * (EMPTY + 600)


@pytest.mark.parametrize("query", [True, False])
def test_a_round_in_which_all_are_quiet_keeps_the_model_and_is_no_failure(query: bool, caplog: Any) -> None:
    strategy = made(query=query)
    long, _ = run(strategy, app(still), rounds=6)
    short, _ = run(made(query=query), app(still), rounds=2 if query else 1)
    assert long.tobytes() == short.tobytes()
    assert not [record for record in caplog.records if record.levelname == "WARNING" and "round 6" in record.message]
    assert strategy.reports[6].asked == 0
    assert len(said(strategy, 6).quiet) == 3


@pytest.mark.parametrize("query", [True, False])
def test_a_compressed_downlink_stays_in_step(query: bool) -> None:
    """Quiet nodes that were sent the model keep it; those that were not are brought up to date when they speak."""

    def loss(partition: int, number: int) -> float:
        return moving(partition, number) if partition == 1 or number > 5 else 1.0

    strategy = made(
        Compressed(fedavg(fraction_evaluate=0.0), TopK(density=0.2), downlink=TopK(density=0.3)),
        max_skip=20,
        query=query,
    )
    run(strategy, app(loss), rounds=9)
    assert all(strategy.reports[number].refused == {} for number in strategy.reports)
    assert len(said(strategy, 5).quiet) == 2


def test_quiet_nodes_are_not_sent_again_what_they_hold() -> None:
    """Their answer says which version they have; a model that does not change then costs nothing."""
    inner = Compressed(fedavg(fraction_evaluate=0.0), TopK(density=0.2), downlink=TopK(density=0.3))
    _, grid = run(made(inner, query=False, max_skip=20), app(still), rounds=30)
    # The last differences of a lossy downlink take some rounds; after that nothing is left to say.
    assert grid.ledger.total("payload", round=30, direction="down") == 0


@pytest.mark.parametrize(
    ("inner", "match"),
    [
        (
            lambda: DpFedAvg(fedavg(fraction_evaluate=0.0), noise_multiplier=1.0, clip=1.0, delta=1e-5, population=3),
            "follow from its data",
        ),
        (lambda: Compressed(fedavg(), chain(Privatise(1.0, 2.0), TopK(density=0.2)), feedback=False), "from its data"),
        (lambda: GossipRelay(get_algorithm({"name": "dpsgd", "lr": 0.1}), "ring", nodes=3), "neighbours waiting"),
        (lambda: object(), "Flower Strategy"),
    ],
)
def test_what_cannot_be_conditional_is_refused_with_the_reason(inner: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        made(inner())


@pytest.mark.parametrize(("options", "match"), [({"max_skip": -1}, "max_skip"), ({"query": 1}, "query")])
def test_settings_out_of_range_are_refused(options: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        made(**options)


def test_what_programs_do_not_send_yet_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="first model"):
        made(Compressed(fedavg(), TopK(density=0.2), TopK(density=0.2), first_model_at_nodes=True))
