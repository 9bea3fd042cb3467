"""Model, data and training in NumPy: replace these functions by your own."""

import numpy as np
from flwr.app import Array, ArrayRecord

CLASSES, FEATURES = 10, 784
Model = dict[str, np.ndarray]
Data = tuple[np.ndarray, np.ndarray]


def load_model() -> Model:
    """Return the model that a run starts with: a softmax regression."""
    return {"weights": np.zeros((FEATURES, CLASSES), np.float32), "biases": np.zeros(CLASSES, np.float32)}


def to_record(model: Model) -> ArrayRecord:
    """Return the model as messages hold it. With PyTorch: ``ArrayRecord(model.state_dict())``."""
    return ArrayRecord({name: Array(values) for name, values in model.items()})


def from_record(record: ArrayRecord) -> Model:
    """Return the model of a message. With PyTorch: ``model.load_state_dict(record.to_torch_state_dict())``."""
    return {name: array.numpy() for name, array in record.items()}


def load_data(partition_id: int) -> tuple[Data, Data]:
    """Return the train and validation examples of one client: points around ten centres that all clients share."""
    centres = np.random.default_rng(0).standard_normal((CLASSES, FEATURES))
    rng = np.random.default_rng([1, partition_id])
    labels = rng.integers(0, CLASSES, 500)
    examples = (centres[labels] / 8.0 + rng.standard_normal((500, FEATURES))).astype(np.float32)
    return (examples[:400], labels[:400]), (examples[400:], labels[400:])


def train(model: Model, data: Data, epochs: int, batch_size: int, lr: float) -> Model:
    """Return the model after some epochs of stochastic gradient descent."""
    weights, biases = model["weights"].copy(), model["biases"].copy()
    examples, labels = data
    rng = np.random.default_rng()
    for _ in range(epochs):
        for batch in np.array_split(rng.permutation(len(labels)), max(1, len(labels) // batch_size)):
            error = _softmax(examples[batch] @ weights + biases)
            error[np.arange(len(batch)), labels[batch]] -= 1.0
            weights -= lr / len(batch) * (examples[batch].T @ error)
            biases -= lr / len(batch) * error.sum(axis=0)
    return {"weights": weights, "biases": biases}


def test(model: Model, data: Data) -> tuple[float, float]:
    """Return mean loss and accuracy of the model."""
    examples, labels = data
    probabilities = _softmax(examples @ model["weights"] + model["biases"])
    loss = -np.log(probabilities[np.arange(len(labels)), labels] + 1e-12).mean()
    return float(loss), float((probabilities.argmax(axis=1) == labels).mean())


def _softmax(scores: np.ndarray) -> np.ndarray:
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)
