"""Every private row of the table: it keeps what it promises to say, and publishes nothing else of a round."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from private_rows import NAMES, small

from fedcomp.adapters import draw
from fedcomp.errors import ConfigError
from fedcomp.experiments import engines
from fedcomp.experiments.spec import RunSpec
from fedcomp.experiments.systems import SYSTEMS, check
from fedcomp.privacy.statement import Statement

COUNTS = {
    *(f"report.{name}" for name in ("compressed", "plain", "lost", "duplicates", "rolled_back", "fresh")),
    *(f"report.{name}" for name in ("refused", "unsupported")),
}

MADE = [pytest.param(name, marks=pytest.mark.long if name in ("datalens", "distributed-dp") else ()) for name in NAMES]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    made = {}

    def run(name):
        if name not in made:
            made[name] = engines.run(small(name), privacy=tmp_path_factory.mktemp("rows") / "privacy.jsonl")
        return made[name]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_a_private_row_runs_and_states_what_it_promises(name, results):
    result = results(name)
    said = Statement.from_json(json.loads(json.dumps(result.notes["privacy"])))
    assert [record.round for record in result] == [0, 1, 2]
    assert all(record.failures == 0 for record in result)
    assert result.notes["ended"] == ""
    assert said.population >= 1
    assert not said.secure
    assert 0.0 < said.epsilon <= said.epsilon_unamplified < math.inf
    assert said.releases >= 2
    missing = " ".join(said.not_covered)
    assert all(what in missing for what in ("the choice of", "preprocessing", "who takes part"))
    assert [r.metrics["privacy.releases"] for r in result] == sorted(r.metrics["privacy.releases"] for r in result)
    assert result.final.metrics["privacy.epsilon"] == said.epsilon
    assert result.final.metrics["privacy.epsilon_unamplified"] == said.epsilon_unamplified
    assert result.rounds[0].metrics["privacy.epsilon"] == 0.0


@pytest.mark.parametrize("name", MADE)
def test_a_private_row_publishes_nothing_of_single_updates(name, results):
    """Memory ratios, changed coordinates, bytes per tensor and reasons of errors are statistics of clients' data."""
    for record in results(name):
        own = {key for key in record.metrics if not key.startswith(("privacy.", "coded."))}
        assert not {key for key in own if key.startswith(("report.", "clients."))} - COUNTS
        assert not any(key.endswith("_because") or "loss" in key for key in record.metrics)


@pytest.mark.parametrize("name", NAMES)
def test_a_private_row_refuses_what_would_break_its_promise(name):
    check(small(name))
    for settings, said in (
        ({"fraction": 0.5}, "fraction=0.5 does not fit a private system"),
        ({"fraction_evaluate": 1.0}, "metrics of clients would be released"),
        ({"budget": -1.0}, "budget=-1.0 is not valid"),
        ({"delta": 0.0}, "delta"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
    ):
        with pytest.raises(ConfigError) as refused:
            check(small(name, **settings))
        assert said in str(refused.value)


@pytest.mark.parametrize("name", [name for name in NAMES if "count" in SYSTEMS[name].defaults])
def test_a1_a_row_with_a_fixed_number_of_clients_refuses_add_remove(name):
    check(small(name, count=2))
    # Rows whose mechanism knows one adjacency only refuse the setting for that reason.
    with pytest.raises(
        ConfigError, match=r"takes its place|adjacency of local privacy is|brings no noise|adds no noise"
    ):
        check(small(name, count=2, adjacency="add_remove"))


@pytest.mark.parametrize(("name", "clients"), [("dp-fedavg", 10), ("topagg", 10)])
def test_delta_is_below_one_over_the_number_of_clients(name, clients):
    check(small(name, clients=clients, delta=0.09))
    with pytest.raises(ConfigError, match="not below 1/10"):
        check(small(name, clients=clients, delta=0.1))


def test_a_codec_has_to_be_named_before_it_has_parameters():
    with pytest.raises(ConfigError, match="need a codec"):
        check(small("dp-fedavg", feedback=True))
    check(small("dp-fedavg", codec="topk", feedback=True, **{"codec.density": 0.1}))


@pytest.mark.parametrize("name", ["dp-fedavg", "record-dp"])
def test_of_adapters_one_half_is_drawn_and_has_no_noise(name):
    """As many values are bounded and noised as travel; A is the one of the seed at the end."""
    lora = {"task.rank": 2, "task.frozen_a": True, "task.hidden": "8", "task.layers": 1, "task.seq_len": 8}
    own = {"codec": "identity", "noise_multiplier": 1.0, "delta": 1e-5, "insecure_deterministic": True, "max_steps": 1}
    settings = {**lora, **own, "adapters": True, "task.speakers": 2}
    result = engines.run(RunSpec(name, task="dialects", rounds=1, clients=2, seed=3, settings=settings))
    halves = {key: array for key, array in result.arrays.items() if "lora_A" in key}
    assert len(halves) == 4
    for key, values in halves.items():
        np.testing.assert_array_equal(values, draw(3, key, values.shape, 1 / np.sqrt(values.shape[1])))
        other = result.arrays[key.replace("lora_A", "lora_B")]
        assert np.count_nonzero(other) > 0.9 * other.size
    with pytest.raises(ConfigError, match=r"'adapters'.* need a codec"):
        check(RunSpec(name, settings={"adapters": True}))


def test_only_private_rows_have_a_budget():
    for system in SYSTEMS.values():
        assert ("budget" in system.known_settings()) == system.private
    with pytest.raises(ConfigError, match="no setting 'budget'"):
        check(RunSpec("topk", settings={"budget": 1.0}))


@pytest.mark.slow
def test_noise_of_a_seed_repeats_and_other_noise_does_not():
    def model(**settings):
        result = engines.run(small("dp-fedavg", rounds=1, **settings))
        return b"".join(array.tobytes() for array in result.arrays.values())

    assert model() == model()
    assert model(insecure_deterministic=False) != model(insecure_deterministic=False)
