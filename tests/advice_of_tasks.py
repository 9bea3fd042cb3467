"""Advice of tasks, their data and their partitions."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from advice import Row, row
from private_rows import small

from fedcomp.experiments import engines
from fedcomp.layout import Layout
from fedcomp.rng import Key
from fedcomp.tasks import get_task, sources
from fedcomp.tasks.arrays import load_arrays, to_arrays
from fedcomp.tasks.cost import multiplies_per_weight, scalecom_policy
from fedcomp.tasks.local import LocalObjective
from fedcomp.tasks.models import Cnn
from fedcomp.tasks.partition import parse_partitioner

BATCH = Key(0, "batch")


def loaded(dtype: type) -> bool:
    """Whether a model takes its parameters as numbers of a type."""
    task = get_task("digits-zero")
    model, arrays = task.model(0), to_arrays(task.model(1))
    load_arrays(model, {name: array.astype(np.float64).astype(dtype) for name, array in arrays.items()})
    return all(np.array_equal(array, arrays[name]) for name, array in to_arrays(model).items())


def gradient(**options: Any) -> bool:
    """Whether a gradient of seven examples is one of a batch and not of all examples, and the same each time."""
    task = get_task("digits-zero")
    model, data = task.model(0), task.train_split
    found, again = (task.gradient(model, data, batch_size=7, **options)[0] for _ in range(2))
    whole = task.gradient(model, data)[0]
    return all(np.array_equal(found[name], again[name]) and (found[name] != whole[name]).any() for name in found)


def skewed(least: int = 0) -> Any:
    return get_task("digits-zero", partition="dirichlet:0.2", min_examples=least)


def trained(clients: int, least: int = 0, *, skip: bool = False) -> bool:
    """Whether the clients together train on every example, each from the same model."""
    task, seen = skewed(least), 0
    for partition in range(clients):
        data = task.client(partition, clients)
        if skip and not len(data):
            continue
        model = task.model(0)
        before = to_arrays(model)
        seen += task.train(model, data, lr=0.1, key=BATCH, epochs=1, batch_size=512)["num-examples"]
        if all(np.array_equal(before[name], array) for name, array in to_arrays(model).items()):
            return False
    return seen == len(task.train_split)


def objectives(nodes: int, least: int = 0) -> bool:
    """Whether the nodes' objectives, weighed by their examples, are that of all examples."""
    task = skewed(least)
    parts = [LocalObjective(task, i, nodes, batch_size=0, dtype="float64") for i in range(nodes)]
    mean = sum(len(part.data) * part.loss(parts[0].start()) for part in parts) / len(task.train_split)
    return np.isclose(mean, LocalObjective(task, 0, 1, batch_size=0, dtype="float64").loss(parts[0].start()))


def natural(partitions: int, least: int) -> bool:
    owner = parse_partitioner("natural").assign(
        partitions, Key(0, "partition"), labels=None, ids=np.array([0] * 9 + [1]), min_examples=least
    )
    return bool(np.bincount(owner, minlength=partitions).min() >= least)


def densities() -> bool:
    """Whether a policy from the multiplications of a network compresses its middle layers by what they cost."""
    model = Cnn(28, (16, 32), 64, 10)
    policy = scalecom_policy(multiplies_per_weight(model, torch.zeros(3, 784)))
    layout = Layout.of(to_arrays(model), policy)
    found = {tensor.name: tensor.density for tensor in layout.tensors}
    return found["conv2.weight"] == 1 / 25 and found["hidden.weight"] == 1 / 400


def generates() -> bool:
    """Whether a round of teachers' votes moves a generator."""
    spec = small("datalens", rounds=1, clients=2)
    result = engines.run(spec)
    start = to_arrays(get_task("digits-generator").model(spec.seed))
    return any((result.arrays[name] != array).any() for name, array in start.items())


def trained_on_records() -> Any:
    task = get_task("digits-generator")
    return task.train(task.model(0), task.train_split, lr=0.1, key=BATCH, epochs=1)


def owners(made_for: int, parts: int) -> bool:
    """Whether every node of a graph that is made for some owners has one of them."""
    shared = get_task("cross-partition", nodes=240, parts=made_for).shared(parts)
    return sorted(np.concatenate([shared.part(i).ids for i in range(parts)]).tolist()) == list(range(240))


def neighbours(**options: Any) -> bool:
    """Whether every node has as many neighbours as were asked for."""
    graph = get_task("cross-partition", **options).graph
    wanted = sum(options.get(name, default) for name, default in (("own", 10), ("telling", 7), ("other", 3)))
    return bool((np.bincount(graph.sources) == wanted).all())


def crossing(parts: int, cross: float) -> bool:
    """Whether about as many edges as were asked for lead to another part."""
    graph = get_task("synthetic-graph", nodes=400, parts=parts, cross=cross).graph
    return abs(np.mean(graph.owner[graph.sources] != graph.owner[graph.targets]) - cross) < 0.03


def regularises_the_bias(name: str) -> bool:
    """Whether the bias's gradient depends on how much is regularised; raises for a task without a linear loss."""
    found = []
    for l2 in (0.0, 1.0):
        task = get_task(name, l2=l2)
        model = task.model(0)
        with torch.no_grad():
            model.layers[0].bias.fill_(2.0)
        found.append(task.gradient(model, task.train_split)[0]["layers.0.bias"])
    return task.linear_loss != "logistic" or not np.allclose(*found)


def windows(**options: Any) -> bool:
    """Whether text comes as windows of the length that was asked for, dealt to two clients."""
    task = get_task("tiny-shakespeare", **options)
    dealt = [len(task.client(i, 2)) for i in range(2)]
    return task.train_split.x.shape[1] == options.get("seq_len", 32) and min(dealt) > 0


def dialects(lr: float = 0.01, momentum: float = 0.0, max_steps: int = 30, **options: Any) -> bool:
    """Whether a small transformer learns the dialects, AdamW's moments among what was asked for."""
    task = get_task("dialects", hidden=8, layers=1, seq_len=8, **options)
    model = task.model(0)
    data = task.client(0, 4)
    before = task.evaluate(model, data)["loss"]
    task.train(model, data, lr=lr, momentum=momentum, max_steps=max_steps, key=BATCH)
    return task.evaluate(model, data)["loss"] < before


@contextmanager
def local_set(root: Path, *, shared: bool = False) -> Iterator[Path]:
    """Write a set of local files under ``root``; yield the folder. ``shared``: another set has files in it, too."""
    rows = np.column_stack([np.arange(420).reshape(60, 7) % 31, np.arange(60) // 15 + 1])
    text = "\n".join("\t".join(map(str, values)) for values in rows).encode()
    folder = root / "wifi_localization"
    folder.mkdir(parents=True)
    (folder / "wifi.txt").write_bytes(text)
    made = {"wifi": replace(sources.SETS["wifi"], files={"wifi.txt": hashlib.sha256(text).hexdigest()})}
    if shared:
        (folder / "a9a").write_bytes(b"of another set")
        made["a9a"] = replace(sources.SETS["a9a"], folder=folder.name)
    with patch.object(sources, "SETS", {**sources.SETS, **made}):
        yield folder


def used(root: Path) -> str:
    """Return where a set came from, and check what came."""
    table, source = sources.load("wifi", root)
    assert table.x_train.shape[1] == 7
    assert np.unique(table.y_train).tolist() == [0, 1, 2, 3]
    return source.used


def changed(folder: Path) -> bytes:
    """Damage the set's file; return what it held."""
    file = folder / "wifi.txt"
    data = file.read_bytes()
    file.write_bytes(data + b"\n")
    return data


def damaged(root: Path) -> None:
    with local_set(root) as folder:
        changed(folder)
        used(root)


def replaced_or_removed(root: Path) -> bool:
    with local_set(root) as folder:
        (folder / "wifi.txt").write_bytes(changed(folder))
        back = used(root)
        changed(folder)
        shutil.rmtree(folder)
        gone = used(root)
    with local_set(root, shared=True) as folder:
        changed(folder)
        (folder / "wifi.txt").unlink()
        return (back, gone, used(root)) == ("local", "offline", "offline") and (folder / "a9a").exists()


def a_pipe(root: Path) -> None:
    with local_set(root) as folder:
        (folder / "wifi.txt").unlink()
        os.mkfifo(folder / "wifi.txt")
        used(root)


def put_there_or_removed(root: Path) -> bool:
    with local_set(root) as folder:
        there = used(root)
        shutil.rmtree(folder)
        return (there, used(root)) == ("local", "offline")


def linked(root: Path, target: str) -> str:
    """Return where a set comes from whose folder is a link."""
    with local_set(root / "elsewhere") as folder:
        (root / folder.name).symlink_to(folder.with_name(target))
        return used(root)


def instead_of_the_folder(root: Path) -> None:
    (root / "wifi_localization").touch()
    used(root)


def denied(root: Path, where: Any, name: str) -> str:
    """Return where a set comes from when the system refuses a call."""
    with local_set(root), patch.object(where, name, side_effect=PermissionError(13, "Permission denied")):
        return used(root)


def allowed(root: Path) -> bool:
    with local_set(root) as folder:
        (folder / "wifi.txt").chmod(0o600)
        return used(root) == "local"


def digits() -> tuple[int, ...]:
    # The function itself, as what was loaded once is kept.
    return sources.SETS["digits"].offline().x_train.shape


def without_scikit_learn() -> None:
    with patch.object(importlib.util, "find_spec", return_value=None):
        digits()


TASKS = (
    row("has dtype {}, the model needs {}; cast it first", lambda: loaded(np.float64), lambda: loaded(np.float32)),
    row("a key; pass key=Key(seed, purpose, round, partition)", gradient, lambda: gradient(key=Key(0, "batch", 1, 2))),
    row(
        "holds no example to train on; use fewer partitions, min_examples >= 1, or skip the client",
        lambda: trained(12),
        lambda: trained(2) and trained(12, least=1) and trained(12, skip=True),
    ),
    row("nodes, or min_examples >= 1", lambda: objectives(12), lambda: objectives(2) and objectives(12, least=1)),
    row(
        "examples, at least {} are asked for; use fewer partitions or a smaller min_examples",
        lambda: natural(2, 2),
        lambda: natural(1, 2) and natural(2, 1),
    ),
    row("with weights was found; pass what multiplies_per_weight() returns", lambda: scalecom_policy({}), densities),
    row("from records; use the system 'datalens'", trained_on_records, generates, long=True),
    row("and has no partition into {}; set the task's option parts={}", lambda: owners(4, 3), lambda: owners(3, 3)),
    row(
        "as neighbours and there are {}; use more nodes or fewer neighbours",
        lambda: neighbours(nodes=40),
        lambda: neighbours(nodes=400) and neighbours(nodes=40, own=5, telling=2),
    ),
    row("part; use cross=0 or more parts", lambda: crossing(1, 0.2), lambda: crossing(1, 0.0) and crossing(3, 0.2)),
    row(
        "which coded linear rounds do not; use 'digits-zero', 'breast-cancer' or 'a9a'",
        lambda: regularises_the_bias("digits-five"),
        lambda: not any(map(regularises_the_bias, ("digits-zero", "breast-cancer", "a9a"))),
    ),
    row("no speaker has {} characters; lower {}", lambda: windows(min_chars=10**9), lambda: windows(min_chars=100)),
    # In an empty folder, so that the stand-in is read, which has 48.
    Row(
        "leaves no text to pretrain on; lower speakers",
        lambda path: dialects(optimizer="adamw", pretrained=1, speakers=48, min_chars=0, root=str(path)),
        lambda path: dialects(optimizer="adamw", pretrained=1, speakers=47, min_chars=0, root=str(path)),
    ),
    row(
        "kept=True keeps the moments of adamw; write optimizer='adamw' as well",
        lambda: dialects(kept=True),
        lambda: dialects(kept=True, optimizer="adamw"),
    ),
    row(
        "falls is of the step size of adamw; write optimizer='adamw' as well",
        lambda: dialects(falls=60),
        lambda: dialects(falls=60, optimizer="adamw"),
    ),
    row(
        "frozen_a=True is of adapters; write their rank as well, such as rank=16",
        lambda: dialects(frozen_a=True),
        lambda: dialects(frozen_a=True, rank=16),
    ),
    row(
        "batch_norm=True is of the cnn; write model='cnn' as well",
        lambda: get_task("digits", batch_norm=True),
        lambda: get_task("digits", batch_norm=True, model="cnn"),
    ),
    row(
        "falls counts the steps of a round; set max_steps",
        lambda: dialects(falls=60, optimizer="adamw", max_steps=0),
        lambda: dialects(falls=60, optimizer="adamw", max_steps=30),
    ),
    row(
        "are of optimizer='sgd'; leave them out with 'adamw'",
        lambda: dialects(optimizer="adamw", momentum=0.5),
        lambda: dialects(optimizer="sgd", momentum=0.5) and dialects(optimizer="adamw"),
    ),
    row(
        "splits by class, which text windows do not have; use 'natural' or 'iid'",
        lambda: windows(partition="dirichlet:0.5"),
        lambda: windows(partition="natural") and windows(partition="iid"),
    ),
)


DATA = (
    row("this data; install it: pip install scikit-learn", without_scikit_learn, lambda: digits() == (1442, 64)),
    Row("be looked up ({}); give another root or make it readable", lambda path: denied(path, os, "lstat"), allowed),
    Row("cannot be read ({}); make it readable", lambda path: denied(path, Path, "read_bytes"), allowed),
    Row("has SHA-256 {}, expected {}; replace the file or remove {}", damaged, replaced_or_removed),
    Row(
        "is a link that leads nowhere ({}); repair it, or remove it to go without the data",
        lambda path: linked(path, "nowhere"),
        lambda path: linked(path, "wifi_localization") == "local" and used(path / "without") == "offline",
    ),
    Row("a folder; put a folder with the data files there, or remove it", instead_of_the_folder, put_there_or_removed),
    Row("is not a regular file; put the data file there or remove {}", a_pipe, put_there_or_removed),
)


ROWS: tuple[Row, ...] = (*TASKS, *DATA)
