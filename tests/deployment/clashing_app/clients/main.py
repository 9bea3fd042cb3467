"""The client: a hundred coordinates, up by ten thousand."""

from coding.numbers import SIZE
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedcomp.clients.compressed import compression

app = ClientApp(mods=[compression()])


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Return the model with its first hundred coordinates moved."""
    (weight,) = msg.content["arrays"].to_numpy_ndarrays()
    trained = weight.copy()
    trained.reshape(-1)[: SIZE // 200] += 10_000.0
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": ArrayRecord([trained]), "metrics": metrics}), reply_to=msg)
