"""Multi-source mixing in Flower: the same bits when it works, an unchanged model when it does not."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from coded_runs import after_sharing, before_sharing, bits, coded_app, either, run
from flwr.app import Context, Message
from toy import fedavg, model

from fedcomp.codecs import QSGD
from fedcomp.coding.packet import Packet, PacketLimits
from fedcomp.coding.sealing import OVERHEAD
from fedcomp.coding.transport import HEADER_BYTES
from fedcomp.errors import ConfigError, NoUsableReply
from fedcomp.flower.coded import BUNDLE, put_bundle, take_bundle
from fedcomp.strategies.coded.strategy import CodedFedAvg
from fedcomp.strategies.compressed import Compressed

NODES = 6


def mixed(**options) -> CodedFedAvg:
    inner = Compressed(fedavg(fraction_evaluate=0.0), QSGD(levels=4))
    return CodedFedAvg(inner, **{"mix": True, "mix_bytes": 2048, "collect_timeout": 5.0, **options})


def uncoded(*lost: int) -> bytes:
    inner = Compressed(fedavg(fraction_evaluate=0.0), QSGD(levels=4))
    return bits(run(inner, NODES, fault=before_sharing(lost))[0])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"transport": "peers"}, {"shards": 3, "seal": False}], ids=str)
def test_everybody_is_decoded_although_clients_vanish_after_sharing(options) -> None:
    strategy = mixed(**options)
    result, _ = run(strategy, NODES, fault=after_sharing([1, 4]))
    assert bits(result) == uncoded()
    report = strategy.reports[1].coded
    assert len(report.included) == NODES
    assert report.innovative == NODES


@pytest.mark.slow
def test_who_shared_nothing_is_left_out() -> None:
    strategy = mixed()
    result, _ = run(strategy, NODES, fault=either(before_sharing([3]), after_sharing([0])))
    assert bits(result) == uncoded(3)
    assert len(strategy.reports[1].coded.excluded) == 1


def test_one_polluting_relay_costs_the_round_and_not_the_model() -> None:
    app = coded_app()

    def polluting(msg: Message, context: Context) -> Message:
        reply = app(msg, context)
        if msg.metadata.message_type == "query.coded_collect" and context.node_config["partition-id"] == 2:
            import dataclasses

            items = take_bundle(reply.content, most=9, longest=1 << 20)
            packets = [Packet.from_bytes(item, PacketLimits()) for item in items]
            del reply.content[BUNDLE]
            put_bundle(
                reply.content,
                [dataclasses.replace(p, body=p.body ^ np.uint8(9), _wire_bytes=None).to_bytes() for p in packets],
            )
        return reply

    strategy = mixed()
    result, _ = run(strategy, NODES, app=polluting)
    assert strategy.reports[1].coded.included == []
    assert all("some combination was wrong" in reason for reason in strategy.reports[1].coded.excluded.values())
    assert bits(result) == b"".join(a.numpy().tobytes() for a in model().values())


def test_between_clients_it_moves_whole_replies() -> None:
    strategy = mixed(transport="peers")
    _, grid = run(strategy, NODES)
    symbol = 2048 + 64  # room for the reply and its framing, in whole cache lines
    each = HEADER_BYTES + OVERHEAD + 42 + symbol
    assert strategy.reports[1].coded.payload_bytes["peer"] == NODES * (NODES - 1) * each
    assert grid.ledger.total("wire", link="peer") == NODES * (NODES - 1) * each


def test_a_reply_that_does_not_fit_a_symbol_is_left_out_with_what_to_do() -> None:
    strategy = mixed(mix_bytes=128)
    with pytest.raises(NoUsableReply, match="raise mix_bytes"):
        run(strategy, NODES)
    assert all("raise mix_bytes" in reason for reason in strategy.reports[1].coded.excluded.values())
    assert len(strategy.reports[1].coded.excluded) == NODES


def test_it_warns_and_refuses_what_makes_no_sense(caplog) -> None:
    with caplog.at_level(logging.WARNING, "flwr.fedcomp"):
        mixed()
    assert "all or nothing" in caplog.text
    for options, reason in (
        ({"code": "mds"}, "use 'rlnc'"),
        ({"symbols": 3}, "clients are the symbols"),
        ({"groups": 2}, "clients are the symbols"),
        ({"mix_bytes": -1}, "mix_bytes"),
        ({"mix": False}, "needs mix=True"),
    ):
        with pytest.raises(ConfigError, match=reason):
            mixed(**options)
