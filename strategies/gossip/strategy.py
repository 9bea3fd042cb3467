"""The server half of decentralised learning: a mailbox between nodes that cannot reach each other.

Flower's nodes talk to the server only, so messages between them travel through it, unread. One round is one iteration:
every node gets, in one message, the messages of the former iteration, finishes it, begins the next and answers with the
messages of that. Who is told what, and what happens to the messages of a node that does not answer, is decided by
:class:`fedcomp.gossip.relay.Relay`; here its instructions become messages and replies its answers.

There is no global model. In rounds that are due, and in the last one, every node is asked for its model; their mean is
what the strategy returns, and the figures of each and their distance from the mean are in the round's metrics. What
that costs is counted apart from training, in messages of a type of their own.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, Literal

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedcomp.errors import ConfigError, FedcompError, StateError
from fedcomp.flower import gossip
from fedcomp.flower.logs import log
from fedcomp.flower.metered import addressed, partition_lookup
from fedcomp.flower.payload import take_node
from fedcomp.flower.records import to_arrays
from fedcomp.flower.report import Reports
from fedcomp.flower.rounds import Exchanges, ExchangeStrategy, Push
from fedcomp.gossip import get_algorithm
from fedcomp.gossip.base import Algorithm
from fedcomp.gossip.protocol import Instruction, NodeAnswer, largest_message
from fedcomp.gossip.relay import ENDLESS, Observer, Relay, RelaySettings
from fedcomp.gossip.topology import Topology, topology_of
from fedcomp.gossip.vector import flatten
from fedcomp.layout import Layout
from fedcomp.plain import Count, fields_of, from_plain
from fedcomp.stateful import Stateful, StatePart
from fedcomp.strategies.gossip.report import Iterations, Observed, answer_of, difference, figures_of, mean_of
from fedcomp.strategies.partitions import contest
from fedcomp.strategies.round_log import RoundLog

__all__ = ["GossipRelay", "Iterations", "Observed", "figures_of", "mean_of"]


_POLL_SECONDS: Final = 0.2
_EVENTS: Final = ("gone", "joined", "left", "failed", "refused", "needed", "lost", "doubted", "noticed")
"""What :class:`fedcomp.gossip.relay.RelayReport` lists."""


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
    skew_rounds : int or "auto"
        Iterations after the last round in which models travel whole and nothing is learnt (push-sum algorithms only);
        "auto": as many as the graph needs to average.
    patience : int
        A node that does not answer this many exchanges in a row is given up. With a synchronous algorithm these follow
        each other in one round, since nobody can go on without it; with an asynchronous one it is one in every round.
    deadline : float, optional
        Seconds for the replies of each exchange; default: the driver's timeout alone.
    wait : float
        Seconds to wait before an exchange for a vertex of which no node is online.
    observe_every : int
        Rounds between two observations; the last round always is one.
    dtype : str
        "float32" or "float64": of the vectors on the nodes.
    dense_below : int
        Tensors with fewer elements, and vectors, travel whole.
    buffers : str
        "dense" mixes running statistics of normalisation layers, "local" leaves them to each node.
    watch : Observer or bool
        What is told the nodes' figures after every iteration and may end the run; True is
        :class:`fedcomp.gossip.tuning.DivergenceWatch`.
    seed : int
        Of everything random in the algorithm, and of a random graph.

    Attributes
    ----------
    reports : Reports
        By round, with the section ``gossip``.

    Examples
    --------
    >>> strategy = GossipRelay({"name": "choco", "lr": 0.1, "gamma": 0.3}, "ring", nodes=8)
    >>> strategy.algorithm.name
    'choco'
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "_relay": StatePart(
            lambda strategy: strategy._save_relay(), lambda strategy, state: strategy._load_relay(state)
        ),
        "_met": dict[int, int | None],
        "_node_of": dict[int, int],
        "_dismissed": set[int],
        "_silent": set[int],
        "_initial": ArrayRecord | None,
        "reports": Reports,
    }

    def __init__(
        self,
        algorithm: Algorithm | Mapping[str, Any],
        topology: Topology | Mapping[str, Any] | str = "ring",
        *,
        nodes: int = 0,
        skew_rounds: int | Literal["auto"] = 0,
        patience: int = 5,
        deadline: float | None = None,
        wait: float = 0.0,
        observe_every: int = 1,
        dtype: str = "float32",
        dense_below: int = 64,
        buffers: str = "dense",
        watch: Observer | bool = True,
        seed: int = 0,
        configrecord_key: str = "config",
    ) -> None:
        self.algorithm = algorithm if isinstance(algorithm, Algorithm) else get_algorithm(algorithm)
        self.topology = topology
        for name, value, low in (("nodes", nodes, 0), ("patience", patience, 1), ("observe_every", observe_every, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ConfigError(f"{name}={value!r} is not valid: a whole number, at least {low}")
        if deadline is not None and not deadline > 0:
            raise ConfigError(f"deadline={deadline!r} is not valid: give seconds > 0, or None")
        if not 0 <= wait < float("inf"):
            raise ConfigError(f"wait={wait!r} is not valid: a number of seconds, at least 0")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ConfigError(f"seed={seed!r} is not valid: a whole number")
        if not (isinstance(watch, bool) or callable(watch)):
            raise ConfigError(f"watch={watch!r} is not valid: True, False, or a callable that is told every iteration")
        whole = isinstance(skew_rounds, int) and not isinstance(skew_rounds, bool)
        if skew_rounds != "auto" and not (whole and skew_rounds >= 0):
            raise ConfigError(f"skew_rounds={skew_rounds!r} is not valid: a whole number, at least 0, or 'auto'")
        if skew_rounds and not self.algorithm.asynchronous:
            raise ConfigError(
                f"skew_rounds={skew_rounds!r} is not valid with {self.algorithm.name}: closing iterations are for "
                "push-sum algorithms; leave it at 0"
            )
        self.skew_rounds, self.patience = skew_rounds, patience
        self.deadline, self.wait, self.observe_every = deadline, wait, observe_every
        self.setup = gossip.GossipSetup(self.algorithm.to_config(), dtype, dense_below, buffers)
        self.watch = watch
        self.seed = seed
        self.reports = Reports()
        self._log = RoundLog("GossipRelay")
        self._count = nodes if isinstance(topology, str) else _vertices(topology, nodes)
        self._key = configrecord_key
        self._initial: ArrayRecord | None = None
        self._relay: Relay | None = None
        self._node_of: dict[int, int] = {}
        self._met: dict[int, int | None] = {}
        self._told: dict[str, int] = {}
        self._dismissed: set[int] = set()
        self._silent: set[int] = set()

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
        made = topology_of(self.topology, nodes, self.seed)
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
        self._dismissed.add(vertex)

    def summary(self) -> None:
        """Log algorithm and graph."""
        log.info("\t├──> GossipRelay: %r over %s", self.algorithm, self.topology)

    def round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[tuple[ArrayRecord | None, MetricRecord | None]]:
        """Run one iteration on all nodes; the models stay with them."""
        report = self.reports.begin(server_round).section(Iterations)
        config["server-round"] = server_round
        yield from self._meet(grid, config, report)
        if self._relay is None:
            self._begin(arrays, config, grid, report)
        relay = self.relay
        if relay.finishing:
            # ENDLESS, as in _begin: how many rounds there will be, only the driver knows.
            relay.prolong(ENDLESS)  # a finished run that is extended
        # The relay counts over the whole run; a round reports the difference.
        before = fields_of(relay.traffic)
        yield from self._exchange(config, grid, report, self._away())
        # Of a synchronous algorithm nobody can go on before everybody has answered or is given up.
        while not (relay.algorithm.asynchronous or relay.settled):
            yield from self._exchange(config, grid, report)
        self._close(report, before)
        return None, report.metrics()

    def close_round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, *, last: bool
    ) -> Exchanges[tuple[ArrayRecord | None, MetricRecord | None]]:
        """After the last round run the closing iterations and deliver all messages; in rounds that are due, observe."""
        whole, relay = self.reports[server_round], self.relay
        report = whole.section(Iterations)
        before = fields_of(relay.traffic)
        if last:
            relay.conclude()
            # _meet in the loop: a node that was offline for a moment gets its vertex back and can still finish.
            while not relay.done:
                yield from self._meet(grid, config, report)
                yield from self._exchange(config, grid, report)
        observed = None
        if last or server_round % self.observe_every == 0:
            observed = yield from self._observe(config, grid, report)
        self._close(report, before)
        whole.asked, whole.used = len(report.members), report.answers
        self._log.conclude(whole)
        return observed, report.metrics()

    def _begin(self, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, report: Iterations) -> None:
        named = to_arrays(arrays)
        layout = Layout.of(named, self.setup.policy)
        count = self._announced(config) or len(list(grid.get_node_ids()))
        size = flatten(named, layout, self.setup.dtype).nbytes // max(1, layout.size)
        self._initial = arrays
        largest = largest_message(self.algorithm, layout.size, size)
        # Random and not from the seed: two runs with one seed must not continue each other's memories.
        self._relay = self._made(count, ENDLESS, secrets.token_hex(8), largest)
        # These nodes introduced themselves before the number of vertices was known.
        for vertex in self._met.values():
            if vertex is not None and vertex >= count:
                report.note("unknown", _outside(vertex, count))

    def _announcement(self) -> gossip.GossipSetup:
        """Return what the nodes are told of the run: the algorithm as it was fitted to the graph."""
        return replace(self.setup, algorithm=self.relay.algorithm.to_config())

    def _announced(self, config: ConfigRecord) -> int:
        """Return how many vertices the settings say there are; 0 when they do not."""
        clients = config.get("clients")
        return self._count or (clients if isinstance(clients, int) else 0)

    def _made(self, count: int, iterations: int, session: str, largest: int) -> Relay:
        graph = self.graph(count)
        return Relay(
            self.algorithm.fitted(graph),
            graph,
            RelaySettings(
                iterations,
                session,
                self.seed,
                largest,
                patience=self.patience,
                skew_rounds=self.skew_rounds,
                watch=self.watch,
            ),
        )

    def _meet(self, grid: Grid, config: ConfigRecord, report: Iterations) -> Exchanges[None]:
        """Ask the nodes that are new which vertex they are, and wait a while for vertices without a node."""
        deadline = time.monotonic() + self.wait
        while True:
            online = list(grid.get_node_ids())
            new_nodes = [node for node in online if node not in self._met]
            if new_nodes:
                yield from self._introduce(new_nodes, grid, config, report)
            self._seat(online, new_nodes, report)
            missing = self._expected(config) - self._node_of.keys()
            if not missing or time.monotonic() >= deadline:
                return
            time.sleep(_POLL_SECONDS)

    def _expected(self, config: ConfigRecord) -> set[int]:
        return set(range(self._announced(config))) if self._relay is None else set(self._relay.members)

    def _introduce(
        self, new_nodes: Sequence[int], grid: Grid, config: ConfigRecord, report: Iterations
    ) -> Exchanges[None]:
        messages = [self._hello(node, config) for node in new_nodes]
        replies = yield Push(messages, self.deadline)
        asked, known = dict(addressed(messages)), partition_lookup(grid)
        for reply in replies:
            node = asked[reply.metadata.reply_to_message_id]
            vertex = known(node)
            # The grid's own knowledge goes before what a node claims.
            vertex = take_node(reply) if vertex is None else vertex
            # It stays out of _met, so that it is asked again in the next round.
            if reply.has_error():
                report.note("unknown", f"a node could not say which vertex it is: {reply.error.reason}")
                continue
            self._met[node] = vertex
            if vertex is None:
                report.note("unknown", "a node does not say which vertex it is")
            elif self._relay is not None and vertex >= self._relay.topology.n:
                report.note("unknown", _outside(vertex, self._relay.topology.n))

    def _seat(self, online: Collection[int], new_nodes: Collection[int], report: Iterations) -> None:
        """Settle which node is which vertex, and report the ``new_nodes`` that are refused.

        A newcomer takes the place of one that is offline or has left its last message unanswered: a process that was
        killed is listed as online for a while. One that answers is not driven out by a claim, and of several newcomers
        that claim one vertex none is seated.
        """
        self._node_of = {vertex: node for vertex, node in self._node_of.items() if node in online}
        there = [(node, vertex) for node, vertex in self._met.items() if node in online and node not in self._silent]
        claims = {node: vertex for node, vertex in there if vertex is not None}
        held, refused = contest(claims, self._node_of)
        for vertex, node in held.items():
            if self._node_of.get(vertex) != node:
                self._node_of[vertex] = node
                # It was given up, and its state went with the old node id: it joins with a new one.
                if self._relay is not None and vertex in self._away():
                    self._relay.join(vertex)
        for node in new_nodes:
            if node in refused:
                report.note("unknown", refused[node])
        for reason in sorted({refused[node] for node in new_nodes if node in refused}):
            log.warning("round %d: %s", report.round, reason)

    def _away(self) -> list[int]:
        """Return the vertices that were given up and of which a node is online: perhaps it can be reached again. Not
        those whose iterations failed: they would fail again, and every return costs all others an epoch."""
        known = {vertex for vertex in self._node_of if vertex < self.relay.topology.n}
        return sorted(known - set(self.relay.members) - self._dismissed - set(self.relay.excluded))

    def _exchange(
        self, config: ConfigRecord, grid: Grid, report: Iterations, away: Sequence[int] = ()
    ) -> Exchanges[None]:
        """Send what every node is to be told now, and settle what comes back; who is ``away`` is asked for a sign."""
        relay = self.relay
        instructions = relay.ask()
        # They count as attempts like any silence: a vertex that stays without a node is given up.
        errors = {v: "no node of this vertex is online" for v in instructions if v not in self._node_of}
        messages = {v: self._message(i, config) for v, i in instructions.items() if v in self._node_of}
        calls = {v: self._hello(self._node_of[v], config) for v in away if v not in messages}
        replies = yield Push([*messages.values(), *calls.values()], self.deadline)
        vertices = {m.metadata.message_id: v for v, m in (*messages.items(), *calls.items())}
        answers: dict[int, NodeAnswer] = {}
        for reply in replies:
            vertex = vertices[reply.metadata.reply_to_message_id]
            if vertex in calls:
                # A sign of life is enough: it joins with a new state, whatever it says.
                if reply.has_content():
                    relay.join(vertex)
                continue
            try:
                answers[vertex] = answer_of(reply)
            except FedcompError as error:
                errors[vertex] = f"{type(error).__name__}: {error}"
        errors |= {v: "nothing came back in time" for v in messages if v not in answers and v not in errors}
        # Replaced each time: a node that answers again is trusted with its vertex again.
        self._silent = {self._node_of[vertex] for vertex in errors if vertex in self._node_of}
        relay.take(answers, errors)
        report.exchanges += 1
        report.answers += len(answers)
        for vertex in sorted(errors):
            report.note("unanswered", f"vertex {vertex}: {errors[vertex]}")

    def _hello(self, node: int, config: ConfigRecord) -> Message:
        return Message(RecordDict({self._key: config}), node, gossip.HELLO_TYPE)

    def _message(self, instruction: Instruction, config: ConfigRecord) -> Message:
        content = RecordDict({self._key: config})
        self._announcement().put(content)
        gossip.put_instruction(content, instruction)
        begins = instruction.start in ("common", "empty")
        if begins:
            assert self._initial is not None
            content[gossip.MODEL] = self._initial
        kind = gossip.START_TYPE if begins else gossip.EXCHANGE_TYPE
        return Message(content, self._node_of[instruction.node], kind)

    def _observe(self, config: ConfigRecord, grid: Grid, report: Iterations) -> Exchanges[ArrayRecord | None]:
        """Ask every settled node for its model and figures; return the mean of the models."""
        instructions = {v: i for v, i in self.relay.observe().items() if v in self._node_of}
        messages = []
        for instruction in instructions.values():
            content = RecordDict({self._key: config})
            self._announcement().put(content)
            gossip.put_instruction(content, instruction)
            messages.append(Message(content, self._node_of[instruction.node], gossip.OBSERVE_TYPE))
        replies = yield Push(messages, self.deadline)
        vertices = {m.metadata.message_id: v for m, v in zip(messages, instructions, strict=True)}
        seen: dict[int, Observed] = {}
        for reply in replies:
            vertex = vertices[reply.metadata.reply_to_message_id]
            try:
                seen[vertex] = Observed.of(reply, self._initial or ArrayRecord(), self.setup.dtype)
            except FedcompError as error:
                report.note("unseen", f"vertex {vertex}: {error}")
        if not seen:
            return None
        # By vertex: replies come in any order, and sums of floats depend on it.
        ordered = [seen[vertex] for vertex in sorted(seen)]
        middle = mean_of([found.arrays for found in ordered])
        report.observed = figures_of(ordered, middle)
        return ArrayRecord({name: Array(array) for name, array in middle.items()})

    def _close(self, report: Iterations, before: Mapping[str, Any]) -> None:
        """Write what has happened since ``before``, the traffic at the time, into the round's report."""
        relay = self.relay
        # Seeing off leavers counts iterations beyond the last one.
        begun = min(relay.iteration, relay.iterations + relay.skew_rounds)
        report.iteration, report.epoch, report.members = begun, relay.epoch, list(relay.members)
        for name, value in difference(fields_of(relay.traffic), before).items():
            # Added, since close_round reports into the same section as the round before it.
            report.traffic[name] = report.traffic.get(name, 0) + value
        for kind in _EVENTS:
            happened = getattr(relay.report, kind)
            # The relay keeps all events of the run; each is reported once.
            for _, vertex, reason in happened[self._told.get(kind, 0) :]:
                report.note(kind, f"vertex {vertex}: {reason}")
            self._told[kind] = len(happened)

    # Resuming.

    def identity(self) -> dict[str, Any]:
        """Return algorithm and model type, which must not change within a run."""
        return self.setup.values()

    def _save_relay(self) -> dict[str, Any] | None:
        """Return the mailbox, and what the relay around it is made from."""
        relay = self._relay
        if relay is None:
            return None
        arguments = [relay.topology.n, relay.iterations, relay.session, relay.largest]
        return {"made_from": arguments, "state": relay.get_state()}

    def _load_relay(self, stored: Mapping[str, Any] | None) -> None:
        if stored is None:
            return
        nodes, iterations, session, largest = from_plain(tuple[Count, Count, str, Count], stored["made_from"], "relay")
        if self._count and nodes != self._count:
            raise StateError(
                f"the stored run is of {nodes} nodes, this strategy of {self._count}; resume with the number the run "
                "was started with"
            )
        self._relay = self._made(nodes, iterations, session, largest)
        self._relay.set_state(*stored["state"])
        # What the stored rounds have reported is not reported again.
        self._told = {kind: len(getattr(self._relay.report, kind)) for kind in _EVENTS}


def _outside(vertex: int, nodes: int) -> str:
    return f"a node says it is vertex {vertex} of a graph of {nodes}"


def _vertices(topology: Topology | Mapping[str, Any], nodes: int) -> int:
    """Return how many vertices a graph has that says so itself; otherwise ``nodes``."""
    given = topology.n if isinstance(topology, Topology) else topology.get("n", nodes)
    if nodes and given != nodes:
        raise ConfigError(f"nodes={nodes!r}, but the graph has {given!r} vertices; leave nodes out")
    return int(given)
