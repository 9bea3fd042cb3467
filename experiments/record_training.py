"""Private trainings on records, many of them: one is a cell of a sweep.

The training is that of :func:`fedcomp.privacy.dpsgd.private_training`; what is added here is the data, the model, the
statement, and how long a client's message with such a contribution would be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["LAST", "TASK", "RecordCell", "RecordOutcome"]

TASK: Final = "digits"

LAST: Final = 0.2
"""Share of the training records that the validation split holds."""

MOMENTUM: Final = 0.9


@dataclass(frozen=True)
class RecordCell:
    """One private training on records.

    Attributes
    ----------
    name : str
    method : str
        As :func:`fedcomp.privacy.dpsgd.private_training` calls it.
    options : mapping of str to number
        ``lr``, and what the method takes.
    noise_multiplier, rate, delta, clip : float
    steps, seed : int
    hidden : str
        Widths of the hidden layers.
    validation : bool
        Train on a part of the training records and evaluate on the others; else evaluate on the test split.
    secure : bool
    budget : float
        Epsilon at which it ends early; 0: none. A training without noise promises nothing, and is not ended by one.
    """

    name: str
    method: str
    options: Mapping[str, Any]
    noise_multiplier: float
    rate: float
    delta: float
    clip: float
    steps: int
    seed: int
    hidden: str
    validation: bool
    secure: bool
    budget: float = 0.0

    def run(self) -> RecordOutcome:
        """Train, and say what it came to."""
        import torch
        from torch.nn import functional
        from torch.utils.data import TensorDataset

        from fedcomp.privacy.accounting import rdp_epsilon
        from fedcomp.privacy.dpsgd import StepSettings, private_training
        from fedcomp.privacy.entropy import make_entropy
        from fedcomp.privacy.errors import BudgetExceeded
        from fedcomp.privacy.ledger import PrivacyLedger
        from fedcomp.privacy.sampling import Sampling
        from fedcomp.privacy.statement import make_statement
        from fedcomp.rng import Key
        from fedcomp.tasks import get_task
        from fedcomp.tasks.base import single_thread

        task = get_task(TASK, hidden=self.hidden)
        x, y = task.train_split.tensors
        held_x, held_y = task.test.tensors
        if self.validation:
            # A fixed key: all settings are judged on the same records, whatever their seed.
            order = torch.from_numpy(Key(0, "topagg_dpsgd/validation").uniform(len(x)).argsort())
            last = round(LAST * len(x))
            held_x, held_y = x[order[:last]], y[order[:last]]
            x, y = x[order[last:]], y[order[last:]]
        key = Key(self.seed, "topagg_dpsgd")
        entropy = make_entropy(None if self.secure else key.at(purpose="noise"), insecure_deterministic=not self.secure)
        ledger = PrivacyLedger(
            delta=self.delta,
            population=len(x),
            adjacency="add_remove",
            # At a rate of 1 there is nothing to sample, and amplification may not be claimed.
            sampling=Sampling("poisson", rate=self.rate) if self.rate < 1.0 else Sampling("everyone"),
            unit="record",
            budget=(self.budget or None) if self.noise_multiplier else None,
        )
        options = {name: value for name, value in self.options.items() if name != "lr"}
        # Votes over sqrt(k) are contributions of norm 1, as clipped gradients are: one range of step sizes for all.
        step = self.options["lr"] / math.sqrt(options.get("k", 1))
        with single_thread():
            module = task.model(self.seed)
            before = _flat(module)
            sgd = torch.optim.SGD(module.parameters(), lr=step, momentum=MOMENTUM)
            with private_training(
                module,
                sgd,
                TensorDataset(x, y),
                ledger,
                StepSettings(
                    noise_multiplier=self.noise_multiplier,
                    rate=self.rate,
                    max_grad_norm=self.clip,
                    loss_reduction="none",
                    entropy=entropy,
                    key=key,
                ),
                steps=self.steps,
                method=self.method,
                **options,
            ) as training:
                made = 0
                for batch in training.loader:
                    try:
                        training.step(batch, lambda m, b: functional.cross_entropy(m(b[0]), b[1], reduction="none"))
                    except BudgetExceeded:
                        break
                    made += 1
                private = training.optimizer
                # What the training moved stands in for a client's update: it has the shape and the sparsity of one.
                frame, header, extra = _message(private, _flat(module) - before, key)
                mechanism = private.mechanism()
            module.eval()
            with torch.no_grad():
                loss = float(functional.cross_entropy(module(x), y))
                accuracy = float((module(held_x).argmax(1) == held_y).double().mean())
        statement: dict[str, Any] = {}
        if self.noise_multiplier:
            statement = make_statement(
                ledger,
                mechanism=mechanism,
                entropy=entropy,
                trust="whoever trains sees the records and is trusted; users of the models are not",
                protects="every model of the training, so the final one and all before it",
                clip=_bounded(self.method, self.options),
                not_covered=(
                    "step sizes, k, rank and kept fraction, chosen on records that were trained on",
                    "the accuracies and losses in this report",
                    "preprocessing of the data",
                    "time a step takes",
                ),
            ).to_json()
        return RecordOutcome(
            loss=loss if math.isfinite(loss) else math.inf,
            accuracy=accuracy,
            epsilon=ledger.epsilon(),
            rdp=rdp_epsilon(ledger.events, self.delta) if self.noise_multiplier else math.inf,
            steps=made,
            releases=ledger.releases,
            coordinates=private.length(),
            frame=frame,
            header=header,
            downlink=extra,
            statement=statement,
        )


@dataclass(frozen=True)
class RecordOutcome:
    """What a private training came to.

    Attributes
    ----------
    loss, accuracy : float
        After the last step: on the training records, and on those held out.
    epsilon, rdp : float
        The ledger's, and by Rényi divergences alone.
    steps, releases : int
        Steps that were made, fewer than asked where the budget ended the training; and events in the ledger.
    coordinates : int
        That noise was on in the last step.
    frame, header, downlink : int
        Bytes of a client's message with such a contribution, of a vote without votes, and of carriers sent to it.
    statement : mapping
        Empty where nothing is promised.
    """

    loss: float
    accuracy: float
    epsilon: float
    rdp: float
    steps: int
    releases: int
    coordinates: int
    frame: int
    header: int
    downlink: int
    statement: Mapping[str, Any] = field(default_factory=dict)


def _flat(module: Any) -> Any:
    import torch

    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy()


def _message(private: Any, update: Any, key: Any) -> tuple[int, int, int]:
    """Return the bytes of a message with a contribution of this kind, of one without votes, and of its carriers.

    The messages are those that the client-level systems of the same names send; here none is sent.
    """
    import numpy as np

    from fedcomp import wire
    from fedcomp.layout import Layout, Update
    from fedcomp.privacy.optimizers import LsgOptimizer, TopAggOptimizer
    from fedcomp.privacy.votes import TopkSign

    if isinstance(private, TopAggOptimizer):
        ballot, layout = TopkSign(k=private.k, stochastic=private.stochastic), Layout.flat(update.size)
        frames = [ballot.encode(Update(vector, layout), {}, key)[0] for vector in (update, np.zeros_like(update))]
        return len(frames[0]), len(frames[1]), 0
    extra = 0
    if isinstance(private, LsgOptimizer):
        carriers = [carrier for pair in private.carriers() if pair is not None for carrier in pair]
        extra = len(wire.encode([wire.dense(carrier) for carrier in carriers])) if carriers else 0
    return len(wire.encode([wire.dense(np.zeros(private.length(), np.float32))])), 0, extra


def _bounded(method: str, options: Mapping[str, Any]) -> str:
    kept = "" if options.get("keep", 1.0) == 1.0 else ", over what a public seed keeps of them"
    return {
        "dp-sgd": "every record's gradient clipped over all parameters together",
        "topagg": "every record votes for k signs; the norm sqrt(k) follows from counting",
        "random-mask": "every record's gradient clipped over the coordinates that a public seed keeps",
        "lsg": f"every record's products with carriers of the public model clipped together{kept}",
    }[method]
