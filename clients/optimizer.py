"""The state of a client's own torch optimizer, kept from round to round: ``with fc.kept(context, optimizer):``.

An app that makes a new optimizer in every round trains its first steps without momentum. :func:`kept` puts the moments
of AdamW, or the momentum of SGD, into the node's ``context.state``, beside the memory of a codec and under other rules:
what a lost reply took along goes back into the codec's memory, while the moments stay as training left them. They have
seen the data, and an old second moment beside a new model is the worse error (derived here; DiLoCo, Douillard et al.
2023, arXiv:2311.08105, keeps the inner optimizer too).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final

import numpy as np
from flwr.app import ArrayRecord, Context

from fedcomp.errors import ConfigError
from fedcomp.flower.logs import log
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.flower.schema import Document, Schema, SchemaError
from fedcomp.rules import Data, Int

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor
    from torch.optim import Optimizer

ARRAYS: Final = "fedcomp.optimizer.arrays"
"""The tensors of the optimizer's state, by the parameter's position and their own name."""


@dataclass(frozen=True)
class OptimizerRecord(Schema, key="fedcomp.optimizer"):
    """What a node keeps of its optimizer beside the tensors.

    Attributes
    ----------
    session : bytes
        Of the server whose model was trained; empty for a strategy that is not of this project.
    number : int
        The round in which it was trained.
    layout : bytes
        Digest of the optimizer's class and its parameters (:func:`_layout_of`).
    rest : dict
        By the names in :data:`ARRAYS`, the dtypes that numpy does not have; by other names, numbers and None.
    """

    session: Annotated[bytes, Data(8)]
    number: Annotated[int, Int()]
    layout: Annotated[bytes, Data(16, 16)]
    rest: Annotated[Mapping[str, Any], Document(1 << 24)]


@dataclass
class Asked:
    """The training message that the app is answering.

    Attributes
    ----------
    session : bytes
    number : int
        Of the round; 0 where the message is not of this project.
    notes : list of str
        What the answer says to the server, once logged here.
    """

    session: bytes = b""
    number: int = 0
    notes: list[str] = field(default_factory=list)


_ASKED: ContextVar[Asked | None] = ContextVar("fedcomp-asked", default=None)


@contextmanager
def answering(session: bytes, number: int, notes: list[str]) -> Iterator[None]:
    """Let the app that runs inside know which message it answers."""
    token = _ASKED.set(Asked(session, number, notes))
    try:
        yield
    finally:
        _ASKED.reset(token)


@contextmanager
def kept(context: Context, optimizer: Optimizer) -> Iterator[int]:
    """Train with the optimizer's state of the node's last round: restored on entry, kept on exit.

    The state is kept on whatever device it was, and returns to the device of the parameters, in the dtype that it had.
    Hyperparameters are not part of it: a step size that falls over the run follows from the server's round number, not
    from what this node has done. Nothing is kept where training raises an error.

    The state is dropped, in a line of the log and a remark in the server's report, where the optimizer or its
    parameters are others, where another strategy object asks, and where it is damaged or is not finite. The memory of a
    codec is rolled back when a reply is lost; this state never is. A node keeps the state of one optimizer.

    Parameters
    ----------
    context : Context
        Of the app; the state is in ``context.state``, and in the node's ``state-dir`` where it has one.
    optimizer : torch.optim.Optimizer
        With the parameters that will be trained. Its state may consist of tensors, numbers and None.

    Yields
    ------
    int
        The round of which the state is; 0 where it begins, and with strategies that are not of this project.

    Raises
    ------
    ConfigError
        When the optimizer's state holds something else.

    Examples
    --------
    >>> import torch
    >>> from flwr.app import RecordDict
    >>> context = Context(0, 0, {}, RecordDict(), {})
    >>> w = torch.nn.Parameter(torch.zeros(2))
    >>> for _ in range(2):
    ...     optimizer = torch.optim.SGD([w], lr=1.0, momentum=0.5)
    ...     with kept(context, optimizer):
    ...         w.grad = torch.ones(2)
    ...         optimizer.step()
    >>> w.tolist()
    [-2.5, -2.5]
    """
    asked, layout, since = _ASKED.get() or Asked(), _layout_of(optimizer), 0
    held, why = _held(context, asked, layout)
    if held is not None:
        try:
            _restore(optimizer, held, context.state.get(ARRAYS))
            since = held.number
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
            why = f"it is damaged ({type(error).__name__})"
    if why:
        _drop(context, asked, why)
    yield since
    _keep(context, optimizer, asked, layout)


def _held(context: Context, asked: Asked, layout: bytes) -> tuple[OptimizerRecord | None, str]:
    """Return what is kept for this session and layout, or why it cannot be used."""
    try:
        held = OptimizerRecord.find(context.state)
    except SchemaError:
        return None, "it is damaged"
    if held is None:
        return None, ""
    if held.session != asked.session:
        return None, "it is of another strategy object"
    if held.layout != layout:
        return None, "the optimizer or the shapes and dtypes of its parameters changed"
    return held, ""


def _drop(context: Context, asked: Asked, why: str) -> None:
    for name in (OptimizerRecord.KEY, ARRAYS):
        context.state.pop(name, None)
    note = f"the optimizer's state was dropped and starts from zero: {why}"
    log.warning("round %d: %s", asked.number, note)
    asked.notes.append(note)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters in the order by which torch numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _layout_of(optimizer: Optimizer) -> bytes:
    """Return a digest of the optimizer's class, and of shapes and dtypes of its parameters in order."""
    tensors = [[list(p.shape), str(p.dtype)] for p in _parameters(optimizer)]
    text = json.dumps([type(optimizer).__name__, tensors])
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _restore(optimizer: Optimizer, held: OptimizerRecord, record: Any) -> None:
    """Put a kept state into the optimizer; raise what a damaged one raises, before anything is changed."""
    import torch

    arrays = to_arrays(record) if isinstance(record, ArrayRecord) else {}
    state: dict[int, dict[str, Any]] = {}
    for name in [*arrays, *(name for name in held.rest if name not in arrays)]:
        number, _, entry = name.partition(".")
        value: Any = held.rest.get(name)
        if name in arrays:
            tensor = torch.from_numpy(arrays[name])
            value = tensor.to(getattr(torch, value)) if value else tensor
        state.setdefault(int(number), {})[entry] = value
    parameters = _parameters(optimizer)
    if not all(0 <= index < len(parameters) for index in state):
        raise IndexError("a state of a parameter that is not there")
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for index, entries in state.items():
        own = optimizer.state[parameters[index]]
        for entry, value in entries.items():
            # torch gives every state its parameter's dtype: float32 moments of a bfloat16 parameter would be rounded.
            if isinstance(value, torch.Tensor) and own[entry].dtype != value.dtype:
                own[entry] = value.to(parameters[index].device)


def _keep(context: Context, optimizer: Optimizer, asked: Asked, layout: bytes) -> None:
    """Put the optimizer's state into the node's."""
    import torch

    arrays: dict[str, NDArray[Any]] = {}
    rest: dict[str, Any] = {}
    for index, entries in optimizer.state_dict()["state"].items():
        for entry, value in entries.items():
            name = f"{index}.{entry}"
            if isinstance(value, torch.Tensor):
                plain = value.detach().cpu()
                if plain.is_floating_point() and not bool(torch.isfinite(plain).all()):
                    return _drop(context, asked, f"{entry} of parameter {index} is not finite after training")
                try:
                    arrays[name] = plain.numpy()
                except TypeError:
                    # bfloat16 and the floats of eight bits: float32 holds every number of theirs.
                    arrays[name], rest[name] = plain.float().numpy(), str(plain.dtype).removeprefix("torch.")
            elif value is None or isinstance(value, bool | int | float):
                rest[name] = value
            else:
                raise ConfigError(
                    f"{type(optimizer).__name__} keeps {entry!r} as a {type(value).__name__}; kept() keeps tensors, "
                    "numbers and None. Use an optimizer whose state consists of them, such as AdamW or SGD"
                )
    context.state[ARRAYS] = to_record({name: np.asarray(array) for name, array in arrays.items()})
    OptimizerRecord(asked.session, asked.number, layout, rest).put(context.state)
    return None
