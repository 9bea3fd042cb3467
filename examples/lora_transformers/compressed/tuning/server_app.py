"""The Flower ServerApp."""

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from peft import get_peft_model_state_dict, set_peft_model_state_dict

import fedcomp as fc
from tuning.strategy import TrackedFedAvg
from tuning.task import get_model, load_data, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Tune the adapters over all clients."""
    config = context.run_config
    strategy = fc.Adapters(TrackedFedAvg())
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(get_peft_model_state_dict(get_model())),
        train_config=ConfigRecord({"lr": config["learning-rate"], "local-steps": config["local-steps"]}),
        num_rounds=config["num-server-rounds"],
        evaluate_fn=global_evaluate,
    )
    final = result.evaluate_metrics_serverapp[config["num-server-rounds"]]
    sent = strategy.tracker.sent
    print(f"loss {final['loss']:.3f}; tracker: bytes up {sent['up']:,}, down {sent['down']:,}")


def global_evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Evaluate the adapters on sentences that no client trains on."""
    model = get_model()
    set_peft_model_state_dict(model, arrays.to_torch_state_dict())
    return MetricRecord({"loss": test(model, load_data(0, count=1024)[64:])})
