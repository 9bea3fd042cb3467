"""How partitions travel ahead of coded gradient descent: through the server, by simulated links, over TCP; counted."""

from __future__ import annotations

import asyncio
import socket
import threading
from functools import partial
from pathlib import Path

import pytest
from linear_toy import PHASE1, SETUP, client, data, metered, run, vector

from fedcomp.clients.edge import PEER_ADDRESS, PEER_STORE
from fedcomp.coding.listener import Listener, ListenerLimits
from fedcomp.coding.spool import Spool
from fedcomp.errors import NoUsableReply
from fedcomp.flower import asks
from fedcomp.flower.faults import Delivery
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import FRAME
from fedcomp.strategies.coded.linear import CodedLinearGD


def parcel(partition: int) -> int:
    """Return the bytes of a partition on a link: header, seal, number of the exchange and name, and what is packed."""
    return 36 + 48 + 9 + len("partition") + 29 + 8 * data(partition).x.size


class Weighed(MeteredGrid):
    """Adds up the packed partitions in all messages and replies."""

    weighed: dict[str, int]

    def send_and_receive(self, messages, **options):
        batch = list(messages)
        replies = super().send_and_receive(batch, **options)
        self.weighed = getattr(self, "weighed", {"down": 0, "up": 0})
        for direction, those in (("down", batch), ("up", replies)):
            for message in those:
                frames = asks.data_in(message.content, FRAME) if message.has_content() else {}
                self.weighed[direction] += sum(len(d) for name, d in frames.items() if name.startswith("partition"))
        return replies


@pytest.mark.slow
@pytest.mark.parametrize("code", ["mds", "balanced"])
def test_set_up_bytes_are_those_handed_over_through_the_hub(code: str) -> None:
    strategy = CodedLinearGD(partitions=6, parities=4, code=code)
    grid = Weighed(InProcessGrid(client(), 10, seed=4), TrafficLedger())
    run(strategy, grid, 3)
    sizes = [29 + 8 * data(j).x.size for j in range(6)]
    transfers = strategy.plan.transfers
    assert len(transfers) == (24 if code == "mds" else 12)
    assert strategy.reports[1].linear.setup_bytes == {"hub-up": grid.weighed["up"], "hub-down": grid.weighed["down"]}
    assert grid.weighed == {"up": sum(sizes), "down": sum(sizes[j] for j, _ in transfers)}
    # The ledger counts them under the set-up's own message type, with labels and rows of the matrix.
    down = grid.ledger.total("payload", message_type=SETUP, direction="down")
    assert down == grid.weighed["down"] + 10 * (6 * 8 + 4)
    up = grid.ledger.total("payload", message_type=SETUP, direction="up")
    # And a digest of each owner's data.
    assert up == grid.weighed["up"] + sum(len(data(j).y) + 4 + 16 for j in range(6))
    assert grid.ledger.total("payload", round=(2, 3), message_type=SETUP) == 0
    # The two phases: one vector and its checksum each way.
    assert grid.ledger.total("payload", round=2, message_type=PHASE1, direction="down") == 10 * (6 * 8 + 4)
    assert grid.ledger.total("payload", round=2, message_type=PHASE1, direction="up") == 10 * (14 * 8 + 4)


def test_parcels_that_came_again_do_not_stay(tmp_path: Path) -> None:
    """The answer to the build gets lost: the next round has everything sent once more to a device that is ready."""
    seen: list[int] = []

    def fault(delivery: Delivery) -> str:
        if delivery.message_type == SETUP and delivery.partition == 4:
            seen.append(delivery.round)
            # Join is the first; a parity is not asked to share.
            return "lost_reply" if len(seen) == 2 else "none"
        return "none"

    strategy = CodedLinearGD(partitions=3, parities=2, code="mds", transport="peers", spool=tmp_path)
    run(strategy, metered(5, fault=fault), 3)
    assert [report.built for report in strategy.reports.sections("linear").values()] == [[0, 1, 2, 3], [4], []]
    assert [report.transfers for report in strategy.reports.sections("linear").values()] == [6, 3, 0]
    assert list(tmp_path.rglob("*.parcel")) == []


class Listeners:
    """TCP listeners in a thread, one for each of some devices; the others have an address where nobody listens."""

    def __init__(self, folder: Path, devices: int, silent: set[int]) -> None:
        self.folder, self.addresses = folder, dict[int, str]()
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        for i in silent:
            with socket.socket() as closed:
                closed.bind(("127.0.0.1", 0))
                self.addresses[i] = f"127.0.0.1:{closed.getsockname()[1]}"

        def note(device: int, address: str) -> None:
            self.addresses[device] = address
            if len(self.addresses) == devices:
                ready.set()

        async def serve() -> None:
            self._all = {i: Listener(Spool(folder / str(i)), ListenerLimits()) for i in set(range(devices)) - silent}
            runs = [each.run("127.0.0.1", 0, partial(note, i)) for i, each in self._all.items()]
            await asyncio.gather(*runs)

        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(serve(),))
        self._thread.start()
        assert ready.wait(100)

    def __enter__(self) -> Listeners:
        return self

    def __exit__(self, *reason: object) -> None:
        for each in self._all.values():
            self._loop.call_soon_threadsafe(each.stop)
        self._thread.join()
        self._loop.close()

    def configuration(self, device: int) -> dict[str, str]:
        return {PEER_ADDRESS: f"tcp://{self.addresses[device]}", PEER_STORE: str(self.folder / str(device))}


@pytest.mark.slow
def test_partitions_go_over_links_and_to_a_device_nobody_reaches_sealed_through_the_server(tmp_path: Path) -> None:
    hub = vector(run(CodedLinearGD(partitions=3, parities=2, code="mds", lr=0.5), metered(5)).arrays)
    with Listeners(tmp_path / "all", 5, set()) as listeners:
        strategy = CodedLinearGD(partitions=3, parities=2, code="mds", lr=0.5, transport="peers")
        grid = metered(5, node_config=listeners.configuration)
        assert vector(run(strategy, grid).arrays).tobytes() == hub.tobytes()
        parcels = sum(parcel(j) for j, _ in strategy.plan.transfers)
        assert strategy.reports[1].linear.setup_bytes == {"peer": parcels}
        assert grid.ledger.total("wire", link="peer") == parcels
    with Listeners(tmp_path / "some", 5, {4}) as listeners:
        strategy = CodedLinearGD(partitions=3, parities=2, code="mds", lr=0.5, transport="peers")
        grid = metered(5, node_config=listeners.configuration)
        result = run(strategy, grid)
        assert vector(result.arrays).tobytes() == hub.tobytes()
        report = strategy.reports[1].linear
        assert (report.transfers, report.built) == (6, [0, 1, 2, 3, 4])
        assert report.setup_bytes == {"peer": sum(parcel(j) for j, i in strategy.plan.transfers if i != 4)}
        assert [note.split()[1] for note in strategy.reports[1].notes] == ["0>4", "1>4", "2>4"]
        up = grid.ledger.total("payload", message_type=SETUP, direction="up")
        assert up > sum(8 * data(j).x.size for j in range(3))


def test_half_an_address_is_refused() -> None:
    strategy = CodedLinearGD(partitions=2, parities=1, transport="peers")
    with pytest.raises(NoUsableReply):
        run(strategy, metered(3, node_config=lambda i: {PEER_ADDRESS: "tcp://127.0.0.1:9"}), 1)
    assert "needs both peer-address and peer-store" in strategy.reports[1].linear.refused[0]
