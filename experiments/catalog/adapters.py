"""Adapters of a small GPT on unlike clients: which half travels, in which codec, and whether clients keep Adam."""

from __future__ import annotations

from operator import gt
from typing import TYPE_CHECKING, Any, Final

from fedcomp.experiments.experiment import Experiment, Studied
from fedcomp.experiments.options import Option
from fedcomp.experiments.tables import by_messages
from fedcomp.rules import Int

if TYPE_CHECKING:
    from fedcomp.experiments.spec import RunSpec
    from fedcomp.experiments.tables import Found, Training

_HALF: Final = "adapters=true first_model_at_nodes=true task.frozen_a=true task.rank=16"
_BOTH: Final = "first_model_at_nodes=true task.rank=8"
_ONE_BIT: Final = "codec.bits=1 downlink=eden downlink.bits=1 downlink.scale=least"
_TOPK_DOWN: Final = "downlink=topk downlink.density=0.1 downlink.values=q2"
_TOPK: Final = f"feedback=true codec.density=0.05 codec.values=q2 {_TOPK_DOWN}"
_EIGHT: Final = "feedback=false codec.density=1.0 codec.values=q8 downlink=topk downlink.density=1.0 downlink.values=q8"
_QUICK: Final = "rounds=2 clients=4 seeds=1 steps=0.01 task.hidden=16 task.layers=1 task.pretrained=20 task.speakers=4"
_KEPT: Final = "task.kept=true"
_FEW: Final = "fraction=0.25"

LORA: Final = "LoRA FedAvg"
FEW: Final = "2 of 8: LoRA FedAvg"
FEW_TOPK: Final = "2 of 8: frozen A, top-k"

ROWS: Final = {
    LORA: "fedavg task.rank=8",
    "LoRA FedAvg, Adam kept": f"fedavg task.rank=8 {_KEPT}",
    "frozen A": f"identity adapters=true task.frozen_a=true task.rank=16 {_KEPT}",
    "frozen A, 1 bit": f"eden {_HALF} {_ONE_BIT} {_KEPT}",
    "frozen A, top-k": f"topk {_HALF} {_TOPK} {_KEPT}",
    "both halves, 1 bit": f"eden {_BOTH} {_ONE_BIT} {_KEPT}",
    "both halves, top-k": f"topk {_BOTH} {_TOPK} {_KEPT}",
    "both halves, 8 bits": f"topk {_BOTH} {_EIGHT} {_KEPT}",
    FEW: f"fedavg task.rank=8 {_FEW}",
    "2 of 8: frozen A, 1 bit": f"eden {_HALF} {_ONE_BIT} {_FEW}",
    "2 of 8: frozen A, 1 bit up, top-k down": f"eden {_HALF} codec.bits=1 {_TOPK_DOWN} {_FEW}",
    FEW_TOPK: f"topk {_HALF} {_TOPK} {_FEW}",
}
"""By label; a row that names a codec compresses both directions."""

_COLUMNS: Final = {name: name for name in ("step size", "uplink bytes", "downlink bytes")}
WORSE: Final = "seeds with a larger loss than {}"

_CLAIMS: Final = f"""
    frozen A, 1 bit | times fewer both ways | >= 30.0 | gate: goal: 32 bits against one, and what a frame costs besides
    frozen A, 1 bit | {WORSE.format(LORA)}  | == 0    | gate: goal: no worse than what apps do today, in any seed
    frozen A, top-k | times fewer both ways | >= 50.0 | gate: goal: 5 % of the values up and 10 % down, in two bits
    frozen A, top-k | {WORSE.format(LORA)}  | == 0    | goal: no worse either, with all clients in every round
    2 of 8: frozen A, 1 bit | {WORSE.format(FEW_TOPK)} | == 0 | gate: goal: memories wait at clients that seldom return
"""


def train(spec: RunSpec, training: Training) -> dict[str, Any]:
    """Train a row by messages; it is judged by the loss on held-out text, the mean over clients."""
    found = by_messages(spec, training)
    return found | {"score": -found["loss"]}


def fewer(found: Found, row: str) -> float:
    """Return how many times fewer bytes a row sends than LoRA FedAvg with as many clients in a round."""
    other = FEW if row.startswith("2 of 8") else LORA
    return round(found.ratio(row, "uplink", "downlink", other=other), 1)


def study(found: Found) -> Studied:
    """Count the seeds in which a row ends above another one."""
    losses = {row: found.each(row, "loss") for row in found.rows}
    above = {
        (row, WORSE.format(to)): sum(map(gt, losses[row], losses[to])) for row in losses for to in (LORA, FEW_TOPK)
    }
    return Studied(above)


EXPERIMENT = Experiment(
    name="adapters",
    question="How many bytes does federated tuning of adapters take, both ways, at the loss of plain LoRA FedAvg?",
    task="dialects",
    rows=ROWS,
    each="task.optimizer=adamw evaluate_every=4",
    train=train,
    tune={"lr": "steps"},
    tunes_without_messages=False,
    options={
        "seeds": 3,
        "workers": 1,
        "steps": "0.005,0.01,0.02,0.04",
        "batch_size": 2,
        "max_steps": 5,
        "task.hidden": "64",
        "task.layers": Option(2, Int(1), "blocks of the transformer"),
        "task.pretrained": Option(400, Int(0), "steps of pretraining on the other speakers' text"),
        "task.speakers": Option(8, Int(2), "speakers, as many as clients"),
    },
    title="Loss and bytes",
    columns={**_COLUMNS, "times fewer both ways": fewer, "loss, nats": "loss, ± half its range"},
    study=study,
    claims=_CLAIMS,
    answer=(
        "Frozen A in one bit: {frozen A, 1 bit | times fewer both ways:.1f} times fewer bytes both ways, loss "
        "{frozen A, 1 bit | final loss:.3f}; in top-k {frozen A, top-k | times fewer both ways:.1f} times, "
        "{frozen A, top-k | final loss:.3f}; LoRA FedAvg {LoRA FedAvg | final loss:.3f}."
    ),
    rounds=20,
    clients=8,
    minutes=9.0,
    quick=tuple(_QUICK.split()),
    notes=(
        "The eight speakers with the most text are the clients, each in a dialect of its own; the base learned the "
        "other speakers' text and knows the first dialect alone. Loss is in nats a character, the mean over the "
        "clients' held-out text. LoRA FedAvg averages both halves of rank 8. Frozen A sends as many values, the half "
        "B of rank 16, and draws A at both ends (FFA-LoRA, Sun, Li, Li, Ding 2024, recalled). A round is five steps "
        "of AdamW; where a row says so, clients keep its moments. Each row takes the step size that does best on "
        "windows before the held-out ones.\n\n"
        "One bit is EDEN without memory. Top-k sends 5 % of the values up with error feedback and 10 % down, in two "
        "bits; eight bits sends all values. Nodes make the first model of a compressed row from the seed, which costs "
        "a digest; a client that was not drawn for some rounds gets all differences it lacks. Sampled rows compare "
        "with LoRA FedAvg of as many clients. Without the plays' file drawn speakers stand in: same bytes, other "
        "losses."
    ),
)
