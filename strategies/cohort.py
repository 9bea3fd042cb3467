"""Sampling of a round's nodes, for strategies that sample by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fedcomp.rng import Key
from fedcomp.rules import AboveZero, Configured, Int, Share, Text
from fedcomp.strategies.nodes import connected

MetricsAggregation = Callable[[list[RecordDict], str], MetricRecord]


@dataclass(frozen=True, kw_only=True)
class CohortSettings(Configured):
    """Who takes part in a round, under which names records travel, and how metrics are averaged.

    A strategy that samples by itself takes these as keyword arguments; they mean what they do in Flower's FedAvg.

    Parameters
    ----------
    fraction_train, fraction_evaluate : float
        Fraction of the connected nodes that trains, and that evaluates (0: none), in a round.
    min_train_nodes, min_evaluate_nodes : int
        Fewer than these are never asked, unless fewer are connected.
    min_available_nodes : int
        A round begins when so many nodes are connected.
    weighted_by_key : str
        The metric by which clients are weighed.
    arrayrecord_key, configrecord_key : str
        Names of the model and of the configuration in messages.
    train_metrics_aggr_fn, evaluate_metrics_aggr_fn : callable
        ``(contents, weighted_by_key) -> MetricRecord``.

    Raises
    ------
    ConfigError
        For a fraction or number out of range.
    """

    fraction_train: AboveZero = 1.0
    fraction_evaluate: Share = 0.0
    min_train_nodes: Annotated[int, Int(1)] = 1
    min_evaluate_nodes: Annotated[int, Int(1)] = 1
    min_available_nodes: Annotated[int, Int(1)] = 1
    weighted_by_key: Annotated[str, Text()] = "num-examples"
    arrayrecord_key: Annotated[str, Text()] = "arrays"
    configrecord_key: Annotated[str, Text()] = "config"
    train_metrics_aggr_fn: MetricsAggregation = field(default_factory=lambda: FedAvg().train_metrics_aggr_fn)
    evaluate_metrics_aggr_fn: MetricsAggregation = field(default_factory=lambda: FedAvg().evaluate_metrics_aggr_fn)

    def draw(self, kind: Literal["train", "evaluate"], grid: Grid, key: Key) -> list[int]:
        """Wait until enough nodes are connected; return those that train, or evaluate, in a round, ascending.

        The draw is by node id, which is new in every run: a partition is a client's own word, and one that is drawn
        often could be searched for.

        Parameters
        ----------
        key : Key
            Names the draw: seed, purpose and round.
        """
        there = sorted(connected(grid, self.min_available_nodes))
        fraction, least = getattr(self, f"fraction_{kind}"), getattr(self, f"min_{kind}_nodes")
        # Rounded down, as in Flower, so that a run with this strategy asks as many as one with FedAvg.
        count = min(len(there), max(least, int(len(there) * fraction)))
        # Those with the smallest random words: a node's word depends on nothing but its id, whoever else is online.
        return sorted(sorted(there, key=lambda node: key.at(purpose=f"{key.purpose}/{node}").u64())[:count])


class Cohort(FedAvg):
    """FedAvg whose rounds are those of a drawn cohort: by the seed, where Flower's own draws from a global generator.

    Parameters
    ----------
    settings : CohortSettings
    seed : int
    """

    def __init__(self, settings: CohortSettings, seed: int) -> None:
        super().__init__(**vars(settings))
        self._settings, self._seed = settings, seed

    def summary(self) -> None:
        """Say nothing: the strategy around it does."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a message for each node of the cohort."""
        return self._messages("train", server_round, arrays, config, grid)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a message for each node that evaluates."""
        if self._settings.fraction_evaluate == 0.0:
            return []
        return self._messages("evaluate", server_round, arrays, config, grid)

    def _messages(
        self,
        kind: Literal["train", "evaluate"],
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> list[Message]:
        # Where Flower's strategies write it, and apps look for it.
        config["server-round"] = server_round
        nodes = self._settings.draw(kind, grid, Key(self._seed, f"cohort/{kind}", server_round))
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        return [Message(content, node, kind, group_id=str(server_round)) for node in nodes]
