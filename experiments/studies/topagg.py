"""TopAgg at client level: private methods at several epsilons, trained without messages, and the bytes of votes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fedcomp.experiments.findings import Table, largest, mean, spread
from fedcomp.experiments.kit import Records, repetitions, table
from fedcomp.experiments.options import Config
from fedcomp.experiments.spec import RunSpec, format_settings
from fedcomp.experiments.studies.datalens import PUBLISHED, PublishedSettings
from fedcomp.experiments.tables import Found, Rows, Studied
from fedcomp.privacy.accounting import noise_multiplier_for
from fedcomp.privacy.votes import threshold
from fedcomp.rng import Key

if TYPE_CHECKING:
    from fedcomp.experiments.central import Beside
    from fedcomp.tasks.base import Task

FEDAVG: Final = "FedAvg, no privacy"
DENSE: Final = "DP-FedAvg, dense"
TOPK: Final = "DP-FedAvg, top-k"
VOTES: Final = "TopAgg"
STOCHASTIC: Final = "TopAgg, stochastic signs"
THRESHOLD: Final = "TopAgg, threshold"

EPSILONS: Final = (1.0, 3.0, 10.0, math.inf)
FINITE: Final = EPSILONS[:-1]
SENT: Final = 3.0
"""The epsilon whose rows also run over messages."""

TUNING_SEED: Final = 1000
"""Added to the seed when settings are chosen; no figure in a table comes from these seeds."""


def drawn_difference(setting: PublishedSettings, draws: int, key: Key) -> float:
    """Return the largest distance of the closed form from ``draws`` draws of the integer noise through the
    threshold."""
    from fedcomp.privacy.entropy import SeededEntropy
    from fedcomp.privacy.noise import draw

    noise = draw("discrete_gaussian", setting.sigma, draws, SeededEntropy(key, insecure_deterministic=True))
    limit = setting.beta * setting.teachers
    quiet = float(np.mean(threshold(noise, limit) != 0))
    passed = threshold(noise + setting.teachers, limit)
    found = (quiet, float(np.mean(passed == 1)), float(np.mean(passed == -1)))
    return max(abs(a - b) for a, b in zip(found, setting.passes, strict=True))


@dataclass(frozen=True)
class PrivateMethod:
    """One way to train privately: its system, and the chosen settings at each epsilon.

    Attributes
    ----------
    label, system : str
    fixed : mapping
        Settings of all of its runs.
    candidates : sequence of mapping
        Settings to try at every epsilon.
    chosen : sequence of int
        Position of the winner by epsilon; printed by ``--set tune=true``.
    """

    label: str
    system: str
    fixed: Mapping[str, Any]
    candidates: Sequence[Mapping[str, Any]]
    chosen: Sequence[int]

    def name(self, epsilon: float) -> str:
        """Return the label of its training at ``epsilon``."""
        return f"{self.label}, epsilon {number(epsilon)}"


def number(epsilon: float) -> str:
    """Return an epsilon as text for labels."""
    return "infinite" if epsilon == math.inf else f"{epsilon:g}"


_SERVER_LR: Final = "inner.server_learning_rate"
_CLIPPED: Final = tuple(
    {"clip": clip, "inner": "fedavgm", _SERVER_LR: rate}
    for clip, rate in ((0.5, 1.0), (0.5, 2.0), (0.5, 4.0), (1.0, 2.0), (2.0, 2.0))
)
_RATES: Final = (0.025, 0.05, 0.1, 0.2)
_VOTED: Final = tuple({"density": d, "server_lr": rate} for d, rate in product((0.2, 0.4), _RATES))
_DRAWN: Final = tuple({"density": 0.2, "server_lr": rate} for rate in (0.05, 0.1, 0.2, 0.4))
_PASSED: Final = tuple(
    {"density": 0.2, "beta": beta, "server_lr": rate} for beta, rate in product((0.1, 0.2), (0.02, 0.04))
)

METHODS: Final = (
    PrivateMethod(DENSE, "dp-fedavg", {"codec": "identity"}, _CLIPPED, (1, 2, 2, 4)),
    PrivateMethod(TOPK, "dp-fedavg", {"codec": "topk", "codec.density": 0.2}, _CLIPPED, (1, 2, 2, 4)),
    PrivateMethod(VOTES, "topagg", {"stochastic": False}, _VOTED, (1, 2, 2, 2)),
    PrivateMethod(STOCHASTIC, "topagg", {}, _DRAWN, (0, 1, 2, 3)),
    PrivateMethod(THRESHOLD, "topagg", {"stochastic": False, "mode": "threshold"}, _PASSED, (1, 1, 3, 0)),
)
"""The compared methods. The published settings of TopAgg amount to plain signs, because their saturation is far below
all gradients."""

_TRAINING: Final = ("task.hidden", "lr", "epochs", "batch_size", "max_steps")


def multiplier(config: Config, epsilon: float) -> float:
    """Return the noise multiplier of ``epsilon`` for this number of rounds with every client in each; 0 for
    infinity."""
    # An infinite epsilon needs no noise, and without rounds nothing is released.
    if epsilon == math.inf or not config.rounds:
        return 0.0

    return noise_multiplier_for(epsilon, float(config.settings["delta"]), releases=config.rounds)


def _settings(config: Config, method: PrivateMethod, epsilon: float, candidate: Mapping[str, Any]) -> dict[str, Any]:
    # A training without noise guarantees nothing, so no budget ends it.
    budget = config.budget if config.budget and epsilon < math.inf else 0.0
    return {
        **method.fixed,
        "budget": budget,
        **candidate,
        "delta": float(config.settings["delta"]),
        "noise_multiplier": multiplier(config, epsilon),
        # Experiments must be repeatable. The statement says so in capitals, and the cost equals that of real noise.
        "insecure_deterministic": True,
    }


def rows(config: Config) -> Rows:
    """Return the rows over messages: dense averaging, and the three compared methods at one epsilon."""
    found = {FEDAVG: "identity"}
    # Messages are too slow for the whole grid. One epsilon and the methods of the question show that they change
    # nothing.
    for method in METHODS[:3]:
        own = _settings(config, method, SENT, method.candidates[method.chosen[EPSILONS.index(SENT)]])
        found[method.name(SENT)] = f"{method.system} {format_settings(own)}"
    return found


Asked = Mapping[str, tuple[str, Mapping[str, Any]]]
"""By label: a system and its settings."""


def train(label: str, seed: int, *, config: Config, asked: Asked) -> dict[str, Any]:
    """Train without messages."""
    from fedcomp.experiments.central import Plan, measured

    system, settings = asked[label]
    own = {**{key: config.settings[key] for key in _TRAINING}, **settings}
    spec = RunSpec(system, label, "digits", rounds=config.rounds, clients=config.clients, seed=seed, settings=own)
    plan, program = Plan.of(spec)
    return measured(replace(plan, every=0), program)


def _trained(found: Found, asked: Asked, seeds: Sequence[int], title: str = "") -> dict[str, Records]:
    """Return trainings by label, one per seed."""
    axes = {"label": list(asked), "seed": seeds}
    return found.sweep(train, axes, title, config=found.config, asked=asked).groups("label")


def study(found: Found) -> Studied:
    """Train every method at every epsilon without messages, and compare a closed form with random draws."""
    from fedcomp.experiments.central import beside

    config, say = found.config, found.say
    chosen, tuned = choose(found)
    asked: dict[str, tuple[str, Mapping[str, Any]]] = {FEDAVG: ("identity", {})}
    for method, epsilon in _trainings():
        label = method.name(epsilon)
        asked[label] = (method.system, _settings(config, method, epsilon, chosen[label]))
    groups = _trained(found, asked, repetitions(config))
    say("bytes of votes, and the runs with messages once more without")
    trained = {label: _figures(group) for label, group in groups.items()}
    votes = {label: {**trained[label], **_vote_sizes(config, chosen[label])} for label in _voting()}
    caption = "These rows run through Flower on the chosen engine. Whole messages have a header and Flower's envelope."
    checked, differ = beside(found.results, caption)
    drawn = largest(
        drawn_difference(setting, 20_000, Key(config.seed, "passing", i)) for i, setting in enumerate(PUBLISHED)
    )
    return Studied(
        {**quantities(trained, votes, differ), "closed form less draws of the integer noise": drawn},
        tables=[*_trained_tables(trained, votes, chosen), *tuned, checked],
        tasks=[_task(config).record()],
        statements={label: group[0].statement for label, group in groups.items() if group[0].statement},
    )


def _task(config: Config) -> Task:
    from fedcomp.tasks import get_task

    return get_task("digits", hidden=str(config.settings["task.hidden"]))


def _trainings() -> list[tuple[PrivateMethod, float]]:
    return list(product(METHODS, EPSILONS))


def _votes_at() -> list[tuple[PrivateMethod, float]]:
    return [(m, e) for m, e in _trainings() if m.system == "topagg"]


def _voting() -> list[str]:
    return [method.name(epsilon) for method, epsilon in _votes_at()]


def choose(found: Found) -> tuple[dict[str, Mapping[str, Any]], list[Table]]:
    """Return the settings of each method at each epsilon. With ``tune`` these have the lowest training loss on seeds
    that nothing else uses, and a table of all tried settings is returned too."""
    config = found.config
    stored = {m.name(e): m.candidates[i] for m in METHODS for e, i in zip(EPSILONS, m.chosen, strict=True)}
    if not config.settings["tune"]:
        return stored, []
    # By the training loss on other seeds, so neither the test split nor a reported draw is used for tuning.
    first = config.seed + TUNING_SEED
    seeds = range(first, first + int(config.settings["tune_seeds"]))
    tried: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for method, epsilon in _trainings():
        for i, candidate in enumerate(method.candidates):
            tried[f"{method.name(epsilon)}, {i}"] = (method.system, _settings(config, method, epsilon, candidate))
    losses = {key: mean(group.each("loss")) for key, group in _trained(found, tried, seeds, "tuning").items()}
    # NaN would be the smallest or the largest depending on its position in the list.
    losses = {key: math.inf if math.isnan(loss) else loss for key, loss in losses.items()}
    tried_at = {m.name(e): [losses[f"{m.name(e)}, {i}"] for i in range(len(m.candidates))] for m, e in _trainings()}
    best = {name: reached.index(min(reached)) for name, reached in tried_at.items()}
    chosen = {m.name(e): m.candidates[best[m.name(e)]] for m, e in _trainings()}
    columns: dict[str, Any] = {
        "training": str,
        "position": lambda name: best[name],
        "chosen": lambda name: _described(chosen[name]),
        "training loss": lambda name: sorted(tried_at[name])[0],
        "second": lambda name: sorted(tried_at[name])[1],
        "worst": lambda name: max(tried_at[name]),
    }
    caption = f"Means over {len(seeds)} trainings with seeds from {first} on. The test split is not used."
    return chosen, [table("What was chosen", columns, tried_at, caption)]


def _described(candidate: Mapping[str, Any]) -> str:
    names = {_SERVER_LR: "server_lr"}
    return ", ".join(f"{names.get(k, k)} {v:g}" for k, v in candidate.items() if not isinstance(v, str))


Figures = Mapping[str, Mapping[str, Any]]
"""By label, the results of the trainings with all seeds."""


def _figures(group: Records) -> dict[str, Any]:
    """Return means over the seeds; bytes are NaN if a budget allowed no round."""

    def per_frame(name: str) -> float:
        return mean(t[name] / t.frames if t.frames else math.nan for t in group)

    return {
        "accuracy": mean(group.each("accuracy")),
        "half": spread(group.each("accuracy")),
        "epsilon": group[0].epsilon,
        # A large number instead of infinity, so no claim about it can hold.
        "worst": largest(t.epsilon if math.isfinite(t.epsilon) else 1e9 for t in group),
        "z": group[0].statement.get("noise_multiplier"),
        "sent": per_frame("uplink"),
        "bare": per_frame("bare"),
        "longest": largest(float(t.largest) if t.frames else math.nan for t in group),
    }


def _vote_sizes(config: Config, candidate: Mapping[str, Any]) -> dict[str, float]:
    """Return the minimum cost of a vote: coordinates, votes, and in bytes the entropy and the frame of an empty
    vote."""
    import numpy as np

    from fedcomp.layout import NONE_DENSE, Layout, Update
    from fedcomp.privacy.votes import TopkSign, entropy_bits

    model = _task(config).model(config.seed)
    layout = Layout.of({name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}, NONE_DENSE)
    ballot = TopkSign(density=float(candidate["density"]))
    # An update of zeros casts no vote, so its frame is only the header.
    empty, _ = ballot.encode(Update(np.zeros(layout.size, np.float32), layout), {}, Key(config.seed))
    k = ballot.total(layout)
    return {"size": layout.size, "k": k, "entropy": entropy_bits(layout.size, k) / 8, "header": float(len(empty))}


def _over_entropy(vote: Mapping[str, Any], name: str) -> float:
    # Without the header, which does not grow with the votes.
    return (vote[name] - vote["header"]) / vote["entropy"]


def _trained_tables(trained: Figures, votes: Figures, chosen: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    # Every method is compared with dense averaging at the same epsilon; FedAvg with nothing.
    dense = {m.name(e): METHODS[0].name(e) for e, m in product(EPSILONS, METHODS) if m.label != DENSE}
    accuracy: dict[str, Any] = {
        "training": str,
        "epsilon": lambda label: trained[label]["epsilon"],
        "z": lambda label: None if trained[label]["z"] is None else round(trained[label]["z"], 3),
        "test, %": lambda label: round(100 * trained[label]["accuracy"], 1),
        "±": lambda label: round(100 * trained[label]["half"], 1),
        "points over dense": lambda label: (
            round(100 * (trained[label]["accuracy"] - trained[dense[label]]["accuracy"]), 1) if label in dense else None
        ),
        "bytes a round": lambda label: round(trained[label]["sent"], 1),
        "times fewer": lambda label: round(trained[FEDAVG]["sent"] / trained[label]["sent"], 1),
    }
    sizes: dict[str, Any] = {"training": str} | {
        heading: (lambda label, name=name: votes[label][name])
        for heading, name in (
            ("d", "size"),
            ("k", "k"),
            ("entropy", "entropy"),
            ("header", "header"),
            ("mean frame", "bare"),
            ("longest", "longest"),
        )
    }
    sizes |= {
        "mean / entropy": lambda label: _over_entropy(votes[label], "bare"),
        "longest / entropy": lambda label: _over_entropy(votes[label], "longest"),
        "sent": lambda label: votes[label]["sent"],
    }
    return [
        table(
            "Accuracy at equal epsilon, and what a client sends",
            accuracy,
            [FEDAVG, *(m.name(e) for e, m in product(EPSILONS, METHODS))],
            "Means over seeds of the last model, ± half their range. FedAvg averages with a server rate of 1; the "
            "rate of the others was tuned, so DP-FedAvg without noise is above it. Epsilon is at the delta of the "
            "statement below, with every client in every round; z is the noise multiplier. Points over dense: "
            "compared with DP-FedAvg dense at the same epsilon; negative values are the loss of votes. Bytes: uplink "
            "frame of a client and round. Frames in private rounds are padded, so their length reveals nothing.",
        ),
        table(
            "Bytes of a vote",
            sizes,
            votes,
            "Entropy: log2 C(d, k) + k bits, in bytes: a uniform support and fair signs. Header: the frame of an "
            "empty vote. The ratios leave the header out. A real support can cost less than a uniform one, and a "
            "client with fewer than k changed coordinates sends fewer. Sent: with the padding that makes all frames "
            "equally long.",
        ),
        table(
            "Settings",
            {"training": str, "chosen among its candidates": lambda label: _described(chosen[label])},
            chosen,
            "Chosen by the training loss on other seeds than those reported (tune=true repeats it); the choice is not "
            "part of any guarantee.",
        ),
    ]


def quantities(trained: Figures, votes: Figures, differ: Mapping[str, Beside]) -> dict[Any, float]:
    """Return epsilons, accuracies, the cost of votes over their entropy, and the differences of runs with messages.

    ``differ``: the differences of runs with messages from those without.
    """
    dense = METHODS[0]

    def over(method: PrivateMethod, epsilon: float) -> float:
        # Equal means differ by rounding.
        return round(trained[method.name(epsilon)]["accuracy"] - trained[dense.name(epsilon)]["accuracy"], 9)

    fewer = [trained[dense.name(e)]["sent"] / trained[m.name(e)]["sent"] for m, e in _votes_at()]
    found: dict[Any, float] = {
        # The worst seed, because a guarantee must hold for each.
        **{(m.name(e), "epsilon of the statement"): trained[m.name(e)]["worst"] for m, e in product(METHODS, FINITE)},
        **{(m.name(e), "accuracy"): trained[m.name(e)]["accuracy"] for m, e in _trainings()},
        **{(m.name(e), "accuracy less that of dense"): over(m, e) for m, e in _trainings()},
        **{(label, "longest vote, times its entropy"): _over_entropy(vote, "longest") for label, vote in votes.items()},
        # The smallest of the ratios, or NaN if one is NaN, because a budget may have allowed no frame.
        "uplink of dense over votes, the longest": -largest(-ratio for ratio in fewer),
        "times fewer bytes": fewer[0],
    }
    for label, each in differ.items():
        found[label, "bytes of the model that messages change"] = each.model
        found[label, "bytes of frames that messages change"] = each.frames
        found[label, "epsilon with messages less that without"] = each.epsilon
    return found
