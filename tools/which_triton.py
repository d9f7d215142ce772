# SPDX-License-Identifier: Apache-2.0
"""Two small Triton kernels for which_steps.py: a tiled attention forward, and a softmax of rows."""
import torch
import triton
import triton.language as tl


@triton.jit
def _tiled_attention_fwd(q, k, v, o, length, scale, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):
    head = tl.program_id(1) * length * DIM
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    queries = tl.load(q + head + rows[:, None] * DIM + dims[None, :])
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM], tl.float32)
    for start in range(0, length, KEYS):
        keys = start + tl.arange(0, KEYS)
        scores = tl.dot(queries, tl.load(k + head + keys[None, :] * DIM + dims[:, None])) * scale
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - new_top[:, None])
        old = tl.exp(top - new_top)
        total = total * old + tl.sum(weights, 1)
        values = tl.load(v + head + keys[:, None] * DIM + dims[None, :])
        out = out * old[:, None] + tl.dot(weights.to(values.dtype), values)
        top = new_top
    tl.store(o + head + rows[:, None] * DIM + dims[None, :], (out / total[:, None]).to(o.dtype.element_ty))


def attention(q, k, v):
    batch, heads, length, dim = q.shape
    out = torch.empty_like(q)
    _tiled_attention_fwd[(length // 64, batch * heads)](q, k, v, out, length, dim ** -0.5, dim, 64, 64)
    return out


@triton.jit
def row_softmax_kernel(x, y, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    values = tl.load(x + row * columns + at, mask=at < columns, other=float("-inf")).to(tl.float32)
    weights = tl.exp(values - tl.max(values, 0))
    tl.store(y + row * columns + at, (weights / tl.sum(weights, 0)).to(y.dtype.element_ty), mask=at < columns)


def softmax(x):
    out = torch.empty_like(x)
    columns = x.shape[-1]
    row_softmax_kernel[(x.numel() // columns,)](x, out, columns, triton.next_power_of_2(columns))
    return out
