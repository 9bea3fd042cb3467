"""Model and data: ordinary PyTorch, nothing federated."""

from functools import cache

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class Net(nn.Module):
    """A small network for 8x8 images."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        """Return the ten class scores of each image."""
        return self.fc2(F.relu(self.fc1(x)))


@cache
def load_images():
    """Return images and labels; the data comes with scikit-learn, nothing is downloaded."""
    digits = load_digits()
    images = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return images[order], labels[order]


def load_data(partition_id: int, num_partitions: int):
    """Return the training images and labels of one node: two to four classes out of ten."""
    images, labels = (values[:1437] for values in load_images())
    order = torch.argsort(labels, stable=True).chunk(num_partitions)[partition_id]
    return images[order], labels[order]


def load_test_data():
    """Return the test images and labels, which no node trains on."""
    images, labels = load_images()
    return images[1437:], labels[1437:]
