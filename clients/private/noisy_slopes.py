"""Slopes with noise: how the loss of this node's records changes along directions, with every record protected.

A Poisson batch of the node's own records is drawn. Each record's slopes along all directions of the round are one
vector, which is clipped as one: clipping each number instead would let a record move m of them, and the sum by sqrt(m)
times the bound. The integer sum gets the noise of the plan's mechanism, one draw for each number, whatever the size of
the model, and is divided by the batch that is expected. The event is in the node's ledger before the noise is drawn.

What is spent is what a step of DP-SGD with the same noise and rate costs: directions are public, and slopes along them
are a linear image of a record's gradient. So is the error that noise makes in the estimate, if the bound is sqrt(m)
times that of gradients (both derived here).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from fedcomp.clients.private.dpsgd import Trainee
from fedcomp.clients.private.node_ledger import node_ledger, require_room, within_own
from fedcomp.flower.record_dp import Account, DpSgdPlan, steps_in
from fedcomp.forward import Oracle
from fedcomp.privacy.entropy import coins_of, make_entropy
from fedcomp.privacy.mechanism import PrivateSum
from fedcomp.privacy.sampling import poisson
from fedcomp.privacy.spending import next_round

if TYPE_CHECKING:
    from torch import Tensor

    from fedcomp.forward.evaluate import Tangent


def noisy_slopes(
    trainee: Trainee,
    plan: DpSgdPlan,
    context: Context,
    tangents: Iterable[Tangent],
    size: int,
    *,
    oracle: Oracle = "jvp",
    at_once: int = 1,
) -> tuple[NDArray[np.float64], Account]:
    """Return slopes of the records' mean loss with noise, shape (size,), and what they cost.

    Parameters
    ----------
    context : Context
        Holds the ledger, and gets it back when the noise is drawn.
    tangents : iterable of mapping of name to float32 array
        As many as ``size``.
    oracle, at_once
        As for :func:`fedcomp.forward.evaluate.record_slopes`.

    Raises
    ------
    BudgetExceeded
        When the release would cross the budget, the plan's or the node's. No record was looked at.
    ConfigError, EmptyPartition
        As :func:`fedcomp.clients.private.dpsgd.train_privately`.
    PrivacyLedgerError
        When the node's ledger is of another run, or damaged.
    """
    import torch

    from fedcomp.forward.evaluate import record_slopes
    from fedcomp.privacy.coins import secret_draws
    from fedcomp.tasks.base import single_thread

    trainee.check()
    plan = within_own(plan, context)
    task, data = trainee.task, trainee.data
    trainee.model.train()
    entropy = make_entropy(trainee.key.at(purpose="record-dp"), insecure_deterministic=plan.insecure)

    def loss(model: object, x: Tensor, y: Tensor) -> Tensor:
        # A batch of one; called as the model is, with other parameters.
        return task.objective(trainee.model, task.outputs(model, x[None]), y[None])  # type: ignore[arg-type]

    with node_ledger(context, plan, len(data)) as ledger:
        require_room(ledger, plan, size)
        total = PrivateSum(plan.mechanism(size), (size,))
        chosen = np.flatnonzero(poisson(len(data), plan.rate, entropy))
        # An empty batch has no slopes, and releases noise like any other.
        if chosen.size:
            batch = [tensor[torch.from_numpy(chosen)] for tensor in data.tensors]
            with single_thread(), secret_draws(coins_of(entropy)):
                found = record_slopes(trainee.model, loss, batch, tangents, oracle=oracle, at_once=at_once)
            for record, row in zip(chosen.tolist(), found, strict=True):
                # One slope that is not finite has no bound: the record contributes zeros, and nobody is told.
                if np.isfinite(row).all():
                    total.add(record, row)
        # Every release draws records of its own, so it is a round of the ledger that no entry has. Who was drawn is
        # written nowhere.
        noisy = total.release(
            ledger, round=next_round(ledger.entries), entropy=entropy, event=plan.event(size), participants=()
        )
        return noisy / (plan.rate * len(data)), Account(ledger.run, 1, steps_in(ledger))
