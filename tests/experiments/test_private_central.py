"""Private systems without messages: the same model, bytes and statement as with them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from fedcomp.errors import ConfigError
from fedcomp.experiments import engines
from fedcomp.experiments.central import Outcome, Plan, measured, simulate
from fedcomp.experiments.findings import different_bytes
from fedcomp.experiments.spec import RunSpec
from fedcomp.layout import Layout, Update
from fedcomp.privacy.votes import TopkSign, entropy_bits
from fedcomp.rng import Key
from fedcomp.wire import FILLED

SETTINGS = {
    "task.hidden": "",
    "lr": 0.5,
    "batch_size": 8,
    "max_steps": 1,
    "delta": 1e-2,
    "insecure_deterministic": True,
    "noise_multiplier": 2.0,
}
CLIENTS = 12


def spec(system: str, rounds: int = 2, **settings) -> RunSpec:
    return RunSpec(
        system=system,
        label=system,
        task="digits",
        engine="inprocess",
        rounds=rounds,
        clients=CLIENTS,
        seed=5,
        settings={**SETTINGS, **settings},
    )


def run(asked: RunSpec) -> Outcome:
    return simulate(*Plan.of(asked))


VOTES = spec("topagg", k=120)
PRIVATE = {
    "votes, mean": spec("topagg", k=40),
    "votes, threshold, layers": spec("topagg", density=0.2, scope="layer", mode="threshold", beta=0.2, saturation=0.1),
    "dense": spec("dp-fedavg", codec="identity", clip=0.5),
    "another inner": spec("topagg", k=40, inner="fedavgm", **{"inner.server_learning_rate": 0.5}),
    "top-k": spec("dp-fedavg", codec="topk", clip=0.5, **{"codec.density": 0.1}),
    "memory": spec("dp-fedavg", codec="topk", feedback=True, clip=0.5, **{"codec.density": 0.1}),
    "a support that all share": spec("random-mask", clip=0.5),
    "noise at the clients": spec("local-dp", clip=0.5),
    "top-k of a model with small tensors": spec(
        "dp-fedavg", codec="topk", clip=0.5, **{"codec.density": 0.1, "task.hidden": "32"}
    ),
    "capped": spec("topagg", k=40, sampling="capped", cap=1, rounds=3),
    "budget": spec("topagg", k=40, noise_multiplier=8.0, budget=0.3, rounds=8),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRIVATE)
def test_messages_change_nothing(name: str) -> None:
    """The model bit for bit, the bytes of all frames, the rounds made and every figure of the statement."""
    asked = PRIVATE[name]
    out = run(asked)
    result = engines.run(asked)
    assert different_bytes(result.arrays, out.arrays) == 0
    assert result.uplink_payload_bytes == out.uplink
    assert result.accuracy == pytest.approx(out.final.accuracy)
    assert out.statement is not None
    said, theirs = out.statement.to_json(), dict(result.notes["privacy"])
    for statement in (said, theirs):
        del statement["run"]
    assert said == theirs
    assert len(out.exchanges) == result.rounds[-1].round or name == "capped"
    assert (len(out.exchanges) < asked.rounds) == (name in ("capped", "budget"))
    assert out.final.round == len(out.exchanges)
    assert math.isfinite(out.statement.epsilon)


def test_a_round_that_draws_nobody_ends_nothing() -> None:
    """It releases its noise, as with messages; before, the simulation ended there."""
    asked = spec("topagg", k=40, sampling="poisson", rate=0.1, rounds=4)
    # Of seed 5 the rounds draw 1, 1, 0 and 1 clients.
    out, result = run(asked), engines.run(asked)
    assert len(out.exchanges) == result.rounds[-1].round == 4
    assert [len(each.frames) for each in out.exchanges] == [1, 1, 0, 1]
    assert different_bytes(result.arrays, out.arrays) == 0
    assert out.statement is not None
    assert out.statement.releases == 4


def test_every_run_of_a_plan_has_a_ledger_of_its_own() -> None:
    plan, system = Plan.of(VOTES)
    first, again = simulate(plan, system), simulate(plan, system)
    assert different_bytes(first.arrays, again.arrays) == 0
    assert first.statement is not None
    assert again.statement is not None
    assert first.statement.releases == again.statement.releases == 2


def test_a_run_is_plain_data_and_its_frames_are_padded() -> None:
    found = measured(*Plan.of(VOTES))
    assert json.loads(json.dumps(found["statement"])) == found["statement"]
    assert found["epsilon"] == found["statement"]["epsilon"] < math.inf
    assert (found["frames"], found["rounds"]) == (2 * CLIENTS, 2)
    header = len(TopkSign(k=120).encode(Update(np.zeros(650, np.float32), Layout.flat(650)), {}, Key(0))[0])
    assert found["largest"] <= 1.05 * entropy_bits(650, 120) / 8 + header
    assert found["bare"] <= found["frames"] * found["largest"]
    longest = TopkSign(k=120).longest(Layout.flat(650))
    assert found["uplink"] == found["frames"] * (longest + FILLED), "padded: a length that tells nothing"


@pytest.mark.slow
def test_a_row_without_a_promise_is_trained_too_and_has_no_epsilon() -> None:
    settings = {key: SETTINGS[key] for key in ("task.hidden", "lr", "batch_size", "max_steps")}
    asked = RunSpec("identity", "dense", "digits", "inprocess", rounds=2, clients=CLIENTS, seed=5, settings=settings)
    found, result = measured(*Plan.of(asked)), engines.run(asked)
    assert found["uplink"] == found["bare"] == result.uplink_payload_bytes
    assert found["accuracy"] == result.accuracy
    assert (found["epsilon"], found["statement"]) == (math.inf, {})
    assert found["frames"] == 2 * CLIENTS


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (spec("dp-fedavg", clip=1.0), "DP-FedAvg would be a plain mean"),
        (spec("topagg", k=40, downlink="qsgd"), "downlink"),
        (spec("dp-fedavg", codec="qsgd", clip=1.0, adapters=True), "adapters is False"),
        (spec("topagg", k=40, **{"task.batch_norm": True, "task.model": "cnn", "task.hidden": "256,256"}), "buffers"),
    ],
)
def test_what_needs_messages_is_refused(asked: RunSpec, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(asked)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"density": 0.0}, "density"),
        ({"k": -3}, "k="),
        ({"mode": "median"}, "mode"),
        ({"beta": 0.5}, "threshold"),
        ({"server_lr": 0.0}, "server_lr"),
        ({"fraction": 0.5}, "fraction"),
        ({"delta": 0.5}, "delta"),
        ({"votes": 3}, "no setting"),
    ],
)
def test_the_row_refuses_settings_that_are_no_vote(settings: dict, words: str) -> None:
    from fedcomp.experiments.systems import check

    with pytest.raises(ConfigError, match=words):
        check(spec("topagg", **settings))
