"""A real deployment with injected faults, and its behaviour as seen from outside.

``fedcomp link`` and four ``fedcomp node`` over network links of their own; the apps are those of
:mod:`fedcomp.experiments.journal`. An operator is played, too: when the server app was killed, its run is stopped, and
it is submitted again.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from fedcomp.experiments.chaos import (
    CLOCK,
    DISK,
    LINK,
    LOSING,
    NODE,
    PROJECTIONS,
    SERVER_APP,
    SUPERLINK,
    Fault,
    judge,
)
from fedcomp.experiments.engines.guarded import GuardedDeployment
from fedcomp.experiments.engines.processes import DeploymentError, sigterm_raises
from fedcomp.experiments.engines.superlink import TASK_POLL
from fedcomp.experiments.journal import APP, CHECKPOINT, JOURNAL, ROUNDS, Kept, read_lines
from fedcomp.experiments.links import SlowLinks

RATE: Final = 1e8
"""Bits per second of each link: no limit to a model of a few kilobytes."""

DISK_BYTES: Final = 1 << 20
"""Of the disk below a state folder, which takes some kilobytes."""

STALLED: Final = 400.0
"""Seconds without the end of a round after which a run is given up, and judged as it is."""

MOMENTS: Final = 3.0
"""Seconds beside its pause that a client may take from the line in its journal to the written state."""

LOOK_SECONDS: Final = 45.0
"""Seconds beyond a round's deadline after which the SuperLink is asked whether there is a run."""

ENDS_SECONDS: Final = 60.0
"""Seconds in which a run has ended whose last round has."""

COMMAND_SECONDS: Final = 180.0

NO_ROOM: Final = "keeps its state on disk"
"""What a node says that cannot write its state."""

BEHIND: Final = 400.0
"""Seconds by which a wrong clock is behind, as that of a board without a battery is: more than the 305 that Flower
bears."""


class Faulted:
    """A deployment, and what is done to it.

    Parameters
    ----------
    deployment : GuardedDeployment
        Entered already.
    asked : dict
        See :func:`fedcomp.experiments.journal.serve`.
    faults : sequence of Fault

    Attributes
    ----------
    done : list of dict
        ``fault`` that was done, ``at``, in seconds since the epoch, and how many ``processes`` were killed; ``over``,
        where a disk has room again, since when.
    again : int
        How often a run was over before its last round, and was submitted again.
    noticed : int
        How many nodes with a wrong clock have said so in their logs.
    """

    def __init__(self, deployment: GuardedDeployment, asked: dict[str, Any], faults: Sequence[Fault]) -> None:
        self.deployment, self.asked = deployment, asked
        self.done: list[dict[str, Any]] = []
        self.again = self.noticed = self._run = 0
        self._file = deployment.folder / "asked.json"
        self._file.write_text(json.dumps(asked), encoding="utf-8")
        # What begins and what ends, by the round and the part of it.
        acts = [(fault.round, fault.after, True, fault) for fault in faults]
        acts += [(fault.round + fault.lasts, 0.0, False, fault) for fault in faults if fault.node >= 0]
        self._acts = sorted(acts, key=lambda act: act[:3])

    def run(self) -> list[dict[str, Any]]:
        """Submit the app and do all faults; return the rounds that ended, after the last one or a stall."""
        self._submit()
        rounds, seen, looked, progress = Path(self.asked["out"], ROUNDS), 0, time.monotonic(), time.monotonic()
        ended = read_lines(rounds)
        while not ended or ended[-1]["round"] < self.asked["rounds"]:
            self.deployment.require_running()
            self._act(ended)
            time.sleep(0.05)
            ended = read_lines(rounds)
            if len(ended) > seen:
                seen, looked, progress = len(ended), time.monotonic(), time.monotonic()
            if time.monotonic() - looked > self.asked["deadline"] + LOOK_SECONDS:
                looked = time.monotonic()
                if self._resume():
                    progress = looked
            if time.monotonic() - progress > STALLED:
                break
        return ended

    def status(self) -> str:
        """Return what the SuperLink says of the run, once it says that it has ended, or after a minute."""
        deadline = time.monotonic() + ENDS_SECONDS
        while True:
            status = str(self.deployment.runs()[0]["status"])
            if status.startswith("finished") or time.monotonic() > deadline:
                return status
            time.sleep(1.0)

    def _act(self, ended: Sequence[dict[str, Any]]) -> None:
        """Do what is due: in an earlier round, or at this part of a usual one."""
        if not ended:
            return
        lengths = [b["at"] - a["at"] for a, b in itertools.pairwise(ended)]
        usual = median(lengths[-9:]) if lengths else self.asked["deadline"] / 2
        number, part = ended[-1]["round"] + 1, (time.time() - ended[-1]["at"]) / usual
        while self._acts and self._acts[0][:2] <= (number, part):
            _, _, begins, fault = self._acts.pop(0)
            if not begins and not self._noticed(fault, ended):
                # Nobody sets a clock, or makes room on a disk, before somebody has seen what is wrong.
                bisect.insort(self._acts, (number + 1, 0.0, False, fault), key=lambda act: act[:3])
                continue
            if begins:
                killed = self._begin(fault)
                self.done.append({"fault": asdict(fault), "at": time.time(), "processes": killed})
            else:
                self._end(fault)

    def _begin(self, fault: Fault) -> int:
        deployment, node = self.deployment, fault.node
        if fault.kind in (NODE, CLOCK):
            cut = len(deployment.kill(node))
            if fault.kind == CLOCK:
                deployment.set_clock(node, -BEHIND)
                deployment.start(node, wait=False)
            return cut
        if fault.kind == LINK:
            deployment.links.pull(node)
        if fault.kind == DISK:
            deployment.disks[node].fill()
        if fault.kind not in (SERVER_APP, SUPERLINK):
            return 0
        killed = deployment.kill_server_app() if fault.kind == SERVER_APP else deployment.kill_superlink()
        if not killed:
            raise DeploymentError(f"there was no {fault.kind} to kill in round {fault.round}:\n{deployment.logs()}")
        if fault.kind == SERVER_APP:
            # Nodes that were being sent a message would wait for the rest of it until the SuperLink misses the app.
            deployment.flwr("stop", str(self._run), deployment.connection, name="stop", limit=COMMAND_SECONDS)
            self._submit()
        return len(killed)

    def _noticed(self, fault: Fault, ended: Sequence[dict[str, Any]]) -> bool:
        """Whether the log of a node says that its clock is wrong, or a round's report that a disk is full.

        A log begins with its process. Other faults need nobody to notice them.
        """
        if fault.kind == CLOCK:
            return "s behind the SuperLink's" in self.deployment.children[1 + fault.node].tail(10**6)
        if fault.kind == DISK:
            reports = [each["refused"] for each in ended if each["round"] >= fault.round]
            return any(NO_ROOM in reason for reasons in reports for reason in reasons)
        return True

    def _end(self, fault: Fault) -> None:
        deployment, node = self.deployment, fault.node
        if fault.kind == NODE:
            # With its key it is refused for up to a minute, for which nobody waits.
            deployment.start(node, wait=False)
        if fault.kind == CLOCK:
            self.noticed += 1
            deployment.set_clock(node, 0.0)
        if fault.kind == LINK:
            deployment.links.plug(node)
        if fault.kind == DISK:
            deployment.disks[node].empty()
            next(each for each in self.done if each["fault"] == asdict(fault))["over"] = time.time()

    def _resume(self) -> bool:
        """Submit the app again when the SuperLink says that its run is over: it was away for longer than a minute."""
        try:
            status = str(self.deployment.runs()[0]["status"])
        except DeploymentError:
            # It is away still: asked again later, until the run is given up.
            return False
        if not status.startswith("finished"):
            return False
        self.again += 1
        self._submit()
        return True

    def _submit(self) -> None:
        self._run = self.deployment.submit({"asked": str(self._file)}, limit=COMMAND_SECONDS, project=APP)


def faulted(
    seed: int,
    faults: Sequence[Fault],
    *,
    rounds: int,
    nodes: int,
    deadline: float,
    pause: float,
    state: bool,
) -> dict[str, Any]:
    """Train while faults are done; return what was seen and the judgement, as JSON-able fields.

    Parameters
    ----------
    faults : sequence of Fault
    deadline, pause : float
        Seconds; see :func:`fedcomp.experiments.journal.serve`.
    state : bool
        Whether nodes have state folders; a full disk needs them.

    Returns
    -------
    dict
        What :func:`~fedcomp.experiments.chaos.judge` returns, ``lost`` of the node that lost most; ``done`` as faults
        were done (:class:`Faulted`); ``ended`` as rounds ended (:func:`~fedcomp.experiments.journal.ended_of`);
        ``seconds``; ``updates`` made, and ``used``; ``again``, how often a run had to be submitted again besides where
        its server app was killed; ``noticed``, how many nodes with a wrong clock said so.
    """
    began = time.monotonic()
    with (
        sigterm_raises(),
        tempfile.TemporaryDirectory(prefix="fedcomp-faulted-") as folder,
        SlowLinks(nodes, RATE) as network,
        GuardedDeployment(
            network,
            states=Path(folder) / "states" if state else None,
            disk=DISK_BYTES if state else None,
            data=Path(folder),
            # A message is looked for once a second, as Flower does: the twenty times of other deployments on this
            # machine would take a processor. And what a killed node leaves in its folder for temporary files goes.
            settings={TASK_POLL: "1", "TMPDIR": folder},
            preload=("fedcomp.experiments.journal",),
            limit=COMMAND_SECONDS,
        ) as deployment,
    ):
        out = deployment.home("out")
        asked = {"seed": seed, "nodes": nodes, "rounds": rounds, "deadline": deadline, "pause": pause, "out": str(out)}
        faulty = Faulted(deployment, asked, faults)
        faulty.run()
        status = faulty.status()
        deployment.stop()
        left = deployment.left()
        if not (out / CHECKPOINT).exists():
            raise DeploymentError(f"no round ended:\n{deployment.logs()}")
        lines = {node: read_lines(Path(folder, f"node-{node}", JOURNAL)) for node in range(nodes)}
        kept = Kept(out, seed)
        # The disks of the folders are there as long as the deployment.
        states = [Path(folder, "states", str(node)) for node in lines] if state else None
        seen = seen_of(kept, lines, faulty.done, states)
    verdict = judge(**seen, hit=hits(lines, faulty.done, pause), rounds=rounds, processes=left)
    if status != "finished:completed":
        verdict["unfinished"].append(f"to the SuperLink the run is {status}")
    return {
        **verdict,
        "abandoned": [list(each) for each in verdict["abandoned"]],
        "lost": max(verdict["lost"].values(), default=0.0),
        "done": faulty.done,
        "ended": kept.rounds,
        "again": faulty.again,
        "noticed": faulty.noticed,
        "updates": len(seen["made"]),
        "used": len(seen["used"]),
        "seconds": time.monotonic() - began,
    }


def seen_of(
    kept: Kept,
    lines: Mapping[int, Sequence[dict[str, Any]]],
    done: Sequence[dict[str, Any]],
    states: Sequence[Path] | None,
) -> dict[str, Any]:
    """Return what :func:`~fedcomp.experiments.chaos.judge` is told of journals by node, and of what was kept; the
    ``states`` are the nodes' folders, None where they have none."""
    return {
        "made": [line for each in lines.values() for line in each],
        "used": [(node, each["sequence"]) for each in kept.rounds for node in each["used"]],
        "owed": {
            node: remembered(own, done, kept) if states is None else kept.owed(states[node], node)
            for node, own in lines.items()
        },
        "finished": len({each["round"] for each in kept.rounds}),
        "moved": kept.moved,
    }


def hits(
    lines: Mapping[int, Sequence[dict[str, Any]]], done: Sequence[dict[str, Any]], pause: float
) -> list[tuple[int, int]]:
    """Return the messages whose updates a node may not have in its folder: it was killed between the line in the
    journal and the written state, or its disk was full, and it wrote nothing since."""
    found = []
    for each in done:
        kind, node, at = each["fault"]["kind"], each["fault"]["node"], each["at"]
        if kind in LOSING:
            before = [line for line in lines[node] if line["at"] <= at]
            if before and at - before[-1]["at"] < pause + MOMENTS:
                found.append((node, before[-1]["sequence"]))
        if kind == DISK and lines[node] and lines[node][-1]["at"] < each.get("over", math.inf):
            # What cannot be written is in the memory of its process alone, which nobody reads after the end.
            found += [(node, line["sequence"]) for line in lines[node] if at - line["at"] < pause + MOMENTS]
    return found


def remembered(lines: Sequence[dict[str, Any]], done: Sequence[dict[str, Any]], kept: Kept) -> tuple[float, ...]:
    """Return what a node without a state folder has at the end: what it wrote down last, unless it was killed since."""
    nothing = (0.0,) * PROJECTIONS
    if not lines:
        return nothing
    last = lines[-1]
    killed = [d["at"] for d in done if d["fault"]["kind"] in LOSING and d["fault"]["node"] == last["node"]]
    if any(at > last["at"] for at in killed):
        return nothing
    peer = kept.peers.get(last["node"])
    if peer is not None and peer.consumed == last["sequence"]:
        return tuple(last["memory"])
    return tuple(np.array(last["memory"]) + np.array(last["frame"]))
