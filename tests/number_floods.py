"""Every whole number of what a server describes, made hostile, on a machine with little memory; run as a process.

``python number_floods.py codecs|gossip|plans`` prints the cases that ended in anything but a result or an error of this
package, and how many there were.
"""

from __future__ import annotations

import copy
import importlib
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fedcomp.errors import FedcompError
from fedcomp.layout import NONE_DENSE, Layout, Update
from fedcomp.rng import Key

HOSTILE = (5_000, 2**31 - 1, 2**40, 2**62)
ROOM = 1 << 29
"""Bytes beyond what the process has before the first case."""

AS_IT_IS = "as it is: "

Path = tuple[Any, ...]


def numbers(config: Any, path: Path = ()) -> Iterator[Path]:
    """Yield where the whole numbers of a configuration stand, and the parameters that were left to a default."""
    entries = config.items() if isinstance(config, Mapping) else enumerate(config)
    for name, value in entries:
        if isinstance(value, Mapping | list | tuple):
            yield from numbers(value, (*path, name))
        elif value is None or type(value) is int:
            yield (*path, name)


def changed(config: Any, path: Path, value: int) -> Any:
    """Return the configuration with another number at a place."""
    out = copy.deepcopy(config)
    place = out
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return out


def codecs() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what a client does with a codec that a server describes, by every number of every codec."""
    from codec_examples import EXAMPLES

    from fedcomp.codecs import get_codec

    layout = Layout.of({"a": np.zeros((200, 150), np.float32), "b": np.zeros(150, np.float32)}, NONE_DENSE)
    update = Update(np.random.default_rng(0).normal(size=layout.size).astype(np.float32), layout)

    def use(config: Any) -> None:
        codec = get_codec(config)
        codec.longest(layout)
        frame, _ = codec.encode(update, codec.init(layout), Key(0, "uplink", round=1))
        codec.decode(frame, layout)

    seen = set()
    for example in EXAMPLES:
        config = example.to_config()
        for path in numbers(config):
            # Of two examples of one form the second has the same numbers.
            form = (str({k: type(v) for k, v in config.items()}), str(config.get("codec"))[:30], path)
            if form not in seen:
                seen.add(form)
                yield AS_IT_IS + repr(example), lambda config=config: use(config)
                for value in HOSTILE:
                    given = changed(config, path, value)
                    yield f"{config['id']} {path} {value}", lambda given=given: use(given)


def gossip() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what a node does with an algorithm that a server describes."""
    from test_every_algorithm import CONFIGS, view

    from fedcomp.gossip import get_algorithm

    layout = Layout.of({"a": np.zeros((200, 150)), "b": np.zeros(150)}, NONE_DENSE)
    model = np.random.default_rng(0).normal(size=layout.size)

    def use(config: Any) -> None:
        algorithm = get_algorithm(config)
        state = algorithm.init(model, layout, common=np.zeros(layout.size))
        algorithm.step(state, [], None, view(0, 0))

    for given in CONFIGS:
        config = get_algorithm(given).to_config()
        yield AS_IT_IS + str(config), lambda config=config: use(config)
        for path in numbers(config):
            for value in HOSTILE:
                hostile = changed(config, path, value)
                yield f"{config['name']} {path} {value}", lambda hostile=hostile: use(hostile)


def plans() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what nodes do with plans of coded rounds that a server describes."""
    from fedcomp.coding.relay import RelayPlan
    from fedcomp.coding.sumcode import SumPlan, contribution, mask, shares
    from fedcomp.coding.sumshards import HeldTags
    from fedcomp.privacy.lsg import LowRankPlan

    size = 1000
    plan = SumPlan.from_config(
        {"p": 2**31 - 1, "size": size, "bound": 1, "contributors": 3, "relays": 3, "symbols": 1, "private": 1}
        | {"max_weight": 1, "seed": 0, "checks": 1, "least": 2, "mode": "share", "extras": [5]}
    ).config()

    def share(config: Any) -> None:
        asked = SumPlan.from_config(config)
        HeldTags.of(asked, {})
        mask(asked)
        shares(asked, contribution(asked, np.zeros(size, np.int64), 1, [0] * len(asked.extras)))

    yield AS_IT_IS + "sum plan", lambda: share(plan)
    for path in numbers(plan):
        for value in HOSTILE:
            hostile = changed(plan, path, value)
            yield f"sum plan {path} {value}", lambda hostile=hostile: share(hostile)
    pairs = {"relays": 1024, "contributors": 2**30, "symbols": 2**20, "private": 2**20}
    for first in pairs:
        for second in pairs:
            hostile = plan | {"extras": [], first: pairs[first], second: pairs[second]}
            yield f"sum plan {first} {second}", lambda hostile=hostile: share(hostile)
    hostile = plan | {"extras": [0] * 2**20}
    yield "sum plan with many extras", lambda hostile=hostile: share(hostile)
    payload = bytes(1 << 23)
    for code in ("rlnc", "mds"):
        yield AS_IT_IS + code, lambda code=code: RelayPlan(code, 9, 17, 1).packets(0, payload)
        for symbols, count in ((1, 1024), (1, 2**31), (2**31, 2**31), (256, 1024)):
            yield (
                f"packets {code} {symbols} {count}",
                lambda code=code, symbols=symbols, count=count: RelayPlan(code, symbols, count, 1).packets(0, payload),
            )
    for value in HOSTILE:
        yield f"carriers {value}", lambda value=value: LowRankPlan.of({"a": (200, 150), "b": (150,)}, value)


def main(name: str) -> None:
    """Run all cases of a kind with :data:`ROOM` more bytes than the process has."""
    importlib.import_module("numba")
    cases = list({"codecs": codecs, "gossip": gossip, "plans": plans}[name]())
    # Once without a limit: what is imported and compiled on the way is nobody's cost.
    for _, use in [case for case in cases if case[0].startswith(AS_IT_IS)]:
        use()
    with open("/proc/self/statm") as file:
        has = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has + ROOM, has + ROOM))
    assert attempt(lambda: np.ones(2 * ROOM, np.uint8)).startswith("MemoryError"), "the limit holds"
    for what, use in cases:
        if ended := attempt(use):
            print(f"{what}: {ended}")
    print(f"{len(cases)} cases")


def attempt(use: Callable[[], Any]) -> str:
    """Return how a case ended; empty where it was done or refused."""
    try:
        use()
    except FedcompError:
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return ""


if __name__ == "__main__":
    main(sys.argv[1])
