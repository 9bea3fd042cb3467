"""The first table of docs/reference/compatibility.md: what it says of each pair is what the pair does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian
from page_reading import ROOT

import fedcomp as fc

CODECS = {
    "`EDEN`": fc.EDEN(bits=1),
    "`Auto`": fc.Auto(),
    "`QSGD`": fc.QSGD(levels=127),
    "`TopK` and kin": fc.TopK(density=0.01, values="q2"),
    "`FixedPoint(RandomK)`": fc.FixedPoint(fc.RandomK(0.1), clip=0.5, levels=127),
    "`ScaledSign`": fc.ScaledSign(),
    "`SignSGD` (votes)": fc.SignSGD(step=0.001),
    "`DGC`": fc.DGC(density=0.01),
    "`Factors`": fc.Factors(rank=4),
}


def private(codec: Any) -> Any:
    inner = fc.DpFedAvg(FedAvg(fraction_evaluate=0.0), clip=1.0, noise_multiplier=2.0, population=1000)
    return fc.Compressed(inner, codec, feedback=False)


COLUMNS: dict[str, Callable[[Any], Any]] = {
    "FedMedian, Krum, …": lambda codec: fc.Compressed(FedMedian(), codec),
    "FedAdam and kin": lambda codec: fc.Compressed(FedAdam(), codec),
    "coded relay": lambda codec: fc.CodedFedAvg(fc.Compressed(FedAvg(), codec), code="mds"),
    "coded sum": lambda codec: fc.CodedFedAvg(fc.Compressed(FedAvg(), codec), construction="sumcode"),
    "`DpFedAvg`": private,
    "`Buffered`": lambda codec: fc.Buffered(fc.Compressed(FedAvg(), codec), concurrency=4, buffer=2),
    "pipelined": lambda codec: fc.PipelinedStrategy(fc.Compressed(FedAvg(), codec), width=2),
    "as a downlink": lambda codec: fc.Compressed(FedAvg(), fc.Identity(), codec),
}


def rows() -> dict[str, dict[str, str]]:
    text = (ROOT / "docs" / "reference" / "compatibility.md").read_text("utf-8").partition("\n\n## Rules")[0]
    head, _, *lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {line[0]: dict(zip(head, line[1:], strict=True)) for line in lines}


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")
def test_a_pair_does_what_the_table_says(name: str, column: str) -> None:
    said = rows()[name][column]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if said.startswith("refused") or said.endswith("only"):
            with pytest.raises(fc.ConfigError):
                COLUMNS[column](CODECS[name])
        else:
            COLUMNS[column](CODECS[name])
