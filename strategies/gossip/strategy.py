"""The server half of decentralised learning: a mailbox between nodes that cannot reach each other.

Flower's nodes talk to the server only, so messages between them travel through it, unread. One round is one iteration:
every node gets, in one message, the messages of the former iteration, finishes it, begins the next and answers with the
messages of that. :class:`fedcomp.gossip.relay.Relay` decides who is asked to do what, and what happens to the messages
of a node that does not answer; here its instructions become messages and replies its answers.

There is no global model. In rounds that are due, and in the last one, every node is asked for its model; their mean is
what the strategy returns, and the figures of each and their distance from the mean are in the round's metrics. What
that costs is counted apart from training, in messages of a type of their own.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedcomp.errors import ConfigError, FedcompError, StateError
from fedcomp.flower import gossip
from fedcomp.flower.logs import log
from fedcomp.flower.records import to_arrays, widened
from fedcomp.flower.report import Reports
from fedcomp.flower.rounds import Exchanges, ExchangeStrategy, Push
from fedcomp.gossip import get_algorithm
from fedcomp.gossip.base import Algorithm, largest_message
from fedcomp.gossip.protocol import Instruction, NodeAnswer
from fedcomp.gossip.relay import ENDLESS, Relay, RelaySettings
from fedcomp.gossip.topology import Topology, topology_of
from fedcomp.gossip.vector import flatten
from fedcomp.layout import Layout
from fedcomp.plain import Count, from_plain
from fedcomp.rules import Int, checked
from fedcomp.stateful import Stateful, StatePart, nested
from fedcomp.strategies.gossip.links import PeerLinks
from fedcomp.strategies.gossip.report import Before, Iterations, Observed, answer_of, far_out, figures_of, mean_of
from fedcomp.strategies.gossip.seats import Seats
from fedcomp.strategies.gossip.settings import GossipSettings
from fedcomp.strategies.round_log import RoundLog

__all__ = ["GossipRelay", "Iterations", "Observed", "figures_of", "mean_of"]


class GossipRelay(ExchangeStrategy, Stateful):
    """Decentralised learning over Flower's star, one iteration per round.

    The clients need the half :func:`fedcomp.clients.gossip.gossip_node`; :mod:`fedcomp.clients.app` has it.
    Vertex i of the graph is the node with partition id i. A node that comes back under a new node id is the same
    vertex; what it knew is lost with its state, and it joins again.

    Parameters
    ----------
    algorithm : Algorithm or mapping
        Or the configuration :func:`fedcomp.gossip.get_algorithm` takes.
    topology : Topology, mapping or str
        The graph; a text or a mapping is read by :func:`fedcomp.gossip.topology.topology_of`.
    nodes : int
        Vertices, where ``topology`` does not say it; 0 takes the entry "clients" of the training configuration, or else
        the number of nodes online in the first round.
    **settings
        How rounds are run, as in :class:`fedcomp.strategies.gossip.settings.GossipSettings`: ``patience=3, seed=1``.

    Attributes
    ----------
    settings : GossipSettings
    reports : Reports
        By round, with the section ``gossip``.

    Raises
    ------
    ConfigError
        For a value out of range, or closing iterations of an algorithm that has no use for them.

    Examples
    --------
    >>> strategy = GossipRelay({"name": "choco", "lr": 0.1, "gamma": 0.3}, "ring", nodes=8, patience=3)
    >>> strategy.algorithm.name
    'choco'
    """

    TOGETHER: ClassVar[str] = (
        "a decentralised run has its models on the nodes: a relay that is set back alone would take them for those of "
        "an earlier iteration. Only the in-process engine stores both"
    )

    STATE: ClassVar[Mapping[str, Any]] = {
        "_relay": StatePart(
            lambda strategy: strategy._save_relay(), lambda strategy, state: strategy._load_relay(state)
        ),
        "_seats": nested("_seats"),
        "_initial": ArrayRecord | None,
        "reports": Reports,
    }

    def __init__(
        self,
        algorithm: Algorithm | Mapping[str, Any],
        topology: Topology | Mapping[str, Any] | str = "ring",
        *,
        nodes: int = 0,
        **settings: Any,
    ) -> None:
        self.algorithm = algorithm if isinstance(algorithm, Algorithm) else get_algorithm(algorithm)
        self.topology = topology
        self.settings = GossipSettings(**settings)
        s = self.settings
        if s.skew_rounds and not self.algorithm.asynchronous:
            raise ConfigError(
                f"skew_rounds={s.skew_rounds!r} is not valid with {self.algorithm.name}: closing iterations are for "
                "push-sum algorithms; leave it at 0"
            )
        self.setup = gossip.GossipSetup(self.algorithm.to_config(), s.dtype, s.dense_below, s.buffers)
        self.reports = Reports()
        nodes = checked("nodes", nodes, Int())
        self._count = nodes if isinstance(topology, str) else _vertices(topology, nodes)
        self._log = RoundLog("GossipRelay")
        self._links = PeerLinks(s) if s.transport == "peers" else None
        self._seats = Seats(s, self._links)
        self._initial: ArrayRecord | None = None
        self._relay: Relay | None = None

    @property
    def relay(self) -> Relay:
        """The mailbox.

        Raises
        ------
        StateError
            Before the first round.
        """
        if self._relay is None:
            raise StateError("the run has not begun: nothing is under way before the first round")
        return self._relay

    def graph(self, nodes: int) -> Topology:
        """Return the graph of a run of ``nodes`` nodes, checked against the algorithm.

        Raises
        ------
        TopologyError
            When it cannot carry the algorithm, or has another number of vertices.
        """
        made = topology_of(self.topology, nodes, self.settings.seed)
        made.check(self.algorithm)
        return made

    def leave(self, vertex: int) -> None:
        """Let a node leave in good order with its next message: what it has goes to its neighbours. It is not let in
        again.

        Raises
        ------
        ConfigError
            When it does not take part.
        """
        self.relay.leave(vertex)
        self._seats.dismissed.add(vertex)

    def summary(self) -> None:
        """Log algorithm and graph."""
        log.info("\t├──> GossipRelay: %r over %s", self.algorithm, self.topology)

    def round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[tuple[ArrayRecord | None, MetricRecord | None]]:
        """Run one iteration on all nodes; the models stay with them."""
        report = self.reports.begin(server_round).section(Iterations)
        config["server-round"] = server_round
        relay, clients = self._relay, config.get("clients")
        # 0 when neither the graph nor the configuration says how many vertices there are.
        count = self._count or (clients if isinstance(clients, int) else 0)
        expected = range(count) if relay is None else relay.members
        yield from self._seats.meet(grid, config, report, relay, expected)
        if relay is None:
            relay = self._begin(arrays, count or len(list(grid.get_node_ids())), report)
        if relay.finishing:
            # ENDLESS, as in _begin: how many rounds there will be, only the driver knows.
            relay.prolong(ENDLESS)  # a finished run that is extended
        # The relay counts over the whole run; a round reports the difference.
        before = Before.of(relay)
        yield from self._exchange(config, report, grid, self._seats.away(relay))
        # Of a synchronous algorithm nobody can go on before everybody has answered or is given up.
        while not (relay.algorithm.asynchronous or relay.settled):
            yield from self._exchange(config, report, grid)
        before.close(relay, report)
        return None, report.metrics()

    def close_round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, *, last: bool
    ) -> Exchanges[tuple[ArrayRecord | None, MetricRecord | None]]:
        """After the last round run the closing iterations and deliver all messages; in rounds that are due, observe."""
        whole, relay = self.reports[server_round], self.relay
        report = whole.section(Iterations)
        before = Before.of(relay)
        if last:
            relay.conclude()
            # meet in the loop: a node that was offline for a moment gets its vertex back and can still finish.
            while not relay.done:
                yield from self._seats.meet(grid, config, report, relay, relay.members)
                yield from self._exchange(config, report, grid)
        observed = None
        if last or server_round % self.settings.observe_every == 0:
            observed = yield from self._observe(config, report)
        before.close(relay, report)
        whole.asked, whole.used = len(report.members), report.answers
        self._log.conclude(whole)
        return observed, report.metrics()

    def _begin(self, arrays: ArrayRecord, count: int, report: Iterations) -> Relay:
        named = to_arrays(arrays)
        layout = Layout.of(named, self.setup.policy)
        if self.setup.dtype == "float32" and layout.wide:
            raise ConfigError(
                f"{layout.wide[0].name} of the model is float64, and nodes would compute in float32, where small steps "
                "of large values are lost: set dtype='float64', or convert the model to float32"
            )
        size = flatten(named, layout, self.setup.dtype).nbytes // max(1, layout.size)
        self._initial = widened(arrays)
        largest = largest_message(self.algorithm, layout.size, size)
        # Random and not from the seed: two runs with one seed must not continue each other's memories.
        self._relay = self._made(count, ENDLESS, secrets.token_hex(8), largest)
        self._seats.note_outside(count, report)
        return self._relay

    def _made(self, count: int, iterations: int, session: str, largest: int) -> Relay:
        graph, s = self.graph(count), self.settings
        given = RelaySettings(
            iterations,
            session,
            s.seed,
            largest,
            patience=s.patience,
            skew_rounds=s.skew_rounds,
            watch=s.watch,
            by_reference=self._links is not None,
        )
        return Relay(self.algorithm.fitted(graph), graph, given)

    def _exchange(
        self, config: ConfigRecord, report: Iterations, grid: Grid, away: Sequence[int] = ()
    ) -> Exchanges[None]:
        """Send every node its instruction and settle what comes back; nodes ``away`` are asked for a sign of life."""
        relay, node_of = self.relay, self._seats.node_of
        instructions = relay.ask()
        # They count as attempts like any silence: a vertex that stays without a node is given up.
        errors = {v: "no node of this vertex is online" for v in instructions if v not in node_of}
        messages = {v: self._message(i, config, report.round) for v, i in instructions.items() if v in node_of}
        calls = {v: self._seats.hello(node_of[v], config) for v in away if v not in messages}
        replies = yield Push([*messages.values(), *calls.values()], self.settings.timeout)
        vertices = {m.metadata.message_id: v for v, m in (*messages.items(), *calls.items())}
        answers, heard = dict[int, NodeAnswer](), set[int]()
        for reply in replies:
            vertex = vertices[reply.metadata.reply_to_message_id]
            if vertex in calls:
                # A sign of life is enough: it joins with a new state, whatever it says.
                if reply.has_content():
                    relay.join(vertex)
                    heard.add(vertex)
                continue
            try:
                answer = answer_of(reply)
                if self._links is not None:
                    self._links.take(reply, node_of[vertex], instructions[vertex], report, grid)
                answers[vertex] = answer
            except FedcompError as error:
                errors[vertex] = f"{type(error).__name__}: {error}"
        errors |= {v: "nothing came back in time" for v in messages if v not in answers and v not in errors}
        heard |= answers.keys()
        self._seats.holders.settle((node_of[v] for v in vertices.values()), {node_of[v]: None for v in heard})
        relay.take(answers, errors)
        report.exchanges += 1
        report.answers += len(answers)
        for vertex in sorted(errors):
            report.note("unanswered", f"vertex {vertex}: {errors[vertex]}")

    def _message(self, instruction: Instruction, config: ConfigRecord, server_round: int) -> Message:
        content = RecordDict({self.settings.configrecord_key: config})
        # The algorithm as it was fitted to the graph, which the settings do not have.
        replace(self.setup, algorithm=self.relay.algorithm.to_config()).put(content)
        gossip.put_instruction(content, instruction)
        if self._links is not None:
            self._links.put(content, instruction, self._seats.node_of, self.relay.oldest(), server_round)
        kind = gossip.OBSERVE_TYPE if instruction.action == "observe" else gossip.EXCHANGE_TYPE
        if instruction.start in ("common", "empty"):
            assert self._initial is not None
            content[gossip.MODEL] = self._initial
            kind = gossip.START_TYPE
        return Message(content, self._seats.node_of[instruction.node], kind)

    def _observe(self, config: ConfigRecord, report: Iterations) -> Exchanges[ArrayRecord | None]:
        """Ask every settled node for its model and figures; return the mean of the models."""
        instructions = {v: i for v, i in self.relay.observe().items() if v in self._seats.node_of}
        messages = [self._message(instruction, config, report.round) for instruction in instructions.values()]
        replies = yield Push(messages, self.settings.timeout)
        vertices = {m.metadata.message_id: v for m, v in zip(messages, instructions, strict=True)}
        seen: dict[int, Observed] = {}
        for reply in replies:
            vertex = vertices[reply.metadata.reply_to_message_id]
            try:
                seen[vertex] = Observed.of(reply, self._initial or ArrayRecord(), self.setup.dtype)
            except FedcompError as error:
                report.note("unseen", f"vertex {vertex}: {error}")
        for vertex, reason in far_out(seen).items():
            report.note("unseen", f"vertex {vertex}: {reason}")
            del seen[vertex]
        if not seen:
            return None
        # By vertex: replies come in any order, and sums of floats depend on it.
        ordered = [seen[vertex] for vertex in sorted(seen)]
        middle = mean_of([found.arrays for found in ordered])
        report.observed = figures_of(ordered, middle)
        return ArrayRecord({name: Array(array) for name, array in middle.items()})

    def identity(self) -> dict[str, Any]:
        """Return algorithm, model type and transport, which must not change within a run."""
        return self.setup.values() | ({} if self._links is None else {"transport": self.settings.transport})

    def _save_relay(self) -> dict[str, Any] | None:
        """Return the mailbox, and what the relay around it is made from."""
        relay = self._relay
        if relay is None:
            return None
        given = relay.settings
        arguments = [relay.topology.n, relay.iterations, given.session, given.largest]
        links = {} if self._links is None else {"links": self._links.save(relay)}
        return {"made_from": arguments, "state": relay.state_dict(), **links}

    def _load_relay(self, stored: Mapping[str, Any] | None) -> None:
        if stored is None:
            return
        nodes, iterations, session, largest = from_plain(tuple[Count, Count, str, Count], stored["made_from"], "relay")
        if self._count and nodes != self._count:
            raise StateError(
                f"the stored run is of {nodes} nodes, this strategy of {self._count}; resume with the number the run "
                "was started with"
            )
        # Made with what the stored run was made with: its messages and its nodes' memories name that session.
        self._relay = self._made(nodes, iterations, session, largest)
        self._relay.load_state_dict(stored["state"])
        if self._links is not None:
            self._links.load(stored["links"])


def _vertices(topology: Topology | Mapping[str, Any], nodes: int) -> int:
    """Return how many vertices a graph has that says so itself; otherwise ``nodes``."""
    given = topology.n if isinstance(topology, Topology) else topology.get("n", nodes)
    if nodes and given != nodes:
        raise ConfigError(f"nodes={nodes!r}, but the graph has {given!r} vertices; leave nodes out")
    return int(given)
