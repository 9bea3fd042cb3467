"""Chaos schedules: when which fault is injected into a deployment, and the conditions checked afterwards.

The judge believes nobody: it compares what clients wrote down before they kept or sent anything, what the server has
in its sums, and what lies in the state folders at the end. With error feedback these add up, node by node:

    sum of updates made = sum of frames used + what is still owed + what was abandoned

An update may be abandoned only where the node was hit while it had the message: killed before its state was written,
the reply never left. Anything else is mass lost, or counted twice.

Vectors are compared by a few inner products with fixed random vectors: they are linear, so that they add up exactly as
the vectors do, and fit into a line of a journal (derived).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.errors import ConfigError
from fedcomp.rng import Key

NODE, SERVER_APP, SUPERLINK, LINK, DISK, CLOCK = "node", "server app", "SuperLink", "link", "disk", "clock"
NODE_FAULTS: Final = (NODE, LINK, DISK, CLOCK)
SERVER_FAULTS: Final = (SERVER_APP, SUPERLINK)

LOSING: Final = (NODE, CLOCK)
"""Faults for which a node may have made an update that it does not remember. A full disk is none of them: the node
answers with an error, remembers in memory, and writes all of it once there is room."""

CALM: Final = 4
"""Rounds between two faults of the server, so that the one is over before the next."""

PROJECTIONS: Final = 4
TOLERANCE: Final = 1e-4
"""Of sums, relative to the sum of their terms' sizes: frames and memories are float32."""
MAX_EXCUSED: Final = 16
"""Updates of a node that may be abandoned: all subsets of them are tried."""


@dataclass(frozen=True, order=True)
class Fault:
    """Something that is done to a deployment.

    Attributes
    ----------
    round : int
        During which it happens.
    kind : str
        SIGKILL of a node, the server app or the SuperLink; a pulled link; a full disk below the state folder; a power
        cut after which a node comes back with a wrong clock.
    node : int
        Who it happens to; -1 for the server's.
    after : float
        Part of a usual round, 0 to 1, that has passed then.
    lasts : int
        Rounds until the node is started again, the link plugged, the disk emptied, the clock set.
    """

    round: int
    kind: str
    node: int = -1
    after: float = 0.0
    lasts: int = 1


def schedule(seed: int, rounds: int, nodes: int, *, each: int = 3, server: int = 1) -> tuple[Fault, ...]:
    """Return faults in order of time, decided by the seed alone.

    Parameters
    ----------
    each : int
        Faults of each kind that nodes have, spread over all of them.
    server : int
        Faults of each kind that the server has.

    Raises
    ------
    ConfigError
        When there are too few rounds for them: the first and the last two are calm, and a node has one fault at a time.
    """
    params.integer("nodes", nodes, low=1)
    free = list(range(2, rounds - 1))
    wanted = [kind for kind in SERVER_FAULTS for _ in range(server)]
    if len(free) < max(len(wanted) * CALM, each * len(NODE_FAULTS)):
        raise ConfigError(f"rounds={rounds} are too few for {each} faults of each kind; give more rounds")
    drawn = Key(seed, "chaos/schedule").generator()
    found: list[Fault] = []
    # One in each stretch of rounds: as far apart as they can be, and yet at any time.
    stretch = len(free) // max(1, len(wanted))
    for place, kind in enumerate(drawn.permutation(wanted).tolist()):
        number = free[place * stretch + int(drawn.integers(0, stretch - CALM + 1))]
        found.append(Fault(number, kind, after=float(drawn.random())))
    busy: set[tuple[int, int]] = set()
    for kind in (kind for _ in range(each) for kind in NODE_FAULTS):
        open_to = [(r, n) for r in free for n in range(nodes) if not {(r, n), (r + 1, n), (r + 2, n)} & busy]
        if not open_to:
            raise ConfigError(f"{nodes} nodes have no room in {rounds} rounds for {each} faults of each kind")
        number, node = open_to[int(drawn.integers(0, len(open_to)))]
        lasts = 1 + int(drawn.integers(0, 2))
        busy |= {(number + later, node) for later in range(lasts + 1)}
        found.append(Fault(number, kind, node, float(drawn.random()), min(lasts, rounds - number)))
    return tuple(sorted(found))


def projected(vector: NDArray[np.float32], seed: int) -> tuple[float, ...]:
    """Return inner products of a vector with :data:`PROJECTIONS` random ones, the same for all that have the seed."""
    wide = vector.astype(np.float64)
    products = (
        wide @ Key(seed, "chaos/projection", layer=i).generator().standard_normal(len(wide)) for i in range(PROJECTIONS)
    )
    return tuple(float(each) for each in products)


def judge(
    made: Sequence[Mapping[str, Any]],
    used: Sequence[tuple[int, int]],
    owed: Mapping[int, Sequence[float]],
    *,
    hit: Collection[tuple[int, int]] = (),
    rounds: int = 0,
    finished: int = 0,
    processes: Sequence[str] = (),
    moved: Sequence[float] = (),
) -> dict[str, Any]:
    """Return what a run did wrong, in sentences, from what was seen of it from outside.

    Parameters
    ----------
    made : sequence of mapping
        What clients wrote down of messages, on the disk before anything was kept or sent: ``node``, ``sequence``, the
        number of the server's message, and the inner products (:func:`projected`) ``update``, of what training came to,
        and ``frame``, of what the frame decodes to. A message that came again has a line for each time.
    used : sequence of (int, int)
        Node and sequence number of every update in a sum of a model that was kept, by the server.
    owed : mapping of int to sequence of float
        By node: what its state folder still has for the server, when the server's last acknowledgement is heard.
    hit : collection of (int, int)
        Node and sequence number of messages whose updates a node may not have in its folder, because a fault met it.
    rounds, finished : int
        Asked for, and in the final model.
    processes : sequence of str
        Command lines of what still ran after everything was stopped.
    moved : sequence of float
        Of the final model less the first one; see :func:`projected`. Empty where nobody looked.

    Returns
    -------
    dict
        ``twice``, ``mass``, ``unfinished`` and ``left``: sentences, all empty when the run kept what it must;
        ``abandoned``, pairs of node and sequence number; ``lost``, by node: the largest inner product without a place,
        as a share of the sum of its updates' ones.

    Raises
    ------
    ConfigError
        When a node was hit during more than :data:`MAX_EXCUSED` messages.
    """
    known, times = {(line["node"], line["sequence"]) for line in made}, Counter(used)
    twice = [f"update {i} of node {node} is in the model {n} times" for (node, i), n in sorted(times.items()) if n > 1]
    unknown = sorted(set(used) - known)
    twice += [f"update {i} of node {node} is in the model, and the node never made it" for node, i in unknown]
    twice += _moved_otherwise(made, used, moved)
    mass, abandoned, lost = list[str](), list[tuple[int, int]](), dict[int, float]()
    for node in sorted({line["node"] for line in made}):
        lines = [line for line in made if line["node"] == node]
        excused = [line for line in lines if (node, line["sequence"]) in set(hit)]
        if len(excused) > MAX_EXCUSED:
            raise ConfigError(
                f"node {node} was hit during {len(excused)} messages; more than {MAX_EXCUSED} prove nothing"
            )
        # Of a message that came again the last answer is the one that left: a stored reply is no new line.
        last = {line["sequence"]: np.array(line["frame"]) for line in lines}
        held = _sum([owed[node]] if node in owed else [])
        missing = _sum(line["update"] for line in lines) - held
        missing -= _sum(times[node, sequence] * frame for sequence, frame in last.items())
        scale = max(float(sum(np.abs(line["update"]).max() for line in lines)) + float(np.abs(held).max()), 1e-12)
        # The fewest excused updates by which the rest is as small as it must be.
        lost[node], found = np.inf, tuple[Mapping[str, Any], ...]()
        for size in range(len(excused) + 1):
            for chosen in itertools.combinations(excused, size):
                share = float(np.abs(missing - _sum(line["update"] for line in chosen)).max()) / scale
                if share < lost[node]:
                    lost[node], found = share, chosen
            if lost[node] <= TOLERANCE:
                abandoned += [(node, line["sequence"]) for line in found]
                break
        else:
            said = f"{np.abs(missing).max():.3g} of {scale:.3g} without a place, {len(excused)} updates excused"
            mass.append(f"node {node}: updates, frames and memory do not add up; {said}")
    return {
        "twice": twice,
        "mass": mass,
        "unfinished": [] if finished >= rounds else [f"{finished} of {rounds} rounds are in the model"],
        "left": [f"still running: {command}" for command in processes],
        "abandoned": abandoned,
        "lost": lost,
    }


def _sum(vectors: Iterable[Sequence[float] | NDArray[np.float64]]) -> NDArray[np.float64]:
    return sum((np.asarray(each, np.float64) for each in vectors), np.zeros(PROJECTIONS))


def _moved_otherwise(
    made: Sequence[Mapping[str, Any]], used: Sequence[tuple[int, int]], moved: Sequence[float]
) -> list[str]:
    """Return what is wrong when the model is not the sum of its rounds' means of the frames that are said to be in it.

    Here nobody's list is believed: the frames are the clients' own, and the model is the one that came out.
    """
    if not moved:
        return []
    frames = {(line["node"], line["sequence"]): line["frame"] for line in made}
    rounds: dict[int, list[Sequence[float]]] = {}
    for pair in dict.fromkeys(used):
        if pair in frames:
            rounds.setdefault(pair[1], []).append(frames[pair])
    means = [np.mean(each, axis=0) for each in rounds.values()]
    missing = np.abs(np.array(moved) - _sum(means)).max()
    scale = float(sum(np.abs(each).max() for each in means)) + float(np.abs(moved).max())
    if missing <= TOLERANCE * max(scale, 1e-12):
        return []
    return [f"the model is not what its updates make of it: {missing:.3g} of {scale:.3g} differ"]
