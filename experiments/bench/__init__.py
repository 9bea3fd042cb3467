"""Benchmarks: ``python -m experiments.bench NAME``. Importing this package imports none of them.

A benchmark is a module with ``cases(quick)``, which yields what is measured as :class:`fedcomp.measuring.Case`.
``quick`` asks for the smallest sizes that still exercise everything.
"""

from __future__ import annotations

_MEASURES = {
    "state": "what it costs to keep a client's state on disk",
    "wire": "size and speed of the FCW1 wire format against the naive ones",
    "kernels": "selection, fused steps and threshold estimates against a read pass",
    "device": "an update formed, ranked and packed on a GPU, beside a copy of the model to the host",
    "engine": "client rounds per second in process against Ray, memory of the server",
    "server": "a client's cost to the server by codec, against FedAvg's own, with up to 1000 clients",
    "round": "a round of both halves beside the app: read passes, models of memory, bytes; plain FedAvg beside it",
    "gigabytes": "memory of a round at 100 million values and of adapters of 1.3 billion, states beyond 2 GiB",
    "upkeep": "a round's cost beside its updates: the step from their mean, the checkpoint, new arrays",
    "gossip": "decentralised runs: time per edge as graphs grow, the protocol",
    "graphs": "a sampled step and a round as graphs grow, the sampler",
    "graph_rows": "bytes and time of Cora's feature rows and id lists by codec, beside numpy's archive, zlib and zstd",
    "node": "processor time of a message on an edge node, with Flower's executor and ours; a quiet minute",
    "fleet": "a training over fifty nodes on this machine: seconds, memory, processor time, every update there",
    "peers": "bytes, errors and times beside torch.topk, numpy, zstd and what other frameworks send",
}

# Name on the command line -> module and what it measures.
BENCHMARKS: dict[str, tuple[str, str]] = {name: (f"{__name__}.{name}", text) for name, text in _MEASURES.items()}
