"""Draw the figures of the pages as SVG, one file for each theme: ``python docs/site/figures.py``.

A page includes both: ``![alt](figures/NAME-light.svg#only-light)`` and ``![alt](figures/NAME-dark.svg#only-dark)``.
Blue is what is sent, orange what is kept, green what counts, red what is lost. Measured
numbers are read from README and from the book of results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Final, NamedTuple

from svg import THEMES, Svg

from fedcomp.experiments.book import RESULTS, beside_fedavg, stored

ROOT: Final = Path(__file__).resolve().parents[2]


Point = tuple[float, float]


def _between(start: Point, end: Point, part: float) -> Point:
    """Return the point that lies ``part`` of the way from the first to the second."""
    return start[0] + (end[0] - start[0]) * part, start[1] + (end[1] - start[1]) * part


def _shard(s: Svg, x: float, y: float, number: int) -> None:
    s.rect(x - 10, y - 10, 20, 20, "bluefill", "blue", 3)
    s.text(x, y + 4.5, str(number), 12, "blue", "middle", "600")


def memory(theme: str) -> str:
    """Three rounds of the pair; the reply of the second is lost."""
    s = Svg(
        1000,
        560,
        "Three rounds of a compressed training, one lost reply",
        "Server above, client below. Round 5: update 10, 6 sent, 4 kept. Round 6: 8 sent but lost, 6 kept. Round 7: "
        "the server acknowledges round 5 only, so the client puts 8 back, sends 15 and keeps 9. 30 trained is 21 "
        "delivered plus 9 kept.",
        theme,
    )
    s.rect(10, 36, 980, 92, "lane", None)
    s.rect(10, 282, 980, 196, "lane", None)
    s.text(24, 60, "Server", 15, "soft", "start", "600")
    s.text(24, 306, "Client", 15, "soft", "start", "600")
    scale = 8.2  # pixels for one unit of update
    rounds = [
        # number, acknowledged, memory, put back, sent, kept, lost, tally
        (5, 4, 0, 0, 6, 4, False, "adds 6"),
        (6, 5, 4, 0, 8, 6, True, "has nothing to add"),
        (7, 5, 6, 8, 15, 9, False, "adds 15"),
    ]
    for i, (number, ack, kept_before, back, sent, kept, lost, tally) in enumerate(rounds):
        x = 22 + 325 * i
        s.text(x + 150, 24, f"Round {number}", 16, "ink", "middle", "600")
        s.rect(x + 70, 70, 92, 42)
        s.text(x + 116, 96, "model", 14)
        s.rect(
            x + 182,
            70,
            122,
            42,
            "bluefill" if not lost else "card",
            "blue" if not lost else "line",
            dash="5 4" if lost else "",
        )
        s.text(x + 243, 96, tally, 13 if not lost else 12, "blue" if not lost else "soft")
        # down
        s.arrow(x + 92, 112, x + 92, 318, "ink")
        s.text(x + 84, 176, "model", 13, "ink", "end")
        s.text(x + 84, 194, f"“round {ack}", 13, "orange" if i == 2 else "soft", "end", "600" if i == 2 else "normal")
        s.text(x + 84, 211, "arrived”", 13, "orange" if i == 2 else "soft", "end", "600" if i == 2 else "normal")
        # up
        if lost:
            s.arrow(x + 243, 318, x + 243, 206, "red", dash="6 5", head=False)
            s.cross(x + 243, 196)
            s.text(x + 256, 200, "lost", 14, "red", "start", "600")
        else:
            s.arrow(x + 243, 318, x + 243, 112, "blue")
        s.text(x + 233, 262, f"frame: {sent}", 13, "blue", "end", "600")
        # client
        if back:
            words = f"update 10 + memory {kept_before} + put back {back} = {sent + kept}"
        else:
            words = f"update 10 + memory {kept_before} = {sent + kept}"
        s.text(x + 158, 340, words, 13.5, "ink")
        w1, w2 = sent * scale, kept * scale
        left = x + 158 - (w1 + w2) / 2
        s.rect(left, 354, w1, 40, "bluefill", "blue", 3)
        s.rect(left + w1, 354, w2, 40, "orangefill", "orange", 3)
        s.text(left + w1 / 2, 379, str(sent), 15, "blue", "middle", "600")
        s.text(left + w1 + w2 / 2, 379, str(kept), 15, "orange", "middle", "600")
        s.text(left + w1 - 4, 413, "sent", 12.5, "blue", "end")
        s.text(left + w1 + 4, 413, "memory", 12.5, "orange", "start")
        if back:
            s.text(x + 158, 445, "Round 6 was not acknowledged:", 13, "orange")
            s.text(x + 158, 463, "its 8 go back into the sum.", 13, "orange")
        if i < 2:
            s.arrow(x + 292, 374, x + 352, 374, "orange")
            s.text(x + 322, 366, str(kept), 13, "orange", "middle", "600")
    s.text(
        500,
        516,
        "Trained 10 + 10 + 10 = 30.  Delivered 6 + 15 = 21.  Still in the client's memory 9.",
        15,
        "ink",
        "middle",
        "600",
    )
    s.text(500, 541, "Nothing is lost and nothing is counted twice, whichever message disappears.", 14, "soft")
    return s.done()


def coded(theme: str) -> str:
    """Shares, losses, collection: six clients, any three shards decode."""
    s = Svg(
        1000,
        470,
        "A coded round: two of six clients vanish and no update is lost",
        "Left: client B cuts its update into six shards, any three of which decode, and hands one to every client. "
        "Middle: B and E vanish. Right: the server collects three shards of B's update from the clients that are left "
        "and decodes it.",
        theme,
    )
    names = "ABCDEF"
    heads = ("1  Share", "2  Two clients vanish", "3  Collect")
    for panel in range(3):
        left = 10 + 332 * panel
        s.rect(left, 36, 316, 330, "lane", None)
        s.text(left + 158, 24, heads[panel], 16, "ink", "middle", "600")
        cx, cy, r = left + 158, 200, 112
        at = {
            n: (cx + r * math.cos(math.radians(-120 + 60 * i)), cy + r * math.sin(math.radians(-120 + 60 * i)))
            for i, n in enumerate(names)
        }

        if panel == 0:
            for number, n in enumerate(names, 1):
                if n == "B":
                    continue
                far = math.dist(at["B"], at[n])
                s.arrow(*_between(at["B"], at[n], 24 / far), *_between(at[n], at["B"], 26 / far), "blue", 1.8)
                _shard(s, *_between(at["B"], at[n], 0.55 if n in "DEF" else 0.48), number)
        if panel == 2:
            s.rect(cx - 46, cy - 24, 92, 48)
            s.text(cx, cy + 5, "Server", 14, "ink", "middle", "600")
            for n in "ACD":
                a = _between(at[n], (cx, cy), 0.22)
                b = _between(at[n], (cx, cy), 0.56 if n == "C" else 0.72)
                s.arrow(*a, *b, "blue", 1.8)
        for number, n in enumerate(names, 1):
            gone = panel > 0 and n in "BE"
            s.circle(*at[n], 22, "card", "line" if gone else ("blue" if n == "B" else "ink"), "4 4" if gone else "")
            s.text(at[n][0], at[n][1] + 5.5, n, 16, "soft" if gone else "ink", "middle", "600")
            if gone:
                s.cross(at[n][0] + 19, at[n][1] - 19, 7)
            elif panel:
                away = _between((cx, cy), at[n], 1.30)
                _shard(s, *away, number)
    lines = (
        ("B cuts its update into 6 shards.", "Any 3 of them decode. All others do the same."),
        ("B and E are gone. Their shards", "are on the other four clients."),
        ("3 shards rebuild B's update, bit for bit;", "E's likewise. The mean is over all 6."),
    )
    for panel, pair in enumerate(lines):
        for row, line in enumerate(pair):
            s.text(168 + 332 * panel, 396 + 21 * row, line, 14, "ink")
    s.text(
        500,
        452,
        "Price: each client sends its peers about 6/3 = 2 updates. The server receives one for each client, as before.",
        13.5,
        "soft",
    )
    return s.done()


QUESTIONS: Final = (
    ("Must no server hold the model?", "fc.GossipRelay(...)"),
    ("Does each client hold a part of one graph?", "fc.SkewedGCN(FedAvg())"),
    ("Must a guarantee with an epsilon hold?", "fc.DpFedAvg(...), fc.RecordDp(...)"),
    ("May the server see only the sum?", 'fc.CodedFedAvg(..., construction="sumcode")'),
    ("Do clients disappear for good in a round?", 'fc.CodedFedAvg(..., code="mds")'),
    ("Do a few slow clients hold up the round?", "fc.Buffered(...)"),
    ("Fewer than 40 rounds, or clients seldom return?", "fc.Compressed(FedAvg(), fc.EDEN(bits=1))"),
)
"""What `docs/choose/use-this-when.md` asks, in its order, and where a "yes" leads."""


def tree(theme: str) -> str:
    """Which line to take: questions from top to bottom."""
    s = Svg(
        1000,
        520,
        "Which line do I need?",
        " ".join(f"{question} Yes: {line}." for question, line in QUESTIONS) + " No: top-k of two bits.",
        theme,
    )
    height = 64
    for row, (question, line) in enumerate(QUESTIONS):
        y = 14 + height * row
        s.rect(20, y, 420, 42, "card", "ink")
        s.text(230, y + 27, question, 16, "ink")
        s.arrow(440, y + 21, 530, y + 21, "green")
        s.text(482, y + 14, "yes", 16, "green", "middle", "600")
        s.rect(530, y, 450, 42, "greenfill", "green", 20)
        s.text(755, y + 27, line, 16, "ink")
        s.arrow(230, y + 42, 230, y + height, "ink")
        s.text(242, y + 58, "no", 16, "soft", "start")
    s.rect(20, 14 + height * len(QUESTIONS), 420, 42, "greenfill", "green", 20)
    s.text(230, 41 + height * len(QUESTIONS), 'fc.Compressed(FedAvg(), fc.TopK(0.03, values="q2"))', 15, "ink")
    s.text(755, 41 + height * len(QUESTIONS), "Downlink slow, too? Add a second codec.", 16, "soft")
    return s.done()


def pair(theme: str) -> str:
    """The path of an update to the server, and of the model back."""
    s = Svg(
        1000,
        392,
        "The path of an update through fedcomp",
        "Client: the app trains; its update and the memory are added and encoded; what is not sent becomes the memory. "
        "Server: the frame is checked and decoded, added to a sum, and the Flower strategy makes the step. The model, "
        "or its change through a downlink codec, goes back with the note which frames were used.",
        theme,
    )
    s.rect(10, 40, 424, 268, "lane", None)
    s.rect(566, 40, 424, 268, "lane", None)
    s.text(24, 66, "Client", 16, "soft", "start", "600")
    s.text(580, 66, "Server", 16, "soft", "start", "600")
    boxes = (
        # left edge, width, fill, stroke, lines
        (24, 104, "card", "ink", ("your app", "trains")),
        (164, 116, "bluefill", "blue", ("update", "+ memory")),
        (316, 104, "bluefill", "blue", ("encode",)),
        (580, 104, "bluefill", "blue", ("check,", "decode")),
        (718, 92, "bluefill", "blue", ("sum",)),
        (844, 132, "greenfill", "green", ("strategy", "makes a step")),
    )
    for left, width, fill, stroke, lines in boxes:
        s.rect(left, 88, width, 58, fill, stroke)
        for row, line in enumerate(lines):
            s.text(left + width / 2, 122 + 20 * (row - (len(lines) - 1) / 2), line, 16, "ink")
    for left, right in ((128, 164), (280, 316), (684, 718), (810, 844)):
        s.arrow(left, 117, right, 117)
    s.arrow(420, 117, 580, 117, "blue", 3)
    s.text(500, 104, "frame", 16, "blue", "middle", "600")
    s.rect(164, 186, 256, 40, "orangefill", "orange")
    s.text(292, 211, "memory: what was not sent", 16, "orange")
    s.arrow(368, 146, 368, 186, "orange")
    s.arrow(222, 186, 222, 146, "orange")
    s.arrow(910, 146, 910, 270, "ink", head=False)
    s.arrow(910, 270, 76, 270, "ink", head=False)
    s.arrow(76, 270, 76, 146, "ink")
    s.text(500, 258, "the model,", 16, "ink")
    s.text(500, 292, "or its change", 16, "ink")
    s.text(292, 294, "“your last frame was used”", 16, "orange")
    s.arrow(292, 270, 292, 226, "orange")
    for left, fill, stroke, words in (
        (172, "card", "ink", "your code"),
        (412, "bluefill", "blue", "fedcomp"),
        (652, "greenfill", "green", "Flower's strategy"),
    ):
        s.rect(left, 338, 26, 26, fill, stroke, 4)
        s.text(left + 38, 357, words, 16, "ink", "start")
    return s.done()


def push_sum(theme: str) -> str:
    """Shares of x and w along directed edges; their sums stay."""
    s = Svg(
        1000,
        440,
        "Push-sum on a directed graph",
        "Node A sends to B and C, B to C, C to A. Each keeps one share of its x and w and sends equal ones to its "
        "out-neighbours. The sums of x and of w stay 12 and 3; in the end x divided by w is 4, the mean, at all nodes.",
        theme,
    )
    edges = {"A": "BC", "B": "C", "C": "A"}
    start = {"A": (9.0, 1.0), "B": (0.0, 1.0), "C": (3.0, 1.0)}

    def stepped(state: Mapping[str, Point]) -> dict[str, Point]:
        new = dict.fromkeys(state, (0.0, 0.0))
        for node, (x, w) in state.items():
            parts = 1 + len(edges[node])
            for to in (node, *edges[node]):
                new[to] = (new[to][0] + x / parts, new[to][1] + w / parts)
        return new

    end = start
    for _ in range(60):
        end = stepped(end)
    panels = (("Before", start), ("After one step", stepped(start)), ("In the end", end))
    for panel, (head, state) in enumerate(panels):
        left = 10 + 332 * panel
        s.rect(left, 36, 316, 300, "lane", None)
        s.text(left + 158, 24, head, 17, "ink", "middle", "600")
        at = {"A": (left + 158, 88.0), "B": (left + 70, 256.0), "C": (left + 246, 256.0)}
        for node, targets in edges.items():
            for to in targets:
                far = math.dist(at[node], at[to])
                # A and C send to each other: two lines, side by side.
                side = 9 if {node, to} == {"A", "C"} else 0
                dx, dy = (at[to][1] - at[node][1]) / far * side, -(at[to][0] - at[node][0]) / far * side
                begin, close = _between(at[node], at[to], 46 / far), _between(at[to], at[node], 48 / far)
                s.arrow(begin[0] + dx, begin[1] + dy, close[0] + dx, close[1] + dy, "blue", 1.8)
                if panel == 0:
                    x, y = _between(at[node], at[to], 0.5)
                    x, y = (x + dx * 3, y + dy * 3) if side else (x - 18, y - 8) if node == "A" else (x, y - 14)
                    s.text(x, y + 5, f"1/{1 + len(targets)}", 16, "blue")
        for node, (x, w) in state.items():
            s.circle(*at[node], 44, "card", "ink")
            s.text(at[node][0], at[node][1] - 18, node, 15, "soft", "middle", "600")
            s.text(at[node][0], at[node][1] + 4, f"x = {_fraction(x)}", 16, "ink")
            s.text(at[node][0], at[node][1] + 24, f"w = {_fraction(w)}", 16, "orange")
        ratios = {x / w for x, w in state.values()}
        words = f"x / w = {min(ratios):.3g} at every node" if max(ratios) - min(ratios) < 1e-9 else "x / w differ"
        s.text(left + 158, 362, words, 16, "green" if "every" in words else "ink", "middle", "600")
        s.text(left + 158, 388, _sums(state), 16, "ink")
    s.text(500, 424, "A share that cannot be delivered goes back to its sender, so both sums stay.", 16, "soft")
    return s.done()


def _fraction(value: float) -> str:
    return str(Fraction(value).limit_denominator(12))


def _sums(state: Mapping[str, Point]) -> str:
    return f"sum of x = {sum(x for x, _ in state.values()):.3g}, of w = {sum(w for _, w in state.values()):.3g}"


def support(theme: str) -> str:
    """Which coordinates four clients send: each its own, or those of one leader."""
    own = {"A": (3, 17, 31), "B": (8, 17, 26), "C": (5, 22, 37), "D": (12, 22, 31)}
    s = Svg(
        1000,
        470,
        "Own supports and a shared one",
        "Four clients send three of 40 coordinates each. With top-k they choose for themselves, and the sum has "
        f"{len(set().union(*own.values()))} coordinates. With a shared support one leader chooses, and it has three.",
        theme,
    )
    colours = {"A": "blue", "B": "orange", "C": "green", "D": "red"}
    left, cell = 104, 17.5
    for panel, (head, chosen) in enumerate(
        (("Each client chooses (top-k)", own), ("A chooses for all (shared support)", dict.fromkeys(own, own["A"])))
    ):
        top = 48 + 214 * panel
        s.text(24, top - 18, head, 17, "ink", "start", "600")
        union = sorted(set().union(*chosen.values()))
        for row, name in enumerate((*chosen, "sum")):
            y = top + 30 * row + (8 if name == "sum" else 0)
            s.text(left - 14, y + 18, name, 16, "ink", "end", "600")
            for index in range(40):
                sent = index in (union if name == "sum" else chosen[name])
                fill = ("ink" if name == "sum" else colours[name]) if sent else "card"
                s.rect(left + cell * index, y, cell - 2, 22, fill, "line", 2, width=0.8)
            count = len(union) if name == "sum" else len(chosen[name])
            weight = "600" if name == "sum" else "normal"
            s.text(left + cell * 40 + 16, y + 18, f"{count} values", 16, "ink", "start", weight)
    s.text(500, 460, "A server that sends the sum on sends more for every client above, and not below.", 16, "soft")
    return s.done()


HORIZON: Final = 60
"""Seconds that the figure of buffered steps shows."""


def buffered(theme: str) -> str:
    """What three clients of unlike pace do while rounds are waited for, and while updates are buffered."""
    pace = {"A": 6, "B": 9, "C": 16}
    s = Svg(
        1000,
        520,
        "Rounds that wait for all, and steps of two updates",
        "Three clients take 6, 9 and 16 seconds. Waiting for all, they are idle until the slowest is done. With a "
        "buffer of two the server steps when two updates have come; each update says how many steps it missed.",
        theme,
    )
    left, scale = 70.0, 900 / HORIZON

    def lanes(top: float, head: str, summary: str) -> None:
        s.text(24, top - 14, head, 17, "ink", "start", "600")
        s.text(left + scale * HORIZON, top - 14, summary, 16, "ink", "end")
        for row, name in enumerate(pace):
            s.rect(left, top + 46 * row, scale * HORIZON, 38, "lane", None, 3)
            s.text(left - 16, top + 46 * row + 25, name, 16, "ink", "end", "600")

    def bar(top: float, name: str, begin: float, end: float, words: str) -> None:
        y = top + 46 * list(pace).index(name)
        s.rect(left + scale * begin, y + 3, scale * (min(end, HORIZON) - begin), 32, "bluefill", "blue", 3)
        if end <= HORIZON:
            s.text(left + scale * (begin + end) / 2, y + 25, words, 16, "blue", "middle", "600")

    def mark(top: float, time: float) -> None:
        s.arrow(left + scale * time, top - 4, left + scale * time, top + 46 * len(pace), "green", 3, head=False)

    slowest, first, second = max(pace.values()), 48.0, 272.0
    rounds = range(slowest, HORIZON + 1, slowest)
    lanes(first, "Every round waits for all", f"{len(rounds)} steps, {len(rounds) * len(pace)} updates")
    for begin in range(0, HORIZON, slowest):
        for name, time in pace.items():
            bar(first, name, begin, begin + time, "0")
    for time in rounds:
        mark(first, time)

    # A client whose update waits in the buffer begins again with the step that takes it.
    work = dict.fromkeys(pace, (0, 0))  # since when, and from which version
    waiting: list[str] = []
    done: list[tuple[str, int, int, int]] = []
    steps: list[int] = []
    for time in range(1, HORIZON + 1):
        for name, (begin, version) in work.items():
            if name not in waiting and begin + pace[name] == time:
                waiting.append(name)
                done.append((name, begin, time, len(steps) - version))
        if len(waiting) >= 2:
            steps.append(time)
            work.update(dict.fromkeys(waiting, (time, len(steps))))
            waiting = []
    lanes(second, "The server steps on two updates", f"{len(steps)} steps, {len(done) - len(waiting)} updates")
    for name, begin, time, age in done:
        bar(second, name, begin, time, str(age))
    for name, (begin, _) in work.items():
        if name not in waiting and begin < HORIZON:
            bar(second, name, begin, begin + pace[name], "")
    for time in steps:
        mark(second, time)
    s.text(left, 440, "0 s", 15, "soft", "start")
    s.text(left + scale * HORIZON, 440, f"{HORIZON} s", 15, "soft", "end")
    s.arrow(230, 478, 260, 478, "green", 3, head=False)
    s.text(270, 484, "a step of the server", 16, "ink", "start")
    s.rect(466, 464, 30, 28, "bluefill", "blue", 3)
    s.text(481, 484, "1", 16, "blue", "middle", "600")
    s.text(506, 484, "training; the update missed one step", 16, "ink", "start")
    return s.done()


PRIME: Final = 31
"""The field of the figure of coded sums."""


def secure_sum(theme: str) -> str:
    """Shards of four updates in a small field; relays add, and any three of their sums give the sum of the updates."""
    s = Svg(
        1000,
        446,
        "A coded sum",
        "Each of four clients hides its update of two numbers behind a random one, in four shards, one for each relay. "
        "Every relay adds the shards that it holds and sends the sum alone. Three of the four sums give the sum of all "
        "updates.",
        theme,
    )
    updates = {"A": (2, 5), "B": (4, 1), "C": (0, 3), "D": (1, 2)}
    random = {"A": 11, "B": 25, "C": 19, "D": 7}
    points = (1, 2, 3, 4)
    shards = {
        name: [(first + second * z + random[name] * z * z) % PRIME for z in points]
        for name, (first, second) in updates.items()
    }
    sums = [sum(row[i] for row in shards.values()) % PRIME for i in range(4)]
    total = _solved(sums[:3], points[:3])[:2]
    if total != tuple(sum(each) for each in zip(*updates.values(), strict=True)):
        raise ArithmeticError("the sums of three relays are not the sum of the updates")
    left, width, top, height = 356.0, 92.0, 92.0, 46.0
    s.text(96, 40, "client", 16, "soft", "middle", "600")
    s.text(186, 40, "update", 16, "soft", "middle", "600")
    s.text(278, 40, "random", 16, "soft", "middle", "600")
    for column in range(4):
        x = left + width * column
        s.rect(x + 4, 20, width - 8, 292, "lane", None)
        s.text(x + width / 2, 40, f"relay {column + 1}", 16, "soft", "middle", "600")
    for row, (name, (first, second)) in enumerate(updates.items()):
        y = top + height * row
        s.text(96, y, name, 18, "ink", "middle", "600")
        s.text(186, y, f"{first}, {second}", 18, "ink")
        s.text(278, y, str(random[name]), 18, "soft")
        s.arrow(308, y - 6, 352, y - 6, "blue", 1.8)
        for column, shard in enumerate(shards[name]):
            x = left + width * column + width / 2
            s.rect(x - 22, y - 22, 44, 32, "bluefill", "blue", 4)
            s.text(x, y, str(shard), 17, "blue", "middle", "600")
    for column, value in enumerate(sums):
        x = left + width * column + width / 2
        gone = column == 3
        if gone:
            s.rect(x - 26, 264, 52, 36, "card", "line", 4, "5 4")
            s.cross(x, 340)
        else:
            s.rect(x - 26, 264, 52, 36, "greenfill", "green", 4)
            s.arrow(x, 300, x, 356, "green")
        s.text(x, 288, str(value), 18, "soft" if gone else "green", "middle", "600")
    s.text(330, 288, "sum", 17, "green", "end", "600")
    s.rect(left, 358, width * 3, 44)
    s.text(left + width * 1.5, 386, f"Server: three sums give {total[0]}, {total[1]}", 15, "ink", "middle", "600")
    added = ", ".join(f"{' + '.join(map(str, each))} = {sum(each)}" for each in zip(*updates.values(), strict=True))
    s.text(340, 386, added, 16, "ink", "end")
    notes = ("A relay sends its sum", "and no shard. One", "shard looks random.", "", "One relay may vanish.")
    for row, words in enumerate(notes):
        s.text(742, top + 26 * row, words, 17, "ink", "start")
    s.text(500, 436, f"Shard of relay z: first + second · z + random · z², modulo {PRIME}.", 15, "soft")
    return s.done()


def _solved(values: list[int], points: tuple[int, ...]) -> tuple[int, ...]:
    """Return the coefficients of the polynomial over the field that has these values at three points."""
    found = [0, 0, 0]
    for i, value in enumerate(values):
        a, b = (point for j, point in enumerate(points) if j != i)
        scale = value * pow((points[i] - a) * (points[i] - b), -1, PRIME)
        for power, coefficient in enumerate((a * b, -(a + b), 1)):
            found[power] = (found[power] + scale * coefficient) % PRIME
    return tuple(found)


class Row(NamedTuple):
    """A line of README's table: MB up and down in all 40 rounds, accuracy on digits after 3, 8 and 40."""

    name: str
    up: float
    down: float
    accuracy: tuple[float, ...]


TRANSFERS: Final = 40 * 10
"""Messages each way behind a row of README's table: ten clients in each of 40 rounds."""


def first_table() -> list[Row]:
    """Return the rows of README's table, so that the figures say what it says."""
    found = []
    for line in (ROOT / "README.md").read_text("utf-8").splitlines():
        name, up, down, digits, *_ = [*line.strip("| ").split(" | "), "", "", "", ""]
        if " MB" in up and " MB" in down:
            mb = [float(cell.partition(" MB")[0]) for cell in (up, down)]
            found.append(Row(name.strip("*"), *mb, tuple(map(float, digits.split(" / ")))))
    return found


def bytes_accuracy(theme: str) -> str:
    """README's table: bytes of a training on the left, accuracy on the right."""
    rows = first_table()
    s = Svg(
        1000,
        430,
        "Bytes and accuracy of five lines",
        " ".join(f"{r.name}: {r.up:g} MB up, {r.down:g} MB down, {r.accuracy[-1]:g} % after 40 rounds." for r in rows),
        theme,
    )
    left, scale, top, step = 215.0, 235 / max(max(r.up, r.down) for r in rows), 60.0, 62.0
    low, high, begin, end = 40.0, 100.0, 590.0, 970.0
    s.text(left, 30, "MB of a training", 17, "ink", "start", "600")
    s.text(begin, 30, "accuracy on digits, %", 17, "ink", "start", "600")

    def place(value: float) -> float:
        return begin + (value - low) / (high - low) * (end - begin)

    for tick in range(int(low), int(high) + 1, 10):
        x = place(tick)
        s.arrow(x, top - 10, x, top + step * len(rows) - 8, "line", 0.7, head=False)
        s.text(x, top + step * len(rows) + 14, str(tick), 14, "soft")
    for i, row in enumerate(rows):
        y = top + step * i
        s.text(left - 14, y + 27, row.name, 16, "ink", "end", "600")
        for offset, value, colour in ((0, row.up, "blue"), (23, row.down, "orange")):
            s.rect(left, y + offset, max(scale * value, 2), 19, f"{colour}fill", colour, 2)
            s.text(left + scale * value + 8, y + offset + 15, f"{value:g}", 15, colour, "start", "600")
        first, last = row.accuracy[0], row.accuracy[-1]
        s.arrow(place(first), y + 21, place(last), y + 21, "line", 1.5, head=False)
        for value, fill in zip(row.accuracy, ("card", "greenfill", "green"), strict=True):
            s.circle(place(value), y + 21, 8, fill, "green")
    y = top + step * len(rows) + 48
    for x, colour, words in ((left, "blue", "clients send"), (left + 150, "orange", "server sends")):
        s.rect(x, y - 14, 24, 18, f"{colour}fill", colour, 2)
        s.text(x + 34, y, words, 16, "ink", "start")
    for x, fill, words in ((begin, "card", "3 rounds"), (begin + 122, "greenfill", "8"), (begin + 190, "green", "40")):
        s.circle(x + 8, y - 6, 8, fill, "green")
        s.text(x + 24, y, words, 16, "ink", "start")
    return s.done()


def systems(theme: str) -> str:
    """All stored rows beside FedAvg, a block for each task: bytes on the left, accuracy on the right."""
    tasks = beside_fedavg(stored(ROOT / RESULTS))
    step, lowest = 24.0, -10.0
    s = Svg(
        1000,
        int(64 + sum(52 + step * len(rows) for rows in tasks.values())),
        "Bytes and accuracy of all stored rows beside FedAvg",
        " ".join(
            f"{task}: {row.label} ({row.experiment}), {row.factor:.3g} times fewer bytes, {row.points:+.1f} points."
            for task, rows in tasks.items()
            for row in rows
        ),
        theme,
    )
    left, right, begin, end = 370.0, 640.0, 730.0, 930.0
    most = 10.0 ** math.ceil(math.log10(max((row.factor for rows in tasks.values() for row in rows), default=10.0)))

    def factor_at(value: float) -> float:
        return left + math.log(max(value, 0.1) / 0.1) / math.log(most / 0.1) * (right - left)

    def points_at(value: float) -> float:
        return begin + (min(max(value, lowest), 2.0) - lowest) / (2.0 - lowest) * (end - begin)

    s.text(left, 22, "times fewer bytes up (log scale)", 15, "ink", "start", "600")
    s.text(begin, 22, "points of test accuracy", 15, "ink", "start", "600")
    s.text(14, 22, "FedAvg is 1 and 0", 15, "ink", "start", "600")
    top = 64.0
    for task, rows in tasks.items():
        bottom = top + 14 + step * len(rows)
        s.text(14, top, task, 17, "ink", "start", "600")
        for power in range(-1, round(math.log10(most)) + 1):
            x = factor_at(10.0**power)
            s.text(x, top, f"{10.0**power:g}", 13, "soft")
            s.arrow(x, top + 8, x, bottom, "ink" if power == 0 else "line", 1.2 if power == 0 else 0.6, head=False)
        for points in range(int(lowest), 3, 2):
            x = points_at(points)
            s.text(x, top, f"{points:+d}" if points else "0", 13, "soft")
            s.arrow(x, top + 8, x, bottom, "ink" if points == 0 else "line", 0.6 if points else 1.2, head=False)
        for i, row in enumerate(rows):
            y = top + 24 + step * i
            s.text(left - 12, y + 5, f"{row.label} ({row.experiment})", 14, "ink", "end")
            s.arrow(factor_at(1.0), y, factor_at(row.factor), y, "blue", 2.5, head=False)
            s.circle(factor_at(row.factor), y, 5, "blue", "blue")
            s.text(right + 8, y + 5, f"{row.factor:.3g}", 13, "blue", "start", "600")
            colour = "red" if row.points < -1.0 else "green"
            if row.points < lowest:
                s.arrow(points_at(lowest) + 20, y, points_at(lowest), y, colour)
            else:
                s.arrow(points_at(0.0), y, points_at(row.points), y, colour, 2.5, head=False)
                s.circle(points_at(row.points), y, 5, colour if row.points < -1.0 else "card", colour)
            s.text(end + 12, y + 5, f"{row.points:+.1f}", 13, colour, "start", "600")
        top = bottom + 38
    s.circle(begin, top - 14, 5, "card", "green")
    s.text(begin + 12, top - 9, "at most 1 point lost", 14, "ink", "start")
    s.circle(begin + 172, top - 14, 5, "red", "red")
    s.text(begin + 184, top - 9, "more", 14, "ink", "start")
    return s.done()


LINKS: Final = ((1, 1), (1, 10), (10, 10), (10, 50))
"""Rates up and down, in Mbit/s."""


def link_time(theme: str) -> str:
    """The seconds that one client's messages of a round take on a link: README's bytes divided by its rate."""
    rows = first_table()
    s = Svg(
        1000,
        446,
        "Seconds of transfer in one round, by link",
        "Logarithmic scale. For each link, the time that the model takes to a client and its update takes back.",
        theme,
    )
    colours = {"plain FedAvg": "ink", "safe": "blue", "both ways": "green", "smaller": "orange"}
    shown = [row for row in rows if row.name in colours]
    low, high, left, right = 0.001, 10.0, 170.0, 930.0

    def place(seconds: float) -> float:
        return left + math.log(seconds / low) / math.log(high / low) * (right - left)

    for tick in (0.001, 0.01, 0.1, 1, 10):
        s.arrow(place(tick), 34, place(tick), 392, "line", 0.7, head=False)
        s.text(place(tick), 24, f"{tick:g} s", 15, "soft")
    for i, (up, down) in enumerate(LINKS):
        y = 44 + 88 * i
        s.text(left - 16, y + 34, f"{up} / {down} Mbit/s", 16, "ink", "end", "600")
        for j, row in enumerate(shown):
            seconds = 8 * (row.up / up + row.down / down) / TRANSFERS
            colour = colours[row.name]
            s.rect(left, y + 18 * j, place(seconds) - left, 15, f"{colour}fill", colour, 2)
            s.text(place(seconds) + 8, y + 18 * j + 13, f"{seconds:.2g} s", 14, colour, "start", "600")
    x = left
    for name, colour in colours.items():
        s.rect(x, 412, 24, 18, f"{colour}fill", colour, 2)
        s.text(x + 34, 427, name, 16, "ink", "start")
        x += 180
    return s.done()


SEEN: Final = (
    # line, what the server sees, what the users of the model and other clients see, unit of the guarantee
    ("Compressed", ("every update", "red"), ("the exact mean", "red"), "none"),
    ("CodedFedAvg, sumcode", ("the exact sum", "orange"), ("the exact mean", "red"), "none"),
    ("DpFedAvg", ("every update", "red"), ("a noisy mean", "green"), "client"),
    ("RecordDp", ("noisy updates", "green"), ("a noisy mean", "green"), "record"),
    ("DistributedDp", ("a noisy sum", "green"), ("a noisy mean", "green"), "client"),
    ("local_dp", ("noisy updates", "green"), ("a noisy mean", "green"), "client"),
)


def who_sees(theme: str) -> str:
    """What the server and the users of the model see under each private system."""
    s = Svg(
        1000,
        452,
        "Who sees what",
        " ".join(
            f"{line}: the server sees {server[0]}, users of the model see {users[0]}; guarantee for a {unit}."
            for line, server, users, unit in SEEN
        ),
        theme,
    )
    columns = ((250, 270, "the server sees"), (545, 270, "users of the model see"), (840, 140, "guarantee for"))
    for x, width, head in columns:
        s.text(x + width / 2, 30, head, 16, "soft", "middle", "600")
    for i, (line, server, users, unit) in enumerate(SEEN):
        y = 48 + 58 * i
        s.text(230, y + 28, line, 15, "ink", "end", "600")
        for (x, width, _), (words, colour) in zip(columns, (server, users), strict=False):
            s.rect(x, y, width, 44, "card" if colour == "red" else f"{colour}fill", colour)
            s.text(x + width / 2, y + 28, words, 17, colour, "middle", "600")
        x, width, _ = columns[2]
        s.rect(x, y, width, 44, "lane", None)
        s.text(x + width / 2, y + 28, unit, 17, "soft" if unit == "none" else "ink")
    s.text(
        500,
        430,
        "Green: noise is added before it is seen. Red: nothing is hidden. Orange: one update is hidden in the sum.",
        16,
        "soft",
    )
    return s.done()


def two_bits(theme: str) -> str:
    """Ten values of which top-k keeps four, in two bits each, and what waits in the memory."""
    values = (0.4, -2.9, 0.7, 4.6, -0.3, 1.0, -4.2, -0.8, 3.1, 0.2)
    kept = sorted(range(len(values)), key=lambda i: -abs(values[i]))[:4]
    sizes = sorted(abs(values[i]) for i in kept)
    # The two means that leave the least squared error, as "q2" fits them.
    small, large = min(
        ((sizes[:cut], sizes[cut:]) for cut in range(1, len(sizes))),
        key=lambda parts: sum((v - sum(p) / len(p)) ** 2 for p in parts for v in p),
    )
    levels = (sum(small) / len(small), sum(large) / len(large))
    sent = [0.0] * len(values)
    for i in kept:
        sent[i] = math.copysign(min(levels, key=lambda level, i=i: abs(abs(values[i]) - level)), values[i])
    waits = [v - w for v, w in zip(values, sent, strict=True)]
    s = Svg(
        1000,
        520,
        "What top-k in two bits sends, and what it keeps",
        "Ten values. The four largest are sent with a sign and one of two magnitudes, "
        f"{levels[0]:g} and {levels[1]:g}. The rest and the rounding error wait in the client's memory.",
        theme,
    )
    left, cell, unit = 230.0, 74.0, 12.0
    panels = (
        ("update", values, "ink", "ten numbers"),
        ("sent", sent, "blue", f"sign and {levels[0]:g} or {levels[1]:g}"),
        ("memory", waits, "orange", "goes into the next round"),
    )
    for row, (head, numbers, colour, words) in enumerate(panels):
        zero = 92 + 162 * row
        s.text(24, zero - 8, head, 18, "ink", "start", "600")
        s.text(24, zero + 16, words, 14, "soft", "start")
        s.arrow(left, zero, left + cell * len(values), zero, "line", 1, head=False)
        for i, value in enumerate(numbers):
            x = left + cell * i + 14
            if abs(value) > 1e-9:
                up = max(value, 0) * unit
                s.rect(x, zero - up, cell - 28, abs(value) * unit, f"{colour}fill", colour, 2)
                s.text(x + (cell - 28) / 2, zero + (18 if value > 0 else -8), f"{value:.3g}", 15, colour)
    s.text(500, 506, "Sent and memory add up to the update.", 16, "soft")
    return s.done()


FIGURES: Final[Mapping[str, Callable[[str], str]]] = {
    "tree": tree,
    "pair": pair,
    "memory": memory,
    "support": support,
    "buffered": buffered,
    "coded": coded,
    "secure-sum": secure_sum,
    "push-sum": push_sum,
    "bytes-accuracy": bytes_accuracy,
    "systems": systems,
    "link-time": link_time,
    "who-sees": who_sees,
    "two-bits": two_bits,
}


def drawn() -> dict[str, str]:
    """Return the text of each figure in each theme, by the name of its file."""
    return {f"{name}-{theme}.svg": draw(theme) for name, draw in FIGURES.items() for theme in THEMES}


if __name__ == "__main__":
    for file, text in drawn().items():
        (ROOT / "docs" / "figures" / file).write_text(text, "utf-8")
