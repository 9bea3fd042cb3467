"""Keeps an edge node running: its SuperNode, the executor of its messages, and its listener for other clients.

What ends is started again, after a pause that grows; what cannot get better by waiting ends the node, with a status
that a service manager can tell from the rest. When the node ends, however it ends, nothing that it started is left.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final

from fedcomp.clients.edge import contact, probe
from fedcomp.clients.edge.children import Child, adopt_orphans
from fedcomp.clients.edge.condition import Condition, write_whole
from fedcomp.clients.edge.events import EventLog
from fedcomp.clients.edge.failures import Failure, classify
from fedcomp.clients.edge.options import NodeOptions
from fedcomp.clients.edge.processes import below
from fedcomp.rng import Key

TEMPORARY, CONFIGURATION = 75, 78
"""Exit statuses, of sysexits.h: may work when it is tried again; will not until somebody changes something."""

SUPERNODE: Final = "supernode"
_LOOK_SECONDS: Final = 5.0
_GRACE_SECONDS: Final = 10.0


@dataclass(frozen=True)
class Pauses:
    """Seconds between the end of a process and its next start: doubled each time, up to ``longest``, less up to a half.

    Nodes that lost their SuperLink at once come back one by one: the part that is left out is drawn for each partition.

    Examples
    --------
    >>> [round(Pauses(7)(n), 1) for n in range(4)] == [round(Pauses(7)(n), 1) for n in range(4)]
    True
    """

    partition: int
    first: float = 1.0
    longest: float = 60.0
    healthy: float = 60.0
    """After so many seconds in contact with the SuperLink the next pause is a first one."""

    def __call__(self, attempt: int) -> float:
        share = Key(0, "node-restart", round=attempt, partition=self.partition).u64() / 2.0**64
        doubled = min(self.longest, 2.0 * self.first * 2.0 ** min(attempt, 30))
        return max(self.first, doubled * (1.0 - share / 2.0))


@dataclass
class Service:
    """A process that is kept running.

    Attributes
    ----------
    name : str
    command : sequence of str
    env : mapping of str to str
    ready : str
        A pattern of the line that says it is ready; empty is ready when started.
    after : Service or None
        Started only when that one is ready.
    fatal : mapping of int to str
        Exit statuses that end the node, and why.
    orphaned : int
        The signal that ends it when the supervisor is killed; 0 for one that leaves when its pipe is closed.
    nice : int
        By how much it gives way to the others.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    ready: str = ""
    after: Service | None = None
    fatal: Mapping[int, str] = field(default_factory=dict)
    orphaned: int = signal.SIGKILL
    nice: int = 0
    child: Child | None = None
    is_ready: bool = False
    due: float = 0.0
    attempt: int = 0
    started: float = 0.0
    printed: deque[str] = field(default_factory=lambda: deque(maxlen=80))


class Supervisor:
    """Runs services until SIGTERM, SIGINT, or a failure that waiting does not mend.

    Parameters
    ----------
    options : NodeOptions
    services : sequence of Service
        One of them is called "supernode".
    log : EventLog
    pauses : Pauses, optional
    behind : callable, optional
        Returns by how many seconds this clock is behind the SuperLink's, or None.
    """

    def __init__(
        self,
        options: NodeOptions,
        services: Sequence[Service],
        log: EventLog,
        *,
        pauses: Pauses | None = None,
        behind: Callable[[], float | None] | None = None,
    ) -> None:
        self._options = options
        self._services = list(services)
        self._log = log
        self._pauses = pauses or Pauses(options.partition)
        tls = options.root_certificates is not None
        self._behind = behind or (lambda: probe.behind(options.address, tls=tls))
        self._condition = Condition()
        self._status: int | None = None
        self._began = time.monotonic()
        self._looked = -_LOOK_SECONDS
        self._since: dict[str, float] = {}
        self._reached = ""
        self._kernel_tells = True
        self._supernode = next(service for service in self._services if service.name == SUPERNODE)

    def run(self) -> int:
        """Return the exit status of the node: 0 after a signal, 75 or 78."""
        adopt_orphans()
        self._began = time.monotonic()
        with _signals(self._leave) as woken:
            try:
                while self._status is None:
                    self._start_due()
                    self._wait(woken)
                    self._collect()
                    self._look()
            finally:
                self._stop()
        return self._status

    def _leave(self, number: int) -> None:
        self._status = 0

    # Starting and waiting.

    def _start_due(self) -> None:
        now = time.monotonic()
        for service in self._services:
            waits = service.after is not None and not service.after.is_ready
            if service.child is None and not waits and now >= service.due:
                service.child = Child(service.command, service.env, service.orphaned, service.nice)
                service.started, service.is_ready = now, not service.ready
                service.printed.clear()
                if service is self._supernode:
                    self._condition.started()
                self._log("started", f"{service.name} has process id {service.child.pid}", service=service.name)

    def _wait(self, woken: int) -> None:
        children = [service.child for service in self._services if service.child is not None]
        dues = [s.due for s in self._services if s.child is None] + [self._looked + _LOOK_SECONDS]
        readable = [woken, *(child.fileno() for child in children)]
        # One that is due but waits for another is woken by that other's lines.
        pause = max(min(due - time.monotonic() for due in dues), 0.02)
        select.select(readable, [], [], min(pause, _LOOK_SECONDS))
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 4096)

    def _collect(self) -> None:
        for service in self._services:
            child = service.child
            if child is None:
                continue
            # The status first: what is read afterwards is all that it printed.
            status = child.returncode
            for line in child.lines() or ():
                self._line(service, line)
            if status is not None:
                child.close()
                service.child, service.is_ready = None, False
                self._kill_strays()
                if self._status is None:
                    self._ended(service, status)
        self._reap()

    def _line(self, service: Service, line: str) -> None:
        if not line.strip():
            return
        service.printed.append(line)
        self._log.output(service.name, line)
        if service.ready and re.search(service.ready, line):
            service.is_ready = True
        if service is self._supernode:
            was_failing, node = self._condition.failing, self._condition.node_id
            self._condition.line(line, time.monotonic())
            if self._condition.node_id not in (None, node):
                self._log("joined", f"the SuperLink knows this node as {self._condition.node_id}")
            if self._condition.failing and not was_failing:
                self._unreachable()

    def _unreachable(self) -> None:
        """Ask why the SuperNode tries in vain: Flower repeats it for ever."""
        if self._options.root_certificates is None and probe.speaks_tls(self._options.address):
            self._fail(
                Failure(
                    "needs-tls",
                    f"the SuperLink at {self._options.superlink} speaks TLS: give --root-certificates, not --insecure",
                    0.0,
                )
            )

    def _ended(self, service: Service, status: int) -> None:
        now = time.monotonic()
        if status in service.fatal:
            self._fail(Failure(service.name, service.fatal[status], 0.0))
            return
        if service is self._supernode:
            self._condition.state = "waiting"
            failure = classify(status, service.printed, self._behind)
        else:
            failure = Failure(f"{service.name}-ended", f"{service.name} ended with status {status}")
        healthy = now - service.started >= self._pauses.healthy
        if service is self._supernode:
            # Alive is not enough: one that waited for a SuperLink all the time has not been healthy.
            healthy = healthy and self._condition.contact is not None and self._condition.contact > service.started
        if healthy:
            service.attempt = 0
            self._since.clear()
        self._fail(failure)
        pause = self._pauses(service.attempt)
        service.attempt += 1
        service.due = now + pause
        self._condition.restarts += 1
        if self._status is None:
            said = f"{service.name} is started again in {pause:.1f} s"
            self._log("restart", said, service=service.name, seconds=round(pause, 3))

    def _fail(self, failure: Failure) -> None:
        """Say what happened; end the node when it has lasted longer than it may."""
        now = time.monotonic()
        since = self._since.setdefault(failure.event, now)
        final = now - since >= failure.patience
        self._condition.error = f"{failure.event}: {failure.message}"
        self._log(failure.event, failure.message, level="error" if final else "warning")
        if final:
            self._status = CONFIGURATION

    def _kill_strays(self) -> None:
        """Kill what an ended service left behind: helpers of a dead SuperNode would serve the next one, on its port."""
        own = {service.child.pid for service in self._services if service.child is not None}
        ours = own.union(*(below(pid) for pid in own))
        for pid in below(os.getpid()) - ours:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Wait for orphans that were adopted: an ended one stays in the list of processes until somebody does."""
        own = {service.child.pid for service in self._services if service.child is not None}
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None or found.si_pid in own:
                return
            os.waitpid(found.si_pid, 0)

    # The condition of the node.

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        child = self._supernode.child
        if child is not None and self._kernel_tells:
            try:
                age = contact.last_received(child.pid, self._options.port)
            except OSError as error:
                self._kernel_tells = False
                self._log(
                    "contact", f"the kernel does not tell ({error}): contact is seen in log lines only", level="warning"
                )
            else:
                if age is not None:
                    self._condition.received(now - age)
        if child is not None and self._condition.node_id is not None:
            self._condition.state = "running"
        reached = self._condition.superlink(now)
        if reached != self._reached and "unreachable" in (reached, self._reached):
            level = "warning" if reached == "unreachable" else "info"
            self._log("superlink", f"the SuperLink is {reached}", level=level)
        self._reached = reached
        self._heartbeat(now)
        since = self._began if self._condition.contact is None else self._condition.contact
        if self._options.give_up is not None and now - since > self._options.give_up and self._status is None:
            self._log("gave-up", f"no contact with the SuperLink for {now - since:.0f} s", level="error")
            self._status = TEMPORARY

    def _heartbeat(self, now: float) -> None:
        if self._options.heartbeat is not None:
            try:
                write_whole(self._options.heartbeat, self._condition.to_json(now, time.time()))
            except OSError as error:
                # A full disk ends no node: who reads the file sees that it is old.
                self._log("heartbeat", f"cannot write {self._options.heartbeat}: {error}", level="warning")

    # The end.

    def _stop(self) -> None:
        """End everything below this process: ask, wait, insist."""
        self._log("stopping", "the node ends")
        # The SuperNode signs off at its SuperLink; a second signal would end it before it has.
        for service in self._services:
            if service.child is not None:
                service.child.signal(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_SECONDS
        while any(service.child is not None for service in self._services) and time.monotonic() < deadline:
            readable = [service.child.fileno() for service in self._services if service.child is not None]
            select.select(readable, [], [], 0.1)
            self._collect()
        asked: set[int] = set()
        deadline = time.monotonic() + 1.0
        while left := below(os.getpid()):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    if time.monotonic() > deadline:
                        os.kill(pid, signal.SIGKILL)
                    elif pid not in asked:
                        os.kill(pid, signal.SIGTERM)
            asked |= left
            self._collect()
            time.sleep(0.02)
        self._collect()
        self._condition.state = "stopped"
        self._heartbeat(time.monotonic())
        peer = self._options.peer
        if peer is not None and peer.temporary and peer.store is not None:
            # It removes the store itself, unless it had to be killed.
            shutil.rmtree(Path(peer.store), ignore_errors=True)
        self._log("stopped", f"status {self._status}")


@contextlib.contextmanager
def _signals(leave: Callable[[int], object]) -> Iterator[int]:
    """Call ``leave`` on SIGTERM and SIGINT inside of the block; give the descriptor that any signal makes readable."""
    woken, wakes = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wakes, False)

    def handle(number: int, frame: FrameType | None) -> None:
        leave(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    # A child that ends wakes the loop as well.
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
    wakeup = signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    try:
        yield woken
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(woken)
        os.close(wakes)
