"""The task of dialects: what is held out, what an adapted model holds and trains, and its optimizer."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from fedcomp.errors import ConfigError
from fedcomp.rng import Key
from fedcomp.tasks import get_task
from fedcomp.tasks.arrays import load_arrays, to_arrays
from fedcomp.tasks.dialects import DIALECTS, AdamW, Dialects
from fedcomp.tasks.sources import DataWarning

KEY = Key(0, "batches")
SMALL = {"hidden": 16, "layers": 2, "seq_len": 16, "speakers": 4}


def dialects(**options: Any) -> Dialects:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)
        task = get_task("dialects", **SMALL | options)
    assert isinstance(task, Dialects)
    return task


def read(task: Dialects, windows: np.ndarray) -> list[str]:
    return ["".join(task.alphabet[i] for i in window) for window in windows]


def test_every_dialect_is_another_text() -> None:
    spoken = {name: dialect("To be, or\nnot") for name, dialect in DIALECTS.items()}
    assert spoken == {
        "plain": "To be, or\nnot",
        "upper case": "TO BE, OR\nNOT",
        "vowels moved": "Tu bi, ur\nnut",
        "words reversed": "oT eb, ro\nton",
        "consonants moved": "No be, od\nson",
        "case swapped": "tO BE, OR\nNOT",
        "spaces marked": "To-be,-or:not",
        "vowels doubled": "Too bee, oor\nnoot",
    }


def test_speakers_hold_out_equally_many_windows_of_the_end_of_their_own_text() -> None:
    task = dialects(held_out=5)
    held = [set(read(task, task.client_test(i, 4).x)) for i in range(4)]
    assert [len(task.client_test(i, 4)) for i in range(4)] == [5] * 4
    for i, windows in enumerate(held):
        own = read(task, task.client(i, 4).x)
        assert not windows & set(own)
        # The second speaker alone writes in upper case.
        assert all(w == w.upper() for w in windows) == all(w == w.upper() for w in own) == (i == 1)
    losses = [task.evaluate(model := task.model(0), task.client_test(i, 4))["loss"] for i in range(4)]
    assert task.evaluate(model, task.test)["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_validation_leaves_the_test_windows_alone() -> None:
    task, tuning = dialects(), dialects(validation=True)
    for i in range(4):
        test, train = (set(read(task, split.x)) for split in (task.client_test(i, 4), task.client(i, 4)))
        other, chosen = (set(read(tuning, split.x)) for split in (tuning.client(i, 4), tuning.client_test(i, 4)))
        assert not test & (other | chosen)
        assert other < train
        assert chosen
        assert chosen <= train - other


def test_every_speaker_has_windows_to_train_on_beside_both_that_are_held_out() -> None:
    task = dialects(validation=True, seq_len=250, speakers=10_000, min_chars=0)
    speakers = len(task.speakers)
    assert speakers > 10
    assert min(len(task.client(i, speakers)) for i in range(speakers)) == 1


def test_an_adapted_model_begins_as_its_base_and_holds_adapters_alone() -> None:
    base, adapted = dialects(pretrained=3), dialects(pretrained=3, rank=2)
    model = adapted.model(1)
    x = adapted.test.tensors[0]
    with torch.no_grad():
        assert torch.equal(model(x), base.model(0)(x))
    arrays = to_arrays(model)
    layers = {name.rpartition(".lora_")[0] for name in arrays}
    assert layers == {
        f"blocks.{i}.{layer}" for i in (0, 1) for layer in ("attention.q", "attention.v", "up.change", "down.change")
    }
    for layer in layers:
        half_a, half_b = arrays[f"{layer}.lora_A.weight"], arrays[f"{layer}.lora_B.weight"]
        assert half_a.shape[0] == half_b.shape[1] == 2
        assert not half_b.any()
        assert 0 < np.abs(half_a).max() <= 1 / np.sqrt(half_a.shape[1])


@pytest.mark.parametrize("frozen", [False, True])
def test_training_moves_adapters_and_nothing_else(frozen: bool) -> None:
    task = dialects(pretrained=3, rank=2, frozen_a=frozen, optimizer="adamw")
    model = task.model(0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    first = task.evaluate(model, task.train_split)["loss"]
    task.train(model, task.train_split, lr=0.02, batch_size=8, max_steps=20, key=KEY)
    assert task.evaluate(model, task.train_split)["loss"] < first - 0.1
    for name, p in model.named_parameters():
        moved = ".lora_B" in name or (".lora_A" in name and not frozen)
        assert torch.equal(p, before[name]) is not moved, name
    # The frozen base is shared by no two models, and the arrays are all that is to be carried over.
    other = task.model(5)
    load_arrays(other, to_arrays(model))
    assert task.evaluate(other, task.test) == task.evaluate(model, task.test)


def test_the_adapters_change_is_twice_b_times_a() -> None:
    task = dialects(rank=2)
    change = task.model(0).blocks[0].up.change
    torch.nn.init.normal_(change.lora_B.weight, generator=torch.Generator().manual_seed(0))
    x = torch.linspace(-1, 1, 16)
    expected = 2.0 * change.lora_B.weight.detach() @ change.lora_A.weight.detach() @ x
    torch.testing.assert_close(change(x).detach(), expected)


def test_pretraining_learns_the_other_speakers_text() -> None:
    task, new = dialects(pretrained=60), dialects()
    plain = task.client_test(0, 4)
    learnt, untrained = (each.evaluate(each.model(0), plain)["loss"] for each in (task, new))
    assert learnt < untrained - 0.3
    # No text of those who take part is in it.
    assert not any(window in task._rest for i in range(4) for window in read(task, task.client(i, 4).x))


def test_the_optimizer_is_torchs_adamw() -> None:
    task = dialects(optimizer="adamw")
    data = task.client(0, 4)
    ours, theirs = task.model(0), task.model(0)
    task.train(ours, data, lr=0.01, weight_decay=0.1, batch_size=4, max_steps=3, key=KEY)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    for x, y in data.batches(batch_size=4, key=KEY, max_steps=3):
        optimizer.zero_grad()
        task.objective(theirs, theirs(x), y).backward()
        optimizer.step()
    for name, array in to_arrays(ours).items():
        np.testing.assert_allclose(array, to_arrays(theirs)[name], rtol=1e-5, atol=1e-7)


def test_an_optimizer_that_is_given_goes_on() -> None:
    task = dialects(optimizer="adamw")
    data, halves, whole = task.client(0, 4), task.model(0), task.model(0)
    optimizer = AdamW(halves.parameters(), lr=0.01, betas=(0.9, 0.99), weight_decay=0.0, foreach=False)
    for _ in range(2):
        task.train(halves, data, lr=0.01, batch_size=len(data), epochs=2, key=KEY, optimizer=optimizer)
    task.train(whole, data, lr=0.01, batch_size=len(data), epochs=4, key=KEY)
    assert int(optimizer.state_dict()["state"][0]["step"]) == 4
    for name, array in to_arrays(whole).items():
        np.testing.assert_allclose(array, to_arrays(halves)[name], rtol=1e-3, atol=1e-4)


def test_a_step_size_that_falls_follows_the_keys_round_and_nothing_that_the_client_did() -> None:
    """A client that missed rounds 2 to 8 takes the steps of round 9 as if it had been there: AdamW at these rates."""
    task = dialects(optimizer="adamw", falls=30)
    data, ours, theirs = task.client(0, 4), task.model(0), task.model(0)
    kept = task.optimizer(ours, lr=0.01)
    plain = torch.optim.AdamW(theirs.parameters(), lr=0.01, betas=(0.9, 0.99), weight_decay=0.0)
    for number in (1, 9):
        key = Key(0, "batches", number)
        task.train(ours, data, lr=0.01, batch_size=4, max_steps=3, key=key, optimizer=kept)
        for h, (x, y) in enumerate(data.batches(batch_size=4, key=key, max_steps=3)):
            at = 3 * (number - 1) + h
            plain.param_groups[0]["lr"] = 0.01 * min(1.0, (at + 1) / 20) * (0.55 + 0.45 * np.cos(np.pi * at / 30))
            plain.zero_grad()
            task.objective(theirs, theirs(x), y).backward()
            plain.step()
    for name, array in to_arrays(ours).items():
        np.testing.assert_allclose(array, to_arrays(theirs)[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "training", "match"),
    [
        ({"falls": 10}, {"max_steps": 2}, "optimizer='adamw' as well"),
        ({"falls": 10, "optimizer": "adamw"}, {}, "set max_steps"),
        ({"pretrained": 1, "speakers": 48, "min_chars": 0}, {}, "lower speakers"),
        ({"kept": True}, {}, "optimizer='adamw' as well"),
        ({"frozen_a": True}, {}, "such as rank=16"),
        ({"hidden": 10}, {}, "heads=4 does not divide"),
        ({"partition": "shards:2"}, {}, "splits by class"),
        ({"optimizer": "adamw"}, {"momentum": 0.9}, "leave them out"),
        ({"optimizer": "adamw"}, {"lr": -1.0}, "lr=-1.0"),
    ],
)
def test_what_cannot_be_is_refused(options: Any, training: Any, match: str) -> None:
    def made() -> None:
        task = dialects(**options)
        task.train(task.model(0), task.client(0, 4), key=KEY, **{"lr": 0.1, **training})

    with pytest.raises(ConfigError, match=match):
        made()
