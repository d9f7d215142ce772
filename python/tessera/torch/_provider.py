# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own scaled_dot_product_attention running on tessera: the kernels behind its flash backend, and the order in
which PyTorch asks its backends."""
from __future__ import annotations

import contextlib
import functools

import torch

from . import _attention, _dropout_weights, _library, _operators
from ._operators import Arguments
from .sdpa import bias_of

_NONE, _BOTTOM_RIGHT, _TOP_LEFT = 0, 1, 2
_FLASH = int(torch.nn.attention.SDPBackend.FLASH_ATTENTION)


def _forward(query, key, value, bias, seed, causal, scale, dropout_p):
    """O [batch, heads, len_q, head_dim_v] and LSE [batch, heads, len_q]. O has the strides that PyTorch's fake kernels
    promise, those of query."""
    o, lse = _operators.forward(*Arguments(query, key, value, bias, seed=seed, causal=causal, scale=scale,
                                           dropout_p=dropout_p, heads_first=True))
    promised = torch.empty_like(query) if query.shape == o.shape else o
    return (o if promised.stride() == o.stride() else promised.copy_(o)), lse


def _backward(grad_out, query, key, value, out, lse, bias, seed, causal, scale, dropout_p, heads_first=True):
    return _operators.backward(grad_out, None, query, key, value, out, lse, bias, None, None, None, seed, -1, -1,
                               causal, -1, -1, scale, 0.0, dropout_p, None, False, heads_first)[:3]


def _causal_on_cpu(is_causal):
    """Causal of PyTorch's flash kernel for the CPU: top-left, as its SDPA has it, for any lengths."""
    return _TOP_LEFT if is_causal else _NONE


def _causal_on_cuda(is_causal):
    """Causal of PyTorch's flash kernel for CUDA: bottom-right, as flash-attention has it. SDPA calls that kernel with
    equal lengths only; torch.nn.attention.bias.causal_lower_right also with others."""
    return _BOTTOM_RIGHT if is_causal else _NONE


def _flash_for_cpu(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    """aten::_scaled_dot_product_flash_attention_for_cpu. Its LSE [batch, heads, len] is [batch, len, heads] in
    memory."""
    bias = bias_of(attn_mask, query.shape, key.shape[2], query.dtype)
    o, lse = _forward(query, key, value, bias, None, _causal_on_cpu(is_causal), scale, dropout_p)
    return o, lse.transpose(1, 2).contiguous().transpose(1, 2)


def _flash_for_cpu_backward(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None,
                            scale=None):
    """aten::_scaled_dot_product_flash_attention_for_cpu_backward. Its gradients are [batch, len, heads, head_dim] in
    memory, whatever the order of its inputs."""
    bias = bias_of(attn_mask, query.shape, key.shape[2], query.dtype)
    tensors = (t.transpose(1, 2) for t in (grad_out, query, key, value, out))
    gradients = _backward(*tensors, logsumexp, bias, None, _causal_on_cpu(is_causal), scale, dropout_p, False)
    return tuple(g.transpose(1, 2) for g in gradients)


def _flash_for_cuda(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    """aten::_scaled_dot_product_flash_attention. philox_seed is tessera's seed, in host memory, drawn from the CPU
    generator. _dropout_weights.py computes the debug mask."""
    seed, causal = _attention.seed_tensor(None, dropout_p), _causal_on_cuda(is_causal)
    o, lse = _forward(query, key, value, None, seed, causal, scale, dropout_p)
    none = debug_mask = query.new_empty(0)
    if return_debug_mask and seed is not None:
        rows = (t.transpose(1, 2) for t in (query, key, value))
        debug_mask = _dropout_weights.signed_weights(Arguments(*rows, seed=seed, causal=causal, scale=scale,
                                                               dropout_p=dropout_p))
    return o, lse, None, None, query.shape[2], key.shape[2], none if seed is None else seed, none, debug_mask


def _flash_for_cuda_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
                             is_causal, philox_seed, philox_offset, *, scale=None):
    seed = philox_seed if dropout_p else None
    return _backward(grad_out, query, key, value, out, logsumexp, None, seed, _causal_on_cuda(is_causal), scale,
                     dropout_p)


_KERNELS = {"CPU": {"_scaled_dot_product_flash_attention_for_cpu": _flash_for_cpu,
                    "_scaled_dot_product_flash_attention_for_cpu_backward": _flash_for_cpu_backward},
            "CUDA": {"_scaled_dot_product_flash_attention": _flash_for_cuda,
                     "_scaled_dot_product_flash_attention_backward": _flash_for_cuda_backward}}


class _FlashFirst:
    """The order in which PyTorch asks its backends for CUDA, with flash first until remove().

    On Hopper and Blackwell PyTorch asks cuDNN first, which then runs and not the provider. PyTorch sets that order in
    its first choice of a backend and overwrites what was set earlier. So that choice is made here, by a call without
    elements, as soon as CUDA is initialized. torch.nn.attention.sdpa_kernel(..., set_priority=True), PyTorch's
    documented way to an order, holds for a block of code only and uses the two functions that are used here."""

    def __init__(self):
        self._before = None  # PyTorch's order, once it is replaced
        self._removed = False
        self._put_flash_first()
        if torch.cuda.is_initialized():
            self._after_pytorchs_first_choice()
        else:
            torch.cuda._lazy_call(self._after_pytorchs_first_choice)

    def _put_flash_first(self):
        self._before = torch._C._get_sdp_priority_order()
        self._own = [_FLASH] + [backend for backend in self._before if backend != _FLASH]
        torch._C._set_sdp_priority_order(self._own)

    def _after_pytorchs_first_choice(self):
        if self._removed:
            return
        order = torch._C._get_sdp_priority_order()
        choose_a_backend()
        if order != self._own:  # the program set an order of its own
            torch._C._set_sdp_priority_order(order)
        elif torch._C._get_sdp_priority_order() != order:
            self._put_flash_first()

    def remove(self):
        """PyTorch's order again, unless the program has set another one in the meantime."""
        self._removed = True
        if torch._C._get_sdp_priority_order() == self._own:
            torch._C._set_sdp_priority_order(self._before)


def choose_a_backend():
    """Lets PyTorch choose a backend for CUDA, by which it sets its order of them; allocates nothing."""
    q = torch.empty(1, 1, 0, 8, dtype=torch.float16, device="cuda")
    with contextlib.suppress(RuntimeError):  # none of the enabled ones takes it
        torch._fused_sdp_choice(q, q, q)


@functools.lru_cache(maxsize=None)
def _register_shardings():
    """Lets DTensors reach the flash kernels for the CPU, for which PyTorch has no rule. Batch and heads stay sharded;
    PyTorch gathers all else. For CUDA it has rules of its own."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding
    aten = torch.ops.aten

    def shardings(tensors, results, q, k, attn_mask, numbers):
        """([results], [arguments]) for each way to cut one dimension of a mesh. Batch and heads are the dimensions 0
        and 1 of all tensors but the mask, in which they may have size 1 or be missing."""
        dims = [0]
        if q.shape[1] == k.shape[1] or k.shape[1] % q.mesh.size() == 0:  # each process has the keys of its queries
            dims.append(1)
        cuts = [Replicate(), *map(Shard, dims)]
        for cut in cuts:
            of_mask = []
            if attn_mask is not None:
                shared = cut.is_replicate() or len(attn_mask.shape) < 4 or attn_mask.shape[cut.dim] == 1
                of_mask = [Replicate() if shared else cut]
            yield [cut] * results, [cut] * tensors + [None] * numbers + of_mask

    @register_sharding(aten._scaled_dot_product_flash_attention_for_cpu.default)
    def forward(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
        return list(shardings(3, 2, query, key, attn_mask, 2))

    @register_sharding(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
    def backward(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None):
        return list(shardings(6, 3, query, key, attn_mask, 2))


class _Handle:
    """The handle that PyTorch keeps while the provider is active; remove() restores PyTorch's own kernels."""

    def __init__(self):
        keys = ["CPU"] if _library.status()[_library.CUDA_LIBRARY] else ["CPU", "CUDA"]
        self._libraries = []
        for key in keys:
            self._libraries.append(torch.library.Library("aten", "IMPL", key))
            for name, function in _KERNELS[key].items():
                self._libraries[-1].impl(name, function, key, allow_override=True)
        if torch.distributed.is_available():
            _register_shardings()
        self._order = _FlashFirst() if "CUDA" in keys else None
        _active.append(self)

    def remove(self):
        if self._order is not None:
            self._order.remove()
        for library in self._libraries:
            library._destroy()
        _active.remove(self)


_active: list[_Handle] = []


def is_active() -> bool:
    """Whether PyTorch's flash backend is tessera."""
    return bool(_active)


def order_when_active() -> list[str]:
    """The names of PyTorch's backends in the order in which it asks them on CUDA while the provider is active."""
    from torch.nn.attention import SDPBackend
    names = {int(value): name for name, value in SDPBackend.__members__.items()}
    order = torch._C._get_sdp_priority_order()
    return [names.get(backend, str(backend)) for backend in [_FLASH] + [b for b in order if b != _FLASH]]


def register_provider(name: str = "tessera") -> None:
    """Makes `name` known to PyTorch: torch.nn.attention.activate_flash_attention_impl(name) then runs
    torch.nn.functional.scaled_dot_product_attention on tessera wherever PyTorch chooses its flash kernel, on the CPU
    and on CUDA. PyTorch asks that kernel first from then on, before cuDNN, also on Hopper and Blackwell.
    torch.nn.attention.restore_flash_attention_impl() ends both.

    Raises ImportError when this PyTorch has no such registry (it came after 2.10)."""
    from torch.nn import attention
    register = getattr(attention, "register_flash_attention_impl", None)
    if register is None:
        raise ImportError(f"PyTorch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl")
    register(name, register_fn=_Handle)
