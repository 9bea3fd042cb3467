"""Small systems that use what no other system does by itself: posts, what nodes keep, asks that are repeated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from fedcomp.codecs import Codec, State, get_codec
from fedcomp.coding.sealing import PeerIdentity, seal
from fedcomp.errors import FedcompError
from fedcomp.layout import Layout, Vector
from fedcomp.program import Answer, AnswerError, Ask, KeyPair, Me, Mean, Now, Post, Round, Said, Single, System
from fedcomp.rules import Data, Flag, Int, Made
from fedcomp.systems import SYSTEMS
from fedcomp.wire import Frame


@dataclass(frozen=True)
class Pass(Said):
    """To whom a node posts, and that one's public key."""

    to: Annotated[int, Int()]
    key: Annotated[bytes, Data(32)] = b""


@dataclass(frozen=True)
class Kept(Said):
    """In how many rounds a node has taken part, as it has kept it."""

    rounds: Annotated[int, Int()]


@dataclass(frozen=True)
class Passing(System, id="passing"):
    """The pair, whose clients each post a number to the next one before they train; that one says what it got."""

    RULES: ClassVar[tuple[type, ...]] = (Mean, Single)
    SAYS: ClassVar[tuple[type[Said], ...]] = (Pass, Kept)
    KEEPS: ClassVar[bool] = True

    codec: Annotated[Codec, Made(get_codec)]

    @property
    def several(self) -> bool:
        return True

    def start(self, layout: Layout) -> State:
        return self.codec.init(layout)

    def round(self, now: Now) -> Round:
        after = dict(zip(now.nodes, (*now.nodes[1:], *now.nodes[:1]), strict=True))
        told = yield [
            Ask(node, "query", Pass(to, now.keys.get(to, b"")), expects=Kept, model=False)
            for node, to in after.items()
            if to in now.keys or not self.KEYS
        ]
        now.state["rounds"] = {str(answer.node): answer.say.rounds for answer in told if isinstance(answer.say, Kept)}
        answers = yield [Ask(node) for node in now.nodes]
        early, heard = (now.read(each, "heard", numbers) for each in (told, answers))
        now.state["heard"] = {
            str(node): [*early.get(node, np.zeros(0)).tolist(), *heard[node].tolist()] for node in heard
        }
        return now.mean_of(self.codec, answers)

    def client(self, memory: State, ask: Ask, me: Me) -> tuple[State, Answer]:
        heard = {"heard": b"".join(self._opened(post, me) for post in ask.mail)}
        if ask.kind == "train":
            frame, memory = self.codec.encode(me.update(), memory, me.key)
            return memory, Answer(me.node, frames={"values": frame, **heard})
        if not isinstance(ask.say, Pass):
            raise AnswerError("says nobody to post to")
        rounds = int.from_bytes(me.kept.get("rounds", b""), "little") + 1
        said = np.int64([10 * me.number + me.node]).tobytes()
        post = Post(me.node, ask.say.to, "number", self._sealed(said, ask.say, me))
        keep = {"rounds": rounds.to_bytes(4, "little")}
        return memory, Answer(me.node, say=Kept(rounds), frames=heard, post=(post,), keep=keep)

    def _sealed(self, data: bytes, say: Pass, me: Me) -> bytes:
        return seal(data, say.key, me.run + b"/%d" % me.number) if self.KEYS else data

    def _opened(self, post: Post, me: Me) -> bytes:
        if not self.KEYS:
            return post.data
        assert me.identity is not None
        try:
            return me.identity.open(post.data, me.run + b"/%d" % me.number)
        except FedcompError:
            # Of another round: whoever sent it is late.
            return b""

    def rollback(self, memory: State, frame: Frame, layout: Layout) -> State:
        return self.codec.rollback(memory, frame, layout)

    def residual(self, memory: State, layout: Layout) -> Vector | None:
        return self.codec.residual(memory)


@dataclass(frozen=True)
class SealedPassing(Passing, id="sealed-passing"):
    """The same in sealed boxes."""

    KEYS: ClassVar[type[KeyPair] | None] = PeerIdentity


def numbers(frame: Frame) -> Any:
    """Return the numbers in a frame."""
    if len(frame) % 8 or len(frame) > 8 * 100:
        raise FedcompError(f"{len(frame)} bytes are no numbers")
    return np.frombuffer(frame, np.int64)


@dataclass(frozen=True)
class Begin(Said):
    """Whether a node begins with its own mass."""

    begin: Annotated[bool, Flag(absent=False)] = False


@dataclass(frozen=True)
class Halving(System, id="halving"):
    """Each node holds a mass, and posts half of it to another one in each round: what there is stays the same."""

    SAYS: ClassVar[tuple[type[Said], ...]] = (Begin,)
    KEEPS: ClassVar[bool] = True
    LOST: ClassVar[str] = "again"
    SENT: ClassVar[str] = ""

    patience: Annotated[int, Int(least=1)] = 1000
    nodes: Annotated[int, Int(least=1)] = 5

    def round(self, now: Now) -> Round:
        # Values of a state are replaced, never changed in place.
        begun, out = list(now.state.get("begun", ())), list(now.state.get("out", ()))
        for node, times in now.open.items():
            if times >= self.patience:
                out.append(node)
                # What it was to get goes to another one.
                now.mailbox.put(post._replace(to=begun[0]) for post in now.mailbox.give_up(node))
        asks = []
        for node in sorted({*now.nodes, *now.open} - {*out}):
            asks.append(Ask(node, say=Begin(node not in begun), model=node not in begun))
            begun += [] if node in begun else [node]
        now.state.update(begun=begun, out=out)
        yield asks
        return None

    def client(self, memory: State, ask: Ask, me: Me) -> tuple[State, Answer]:
        if not isinstance(ask.say, Begin):
            raise AnswerError("does not say whether to begin")
        mass = np.float64(1 << 40) * (me.node + 1) if ask.say.begin else memory["mass"]
        # What cannot be read is not this node's, and goes back.
        back = tuple(Post(me.node, post.source, "mass", post.data) for post in ask.mail if len(post.data) != 8)
        mass = mass + sum(float(np.frombuffer(post.data, np.float64)[0]) for post in ask.mail if len(post.data) == 8)
        # Of an integer, so that nothing is lost in a rounding.
        half = np.floor(mass / 2)
        to = (me.node + me.number) % self.nodes
        turns = memory["turns"] + 1 if "turns" in memory else np.float64(1)
        post = Post(me.node, to, "mass", np.float64([half]).tobytes())
        return {"mass": np.array(mass - half), "turns": np.array(turns)}, Answer(me.node, post=(post, *back), bare=True)


SYSTEMS.update({kind.ID: kind for kind in (Passing, SealedPassing, Halving)})
