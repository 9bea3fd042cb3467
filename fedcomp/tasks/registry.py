"""The table of tasks. Importing it loads neither torch nor any data."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from fedcomp.errors import ConfigError, nearest, optional
from fedcomp.tasks.options import resolve
from fedcomp.tasks.sources import SETS, Stamp, data_root, local_stamp

if TYPE_CHECKING:
    from fedcomp.tasks.base import Task

TASKS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "digits": "fedcomp.tasks.images:DigitImages",
        "mnist": "fedcomp.tasks.images:Mnist",
        "cifar10-subset": "fedcomp.tasks.images:Cifar",
        "tiny-shakespeare": "fedcomp.tasks.shakespeare:TinyShakespeare",
        "dialects": "fedcomp.tasks.dialects:Dialects",
        "a9a": "fedcomp.tasks.linear:A9a",
        "breast-cancer": "fedcomp.tasks.linear:BreastCancer",
        "digits-five": "fedcomp.tasks.linear:DigitsFive",
        "digits-zero": "fedcomp.tasks.linear:DigitsZero",
        "wifi": "fedcomp.tasks.wifi:Wifi",
        "digits-generator": "fedcomp.tasks.generator:DigitsGenerator",
        "mnist-generator": "fedcomp.tasks.generator:MnistGenerator",
        "digits-graph": "fedcomp.tasks.graph:DigitsGraph",
        "cora": "fedcomp.tasks.graph:Cora",
        "citeseer": "fedcomp.tasks.graph:CiteSeer",
        "cora-ml": "fedcomp.tasks.graph:CoraMl",
        "karate": "fedcomp.tasks.graph:Karate",
        "cross-partition": "fedcomp.tasks.graph:CrossPartition",
        "synthetic-graph": "fedcomp.tasks.graph:SyntheticGraph",
    }
)
"""Name of each task and where its class is (``module:class``)."""


def task_class(name: str) -> type[Task]:
    """Return the class of the task called ``name``.

    Raises
    ------
    ConfigError
        When there is none; the message names the nearest.
    """
    if name not in TASKS:
        raise ConfigError(f"unknown task {name!r}{nearest(name, TASKS)}")
    module, _, attribute = TASKS[name].partition(":")
    with optional(f"the task {name!r}"):
        return getattr(importlib.import_module(module), attribute)


def get_task(name: str, **options: Any) -> Task:
    """Return the task called ``name`` with the given options, its data loaded and partitionable.

    Tasks are immutable and kept for the next call with the same options and untouched data files, so that a
    client app may ask for its task in every message.

    Parameters
    ----------
    name : str
        One of :data:`TASKS`.
    **options
        See the task class's ``OPTIONS``; values may be given as text.

    Raises
    ------
    ConfigError
        For an unknown task or option (the message names the nearest) or an impossible value.
    DataError
        When local data files are there but are not the recorded ones or cannot be read.

    Examples
    --------
    >>> from fedcomp.rng import Key
    >>> task = get_task("digits", hidden="32", partition="shards:2")
    >>> data, model = task.client(3, 10), task.model(seed=0)
    >>> task.train(model, data, lr=0.2, epochs=3, key=Key(0, "batches"))["num-examples"]
    146
    >>> sorted(task.evaluate(model, task.test))
    ['accuracy', 'loss', 'num-examples']
    """
    cls = task_class(name)
    resolved = resolve(name, cls.OPTIONS, options)
    # The environment's answer is part of the key: a changed FEDCOMP_DATA must not serve the old data.
    resolved["root"] = data_root(resolved["root"])
    options_key = tuple(sorted(resolved.items(), key=lambda item: item[0]))
    # Graphs that are drawn from a formula have no data files that could change.
    return _build(cls, options_key, local_stamp(name, resolved["root"]) if name in SETS else None)


@lru_cache(maxsize=8)
def _build(cls: type[Task], options: tuple[tuple[str, Any], ...], stamp: Stamp | None) -> Task:
    # The stamp is there to tell apart calls before and after a change of the data files.
    # Every class in the table is built from its options alone; only the abstract base takes data.
    make: Callable[[dict[str, Any]], Task] = cls
    return make(dict(options))
