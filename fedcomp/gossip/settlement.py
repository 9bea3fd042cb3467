"""The other half of a relay: what becomes of the nodes' answers, and of those that give none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fedcomp.errors import StateError
from fedcomp.gossip.base import GossipMessage, Multicast, View
from fedcomp.gossip.errors import NodeAnswerError
from fedcomp.gossip.outstanding import Open
from fedcomp.gossip.protocol import NodeAnswer, check
from fedcomp.gossip.reference import MOST_BESIDE, REFERENCE_BYTES, check_references
from fedcomp.gossip.run import REASON_CHARACTERS, Observer, RelayRun
from fedcomp.gossip.traffic import Phase
from fedcomp.gossip.tuning import DivergenceWatch


class Settlement:
    """Takes answers, posts their messages and gives up who does not answer.

    Parameters
    ----------
    run : RelayRun
        What is open.
    """

    def __init__(self, run: RelayRun) -> None:
        self._run = run
        watch = run.settings.watch
        self._watch: Observer | None = DivergenceWatch() if watch is True else (watch or None)

    def take(self, answers: Mapping[int, NodeAnswer], errors: Mapping[int, str]) -> None:
        """Settle a round: :meth:`fedcomp.gossip.relay.Relay.take`."""
        run = self._run
        # By node, not as they came: what a round does must not depend on the order of a network.
        for node in sorted(answers):
            self._settle(node, answers[node])
        for node, entry in sorted(run.outstanding.open.items()):
            # The default keeps why _settle has just refused an answer.
            entry.error = errors.get(node, entry.error)
            if entry.attempts >= run.settings.patience:
                why = f": {entry.error[:REASON_CHARACTERS]}" if entry.error else ""
                self.give_up(node, f"no answer to {entry.attempts} requests{why}")
        for node in sorted(run.nodes.departing - run.outstanding.open.keys()):
            if not run.outstanding.awaited(node):
                run.end(node)
        self._exclude()
        self._require_nodes()
        self._show()

    def give_up(self, node: int, reason: str) -> None:
        """Declare a node gone. Whatever it did with its open instruction, its state is never used again."""
        run = self._run
        entry = run.outstanding.open.pop(node)
        # Of a node that leaves the others' iteration knows nothing any more.
        run.epochs.torn |= not run.algorithm.asynchronous and entry.instruction.action != "leave"
        run.note(run.report.gone, node, reason)
        run.end(node, entry.pending)

    def _settle(self, node: int, answer: NodeAnswer) -> None:
        run = self._run
        # Before any check: these bytes have come up the wire, whatever they are worth.
        for multicast in answer.multicasts:
            run.traffic.up.add(len(multicast.payload))
        entry = run.outstanding.open.get(node)
        # A duplicate, or the answer of a node that was given up: messages count with the first answer only.
        if entry is None or (answer.session, answer.serial) != (run.settings.session, entry.instruction.serial):
            run.report.ignored += 1
            if entry is not None:
                entry.error = f"it answered instruction {answer.serial}, not {entry.instruction.serial}, of its run"
            return
        try:
            largest, beside = run.settings.largest, MOST_BESIDE if run.settings.by_reference else 0
            check(entry.instruction, answer, largest + beside, synchronous=not run.algorithm.asynchronous)
            if run.settings.by_reference:
                check_references(entry.instruction, answer, largest)
        except NodeAnswerError as error:
            # As if it had not answered. It will say the same again until it is given up, and nobody else is harmed.
            entry.error = str(error)
            run.note(run.report.refused, node, str(error))
            return
        if answer.fresh:
            # Who wanted to leave has lost what it would have handed over.
            if run.settings.rejoin and node in run.nodes.members - run.nodes.leaving:
                run.nodes.joining.add(node)
            self.give_up(node, "its memory is lost")
            return
        del run.outstanding.open[node]
        self._accept(node, entry, answer)

    def _accept(self, node: int, entry: Open, answer: NodeAnswer) -> None:
        run, instruction = self._run, entry.instruction
        self._note_remarks(node, answer)
        if answer.needs and run.algorithm.asynchronous:
            run.undelivered(run.outstanding.mailbox.refuse(entry.pending, answer.needs, node))
        elif answer.needs:
            # Neither figures nor messages: a synchronous node that could not finish has begun nothing.
            run.epochs.torn, run.epochs.unread = True, f"node {node}: {answer.reasons[0]}"
            return
        # Figures are kept of steps only: those of other instructions belong to no iteration.
        if instruction.action == "finish":
            run.nodes.finished.add(node)
        elif instruction.action == "leave":
            run.note(run.report.left, node, f"sent {len(answer.multicasts)} messages")
        elif answer.failed:
            run.note(run.report.failed, node, answer.failed)
            run.nodes.failed(node, instruction.iteration, answer.failed, count=run.algorithm.asynchronous)
        else:
            run.nodes.succeeded(node)
            run.figures.setdefault(instruction.iteration, {})[node] = dict(answer.facts)
        self._post(node, instruction.view, answer.multicasts)

    def _note_remarks(self, node: int, answer: NodeAnswer) -> None:
        """Report what a node says of messages it was given or got back."""
        run = self._run
        for source, reason in zip(answer.needs, answer.reasons, strict=True):
            run.note(run.report.needed, node, f"messages of node {source}: {reason}")
        for reason in answer.lost:
            run.note(run.report.lost, node, reason)
        for source, remark in answer.noticed:
            if (node, source) not in run.noticed:
                run.noticed.add((node, source))
                run.note(run.report.noticed, source, f"node {node} says: {remark}")

    def _post(self, node: int, view: View, multicasts: Iterable[Multicast]) -> None:
        """Put what ``node`` sent into the mailboxes."""
        run = self._run
        counted: dict[object, tuple[int, dict[Phase, int]]] = {}
        for place, multicast in enumerate(multicasts):
            # A message that took its link on some edges only is one message: its reference is the same on all.
            name = multicast.payload[:REFERENCE_BYTES] if run.settings.by_reference else place
            _, phases = counted.setdefault(name, (run.size(multicast.payload), {}))
            for to in multicast.destinations:
                whole = to in view.resync
                phase: Phase = "dense" if view.dense else "resync" if whole else "train"
                phases[phase] = phases.get(phase, 0) + 1
                message = GossipMessage(node, to, multicast.payload)
                receiving = to in run.nodes.members
                if not run.outstanding.mailbox.put(message, receiving=receiving, whole=whole, dense=view.dense):
                    run.undelivered([message])
        for size, phases in counted.values():
            run.traffic.count(size, phases)

    def _exclude(self) -> None:
        """Give up the nodes whose iterations failed too often; raises Diverged when they are most of all."""
        run = self._run
        for node in run.nodes.exclude(run.settings.patience if run.algorithm.asynchronous else 1):
            run.note(run.report.gone, node, f"excluded: {run.nodes.excluded[node]}")
            # Without its messages the others cannot finish an iteration of a synchronous run.
            run.epochs.torn |= not run.algorithm.asynchronous
            run.end(node)

    def _require_nodes(self) -> None:
        run, nodes = self._run, self._run.nodes
        # Who joins push-sum brings no mass, and nobody joins a run that is over.
        coming = nodes.joining and not (run.finishing or run.algorithm.asynchronous)
        if not (nodes.members or nodes.departing or coming):
            raise StateError(
                f"no node is left that could go on; the last events were {(run.report.gone + run.report.left)[-3:]}. "
                "Look into the nodes' logs, or allow more patience, and restart"
            )

    def _show(self) -> None:
        """Show the watcher the figures that have come in."""
        run = self._run
        # Figures of a synchronous iteration may come in over several rounds; the watcher sees whole iterations.
        if not (run.algorithm.asynchronous or run.settled):
            return
        figures, run.figures = run.figures, {}
        if self._watch is None:
            return
        for iteration in sorted(figures):
            doubted = self._watch(iteration, figures[iteration]) or {}
            for node, reason in sorted(doubted.items()):
                run.note(run.report.doubted, node, f"left out of the judgement: {reason}")
