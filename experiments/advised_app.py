"""The model that a Flower app begins with: its ServerApp runs up to the first message that holds a model.

``python -m fedcomp.experiments.advised_app FOLDER CLIENTS FILE`` writes it as an ``.npz`` file. This is a process of
its own because it runs the app's code, as ``flwr run`` does: what the app imports and prints stays here. Nobody trains.
What an app asks before it sends a model (which clients there are, how they reach each other) is answered.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.experiments.advised_client import trial_client
from fedcomp.experiments.commands import OK, WRONG_INPUT, complain

MOST: Final = 1000
"""Clients that an app is shown, at most."""


def first_model(folder: Path, clients: int) -> dict[str, NDArray[Any]]:
    """Return the arrays by name that the app of a folder sends first; a process of its own runs the app.

    Raises
    ------
    ConfigError
        When the folder is not an app, or the app ends or fails before it sends a model.
    """
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "model.npz")
        words = [sys.executable, "-m", __name__, str(folder.resolve()), str(min(clients, MOST)), str(out)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode or not out.exists():
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            why = lines[-1].removeprefix("error: ") if lines else f"it ended with status {done.returncode}"
            raise ConfigError(f"no model of the app in {folder}: {why}. Give a state dict, or its number of parameters")
        with np.load(out, allow_pickle=False) as file:
            return {str(name): file[f"arr_{i}"] for i, name in enumerate(file["names"])}


class _Found(BaseException):
    """Ends the app; it is no Exception, so that the app cannot take it for a failed round and go on."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        super().__init__()
        self.arrays = arrays


def _run(folder: Path, clients: int) -> Mapping[str, NDArray[Any]]:
    """Return the model that the app sends first.

    Raises
    ------
    ConfigError
        When there is none.
    """
    from flwr.app import Context, Message, RecordDict

    from fedcomp.flower.grid import InProcessGrid
    from fedcomp.flower.nodes import GridError

    class Listening(InProcessGrid):
        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            batch = list(messages)
            for record in (record for message in batch for record in message.content.array_records.values()):
                arrays = {name: array.numpy() for name, array in record.items()}
                if any(array.dtype.kind == "f" for array in arrays.values()):
                    raise _Found(arrays)
            return super().push_messages(batch)

    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
    except FileNotFoundError as error:
        raise ConfigError("it holds no pyproject.toml") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"its pyproject.toml cannot be read: {error}") from error
    try:
        flower = project["tool"]["flwr"]["app"]
        module, _, path = flower["components"]["serverapp"].partition(":")
    except KeyError as error:
        raise ConfigError("its pyproject.toml names no [tool.flwr.app.components] serverapp") from error
    sys.path.insert(0, str(folder))
    try:
        app: Any = reduce(getattr, path.split("."), importlib.import_module(module))
        with Listening(trial_client(), clients) as grid:
            app(grid, Context(1, 0, {}, RecordDict(), _flat(flower.get("config", {}))))
    except _Found as found:
        return found.arrays
    except GridError as error:
        raise ConfigError(f"it waits for more than {clients} clients; raise clients") from error
    except Exception as error:
        raise ConfigError(f"it raised {type(error).__name__}: {error}") from error
    raise ConfigError("it ended before it sent a model")


def _flat(config: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return an app's settings as Flower hands them over: by one name, with dots where tables are nested."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= _flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {before + name: value}
    return found


def main(arguments: list[str]) -> int:
    """Write the model of an app to a file and return the exit code."""
    folder, clients, out = arguments
    try:
        arrays = _run(Path(folder), int(clients))
    except ConfigError as error:
        return complain(str(error), WRONG_INPUT)
    # By position: an array may have any name, also that of an argument.
    np.savez(out, *arrays.values(), names=np.array(list(arrays)))
    return OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
