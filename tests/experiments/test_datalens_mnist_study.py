"""The study of DataLens and MNIST, very small and without MNIST's files: every row pays for what it releases."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from experiment_runs import Ran, ran, resumes

from fedcomp.experiments.catalog.datalens_mnist import EXPERIMENT
from fedcomp.experiments.findings import Pictures, Say
from fedcomp.experiments.generator_training import HELD, PROXY, GeneratorCell, task_of
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


def cell(**changes: Any) -> GeneratorCell:
    values: dict[str, Any] = {
        "name": "x",
        "method": "votes",
        "options": {"lr": 0.01, "k": 784, "beta": 0.0, "stochastic": 0, "teacher_lr": 0.0},
        "epsilon": 10.0,
        "delta": 1e-5,
        "clients": 24,
        "steps": 2,
        "images": 2,
        "seed": 0,
        "evaluation": {"synthetic": 20, "classifier_epochs": 1},
    }
    return GeneratorCell(**{**values, **changes})


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
            _, releases, z, _, _, _, epsilon = rows[label(method, target)]
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
            name: {**cell, "retrained": int(any(name.startswith(f"{row},") for row in died))}
            for name, cell in small.kept.items()
        }
        return study(Found(EXPERIMENT, small.config, {}, Say(kept=kept))).tables[0].caption

    rows = label(PLAIN, 10.0), label(DP_SGD, 1.0)
    assert f"happened in {'; '.join(rows)}." in caption(*rows)
    assert "happened in no row." in caption()


@pytest.mark.long
def test_f_the_sheets_show_what_each_generator_makes(small: Ran) -> None:
    sheets = [figure for figure in small.findings.figures if isinstance(figure, Pictures)]
    # Records, and one sheet for each generator: a classifier makes no images.
    assert len(sheets) == 1 + (len(METHODS) - 1) * len(TARGETS)
    assert {sheet.shape for sheet in sheets} == {(10, 8, 28, 28)}
    assert len({sheet.pixels for sheet in sheets}) == len(sheets)


@pytest.mark.long
def test_f_what_is_finished_is_kept_cell_by_cell(small: Ran) -> None:
    assert len(small.kept) == len(METHODS) * len(TARGETS)
    assert resumes(EXPERIMENT, small)


@pytest.mark.long
def test_f_settings_are_chosen_on_held_out_records_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedcomp.experiments import generator_training

    seen: list[tuple[int, int, float]] = []

    class Noted(generator_training._Training):
        def outcome(self, made: Any) -> Any:
            out = super().outcome(made)
            learnt = {row.tobytes() for row in self.data.x}
            assert not any(row.tobytes() in learnt for row in self.judge.x)
            seen.append((len(self.data), len(self.judge), self.z))
            return out

    monkeypatch.setattr(generator_training, "_Training", Noted)
    reported, held = cell().run(), cell(validation=True).run()
    everyone = 15 * 24
    assert [(learnt, judged) for learnt, judged, _ in seen] == [(everyone, 355), (15 * 24 // PROXY, everyone // HELD)]
    # As many times fewer clients, as many times less noise; and no promise.
    assert seen[1][2] == pytest.approx(seen[0][2] / PROXY)
    assert reported.statement
    assert not held.statement
    assert held.epsilon == math.inf


@pytest.mark.long
def test_f_without_noise_teachers_move_a_generator_towards_the_class_means() -> None:
    """Fresh or kept, by plain votes of all pixels: a wrong sign, or votes on another class's images, would not."""
    from fedcomp.experiments.generator_training import _Training, _votes

    for rate in (0.0, 0.001):
        options = {"lr": 0.01, "k": 784, "beta": 0.0, "stochastic": 0, "teacher_lr": rate}
        training = _Training(cell(epsilon=math.inf, options=options, steps=12, images=15))
        task, split = training.task, training.task.train_split
        means = np.stack([split.x[split.y == c].mean(0) for c in range(10)])

        models = (task.model(0), _votes(training))
        made = (task.samples(model, 8, training.key).reshape(10, 8, -1).mean(1) for model in models)
        before, after = (float(np.linalg.norm(images - means)) for images in made)
        assert after < 0.6 * before


def test_f_the_task_is_mnist_itself_where_its_files_are() -> None:
    assert task_of(24, {}).data.substitute
    assert len(task_of(24, {}).train_split) == 360
