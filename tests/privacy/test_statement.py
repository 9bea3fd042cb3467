"""The statement: everything an epsilon needs to mean something, for a reader and for a machine."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from fedcomp.errors import ConfigError
from fedcomp.plain import PlainError
from fedcomp.privacy.entropy import make_entropy
from fedcomp.privacy.events import Event
from fedcomp.privacy.gaussian import gaussian_epsilon, lattice_delta, lattice_excess
from fedcomp.privacy.ledger import PrivacyLedger
from fedcomp.privacy.mechanism import GridGaussian, Votes
from fedcomp.privacy.sampling import Sampling
from fedcomp.privacy.statement import Statement, make_statement
from fedcomp.rng import Key

SAID: dict[str, Any] = {"trust": "the server is trusted", "protects": "all released models"}
MECHANISM = GridGaussian(noise_multiplier=4.0, clip=0.5, size=100)


def made(
    rounds: int = 3, *, said: dict[str, Any] | None = None, mechanism: Any = MECHANISM, **changes: Any
) -> Statement:
    arguments: dict[str, Any] = {
        "delta": 1e-5,
        "population": 50,
        "adjacency": "zero_out",
        "sampling": Sampling("everyone"),
    }
    ledger = PrivacyLedger(**{**arguments, **changes})
    rate = ledger.sampling.event_rate
    for number in range(1, rounds + 1):
        ledger.record(mechanism.event(size=100, rate=rate), round=number, participants=[1, 10 + number])
    return make_statement(ledger, mechanism=mechanism, **{**SAID, **(said or {})})


def test_the_figures_are_the_ledgers_and_the_mechanisms() -> None:
    statement = made()
    assert statement.epsilon == statement.epsilon_unamplified > 0.0
    assert (statement.bound, statement.sensitivity) == pytest.approx((0.5, 0.5))
    assert (statement.noise_multiplier, statement.sigma) == pytest.approx((4.0, 2.0))
    assert (statement.rounds, statement.releases, statement.most_participations) == (3, 3, 3)
    assert statement.noise == "discrete_gaussian"
    assert statement.secure


def test_prose_says_all_of_it() -> None:
    sampling = Sampling("capped", cap=20)
    prose = made(
        sampling=sampling, budget=3.0, said={"not_covered": ("metrics", "timing"), "clip": "clipped to 0.5"}
    ).prose()
    first, *rest = prose.splitlines()
    assert first.startswith("Client-level (epsilon=")
    for words in ("delta=1e-05", "zero-out adjacency", "all released models", "at most 20 rounds of each client"):
        assert words in first
    assert "no secrecy of sampling assumed; the server is trusted" in first
    for words in (
        "Gaussian, closed form",
        "had every client been in every release",
        "below 1/50",
        "leaving one client's contribution out of every sum and count",
        "L2 norm at most 0.5",
        "clipped to 0.5",
        "4 times the sensitivity",
        "3 releases in 3 rounds",
        "operating-system entropy",
        "integers on a public grid",
        "a lost client",
        "epsilon 3, asked before anybody is contacted",
        "metrics; timing",
    ):
        assert any(words in line for line in rest), words
    assert "INSECURE" not in prose


def test_poisson_states_both_epsilons_and_what_the_smaller_one_assumes() -> None:
    statement = made(sampling=Sampling("poisson", rate=0.1))
    assert statement.epsilon < statement.epsilon_unamplified
    prose = statement.prose()
    assert "if nobody learns who took part" in prose
    without = float(prose.split("unamplified:")[1].split(",")[0])
    assert statement.epsilon_unamplified <= without < statement.epsilon_unamplified + 1e-3
    assert statement.most_participations == 0, "who took part is the secret of the guarantee"
    assert "PRV (Opacus 1." in prose
    assert "numerical error of 0.01 included" in prose


def test_a_seed_is_announced() -> None:
    key = Key(0, "noise")
    entropy = make_entropy(key, insecure_deterministic=True)
    for said in ({"entropy": entropy}, {"secure": False}):
        statement = made(said=said)
        assert not statement.secure
        assert statement.prose().startswith("INSECURE: ")
        assert "INSECURE: a seed" in statement.prose().split("randomness:")[1]


def test_failures_beside_the_noise_are_named() -> None:
    ledger = PrivacyLedger(delta=1e-5, population=50, adjacency="zero_out", sampling=Sampling("capped", cap=2))
    for number in range(1, 6):
        ledger.record(Event("gaussian", 9.0, delta=1e-7), round=number)
    statement = make_statement(ledger, mechanism=MECHANISM, **SAID)
    assert statement.failure == pytest.approx(2e-7)
    assert "of which 2e-07 for failures" in statement.prose()


def test_float_noise_is_announced() -> None:
    mechanism = GridGaussian(noise_multiplier=4.0, clip=0.5, size=100, noise="gaussian")
    assert "INSECURE" in made(mechanism=mechanism).finite_precision


def test_coarse_noise_is_accounted_for_what_it_is() -> None:
    ledger = PrivacyLedger(delta=1e-5, population=50, adjacency="zero_out", sampling=Sampling("everyone"))
    ledger.record(Event("discrete_gaussian", 1.0, grid_sigma=2.0), round=1)
    statement = make_statement(ledger, mechanism=Votes(noise_multiplier=1.0, k=4, shape=(10,)), **SAID)
    assert "coarse" in statement.finite_precision
    assert statement.accountant == "zCDP"


def test_a6_what_the_accounting_of_integers_as_continuous_takes_off_delta_is_named() -> None:
    ledger = PrivacyLedger(delta=1e-5, population=50, adjacency="zero_out", sampling=Sampling("everyone"))
    for number in range(1, 5):
        ledger.record(Event("discrete_gaussian", 2.0, grid_sigma=10.0), round=number)
    statement = make_statement(ledger, mechanism=MECHANISM, **SAID)
    assert ledger.lattice == pytest.approx(lattice_excess(1.0, 1e-5 / 1.025, 10.0), rel=1e-3)
    assert "delta divided by 1 + 0.025" in statement.finite_precision
    assert ledger.epsilon() == gaussian_epsilon(1.0, lattice_delta(1.0, 1e-5, 10.0)) > gaussian_epsilon(1.0, 1e-5)
    continuous = PrivacyLedger(delta=1e-5, population=50, adjacency="zero_out", sampling=Sampling("everyone"))
    continuous.record(Event("gaussian", 2.0), round=1)
    assert continuous.lattice == 0.0


def test_without_noise_it_says_not_private() -> None:
    statement = made(mechanism=GridGaussian(noise_multiplier=0.0, clip=0.5, size=100))
    assert statement.epsilon == float("inf")
    assert statement.prose().startswith("NOT PRIVATE")
    assert statement.to_json()["epsilon"] == "infinite"


def test_a_printed_epsilon_is_never_below_the_one_that_was_spent() -> None:
    statement = made()
    printed = float(statement.prose().split("epsilon=")[1].split(",")[0])
    assert statement.epsilon <= printed < statement.epsilon + 1e-3


@pytest.mark.parametrize("noise_multiplier", [4.0, 0.0])
def test_json_round_trip(noise_multiplier: float) -> None:
    mechanism = GridGaussian(noise_multiplier=noise_multiplier, clip=0.5, size=100)
    statement = made(mechanism=mechanism, sampling=Sampling("capped", cap=4))
    document = json.loads(json.dumps(statement.to_json(), allow_nan=False))
    assert Statement.from_json(document) == statement
    assert document["prose"] == statement.prose()
    assert set(document) == {f.name for f in fields(Statement)} | {"prose"}


@pytest.mark.parametrize("change", [{"extra": 1}, {"epsilon": None}])
def test_other_fields_are_refused(change: dict[str, Any]) -> None:
    document = made().to_json()
    document = {k: v for k, v in {**document, **change}.items() if v is not None or k not in change}
    with pytest.raises(PlainError, match=next(iter(change))):
        Statement.from_json(document)


@pytest.mark.parametrize(
    "change",
    [
        {"delta": 0.02},
        {"population": 0},
        {"adjacency": "swap"},
        {"sampling": "fixed"},
        {"noise": "laplace"},
        {"epsilon": float("nan")},
        {"trust": ""},
        {"protects": ""},
    ],
)
def test_what_cannot_be_stated_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(PlainError):
        Statement.from_json({**made().to_json(), **change})


def test_what_is_not_said_is_asked_for() -> None:
    ledger = PrivacyLedger(delta=1e-5, population=50, adjacency="replace", sampling=Sampling("everyone"))
    with pytest.raises(ConfigError, match="trust"):
        make_statement(
            ledger, mechanism=GridGaussian(noise_multiplier=1.0, clip=1.0, size=4, adjacency="replace"), protects="x"
        )
    with pytest.raises(ConfigError, match="bound"):
        make_statement(ledger, **SAID)
    with pytest.raises(ConfigError, match="scaled for 'zero_out'"):
        make_statement(ledger, mechanism=MECHANISM, **SAID)
    zeroed = PrivacyLedger(delta=1e-5, population=50, adjacency="zero_out", sampling=Sampling("everyone"))
    with pytest.raises(ConfigError, match="clipp"):
        make_statement(zeroed, mechanism=MECHANISM, **SAID, clipp="a typo")


def test_noise_that_does_not_come_from_a_mechanism_can_be_stated() -> None:
    ledger = PrivacyLedger(
        delta=1e-5, population=5000, adjacency="add_remove", sampling=Sampling("everyone"), unit="record"
    )
    ledger.record(Event("gaussian", 1.1), round=1, times=3)
    statement = make_statement(
        ledger, name="DP-SGD", bound=1.0, sensitivity=1.0, noise="gaussian", noise_multiplier=1.1, sigma=1.1, **SAID
    )
    assert statement.prose().startswith("Record-level")
    assert "DP-SGD" in statement.prose()
