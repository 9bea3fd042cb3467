"""The encoder of a payload, chosen by the name of the code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from fedcomp.coding.code import CodeName, Encoder, PacketPlace
from fedcomp.coding.mds import MdsEncoder
from fedcomp.coding.rlnc import RlncEncoder
from fedcomp.errors import ConfigError, nearest

ENCODERS: Final[Mapping[str, Callable[..., Encoder]]] = {"rlnc": RlncEncoder, "mds": MdsEncoder}


def encoder(
    code: CodeName,
    payload: bytes | memoryview,
    *,
    symbols: int,
    round: int,
    source: int,
    run: int | bytes,
    **options: Any,
) -> Encoder:
    """Return the encoder of a payload.

    Parameters
    ----------
    code : {"rlnc", "mds"}
        Random linear network code (any number of packets, can be recoded, K packets decode with probability 0.996) or
        systematic Cauchy Reed-Solomon (any K packets decode, K and parities together at most 256).
    payload : bytes
    symbols : int
        K that is wanted, 1 to 1024; short payloads get fewer, see :func:`fedcomp.coding.code.symbols_for`.
    round, source : int
        Where the packets belong; a receiver mixes neither.
    run : int or bytes
        Name of the run; with round, source and packet number it seeds the coefficients of the random code.
    **options
        Of :class:`~fedcomp.coding.code.Encoder`, and ``mode``: "systematic", where the first K packets are the symbols
        themselves, and the code's rows follow; "random" (RLNC) or "cauchy" (MDS), the code's rows from the first packet
        on.

    Raises
    ------
    ConfigError
        When the parameters do not make a code.
    """
    if code not in ENCODERS:
        raise ConfigError(f"code = {code!r}{nearest(code, ENCODERS)}")
    return ENCODERS[code](payload, PacketPlace(round, source, run), symbols=symbols, **options)
