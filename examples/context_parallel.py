# SPDX-License-Identifier: Apache-2.0
"""A small Llama-like model in training on one sequence that is spread over all ranks:

    torchrun --nproc-per-node 4 examples/context_parallel.py            # on the CPU by gloo; --device cuda: by NCCL

Each rank has its rows of the tokens, of the labels and of the positions, and runs the model on them. Attention is the
only layer that needs rows of other ranks. The losses are those of one process, to rounding.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import nn

import tessera.torch as tt

VOCABULARY, WIDTH, HEADS, HEADS_KV, HEAD_DIM, LAYERS = 96, 64, 4, 2, 16, 2


def rotated(x, positions):
    """Rotary embedding of x [batch, rows, heads, HEAD_DIM] at the positions [rows] of this rank."""
    angles = positions[:, None] * 10000.0 ** -torch.linspace(0, 1, HEAD_DIM // 2 + 1, device=x.device)[:-1]
    cosine, sine = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1).to(x.dtype)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * HEADS_KV) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, positions, group):
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split((HEADS, HEADS_KV, HEADS_KV), 2)
        o = tt.context_parallel_attention(rotated(q, positions), rotated(k, positions), v, group, causal=True)
        x = x + self.out(o.flatten(2))
        return x + self.down(functional.silu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, positions, group):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, positions, group)
        return self.head(self.norm(x))


def train(group=None, steps=10, rows=192, device="cpu"):
    """The losses of `steps` steps on a sequence of `rows` tokens."""
    torch.manual_seed(0)  # all ranks begin with the same weights
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.randint(VOCABULARY, (1, rows + 1), generator=torch.Generator().manual_seed(1)).to(device)
    ids, labels = (tt.shard_sequence(t, group) for t in (text[:, :-1], text[:, 1:]))
    positions = tt.sequence_positions(rows, group).to(device)
    losses = []
    for _ in range(steps):
        logits = model(ids, positions, group)
        # The sum over this rank's rows, divided by the rows of all: the ranks' losses and gradients add up.
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / rows
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        for tensor in (total, *(p.grad for p in model.parameters())):
            dist.all_reduce(tensor, group=group)
        optimizer.step()
        losses.append(total.item())
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    device = options.device
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    losses = train(None, options.steps, options.rows, device)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks: " + " ".join(f"{loss:.4f}" for loss in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
