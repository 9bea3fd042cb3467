"""Export of each round's figures to experiment trackers: a dashboard, a file, or any function.

Flower's loop calls ``evaluate_fn`` after each round, and so does every loop of this project. :func:`track` returns such
a function, so it works with every strategy and on every engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedcomp.asks import HELLO
from fedcomp.errors import ConfigError, optional
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.logs import log
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.privacy import find_private
from fedcomp.flower.report import Report, Reports, reports_of
from fedcomp.flower.rounds import EvaluateFn, evaluated

Tracker = Callable[[dict[str, float]], object]
"""Is called with the record of each round."""


def track(strategy: Strategy, grid: Grid, *trackers: Tracker, evaluate_fn: EvaluateFn | None = None) -> EvaluateFn:
    """Return an ``evaluate_fn`` for ``strategy.start()`` that calls ``trackers`` with the record of each round.

    A record holds ``round``; the round's bytes under the names that ``rounds.jsonl`` has for them, such as
    ``uplink_wire_bytes``; the clients ``asked``, ``answered``, ``used`` and ``refused``; the messages ``lost``, several
    where one client missed several exchanges; the figures of the strategy's report; aggregated metrics of training
    (``train.loss``) and of the clients' evaluation (``clients.loss``); what ``evaluate_fn`` returns (``loss``); and
    ``privacy.epsilon`` of a private run. All values are finite floats; a figure that is NaN or infinite is left out,
    and a warning names it. Round 0 has a record when ``evaluate_fn`` returns metrics for it.

    Parameters
    ----------
    strategy : Strategy
        The strategy whose ``start()`` is called.
    grid : Grid
        A :class:`MeteredGrid`, or a wrapper around one.
    *trackers : callable
        ``(record) -> anything``; see :func:`to_mlflow` and :func:`to_wandb`. An exception in one is logged as a
        warning, and the run goes on.
    evaluate_fn : callable, optional
        The server's own evaluation, ``(round, arrays) -> MetricRecord | None``.

    Raises
    ------
    ConfigError
        When no :class:`MeteredGrid` is in ``grid``, or a tracker is not callable.

    Notes
    -----
    A record of a private run holds only public figures. When the participants are secret, bytes and numbers of clients
    are left out.

    ``train.`` and ``clients.`` come from fedcomp's loop. Flower's own loop, which runs Flower's strategies, does not
    pass these metrics on until it ends.
    """
    meter = _meter_of(grid)
    # Rounds of an earlier run over the same grid have the same numbers.
    ledger, earlier = meter.ledger, len(meter.ledger)
    for tracker in trackers:
        if not callable(tracker):
            raise ConfigError(f"a tracker is a function of a record, not {tracker!r}")

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        metrics = None if evaluate_fn is None else evaluate_fn(server_round, arrays)
        if server_round or metrics:
            own = _rows_after(ledger, earlier) if earlier and meter.ledger is ledger else meter.ledger
            record = _record(strategy, own, server_round, metrics)
            for tracker in trackers:
                try:
                    tracker(dict(record))
                except Exception as error:
                    log.warning("round %d is not in a tracker: %s: %s", server_round, type(error).__name__, error)
        return metrics

    return evaluate


def to_mlflow(run_id: str | None = None) -> Tracker:
    """Return a tracker that logs to MLflow (extra ``mlflow``), with the round as its step.

    Parameters
    ----------
    run_id : str, optional
        The run that is logged to; by default the active one.

    Raises
    ------
    MissingExtra
        When MLflow is not installed.
    """
    with optional("to_mlflow()"):
        import mlflow
    return lambda record: mlflow.log_metrics(_figures(record), step=int(record["round"]), run_id=run_id)


def to_wandb(run: Any = None) -> Tracker:
    """Return a tracker that logs to Weights & Biases (extra ``wandb``), with the round as its step.

    The library sends a step when the next one begins or the run finishes.

    Parameters
    ----------
    run : wandb.Run, optional
        What ``wandb.init()`` returned; by default the active run.

    Raises
    ------
    MissingExtra
        When the library is not installed.
    """
    with optional("to_wandb()"):
        import wandb
    return lambda record: (run or wandb).log(_figures(record), step=int(record["round"]))


def _figures(record: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name != "round"}


def _meter_of(grid: Grid) -> MeteredGrid:
    found: Any = grid
    while found is not None and not isinstance(found, MeteredGrid):
        found = getattr(found, "inner", None)
    if found is None:
        raise ConfigError(f"{type(grid).__name__} counts no bytes; make grid = fc.MeteredGrid(grid) and start with it")
    return found


def _rows_after(ledger: TrafficLedger, count: int) -> TrafficLedger:
    """Return the ledger without its first ``count`` rows."""
    columns = {name: column[count:] for name, column in ledger.columns().items()}
    return TrafficLedger.from_columns(columns, ledger.tables())


def _record(
    strategy: Strategy, ledger: TrafficLedger, server_round: int, server: Mapping[str, Any] | None
) -> dict[str, float]:
    private, report = find_private(strategy), reports_of(strategy, Reports()).get(server_round)
    outcome = evaluated.get()
    found: dict[str, Any] = {"round": server_round}
    if getattr(private, "withholds", False) is not True:
        found |= _counted(ledger, server_round, report)
        if report is not None:
            found |= report.figures(public=private is not None)
    if outcome is not None:
        found |= {f"train.{name}": value for name, value in (outcome.train or {}).items()}
        # No promise covers what clients say of their evaluation.
        if private is None:
            found |= {f"clients.{name}": value for name, value in (outcome.evaluate or {}).items()}
    if private is not None:
        found |= {"privacy.epsilon": private.privacy.epsilon(), "privacy.releases": private.privacy.releases}
    found |= server or {}
    numbers = {name: value for name, value in found.items() if isinstance(value, int | float)}
    if infinite := sorted(name for name, value in numbers.items() if not math.isfinite(value)):
        log.warning("round %d: not finite, so not in the trackers' record: %s", server_round, ", ".join(infinite))
    return {name: float(value) for name, value in numbers.items() if name not in infinite}


def _counted(ledger: TrafficLedger, server_round: int, report: Report | None) -> dict[str, int]:
    """Return a round's bytes, the number of clients that were asked to train, and the outcomes."""
    found = {}
    for value in ("payload", "wire"):
        for way in ("up", "down"):
            found[f"{way}link_{value}_bytes"] = ledger.total(value, round=server_round, direction=way, link="hub")
        found[f"peer_{value}_bytes"] = ledger.total(value, round=server_round, link="peer")
    kinds = ledger.by("message_type", "messages", round=server_round)
    # Who has said hello has answered nothing of the round yet.
    asks = [kind for kind in kinds if not kind.startswith("evaluate") and kind != HELLO]
    where = {"round": server_round, "message_type": asks}
    nodes = {way: len(ledger.by("node", "messages", direction=way, link="hub", **where)) for way in ("down", "up")}
    if report is None:
        # A strategy without reports, such as Flower's own.
        return {**found, "asked": nodes["down"], "answered": nodes["up"]}
    # Not what was asked less what was lost: a node may be asked several times in a round, and be lost in each.
    counts = {"asked": report.asked, "answered": nodes["up"], "used": report.used}
    return {**found, **counts, "lost": report.lost, "refused": len(report.refused)}
