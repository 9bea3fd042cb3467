"""Decentralised learning over Flower's star topology, one iteration per round.

:class:`fedcomp.systems.gossip.Gossip` says who does what; here its runs are given vertices, a report and an end. There
is no global model: in rounds that are due, and in the last one, every node is asked for its model; their mean is what
the strategy returns, and the figures of each and their distance from the mean are in the round's metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fedcomp.errors import ConfigError, StateError
from fedcomp.flower.logs import log
from fedcomp.flower.records import to_arrays, widened
from fedcomp.flower.report import Report
from fedcomp.flower.rounds import Exchanges, Push
from fedcomp.gossip import get_algorithm
from fedcomp.gossip.base import Algorithm
from fedcomp.gossip.errors import Diverged
from fedcomp.gossip.events import RunReport
from fedcomp.gossip.topology import Complete, Topology, topology_of
from fedcomp.gossip.traffic import GossipTraffic
from fedcomp.gossip.tuning import ADVICE, DivergenceWatch, Observer
from fedcomp.gossip.vector import GossipPolicy, unflatten
from fedcomp.layout import Layout
from fedcomp.plain import Count
from fedcomp.program import Now, Round
from fedcomp.rules import Int, checked
from fedcomp.stateful import Stateful, StatePart
from fedcomp.strategies.gossip.report import Iterations, Observed, close, far_out, figures_of, mean_of, why_not_finite
from fedcomp.strategies.gossip.settings import GossipSettings
from fedcomp.strategies.links import Links
from fedcomp.strategies.round_log import RoundLog
from fedcomp.strategies.running import Running
from fedcomp.strategies.server import Server
from fedcomp.systems.gossip import Course, Gossip

__all__ = ["GossipRelay", "Iterations", "Observed", "figures_of", "mean_of"]

_POLL_SECONDS: Final = 0.1
_REASONS: Final = 3
"""How many different answers an error of the run quotes."""


def _watching(strategy: GossipRelay) -> Any:
    watch = strategy._watch
    return watch.state_dict() if isinstance(watch, Stateful) else None


def _watch_on(strategy: GossipRelay, state: Any) -> None:
    # A run may be resumed with a watch, or without one, that it did not have before.
    if state is not None and isinstance(strategy._watch, Stateful):
        strategy._watch.load_state_dict(state)


class _Everybody(FedAvg):
    """Sends the model to all nodes that are online; which of them get it, and what else, is the program's to say."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        return [Message(content, node, "train", group_id=str(server_round)) for node in sorted(grid.get_node_ids())]

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return ()


class GossipRelay(Server):
    """Decentralised learning over Flower's star, one iteration per round.

    The clients need the half :func:`fedcomp.clients.gossip.gossip_node`; :mod:`fedcomp.clients.app` has it. Vertex i of
    the graph is the node with partition id i. A node that returns under a new node id is the same vertex; without its
    old state it joins afresh.

    Parameters
    ----------
    algorithm : Algorithm or mapping
        Or the configuration :func:`fedcomp.gossip.get_algorithm` takes.
    topology : Topology, mapping or str
        The graph; a text or a mapping is read by :func:`fedcomp.gossip.topology.topology_of`.
    nodes : int
        Number of vertices if ``topology`` does not state it; 0 takes the entry "clients" of the training configuration,
        or else the number of nodes online in the first round.
    **settings
        How rounds are run, as in :class:`fedcomp.strategies.gossip.settings.GossipSettings`: ``patience=3, seed=1``.

    Attributes
    ----------
    settings : GossipSettings
    reports : Reports
        By round, with the section ``gossip``.
    course : Course
        Progress of the run: iteration and members.
    traffic, events : GossipTraffic, RunReport
        Of the whole run.

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

    system: Gossip

    STATE: ClassVar[Mapping[str, Any]] = {
        **Server.STATE,
        "vertices": Count,
        "traffic": GossipTraffic,
        "events": RunReport,
        "_initial": ArrayRecord | None,
        "_watch": StatePart(_watching, _watch_on),
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
        s = self.settings = GossipSettings(**settings)
        if s.skew_rounds and not self.algorithm.asynchronous:
            raise ConfigError(
                f"skew_rounds={s.skew_rounds!r} is not valid with {self.algorithm.name}: closing iterations are for "
                "push-sum algorithms; leave it at 0"
            )
        nodes = checked("nodes", nodes, Int())
        self._stated = nodes if isinstance(topology, str) else _vertices(topology, nodes)
        if self._stated:
            # Here, not in the first round: what cannot run is refused where it is written.
            self.graph(self._stated)
        super().__init__(
            # Until the number of vertices is known a graph that any algorithm runs on stands for it.
            Gossip(self.algorithm, Complete(2)),
            _Everybody(configrecord_key=s.configrecord_key),
            policy=GossipPolicy(s.dense_below, s.buffers),  # type: ignore[arg-type]
            links=Links(s.spool, seal=s.seal, max_store_bytes=s.max_store_bytes) if s.transport == "peers" else None,
            seed=s.seed,
        )

    def _begin(self) -> None:
        super()._begin()
        self.vertices, watch = self._stated, self.settings.watch
        self._watch: Observer | None = DivergenceWatch() if watch is True else (watch or None)
        # Whether the system is that of the run's own graph.
        self._fitted = False
        self.traffic, self.events = GossipTraffic(), RunReport()
        self._log = RoundLog(self._name, self.system.APP, "messages")
        self._initial: ArrayRecord | None = None
        self._strangers: set[int] = set()
        self._online: set[int] = set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.algorithm!r}, {self.topology!r})"

    @property
    def course(self) -> Course:
        """How far the run is.

        Raises
        ------
        StateError
            Before the first round.
        """
        if "course" not in self.state:
            raise StateError("the run has not started: nothing is under way before the first round")
        return self.system.course(self.state)

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
        _ = self.course
        self.state = self.system.leave(self.state, vertex)

    def summary(self) -> None:
        """Log algorithm and graph."""
        log.info("\t├──> GossipRelay: %r over %s", self.algorithm, self.topology)

    def identity(self) -> dict[str, Any]:
        """Return algorithm and model type, which must not change within a run."""
        s = self.settings
        names = {"dtype": s.dtype, "dense_below": s.dense_below, "buffers": s.buffers}
        return {"algorithm": self.algorithm.to_config(), **names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a stored run.

        Raises
        ------
        StateError
            When it is of another number of nodes.
        """
        if self.vertices and state.get("vertices", self.vertices) not in (0, self.vertices):
            raise StateError(
                f"the stored run is of {state['vertices']} nodes, this strategy of {self.vertices}; resume with the "
                "number the run was started with"
            )
        super().load_state_dict(state)

    def round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[tuple[ArrayRecord | None, MetricRecord | None]]:
        """Run one iteration on all nodes; the models stay with them."""
        report = self.reports.begin(server_round)
        config["server-round"] = server_round
        if self._initial is None:
            self._initial = widened(arrays)
        self._found(config, grid)
        _, now = yield from self._run(report, config, grid, lambda system, now: system.round(now))
        section = report.section(Iterations)
        # Nodes, each once: a round may have several exchanges, and an observation more.
        report.asked, report.used = len(section.members), len(now.told["answered"].intersection(section.members))
        return None, section.metrics()

    def close_round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, *, last: bool
    ) -> Exchanges[tuple[ArrayRecord | None, MetricRecord | None]]:
        """After the last round run the closing iterations and deliver all messages; in rounds that are due, observe."""
        report = self.reports[server_round]
        section = report.section(Iterations)
        observed = None
        if last or server_round % self.settings.observe_every == 0:
            program = Gossip.closing if last else Gossip.observing
            x, now = yield from self._run(report, config, grid, program)
            observed, why = self._observed(x.layout, now, section)
            if why and last:
                raise Diverged(f"after the last round {why}. {ADVICE}")
            report.notes += [f"the models diverge: {why}"] if why else []
        if last and observed is None:
            raise StateError(
                "no node has shown its model after the last round, so the run has no result" + _reasons(report)
            )
        self._log.conclude(report, self.roster.claims)
        return observed, section.metrics()

    def _run(
        self, report: Report, config: ConfigRecord, grid: Grid, program: Callable[[Gossip, Now], Round]
    ) -> Exchanges[tuple[Running, Now]]:
        """Drive one of the system's programs; take what it told."""
        assert self._initial is not None
        self.roster.meet(grid)
        self._grid = grid
        messages = list(self.inner.configure_train(report.round, self._initial, config, grid))
        online = {message.metadata.dst_node_id for message in messages}
        for address in (*(online - self._online), *self.roster.doubted(online)):
            # Another node may have declared its partition since: whoever held it first has it back once it answers.
            self.roster.peer(address).key = b""
        self._online = online
        for _ in range(1 if "course" in self.state else self.settings.patience):
            for peer in self.roster.peers.values():
                # Every vertex is wanted: one that broke when it was greeted is greeted again at once.
                peer.greet = 0
            yield from self._in_time(self._greet(report.round, messages))
            peers = [self.roster.peer(message.metadata.dst_node_id) for message in messages]
            # Whose app has no half will not have one either when it is greeted again.
            if all(peer.key or peer.greet for peer in peers):
                break
        x, now = self._ask(report.round, self._initial, messages)
        if self.settings.dtype == "float32" and x.layout.wide:
            raise ConfigError(
                f"{x.layout.wide[0].name} of the model is float64, and nodes would compute in float32, where small "
                "steps of large values are lost: set dtype='float64', or convert the model to float32"
            )
        try:
            yield from self._in_time(self._play(x, now, program(self.system, now)))
        except StateError as error:
            raise StateError(f"{error}{_reasons(report)}") from error
        self.state, self.mailbox = dict(now.state), x.mailbox
        self.traffic.add(now.told["traffic"])
        self._account(report, x, now.told["traffic"])
        self.events.add(now.told)
        section = report.section(Iterations)
        self._note_strangers(x, section)
        close(section, now.told, self._initial)
        if self._watch is not None:
            self.events.watched(self._watch, now.told["figures"])
        return x, now

    def _account(self, report: Report, x: Running, traffic: GossipTraffic) -> None:
        """Add up what nodes sent, each message once, against as many whole models, and what of it travelled whole."""
        layout, item = x.layout, np.dtype(self.settings.dtype).itemsize
        vectors, count = self.algorithm.vectors_per_message, traffic.node["train"]
        report.payload_bytes += traffic.node_bytes
        messages = sum(each.messages for each in traffic.node.values())
        report.model_bytes += messages * sum(x.model[t.name].nbytes for t in layout.tensors)
        whole = count.messages * vectors * layout.size * item
        # As long as whole vectors: nothing was compressed, whatever the layout allows.
        dense = whole if count.bodies >= whole else count.messages * vectors * layout.dense_size * item
        others = sum(traffic.node[phase].bodies for phase in ("dense", "resync"))
        report.frame_bytes += count.bodies + others
        report.dense_bytes += min(count.bodies, dense) + others

    def _note_strangers(self, x: Running, section: Iterations) -> None:
        """Report, once each, the nodes that are no vertex: of another number, or of one that another node holds."""
        outside = {address for number, address in x.addresses.items() if number >= self.vertices}
        refused = self.roster.settle((), dict.fromkeys(set(x.addresses.values()) - self.roster.silent))
        for address in sorted(outside - self._strangers):
            claim = self.roster.claims.get(address)
            if claim is not None and claim >= self.vertices:
                section.note("unknown", f"a node says it is vertex {claim} of a graph of {self.vertices}")
            elif claim is not None:
                section.note("unknown", refused.get(address, f"another node also declares partition {claim}"))
                log.warning("round %d: %s", x.report.round, refused.get(address, ""))
        self._strangers = {address for address in outside if self.roster.claims.get(address) is not None}

    def _in_time(self, play: Exchanges[Any]) -> Exchanges[Any]:
        """Give every exchange the run's own time."""
        try:
            messages = next(play)
            while True:
                if self.settings.timeout is not None and isinstance(messages, list):
                    messages = Push(messages, self.settings.timeout)
                messages = play.send((yield messages))
        except StopIteration as end:
            return end.value

    def _found(self, config: ConfigRecord, grid: Grid) -> None:
        """Make the graph, once it is known of how many vertices; wait a while for nodes that are not there."""
        s, clients = self.settings, config.get("clients")
        deadline = time.monotonic() + s.wait
        if not self.vertices:
            self.vertices = clients if isinstance(clients, int) and clients else len(list(grid.get_node_ids()))
        while len(list(grid.get_node_ids())) < self.vertices and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        if self._fitted:
            return
        self._fitted = True
        graph = self.graph(self.vertices)
        self.system = Gossip(
            self.algorithm,
            graph,
            s.dtype,
            patience=s.patience,
            skew_rounds=graph.averaging_rounds() if s.skew_rounds == "auto" else s.skew_rounds,
        )

    def _observed(self, layout: Layout, now: Now, report: Iterations) -> tuple[ArrayRecord | None, str]:
        """Return the mean of the models that were shown, and why it is of no use; report figures of them."""
        assert self._initial is not None
        given = {name: np.asarray(array) for name, array in to_arrays(self._initial).items() if name in layout.order}
        seen: dict[int, Observed] = {}
        for vertex, shown in sorted(now.told["models"].items()):
            named = {**given, **unflatten(shown.model, layout), **shown.own}
            seen[vertex] = Observed({name: named[name] for name in layout.order}, shown.figures, shown.facts)
        for vertex, reason in far_out(seen).items():
            report.note("unseen", f"vertex {vertex}: {reason}")
            del seen[vertex]
        if not seen:
            return None, next(iter(report.events.get("unseen", [])), "")
        # By vertex: sums of floats depend on the order.
        ordered = list(seen.values())
        middle = mean_of([found.arrays for found in ordered])
        report.observed = figures_of(ordered, middle)
        found = ArrayRecord({name: Array(array) for name, array in middle.items()})
        return found, why_not_finite(ordered, middle)


def _vertices(topology: Topology | Mapping[str, Any], nodes: int) -> int:
    """Return how many vertices a graph has that says so itself; otherwise ``nodes``."""
    given = topology.n if isinstance(topology, Topology) else topology.get("n", nodes)
    if nodes and given != nodes:
        raise ConfigError(f"nodes={nodes!r}, but the graph has {given!r} vertices; leave nodes out")
    return int(given)


def _reasons(report: Report) -> str:
    """Return the end of a sentence on what nodes answered in a round that failed; empty where none was refused."""
    found = list(dict.fromkeys(report.refused.values()))
    more = f"; and {len(found) - _REASONS} more" if len(found) > _REASONS else ""
    return f". Nodes answered: {'; '.join(found[:_REASONS])}{more}" if found else ""
