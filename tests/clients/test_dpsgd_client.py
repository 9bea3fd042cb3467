"""A client that trains with DP-SGD: its ledger outlives the round, and nothing leaves that was not paid for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedcomp.clients.client import client as fc_client
from fedcomp.clients.edge import LEDGER_FILE, OWN_BUDGET, STATE_FOLDER
from fedcomp.clients.private.dpsgd import Trainee, record_dp, train_privately
from fedcomp.errors import ConfigError
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.records import to_record
from fedcomp.privacy.accounting import compose
from fedcomp.privacy.dpsgd import PoissonLoader
from fedcomp.privacy.errors import BudgetExceeded, PrivacyError, PrivacyLedgerError, Unbounded
from fedcomp.privacy.journal import from_bytes
from fedcomp.privacy.ledger import PrivacyLedger
from fedcomp.rng import Key
from fedcomp.systems.private.record import Account, DpSgdPlan
from fedcomp.tasks import get_task
from fedcomp.tasks.base import ClientData, EmptyPartition

PLAN = DpSgdPlan(noise_multiplier=1.5, rate=0.1, steps=3, delta=1e-5, insecure=True)
KEPT = "record-dp.ledger"


def context(**node_config: Any) -> Context:
    return Context(1, 2, {"partition-id": 0, "num-partitions": 4, **node_config}, RecordDict(), {})


class Client:
    """One partition of digits, a context, and the model of the moment."""

    def __init__(self, task: Any = None, plan: DpSgdPlan = PLAN, **node_config: Any) -> None:
        self.task = get_task("digits", hidden="16") if task is None else task
        self.plan = plan
        self.context = context(**node_config)
        self.data = self.task.client(0, 4)
        self.round = 0
        self.kept: dict[str, bytes] = {}

    def train(self, **changes: Any) -> tuple[Account, bytes]:
        """Return the account, and the bytes of the trained model."""
        self.round += 1
        model = self.task.model(0)
        options = {"lr": 0.5, "key": Key(3, "batches", self.round), **changes}
        trainee = Trainee("arrays", model, self.task, self.data, **options)
        account, keep = train_privately(trainee, self.plan, self.context, self.kept)
        self.kept |= keep
        return account, b"".join(p.detach().numpy().tobytes() for p in model.parameters())

    @property
    def state(self) -> bytes:
        return self.kept[KEPT]

    def ledger(self) -> PrivacyLedger:
        """Return what was kept."""
        header, entries, _ = from_bytes(self.state)
        del header["after"]
        ledger = self.plan.ledger(len(self.data))
        ledger.load_state_dict({"header": header, "file": False, "entries": entries})
        return ledger


def epsilon(steps: int, plan: DpSgdPlan = PLAN) -> float:
    return compose([plan.event(1000)] * steps, plan.delta).epsilon


@pytest.mark.slow
def test_the_ledger_outlives_the_round_and_does_not_grow_with_it():
    client = Client()
    first, _ = client.train()
    second, _ = client.train()
    size = len(client.state)
    third, _ = client.train()
    assert [a.total for a in (first, second, third)] == [3, 6, 9]
    assert {a.now for a in (first, second, third)} == {3}
    assert len({a.run for a in (first, second, third)}) == 1
    assert len(client.state) == size
    # What is kept says which ledger it continues, so that its name stands for all of the past.
    header, _, last = from_bytes(client.state)
    assert (header["after"], last) == (second.head, third.head)
    assert len({a.head for a in (first, second, third)}) == 3
    ledger = client.ledger()
    # An accountant that begins anew in every round would say a third of the steps.
    assert ledger.epsilon() == pytest.approx(epsilon(9))
    assert ledger.epsilon() > epsilon(3) + 0.1


@pytest.mark.parametrize("kind", [ValueError, Unbounded])
def test_a9_a_training_that_breaks_leaves_nothing_and_costs_nothing(kind, monkeypatch):
    client = Client()
    client.train()
    before = client.state
    client.plan = dataclasses.replace(PLAN, options={})

    def broken(*args: Any) -> torch.Tensor:
        raise kind("record 7 says: secret diagnosis")

    monkeypatch.setattr(client.task, "objective", broken)
    with pytest.raises(PrivacyError) as error:
        client.train()
    # Flower sends the text of an exception to the server.
    assert "secret" not in str(error.value)
    assert type(error.value) is PrivacyError
    assert error.value.__suppress_context__
    assert client.state == before


def test_what_forward_passes_write_into_a_model_does_not_leave(monkeypatch):
    class Watching(torch.nn.Module):
        def __init__(self, inside: torch.nn.Module) -> None:
            super().__init__()
            self.inside = inside
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, records: torch.Tensor) -> torch.Tensor:
            self.seen += records.detach().sum()
            return self.inside(records)

    client = Client()
    model = Watching(client.task.model(0))
    before = [p.detach().clone() for p in model.parameters()]
    monkeypatch.setattr(client.task, "model", lambda seed: model)
    client.train()
    assert float(model.seen) == 0.0
    # And the parameters are the trained ones.
    assert any((p != b).any() for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.slow
def test_a_budget_is_asked_before_a_record_is_looked_at(monkeypatch):
    allowed = epsilon(6) + 1e-6
    client = Client(plan=dataclasses.replace(PLAN, budget=allowed))
    client.train()
    client.train()
    before = client.state

    def looked(self: PoissonLoader) -> Any:
        raise AssertionError("a batch was drawn")

    monkeypatch.setattr(PoissonLoader, "__iter__", looked)
    model = client.task.model(0)
    values = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(BudgetExceeded, match="3 more steps would cross this client's budget"):
        train_privately(
            Trainee("arrays", model, client.task, client.data, Key(0), 0.5), client.plan, client.context, client.kept
        )
    assert all(torch.equal(a, b) for a, b in zip(values, model.parameters(), strict=True))
    assert client.state == before


@pytest.mark.slow
def test_a_budget_is_asked_for_what_a_step_of_the_method_costs(monkeypatch):
    """On the few coordinates that a mask keeps the grid is coarser than on all, and a step costs a little more."""
    plan = dataclasses.replace(PLAN, method="random-mask", options={"keep": 0.01})
    client = Client(plan=plan)
    client.train()
    spent = client.ledger().epsilon()
    size = sum(p.numel() for p in client.task.model(0).parameters())
    whole = compose([plan.event(size)] * plan.steps, plan.delta).epsilon
    assert whole < spent
    monkeypatch.setattr(PoissonLoader, "__iter__", lambda self: pytest.fail("a batch was drawn"))
    with pytest.raises(BudgetExceeded, match="3 more steps"):
        Client(plan=dataclasses.replace(plan, budget=(whole + spent) / 2)).train()


def test_noise_is_drawn_anew_unless_a_seed_is_asked_for_by_its_full_name():
    secure = dataclasses.replace(PLAN, insecure=False)
    assert Client().train()[1] == Client().train()[1]
    assert Client(plan=secure).train()[1] != Client(plan=secure).train()[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options"), [("topagg", {"k": 50}), ("random-mask", {"keep": 0.5}), ("lsg", {"keep": 0.5, "rank": 2})]
)
def test_every_method_pays_the_same_for_its_steps(method, options):
    client = Client(plan=dataclasses.replace(PLAN, method=method, options=options))
    account, trained = client.train()
    assert (account.now, account.total) == (3, 3)
    values = np.frombuffer(trained, np.float32)
    assert np.isfinite(values).all()
    ledger = client.ledger()
    # Beside the steps, failures of sampling tables and the lattice of the votes (noise of 10.6 steps) are paid for.
    assert ledger.epsilon() == pytest.approx(epsilon(3), rel=3e-3)


def test_delta_is_below_one_over_the_clients_own_records():
    client = Client()
    client.plan = dataclasses.replace(PLAN, delta=1.0 / len(client.data))
    with pytest.raises(ConfigError, match="not below"):
        client.train()


def test_a_client_without_records_says_so():
    client = Client()
    client.data = ClientData(client.data.x[:0], client.data.y[:0])
    with pytest.raises(EmptyPartition):
        client.train()


def test_a_ledger_that_cannot_be_read_is_not_begun_anew():
    client = Client()
    client.train()
    whole = client.state
    for damaged in (whole[:-1], whole[:-40], whole + b"x", whole.replace(b'"times":3', b'"times":1'), b"{", b"\n"):
        client.kept[KEPT] = damaged
        with pytest.raises(PrivacyLedgerError, match="what it spent is unknown"):
            client.train()
    client.kept[KEPT] = whole[:1]
    with pytest.raises(PrivacyLedgerError, match="what it spent is unknown"):
        client.train()


def test_another_promise_does_not_continue_the_ledger():
    client = Client()
    client.train()
    client.plan = dataclasses.replace(PLAN, rate=0.2)
    with pytest.raises(PrivacyLedgerError, match="sampling"):
        client.train()


def test_a_file_remembers_what_a_restarted_node_forgets(tmp_path: Path):
    path = str(tmp_path / "node" / "ledger.jsonl")
    client = Client(**{LEDGER_FILE: path})
    first, _ = client.train()
    assert not client.kept
    restarted = Client(**{LEDGER_FILE: path})
    second, _ = restarted.train()
    assert (first.run, first.total, second.total) == (second.run, 3, 6)
    with pytest.raises(ConfigError, match="expected an absolute path"):
        Client(**{LEDGER_FILE: "ledger"}).train()


@pytest.mark.slow
def test_a_node_with_a_budget_of_its_own_needs_no_trust_in_the_servers_plan(tmp_path: Path):
    own = {"privacy-budget": epsilon(3) + 1e-6, STATE_FOLDER: str(tmp_path)}
    secure = dataclasses.replace(PLAN, insecure=False)
    client = Client(plan=secure, **own)
    client.train()
    with pytest.raises(BudgetExceeded):
        client.train()
    # Flower gives every run a new context, and a restarted node too: the budget is that of the node.
    with pytest.raises(BudgetExceeded, match="would cross"):
        Client(plan=secure, **own).train()
    # A server that plans no noise at all, or noise that it can take off again.
    with pytest.raises(BudgetExceeded):
        Client(plan=dataclasses.replace(secure, noise_multiplier=0.0), **own).train()
    with pytest.raises(ConfigError, match="from a seed"):
        Client(plan=PLAN, **own).train()
    with pytest.raises(ConfigError, match="expected an epsilon above 0"):
        Client(plan=secure, **{"privacy-budget": 0.0}).train()


def test_a_node_with_a_budget_of_its_own_decides_on_noise_and_delta(tmp_path: Path):
    own, secure = {OWN_BUDGET: 3.0, STATE_FOLDER: str(tmp_path)}, dataclasses.replace(PLAN, insecure=False)
    with pytest.raises(ConfigError, match="floating-point noise"):
        Client(plan=dataclasses.replace(secure, noise="gaussian"), **own).train()
    loose = Client(plan=dataclasses.replace(secure, delta=0.9 / 400), **own)
    loose.train()
    ledger = tmp_path / "0.privacy.jsonl"
    assert json.loads(ledger.read_text().splitlines()[1])["delta"] == 1e-5
    for delta, other in ((1e-6, 1e-6), (1e-3, 1e-5)):
        client = Client(plan=secure, **{**own, "privacy-delta": delta, STATE_FOLDER: str(tmp_path / str(delta))})
        client.train()
        text = (tmp_path / str(delta) / "0.privacy.jsonl").read_text()
        assert json.loads(text.splitlines()[1])["delta"] == other
    for wrong in (0.0, 1.0, True, "1e-5"):
        with pytest.raises(ConfigError, match="expected a probability"):
            Client(plan=secure, **{**own, "privacy-delta": wrong}).train()


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_budget_of_its_own_guards_also_an_app_of_ones_own(kind):
    inner = ClientApp()

    def looked(msg: Message, context: Context) -> Message:
        raise AssertionError("the records were looked at")

    inner.train()(looked)
    inner.evaluate()(looked)
    around = fc_client(inner, record_dp(lambda msg, ctx: looked(msg, ctx)))  # type: ignore[arg-type, return-value]
    with InProcessGrid(around, 1, node_config={OWN_BUDGET: 1.0}) as grid:
        content = RecordDict({"arrays": to_record({"w": np.zeros(3, np.float32)}), "config": ConfigRecord({})})
        (reply,) = grid.send_and_receive([Message(content, grid.get_node_ids()[0], kind)])
    assert "it trains with noise (record-dp), and uses its records for nothing else" in reply.error.reason


@pytest.mark.slow
def test_a_budget_without_a_place_that_outlives_a_run_is_refused_with_what_to_add(tmp_path: Path):
    own, secure = {OWN_BUDGET: epsilon(6) + 1e-6}, dataclasses.replace(PLAN, insecure=False)
    with pytest.raises(ConfigError, match="start it with --privacy-ledger FILE or --state-dir DIR"):
        Client(plan=secure, **own).train()
    for place in ({LEDGER_FILE: str(tmp_path / "spent.jsonl")}, {STATE_FOLDER: str(tmp_path / "state")}):
        assert [Client(plan=secure, **own, **place).train()[0].total for _ in range(2)] == [3, 6]
        with pytest.raises(BudgetExceeded):
            Client(plan=secure, **own, **place).train()
        # In a simulation every partition has its file.
        other = Client(plan=secure, **own, **place)
        other.context.node_config["partition-id"] = 1
        if STATE_FOLDER in place:
            assert other.train()[0].total == 3


@pytest.mark.slow
def test_what_was_spent_before_a_node_had_a_file_stays_spent(tmp_path: Path):
    client = Client()
    client.train()
    client.context.node_config[LEDGER_FILE] = str(tmp_path / "spent.jsonl")
    assert client.train()[0].total == 6
    assert not client.kept[KEPT]
    assert Client(**{LEDGER_FILE: str(tmp_path / "spent.jsonl")}).train()[0].total == 9
