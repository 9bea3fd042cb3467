"""Federated tuning of LoRA adapters: transformers, PEFT and Flower."""
