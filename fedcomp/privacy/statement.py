"""The privacy statement: a run's guarantee, whom it covers, its assumptions, and its limits.

An epsilon means nothing without its unit, its adjacency, its sampler and its delta: the same run is 1.8 or 634. So
they are given together, as data and as prose, and every epsilon comes with the one that needs no assumption on
sampling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Final

from fedcomp.errors import ConfigError
from fedcomp.plain import Null, fields_of, from_fields
from fedcomp.privacy.accounting import is_fine
from fedcomp.privacy.entropy import Entropy, SeededEntropy, SystemEntropy
from fedcomp.privacy.events import Adjacency, Noise
from fedcomp.privacy.ledger import UNCOUNTED, check_population
from fedcomp.privacy.sampling import Kind, Sampling
from fedcomp.rules import Configured, Int

if TYPE_CHECKING:
    from fedcomp.privacy.ledger import PrivacyLedger
    from fedcomp.privacy.mechanism import Mechanism

NOT_COVERED: Final = (
    "metrics and evaluation results",
    "the choice of hyper-parameters",
    "preprocessing of the data",
    "who takes part and when",
    "timing and message sizes",
)
"""What a run does not cover unless it says otherwise."""

_MANY_IDS: Final = (
    "more ids than were declared took part: some came back under another id, or the population was declared too "
    "small, and delta is then too large"
)
"""The addition to the unit if this is the case. With a cap the ledger refuses it."""

Epsilon = Annotated[float, Null(math.inf, "infinite")]
"""An epsilon; JSON has no number for an infinite one and gets this word."""

_CHANGES: Final = {
    "zero_out": "leaving one {unit}'s contribution out of every sum and count, and nothing else",
    "add_remove": "adding or removing one {unit}",
    "replace": "exchanging one {unit} for another",
}


@dataclass(frozen=True, kw_only=True)
class Statement(Configured):
    """The privacy guarantee of a run.

    Attributes
    ----------
    epsilon, delta : float
        The guarantee; epsilon is infinite where nothing is protected.
    epsilon_unamplified : float
        The same with every unit in every release: no sampling, no cap.
    accountant, accountant_unamplified : str
        Which analyses these are from, with the version of the library where one was used.
    accountant_error : float
        Numerical error that is part of ``epsilon``.
    accountant_order : float or None
        Rényi order, where orders are involved.
    failure : float
        Part of delta that pays for failures beside the noise.
    unit : str
        The protected unit.
    unit_note : str
        What a unit is in terms of people: how a user maps to clients or records.
    adjacency : {"zero_out", "add_remove", "replace"}
    mechanism : str
        Name of the mechanism.
    bound, sensitivity : float
        Largest L2 norm of one contribution, and of the change of the sum, in the units of the update.
    noise : str
    noise_multiplier, sigma : float
        z, smallest over the recorded events, and the standard deviation s on the sum, in the units of the update.
    clip : str
        How contributions are bounded.
    sampling : {"everyone", "poisson", "capped"}
    rate, participation_cap
        Of the sampler.
    most_participations : int
        Rounds the most frequent unit was in; 0 where who took part is the secret of the guarantee.
    population : int
        Declared number of units N.
    rounds, releases : int
    budget : float or None
    trust : str
        Who sees raw contributions.
    protects : str
        What may be published.
    not_covered : tuple of str
    randomness : str
        Where noise and samples come from.
    secure : bool
        Whether the randomness is unpredictable; False is reported as INSECURE.
    finite_precision : str
        What was done about floating point.
    dropouts : str
        What a lost unit changes.
    run : str
        Names the ledger this is from.

    Raises
    ------
    ConfigError
        When delta is not below 1 / population, or a field has a value it cannot have.
    """

    epsilon: Epsilon
    delta: float
    epsilon_unamplified: Epsilon
    accountant: str
    accountant_unamplified: str
    accountant_error: float
    accountant_order: float | None
    failure: float
    unit: str
    unit_note: str
    adjacency: Adjacency
    mechanism: str
    bound: float
    sensitivity: float
    noise: Noise
    noise_multiplier: float
    sigma: float
    clip: str
    sampling: Kind
    rate: float
    participation_cap: int
    most_participations: int
    population: Annotated[int, Int(1)]
    rounds: int
    releases: int
    budget: float | None
    trust: str
    protects: str
    not_covered: tuple[str, ...]
    randomness: str
    secure: bool
    finite_precision: str
    dropouts: str
    run: str

    def __post_init__(self) -> None:
        # Also of a statement that is read back.
        super().__post_init__()
        check_population(self.delta, self.population)
        if math.isnan(self.epsilon) or self.epsilon < 0.0 or math.isnan(self.epsilon_unamplified):
            raise ConfigError(f"epsilon={self.epsilon!r} of a statement is not a number >= 0")
        if not self.trust or not self.protects:
            raise ConfigError("a statement says who is trusted and what is protected; trust and protects are empty")

    def to_json(self) -> dict[str, Any]:
        """Return the statement as JSON-able data, and its prose."""
        return {**fields_of(self), "prose": self.prose()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Statement:
        """Read :meth:`to_json`; raises :class:`fedcomp.plain.PlainError` when it is something else."""
        # The prose follows from the fields.
        return from_fields(cls, {name: value for name, value in document.items() if name != "prose"}, "a statement")

    def prose(self) -> str:
        """Return the statement for a reader: one sentence that can be quoted, and the lines it rests on."""
        change = _CHANGES[self.adjacency].format(unit=self.unit)
        sampler = Sampling(self.sampling, rate=self.rate, cap=self.participation_cap)
        lines = [*self._head(), ""]
        order = "" if self.accountant_order is None else f", order {self.accountant_order:g}"
        error = f", its numerical error of {self.accountant_error:g} included" if self.accountant_error else ""
        budget = (
            "none: the epsilon is that of so many rounds, and their number must not depend on what they released"
            if self.budget is None
            else f"epsilon {_number(self.budget)}, asked before anybody is contacted; a run whose end depends on what "
            "it released is covered by the budget it began with"
        )
        rows = {
            "epsilon": f"{_number(self.epsilon)}: {self.accountant}{order}{error}",
            "unamplified": (
                f"{_number(self.epsilon_unamplified)}, had every {self.unit} been in every release: "
                f"{self.accountant_unamplified}"
            ),
            "delta": (
                f"{self.delta:g}, of which {self.failure:.3g} for failures beside the noise; below 1/{self.population}"
            ),
            "unit": f"one {self.unit} of {self.population}; {self.adjacency}: {change}" + _also(self.unit_note),
            "sampling": sampler.describe(self.unit) + self._taken(),
            "mechanism": (
                f"{self.mechanism}: a contribution has L2 norm at most {self.bound:.6g}, one {self.unit} moves the sum "
                f"by at most {self.sensitivity:.6g}" + _also(self.clip)
            ),
            "noise": (
                f"{self.noise}, standard deviation {self.sigma:.6g} on the sum, {self.noise_multiplier:.6g} times the "
                f"sensitivity; {self.releases} releases in {self.rounds} rounds"
            ),
            "randomness": self.randomness,
            "precision": self.finite_precision,
            "dropouts": self.dropouts,
            "budget": budget,
            "trust": self.trust,
            "protected": self.protects,
            "not covered": "; ".join(self.not_covered) if self.not_covered else "nothing was named",
        }
        lines += [f"{name + ':':<13}{text}" for name, text in rows.items()]
        return "\n".join(lines)

    def _head(self) -> list[str]:
        if self.epsilon == math.inf:
            promise = f"NOT PRIVATE: no {self.unit} is protected ({self.accountant})."
        else:
            cap = (
                f", with at most {self.participation_cap} rounds of each {self.unit}" if self.participation_cap else ""
            )
            secrecy = (
                "if nobody learns who took part"
                if self.sampling == "poisson" and self.rate < 1.0
                else "no secrecy of sampling assumed"
            )
            promise = (
                f"{self.unit.capitalize()}-level (epsilon={_number(self.epsilon)}, delta={self.delta:g})-differential "
                f"privacy under {self.adjacency.replace('_', '-')} adjacency for {self.protects}{cap}; {secrecy}; "
                f"{self.trust}."
            )
        # Else a warning comes first, so that nobody reads the promise without it.
        if self.secure:
            return [promise]
        return [
            "INSECURE: noise or samples come from a seed, and whoever knows it takes them off again. The figures below "
            "are those of a run with real randomness.",
            promise,
        ]

    def _taken(self) -> str:
        return f"; the most frequent one was in {self.most_participations} rounds" if self.most_participations else ""


def make_statement(
    ledger: PrivacyLedger, *, mechanism: Mechanism | None = None, entropy: Entropy | None = None, **said: Any
) -> Statement:
    """Return the statement of what ``ledger`` holds.

    Parameters
    ----------
    ledger : PrivacyLedger
    mechanism : Mechanism, optional
        Gives bound, sensitivity, noise and its scale. Without one, ``mechanism``'s fields must be in ``said`` (``name``
        for the field ``mechanism``, ``bound``, ``sensitivity``, ``noise``, ``noise_multiplier``, ``sigma``).
    entropy : Entropy, optional
        Where noise comes from; default the operating system's. ``secure=False`` in ``said`` stands for a seed.
    **said
        Any other field of :class:`Statement`; ``trust`` and ``protects`` have no default.

    Raises
    ------
    ConfigError
        When something cannot be stated, or is missing.

    Examples
    --------
    >>> from fedcomp.privacy.ledger import PrivacyLedger
    >>> from fedcomp.privacy.mechanism import GridGaussian
    >>> mechanism = GridGaussian(noise_multiplier=2.0, clip=1.0, size=10)
    >>> ledger = PrivacyLedger(delta=1e-5, population=1000, adjacency="zero_out", sampling=Sampling())
    >>> ledger.record(mechanism.event(), round=1)
    >>> said = make_statement(ledger, mechanism=mechanism, trust="the server is trusted", protects="every model")
    >>> round(said.epsilon, 2), said.sensitivity, said.secure
    (1.99, 1.0, True)
    """
    # A class stands in for a source that is not at hand: both say what they are.
    source: type[Entropy] | Entropy = entropy if entropy is not None else SystemEntropy
    if entropy is None and said.get("secure") is False:
        source = SeededEntropy
    cost, plain = ledger.cost(), ledger.cost(amplified=False)
    entries = ledger.entries
    secret = ledger.sampling.event_rate < 1.0
    values: dict[str, Any] = {
        "epsilon": cost.epsilon,
        "delta": ledger.delta,
        "epsilon_unamplified": plain.epsilon,
        "accountant": cost.accountant,
        "accountant_unamplified": plain.accountant,
        "accountant_error": cost.error,
        "accountant_order": None if math.isnan(cost.order) else cost.order,
        "failure": ledger.failure,
        "unit": ledger.unit,
        "unit_note": "",
        "adjacency": ledger.adjacency,
        "clip": "",
        "sampling": ledger.sampling.kind,
        "rate": ledger.sampling.event_rate,
        "participation_cap": ledger.sampling.cap,
        "most_participations": 0 if secret else max(ledger.participations.values(), default=0),
        "population": ledger.population,
        "rounds": ledger.rounds,
        "releases": ledger.releases,
        "budget": ledger.budget,
        "not_covered": NOT_COVERED,
        "randomness": source.description,
        "secure": source.secure,
        "dropouts": (
            f"a lost {ledger.unit} leaves noise, bound and divisor as they are: the guarantee does not depend on who "
            "answered"
        ),
        "run": ledger.run,
    }
    if mechanism is not None:
        if mechanism.adjacency != ledger.adjacency:
            raise ConfigError(
                f"the mechanism is scaled for {mechanism.adjacency!r} adjacency, the ledger accounts for "
                f"{ledger.adjacency!r}; give both the same"
            )
        values |= {
            "mechanism": type(mechanism).__name__,
            "bound": mechanism.bound * mechanism.step,
            "sensitivity": mechanism.sensitivity * mechanism.step,
            "noise": mechanism.noise,
            "noise_multiplier": float(mechanism.noise_multiplier),
            "sigma": mechanism.sigma,
        }
    # ``mechanism`` is the parameter here, so the field of that name is said as ``name``.
    if "name" in said:
        said["mechanism"] = said.pop("name")
    # After ledger and mechanism, which a caller that knows better overrides.
    values |= said
    # Not an error: without a cap no figure depends on ids, and whoever reads the statement has to know.
    if len(ledger.participations) > ledger.most:
        values["unit_note"] = "; ".join(filter(None, (values["unit_note"], _MANY_IDS)))
    if not ledger.counted:
        values["not_covered"] = (*values["not_covered"], UNCOUNTED)
    # The least that was recorded: the mechanism at hand describes one release, the statement all of them.
    if entries and "noise_multiplier" not in said:
        values["noise_multiplier"] = min(entry.event.noise_multiplier for entry in entries)
    values["not_covered"] = tuple(values["not_covered"])
    noise = str(values.get("noise", ""))
    values.setdefault("finite_precision", _precision(noise, ledger))
    # All gaps at once, by name: a statement must leave no assumption out.
    missing = {f.name for f in fields(Statement)} - set(values)
    unknown = set(values) - {f.name for f in fields(Statement)}
    if missing or unknown:
        raise ConfigError(
            f"a statement lacks {sorted(missing) or 'nothing'} and does not know {sorted(unknown) or 'nothing'}"
        )
    return Statement(**values)


def _precision(noise: str, ledger: PrivacyLedger) -> str:
    """Return the statement about floating-point precision."""
    if noise == "gaussian":
        return (
            "INSECURE: noise is drawn and added in floating point, whose last bits can give the sum away; epsilon "
            "holds for real numbers"
        )
    gaussian = [event for event in ledger.events if event.noise == "discrete_gaussian" and event.noise_multiplier]
    sigmas = [event.grid_sigma for event in gaussian]
    text = "sums and noise are integers on a public grid: no floating-point result shows its input"
    if noise == "discrete_gaussian" and sigmas:
        if all(is_fine(event) for event in gaussian):
            text += (
                f"; integer Gaussian noise of {min(sigmas):.4g} grid steps or more is accounted as continuous, at a "
                f"delta divided by 1 + {ledger.lattice:.2g}, which covers what integers cost beyond that"
            )
        else:
            text += (
                f"; noise of {min(sigmas):.4g} grid steps is coarse, and accounted by zCDP, which holds for integers"
            )
    return text


def _number(value: float) -> str:
    # Rounded up: an epsilon must never be stated smaller than it is.
    return "infinite" if value == math.inf else f"{math.ceil(value * 1e4) / 1e4:.4f}".rstrip("0").rstrip(".")


def _also(text: str) -> str:
    return f"; {text}" if text else ""
