# SPDX-License-Identifier: Apache-2.0
"""O of a call that needs gradients, by a node of autograd in C++.

The stable ABI has no words for gradients, and a torch.autograd.Function costs more than the rest of a small call. PyTorch
has one operator with a gradient of its own and no kernel for the CPU or CUDA: it is for backends that bring their own
attention, and PyTorch never calls it there. libtessera_torch gives it those kernels (torch_ops/operators.cc)."""
import functools
import struct

import torch

from . import _operators

_SCHEMA = ("aten::_scaled_dot_product_fused_attention_overrideable(Tensor query, Tensor key, Tensor value, "
           "Tensor? attn_bias=None, float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, "
           "float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, "
           "SymInt max_k, Tensor philox_seed, Tensor philox_offset, Tensor debug_attn_mask)")
_CLASSES = frozenset((torch.Tensor, torch.nn.Parameter))
_SCALES = frozenset((type(None), int, float))
_modes = torch._C._len_torch_dispatch_stack


def _operator():
    """PyTorch's operator, or None where it is not the one that libtessera_torch knows."""
    packet = getattr(torch.ops.aten, "_scaled_dot_product_fused_attention_overrideable", None)
    if packet is None or str(packet.default._schema) != _SCHEMA:
        return None
    return packet.default._op


_op = _operator()


@functools.lru_cache(maxsize=256)
def _settings(causal, heads_first, scale, window_left, window_right):
    """What the operator takes for its attn_bias: int64 [6] in host memory, as torch_ops/operators.cc has it."""
    bits = 0 if scale is None else struct.unpack("q", struct.pack("d", scale))[0]
    with torch.inference_mode(False):  # which would make a tensor that no backward may keep
        return torch.tensor([causal, heads_first, window_left, window_right, scale is not None, bits],
                            dtype=torch.int64, device="cpu")


def takes(q, k, v, heads_first, scale):
    """Whether attention() can give O of this call. Not for what traces: it is to see tessera's own operators. Not
    without memory: PyTorch has a kernel of its own for that."""
    return (_op is not None and not _modes() and q.__class__ in _CLASSES and scale.__class__ in _SCALES
            and (q.is_cuda or q.is_cpu) and not k.is_meta and not v.is_meta
            and not (_operators.keeps_rest(q) and _operators.pays_rest(q, k, heads_first)))


def attention(q, k, v, *settings):
    """O, differentiable; the arguments of the plain operators."""
    return _op(q, k, v, _settings(*settings))[0]
