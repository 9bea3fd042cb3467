"""Consensus without gradients: the rate per topology and compressor, and bytes per digit of agreement."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.experiments.averaging import FLOOR, average
from fedcomp.experiments.decentralised import Energy
from fedcomp.experiments.findings import largest
from fedcomp.experiments.kit import Record, Records, curves, table
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

# Too large a step diverges, too small a step is only slow. Each was tuned for 8 nodes and messages of a tenth.
GAMMAS: Final[Mapping[str, float]] = {
    "directed-ring": 0.1,
    "exponential": 0.15,
    "one-peer": 0.15,
    UNBALANCED: 0.15,
    DIGRAPH: 0.1,
    "ring": 0.2,
    "torus": 0.15,
}
"""Consensus steps of Sparse-Push for messages of one tenth."""

VARIANT_GAMMAS: Final = (0.02, 0.05, 0.1, 0.2)
VARIANT_GRAPHS: Final = ("exponential", UNBALANCED, DIGRAPH)

SPARSE_PUSH: Final = "Sparse-Push"
SQUEEZE: Final = "DeepSqueeze, top-k"

Cell = tuple[str, str, int]
"""System, graph, nodes."""

Runs = dict[Cell, dict[str, Any]]
"""``algorithm`` and ``rounds``, and where they differ from the defaults, the ``side`` of matrices and ``every`` and
``late`` of an average."""


def graph_of(name: str, n: int, config: Config) -> Topology:
    """Return a graph of the experiment. Raises :class:`TopologyError` for a torus that n nodes cannot fill."""
    # A ring with shortcuts from every second and every third node. Out-degrees differ, so push-sum's weights leave 1
    # and dividing by them matters.
    if name == UNBALANCED:
        edges = {(i, (i + 1) % n) for i in range(n)}
        edges |= {(i, (i + 2) % n) for i in range(0, n, 2)} | {(i, (i + 3) % n) for i in range(0, n, 3)}
        return Edges(n, sorted(edges))
    return topology_of("digraph:0.3" if name == DIGRAPH else name, n, config.seed)


def possible(names: Sequence[str], n: int, config: Config) -> list[str]:
    """Return the graphs that n nodes can form."""
    found = []
    for name in names:
        # A torus is impossible for a prime number of nodes and is left out then; all others must be possible.
        try:
            graph_of(name, n, config)
        except TopologyError:
            if name != "torus":
                raise
        else:
            found.append(name)
    return found


def _values(config: Config, nodes: int, size: int) -> NDArray[np.float64]:
    # Only the number of nodes is in the key: every algorithm and graph of n nodes starts with the same vectors.
    return Key(config.seed, "consensus", nodes).generator().standard_normal((nodes, size))


def run(row: str, graph: str, nodes: int, *, config: Config, runs: Runs) -> dict[str, Any]:
    """Average vectors, or matrices of ``side`` rows if the run has a side."""
    made = dict(runs[row, graph, nodes])
    algorithm, rounds, side = made.pop("algorithm"), made.pop("rounds"), made.pop("side", 0)
    # Matrices keep their shape for PowerGossip; a vector is one flat tensor. Nothing stays dense, because messages
    # should be small.
    shape = {"m": np.zeros((side, side))}
    layout = Layout.of(shape, GossipPolicy(dense_below=0)) if side else Layout.flat(int(config.settings["size"]))
    values = _values(config, nodes, layout.size)
    return average(algorithm, graph_of(graph, nodes, config), values, rounds, layout=layout, seed=config.seed, **made)


def vary(kind: str, graph: str, gamma: float, *, config: Config) -> dict[str, Any]:
    """Return the last error of a variant of compressed push-sum."""
    n, rounds = config.clients, int(config.settings["variant_rounds"])
    made = graph_of(graph, n, config)
    # A graph that never repeats needs one matrix per round.
    known = [made.mixing_matrix(t, symmetric=False) for t in range(made.period or rounds)]
    values = _values(config, n, int(config.settings["size"]))
    return {"last": averaged(kind, known, values, int(config.settings["k"]), gamma, rounds)[-1]}


def foretell(graph: str, nodes: int, *, config: Config) -> dict[str, Any]:
    """Return a graph's rate by its matrices, the rounds needed to see it, and the errors from products of the
    matrices."""
    made, symmetric = graph_of(graph, nodes, config), graph in UNDIRECTED
    rate = made.mixing_rate(symmetric)
    # A fifth more rounds than bring the error to the floor; later rounds would only fit a line to rounding errors.
    needed = 1.2 * math.log(FLOOR) / math.log(rate) if 0.0 < rate < 1.0 else 0.0
    rounds = max(12, min(int(config.settings["dense_rounds"]), math.ceil(needed)))
    values = _values(config, nodes, int(config.settings["size"]))
    return {"rate": rate, "rounds": rounds, "errors": by_matrices(made, values, rounds, symmetric)}


def by_matrices(graph: Topology, values: NDArray[np.float64], rounds: int, symmetric: bool) -> list[float]:
    """Return the relative errors of uncompressed averaging after 0, 1, ... rounds, from the products of matrices."""
    # Weights are always used. Where W needs none they stay 1, and the division changes nothing.
    mean, x, w = values.mean(axis=0), values, np.ones(graph.n)
    errors = []
    for t in range(rounds + 1):
        errors.append(float(np.linalg.norm(x / w[:, None] - mean)))
        p = graph.mixing_matrix(t, symmetric=symmetric)
        x, w = p @ x, p @ w
    return [error / errors[0] for error in errors]


def compressed_runs(config: Config) -> Runs:
    """Return the compressed runs, half as long on graphs that reach rounding error in half the time."""
    n, density = config.clients, int(config.settings["k"]) / int(config.settings["size"])
    out: Runs = {}

    def scaled(gamma: float) -> float:
        # Proportional to the square root of the density, as in the automatic rule of Sparse-Push. This is a guess for
        # densities other than a tenth, at which the steps were tuned. Above 1 a node would overshoot its neighbours.
        return min(1.0, gamma * math.sqrt(density / 0.1))

    def add(label: str, graph: str, name: str, nodes: int = n, **options: Any) -> None:
        half = graph in ("exponential", "torus", "complete")
        rounds = config.rounds // 2 if half else config.rounds
        out[label, graph, nodes] = {"algorithm": {"name": name, **options}, "rounds": rounds}

    def push(label: str, graph: str, nodes: int = n, estimates: str = "edge") -> None:
        add(label, graph, "sparse-push", nodes, density=density, gamma=scaled(GAMMAS[graph]), estimates=estimates)

    for graph in possible([*GAMMAS], n, config):
        push(SPARSE_PUSH, graph)
    push(f"{SPARSE_PUSH}, broadcast", "exponential", estimates="broadcast")
    for graph in ("exponential", "one-peer"):
        push(SPARSE_PUSH, graph, 2 * n)
    for graph in ("directed-ring", "exponential", "one-peer", DIGRAPH):
        add("coordinate push", graph, "coordinate-push", density=density)
    top = {"id": "topk", "density": density}
    # The best of three or four values on the ring of 8.
    for label, gamma, compressor in (
        ("CHOCO, top-k", scaled(0.2), top),
        ("CHOCO, top-2k", scaled(0.4), {**top, "density": min(1.0, 2.0 * density)}),
        ("CHOCO, random k", scaled(0.1), {"id": "randomk", "density": density, "shared": False}),
        ("CHOCO, sign times mean", 0.2, {"id": "scaledsign"}),
        ("CHOCO, sign times half maximum", 0.4, {"id": "normsign"}),
        ("CHOCO, dithered, 2 bits", 0.6, {"id": "dithering", "bits": 2}),
    ):
        add(label, "ring", "choco", gamma=gamma, compressor=compressor)
    for graph in possible(["torus", "complete"], n, config):
        add("CHOCO, top-k", graph, "choco", gamma=scaled(0.15), compressor=top)
    for gamma in map(scaled, VARIANT_GAMMAS):
        add(f"{SQUEEZE}, gamma {gamma:.3g}", "ring", "deepsqueeze", gamma=gamma, compressor=top)
    return out


def matrix_runs(config: Config) -> Runs:
    """Return runs on matrices over the ring: PowerGossip, and CHOCO with messages of about the same size."""
    side = int(config.settings["matrix"])
    # float32 on the wire, as in CHOCO's messages, because bytes are compared: 4 bytes per value against 4 and an index
    # of about 1.
    power = {"name": "power-gossip", "values": "float32"}
    choco = {"name": "choco", "compressor": {"id": "topk", "density": max(1, round(side * 4 / 5)) / side**2}}
    long: dict[str, Any] = {"rounds": config.rounds, "side": side}
    # Only their rates are needed, and with an error after every round there are enough points for a line.
    short = {"rounds": min(config.rounds, 40), "side": side, "every": 1, "late": 0.5}
    made: dict[str, dict[str, Any]] = {
        **{f"PowerGossip, rank {r}": {"algorithm": {**power, "rank": r}, **long} for r in (1, 2)},
        # PowerGossip has no step to tune, so CHOCO is shown below, at and beyond its best step.
        **{f"CHOCO, same bytes, gamma {g:g}": {"algorithm": {**choco, "gamma": g}, **long} for g in (0.02, 0.1, 0.4)},
        "PowerGossip, full rank": {"algorithm": {"name": "power-gossip", "rank": side}, **short},
        "D-PSGD on matrices": {"algorithm": {"name": "dpsgd"}, **short},
    }
    return {(label, "ring", config.clients): own for label, own in made.items()}


def short_runs(config: Config) -> Runs:
    """Return short runs with a consensus step that works and one that does not."""
    rounds, density = int(config.settings["sweep_rounds"]), int(config.settings["k"]) / int(config.settings["size"])
    return {
        (f"{SPARSE_PUSH}, short, gamma {gamma:g}", "exponential", config.clients): {
            "algorithm": {"name": "sparse-push", "density": density, "gamma": gamma},
            "rounds": rounds,
        }
        for gamma in (0.2, 0.4)
    }


def study(found: Found) -> Studied:
    """Run all averages, and compare them with matrices and theory.

    Raises
    ------
    ConfigError
        If there are too few nodes for the graphs, or a message would hold more elements than the vector.
    """
    config, n = found.config, found.config.clients
    per_byte = Energy.of(config.settings).per_byte
    if n < 4:
        raise ConfigError(f"--clients must be at least 4 for this experiment, not {n}")
    size, k = int(config.settings["size"]), int(config.settings["k"])
    if k > size:
        raise ConfigError(f"k={k} exceeds size={size}; a message holds at most all elements")
    directed = [graph for graph in GAMMAS if graph not in UNDIRECTED]
    graphs = [(graph, nodes) for nodes in (n, 2 * n) for graph in possible((*UNDIRECTED, *directed), nodes, config)]
    theory = {
        ("D-PSGD" if each.graph in UNDIRECTED else "SGP", each.graph, each.nodes): each
        for each in found.sweep(foretell, [{"graph": g, "nodes": m} for g, m in graphs], "theory", config=config)
    }
    # As many rounds as theory predicts, with an error after each, because a fast graph has few points before rounding.
    dense: Runs = {
        cell: {"algorithm": {"name": cell[0].lower().replace("-", "")}, "rounds": each.rounds, "every": 1, "late": 0.5}
        for cell, each in theory.items()
    }
    runs = {**dense, **compressed_runs(config), **matrix_runs(config), **short_runs(config)}
    cells = [dict(zip(("row", "graph", "nodes"), cell, strict=True)) for cell in runs]
    tracks = dict(zip(runs, found.sweep(run, cells, config=config, runs=runs), strict=True))
    for cell, each in theory.items():
        # A line through the few points before exact averaging is meaningless.
        if each.rate == 0.0 and tracks[cell].last <= FLOOR:
            tracks[cell] = Record({**tracks[cell], "rate": 0.0})
    axes = {"kind": COMPRESSED, "graph": VARIANT_GRAPHS, "gamma": VARIANT_GAMMAS}
    variants = found.sweep(vary, axes, "variant", config=config)
    columns: dict[str, Any] = {
        "algorithm, graph": lambda cell: f"{cell[0].partition(', gamma')[0]}, {cell[1]}",
        "nodes": lambda cell: cell[2],
        "gamma": lambda cell: runs[cell]["algorithm"].get("gamma"),
        "rounds": lambda cell: tracks[cell].rounds[-1],
        "rate by matrices": lambda cell: theory[cell].rate if cell in theory else None,
        "rate": lambda cell: tracks[cell].rate,
        "R²": lambda cell: tracks[cell].r2,
        "last error": lambda cell: tracks[cell].last,
        "bytes a message": lambda cell: tracks[cell].message,
        "digits per kB": lambda cell: tracks[cell].digits,
        "joules per digit": lambda cell: (
            1e3 * per_byte / tracks[cell].digits if per_byte is not None and tracks[cell].digits > 0.0 else None
        ),
        "least w": lambda cell: tracks[cell].least,
    }
    # The figure has one of DeepSqueeze's runs; the table has all.
    squeezes = [cell for cell in runs if cell[0].startswith(SQUEEZE)]
    ring = [c for c in runs if c[1:] == ("ring", n) and "side" not in runs[c] and c not in squeezes[1:]]
    return Studied(
        quantities(tracks, theory, variants, n),
        tables=[
            table(
                "Vectors, and matrices on the ring",
                columns,
                tracks,
                "Error: distance of all models from the mean of the first ones, relative to its start. Rate: the "
                "fitted factor per round; 0 is exact averaging in finitely many rounds. By matrices: the second "
                "eigenvalue, or on the random digraph the second Lyapunov exponent. A small R² means that the error "
                "has stopped falling. Digits: decimal digits of error removed per kB that a node sends. Bytes are "
                "those of real messages with header, share and digests. Values are sent as float32, except that "
                "coordinate push and uncompressed messages send float64. w are push-sum's weights at the end. The "
                "last rows before the short ones are random matrices, which have no low rank.",
                optional=("joules per digit",),
            ),
            table(
                "What may be compressed in push-sum",
                {
                    "what travels as top-k": lambda row: row[0].kind,
                    "graph": lambda row: row[0].graph,
                    **{f"gamma {gamma:g}": partial(_last_at, gamma) for gamma in VARIANT_GAMMAS},
                },
                variants.groups("kind", "graph").values(),
                "Last relative errors, computed on matrices. Without estimates a smaller gamma stops later and at a "
                "lower error. On a changing graph w and x never settle, but z does. An empty cell means divergence.",
            ),
        ],
        figures=[
            curves(
                "On the ring",
                [cell for cell in ring if math.isfinite(tracks[cell].last)],
                lambda cell: [k * tracks[cell].sent for k in tracks[cell].rounds[1:]],
                lambda cell: tracks[cell].errors[1:],
                lambda cell: cell[0],
                x_label="bytes a node has sent",
                y_label="relative error",
                log_y=True,
                x_bytes=True,
            )
        ],
    )


def _last_at(gamma: float, row: Records) -> float:
    return float(row.one(gamma=gamma).last)


def off(rate: float, expected: float) -> float:
    """Return the relative difference of two rates' logarithms, to which the number of rounds is inversely
    proportional."""
    # NaN fails every claim, so an undefined rate cannot pass as equal.
    return abs(math.log(rate) / math.log(expected) - 1.0) if 0.0 < rate < math.inf else math.nan


def quantities(
    tracks: Mapping[Cell, Record], theory: Mapping[Cell, Record], variants: Records, n: int
) -> dict[Any, float]:
    """Return the quantities of the claims: theory for dense rounds, conservation in all, and convergence under
    compression."""
    out: dict[Any, float] = {}
    for (label, graph, nodes), track in tracks.items():
        if nodes == n:
            out[f"{label}, {graph}", "rate"], out[f"{label}, {graph}", "last error"] = track.rate, track.last
    for words, nodes in (("", n), (", twice the nodes", 2 * n)):
        # A complete graph averages in its first round, and the one-peer graph with a power of two nodes in log2 n
        # rounds. All later errors are rounding.
        out[f"complete{words}, dense: error after one round"] = tracks["D-PSGD", "complete", nodes].errors[1]
        if not nodes & (nodes - 1):
            log = int(math.log2(nodes))
            out[f"one-peer{words}, dense: error after log2 n rounds"] = tracks["SGP", "one-peer", nodes].errors[log]
    apart = {cell: off(tracks[cell].rate, each.rate) for cell, each in theory.items() if each.rate > 0.0}
    for name, random in (
        ("slope and log of the second eigenvalue, largest of all graphs", False),
        ("slope and Lyapunov exponent, random digraphs", True),
    ):
        differences = [value for cell, value in apart.items() if (cell[1] == DIGRAPH) == random]
        out[f"dense: relative difference of {name}"] = largest(differences)
    # Of a run that diverged only the errors are known, and short runs serve only for their errors.
    ended = [track for cell, track in tracks.items() if math.isfinite(track.last) and "short" not in cell[0]]
    for kind in COMPRESSED:
        for graph in VARIANT_GRAPHS:
            last, best = (min(variants.where(kind=each, graph=graph).each("last")) for each in (kind, COMPRESSED[-1]))
            out[f"push-sum, {kind}", f"last error, {graph}"] = last
            # A smaller step stops lower, so an error alone depends on the grid of steps; its ratio to the correct
            # variant does not.
            out[f"push-sum, {kind}", f"last error, times that of {COMPRESSED[-1]}, {graph}"] = last / best
    full, plain = (tracks[label, "ring", n].rate for label in ("PowerGossip, full rank", "D-PSGD on matrices"))
    squeezed = [track.last for cell, track in tracks.items() if cell[0].startswith(SQUEEZE)]
    return {
        **out,
        "dense: largest difference from the products of the matrices": largest(
            abs(error / known - 1.0)
            for cell, each in theory.items()
            for error, known in zip(tracks[cell].errors, each.errors, strict=True)
            # Rounding is about 1e-16. For a smaller error it would be a visible part of the claimed 1e-6.
            if known > 1e-9
        ),
        "sums over all nodes: largest change of a coordinate in any run": largest(track.moved for track in ended),
        "push-sum: largest change of the sum of w in any run": largest(track.weights for track in ended),
        "unbalanced digraph, dense: error of z": tracks["SGP", UNBALANCED, n].last,
        "unbalanced digraph, dense: error of x, not divided by w": tracks["SGP", UNBALANCED, n].biased,
        (SQUEEZE, "last error at the best gamma"): min(squeezed),
        ("PowerGossip, rank 1", "last error"): tracks["PowerGossip, rank 1", "ring", n].last,
        ("PowerGossip, full rank", "relative difference of its slope and D-PSGD's"): off(full, plain),
    }
