# SPDX-License-Identifier: Apache-2.0
"""The functions of flash_attn.layers.rotary: rotary position embeddings (Su et al., arXiv:2104.09864).

compat.install() gives them under that name. They are compositions of PyTorch's operations, computed in float32 or more.
Names that end in _ write into their argument. cos and sin get no gradient.
"""
from __future__ import annotations

import torch
from torch import Tensor

from ._arrays import expect

__all__ = ["RotaryEmbedding", "apply_rotary_emb", "apply_rotary_emb_func", "apply_rotary_emb_kv_",
           "apply_rotary_emb_qkv_", "apply_rotary_emb_torch", "rotate_half"]


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """Each pair (a, b) of the last dimension as (-b, a). The pairs are the two halves, or with `interleaved` the
    neighbours."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def _expect_width(x, cos):
    if 2 * cos.shape[-1] > x.shape[-1]:
        expect("cos", f"at most {x.shape[-1] // 2} columns, half of head_dim", cos.shape[-1])


def _rotated(x, cos, sin, interleaved):
    """x with its first dimensions rotated by cos and sin [..., 1, rotary_dim / 2]."""
    dim = 2 * cos.shape[-1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (t.detach().to(dtype) for t in (cos, sin))
    cos, sin = (t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in (cos, sin))
    first = x[..., :dim].to(dtype)
    return torch.cat(((first * cos + rotate_half(first, interleaved) * sin).to(x.dtype), x[..., dim:]), -1)


def _expect_offsets(offsets, batch):
    """Raises ValueError unless seqlen_offsets is an integer from 0 on, or integers (batch,)."""
    if isinstance(offsets, torch.Tensor):
        if offsets.shape != (batch,) or offsets.dtype not in (torch.int32, torch.int64):
            expect("seqlen_offsets", f"an integer or int32 ({batch},)", f"{offsets.dtype} {list(offsets.shape)}")
    elif not isinstance(offsets, torch.SymInt) and (not hasattr(offsets, "__index__") or offsets < 0):
        expect("seqlen_offsets", "an integer from 0 on or a tensor", repr(offsets))


def _expect_rows(positions, rows):
    """Raises ValueError for positions without a row of cos. Those on a GPU, in a graph or of a fake tensor are not read."""
    if not positions.is_cpu or torch.compiler.is_compiling() or type(positions) is not Tensor or not positions.numel():
        return
    least, most = int(positions.min()), int(positions.max())
    if least < 0:
        expect("seqlen_offsets", "positions from 0 on", f"a smallest one of {least}")
    if most >= rows:
        expect("cos", f"at least {most + 1} rows, one for each position", rows)


def _positions(x, offsets, cu_seqlens):
    """The position of each row: (seqlen,) or (batch, seqlen), or (total,) with cu_seqlens."""
    if cu_seqlens is None:
        rows = torch.arange(x.shape[1], device=x.device)
        return rows + (offsets[:, None] if isinstance(offsets, torch.Tensor) else offsets)
    rows = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), rows.to(cu_seqlens.dtype), right=True)
    behind = sequence >= len(cu_seqlens) - 1  # of no sequence
    sequence = torch.where(behind, 0, sequence)
    offsets = offsets[sequence] if isinstance(offsets, torch.Tensor) else offsets
    return torch.where(behind, 0, rows - cu_seqlens[sequence] + offsets)


def _checked(x, cos, sin, seqlen_offsets, cu_seqlens=None):
    """_positions() of a call of apply_rotary_emb(), all of whose arguments have been checked."""
    if cos.shape != sin.shape or cos.dim() != 2:
        expect("cos", "the shape of sin, (seqlen_rotary, rotary_dim / 2)", f"{list(cos.shape)} and {list(sin.shape)}")
    for name, table in (("cos", cos), ("sin", sin)):
        if not table.is_floating_point():
            expect(name, "floating numbers", table.dtype)
        if table.device != x.device:
            expect(name, f"a tensor on {x.device}, where x is", f"one on {table.device}")
    if x.dim() != (4 if cu_seqlens is None else 3):
        expect("x", "shape (batch, seqlen, nheads, headdim), or (total_seqlen, nheads, headdim) with cu_seqlens",
               list(x.shape))
    if not x.is_floating_point():
        expect("x", "floating numbers", x.dtype)
    if cu_seqlens is not None and not (isinstance(cu_seqlens, Tensor) and cu_seqlens.dim() == 1
                                       and cu_seqlens.dtype in (torch.int32, torch.int64)):
        expect("cu_seqlens", "a tensor int32 (batch + 1,)", f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}"
               if isinstance(cu_seqlens, Tensor) else f"a {type(cu_seqlens).__name__}")
    _expect_width(x, cos)
    _expect_offsets(seqlen_offsets, len(x) if cu_seqlens is None else len(cu_seqlens) - 1)
    if cu_seqlens is None and not isinstance(seqlen_offsets, torch.Tensor) and x.shape[1] + seqlen_offsets > len(cos):
        expect("cos", f"at least {x.shape[1] + seqlen_offsets} rows, one for each position", len(cos))
    positions = _positions(x, seqlen_offsets, cu_seqlens)
    _expect_rows(positions, len(cos))
    return positions


def _rotate_in_place(calls, interleaved, seqlen_offsets):
    """Rotates each x of `calls`, (x, cos, sin), in place, after all of them have been checked: a call that is refused
    writes nothing."""
    checked = [_checked(*call, seqlen_offsets) for call in calls]
    for (x, cos, sin), positions in zip(calls, checked):
        x.copy_(_rotated(x, cos[positions].unsqueeze(-2), sin[positions].unsqueeze(-2), interleaved))


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False,
                     seqlen_offsets: int | Tensor = 0, cu_seqlens: Tensor | None = None,
                     max_seqlen: int | None = None) -> Tensor:
    """x (batch, seqlen, nheads, headdim), or (total_seqlen, nheads, headdim) with cu_seqlens, rotated by position.

    cos, sin: (seqlen_rotary, rotary_dim / 2); a row for each position. The first rotary_dim dimensions are rotated.
    interleaved: pairs are neighbours (GPT-J), else the halves (GPT-NeoX). inplace: the result is written into x.
    seqlen_offsets: an integer or (batch,), the position of the first row of each sequence. cu_seqlens: (batch + 1,);
    rows past the last offset are rotated as position 0. Positions on a GPU are not checked. max_seqlen changes nothing.
    Raises ValueError that names the argument."""
    positions = _checked(x, cos, sin, seqlen_offsets, cu_seqlens)
    rotated = _rotated(x, cos[positions].unsqueeze(-2), sin[positions].unsqueeze(-2), interleaved)
    return x.copy_(rotated) if inplace else rotated


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x (batch, seqlen, nheads, headdim) rotated by cos, sin (seqlen, rotary_dim / 2) or (batch, seqlen, ..)."""
    _expect_width(x, cos)
    return _rotated(x, cos.unsqueeze(-2), sin.unsqueeze(-2), interleaved)


def _heads_of(qkv, num_heads_q):
    """The queries and the keys of a packed qkv, as views."""
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        if num_heads_q not in (None, qkv.shape[3]):
            expect("num_heads_q", f"None or {qkv.shape[3]}, the heads of qkv with 5 dimensions", num_heads_q)
        return qkv[:, :, 0], qkv[:, :, 1]
    if qkv.dim() != 4:
        expect("qkv", "shape (batch, seqlen, 3, nheads, headdim) or (batch, seqlen, heads, headdim)", list(qkv.shape))
    if num_heads_q is None or not 0 < num_heads_q < qkv.shape[2] or (qkv.shape[2] - num_heads_q) % 2:
        expect("num_heads_q", f"the number of heads of q among {qkv.shape[2]}", num_heads_q)
    heads_k = (qkv.shape[2] - num_heads_q) // 2
    return qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q:num_heads_q + heads_k]


def apply_rotary_emb_qkv_(qkv: Tensor, cos: Tensor, sin: Tensor, cos_k: Tensor | None = None,
                          sin_k: Tensor | None = None, interleaved: bool = False, seqlen_offsets: int | Tensor = 0,
                          num_heads_q: int | None = None) -> Tensor:
    """Rotates q and k of qkv (batch, seqlen, 3, nheads, headdim) in place; or, with num_heads_q, of
    (batch, seqlen, num_heads_q + 2 * num_heads_k, headdim). cos_k, sin_k: those of k, if they are others."""
    q, k = _heads_of(qkv, num_heads_q)
    of_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    _rotate_in_place([(q, cos, sin), (k, *of_k)], interleaved, seqlen_offsets)
    return qkv


def _keys_of(kv):
    if kv.dim() != 5 or kv.shape[2] != 2:
        expect("kv", "shape (batch, seqlen, 2, nheads, headdim)", list(kv.shape))
    return kv[:, :, 0]


def apply_rotary_emb_kv_(kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False,
                         seqlen_offsets: int | Tensor = 0) -> Tensor:
    """Rotates k of kv (batch, seqlen, 2, nheads, headdim) in place."""
    _rotate_in_place([(_keys_of(kv), cos, sin)], interleaved, seqlen_offsets)
    return kv


class RotaryEmbedding(torch.nn.Module):
    """Rotates q and k by position. With scale_base it also scales them (XPos, arXiv:2212.10554); 512 is usual.

    dim: the number of dimensions to rotate. base: the frequencies are base ** (-i / dim) for even i."""

    def __init__(self, dim: int, base: float = 10000.0, interleaved: bool = False, scale_base: float | None = None,
                 device: torch.device | str | None = None):
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self.base ** -(self._even(device) / dim), persistent=False)
        scale = None if scale_base is None else (self._even(device) + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._cached = None  # (length, device, tables)

    def _even(self, device):
        return torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)

    def _tables(self, length, device):
        """(cos, sin) of q and (cos, sin) of k, float32, at least `length` rows of dim / 2."""
        cached = self._cached
        if cached is None or cached[1] != device or length > cached[0] or (self.scale_base and length != cached[0]):
            cached = self._cached = (length, device, self._new_tables(length, device))
        return cached[2]

    def _new_tables(self, length, device):
        # The buffers are not read: a model that was cast to bf16 has rounded them.
        positions = torch.arange(length, device=device, dtype=torch.float32)
        angles = torch.outer(positions, self.base ** -(self._even(device) / self.dim))
        cos, sin = angles.cos(), angles.sin()
        if self.scale_base is None:
            return (cos, sin), (cos, sin)
        scale = ((self._even(device) + 0.4 * self.dim) / (1.4 * self.dim)) ** (
            (positions - length // 2) / self.scale_base)[:, None]
        return (cos * scale, sin * scale), (cos / scale, sin / scale)

    def forward(self, qkv: Tensor, kv: Tensor | None = None, seqlen_offset: int | Tensor = 0,
                max_seqlen: int | None = None, num_heads_q: int | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """qkv, rotated in place: (batch, seqlen, 3, nheads, headdim), or (batch, seqlen, heads, headdim) with
        num_heads_q. With kv (batch, seqlen, 2, nheads, headdim), qkv is q alone (batch, seqlen, nheads, headdim), and
        the result is (q, kv).

        seqlen_offset: an integer or (batch,). max_seqlen: a bound of the positions; with
        a tensor and without it the host waits for the tensor."""
        _expect_offsets(seqlen_offset, len(qkv))
        if not isinstance(seqlen_offset, torch.Tensor):
            length = qkv.shape[1] + seqlen_offset
        else:
            length = qkv.shape[1] + int(seqlen_offset.max()) if max_seqlen is None else max_seqlen
        of_q, of_k = self._tables(max(length, max_seqlen or 0), qkv.device)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, *of_q, *of_k, self.interleaved, seqlen_offset, num_heads_q)
        _rotate_in_place([(qkv, *of_q), (_keys_of(kv), *of_k)], self.interleaved, seqlen_offset)
        return qkv, kv
