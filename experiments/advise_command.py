"""The command ``fedcomp advise``: a table of lines for a model and a link, with the recommendation first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from fedcomp.experiments.advise import advise
from fedcomp.experiments.commands import OK, command_line, invoke


@dataclass(frozen=True)
class Question:
    """What the command line asks; fields as the parameters of :func:`fedcomp.experiments.advise.advise`."""

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]",
            help="State dict: .pt, .npz or .safetensors. Or the folder of a Flower app: its ServerApp is run, as "
            "flwr run does, up to the first model that it sends.",
            show_default=False,
        ),
    ] = None
    parameters: Annotated[
        int | None, typer.Option(metavar="N", help="Number of values, instead of a file.", show_default=False)
    ] = None
    clients: Annotated[int, typer.Option(metavar="N", help="Clients in all.")] = 10
    fraction: Annotated[float, typer.Option(metavar="X", help="Share of the clients that take part in a round.")] = 1.0
    rounds: Annotated[int, typer.Option(metavar="N", help="Rounds of the run.")] = 30
    link: Annotated[str, typer.Option(metavar="LINK", help="A preset, or rates and latency: 1mbit/8mbit@50ms.")] = (
        "10mbit"
    )
    may_lose: Annotated[float, typer.Option(metavar="POINTS", help="Points of accuracy that may be lost.")] = 1.0
    privacy: Annotated[str, typer.Option(metavar="KIND", help="none, hide, client or record.")] = "none"
    vanish: Annotated[bool, typer.Option("--vanish", help="Clients leave for good in the middle of a round.")] = False
    no_server: Annotated[bool, typer.Option("--no-server", help="No server may hold the model.")] = False
    median: Annotated[bool, typer.Option("--median", help="The server looks at single updates.")] = False
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")] = False


APP = command_line(
    Question, "Say which line fits a model (a state dict, or a Flower app) and a link, and what it sends."
)


def main(arguments: Sequence[str] | None = None, program: str = "fedcomp advise") -> int:
    """Read ``arguments``, print the advice and return the exit code."""
    return invoke(APP, program, arguments, _print)


def _print(asked: Question) -> int:
    given = asdict(asked)
    as_json, no_server = given.pop("json"), given.pop("no_server")
    advice = advise(**given, server=not no_server)
    print(json.dumps(asdict(advice), indent=2) if as_json else advice)
    return OK
