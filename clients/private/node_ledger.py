"""A node's own privacy ledger: a persistent record of every noisy release on its data.

It is among the bytes that a node keeps beside its memory, whatever session asks (:attr:`fedcomp.program.Answer.keep`),
written as the last act: a release whose reply is lost was paid for, one that broke left nothing and costs nothing. Its
lines are those of a file, chained (:mod:`fedcomp.privacy.journal`). A SuperNode that is restarted forgets its state,
unless it has a state folder, and a new run begins without it; with ``privacy-ledger`` in its node configuration the
ledger is a file instead, which outlives both. How much noise there is, the server plans; a node that does not leave
that to it has a ``privacy-budget`` of its own. As the server could renew that by another run, its ledger is always a
file: the one that is named, or one in the state folder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from flwr.app import Context

from fedcomp.asks import NO_FRAMES, Frames
from fedcomp.clients.edge.node_config import LEDGER_FILE, OWN_BUDGET, OWN_DELTA, STATE_FOLDER
from fedcomp.errors import ConfigError
from fedcomp.flower.folder import StateFolder
from fedcomp.flower.payload import PARTITION_KEY
from fedcomp.plain import fields_of
from fedcomp.privacy.errors import BudgetExceeded
from fedcomp.privacy.journal import from_bytes, to_bytes
from fedcomp.privacy.ledger import PrivacyLedger
from fedcomp.systems.private.record import DpSgdPlan

DELTA: Final = 1e-5
"""Of a node's own budget, unless it names another one."""

_KEPT: Final = "record-dp.ledger"
"""Name of its bytes among those that a node keeps."""

_AFTER: Final = "after"
"""Where their header names the ledger before the last training, so that one name stands for all of its past."""


def within_own(plan: DpSgdPlan, context: Context) -> DpSgdPlan:
    """Return ``plan`` within what this node allows.

    Raises
    ------
    ConfigError
        When the node has a budget of its own, and the plan's noise would come from a seed, or be of floating point.
    """
    own = context.node_config.get(OWN_BUDGET)
    if own is None:
        return plan
    if isinstance(own, bool) or not isinstance(own, int | float) or not 0.0 < own < math.inf:
        raise ConfigError(f"{OWN_BUDGET} of this node is {own!r}; expected an epsilon above 0")
    if plan.insecure:
        raise ConfigError("the server plans noise from a seed that it knows; a node with a budget of its own draws its")
    if plan.noise == "gaussian":
        raise ConfigError(
            "the server plans floating-point noise (noise='gaussian'), whose last bits may reveal what it hides; a "
            "node with a budget of its own adds integer noise: noise='discrete_gaussian'"
        )
    delta = context.node_config.get(OWN_DELTA, DELTA)
    if isinstance(delta, bool) or not isinstance(delta, float) or not 0.0 < delta < 1.0:
        raise ConfigError(f"{OWN_DELTA} of this node is {delta!r}; expected a probability above 0 and below 1")
    # The stricter of both; 0 in a plan is no budget. A larger delta would be another promise under the same epsilon.
    return replace(plan, budget=min(float(own), plan.budget or math.inf), delta=min(delta, plan.delta))


def require_room(ledger: PrivacyLedger, plan: DpSgdPlan, size: int) -> None:
    """Refuse what would cross the budget, before a record is looked at.

    Parameters
    ----------
    size : int
        Coordinates of what a step releases.

    Raises
    ------
    BudgetExceeded
    """
    if ledger.affords(plan.event(size), plan.steps):
        return
    raise BudgetExceeded(
        f"{plan.steps} more steps would cross this client's budget of epsilon {plan.budget:g} at delta {plan.delta:g}; "
        f"{ledger.epsilon():.4g} is spent. No record was looked at"
    )


@dataclass
class NodeLedger:
    """A node's ledger while a training is paid from it.

    Attributes
    ----------
    ledger : PrivacyLedger
    head : str
        Names all that was spent: the checksum of the last line of its chain. There once the block has ended.
    keep : mapping of str to bytes
        What the node keeps of it from then on; nothing where it is a file.
    """

    ledger: PrivacyLedger
    head: str = ""
    keep: Frames = field(default_factory=dict)


@contextmanager
def node_ledger(context: Context, plan: DpSgdPlan, records: int, kept: Frames = NO_FRAMES) -> Iterator[NodeLedger]:
    """Yield this node's ledger; what it is when the block ends without an error is to be kept.

    Parameters
    ----------
    kept : mapping of str to bytes
        What the node keeps (:attr:`fedcomp.program.Me.kept`).

    Raises
    ------
    ConfigError, FolderError
        When the file that is named cannot be one.
    PrivacyLedgerError
        When the ledger is of another run, or damaged.
    """
    ledger, data = plan.ledger(records), kept.get(_KEPT, b"")
    found, path = NodeLedger(ledger), _ledger_file(context)
    header, entries, former = from_bytes(data) if data else ({}, [], "")
    if header:
        # The name of what came before is in the chain, and no word of the ledger.
        held = {name: value for name, value in header.items() if name != _AFTER}
    if path is not None:
        ledger.open(path)
        try:
            # From before the node had a file: what was spent then stays spent.
            if header:
                ledger.load_state_dict({"header": held, "file": False, "entries": entries})
                found.keep = {_KEPT: b""}
            yield found
            found.head = ledger.head
        finally:
            ledger.close()
        return
    if header:
        ledger.load_state_dict({"header": held, "file": False, "entries": entries})
    # Without a file nothing is written when the block fails: no noisy value has left the node.
    yield found
    # Equal steps are merged: a record of thousands of rounds stays as short as that of one.
    state = compact(ledger)
    written, found.head = to_bytes({**state["header"], _AFTER: former}, state["entries"])
    found.keep = {_KEPT: written}


def _ledger_file(context: Context) -> Path | None:
    """Return the file of this node's ledger, None where the ledger lies in the node's state.

    Raises
    ------
    ConfigError
        When the node has a budget of its own and no place that outlives a run, or a path is not absolute.
    """
    named = context.node_config.get(LEDGER_FILE)
    if named:
        if not isinstance(named, str) or not Path(named).is_absolute():
            raise ConfigError(f"{LEDGER_FILE} of this node is {named!r}; expected an absolute path")
        return Path(named)
    if OWN_BUDGET not in context.node_config:
        return None
    found = file_of_node(context, "privacy")
    if found is None:
        raise ConfigError(
            f"this node has a {OWN_BUDGET} of its own, but no file for what it spent that outlives a run: start it "
            "with --privacy-ledger FILE or --state-dir DIR (privacy-ledger='/absolute/file' or "
            "state-dir='/absolute/folder' in its node configuration)"
        )
    return found


def file_of_node(context: Context, name: str, fallback: Path | None = None) -> Path | None:
    """Return the file in the node's state folder that outlives runs, None where the node has no folder.

    Parameters
    ----------
    name : str
        What is in it.
    fallback : Path, optional
        The folder of nodes whose configuration names none.

    Raises
    ------
    ConfigError, FolderError
        When the folder cannot be used.
    """
    folder = context.node_config.get(STATE_FOLDER, fallback)
    if folder is None:
        return None
    if not isinstance(folder, str | Path):
        raise ConfigError(f"{STATE_FOLDER} of this node is {folder!r}; expected an absolute path")
    partition = context.node_config.get(PARTITION_KEY)
    # A node id is no name: without a key it is another one after a restart.
    own = f"{partition}." if isinstance(partition, int) else ""
    return StateFolder(Path(folder), partition if isinstance(partition, int) else 0).path / f"{own}{name}.jsonl"


def steps_in(ledger: PrivacyLedger) -> int:
    """Return how many steps ``ledger`` holds."""
    return sum(entry.times for entry in ledger.entries)


def compact(ledger: PrivacyLedger) -> dict[str, Any]:
    """Return ``ledger.state_dict()`` with equal events in a row as one entry, so that it does not grow with steps."""
    state = ledger.state_dict()
    merged: list[tuple[dict[str, Any], int]] = []
    for entry in ledger.entries:
        event = fields_of(entry.event)
        # Neighbours only, so that the entries keep the order in which they were spent.
        if merged and merged[-1][0] == event:
            merged[-1] = (event, merged[-1][1] + entry.times)
        else:
            merged.append((event, entry.times))
    state["entries"] = [
        # Each merged entry is an attempt of its own: its rounds 0 to times - 1 do not meet those of another.
        {"serial": i, "attempt": i, "round": 0, "times": times, "participants": [], "event": event}
        for i, (event, times) in enumerate(merged)
    ]
    return state
