"""Options of a graph run, shared by both halves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Final

from fedcomp.codecs import Codec, Identity, get_codec
from fedcomp.graphs.settings import RoundSettings, RowSettings, SamplerSettings
from fedcomp.rules import Made, OneOf
from fedcomp.systems.pair import Pair

STRUCTURES: Final = ("full", "halo")


@dataclass(frozen=True, repr=False, eq=False)
class GraphOptions(Pair):
    """What is computed, and what travels.

    Parameters
    ----------
    codec : Codec or dict
        Of updates, as of :class:`~fedcomp.systems.pair.Pair`; default whole models.
    sampler : SamplerSettings or dict
        Which neighbours a step uses. Its ``layers`` are those of the model.
    rows : RowSettings or dict
        How feature rows travel, and which of them clients keep.
    rounds : RoundSettings or dict
        What a round asks of a client: steps, batch size, evaluation; and how long its exchanges may take.
    structure : {"full", "halo"}
        What clients know of the edges: all of them, or those of their own nodes.

    Raises
    ------
    ConfigError
        For a sampler that needs to know more of the edges.
    """

    codec: Annotated[Codec, Made(get_codec)] = field(default_factory=Identity)
    sampler: Annotated[SamplerSettings, Made(SamplerSettings.made)] = field(default_factory=SamplerSettings)
    rows: Annotated[RowSettings, Made(RowSettings.made)] = field(default_factory=RowSettings)
    rounds: Annotated[RoundSettings, Made(RoundSettings.made)] = field(default_factory=RoundSettings)
    structure: Annotated[str, OneOf(*STRUCTURES)] = "full"

    def conflict(self) -> str:
        if self.sampler.sampler == "fastgcn" and self.structure != "full":
            return (
                f"sampler 'fastgcn' draws by column norms of all of P, which structure={self.structure!r} does not "
                "show; use structure='full', or another sampler"
            )
        return ""

    def sampler_of(self, purpose: str) -> SamplerSettings:
        """Return the sampler of a training or an evaluation."""
        if purpose == "train" or self.rounds.evaluate == "sampled":
            return self.sampler
        # The same settings otherwise: layers have to fit the model in evaluation, too.
        return replace(self.sampler, sampler="full")
