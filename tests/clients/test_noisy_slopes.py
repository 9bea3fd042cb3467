"""Slopes with noise on a client: what one record can move, what is drawn on it, and what it is paid from."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from torch import Tensor, nn

from fedcomp.clients.edge import LEDGER_FILE, STATE_FOLDER
from fedcomp.clients.private import noisy_slopes as module
from fedcomp.clients.private.dpsgd import Trainee, train_privately
from fedcomp.clients.private.noisy_slopes import noisy_slopes
from fedcomp.errors import ConfigError
from fedcomp.flower.record_dp import Account, DpSgdPlan
from fedcomp.forward import evaluate
from fedcomp.forward.directions import Directions
from fedcomp.privacy.accounting import compose
from fedcomp.privacy.errors import BudgetExceeded
from fedcomp.privacy.mechanism import GridGaussian
from fedcomp.rng import Key
from fedcomp.tasks import get_task
from fedcomp.tasks.base import EmptyPartition, Split

P, M, RECORDS, CLIP = 40, 9, 30, 2.0
PLAN = DpSgdPlan(method="forward", noise_multiplier=1.5, clip=CLIP, rate=0.2, steps=1, delta=1e-3, insecure=True)
EXACT = dataclasses.replace(PLAN, noise_multiplier=0.0, rate=1.0)
"""No noise, and every record is in the batch: what is released is the clipped sum."""

STATE = "fedcomp.record-dp"


def toy(**options: Any) -> Any:
    """A loss whose gradient of a record is its inputs times its target."""

    def objective(model: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] * targets).mean()

    return SimpleNamespace(name="toy", options=options, objective=objective, outputs=lambda model, x: model(x))


def records(count: int = RECORDS, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    x = scale * Key(3, "records").uniform(count * P).reshape(count, P).astype(np.float32)
    return x, np.linspace(-1.0, 1.0, count, dtype=np.float32)


def context(**node_config: Any) -> Context:
    return Context(1, 2, {"partition-id": 0, "num-partitions": 1, **node_config}, RecordDict(), {})


def directions() -> list[dict[str, np.ndarray]]:
    drawn = Directions(Key(8, "forward"), [P], M)
    return [{"weight": drawn.signs(0, k)[None]} for k in range(M)]


def release(
    data: tuple[np.ndarray, np.ndarray],
    plan: DpSgdPlan = PLAN,
    held: Context | None = None,
    key: int = 0,
    task: Any = None,
    **options: Any,
) -> tuple[np.ndarray, Account]:
    model = nn.Linear(P, 1, bias=False)
    nn.init.constant_(model.weight, 0.25)
    trainee = Trainee("arrays", model, task or toy(), Split(*data), 0, Key(key, "batches"))
    return noisy_slopes(trainee, plan, held or context(), directions(), M, **options)


def total(data: tuple[np.ndarray, np.ndarray], plan: DpSgdPlan = EXACT, **options: Any) -> np.ndarray:
    """The sum that a release stands for."""
    return release(data, plan, **options)[0] * plan.rate * len(data[0])


def with_record(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    inputs, targets = records()
    return np.concatenate([inputs, x[None]]), np.append(targets, np.float32(1.0))


ADVERSARIAL = {
    "long in all directions": np.sum([d["weight"][0] for d in directions()], axis=0) * 1e6,
    "long in one": directions()[0]["weight"][0] * 1e20,
    "overflows": np.full(P, 3e38, np.float32),
    "not a number": np.where(np.arange(P) == 5, np.nan, 1.0),
    "infinite": np.where(np.arange(P) == 5, np.inf, 1.0),
    "short": np.full(P, 1e-3),
    "zero": np.zeros(P),
}


@pytest.mark.parametrize("oracle", ["jvp", "differences"])
@pytest.mark.parametrize("who", ADVERSARIAL)
def test_one_record_moves_the_sum_of_all_slopes_by_the_clip_at_most(who: str, oracle: str) -> None:
    """Neighbouring data sets, every record in the batch, no noise. In grid steps, so exactly."""
    mechanism = EXACT.mechanism(M)
    moved = total(with_record(ADVERSARIAL[who].astype(np.float32)), oracle=oracle) - total(records(), oracle=oracle)
    assert np.linalg.norm(moved) <= CLIP * (1 + 1e-9)
    steps = moved / mechanism.step
    np.testing.assert_allclose(steps, np.rint(steps), atol=1e-6)
    # All of the bound is used where a record is long, and nothing where its slopes are no numbers.
    if who.startswith("long"):
        assert np.linalg.norm(moved) > 0.98 * CLIP
    if who in ("not a number", "infinite", "zero", "overflows"):
        assert not moved.any()


def test_a_clip_of_single_slopes_would_let_a_record_move_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: each number is within the bound, and the vector sqrt(m) times as long."""

    def each(self: GridGaussian, contribution: np.ndarray) -> np.ndarray:
        return np.rint(np.clip(contribution, -self.clip, self.clip) / self.step).astype(np.int64)

    monkeypatch.setattr(GridGaussian, "admit", each)
    long = with_record(ADVERSARIAL["long in all directions"].astype(np.float32))
    moved = total(long) - total(records())
    assert np.abs(moved).max() <= CLIP * (1 + 1e-9)
    assert np.linalg.norm(moved) == pytest.approx(CLIP * M**0.5, rel=1e-6)


def test_a_record_that_is_within_the_clip_counts_as_it_is() -> None:
    x, y = records(scale=1e-3)
    signs = np.stack([d["weight"][0] for d in directions()])
    exact = (x * y[:, None]).astype(np.float64) @ signs.T
    step = EXACT.mechanism(M).step
    assert np.abs(total((x, y)) - exact.sum(axis=0)).max() < 0.5 * step * RECORDS
    # Divided by the batch that is expected, which is public, and not by the one that was drawn.
    noiseless = dataclasses.replace(EXACT, rate=0.5)
    found = release((x, y), noiseless)[0]
    drawn = np.flatnonzero(
        module.poisson(RECORDS, 0.5, module.make_entropy(Key(0, "record-dp"), insecure_deterministic=True))
    )
    assert 0 < len(drawn) != 15
    assert np.abs(found - exact[drawn].sum(axis=0) / 15).max() < 0.5 * step * len(drawn) / 15 + 1e-9


def test_the_noise_is_that_of_the_mechanism() -> None:
    """Chi-square: of records without slopes nothing but noise is left, whatever the size of the model."""
    silent = (np.zeros((RECORDS, P), np.float32), np.ones(RECORDS, np.float32))
    draws = np.concatenate([release(silent, key=key)[0] for key in range(120)]) * PLAN.rate * RECORDS
    mechanism = PLAN.mechanism(M)
    np.testing.assert_allclose(draws / mechanism.step, np.rint(draws / mechanism.step), atol=1e-6)
    ratio, off = np.square(draws).sum() / mechanism.sigma**2 / draws.size, 4 * (2 / draws.size) ** 0.5
    assert mechanism.sigma == pytest.approx(1.5 * CLIP)
    assert abs(ratio - 1) < off
    assert abs(draws.mean()) < 4 * mechanism.sigma / draws.size**0.5
    # Noise for one number's bound, C over sqrt(m), would be seen.
    assert abs(ratio * M - 1) > off


def test_an_empty_batch_releases_noise_and_is_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked(*args: Any, **options: Any) -> Any:
        raise AssertionError("no record is in the batch")

    monkeypatch.setattr(evaluate, "record_slopes", looked)
    noisy, account = release(records(), dataclasses.replace(PLAN, rate=1e-9))
    assert noisy.all()
    assert (account.now, account.total) == (1, 1)


def test_a_record_without_finite_slopes_is_as_if_it_were_not_there() -> None:
    """The same noise, and the same sum as of a record without slopes: nothing tells that it was left out."""
    bad, none = (with_record(ADVERSARIAL[who].astype(np.float32)) for who in ("not a number", "zero"))
    everybody = dataclasses.replace(PLAN, rate=1.0)
    np.testing.assert_array_equal(release(bad, everybody)[0], release(none, everybody)[0])


@pytest.mark.slow
def test_slopes_cost_what_steps_of_dp_sgd_cost() -> None:
    task = get_task("digits", hidden="16")
    data, size = task.client(0, 4), sum(p.numel() for p in task.model(0).parameters())
    plan = DpSgdPlan(noise_multiplier=1.5, rate=0.1, steps=1, delta=1e-5)
    epsilons = {}
    for method in ("dp-sgd", "forward"):
        held = context()
        for round_ in range(5):
            trainee = Trainee("arrays", task.model(0), task, data, 0, Key(0, "batches", round_))
            given = dataclasses.replace(plan, method=method)
            if method == "forward":
                drawn = Directions(Key(8, "forward", round_), [size], 16)
                names = [(n, tuple(p.shape)) for n, p in trainee.model.named_parameters()]
                ends = np.cumsum([int(np.prod(shape)) for _, shape in names])[:-1]
                tangents = [
                    {n: a.reshape(s) for (n, s), a in zip(names, np.split(drawn.signs(0, k), ends), strict=True)}
                    for k in range(16)
                ]
                noisy_slopes(trainee, given, held, tangents, 16, at_once=16)
            else:
                train_privately(trainee, given, held)
        ledger = plan.ledger(len(data))
        ledger.load_state_dict(json.loads(str(held.state.config_records[STATE]["ledger"])))
        assert ledger.releases == 5
        epsilons[method] = ledger.epsilon()
    # What differs is what pays for failures of the samplers, which draw fewer numbers.
    assert epsilons["forward"] == pytest.approx(epsilons["dp-sgd"], rel=3e-3)
    assert epsilons["forward"] == pytest.approx(compose([plan.event(16)] * 5, 1e-5).epsilon)


def test_one_ledger_pays_for_slopes_and_trainings() -> None:
    """A node that does both spends from one budget."""
    held = context()
    _, account = release(records(), held=held)
    task = get_task("digits", hidden="4")
    data = task.client(0, 40)
    mixed = dataclasses.replace(PLAN, method="dp-sgd", steps=2)
    # Of another number of records the ledger is another one's.
    small = Split(data.x[:RECORDS], data.y[:RECORDS])
    spent = train_privately(Trainee("arrays", task.model(0), task, small, 0, Key(0)), mixed, held)
    assert (spent.run, spent.now, spent.total) == (account.run, 2, 3)


def test_the_budget_is_asked_before_a_record_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = compose([PLAN.event(M)] * 2, PLAN.delta).epsilon + 1e-6
    plan, held = dataclasses.replace(PLAN, budget=allowed), context()
    release(records(), plan, held)
    _, account = release(records(), plan, held)
    assert account.total == 2
    before = str(held.state.config_records[STATE]["ledger"])

    def looked(*args: Any, **options: Any) -> Any:
        raise AssertionError("a batch was drawn")

    monkeypatch.setattr(module, "poisson", looked)
    monkeypatch.setattr(evaluate, "record_slopes", looked)
    with pytest.raises(BudgetExceeded, match="No record was looked at"):
        release(records(), plan, held)
    assert str(held.state.config_records[STATE]["ledger"]) == before
    # The node's own budget is one as well, and noise from a seed is none.
    own = context(**{"privacy-budget": 1e-3, STATE_FOLDER: str(tmp_path)})
    with pytest.raises(BudgetExceeded):
        release(records(), dataclasses.replace(PLAN, insecure=False), own)
    with pytest.raises(ConfigError, match="from a seed"):
        release(records(), PLAN, own)


def test_a_release_is_on_the_disk_before_its_noise_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = context(**{LEDGER_FILE: str(tmp_path / "spent.jsonl")})

    def dies(self: GridGaussian, total: np.ndarray, entropy: Any) -> np.ndarray:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(GridGaussian, "perturb", dies)
        with pytest.raises(KeyboardInterrupt):
            release(records(), held=held)
    # It is paid for though nothing left; whoever restarts the node goes on from there.
    assert release(records(), held=held)[1].total == 2


def test_a_batch_that_breaks_costs_nothing() -> None:
    held = context()
    release(records(), held=held)
    before = str(held.state.config_records[STATE]["ledger"])
    task = toy()
    task.outputs = lambda model, x: model(x[:, :3])
    with pytest.raises(RuntimeError):
        release(records(), dataclasses.replace(PLAN, rate=1.0), held, task=task)
    assert str(held.state.config_records[STATE]["ledger"]) == before


def test_noise_and_batch_are_drawn_anew_unless_a_seed_is_asked_for_by_its_full_name() -> None:
    secure = dataclasses.replace(PLAN, insecure=False)
    np.testing.assert_array_equal(release(records())[0], release(records())[0])
    assert (release(records(), secure)[0] != release(records(), secure)[0]).any()


def test_what_has_no_slope_of_a_record_is_refused() -> None:
    with pytest.raises(EmptyPartition):
        release((np.zeros((0, P), np.float32), np.zeros(0, np.float32)))
    with pytest.raises(ConfigError, match="no part of a record's gradient"):
        release(records(), task=toy(l2=0.1))
    trainee = Trainee("arrays", nn.Linear(P, 1), toy(), Split(*records()), 0, Key(0), proximal=0.1)
    with pytest.raises(ConfigError, match="FedProx"):
        noisy_slopes(trainee, PLAN, context(), directions(), M)
    with pytest.raises(ConfigError, match="not below"):
        release(records(), dataclasses.replace(PLAN, delta=0.1))


def test_the_model_is_as_it_was() -> None:
    model = nn.Linear(P, 1, bias=False)
    before = model.weight.detach().clone()
    for oracle in ("jvp", "differences"):
        trainee = Trainee("arrays", model, toy(), Split(*records()), 0, Key(0))
        noisy_slopes(trainee, PLAN, context(), directions(), M, oracle=oracle)  # type: ignore[arg-type]
        assert torch.equal(model.weight, before)


class Dropping(nn.Linear):
    """Drops inputs, with coins from torch's global generator."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


@pytest.mark.slow
def test_no_seed_of_torch_names_what_a_model_draws_for_its_records() -> None:
    """Dealt in the order of the batch, known coins would let a record more exchange those of all behind it."""
    model = Dropping(P, 1, bias=False)
    nn.init.constant_(model.weight, 0.25)
    found: dict[bool, set[bytes]] = {True: set(), False: set()}
    for insecure in (True, True, False, False):
        trainee = Trainee("arrays", model, toy(), Split(*records()), 0, Key(0, "batches"))
        torch.manual_seed(7)
        before = torch.get_rng_state()
        plan = dataclasses.replace(EXACT, insecure=insecure)
        found[insecure].add(noisy_slopes(trainee, plan, context(), directions(), M)[0].tobytes())
        assert torch.equal(before, torch.get_rng_state())
    assert len(found[False]) == 2
    assert len(found[True]) == 1, "experiments repeat"
