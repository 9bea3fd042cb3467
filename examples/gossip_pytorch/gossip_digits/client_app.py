"""The Flower ClientApp: a gradient and an evaluation; everything else comes with the server's messages."""

import torch
import torch.nn.functional as F
from flwr.clientapp import ClientApp

import fedcomp as fc
from gossip_digits.task import Net, load_data, load_test_data


class Digits:
    """What one node learns from."""

    def __init__(self, partition_id, num_partitions):
        self.images, self.labels = load_data(partition_id, num_partitions)
        self.net = Net()

    def load(self, arrays):
        """Put a model's arrays into the network."""
        self.net.load_state_dict({name: torch.tensor(array) for name, array in arrays.items()})

    def gradient(self, arrays, key):
        """Return the gradient on a batch; ``key`` chooses it, so that a message delivered twice has the same answer."""
        self.load(arrays)
        rows = torch.from_numpy(key.generator().integers(len(self.labels), size=32))
        loss = F.cross_entropy(self.net(self.images[rows]), self.labels[rows])
        named = dict(self.net.named_parameters())
        gradients = torch.autograd.grad(loss, list(named.values()))
        return {name: g.numpy() for name, g in zip(named, gradients, strict=True)}

    def buffers_after(self):
        """Return what the last forward pass made of running statistics: this network has none."""
        return {}

    def evaluate(self, arrays):
        """Return figures for the server's reports."""
        self.load(arrays)
        images, labels = load_test_data()
        with torch.no_grad():
            return {"accuracy": float((self.net(images).argmax(1) == labels).float().mean())}


def problem(msg, context, setup):
    """Return what this node learns from."""
    return Digits(context.node_config["partition-id"], context.node_config["num-partitions"])


app = fc.client(ClientApp(), fc.gossip_node(problem))
