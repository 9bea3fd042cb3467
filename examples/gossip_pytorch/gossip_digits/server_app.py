"""The Flower ServerApp: a mailbox between the nodes."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedcomp.gossip.sparse_push import SparsePush
from fedcomp.strategies.gossip.strategy import GossipRelay
from gossip_digits.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Let the nodes learn from each other."""
    config = context.run_config
    algorithm = SparsePush(density=config["density"], lr=config["learning-rate"], momentum=0.9)
    rounds = config["num-server-rounds"]
    strategy = GossipRelay(algorithm, config["topology"], skew_rounds="auto", observe_every=rounds)
    strategy.start(grid, ArrayRecord(Net().state_dict()), num_rounds=rounds)
    figures, traffic = strategy.reports[rounds].gossip.observed, strategy.traffic
    print(
        f"accuracy of the nodes {figures['accuracy_min']:.3f} to {figures['accuracy_max']:.3f}; "
        f"{traffic.edge['train'].bytes:,} bytes in {traffic.edge['train'].messages:,} messages, "
        f"and {traffic.edge['dense'].bytes:,} in the {strategy.system.skew_rounds} closing iterations"
    )
