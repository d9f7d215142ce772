# SPDX-License-Identifier: Apache-2.0
"""Attention in fp64 with the words of docs/numerics.md, by PyTorch's own operators: what the tests of tessera.torch are
judged by. The limits of that page, as far as these tests use them; their inputs; and who listens to PyTorch's
dispatcher."""
import torch
from seeds import random_seed
from torch.utils._python_dispatch import TorchDispatchMode


def visible(len_q, len_kv, causal=None, window=None, device="cpu"):
    """bool [len_q, len_kv]."""
    i, j = torch.arange(len_q, device=device)[:, None], torch.arange(len_kv, device=device)[None, :]
    diagonal = len_kv - len_q
    seen = torch.ones(len_q, len_kv, dtype=torch.bool, device=device)
    if causal == "bottom-right":
        seen &= j <= i + diagonal
    if causal == "top-left":
        seen &= j <= i
    left, right = window or (None, None)
    if left is not None:
        seen &= j >= i + diagonal - left
    if right is not None:
        seen &= j <= i + diagonal + right
    return seen


def attention(q, k, v, causal=None, window=None, scale=None, softcap=0.0, alibi_slopes=None, bias=None, mask=None,
              sinks=None):
    """(o [batch, len_q, heads_q, head_dim_v], lse [batch, heads_q, len_q]), both fp64 and differentiable."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    len_q, len_kv = q.shape[1], k.shape[1]
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        i, j = torch.arange(len_q, device=q.device)[:, None], torch.arange(len_kv, device=q.device)[None, :]
        distance = (i + len_kv - len_q - j).abs()
        scores = scores - alibi_slopes.double().reshape(-1, q.shape[2], 1, 1) * distance
    if bias is not None:
        scores = scores + bias.double()
    seen = visible(len_q, len_kv, causal, window, q.device)[None, None]
    if mask is not None:
        seen = seen & mask
    if sinks is not None:  # one more key, which every query sees, with a value of 0
        scores = torch.cat((scores.masked_fill(~seen, float("-inf")),
                            sinks.double()[:, None, None].expand(*scores.shape[:3], 1)), -1)
        o = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1)[..., :-1], v)
        return o, scores.logsumexp(-1)
    none = ~seen.any(-1)
    # Rows without a key take a finite score here and their results below, so that their gradients are 0 and not NaN.
    scores = scores.masked_fill(~seen & ~none[..., None], float("-inf"))
    o = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    o = torch.where(none.transpose(1, 2)[..., None], 0.0, o)
    return o, torch.where(none, float("-inf"), scores.logsumexp(-1))


def inputs(batch=2, len_q=37, len_kv=53, heads_q=4, heads_kv=2, head_dim=32, head_dim_v=None, dtype=torch.float32,
           seed=0, device="cpu"):
    """q, k, v with requires_grad: the same numbers on every device."""
    generator = torch.Generator().manual_seed(random_seed(seed))
    shapes = ((batch, len_q, heads_q, head_dim), (batch, len_kv, heads_kv, head_dim),
              (batch, len_kv, heads_kv, head_dim_v or head_dim))
    return [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes]


def random(shape, seed, device="cpu", dtype=torch.float32):
    """Normal numbers: the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(random_seed(seed))).to(device, dtype)


def moved(options, device):
    """Keywords of a call, their tensors on the device."""
    return {name: o.to(device) if isinstance(o, torch.Tensor) else o for name, o in options.items()}


def expect_close(got, want, rmse, what):
    """The root mean square error of finite entries beside that of `want`; infinite ones are equal."""
    got, want = got.double(), want.double()
    assert got.shape == want.shape, what
    finite = want.isfinite()
    assert torch.equal(got[~finite], want[~finite]), f"{what}: other values where infinite ones are expected"
    error = (got - want)[finite].square().mean().sqrt()
    size = want[finite].square().mean().sqrt()
    assert error <= rmse * size + 1e-12, f"{what}: relative RMSE {float(error / size):.2e} is over {rmse:.0e}"


def expect_lse(got, want):
    """The rule of docs/numerics.md for every element: 2e-6 + 2^-20 |LSE|."""
    want = want.double()
    finite = want.isfinite()
    assert torch.equal(got.double()[~finite], want[~finite])
    error = (got.double() - want).abs()[finite]
    assert (error <= 2e-6 + 2**-20 * want.abs()[finite]).all(), f"LSE is off by {float(error.max()):.2e}"


class Names(TorchDispatchMode):
    """Within it, `seen` gets the name of every operator that is called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))
