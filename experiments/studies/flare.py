"""Sensors and nodes that send only new information: latency, bytes, false alarms, and rounds of nodes."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from fedcomp.experiments.drifting import DATA, SCHEDULERS, TICK, WINDOW
from fedcomp.experiments.experiment import Studied
from fedcomp.experiments.findings import mean
from fedcomp.experiments.kit import Records, repetitions, table
from fedcomp.experiments.tables import Found

SLOW: Final = "fixed, every 50 ticks"
QUICK: Final = "fixed, every 10 ticks"
OURS: Final = "conditional"
STEPS: Final = "conditional, 10 % steps"
MEANS: Final = "conditional, by mean"
LOSS: Final = "conditional, by loss"
IMAGES: Final = "digits, noise"
RADIO: Final = "Wi-Fi, another antenna"
SWAPPED: Final = "digits, labels swapped"

WITHIN: Final = (WINDOW + 2 * TICK) // TICK
"""Ticks within which strong drift must be found: the time to fill a window, and two consecutive ticks."""

WINDOWS: Final = (25, 50, 100, 200)
EVERY: Final = "every round"
SECOND: Final = "every second round"
ASKED: Final = "conditional, asked first"
GIVEN: Final = "conditional, with the model"


def sensors(scheduler: str, drift: str, seed: int, *, ticks: int) -> dict[str, Any]:
    """Run one sensor."""
    from fedcomp.experiments.drifting import run
    from fedcomp.flower.logs import quiet

    with quiet():
        return run(scheduler, drift, seed, ticks=ticks, first=2 * ticks // 5, last=2 * ticks // 5 + ticks // 8)


def alarms(window: int, seed: int, *, ticks: int, level: float) -> dict[str, Any]:
    """Count windows above the thresholds without drift."""
    from fedcomp.experiments.drifting import quiet

    return quiet(window, seed, ticks=ticks, level=level)


def federated(row: str, seed: int, *, rounds: int) -> dict[str, Any]:
    """Run rounds between nodes."""
    from fedcomp.experiments.drifting_rounds import run
    from fedcomp.flower.logs import quiet

    with quiet():
        return run(row, seed, rounds=rounds, drift=rounds // 2)


def latency(records: Records) -> float:
    """Return the median latency; infinite if most runs did not find the drift."""
    found = [float("inf") if value is None else value for value in records.each("latency")]
    return float(np.median(found))


def shown(value: float) -> Any:
    """Return a latency as text for a table."""
    return round(value, 1) if value < float("inf") else "not found"


def study(found: Found) -> Studied:
    """Run sensors with all schedulers, count false alarms, and run rounds between nodes."""
    from fedcomp.experiments.drifting_rounds import ROWS
    from fedcomp.tasks import get_task

    s, seeds = found.config.settings, list(repetitions(found.config))
    ticks = int(s["ticks"])
    cells = [
        {"scheduler": scheduler, "drift": drift, "seed": seed}
        for drift in DATA
        for scheduler in SCHEDULERS
        # If confidence cannot detect the drift, the question is what can.
        if drift != SWAPPED or scheduler in (SLOW, OURS, MEANS, LOSS)
        for seed in seeds
    ]
    groups = found.sweep(sensors, cells, "sensors", ticks=ticks).groups("drift", "scheduler")
    quiet = {"ticks": int(s["quiet_ticks"]), "level": float(s["level"])}
    counted = found.sweep(alarms, {"window": WINDOWS, "seed": seeds}, "without drift", **quiet)
    asked = {"row": list(ROWS), "seed": seeds[:3]}
    rows = found.sweep(federated, asked, "rounds", rounds=int(s["federated_rounds"])).groups("row")

    def average(drift: str, scheduler: str, name: str) -> float:
        return mean(groups[drift, scheduler].each(name))

    def share(name: str, window: int) -> float:
        return mean(counted.where(window=window).each(name))

    def over(row: str, name: str, other: str = EVERY) -> float:
        return mean(rows[row].each(name)) / mean(rows[other].each(name))

    radio = get_task(DATA[RADIO], hidden="64").data
    absent = "" if not radio.substitute else f"the Wi-Fi data are not here, and {radio.served} hardly move by that"
    in_time = mean(value is not None and value <= WITHIN for value in groups[IMAGES, OURS].each("latency"))
    lost = mean(rows[EVERY].each("accuracy")) - mean(rows[ASKED].each("accuracy"))
    sooner = latency(groups[IMAGES, SLOW]) / max(1.0, latency(groups[IMAGES, OURS]))
    fewer = average(IMAGES, SLOW, "bytes") / average(IMAGES, OURS, "bytes")
    sent = average(SWAPPED, OURS, "uploads") - average(SWAPPED, OURS, "false")
    slower = "bytes of a fixed interval of 50 ticks over conditional"
    gained = "points of accuracy after the drift, conditional less a fixed interval of 50 ticks"
    steps = "steps of a tenth: bytes over whole models"
    return Studied(
        {
            ("digits", "share of runs in which the drift is found within a window and two ticks"): in_time,
            ("digits", "windows sent before the drift, conditional"): average(IMAGES, OURS, "false"),
            ("digits", "bytes of a fixed interval of 10 ticks over conditional"): (
                average(IMAGES, QUICK, "bytes") / average(IMAGES, OURS, "bytes")
            ),
            ("digits", slower): fewer,
            ("digits", "latency of a fixed interval of 50 ticks over conditional"): sooner,
            ("Wi-Fi", slower): average(RADIO, SLOW, "bytes") / average(RADIO, OURS, "bytes"),
            ("Wi-Fi", gained): average(RADIO, OURS, "accuracy") - average(RADIO, SLOW, "accuracy"),
            ("digits", "points of accuracy after the drift, conditional less a fixed interval of 10 ticks"): (
                average(IMAGES, OURS, "accuracy") - average(IMAGES, QUICK, "accuracy")
            ),
            ("Wi-Fi", steps): average(RADIO, STEPS, "bytes") / average(RADIO, OURS, "bytes"),
            ("digits", "latency over that of the rival that compares means"): (
                latency(groups[IMAGES, OURS]) / max(1.0, latency(groups[IMAGES, MEANS]))
            ),
            **{
                ("without drift", f"share of windows of {window} above the {name} threshold"): share(key, window)
                for window in WINDOWS
                for name, key in (("calibrated", "calibrated_above"), ("textbook's", "textbook_above"))
            },
            ("labels swapped", "windows sent after the drift by confidence"): sent,
            ("labels swapped", "share of runs in which losses find it"): (
                mean(value is not None for value in groups[SWAPPED, LOSS].each("latency"))
            ),
            ("rounds", "uplink over that of every round"): over(ASKED, "up"),
            ("rounds", "downlink over that of every round"): over(ASKED, "down"),
            ("rounds", "points of accuracy lost against every round"): lost,
            ("rounds", "points of accuracy, conditional less every second round"): (
                mean(rows[ASKED].each("accuracy")) - mean(rows[SECOND].each("accuracy"))
            ),
            "uplink saved by quiet rounds, %": 100 * (1 - over(ASKED, "up")),
            "downlink saved by quiet rounds, %": 100 * (1 - over(ASKED, "down")),
            (OURS, "latency, ticks"): shown(latency(groups[IMAGES, OURS])),
            (SLOW, "latency, ticks"): shown(latency(groups[IMAGES, SLOW])),
        },
        tables=[
            table(
                f"A sensor: {drift}",
                {
                    "scheduler": lambda key: key[1],
                    "latency, ticks, median": lambda key: shown(latency(groups[key])),
                    "windows sent": lambda key: round(mean(groups[key].each("uploads")), 1),
                    "before the drift": lambda key: round(mean(groups[key].each("false")), 1),
                    "KB both ways": lambda key: round(mean(groups[key].each("bytes")) / 1e3, 1),
                    "after the drift, %": lambda key: round(mean(groups[key].each("accuracy")), 1),
                    "not adapted, %": lambda key: round(mean(groups[key].each("unadapted")), 1),
                },
                [key for key in groups if key[0] == drift],
                f"{ticks} ticks of {TICK} inferences, windows of {WINDOW}; bytes are those of whole messages on the "
                "link. After the drift: accuracy of the deployed model, as the mean over the ticks since its start. "
                "Not adapted: accuracy of the first model.",
            )
            for drift in DATA
        ]
        + [
            table(
                "Without drift: windows above the threshold",
                {
                    "window": lambda window: window,
                    "calibrated, %": lambda window: round(100 * share("calibrated_above", window), 2),
                    "textbook, %": lambda window: round(100 * share("textbook_above", window), 2),
                    "calibrated: windows sent": lambda window: round(share("calibrated_uploads", window), 1),
                    "textbook: windows sent": lambda window: round(share("textbook_uploads", window), 1),
                },
                WINDOWS,
                f"{s['quiet_ticks']} ticks; the textbook's threshold is that of a level of "
                f"{100 * float(s['level']):g} %.",
            ),
            table(
                "Rounds between nodes with sensors, of which one sees something new from the middle on",
                {
                    "row": lambda row: row,
                    "uplink, MB": lambda row: round(mean(rows[row].each("up")) / 1e6, 2),
                    "downlink, MB": lambda row: round(mean(rows[row].each("down")) / 1e6, 2),
                    "updates": lambda row: round(mean(rows[row].each("updates"))),
                    "quiet, %": lambda row: round(100 * mean(rows[row].each("quiet"))),
                    "after the drift, %": lambda row: round(mean(rows[row].each("accuracy")), 1),
                    "last ten, %": lambda row: round(mean(rows[row].each("last")), 1),
                    "sensor links, KB": lambda row: round(mean(rows[row].each("sensor_bytes")) / 1e3),
                },
                rows,
                "Four nodes, top-k 10 % with feedback. Messages are whole, as in a deployment; an empty one has 0.55 "
                "KB. Accuracy is that of the federated model on the data that the sensors see.",
            ),
            table(
                "What the rows do",
                {"row": lambda i: i[0], "what": lambda i: i[1]},
                [*SCHEDULERS.items(), *ROWS.items()],
            ),
        ],
        skipped={("Wi-Fi", quantity): absent for quantity in (slower, gained, steps)} if absent else {},
    )
