"""The relay's half of the protocol: who is told what, and a mailbox that never looks inside a message.

Life of an instruction. It is *issued* with the inbox that waits for its node. It is then *open*: asked again, verbatim,
every round. It ends in one of two ways. *Answered*: the inbox counts as delivered and what the node sent goes into
the mailboxes. *Given up*, when its node did not answer ``patience`` times or has lost its memory: the node is **gone**.
Its inbox was not delivered, whatever the node may have done with it, since its state is never used again: it comes back
only by **joining**, with a new state. Nothing else happens to an instruction; in particular none is ever withdrawn from
a node that goes on. So no message is delivered twice, and none is both delivered and returned.

Asynchronous algorithms (push-sum) go on without the nodes that have not answered: edges to them rest, their inbox
waits, and what they posted is delivered when it arrives. What cannot be delivered goes back to its sender, whose mass
it is. Synchronous algorithms wait: only the nodes that are missing are asked again, so that a run with faults has the
same trajectory, bit for bit, as one without. When a node goes, comes or leaves, all others begin a new **epoch**:
models stay, everything that is shared between neighbours restarts.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol

from fedcomp.errors import ConfigError, StateError
from fedcomp.gossip.base import Algorithm, GossipMessage, Multicast, View
from fedcomp.gossip.errors import AnswerError, Diverged, MessageError
from fedcomp.gossip.events import RelayReport
from fedcomp.gossip.mailbox import Blobs, Mailbox, Pending, numbered, unnumbered
from fedcomp.gossip.protocol import Action, Instruction, NodeAnswer, Start, check
from fedcomp.gossip.topology import Topology
from fedcomp.gossip.traffic import GossipTraffic, Phase
from fedcomp.gossip.tuning import DivergenceWatch
from fedcomp.logs import log
from fedcomp.plain import fields_of, from_fields

_REASON: Final = 300
"""Characters of a node's own words that are kept."""


ENDLESS: Final = 2**32 - 1
"""More iterations than a message's header can number."""


class Observer(Protocol):
    """What is told the nodes' figures after every iteration; :class:`fedcomp.gossip.tuning.DivergenceWatch` is one."""

    def __call__(self, iteration: int, facts: Mapping[int, Mapping[str, float]]) -> Mapping[int, str] | None:
        """Take note; return nodes that are not believed, with the reason, for the report. Raises
        :class:`~fedcomp.gossip.errors.Diverged` when the run has to end."""
        ...


@dataclass(slots=True)
class Open:
    """An instruction that has not been answered."""

    instruction: Instruction
    pending: tuple[Pending, ...]
    attempts: int = 0
    error: str = ""


@dataclass(frozen=True)
class RelaySettings:
    """How a relay runs.

    Parameters
    ----------
    iterations : int
        Iterations with gradients.
    session : str
        Names the run, unlike any other of the same nodes.
    seed : int
        The run's.
    largest : int
        Bytes of the largest message that is accepted: :func:`~fedcomp.gossip.protocol.largest_message`.
    patience : int
        A node that does not answer this many times in a row is gone, and so is one whose iterations fail this many
        times in a row (of a synchronous run: once, since nobody can finish the iteration without it). When more than
        half of the nodes have failed, the run has diverged.
    skew_rounds : int or "auto"
        Closing iterations without gradients, in which models travel whole (push-sum only). ``"auto"``: as many as the
        graph needs to average.
    rejoin : bool
        A node that has lost its memory joins again in the next round.
    members : collection of int, optional
        Who takes part from the beginning; default: every vertex.
    watch : Observer or bool
        Is told the nodes' figures of every iteration and ends the run by raising Diverged; True: a
        :class:`~fedcomp.gossip.tuning.DivergenceWatch`, False: nobody.

    Raises
    ------
    ConfigError
        For a number out of range.
    """

    iterations: int
    session: str
    seed: int
    largest: int
    patience: int = 5
    skew_rounds: int | Literal["auto"] = 0
    rejoin: bool = True
    members: Collection[int] | None = None
    watch: Observer | bool = True

    def __post_init__(self) -> None:
        for name, low in (("iterations", 0), ("largest", 1), ("patience", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name}={getattr(self, name)} is not valid: an integer, at least {low}")


class Relay:
    """The mailbox between the nodes of one run.

    A driver repeats ``instructions = relay.ask()``, carries them out in any order and anywhere, and hands over what
    came back, ``relay.take(answers)``, until :attr:`done`. After ``take``, :meth:`get_state` is all there is.

    Parameters
    ----------
    algorithm : Algorithm
    topology : Topology
        Checked against the algorithm. Its vertices are the nodes' numbers.
    settings : RelaySettings

    Raises
    ------
    ConfigError
        For members that are no vertices, or closing iterations of an algorithm that has no use for them.
    TopologyError
        When the graph cannot carry the algorithm.
    """

    def __init__(self, algorithm: Algorithm, topology: Topology, settings: RelaySettings) -> None:
        topology.check(algorithm)
        skew_rounds, members = settings.skew_rounds, settings.members
        if skew_rounds == "auto":
            skew_rounds = topology.averaging_rounds()
        if skew_rounds < 0 or (skew_rounds and not algorithm.asynchronous):
            raise ConfigError(
                f"skew_rounds={skew_rounds} is not valid with {algorithm.name}: closing iterations, at least 0, are "
                "for push-sum algorithms, whose estimates may be left as they are"
            )
        self.algorithm, self.topology, self.session, self.seed = algorithm, topology, settings.session, settings.seed
        self.iterations, self.skew_rounds = settings.iterations, skew_rounds
        self.largest, self.patience, self.rejoin = settings.largest, settings.patience, settings.rejoin
        watch = settings.watch
        self.watch: Observer | None = DivergenceWatch() if watch is True else (watch or None)
        self.iteration = 0
        self.epoch = 0
        self.traffic = GossipTraffic()
        self.report = RelayReport()
        self._members = set(range(topology.n)) if members is None else set(members)
        if not self._members or not self._members <= set(range(topology.n)):
            raise ConfigError(f"members {members} are not valid: vertices of a graph of {topology.n}, at least one")
        # Without push-sum there is no mass that could come back: a new epoch begins instead.
        self._mailbox = Mailbox(topology.n, returns=algorithm.asynchronous)
        self._serials = [0] * topology.n
        self._failures = [0] * topology.n
        self._failed: dict[int, str] = {}
        self._noticed: set[tuple[int, int]] = set()
        self._starts: dict[int, Start] = dict.fromkeys(self._members, "common")
        self._open: dict[int, Open] = {}
        self._joining: set[int] = set()
        self._leaving: set[int] = set()
        self._departing: set[int] = set()
        self._finished: set[int] = set()
        self._excluded: dict[int, str] = {}
        self._figures: dict[int, dict[int, Mapping[str, float]]] = {}
        # Of synchronous runs: an iteration that was begun cannot be finished; why, when it is because of messages that
        # cannot be read, how many epochs in a row that was so, and whether the last instructions began an epoch.
        self._torn = False
        self._unread = ""
        self._in_vain = 0
        self._restarted = False

    @property
    def members(self) -> tuple[int, ...]:
        """Who takes part, ascending."""
        return tuple(sorted(self._members))

    @property
    def excluded(self) -> tuple[int, ...]:
        """Who was given up because its iterations failed, ascending; :meth:`join` lets it in again."""
        return tuple(sorted(self._excluded))

    @property
    def settled(self) -> bool:
        """Whether nothing is open: every node has answered its last instruction."""
        return not self._open

    @property
    def finishing(self) -> bool:
        """Whether all iterations have been begun; what follows only delivers."""
        return self.iteration >= self.iterations + self.skew_rounds

    @property
    def done(self) -> bool:
        """Whether every node holds its final model and nothing is under way."""
        if not self.finishing or self._open or self._departing:
            return False
        return all(self._has_finished(node) for node in self._members)

    def _has_finished(self, node: int) -> bool:
        return node in self._finished and node not in self._starts and not self._mailbox.waits(node)

    def ask(self) -> dict[int, Instruction]:
        """Return what every node is to be told now, by node, ascending; counts as an attempt. Empty when :attr:`done`.

        Raises
        ------
        MessageError
            When messages of a synchronous run cannot be read, again and again.
        """
        if self.done:
            return {}
        self.report.rounds += 1
        self.report.repeated += len(self._open)
        # A synchronous run begins an iteration only when everybody has finished the former one.
        if self.algorithm.asynchronous:
            self._enter()
            self._issue()
        elif not self._open:
            self._turn()
            self._issue()
        for entry in self._open.values():
            entry.attempts += 1
            # In every attempt: what is asked again goes down the wire again.
            for message in (*entry.instruction.inbox, *entry.instruction.returned):
                self.traffic.down.add(len(message.payload))
        return {node: self._open[node].instruction for node in sorted(self._open)}

    def _turn(self) -> None:
        """Begin a new epoch of a synchronous run when the set of nodes has changed or an iteration was in vain."""
        if self._unread:
            self._in_vain += 1
        elif not self._restarted:
            self._in_vain = 0  # messages were read
        # Damage on the way is mended by the next epoch; what can never be read would restart the run for ever.
        if self._in_vain > self.patience:
            raise MessageError(f"messages could not be read in {self._in_vain} epochs in a row; last: {self._unread}")
        # Nobody is let in once the run is finishing, so a node that waits to join is no reason for an epoch then.
        self._restarted = self._torn or bool(self._leaving) or (bool(self._joining) and not self.finishing)
        if not self._restarted:
            return
        self.epoch += 1
        # Who has not even begun has nothing to reset.
        self._starts = {node: self._starts.get(node, "reset") for node in self._members}
        if self._torn:
            # Nobody may apply messages of an iteration that others cannot finish.
            self._undelivered(self._mailbox.clear())
        self._enter()
        # At the end of a run nothing is sent, so nobody learns whole estimates: if it goes on, another epoch begins.
        self._torn, self._unread = self.finishing, ""

    def _enter(self) -> None:
        """Let those in who want to join. Who is still about to leave has to wait."""
        if self.finishing:
            return
        for node in sorted(self._joining - self._departing):
            self._joining.discard(node)
            self._members.add(node)
            self._starts[node] = "empty"
            self._failures[node] = 0
            self._note(self.report.joined, node, "with a new state")
            # A synchronous newcomer comes with a new epoch, in which all edges begin anew.
            if self.algorithm.asynchronous:
                self._mailbox.break_edges(node, self._members - {node})

    def _issue(self) -> None:
        """Issue the next instruction to every node that has answered its last."""
        # Who has an open instruction is left out of ``living``: edges to it rest until it answers.
        idle = [node for node in sorted(self._members) if node not in self._open]
        living = set(idle)
        begins = not self.finishing
        if not begins:
            for node in idle:
                if not self._has_finished(node):
                    self._send(node, "finish", View(node, self.iteration, seed=self.seed))
        else:
            # A leaver gets no messages any more: it would only have to pass them on.
            living -= self._leaving
            # None spares the views a set lookup for every edge.
            alive = None if len(living) == self.topology.n else frozenset(living)
            for node in idle:
                if node in self._leaving:
                    self._depart(node, living)
                else:
                    self._send(node, "step", self._view(node, alive))
        for node in sorted(self._departing - self._open.keys()):
            if self._mailbox.look_returned(node):
                self._see_off(node, living)
        # The messages of a node that leaves twice are told apart by the iteration.
        self.iteration += begins or bool(self._departing)

    def _depart(self, node: int, living: set[int]) -> None:
        """Tell a node to leave; while nobody can take what it has, it stays."""
        # With itself among the living: the dead have no column.
        view = self._view(node, frozenset(living | {node}))
        if self.algorithm.asynchronous and not view.column:
            self._send(node, "step", view)
            return
        self._send(node, "leave", view)
        self._leaving.discard(node)
        self._departing.add(node)
        # From now on what is sent to it goes back to its sender.
        self._members.discard(node)

    def _see_off(self, node: int, living: set[int]) -> None:
        """Let a node that has left take back what could not be delivered, and leave with it once more."""
        view = self._view(node, frozenset(living | {node}))
        if view.column:
            self._send(node, "leave", view)
        # Only when every member has answered: one that is silent now may take the mass later.
        elif len(living) == len(self._members) and not self._has_heirs(node):
            self._end(node, ())

    def _has_heirs(self, node: int) -> bool:
        """Whether a node that has left will have a living out-neighbour before long."""
        alive = frozenset(self._members | {node})
        # Within a window every edge the graph relies on occurs.
        coming = range(self.iteration, self.iteration + self.topology.window)
        return any(self.topology.column(node, t, alive) for t in coming)

    def _view(self, node: int, alive: frozenset[int] | None) -> View:
        algorithm, dense = self.algorithm, self.iteration >= self.iterations
        view = self.topology.view(
            node, self.iteration, seed=self.seed, alive=alive, directed_algorithm=algorithm.directed, dense=dense
        )
        if algorithm.asynchronous:
            broken = self._mailbox.broken(node)
            return replace(view, resync=frozenset(broken & view.column.keys())) if broken else view
        # Of a new epoch's neighbours nothing is known.
        new = self._starts.get(node) in ("reset", "empty")
        return replace(view, resync=frozenset(view.column)) if new else view

    def _send(self, node: int, action: Action, view: View) -> None:
        # Never reused, also after a rejoin: a late copy of an older instruction is then recognised by its number.
        self._serials[node] += 1
        # From here these messages are in the open instruction only: a message is never in two places.
        pending, returned = self._mailbox.take(node)
        instruction = Instruction(
            self.session,
            self._serials[node],
            self.epoch,
            action,
            view,
            inbox=tuple(item.message for item in pending),
            returned=returned,
            # Said once; the instruction that says it is repeated until it is answered.
            start=self._starts.pop(node, ""),
        )
        self._open[node] = Open(instruction, pending)

    def take(self, answers: Mapping[int, NodeAnswer], errors: Mapping[int, str] | None = None) -> None:
        """Settle a round.

        Parameters
        ----------
        answers : mapping of int to NodeAnswer
            By node. Who is missing is asked again. An answer that cannot be one is as good as none.
        errors : mapping of int to str, optional
            Why some are missing, for the report.

        Raises
        ------
        Diverged
            When more than half of the nodes have failed, or the watcher says so.
        StateError
            When no node is left.
        """
        # By node, not as they came: what a round does must not depend on the order of a network.
        for node in sorted(answers):
            self._settle(node, answers[node])
        for node, entry in sorted(self._open.items()):
            # The default keeps why _settle has just refused an answer.
            entry.error = (errors or {}).get(node, entry.error)
            if entry.attempts >= self.patience:
                why = f": {entry.error[:_REASON]}" if entry.error else ""
                self._give_up(node, f"no answer to {entry.attempts} requests{why}")
        for node in sorted(self._departing - self._open.keys()):
            if not self._is_awaited(node):
                self._end(node, ())
        self._judge()

    def _judge(self) -> None:
        self._exclude()
        # Who joins push-sum brings no mass, and nobody joins a run that is over.
        coming = self._joining and not (self.finishing or self.algorithm.asynchronous)
        if not (self._members or self._departing or coming):
            raise StateError(
                f"no node is left that could go on; the last events were {(self.report.gone + self.report.left)[-3:]}. "
                "Look into the nodes' logs, or allow more patience, and restart"
            )
        # Figures of a synchronous iteration may come in over several rounds; the watcher sees whole iterations.
        if self.algorithm.asynchronous or self.settled:
            figures, self._figures = self._figures, {}
            if self.watch is not None:
                for iteration in sorted(figures):
                    doubted = self.watch(iteration, figures[iteration]) or {}
                    for node, reason in sorted(doubted.items()):
                        self._note(self.report.doubted, node, f"left out of the judgement: {reason}")

    def _exclude(self) -> None:
        """Give up the nodes whose iterations failed too often.

        Raises
        ------
        Diverged
            When they are more than half of all: then it is not they that fail, but the run.
        """
        most = self.patience if self.algorithm.asynchronous else 1
        failing = [node for node in sorted(self._members) if self._failures[node] >= most]
        self._excluded |= {node: self._failed[node] for node in failing}
        # Those excluded earlier count: otherwise a run that diverges would lose its nodes one by one and never end.
        if failing and 2 * len(self._excluded) > len(self._members | self._excluded.keys()):
            raise Diverged(
                f"{len(self._excluded)} of {len(self._members | self._excluded.keys())} nodes failed; "
                f"{self._excluded[failing[0]]}"
            )
        for node in failing:
            self._note(self.report.gone, node, f"excluded: {self._excluded[node]}")
            # Without its messages the others cannot finish an iteration of a synchronous run.
            self._torn = self._torn or not self.algorithm.asynchronous
            self._end(node, ())

    def _settle(self, node: int, answer: NodeAnswer) -> None:
        # Before any check: these bytes have come up the wire, whatever they are worth.
        for multicast in answer.multicasts:
            self.traffic.up.add(len(multicast.payload))
        entry = self._open.get(node)
        # A duplicate, or the answer of a node that was given up: messages count with the first answer only.
        if entry is None or (answer.session, answer.serial) != (self.session, entry.instruction.serial):
            self.report.ignored += 1
            if entry is not None:
                entry.error = f"it answered instruction {answer.serial}, not {entry.instruction.serial}, of its run"
            return
        try:
            check(entry.instruction, answer, self.largest, synchronous=not self.algorithm.asynchronous)
        except AnswerError as error:
            # As if it had not answered. It will say the same again until it is given up, and nobody else is harmed.
            entry.error = str(error)
            self._note(self.report.refused, node, str(error))
            return
        if answer.fresh:
            # Who wanted to leave has lost what it would have handed over.
            if self.rejoin and node in self._members - self._leaving:
                self._joining.add(node)
            self._give_up(node, "its memory is lost")
            return
        del self._open[node]
        self._accept(node, entry, answer)

    def _accept(self, node: int, entry: Open, answer: NodeAnswer) -> None:
        instruction = entry.instruction
        for source, reason in zip(answer.needs, answer.reasons, strict=True):
            self._note(self.report.needed, node, f"messages of node {source}: {reason}")
        for reason in answer.lost:
            self._note(self.report.lost, node, reason)
        for source, remark in answer.noticed:
            if (node, source) not in self._noticed:  # a line for each message would bury the others
                self._noticed.add((node, source))
                self._note(self.report.noticed, source, f"node {node} says: {remark}")
        if answer.needs and self.algorithm.asynchronous:
            self._undelivered(self._mailbox.refuse(entry.pending, answer.needs, node))
        elif answer.needs:
            # Neither figures nor messages: a synchronous node that could not finish has begun nothing.
            self._torn, self._unread = True, f"node {node}: {answer.reasons[0]}"
            return
        if instruction.action == "finish":
            self._finished.add(node)
        elif instruction.action == "leave":
            self._note(self.report.left, node, f"sent {len(answer.multicasts)} messages")
        elif answer.failed:
            self._failures[node] += 1
            self._note(self.report.failed, node, answer.failed)
            times = f" (iteration {self._failures[node]} in a row)" if self.algorithm.asynchronous else ""
            self._failed[node] = f"node {node}, iteration {instruction.iteration}{times}: {answer.failed}"
        else:
            self._failures[node] = 0
            self._figures.setdefault(instruction.iteration, {})[node] = answer.facts
        self._deliver(node, instruction.view, answer.multicasts)

    def _deliver(self, node: int, view: View, multicasts: Iterable[Multicast]) -> None:
        for multicast in multicasts:
            phases: dict[Phase, int] = {}
            for to in multicast.destinations:
                whole = to in view.resync
                phase: Phase = "dense" if view.dense else "resync" if whole else "train"
                phases[phase] = phases.get(phase, 0) + 1
                message = GossipMessage(node, to, multicast.payload)
                if not self._mailbox.put(message, receiving=to in self._members, whole=whole, dense=view.dense):
                    self._undelivered([message])
            self.traffic.post(len(multicast.payload), phases)

    def _give_up(self, node: int, reason: str) -> None:
        """Declare a node gone. Whatever it did with its open instruction, its state is never used again."""
        entry = self._open.pop(node)
        # Of a node that leaves the others' iteration knows nothing any more.
        self._torn = self._torn or (not self.algorithm.asynchronous and entry.instruction.action != "leave")
        self._note(self.report.gone, node, reason)
        self._end(node, entry.pending)

    def _end(self, node: int, pending: Iterable[Pending]) -> None:
        for group in (self._members, self._departing, self._leaving, self._finished):
            group.discard(node)
        self._starts.pop(node, None)
        self._undelivered(self._mailbox.end(node, pending))
        groups = self.topology.components(self.iteration, frozenset(self._members))
        if len(groups) > 1:
            self.report.split.append((self.report.rounds, [sorted(group) for group in groups]))

    def _is_awaited(self, node: int) -> bool:
        """Whether messages of a node that has left may still come back to it."""
        if not self.algorithm.asynchronous:
            return False
        mailbox = self._mailbox
        if mailbox.look_returned(node) or mailbox.messages_of(node):
            return True
        # Messages that were handed out but not acknowledged: they come back if their receiver is given up.
        return any(item.message.source == node for entry in self._open.values() for item in entry.pending)

    def _undelivered(self, messages: Iterable[GossipMessage]) -> None:
        for message in messages:
            self.report.undelivered += 1
            self.traffic.undelivered.add(len(message.payload))

    def _note(self, events: list[tuple[int, int, str]], node: int, reason: str) -> None:
        # Cut, since the words may be a peer's and go into the log and the stored state.
        events.append((self.report.rounds, node, reason[:_REASON]))
        usual = events is self.report.joined or events is self.report.left
        level = logging.INFO if usual else logging.WARNING
        log.log(level, "gossip round %d, node %d: %s", self.report.rounds, node, reason[:_REASON])

    def observe(self) -> dict[int, Instruction]:
        """Return instructions that ask for models as they will be after the inbox that waits; they change nothing.

        Of nodes that have answered their last instruction; of a synchronous run only while it is :attr:`settled`.

        Raises
        ------
        StateError
            When a synchronous run is in the middle of an iteration: models would be of different ones.
        """
        if not (self.algorithm.asynchronous or self.settled):
            raise StateError(f"nodes {sorted(self._open)} have not finished their iteration; observe when settled")
        return {
            node: Instruction(
                self.session,
                self._serials[node],
                self.epoch,
                "observe",
                View(node, self.iteration, seed=self.seed),
                # Messages of a torn iteration will never be applied: shown is what the coming reset leaves.
                inbox=() if self._torn else tuple(item.message for item in self._mailbox.look(node)),
                returned=self._mailbox.look_returned(node),
                start="reset" if self._torn else "",
            )
            # Who has yet to begin has no model.
            for node in sorted(self._members - self._open.keys() - self._starts.keys())
        }

    def conclude(self) -> None:
        """Begin no more iterations with gradients; closing iterations and deliveries follow. For a driver that learns
        only at the end how many iterations there are: it makes the relay with :data:`ENDLESS`."""
        self.iterations = min(self.iterations, self.iteration)

    def prolong(self, iterations: int) -> None:
        """Go on until so many iterations with gradients have been begun, also after :attr:`done`.

        Raises
        ------
        ConfigError
            For fewer than have been begun.
        """
        if iterations < self.iteration:
            raise ConfigError(f"iterations={iterations} is not valid: {self.iteration} have been begun")
        self.iterations = iterations
        # Everybody gets instructions again and has to finish once more.
        self._finished.clear()

    def leave(self, node: int) -> None:
        """Let a node leave in good order, by its next instruction: what it has goes to its out-neighbours.

        Raises
        ------
        ConfigError
            When it is no member.
        """
        if node not in self._members:
            raise ConfigError(f"node {node} cannot leave; members are {self.members}")
        self._leaving.add(node)

    def join(self, node: int) -> None:
        """Let a node that is not a member enter, with the next round and a new state.

        Raises
        ------
        ConfigError
            When it is a member, or no vertex of the graph.
        """
        if node in self._members or not 0 <= node < self.topology.n:
            raise ConfigError(f"node {node} cannot join; members are {self.members} of a graph of {self.topology.n}")
        self._joining.add(node)
        self._excluded.pop(node, None)
        self._failures[node] = 0

    def get_state(self) -> tuple[dict[str, Any], list[bytes]]:
        """Return all there is between :meth:`take` and :meth:`ask`: JSON-able, and the messages it refers to by number.

        What the watcher has seen is not in it. It must be stored after every round: a node that has carried out an
        instruction this state knows nothing of, beyond the next one, has gone on without it.
        """
        blobs = Blobs()
        state = {
            "session": self.session,
            "rounds": [self.iterations, self.skew_rounds],
            "iteration": self.iteration,
            "epoch": self.epoch,
            "serials": list(self._serials),
            "failures": list(self._failures),
            # Pairs, not a mapping: JSON would make texts of the nodes' numbers.
            "failed": sorted(self._failed.items()),
            "excluded": sorted(self._excluded.items()),
            "starts": [[node, start] for node, start in sorted(self._starts.items())],
            "groups": [sorted(group) for group in self._groups],
            "torn": [self._torn, self._unread, self._in_vain, self._restarted],
            "figures": [
                [iteration, node, list(facts), [float(value) for value in facts.values()]]
                for iteration, nodes in sorted(self._figures.items())
                for node, facts in sorted(nodes.items())
            ],
            "open": [
                [numbered(entry.instruction, blobs), [p.life for p in entry.pending], entry.attempts, entry.error]
                for _, entry in sorted(self._open.items())
            ],
            "mailbox": self._mailbox.get_state(blobs),
            "traffic": fields_of(self.traffic),
            "report": fields_of(self.report),
        }
        return state, blobs.blobs

    @property
    def _groups(self) -> tuple[set[int], ...]:
        return self._members, self._joining, self._leaving, self._departing, self._finished

    def set_state(self, state: Mapping[str, Any], messages: Sequence[bytes]) -> None:
        """Go on from what :meth:`get_state` returned, in a relay made with the same arguments.

        Raises
        ------
        StateError
            When it is the state of another run, or none.
        """
        if state.get("session") != self.session or state["rounds"] != [self.iterations, self.skew_rounds]:
            raise StateError(
                f"this state is of run {state.get('session')!r} or of another length, not {self.session!r}"
            )
        try:
            self.iteration, self.epoch = int(state["iteration"]), int(state["epoch"])
            self._serials, self._failures = list(state["serials"]), list(state["failures"])
            self._failed, self._excluded = dict(state.get("failed", ())), dict(state.get("excluded", ()))
            self._starts = dict(state["starts"])
            groups = map(set, state["groups"])
            # In the order of _groups.
            self._members, self._joining, self._leaving, self._departing, self._finished = groups
            self._torn, self._unread, self._in_vain, self._restarted = state["torn"]
            self._figures = {}
            for iteration, node, names, values in state["figures"]:
                self._figures.setdefault(iteration, {})[node] = dict(zip(names, values, strict=True))
            self._open = {}
            for parts, lives, attempts, error in state["open"]:
                instruction = unnumbered(parts, messages)
                pending = tuple(Pending(message, life) for message, life in zip(instruction.inbox, lives, strict=True))
                self._open[instruction.node] = Open(instruction, pending, attempts, error)
            self._mailbox.set_state(state["mailbox"], messages)
            self.traffic = from_fields(GossipTraffic, state["traffic"], "traffic")
            self.report = from_fields(RelayReport, state["report"], "report")
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise StateError(f"this is not the state of a relay: {type(error).__name__}: {error}") from error
