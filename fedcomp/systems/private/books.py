"""Common state of all private runs: a privacy ledger, a sampler, and sources of randomness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from fedcomp.privacy.entropy import Entropy, make_entropy
from fedcomp.privacy.events import Adjacency, Event
from fedcomp.privacy.ledger import PrivacyLedger
from fedcomp.rng import Key
from fedcomp.systems.private.settings import PrivacySettings

NOT_COVERED: Final = (
    "the choice of hyper-parameters and of the model, and preprocessing of the data",
    "who takes part, and when",
    "a client that reconnects under another node id, which is counted as another client",
    "the server's own reports and logs (who was refused, and why)",
    "the server's evaluation of released models on data of its own",
)
"""What no statement of these rules extends to."""

LENGTHS: Final = "the length of every message, which follows what is in it (pad=False)"
"""What a statement does not extend to where frames are not padded."""


class Books:
    """The ledger, the sampling and the randomness of one private run.

    Parameters
    ----------
    given : PrivacySettings
    unit : str
        Whose contribution is hidden.

    Attributes
    ----------
    privacy : PrivacyLedger
        What was released, and what it cost.
    exhausted : str
        Why nobody is left who could be asked, empty while somebody is.
    """

    def __init__(self, given: PrivacySettings, *, unit: str = "client") -> None:
        self.noise_multiplier, self.noise, self.pad = given.noise_multiplier, given.noise, given.pad
        self.adjacency: Adjacency = given.adjacency
        self.delta, self.budget, self.sampling = given.delta, given.budget, given.drawn
        self.insecure_deterministic, self.seed = given.insecure_deterministic, given.seed
        self.privacy = PrivacyLedger(
            delta=given.delta,
            population=given.population,
            adjacency=given.adjacency,
            sampling=given.drawn,
            budget=given.budget,
            unit=unit,
        )
        self.exhausted = ""
        self._again = 0

    @property
    def withholds(self) -> bool:
        """Whether what a round costs rests on nobody knowing who took part: then neither log nor reports say."""
        return self.sampling.event_rate < 1.0

    def open_ledger(self, path: Path) -> None:
        """Keep the ledger in a file from now on; events in it that the ledger lacks were paid and count."""
        self.privacy.open(Path(path))

    def unaffordable(self, event: Event) -> str:
        """Return why the budget does not allow one more round with ``event``, empty when it does."""
        # Of whatever number it is: its units are redrawn, also where a round of that number was made before.
        if self.privacy.affords(event):
            return ""
        return (
            f"the budget of epsilon {self.budget:g} at delta {self.delta:g} allows no further round: "
            f"{self.privacy.epsilon():.4g} is spent"
        )

    def sample(self, nodes: Sequence[int], clients: int, server_round: int, *, count: int = 0) -> tuple[list[int], str]:
        """Return which of the connected ``nodes`` are asked in a round, and why nobody is, empty when somebody may be.

        Parameters
        ----------
        clients : int
            Public number of all that may ever take part.
        count : int
            The most that are drawn; 0 for all who may.
        """
        if len(nodes) > clients:
            # Not an error that ends the run: a client that came back may for a while be there under its former id, too.
            return [], (
                f"{len(nodes)} clients are online, and their number was given as {clients}. The promise depends on "
                "the number of all clients that may ever take part: end this run, and start one with the right number"
            )
        entropy = self.entropy("sampling", server_round)
        chosen = self.sampling.draw(nodes, self.privacy, server_round, entropy, count=count)
        # An empty Poisson draw is a round like any other; of a cap it means that all turns are taken.
        capped = self.sampling.kind == "capped" and nodes and not chosen
        self.exhausted = "every client that is online has taken part as often as it may" if capped else ""
        return chosen, self.exhausted

    def surplus(self, nodes: Sequence[int]) -> Iterator[str]:
        """Yield why some of ``nodes`` are never asked."""
        for node in self.privacy.surplus(nodes):
            yield (
                f"node {node} is not asked: the {self.privacy.most} clients that were declared have all taken "
                "part, and under another id one of them would have its turns again"
            )

    def entropy(self, purpose: str, server_round: int) -> Entropy:
        """Return the source of randomness for one purpose of a round, other than that of the same round made before."""
        # A stream of its own for each: seeded noise must not continue the stream that drew the nodes.
        key = Key(self.seed, f"privacy/{purpose}", server_round, self._again)
        return make_entropy(key, insecure_deterministic=self.insecure_deterministic)
