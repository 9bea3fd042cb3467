"""Tasks: data, its partition over clients, model, loss and metric. Everything runs offline by default."""

from fedcomp.tasks.partition import Partitioner, parse_partitioner
from fedcomp.tasks.registry import TASKS, get_task

__all__ = ["TASKS", "Partitioner", "get_task", "parse_partitioner"]
