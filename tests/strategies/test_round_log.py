"""What a user reads of a run without configuring anything: one line a round, every reason, an error when all failed."""

from __future__ import annotations

import io
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import FedMedian
from private_runs import forged
from toy import ONE, by_partition, client_app, fedavg, model, sent_frame, stack, training, update

from fedcomp.clients.compressed import compression
from fedcomp.clients.private.mod import private
from fedcomp.codecs import Identity, RandomK, ScaleCom, TopK
from fedcomp.errors import NoUsableReply
from fedcomp.experiments import engines
from fedcomp.experiments.spec import RunSpec
from fedcomp.flower.faults import ScriptedFaults
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.report import Report
from fedcomp.layout import SmallDense
from fedcomp.privacy.sampling import Sampling
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.private.dp_fedavg import DpFedAvg
from fedcomp.strategies.round_log import RoundLog, require_learnt, require_usable
from fedcomp.strategies.round_log import line as line_of
from fedcomp.strategies.shared_support import SharedSupport


class Shown:
    """What Flower's console handler wrote, without colours."""

    def __init__(self, stream: io.StringIO) -> None:
        self._stream = stream

    def lines(self, part: str) -> list[str]:
        text = re.sub("\x1b\\[[0-9]+m", "", self._stream.getvalue())
        return [line for line in text.splitlines() if part in line]

    def warnings(self, part: str) -> list[str]:
        return [line for line in self.lines(part) if line.startswith("WARNING")]


@pytest.fixture
def shown() -> Iterator[Shown]:
    (handler,) = logging.getLogger("flwr").handlers
    assert isinstance(handler, logging.StreamHandler)
    stream = io.StringIO()
    before = handler.setStream(stream)
    yield Shown(stream)
    handler.setStream(before)


def run(strategy, app=None, *, nodes=4, rounds=2, ledger=None, initial=None, **options):
    app = client_app([compression()]) if app is None else app
    grid = MeteredGrid(InProcessGrid(app, nodes, seed=4, **options), TrafficLedger() if ledger is None else ledger)
    return strategy.start(grid, initial or model(), num_rounds=rounds, timeout=9)


def failing(rounds, partitions, reason="disk full"):
    """An app with the mod whose ``partitions`` raise in ``rounds``."""
    honest = client_app([compression()])

    def app(msg: Message, context: Context) -> Message:
        config: ConfigRecord = next(iter(msg.content.config_records.values()))
        if config["server-round"] in rounds and context.node_config["partition-id"] in partitions:
            raise RuntimeError(reason)
        return honest(msg, context)

    return app


@pytest.mark.slow
def test_b1_a_round_is_one_line_with_the_bytes_of_the_ledger(shown: Shown) -> None:
    ledger = TrafficLedger()
    strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(0.05), policy=SmallDense())
    run(strategy, nodes=10, rounds=3, ledger=ledger)
    lines = shown.lines("Compressed(FedAvg), round")
    assert len(lines) == 3
    for number, line in enumerate(lines, 1):
        report = strategy.reports[number]
        sent = ledger.total("payload", direction="up", round=number)
        assert line.startswith("INFO")
        ratio = 10 * 4 * stack(model()).size / sent
        assert f"10 asked, 10 used, training replies {sent:,} bytes, {ratio:.3g}x fewer than models" in line
        assert f"round {number}: " in line
        assert (report.used, report.payload_bytes, report.frame_bytes) == (10, sent, sent)
        dense = report.tensor_bytes["the dense rest"]
        assert report.dense_bytes == dense > 10 * 4 * 12
        assert f"{100 * dense / sent:.0f} % of the frames dense" in line


def test_b1_values_that_travel_as_they_are_count_as_dense() -> None:
    counter = Compressed(fedavg(fraction_evaluate=0.0), TopK(0.05), policy=SmallDense())
    run(counter, nodes=2, rounds=1, initial=model(counter=True))
    report = counter.reports[1]
    assert report.dense_bytes > report.tensor_bytes["the dense rest"]
    assert report.frame_bytes == report.payload_bytes
    lossless = Compressed(fedavg(fraction_evaluate=0.0), Identity())
    run(lossless, rounds=1)
    assert lossless.reports[1].dense_bytes == lossless.reports[1].frame_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("inner", [fedavg, lambda **o: FedMedian(**ONE, **o)], ids=["mean", "dense"])
def test_b1_flowers_own_line_counts_clients_not_their_mean(shown: Shown, inner) -> None:
    """Ten clients read "Received 1 results and 0 failures" before: nine losses to whoever knows Flower."""
    strategy = Compressed(inner(fraction_evaluate=0.0), TopK(0.05))
    run(strategy, failing({2}, {3, 5}), nodes=10, rounds=2, fault=ScriptedFaults({(2, 7): "silent"}))
    first, second = shown.lines("aggregate_train: Received")
    assert "Received 10 results and 0 failures" in first
    assert "Received 7 results and 2 failures" in second
    assert "10 asked, 7 used, 2 refused (2 x error 2: " in shown.lines("round 2:")[-1]
    assert "disk full" in shown.lines("round 2:")[-1]
    assert ", 1 without a reply, " in shown.lines("round 2:")[-1]
    assert not logging.getLogger("flwr").filters


@pytest.mark.slow
def test_b1_clients_without_the_mod_are_named_once_and_counted(shown: Shown) -> None:
    plain, modded = client_app(), client_app([compression()])
    either = by_partition(lambda partition: plain if partition == 2 else modded)
    strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(0.05))
    run(strategy, either, rounds=12)
    (node,) = strategy.reports[1].without_mod
    first, tenth = shown.warnings("write app = ClientApp(mods=[fc.compression()])")
    assert f"(node {node} of partition 2)" in first
    assert "round 1:" in first
    assert "round 10:" in tenth
    assert "for the 10th time" in tenth
    lines = shown.lines("4 asked, 4 used (1 sent full models)")
    assert len(lines) == 12


def test_b1_a_client_that_may_not_use_the_codec_says_so_in_the_log(shown: Shown) -> None:
    strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(0.05))
    run(strategy, client_app([compression(accept=["qsgd"])]))
    (warning,) = shown.warnings("full model instead of a frame")
    assert "this client accepts the codecs ['pair', 'qsgd']" in warning
    assert "(4 nodes: " in warning
    assert strategy.reports[1].without_mod == []


@pytest.mark.parametrize("inner", [fedavg, lambda **o: FedMedian(**ONE, **o)], ids=["mean", "dense"])
def test_b1_a_first_round_without_a_usable_reply_is_an_error_with_the_reasons(inner) -> None:
    strategy = Compressed(inner(fraction_evaluate=0.0), TopK(0.05))
    with pytest.raises(NoUsableReply, match=r"4 clients were asked.*3 x error 2:.*disk full.*1 of 4 without a reply"):
        run(strategy, failing({1}, {0, 1, 2}), fault=ScriptedFaults({(1, 3): "silent"}))
    assert len(strategy.reports[1].refused) == 3


def test_a_node_goes_by_its_partition_too_where_that_is_configured(caplog: pytest.LogCaptureFixture) -> None:
    report, drawn = Report(1, asked=9), (1 << 40) + 5
    for node in (11, drawn, 12):
        report.refuse(node, "late")
    RoundLog("S").conclude(report, {11: 3, drawn: 5})
    (warning,) = [text for text in caplog.messages if "reply not used" in text]
    assert warning.endswith(f": late (3 nodes: 11 of partition 3, {drawn}, 12)")


def test_an_error_of_a_run_groups_reasons_that_differ_in_numbers_alone() -> None:
    """Of thirty clients each has another loss: their errors are one, and do not hide the other one."""
    for require in (require_usable, lambda report: require_learnt({1: report})):
        report = Report(1, asked=30)
        for node in range(1, 30):
            report.refuse(node, f"loss {node / 7} is too large")
        report.refuse(30, "disk full")
        with pytest.raises(NoUsableReply) as error:
            require(report)
        assert f": 29 x loss {1 / 7} is too large; disk full" in str(error.value)
        assert str(error.value).count("too large") == 1


def test_of_what_an_app_raises_the_log_has_the_users_frames_and_all_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    honest = client_app([compression()])

    def load(msg: Message) -> None:
        try:
            {}["missing"]
        except KeyError as error:
            raise RuntimeError("no data here") from error

    @honest.query("other")
    def other(msg: Message, context: Context) -> Message:
        load(msg)
        return msg

    with caplog.at_level(logging.DEBUG, "flwr.fedcomp"), InProcessGrid(honest, 1) as over:
        (node,) = over.get_node_ids()
        over.send_and_receive([Message(RecordDict(), node, "query.other")])
    short = next(r for r in caplog.records if r.levelno == logging.WARNING)
    first, cause, outer, inner = short.getMessage().split("\n    ")
    assert first == "client of partition 0 raised RuntimeError: no data here"
    assert cause == "caused by KeyError: 'missing'"
    assert "in other: load(msg)" in outer
    assert f"at {__file__}:" in inner
    assert "in load: raise RuntimeError" in inner
    assert short.exc_info is None
    whole = next(r for r in caplog.records if r.levelno == logging.DEBUG and r.exc_info)
    assert "Traceback" in logging.Formatter().format(whole)
    assert "clients/kept.py" in logging.Formatter().format(whole)


def test_reasons_in_a_rounds_line_end_with_a_word() -> None:
    report = Report(1, asked=1)
    reason = "NonFiniteUpdate: " + "tensor 'a' of the update holds non-finite values; " * 4
    report.refuse(7, reason)
    cut = line_of(report).partition("refused (")[2].removesuffix(")")
    assert cut.endswith("...")
    assert len(cut) <= 100
    assert reason.startswith(cut.removesuffix("...") + " ")


def test_b1_a_later_round_without_a_usable_reply_is_a_warning(shown: Shown) -> None:
    strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(0.05))
    result = run(strategy, failing({2}, {0, 1, 2, 3}), rounds=3)
    assert [report.used for report in strategy.reports.values()] == [4, 0, 4]
    assert len(result.arrays) == 2
    assert "error 2" in shown.warnings("reply not used")[0]
    assert "(4 nodes: " in shown.warnings("reply not used")[0]
    assert len(shown.warnings("round 2: no update was used, the model is unchanged")) == 1


def test_b1_a_resumed_run_is_not_in_its_first_round() -> None:
    first = Compressed(fedavg(fraction_evaluate=0.0), TopK(0.05))
    run(first, rounds=1)
    resumed = Compressed(fedavg(fraction_evaluate=0.0), TopK(0.05))
    resumed.load_state_dict(first.state_dict())
    grid = InProcessGrid(failing({2}, {0, 1}), 2, seed=4)
    replies = grid.send_and_receive(resumed.configure_train(2, model(), ConfigRecord(), grid), timeout=9)
    assert resumed.aggregate_train(2, replies) == (None, None)


def test_b1_nobody_asked_is_no_failure(shown: Shown) -> None:
    run(Compressed(fedavg(fraction_evaluate=0.0, fraction_train=0.0), TopK(0.05)), rounds=1)
    assert shown.lines("round 1: no client was asked")


def test_b1_failed_evaluations_are_in_the_log(shown: Shown) -> None:
    honest = client_app([compression()])

    def app(msg: Message, context: Context) -> Message:
        if msg.metadata.message_type == "evaluate" and context.node_config["partition-id"] == 1:
            raise RuntimeError("no test set")
        return honest(msg, context)

    run(Compressed(fedavg(), TopK(0.05)), app, rounds=1)
    (warning,) = shown.warnings("reply not used")
    assert "no test set" in warning


def test_b1_a_log_of_a_thousand_rounds_stays_readable(shown: Shown) -> None:
    """One failing client: four warnings. One that never says the same twice: not one for each round either."""
    log = RoundLog("S")
    for number in range(1, 1001):
        report = Report(number, asked=3, used=1, compressed=1)
        report.refuse(11, f"update answers message {number}, expected {number + 1}: a stale reply")
        report.refuse(12, "".join(chr(97 + int(digit)) for digit in str(number)))
        log.conclude(report)
    assert len(shown.lines("3 asked, 1 used, 2 refused")) == 1000
    assert [line.split(",")[1].split(":")[0] for line in shown.warnings("(node 11)")] == [
        " round 1",
        " round 10",
        " round 100",
        " round 1000",
    ]
    assert len(shown.warnings("(node 12)")) == 7 + 4


def test_b1_what_a_client_writes_stays_on_one_line(shown: Shown) -> None:
    log = RoundLog("S")
    report = Report(1, asked=2, used=1, compressed=1)
    report.refuse(7, "no\nWARNING :   the server was told to stop\x1b[2J")
    log.conclude(report)
    assert not [line for line in shown.lines("told to stop") if "round 1" not in line]
    assert "\x1b[2J" not in shown._stream.getvalue()


@pytest.mark.slow
def test_b1_a_round_whose_participants_are_secret_says_nothing_of_them(shown: Shown) -> None:
    """Poisson sampling is accounted for as if nobody knew who took part."""
    options = {"noise_multiplier": 1.0, "population": 100, "delta": 1e-5, "insecure_deterministic": True}
    strategy = DpFedAvg(fedavg(fraction_evaluate=0.0), clip=1.0, sampling=Sampling("poisson", rate=0.5), **options)
    pair = Compressed(strategy, TopK(0.05))
    honest = client_app([compression(), private()])
    asked: Counter[int] = Counter()

    def app(msg: Message, context: Context) -> Message:
        asked[int(next(iter(msg.content.config_records.values()))["server-round"])] += 1  # type: ignore[arg-type]
        return honest(msg, context)

    run(pair, app, nodes=6, rounds=6)
    ours = [line for line in shown.lines("round ") if "Compressed" in line]
    assert len(ours) == 6
    assert len({re.sub("round [0-9]", "", line) for line in ours}) == 1
    assert len({asked[number] for number in range(1, 7)}) > 1, "the rounds were of one size anyway"
    assert not shown.lines("Received 1 results")


def test_b1_a_private_round_that_everyone_takes_part_in_counts(shown: Shown) -> None:
    strategy = DpFedAvg(fedavg(fraction_evaluate=0.0), clip=1.0, noise_multiplier=1.0, population=100)
    run(Compressed(strategy, TopK(0.05)), client_app([compression(), private()]), rounds=1)
    assert shown.lines("round 1: 4 asked, 4 used")


def test_b1_bytes_and_ratio_of_a_shared_support_are_those_of_both_exchanges(shown: Shown) -> None:
    ledger = TrafficLedger()
    strategy = SharedSupport(ScaleCom(density=0.05), fraction_evaluate=0.0)
    run(strategy, client_app([compression()]), rounds=1, ledger=ledger)
    report = strategy.reports[1]
    assert report.payload_bytes == ledger.total("payload", direction="up") > 0
    assert report.ratio == 4 * 4 * stack(model()).size / report.payload_bytes
    assert shown.lines(
        f"4 used, training replies {report.payload_bytes:,} bytes, {report.ratio:.3g}x fewer than models"
    )


# What a round's report says beside who replied: gradient build-up, bytes per tensor, memory ratios.

INNER = {"mean": lambda: fedavg(fraction_evaluate=0.0), "dense": lambda: FedMedian(**ONE, fraction_evaluate=0.0)}


def noting(frames: list[bytes]):
    """Return the toy app, of which every frame that it sends is noted."""
    return forged(client_app([compression()]), lambda content: frames.append(sent_frame(content)))


@pytest.mark.parametrize("inner", INNER)
def test_changed_is_the_union_of_what_was_sent(inner: str) -> None:
    """Top-k of each client: the union of four supports; a shared random support: one. The dense rest does not count."""
    strategy = Compressed(INNER[inner](), TopK(0.05), feedback=False, policy=SmallDense())
    run(strategy, rounds=1)
    chosen = [set(np.argsort(-np.abs(update(1, p, (1200,))), kind="stable")[:60].tolist()) for p in range(4)]
    union = set().union(*chosen)
    assert 120 < len(union) <= 240, "the clients agree about little"
    assert strategy.reports[1].changed == len(union)
    shared = Compressed(INNER[inner](), RandomK(0.05), feedback=False, policy=SmallDense())
    run(shared, rounds=1)
    assert 60 - 4 <= shared.reports[1].changed <= 60


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("mods", [True, False])
def test_changed_of_whole_models_is_counted_against_the_model(inner: str, mods: bool) -> None:
    """A lossless codec, and clients without the mod, send models instead of changes."""

    def step(arrays, number, partition):
        weight = arrays["weight"].copy()
        weight[5 * partition : 5 * partition + 10] += 1.0  # ten rows of 30; the next client's overlap by five
        return {**arrays, "weight": weight}

    strategy = Compressed(INNER[inner](), Identity() if mods else TopK(0.05))
    run(strategy, training(step, [compression()] if mods else []), nodes=2, rounds=1, initial=model(3.0))
    assert (strategy.reports[1].compressed, strategy.reports[1].plain) == ((2, 0) if mods else (0, 2))
    assert strategy.reports[1].changed == 15 * 30


@pytest.mark.slow
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize(
    ("scope", "names"), [("global", ["the compressed part", "the dense rest"]), ("layer", ["weight", "the dense rest"])]
)
def test_bytes_per_tensor_add_up_to_the_frames(inner: str, scope: str, names: list[str]) -> None:
    frames: list[bytes] = []
    strategy = Compressed(INNER[inner](), TopK(0.05, scope=scope), policy=SmallDense())
    run(strategy, noting(frames), rounds=1)
    found = strategy.reports[1].tensor_bytes
    assert list(found) == names
    assert sum(found.values()) == sum(len(f) - 21 for f in frames)  # header, end mark and checksum
    assert found["the dense rest"] == 4 * (48 + 13)
    assert found[names[0]] > 4 * 60 * 4


def test_what_was_refused_is_not_counted() -> None:
    strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(0.05))
    frames: list[bytes] = []
    without = lambda content: RecordDict({k: v for k, v in content.items() if k != "metrics"})  # noqa: E731
    run(strategy, forged(noting(frames), without, 1))
    assert [r.compressed for r in strategy.reports.values()] == [3, 3]
    assert sum(strategy.reports[1].tensor_bytes.values()) < sum(len(f) - 21 for f in frames[:4])
    nobody = Compressed(fedavg(fraction_evaluate=0.0), TopK(0.05))
    run(nobody, client_app())
    assert all(r.tensor_bytes == {} and r.plain == 4 for r in nobody.reports.values())


def declaring(value):
    """Return the toy app, of which one client declares a memory of this ratio."""

    def evil(content: RecordDict) -> None:
        content["fedcomp.node"]["memory"] = value

    return forged(client_app([compression()]), evil, 1)


@pytest.mark.slow
@pytest.mark.parametrize("value", [0.0, 0.5, 1e300])
def test_a_memory_ratio_is_reported_by_node(value: float) -> None:
    strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(0.05))
    run(strategy, declaring(value))
    assert value in strategy.reports[2].memory.values()
    assert not strategy.reports[2].notes


def test_reports_survive_json() -> None:
    strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(0.05, scope="layer"), policy=SmallDense())
    numeric = ArrayRecord({"0": Array(np.zeros((40, 30), np.float32)), "1": Array(np.zeros(12, np.float32))})
    run(strategy, declaring(0.5), initial=numeric)
    for report in strategy.reports.values():
        again = Report.from_json(json.loads(json.dumps(report.to_json())))
        assert again == report
        assert list(again.tensor_bytes) == ["0", "the dense rest"], "names of tensors stay names, also when digits"
        assert all(isinstance(node, int) for node in again.memory)
        assert again.changed > 60
    fresh, state = Compressed(fedavg(fraction_evaluate=0.0), TopK(0.05, scope="layer")), strategy.state_dict()
    fresh.load_state_dict(state)
    assert fresh.reports == strategy.reports


@pytest.mark.slow
def test_a_run_records_them_per_round(tmp_path) -> None:
    settings = {"task.hidden": "32", "codec.density": 0.1, "codec.scope": "layer", "policy.share": 0.01}
    result = engines.run(RunSpec("topk", rounds=2, clients=3, settings=settings), checkpoint=tmp_path / "c")
    again = engines.run(RunSpec("topk", rounds=2, clients=3, settings=settings), checkpoint=tmp_path / "c")
    for record in (*result.rounds[1:], *again.rounds[1:]):
        metrics = json.loads(json.dumps(record.to_json()))["metrics"]
        sizes = metrics["report.tensor_bytes"]
        assert "the dense rest" in sizes
        assert len(sizes) == 4
        assert 0 < sum(sizes.values()) < record.uplink_payload_bytes
        assert 0.1 * 2048 < metrics["report.changed"] < 2410
    assert [r.metrics for r in again] == [r.metrics for r in result]
