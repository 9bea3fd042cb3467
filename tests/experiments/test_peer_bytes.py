"""Bytes between clients have columns of their own and are in no other, from the meter to the report."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import TINY
from flwr.app import ConfigRecord
from pages import facts, recorded
from rich.console import Console
from toy import client_app

from fedcomp.errors import ConfigError
from fedcomp.experiments import engines, serve
from fedcomp.experiments.console import table_of
from fedcomp.experiments.federation import Cohorts
from fedcomp.experiments.findings import Findings
from fedcomp.experiments.page import render_report
from fedcomp.experiments.report import summarise
from fedcomp.experiments.sheets import result_sheet
from fedcomp.experiments.spec import RoundRecord, RunSpec
from fedcomp.experiments.tables import specs_of
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid

SPEC = RunSpec("fedavg", rounds=2, clients=2, settings={"max_steps": 1})


def test_a_row_between_peers_counts_for_the_partition_of_its_sender() -> None:
    with InProcessGrid(client_app(), 3) as engine:
        grid = MeteredGrid(engine)
        nodes = engine.get_node_ids()
        cohorts = Cohorts(grid, clients=3, seed=0, train=1.0, evaluate=1.0, query=ConfigRecord())
        grid.record_peer(1, nodes[2], "train", 100, 136)
        cohorts.record_peer(2, nodes[0], "train", 5, 41)
        grid.record_peer(2, 4242, "train", 1, 2)  # a node nobody knows keeps its id
        ledger = grid.ledger
        assert ledger.by("node", "wire", link="peer") == {0: 41, 2: 136, 4242: 2}
        assert ledger.by("round", "payload", direction="up", link="peer") == {1: 100, 2: 6}
        assert ledger.total("wire", link="hub") == 0
        assert {k: v for k, v in ledger.summary().items() if v} == {
            "messages": 3,
            "payload_peer": 106,
            "wire_peer": 179,
        }
        assert "0 bytes up, 0 bytes down, 179 bytes between peers" in repr(ledger)
        with pytest.raises(ConfigError, match="must not be negative"):
            grid.record_peer(1, nodes[0], "train", -1, 0)


@pytest.mark.slow
def test_a_run_keeps_them_apart_from_what_passes_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = engines.run(SPEC)
    fit = serve.fit

    def linked(strategy: Any, grid: Cohorts, *args: Any, on_round: Any, **kwargs: Any) -> Any:
        def noted(server_round: int, *rest: Any) -> Any:
            for node in grid.get_node_ids():
                grid.record_peer(server_round, node, "train", 1000 * server_round, 1036 * server_round)
            return on_round(server_round, *rest)

        return fit(strategy, grid, *args, on_round=noted, **kwargs)

    monkeypatch.setattr(serve, "fit", linked)
    result = engines.run(SPEC)
    assert [(r.peer_payload_bytes, r.peer_wire_bytes) for r in result] == [(0, 0), (2000, 2072), (4000, 4144)]
    assert (result.peer_payload_bytes, result.peer_wire_bytes) == (6000, 6216)
    assert (plain.peer_payload_bytes, plain.peer_wire_bytes) == (0, 0)
    for name in ("uplink_payload_bytes", "uplink_wire_bytes", "downlink_payload_bytes", "downlink_wire_bytes"):
        assert getattr(result, name) == getattr(plain, name) > 0
    assert result.notes["wire_peer"] == 6216
    assert result.ledger.by("node", "wire", link="peer") == {0: 3108, 1: 3108}


def test_the_simulated_link_to_the_server_carries_none_of_them() -> None:
    with InProcessGrid(client_app(), 1) as engine:
        grid = MeteredGrid(engine)
        node = engine.get_node_ids()[0]
        grid.ledger.record(1, 0, "up", "train", "hub", 10, 20)
        grid.record_peer(1, node, "train", 10**6, 10**6)
        assert [row["wire"] for row in serve._rows(grid.ledger, 1)] == [20]


@pytest.mark.slow
@pytest.mark.parametrize("wire", [0, 2_500_000])
def test_reports_show_the_column_where_there_is_something_in_it(wire: int) -> None:
    config = TINY.configure()
    records = [RoundRecord(1, 0.4, 1.0, 10, 20, 30, 40, peer_payload_bytes=wire, peer_wire_bytes=wire)]
    dense, sparse = specs_of(TINY, config)
    results = {"dense": recorded(dense, records), "sparse": recorded(sparse, [])}
    summary = summarise(TINY, config, [dense, sparse], results, Findings(), facts())
    assert [row["peer_wire_bytes"] for row in summary["rows"]] == [wire, 0]
    assert summary["rows"][0]["uplink_wire_bytes"] == 20
    page = render_report(summary, {"dense": records, "sparse": []})
    assert ("between clients" in page) == ("2.5 MB" in page) == bool(wire)
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table_of(result_sheet(summary)))
    assert ("between" in capture.get()) == ("2.5 MB" in capture.get()) == bool(wire)
