"""What a private strategy says of one release: its mechanism, what a client contributes, and what a sum becomes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.layout import Layout, Vector
from fedcomp.privacy.entropy import Entropy
from fedcomp.privacy.mechanism import Mechanism

Contribution = NDArray[Any]


class Release:
    """One release after another, as :class:`fedcomp.strategies.private.sums.PrivateSink` asks for it."""

    @abstractmethod
    def mechanism(self, layout: Layout, server_round: int) -> Mechanism:
        """Return the mechanism of a round.

        Parameters
        ----------
        layout : Layout
            Of what is released: the model's, or a flat one of the coordinates that a support shared by all keeps.
        """

    def contribution(self, update: Vector, layout: Layout, server_round: int) -> Contribution:
        """Return what the mechanism is given for one client's ``update``; default the update.

        Parameters
        ----------
        update : ndarray, (layout.size,)
            What was decoded from the client's reply; nothing about it is known.

        Raises
        ------
        Unbounded
            When the client is to be left out.
        """
        return update

    def opened(self, server_round: int, chosen: Sequence[int]) -> None:
        """Prepare for a round in which the nodes ``chosen`` will be asked; called before they are."""

    def begun(self, server_round: int) -> None:
        """Prepare for the contributions of a round; called once, before the first of them."""

    def added(self, contribution: Contribution) -> None:
        """Note one contribution that is in the sum; called once for each."""

    def concluded(self, server_round: int, entropy: Entropy) -> None:
        """Release what the round's event pays for beside the sum; called after the sum was released."""

    @abstractmethod
    def released(self, noisy: NDArray[np.float64], layout: Layout, server_round: int) -> Vector:
        """Return the update that the noisy sum stands for, float32 ``(layout.size,)``."""

    def describe(self) -> str:
        """Return the subclass's own parameters in a few words, for the log and the statement."""
        return ""

    def describe_settings(self) -> str:
        """Return the subclass's parameters that must not change within a run; default :meth:`describe`."""
        return self.describe()

    def said(self, mechanism: Mechanism) -> dict[str, Any]:
        """Return what a subclass says otherwise in the statement, by its fields."""
        return {}
