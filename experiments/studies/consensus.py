"""Consensus without gradients: rate per topology and compressor, and what a digit of agreement costs in bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.experiments.averaging import FLOOR, Track, average, by_matrices, starts
from fedcomp.experiments.decentralised import Energy
from fedcomp.experiments.findings import Curves, HeatMap, Series, Table, largest
from fedcomp.experiments.kit import Records, curves, table
from fedcomp.experiments.options import Config
from fedcomp.experiments.studies.push_sum_variants import COMPRESSED, averaged
from fedcomp.experiments.tables import Found, Studied
from fedcomp.gossip.errors import TopologyError
from fedcomp.gossip.topology import Edges, Topology, topology_of
from fedcomp.gossip.vector import GossipPolicy
from fedcomp.layout import Layout
from fedcomp.rng import Key

UNBALANCED: Final = "unbalanced"
DIGRAPH: Final = "digraph"
UNDIRECTED: Final = ("ring", "torus", "complete")
DIRECTED: Final = ("directed-ring", "exponential", "one-peer", UNBALANCED, DIGRAPH)

# Too large diverges, too small only slows; each is a compromise found for 8 nodes and messages of a tenth.
GAMMAS: Final[Mapping[str, float]] = {
    "ring": 0.2,
    "torus": 0.15,
    "directed-ring": 0.1,
    "exponential": 0.15,
    "one-peer": 0.15,
    UNBALANCED: 0.15,
    DIGRAPH: 0.1,
}
"""Consensus steps of Sparse-Push for messages of one tenth."""

# From steps that only slow to steps that diverge, a factor of two apart.
SWEEP: Final = (0.05, 0.1, 0.2, 0.4)
VARIANT_GAMMAS: Final = (0.02, 0.05, 0.1, 0.2)
VARIANT_GRAPHS: Final = ("exponential", UNBALANCED, DIGRAPH)

SPARSE_PUSH: Final = "Sparse-Push"
CHOCO_TOP: Final = "CHOCO, top-k"
SQUEEZE: Final = "DeepSqueeze, top-k"


def graph_of(name: str, n: int, config: Config) -> Topology:
    """Return a graph of the experiment; raises :class:`TopologyError` for a torus that n does not fill."""
    # A ring with shortcuts from every second and every third node: out-degrees differ, so that push-sum's weights leave
    # 1 and dividing by them matters.
    if name == UNBALANCED:
        edges = {(i, (i + 1) % n) for i in range(n)}
        edges |= {(i, (i + 2) % n) for i in range(0, n, 2)} | {(i, (i + 3) % n) for i in range(0, n, 3)}
        return Edges(n, sorted(edges))
    return topology_of("digraph:0.3" if name == DIGRAPH else name, n, config.seed)


def possible(names: Sequence[str], n: int, config: Config) -> list[str]:
    """Return the graphs that n nodes can form."""
    found = []
    for name in names:
        # A torus needs a number of nodes that is no prime: it is left out, and everything else must be possible.
        try:
            graph_of(name, n, config)
        except TopologyError:
            if name != "torus":
                raise
        else:
            found.append(name)
    return found


def _values(config: Config, nodes: int, size: int) -> NDArray[np.float64]:
    # By number of nodes and nothing else: every algorithm and graph of n nodes begins with the same vectors.
    return starts(Key(config.seed, "consensus", nodes), nodes, size)


def run(
    row: str,
    graph: str,
    nodes: int,
    *,
    config: Config,
    runs: Mapping[tuple[str, str, int], Mapping[str, Any]],
) -> dict[str, Any]:
    """Average vectors, or matrices of ``side`` rows where the run has one; return a :class:`Track`'s fields."""
    made = dict(runs[row, graph, nodes])
    algorithm, rounds, side = made.pop("algorithm"), made.pop("rounds"), made.pop("side", 0)
    # Matrices keep their shape for PowerGossip; a vector is one flat tensor. Nothing stays dense: a message is meant to
    # be short.
    shape = {"m": np.zeros((side, side))}
    layout = Layout.of(shape, GossipPolicy(dense_below=0)) if side else Layout.flat(int(config.settings["size"]))
    values = _values(config, nodes, layout.size)
    return asdict(
        average(algorithm, graph_of(graph, nodes, config), values, rounds, layout=layout, seed=config.seed, **made)
    )


def vary(kind: str, graph: str, gamma: float, *, config: Config) -> dict[str, Any]:
    """Return the errors of a variant of compressed push-sum, after 0, 1, ... rounds."""
    n, rounds = config.clients, int(config.settings["variant_rounds"])
    made = graph_of(graph, n, config)
    # A graph that never repeats needs a matrix for each round.
    known = [made.mixing_matrix(t, symmetric=False) for t in range(made.period or rounds)]
    values = _values(config, n, int(config.settings["size"]))
    return {"errors": averaged(kind, known, values, int(config.settings["k"]), gamma, rounds)}


def foretell(graph: str, nodes: int, *, config: Config) -> dict[str, Any]:
    """Return a graph's rate by its matrices, the rounds that show it, and the errors that their products give."""
    made, symmetric = graph_of(graph, nodes, config), graph in UNDIRECTED
    rate = made.mixing_rate(symmetric)
    # As many rounds as bring the error to the floor, and a fifth more; beyond it there is rounding to fit a line to.
    needed = 1.2 * math.log(FLOOR) / math.log(rate) if 0.0 < rate < 1.0 else 0.0
    rounds = max(12, min(int(config.settings["dense_rounds"]), math.ceil(needed)))
    values = _values(config, nodes, int(config.settings["size"]))
    return {"rate": rate, "rounds": rounds, "errors": by_matrices(made, values, rounds, symmetric=symmetric)}


Cell = tuple[str, str, int]
"""System, graph, nodes."""

Runs = dict[Cell, dict[str, Any]]


def compressed_runs(config: Config) -> Runs:
    """Return what is compressed; half as long on graphs that come to rounding in half the time."""
    n, density = config.clients, int(config.settings["k"]) / int(config.settings["size"])
    out: Runs = {}

    def scaled(gamma: float) -> float:
        # With the square root of the density, as the automatic rule of Sparse-Push: a guess away from a tenth, at which
        # the steps were tried. Above 1 a node would overshoot its neighbours.
        return min(1.0, gamma * math.sqrt(density / 0.1))

    def add(label: str, graph: str, algorithm: dict[str, Any], nodes: int = n) -> None:
        half = graph in ("exponential", "torus", "complete")
        out[label, graph, nodes] = {"algorithm": algorithm, "rounds": config.rounds // 2 if half else config.rounds}

    def push(graph: str, estimates: str = "edge") -> dict[str, Any]:
        return {"name": "sparse-push", "density": density, "gamma": scaled(GAMMAS[graph]), "estimates": estimates}

    for graph in possible([*DIRECTED, "ring", "torus"], n, config):
        add(SPARSE_PUSH, graph, push(graph))
    add(f"{SPARSE_PUSH}, broadcast", "exponential", push("exponential", "broadcast"))
    for graph in ("exponential", "one-peer"):
        add(SPARSE_PUSH, graph, push(graph), 2 * n)
    for graph in ("directed-ring", "exponential", "one-peer", DIGRAPH):
        add("coordinate push", graph, {"name": "coordinate-push", "density": density})
    top = {"id": "topk", "density": density}
    # Tried on the ring of 8, the best of three or four.
    for label, gamma, compressor in (
        (CHOCO_TOP, scaled(0.2), top),
        ("CHOCO, top-2k", scaled(0.4), {**top, "density": min(1.0, 2.0 * density)}),
        ("CHOCO, random k", scaled(0.1), {"id": "randomk", "density": density, "shared": False}),
        ("CHOCO, sign times mean", 0.2, {"id": "scaledsign"}),
        ("CHOCO, sign times half maximum", 0.4, {"id": "normsign"}),
        ("CHOCO, dithered, 2 bits", 0.6, {"id": "dithering", "bits": 2}),
    ):
        add(label, "ring", {"name": "choco", "gamma": gamma, "compressor": compressor})
    for graph in possible(["torus", "complete"], n, config):
        add(CHOCO_TOP, graph, {"name": "choco", "gamma": scaled(0.15), "compressor": top})
    for gamma in VARIANT_GAMMAS:
        own = {"name": "deepsqueeze", "gamma": scaled(gamma), "compressor": top}
        add(f"{SQUEEZE}, gamma {own['gamma']:.3g}", "ring", own)
    return out


def matrix_runs(config: Config) -> Runs:
    """Return runs on matrices over the ring: PowerGossip, and CHOCO with messages about as long."""
    side = int(config.settings["matrix"])
    # float32 on the wire, as CHOCO's messages have it: the comparison is by bytes. 4 bytes a value against 4 and an
    # index of about 1.
    power = {"name": "power-gossip", "values": "float32"}
    top = {"id": "topk", "density": max(1, round(side * 4 / 5)) / side**2}
    long: dict[str, Any] = {"rounds": config.rounds, "side": side}
    # Their rates are all that is asked of them, and with a look after every round these are points enough for a line.
    short = {"rounds": min(config.rounds, 40), "side": side, "every": 1, "late": 0.5}
    made: dict[str, dict[str, Any]] = {
        **{f"PowerGossip, rank {r}": {"algorithm": {**power, "rank": r}, **long} for r in (1, 2)},
        # PowerGossip has no step to tune, so that CHOCO is shown below, at and beyond its best one.
        **{
            f"CHOCO, same bytes, gamma {g:g}": {
                "algorithm": {"name": "choco", "gamma": g, "compressor": top},
                **long,
            }
            for g in (0.02, 0.1, 0.4)
        },
        "PowerGossip, full rank": {"algorithm": {"name": "power-gossip", "rank": side}, **short},
        "D-PSGD on matrices": {"algorithm": {"name": "dpsgd"}, **short},
    }
    return {(label, "ring", config.clients): own for label, own in made.items()}


def sweep_runs(config: Config) -> dict[str, Runs]:
    """Return short runs by consensus step."""
    rounds, n = int(config.settings["sweep_rounds"]), config.clients
    top = {"compressor": {"id": "topk", "density": int(config.settings["k"]) / int(config.settings["size"])}}
    rows: list[tuple[str, str, dict[str, Any]]] = [
        *((SPARSE_PUSH, graph, {"name": "sparse-push", "density": top["compressor"]["density"]}) for graph in DIRECTED),
        (CHOCO_TOP, "ring", {"name": "choco", **top}),
        (SQUEEZE, "ring", {"name": "deepsqueeze", **top}),
    ]
    return {
        f"{label}, {graph}": {
            (f"{label}, gamma {gamma:g}", graph, n): {"algorithm": {**own, "gamma": gamma}, "rounds": rounds}
            for gamma in SWEEP
        }
        for label, graph, own in rows
    }


def study(found: Found) -> Studied:
    """Average everything, beside what matrices and theory say.

    Raises
    ------
    ConfigError
        When there are too few nodes for the graphs, or a message would hold more than all elements.
    """
    config, n = found.config, found.config.clients
    energy = Energy.of(config.settings)
    if n < 4:
        raise ConfigError(f"--clients must be at least 4 for this experiment, not {n}")
    size, k = int(config.settings["size"]), int(config.settings["k"])
    if k > size:
        raise ConfigError(f"k={k} exceeds size={size}; a message holds at most all elements")

    def tracks(runs: Runs, title: str) -> dict[Cell, Track]:
        cells = [dict(zip(("row", "graph", "nodes"), cell, strict=True)) for cell in runs]
        done = found.sweep(run, cells, title, config=config, runs=runs)
        return {cell: record.read(Track) for cell, record in zip(runs, done, strict=True)}

    asked = [
        {"graph": graph, "nodes": nodes}
        for nodes in (n, 2 * n)
        for graph in possible((*UNDIRECTED, *DIRECTED), nodes, config)
    ]
    theory = {
        ("D-PSGD" if each.graph in UNDIRECTED else "SGP", each.graph, each.nodes): each
        for each in found.sweep(foretell, asked, "theory", config=config)
    }
    # As many rounds as theory says and a look after each: a fast graph has few points before rounding.
    dense = tracks(
        {
            cell: {
                "algorithm": {"name": "dpsgd" if cell[0] == "D-PSGD" else "sgp"},
                "rounds": each.rounds,
                "every": 1,
                "late": 0.5,
            }
            for cell, each in theory.items()
        },
        "dense",
    )
    products = largest(
        abs(error / known - 1.0)
        for cell, each in theory.items()
        for error, known in zip(dense[cell].errors, each.errors, strict=True)
        # Rounding is about 1e-16: of a smaller error it would be a visible part of the 1e-6 that is claimed.
        if known > 1e-9
    )
    # A line through the few points before exact averaging means nothing.
    dense = {
        cell: replace(track, rate=0.0) if theory[cell].rate == 0.0 and track.final <= FLOOR else track
        for cell, track in dense.items()
    }
    runs, rates = compressed_runs(config), {cell: each.rate for cell, each in theory.items()}
    compressed = tracks(runs, "compressed")
    on_matrices = tracks(matrix_runs(config), "matrices")
    matrices = {label: track for (label, _, _), track in on_matrices.items()}
    sweep = {row: [t.final for t in tracks(own, "sweep").values()] for row, own in sweep_runs(config).items()}
    axes = {"kind": COMPRESSED, "graph": VARIANT_GRAPHS, "gamma": VARIANT_GAMMAS}
    variants = found.sweep(vary, axes, "variant", config=config)
    gammas = {cell: own["algorithm"].get("gamma") for cell, own in runs.items()}
    return Studied(
        {
            "dense: largest difference from the products of the matrices": products,
            **_of_theory(dense, rates, [*dense.values(), *compressed.values(), *matrices.values()], n),
            **_of_compression(compressed, matrices, n),
            **_of_variants(variants),
        },
        tables=[
            _table(
                "Without compression",
                dense,
                {"rate by matrices": rates.get},
                energy,
                "Error: distance of all models from the mean of the first ones, relative to what it was. Rate: factor "
                "per round, fitted; 0 is exact averaging in finitely many rounds. By matrices: second eigenvalue, on "
                "the random digraph the second Lyapunov exponent. Digits: decimal digits of error removed per kB a "
                "node sends. float64 throughout.",
            ),
            *(
                _table(
                    f"Compressed, {'un' if undirected else ''}directed graphs",
                    {cell: track for cell, track in compressed.items() if (cell[1] in UNDIRECTED) == undirected},
                    {"gamma": gammas.get, "R²": lambda cell: compressed[cell].r2},
                    energy,
                    "As above. Bytes are those of real messages, header, share and digests included; values travel as "
                    "float32, but for coordinate push, which sends float64. Where R² is small the error does not fall "
                    "along a line: it has stopped.",
                )
                for undirected in (False, True)
            ),
            _table(
                "Matrices on the ring",
                on_matrices,
                {"rounds": lambda cell: on_matrices[cell].rounds[-1] if on_matrices[cell].rounds else 0},
                energy,
                "Random matrices, which no low rank describes. PowerGossip has no step size to tune.",
            ),
            _variant_table(variants),
            _sums_table({**dense, **compressed, **on_matrices}),
        ],
        figures=_figures(dense, compressed, matrices, variants, sweep, config),
    )


def best(variants: Records, kind: str, graph: str) -> Any:
    """Return the variant whose last error is the smallest."""
    return min(variants.where(kind=kind, graph=graph), key=lambda record: float(record.errors[-1]))


def _squeezed(compressed: Mapping[Cell, Track]) -> float:
    return min(track.final for (label, _, _), track in compressed.items() if label.startswith(SQUEEZE))


def off(rate: float, expected: float) -> float:
    """Return the relative difference of two rates' logarithms, which are what rounds are proportional to."""
    # NaN fails every claim: a rate that is no rate must not pass as equal.
    return abs(math.log(rate) / math.log(expected) - 1.0) if 0.0 < rate < math.inf else math.nan


def _of_theory(
    dense: Mapping[Cell, Track], rates: Mapping[Cell, float], every: Sequence[Track], n: int
) -> dict[str, float]:
    """Return what theory says of dense rounds, and what is conserved in all."""
    differences = {cell: off(dense[cell].rate, rate) for cell, rate in rates.items() if rate > 0.0}
    # A run that diverged has no sums to speak of: nothing but its errors is known.
    ended = [track for track in every if not track.diverged]
    out = {}
    for words, nodes in (("", n), (", twice the nodes", 2 * n)):
        # A complete graph averages in its first round, powers of two in log2 n of the one-peer graph; all later errors
        # are rounding.
        out[f"complete{words}, dense: error after one round"] = dense["D-PSGD", "complete", nodes].errors[1]
        if not nodes & (nodes - 1):
            log = int(math.log2(nodes))
            out[f"one-peer{words}, dense: error after log2 n rounds"] = dense["SGP", "one-peer", nodes].errors[log]
    slope = "dense: relative difference of slope and log of the second eigenvalue, largest of all graphs"
    return {
        **out,
        slope: largest(value for cell, value in differences.items() if cell[1] != DIGRAPH),
        "dense: relative difference of slope and Lyapunov exponent, random digraphs": largest(
            value for cell, value in differences.items() if cell[1] == DIGRAPH
        ),
        "sums over all nodes: largest change of a coordinate in any run": largest(track.moved for track in ended),
        "push-sum: largest change of the sum of w in any run": largest(track.weights for track in ended),
        "unbalanced digraph, dense: error of z": dense["SGP", UNBALANCED, n].final,
        "unbalanced digraph, dense: error of x, not divided by w": dense["SGP", UNBALANCED, n].biased,
    }


def _of_compression(compressed: Mapping[Cell, Track], matrices: Mapping[str, Track], n: int) -> dict[Any, float]:
    """Return what converges under compression and what does not."""
    out: dict[Any, float] = {}
    for (label, graph, nodes), track in compressed.items():
        if nodes == n:
            out[f"{label}, {graph}", "rate"], out[f"{label}, {graph}", "last error"] = track.rate, track.final
    return {
        **out,
        (SQUEEZE, "last error at the best gamma"): _squeezed(compressed),
        ("PowerGossip, rank 1", "last error"): matrices["PowerGossip, rank 1"].final,
        ("PowerGossip, full rank", "relative difference of its slope and D-PSGD's"): off(
            matrices["PowerGossip, full rank"].rate, matrices["D-PSGD on matrices"].rate
        ),
    }


def _of_variants(variants: Records) -> dict[Any, float]:
    """Return the last errors of variants of compressed push-sum, of which one converges."""
    kept, _, right = COMPRESSED
    out: dict[Any, float] = {}
    for graph in VARIANT_GRAPHS:
        for kind in COMPRESSED:
            out[f"push-sum, {kind}", f"last error, {graph}"] = best(variants, kind, graph).errors[-1]
        # A smaller step stops lower, so that an error by itself depends on the grid; its ratio to the right one does
        # not.
        ratio = best(variants, kept, graph).errors[-1] / best(variants, right, graph).errors[-1]
        out[f"push-sum, {kept}", f"last error, times that of {right}, {graph}"] = ratio
    return out


def _table(title: str, tracks: Mapping[Cell, Track], own: Mapping[str, Any], energy: Energy, caption: str) -> Table:
    columns: dict[str, Any] = {
        "algorithm, graph": lambda cell: f"{cell[0].partition(', gamma')[0] if 'gamma' in own else cell[0]}, {cell[1]}",
        "nodes": lambda cell: cell[2],
        **own,
        "rate": lambda cell: tracks[cell].rate,
        "last error": lambda cell: tracks[cell].final,
        "bytes a message": lambda cell: tracks[cell].message,
        "digits per kB": lambda cell: tracks[cell].digits,
        "joules per digit": lambda cell: tracks[cell].joules(energy.per_byte),
    }
    # Joules are shown only where the energy of a byte is given.
    return table(title, columns, tracks, caption, optional=("joules per digit",))


def _sums_table(tracks: Mapping[Cell, Track]) -> Table:
    columns: dict[str, Any] = {
        "run": lambda run: f"{run[0][0].partition(', gamma')[0]}, {run[0][1]}, {run[0][2]} nodes",
        "bytes a node, round": lambda run: run[1].sent,
        "sum moved": lambda run: run[1].moved,
        "sum of w moved": lambda run: run[1].weights,
        "least w": lambda run: run[1].least,
        "largest w": lambda run: run[1].most,
        "last error of x": lambda run: run[1].biased,
    }
    return table(
        "What is conserved",
        columns,
        tracks.items(),
        "Sum moved: largest coordinate by which the sum over all nodes differs from that of the first vectors. w are "
        "push-sum's weights at the end. Error of x: of the numerators, without dividing by w.",
    )


def _variant_table(variants: Records) -> Table:
    columns: dict[str, Any] = {"what travels as top-k, graph": lambda row: f"{row[0].kind}, {row[0].graph}"} | {
        # Bound as a default: a closure would see the last gamma of the loop only.
        f"gamma {gamma:g}": (lambda row, gamma=gamma: row.one(gamma=gamma).errors[-1])
        for gamma in VARIANT_GAMMAS
    }
    return table(
        "What may be compressed in push-sum",
        columns,
        variants.groups("kind", "graph").values(),
        "Last relative errors, computed on matrices. Without estimates a smaller gamma stops later and lower. On a "
        "graph that changes w and x never settle, z does; a gap is divergence.",
    )


def _figures(
    dense: Mapping[Cell, Track],
    compressed: Mapping[Cell, Track],
    matrices: Mapping[str, Track],
    variants: Records,
    sweep: Mapping[str, Sequence[float]],
    config: Config,
) -> list[Curves | HeatMap]:
    def against_rounds(title: str, tracks: Mapping[Cell, Track]) -> Curves:
        series = [Series(c[1], t.rounds, t.errors) for c, t in tracks.items() if c[2] == config.clients]
        return Curves(f"{title}, {config.clients} nodes", "round", "relative error", series, log_y=True)

    def against_bytes(title: str, tracks: Mapping[str, Track]) -> Curves:
        series = [Series(label, t.spent[1:], t.errors[1:]) for label, t in tracks.items() if not t.diverged]
        return Curves(title, "bytes a node has sent", "relative error", series, log_y=True, x_bytes=True)

    def sampled(values: Sequence[float]) -> list[float]:
        return list(values[:: max(1, len(values) // 150)])

    # One of DeepSqueeze's runs is enough in the figure; all of them are in the table.
    squeezes = [label for label, _, _ in compressed if label.startswith(SQUEEZE)]
    ring = {"D-PSGD": dense["D-PSGD", "ring", config.clients]}
    ring |= {c[0]: t for c, t in compressed.items() if c[1] == "ring" and c[0] not in squeezes[1:]}
    return [
        against_rounds("Without compression", dense),
        against_rounds("Sparse-Push by graph", {c: t for c, t in compressed.items() if c[0] == SPARSE_PUSH}),
        against_bytes("On the ring", ring),
        against_bytes("Matrices on the ring", matrices),
        curves(
            "Push-sum on the random digraph, best gamma",
            [best(variants, kind, DIGRAPH) for kind in COMPRESSED],
            lambda record: sampled(range(len(record.errors))),
            lambda record: sampled(record.errors),
            "kind",
            x_label="round",
            y_label="relative error",
            log_y=True,
        ),
        HeatMap(
            f"Relative error after {config.settings['sweep_rounds']} rounds",
            [f"{gamma:g}" for gamma in SWEEP],
            list(sweep),
            list(sweep.values()),
            "by consensus step",
            log=True,
            caption="Deeper is worse, a gap is divergence. Too large diverges, too small only slows.",
        ),
    ]
