# SPDX-License-Identifier: Apache-2.0
"""A plugin for vLLM 0.33: register() gives its attention backend CUSTOM, which the wheel's entry point calls.

    vllm serve MODEL --attention-backend CUSTOM
    TESSERA_PROMPT_KERNEL=cuda.fa3.forward vllm serve ...   # prompts on a kernel of their own (docs/python.md, Servers)

It keeps vLLM's cache, metadata and appending of new keys, and attends with tessera.flash_attn. vLLM has no contract for
such plugins and changes its classes with each minor version, so register() does nothing for any other but warn. It is
tested against the signatures of 0.33.0 and has not run inside of vLLM. vLLM's FlashAttention backend, which this one
extends, is for CUDA."""
from __future__ import annotations

VERSION = "0.33"


def register() -> None:
    """Registers tessera._vllm_backend.Backend as vLLM's backend CUSTOM. Warns and does nothing in another vLLM, all of
    whose processes call this."""
    import importlib.metadata
    import warnings
    found = importlib.metadata.version("vllm")
    if found.split(".")[:2] != VERSION.split("."):
        warnings.warn(f"tessera.vllm: expected vLLM {VERSION}, got {found}: its backend CUSTOM is not tessera's",
                      stacklevel=2)
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    register_backend(AttentionBackendEnum.CUSTOM, "tessera._vllm_backend.Backend")
