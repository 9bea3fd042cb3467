"""Tasks learn, repeat bit for bit, and leave torch's and numpy's global generators alone."""

from __future__ import annotations

import contextlib
import hashlib
import io
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from fedcomp.errors import ConfigError
from fedcomp.rng import Key
from fedcomp.tasks import TASKS, get_task
from fedcomp.tasks.arrays import load_arrays, to_arrays
from fedcomp.tasks.base import EmptyPartition, Split, Task, single_thread
from fedcomp.tasks.models import CharTransformer, build
from fedcomp.tasks.options import resolve
from fedcomp.tasks.partition import dirichlet
from fedcomp.tasks.registry import task_class
from fedcomp.tasks.sgd import Sgd
from fedcomp.tasks.shakespeare import TinyShakespeare
from fedcomp.tasks.sources import DataWarning

KEY = Key(0, "batches")


def _task(name: str, **options: Any) -> Task:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)
        return get_task(name, **options)


def _digest(arrays: dict[str, np.ndarray]) -> str:
    return hashlib.sha256(b"".join(a.tobytes() for a in arrays.values())).hexdigest()


LEARNT: list[tuple[str, dict[str, Any], dict[str, Any], float]] = [
    ("digits", {}, {"lr": 0.1, "epochs": 8}, 0.93),
    *(
        ("digits", {"model": "cnn", "batch_norm": norm}, {"lr": 0.1, "momentum": 0.5, "epochs": 3}, 0.93)
        for norm in (False, True)
    ),
    ("breast-cancer", {"model": "logistic", "l2": 1e-3}, {"lr": 0.05, "epochs": 20, "batch_size": 16}, 0.95),
    ("breast-cancer", {"model": "svm", "l2": 1e-3}, {"lr": 0.05, "epochs": 20, "batch_size": 16}, 0.95),
    ("wifi", {}, {"lr": 0.1, "epochs": 15}, 0.85),
    ("tiny-shakespeare", {"speakers": 4, "hidden": 48}, {"lr": 1.0, "momentum": 0.9, "epochs": 4}, 0.0),
    (
        "tiny-shakespeare",
        {"speakers": 4, "model": "transformer", "hidden": 32},
        {"lr": 0.3, "epochs": 4, "batch_size": 16},
        0.0,
    ),
]
"""Task, its options, a training, and the accuracy after it; of characters the loss says more."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "training", "accuracy"), LEARNT)
def test_a_model_learns(name: str, options: Any, training: Any, accuracy: float) -> None:
    task = _task(name, **options)
    model = task.model(0)
    before = task.evaluate(model, task.test)
    out = task.train(model, task.train_split, **{"batch_size": 32, **training}, key=KEY)
    after = task.evaluate(model, task.test)
    assert after["loss"] < before["loss"]
    assert out["train_loss"] < before["loss"]
    assert (out["num-examples"], after["num-examples"]) == (len(task.train_split), len(task.test))
    assert before["accuracy"] < 0.8
    assert after["accuracy"] > accuracy
    if not accuracy:
        # The loss, in nats, of the best model that ignores the context.
        share = np.bincount(task.test.y.reshape(-1)) / task.test.y.size
        entropy = -(share[share > 0] * np.log(share[share > 0])).sum()
        assert after["loss"] < 0.9 * entropy


def test_the_transformer_sees_no_later_character() -> None:
    model = build(lambda: CharTransformer(11, 8, 16), 0)
    text = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    other = text.clone()
    other[0, 5:] = 9
    with torch.no_grad():
        assert torch.equal(model(text)[0, :5], model(other)[0, :5])
        assert not torch.equal(model(text)[0, 5:], model(other)[0, 5:])


def test_logistic_objective_is_the_textbook_one() -> None:
    task = _task("breast-cancer", l2=0.1)
    x, y = task.train_split.x, 2.0 * task.train_split.y - 1.0
    assert set(np.unique(y)) == {-1.0, 1.0}
    model = task.model(0)
    arrays = to_arrays(model)
    w, b = arrays["layers.0.weight"][0].astype(float), float(arrays["layers.0.bias"][0])
    margin = y * (x.astype(float) @ w + b)
    expected = np.log1p(np.exp(-margin)).mean() + 0.05 * (w**2).sum()
    assert task.evaluate(model, task.train_split)["loss"] == pytest.approx(expected, rel=1e-5)
    gradient, loss = task.gradient(model, task.train_split)
    slope = -(y / (1 + np.exp(margin))) @ x.astype(float) / len(y) + 0.1 * w
    np.testing.assert_allclose(gradient["layers.0.weight"][0], slope, rtol=1e-3, atol=1e-6)
    assert loss == pytest.approx(expected, rel=1e-5)


def test_hinge_objective_is_the_textbook_one() -> None:
    task = _task("breast-cancer", model="svm")
    x, y = task.test.x, 2.0 * task.test.y - 1.0
    model = task.model(1)
    arrays = to_arrays(model)
    margin = y * (x @ arrays["layers.0.weight"][0] + arrays["layers.0.bias"][0])
    loss = task.evaluate(model, task.test)["loss"]
    assert loss == pytest.approx(np.maximum(0, 1 - margin).mean(), rel=1e-5)


@pytest.mark.parametrize(
    ("momentum", "weight_decay", "mu"),
    [(0.0, 0.0, 0.0), (0.9, 0.0, 0.0), (0.0, 0.01, 0.0), (0.9, 0.01, 0.0), (0.0, 0.0, 2), (0.9, 0.0, 0.7)],
)
def test_training_is_torch_sgd_on_the_penalised_loss(momentum: float, weight_decay: float, mu: float) -> None:
    """Bit for bit where no proximal term is asked for."""
    task = _task("digits", hidden="32")
    data, decayed = task.client(1, 10), {"momentum": momentum, "weight_decay": weight_decay}
    ours, theirs = task.model(3), task.model(3)
    task.train(ours, data, lr=0.05, **decayed, proximal=mu, epochs=2, batch_size=16, key=KEY)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.05, **decayed, foreach=False)
    start = [p.detach().clone() for p in theirs.parameters()]
    with single_thread():
        for x, y in data.batches(epochs=2, batch_size=16, key=KEY):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(theirs(x), y)
            pull = sum((p - w).square().sum() for p, w in zip(theirs.parameters(), start, strict=True))
            (loss + mu / 2 * pull if mu else loss).backward()
            optimizer.step()
    if not mu:
        assert _digest(to_arrays(ours)) == _digest(to_arrays(theirs))
    for name, array in to_arrays(ours).items():
        np.testing.assert_allclose(array, to_arrays(theirs)[name], rtol=1e-4, atol=1e-6)


def test_descent_owns_its_momentum_and_leaves_frozen_parameters() -> None:
    # The gradient of a sum is one number in memory, which nothing can be added to in place.
    free, frozen = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.ones(3), requires_grad=False)
    descent = Sgd([free, frozen], lr=1.0, momentum=0.5)
    for _ in range(3):
        descent.step((free + frozen).sum())
    assert free.tolist() == [-(1 + 1.5 + 1.75)] * 3
    assert frozen.tolist() == [1.0] * 3


def test_batches_cover_each_epoch_and_stop_at_max_steps() -> None:
    data = Split(np.arange(10, dtype=np.float32)[:, None], np.arange(10))
    seen = [y.tolist() for _, y in data.batches(epochs=2, batch_size=4, key=KEY)]
    assert [len(s) for s in seen] == [4, 4, 2, 4, 4, 2]
    first, second = [*seen[0], *seen[1], *seen[2]], [*seen[3], *seen[4], *seen[5]]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert len(list(data.batches(epochs=None, max_steps=7, batch_size=4, key=KEY))) == 7
    assert len(list(data.batches(epochs=1, max_steps=2, batch_size=4, key=KEY))) == 2
    with pytest.raises(ConfigError, match="limit"):
        next(data.batches(epochs=None, batch_size=4, key=KEY))
    nothing = Split(np.empty((0, 1), np.float32), np.empty(0, np.int64))
    assert list(nothing.batches(epochs=None, max_steps=3, batch_size=4, key=KEY)) == []


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"lr": float("nan")}, "lr=nan is not valid: lr must be a number in"),
        ({"lr": -1.0}, "lr=-1.0 is not valid: lr must be a number in"),
        ({"lr": "0.1"}, "lr='0.1' is not valid: lr must be a number in"),
        ({"lr": 1e39}, r"\[0, 3.40282e\+38\]"),
        ({"momentum": -0.5}, "momentum=-0.5"),
        ({"weight_decay": float("inf")}, "weight_decay=inf"),
        ({"weight_decay": 10**400}, "weight_decay=1000.*must be a number in"),
        ({"proximal": float("nan")}, "proximal=nan"),
        ({"proximal": -1}, "proximal=-1"),
        ({"epochs": -1}, "epochs=-1 is not valid: epochs must be an integer >= 0 or None"),
        ({"epochs": 1.5}, "epochs=1.5"),
        ({"epochs": float("nan")}, "epochs=nan"),
        ({"max_steps": -1}, "max_steps=-1 is not valid"),
        ({"max_steps": -(10**5000)}, "max_steps=<int>"),
        ({"batch_size": 0}, "batch_size=0 is not valid: batch_size must be an integer >= 1"),
        ({"batch_size": None}, "batch_size=None"),
        ({"epochs": None}, "limit on epochs or steps"),
    ],
)
def test_impossible_hyperparameters_are_refused(bad: dict[str, Any], match: str) -> None:
    task = _task("digits", hidden="8")
    model = task.model(0)
    before = _digest(to_arrays(model))
    with pytest.raises(ConfigError, match=match):
        task.train(model, task.test, **{"lr": 0.1, "key": KEY, **bad})
    assert _digest(to_arrays(model)) == before


@pytest.mark.parametrize("limit", [{"epochs": 0}, {"max_steps": 0}, {"epochs": np.int64(0)}])
def test_no_steps_leave_the_model_as_it_is(limit: dict[str, int]) -> None:
    task = _task("digits", hidden="8")
    model = task.model(0)
    before = _digest(to_arrays(model))
    out = task.train(model, task.test, lr=0.1, key=KEY, **limit)
    assert out == {"train_loss": 0.0, "num-examples": 355}
    assert _digest(to_arrays(model)) == before


SCRIPT = """
import hashlib, warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads({threads})
torch.rand({threads})
from fedcomp.rng import Key
from fedcomp.tasks import get_task
from fedcomp.tasks.arrays import to_arrays
for name, options in (("digits", dict(partition="dirichlet:0.5")), ("digits", dict(model="cnn", batch_norm=True)),
                      ("tiny-shakespeare", dict(speakers=3, hidden=16))):
    task = get_task(name, **options)
    model = task.model(5)
    out = task.train(model, task.client(1, 3), lr=0.1, batch_size=16, max_steps=6, key=Key(2, "batches"))
    assert torch.get_num_threads() == {threads}
    arrays = to_arrays(model)
    digest = hashlib.sha256(b"".join(a.tobytes() for a in arrays.values())).hexdigest()
    print(digest, out, task.evaluate(model, task.test))
"""


@pytest.mark.slow
def test_two_processes_give_the_same_bits() -> None:
    """This process with one thread, and another one with two."""
    command = [sys.executable, "-c", SCRIPT.format(threads=2)]
    here, before = io.StringIO(), torch.get_num_threads()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(here):
                exec(SCRIPT.format(threads=1), {})
        finally:
            torch.set_num_threads(before)
        there = started.communicate()[0]
    assert started.returncode == 0
    assert there.count("\n") == 3
    assert here.getvalue() == there


@pytest.mark.parametrize("name", sorted(name for name in TASKS if task_class(name).needs != "generator"))
def test_a_model_loaded_into_one_that_was_used_is_the_one_loaded_into_a_new_one(name: str) -> None:
    task = _task(name)
    arrays, used = to_arrays(task.model(3)), task.blank()
    with torch.no_grad():
        for tensor in used.state_dict().values():
            tensor.fill_(7)
    load_arrays(task.blank(), arrays)
    assert used is task.blank()
    assert _digest(to_arrays(used)) == _digest(arrays)
    # There is nothing else in it that a user could leave behind.
    held = {t.data_ptr() for t in used.state_dict().values()}
    assert {t.data_ptr() for t in [*used.parameters(), *used.buffers()]} == held
    if not task.needs:
        data = task.client(0, 4)
        task.train(used, data, lr=0.1, batch_size=16, max_steps=2, key=KEY)
        task.evaluate(used, data)
        load_arrays(used, arrays)
        models = [task.model(3), used]
        for model in models:
            task.train(model, data, lr=0.01, momentum=0.9, batch_size=16, max_steps=3, key=KEY)
        assert len({_digest(to_arrays(model)) for model in models}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(name for name in TASKS if not task_class(name).needs))
def test_global_generators_are_untouched_and_irrelevant(name: str) -> None:
    task = _task(name)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    model = task.model(0)
    task.train(model, task.client(0, 4), lr=0.01, batch_size=16, max_steps=2, key=KEY)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002
    assert _digest(to_arrays(task.model(7))) == _digest(to_arrays(task.model(7)))
    assert _digest(to_arrays(task.model(7))) != _digest(to_arrays(task.model(8)))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TASKS))
def test_clients_cover_the_training_split(name: str) -> None:
    # Some graphs are made for a number of owners.
    task = _task(name, **({"parts": 5} if "parts" in task_class(name).OPTIONS else {}))
    rows = np.concatenate([task.client(p, 5).indices for p in range(5)])
    assert sorted(rows.tolist()) == list(range(len(task.train_split)))
    client = task.client(2, 5)
    np.testing.assert_array_equal(client.x, task.train_split.x[client.indices])
    np.testing.assert_array_equal(client.tensors[1].numpy(), task.train_split.y[client.indices])
    assert task.client(2, 5) is client
    assert sum(len(task.client_test(p, 5)) for p in range(5)) == len(task.test)
    with pytest.raises(ValueError, match="read-only"):
        client.x[0] = 0
    with pytest.raises(ConfigError, match="range"):
        task.client(5, 5)


def test_no_example_is_both_trained_on_and_held_out() -> None:
    for name in ("digits", "breast-cancer"):
        task = _task(name)
        train = {row.tobytes() for row in task.train_split.x}
        assert not any(row.tobytes() in train for row in task.test.x)


def test_empty_partition_is_refused_only_in_training() -> None:
    task = _task("digits", partition="dirichlet:0.001", min_examples=0)
    sizes = np.bincount(task.assignment(40), minlength=40)
    data = task.client(int(sizes.argmin()), 40)
    assert len(data) == 0
    model = task.model(0)
    assert task.evaluate(model, data) == {"loss": 0.0, "accuracy": 0.0, "num-examples": 0}
    with pytest.raises(EmptyPartition, match="min_examples"):
        task.train(model, data, lr=0.1, key=KEY)
    with pytest.raises(EmptyPartition):
        task.gradient(model, data)


def test_evaluate_restores_the_mode_and_leaves_statistics_alone() -> None:
    task = _task("digits", model="cnn", batch_norm=True)
    model = task.model(0)
    before = _digest(to_arrays(model))
    for mode in (True, False):
        model.train(mode)
        task.evaluate(model, task.test)
        assert model.training is mode
    assert _digest(to_arrays(model)) == before


def test_one_speaker_is_one_client() -> None:
    task = _task("tiny-shakespeare", speakers=6)
    assert isinstance(task, TinyShakespeare)
    assert len(task.speakers) == 6
    sizes = [len(task.client(p, 6)) for p in range(6)]
    assert sizes == sorted(sizes, reverse=True)
    x, y = task.client(3, 6).x, task.client(3, 6).y
    np.testing.assert_array_equal(x[:, 1:], y[:, :-1])
    # Windows follow one another in the speaker's text.
    np.testing.assert_array_equal(x[1:, 0], y[:-1, -1])
    with pytest.raises(ConfigError, match="6 ids"):
        task.client(0, 7)
    with pytest.raises(ConfigError, match="splits by class"):
        _task("tiny-shakespeare", partition="dirichlet:1")


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("digit", {}, "did you mean 'digits'"),
        ("digits", {"hiden": 3}, "did you mean 'hidden'"),
        ("digits", {"hidden": "256,-1"}, "each an integer >= 1"),
        ("digits", {"hidden": 2.5}, "hidden must be a list"),
        ("digits", {"model": "cn"}, "did you mean 'cnn'"),
        ("digits", {"batch_norm": "maybe"}, "must be True or False"),
        ("digits", {"batch_norm": True}, "batch_norm=True is of the cnn"),
        ("digits", {"batch_norm": True, "model": "quickstart"}, "batch_norm=True is of the cnn"),
        ("mnist", {"batch_norm": True, "model": "mlp"}, "batch_norm=True is of the cnn"),
        ("digits", {"partition": "dirichle:1"}, "did you mean 'dirichlet'"),
        ("digits", {"partition_seed": -1}, "an integer >= 0"),
        ("digits", {"train_examples": "many"}, "must be an integer"),
        ("breast-cancer", {"l2": -1.0}, "must be a finite number >= 0"),
        ("breast-cancer", {"l2": "nan"}, "must be a finite number >= 0"),
        ("breast-cancer", {"l2": 10**400}, r"l2=1000.*must be a finite number >= 0"),
        ("breast-cancer", {"l2": -(10**5000)}, "l2=<int> is not valid"),
        ("breast-cancer", {"l2": "1e400"}, "must be a finite number >= 0"),
        ("digits", {"partition_seed": 10**400}, "an integer >= 0"),
        ("digits", {"train_examples": 10**5000}, "train_examples=<int> is not valid"),
        ("digits", {"hidden": 10**400}, "each an integer >= 1"),
        ("digits", {"hidden": (64, 10**5000)}, "each an integer >= 1"),
        ("digits", {"batch_norm": 10**5000}, "batch_norm=<int> is not valid"),
        ("digits", {"model": 10**5000}, "model=<int> is not valid"),
        ("digits", {"partition": 10**5000}, "written down"),
        ("digits", {"root": 10**5000}, "written down"),
        ("tiny-shakespeare", {"seq_len": 1}, "an integer >= 2"),
        ("tiny-shakespeare", {"min_chars": 10**9}, "lower min_chars"),
        ("tiny-shakespeare", {"seq_len": 10**6}, "lower seq_len"),
        ("tiny-shakespeare", {"model": "transformer", "hidden": 30}, "heads=4 does not divide"),
        ("tiny-shakespeare", {"model": "transformers"}, "did you mean 'transformer'"),
    ],
)
def test_bad_names_and_values_are_refused(name: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        _task(name, **options)


def test_options_in_text_form_are_the_same_task() -> None:
    task = get_task("digits", hidden="64,32", partition="Dirichlet:0.50", train_examples="500", batch_norm="False")
    assert task is get_task("digits", hidden=(64, 32), partition="dirichlet:0.5", train_examples=500)
    assert [tuple(p.shape) for p in task.model(0).parameters()][::2] == [(64, 64), (32, 64), (10, 32)]
    assert len(task.train_split) == 500
    assert task.record()["options"]["hidden"] == [64, 32]


@pytest.mark.parametrize("name", TASKS)
def test_defaults_follow_their_rules_and_have_a_text_form(name: str) -> None:
    table = task_class(name).OPTIONS
    defaults = {key: option.default for key, option in table.items()}
    texts = {key: "" if value is None else str(value).strip("(,)") for key, value in defaults.items()}
    assert resolve(name, table, {}) == resolve(name, table, texts) == defaults


def test_one_width_is_a_number_in_a_run_configuration() -> None:
    assert resolve("digits", task_class("digits").OPTIONS, {"hidden": 64})["hidden"] == (64,)


def test_the_partition_of_the_record_is_the_one_that_was_asked_for() -> None:
    task = _task("digits", partition="dirichlet:0.12345678")
    assert task.record()["options"]["partition"] == "dirichlet:0.12345678"
    direct = dirichlet(task.train_split.y, 5, 0.12345678, Key(0, "partition/dirichlet"))
    np.testing.assert_array_equal(task.assignment(5), direct)


def test_min_examples_guards_iid_clients_too() -> None:
    with pytest.raises(ConfigError, match="30 examples cannot give 31 partitions"):
        _task("digits", train_examples=30).client(0, 31)
    sparse = _task("digits", train_examples=30, min_examples=0)
    assert sorted(len(sparse.client(p, 31)) for p in range(31)) == [0] + [1] * 30


def test_validation_looks_at_no_test_image() -> None:
    task, tuning = _task("digits"), _task("digits", validation=True)
    rows = {row.tobytes() for row in task.train_split.x}
    assert len(tuning.train_split) + len(tuning.test) == len(task.train_split)
    assert all(row.tobytes() in rows for split in (tuning.train_split, tuning.test) for row in split.x)
    assert np.bincount(tuning.test.y).tolist() == (np.bincount(task.train_split.y) // 5).tolist()


def test_the_quickstarts_cnn_takes_digits_enlarged_to_its_shape() -> None:
    task = _task("digits", model="quickstart")
    model, x = task.model(0), torch.from_numpy(task.test.x[:5].copy())
    enlarged = x.reshape(5, 8, 8).numpy().repeat(4, 1).repeat(4, 2)
    colours = torch.from_numpy(np.stack([enlarged] * 3, 1).reshape(5, -1))
    torch.testing.assert_close(model(x), model(colours), rtol=0.0, atol=0.0)


def test_the_first_examples_of_either_split_can_be_all_of_it() -> None:
    whole, small = _task("digits"), _task("digits", train_examples=40, test_examples=30)
    assert (len(small.train_split), len(small.test), len(whole.test)) == (40, 30, 355)
    np.testing.assert_array_equal(small.test.x, whole.test.x[:30])


@pytest.mark.slow
def test_documented_parameter_counts() -> None:
    counts = {
        ("digits", "mlp"): 85_002,
        ("digits", "cnn"): 13_706,
        ("mnist", "cnn"): 114_314,
        ("digits", "quickstart"): 62_006,
        ("cifar10-subset", "quickstart"): 62_006,
    }
    for (name, kind), count in counts.items():
        model = _task(name, model=kind).model(0)
        assert sum(p.numel() for p in model.parameters()) == count
        arrays = to_arrays(model)
        load_arrays(_task(name, model=kind).model(1), arrays)
