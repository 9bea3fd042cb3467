"""The row for graphs: what cannot run is refused before anything starts, what can is made as it was asked for."""

from __future__ import annotations

import pytest

from fedcomp.errors import ConfigError
from fedcomp.experiments import engines
from fedcomp.experiments.kit import Record
from fedcomp.experiments.spec import RunSpec
from fedcomp.experiments.studies.graph_runs import outcome
from fedcomp.experiments.systems import check, get_system
from fedcomp.graphs.settings import RoundSettings, RowSettings
from fedcomp.strategies.gcn.system import layer_sizes, sampler_settings

SMALL = {"n": "8", "batch_size": 4}


def row(task: str = "karate", clients: int = 2, **settings: object) -> RunSpec:
    return RunSpec("skewed-gcn", task=task, rounds=2, clients=clients, settings={**SMALL, **settings})  # type: ignore[dict-item]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (row("digits"), "does not fit task 'digits'.*trains? on records"),
        (RunSpec("fedavg", task="karate"), "does not fit task 'karate'.*'skewed-gcn'"),
        (RunSpec("dpsgd", task="karate", clients=3), "does not fit task 'karate'"),
        (RunSpec("datalens", task="karate"), "does not fit task 'karate'"),
        (row("digits-generator"), "does not fit task 'digits-generator'.*'datalens'"),
        (row(budget=2.0), "did you mean 'variance_budget'"),
        (row(variance_budget=0.5), "budget=0.5 is not valid"),
        (row(n="many"), "'n' is 'many'; expected a whole number"),
        (row(n="8,8,8"), "3 numbers for 2 layers"),
        (row(sampler="skewd"), "did you mean 'skewed'"),
        (row(cache="lur"), "did you mean 'lru'"),
        (row(cache_bytes=100), "use cache=lru"),
        (row(cache="lru", cache_bytes=-1), "cache_bytes=-1 is not valid"),
        (row(deadline=-1.0), "deadline=-1.0 is not valid"),
        (row(local_steps=0), "local_steps=0 is not valid"),
        (row(epochs=2), "use local_steps"),
        (row(max_steps=3), "use local_steps"),
        (row(fraction=0.5), "set fraction=1"),
        (row(fraction_evaluate=0.5), "all owners evaluate"),
        (row(feedback=True), "need a codec"),
        (row(sampler="fastgcn", **{"task.structure": "halo"}), "use structure='full'"),
        (
            row("digits-graph", row_codec="binary-rice"),
            "binary-rice does not fit task 'digits-graph'.*take 'csr' or 'auto'",
        ),
        (row(row_codec="binary-rice", noise=0.1), "cannot hold rows with noise"),
        (row("cross-partition", clients=4), "has 1 layers?.*layers=1"),
        (row(layers=3), "has 2 layers?.*layers=2"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(spec: RunSpec, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(spec)


def test_layers_are_the_tasks_where_it_is_asked_for_them() -> None:
    check(row(layers=0, **{"task.layers": 3}))
    check(row("cross-partition", clients=4, layers=1))
    check(row(row_codec="binary-rice"))
    assert layer_sizes("384") == 384
    assert layer_sizes("384,256") == (384, 256)


def test_settings_reach_the_sampler_and_the_strategy() -> None:
    given = {
        "n": "20,10",
        "sampler": "node",
        "fanout": 3,
        "estimator": "multinomial",
        "weight": "count",
        "mode": "worst",
        "variance_budget": 2,
        "scale": 3,
        "s_max": 8,
        "keep_self": True,
        "favour": "halo",
        "q": 0.5,
        "cache": "lru",
        "cache_bytes": 1000,
        "row_codec": "csr",
        "local_steps": 3,
        "batch_size": 0,
        "dedupe": True,
        "noise": 0.5,
        "evaluate": "sampled",
        "deadline": 7.0,
        "task.structure": "halo",
        "codec": "topk",
        "codec.density": 0.1,
    }
    system = get_system("skewed-gcn")
    settings = system.resolve(given)
    strategy = system.build(settings, 11)
    made = sampler_settings(settings)
    system = strategy.system
    assert system.sampler == made
    for name in ("sampler", "fanout", "estimator", "weight", "mode", "scale", "s_max", "keep_self", "favour", "q"):
        assert getattr(made, name) == given[name]
    assert (made.n, made.budget, made.layers) == ((20, 10), 2.0, 2)
    assert system.rows == RowSettings(codec="csr", cache="lru", cache_bytes=1000, dedupe=True, noise=0.5)
    assert system.rounds == RoundSettings(local_steps=3, batch_size=0, evaluate="sampled", timeout=7.0)
    assert (system.structure, strategy.seed) == ("halo", 11)
    assert system.codec.density == 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"inner": "fedadam", "inner.eta": 0.05, "lr": 1.0, "codec": "topk", "codec.density": 0.5, "feedback": True},
        {"mode": "fixed", "local_steps": 2, "fraction_evaluate": 1.0, "batch_size": 0},
    ],
)
def test_the_row_learns_and_its_bytes_are_the_ledgers(settings: dict[str, object]) -> None:
    result = engines.run(row("karate", lr=0.5, **settings) if "lr" not in settings else row("karate", **settings))
    assert [record.replies for record in result] == [0, 2, 2]
    assert result.final.loss < result.rounds[0].loss
    found = Record(outcome(result))
    assert found.rows_fetched > 0
    assert (found.gap_asked, found.gap_link) == (0, 0)
    assert found.feature_bytes_link == 2 * found.feature_bytes_logical
    assert bool(found.evaluate_feature_bytes_link) == ("fraction_evaluate" in settings)
