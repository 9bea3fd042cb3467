"""Conditional sending: sensors whose surroundings change, and nodes with nothing new (FLARE)."""

from __future__ import annotations

from fedcomp.experiments.drifting import DBM, NOISE
from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.options import Option
from fedcomp.experiments.studies.flare import study
from fedcomp.rules import Int, Real

EXPERIMENT = Experiment(
    name="flare",
    question="Can sensors and nodes keep still until there is something to say, and still notice in time?",
    # Sensors have streams of their own.
    study=study,
    repeats=False,
    options={
        "seeds": 6,
        "workers": 2,
        "ticks": Option(500, Int(50), "ticks of a run; the drift begins at two fifths, or a little later"),
        "quiet_ticks": Option(2000, Int(100), "ticks without drift in which false alarms are counted"),
        "level": Option(
            0.01, Real(above=0.0, most=0.5), "level of the textbook's test that calibration is compared with"
        ),
        "federated_rounds": Option(90, Int(12), "rounds between nodes with sensors; the drift begins in the middle"),
    },
    claims="""
        digits | share of runs in which the drift is found within a window and two ticks | >= 0.95 | gate: derived: a
            window, and two ticks in a row
        digits | windows sent before the drift, conditional | <= 0.2 | gate: calibrated thresholds
        digits | bytes of a fixed interval of 10 ticks over conditional | >= 10.0 | gate: measured before: 27
        digits | bytes of a fixed interval of 50 ticks over conditional | >= 5.0 | goal: the abstract's more than five
            times less data
        digits | latency of a fixed interval of 50 ticks over conditional | >= 16.0 | goal: the abstract's 16 times;
            half the interval over a window's fill, so that it holds for intervals of some 130 ticks and more
        Wi-Fi | bytes of a fixed interval of 50 ticks over conditional | >= 3.0 | gate: chosen: the model is small here,
            so that windows are most of it
        Wi-Fi | points of accuracy after the drift, conditional less a fixed interval of 50 ticks | >= 0.0 | goal: it
            adapts sooner
        digits | points of accuracy after the drift, conditional less a fixed interval of 10 ticks | >= 0.0 | goal: with
            few windows as good as with all of them
        Wi-Fi | steps of a tenth: bytes over whole models | <= 0.9 | gate: a model deployed to sensors is a compressed
            step
        digits | latency over that of the rival that compares means | <= 1.0 | goal: the simple rival
        without drift | share of windows of 25 above the calibrated threshold | <= 0.01 | gate: the share that
            calibration is for
        without drift | share of windows of 50 above the calibrated threshold | <= 0.01 | gate: the share that
            calibration is for
        without drift | share of windows of 100 above the calibrated threshold | <= 0.01 | gate: the share that
            calibration is for
        without drift | share of windows of 200 above the calibrated threshold | <= 0.01 | gate: the share that
            calibration is for
        without drift | share of windows of 200 above the textbook's threshold | >= 0.01 | gate: theory: a finite
            reference is compared again and again; what calibration is needed for
        labels swapped | windows sent after the drift by confidence | <= 0.5 | gate: the blind spot: the model is as
            sure as before
        labels swapped | share of runs in which losses find it | >= 0.95 | gate: with labels it is no blind spot
        rounds | uplink over that of every round | <= 0.85 | goal: chosen: a node is quiet only when nothing it tries
            helps, and its answers to questions count
        rounds | downlink over that of every round | <= 0.7 | gate: chosen
        rounds | points of accuracy lost against every round | <= 1.0 | gate: chosen
        rounds | points of accuracy, conditional less every second round | >= 0.0 | goal: the clock as the rival
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
        f"Drift is noise of standard deviation {NOISE:g} on digits whose pixels are 0 to 1, a shift of all Wi-Fi "
        "strengths "
        f"by {DBM:g} dBm, or that two labels swap. A sensor draws from examples that neither training nor reference "
        "has. "
        "After each window the edge trains five epochs on its former data and all windows, in equal parts, and "
        "deploys: "
        "the same in all rows. After drift the reference is made by cross-fitting: too little has been sent to set a "
        "part of it aside, and with less than two windows the sensor is told to collect."
    ),
)
