"""Relayed shards: every client's payload is spread over the others, so that its owner may vanish. No network in here.

A contributor turns its payload, whatever bytes these are, into N packets of which any K (K + T with T random symbols)
decode, and hands one to each of N relays. From the moment K have arrived nobody needs the contributor any more. The
server asks relays for what they hold, as many of them as are needed and no more, decodes every source that is complete
and leaves the others out whole: what is added up afterwards is bytes that were decoded and whose digest is right.
Adding the packets themselves would be wrong, GF(2^8) adds by XOR (tests/coding/test_relay_plan.py shows it).

Codes are :mod:`fedcomp.coding.rlnc` and :mod:`fedcomp.coding.mds`; construction: derived here, from network coding
practice (recalled).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from fedcomp.coding.code import GENERATION_BYTES, CodeName, Encoder, shape_of
from fedcomp.coding.decoder import Decoder
from fedcomp.coding.encoder import encoder
from fedcomp.coding.errors import CodingError, CorruptGeneration, NotDecodable, PacketError
from fedcomp.coding.packet import DIGEST_BYTES, Packet, PacketLimits
from fedcomp.coding.plan import shards as shards_for
from fedcomp.coding.plan import success
from fedcomp.errors import ConfigError

MOST_SYMBOLS: Final = 128
"""K + T at most. Products over GF(2^8) take time in proportion to it: with GFNI 1,300 MB/s of a payload here, 750 at
twice and 390 at four times as many (measured, ``python -m coding.bench``)."""

DEFAULT_SYMBOLS: Final = 16
"""K is chosen no larger than this: beyond it the gain in storage per relay is small and inverting costs more."""

MOST_BYTES: Final = 1 << 32
"""Of all packets that one message has a node make. A payload is as long as the model, and the number of its packets is
the server's choice."""

DEFAULT_LOSS: Final = 0.1
"""Fraction of relays that is expected to vanish, unless another one is given."""


def packet_hash(data: bytes) -> bytes:
    """Return the 8-byte BLAKE2b hash of one whole packet.

    A packet's payload digest is the same in all packets of the payload, so whoever holds one can forge others under it;
    this hash is not known to anybody but the packet's maker, its holder and the server.
    """
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def choose(
    relays: int,
    *,
    code: str,
    symbols: int = 0,
    shards: int = 0,
    loss: float | None = None,
    target: float = 0.999,
    threshold: int = 0,
) -> tuple[int, int]:
    """Return (K, N) for a round with so many possible relays.

    Parameters
    ----------
    relays : int
        Clients that can keep shards.
    code : {"rlnc", "mds"}
    symbols : int
        K; 0 chooses the largest K <= 16 for which N relays decode with probability ``target``.
    shards : int
        N; 0 takes what K and ``loss`` ask for where both are given, otherwise all relays, as many as the code has.
    loss, target : float
        Fraction of relays that is expected to vanish, 0.1 by default, and the wanted probability of decoding.
    threshold : int
        T, the privacy threshold: any T relays together learn nothing of the payload, and K + T shards decode.

    Raises
    ------
    ConfigError
        When the numbers contradict each other, whatever the number of relays.
    NotDecodable
        When these relays are too few for them: another round may have more.
    """
    check(code=code, symbols=symbols, shards=shards, threshold=threshold)
    expected = DEFAULT_LOSS if loss is None else loss
    # Any K packets of Reed-Solomon decode; random ones over 256 elements are dependent now and then.
    order = None if code == "mds" else 256
    wanted, count = symbols, shards
    if symbols and not shards:
        # With a stated loss no more shards are made than these ask for, as each is bytes on a link; otherwise every
        # client keeps one.
        most = min(relays, _most_shards(code, symbols + threshold, threshold, relays))
        count = most if loss is None else shards_for(symbols + threshold, loss, target, order=order)
    if not symbols:
        # Larger K first: shards are shorter then. Where no K > 1 reaches the target, K = 1 is left: N copies of the
        # payload.
        for wanted in range(min(DEFAULT_SYMBOLS, MOST_SYMBOLS - threshold), 0, -1):
            most = _most_shards(code, wanted + threshold, threshold, relays)
            count = shards or min(relays, most)
            if count <= most and success(wanted + threshold, count, expected, order) >= target:
                break
    if count > relays:
        raise NotDecodable(
            f"{relays} clients take part, the code needs {count}, one for each shard: lower shards or symbols, or ask "
            "more clients (fraction_train, min_available_nodes)"
        )
    if count < wanted + threshold:
        raise NotDecodable(
            f"{count} clients take part, the code needs {wanted + threshold} (symbols + threshold = {wanted} + "
            f"{threshold}): lower symbols or threshold, or ask more clients (fraction_train, min_available_nodes)"
        )
    return wanted, count


def check(*, code: str, symbols: int, shards: int, threshold: int) -> None:
    """Refuse numbers that can never work.

    Raises
    ------
    ConfigError
        When N is less than K + T, the field has too few points, or a random code is given a threshold.
    """
    if threshold and code != "mds":
        raise ConfigError(
            f"threshold={threshold} needs code='mds': nothing guarantees that T shards of a random code tell nothing, "
            "some combination of them may be free of the random symbols"
        )
    if shards and symbols and shards < symbols + threshold:
        raise ConfigError(
            f"shards={shards} are fewer than the {symbols + threshold} that decoding needs (K + threshold)"
        )
    if shards and shards < 1 + threshold:
        raise ConfigError(f"shards={shards} leave no symbol beside {threshold} random ones")
    if (coded := (symbols or 1) + threshold) > MOST_SYMBOLS:
        raise ConfigError(
            f"symbols + threshold = {coded}; a relay computes with products over GF(2^8), whose time "
            f"grows with K, and codes at most {MOST_SYMBOLS}: set fewer symbols"
        )
    if shards > (most := _most_shards(code, coded, threshold, shards)):
        raise ConfigError(f"shards={shards}; a Reed-Solomon code over GF(2^8) has at most {most}")


def _most_shards(code: str, needed: int, threshold: int, wanted: int) -> int:
    """Return how many packets a code has of which ``needed`` decode; ``wanted`` where there is no end to them."""
    if code != "mds":
        return wanted
    # Rows and columns of a Cauchy matrix are named by different elements of GF(2^8). Without random symbols the first
    # packets are the symbols themselves, which are no rows.
    return 256 - needed if threshold else 256


@dataclass(frozen=True)
class RelayPlan:
    """The parameters of a coded round, common to all parties.

    Parameters
    ----------
    code : {"rlnc", "mds"}
    symbols : int
        K.
    shards : int
        N: how many packets are made of a payload; each goes to another relay, see :meth:`holders`.
    threshold : int
        T: any T relays together learn nothing of a payload; every generation has T random symbols beside its K.
    round, seed : int
        Name the coefficient streams, with source and shard index.
    max_payload : int
        Largest accepted payload in bytes.

    Raises
    ------
    ConfigError
        When the numbers cannot work.

    Examples
    --------
    Any 4 of 6 relays bring back the payload of contributor 0:

    >>> plan = RelayPlan("mds", symbols=4, shards=6, round=1)
    >>> shards = plan.packets(0, b"an update" * 100)
    >>> collector = Collector(plan, range(7))
    >>> for relay, shard in list(zip(plan.holders(0, 7), shards))[2:]:
    ...     _ = collector.add(relay, shard)
    >>> collector.payload(0) == b"an update" * 100
    True
    """

    code: CodeName
    symbols: int
    shards: int
    round: int
    threshold: int = 0
    seed: int = 0
    max_payload: int = 1 << 28

    def __post_init__(self) -> None:
        check(code=self.code, symbols=self.symbols, shards=self.shards, threshold=self.threshold)
        if self.symbols < 1 or self.shards < self.needed:
            raise ConfigError(f"{self.shards} shards of which {self.needed} decode: both must be at least 1, in order")
        if self.max_payload < 1:
            raise ConfigError(f"max_payload={self.max_payload} is not valid: it must be at least 1 byte")

    @property
    def needed(self) -> int:
        """K + T: how many packets decode."""
        return self.symbols + self.threshold

    @property
    def limits(self) -> PacketLimits:
        """What is accepted of a packet, before anything is allocated."""
        return PacketLimits(
            max_symbols=self.needed,
            max_symbol_bytes=min(self.max_payload, GENERATION_BYTES) // self.symbols + 128,
            max_payload=self.max_payload,
            max_generations=self.max_payload // GENERATION_BYTES + 2,
        )

    def holders(self, source: int, clients: int) -> list[int]:
        """Return which of ``clients`` get packets 0, 1, ... of a source: those that follow it, itself the last of all.

        Every source begins at another client. So all of them hold, and are first asked for, equally much.
        """
        return [(source + 1 + i) % clients for i in range(min(self.shards, clients))]

    def encode(self, source: int, payload: bytes) -> Encoder:
        """Return the encoder of one source's payload.

        Raises
        ------
        ConfigError
            When the payload is longer than anybody accepts.
        """
        if len(payload) > self.max_payload:
            raise ConfigError(
                f"the payload has {len(payload)} bytes, more than the {self.max_payload} this round accepts: an update "
                "cannot be that much larger than the model"
            )
        # How many packets there are is the server's choice.
        if self.shards * len(payload) > MOST_BYTES * self.symbols:
            raise ConfigError(
                f"{self.shards} packets of {len(payload) // self.symbols} bytes: more than {MOST_BYTES} together. Have "
                "more symbols (K), or fewer shards"
            )
        return encoder(
            self.code,
            payload,
            symbols=self.symbols,
            round=self.round,
            source=source,
            run=self.seed,
            shards=self.shards,
            threshold=self.threshold,
        )

    def packets(self, source: int, payload: bytes) -> list[bytes]:
        """Return the N packets of a payload, the one for holder i at index i; equal arguments give equal bytes.

        (With random symbols they do not: those are drawn from the operating system each time.)
        """
        return [packet.to_bytes() for packet in self.encode(source, payload).packets(range(self.shards))]


@dataclass(frozen=True)
class Commitment:
    """What a contributor says of its payload over a channel nobody else can write to.

    Attributes
    ----------
    payload_bytes : int
    digest : bytes
        The 8 bytes every packet of it carries.
    """

    payload_bytes: int
    digest: bytes

    @classmethod
    def of(cls, packet: Packet) -> Commitment:
        """Return what a packet says of its payload."""
        return cls(packet.payload_bytes, packet.digest)


@dataclass
class _Version:
    """The packets of one source that agree on what they are packets of."""

    decoder: Decoder
    relays: set[int] = field(default_factory=set)
    """Who sent them."""
    tried: int = 0
    """How many packets there were when decoding last failed."""


@dataclass
class _Source:
    """What is known of one contributor."""

    unasked: list[int]
    expected: Commitment | None = None
    hashes: frozenset[bytes] = frozenset()
    versions: dict[tuple[int, int, int, bytes], _Version] = field(default_factory=dict)
    payload: bytes | None = None
    reason: str = ""
    given_up: bool = False


class Collector:
    """Gathers the packets of one round at the server: who is asked next, what is decodable, what is wrong.

    No input of a peer raises; unusable packets are listed in :attr:`refused`.

    Parameters
    ----------
    plan : RelayPlan
    sources : iterable of int
        Contributors by index; as many clients take part, as relays.

    Attributes
    ----------
    received, innovative, dependent : int
        Packets that were parsed, those that raised a rank, and those that did not.
    refused : list of str
        Why packets were thrown away.
    """

    def __init__(self, plan: RelayPlan, sources: Iterable[int]) -> None:
        sources = list(sources)
        self.plan = plan
        self.received = self.innovative = self.dependent = 0
        self.refused: list[str] = []
        self._limits = plan.limits
        self._sources = {source: _Source(plan.holders(source, len(sources))) for source in sources}

    def expect(self, source: int, commitment: Commitment, hashes: Iterable[bytes] = ()) -> None:
        """Accept only packets of this very payload from now on; those of others are as good as lost.

        Parameters
        ----------
        source : int
        commitment : Commitment
        hashes : iterable of bytes, optional
            :func:`packet_hash` of every packet the source made. Where there are some, packets with another one are
            refused.
        """
        known = self._sources[source]
        known.expected, known.hashes = commitment, frozenset(hashes)

    def give_up(self, source: int) -> None:
        """Ask nobody for ``source`` any more: it shared nothing, or answers in another way."""
        self._sources[source].given_up = True

    def add(self, relay: int, data: bytes, asked: Collection[int] | None = None) -> int | None:
        """Take a packet that ``relay`` sent; return its source, None when it was refused.

        Parameters
        ----------
        relay : int
            Who sent it.
        data : bytes
        asked : collection of int, optional
            Sources that relay was asked for.
        """
        try:
            packet = Packet.from_bytes(data, self._limits)
            if packet.round != self.plan.round:
                raise PacketError(f"it is of round {packet.round}, expected {self.plan.round}")
            if packet.source not in self._sources or (asked is not None and packet.source not in asked):
                raise PacketError(f"no request named source {packet.source}")
            source = self._sources[packet.source]
            if source.expected is not None and Commitment.of(packet) != source.expected:
                raise PacketError(f"it is of another payload than the one source {packet.source} announced")
            if source.hashes and packet_hash(data) not in source.hashes:
                raise PacketError(f"it is not one of the packets that source {packet.source} announced")
            if packet.recoded:
                raise PacketError("it was recoded; in this plan relays do not recode packets")
            self._check_shape(packet)
            version = self._version(source, packet)
            # A relay keeps one shard of a source. If several of one relay counted, it could forge as many as decode.
            if relay in version.relays:
                return packet.source  # delivered twice
            innovative = version.decoder.add(packet)
        except CodingError as error:
            self.refused.append(f"relay {relay}: {error}")
            return None
        self.received += 1
        self.innovative += innovative
        self.dependent += not innovative
        # Only now: a packet that the decoder refused must not take the place of this relay's one packet.
        version.relays.add(relay)
        self._try(packet.source)
        return packet.source

    @property
    def waiting(self) -> list[int]:
        """Sources that are still waited for, in order."""
        return [i for i, source in self._sources.items() if source.payload is None and not source.given_up]

    def missing(self, source: int) -> int:
        """Return how many more packets ``source`` lacks at least: one more than enough when some are wrong."""
        known = self._sources[source]
        if known.payload is not None:
            return 0
        # At least one: a payload that decodes without its digest takes another packet to be repaired.
        lacking = (max(1, v.decoder.needed, self._voices(known, v)) for v in known.versions.values())
        return min(lacking, default=self.plan.needed)

    def ask(self, able: Collection[int], perhaps: Collection[int] = ()) -> dict[int, list[int]]:
        """Return which relays to ask now, and each for which sources; nothing when there is no use in asking.

        Of every source that waits, as many holders as it lacks packets, in the order of its plan. Since sources begin
        at different clients, the first question asks everybody for equally much, one update's worth. A source that
        lacks more packets than there are holders left to ask is given up: nobody is asked for its sake.

        Parameters
        ----------
        able : collection of int
            Relays that can be asked.
        perhaps : collection of int
            Relays that can be asked, but are thought to be away; asked only where the others do not suffice.
        """
        wanted: dict[int, list[int]] = {}
        for index in self.waiting:
            source, missing = self._sources[index], self.missing(index)
            first = [relay for relay in source.unasked if relay in able]
            chosen = [*first, *(relay for relay in source.unasked if relay in perhaps)][:missing]
            if len(chosen) < missing:
                continue
            # Nobody is asked twice for a source: a relay that was silent, or sent what is wrong, has had its turn.
            source.unasked = [relay for relay in source.unasked if relay not in chosen]
            for relay in chosen:
                wanted.setdefault(relay, []).append(index)
        return dict(sorted(wanted.items()))

    def payload(self, source: int) -> bytes:
        """Return the bytes of a source.

        Raises
        ------
        NotDecodable
            When too few packets came.
        CorruptGeneration
            When enough came, but no choice of them gives what was announced.
        """
        known = self._sources[source]
        if known.payload is not None:
            return known.payload
        if known.reason:
            raise CorruptGeneration(known.reason)
        most = max((v.decoder.rank for v in known.versions.values()), default=0)
        raise NotDecodable(f"{most} independent shards of source {source} came, {self.plan.needed} are needed")

    def _version(self, source: _Source, packet: Packet) -> _Version:
        """Return the packets that agree with ``packet`` on length, digest and shape: a liar does not stop the rest."""
        form = (packet.symbols, packet.symbol_bytes, packet.payload_bytes, packet.digest)
        if form not in source.versions:
            expected = (self.plan.round, packet.source)
            decoder = Decoder(limits=self._limits, expect=expected, threshold=self.plan.threshold)
            source.versions[form] = _Version(decoder)
        return source.versions[form]

    def _check_shape(self, packet: Packet) -> None:
        """Refuse a packet that cuts its payload otherwise than the plan does: with fewer symbols fewer would decode."""
        shape = shape_of(packet.payload_bytes, self.plan.symbols, threshold=self.plan.threshold)
        found = (packet.symbols, packet.symbol_bytes, packet.generations)
        if found != (shape.coded, shape.symbol_bytes, shape.generations):
            raise PacketError(
                f"it has K, S and generations {found}, a payload of {packet.payload_bytes} bytes has "
                f"{(shape.coded, shape.symbol_bytes, shape.generations)} in this plan"
            )

    def _voices(self, source: _Source, version: _Version) -> int:
        """Return how many more relays have to agree before a payload is believed that its source did not announce.

        As many as decode a long one: the shortest payloads have fewer symbols, and one relay could make one up.
        """
        return 0 if source.expected is not None else self.plan.needed - len(version.relays)

    def _try(self, index: int) -> None:
        """Decode a source if that is possible now."""
        source = self._sources[index]
        if source.payload is not None:
            return
        for version in source.versions.values():
            if (
                not version.decoder.complete
                or version.tried == len(version.relays)
                or self._voices(source, version) > 0
            ):
                continue
            # Before the attempt: without another packet it would fail in the same way, at the same cost.
            version.tried = len(version.relays)
            try:
                source.payload = version.decoder.payload()
                return
            except CorruptGeneration as error:
                source.reason = str(error)  # one more packet may show which of them is wrong
