# SPDX-License-Identifier: Apache-2.0
"""The checks of libtessera (src/core/checks.cc, src/core/problem.cc) for tensors without memory: what a kernel refuses,
its fake kernel refuses. Sizes may be symbols: torch._check turns a condition on them into a guard or an assertion of
the graph. Errors have the form of an operator's, which _errors.translated() reads."""
import torch
from torch.compiler import is_dynamo_compiling

from .. import _native

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INDEX = (torch.int32, torch.int64)
_LARGEST = torch.finfo(torch.float32).max
_MAX_HEAD_DIM, _MAX_LENGTH, _MAX_COUNT = 256, 2**32, 2**32 - 1
_ORDERS = {(False, False): "[batch, len, heads, head_dim]", (True, False): "[batch, heads, len, head_dim]",
           (False, True): "[total, heads, head_dim]"}


def _check(condition, name, expected, got):
    """Raises an operator's error naming the argument unless `condition` (bool or SymBool) is true."""
    if condition is True:
        return
    if is_dynamo_compiling():  # math=True; Dynamo traces neither a message that is a closure nor _errors.translated()
        if condition:
            return
        raise ValueError(f"{name}: expected {expected}, got {got}")
    torch._check(condition, lambda: f"tessera {_native.INVALID_ARGUMENT}: {name}: expected {expected}, got {got}")


def _expect_shape(name, tensor, shape):
    expected, got = f"shape {list(shape)}", f"{list(tensor.shape)} of rank {tensor.dim()}"
    _check(tensor.dim() == len(shape), name, expected, got)
    for size, wanted in zip(tensor.shape, shape):
        _check(size == wanted, name, expected, got)


def _expect_size(name, size, low, high):
    """A symbol is left to the kernel: a bound of it would be a constraint of every exported program."""
    _check(not isinstance(size, int) or low <= size <= high, name, f"{low}..{high}", size)


def _expect_dtype(name, tensor, *allowed):
    _check(tensor.dtype in allowed, name, "dtype " + " or ".join(str(d).removeprefix("torch.") for d in allowed),
           str(tensor.dtype).removeprefix("torch."))


def expect_one_device(q, **tensors):
    for name, tensor in tensors.items():
        if tensor is not None:
            _check(tensor.device == q.device, name, f"a tensor on {q.device}, where q is", f"one on {tensor.device}")


def _expect_numbers(a):
    """The arguments that are no tensors. Symbols among them are left to the kernel."""
    _check(a.causal in (0, 1, 2), "causal", "0, 1 or 2", a.causal)
    for name in ("window_left", "window_right"):
        side = getattr(a, name)
        _check(not isinstance(side, int) or side >= -1, name, "a number of keys, or -1 for no limit", side)
    for name, low in (("scale", -_LARGEST), ("softcap", 0.0)):
        number = getattr(a, name)
        finite = not isinstance(number, float) or low <= number <= _LARGEST  # false for NaN too
        _check(finite, name, f"a number that is finite in fp32{' and 0 or more' if low == 0 else ''}", number)
    if isinstance(a.dropout_p, float):
        _check(0 <= a.dropout_p < 1, "dropout", "a probability in [0, 1)", a.dropout_p)
        _check(a.dropout_p == 0 or a.seed is not None, "seed", "a tensor int64 [1] with dropout", "none")
    if a.seed is not None:
        _expect_dtype("seed", a.seed, torch.int64)
        _expect_shape("seed", a.seed, (1,))


def _expect_bias(a, shape):
    name, expected = "bias", f"{list(shape)}, any size also 1"
    _check(a.bias.dim() == 4, name, expected, list(a.bias.shape))
    for size, full in zip(a.bias.shape, shape):
        if not (isinstance(size, int) and size == 1):
            _check(size == full, name, expected, list(a.bias.shape))
    _expect_dtype(name, a.bias, torch.float32, a.q.dtype)


def expect(a):
    """Raises RuntimeError, in the form of an operator's error, for Arguments that the forward kernels refuse."""
    ragged = a.cu_seqlens_q is not None
    _check(ragged == (a.cu_seqlens_kv is not None), "cu_seqlens_kv" if ragged else "cu_seqlens_q",
           "both cu_seqlens or none", "one")
    _check(not (ragged and a.heads_first), "heads_first", "false with cu_seqlens", "true")
    rank = 3 if ragged else 4
    for name, tensor in (("q", a.q), ("k", a.k), ("v", a.v)):
        _check(tensor.dim() == rank, name, f"{rank} dimensions ({_ORDERS[a.heads_first, ragged]})", tensor.dim())
    _expect_dtype("q", a.q, *FLOATING)
    expect_one_device(a.q, k=a.k, v=a.v, bias=a.bias, alibi_slopes=a.alibi_slopes, cu_seqlens_q=a.cu_seqlens_q,
                      cu_seqlens_kv=a.cu_seqlens_kv)
    _expect_numbers(a)
    heads, length = (1, 2) if a.heads_first else (rank - 2, rank - 3)
    heads_q, heads_kv, head_dim, head_dim_v = a.q.shape[heads], a.k.shape[heads], a.q.shape[-1], a.v.shape[-1]
    batch = a.cu_seqlens_q.numel() - 1 if ragged else a.q.shape[0]
    for name, size in (("batch", batch), ("heads_q", heads_q), ("heads_kv", heads_kv)):
        _expect_size(name, size, 0, _MAX_COUNT)
    if not ragged:
        _expect_size("len_q", a.q.shape[length], 0, _MAX_LENGTH)
        _expect_size("len_kv", a.k.shape[length], 0, _MAX_LENGTH)
    _expect_size("head_dim", head_dim, 1, _MAX_HEAD_DIM)
    _expect_size("head_dim_v", head_dim_v, 1, _MAX_HEAD_DIM)
    if isinstance(heads_q, int) and isinstance(heads_kv, int):
        multiple = heads_q == 0 if heads_kv == 0 else heads_q % heads_kv == 0
        _check(multiple, "heads_q", f"a multiple of heads_kv = {heads_kv}", heads_q)
    if ragged:
        for name, lengths in (("cu_seqlens_q", a.cu_seqlens_q), ("cu_seqlens_kv", a.cu_seqlens_kv)):
            _expect_shape(name, lengths, (batch + 1,))
            _expect_dtype(name, lengths, *_INDEX)
    _expect_shape("k", a.k, ((a.k if ragged else a.q).shape[0], *a.k.shape[1:-1], head_dim))
    _expect_shape("v", a.v, (*a.k.shape[:-1], head_dim_v))
    _expect_dtype("k", a.k, a.q.dtype)
    _expect_dtype("v", a.v, a.q.dtype)
    if a.bias is not None:
        # The lengths of a ragged batch may be in cu_seqlens alone.
        lengths = a.bias.shape[2:] if ragged else (a.q.shape[length], a.k.shape[length])
        _expect_bias(a, (batch, heads_q, *lengths))
    if a.alibi_slopes is not None:
        _expect_shape("alibi_slopes", a.alibi_slopes, (batch, heads_q) if a.alibi_slopes.dim() == 2 else (heads_q,))
        _expect_dtype("alibi_slopes", a.alibi_slopes, torch.float32)


def expect_backward(a, d_o, dlse, o, lse, bias_gradient):
    """expect() of the backward's Arguments, and of the tensors that it has beside them."""
    expect(a)
    _check(not bias_gradient or a.bias is not None, "bias_gradient", "false without a bias", "true")
    shape_of_o = (*a.q.shape[:-1], a.v.shape[-1])
    rows = a.q.shape[1::-1] if a.cu_seqlens_q is not None else (
        a.q.shape[0], *(a.q.shape[1:3] if a.heads_first else a.q.shape[2:0:-1]))
    of_lse = (torch.float32, torch.float64) if a.q.dtype == torch.float64 else (torch.float32,)
    for name, tensor, shape, dtypes in (("do", d_o, shape_of_o, (a.q.dtype,)), ("o", o, shape_of_o, (a.q.dtype,)),
                                        ("lse", lse, rows, of_lse), ("dlse", dlse, rows, of_lse)):
        if tensor is not None:
            expect_one_device(a.q, **{name: tensor})
            _expect_shape(name, tensor, shape)
            _expect_dtype(name, tensor, *dtypes)
