"""Benchmarks: ``python -m experiments.bench NAME``. Importing this package imports none of them.

A benchmark is a module with ``run(*, quick=False, progress=None)`` that returns
``{"rows": list of flat dictionaries, "claims": list of Claim}``. ``quick`` asks for the smallest sizes that still
exercise everything; ``progress``, when given, is called with one line of text before each measurement.
"""

from __future__ import annotations

# Name on the command line -> module and what it measures.
BENCHMARKS: dict[str, tuple[str, str]] = {
    "state": (
        "fedcomp.experiments.bench.state",
        "what it costs to keep a client's state on disk",
    ),
    "wire": (f"{__name__}.wire", "size and speed of the FCW1 wire format against the naive ones"),
    "kernels": (
        "fedcomp.experiments.bench.kernels",
        "selection, fused steps and threshold estimates against a read pass",
    ),
    "engine": (
        "fedcomp.experiments.bench.engine",
        "client rounds per second in process against Ray, memory of the server",
    ),
    "server": (
        "fedcomp.experiments.bench.server",
        "a client's cost to the server by codec, against FedAvg's own, with up to 1000 clients",
    ),
    "round": (
        "fedcomp.experiments.bench.round",
        "a round of both halves beside the app: read passes, models of memory, bytes; plain FedAvg in the same run",
    ),
    "upkeep": (
        "fedcomp.experiments.bench.upkeep",
        "a round's cost beside its updates: the step from their mean, the checkpoint, new arrays",
    ),
    "gossip": (
        "fedcomp.experiments.bench.gossip",
        "decentralised runs: time per edge as graphs grow, messages, the protocol",
    ),
    "graphs": (
        "fedcomp.experiments.bench.graphs",
        "a sampled step and a round as graphs grow, the sampler, row codecs",
    ),
    "messages": (
        "fedcomp.experiments.bench.messages",
        "a training with messages, handed over by reference, and in the bare loop",
    ),
    "node": (
        "fedcomp.experiments.bench.node",
        "processor time of a message on an edge node, with Flower's executor and ours; a quiet minute",
    ),
    "fleet": (
        "fedcomp.experiments.bench.fleet",
        "a training over fifty nodes on this machine: seconds, memory, processor time, every update there",
    ),
    "noise": (
        "fedcomp.experiments.bench.noise",
        "exact integer noise against float noise and against rational arithmetic",
    ),
    "peers": (
        "fedcomp.experiments.bench.peers",
        "bytes, errors and times beside torch.topk, numpy, zstd and what other frameworks send",
    ),
}
