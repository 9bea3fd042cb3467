"""Federated graph convolution with sampled neighbours: the server side."""
