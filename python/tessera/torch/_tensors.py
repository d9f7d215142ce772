# SPDX-License-Identifier: Apache-2.0
"""Which objects may stand for a tensor argument, and what PyTorch's own mask classes mean."""
import contextlib

import torch
from torch.nn.attention.bias import CausalBias, CausalVariant

from .._subclasses import overridden

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_PLAIN_OR_NONE = _PLAIN | {type(None)}
_NO_OVERRIDE = (torch._C._disabled_torch_function_impl,)
_DEVICES = ("cpu", "cuda")
_ALIGNMENTS = {CausalVariant.UPPER_LEFT: "top-left", CausalVariant.LOWER_RIGHT: "bottom-right"}


def is_plain(tensor):
    """Whether a tensor's class is one of PyTorch's own."""
    return type(tensor) in _PLAIN


def expect_tensor(name, tensor):
    """Raises ValueError naming the argument unless `tensor` is a torch.Tensor that an operator may be called with.

    A subclass with a __torch_function__ of its own is refused: only that function knows what its objects mean, and it
    does not know tessera's operators. One with a __torch_dispatch__ receives the call of the operator."""
    cls = type(tensor)
    if cls in _PLAIN and tensor.layout == torch.strided and not tensor.is_nested:
        return
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name}: expected a torch.Tensor, got a {cls.__name__}")
    if tensor.is_nested:
        raise ValueError(f"{name}: expected a strided tensor, got one that is nested")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name}: expected a strided tensor, got one of the layout {tensor.layout}")
    if overridden(cls, torch.Tensor, ("__torch_function__",), _NO_OVERRIDE) is not None:
        raise ValueError(f"{name}: expected a torch.Tensor whose memory holds its numbers, got a {cls.__name__}, which "
                         "overrides __torch_function__; .as_subclass(torch.Tensor) gives its memory as it is")


def expect_arguments(arguments):
    """expect_tensor() of the 8 tensors with which the operators' Arguments begin; all but q, k and v may be None.
    Returns whether all are of PyTorch's own classes."""
    q, k, v, *others = arguments[:8]
    if (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN
            and _PLAIN_OR_NONE.issuperset([type(t) for t in others])):
        return True
    for name, tensor in zip(arguments._fields, arguments[:8]):
        if tensor is not None or name in ("q", "k", "v"):
            expect_tensor(name, tensor)
    return False


def under_autocast(q, k, v, bias=None):
    """The tensors of a call as PyTorch's attention takes them under autocast: q, k and v in its dtype, but for fp64 and
    what is no float. A bias of 16 bits follows them; one in fp32 stays, which is more exact than PyTorch's."""
    device = q.device.type
    if device not in _DEVICES or not torch.is_autocast_enabled(device):
        return q, k, v, bias
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in (q, k, v))
    if bias is not None and bias.dtype in (torch.float16, torch.bfloat16):
        bias = bias.to(q.dtype)
    return q, k, v, bias


def without_autocast(tensor):
    """A context in which operators on the tensor's device compute in the dtypes of their inputs."""
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if device in _DEVICES else contextlib.nullcontext()


def alignment_of(name, bias, len_q, len_kv):
    """The alignment of a CausalBias: "top-left" or "bottom-right". Raises ValueError naming the argument when its
    lengths are not those of the call."""
    if (bias.seq_len_q, bias.seq_len_kv) != (len_q, len_kv):
        raise ValueError(f"{name}: expected a CausalBias of {len_q} queries and {len_kv} keys, got one of "
                         f"{bias.seq_len_q} and {bias.seq_len_kv}")
    return _ALIGNMENTS[bias.variant]
