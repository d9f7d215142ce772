# SPDX-License-Identifier: Apache-2.0
"""O of a call that needs gradients, by a node of autograd in C++.

The stable ABI has no words for gradients, and a torch.autograd.Function costs more than the rest of a small call. PyTorch
has one operator with a gradient of its own and no kernel for the CPU or CUDA: it is for backends that bring their own
attention, and PyTorch never calls it there. libtessera_torch gives it those kernels (torch_ops/operators.cc)."""
import functools
import struct

import torch

_SCHEMA = ("aten::_scaled_dot_product_fused_attention_overrideable(Tensor query, Tensor key, Tensor value, "
           "Tensor? attn_bias=None, float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, "
           "float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, "
           "SymInt max_k, Tensor philox_seed, Tensor philox_offset, Tensor debug_attn_mask)")
_CLASSES = frozenset((torch.Tensor, torch.nn.Parameter))
_modes = torch._C._len_torch_dispatch_stack
_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def _operator():
    """PyTorch's operator, or None where it is not the one that libtessera_torch knows."""
    packet = getattr(torch.ops.aten, "_scaled_dot_product_fused_attention_overrideable", None)
    if packet is None or str(packet.default._schema) != _SCHEMA:
        return None
    return packet.default._op


op = _operator()


@functools.lru_cache(maxsize=256)
def settings(causal, heads_first, scale, window_left, window_right, least_for_rest):
    """What the operator takes for its attn_bias: int64 [7] in host memory, as torch_ops/operators.cc has it."""
    bits = 0 if scale is None else struct.unpack("q", struct.pack("d", scale))[0]
    with torch.inference_mode(False):  # which would make a tensor that no backward may keep
        return torch.tensor([causal, heads_first, window_left, window_right, scale is not None, bits,
                             min(least_for_rest, 2**63 - 1)], dtype=torch.int64, device="cpu")


def takes(q, k, v):
    """Whether op(q, k, v, settings(...))[0] is O of a plain call. Not for what traces: it is to see tessera's own
    operators. Nor for tensors without memory: PyTorch has a kernel of its own for them. Nor where hooks take what is
    saved, as checkpoints do: they may cast it, and they run the forward once more, perhaps under a mode, and want the
    same tensors saved."""
    return (op is not None and q.__class__ in _CLASSES and not _modes()
            and _hooks is not None and _hooks(False) is None
            and ((q.is_cuda and k.is_cuda and v.is_cuda) or (q.is_cpu and k.is_cpu and v.is_cpu)))
