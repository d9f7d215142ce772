# SPDX-License-Identifier: Apache-2.0
"""The attention backend of the plugin for vLLM 0.33 (vllm.py): the classes that vLLM asks for.

The cache is vLLM's, [blocks, kv heads, block size, 2 head_size] with K and V of a token side by side, of any strides.
"""
from vllm.v1.attention.backend import AttentionType, MultipleOf
from vllm.v1.attention.backends.flash_attn import (FlashAttentionBackend, FlashAttentionImpl,
                                                   FlashAttentionMetadataBuilder)

from .flash_attn import flash_attn_varlen_func

_DTYPES = ("auto", "float16", "bfloat16")


def _refuse(**arguments):
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name}: expected None, since tessera does not have this feature, got "
                                      f"{type(value).__name__}")


class Backend(FlashAttentionBackend):
    """vLLM's FlashAttention backend with tessera in the place of its kernels."""
    supported_kv_cache_dtypes = list(_DTYPES)

    @staticmethod
    def get_name():
        return "CUSTOM"

    @staticmethod
    def get_impl_cls():
        return Impl

    @staticmethod
    def get_builder_cls():
        return MetadataBuilder

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec=None):
        return [MultipleOf(1)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size):
        return default_block_size

    @classmethod
    def supports_head_size(cls, head_size):
        return 1 <= head_size <= 256

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype):
        return kv_cache_dtype is None or kv_cache_dtype in _DTYPES

    @classmethod
    def supports_attn_type(cls, attn_type):
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_per_head_quant_scales(cls):
        return False

    @classmethod
    def supports_rswa(cls):
        return False

    @classmethod
    def supports_mm_prefix(cls):
        return False

    @classmethod
    def supports_sink(cls):
        return True

    @classmethod
    def supports_combination(cls, *args, **keywords):
        return None


class MetadataBuilder(FlashAttentionMetadataBuilder):
    """Without FlashAttention-3's plan, which tessera does not read."""

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self.aot_schedule = False


class Impl(FlashAttentionImpl):
    """Attention of one layer. It refuses fp8, context parallelism of decoding, a causal flag for each request,
    and the masks of PrefixLM and of R-SWA."""

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None,
                output_block_scale=None):
        """Writes attention of query [tokens, heads, head_size] over the cache into output, and returns it. Tokens past
        num_actual_tokens are padding."""
        _refuse(output_scale=output_scale, output_block_scale=output_block_scale)
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        given = attn_metadata
        if not isinstance(given.causal, bool):
            raise NotImplementedError("causal: expected a bool, since tessera has no causal flag for each request, got a "
                                      f"{type(given.causal).__name__}")
        _refuse(mm_prefix_query_range_tensor=given.mm_prefix_query_range_tensor,
                rswa_prefix_lens=given.rswa_prefix_lens, decode_context_parallel=self.dcp_world_size > 1)
        if self.kv_cache_dtype not in _DTYPES:
            raise NotImplementedError(f"kv_cache_dtype: expected {' or '.join(_DTYPES)}, got {self.kv_cache_dtype}")
        left, right = self.sliding_window
        k, v = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        tokens = given.num_actual_tokens
        flash_attn_varlen_func(
            query[:tokens], k, v, given.query_start_loc, None, given.max_query_len, given.max_seq_len,
            softmax_scale=self.scale, causal=given.causal, softcap=self.logits_soft_cap or 0.0,
            window_size=(left, right if given.causal or right != 0 else left), alibi_slopes=self.alibi_slopes,
            block_table=given.block_table, seqused_k=given.seq_lens, s_aux=self.sinks, out=output[:tokens])
        return output
