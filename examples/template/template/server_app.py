"""The Flower ServerApp."""

from flwr.app import ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import fedcomp as fc
from template.task import load_model, to_record

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train a global model over all clients, and print how well it does on their validation examples."""
    config = context.run_config
    strategy = fc.Compressed(FedAvg(), fc.EDEN(bits=1))
    result = strategy.start(
        grid=grid,
        initial_arrays=to_record(load_model()),
        train_config=ConfigRecord(
            {
                "lr": config["learning-rate"],
                "local-epochs": config["local-epochs"],
                "batch-size": config["batch-size"],
            }
        ),
        num_rounds=config["num-server-rounds"],
    )
    print(result.evaluate_metrics_clientapp[config["num-server-rounds"]])
