"""The relay's half of the protocol: who is asked to do what, and a mailbox that never looks inside a message.

:mod:`fedcomp.gossip.dispatch` issues instructions, :mod:`fedcomp.gossip.settlement` takes the answers; both work on the
state in :mod:`fedcomp.gossip.run`.

Life of an instruction. It is *issued* with the inbox that waits for its node. It is then *open*: asked again, verbatim,
every round. It ends in one of two ways. *Answered*: the inbox counts as delivered and what the node sent goes into
the mailboxes. *Given up*, when its node did not answer ``patience`` times or has lost its memory: the node is **gone**.
Its inbox was not delivered, whatever the node may have done with it, since its state is never used again: it comes back
only by **joining**, with a new state. Nothing else happens to an instruction; in particular none is ever withdrawn from
a node that goes on. So no message is delivered twice, and none is both delivered and returned.

Asynchronous algorithms (push-sum) go on without the nodes that have not answered: edges to them rest, their inbox
waits, and what they sent is delivered when it arrives. What cannot be delivered goes back to its sender, whose mass
it is. Synchronous algorithms wait: only the nodes that are missing are asked again, so that a run with faults has the
same trajectory, bit for bit, as one without. When a node goes, comes or leaves, all others begin a new **epoch**:
models stay, everything that is shared between neighbours restarts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fedcomp.errors import ConfigError, StateError
from fedcomp.gossip.base import Algorithm, View
from fedcomp.gossip.dispatch import Dispatch
from fedcomp.gossip.protocol import Instruction, NodeAnswer
from fedcomp.gossip.reference import Reference
from fedcomp.gossip.run import Observer, RelayRun, RelaySettings
from fedcomp.gossip.settlement import Settlement
from fedcomp.gossip.topology import Topology

__all__ = ["ENDLESS", "Observer", "Relay", "RelaySettings"]

ENDLESS: Final = 2**32 - 1
"""More iterations than a message's header can number."""


class Relay(RelayRun):
    """The mailbox between the nodes of one run.

    A driver repeats ``instructions = relay.ask()``, carries them out in any order and anywhere, and hands over what
    came back, ``relay.take(answers)``, until :attr:`done`. After ``take``, :meth:`state_dict` is all there is.

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

    Examples
    --------
    >>> from fedcomp.gossip import get_algorithm
    >>> from fedcomp.gossip.topology import topology_of
    >>> sgp = get_algorithm({"name": "sgp", "lr": 0.1})
    >>> relay = Relay(sgp, topology_of("ring", 3, 0), RelaySettings(2, "run 1", seed=0, largest=4096))
    >>> [(node, asked.action, asked.start) for node, asked in relay.ask().items()]
    [(0, 'step', 'common'), (1, 'step', 'common'), (2, 'step', 'common')]
    """

    def __init__(self, algorithm: Algorithm, topology: Topology, settings: RelaySettings) -> None:
        super().__init__(algorithm, topology, settings)
        # Both hold the relay and none of its parts: loading a state replaces parts such as the report.
        self._dispatch, self.settlement = Dispatch(self), Settlement(self)

    @property
    def members(self) -> tuple[int, ...]:
        """Who takes part, ascending."""
        return tuple(sorted(self.nodes.members))

    def ask(self) -> dict[int, Instruction]:
        """Return every node's instruction, by node, ascending; counts as an attempt. Empty when :attr:`done`.

        Raises
        ------
        MessageError
            When messages of a synchronous run cannot be read, again and again.
        """
        return self._dispatch.ask()

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
        self.settlement.take(answers, errors or {})

    def observe(self) -> dict[int, Instruction]:
        """Return instructions that ask for models as they will be after the inbox that waits; they change nothing.

        Of nodes that have answered their last instruction; of a synchronous run only while it is :attr:`settled`.

        Raises
        ------
        StateError
            When a synchronous run is in the middle of an iteration: models would be of different ones.
        """
        if not (self.algorithm.asynchronous or self.settled):
            raise StateError(
                f"nodes {sorted(self.outstanding.open)} have not finished their iteration; observe when settled"
            )
        mailbox = self.outstanding.mailbox
        return {
            node: Instruction(
                self.settings.session,
                self.outstanding.serial(node),
                self.epochs.number,
                "observe",
                View(node, self.iteration, seed=self.settings.seed),
                # Messages of a torn iteration will never be applied: shown is what the coming reset leaves.
                inbox=() if self.epochs.torn else tuple(item.message for item in mailbox.look(node)),
                returned=mailbox.look_returned(node),
                start="reset" if self.epochs.torn else "",
            )
            # Who has yet to begin has no model.
            for node in sorted(self.nodes.members - self.outstanding.open.keys() - self.nodes.starts.keys())
        }

    def oldest(self) -> int:
        """Return the lowest iteration of which a message is under way, or may still come from who has not answered: no
        node needs anything of those before. For runs by reference."""
        messages = (*self.outstanding.mailbox.messages(), *self.outstanding.handed_out())
        written = [Reference.split(message.payload)[0].iteration for message in messages]
        begun = [entry.instruction.iteration for entry in self.outstanding.open.values()]
        return min([*written, *begun, self.iteration])

    def conclude(self) -> None:
        """Begin no more iterations with gradients; closing iterations and deliveries follow. For a driver that learns
        only at the end how many iterations there are: it makes the relay with :data:`ENDLESS`."""
        # min: called again during the closing iterations, which count, too, it must not begin them once more.
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
        self.nodes.finished.clear()

    def leave(self, node: int) -> None:
        """Let a node leave in good order, by its next instruction: what it has goes to its out-neighbours.

        Raises
        ------
        ConfigError
            When it is not a member.
        """
        if node not in self.nodes.members:
            raise ConfigError(f"node {node} cannot leave; members are {self.members}")
        self.nodes.leaving.add(node)

    def join(self, node: int) -> None:
        """Let a node that is not a member enter, with the next round and a new state.

        Raises
        ------
        ConfigError
            When it is a member, or no vertex of the graph.
        """
        if node in self.nodes.members or not 0 <= node < self.topology.n:
            raise ConfigError(f"node {node} cannot join; members are {self.members} of a graph of {self.topology.n}")
        self.nodes.invite(node)
