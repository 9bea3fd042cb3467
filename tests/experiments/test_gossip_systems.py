"""The rows of decentralised learning: each runs as in one process, says what it costs, refuses what does not fit."""

from __future__ import annotations

import numpy as np
import pytest

from fedcomp.errors import ConfigError
from fedcomp.experiments import engines
from fedcomp.experiments.relayed import edge_bytes, without_messages
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.experiments.systems import SYSTEMS, check, get_system
from fedcomp.gossip import ALGORITHMS
from fedcomp.gossip.power_gossip import auto_rate
from fedcomp.gossip.topology import topology_of

NAMES = [name for name, system in SYSTEMS.items() if "topology" in system.needs]
SMALL = {"task.hidden": "16", "task.partition": "dirichlet:0.5", "evaluate_every": 2}


def spec(name: str, rounds: int = 2, clients: int = 4, **settings) -> RunSpec:
    return RunSpec(name, rounds=rounds, clients=clients, seed=3, settings=SMALL | settings)


def whole(result: RunResult) -> np.ndarray:
    return np.concatenate([result.arrays[n].ravel() for n in sorted(result.arrays)])


def test_every_algorithm_is_a_row() -> None:
    assert sorted(NAMES) == sorted(ALGORITHMS)


def bits(arrays: dict[str, np.ndarray]) -> dict[str, tuple[str, bytes]]:
    return {name: (array.dtype.str, array.tobytes()) for name, array in arrays.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_7_16_every_row_gives_the_bits_of_the_run_without_messages(name: str) -> None:
    asked = spec(name)
    result, (arrays, sent) = engines.run(asked), without_messages(asked)
    assert bits(result.arrays) == bits(arrays)
    assert edge_bytes(result) == sent > 0
    assert [r.replies for r in result.rounds] == [0, 4, 8]
    assert [np.isnan(r.accuracy) for r in result.rounds] == [False, True, False]
    assert result.rounds[0].loss != result.final.loss


@pytest.mark.slow
@pytest.mark.parametrize("buffers", ["dense", "local"])
def test_7_16_running_statistics_and_counters_are_those_of_the_run_without_messages(buffers: str) -> None:
    more = {"task.model": "cnn", "task.batch_norm": True, "buffers": buffers, "batch_size": 4, "task.hidden": "8"}
    asked = spec("sgp", clients=2, **more)
    result, (arrays, _) = engines.run(asked), without_messages(asked)
    assert bits(result.arrays) == bits(arrays)
    counters = {int(array) for name, array in result.arrays.items() if name.endswith("num_batches_tracked")}
    assert counters == {2}
    means = [array for name, array in result.arrays.items() if name.endswith("running_mean")]
    assert any(array.any() for array in means)


@pytest.mark.slow
def test_a_record_keeps_the_four_counters_apart() -> None:
    result = engines.run(spec("sparse-push", rounds=3, skew_rounds="2", evaluate_every=3))
    ledger = result.ledger
    for record in result.rounds[1:]:
        metrics = record.metrics
        assert metrics["gossip.edge"] >= metrics["gossip.node"] > 0
        wire = ledger.total("wire", round=record.round, message_type="train")
        # What a node sends to several others goes up once, and down to each of them.
        messages = metrics["gossip.up"] + metrics["gossip.down"]
        assert wire == messages + metrics["gossip.start"] + metrics["gossip.overhead"]
        assert metrics["gossip.up"] == metrics["gossip.node"]
    first, last = result.rounds[1].metrics, result.final.metrics
    assert first["gossip.start"] > 0 == last["gossip.start"]
    assert first["gossip.observation"] == 0 < last["gossip.observation"]
    assert last["gossip.edge.dense"] > 10 * last["gossip.edge.train"] > 0
    assert last["gossip.sum_w"] == pytest.approx(4, abs=1e-12)
    assert last["gossip.accuracy_min"] <= last["gossip.accuracy_mean"] <= last["gossip.accuracy_max"]


def test_broadcast_messages_are_counted_once_per_sender_and_once_per_edge() -> None:
    metrics = engines.run(spec("choco", rounds=1)).final.metrics
    assert metrics["gossip.edge"] == 2 * metrics["gossip.node"]
    assert metrics["gossip.edge.messages"] == 8
    assert metrics["gossip.edge.headers"] == 64


@pytest.mark.slow
def test_a_rate_left_to_the_graph_is_the_graphs() -> None:
    # On the ring of four the rate is 1.
    rates = ("auto", repr(auto_rate(topology_of("ring", 5))), 1.0)
    graphs, numbers, ones = (engines.run(spec("power-gossip", rounds=2, clients=5, rate=rate)) for rate in rates)
    assert whole(graphs).tobytes() == whole(numbers).tobytes()
    assert graphs.final.metrics["gossip.distance"] != ones.final.metrics["gossip.distance"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "own"), [("sparse-push", {}), ("lead", {}), ("power-gossip", {"rate": "auto"})])
def test_an_interrupted_run_continues_to_the_same_bits_and_bytes(name: str, own: dict, tmp_path) -> None:
    asked, file = spec(name, rounds=4, **own), tmp_path / "checkpoint"
    whole_run = engines.run(asked)

    def interrupt(record) -> None:
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engines.run(asked, on_round=interrupt, checkpoint=file)
    resumed = engines.run(asked, checkpoint=file)
    assert whole(resumed).tobytes() == whole(whole_run).tobytes()
    assert [r.metrics["gossip.edge"] for r in resumed.rounds[1:]] == [
        r.metrics["gossip.edge"] for r in whole_run.rounds[1:]
    ]
    for direction in ("up", "down"):
        by = [r.ledger.by("round", "payload", direction=direction) for r in (resumed, whole_run)]
        assert by[0] == by[1]


@pytest.mark.slow
def test_settings_reach_algorithm_relay_and_clients() -> None:
    settings = SMALL | {
        "lr": 0.03,
        "momentum": 0.5,
        "gamma": 0.2,
        "compressor": "randomk",
        "compressor.density": 0.1,
        "algorithm.digest_every": 7,
        "topology": "torus",
        "batch_size": 0,
        "dtype": "float64",
        "patience": 9,
        "timeout": 4.0,
        "evaluate_every": 5,
    }
    made = get_system("choco").build(get_system("choco").resolve(settings), 11)
    config = made.algorithm.get_config()
    assert (config["lr"], config["momentum"], config["gamma"], config["digest_every"]) == (0.03, 0.5, 0.2, 7)
    assert (config["compressor"]["id"], config["compressor"]["density"]) == ("randomk", 0.1)
    how = made.settings
    assert (how.patience, how.timeout, how.observe_every, how.seed) == (9, 4.0, 5, 11)
    assert made.graph(4).text == "torus"
    full = [engines.run(RunSpec("nids", rounds=1, clients=2, settings=SMALL | {"batch_size": b})) for b in (0, 32, 0)]
    assert whole(full[0]).tobytes() == whole(full[2]).tobytes() != whole(full[1]).tobytes()
    doubled = engines.run(spec("nids", rounds=1, dtype="float64"))
    assert {array.dtype.name for array in doubled.arrays.values()} == {"float64"}


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("cold", {"fraction": 0.5}, "fraction=0.5 does not fit"),
        ("cold", {"fraction_evaluate": 1.0}, "fraction_evaluate=1.0 does not fit"),
        ("cold", {"epochs": 2}, "epochs=2 does not fit"),
        ("cold", {"inner": "fedadam"}, "does not fit"),
        ("cold", {"momentum": 0.9}, "COLD has none"),
        ("cold", {"topology": "exponential"}, "symmetric"),
        ("cold", {"topology": "rin"}, "did you mean 'ring'"),
        ("cold", {"skew_rounds": 3}, "push-sum"),
        ("cold", {"gamma": "much"}, "expected a number or 'auto'"),
        ("cold", {"gamma": 7.0}, "gamma"),
        ("cold", {"compressor": "topkk"}, "topk"),
        ("cold", {"compressor.fractoin": 0.5}, "unexpected keyword argument .fractoin"),
        ("cold", {"compressor.id": "dithering"}, "set compressor=dithering"),
        ("nids", {"compressor.density": 0.5}, "NIDS has no compressor"),
        ("cold", {"algorithm.gama": 0.5}, "did you mean 'gamma'"),
        ("cold", {"dtype": "float16"}, "dtype='float16'"),
        ("cold", {"buffers": "none"}, "buffers='none'"),
        ("topk", {"batch_size": 0}, "'batch_size' is 0"),
        ("cold", {"batch_size": -1}, "'batch_size' is -1"),
        ("sparse-push", {"skew_rounds": "few"}, "skew_rounds"),
        ("sparse-push", {"skew_rounds": 1.5}, "skew_rounds"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(name: str, settings: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(spec(name, **settings))
