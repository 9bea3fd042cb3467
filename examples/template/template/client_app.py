"""The Flower ClientApp."""

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedcomp as fc
from template.task import from_record, load_data, to_record
from template.task import test as test_fn
from template.task import train as train_fn

app = ClientApp(mods=[fc.compression()])


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model on local data."""
    config = msg.content["config"]
    data, _ = load_data(context.node_config["partition-id"])
    model = from_record(msg.content["arrays"])
    trained = train_fn(model, data, config["local-epochs"], config["batch-size"], config["lr"])
    metrics = MetricRecord({"num-examples": len(data[1])})
    return Message(RecordDict({"arrays": to_record(trained), "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate the model on local data."""
    _, data = load_data(context.node_config["partition-id"])
    loss, accuracy = test_fn(from_record(msg.content["arrays"]), data)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(data[1])})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
