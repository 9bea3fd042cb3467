"""Conditional sending (FLARE): sensors whose environment changes, and nodes that have nothing new."""

from __future__ import annotations

from fedcomp.experiments.drifting import DBM, NOISE
from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.options import Option
from fedcomp.experiments.studies.flare import study
from fedcomp.rules import Int, Real

EXPERIMENT = Experiment(
    name="flare",
    question="Can sensors and nodes stay silent until something changes, and still notice the change in time?",
    # Sensors have their own data streams.
    study=study,
    repeats=False,
    options={
        "seeds": 6,
        "workers": 2,
        "ticks": Option(500, Int(50), "ticks of a run; the drift starts after two fifths, or slightly later"),
        "quiet_ticks": Option(2000, Int(100), "ticks without drift over which false alarms are counted"),
        "level": Option(
            0.01, Real(above=0.0, most=0.5), "level of the textbook test with which calibration is compared"
        ),
        "federated_rounds": Option(90, Int(12), "rounds between nodes with sensors; the drift starts in the middle"),
    },
    claims="""
        digits | share of runs in which the drift is found within a window and two ticks | >= 0.95 | gate: derived: the
            time to fill a window, and two consecutive ticks
        digits | windows sent before the drift, conditional | <= 0.2 | gate: calibrated thresholds
        digits | bytes of a fixed interval of 10 ticks over conditional | >= 10.0 | gate: measured before: 27
        digits | bytes of a fixed interval of 50 ticks over conditional | >= 5.0 | goal: the abstract: more than five
            times less data
        digits | latency of a fixed interval of 50 ticks over conditional | >= 16.0 | goal: the abstract: 16 times; the
            ratio is half the interval over the time to fill a window, so it needs intervals of about 130 ticks or more
        Wi-Fi | bytes of a fixed interval of 50 ticks over conditional | >= 3.0 | gate: chosen: the model is small here,
            so windows are most of the traffic
        Wi-Fi | points of accuracy after the drift, conditional less a fixed interval of 50 ticks | >= 0.0 | goal: it
            adapts sooner
        digits | points of accuracy after the drift, conditional less a fixed interval of 10 ticks | >= 0.0 | goal: a
            few windows are as good as all of them
        Wi-Fi | steps of a tenth: bytes over whole models | <= 0.9 | gate: sensors get a new model as a compressed step
        digits | latency over that of the rival that compares means | <= 1.0 | goal: the simple rival
        without drift | share of windows of 25 above the calibrated threshold & share of windows of 50 above the \
            calibrated threshold & share of windows of 100 above the calibrated threshold & share of windows of 200 \
            above the calibrated threshold | <= 0.01 | gate: the share that calibration aims at
        without drift | share of windows of 200 above the textbook's threshold | >= 0.01 | gate: theory: a finite
            reference is compared again and again, which is why calibration is needed
        labels swapped | windows sent after the drift by confidence | <= 0.5 | gate: the blind spot: the model is as
            confident as before
        labels swapped | share of runs in which losses find it | >= 0.95 | gate: with labels this is not a blind spot
        rounds | uplink over that of every round | <= 0.85 | goal: chosen: a node stays silent only if none of its
            trials helps, and its short replies count as traffic
        rounds | downlink over that of every round | <= 0.7 | goal: chosen; a third of the nodes
            stay quiet, and asking costs too
        rounds | points of accuracy lost against every round | <= 1.0 | gate: chosen
        rounds | points of accuracy, conditional less every second round | >= 0.0 | goal: the rival is a fixed schedule
    """,
    answer=(
        "A conditional sensor finds noise after {conditional | latency, ticks} ticks and sends "
        "{digits | bytes of a fixed interval of 50 ticks over conditional:.1f} times less than one that sends every 50 "
        "ticks, which finds it after {fixed, every 50 ticks | latency, ticks}; between nodes quiet rounds save "
        "{downlink saved by quiet rounds, %:.0f} % of the downlink and {uplink saved by quiet rounds, %:.0f} % of the "
        "uplink for {rounds | points of accuracy lost against every round:.1f} points. Swapped labels are invisible to "
        "confidence."
    ),
    rounds=1,
    clients=4,
    minutes=4.0,
    quick=("seeds=1", "ticks=50", "quiet_ticks=100", "federated_rounds=12", "workers=1"),
    notes=(
        f"Drift is noise of standard deviation {NOISE:g} on digits with pixels from 0 to 1, a shift of all Wi-Fi "
        f"strengths by {DBM:g} dBm, or a swap of two labels. A sensor draws examples that are neither in the training "
        "data nor in the reference. After each window the edge node trains for five epochs on its earlier data and "
        "all windows, in equal parts, and deploys the model. This is the same in all rows. After drift, too few "
        "examples have been sent to set some aside, so the reference comes from cross-fitting. With fewer than two "
        "windows the edge tells the sensor to collect more."
    ),
)
