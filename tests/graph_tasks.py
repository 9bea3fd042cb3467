"""Tasks on graphs, made without a word about stand-ins."""

from __future__ import annotations

import warnings
from typing import Any

from fedcomp.tasks import get_task
from fedcomp.tasks.graph import GraphTask
from fedcomp.tasks.sources import DataWarning


def graph_task(name: str, **options: Any) -> GraphTask:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)
        task = get_task(name, **options)
    assert isinstance(task, GraphTask)
    return task
