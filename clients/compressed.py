"""The client half of all systems written as programs (:mod:`fedcomp.systems`): one mod without configuration.

``ClientApp(mods=[compression()])`` is all a Flower app needs. The server's messages say what to do; a message without
an ask passes through untouched. In a list with other mods it comes first: it must be the last to touch the outgoing
reply, outside of everything that changes the update (clipping, noise). :func:`fedcomp.clients.client.client` puts it in
its place among the halves of other systems.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache

from flwr.app import Context, Message

from fedcomp.clients.half import CallNext, ClientHalf, drop_in
from fedcomp.clients.messages import require_ids
from fedcomp.clients.programs import GUARDS, OUTSIDE, FirstModel, handle
from fedcomp.errors import ConfigError
from fedcomp.systems import SYSTEMS
from fedcomp.systems.pair import Pair


@drop_in
def compression(
    accept: Collection[str] | None = None,
    *,
    i_know_inputs_are_visible: bool = False,
    first_model: FirstModel | None = None,
    base: Callable[[], str] | None = None,
) -> ClientHalf:
    """Return the client half of all systems written as programs. Some need code of the app as well, see
    :func:`fedcomp.clients.programs.bringing`.

    Parameters
    ----------
    accept : collection of str, optional
        Ids of codecs, wrappers ("feedback", "chain") included, and of systems that this client agrees to use, the pair
        beside them; default all registered ones. A message that needs another one is answered with the app's
        uncompressed reply, and the server is told; if that codec privatises updates, the message is refused.
    i_know_inputs_are_visible : bool
        Agree to codecs whose frames show the server single examples (:class:`fedcomp.codecs.Factors` in the modes "dad"
        and "edad"); without it they, too, are answered with the app's own reply. Agree only where the server may see
        the data.
    first_model : callable, optional
        Takes message and context, and returns the run's first model as an ArrayRecord, bit for bit the server's: made
        from a seed in the message's configuration, or read from a file of this node. It is called once, and only if the
        server does not send that model. The digest in the message reveals a difference; the server then sends its own
        in the next round.
    base : callable, optional
        Returns :func:`fedcomp.flower.records.base_digest` of the model whose adapters this client trains; called once.
        Where the server names another base model (:class:`fedcomp.strategies.adapters.Adapters`), nothing is trained
        and the reply says so.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> app = ClientApp(mods=[compression()])
    """
    agreed = require_ids(accept, *SYSTEMS)
    if agreed is not None:
        # What the pair does is its codec's doing alone.
        agreed |= {Pair.ID}
    if first_model is not None and not callable(first_model):
        raise ConfigError(f"first_model={first_model!r} is not valid: a function of message and context")
    if base is not None and not callable(base):
        raise ConfigError(f"base={base!r} is not valid: a function that returns a digest")
    digest = None if base is None else cache(base)

    def compression_mod(msg: Message, context: Context, call_next: CallNext) -> Message:
        return handle(msg, context, call_next, agreed, i_know_inputs_are_visible, first_model, digest)

    return ClientHalf("compression", compression_mod, outside=OUTSIDE, inside=GUARDS, drop_in=True)
