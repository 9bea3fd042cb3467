"""The entry point of a client: halves find their order, and what cannot work is refused when the app is built."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from toy import client_app, fedavg, model, stack

from fedcomp.clients import app as generic
from fedcomp.clients.client import HALVES, client, in_order
from fedcomp.clients.compressed import compression
from fedcomp.clients.half import ClientHalf
from fedcomp.clients.private.dpsgd import record_dp
from fedcomp.clients.private.local_dp import local_privacy
from fedcomp.clients.private.mod import private
from fedcomp.clients.private.topagg import votes_only
from fedcomp.codecs import TopK
from fedcomp.errors import ConfigError
from fedcomp.flower._private import acting_as
from fedcomp.flower.grid import InProcessGrid
from fedcomp.strategies.compressed import Compressed

OUTERMOST_FIRST = ("votes_only", "local_privacy", "record_dp", "compression", "private")


def say(app, kind: str = "train") -> Message:
    """Return what the app answers to an empty message."""
    with acting_as(1, 2):
        return app(Message(RecordDict(), 2, kind), context())


def context() -> Context:
    return Context(1, 2, {"partition-id": 0, "num-partitions": 1}, RecordDict(), {})


def spy(name: str, seen: list[str], **place: tuple[str, ...]) -> ClientHalf:
    """Return a half that notes when a message comes in and when its reply goes out."""

    def mod(msg, ctx, call_next):
        seen.append(name)
        reply = call_next(msg, ctx)
        seen.append(f"/{name}")
        return reply

    return ClientHalf(name, mod, **place)


def answering(seen: list[str], name: str = "app"):
    def handler(msg: Message, ctx: Context) -> Message:
        seen.append(name)
        return Message(RecordDict(), reply_to=msg)

    return handler


def test_the_halves_of_the_project_have_one_order_whatever_order_they_are_named_in() -> None:
    made = {name: make() for name, make in HALVES.items()}
    made |= {"record_dp": record_dp(lambda msg, ctx: None), "votes_only": votes_only()}  # type: ignore[arg-type, return-value]
    for names in (sorted(made), OUTERMOST_FIRST, OUTERMOST_FIRST[::-1]):
        assert tuple(half.name for half in in_order({name: made[name] for name in names})) == OUTERMOST_FIRST
    for pair in permutations(made, 2):
        found = [half.name for half in in_order({name: made[name] for name in pair})]
        assert found == sorted(found, key=OUTERMOST_FIRST.index), "no half has to be there for two others to be ordered"


def test_a_message_passes_the_mods_from_the_outermost_and_the_reply_back() -> None:
    seen: list[str] = []
    own = ClientApp(mods=[spy("own", seen).mod])
    halves = [spy("c", seen, inside=("b",)), spy("a", seen, outside=("b", "c")), spy("b", seen)]
    app = client(own, *halves, only=[])
    app.train()(answering(seen))
    say(app)
    assert seen == ["a", "b", "c", "own", "app", "/own", "/c", "/b", "/a"]


def test_handlers_are_registered_before_or_after_with_either_app() -> None:
    seen: list[str] = []
    plain = ClientApp()
    plain.train()(answering(seen, "before"))
    app = client(plain, ClientHalf("h", handlers={"query.ours": answering(seen, "ours")}))
    app.query()(answering(seen, "after"))
    plain.evaluate("own")(answering(seen, "behind"))
    for kind in ("train", "query", "evaluate.own", "query.ours"):
        say(app, kind)
    assert seen == ["before", "after", "behind", "ours"]
    with pytest.raises(ValueError, match="No query function registered with name 'ours'"):
        say(plain, "query.ours")
    with pytest.raises(ValueError, match="No evaluate function"):
        say(app, "evaluate")


def test_mods_see_messages_that_the_app_has_no_handler_for() -> None:
    """Flower alone refuses such a message before any mod could answer it."""

    def mod(msg, ctx, call_next):
        return Message(RecordDict(), reply_to=msg) if msg.metadata.message_type == "query.mine" else call_next(msg, ctx)

    assert say(client(ClientApp(), ClientHalf("h", mod)), "query.mine").has_content()
    with pytest.raises(ValueError, match="No query function"):
        say(ClientApp(mods=[mod]), "query.mine")


@pytest.mark.parametrize("early", [True, False])
def test_the_lifespan_is_outside_of_all_mods_and_entered_once(early: bool) -> None:
    seen: list[str] = []

    def twice(msg, ctx, call_next):
        call_next(msg, ctx)
        return call_next(msg, ctx)

    def span(ctx: Context) -> Iterator[None]:
        seen.append("enter")
        yield
        seen.append("leave")

    plain = ClientApp()
    if early:
        plain.lifespan()(span)
    app = client(plain, spy("a", seen, outside=("twice",)), ClientHalf("twice", twice))
    if not early:
        app.lifespan()(span)
    app.train()(answering(seen))
    say(app)
    assert seen == ["enter", "a", "app", "app", "/a", "leave"]


REFUSED = {
    "no partner by name": (lambda: client(ClientApp(), only=["local_privacy"]), "local_privacy .* without compression"),
    "trains with noise": (
        lambda: client(ClientApp(), record_dp(lambda *_: None), only=[]),  # type: ignore[arg-type, return-value]
        "record_dp .* without compression",
    ),
    "circle": (
        lambda: client(ClientApp(), spy("a", [], outside=("private",), inside=("private",))),
        "private outside of a|a outside of private",
    ),
    "twice of the author": (lambda: client(ClientApp(), private(), private()), "private is given twice"),
    "among own mods": (lambda: client(ClientApp(mods=[compression()])), "compression is among the app's own mods"),
    "factory among own": (lambda: client(ClientApp(mods=[compression])), "compression is among the app's own mods"),
    "typo": (lambda: client(ClientApp(), only=["compresion"]), "did you mean 'compression'"),
    "unknown": (lambda: client(ClientApp(), only=["xyzzy"]), "expected one of local_privacy, compression"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_work_is_refused_when_the_app_is_built(why: str) -> None:
    build, words = REFUSED[why]
    with pytest.raises(ConfigError, match=words):
        build()


def test_a_message_type_of_a_half_is_not_the_apps_now_or_later() -> None:
    taken = ClientHalf("h", handlers={"train": answering([]), "query.ours": answering([])})
    for kind, action in (("train", "default"), ("query", "ours")):
        plain = ClientApp()
        getattr(plain, kind)(action)(answering([]))
        with pytest.raises(ConfigError, match="another name"):
            client(plain, taken)
        with pytest.raises(ConfigError, match="another name"):
            getattr(client(ClientApp(), taken), kind)(action)


def moved(app, *, refused: int = 0) -> np.ndarray:
    strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(0.1))
    result = strategy.start(InProcessGrid(app, 3, seed=2), model(), num_rounds=2, timeout=9)
    assert [report.compressed for report in strategy.reports.values()] == [3 - refused] * 2
    return stack(result.arrays)


def drop_in(*mods) -> ClientApp:
    app = ClientApp(mods=list(mods))
    plain = client_app()
    for kind in ("train", "evaluate"):
        getattr(app, kind)()(plain)
    return app


def test_b2_the_drop_in_line_is_the_same_run_with_and_without_parentheses() -> None:
    expected = moved(client_app([compression()]))
    for app in (
        drop_in(compression()),
        drop_in(compression),
        client(drop_in(), only=["compression"]),
        client(drop_in()),
    ):
        assert np.array_equal(moved(app), expected)


def test_b2_arguments_reach_the_half() -> None:
    strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(0.1))
    strategy.start(InProcessGrid(drop_in(compression(["qsgd"])), 2, seed=2), model(), num_rounds=1, timeout=9)
    assert len(strategy.reports[1].unsupported) == 2
    # A half that the author makes takes the place of the one with its defaults.
    app = client(drop_in(), compression(["qsgd"]))
    strategy.start(InProcessGrid(app, 2, seed=2), model(), num_rounds=1, timeout=9)
    assert len(strategy.reports[1].unsupported) == 2


@pytest.mark.parametrize("half", [private(), local_privacy()], ids=lambda half: half.name)
def test_other_halves_in_a_list_of_mods_say_where_they_belong(half: ClientHalf) -> None:
    """Flower checks nothing when an app is built, so that the first message has to."""
    with pytest.raises(ConfigError, match=r"use fedcomp\.client\(app\)"):
        say(drop_in(half, compression()))


def test_the_generic_app_has_a_handler_for_every_system() -> None:
    kinds = ("train.gcn", "evaluate.gcn")
    with InProcessGrid(generic.app, 1, seed=2) as grid:
        (node,) = grid.get_node_ids()
        for kind in (*kinds, "query.unknown"):
            (reply,) = grid.send_and_receive([Message(RecordDict(), node, kind)], timeout=9)
            assert ("function registered" in reply.error.reason) == (kind == "query.unknown"), kind
