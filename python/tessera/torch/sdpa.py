# SPDX-License-Identifier: Apache-2.0
"""torch.nn.functional.scaled_dot_product_attention, and PyTorch's own function running on tessera."""
import torch

from . import _attention, _operators

_BLOCKED = float("-inf")


def bias_of(mask, q_shape, len_kv, dtype):
    """The additive bias [.., .., .., ..] of torch's attn_mask: bool (True: takes part) or a number to add. A mask of
    fewer than 4 dimensions gets dimensions of 1 in front."""
    if mask is None:
        return None
    batch, heads, len_q = q_shape[0], q_shape[1], q_shape[2]
    full = (batch, heads, len_q, len_kv)
    fits = mask.dim() <= 4 and all(size in (1, expected) for size, expected in zip(mask.shape[::-1], full[::-1]))
    if not fits:
        raise ValueError(f"attn_mask: expected a shape that broadcasts to {list(full)}, got {list(mask.shape)}")
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, _BLOCKED)
    elif mask.dtype not in (dtype, torch.float32):
        raise ValueError(f"attn_mask: expected bool, float32 or the dtype of query, {dtype}, got {mask.dtype}")
    return mask[(None,) * (4 - mask.dim())]


def _four_dimensions(tensor):
    """[batch, heads, len, head_dim] of [..., len, head_dim]; all leading dimensions but the last make the batch."""
    if tensor.dim() == 4:
        return tensor
    if tensor.dim() > 4:
        return tensor.flatten(0, -4)
    return tensor[(None,) * (4 - tensor.dim())]


def _under_autocast(*tensors):
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)


def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                                 enable_gqa=False):
    """torch.nn.functional.scaled_dot_product_attention: the same arguments, the same meaning.

    query: [..., heads, len_q, head_dim]; key, value: [..., heads, len_kv, ..]. is_causal is TOP-LEFT: query i sees the
        keys 0 .. i, whatever the lengths are (attention() has both alignments). dropout_p holds in eval() too.
    attn_mask: bool, True where the key takes part, or numbers that are added to the scores, float32 or the dtype of
        query; broadcasts to [..., heads, len_q, len_kv]; numbers get a gradient.
    Returns [..., heads, len_q, head_dim_v]. Where a query sees no key the output is 0, as PyTorch's is since 2.5.
    Unlike torch's: head_dim up to 256 only; no nested tensors; dropout draws other bits. Under autocast the
        inputs are cast as torch's are.
    Raises ValueError that names the argument; tessera.Unsupported."""
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask: expected None with is_causal=True, got both")
    if query.dim() < 2 or key.dim() != query.dim() or value.dim() != query.dim():
        raise ValueError("query: expected query, key and value of one number of dimensions, 2 or more, got "
                         f"{query.dim()}, {key.dim()} and {value.dim()}")
    leading = query.shape[:-2]
    if not enable_gqa and query.dim() > 2 and key.shape[-3] != query.shape[-3]:
        raise ValueError(f"key: expected {query.shape[-3]} heads as query has (enable_gqa=False), got {key.shape[-3]}")
    query, key, value = _under_autocast(query, key, value)
    q, k, v = _four_dimensions(query), _four_dimensions(key), _four_dimensions(value)
    if attn_mask is not None and attn_mask.dim() > 4:
        attn_mask = attn_mask.expand(*leading, *attn_mask.shape[-2:]).flatten(0, -4)
    bias = bias_of(attn_mask, q.shape, k.shape[2], q.dtype)
    o, _ = _attention.run(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias, None, None, None,
                          _attention.seed_tensor(None, dropout_p), -1, -1, 2 if is_causal else 0, -1, -1, scale, 0.0,
                          dropout_p, None)
    o = o.transpose(1, 2)
    return o if query.dim() == 4 else o.reshape(*leading, *o.shape[-2:])


def _flash_for_cpu(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    """aten::_scaled_dot_product_flash_attention_for_cpu, with the strides that PyTorch's fake kernel promises."""
    bias = bias_of(attn_mask, query.shape, key.shape[2], query.dtype)
    o, lse = _operators.forward(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), bias, None, None,
                                None, None, -1, -1, 2 if is_causal else 0, -1, -1, scale, 0.0, dropout_p, None)
    out = o.transpose(1, 2)
    promised = torch.empty_like(query)
    if promised.stride() != out.stride():
        out = promised.copy_(out)
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)


def _flash_for_cpu_backward(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None,
                            scale=None):
    bias = bias_of(attn_mask, query.shape, key.shape[2], query.dtype)
    d_o, q, k, v, o = (t.transpose(1, 2) for t in (grad_out, query, key, value, out))
    gradients = _operators.backward(d_o, None, q, k, v, o, logsumexp, bias, None, None, None, None, -1, -1,
                                    2 if is_causal else 0, -1, -1, scale, 0.0, dropout_p, None, False)
    return tuple(g.transpose(1, 2) for g in gradients[:3])


class _Handle:
    """What PyTorch keeps while the provider is active; remove() gives PyTorch its own kernels back."""

    def __init__(self):
        self._library = torch.library.Library("aten", "IMPL", "CPU")
        self._library.impl("_scaled_dot_product_flash_attention_for_cpu", _flash_for_cpu, "CPU", allow_override=True)
        self._library.impl("_scaled_dot_product_flash_attention_for_cpu_backward", _flash_for_cpu_backward, "CPU",
                           allow_override=True)

    def remove(self):
        self._library._destroy()


def register_provider(name="tessera"):
    """Makes `name` known to PyTorch: torch.nn.attention.activate_flash_attention_impl(name) then runs
    torch.nn.functional.scaled_dot_product_attention on tessera wherever PyTorch chooses its flash kernel for the CPU,
    and torch.nn.attention.restore_flash_attention_impl() ends that. Kernels for CUDA are not replaced.

    Raises ImportError when this PyTorch has no such registry (it came after 2.10)."""
    from torch.nn import attention
    register = getattr(attention, "register_flash_attention_impl", None)
    if register is None:
        raise ImportError(f"PyTorch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl")
    register(name, register_fn=_Handle)
