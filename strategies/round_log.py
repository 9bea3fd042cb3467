"""The server's log of training rounds: one line per round, and each reason once.

A run of 1,000 rounds in which one client fails each time has 1,000 lines and four warnings: the reason when it is new,
and again the 10th, 100th and 1000th time.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from fedcomp.errors import NoUsableReply
from fedcomp.flower.logs import log
from fedcomp.flower.payload import PARTITIONS
from fedcomp.flower.report import WITHHELD, Report
from fedcomp.flower.rounds import planned
from fedcomp.logs import ROUNDS_VARIABLE
from fedcomp.program import System

_REASONS: Final = 8
"""Different reasons of one node that are told apart: error texts are the clients' own, and they may all differ."""

_NAMED: Final = 5
"""Nodes that one warning names."""

_LEAST_RATIO: Final = 1.005
"""What is less is written "1x"."""

_NONE: Final[Mapping[int, int]] = MappingProxyType({})

_NOBODY: Final = 0
"""In place of a node, for what is about the round: Flower's node ids are never 0."""

_CUT: Final = 100
"""Characters of a reason in a round's line; its warning has all that the report keeps."""


def lacks(name: str, app: str) -> str:
    """Return what is said of a client without the half of the strategy ``name``, which the line ``app`` adds."""
    return f"the client's app lacks the client half of {name}; write {app}"


class RoundLog:
    """Logs the rounds of one strategy.

    Parameters
    ----------
    name : str
        The strategy's, for its lines.
    app : str
        The line by which an app gets the client half.
    counted : str
        What the bytes of a round are of.
    """

    def __init__(self, name: str, app: str = System.APP, counted: str = "training replies") -> None:
        self._name, self._app, self._counted = name, app, counted
        self._count: defaultdict[int, Counter[str]] = defaultdict(Counter)

    def conclude(self, report: Report, partitions: Mapping[int, int] = _NONE, *, withheld: bool = False) -> None:
        """Log a training round: its warnings, then its line. The report is complete with that.

        Parameters
        ----------
        partitions : mapping of int to int
            Of the nodes, as far as they are known.
        withheld : bool
            Say nothing that depends on who took part, and let the report forget it.
        """
        report.concluded = True
        if withheld:
            log.info("%s, round %d: %s", self._name, report.round, WITHHELD)
            # In place: checkpoints store this very object.
            report.withhold()
            self._publish(report, WITHHELD)
            return
        self.warn(report, partitions)
        # Of those that are refused as well the reason is logged already.
        taken = [node for node in report.without_mod if node not in report.refused]
        without = dict.fromkeys(taken, lacks(self._name, self._app))
        self._warn(report.round, "full model instead of a frame", without | report.unsupported, partitions)
        if report.asked and not report.used:
            log.warning("%s, round %d: no update was used, the model is unchanged", self._name, report.round)
        text = line(report, self._counted)
        log.info("%s, round %d: %s", self._name, report.round, text)
        self._publish(report, text)

    def _publish(self, report: Report, text: str) -> None:
        """Add the round's end to the file that the environment names, if it names one."""
        path = os.environ.get(ROUNDS_VARIABLE)
        if not path:
            return
        used = [node for node in report.weights if node not in report.refused] if report.used else []
        end = {"time": time.time(), "name": self._name, "round": report.round, "of": planned.get()}
        data = f"{json.dumps({**end, 'text': text, 'nodes': [str(node) for node in used]})}\n".encode()
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(file, data)
            finally:
                os.close(file)
        except OSError as error:
            log.warning(
                "%s, round %d: cannot write the end of the round to %s: %s", self._name, report.round, path, error
            )

    def warn(self, report: Report, partitions: Mapping[int, int] = _NONE) -> None:
        """Log what was refused in a round, training or evaluation, and why, and its notes."""
        self._warn(report.round, "reply not used", report.refused, partitions)
        for note in report.notes:
            self._warn(report.round, "note", {_NOBODY: note})

    def _warn(
        self, server_round: int, what: str, reasons: Mapping[int, str], partitions: Mapping[int, int] = _NONE
    ) -> None:
        """Log reasons by node: each the first time, and every power of ten times; one line for all that share it."""
        due: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for node, reason in reasons.items():
            text = _one_line(reason)
            kind = f"{what}: {_kind(text)}"
            counts = self._count[node]
            # Bounded per node, or a client could fill memory and log with a new text each round.
            if kind not in counts and len(counts) >= _REASONS:
                kind = "any other reason"
            counts[kind] += 1
            if _power_of_ten(counts[kind]):
                due[text, counts[kind]].append(node)
        for (text, times), nodes in due.items():
            again = f", for the {times}th time" if times > 1 else ""
            log.warning(
                "%s, round %d: %s: %s%s%s", self._name, server_round, what, text, _whose(nodes, partitions), again
            )


def line(report: Report, counted: str = "training replies") -> str:
    """Return a round in one line: asked, used, refused and why, bytes, ratio, and what part travelled dense."""
    said = [words for section in report.sections.values() if (words := section.line())]
    if not report.asked:
        return ", ".join(["no client was asked", *said])
    full = report.plain
    parts = [f"{report.asked} asked, {report.used} used" + (f" ({full} sent full models)" if full else "")]
    if report.refused:
        # Cut before they are counted: texts that differ behind the cut are one reason here.
        reasons = Counter(_cut(_one_line(reason)) for reason in report.refused.values()).most_common(3)
        why = "; ".join(f"{count} x {reason}" if count > 1 else reason for reason, count in reasons)
        parts.append(f"{len(report.refused)} refused ({why})")
    if report.missed:
        parts.append(f"{len(report.missed)} without a reply")
    if report.payload_bytes:
        # Below it the ratio would say of more bytes that they are "0.998x fewer".
        fewer = f"{report.ratio:.3g}x fewer than models" if report.ratio >= _LEAST_RATIO else "no fewer than models"
        parts.append(f"{counted} {report.payload_bytes:,} bytes, {fewer}")
    if report.frame_bytes:
        parts.append(f"{100 * report.dense_bytes / report.frame_bytes:.0f} % of the frames dense")
    return ", ".join([*parts, *said])


def require_usable(report: Report) -> None:
    """Raise when clients replied and no reply of theirs could be used.

    Where nobody replied at all nothing says that anything is wrong: devices vanish, and the next round may find them.

    Raises
    ------
    NoUsableReply
    """
    replied = report.asked - len(report.missed)
    # Fewer refusals than replies: something could be used, whether or not it made a model.
    if not replied or len(report.refused) < replied:
        return
    why = _grouped(report.refused.values())
    why += [f"{len(report.missed)} of {report.asked} without a reply in time"] if report.missed else []
    why += [_one_line(note) for note in report.notes]
    raise NoUsableReply(
        f"round {report.round}: {report.asked} clients were asked and no update can be used: {'; '.join(why)}. "
        "Nothing was learnt yet, so the run ends here; a later round like this one is a warning. Correct the clients, "
        "whose own logs say more, and start again"
    )


def require_half(report: Report) -> None:
    """Raise when all clients that replied were refused because their apps lack the client half: none can ever be used.

    Raises
    ------
    NoUsableReply
    """
    without = [node for node in report.without_mod if node in report.refused]
    if without and len(without) >= report.asked - len(report.missed):
        raise NoUsableReply(
            f"round {report.round}: none of the {len(without)} clients that replied can be used: "
            f"{report.refused[without[0]]}. Nothing was learnt yet, so the run ends here"
        )


def require_enough(report: Report, why: str) -> None:
    """Raise when a round could not work with the clients that it has, whatever they reply; ``why`` says so.

    Raises
    ------
    NoUsableReply
        Unless ``why`` is empty.
    """
    if why:
        raise NoUsableReply(
            f"round {report.round}: {why}. Nothing was learnt yet, so the run ends here; a later round like this one "
            "is a warning"
        )


def require_learnt(reports: Mapping[int, Report]) -> None:
    """Raise when clients were asked and no round has used an update.

    Raises
    ------
    NoUsableReply
    """
    made = [report for report in reports.values() if report.asked]
    if not made or any(report.used for report in made):
        return
    last = made[-1]
    why = _grouped(last.refused.values())
    why += [f"{last.lost} messages without a reply"] if last.lost else []
    why += [_one_line(note) for note in last.notes]
    raise NoUsableReply(
        f"the run has learnt nothing: clients were asked in {len(made)} rounds, no update was used, and the model is "
        f"the first one. In round {last.round}: {'; '.join(why) or 'nothing that clients sent was of use'}"
    )


def _whose(nodes: list[int], partitions: Mapping[int, int]) -> str:
    # The remainder is what a node without a partition of its own draws: it tells nobody which one is meant.
    known = {node: f" of partition {p}" for node, p in partitions.items() if p != node % PARTITIONS}
    named = ", ".join(f"{node}{known.get(node, '')}" for node in nodes[:_NAMED])
    if len(nodes) == 1:
        return "" if nodes == [_NOBODY] else f" (node {named})"
    return f" ({len(nodes)} nodes: {named}{', ...' if len(nodes) > _NAMED else ''})"


def _kind(text: str) -> str:
    """Return a reason without its numbers: rounds, sequence numbers and losses would make every reason a new one."""
    return re.sub("[0-9]+", "#", text)


def _grouped(reasons: Iterable[str]) -> list[str]:
    """Return the most frequent kinds of reasons, each by the first one of its kind and how many there are."""
    first, count = dict[str, str](), Counter[str]()
    for reason in map(_one_line, reasons):
        first.setdefault(_kind(reason), reason)
        count[_kind(reason)] += 1
    return [f"{n} x {first[kind]}" if n > 1 else first[kind] for kind, n in count.most_common(10)]


def _cut(text: str) -> str:
    """Return the beginning of a reason, up to the last word that fits into a round's line."""
    if len(text) <= _CUT:
        return text
    head = text[: _CUT - 3]
    return f"{head.rpartition(' ')[0] or head}..."


def _power_of_ten(count: int) -> bool:
    while count % 10 == 0:
        count //= 10
    return count == 1


def _one_line(text: str) -> str:
    # Clients write these texts: a line break could forge a line of the log, an escape sequence alter the terminal.
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
