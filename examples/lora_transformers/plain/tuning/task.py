"""Model, data and training: ordinary transformers and PEFT, nothing federated."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

WORDS = 32
LENGTH = 24


def get_model():
    """Return a small Llama with adapters. It is built from a configuration, so that nothing is downloaded; every node
    builds the same base."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=WORDS,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=LENGTH,
            )
        )
        modules = ["q_proj", "v_proj", "up_proj", "down_proj"]
        return get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=modules, task_type="CAUSAL_LM"))


def load_data(partition_id, count=64):
    """Return sentences of one client, of shape (count, LENGTH): each word is the one before plus the client's own step
    or plus one."""
    generator = torch.Generator().manual_seed(partition_id)
    first = torch.randint(WORDS, (count, 1), generator=generator)
    steps = torch.where(torch.rand(count, LENGTH - 1, generator=generator) < 0.5, 1, 2 + partition_id)
    return torch.cat([first, first + steps.cumsum(1)], dim=1) % WORDS


def train(model, data, steps, lr):
    """Train what needs a gradient; return the mean loss."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    model.train()
    total = 0.0
    for step in range(steps):
        batch = data[torch.arange(step * 8, step * 8 + 8) % len(data)]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / steps


def test(model, data):
    """Return the loss."""
    model.eval()
    with torch.no_grad():
        return model(input_ids=data, labels=data).loss.item()
