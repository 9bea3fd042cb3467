"""The catalogue: one row per experiment, imported on demand."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from fedcomp.errors import ConfigError, nearest
from fedcomp.experiments.experiment import Experiment

# Name on the command line -> module that defines EXPERIMENT.
CATALOG: dict[str, str] = {
    name: f"{__name__}.{name}"
    for name in (
        "quickstart",
        "readme",
        "compare",
        "auto",
        "adapters",
        "private_adapters",
        "bits",
        "compressors",
        "fft",
        "sparsifiers",
        "sparse_study",
        "adacomp",
        "sidco",
        "scalecom",
        "gradiveq",
        "lgc",
        "power_sgd",
        "factors",
        "pipe_sgd",
        "flare",
        "slow_link",
        "chaos",
        "forward",
        "diloco",
        "coded_dropout",
        "coded_training",
        "gradient_coding",
        "sumcode",
        "modular_sum",
        "sparse_push",
        "consensus",
        "cold",
        "power_gossip",
        "topagg",
        "topagg_dpsgd",
        "privacy_audit",
        "datalens",
        "datalens_mnist",
        "gcn",
    )
} | {"async": f"{__name__}.asynchronous"}  # a Python keyword cannot be a module's name


def get_experiment(name: str, catalog: Mapping[str, str | Experiment] = CATALOG) -> Experiment:
    """Return the experiment called ``name``.

    ``catalog`` maps names to a module path or to the experiment itself. Raises :class:`ConfigError`, which names the
    experiment with the nearest name, when there is none of this name.
    """
    if name not in catalog:
        raise ConfigError(f"no experiment {name!r}{nearest(name, catalog)}")
    entry = catalog[name]
    if isinstance(entry, Experiment):
        return entry
    experiment = importlib.import_module(entry).EXPERIMENT
    if not isinstance(experiment, Experiment):
        raise TypeError(f"{entry}.EXPERIMENT is a {type(experiment).__name__}, not an Experiment")
    return experiment
