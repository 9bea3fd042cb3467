"""``python -m coding.bench [--json] [--quick]``: the cost of coding, as ratios taken in one process.

A claim has a bound and where it comes from. A claim that gates and fails makes the exit code 1. What cannot be measured
here, because the CPU lacks a tier or a library is not installed, is shown as not measured, with the reason and what to
install, and gates nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fedcomp.measuring import UNMEASURED, conclude, mark, run


def main(arguments: Sequence[str] | None = None, *, program: str = "python -m coding.bench") -> int:
    """Run the benchmark and print it; return 1 when a claim that gates fails, else 0."""
    parser = argparse.ArgumentParser(prog=program, description="Costs of coding, as same-run ratios.")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document and nothing else")
    parser.add_argument("--quick", action="store_true", help="smallest sizes; figures mean nothing and gate nothing")
    chosen = parser.parse_args(arguments)
    # BLAS reads this when numpy is loaded; a second thread's time would not be counted.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from fedcomp.coding.bench import parts

    # What libraries print meanwhile goes to standard error: standard output holds one document.
    with contextlib.redirect_stdout(sys.stderr) if chosen.json else contextlib.nullcontext():
        say = partial(print, "", file=sys.stderr, flush=True)
        found = run(parts.cases(chosen.quick), quick=chosen.quick, say=say)

    def show(summary: Mapping[str, Any]) -> None:
        print(json.dumps(summary, indent=1, allow_nan=False) if chosen.json else text_of(summary))

    return conclude("coding", found, show, quick=chosen.quick, environment=parts.environment())


def text_of(result: Mapping[str, Any]) -> str:
    """Return the result for people: measurements part by part, then claims, then a verdict."""
    lines = []
    for part, rows in itertools.groupby(result["rows"], lambda row: row["part"]):
        shown = [list(row.items())[1:] for row in rows]
        lines += [part, *_aligned([[name for name, _ in shown[0]], *([str(v) for _, v in row] for row in shown)]), ""]
    table, claims = [["", "claim", "value", "bound"]], result["claims"]
    gated = any(claim["gate"] for claim in claims)  # else there is nothing to tell goals from
    for claim in claims:
        value = claim["skipped"] or ("NaN" if claim["value"] is None else f"{claim['value']:.3g}")
        goal = " (goal)" if gated and not claim["gate"] and claim["ok"] is not None else ""
        table.append([mark(claim), claim["name"] + goal, value, f"{claim['op']} {claim['bound']:g}"])
    known, ended = result["environment"], [row[0] for row in table]
    failed, skipped = ended.count("FAILED"), ended.count(UNMEASURED)
    told = f"{failed} claims that gate failed, {skipped} of {len(claims)} claims were not measured"
    verdict = told if failed or skipped else "every claim that gates holds"
    tier = f"tier {known['tier']} on {known['cpu']}; ISA-L: {', '.join(known['isal']) or 'not installed'}"
    return "\n".join([*lines, "claims", *_aligned(table), "", tier, verdict])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]


if __name__ == "__main__":
    sys.exit(main())
