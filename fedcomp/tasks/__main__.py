"""``python -m fedcomp.tasks``: a list of the tasks, the look of a partition, and the result of central training.

Prints the figures of ``docs/reference/tasks.md``.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence

import numpy as np

from fedcomp.errors import FedcompError
from fedcomp.rng import Key
from fedcomp.tasks import TASKS, get_task
from fedcomp.tasks.base import Task
from fedcomp.tasks.graph import GraphTask, train_centrally
from fedcomp.tasks.sources import DataWarning


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fedcomp.tasks",
        description="Describe a task, its partition over clients, and train it centrally.",
    )
    parser.add_argument("task", nargs="?", help=f"one of {', '.join(TASKS)}; all are described when left out")
    parser.add_argument("options", nargs="*", metavar="option=value", help="options of the task")
    parser.add_argument("--clients", type=int, help="print the partition over this many clients")
    parser.add_argument("--epochs", type=int, help="train centrally for this many epochs; on a graph, steps of Adam")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0, help="of the model and of the batches")
    args = parser.parse_args(argv)
    # Split at the first sign: a value may hold another one.
    options = dict(option.partition("=")[::2] for option in args.options)
    with warnings.catch_warnings():
        # The note about a stand-in is part of what is printed.
        warnings.simplefilter("ignore", DataWarning)
        try:
            for name in [args.task] if args.task else TASKS:
                task = get_task(name, **options)
                describe(task)
                if args.clients:
                    describe_partition(task, args.clients)
                if args.epochs:
                    train(task, args)
        except FedcompError as error:
            print(f"error: {error}", file=sys.stderr)
            # The status that argparse exits with for arguments that cannot work.
            return 2
    return 0


def describe(task: Task) -> None:
    """Print sizes and the origin of the data."""
    parameters = sum(p.numel() for p in task.model(0).parameters())
    print(
        f"{task.name}: {len(task.train_split):,} train, {len(task.test):,} test, {task.classes} classes, "
        f"{parameters:,} parameters"
    )
    print(f"  {task.data.note}")


def describe_partition(task: Task, clients: int) -> None:
    """Print sizes of the partitions and, where examples have a class, how many of each class they hold."""
    assignment = task.assignment(clients)
    sizes = np.bincount(assignment, minlength=clients)
    if isinstance(task, GraphTask):
        owned = np.bincount(task.shared(clients).owner, minlength=clients)
        edges = f"{task.shared(clients).cut:.3f} of {task.neighbours.edges:,} edges cut"
        print(f"  {task.shared(clients).method} over {clients}: {owned.min()} to {owned.max()} nodes, {edges}")
    else:
        print(f"  {task.options['partition']} over {clients}: {sizes.min()} to {sizes.max()} examples")
    y = task.train_split.y
    if y.ndim == 1 and clients <= 20:
        for partition in range(clients):
            counts = np.bincount(y[assignment == partition], minlength=task.classes)
            print(f"  {partition:3d} {sizes[partition]:5d} " + " ".join(f"{c:4d}" for c in counts))


def train(task: Task, args: argparse.Namespace) -> None:
    """Train on all clients' data together and print the metrics on the held-out examples."""
    model = task.model(args.seed)
    if isinstance(task, GraphTask):
        train_centrally(task, model, steps=args.epochs, lr=args.lr, seed=args.seed)
    else:
        task.train(
            model,
            task.train_split,
            lr=args.lr,
            momentum=args.momentum,
            batch_size=args.batch_size,
            epochs=args.epochs,
            key=Key(args.seed, "batches"),
        )
    metrics = task.evaluate(model, task.test)
    print(f"  after {args.epochs} epochs: loss {metrics['loss']:.3f}, accuracy {metrics['accuracy']:.3f}")


if __name__ == "__main__":
    sys.exit(main())
