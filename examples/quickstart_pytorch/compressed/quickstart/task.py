"""Model, data and training: ordinary PyTorch, nothing federated."""

from functools import cache

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A small network for 8x8 images."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 256)
        self.fc2 = nn.Linear(256, 128)
        self.fc3 = nn.Linear(128, 10)

    def forward(self, x):
        """Return the ten class scores of each image."""
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


@cache
def load_images():
    """Return train and test sets; the data comes with scikit-learn, nothing is downloaded."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])


def load_data(partition_id: int, num_partitions: int, batch_size: int):
    """Return the train and validation loaders of one client."""
    train, _ = load_images()
    mine = torch.utils.data.Subset(train, range(partition_id, len(train), num_partitions))
    split = len(mine) * 4 // 5
    trainset = torch.utils.data.Subset(mine, range(split))
    valset = torch.utils.data.Subset(mine, range(split, len(mine)))
    return DataLoader(trainset, batch_size=batch_size, shuffle=True), DataLoader(valset, batch_size=batch_size)


def load_test_data():
    """Return the loader of the test set, which no client has seen."""
    return DataLoader(load_images()[1], batch_size=128)


def train(net, trainloader, epochs, lr):
    """Train the model; return the average loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    running_loss = 0.0
    for _ in range(epochs):
        for images, labels in trainloader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
    return running_loss / (epochs * len(trainloader))


def test(net, testloader):
    """Return loss and accuracy of the model."""
    net.eval()
    correct, loss = 0, 0.0
    with torch.no_grad():
        for images, labels in testloader:
            outputs = net(images)
            loss += F.cross_entropy(outputs, labels, reduction="sum").item()
            correct += (outputs.argmax(dim=1) == labels).sum().item()
    return loss / len(testloader.dataset), correct / len(testloader.dataset)
