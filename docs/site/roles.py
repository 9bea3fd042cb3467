"""Sphinx roles in docstrings become Markdown: a link where the reference has the name, else code."""

from __future__ import annotations

import re
from collections.abc import Mapping

ROLE = re.compile(r":(?:class|func|mod|data|meth|attr|exc):`(~?)([^`<]+)`")


def linked(text: str, shown: Mapping[str, str], *, module: str = "", owner: str = "", link: str = "[{0}][{1}]") -> str:
    """Return ``text`` with links in place of roles.

    Parameters
    ----------
    text : str
        A docstring.
    shown : mapping
        For every dotted name of an entry of the reference, the name that the entry has there.
    module, owner : str
        Dotted names of the module, and of the class if there is one, from which a role without dots is read. A method
        is a link to its class. What leads to ``owner`` itself is no link.
    link : str
        How a link is written, of its text and the entry's name.

    Examples
    --------
    >>> shown = {"fedcomp.codecs.topk.TopK": "fedcomp.TopK"}
    >>> linked("see :class:`~fedcomp.codecs.topk.TopK`", shown)
    'see [`TopK`][fedcomp.TopK]'
    >>> linked(":meth:`TopK.encode` is not :func:`fedcomp.heap.trim`", shown, module="fedcomp.codecs.topk")
    '[`TopK.encode`][fedcomp.TopK] is not `fedcomp.heap.trim`'
    """

    def replaced(found: re.Match[str]) -> str:
        short, target = found.groups()
        target = re.sub(r"\s+", "", target)  # a long name may be on two lines
        words = f"`{target.rpartition('.')[2] if short else target}`"
        for name in (target, f"{owner}.{target}", f"{module}.{target}"):
            entry = shown.get(name) or shown.get(name.rpartition(".")[0])
            if entry is not None:
                return words if entry == shown.get(owner) else link.format(words, entry)
        return words

    # Two colons before a block are one in Markdown.
    return re.sub(r"(?<=\w)::$", ":", ROLE.sub(replaced, text), flags=re.MULTILINE)
