"""Supervision of processes: the restart loop of an edge node and of ``fedcomp link``.

What ends is started again, after a pause that grows; what cannot get better by waiting ends the supervisor, with a
status that a service manager can tell from the rest. However it ends, nothing that it started is left.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fedcomp.clients.edge import contact, probe
from fedcomp.clients.edge.condition import Condition, write_whole
from fedcomp.clients.edge.events import EventLog
from fedcomp.clients.edge.failures import Failure, classify
from fedcomp.clients.edge.options import NodeOptions
from fedcomp.clients.edge.processes import Child, adopt_orphans, below
from fedcomp.rng import Key

TEMPORARY, CONFIGURATION = 75, 78
"""Exit statuses, of sysexits.h: may work when it is tried again; will not until somebody changes something."""

SUPERNODE: Final = "supernode"
LOOK_SECONDS, GRACE_SECONDS = 5.0, 10.0
"""Between two looks at how the node is; for a SuperNode that signs off."""


FIRST, LONGEST, HEALTHY = 1.0, 60.0, 60.0
"""Seconds: the first pause before a start and the longest; after so many in contact the next is a first one."""


def pause(partition: int, attempt: int) -> float:
    """Return the seconds between the end of a process and its next start: doubled each time, less up to a half.

    Nodes that lost their SuperLink at once come back one by one: the part that is left out is drawn for each partition,
    and is the same each time.
    """
    share = Key(0, "node-restart", round=attempt, partition=partition).u64() / 2.0**64
    return max(FIRST, min(LONGEST, FIRST * 2.0 ** min(attempt + 1, 30)) * (1.0 - share / 2.0))


@dataclass
class Service:
    """A process that is kept running.

    Attributes
    ----------
    name : str
    command : sequence of str
    env : mapping of str to str
    ready : str
        A pattern of the line that says it is ready.
    port : int
        It is ready when it accepts connections at this port of loopback. With neither it is ready when started.
    after : Service or None
        Started only when that one is ready.
    once : bool
        It does its work and ends with status 0, and is ready then.
    needed : bool
        Its end before it was ever ready ends all, with status 75.
    fatal : mapping of int to str
        Exit statuses that end all with status 78, and why.
    orphaned : int
        The signal that ends it when the supervisor is killed; 0 for one that leaves when its pipe is closed.
    nice : int
        By how much it gives way to the others.
    cwd : Path or None
        Where it runs; None is where this process does.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    ready: str = ""
    port: int = 0
    after: Service | None = None
    once: bool = False
    needed: bool = False
    fatal: Mapping[int, str] = field(default_factory=dict)
    orphaned: int = signal.SIGKILL
    nice: int = 0
    cwd: Path | None = None
    child: Child | None = None
    is_ready: bool = False
    was_ready: bool = False
    due: float = 0.0
    attempt: int = 0
    started: float = 0.0
    printed: deque[str] = field(default_factory=lambda: deque(maxlen=80))


class Supervisor:
    """Runs services until SIGTERM, SIGINT, or a failure that waiting does not mend.

    Subclasses say what is looked at every few seconds, and what becomes of a line and of an end.

    Parameters
    ----------
    services : sequence of Service
    log : EventLog
    partition : int
        Decides how long it waits before a start; see :func:`pause`.
    """

    def __init__(self, services: Sequence[Service], log: EventLog, partition: int = 0) -> None:
        self._services, self._log, self._partition = list(services), log, partition
        self._status: int | None = None
        self._looked = -LOOK_SECONDS

    def run(self) -> int:
        """Return the exit status: 0 after a signal, 75 or 78."""
        adopt_orphans()
        with _signals(self._leave) as woken:
            try:
                while self._status is None:
                    self._start_due()
                    self._wait(woken)
                    self._collect()
                    if time.monotonic() - self._looked >= LOOK_SECONDS:
                        self._looked = time.monotonic()
                        self.look(self._looked)
            finally:
                self._stop()
        return self._status

    def started(self, service: Service) -> None:
        """A process of a service was started."""

    def line(self, service: Service, line: str) -> None:
        """A service has printed a line."""

    def look(self, now: float) -> None:
        """See how things are; called every :data:`LOOK_SECONDS`."""

    def ended(self, service: Service, status: int) -> bool:
        """Say why a service ended; return whether its next pause is a first one."""
        self._log(f"{service.name}-ended", f"{service.name} ended with status {status}", level="warning")
        return time.monotonic() - service.started >= HEALTHY

    def stopping(self) -> None:
        """All services are about to be asked to end."""

    def stopped(self) -> None:
        """Nothing is left of them."""

    def _leave(self) -> None:
        self._status = 0

    def _give_up(self, event: str, message: str, status: int) -> None:
        self._log(event, message, level="error")
        self._status = status

    def _running(self) -> list[tuple[Service, Child]]:
        return [(service, service.child) for service in self._services if service.child is not None]

    def _start_due(self) -> None:
        now = time.monotonic()
        for service in self._services:
            waits = service.after is not None and not service.after.is_ready
            if service.child is None and not waits and now >= service.due:
                service.child = Child(service.command, service.env, service.orphaned, service.nice, service.cwd)
                service.started, service.is_ready = now, not (service.ready or service.port or service.once)
                service.printed.clear()
                self._log("started", f"{service.name} has process id {service.child.pid}", service=service.name)
                self.started(service)

    def _wait(self, woken: int) -> None:
        opening = [service for service, _ in self._running() if service.port and not service.is_ready]
        dues = [s.due for s in self._services if s.child is None] + [self._looked + LOOK_SECONDS]
        # One that is due but waits for another is woken by that other's lines.
        longest = max(min(due - time.monotonic() for due in dues), 0.02)
        readable = [woken, *(child.fileno() for _, child in self._running())]
        select.select(readable, [], [], min(longest, 0.1 if opening else LOOK_SECONDS))
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 4096)
        for service in opening:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", service.port), timeout=1.0).close()
                service.is_ready = service.was_ready = True

    def _collect(self) -> None:
        """Pass on what was printed, and see to what has ended."""
        for service, child in self._running():
            # The status first: what is read afterwards is all that it printed.
            status = child.returncode
            for line in filter(str.strip, child.lines()):
                service.printed.append(line)
                self._log.output(service.name, line)
                if service.ready and re.search(service.ready, line):
                    service.is_ready = service.was_ready = True
                self.line(service, line)
            if status is not None:
                child.close()
                service.child, service.is_ready = None, False
                if self._status is None:
                    self._restart(service, status)
        # Orphans that were adopted: an ended one stays in the list of processes until somebody waits for it.
        own = {child.pid for _, child in self._running()}
        with contextlib.suppress(ChildProcessError):
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if found.si_pid in own:
                    return
                os.waitpid(found.si_pid, 0)

    def _restart(self, service: Service, status: int) -> None:
        """See to a service that has ended: what is done is done, what cannot go on ends all, the rest is due again."""
        if service.once and status == 0:
            service.is_ready, service.due = True, math.inf
            return
        if status in service.fatal:
            self._give_up(service.name, service.fatal[status], CONFIGURATION)
            return
        if service.needed and not service.was_ready:
            self._give_up(f"{service.name}-ended", f"{service.name} ended with status {status}", TEMPORARY)
            return
        if self.ended(service, status):
            service.attempt = 0
        seconds = pause(self._partition, service.attempt)
        service.attempt += 1
        service.due = time.monotonic() + seconds
        if self._status is None:
            text = f"{service.name} restarts in {seconds:.1f} s"
            self._log("restart", text, service=service.name, seconds=round(seconds, 3))

    def _stop(self) -> None:
        """End everything below this process: ask, wait, insist."""
        self._log("stopping", "stopping all processes")
        self.stopping()
        # A SuperNode signs off at its SuperLink, and a server app says that it was stopped; a second signal would end
        # them before they have. The last first: what was started after another needs it.
        for _, child in reversed(self._running()):
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while (running := self._running()) and time.monotonic() < deadline:
            select.select([child.fileno() for _, child in running], [], [], 0.1)
            self._collect()
        _kill(below(os.getpid()), signal.SIGTERM)
        deadline = time.monotonic() + 1.0
        while left := below(os.getpid()):
            if time.monotonic() > deadline:
                _kill(left, signal.SIGKILL)
            self._collect()
            time.sleep(0.02)
        self._collect()
        self.stopped()
        self._log("stopped", f"status {self._status}")


class NodeSupervisor(Supervisor):
    """Runs a node, and knows how it is.

    Parameters
    ----------
    options : NodeOptions
    services : sequence of Service
        One of them is called "supernode".
    log : EventLog
    """

    def __init__(self, options: NodeOptions, services: Sequence[Service], log: EventLog) -> None:
        super().__init__(services, log, options.partition)
        self._options = options
        self._condition = Condition()
        self._began = time.monotonic()
        self._since: dict[str, float] = {}
        self._reached = ""
        self._kernel_tells = True
        self._supernode = next(service for service in self._services if service.name == SUPERNODE)

    def started(self, service: Service) -> None:
        """A new SuperNode has not joined yet."""
        if service is self._supernode:
            self._condition.started()

    def line(self, service: Service, line: str) -> None:
        """See in a line of the SuperNode whether it has joined, and whether it reaches its SuperLink."""
        if service is not self._supernode:
            return
        condition, options = self._condition, self._options
        was_failing, node = condition.failing, condition.node_id
        condition.line(line, time.monotonic())
        if condition.node_id not in (None, node):
            self._log("joined", f"the SuperLink knows this node as {condition.node_id}")
        # Why it tries in vain: Flower repeats it for ever.
        asks = condition.failing and not was_failing and options.root_certificates is None
        if asks and probe.speaks_tls(options.address):
            text = f"the SuperLink at {options.superlink} speaks TLS: give --root-certificates, not --insecure"
            self._fail(Failure("needs-tls", text, 0.0))

    def ended(self, service: Service, status: int) -> bool:
        """Say why a service ended; return whether it was healthy."""
        # Helpers of a dead SuperNode would serve the next one, on its port.
        own = {child.pid for _, child in self._running()}
        _kill(below(os.getpid()) - own.union(*map(below, own)), signal.SIGKILL)
        healthy = time.monotonic() - service.started >= HEALTHY
        failure = Failure(f"{service.name}-ended", f"{service.name} ended with status {status}")
        if service is self._supernode:
            self._condition.state = "waiting"
            tls = self._options.root_certificates is not None
            failure = classify(status, service.printed, lambda: probe.behind(self._options.address, tls=tls))
            # Alive is not enough: one that waited for a SuperLink all the time has not been healthy.
            healthy = healthy and self._condition.contact is not None and self._condition.contact > service.started
        if healthy:
            self._since.clear()
        self._fail(failure)
        self._condition.restarts += 1
        return healthy

    def _fail(self, failure: Failure) -> None:
        """Say what happened; end the node when it has lasted longer than it may."""
        now = time.monotonic()
        self._condition.error = f"{failure.event}: {failure.message}"
        if now - self._since.setdefault(failure.event, now) >= failure.patience:
            self._give_up(failure.event, failure.message, CONFIGURATION)
        else:
            self._log(failure.event, failure.message, level="warning")

    def look(self, now: float) -> None:
        """See how the node is, and write it down."""
        condition, child = self._condition, self._supernode.child
        if child is not None and self._kernel_tells:
            try:
                age = contact.last_received(child.pid, self._options.port)
                if age is not None:
                    condition.received(now - age)
            except OSError as error:
                # One that ended a moment ago hides its files from all but root; the next one will be asked for.
                if child.returncode is None:
                    self._kernel_tells = False
                    text = f"the kernel gives no answer ({error}): contact is seen in log lines only"
                    self._log("contact", text, level="warning")
        if child is not None and condition.node_id is not None:
            condition.state = "running"
        reached = condition.superlink(now)
        if reached != self._reached and "unreachable" in (reached, self._reached):
            level = "warning" if reached == "unreachable" else "info"
            self._log("superlink", f"the SuperLink is {reached}", level=level)
        self._reached = reached
        self._heartbeat(now)
        alone = now - (self._began if condition.contact is None else condition.contact)
        if self._options.give_up is not None and alone > self._options.give_up and self._status is None:
            self._give_up("gave-up", f"no contact with the SuperLink for {alone:.0f} s", TEMPORARY)

    def stopped(self) -> None:
        """Write down that the node is over."""
        self._condition.state = "stopped"
        self._heartbeat(time.monotonic())

    def _heartbeat(self, now: float) -> None:
        if self._options.heartbeat is not None:
            try:
                write_whole(self._options.heartbeat, self._condition.to_json(now, time.time()))
            except OSError as error:
                # A full disk ends no node: who reads the file sees that it is old.
                self._log("heartbeat", f"cannot write {self._options.heartbeat}: {error}", level="warning")


def _kill(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def _signals(leave: Callable[[], None]) -> Iterator[int]:
    """Call ``leave`` on SIGTERM and SIGINT inside of the block; give the descriptor that any signal makes readable."""
    woken, wakes = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wakes, False)
    before = {number: signal.signal(number, lambda *_: leave()) for number in (signal.SIGTERM, signal.SIGINT)}
    # A child that ends wakes the loop as well.
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
    wakeup = signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    try:
        yield woken
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(woken)
        os.close(wakes)
