"""The assignment of partitions to nodes, as the nodes report it: one rule for all strategies.

The likeliest mistake with many devices is a configuration that was copied with its partition id: a hundred devices then
train as partition 0, share its random streams and count a hundred times. Nobody can tell which of them is meant, so
among equals nobody is used. A partition that was held before stays with its holder: whoever comes later and declares it
too does not drive out a node that answers, and one that took the place of a silent holder gives it back when that one
answers again. A node with a registered key keeps its id, so that a partition is bound to the key that held it first.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

from flwr.serverapp import Grid

from fedcomp.flower.metered import engine_lookup
from fedcomp.flower.payload import PARTITIONS
from fedcomp.stateful import Stateful

FORMER: Final = 16
"""How many holders of a partition are remembered: without keys anybody may come under any number of ids."""

_NAMED: Final = 5
"""How many node ids a reason names."""


def contest(claims: Mapping[int, int], holders: Mapping[int, int]) -> tuple[dict[int, int], dict[int, str]]:
    """Return who holds each partition, and why the other nodes that declare it are refused, by node.

    A partition that one node declares is that node's. Of several the one that held it before keeps it, and the others
    are refused; where none did, all of them are.

    Parameters
    ----------
    claims : mapping of int to int
        The partition each node declares, of the nodes that are online and answer.
    holders : mapping of int to int
        The node that held each partition before.
    """
    claimants: dict[int, list[int]] = {}
    # Sorted, so that a reason does not depend on who answered first.
    for node, partition in sorted(claims.items()):
        claimants.setdefault(partition, []).append(node)
    held: dict[int, int] = {}
    refused: dict[int, str] = {}
    for partition, nodes in claimants.items():
        # A former holder that is not among those that declare it now has no say.
        holder = nodes[0] if len(nodes) == 1 else holders.get(partition)
        if holder in nodes:
            held[partition] = holder
        reason = _reason(partition, nodes, held.get(partition)) if len(nodes) > 1 else ""
        refused |= {node: reason for node in nodes if node != held.get(partition)}
    return held, refused


def _reason(partition: int, nodes: Sequence[int], holder: int | None) -> str:
    named = ", ".join(map(str, nodes[:_NAMED])) + (", ..." if len(nodes) > _NAMED else "")
    used = "none of them is used" if holder is None else f"only node {holder}, which held it before, is used"
    return (
        f"{len(nodes)} nodes declare partition {partition} ({named}): {used}. Was a configuration copied? Give every "
        "node a partition-id of its own"
    )


class Holders(Stateful):
    """The nodes of a run that declared a partition, and the one among them that holds it; see :func:`contest`.

    A holder that is offline, leaves a message unanswered or declares another partition holds it no longer, until it
    answers again: of several that declare a partition the one that held it first is meant. Where the
    engine itself knows who holds what, as the in-process one does, the nodes' word does not count. A node without a
    configured partition declares a number drawn from its node id; two such numbers may be equal by chance, which is
    nobody's mistake and refuses nobody.

    Attributes
    ----------
    known : dict of int to int
        The partition of each node of which the engine itself knows it.
    claims : dict of int to int
        The partition each node declared last.
    held : dict of int to int
        The node that holds each partition.
    silent : set of int
        Nodes that left their last message unanswered.
    former : dict of int to list of int
        The nodes that ever held each partition, the first ones first, at most :data:`FORMER` of each.
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "claims": dict[int, int],
        "held": dict[int, int],
        "silent": set[int],
        "former": dict[int, list[int]],
    }

    def __init__(self) -> None:
        self.known: dict[int, int] = {}
        self.claims: dict[int, int] = {}
        self.held: dict[int, int] = {}
        self.silent: set[int] = set()
        self.former: dict[int, list[int]] = {}

    def meet(self, grid: Grid) -> None:
        """Forget the nodes that are not online any more, and learn which partitions the engine knows."""
        present, lookup = set(grid.get_node_ids()), engine_lookup(grid)
        self.known = {node: partition for node in present if (partition := lookup(node)) is not None}
        self.claims = {node: partition for node, partition in self.claims.items() if node in present} | self.known
        self.silent.intersection_update(present)

    def doubted(self, among: Container[int]) -> list[int]:
        """Return the silent nodes ``among`` some whose partition another node declares, too: to be asked once more.

        A process that was killed is listed as online for a while, and one that is there keeps its partition.
        """
        declared = {partition for node, partition in self.claims.items() if node not in self.silent and node in among}
        return [node for node in sorted(self.silent) if node in among and self.claims.get(node) in declared]

    def settle(self, asked: Iterable[int], answers: Mapping[int, int | None]) -> dict[int, str]:
        """Take the answers of one exchange; return why nodes that answered are refused, by node.

        Parameters
        ----------
        asked : iterable of int
            The nodes that were sent a message.
        answers : mapping of int to int or None
            The partition each node that answered declares; None where it says nothing, and stays with its last word.
        """
        # Silence counts until the next answer: a holder that is down must not lock out its replacement.
        self.silent.update(asked)
        self.silent.difference_update(answers)
        for node, partition in answers.items():
            if partition is not None and node not in self.known:
                self.claims[node] = partition
        # The remainder is what a client declares when nothing is configured.
        meant = {n: p for n, p in self.claims.items() if n not in self.silent and p != n % PARTITIONS}
        # The first of those that declare it: whoever came while it was silent does not keep its place.
        there = {p: [n for n in nodes if meant.get(n) == p] for p, nodes in self.former.items()}
        self.held, refused = contest(meant, {p: nodes[0] for p, nodes in there.items() if nodes})
        for partition, node in self.held.items():
            nodes = self.former.setdefault(partition, [])
            if node not in nodes and len(nodes) < FORMER:
                nodes.append(node)
        return {node: reason for node, reason in refused.items() if node in answers}
