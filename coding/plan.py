"""How many shards a payload needs: from the loss of relays and the wanted probability of decoding.

``python -m fedcomp.coding.plan`` prints a table of ``docs/background/coding.md``: with ``--measure TRIALS`` beside
the formula's rate of singular matrices the one that the decoder's own elimination finds, with ``--payload BYTES`` the
lengths of packets.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from fedcomp.errors import ConfigError

FIELD_ORDERS = (2, 4, 16, 256, 65521)
LOSSES = (0.05, 0.1, 0.2, 0.3, 0.5)
SYMBOLS = (4, 8, 16, 32)


def rank_probability(symbols: int, extra: int, order: int | None = 256) -> float:
    """Return the probability that ``symbols + extra`` uniform random vectors over GF(order) span all of them.

    That is the product of 1 - q^-i over i = extra+1 .. extra+K (recalled; a count of matrices). ``order=None`` stands
    for a code in which any K rows are independent: 1 from ``extra = 0`` on. Negative ``extra`` gives 0.
    """
    _check_order(order)
    _check_symbols(symbols)
    if extra < 0:
        return 0.0
    if order is None:
        return 1.0
    return math.exp(-_failure_log(symbols, extra, order))


def failure(symbols: int, extra: int, order: int) -> float:
    """Return ``1 - rank_probability``, without the rounding error of that difference."""
    _check_order(order)
    _check_symbols(symbols)
    return 1.0 if extra < 0 else -math.expm1(-_failure_log(symbols, extra, order))


def expected_surplus(symbols: int, order: int = 256) -> float:
    """Return how many random packets beyond K are needed on average: the sum of 1 / (q^i - 1) over i = 1..K."""
    _check_order(order)
    _check_symbols(symbols)
    shares = (float(order) ** -i for i in range(1, symbols + 1))
    return math.fsum(share / (1.0 - share) for share in shares)


def success(symbols: int, shards: int, loss: float, order: int | None = 256) -> float:
    """Return the probability that a payload of K symbols decodes from what arrives of N shards.

    Every shard is lost on its own with probability ``loss``; all arriving ones are uniform random vectors over
    GF(order), or rows of an MDS code with ``order=None``. A systematic random code does a little better.
    """
    _check_order(order)
    _check_symbols(symbols)
    _check_loss(loss)
    # All N arrive, and the logarithm below has no value.
    if loss == 0.0:
        return rank_probability(symbols, shards - symbols, order)
    stay, lose = math.log1p(-loss), math.log(loss)
    # In logarithms: a binomial coefficient of a few thousand shards is beyond the range of a double.
    ways = math.lgamma(shards + 1) if shards >= 0 else 0.0
    total = math.fsum(
        math.exp(
            ways
            - math.lgamma(arrived + 1)
            - math.lgamma(shards - arrived + 1)
            + arrived * stay
            + (shards - arrived) * lose
        )
        * rank_probability(symbols, arrived - symbols, order)
        for arrived in range(symbols, shards + 1)
    )
    # Rounding may carry a sum of probabilities a little past 1.
    return min(1.0, total)


def shards(
    symbols: int, loss: float, target: float = 0.999, *, order: int | None = 256, most: int | None = None
) -> int:
    """Return the smallest number N of shards with which a payload decodes with probability ``target`` or more.

    Parameters
    ----------
    symbols : int
        K; with random symbols, all that are coded.
    loss : float
        Probability that one shard is lost, 0 <= loss < 1.
    target : float
        0 < target < 1.
    order : int, optional
        Elements of the field of a random code; None for an MDS code.
    most : int, optional
        Not more than so many: the number of relays, or 256 for the Cauchy code.

    Raises
    ------
    ConfigError
        When a parameter is out of range, or ``most`` shards are not enough; the message says what they reach.
    """
    if not 0.0 < target < 1.0:
        raise ConfigError(f"target = {target}; a probability of decoding between 0 and 1, both excluded")
    _check_symbols(symbols)
    _check_loss(loss)
    enough = symbols
    # By doubling: at a high loss N may be many times K, and no bound on it is known beforehand.
    while success(symbols, enough, loss, order) < target:
        if most is not None and enough >= most:
            break
        enough *= 2
    low, high = symbols, enough if most is None else min(enough, most)
    if most is not None and (most < symbols or success(symbols, high, loss, order) < target):
        reached = success(symbols, most, loss, order) if most >= symbols else 0.0
        raise ConfigError(
            f"{most} shards of K = {symbols} decode with probability {reached:.6f} at loss {loss}, not {target}; "
            "take fewer symbols, more relays or a lower target"
        )
    # More shards never decode less often, so bisection finds the smallest number that is enough.
    while low < high:
        middle = (low + high) // 2
        if success(symbols, middle, loss, order) >= target:
            high = middle
        else:
            low = middle + 1
    return low


def measured_failure(symbols: int, extra: int, trials: int, seed: int = 0) -> float:
    """Return how many of ``trials`` sets of K + extra random packets over GF(2^8) did not have rank K, as a rate."""
    from fedcomp.coding.elimination import rank
    from fedcomp.coding.stream import SplitMix64, derive

    count = symbols + extra
    drawn = SplitMix64(derive(seed, symbols, extra)).bytes(trials * count * symbols).reshape(trials, count, symbols)
    return sum(rank(one) < symbols for one in drawn) / trials


def _failure_log(symbols: int, extra: int, order: int) -> float:
    """Return ``-log(rank_probability)``: a failure far below the rounding of 1 is not lost."""
    return -math.fsum(math.log1p(-(float(order) ** -i)) for i in range(extra + 1, extra + symbols + 1))


def _check_symbols(symbols: int) -> None:
    if symbols < 1:
        raise ConfigError(f"symbols = {symbols}; a generation has at least one symbol")


def _check_loss(loss: float) -> None:
    if not 0.0 <= loss < 1.0:
        raise ConfigError(f"loss = {loss}; a probability from 0, and below 1")


def _check_order(order: int | None) -> None:
    if order is not None and order < 2:
        raise ConfigError(f"order = {order}; a field has at least 2 elements, and None stands for an MDS code")


def _rank_table(symbols: int, trials: int) -> list[str]:
    lines = [f"random codes, K = {symbols}: probability that K + e packets do not decode, and packets needed beyond K"]
    lines += ["| field order | e=0 | e=1 | e=2 | surplus |", "|---|---|---|---|---|"]
    for order in FIELD_ORDERS:
        rates = " | ".join(f"{failure(symbols, extra, order):.3g}" for extra in range(3))
        lines.append(f"| {order} | {rates} | {expected_surplus(symbols, order):.3g} |")
    if trials:
        rates = " | ".join(f"{measured_failure(symbols, extra, trials):.3g}" for extra in range(2))
        lines.append(f"| 256, measured in {trials} trials | {rates} | | |")
    return lines


def _shard_table(target: float, order: int | None) -> list[str]:
    code = "an MDS code" if order is None else f"a random code over GF({order})"
    lines = [f"shards N for K symbols, so that {code} decodes with probability {target} at a loss per shard of"]
    lines += ["| K | " + " | ".join(f"{loss:g}" for loss in LOSSES) + " |", "|---" * (len(LOSSES) + 1) + "|"]
    for symbols in SYMBOLS:
        counts = " | ".join(str(shards(symbols, loss, target, order=order)) for loss in LOSSES)
        lines.append(f"| {symbols} | {counts} |")
    return lines


def packet_table(payload_len: int, symbols: int) -> list[str]:
    """Return the lengths of real packets of a payload, one line per way to name the coefficients."""
    from fedcomp.coding.code import CodeName
    from fedcomp.coding.encoder import encoder
    from fedcomp.coding.rlnc import Recoder

    payload = bytes(payload_len)
    found: dict[str, int] = {}
    names: tuple[tuple[CodeName, str], ...] = (("rlnc", "seed (RLNC)"), ("mds", "Cauchy row (MDS)"))
    for code, name in names:
        source = encoder(code, payload, symbols=symbols, round=1, source=0, run=0)
        found["the symbol itself"] = len(source.packet(0).to_bytes())
        found[name] = len(source.packet(source.symbols).to_bytes())
        if code == "rlnc" and source.symbols > 1:
            relay = Recoder()
            # Two: a single packet is passed on as it is, with its seed instead of a vector.
            for packet in source.packets(range(source.symbols, source.symbols + 2)):
                relay.add(packet)
            found["dense vector (recoded by a relay)"] = len(relay.recode(1).to_bytes())
    shape = f"{source.generations} x {source.symbols} symbols of {source.symbol_bytes} bytes"
    lines = [f"packets of a payload of {payload_len} bytes, {shape}"]
    lines += ["| coefficients | bytes of one packet | K packets / payload |", "|---|---|---|"]
    for name, size in found.items():
        lines.append(f"| {name} | {size} | {source.symbols * size / max(1, payload_len):.4f} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m fedcomp.coding.plan", description=__doc__.splitlines()[0])
    parser.add_argument("--symbols", type=int, default=8, help="K of rank probabilities and packets")
    parser.add_argument("--target", type=float, default=0.999, help="probability of decoding in the table of shards")
    parser.add_argument("--measure", type=int, default=0, metavar="TRIALS", help="count singular matrices as well")
    parser.add_argument(
        "--payload", type=int, metavar="BYTES", help="print what packets of such a payload take instead"
    )
    given = parser.parse_args(arguments)
    if given.payload is not None:
        print("\n".join(packet_table(given.payload, given.symbols)))
        return
    for order in (256, None):
        print("\n".join(_shard_table(given.target, order)), end="\n\n")
    print("\n".join(_rank_table(given.symbols, given.measure)))


if __name__ == "__main__":
    main()
