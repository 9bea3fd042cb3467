"""The catalogue: one row per experiment, imported only when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from experiments.experiment import Experiment
from fedcomp.errors import ConfigError, nearest

# Name on the command line -> module that defines EXPERIMENT.
CATALOG: dict[str, str] = {
    "quickstart": "experiments.catalog.quickstart",
    "sparsifiers": "experiments.catalog.sparsifiers",
    "sparse_study": "experiments.catalog.sparse_study",
    "adacomp": "experiments.catalog.adacomp",
    "sidco": "experiments.catalog.sidco",
    "scalecom": "experiments.catalog.scalecom",
    "coded_dropout": "experiments.catalog.coded_dropout",
    "coded_training": "experiments.catalog.coded_training",
    "gradient_coding": "experiments.catalog.gradient_coding",
    "sumcode": "experiments.catalog.sumcode",
    "sparse_push": "experiments.catalog.sparse_push",
    "consensus": "experiments.catalog.consensus",
    "cold": "experiments.catalog.cold",
    "power_gossip": "experiments.catalog.power_gossip",
    "topagg": "experiments.catalog.topagg",
    "topagg_dpsgd": "experiments.catalog.topagg_dpsgd",
    "privacy_audit": "experiments.catalog.privacy_audit",
    "datalens": "experiments.catalog.datalens",
    "datalens_mnist": "experiments.catalog.datalens_mnist",
    "gcn": "experiments.catalog.gcn",
}


def get_experiment(name: str, catalog: Mapping[str, str | Experiment] = CATALOG) -> Experiment:
    """Return the experiment called ``name``.

    ``catalog`` maps names to a module path or to the experiment itself. Raises :class:`ConfigError` that names the
    nearest experiment when there is none of this name.
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
