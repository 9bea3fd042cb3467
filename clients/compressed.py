"""The client half of the drop-in pair: one mod, no configuration.

``ClientApp(mods=[compression()])`` is all a Flower app needs. The server's messages say what to do; a message without
an ask passes through untouched. In a list with other mods it comes first: it must be the last to touch the outgoing
reply, outside of everything that changes the update (clipping, noise). Other systems of this project need
:func:`fedcomp.clients.client.client`, which puts this half in its place among theirs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from fedcomp.clients.half import ClientHalf, drop_in
from fedcomp.clients.messages import require_ids
from fedcomp.clients.programs import FirstModel, programs
from fedcomp.systems.pair import Pair


@drop_in
def compression(
    accept: Collection[str] | None = None,
    *,
    i_know_inputs_are_visible: bool = False,
    first_model: FirstModel | None = None,
) -> ClientHalf:
    """Return the half of :func:`fedcomp.clients.programs.programs`, which may stand in a list of mods here.

    Parameters
    ----------
    accept : collection of str, optional
        Ids of codecs this client agrees to use; default all registered ones.
    i_know_inputs_are_visible, first_model
        As there.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> app = ClientApp(mods=[compression()])
    """
    agreed = require_ids(accept)
    # What the pair does is its codec's doing alone.
    named = None if agreed is None else {*agreed, Pair.ID}
    half = programs(named, i_know_inputs_are_visible=i_know_inputs_are_visible, first_model=first_model)
    return replace(half, drop_in=True)
