"""Devices that vanish inside a round: when each is reachable, and which uploads and shards arrive.

All times are seconds since the round began. A device computes whether or not it can be reached; whatever it sends or is
sent needs it to be there for the whole transfer, and an interrupted transfer is lost. The schemes differ in what is
transferred as one piece:

- plain upload: the whole update. It restarts when the device comes back, which one that has died never does;
- upload with resume: chunks, which the server keeps;
- relay: shards, one after the other over fast links to peers. From the K-th shard on that another device holds, the
  contributor is not needed. The peers upload later, slowly, what they hold; replication is the case K = 1.

Pure functions of sizes and of a failure model, which is a pure function of round and client, so that every scheme meets
the same failures. The model is ours (derived); it knows no congestion, and a server that is no bottleneck.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final

from fedcomp.errors import ConfigError
from fedcomp.rng import Key
from fedcomp.rules import Configured, NotNegative, Positive, Real, Share
from fedcomp.timing.links import Link

_Seconds = Annotated[float, Real(above=0.0, infinite=True)]

NEVER: Final = math.inf
"""The time of something that does not happen."""


@dataclass(frozen=True, slots=True)
class Presence:
    """When one device can be reached in one round.

    Parameters
    ----------
    intervals : tuple of (float, float)
        From and until, in seconds since the round began; ascending and apart, the last may end at infinity. A transfer
        that ends in the very moment the device leaves has arrived.

    Raises
    ------
    ConfigError
        When the intervals overlap, are empty or not in order.
    """

    intervals: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        before = -math.inf
        for begin, end in self.intervals:
            # Intervals that touch are one stay: as two, they would break off a transfer that nothing interrupts.
            if not before < begin < end:
                raise ConfigError(f"presence {self.intervals!r}: expected ascending intervals that do not touch")
            before = end

    def here(self, at: float) -> bool:
        """Whether the device can be reached at second ``at``."""
        return any(begin <= at <= end for begin, end in self.intervals)

    def next(self, at: float) -> float:
        """Return the first second from ``at`` on at which the device can be reached, infinity when there is none."""
        return next((max(begin, at) for begin, end in self.intervals if at <= end), NEVER)

    def whole(self, start: float, seconds: float) -> float:
        """Return when a transfer of ``seconds`` is complete that can begin at ``start`` and must not be interrupted.

        An interrupted one restarts when the device is back; infinity when no stay is long enough.
        """
        stays = ((max(begin, start), end) for begin, end in self.intervals)
        return next((begin + seconds for begin, end in stays if begin + seconds <= end), NEVER)

    def pieces(self, start: float, pieces: Iterable[float]) -> float:
        """Return when the last of several transfers is complete, one after the other, each as of :meth:`whole`."""
        at = start
        for seconds in pieces:
            at = self.whole(at, seconds)
        return at

    def busy(self, start: float, until: float) -> float:
        """Return for how many of the seconds between ``start`` and ``until`` the device can be reached."""
        return math.fsum(max(0.0, min(end, until) - max(begin, start)) for begin, end in self.intervals)


ALWAYS: Final = Presence(((0.0, math.inf),))

Failures = Callable[[int, int], Presence]
"""From round and client to when that client can be reached in that round."""


@dataclass(frozen=True)
class OnOff(Configured):
    """Devices present for an exponential time, away for an exponential time, and so on; present when a round begins.

    Parameters
    ----------
    mean_on : float
        Mean seconds a device stays; with infinity it never leaves.
    mean_off : float
        Mean seconds until it comes back; with infinity it does not come back in this round: devices die, with
        exponential lifetimes.
    key : Key
        Names the stream; each round and client has its own.
    horizon : float
        Seconds of a round that matter; the comings and goings of devices are drawn up to there.

    Raises
    ------
    ConfigError
        When a mean is not positive, or devices come back and the horizon is not finite.
    """

    mean_on: _Seconds
    mean_off: _Seconds = math.inf
    key: Key = field(default_factory=lambda: Key(0, "dropout"))
    horizon: _Seconds = math.inf

    def conflict(self) -> str:
        """Comings and goings have to end."""
        if math.isinf(self.horizon) and math.isfinite(self.mean_on) and math.isfinite(self.mean_off):
            return "devices come and go without end; give horizon, the seconds of a round"
        return ""

    def __call__(self, server_round: int, client: int) -> Presence:
        """Return when ``client`` can be reached in ``server_round``."""
        key = self.key.at(round=server_round, partition=client)
        if math.isinf(self.mean_on):
            return ALWAYS
        if math.isinf(self.mean_off):
            return Presence(((0.0, _waiting(self.mean_on, float(key.uniform(1)[0]))),))
        # The stream's beginning does not depend on how much of it is drawn.
        count = 16
        while True:
            stays: list[tuple[float, float]] = []
            at, draws = 0.0, key.uniform(count)
            for on, off in zip(draws[0::2].tolist(), draws[1::2].tolist(), strict=True):
                end = at + _waiting(self.mean_on, on)
                if at >= self.horizon:
                    return Presence(tuple(stays))
                stays.append((at, end))
                at = end + _waiting(self.mean_off, off)
            if at >= self.horizon:
                return Presence(tuple(stays))
            count *= 2


def _waiting(mean: float, uniform: float) -> float:
    """Return an exponential time; a uniform number of 0 gives a tiny time above zero."""
    return max(-mean * math.log1p(-uniform), 1e-9)


@dataclass(frozen=True)
class Trace(Configured):
    """Devices that are present when a recorded trace says so.

    Parameters
    ----------
    stays : mapping of int to sequence of (float, float)
        By client: from and until, in seconds since the trace began. A client without an entry is never there.
    period : float
        Seconds from one round's beginning to the next one's; round 1 begins with the trace.

    Raises
    ------
    ConfigError
        When the stays of a client overlap or are not in order, or the period is not positive.
    """

    stays: Mapping[int, Sequence[tuple[float, float]]]
    period: Positive

    def __post_init__(self) -> None:
        super().__post_init__()
        for stays in self.stays.values():
            # Made for its checks alone.
            Presence(tuple(stays))

    @classmethod
    def parse(cls, text: str, period: float) -> Trace:
        """Read lines of ``client,from,until``; empty lines and lines that begin with ``#`` are passed over.

        Raises
        ------
        ConfigError
            Names the line that is not of this form.
        """
        stays: dict[int, list[tuple[float, float]]] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            try:
                client, begin, end = line.split(",")
                stays.setdefault(int(client), []).append((float(begin), float(end)))
            except ValueError:
                raise ConfigError(f"line {number} of the trace is {line!r}; expected client,from,until") from None
        return cls({client: sorted(found) for client, found in stays.items()}, period)

    def __call__(self, server_round: int, client: int) -> Presence:
        """Return when ``client`` can be reached in ``server_round``, counted from that round's beginning."""
        begun = (server_round - 1) * self.period
        # Seconds of this round: a stay that began earlier has been going on since 0, one that ended earlier drops out.
        stays = ((max(0.0, begin - begun), end - begun) for begin, end in self.stays.get(client, ()))
        return Presence(tuple((begin, end) for begin, end in stays if end > begin))


@dataclass(frozen=True)
class Compute(Configured):
    """How long training takes: ``mean`` seconds, evenly spread by up to ``spread`` of it to either side.

    Raises
    ------
    ConfigError
        When the mean is negative or not finite, or the spread is not a share between 0 and 1.
    """

    mean: NotNegative
    spread: Share = 0.0
    key: Key = field(default_factory=lambda: Key(0, "compute"))

    def __call__(self, server_round: int, client: int) -> float:
        """Return the seconds ``client`` trains in ``server_round``."""
        draw = float(self.key.at(round=server_round, partition=client).uniform(1)[0])
        return self.mean * (1.0 + self.spread * (2.0 * draw - 1.0))


@dataclass(frozen=True)
class Situation:
    """One round as every scheme finds it.

    Parameters
    ----------
    presence : sequence of Presence
        Of each client.
    ready : sequence of float
        When each client has its update.
    server, peer : Link
        Every client's link to the server, and to its peers; only the uplink and the latency of either count.
    share_by : float
        When the server begins to collect at the latest, in seconds.
    end : float
        What arrives later, in seconds, is not in the sum.

    Raises
    ------
    ConfigError
        When there is not one presence and one time for each client, or the deadlines are not in order.
    """

    presence: Sequence[Presence]
    ready: Sequence[float]
    server: Link
    peer: Link
    share_by: float
    end: float

    def __post_init__(self) -> None:
        if len(self.presence) != len(self.ready):
            raise ConfigError(f"{len(self.presence)} clients, but {len(self.ready)} times at which they are ready")
        if not 0 < self.share_by <= self.end:
            raise ConfigError(f"sharing until {self.share_by!r} s and collecting until {self.end!r} s: out of order")

    @property
    def clients(self) -> range:
        """Their numbers."""
        return range(len(self.presence))

    def upload(self, client: int, start: float, nbytes: int, chunk: int = 0) -> float:
        """Return when the server has ``nbytes`` that ``client`` sends from ``start`` on; infinity after the end.

        ``chunk`` bytes at a time are kept when the transfer breaks off; 0 keeps nothing.
        """
        _positive("bytes of an upload", nbytes)
        if start == NEVER:
            return NEVER
        sizes = [nbytes] if not chunk else [chunk] * (nbytes // chunk) + [nbytes % chunk] * bool(nbytes % chunk)
        seconds = (8.0 * size / self.server.up_bits_per_s for size in sizes)
        # Chunks follow each other without waiting for an answer, so latency is paid once.
        there = self.presence[client].pieces(start, seconds) + self.server.latency_s
        return there if there <= self.end else NEVER

    def spent(self, client: int, start: float, nbytes: int, until: float | None = None) -> float:
        """Return how many of ``nbytes`` left ``client`` from ``start`` on, whether or not the transfer succeeded."""
        _positive("bytes of an upload", nbytes)
        if start == NEVER:
            return 0.0
        rate = self.server.up_bits_per_s / 8.0
        seconds = self.presence[client].busy(start, self.end if until is None else until)
        # With infinite bandwidth 0 s * rate would be NaN.
        return min(float(nbytes), seconds * rate) if math.isfinite(rate) else float(nbytes) * (seconds > 0)

    def share(self, client: int, start: float, shards: Sequence[tuple[int, int]]) -> tuple[list[float], float]:
        """Return when each of ``shards`` lands, and when the last has left, as ``client`` sends them in order.

        Parameters
        ----------
        client : int
        start : float
            When it begins.
        shards : sequence of (int, int)
            Holder and bytes of each. The client's own takes no time. A holder who is not there when a shard arrives
            misses it, and so does one whom it reaches after ``share_by``.

        Returns
        -------
        landed : list of float
            Infinity for a shard that was lost.
        left : float
            When the client has sent all of them, infinity when it never has.
        """
        landed, at = [], start
        for holder, nbytes in shards:
            if holder == client:
                # Its own shard takes no link, but counts only if training ended in time.
                landed.append(start if start <= self.share_by else NEVER)
                continue
            # Landed or lost, a shard has taken its time on the sender's link.
            at = self.presence[client].whole(at, 8.0 * _positive("bytes of a shard", nbytes) / self.peer.up_bits_per_s)
            there = at + self.peer.latency_s
            kept = there <= self.share_by and self.presence[holder].here(there)
            landed.append(there if kept else NEVER)
        return landed, at


@dataclass(frozen=True)
class World:
    """Devices, links and deadlines, the same for every system that is run in it.

    Attributes
    ----------
    failures, compute
        Pure functions of round and client.
    server, peer : Link
    share_by, end : float
        Seconds from a round's beginning: until when shards land, and until when the server takes anything.
    """

    failures: Failures
    compute: Compute
    server: Link
    peer: Link
    share_by: float
    end: float

    def situation(self, clients: int, server_round: int, *, model: int = 0) -> Situation:
        """Return a round: each client gets a model of ``model`` bytes, if it is there, and trains."""
        there = [self.failures(server_round, client) for client in range(clients)]
        ready = [
            presence.whole(0.0, self.server.down_seconds(model)) + self.compute(server_round, client)
            for client, presence in enumerate(there)
        ]
        return Situation(there, ready, self.server, self.peer, self.share_by, self.end)


@dataclass(frozen=True)
class Fate:
    """The outcome of one round.

    Attributes
    ----------
    known : tuple of float
        When the server had each client's update; infinity when it never had.
    seconds : float
        When the server stopped waiting.
    waves : int
        How often it asked the relays.
    """

    known: tuple[float, ...]
    seconds: float
    waves: int = 0

    @property
    def fraction(self) -> float:
        """Fraction of the clients whose update is in the sum."""
        return sum(math.isfinite(at) for at in self.known) / len(self.known) if self.known else 0.0


def plain(round: Situation, nbytes: int, *, chunk: int = 0) -> Fate:
    """Every client uploads its own update of ``nbytes``; ``chunk`` bytes at a time survive a break, 0 for none."""
    known = tuple(round.upload(client, round.ready[client], nbytes, chunk) for client in round.clients)
    # One update that never comes keeps the server waiting to the end.
    return Fate(known, min(round.end, max(known, default=0.0)))


Holders = Callable[[int], Sequence[int]]
"""From a contributor to the clients that get its shards 0, 1, ..., in the order they are sent."""

Asked = Mapping[int, Sequence[int]]
"""By relay: the contributors whose shards it is asked for."""

Ask = Callable[[Sequence[Sequence[int]], Sequence[int], frozenset[int]], Asked]
"""The server's next questions, from each contributor's holders in order, what is still needed of each, and the clients
that did not answer the last time. Nothing asked ends the round."""


def relay(
    round: Situation,
    shard: int,
    symbols: int,
    holders: Holders,
    ask: Ask,
    *,
    reply: int = 0,
    patience: float,
) -> Fate:
    """Every client spreads shards over others, and the server collects ``symbols`` of each contributor's.

    Parameters
    ----------
    round : Situation
    shard : int
        Bytes of one shard, on its way to a relay and on its way to the server.
    symbols : int
        K: how many shards make an update; 1 for replication.
    holders : callable
        Who gets whose shards.
    ask : callable
        Whom the server asks for what, wave by wave.
    reply : int
        Bytes with which a contributor says that it has shared, and of a relay's answer beside its shards.
    patience : float
        Seconds the server waits for a wave's answers, when one is missing.

    Notes
    -----
    A relay answers a wave with one message; it counts as a whole or not at all. The server asks for what was planned,
    and gets what landed; a relay that answers also says whose shards it has. One that did not answer is not asked
    again, nor is one that did not say in time that it has shared.
    """
    if symbols < 1:
        raise ConfigError(f"an update of {symbols} symbols cannot be coded; expected at least 1")
    plan = [list(holders(client)) for client in round.clients]
    landed: list[dict[int, bool]] = []
    shared: list[float] = []
    for client in round.clients:
        times, left = round.share(client, round.ready[client], [(holder, shard) for holder in plan[client]])
        landed.append({holder: math.isfinite(at) for holder, at in zip(plan[client], times, strict=True)})
        # Only after its last shard has left: before, the server must not count on the relays.
        said = round.upload(client, left, reply)
        shared.append(said if said <= round.share_by else NEVER)
    at = max(shared, default=0.0)
    # Whoever could not say that it has shared keeps the server waiting until the deadline.
    at = at if math.isfinite(at) else round.share_by
    arrived: list[list[float]] = [[] for _ in plan]
    unasked = [list(found) for found in plan]
    # Who said nothing is assumed to be away, whatever shards of others it holds.
    silent = frozenset(client for client in round.clients if not math.isfinite(shared[client]))
    waves = 0
    while at < round.end:
        wanted = ask(unasked, [max(0, symbols - len(times)) for times in arrived], silent)
        if not any(wanted.values()):
            break
        waves += 1
        begun, limit = at, min(at + patience, round.end)
        for holder, sources in wanted.items():
            found = [source for source in sources if landed[source][holder]]
            # A relay that is away gets the question when it is back.
            asked = round.presence[holder].next(begun + round.server.latency_s)
            there = round.upload(holder, asked, shard * len(found) + reply)
            # Whatever came of it, nobody is asked for the same shard twice.
            for source in sources:
                unasked[source].remove(holder)
            # One answer that is missing costs all of the patience, however early the others came.
            if there > limit:
                silent |= {holder}
                at = limit
                continue
            at = max(at, there)
            for source in found:
                arrived[source].append(there)
            # Its answer also says which shards it lacks, so nobody counts on those.
            for source, others in enumerate(unasked):
                if holder in others and not landed[source][holder]:
                    others.remove(holder)
    # An update is known with the K-th of its shards, whichever they are.
    known = tuple(sorted(times)[symbols - 1] if len(times) >= symbols else NEVER for times in arrived)
    return Fate(known, at, waves)


def in_turn(unasked: Sequence[Sequence[int]], needed: Sequence[int], silent: frozenset[int]) -> dict[int, list[int]]:
    """Ask, for every contributor, as many holders as it needs shards, in the order of its plan; an :data:`Ask`.

    Where plans begin at different relays, every relay is asked for about as many shards. A contributor with too few
    holders left is given up.
    """
    out: dict[int, list[int]] = {}
    for source, (holders, missing) in enumerate(zip(unasked, needed, strict=True)):
        able = [holder for holder in holders if holder not in silent]
        for holder in able[:missing] if len(able) >= missing else ():
            out.setdefault(holder, []).append(source)
    return out


def _positive(what: str, value: int) -> int:
    if not 0 <= value < math.inf:
        raise ConfigError(f"{value!r} {what} are impossible; expected at least 0")
    return value
