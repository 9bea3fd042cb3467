"""Generators and their teachers: records have one teacher each, steps are what they say, the last epoch counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from fedcomp.errors import ConfigError
from fedcomp.privacy.votes import topk_stochastic_sign
from fedcomp.rng import Key
from fedcomp.tasks import gan, get_task
from fedcomp.tasks.arrays import load_arrays, to_arrays
from fedcomp.tasks.base import Classification, EmptyPartition, Split
from fedcomp.tasks.generator import DigitsGenerator, GeneratorTask, simulate
from fedcomp.tasks.models import build, build_many
from fedcomp.tasks.teachers import MNIST_CLASSES, by_hash, shared_records, wrapping_deal

KEY = Key(3, "teachers")
ADAM = gan.Adam(0.01, 0.5)
KINDS = {
    "bilinear": lambda: gan.Bilinear(10, 64),
    "mlp": lambda: gan.MlpDiscriminator(10, 64, (8,)),
    "conv": lambda: gan.ConvDiscriminator(10, 8, 2),
}


def digits(**options: Any) -> GeneratorTask:
    task = get_task("digits-generator", **options)
    assert isinstance(task, GeneratorTask)
    return task


def unbalanced() -> np.ndarray:
    return np.repeat(np.arange(10), MNIST_CLASSES)


def records(count: int = 90) -> Split:
    split = digits().train_split
    return Split(split.x[:count], split.y[:count])


def teachers(kind: str = "bilinear", *, data: Split | None = None, count: int = 3, **options: Any) -> gan.Teachers:
    data = records() if data is None else data
    owner = options.pop("owner", np.arange(len(data)) % count)
    usual: dict[str, Any] = {"classes": 10, "adam": ADAM, "batch": 8, "key": KEY}
    return gan.Teachers(KINDS[kind], data, owner, count, **{**usual, **options})


def noise_faker(seed: int = 1) -> gan.Faker:
    return lambda labels: Key(seed, "fakes").uniform(len(labels) * 64).reshape(-1, 64).astype(np.float32)


def trained(ensemble: gan.Teachers, steps: int = 3) -> dict[str, np.ndarray]:
    state = ensemble.start()
    for step in range(steps):
        state = ensemble.learn(state, noise_faker(step), Key(step, "batch"))
    return state


def shown(ensemble: gan.Teachers, state: dict[str, np.ndarray]) -> np.ndarray:
    return ensemble.gradients(state, noise_faker(99)(np.arange(5)), np.arange(5))


# Who holds which record.


def test_1_11_i_every_record_has_one_teacher_whatever_the_sizes_of_the_classes() -> None:
    labels = unbalanced()[::20]
    owner = by_hash(range(len(labels)), 200, KEY)
    assert owner.shape == labels.shape
    assert 0 <= owner.min() <= owner.max() < 200
    sizes = np.bincount(owner, minlength=200)
    assert sizes.sum() == len(labels)
    # About the spread of independent draws, mean 15 and variance 15.
    assert sizes.var() == pytest.approx(15, rel=0.35)


def test_1_11_i_a_record_that_is_taken_out_moves_no_other() -> None:
    ids = np.arange(300)
    whole = dict(zip(ids, by_hash(ids, 20, KEY), strict=True))
    left = np.delete(ids, 17)
    assert all(whole[i] == t for i, t in zip(left, by_hash(left, 20, KEY), strict=True))
    assert by_hash(ids, 20, KEY).tolist() != by_hash(ids, 20, KEY.at(purpose="other")).tolist()
    with pytest.raises(ConfigError, match="teachers=0"):
        by_hash(ids, 0, KEY)


def test_1_11_i_the_published_deal_puts_1138_of_mnists_records_into_two_teachers() -> None:
    labels = unbalanced()
    dealt = wrapping_deal(labels, 4000, 15)
    assert shared_records(dealt, len(labels)) == (1138, 1138)
    # Classes of one size, as in Fashion-MNIST: everyone has one.
    assert shared_records(wrapping_deal(np.repeat(np.arange(10), 6000), 4000, 15), 60000) == (0, 0)
    # And taking one record out moves the later ones of its class on to other teachers.
    small = np.repeat([0, 1], [40, 60])
    before = {int(r): t for t, hand in enumerate(wrapping_deal(small, 10, 8)) for r in hand}
    after = {int(r) + 1: t for t, hand in enumerate(wrapping_deal(small[1:], 10, 8)) for r in hand}
    moved = [r for r in range(1, 40) if before[r] != after.get(r)]
    assert len(moved) > 5


def test_1_11_i_teachers_of_all_clients_together_hold_every_record_once() -> None:
    task = digits(partition="dirichlet:0.3")
    held: list[int] = []
    for partition in range(3):
        made = task.ensemble(partition, 3, 7, ADAM, batch=8, key=KEY).teachers
        data = task.client(partition, 3)
        for teacher in range(7):
            held += data.indices[made.records_of(teacher)].tolist()
    assert sorted(held) == list(range(len(task.train_split)))


@pytest.mark.parametrize("kind", KINDS)
def test_exchanging_one_record_changes_one_teacher_alone(kind: str) -> None:
    """What the sensitivity of a vote rests on: the other teachers' gradients stay as they are, bit for bit."""
    data = records(24)
    x, y = data.x.copy(), data.y.copy()
    x[4], y[4] = 1.0 - x[4], (y[4] + 3) % 10
    first = teachers(kind, data=data)
    second = teachers(kind, data=Split(x, y))
    one, other = shown(first, trained(first)), shown(second, trained(second))
    same = [np.array_equal(a, b) for a, b in zip(one, other, strict=True)]
    assert same == [True, False, True]
    votes = [topk_stochastic_sign(g.reshape(15, 64), 28, uniforms=KEY).astype(int) for g in (one, other)]
    change = (votes[0] - votes[1]).reshape(3, 5, 64).sum(0)
    assert 0 < np.linalg.norm(change, axis=1).max() <= 2 * np.sqrt(28)


def voted(data: Split, owner: np.ndarray, generator: str) -> list[np.ndarray]:
    """Return what each of three teachers has learnt in three steps, with a real generator beside them."""
    task = digits(generator=generator)
    student, arrays = task.student(ADAM), to_arrays(task.model(0))
    made = teachers(data=data, owner=owner)
    state = made.start()
    for step in range(3):
        state = made.learn(state, student.faker(arrays, Key(step, "fakes")), Key(step, "batch"))
    return list(shown(made, state))


@pytest.mark.slow
@pytest.mark.parametrize("generator", ["mlp", "conv"])
@pytest.mark.parametrize("change", ["exchanged", "not finite", "taken out"])
def test_a_record_reaches_no_other_teacher_through_a_shared_generator_or_batch(generator: str, change: str) -> None:
    """Batch normalisation would mix the labels of all teachers' records; padding and sizes would tell of them too."""
    data, owner = records(24), np.arange(24) % 3
    # Teacher 0 holds the largest share and record 0.
    owner[1:9] = 0
    one = voted(data, owner, generator)
    x, y = data.x.copy(), data.y.copy()
    if change == "taken out":
        x, y, owner = x[1:], y[1:], owner[1:]
    else:
        x[0], y[0] = (1.0 - x[0], y[0]) if change == "exchanged" else (np.nan, y[0])
        y[0] = (y[0] + 3) % 10
    other = voted(Split(x, y), owner, generator)
    assert [np.array_equal(a, b) for a, b in zip(one, other, strict=True)] == [False, True, True]


# What a teacher learns.


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_teachers_side_by_side_are_teachers_one_by_one(kind: str) -> None:
    data, owner = records(40), np.arange(40) % 2
    together = teachers(kind, data=data, count=2, batch=64)
    state = together.start()
    after = together.learn(state, lambda labels: np.full((len(labels), 64), 0.5, np.float32), KEY)
    for t in range(2):
        module = build(KINDS[kind], 0)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(torch.from_numpy(state[f"p/{name}"][t]))
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01, betas=(0.5, 0.999))
        x, y = torch.from_numpy(data.x[owner == t]), gan.one_hot(data.y[owner == t], 10)
        real, fake = module(x, y), module(torch.full_like(x, 0.5), y)
        (functional.softplus(-real).mean() + functional.softplus(fake).mean()).backward()
        optimizer.step()
        for name, parameter in module.named_parameters():
            np.testing.assert_allclose(after[f"p/{name}"][t], parameter.detach().numpy(), rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_directions_are_the_slope_of_what_makes_an_image_real(kind: str) -> None:
    ensemble = teachers(kind, count=2)
    state = trained(ensemble)
    images, labels = noise_faker(7)(np.arange(4)), np.array([1, 1, 4, 9])
    found = ensemble.gradients(state, images, labels)
    assert found.shape == (2, 4, 64)
    module = build(KINDS[kind], 0)
    for t in range(2):
        arrays = {name: torch.from_numpy(state[f"p/{name}"][t]) for name, _ in module.named_parameters()}
        x = torch.from_numpy(images.copy()).requires_grad_()
        score = torch.func.functional_call(module, arrays, (x, gan.one_hot(labels, 10)))
        (slope,) = torch.autograd.grad(functional.logsigmoid(score).sum(), [x])
        np.testing.assert_allclose(found[t], slope.numpy(), rtol=1e-4, atol=1e-7)


def test_a_teacher_takes_all_it_has_and_none_twice_and_nothing_of_the_others() -> None:
    owner = np.repeat([0, 2], [5, 60])
    ensemble = teachers(data=records(65), count=3, owner=owner, batch=16)
    rows, weights = ensemble._batch(KEY)
    assert rows.shape == (3, 16)
    used = [rows[t][weights[t] > 0].tolist() for t in range(3)]
    assert [len(u) for u in used] == [5, 0, 16]
    assert all(len(set(u)) == len(u) for u in used)
    assert set(used[0]) == set(range(5))
    assert set(used[2]) <= set(range(5, 65))
    np.testing.assert_allclose(weights.sum(1), [1.0, 0.0, 1.0])
    # Who has no record learns nothing and has nothing to say.
    state = trained(ensemble)
    assert np.array_equal(state["p/rows.weight"][1], ensemble.start()["p/rows.weight"][1])
    directions = shown(ensemble, state)
    assert not directions[1].any()
    assert not topk_stochastic_sign(directions[1], 28, uniforms=KEY).any()
    with pytest.raises(ConfigError, match="one owner of 0 to 1"):
        teachers(count=2, owner=np.full(90, 2))


def test_a_client_without_records_has_teachers_that_say_nothing() -> None:
    ensemble = teachers(data=records(0), count=2)
    state = trained(ensemble)
    assert all(np.array_equal(state[name], array) for name, array in ensemble.start().items())
    assert not shown(ensemble, state).any()


def test_stacked_initial_values_are_independent_and_named_by_their_seed() -> None:
    stacked, again = (build_many(KINDS["mlp"], 4, 3) for _ in range(2))
    assert {n: p.shape[1:] for n, p in stacked.items()} == {n: p.shape for n, p in KINDS["mlp"]().named_parameters()}
    weights = stacked["layers.0.weight"]
    assert torch.equal(weights, again["layers.0.weight"])
    assert not torch.equal(weights[0], weights[1])
    assert float(weights.abs().max()) <= 1 / np.sqrt(74)
    assert not stacked["layers.0.bias"].any()
    with pytest.raises(ConfigError, match="has buffers"):
        build_many(lambda: torch.nn.BatchNorm1d(3), 0, 2)


# What the generator learns.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits-generator", "mnist-generator"])
@pytest.mark.filterwarnings("ignore::fedcomp.tasks.sources.DataWarning")
def test_a_step_is_torchs_adam_on_the_distance_to_the_targets(name: str) -> None:
    task = get_task(name, width=2, hidden="16", noise=6)
    assert isinstance(task, GeneratorTask)
    student, module = task.student(ADAM), task.model(1)
    assert isinstance(module, gan.Generator)
    arrays, moments = to_arrays(module), student.start()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01, betas=(0.5, 0.999))
    module.train()
    for step in range(3):
        key = Key(step, "step")
        targets = 1e-3 * np.sign(key.at(purpose="t").uniform(5 * task.pixels) - 0.5).reshape(5, -1).astype(np.float32)
        z, labels = gan.noise_and_labels(key, 5, 6, 10)
        assert np.array_equal(labels, student.labels(key, 5))
        shown = student.images(arrays, key, 5)
        arrays, moments = student.step(arrays, moments, key, targets)
        optimizer.zero_grad()
        images = module(torch.from_numpy(z), gan.one_hot(labels, 10))
        np.testing.assert_allclose(shown, images.detach().numpy(), rtol=2e-3, atol=2e-4)
        ((images.detach() + torch.from_numpy(targets) - images) ** 2).sum().backward()
        optimizer.step()
    # A normalisation takes the biases before it off again: their gradients are rounding, which Adam makes steps of.
    idle = {f"{layer}.bias" for layer in ("first", "second", "third")}
    for tensor, array in to_arrays(module).items():
        if tensor not in idle and not tensor.endswith("running_mean"):
            np.testing.assert_allclose(arrays[tensor], array, rtol=5e-3, atol=5e-4)
    assert int(moments["t"]) == 3


def test_a_step_moves_images_towards_their_targets_and_images_move_nothing() -> None:
    task = digits(hidden="32")
    student = task.student(gan.Adam(0.001, 0.5))
    arrays, key = to_arrays(task.model(0)), Key(0, "look")
    before = student.images(arrays, key, 6)
    assert np.array_equal(before, student.images(arrays, key, 6))
    targets = np.full((6, 64), 1e-3, np.float32)
    after, _ = student.step(arrays, student.start(), key, targets)
    assert (student.images(after, key, 6) > before).mean() > 0.95
    assert np.array_equal(to_arrays(task.model(0))["layers.0.weight"], arrays["layers.0.weight"])


# What it is worth.


def test_the_accuracy_is_that_after_the_last_epoch_and_the_test_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Records in place of images: a classifier that dies on its images would be trained again.
    monkeypatch.setattr(
        DigitsGenerator,
        "synthetic",
        lambda self, model, count, key: Split(self.train_split.x[:count], self.train_split.y[:count]),
    )
    task = digits(classifier_epochs=5, synthetic=200)
    looked: list[int] = []
    honest = Classification.evaluate

    def counted(self: Any, model: torch.nn.Module, split: Split) -> dict[str, float]:
        looked.append(len(split))
        return honest(self, model, split)

    model = task.model(0)
    with monkeypatch.context() as patch:
        patch.setattr(Classification, "evaluate", counted)
        found = task.evaluate(model, task.test)
    assert looked == [len(task.test)]
    # The same training, looked at after every epoch: it is the last one's figure, also where an earlier one is better.
    made = task.synthetic(model, 200, Key(0, "evaluation/images"))
    epochs = []
    for epochs_made in (3, 4, 5):
        classifier = task.classifier()
        settings = {"lr": 0.1, "momentum": 0.9, "batch_size": 64, "key": Key(0, "evaluation/batches")}
        task.train(classifier, made, epochs=epochs_made, **settings)
        epochs.append(task.evaluate(classifier, task.test)["accuracy"])
    assert found["accuracy"] == epochs[-1]
    assert found["num-examples"] == 355
    assert max(epochs) > epochs[-1]


def test_a_classifier_that_dies_is_trained_again_and_the_result_says_how_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """At too large a step size it answers the same to every image; images that are the data deserve better."""
    monkeypatch.setattr(DigitsGenerator, "synthetic", lambda self, model, count, key: self.train_split)
    tested: list[float] = []
    honest = Classification.train

    def noted(self: Any, model: torch.nn.Module, data: Split, *, lr: float, **settings: Any) -> dict[str, float]:
        tested.append(lr)
        return honest(self, model, data, lr=lr, **settings)

    monkeypatch.setattr(Classification, "train", noted)
    usual = digits(classifier_epochs=3)
    assert usual.evaluate(usual.model(0), usual.test)["retrained"] == 0
    high = digits(classifier_epochs=3, classifier_lr=6.0)
    found = high.evaluate(high.model(0), high.test)
    assert found["retrained"] > 0
    assert found["accuracy"] > 0.8
    assert tested == [0.1, *(6.0 / 2**i for i in range(int(found["retrained"]) + 1))]
    # Five trainings at most: what cannot be learnt is judged as it is.
    hopeless = digits(classifier_epochs=3, classifier_lr=1e9)
    assert hopeless.evaluate(hopeless.model(0), hopeless.test)["retrained"] == 4


def test_whether_a_classifier_died_is_decided_without_the_test_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """A split whose labels are wrong makes every classifier worse than a guess there, and changes no training."""
    monkeypatch.setattr(DigitsGenerator, "synthetic", lambda self, model, count, key: self.train_split)
    task = digits(classifier_epochs=3)
    wrong = Split(task.test.x, (task.test.y + 1) % 10)
    found = task.evaluate(task.model(0), wrong)
    assert found["accuracy"] < 0.1
    assert found["retrained"] == 0


@pytest.mark.slow
def test_images_that_are_the_data_are_worth_nearly_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluation can see a good generator: with real records in place of its images it says so."""
    task = digits()
    monkeypatch.setattr(DigitsGenerator, "synthetic", lambda self, model, count, key: self.train_split)
    assert task.evaluate(task.model(0), task.test)["accuracy"] > 0.93
    drawn = Split(*simulate(task.train_split.x, task.train_split.y, 2000, KEY))
    monkeypatch.setattr(DigitsGenerator, "synthetic", lambda self, model, count, key: drawn)
    assert task.evaluate(task.model(0), task.test)["accuracy"] > 0.9


def test_simulated_records_look_like_the_set_and_say_so() -> None:
    task = digits(records=600)
    x, y = task.train_split.x, task.train_split.y
    assert x.shape == (600, 64)
    assert (np.bincount(y) == 60).all()
    assert 0.0 <= x.min() < x.max() <= 1.0
    real = digits().train_split
    for label in (0, 7):
        np.testing.assert_allclose(x[y == label].mean(0), real.x[real.y == label].mean(0), atol=0.12)
    said = task.record()["data"]
    assert said["substitute"]
    assert "600 records drawn from one Gaussian per class" in said["note"]
    assert np.array_equal(task.test.x, digits().test.x)
    again = get_task("digits-generator", records=600, records_seed=1)
    assert not np.array_equal(again.train_split.x, x)


@pytest.mark.slow
def test_a_generator_does_not_learn_from_records_and_touches_no_global_generator() -> None:
    task = digits()
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    model = task.model(0)
    with pytest.raises(ConfigError, match="learns from votes of discriminators"):
        task.train(model, task.client(0, 4), lr=0.1, key=KEY)
    trained(task.ensemble(0, 4, 2, ADAM, batch=4, key=KEY).teachers, 1)
    task.evaluate(model, Split(task.test.x[:9], task.test.y[:9]))
    assert model.training
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002
    with pytest.raises(EmptyPartition):
        task.train(task.classifier(), Split(task.test.x[:0], task.test.y[:0]), lr=0.1, key=KEY)


def test_samples_are_rows_of_classes() -> None:
    task = digits()
    found = task.samples(task.model(2), 4, KEY)
    assert found.shape == (10, 4, 8, 8)
    module = task.model(2)
    z, _ = gan.noise_and_labels(KEY, 40, 20, 10)
    load_arrays(module, to_arrays(task.model(2)))
    with torch.no_grad():
        images = module(torch.from_numpy(z), gan.one_hot(np.repeat(np.arange(10), 4), 10)).numpy()
    np.testing.assert_array_equal(found.reshape(40, 64), images)
