"""One half of a relay: the next instruction to every node."""

from __future__ import annotations

from fedcomp.gossip.base import View
from fedcomp.gossip.protocol import Action, Instruction
from fedcomp.gossip.run import RelayRun


class Dispatch:
    """Issues instructions; see :mod:`fedcomp.gossip.relay` for their life.

    Parameters
    ----------
    run : RelayRun
        Which nodes are free, and what waits for them.
    """

    def __init__(self, run: RelayRun) -> None:
        self._run = run

    def ask(self) -> dict[int, Instruction]:
        """Return every node's instruction, by node, ascending; counts as an attempt. Empty when the run is done.

        Raises
        ------
        MessageError
            When messages of a synchronous run cannot be read, again and again.
        """
        run = self._run
        if run.done:
            return {}
        run.report.rounds += 1
        run.report.repeated += len(run.outstanding.open)
        # A synchronous run begins an iteration only when everybody has finished the former one.
        if run.algorithm.asynchronous:
            self._enter()
            self._issue()
        elif run.settled:
            self._turn()
            self._issue()
        # In every attempt: what is asked again goes down the wire again.
        for message in run.outstanding.handed_out():
            run.traffic.down.add(len(message.payload))
        return run.outstanding.ask()

    def _turn(self) -> None:
        """Begin a new epoch of a synchronous run when the set of nodes has changed or an iteration was in vain."""
        run, nodes, epochs = self._run, self._run.nodes, self._run.epochs
        # Nobody is let in once the run is finishing, so a node that waits to join is no reason for an epoch then.
        changed = bool(nodes.leaving) or (bool(nodes.joining) and not run.finishing)
        if not epochs.turn(changed=changed, patience=run.settings.patience):
            return
        nodes.reset()
        if epochs.torn:
            # Nobody may apply messages of an iteration that others cannot finish.
            run.undelivered(run.outstanding.mailbox.clear())
        self._enter()
        # At the end of a run nothing is sent, so nobody learns whole estimates: if it goes on, another epoch begins.
        epochs.torn, epochs.unread = run.finishing, ""

    def _enter(self) -> None:
        """Let those in who want to join."""
        run = self._run
        if run.finishing:
            return
        for node in run.nodes.admit():
            run.note(run.report.joined, node, "with a new state")
            # A synchronous newcomer comes with a new epoch, in which all edges restart.
            if run.algorithm.asynchronous:
                run.outstanding.mailbox.break_edges(node, run.nodes.members - {node})

    def _issue(self) -> None:
        """Issue the next instruction to every node that has answered its last."""
        run, nodes = self._run, self._run.nodes
        # Who has an open instruction is left out of ``living``: edges to it rest until it answers.
        idle = [node for node in sorted(nodes.members) if node not in run.outstanding.open]
        living = set(idle)
        begins = not run.finishing
        if not begins:
            for node in idle:
                if not run.has_finished(node):
                    self._send("finish", View(node, run.iteration, seed=run.settings.seed))
        else:
            # A leaver gets no messages any more: it would only have to pass them on.
            living -= nodes.leaving
            # None spares the views a set lookup for every edge.
            alive = None if len(living) == run.topology.n else frozenset(living)
            for node in idle:
                if node in nodes.leaving:
                    self._depart(node, living)
                else:
                    self._send("step", run.view(node, alive))
        for node in sorted(nodes.departing - run.outstanding.open.keys()):
            # Whatever comes back to it is mass that would be lost with it.
            if run.outstanding.mailbox.look_returned(node):
                self._see_off(node, living)
        # The messages of a node that leaves twice are told apart by the iteration.
        run.iteration += begins or bool(nodes.departing)

    def _depart(self, node: int, living: set[int]) -> None:
        """Tell a node to leave; while nobody can take what it has, it stays."""
        run = self._run
        # With itself among the living: the dead have no column.
        view = run.view(node, frozenset(living | {node}))
        if run.algorithm.asynchronous and not view.column:
            self._send("step", view)
            return
        self._send("leave", view)
        run.nodes.depart(node)

    def _see_off(self, node: int, living: set[int]) -> None:
        """Let a node that has left take back what could not be delivered, and leave with it once more."""
        run = self._run
        view = run.view(node, frozenset(living | {node}))
        if view.column:
            self._send("leave", view)
        # Only when every member has answered: one that is silent now may take the mass later.
        elif len(living) == len(run.nodes.members) and not self._has_heirs(node):
            run.end(node)

    def _has_heirs(self, node: int) -> bool:
        """Whether a node that has left will have a living out-neighbour before long."""
        run = self._run
        alive = frozenset(run.nodes.members | {node})
        # Within a window every edge the graph relies on occurs.
        coming = range(run.iteration, run.iteration + run.topology.window)
        return any(run.topology.column(node, t, alive) for t in coming)

    def _send(self, action: Action, view: View) -> None:
        run = self._run
        # In one instruction only, which is repeated until it is answered.
        start = run.nodes.starts.pop(view.node, "")
        run.outstanding.issue(run.settings.session, run.epochs.number, action, view, start)
