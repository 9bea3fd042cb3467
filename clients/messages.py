"""Message handling in client halves: what a message asks for, id checks, and the update an app made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict
from numpy.typing import NDArray

from fedcomp.adapters import WORKING, nearest, trained_from
from fedcomp.clients.edge.node_config import UPLINK
from fedcomp.codecs.chain import registry as transforms
from fedcomp.codecs.orthonormal import bases
from fedcomp.codecs.registry import codecs
from fedcomp.errors import ConfigError
from fedcomp.exact import check_exact
from fedcomp.flower.asks import find_ask
from fedcomp.flower.payload import PARTITION_KEY
from fedcomp.flower.records import to_arrays
from fedcomp.layout import Layout, Update, Vector
from fedcomp.params import shown, similar
from fedcomp.timing.links import parse_link

T = TypeVar("T")

NOT_WITHOUT_NOISE = (
    "the server asks for a codec that privatises updates, and this client cannot or may not use it; it sends nothing "
    "without that noise. Use the same release on both sides, and accept its codecs"
)
"""Why a client does not answer densely, as it does where a codec only compresses."""


class AppError(Exception):
    """The app answered with an error, which goes back as it is."""

    def __init__(self, reply: Message) -> None:
        super().__init__()
        self.reply = reply


def asked_config(content: RecordDict) -> Mapping[str, Any] | None:
    """Return the options of the system that a message asks for; None where it asks for none.

    Raises
    ------
    FedcompError
        When what it says cannot be read, or is of another version.
    """
    head = find_ask(content)
    return None if head is None else head.system


def require_ids(accept: object, *others: str) -> frozenset[str] | None:
    """Return the ids of codecs that a client agrees to, or of ``others``; None: to all.

    Raises
    ------
    ConfigError
        When ``accept`` is not a collection of names, or one of them is not known: a client that accepts less than was
        meant answers densely.
    """
    if accept is None:
        return None
    if isinstance(accept, str) or not isinstance(accept, Collection) or not all(isinstance(i, str) for i in accept):
        raise ConfigError(
            f"accept={shown(accept)} is not valid: a list of ids of codecs, such as ['topk']. What clients send is the "
            "server's choice: Compressed(strategy, codec)"
        )
    known = (*codecs.known(), *transforms.known(), *bases.known(), *others)
    for name in accept:
        if name not in known:
            raise ConfigError(f"accept={shown(accept)}: no codec is called {name!r}{similar(name, known)}")
    return frozenset(accept)


def made(
    config: dict[str, Any], make: Callable[[dict[str, Any]], T], accept: Collection[str] | None
) -> tuple[T | None, str]:
    """Return what ``make`` makes of a configuration, or None and the reason why it may not or cannot be made (none if
    there is no configuration)."""
    if not config:
        return None, ""
    # Before it is built, which imports what its id names and may take what its parameters ask for.
    refused = [] if accept is None else [i for i in _ids(config) if i not in accept]
    if refused:
        return None, f"this client accepts the codecs {sorted(accept or ())}, not {shown(refused)}"
    try:
        return make(config), ""
    except ConfigError as error:
        return None, str(error)


def _ids(config: Any) -> list[str]:
    """Return the ids in a configuration: wrapped codecs stand inside that of their wrapper."""
    # An accepted "chain" must not bring in a codec that is not. No recursion: how deep it nests is the sender's choice.
    found: list[str] = []
    waiting = [config]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if isinstance(part.get("id"), str):
                found.append(part["id"])
            waiting += reversed(part.values())
        elif isinstance(part, list):
            waiting += reversed(part)
    return found


def reply_arrays(
    content: RecordDict, before: Mapping[str, NDArray[Any]], record: str = "", *, stay: bool = False
) -> tuple[str, dict[str, NDArray[Any]]]:
    """Return the model of an app's reply, to be read: the ArrayRecord called ``record``, else the only one; with
    ``stay`` as :func:`fedcomp.flower.records.to_arrays`.

    A tensor that comes in bfloat16, or in float16 where ``before``, the model the app was given, is longer, was trained
    from what is nearest to that: what the app changed is added to ``before``, so that changes below the spacing add up
    over rounds.

    Raises
    ------
    ConfigError
        When it holds several and none has that name, or none at all.
    """
    records = {name: holder for name, holder in content.items() if isinstance(holder, ArrayRecord)}
    name = record if record in records else next(iter(records), "")
    if not records or (len(records) > 1 and name != record):
        raise ConfigError(
            f"the reply holds {len(records)} ArrayRecords {sorted(records)}; expected exactly one, the trained model, "
            f"or several of which one is called {record!r}, as the model of the message was"
        )
    after = to_arrays(records[name], copy=False, stay=stay)
    for key, array in records[name].items():
        given = before.get(key)
        if given is None or given.shape != after[key].shape:
            continue
        if array.dtype in WORKING[1:] and given.dtype in (np.float32, np.float64):
            after[key] = trained_from(given, after[key], nearest(given, array.dtype))
    return name, after


def partition_of(context: Context) -> int:
    """Return the partition id, or a number drawn from the node id where the deployment configures none."""
    value = context.node_config.get(PARTITION_KEY)
    # Within the range of partition ids; the server knows this remainder as nobody's configuration.
    return value if isinstance(value, int) else context.node_id % (1 << 31)


def require_partition(context: Context, why: str) -> int:
    """Return the partition id that this node was started with.

    Parameters
    ----------
    why : str
        What it is needed for, as a clause of the error.

    Raises
    ------
    ConfigError
        When it is not a whole number >= 0.
    """
    value = context.node_config.get(PARTITION_KEY)
    # True is an integer, and would pass for partition 1.
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(
            f"this node's {PARTITION_KEY} is {value!r}; {why}: start the SuperNode with --node-config 'partition-id=0 "
            "num-partitions=4'"
        )
    return value


def uplink_of(context: Context) -> float:
    """Return the bytes a second that this node can send, as ``uplink`` of its configuration says ("1mbit"); else 0.

    Raises
    ------
    ConfigError
        When that is not the rate of a link.
    """
    said = context.node_config.get(UPLINK)
    return 0.0 if said is None else parse_link(str(said)).up_bits_per_s / 8.0


def changed(
    after: Mapping[str, NDArray[Any]],
    before: Mapping[str, NDArray[Any]],
    layout: Layout,
    *,
    lossless: bool = False,
    out: Vector | None = None,
) -> tuple[Update, dict[str, NDArray[Any]]]:
    """Return the update between two models, or ``after`` itself where ``lossless``, and the exact buffers; the update
    in ``out``, where that is given."""
    layout.check(after)
    exact = {t.name: check_exact(after[t.name], t, np.asarray(before[t.name])) for t in layout.exact}
    vector = layout.flatten(after, out) if lossless else layout.difference(after, before, out)
    return Update(vector, layout), exact
