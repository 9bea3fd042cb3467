"""The Flower ClientApp."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from peft import get_peft_model_state_dict, set_peft_model_state_dict

from tuning.task import get_model, load_data
from tuning.task import train as train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    """Tune the adapters on local data."""
    model = get_model()
    set_peft_model_state_dict(model, msg.content["arrays"].to_torch_state_dict())

    config = msg.content["config"]
    data = load_data(context.node_config["partition-id"])
    train_loss = train_fn(model, data, config["local-steps"], config["lr"])

    metrics = MetricRecord({"train_loss": train_loss, "num-examples": len(data)})
    content = RecordDict({"arrays": ArrayRecord(get_peft_model_state_dict(model)), "metrics": metrics})
    return Message(content=content, reply_to=msg)
