"""The privacy audit: what an attacker measures of every private system, and whether wrong variants would be noticed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fedcomp.experiments.experiment import Config, Experiment, Option, no_rows
from fedcomp.experiments.findings import Claim, Curves, Findings, Say, Series, Table, largest
from fedcomp.experiments.kit import judged
from fedcomp.experiments.spec import RunResult
from fedcomp.rng import Key

if TYPE_CHECKING:
    from fedcomp.experiments.audits.tiers import Verdict

OPTIONS = {
    "runs": Option(300, "runs of every attack, as many with the canary as without", least=50),
    "noise_runs": Option(30, "runs whose noise is measured", least=5),
    "canaries": Option(1000, "canaries of the audits in one run", least=100),
    "guesses": Option(100, "guesses of the audits in one run", least=10),
    "confidence": Option(0.99, "of the lower bounds on mu", least=0.5, most=0.9999),
    "clip_rounds": Option(60, "rounds of the clip norms' trajectories", least=5),
    "float_draws": Option(100_000, "noisy values whose last bits are looked at", least=1000),
}

POWERS: Final = (1.0, 1.1, 1.2, math.sqrt(2.0), 2.0)
TRIALS: Final = (500, 2000, 5000, 20000)
STARTS: Final = (0.1, 0.9, 1.2, 5.0)
"""First clip norms of clients whose updates have a median norm of 1."""

TIERS: Final = ("A", "B", "C", "E", "F")
HEADERS: Final = ("A: distance", "B: noise", "C: mu >=", "mu", "E: off grid", "F: alike")

Audit = list[dict[str, Any]]


class Bench:
    """All measurements of one configuration, each kept by its name."""

    def __init__(self, config: Config, say: Say) -> None:
        self.config, self.say = config, say

    def count(self, name: str) -> int:
        """Return a setting that counts something."""
        return int(self.config.settings[name])

    def cell(self, name: str, make: Callable[[], Any]) -> Any:
        """Return ``make()``, or what it returned before an interruption."""
        self.say(name)
        return self.say.cell(name, make)

    def audits(self) -> dict[str, Audit]:
        """Return the verdicts of tiers A, B, C, E and F on every subject."""
        from fedcomp.experiments.audits import cases, systems

        makers = {**cases.SUBJECTS, **systems.SUBJECTS}
        return {name: self.cell(f"audit/{name}", partial(self._audit, make)) for name, make in makers.items()}

    def _audit(self, make: Callable[[], Any]) -> Audit:
        from fedcomp.experiments.audits.tiers import tier_a, tier_b, tier_c, tier_e, tier_f

        subject, seed = make(), self.config.seed
        confidence = float(self.config.settings["confidence"])
        found = [tier_a(subject), *tier_b(subject, runs=self.count("noise_runs"), seed=seed)]
        found.append(tier_c(subject, runs=self.count("runs"), seed=seed, confidence=confidence))
        found += [tier_e(subject, runs=5, seed=seed), tier_f(subject, seed=seed)]
        return _plain(found)

    def one_run(self) -> dict[str, Audit]:
        """Return the verdicts of tier D: a sum of votes, of clipped vectors, and one whose noise was forgotten."""
        from fedcomp.experiments.audits.caught import whole_run

        count, guesses = self.count("canaries"), min(self.count("guesses"), self.count("canaries"))
        out = {}
        for kind in ("votes", "clipped vectors", "no noise"):

            def make(kind: str = kind) -> Audit:
                return _plain([whole_run(kind, count, guesses, seed=self.config.seed)])

            out[kind] = self.cell(f"one run/{kind}", make)
        return out

    def mutants(self) -> dict[str, dict[str, Any]]:
        """Return every mutant with the verdicts on its original and on itself."""
        from fedcomp.experiments.audits.caught import MUTANTS

        out = {}
        for name, mutant in MUTANTS.items():

            def make(mutant: Any = mutant) -> dict[str, Any]:
                return {"original": _plain(mutant.original()), "mutated": _plain(mutant.mutated())}

            out[name] = {"wrong": mutant.wrong, "tier": mutant.tier, **self.cell(f"mutant/{name}", make)}
        return out

    def floats(self) -> dict[str, list[float]]:
        """Return the shares of outputs beside a grid for the values 0 and 1, by kind of noise."""
        found: dict[str, list[float]] = self.cell(
            "last bits", lambda: last_bits(self.count("float_draws"), self.config.seed)
        )
        return found

    def flower(self) -> dict[str, Any]:
        """Return what the wrappers of the installed Flower do."""
        found: dict[str, Any] = self.cell("Flower", lambda: flower_findings(self.count("clip_rounds")))
        return found


def _plain(verdicts: list[Verdict]) -> Audit:
    return [verdict.to_json() for verdict in verdicts]


def last_bits(draws: int, seed: int) -> dict[str, list[float]]:
    """Return the shares of noisy values 0 and 1 that are no multiple of the last bit of a number beside 1.

    Unit noise; float32 has multiples of 2^-24 there, float64 of 2^-53.
    """
    from fedcomp.privacy.audit import off_grid
    from fedcomp.privacy.entropy import SeededEntropy
    from fedcomp.privacy.mechanism import GridGaussian

    out: dict[str, list[float]] = {}
    unit = Key(seed, "audit floats").generator().standard_normal(draws)
    for name, step in (("float32", 2.0**-24), ("float64", 2.0**-53)):
        noise_of = unit.astype(name)
        out[f"{name} noise on {name}"] = [off_grid(np.array(value, name) + noise_of, step) for value in (0.0, 1.0)]
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
            for value in (0, int(mechanism.bound))
        ]
    return out


def flower_findings(rounds: int) -> dict[str, Any]:
    """Return what the wrappers of the installed Flower do, as plain data."""
    from fedcomp.experiments.audits import flower_flaws as flaws
    from fedcomp.experiments.audits.caught import tracked
    from fedcomp.strategies.private.dp_fedavg import DpFedAvg

    floats, integers, dtype = flaws.integer_buffers()
    all_clipped, none_clipped = flaws.adaptive_noise()
    return {
        "version": flaws.flower_version(),
        "clips": {f"{start:g}": flaws.clip_norms(start, rounds) for start in STARTS},
        "ours": {f"{start:g}": tracked(DpFedAvg, start=start, rounds=rounds) for start in STARTS},
        "zero": flaws.zero_update(),
        "integer": flaws.integer_update(),
        "nan": flaws.not_finite(math.nan),
        "inf": flaws.not_finite(math.inf),
        "moved": [floats, integers],
        "dtype": dtype,
        "missing": flaws.missing_replies(),
        "heavy": flaws.heavy_client(),
        "adaptive": [all_clipped, none_clipped],
        "metric": flaws.leaked_metric(),
        "bits": list(flaws.last_bits()),
        "local": {f"{e:g}/{t}": flaws.local_epsilon(e, t) for e in (1.0, 10.0) for t in (1, 10)},
    }


def measure(config: Config, results: Mapping[str, RunResult], say: Say) -> Findings:
    """Audit every system, every mutant and the installed Flower."""
    bench = Bench(config, say)
    audits, runs, mutants = bench.audits(), bench.one_run(), bench.mutants()
    floats, flower = bench.floats(), bench.flower()
    table, curves = power_of()
    return Findings(
        tables=[
            _audit_table(audits, bench),
            _run_table(runs),
            _mutant_table(mutants),
            table,
            _float_table(floats, flower),
            _flower_table(flower),
        ],
        figures=[curves, _clip_figure(flower)],
        values=_values(audits, runs, mutants, floats, flower),
    )


def power_of() -> tuple[Table, Curves]:
    """Return how probable it is that a claim of mu = 1 is refuted, by what is true and how often the attack is run."""
    from fedcomp.privacy.audit import power

    rows = []
    for trials in TRIALS:
        found = [power(mu, 1.0, trials) for mu in POWERS]
        rows.append([trials, found[0][1], *(alarms for alarms, _ in found)])
    table = Table(
        "Power of the canary audit",
        ("runs", "mean bound at 1", *(f"alarms at {mu:.2f}" for mu in POWERS)),
        rows,
        "Computed: both kinds of error are binomial. A claim of mu = 1 at a confidence of 99 %, by the true mu.",
    )
    grid = [1.0 + 0.02 * i for i in range(51)]
    series = [Series(f"{trials} runs", grid, [power(mu, 1.0, trials)[0] for mu in grid]) for trials in TRIALS]
    return table, Curves("How likely a claim of mu = 1 is refuted", "true mu", "probability of an alarm", series)


def _by_tier(audit: Audit, tier: str) -> Audit:
    return [verdict for verdict in audit if verdict["tier"] == tier]


def _audit_table(audits: Mapping[str, Audit], bench: Bench) -> Table:
    rows: list[list[Any]] = []
    for name, audit in audits.items():
        a, c = _by_tier(audit, "A")[0], _by_tier(audit, "C")[0]
        noise = max((v["found"] for v in _by_tier(audit, "B")), key=lambda ratio: abs(math.log(ratio)))
        e, f = _by_tier(audit, "E")[0], _by_tier(audit, "F")[0]
        found = [a["found"] / a["claimed"], noise, c["found"], c["claimed"], e["found"], f["found"]]
        rows.append([name, *found, "stands" if all(v["ok"] for v in audit) else "REFUTED"])
    return Table(
        "Audited systems",
        ("system", *HEADERS, "verdict"),
        rows,
        "A: largest distance of two neighbouring sums, over what the event says. B: noise over the claim, the worst of "
        f"all tensors. C: lower bound on mu from {bench.count('runs')} runs in each world, and mu by the ledger's "
        "epsilon. E: share of outputs beside the public grid. F: largest correlation of two rounds' noise. That a "
        "claim stands is no proof of it.",
    )


def _run_table(runs: Mapping[str, Audit]) -> Table:
    rows: list[list[Any]] = []
    for name, audit in runs.items():
        v = audit[0]
        verdict = "stands" if v["ok"] else "REFUTED"
        rows.append([name, v["trials"], v["part"], v["claimed"], v["found"], verdict])
    return Table(
        "D: one run with many canaries",
        ("sum", "canaries", "guesses", "epsilon claimed", "epsilon >=", "verdict"),
        rows,
        "Fair coins decide which canaries are in (Steinke, Nasr, Jagielski 2023). 100 guesses, all of them right, "
        "show an epsilon of 3.47 and no more: an alarm for gross mistakes. The last row is meant to be refuted.",
    )


def _worst(audit: Audit) -> dict[str, Any]:
    """Return the verdict that fails, or else the one farthest from its claim."""
    failed = [verdict for verdict in audit if not verdict["ok"]]
    return (failed or audit)[0]


def _mutant_table(mutants: Mapping[str, Mapping[str, Any]]) -> Table:
    rows: list[list[Any]] = []
    for name, mutant in mutants.items():
        wrong = _worst(mutant["mutated"])
        right = next((v for v in mutant["original"] if v["part"] == wrong["part"]), mutant["original"][0])
        shown = [wrong["measure"], wrong["claimed"], right["found"], wrong["found"]]
        rows.append([name, mutant["wrong"], mutant["tier"], *shown, _caught(mutant)])
    return Table(
        "Mutants",
        ("mutant", "what is wrong", "tier", "measure", "claimed", "original", "mutant", "caught"),
        rows,
        "One thing changed in a class of the project each, audited beside the original on the same data. Caught: the "
        "tier refutes the mutant and not the original.",
    )


def _caught(mutant: Mapping[str, Any]) -> bool:
    return all(v["ok"] for v in mutant["original"]) and not all(v["ok"] for v in mutant["mutated"])


def _float_table(floats: Mapping[str, list[float]], flower: Mapping[str, Any]) -> Table:
    rows: list[list[Any]] = [[name, *shares, shares[0] - shares[1]] for name, shares in floats.items()]
    zero, one = flower["bits"]
    rows.insert(2, [f"Flower {flower['version']}, fixed clipping", zero, one, zero - one])
    return Table(
        "What the last bits tell",
        ("noise", "value 0", "value 1", "difference"),
        rows,
        "Share of outputs that are no multiple of the last bit of a number beside 1 (Mironov 2012), one coordinate "
        "with unit noise. Whoever sees such an output knows that the value was 0.",
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
        "Replies made by hand, handed to the wrappers. Their noise comes from numpy's global generator, so the last "
        "digits vary. LocalDpMod: delta 1e-5, sensitivity set to the clip norm.",
    )


def _clip_figure(flower: Mapping[str, Any]) -> Curves:
    series = []
    for whose, clips in ((f"Flower {flower['version']}", flower["clips"]), ("ours", flower["ours"])):
        series += [Series(f"{whose}, from {start}", range(len(c)), c) for start, c in clips.items()]
    return Curves(
        "Adaptive clip norm, updates of median norm 1",
        "round",
        "clip norm",
        series,
        log_y=True,
        caption="No noise; 20 clients, the median is aimed at.",
    )


def _values(
    audits: Mapping[str, Audit],
    runs: Mapping[str, Audit],
    mutants: Mapping[str, Mapping[str, Any]],
    floats: Mapping[str, list[float]],
    flower: Mapping[str, Any],
) -> dict[str, float]:
    out: dict[str, float] = {}
    for tier in TIERS:
        found = [v for audit in audits.values() for v in _by_tier(audit, tier)]
        out[f"refuted/{tier}"] = sum(not v["ok"] for v in found) if found else math.nan
    attacks = [_by_tier(audit, "C")[0] for audit in audits.values()]
    out["least seen"] = min(v["found"] / v["claimed"] for v in attacks)
    out["one run, refuted"] = sum(not runs[kind][0]["ok"] for kind in ("votes", "clipped vectors"))
    out["one run, no noise refuted"] = float(not runs["no noise"][0]["ok"])
    out["mutants"] = len(mutants)
    out["mutants missed"] = sum(not _caught(mutant) for mutant in mutants.values())
    ours = floats["integer noise on the grid"]
    out["bits, ours"] = largest(ours)
    out["bits, float"] = min(zero - one for name, (zero, one) in floats.items() if name != "integer noise on the grid")
    ends = [clips[-1] for clips in flower["clips"].values()]
    out["Flower's clip norm"] = min(max(end, 1.0 / end) for end in ends)
    out["our clip norm"] = largest(max(c[-1], 1.0 / c[-1]) for c in flower["ours"].values())
    out["Flower's integers"] = flower["moved"][1]
    out["Flower's NaN"] = flower["nan"]
    out["Flower's zero update"] = float(bool(flower["zero"]))
    return out


def claims(config: Config, results: Mapping[str, RunResult], findings: Findings) -> list[Claim]:
    """Nothing is refuted, every mutant is caught, no last bit tells anything; and what the installed Flower does."""
    from fedcomp.privacy.audit import power

    v = findings.values
    promise, flower = "every system's own claim", "measured on Flower 1.41.0; another version may have mended it"
    out = [Claim(f"tier {tier}: verdicts against a system", v[f"refuted/{tier}"], "==", 0, promise) for tier in TIERS]
    found, _ = power(math.sqrt(2.0), 1.0, 2000)
    out += [
        Claim("tier D: one-run audits against a system", v["one run, refuted"], "==", 0, promise),
        Claim("tier D: noise that was forgotten is noticed", v["one run, no noise refuted"], "==", 1, "goal"),
        Claim(
            "tier C: weakest attack's bound over mu", v["least seen"], ">=", 0.2, "an attack that sees nothing is none"
        ),
        Claim("mutants not told from their originals", v["mutants missed"], "==", 0, "goal: every one is caught"),
        Claim("mutants tried", v["mutants"], ">=", 19, "15 published mistakes and four more"),
        Claim("2000 runs: probability that sqrt(2) for 1 is noticed", found, ">=", 0.99, "computed"),
        Claim("integer noise: outputs that tell 0 from 1", v["bits, ours"], "==", 0, "derived: all lie on one grid"),
        Claim("float noise: outputs that tell 0 from 1", v["bits, float"], ">=", 0.2, "measured: a quarter of them"),
        Claim("our adaptive clip norm, factor from the median", v["our clip norm"], "<=", 1.1, "the published rule"),
    ]
    for name, key, op, bound in (
        ("Flower: adaptive clip norm, smallest factor from the median", "Flower's clip norm", ">=", 10.0),
        ("Flower: share of integers that local noise moved", "Flower's integers", "==", 0.0),
        ("Flower: one client's NaN is in the mean", "Flower's NaN", ">", 0.0),
        ("Flower: an unchanged model ends the round", "Flower's zero update", "==", 1.0),
    ):
        out.append(Claim(name, v[key], op, bound, flower, gate=False))
    return out


def answer(config: Config, results: Mapping[str, RunResult], findings: Findings) -> str:
    """Return what came out, in this run's figures."""
    v = findings.values
    refuted = sum(v[f"refuted/{tier}"] for tier in TIERS) + v["one run, refuted"]
    return (
        f"{refuted:.0f} attacks refute what a system says of itself; {v['mutants'] - v['mutants missed']:.0f} of "
        f"{v['mutants']:.0f} wrong variants are caught."
    )


EXPERIMENT = Experiment(
    name="privacy_audit",
    question="Does any private system give away more than it says, and would we notice if it did?",
    rows=no_rows,
    measure=judged(measure, claims, answer),
    options=OPTIONS,
    rounds=0,
    clients=1,
    minutes=0.75,
    quick=(
        "runs=60",
        "noise_runs=5",
        "canaries=150",
        "guesses=40",
        "clip_rounds=8",
        "float_draws=2000",
    ),
    engines=("inprocess",),
    notes=(
        "Every system runs on the code a training runs, thousands of times, in two worlds that differ by one unit. An "
        "attacker who knows everything else tries to tell them apart. What he achieves is a lower bound on what the "
        "system gives away; where it exceeds the ledger's claim, the claim is refuted. An audit refutes, it proves "
        "nothing.\n\n"
        "Noise comes from the run's seed here, or nothing could be repeated; tests have it from the operating system, "
        "too. What is measured of Flower contains noise of numpy's global generator and varies a little.\n\n"
        "mu is the parameter of Gaussian differential privacy: telling the two worlds apart is as hard as telling "
        "N(0, 1) from N(mu, 1). With noise multiplier z, one release has mu = 1 / z."
    ),
)
