# SPDX-License-Identifier: Apache-2.0
"""Which objects may stand for a tensor argument, and what PyTorch's own mask classes mean."""
import torch
from torch.nn.attention.bias import CausalBias, CausalVariant

from .._subclasses import overridden

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_NO_OVERRIDE = (torch._C._disabled_torch_function_impl,)
_ALIGNMENTS = {CausalVariant.UPPER_LEFT: "top-left", CausalVariant.LOWER_RIGHT: "bottom-right"}


def expect_tensor(name, tensor):
    """Raises ValueError naming the argument unless `tensor` is a torch.Tensor that an operator may be called with.

    A subclass with a __torch_function__ of its own is refused: only that function knows what its objects mean, and it
    was not written for tessera's operators. One with a __torch_dispatch__ gets the operator call itself."""
    cls = type(tensor)
    if cls in _PLAIN:
        return
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name}: expected a torch.Tensor, got a {cls.__name__}")
    if overridden(cls, torch.Tensor, ("__torch_function__",), _NO_OVERRIDE) is not None:
        raise ValueError(f"{name}: expected a torch.Tensor whose memory holds its numbers, got a {cls.__name__}, which "
                         "overrides __torch_function__; .as_subclass(torch.Tensor) gives its memory as it is")


def alignment_of(name, bias, len_q, len_kv):
    """The alignment of a CausalBias: "top-left" or "bottom-right". Raises ValueError naming the argument when its lengths
    are not those of the call."""
    if (bias.seq_len_q, bias.seq_len_kv) != (len_q, len_kv):
        raise ValueError(f"{name}: expected a CausalBias of {len_q} queries and {len_kv} keys, got one of "
                         f"{bias.seq_len_q} and {bias.seq_len_kv}")
    return _ALIGNMENTS[bias.variant]
