# SPDX-License-Identifier: Apache-2.0
"""tessera as an attention implementation of Hugging Face transformers:

    import tessera.transformers
    tessera.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="tessera")
"""
import warnings
import weakref

import torch

from .torch import _attention, sdpa

NAME = "tessera"


def _once_for_all_layers(function):
    """Remembers the answer for the last tensor, as long as that is not changed: all layers of a model are given one
    tensor, and reading it waits for the device. While a graph is captured nothing is remembered: its replays would
    take the answer for other positions (and the reading is PyTorch's error there)."""
    last = (lambda: None), None, None, None

    def remembered(tensor, batch):
        nonlocal last
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return function(tensor, batch)
        version = None if tensor.is_inference() else tensor._version  # inference tensors don't count their changes
        known, known_version, known_batch, answer = last
        if known() is tensor and version is not None and (known_version, known_batch) == (version, batch):
            return answer
        answer = function(tensor, batch)
        last = weakref.ref(tensor), version, batch, answer
        return answer
    return remembered


@_once_for_all_layers
def _member_starts(position_ids, batch):
    """cu_seqlens of sequences that are packed one after another: int32 [sequences + 1] over the rows of all members;
    None when each row of the batch is one sequence. Reads position_ids on the host."""
    position_ids = position_ids.expand(batch, -1)
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    begins = starts.flatten().nonzero().flatten()
    if len(begins) == batch:
        return None
    end = begins.new_tensor([position_ids.numel()])
    return torch.cat([begins, end]).to(torch.int32)


def _packed(query, key, attention_mask, position_ids, cu_seq_lens_q, cu_seq_lens_k):
    """(cu_seqlens_q, cu_seqlens_kv) of a packed batch, or None. transformers makes no mask for one with a cache on."""
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        return cu_seq_lens_q, cu_seq_lens_k
    whole = attention_mask is None and query.shape[2] == key.shape[2] > 1
    if not whole or position_ids is None or position_ids.dim() != 2 or torch.compiler.is_compiling():
        return None
    starts = _member_starts(position_ids, query.shape[0])
    return None if starts is None else (starts, starts)


def _bias(attention_mask, position_bias, query, len_kv):
    """One additive bias of both, [batch or 1, heads or 1, len_q or 1, len_kv or 1]."""
    if attention_mask is not None and attention_mask.dtype not in (torch.bool, query.dtype, torch.float32):
        attention_mask = attention_mask.to(query.dtype)
    mask = sdpa.bias_of(attention_mask, (*query.shape[:2], query.shape[2]), len_kv, query.dtype)
    if position_bias is None or mask is None:
        return mask if position_bias is None else position_bias
    return position_bias + mask


def attention_forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None,
                      softcap=None, is_causal=None, s_aux=None, position_bias=None, cache=None, position_ids=None,
                      cu_seq_lens_q=None, cu_seq_lens_k=None, output_attentions=False, **kwargs):
    """What transformers calls for each layer: query (batch, heads, len_q, head_dim), key, value (batch, kv_heads, ..).

    attention_mask: as sdpa_mask makes it, bool (batch, 1, len_q, len_kv) or None; numbers are added. Without one a
    causal layer is causal, and sliding_window w lets a query see w keys, itself included: window (w - 1, 0). Without a
    mask, position_ids that begin anew inside a row mean packed sequences, which don't see each other (under
    torch.compile they can't be looked at: give cu_seq_lens_q and cu_seq_lens_k there).
    Returns ((batch, len_q, heads, head_dim), None): output_attentions only warns, as it does with "sdpa". Raises
    ValueError for s_aux (sinks) and paged caches, which are not there."""
    if output_attentions:
        warnings.warn(f"attn_implementation=\"{NAME}\" gives no attention weights, as \"sdpa\" gives none: "
                      "use \"eager\" for output_attentions=True", stacklevel=2)
    for name, given in (("s_aux", s_aux is not None), ("cache", cache is not None)):
        if given:
            raise ValueError(f"{name}: attn_implementation=\"{NAME}\" doesn't have it; expected it to be left out")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = attention_mask is None and is_causal and query.shape[2] > 1
    if causal and key.shape[2] > query.shape[2]:  # the first call with an empty static cache: the rest has no keys yet
        key, value = key[:, :, :query.shape[2]], value[:, :, :query.shape[2]]
        position_bias = None if position_bias is None else position_bias[..., :query.shape[2]]
    left = sliding_window - 1 if sliding_window is not None and is_causal and attention_mask is None else -1
    seed = _attention.seed_tensor(None, dropout)
    settings = (1 if causal else 0, left, -1, scaling, softcap or 0.0, dropout, None)
    packed = _packed(query, key, attention_mask, position_ids, cu_seq_lens_q, cu_seq_lens_k)
    if packed is None:
        bias = _bias(attention_mask, position_bias, query, key.shape[2])
        if bias is None and not softcap and not dropout:
            return _attention.run_o(query, key, value, int(causal), True, scaling, left, -1).transpose(1, 2), None
        o, _ = _attention.run(query, key, value, bias, None, None, None, seed, -1, -1, *settings, True)
        return o.transpose(1, 2), None
    if position_bias is not None:
        raise ValueError("position_bias: expected none with packed sequences")
    flat = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    o, _ = _attention.run(*flat, None, None, *packed, seed, -1, -1, *settings, False)
    return o.unflatten(0, (query.shape[0], query.shape[2])), None


def register(name=NAME):
    """Registers `name` with transformers' AttentionInterface and AttentionMaskInterface: masks are sdpa's, so padding,
    sliding windows, chunks and static caches mean what they mean there.

    Raises ValueError for a name with "flash" in it, which transformers takes for flash-attn itself."""
    if "flash" in name:
        raise ValueError(f"name: expected one without \"flash\", which transformers takes for flash-attn, got {name!r}")
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, sdpa_mask)
