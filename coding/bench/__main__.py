"""``python -m coding.bench [--json] [--quick]``: what coding costs, as ratios taken in one process.

Absolute speeds differ between machines and minutes; ratios of methods whose calls are interleaved carry over. Every
figure is the median over repetitions; a ratio is the median of the ratios within a repetition. Time is the thread's
own CPU time, so that other processes do not count.

A claim has a bound and where it comes from. A claim that gates and fails makes the exit code 1. What cannot be measured
here, because the CPU lacks a tier or a library is not installed, is shown as not measured, with the reason and what to
install, and gates nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedcomp.coding.bench.measuring import Size


def main(
    arguments: Sequence[str] | None = None, *, size: Size | None = None, program: str = "python -m coding.bench"
) -> int:
    """Run the benchmark and print it; return 1 when a claim that gates fails, else 0."""
    parser = argparse.ArgumentParser(prog=program, description="Costs of coding, as same-run ratios.")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document and nothing else")
    parser.add_argument("--quick", action="store_true", help="smallest sizes; figures mean nothing and gate nothing")
    chosen = parser.parse_args(arguments)
    size = size or (Size(generation=4096, repetitions=3, quick=True) if chosen.quick else Size())
    # BLAS reads this when numpy is loaded; a second thread's time would not be counted.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from fedcomp.coding.bench.parts import run

    with _quiet_stdout(chosen.json):
        result = run(size, lambda line: print(f"  {line}", file=sys.stderr, flush=True))
    if chosen.json:
        print(json.dumps(_without_nan(result), indent=1, allow_nan=False))
    else:
        print(text_of(result))
    return int(any(claim["gate"] and claim["ok"] is False for claim in result["claims"]))


def _without_nan(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result with null where a claim's value is NaN, which JSON does not have; it stays a failed claim."""
    # NaN is the one value that differs from itself.
    claims = [
        {**claim, "value": None if claim["value"] != claim["value"] else claim["value"]} for claim in result["claims"]
    ]
    return {**result, "claims": claims}


@contextlib.contextmanager
def _quiet_stdout(wanted: bool) -> Iterator[None]:
    """Send what libraries print meanwhile to standard error: standard output holds one document."""
    with contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext():
        yield


def text_of(result: Mapping[str, Any]) -> str:
    """Return the result for people: measurements part by part, then claims, then a verdict."""
    lines = []
    for part in dict.fromkeys(row["part"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["part"] == part]
        lines += [part, *_aligned([[*map(str, list(row.values())[1:])] for row in rows], list(rows[0])[1:]), ""]
    table = []
    gated = any(claim["gate"] for claim in result["claims"])  # else there is nothing to tell goals from
    for claim in result["claims"]:
        value = claim["skipped"] if claim["value"] is None else f"{claim['value']:.3g}"
        goal = " (goal)" if gated and not claim["gate"] and claim["ok"] is not None else ""
        table.append([_ended(claim), claim["name"] + goal, value, f"{claim['op']} {claim['bound']:g}"])
    lines += ["claims", *_aligned(table, ["", "claim", "value", "bound"]), ""]
    failed = [claim["name"] for claim in result["claims"] if claim["gate"] and claim["ok"] is False]
    skipped = sum(claim["ok"] is None for claim in result["claims"])
    known = result["environment"]
    lines.append(f"tier {known['tier']} on {known['cpu']}; ISA-L: {', '.join(known['isal']) or 'not installed'}")
    lines.append(
        f"{len(failed)} claims that gate failed, {skipped} of {len(result['claims'])} claims were not measured"
        if failed or skipped
        else "every claim that gates holds"
    )
    return "\n".join(lines)


def _ended(claim: Mapping[str, Any]) -> str:
    """Return how a claim ended, in the words of :mod:`fedcomp.experiments.report`, a layer above this one."""
    if claim["ok"] is None:
        return "not measured"
    return "holds" if claim["ok"] else "FAILED" if claim["gate"] else "missed"


def _aligned(rows: Sequence[Sequence[str]], heads: Sequence[str]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in (heads, *rows)]


if __name__ == "__main__":
    sys.exit(main())
