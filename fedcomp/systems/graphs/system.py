"""Graph convolutions on sampled neighbours that favour owned ones, on a graph of several owners: both halves.

Sampler after Jiang and Rumi (arXiv 2101.07706, abstract); the rule by which a budget sets the skew is derived here. The
clients decide which nodes a step uses (:mod:`fedcomp.graphs`); the rows of other owners' nodes travel through the
server (:mod:`fedcomp.systems.graphs.conversation`). With one step per round and updates weighted by the sizes of the
batches this is synchronous data-parallel SGD on the union of the batches; with more steps it is local SGD.

A client does without the rows of an absent owner, except those in its cache; the report says which share of the base
weight was lost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedcomp.codecs import State
from fedcomp.graphs.base import GraphError
from fedcomp.program import Answer, Ask, Me, Mean, Now, Round, Said, Single
from fedcomp.systems.graphs.conversation import Conversation
from fedcomp.systems.graphs.kept import HIDDEN, hidden_of, remembered
from fedcomp.systems.graphs.options import GraphOptions
from fedcomp.systems.graphs.owner import begun, handed_out, planned, turn_of
from fedcomp.systems.graphs.words import Fetch, Needs, Owner, Plan, Planned, Refused, Turn, Who


@dataclass(frozen=True, repr=False, eq=False)
class Graphs(GraphOptions, id="graphs"):
    """Train on a graph whose nodes, features and labels belong to several owners; node i owns part i.

    What an app brings is a :class:`fedcomp.systems.graphs.owner.OwnsPart`; the options are those of
    :class:`fedcomp.systems.graphs.options.GraphOptions`.
    """

    APP: ClassVar[str] = "app = fc.client(app, fc.graph_owner(...))"
    SAYS: ClassVar[tuple[type[Said], ...]] = (Who, Owner, Plan, Needs, Planned, Fetch, Refused, Turn)
    RULES: ClassVar[tuple[type, ...]] = (Mean, Single)
    KEEPS: ClassVar[bool] = True
    SEVERAL: ClassVar[bool] = True
    BESIDE: ClassVar[tuple[str, ...]] = (HIDDEN,)

    def round(self, now: Now) -> Round:
        turn = Conversation(self, now, "train")
        now.told["graph"] = turn
        answers = yield from turn.turn()
        step = self.summed(now, answers)
        return None if step is None else replace(step, metrics=turn.traffic.metrics("gcn."))

    def evaluation(self, now: Now) -> Round:
        turn = Conversation(self, now, "evaluate")
        now.told["graph"] = turn
        yield from turn.turn()
        return None

    def client(self, memory: State, ask: Ask, me: Me) -> tuple[State, Answer]:
        say = ask.say
        if me.data is None:
            raise GraphError("this app owns no part of a graph; wrap it with fedcomp.client(app, graph_owner(...))")
        if isinstance(say, Who):
            return memory, Answer(me.node, say=Owner.of_part(me.data.part), bare=True)
        if isinstance(say, Fetch):
            return memory, handed_out(self, ask, me, say)
        if not isinstance(say, Plan):
            raise GraphError("an owner is asked for nothing that it could answer")
        if not isinstance(say, Turn):
            return memory, planned(self, memory, ask, me, say)
        steps, kept = begun(self, memory, ask, me, say)
        me.data.load(steps)
        if say.purpose != "train":
            return memory, Answer(me.node, keep=kept.to_frames(me.kept))
        turn = turn_of(me.number, say)
        state, answer = super().client(self.own(memory), ask, me)
        hidden = remembered(hidden_of(memory, turn), me.data.seen, turn) if steps.measures else {}
        return {**state, **hidden}, answer._replace(keep=kept.to_frames(me.kept))
