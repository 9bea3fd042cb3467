"""Messages between clients on their way through the server: bytes, and the asks that deliver them.

A post leaves with its sender's answer and comes with the recipient's next ask, so nobody is reached in the exchange in
which something was posted to it. What an ask brought and nobody answered comes again; a client half may therefore be
given a post twice, and never not at all. Where asks are repeated until they are answered
(:attr:`fedcomp.program.System.LOST`) each post acts exactly once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from fedcomp.asks import AnswerError, Ask, Post, Said
from fedcomp.errors import FedcompError
from fedcomp.plain import from_plain, to_plain

MOST_WAITING: Final = 1 << 30
"""Bytes that may wait for one client."""

MOST_POSTS: Final = 1 << 20
"""Posts that may wait for one client: empty ones take memory, too."""

LONGEST_NAME: Final = 200


class PostError(FedcompError, ValueError):
    """Something posted cannot be delivered; whoever posted it is refused."""


class Stamped(NamedTuple):
    """An ask as it goes out.

    Attributes
    ----------
    number : int
        Of its exchange; a repeated ask keeps that of the first.
    round : int
        In which it was asked first.
    ask : Ask
        With its mail.
    times : int
        How often it has gone out.
    """

    number: int
    round: int
    ask: Ask
    times: int = 1


@dataclass
class Mailbox:
    """What waits for clients, and what has been sent and not answered.

    Attributes
    ----------
    waiting : dict of int to list of Post
        By the client it is for, in the order of posting.
    asked : dict of int to Stamped
        Asks without an answer, by node.
    """

    waiting: dict[int, list[Post]] = field(default_factory=dict)
    asked: dict[int, Stamped] = field(default_factory=dict)

    def require(self, posts: Sequence[Post], nodes: Collection[int]) -> None:
        """Require that what a client posts can be delivered to one of ``nodes``.

        Raises
        ------
        PostError
            For a recipient that is not there, a name that is none, or more bytes or posts than may wait for one client.
        """
        coming: dict[int, list[Post]] = {}
        for post in posts:
            if post.to not in nodes:
                raise PostError(f"posts {post.name[:80]!r} to {post.to}, which is no node of this run")
            if not 0 < len(post.name) <= LONGEST_NAME:
                raise PostError(f"the name of a post has {len(post.name)} characters, expected 1 to {LONGEST_NAME}")
            coming.setdefault(post.to, []).append(post)
        for to, new in coming.items():
            old = self.waiting.get(to, [])
            there, size = (sum(len(post.data) for post in posts) for posts in (old, new))
            if there + size > MOST_WAITING:
                raise PostError(f"{there:,} bytes wait for node {to}; {size:,} more are beyond {MOST_WAITING:,}")
            if len(old) + len(new) > MOST_POSTS:
                raise PostError(f"{len(old):,} posts wait for node {to}; {len(new):,} more are beyond {MOST_POSTS:,}")

    def put(self, posts: Iterable[Post]) -> None:
        """Let posts wait for whom they are for."""
        for post in posts:
            self.waiting.setdefault(post.to, []).append(post)

    def take(self, node: int) -> tuple[Post, ...]:
        """Return what waits for a client and forget it, in the order of its senders."""
        return tuple(sorted(self.waiting.pop(node, ()), key=lambda post: post.source))

    def stamp(self, number: int, round: int, ask: Ask, *, again: bool) -> Stamped:
        """Return an ask as it goes out: with what waits, or in its place an earlier one without an answer.

        With ``again`` asks to train are repeated, and these alone take mail: a question that nobody answers is asked
        again as the program likes, with copies of what waits where it put these into the ask.
        """
        former = self.asked.get(ask.node) if again else None
        if former is not None:
            stamped = former._replace(times=former.times + 1)
        else:
            # Where nothing is remembered mail would be lost.
            brings = ask.kind == "train" or (ask.kind == "query" and not again)
            stamped = Stamped(number, round, ask._replace(mail=self.take(ask.node)) if brings else ask)
        if ask.kind == "train" or former is not None or not again:
            self.asked[ask.node] = stamped
        return stamped

    def answered(self, node: int) -> None:
        """Note that an ask has its answer, and that its mail has arrived with it."""
        self.asked.pop(node, None)

    def give_up(self, node: int) -> tuple[Post, ...]:
        """Forget an ask; return what was for its node and is not known to have arrived."""
        asked = self.asked.pop(node, None)
        return (*(() if asked is None else asked.ask.mail), *self.take(node))

    def put_back(self) -> None:
        """Forget all asks without an answer; their mail waits again, before what was posted since."""
        for node in list(self.asked):
            if found := list(self.give_up(node)):
                self.waiting[node] = found

    def copy(self) -> Mailbox:
        """Return one that changes by itself."""
        return Mailbox({node: list(posts) for node, posts in self.waiting.items()}, dict(self.asked))

    def to_plain(self) -> dict[str, Any]:
        """Return the mail as plain data."""
        waiting = [tuple(post) for posts in self.waiting.values() for post in posts]
        return {"waiting": to_plain(waiting), "asked": [to_plain(_Saved.of(each)) for each in self.asked.values()]}

    @classmethod
    def of(cls, plain: Any, words: Sequence[type[Said]], where: str = "mailbox") -> Mailbox:
        """Return what :meth:`to_plain` wrote, of a system that says ``words``.

        Raises
        ------
        FedcompError
            When it is anything else.
        """
        saved = from_plain(_Mail, plain, where)
        mailbox = cls(asked={each.node: each.stamped(words) for each in saved.asked})
        mailbox.put(Post(*post) for post in saved.waiting)
        return mailbox


_Plain = tuple[int, int, str, bytes]


@dataclass(frozen=True)
class _Saved:
    """An ask without an answer, as plain data."""

    number: int
    round: int
    times: int
    node: int
    kind: str
    frames: dict[str, bytes]
    blobs: dict[str, bytes]
    dense: bool
    model: bool
    mail: list[_Plain]
    say: str
    said: dict[str, Any]
    expects: str

    @classmethod
    def of(cls, stamped: Stamped) -> _Saved:
        """Return an ask in its saved form."""
        ask, say = stamped.ask, stamped.ask.say
        return cls(
            stamped.number,
            stamped.round,
            stamped.times,
            ask.node,
            ask.kind,
            dict(ask.frames),
            dict(ask.blobs),
            ask.dense,
            ask.model,
            [(post.source, post.to, post.name, post.data) for post in ask.mail],
            "" if say is None else type(say).__name__,
            {} if say is None else say.entries(),
            "" if ask.expects is None else ask.expects.__name__,
        )

    def stamped(self, words: Sequence[type[Said]]) -> Stamped:
        """Return the ask; raise AnswerError if the system has no such words."""
        kinds = {kind.__name__: kind for kind in words}
        if unknown := [name for name in (self.say, self.expects) if name and name not in kinds]:
            raise AnswerError(f"the system has no words {unknown[0]!r}")
        ask = Ask(
            self.node,
            self.kind,
            kinds[self.say].of(self.said) if self.say else None,
            self.frames,
            self.blobs,
            kinds[self.expects] if self.expects else None,
            self.dense,
            tuple(Post(*post) for post in self.mail),
            self.model,
        )
        return Stamped(self.number, self.round, ask, self.times)


@dataclass(frozen=True)
class _Mail:
    waiting: list[_Plain]
    asked: list[_Saved]
