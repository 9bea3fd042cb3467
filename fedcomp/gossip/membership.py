"""Who takes part in a decentralised run: members, who waits to come or to go, and whose iterations fail."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from fedcomp.gossip.errors import Diverged
from fedcomp.gossip.protocol import Start
from fedcomp.plain import Count
from fedcomp.stateful import Stateful


class Membership(Stateful):
    """The groups of nodes of one run; a node is a vertex of the graph.

    Parameters
    ----------
    members : collection of int
        Who takes part from the beginning.

    Attributes
    ----------
    members : set of int
        Who takes part and gets messages.
    joining : set of int
        Who enters with the next instructions.
    leaving : set of int
        Members that leave with their next instruction.
    departing : set of int
        Who got the instruction to leave and is not a member any more, but may still get own messages back.
    finished : set of int
        Who has carried out an instruction to finish.
    starts : dict of int to Start
        How the state is made of those whose next instruction has to say so.
    excluded : dict of int to str
        Who was given up because its iterations failed, with the reason of the last failure.
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "members": set[int],
        "joining": set[int],
        "leaving": set[int],
        "departing": set[int],
        "finished": set[int],
        "starts": dict[int, Start],
        "excluded": dict[int, str],
        "_failures": dict[int, tuple[Count, str]],
    }

    def __init__(self, members: Collection[int]) -> None:
        self.members = set(members)
        self.joining: set[int] = set()
        self.leaving: set[int] = set()
        self.departing: set[int] = set()
        self.finished: set[int] = set()
        self.starts: dict[int, Start] = dict.fromkeys(self.members, "common")
        self.excluded: dict[int, str] = {}
        # How many iterations in a row failed, and why the last one did.
        self._failures: dict[int, tuple[int, str]] = {}

    def invite(self, node: int) -> None:
        """Let a node that is not a member enter with the next instructions; its former failures are forgotten."""
        self.joining.add(node)
        self.excluded.pop(node, None)
        self.succeeded(node)

    def admit(self) -> list[int]:
        """Make members of those that wait to join, with new states; return them. Who is still about to leave waits."""
        admitted = sorted(self.joining - self.departing)
        for node in admitted:
            self.joining.discard(node)
            self.members.add(node)
            self.starts[node] = "empty"
            self.succeeded(node)
        return admitted

    def depart(self, node: int) -> None:
        """Note that a member got the instruction to leave: from now on what is sent to it goes back to its sender."""
        self.leaving.discard(node)
        self.departing.add(node)
        self.members.discard(node)

    def remove(self, node: int) -> None:
        """Forget a node that was given up or has left, but for why it was excluded."""
        # Not its failures: exclude counts those of members only, and whoever comes back starts without any.
        for group in (self.members, self.departing, self.leaving, self.finished):
            group.discard(node)
        self.starts.pop(node, None)

    def reset(self) -> None:
        """Let every member begin a new epoch with its next instruction."""
        # Who has not even begun has nothing to reset.
        self.starts = {node: self.starts.get(node, "reset") for node in self.members}

    def failed(self, node: int, iteration: int, reason: str, *, count: bool) -> None:
        """Note that an iteration of ``node`` failed; ``count`` says in the reason how many did in a row."""
        times = self._failures.get(node, (0, ""))[0] + 1
        counted = f" (iteration {times} in a row)" if count else ""
        self._failures[node] = times, f"node {node}, iteration {iteration}{counted}: {reason}"

    def succeeded(self, node: int) -> None:
        """Note that an iteration of ``node`` went well."""
        self._failures.pop(node, None)

    def exclude(self, most: int) -> list[int]:
        """Return the members of which ``most`` iterations in a row failed, ascending, and add them to ``excluded``.

        Raises
        ------
        Diverged
            When more than half of all nodes are excluded now: then it is not they that fail, but the run.
        """
        failing = sorted(node for node, (times, _) in self._failures.items() if times >= most and node in self.members)
        self.excluded |= {node: self._failures[node][1] for node in failing}
        everybody = self.members | self.excluded.keys()
        # Those excluded earlier count: otherwise a run that diverges would lose its nodes one by one and never end.
        if failing and 2 * len(self.excluded) > len(everybody):
            raise Diverged(f"{len(self.excluded)} of {len(everybody)} nodes failed; {self.excluded[failing[0]]}")
        # The caller removes them: it also has to deal with the messages they were given.
        return failing
