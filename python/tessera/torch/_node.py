# SPDX-License-Identifier: Apache-2.0
"""O of a call that needs gradients, by a node of autograd in C++.

The stable ABI has no words for gradients, and a torch.autograd.Function costs more than the rest of a small call. But
PyTorch has operators for attention with a gradient of their own and without a kernel for the CPU or CUDA, which it never
calls there. libtessera_torch gives one of them those kernels on each device (torch_ops/node.hpp): on the CPU the one that
is for backends that bring their own attention, on CUDA the one of the CPU's flash kernel, which costs less."""
import functools

import torch

from . import _operators

_ON_CPU = ("aten::_scaled_dot_product_fused_attention_overrideable(Tensor query, Tensor key, Tensor value, "
           "Tensor? attn_bias=None, float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, "
           "float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, "
           "SymInt max_k, Tensor philox_seed, Tensor philox_offset, Tensor debug_attn_mask)")
_ON_CUDA = ("aten::_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value, "
            "float dropout_p=0., bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) -> "
            "(Tensor output, Tensor logsumexp)")
_CLASSES = frozenset((torch.Tensor, torch.nn.Parameter))
_FIRST_TOO_WIDE = 2**21 - 1
_modes = torch._C._len_torch_dispatch_stack
_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def _operator(schema):
    """A function of q, k, v, dropout_p and scale, by PyTorch's operator of that schema; None where it has another one."""
    name = schema[len("aten::"):schema.index("(")]
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or str(packet.default._schema) != schema:
        return None
    if "attn_bias" in schema:
        op = packet.default._op
        return lambda q, k, v, code, **scale: op(q, k, v, None, code, **scale)
    return getattr(torch, name, None)  # PyTorch's own binding is faster than that of torch.ops


on_cpu, on_cuda = _operator(_ON_CPU), _operator(_ON_CUDA)


@functools.lru_cache(maxsize=256)
def code(causal, heads_first, window_left, window_right, least_for_residual):
    """The settings as one number, as torch_ops/node.cc has them; None of a window that is too wide for it."""
    if max(window_left, window_right) >= _FIRST_TOO_WIDE:
        return None
    log_least = 63 if least_for_residual >= 2**63 else max(int(least_for_residual) - 1, 0).bit_length()
    bits = causal + 4 * heads_first + ((window_left + 1) << 3) + ((window_right + 1) << 24) + (log_least << 45)
    return float(2**52 + bits)


def operator(q, k, v):
    """on_cpu or on_cuda where it can run a plain call of these, else None. Not for what traces: it is to see tessera's
    own operators. Nor for tensors without memory: PyTorch has a kernel of its own for them. Nor where hooks take what is
    saved, as checkpoints do: they may cast it, and they run the forward once more, perhaps under a mode, and want the
    same tensors saved."""
    if q.__class__ not in _CLASSES or _modes() or _hooks is None or _hooks(False) is not None:
        return None
    if q.is_cuda:
        return on_cuda if k.is_cuda and v.is_cuda else None
    return on_cpu if q.is_cpu and k.is_cpu and v.is_cpu else None


def attention(q, k, v, causal, heads_first, scale, window_left, window_right):
    """O with a node of autograd, or None where another way has to be taken."""
    op = operator(q, k, v)
    number = op and code(causal, heads_first, window_left, window_right, _operators.LEAST_FOR_REST)
    if number is None:
        return None
    if scale is None:
        return op(q, k, v, number)[0]  # PyTorch takes longer for each argument more
    return op(q, k, v, number, scale=scale)[0]
