"""The study of DataLens and MNIST, very small and without MNIST's files: every row pays for what it releases."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from experiment_runs import Ran, ran

from fedcomp.experiments.catalog.datalens_mnist import EXPERIMENT
from fedcomp.experiments.findings import Pictures, Say
from fedcomp.experiments.generator_training import EACH, HELD, PROXY, Training, _votes, task_of
from fedcomp.experiments.studies.datalens_mnist import (
    CHOSEN,
    DIRECT,
    DP_SGD,
    GRIDS,
    MEANS,
    METHODS,
    PLAIN,
    TARGETS,
    TOPAGG,
    label,
    study,
)
from fedcomp.experiments.tables import Found
from fedcomp.privacy.accounting import gaussian_epsilon
from fedcomp.privacy.statement import Statement

pytestmark = pytest.mark.filterwarnings("ignore:mnist-generator")

SMALL = ("seeds=1", "synthetic=20", "classifier_epochs=1", "images=2")


@pytest.fixture(autouse=True)
def _no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDCOMP_DATA", raising=False)


@pytest.fixture(scope="module")
def small() -> Ran:
    return ran(EXPERIMENT, *SMALL, rounds=2, clients=24)


def training(epsilon: float = 10.0, rate: float = 0.0, **changes: Any) -> Training:
    """Return a training by plain votes of all pixels."""
    options = {"lr": 0.01, "k": 784, "beta": 0.0, "stochastic": 0, "teacher_lr": rate}
    sizes: dict[str, Any] = {"clients": 24, "steps": 2, "images": 2, **changes}
    evaluation = {"synthetic": 20, "classifier_epochs": 1}
    return Training("votes", options, epsilon, 0, delta=1e-5, evaluation=evaluation, **sizes)


@pytest.mark.long
def test_f_what_was_chosen_was_tried() -> None:
    assert set(CHOSEN) == set(GRIDS) == set(METHODS)
    assert {len(grid) for grid in GRIDS.values()} == {4}
    assert all(0 <= place < 4 for places in CHOSEN.values() for place in places)


@pytest.mark.long
def test_f_every_row_spends_its_epsilon_and_every_image_is_a_release(small: Ran) -> None:
    rows = {row[0]: row for row in small.findings.tables[1].rows}
    assert set(rows) == {label(m, t) for m in METHODS for t in TARGETS[:-1]} == set(small.findings.statements)
    for method in METHODS:
        for target in TARGETS[:-1]:
            _, _, releases, z, _, _, _, epsilon = rows[label(method, target)]
            assert releases == {TOPAGG: 4, PLAIN: 4, DP_SGD: 2, MEANS: 1, DIRECT: 2}[method]
            # As much noise as so many releases of the Gaussian mechanism need, exactly, and not more than a bit more.
            assert 0.99 * target < gaussian_epsilon(math.sqrt(releases) / z, 1e-5) <= target
            assert 0.99 * target < epsilon <= target
            said = Statement.from_json(small.findings.statements[label(method, target)])
            assert (said.unit, said.adjacency, said.epsilon, said.population) == ("client", "replace", epsilon, 24)
            assert "INSECURE" in said.prose()
    gates = {claim.name: claim.ok for claim in small.findings.claims if claim.gate}
    assert [name for name, ok in gates.items() if not ok and "accuracy" not in name] == []


@pytest.mark.long
def test_f_without_the_files_the_table_says_so(small: Ran) -> None:
    assert "NOT MNIST" in small.findings.tables[0].title
    assert "enlarged" in small.findings.tables[0].title
    assert small.findings.tasks[0]["data"]["substitute"]


@pytest.mark.long
def test_f_rows_whose_network_had_to_be_trained_again_are_named(small: Ran) -> None:
    def caption(*died: str) -> str:
        kept = {
            name: {**cell, "retrained": int(any(name.startswith(row) for row in died))}
            for name, cell in small.kept.items()
        }
        return study(Found(EXPERIMENT, small.config, {}, Say(kept=kept))).tables[0].caption

    rows = label(PLAIN, 10.0), label(DP_SGD, 1.0)
    assert f"happened in {'; '.join(rows)}." in caption(f"{PLAIN}, target 10,", f"{DP_SGD}, target 1,")
    assert "happened in no row." in caption()


@pytest.mark.long
def test_f_the_sheets_show_what_each_generator_makes(small: Ran) -> None:
    sheets = [figure for figure in small.findings.figures if isinstance(figure, Pictures)]
    # Records, and one sheet for each generator: a classifier makes no images.
    assert len(sheets) == 1 + (len(METHODS) - 1) * len(TARGETS)
    assert {sheet.shape for sheet in sheets} == {(10, 8, 28, 28)}
    assert len({sheet.pixels for sheet in sheets}) == len(sheets)


@pytest.mark.long
def test_f_settings_are_chosen_on_held_out_records_alone() -> None:
    shown, tried = training(), training(validation=True)
    for made in (shown, tried):
        learnt = {row.tobytes() for row in made.data.x}
        assert not any(row.tobytes() in learnt for row in made.judge.x)
    assert (len(shown.data), len(shown.judge)) == (EACH * 24, 355)
    assert (len(tried.data), len(tried.judge)) == (EACH * 24 // PROXY, EACH * 24 // HELD)
    # As many times fewer clients, as many times less noise; and no promise.
    assert tried.z == pytest.approx(shown.z / PROXY)
    reported, held = shown.run(), tried.run()
    assert reported["statement"]
    assert (held["statement"], held["epsilon"]) == ({}, math.inf)


@pytest.mark.long
@pytest.mark.parametrize("rate", [0.0, 0.001])
def test_f_without_noise_teachers_move_a_generator_towards_the_class_means(rate: float) -> None:
    """Fresh or kept: a wrong sign, or votes on another class's images, would not."""
    made = training(math.inf, rate, steps=12, images=15)
    task, split = made.task, made.task.train_split
    means = np.stack([split.x[split.y == c].mean(0) for c in range(10)])
    models = (task.model(0), _votes(made))
    drawn = (task.samples(model, 8, made.key).reshape(10, 8, -1).mean(1) for model in models)
    before, after = (float(np.linalg.norm(images - means)) for images in drawn)
    assert after < 0.6 * before


def test_f_the_task_is_mnist_itself_where_its_files_are() -> None:
    assert task_of(24, {}).data.substitute
    assert len(task_of(24, {}).train_split) == 360
