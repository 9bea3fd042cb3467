"""The privacy audit: attacks on every private system, on incorrect variants, and on the installed Flower."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fedcomp.experiments.findings import Curves, Table, largest
from fedcomp.experiments.kit import curves, table
from fedcomp.experiments.options import Config
from fedcomp.experiments.tables import Found, Studied
from fedcomp.rng import Key

if TYPE_CHECKING:
    from fedcomp.experiments.audits.tiers import Verdict

# The claim itself, 10 % and 20 % above it, and the factors of typical mistakes in sensitivity or adjacency.
POWERS: Final = (1.0, 1.1, 1.2, math.sqrt(2.0), 2.0)
TRIALS: Final = (500, 2000, 5000, 20000)
TIERS: Final = ("A", "B", "C", "E", "F")

RUNS: Final = ("votes", "clipped vectors", "no noise")
"""Sums for the audit of a single run; the last has no noise."""

Audit = list[dict[str, Any]]
"""Verdicts as plain data."""


def audit(config: Config, make: Callable[[], Any]) -> Audit:
    """Return the verdicts of tiers A, B, C, E and F on a subject."""
    from fedcomp.experiments.audits.tiers import tier_a, tier_b, tier_c, tier_e, tier_f

    subject, seed, said = make(), config.seed, config.settings
    found = [tier_a(subject), *tier_b(subject, runs=int(said["noise_runs"]), seed=seed)]
    found.append(tier_c(subject, runs=int(said["runs"]), seed=seed, confidence=float(said["confidence"])))
    # A few runs are enough, because a single output off the grid refutes the claim and each run has many coordinates.
    found += [tier_e(subject, runs=5, seed=seed), tier_f(subject, seed=seed)]
    return _plain(found)


def _plain(verdicts: list[Verdict]) -> Audit:
    return [asdict(verdict) for verdict in verdicts]


def last_bits(draws: int, seed: int) -> dict[str, list[float]]:
    """Return the fractions of noisy values 0 and 1 that are not a multiple of the last bit of a number near 1.

    The noise has unit scale. Near 1, float32 has multiples of 2^-24 and float64 of 2^-53.
    """
    from fedcomp.privacy.audit import off_grid
    from fedcomp.privacy.entropy import SeededEntropy
    from fedcomp.privacy.mechanism import GridGaussian

    out: dict[str, list[float]] = {}
    # The same noise for both values, so only the rounding of the addition differs.
    unit = Key(seed, "audit floats").generator().standard_normal(draws)
    for name, step in (("float32", 2.0**-24), ("float64", 2.0**-53)):
        noise_of = unit.astype(name)
        out[f"{name} noise on {name}"] = [off_grid(np.array(value, name) + noise_of, step) for value in (0.0, 1.0)]
    # Float noise on a grid reveals as much as plain floats; only integer noise stays on the grid.
    for noise, name in (("gaussian", "float noise on the grid"), ("discrete_gaussian", "integer noise on the grid")):
        mechanism = GridGaussian(noise_multiplier=1.0, clip=1.0, size=1, noise=noise)
        out[name] = [
            off_grid(
                mechanism.perturb(
                    np.full(draws, value, np.int64),
                    SeededEntropy(Key(seed, "audit floats", value), insecure_deterministic=True),
                ),
                2.0**-53,
            )
            # In grid steps: 0 and the clip norm, which is 1.
            for value in (0, int(mechanism.bound))
        ]
    return out


def study(found: Found) -> Studied:
    """Audit every system, every mutant and the installed Flower."""
    from fedcomp.experiments.audits import cases, flower_flaws, mutants, systems

    config, say = found.config, found.say

    def cell(name: str, make: Callable[[], Any]) -> Any:
        say(name)
        return say.cell(name, make)

    canaries, draws = int(config.settings["canaries"]), int(config.settings["float_draws"])
    guesses = min(int(config.settings["guesses"]), canaries)
    makers = {**cases.SUBJECTS, **systems.SUBJECTS}
    audits = {name: cell(f"audit/{name}", partial(audit, config, make)) for name, make in makers.items()}

    def whole_run(kind: str) -> Audit:
        return _plain([mutants.whole_run(kind, canaries, guesses, seed=config.seed)])

    def both(mutant: mutants.Mutant) -> dict[str, Audit]:
        return {"original": _plain(mutant.original()), "mutated": _plain(mutant.mutated())}

    runs = {kind: cell(f"one run/{kind}", partial(whole_run, kind)) for kind in RUNS}
    wrong = {
        name: {"wrong": one.wrong, "tier": one.tier, **cell(f"mutant/{name}", partial(both, one))}
        for name, one in mutants.MUTANTS.items()
    }
    floats = cell("last bits", partial(last_bits, draws, config.seed))
    flower = cell("Flower", partial(flower_flaws.findings, int(config.settings["clip_rounds"])))
    return Studied(
        quantities(audits, runs, wrong, floats, flower),
        tables=[
            _audit_table(audits, int(config.settings["runs"])),
            _run_table(runs),
            _mutant_table(wrong),
            _power_table(),
            _float_table(floats, flower),
            _flower_table(flower),
        ],
        figures=[_clip_figure(flower)],
    )


def quantities(
    audits: Mapping[str, Audit],
    runs: Mapping[str, Audit],
    mutants: Mapping[str, Mapping[str, Any]],
    floats: Mapping[str, list[float]],
    flower: Mapping[str, Any],
) -> dict[Any, float]:
    """Return the refuted claims, the caught mutants, the leak through last bits, and the behaviour of the installed
    Flower."""
    from fedcomp.privacy.audit import power

    ours = "integer noise on the grid"

    def refuted(verdicts: Audit) -> float:
        # Without any verdict the result is NaN, which fails the claim.
        return sum(not verdict["ok"] for verdict in verdicts) if verdicts else math.nan

    def against(tier: str) -> float:
        return refuted([verdict for found in audits.values() for verdict in _by_tier(found, tier)])

    ends = [clips[-1] for clips in flower["clips"].values()]
    # Without the run that has no noise, which must be refuted.
    real = (*audits.values(), runs["votes"], runs["clipped vectors"])
    return {
        "attacks that refute": sum(not verdict["ok"] for one in real for verdict in one),
        **{(f"tier {tier}", "verdicts against a system"): against(tier) for tier in TIERS},
        ("tier D", "verdicts against a system"): refuted([*runs["votes"], *runs["clipped vectors"]]),
        ("tier D", "forgotten noise is noticed"): refuted(runs["no noise"]),
        # An attack that finds nothing would pass every mutant, so each must come within a factor of five of the truth.
        ("tier C", "weakest attack's bound over mu"): min(
            v["found"] / v["claimed"] for found in audits.values() for v in _by_tier(found, "C")
        ),
        "mutants caught": sum(map(_caught, mutants.values())),
        "mutants not told from their originals": sum(not _caught(mutant) for mutant in mutants.values()),
        "mutants tried": len(mutants),
        "probability that 2000 runs notice sqrt(2) for 1": power(math.sqrt(2.0), 1.0, 2000)[0],
        ("integer noise", "outputs that tell 0 from 1"): largest(floats[ours]),
        ("float noise", "outputs that tell 0 from 1"): min(
            zero - one for name, (zero, one) in floats.items() if name != ours
        ),
        "our adaptive clip norm, factor from the median": largest(
            max(clips[-1], 1.0 / clips[-1]) for clips in flower["ours"].values()
        ),
        ("Flower", "adaptive clip norm, smallest factor from the median"): min(max(e, 1.0 / e) for e in ends),
        ("Flower", "share of integers that local noise moved"): flower["moved"][1],
        ("Flower", "share of the mean that one client's NaN makes NaN"): flower["nan"],
        ("Flower", "an unchanged model ends the round"): float(bool(flower["zero"])),
    }


def _power_table() -> Table:
    """Return the probability that a claim of mu = 1 is refuted, by the true mu and the number of runs of the attack."""
    from fedcomp.privacy.audit import power

    columns: dict[str, Any] = {"runs": int, "mean bound at 1": lambda trials: power(1.0, 1.0, trials)[1]}
    columns |= {f"alarms at {mu:.2f}": (lambda trials, mu=mu: power(mu, 1.0, trials)[0]) for mu in POWERS}
    caption = "Computed: both kinds of error are binomial. A claim of mu = 1 at a confidence of 99 %, by the true mu."
    return table("Power of the canary audit", columns, TRIALS, caption)


def _by_tier(audit: Audit, tier: str) -> Audit:
    return [verdict for verdict in audit if verdict["tier"] == tier]


def _verdict(audit: Audit) -> str:
    return "stands" if all(verdict["ok"] for verdict in audit) else "REFUTED"


def _audit_table(audits: Mapping[str, Audit], runs: int) -> Table:
    def first(name: str, tier: str) -> dict[str, Any]:
        return _by_tier(audits[name], tier)[0]

    def noise(name: str) -> float:
        ratios = [float(verdict["found"]) for verdict in _by_tier(audits[name], "B")]
        # By the logarithm, because half the noise is as wrong as twice the noise.
        return max(ratios, key=lambda ratio: abs(math.log(ratio)))

    columns: dict[str, Any] = {
        "system": str,
        "A: distance": lambda name: first(name, "A")["found"] / first(name, "A")["claimed"],
        "B: noise": noise,
        "C: mu >=": lambda name: first(name, "C")["found"],
        "mu": lambda name: first(name, "C")["claimed"],
        "E: off grid": lambda name: first(name, "E")["found"],
        "F: alike": lambda name: first(name, "F")["found"],
        "verdict": lambda name: _verdict(audits[name]),
    }
    return table(
        "Audited systems",
        columns,
        audits,
        "A: largest distance of two neighbouring sums, over the sensitivity in the event. B: noise over the claim, the "
        f"worst of all tensors. C: lower bound on mu from {runs} runs in each world, and mu from the ledger's epsilon. "
        "E: fraction of outputs off the public grid. F: largest correlation of the noise of two rounds. A claim that "
        "is not refuted is not proven.",
    )


def _run_table(runs: Mapping[str, Audit]) -> Table:
    columns: dict[str, Any] = {"sum": str}
    headings = {"canaries": "trials", "guesses": "part", "epsilon claimed": "claimed", "epsilon >=": "found"}
    columns |= {heading: (lambda kind, name=name: runs[kind][0][name]) for heading, name in headings.items()}
    columns["verdict"] = lambda kind: _verdict(runs[kind])
    return table(
        "D: one run with many canaries",
        columns,
        runs,
        "Fair coins decide which canaries are included (Steinke, Nasr, Jagielski 2023). 100 correct guesses show an "
        "epsilon of at most 3.47, so this detects only gross mistakes. The last row must be refuted.",
    )


def _caught(mutant: Mapping[str, Any]) -> bool:
    return all(v["ok"] for v in mutant["original"]) and not all(v["ok"] for v in mutant["mutated"])


def _mutant_table(mutants: Mapping[str, Mapping[str, Any]]) -> Table:
    rows: list[list[Any]] = []
    for name, mutant in mutants.items():
        # The failing verdict, or otherwise the first.
        wrong = min(mutant["mutated"], key=lambda verdict: verdict["ok"])
        right = next((v for v in mutant["original"] if v["part"] == wrong["part"]), mutant["original"][0])
        shown = [wrong["measure"], wrong["claimed"], right["found"], wrong["found"]]
        rows.append([name, mutant["wrong"], mutant["tier"], *shown, _caught(mutant)])
    return Table(
        "Mutants",
        ("mutant", "what is wrong", "tier", "measure", "claimed", "original", "mutant", "caught"),
        rows,
        "Each mutant changes one thing in a class of the project and is audited with the original on the same data. "
        "Caught: the tier refutes the mutant and not the original.",
    )


def _float_table(floats: Mapping[str, list[float]], flower: Mapping[str, Any]) -> Table:
    shares = list(floats.items())
    # After the plain floats and before our grids.
    shares.insert(2, (f"Flower {flower['version']}, fixed clipping", flower["bits"]))
    return Table(
        "What the last bits reveal",
        ("noise", "value 0", "value 1", "difference"),
        [[name, zero, one, zero - one] for name, (zero, one) in shares],
        "Fraction of outputs that are not a multiple of the last bit of a number near 1 (Mironov 2012), for one "
        "coordinate with unit noise. Such an output reveals that the value was 0.",
    )


def _flower_table(flower: Mapping[str, Any]) -> Table:
    low, high = flower["adaptive"]
    ends = {start: clips[-1] for start, clips in flower["clips"].items()}
    ours = [clips[-1] for clips in flower["ours"].values()]
    rounds = len(next(iter(flower["clips"].values()))) - 1
    rows: list[list[Any]] = [
        [f"adaptive clip norm after {rounds} rounds, from {start}", end, f"1 (ours {min(ours):.2f} to {max(ours):.2f})"]
        for start, end in ends.items()
    ]
    rows += [
        ["adaptive clipping: noise over what the clips need, all clipped", low, "1"],
        ["adaptive clipping: the same, none clipped", high, "1"],
        ["noise over what the mean needs, 5 of 20 replied", flower["missing"], "1"],
        ["one client's weight over the noise, 1000 of 1090 examples", flower["heavy"], "1"],
        ["a round with one unchanged model ends with", flower["zero"] or "a model", "a model"],
        ["a round with an integer buffer that changed ends with", flower["integer"] or "a model", "a model"],
        ["share of the mean that is NaN after one client's NaN", flower["nan"], "0"],
        ["the same after one client's infinity", flower["inf"], "0"],
        ["local noise: share of floats it moved", flower["moved"][0], "1"],
        ["local noise: share of integers it moved", flower["moved"][1], "integers are not sent"],
        ["integer buffers after server noise are", flower["dtype"], "int64"],
        ["share of the clients' mean loss that is released as it is", flower["metric"], "0"],
    ]
    for key, epsilon in flower["local"].items():
        named, _, times = key.partition("/")
        rows.append([f"LocalDpMod, epsilon {named}, {times} messages: true epsilon", epsilon, named])
    return Table(
        f"Flower {flower['version']}",
        ("measured on its own wrappers", "found", "right would be"),
        rows,
        "Synthetic replies go into Flower's wrappers. The noise comes from numpy's global generator, so the last "
        "digits vary. LocalDpMod: delta 1e-5, sensitivity set to the clip norm.",
    )


def _clip_figure(flower: Mapping[str, Any]) -> Curves:
    trajectories = [
        (f"{whose}, from {start}", clips)
        for whose, found in ((f"Flower {flower['version']}", flower["clips"]), ("ours", flower["ours"]))
        for start, clips in found.items()
    ]
    return curves(
        "Adaptive clip norm, updates of median norm 1",
        trajectories,
        lambda line: range(len(line[1])),
        lambda line: line[1],
        lambda line: line[0],
        x_label="round",
        y_label="clip norm",
        log_y=True,
        caption="No noise; 20 clients; the target is the median.",
    )
