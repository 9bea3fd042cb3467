"""What the server of a graph run and the owners of its parts say to each other, as Flower's records.

    query.gcn_setup    hello: which part are you; norms: feature norms of boundary nodes, asked for by others
    query.gcn_plan     which rows of other owners do your next steps use
    query.gcn_rows     rows of yours, as bytes, for those who asked
    train.gcn          the inner strategy's training message, with the rows in it
    evaluate.gcn       the same for evaluation

Scalars stand in one ConfigRecord; every list of ids and every block of rows is one frame, which the server passes on as
it came: what it costs on one link it costs on the other.
"""

from __future__ import annotations

from typing import Final

SETUP: Final = "gcn_setup"
PLAN: Final = "gcn_plan"
ROWS: Final = "gcn_rows"
GCN: Final = "gcn"
"""Actions of the messages; ``query.``, ``train.`` or ``evaluate.`` before them makes their types."""

HEADER: Final = "fedcomp.gcn"
"""Name of the ConfigRecord with what a message says beside its frames."""

SETUP_TYPE: Final = f"query.{SETUP}"
PLAN_TYPE: Final = f"query.{PLAN}"
ROWS_TYPE: Final = f"query.{ROWS}"
TRAIN_TYPE: Final = f"train.{GCN}"
EVALUATE_TYPE: Final = f"evaluate.{GCN}"
