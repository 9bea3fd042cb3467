"""State in ``context.state`` that clients of all systems report on; see :mod:`fedcomp.clients.memory`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from fedcomp.errors import StateError
from fedcomp.flower.schema import Schema
from fedcomp.rules import Int

MOST_BYTES: Final = 2**31 - 2**20
"""Of a node's state in Flower's hands, which keep it as one serialised message: those end at 2 GiB."""


UNSETTLED: Final = (
    "whether its last update was used is not known here, and it is not sent again; a node with a key keeps its id"
)


class StaleMessage(StateError):
    """An older message arrived after a newer one was answered; answering it would count an update twice."""


@dataclass(frozen=True)
class ReplicaRecord(Schema, key="fedcomp.replica"):
    """Which version of the model a node holds."""

    version: Annotated[int, Int()]


# Made once: json.dumps() would make one for each text.
_COMPACT: Final = json.JSONEncoder(separators=(",", ":")).encode


def lineage(config: Mapping[str, Any]) -> str:
    """Return the nested codec ids of a codec's configuration, without parameters.

    Memory outlives a change of parameters (a density that falls over the rounds), but not a change of algorithm.
    """

    def ids(config: Any) -> Any:
        if isinstance(config, dict):
            return {k: ids(v) for k, v in sorted(config.items()) if k == "id" or configured(v)}
        if isinstance(config, list):
            return [ids(v) for v in config if isinstance(v, dict)]
        return config

    # A list of anything else is a parameter, as a schedule of densities is.
    def configured(value: Any) -> bool:
        return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, dict) for v in value))

    own = {name: value for name, value in config.items() if name != "id"}
    return _COMPACT([config["id"], ids(own)])
