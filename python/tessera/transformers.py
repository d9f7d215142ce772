# SPDX-License-Identifier: Apache-2.0
"""tessera as an attention implementation of Hugging Face transformers:

    import tessera.transformers
    tessera.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="tessera")
"""
from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.jit import is_tracing

from . import _model_families
from ._layer_masks import LayerMask
from .torch import _attention, _broadcast, _sinks, sdpa
from .torch._operators import Arguments
from .torch._tensors import expect_tensor, under_autocast

NAME = "tessera"


def _sequences(cu_seq_lens, batch, length):
    """[batch, length]: the index of the sequence that each row of a packed batch belongs to."""
    rows = torch.arange(batch * length, device=cu_seq_lens.device, dtype=cu_seq_lens.dtype)
    return torch.searchsorted(cu_seq_lens, rows, right=True).reshape(batch, length)


def _within_sequences(mask, cu_seq_lens_q, cu_seq_lens_k, query, key):
    """The mask, in which moreover no sequence of a packed batch sees another one."""
    of_query = _sequences(cu_seq_lens_q, query.shape[0], query.shape[2])
    of_key = _sequences(cu_seq_lens_k, key.shape[0], key.shape[2])
    same = of_query[:, None, :, None] == of_key[:, None, None, :]
    return mask & same if mask.dtype == torch.bool else torch.where(same, mask, float("-inf"))


def _bias(attention_mask, position_bias, query, len_kv):
    """The additive bias of both, [batch or 1, heads or 1, len_q or 1, len_kv or 1]; None for none."""
    if attention_mask is not None and attention_mask.dtype not in (torch.bool, query.dtype, torch.float32):
        attention_mask = attention_mask.to(query.dtype)
    mask = sdpa.bias_of(attention_mask, query.shape, len_kv, query.dtype, "attention_mask")
    if position_bias is None or mask is None:
        return mask if position_bias is None else position_bias
    return position_bias + mask


def _of_padding(mask, len_q, len_kv):
    """(mask, whether it is bottom-right causal beside that): the row of a padded batch, [batch, 1, 1, len_kv] or None
    when all keys count, if the bool mask says no more than that. On the CPU only: the comparison reads the mask, which
    costs less there than computing the tiles above the diagonal, and on CUDA the host would wait for it."""
    if (mask.dtype != torch.bool or mask.device.type != "cpu" or type(mask) is not Tensor or is_compiling()
            or is_tracing() or mask.dim() != 4 or mask.shape[2:] != (len_q, len_kv) or not 2 <= len_q <= len_kv):
        return mask, False
    row, first = mask[:, :, -1:], mask[:, :, :1]
    causal = not torch.equal(row, first)
    seen = row.expand_as(mask)
    if causal:
        seen = row & torch.ones(len_q, len_kv, dtype=torch.bool).tril(len_kv - len_q)
    if not torch.equal(mask, seen):
        return mask, False
    return None if row.all() else row, causal


def _needs_pairs(mask, position_bias, dropout, cu_seq_lens_q):
    """Whether a call with a LayerMask needs it as a mask of all pairs: biases have no ragged batch, and offsets of the
    caller replace those of documents but not those of padding."""
    return (position_bias is not None or _attention.number("dropout", dropout) == 1.0
            or (cu_seq_lens_q is not None and (mask.keys is not None or mask.chunk > 0)))


def _check(unsupported, tensors):
    """Raises ValueError naming the argument: `unsupported` and `tensors` map names to what was given."""
    for name, given in unsupported.items():
        if given is not None:
            raise ValueError(f"{name}: expected None, since attn_implementation=\"{NAME}\" does not have it, got a "
                             f"{type(given).__name__}")
    for name, tensor in tensors.items():
        if tensor is not None:
            expect_tensor(name, tensor)
    mask = tensors["attention_mask"]
    if mask is not None and not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ValueError("attention_mask: expected bool, True where the key takes part, or floating numbers that are added "
                         f"to the scores, got {str(mask.dtype).removeprefix('torch.')}")
    if mask is not None and mask.dim() != 4:  # of fewer dimensions, PyTorch's attention takes the last two for lengths
        raise ValueError("attention_mask: expected [batch, 1, len_q, len_kv], any size also 1, got "
                         f"{list(mask.shape)}; the model takes a mask of padding, [batch, len_kv]")
    missing = [name for name in ("cu_seq_lens_q", "cu_seq_lens_k") if tensors[name] is None]
    if len(missing) == 1:
        raise ValueError(f"{missing[0]}: expected a tensor, since the other one is given, got None")
    if tensors["position_bias"] is not None and not missing:
        raise ValueError("position_bias: expected None with packed sequences (cu_seq_lens_q), got a tensor")


_warned: list[bool] = []


def _warn_once():
    """Not for each layer."""
    if not _warned:
        _warned.append(True)
        warnings.warn(f"attn_implementation=\"{NAME}\" gives no attention weights, as \"sdpa\" gives none: "
                      "use \"eager\" for output_attentions=True", stacklevel=3)


def attention_forward(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
                      attention_mask: Tensor | LayerMask | None, dropout: float = 0.0, scaling: float | None = None,
                      sliding_window: int | None = None, softcap: float | None = None, is_causal: bool | None = None,
                      s_aux: Tensor | None = None, sinks: Tensor | None = None, head_mask: None = None,
                      position_bias: Tensor | None = None, cache: None = None, cu_seq_lens_q: Tensor | None = None,
                      cu_seq_lens_k: Tensor | None = None, max_length_q: int | None = None,
                      max_length_k: int | None = None, output_attentions: bool = False,
                      **kwargs: Any) -> tuple[Tensor, None]:
    """Called by transformers for each layer: query [batch, heads, len_q, head_dim], key, value [batch, kv_heads, ..].

    attention_mask: a LayerMask, which says all of causal, window, padding, documents and chunks; or bool
        [batch, 1, len_q, len_kv], as sdpa_mask makes it; floating numbers are added. Without one a causal layer is causal, and
        sliding_window w lets a query see w keys, itself included: window (w - 1, 0).
    cu_seq_lens_q, cu_seq_lens_k: int [sequences + 1] over the rows of the whole batch: packed sequences, which do not
        see each other. max_length_q, max_length_k: bounds of their lengths. position_ids that begin anew mean packed
        sequences where they do for "sdpa": in the mask that transformers makes without a cache. Beside offsets they
        change nothing.
    s_aux, sinks: two names of one argument, [heads]: the sinks of tessera.torch.attention, as gpt-oss has them.
    Under autocast query, key and value are cast as PyTorch's attention casts them.
    Returns ([batch, len_q, heads, head_dim], None): output_attentions only warns, once, as it does with "sdpa".
    Raises ValueError that names the argument, also for head_mask and paged caches, which tessera does not have. Other
    keywords are for other implementations and change nothing."""
    if output_attentions:
        _warn_once()
    _check(dict(head_mask=head_mask, cache=cache),
           dict(query=query, key=key, value=value, position_bias=position_bias, cu_seq_lens_q=cu_seq_lens_q,
                cu_seq_lens_k=cu_seq_lens_k,
                attention_mask=None if isinstance(attention_mask, LayerMask) else attention_mask))
    if s_aux is not None and sinks is not None:
        raise ValueError("sinks: expected None beside s_aux, which is another name of it, got both")
    sinks = s_aux if sinks is None else sinks
    query, key, value, position_bias = under_autocast(query, key, value, position_bias)
    if not (query.shape[0] == key.shape[0] and key.shape[:2] == value.shape[:2]):
        query, key, value, _ = _broadcast.heads_first(query, key, value, True)
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and is_causal and not _model_families.take_masks_of_sdpa(type(module).__module__):
        is_causal = False
    layer_mask, right = None, -1
    if isinstance(attention_mask, LayerMask):
        attention_mask.expect(query, key)
        if _needs_pairs(attention_mask, position_bias, dropout, cu_seq_lens_q):
            attention_mask = attention_mask.dense(query.device)
        else:
            layer_mask, attention_mask = attention_mask, None
    causal = attention_mask is None and is_causal and query.shape[2] > 1
    if causal and cu_seq_lens_q is None and key.shape[2] > query.shape[2]:  # a static cache, whose other keys are unset
        key, value = key[:, :, :query.shape[2]], value[:, :, :query.shape[2]]
        position_bias = None if position_bias is None else position_bias[..., :query.shape[2]]
    left = -1
    if sliding_window is not None and is_causal and attention_mask is None:
        left = _attention._bound("sliding_window", sliding_window) - 1
        if left < 0:
            raise ValueError(f"sliding_window: expected an integer from 1 on or None, got {sliding_window}")
    if layer_mask is not None:
        causal, left, right = layer_mask.causal, layer_mask.window_left, layer_mask.window_right
        if cu_seq_lens_q is None and layer_mask.offsets is not None:
            cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k = layer_mask.offsets
    elif attention_mask is not None and cu_seq_lens_q is None:
        attention_mask, causal = _of_padding(attention_mask, query.shape[2], key.shape[2])
    scores = dict(seed=_attention.seed_tensor(None, dropout), causal=1 if causal else 0, window_left=left,
                  scale=scaling, window_right=right, softcap=softcap or 0.0, dropout_p=dropout)
    if cu_seq_lens_q is not None and attention_mask is not None:
        attention_mask = _within_sequences(attention_mask, cu_seq_lens_q, cu_seq_lens_k, query, key)
    if cu_seq_lens_q is None or attention_mask is not None:
        bias = _bias(attention_mask, position_bias, query, key.shape[2])
        if _attention.number("dropout", dropout) == 1.0:
            return sdpa.zeros_for_full_dropout(query, key, value, bias).transpose(1, 2), None
        if bias is None and sinks is None and not softcap and type(dropout) is float and dropout == 0.0:
            o = _attention.run_few(query, key, value, 1 if causal else 0, True, scaling, left, right)
            return o.transpose(1, 2), None
        o = _sinks.run(Arguments(query, key, value, bias, heads_first=True, **scores), sinks, False)
        return o.transpose(1, 2), None
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    max_len_q, max_len_kv = (-1 if length is None else int(length) for length in (max_length_q, max_length_k))
    arguments = Arguments(q, k, v, cu_seqlens_q=cu_seq_lens_q, cu_seqlens_kv=cu_seq_lens_k, max_len_q=max_len_q,
                          max_len_kv=max_len_kv, **scores)
    o = _sinks.run(arguments, sinks, False)
    return o.unflatten(0, (query.shape[0], query.shape[2])), None


def register(name: str = NAME) -> None:
    """Registers `name` with transformers' AttentionInterface and AttentionMaskInterface. Masks mean what those of
    "sdpa" mean. Causal layers, sliding windows, chunks, padding and packed sequences get no mask of all pairs.

    Raises ValueError for a name with "flash" in it, which transformers takes for flash-attn itself."""
    if "flash" in name:
        raise ValueError(f"name: expected one without \"flash\", which transformers takes for flash-attn, got {name!r}")
    from transformers import AttentionInterface, AttentionMaskInterface

    from ._mask_functions import layer_mask
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, layer_mask)


def register_context_parallel(group: Any = None, *, order: Any = "zigzag", name: str = "tessera_context_parallel") -> None:
    """Registers `name` as attention over the ranks of a group, of which each runs the model on its own rows.

    group, order: as in tessera.torch.context_parallel_attention(). input_ids, labels and position_ids of the model are
    those of this rank (tessera.torch.shard_sequence), position_ids always given, since transformers would count from 0.
    cu_seq_lens_q= of the model, if given, are offsets of packed documents over the whole sequence. Causal layers and
    sliding windows are as with register(). A mask that hides keys, dropout and caches are refused. Raises ValueError."""
    if "flash" in name:
        raise ValueError(f"name: expected one without \"flash\", which transformers takes for flash-attn, got {name!r}")
    from transformers import AttentionInterface, AttentionMaskInterface

    from . import _context_parallel_layer
    AttentionInterface.register(name, _context_parallel_layer.Layer(group, order))
    AttentionMaskInterface.register(name, _context_parallel_layer.masks_of(group))
