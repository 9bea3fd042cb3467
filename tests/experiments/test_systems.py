"""Every row of the table runs end to end; every wrong name or value is found before anything starts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedcomp.errors import ConfigError
from fedcomp.experiments import engines
from fedcomp.experiments.central import Plan
from fedcomp.experiments.spec import RunSpec
from fedcomp.experiments.systems import SYSTEMS, check, get_system
from fedcomp.layout import NONE_DENSE, SmallDense
from fedcomp.strategies.parts import INNER
from fedcomp.strategies.system import COMMON, System

SMALL = {"task.hidden": "32", "task.partition": "dirichlet:0.5", "momentum": 0.9, "lr": 0.05}
# Values that let two rounds of a sparse codec, or two steps of a vote, show that they learn; one per setting.
AMPLE = {
    "codec.density": 0.3,
    "codec.level": 0.003,
    "codec.key_density": 0.6,
    "codec.sparse_density": 0.3,
    "codec.bin": 50,
    "codec.step": 0.01,
}
INNER_OPTIONS = {
    "fedtrimmedavg": {"inner.beta": 0.2},
    "krum": {"inner.num_malicious_nodes": 1},
    "multikrum": {"inner.num_malicious_nodes": 1, "inner.num_nodes_to_select": 3},
    "bulyan": {"inner.num_malicious_nodes": 1},
    "fedprox": {"inner.proximal_mu": 0.01},
    "qfedavg": {"inner.client_learning_rate": 0.05, "inner.q": 0.1},
}


@pytest.fixture(scope="module")
def plain():
    return engines.run(RunSpec("fedavg", rounds=2, clients=4, settings=SMALL))


def codec_of(name: str):
    """Return the codec of a system as it is by default; a coded system has it in the pair it stands around."""
    strategy = get_system(name).build(get_system(name).resolve({}), 0)
    system = getattr(strategy, "system", None)
    places = (strategy, system, getattr(system, "inner", None), strategy.inner)
    return next(each.codec for each in places if hasattr(each, "codec"))


# Coded gradient descent needs a linear task: tests/experiments/test_coded_training_study.py runs it. Private
# systems say less of a round, and are in test_private_systems.py.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, system in SYSTEMS.items() if not system.needs and not system.private])
def test_every_system_runs_end_to_end(name, plain):
    ample = {key: value for key, value in AMPLE.items() if key in SYSTEMS[name].defaults}
    result = engines.run(RunSpec(name, rounds=2, clients=4, settings=SMALL | ample))
    assert [record.round for record in result] == [0, 1, 2]
    assert [record.replies for record in result] == [0, 4, 4]
    assert all(record.failures == 0 for record in result)
    assert result.final.loss < result.rounds[0].loss
    assert result.uplink_wire_bytes == result.ledger.total("wire", direction="up", link="hub")
    assert result.downlink_wire_bytes == result.ledger.total("wire", direction="down", link="hub")
    assert all(np.isfinite(array).all() for array in result.arrays.values())
    if SYSTEMS[name].prefixes != get_system("fedavg").prefixes:
        assert result.uplink_payload_bytes < plain.uplink_payload_bytes
        assert result.final.metrics["report.compressed"] == 4
        assert result.final.metrics["report.changed"] > 0
        # A coded sum shows nothing of single clients; by default GradiVeQ has no memory, and LGC's is not what is owed.
        told = codec_of(name).remembers and name not in ("sumcode", "gradiveq", "lgc")
        assert ("report.memory_mean" in result.final.metrics) == told


def test_the_identity_codec_changes_no_bit(plain):
    result = engines.run(RunSpec("identity", rounds=2, clients=4, settings=SMALL))
    assert {k: v.tobytes() for k, v in result.arrays.items()} == {k: v.tobytes() for k, v in plain.arrays.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", INNER)
def test_every_inner_strategy_runs_plain_and_compressed(name):
    settings = SMALL | {"inner": name} | INNER_OPTIONS.get(name, {})
    for system in ("fedavg", "topk"):
        # Krum and Bulyan need more clients than they may lose.
        result = engines.run(RunSpec(system, rounds=2, clients=7, settings=settings))
        assert result.final.replies == 7
        assert not math.isnan(result.accuracy)
        changed = [not np.array_equal(a, b) for a, b in zip(result.arrays.values(), initial(7).values(), strict=True)]
        assert any(changed), f"{name} in {system} never moved the model"


def initial(clients: int):
    return engines.run(RunSpec("fedavg", rounds=0, clients=clients, settings=SMALL)).arrays


def test_the_proximal_term_reaches_the_clients():
    def final(mu: float) -> np.ndarray:
        settings = SMALL | {"inner": "fedprox", "inner.proximal_mu": mu}
        result = engines.run(RunSpec("fedavg", rounds=1, clients=2, settings=settings))
        return np.concatenate([array.ravel() for array in result.arrays.values()])

    start = np.concatenate([array.ravel() for array in initial(2).values()])
    assert np.linalg.norm(final(10.0) - start) < 0.8 * np.linalg.norm(final(0.0) - start)


def test_policy_settings_reach_the_policy_with_and_without_messages():
    def resolved(**policy):
        return get_system("topk").resolve({f"policy.{key}": value for key, value in policy.items()})

    make = get_system("topk").build
    assert make(resolved(), 0).policy == NONE_DENSE
    assert make(resolved(share=0.5), 0).policy == SmallDense(share=0.5)
    assert make(resolved(min_size=10), 0).policy == SmallDense(10)
    plan, _ = Plan.of(RunSpec("topk", settings={"policy.share": 1.0}))
    assert plan.policy == SmallDense(share=1.0)
    for settings, told in (
        ({"size": 10}, "no parameter 'size'; did you mean 'min_size'"),
        ({"share": 2.0}, "share must be a number in"),
        ({"min_size": 1.5}, "min_size must be an integer"),
    ):
        with pytest.raises(ConfigError, match=told):
            make(resolved(**settings), 0)
    with pytest.raises(ConfigError, match=r"no setting 'policy\.share'"):
        get_system("fedavg").resolve({"policy.share": 0.5})


@pytest.mark.slow
def test_a_policy_decides_what_travels_dense():
    bytes_up = {
        share: engines.run(
            RunSpec("topk", rounds=1, clients=2, settings=SMALL | {"policy.share": share})
        ).uplink_payload_bytes
        for share in (0.0, 1.0)
    }
    assert bytes_up[0.0] < bytes_up[1.0]


@pytest.mark.slow
def test_downlink_and_memory_settings_reach_their_codecs():
    spec = RunSpec(
        "topk",
        rounds=3,
        clients=3,
        settings=SMALL | {"downlink": "topk", "downlink.density": 0.05, "feedback.momentum": 0.5},
    )
    strategy = get_system("topk").build(get_system("topk").resolve(spec.settings), 0)
    assert strategy.downlink.density == 0.05
    assert strategy.codec.momentum == 0.5
    result = engines.run(spec)
    # The first round has to send the model; later ones send steps.
    assert result.rounds[3].downlink_payload_bytes < 0.5 * result.rounds[1].downlink_payload_bytes


def test_rows_describe_themselves():
    for name, system in SYSTEMS.items():
        assert isinstance(system, System)
        assert system.name == name
        assert system.title
        assert system.paper
        assert system.summary
        assert set(system.defaults) & set(COMMON) <= {"inner"}


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_defaults_of_a_system_follow_the_rules_of_its_settings(name):
    known = SYSTEMS[name].known_settings()
    resolved = SYSTEMS[name].resolve(known)
    assert resolved == SYSTEMS[name].resolve({}) == known
    assert list(map(type, resolved.values())) == list(map(type, known.values()))


def test_all_examples_at_once_are_for_those_who_train_so():
    assert get_system("dpsgd").resolve({"batch_size": 0})["batch_size"] == 0
    with pytest.raises(ConfigError, match="expected an integer >= 1, for instance 32"):
        get_system("fedavg").resolve({"batch_size": 0})


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (RunSpec("topkk"), "unknown system 'topkk'; did you mean 'topk'"),
        (RunSpec("fedavg", task="digit"), "unknown task 'digit'; did you mean 'digits'"),
        (RunSpec("fedavg", engine="rai"), "unknown engine 'rai'; did you mean 'ray'"),
        (RunSpec("topk", settings={"density": 0.1}), "did you mean 'codec.density'"),
        (RunSpec("topk", settings={"codec.densty": 0.1}), "densty"),
        (RunSpec("topk", settings={"codec.density": math.nan}), "density=nan is not valid"),
        (RunSpec("topk", settings={"codec.density": "1%"}), "expected a number"),
        (RunSpec("topk", settings={"feedback": 1}), "expected True or False, for instance True"),
        (RunSpec("topk", settings={"feedback": False, "feedback.beta": 0.5}), "need feedback=true"),
        (RunSpec("topk", settings={"downlink.density": 0.5}), "need a codec"),
        (RunSpec("dgc", settings={"feedback": True}), "has memory of its own"),
        (RunSpec("signsgd", settings={"feedback": True}), "not in the update's unit"),
        (RunSpec("signsgd", settings={"inner": "fedmedian"}), "FedMedian looks at single updates"),
        (RunSpec("threshold", settings={"codec.level": 0.0}), "level=0.0 is not valid"),
        (RunSpec("fedavg", settings={"codec.density": 0.5}), "has no setting 'codec.density'"),
        (RunSpec("fedavg", settings={"inner": "fedavgmm"}), "did you mean 'fedavgm'"),
        (RunSpec("fedavg", settings={"inner.server_lr": 1.0}), "has no parameter 'server_lr'"),
        (RunSpec("fedavg", settings={"inner.fraction_train": 0.5}), "use 'fraction'"),
        (RunSpec("fedavg", settings={"lr": 0.0}), "'lr' is 0.0; expected a positive finite number"),
        (RunSpec("fedavg", settings={"lr": math.nan}), "'lr' is nan"),
        (RunSpec("fedavg", settings={"epochs": 1.5}), "expected an integer >= 1"),
        (RunSpec("fedavg", settings={"fraction": 0.0}), "expected a number in (0, 1]"),
        (RunSpec("fedavg", settings={"task.partition": "dirichle:1"}), "did you mean 'dirichlet'"),
        (RunSpec("fedavg", clients=2000, settings={"task.partition": "dirichlet:1"}), "cannot give 2000 partitions"),
        (RunSpec("fedavg", settings={"link": "10 furlongs"}), "is not a bandwidth"),
    ],
)
def test_what_cannot_run_is_refused_with_a_reason(spec, said):
    # Without running, where that tells, and by whoever runs it.
    for refuse in (check, engines.run) if spec.engine in engines.ENGINES else (engines.run,):
        with pytest.raises(ConfigError) as refused:
            refuse(spec)
        assert said in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "identity", "topk"])
def test_a_model_with_integer_buffers_keeps_them(name):
    settings = {"task.model": "cnn", "task.batch_norm": True, "max_steps": 2}
    result = engines.run(RunSpec(name, rounds=2, clients=3, settings=settings))
    counters = {k: v for k, v in result.arrays.items() if k.endswith("num_batches_tracked")}
    # Two steps a round on every client: after two rounds the averaged counter has seen four batches.
    assert counters
    assert all(value == 4 for value in counters.values())
    assert result.final.replies == 3
