"""The encoder of a payload, by the name of the code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from fedcomp.coding.code import ALIGN, CodeName, Encoder, EncoderMode
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
    shards: int | None = None,
    private: int = 0,
    mode: EncoderMode = "systematic",
    align: int = ALIGN,
    insecure_seed: int | None = None,
) -> Encoder:
    """Return the encoder of a payload.

    Parameters
    ----------
    code : {"rlnc", "mds"}
        Random linear network code (any number of packets, can be recoded, K packets decode with probability 0.996) or
        systematic Cauchy Reed-Solomon (any K packets decode, K and parities together at most 256).
    payload : bytes
    symbols : int
        K that is wanted, 1 to 1024; short payloads get fewer, see :func:`symbols_for`.
    round, source : int
        Where the packets belong; a receiver mixes neither.
    run : int or bytes
        Name of the run; with round, source and packet number it seeds the coefficients of the random code.
    shards : int, optional
        How many packets will be asked for; for RLNC no limit by default, for MDS as many as the field has.
    private : int
        T. So many uniformly random symbols are coded along, such that any T packets are independent of the payload;
        K + T packets decode. Code "mds" only; all packets are then Cauchy rows.
    mode : {"systematic", "random", "cauchy"}
        "systematic": the first K packets are the symbols themselves, and the code's rows follow. "random" (RLNC) and
        "cauchy" (MDS): the code's rows from the first packet on.
    align : int
        Symbols are padded to a multiple of so many bytes, 1 to 64.
    insecure_seed : int, optional
        Draws the private symbols from a public stream instead of the operating system: for tests only.

    Raises
    ------
    ConfigError
        When the parameters do not make a code.
    """
    if code not in ENCODERS:
        raise ConfigError(f"code = {code!r}{nearest(code, ENCODERS)}")
    return ENCODERS[code](
        payload,
        symbols=symbols,
        round=round,
        source=source,
        run=run,
        shards=shards,
        private=private,
        mode=mode,
        align=align,
        insecure_seed=insecure_seed,
    )
