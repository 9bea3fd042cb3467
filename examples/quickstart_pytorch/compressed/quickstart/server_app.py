"""The Flower ServerApp."""

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import fedcomp as fc
from quickstart.task import Net, load_test_data, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train a global model over all clients."""
    config = context.run_config
    arrays = ArrayRecord(Net().state_dict())
    client_config = ConfigRecord(
        {
            "lr": config["learning-rate"],
            "local-epochs": config["local-epochs"],
            "batch-size": config["batch-size"],
        }
    )

    strategy = fc.Compressed(FedAvg(fraction_evaluate=config["fraction-evaluate"]), fc.EDEN(bits=1))
    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=client_config,
        evaluate_config=client_config,
        num_rounds=config["num-server-rounds"],
        evaluate_fn=global_evaluate,
    )
    print(result.evaluate_metrics_serverapp[config["num-server-rounds"]])


def global_evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Evaluate the global model on the test set."""
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy = test(model, load_test_data())
    return MetricRecord({"loss": loss, "accuracy": accuracy})
