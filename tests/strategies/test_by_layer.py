"""Layer by layer over messages: the same bits as one exchange, memories, a server that is restarted, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flwr.app import Message
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from test_shared_factors import app, network, pair, record_of, run
from toy import fedavg

from fedcomp import wire
from fedcomp.codecs import Codec, Factors, TopK
from fedcomp.errors import ConfigError
from fedcomp.flower import asks
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import FRAME
from fedcomp.flower.rounds import fit
from fedcomp.strategies.by_layer import LayerByLayer
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.private.dp_fedavg import DpFedAvg
from fedcomp.timing.pipeline import layered


def remembering() -> Compressed:
    return Compressed(fedavg(fraction_evaluate=0.0), Factors(rank=2), feedback=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "made",
    [
        remembering,
        *(pytest.param(lambda m=m: pair(mode=m), id=m, marks=pytest.mark.long) for m in ("dad", "edad", "rank")),
    ],
)
def test_what_comes_of_it_is_what_comes_of_one_exchange_bit_for_bit(made: Callable[[], Compressed]) -> None:
    strategy = LayerByLayer(made())
    assert run(strategy, rounds=2).tobytes() == run(made(), rounds=2).tobytes()
    for report in strategy.reports.values():
        assert report.used == 3
        assert not report.notes
        # What is in the model is acknowledged: no memory puts it back.
        assert not report.rolled_back


def test_the_last_layer_comes_first_and_every_byte_is_counted() -> None:
    strategy = LayerByLayer(pair())
    seen: list[tuple[str, list[Any]]] = []

    class Watching(MeteredGrid):
        def send_and_receive(self, messages: Any, **options: Any) -> list[Message]:
            replies = super().send_and_receive(messages, **options)
            for reply in replies:
                (frame,) = asks.data_in(reply.content, FRAME).values()
                seen.append((messages[0].metadata.message_type, [t.shape for t in wire.decode(frame).tensors]))
            return replies

    with InProcessGrid(app(), 3, seed=4) as inner:
        grid = Watching(inner)
        fit(strategy, grid, record_of(network()), 1)
        fetched = grid.ledger.total("messages", message_type="query", direction="up")
        payload = grid.ledger.total("payload", direction="up")
    assert [kind for kind, _ in seen] == ["train"] * 3 + ["query"] * 6
    # Clients have batches of 5, 12 and 9 rows; each layer's bias follows from its factors.
    assert [shapes for _, shapes in seen[::3]] == [[(5, 28), (0,)], [(5, 54), (0,)], [(5, 70), (0,)]]
    assert fetched == 6
    assert strategy.reports[1].payload_bytes == payload


def test_what_layers_cost_is_a_round_trip_each_and_what_they_may_hide_is_work() -> None:
    work, transfer = [3.0, 2.0, 1.0], [0.5, 1.0, 2.0]
    by_layer, at_once = layered(work, transfer, 0.25)
    assert at_once == 6.0 + 3.5 + 0.5
    assert by_layer == at_once + 2 * 2 * 0.25
    hidden, _ = layered(work, transfer, 0.25, during=True)
    # 3.25 the first answer leaves, at 4 it is there; the second, ready at 5.25, is there at 6.5; the third at 9.
    assert hidden == 9.0
    assert layered(work, transfer, 0.0, during=True)[0] < layered(work, transfer, 0.0)[0]


def compressed(codec: Codec, inner: Any = None, **options: Any) -> Compressed:
    return Compressed(inner or FedAvg(), codec, **options)


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (lambda: fedavg(), "whose frames are divided"),
        (lambda: compressed(TopK(density=0.2)), "expected Factors"),
        (lambda: compressed(Factors(), downlink=TopK(0.5), first_model_at_nodes=True), "the first model whole"),
        (
            lambda: compressed(Factors(), DpFedAvg(fedavg(fraction_evaluate=0.0), clip=1.0, noise_multiplier=1.0)),
            "keeps a",
        ),
        (
            lambda: compressed(Factors(), DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 1.0, 3)),
            "keeps a promise",
        ),
    ],
)
def test_it_divides_the_factors_of_compressed_alone(made: Callable[[], Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        LayerByLayer(made())
