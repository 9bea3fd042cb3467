"""A node's own privacy ledger, which outlives the round: what every release of noise on records is paid from.

Training with noise and slopes with noise spend from one ledger. It lies in the node's state, written as the last act: a
release whose reply is lost was paid for, one that broke left nothing and costs nothing. A SuperNode that is restarted
forgets its state, unless it has a state folder, and a new run begins without it; with ``privacy-ledger`` in its node
configuration the ledger is a file instead, which outlives both. How much noise there is, the server plans; a node that
does not leave that to it has a ``privacy-budget`` of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from flwr.app import ConfigRecord, Context

from fedcomp.clients.edge.node_config import LEDGER_FILE, OWN_BUDGET
from fedcomp.errors import ConfigError
from fedcomp.flower.record_dp import DpSgdPlan, compact
from fedcomp.privacy.errors import BudgetExceeded, PrivacyLedgerError
from fedcomp.privacy.ledger import PrivacyLedger

_STATE: Final = "fedcomp.record-dp"


def within_own(plan: DpSgdPlan, context: Context) -> DpSgdPlan:
    """Return ``plan`` within what this node allows.

    Raises
    ------
    ConfigError
        When the node has a budget of its own, and the plan's noise would come from a seed.
    """
    own = context.node_config.get(OWN_BUDGET)
    if own is None:
        return plan
    if isinstance(own, bool) or not isinstance(own, int | float) or not 0.0 < own < math.inf:
        raise ConfigError(f"{OWN_BUDGET} of this node is {own!r}; expected an epsilon above 0")
    if plan.insecure:
        raise ConfigError("the server plans noise from a seed that it knows; a node with a budget of its own draws its")
    # The stricter of both; 0 in a plan is no budget.
    return replace(plan, budget=min(float(own), plan.budget or math.inf))


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


@contextmanager
def node_ledger(context: Context, plan: DpSgdPlan, records: int) -> Iterator[PrivacyLedger]:
    """Yield this node's ledger; it is back where it was when the block ends without an error."""
    ledger = plan.ledger(records)
    path = context.node_config.get(LEDGER_FILE)
    if path:
        if not isinstance(path, str) or not Path(path).is_absolute():
            raise ConfigError(f"{LEDGER_FILE} of this node is {path!r}; expected an absolute path")
        ledger.open(Path(path))
        try:
            yield ledger
        finally:
            ledger.close()
        return
    kept = context.state.config_records.get(_STATE)
    if kept is not None:
        ledger.load_state_dict(_read(kept))
    # Without a file nothing is written when the block fails: no noisy value has left the node.
    yield ledger
    # Equal steps are merged: a record of thousands of rounds stays as short as that of one.
    context.state[_STATE] = ConfigRecord({"ledger": json.dumps(compact(ledger), separators=(",", ":"))})


def _read(record: ConfigRecord) -> Mapping[str, Any]:
    try:
        document = json.loads(str(record["ledger"]))
    except (KeyError, ValueError) as error:
        raise PrivacyLedgerError(f"this node's ledger cannot be read: {error!r}; what it spent is unknown") from error
    if not isinstance(document, dict):
        raise PrivacyLedgerError("this node's ledger cannot be read; what it spent is unknown")
    return document
