# SPDX-License-Identifier: Apache-2.0
"""The function that makes the masks of attn_implementation="tessera": it keeps the structure of a mask.

transformers describes a mask by a function of indices, which it composes of a few closures, and sdpa_mask evaluates
that function for all pairs. layer_mask() reads it instead: in Python from the closures, in a graph that torch.compile
traces from the operations that the function leaves there, because Dynamo of PyTorch 2.11 does not show closures. Masks
of other functions are those of sdpa_mask.
"""
from __future__ import annotations

import inspect
import operator
import warnings
from typing import NamedTuple

import torch
from torch import Tensor
from torch._dynamo.comptime import comptime
from torch.compiler import is_compiling
from torch.jit import is_tracing
from transformers import masking_utils

from . import _layer_masks, _model_families
from ._layer_masks import LayerMask

# Beginnings of the model_type of models that work on the mask itself (index it, add to it, concatenate it).
_WORK_ON_THE_MASK = ("axk2", "deepseek_v32", "diffusion_gemma", "doge", "gemma4_assistant", "gemma4_unified_assistant",
                     "glm_moe_dsa", "hy_v4", "longformer", "luke", "nemotron_asr_streaming", "pix2struct", "qwen4_exp",
                     "siglip2", "switch_transformers", "t5gemma2", "visual_bert")


class Pattern(NamedTuple):
    """The mask that a mask function describes.

    local: "" or "window" (a query sees `size` keys, itself included), "both sides" (`size` keys on each side) or "chunk".
    documents: "" or whose position_ids separate them, "given" or "model"."""
    causal: bool = False
    local: str = ""
    size: int = 0
    documents: str = ""


# The kinds of the closures' names in transformers.masking_utils, with the variable that holds their number.
_LOCAL = {"sliding_window_overlay": ("window", "sliding_window"),
          "sliding_window_bidirectional_overlay": ("both sides", "sliding_window"),
          "chunked_overlay": ("chunk", "chunk_size")}


def _pattern_of(function):
    """The Pattern of a mask function that Python sees, or None."""
    found, pending, remapped = {}, [function], False
    while pending:
        function = pending.pop()
        if function is masking_utils.causal_mask_function:
            found["causal"] = True
            continue
        if function is masking_utils.bidirectional_mask_function:
            continue
        if getattr(function, "__module__", None) != masking_utils.__name__ or not inspect.isfunction(function):
            return None
        maker, cells = function.__qualname__.partition(".")[0], inspect.getclosurevars(function).nonlocals
        if maker == "and_masks":
            pending += cells["mask_functions"]
        elif maker == "remap_positions_for_packed_sequence":
            remapped = True
            pending.append(cells["mask_function"])
        elif maker == "packed_sequence_mask_function":
            found["documents"] = "given"
        elif maker in _LOCAL and "local" not in found:
            found["local"], size = _LOCAL[maker]
            found["size"] = cells[size]
        else:
            return None
    return _checked(found, remapped)


def _checked(found, remapped):
    """The Pattern of these fields, or None for one that has no form but a mask."""
    pattern = Pattern(**found)
    if remapped and not pattern.documents:
        return None
    if pattern.documents == "given" and (pattern.local in ("chunk", "both sides") or not pattern.causal):
        return None
    return pattern


class _Graph:
    """Reads a Pattern from the nodes of an FX graph that a call of a mask function left."""

    def __init__(self, batch, head, query, key):
        self._batch, self._index = batch, {query: "q", key: "k"}
        self._remapped, self._documents = False, None

    def pattern(self, node, size):
        """size: the width of the local part, or None. Returns None for what is not known."""
        found = {}
        for term in self._terms(node):
            kind = self._kind(term, size)
            if kind is None:
                return None
            if kind == "causal":
                found["causal"] = True
            elif kind == "documents":
                found["documents"] = "given" if _depends_on_input(self._documents) else "model"
            elif kind != "all":
                if "local" in found:
                    return None
                found["local"], found["size"] = kind, size
        return _checked(found, self._remapped)

    def _terms(self, node):
        name, arguments = _operation(node)
        if name == "and_":
            return [term for argument in arguments for term in self._terms(argument)]
        return [] if name == "new_ones" else self._terms(arguments[0]) if name == "to" else [node]

    def _kind(self, node, size):
        name, arguments = _operation(node)
        if len(arguments) != 2:
            return None
        left, right = arguments
        if name == "ge" and self._side(left) == "q" and right == 0:
            return "all"
        if name == "le" and self._side(left) == "k" and self._side(right) == "q":
            return "causal"
        if name == "gt" and self._side(left) == "k" and self._is(right, "sub", "q", size):
            return "window"
        if name == "le" and right == size and _operation(left)[0] == "abs":
            return "both sides" if self._is(_operation(left)[1][0], "sub", "q", "k") else None
        if name == "eq":
            return self._equality(left, right, size)
        return None

    def _equality(self, left, right, size):
        of_left, of_right = self._looked_up(left), self._looked_up(right)
        if of_left and of_right and of_left[0] is of_right[0] and {of_left[1], of_right[1]} == {"q", "k"}:
            self._documents = of_left[0]
            return "documents"
        sides = set()
        for node in (left, right):
            name, arguments = _operation(node)
            if name != "floordiv" or arguments[1] != size or _operation(arguments[0])[0] != "sub":
                return None
            sides.add(self._side(_operation(arguments[0])[1][0]))
        return "chunk" if sides == {"q", "k"} else None

    def _is(self, node, name, side, other):
        found, arguments = _operation(node)
        if found != name or len(arguments) != 2 or self._side(arguments[0]) != side:
            return False
        return self._side(arguments[1]) == other if other in ("q", "k") else arguments[1] == other

    def _side(self, node):
        """ "q" or "k" if the node is the index of a query or of a key, or its position in its document."""
        if not isinstance(node, torch.fx.Node):
            return None
        looked_up = self._looked_up(node)
        if looked_up:
            self._remapped = True
            return looked_up[1]
        return self._index.get(node)

    def _looked_up(self, node):
        """(table, "q" or "k") if the node is table[batch, index]."""
        name, arguments = _operation(node)
        if name != "getitem" or not isinstance(arguments[1], tuple) or len(arguments[1]) != 2:
            return None
        batch, index = arguments[1]
        return (arguments[0], self._index[index]) if batch is self._batch and index in self._index else None


def _operation(node):
    """The name of what a node computes, as in the module operator, and its arguments."""
    if not isinstance(node, torch.fx.Node) or node.op not in ("call_function", "call_method"):
        return "", ()
    name = node.target if node.op == "call_method" else node.target.__name__
    if name.startswith("__"):  # Dynamo of PyTorch 2.11 has a call of the method __eq__ for ==
        name = getattr(getattr(operator, name, None), "__name__", name)
    return name, node.args


def _depends_on_input(node):
    """Whether the values of a tensor that the graph is given take part in a node. A model makes the others from sizes."""
    pending, seen = [node], set()
    while pending:
        node = pending.pop()
        if node in seen or node.op == "call_method" and node.target in ("size", "numel", "dim"):
            continue
        seen.add(node)
        if node.op in ("placeholder", "get_attr") and isinstance(node.meta.get("example_value"), Tensor):
            return True
        pending += node.all_input_nodes
    return False


_traced: list[Pattern | None] = [None]


def _read_trace(context):
    """Reads the pattern while Dynamo traces, in the frame of _traced_pattern()."""
    batch, head, query, key, seen = (context.get_local(name).as_proxy().node
                                     for name in ("batch", "head", "query", "key", "seen"))
    size = context.get_local("local_size")
    size = size.as_proxy() if size.is_proxy() and not size.is_python_constant() else size.as_python_constant()
    size = size.node if isinstance(size, torch.fx.Proxy) else size
    _traced[0] = _Graph(batch, head, query, key).pattern(seen, size)


@torch.compiler.assume_constant_result
def _traced_kind(field):
    """A field of the Pattern that _read_trace() found last; "unknown" for none. Dynamo calls it once for each place."""
    return "unknown" if _traced[0] is None else getattr(_traced[0], field)


def _traced_pattern(batch, head, query, key, seen, local_size):
    """The Pattern of the mask function that was traced to `seen`, or None."""
    comptime(_read_trace)
    local = _traced_kind("local")
    if local == "unknown":
        return None
    return Pattern(_traced_kind("causal"), local, local_size if local else 0, _traced_kind("documents"))


_warned: set[str] = set()


@torch.compiler.assume_constant_result
def _warn_once(reason):
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"attn_implementation=\"tessera\": {reason}, so layers get a mask of [batch, 1, len_q, len_kv], "
                      "which takes more time and memory", stacklevel=2)
    return True


def _may_read(tensor):
    """Whether the host may read it without waiting for a device and without fixing it in a graph."""
    return not (is_compiling() or is_tracing()) and tensor.device.type == "cpu" and type(tensor) is Tensor


def _run_of(keys):
    """(all keys count, the Run of the keys that count or None). If the host may not read `keys`, the device checks that
    each row's keys are a single run, and stops the program otherwise."""
    run = _layer_masks.run_of(keys)
    if _may_read(keys):
        return bool(keys.all()), run if bool(run.is_one.all()) else None
    torch._assert_async(run.is_one.all(), "attention_mask: expected one run of ones in each row, since the host does "
                        "not read it here, got zeros between ones; a mask of 4 dimensions may be anything")
    return False, run


def layer_mask(**keywords):
    """The mask function of "tessera" for AttentionMaskInterface. The keywords are those of sdpa_mask().

    Returns a LayerMask, None for a mask that says no more than the layer does (causal or nothing), or what sdpa_mask()
    gives; for a model that is not written for such masks, what eager_mask() gives. Raises ValueError for an attention_mask
    of 2 dimensions, that of padding, with other numbers than 0 and 1."""
    mask = keywords.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        keywords["attention_mask"] = _layer_masks.padding("attention_mask", mask, _may_read(mask))
    if not _model_families.take_masks_of_sdpa(type(keywords.get("config")).__module__):
        _warn_once("transformers has no \"sdpa\" for this model")
        return masking_utils.eager_mask(**keywords)
    mask = _structured(**keywords)
    return masking_utils.sdpa_mask(**keywords) if mask is NotImplemented else mask


def _structured(batch_size=None, q_length=None, kv_length=None, q_offset=0, kv_offset=0, mask_function=None,
                attention_mask=None, local_size=None, allow_is_causal_skip=True, allow_is_bidirectional_skip=None,
                use_vmap=False, device="cpu", config=None, **_):
    """layer_mask(), or NotImplemented for a mask that sdpa_mask() has to make."""
    if isinstance(attention_mask, LayerMask):
        return attention_mask  # generate() made it before
    if q_length is None or isinstance(q_length, Tensor) or q_length == 1 or mask_function is None:
        return NotImplemented  # one query of each sequence has a row of keys, and no mask of pairs
    if isinstance(q_offset, Tensor) or isinstance(kv_offset, Tensor) or allow_is_bidirectional_skip is False:
        return NotImplemented
    model_type = getattr(config, "model_type", "")
    if model_type == "falcon" or model_type.startswith(_WORK_ON_THE_MASK):
        return NotImplemented
    if use_vmap:
        _warn_once("a model adds a mask function of its own")
        return NotImplemented
    if attention_mask is not None and (attention_mask.dim() != 2 or attention_mask.shape[1] != kv_length):
        return NotImplemented
    bidirectional = allow_is_bidirectional_skip is not None
    if not bidirectional and (q_length != kv_length or q_offset != kv_offset):
        return NotImplemented  # a cache that has keys already, or room for more
    if torch.compiler.is_dynamo_compiling():
        batch = torch.arange(batch_size, device=device)[:, None]
        query = torch.arange(1, q_length, device=device)[None]
        key = torch.arange(q_length - 1, device=device)[None]
        head = torch.arange(1, device=device)[:, None]
        seen = mask_function(batch, head, query, key)
        pattern = _traced_pattern(batch, head, query, key, seen, local_size)
    else:
        pattern = _pattern_of(mask_function)
    if pattern is None:
        _warn_once("a model has a mask function that is not known")
        return NotImplemented
    if pattern.local and q_length != kv_length:
        return NotImplemented
    if not (bidirectional or allow_is_causal_skip or pattern.documents):
        return NotImplemented  # a model that works on the mask asks for one; with documents that does not show
    left, right = -1, -1
    if pattern.local in ("window", "both sides"):
        reach = pattern.size - (1 if pattern.local == "window" else 0)
        if reach < kv_length - 1:
            left, right = reach, reach if pattern.local == "both sides" else -1
    chunk = pattern.size if pattern.local == "chunk" and pattern.size < kv_length else 0
    mask = LayerMask(batch_size, q_length, kv_length, pattern.causal, left, right)
    if attention_mask is not None:
        return _padded(mask, attention_mask, chunk)
    if pattern.documents == "given" and left != 0:
        return _packed(mask, mask_function, device)
    if chunk:
        return mask._replace(chunk=chunk, offsets=_layer_masks.of_chunks(batch_size, kv_length, chunk, device))
    return None if left < 0 else mask


def _padded(mask, keys, chunk):
    every, run = _run_of(keys)
    if run is None:
        _warn_once("an attention_mask has zeros between ones")
        return NotImplemented
    local = mask.window_left >= 0 or chunk
    if every and not chunk:
        return mask if local else None
    # Queries of padding take part where a layer's queries and keys may be of two sequences (cross-attention).
    if mask.causal or local:
        offsets = _layer_masks.of_padded_rows(run, mask.len_kv, chunk)
    else:
        offsets = _layer_masks.of_padded_keys(run, mask.len_q, mask.len_kv)
    return mask._replace(keys=keys, chunk=chunk, offsets=offsets)


def _packed(mask, function, device):
    """The mask of documents: a query that does not see the key before it begins one."""
    index = torch.arange(1, mask.len_q, device=device)[None]
    batch = torch.arange(mask.batch, device=device)[:, None]
    joined = function(batch, torch.zeros_like(batch[:1]), index, index - 1).expand(mask.batch, mask.len_q - 1)
    begins = torch.cat([torch.ones_like(joined[:, :1]), ~joined], 1)
    return mask._replace(documents=begins.cumsum(-1), offsets=_layer_masks.of_documents(begins))
