"""A run's report as one HTML page that needs nothing but itself: no script, nothing loaded from anywhere."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from fedcomp.experiments.experiment import show_value
from fedcomp.experiments.findings import LONG, Curves, Findings, HeatMap, Pictures, Series, Table
from fedcomp.experiments.plots import line_plot, picture_sheet, swatch
from fedcomp.experiments.report import (
    COUNTED,
    aligned,
    duration,
    failed_claims,
    link_name,
    number,
    percent,
    promises,
    ratio,
    short_bytes,
    shortfalls,
    shown_epsilon,
    verdict,
)
from fedcomp.experiments.spec import RoundRecord

FEW = 8
"""Up to so many rows their accuracy is plotted also where an experiment has figures of its own."""

UNFOLDED = 2
"""Up to so many privacy statements are unfolded."""


def render_html(summary: Mapping[str, Any], rounds: Mapping[str, Sequence[RoundRecord]]) -> str:
    """Return ``report.html``: one file, no script, nothing loaded from anywhere."""
    claims, quick = summary["claims"], summary["config"]["quick"]
    held = not quick and bool(claims) and all(claim["ok"] for claim in claims)
    state = "bad" if failed_claims(summary) else "good" if held else "plain"
    findings = Findings.from_json(summary["findings"])
    sections = [
        f'<p class="verdict {state}">{escape(verdict(summary))}</p>',
        _shortfalls([] if quick else shortfalls(claims)),
        _changed(summary),
        *(_findings_table(table) for table in findings.tables if len(table.rows) <= LONG),
        _figures(findings),
        *(_findings_table(table) for table in findings.tables if len(table.rows) > LONG),
        _table(summary, findings) if summary["rows"] else "",
        _plots(summary, rounds) if not findings.figures or len(summary["rows"]) <= FEW else "",
        _privacy(summary),
        _claims(claims),
        _paragraphs("What to keep in mind", str(summary["notes"]).split("\n\n")),
        _paragraphs("What is counted", COUNTED.values() if summary["rows"] else ()),
        _paragraphs("Data", [summary["data"]]),
        _facts("Configuration", _configuration(summary["config"])),
        _facts("Environment", summary["environment"]),
    ]
    return _PAGE.format(
        title=escape(f"{summary['experiment']}: report"),
        style=_STYLE,
        name=escape(summary["experiment"]),
        question=escape(summary["question"]),
        body="\n".join(section for section in sections if section),
        run=escape(os.path.basename(str(summary["run"]))),
    )


def _changed(summary: Mapping[str, Any]) -> str:
    if not summary["changed"]:
        return ""
    items = ", ".join(f"<code>{escape(item)}</code>" for item in summary["changed"])
    return f'<p class="changed">Changed from the defaults the bounds were set for: {items}.</p>'


def _shortfalls(short: Sequence[tuple[str, str]]) -> str:
    items = "".join(
        f"<li><span class='mark {'fails' if mark == 'FAILED' else 'missed'}'>{mark.lower()}</span> {escape(text)}</li>"
        for mark, text in short
    )
    return f"<ul class='shortfalls'>{items}</ul>" if items else ""


def _findings_table(table: Table) -> str:
    numeric = table.numeric
    columns = [aligned(column) for column in zip(*table.rows, strict=True)]
    heads = "".join(
        f'<th scope="col"{_num(wide)}>{escape(text)}</th>' for text, wide in zip(table.columns, numeric, strict=True)
    )
    body = []
    for row in zip(*columns, strict=True):
        first, *others = map(escape, row)
        cells = "".join(f"<td{_num(wide)}>{text}</td>" for text, wide in zip(others, numeric[1:], strict=True))
        body.append(f'<tr><th scope="row"{_num(numeric[0])}>{first}</th>{cells}</tr>')
    content = (
        f"<div class='scroll'><table class='found'><thead><tr>{heads}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )
    return f"<h2>{escape(table.title)}</h2>{_folded(content, len(table.rows))}{_caption(table.caption)}"


def _num(numeric: bool) -> str:
    return " class='num'" if numeric else ""


def _folded(content: str, rows: int) -> str:
    return f"<details><summary>{rows} rows</summary>{content}</details>" if rows > LONG else content


def _caption(text: str) -> str:
    return f"<p class='caption'>{escape(text)}</p>" if text else ""


def _figures(findings: Findings) -> str:
    maps = [_heat_map(figure) for figure in findings.figures if isinstance(figure, HeatMap)]
    shown = [_pictures(figure) for figure in findings.figures if isinstance(figure, Pictures)]
    plots = [_curves(figure, f"found-{i}") for i, figure in enumerate(findings.figures) if isinstance(figure, Curves)]
    seen = f"<h2>Pictures</h2><div class='plots'>{''.join(shown)}</div>" if shown else ""
    return "".join([seen, *maps, f"<h2>Curves</h2><div class='plots'>{''.join(plots)}</div>" if plots else ""])


def _heat_map(heat: HeatMap) -> str:
    heads = "".join(f'<th scope="col">{escape(label)}</th>' for label in heat.x_labels)
    body = []
    shown = iter(aligned([value for row in heat.values for value in row]))
    for label, row in zip(heat.y_labels, heat.values, strict=True):
        cells = "".join(f'<td style="--depth: {heat.depth(value):.3f}">{escape(next(shown))}</td>' for value in row)
        body.append(f'<tr><th scope="row">{escape(label)}</th>{cells}</tr>')
    return (
        f"<h2>{escape(heat.title)}</h2><div class='scroll fit'><table class='heat'>"
        f'<thead><tr><th scope="col">{escape(heat.value_label)}</th>{heads}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>{_caption(heat.caption)}"
    )


def _pictures(pictures: Pictures) -> str:
    labels = "".join(f"<span>{escape(label)}</span>" for label in pictures.row_labels)
    caption = f"<figcaption>{escape(pictures.caption)}</figcaption>" if pictures.caption else ""
    said = f"{pictures.title}: {pictures.shape[0]} rows of {pictures.shape[1]} images"
    image = f"<img src='data:image/png;base64,{picture_sheet(pictures)}' alt='{escape(said, quote=True)}'>"
    return (
        f"<figure><h3>{escape(pictures.title)}</h3><div class='sheet'><div class='rows'>{labels}</div>{image}</div>"
        f"{caption}</figure>"
    )


def _curves(curves: Curves, salt: str) -> str:
    legend = "".join(f"<li>{swatch(i)}{escape(series.name)}</li>" for i, series in enumerate(curves.series))
    caption = f"<figcaption>{escape(curves.caption)}</figcaption>" if curves.caption else ""
    return (
        f"<figure><h3>{escape(curves.title)}</h3>{line_plot(curves, salt=salt)}"
        f"<ul class='legend'>{legend}</ul>{caption}</figure>"
    )


def _table(summary: Mapping[str, Any], findings: Findings) -> str:
    link = link_name(summary["config"]["settings"])
    lossy = any(row["failures"] for row in summary["rows"])
    # Only with links between clients; summaries of runs before there were any lack the figure.
    linked = any(row.get("peer_wire_bytes") for row in summary["rows"])
    heads = (
        "System",
        "Accuracy",
        "Uplink payload",
        "Uplink wire",
        "Downlink wire",
        *(("Between clients",) if linked else ()),
        "Uplink ratio",
        f"Time at {link}" if link else "Simulated time",
        *(("Lost replies",) if lossy else ()),
    )
    body = []
    for i, row in enumerate(summary["rows"]):
        cells = (
            percent(row["accuracy"]),
            short_bytes(row["uplink_payload_bytes"]),
            short_bytes(row["uplink_wire_bytes"]),
            short_bytes(row["downlink_wire_bytes"]),
            *((short_bytes(row.get("peer_wire_bytes", 0)),) if linked else ()),
            ratio(row["uplink_ratio"]),
            duration(row["simulated_seconds"]) if row["simulated_seconds"] else "–",
            *((str(row["failures"]),) if lossy else ()),
        )
        body.append(
            f'<tr><th scope="row">{swatch(i)}{escape(row["label"])}</th>'
            + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            + "</tr>"
        )
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    spans = [_span(name, [row[name] for row in summary["rows"]]) for name in ("rounds", "clients")]
    caption = f"Totals over {' and '.join(spans)}. "
    caption += f"The ratio compares uplink payload with {summary['baseline']}."
    table = (
        f"<div class='scroll'><table class='figures'><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )
    title = "Runs of whole systems" if findings else "Result"
    return f"<h2>{title}</h2>{_folded(table, len(body))}{_caption(caption)}"


def _span(name: str, counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{least} {name}" if least == most else f"{least} to {most} {name}"


def _plots(summary: Mapping[str, Any], rounds: Mapping[str, Sequence[RoundRecord]]) -> str:
    labels = [row["label"] for row in summary["rows"]]
    if not any(rounds.get(label) for label in labels):
        return ""
    by_round, by_bytes = [], []
    for label in labels:
        records = rounds.get(label, ())
        accuracy = [100 * record.accuracy for record in records]
        sent, total = [], 0
        for record in records:
            total += record.uplink_payload_bytes
            sent.append(float(total))
        by_round.append(Series(label, [float(record.round) for record in records], accuracy))
        by_bytes.append(Series(label, sent, accuracy))
    y_label = "test accuracy (%)"
    first = Curves("Accuracy against rounds", "round", y_label, by_round)
    second = Curves(
        "Accuracy against uplink payload",
        "uplink payload so far, all clients (logarithmic)",
        y_label,
        by_bytes,
        log_x=True,
        x_bytes=True,
    )
    legend = "".join(f"<li>{swatch(i)}{escape(label)}</li>" for i, label in enumerate(labels))
    return (
        f"<h2>Accuracy</h2><ul class='legend'>{legend}</ul><div class='plots'>"
        f"<figure>{line_plot(first, salt='rounds')}<figcaption>against rounds</figcaption></figure>"
        f"<figure>{line_plot(second, salt='bytes')}<figcaption>against uplink bytes</figcaption></figure></div>"
    )


def _privacy(summary: Mapping[str, Any]) -> str:
    """Return epsilons, and below them, always, what they mean."""
    found = promises(summary)
    if not found:
        return ""
    body, statements = [], []
    for label, said, ended in found:
        mark = "" if said.secure else " <span class='mark fails'>insecure noise</span>"
        cells = (shown_epsilon(said.epsilon), shown_epsilon(said.epsilon_unamplified), f"{said.delta:g}")
        numbers = "".join(f"<td class='num'>{escape(cell)}</td>" for cell in cells)
        hidden = f"one {said.unit} of {said.population}, {said.adjacency.replace('_', '-')}"
        body.append(
            f"<tr><th scope='row'>{escape(label)}{mark}</th>{numbers}<td>{escape(hidden)}</td>"
            f"<td class='num'>{said.releases}</td></tr>"
        )
        head, _, lines = said.prose().partition("\n\n")
        parts = [f"<p>{escape(line)}</p>" for line in [*head.splitlines(), ended] if line]
        pairs = (line.partition(":") for line in lines.splitlines() if line)
        facts = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text.strip())}</dd></div>" for name, _, text in pairs)
        unfolded = " open" if len(found) <= UNFOLDED else ""
        statements.append(
            f"<details class='statement'{unfolded}><summary>What is promised: {escape(label)}</summary>"
            f"{''.join(parts)}<dl class='lines'>{facts}</dl></details>"
        )
    heads = ("System", "Epsilon", "without sampling or cap", "Delta", "What is hidden", "Releases")
    head = "".join(f'<th scope="col"{_num(i not in (0, 4))}>{text}</th>' for i, text in enumerate(heads))
    return (
        f"<h2>Privacy</h2><div class='scroll'><table class='private'><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>{''.join(statements)}"
    )


def _claims(claims: Sequence[Mapping[str, Any]]) -> str:
    if not claims:
        return ""
    rows = []
    for claim in claims:
        mark = "holds" if claim["ok"] else "fails" if claim["gate"] else "missed"
        gate = "" if claim["gate"] else " <span class='goal'>goal</span>"
        rows.append(
            f"<tr><td><span class='mark {mark}'>{mark}</span></td><th scope='row'>{escape(claim['name'])}{gate}</th>"
            f"<td class='num'>{escape(number(claim['value']))}</td>"
            f"<td class='num'>{escape(claim['op'])} {escape(number(claim['bound']))}</td>"
            f"<td class='source'>{escape(claim['source'])}</td></tr>"
        )
    heads = "".join(
        f'<th scope="col">{text}</th>' for text in ("", "Claim", "Measured", "Bound", "Where the bound is from")
    )
    return (
        f"<h2>Claims</h2><div class='scroll'><table class='claims'><thead><tr>{heads}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _paragraphs(title: str, texts: Iterable[str]) -> str:
    parts = [f"<p>{escape(text)}</p>" for text in texts if text.strip()]
    return f"<h2>{escape(title)}</h2>{''.join(parts)}" if parts else ""


def _facts(title: str, facts: Mapping[str, str]) -> str:
    items = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in facts.items())
    return f"<h2>{escape(title)}</h2><dl>{items}</dl>"


def _configuration(config: Mapping[str, Any]) -> dict[str, str]:
    plain = {key: str(config[key]) for key in ("engine", "rounds", "clients", "seed")}
    return plain | {key: show_value(value) or "none" for key, value in config["settings"].items()}


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<p class="kicker">fedcomp experiment <b>{name}</b></p>
<h1>{question}</h1>
{body}
<footer>Run {run}. The same figures are in <code>summary.json</code> and <code>rounds.jsonl</code> beside
this file.</footer> </main> </body> </html>
"""

_STYLE = """
:root {
  color-scheme: light dark;
  --page: #fbfbf9; --card: #ffffff; --ink: #1b1d21; --muted: #5c626b; --grid: #e2e3df; --accent: #14507d;
  --heat: 20 80 125; --good: #12703f; --good-back: #e4f3ea; --bad: #a3242b; --bad-back: #fae6e6;
  --series-0: #9aa3ad; --series-1: #1b1d21; --series-2: #0b6fb3; --series-3: #c8501e;
  --series-4: #16875c; --series-5: #8a4bb5; --series-6: #a88300; --series-7: #c2307f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #15171a; --card: #1d2024; --ink: #e8e9ea; --muted: #a2a8b0; --grid: #34383e; --accent: #8cc4f0;
    --heat: 40 110 170; --good: #6fd39b; --good-back: #17301f; --bad: #f39a9a; --bad-back: #3a1c1e;
    --series-0: #7f8892; --series-1: #f2f3f4; --series-2: #5db3f0; --series-3: #f08a55;
    --series-4: #4fc690; --series-5: #c194e6; --series-6: #dcbc45; --series-7: #f07fb8;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 2.5rem 1.25rem 3rem; }
.kicker { margin: 0; color: var(--muted); }
h1 { margin: .2rem 0 1.1rem; font-size: 1.75rem; line-height: 1.25; max-width: 46rem; text-wrap: balance; }
h2 { margin: 2.4rem 0 .7rem; font-size: 1.15rem; }
p { max-width: 46rem; margin: .5rem 0; }
.verdict { display: inline-block; padding: .35rem .8rem; border-radius: .4rem; font-weight: 600;
  background: var(--card); border: 1px solid var(--grid); }
.verdict.good { color: var(--good); background: var(--good-back); border-color: transparent; }
.verdict.bad { color: var(--bad); background: var(--bad-back); border-color: transparent; }
.caption, .changed, figcaption, footer, .source { color: var(--muted); font-size: .9rem; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--grid); border-radius: .5rem; }
table { border-collapse: collapse; width: 100%; font-size: .94rem; }
th, td { padding: .55rem .8rem; text-align: left; border-top: 1px solid var(--grid); }
thead th { border-top: 0; color: var(--muted); font-weight: 500; font-size: .85rem; vertical-align: bottom; }
tbody th { font-weight: 500; white-space: nowrap; }
.claims tbody th { white-space: normal; min-width: 15rem; }
.claims .source { min-width: 15rem; }
.claims thead th:nth-child(n+3):nth-child(-n+4) { text-align: right; }
.figures td, .figures thead th:not(:first-child), .num { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.figures thead th { white-space: normal; }
.shortfalls { list-style: none; margin: .8rem 0; padding: 0; max-width: 58rem; }
.shortfalls li { margin: .25rem 0; }
.mark { display: inline-block; padding: .05rem .5rem; border-radius: .3rem; font-size: .85rem; font-weight: 600; }
.mark.holds { color: var(--good); background: var(--good-back); }
.mark.fails { color: var(--bad); background: var(--bad-back); }
.mark.missed { color: var(--muted); background: var(--grid); }
.goal { color: var(--muted); font-weight: 400; font-size: .85rem; }
.swatch { margin-right: .6rem; vertical-align: middle; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; margin: 0 0 .6rem; padding: 0;
  font-size: .92rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); gap: 1rem; }
figure { margin: 0; padding: .9rem .9rem .6rem; background: var(--card); border: 1px solid var(--grid);
  border-radius: .5rem; }
.sheet { display: flex; gap: .5rem; }
.sheet img { width: calc(100% - 1.5rem); height: auto; image-rendering: pixelated; }
.sheet .rows { display: flex; flex-direction: column; width: 1rem; color: var(--muted); font-size: .85rem; }
.sheet .rows span { flex: 1; display: flex; align-items: center; justify-content: flex-end; }
.plot { display: block; width: 100%; height: auto; }
.plot * { stroke-linejoin: round; }
figcaption { text-align: center; }
h3 { margin: 0 0 .5rem; font-size: 1rem; font-weight: 600; }
figure .legend { margin-top: .5rem; font-size: .85rem; }
.private td { vertical-align: baseline; }
.private thead th { white-space: normal; }
.private .mark { margin-left: .4rem; }
.statement { margin: .9rem 0; }
.statement > p { max-width: 50rem; }
.lines { display: block; max-width: 62rem; margin-top: .6rem; }
.lines div { justify-content: flex-start; }
.lines dt { flex: 0 0 7rem; }
.lines dd { text-align: left; overflow-wrap: normal; }
details > summary { cursor: pointer; color: var(--accent); margin-bottom: .5rem; }
.found thead th { white-space: normal; }
.fit { width: fit-content; max-width: 100%; }
.heat { width: auto; }
.heat th, .heat td { padding: .45rem .9rem; }
.heat td { text-align: center; font-variant-numeric: tabular-nums; border: 1px solid var(--card);
  /* At most 0.6: the text stays readable on the deepest cell of either face. */
  background: rgb(var(--heat) / calc(.6 * var(--depth))); print-color-adjust: exact; }
.heat thead th { text-align: center; }
.heat thead th:first-child { text-align: left; font-weight: 400; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(14rem, 1fr)); gap: .1rem 1.6rem; margin: 0; }
dl div { display: flex; justify-content: space-between; gap: 1rem; border-bottom: 1px solid var(--grid);
  padding: .3rem 0; font-size: .92rem; }
dt { color: var(--muted); }
dd { margin: 0; text-align: right; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
code { font-size: .92em; }
footer { margin-top: 3rem; border-top: 1px solid var(--grid); padding-top: .8rem; }
@media print { body { background: #fff; } .scroll, figure { break-inside: avoid; } }
"""
