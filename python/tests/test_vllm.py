# SPDX-License-Identifier: Apache-2.0
"""The plugin for vLLM against stand-ins for its classes, with the signatures of vLLM 0.33.0. It does not run vLLM."""
import dataclasses
import importlib.metadata
import inspect
import sys
import types
import typing

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import tessera.vllm  # noqa: E402
import torch_reference as reference  # noqa: E402

NAN = float("nan")


class AttentionType:
    DECODER, ENCODER, ENCODER_ONLY, ENCODER_DECODER = "decoder", "encoder", "encoder_only", "encoder_decoder"


class MultipleOf:
    def __init__(self, base):
        self.base = base


class FlashAttentionBackend:
    def get_name(): ...
    def get_impl_cls(): ...
    def get_builder_cls(): ...
    def get_supported_kernel_block_sizes(cls, kv_cache_spec=None): ...
    def get_preferred_block_size(cls, default_block_size): ...
    def supports_rswa(cls): ...
    def supports_attn_type(cls, attn_type): ...
    def supports_per_head_quant_scales(cls): ...
    def supports_head_size(cls, head_size): ...
    def supports_kv_cache_dtype(cls, kv_cache_dtype): ...
    def supports_mm_prefix(cls): ...
    def supports_sink(cls): ...

    def supports_combination(cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse,
                             use_mm_prefix, device_capability): ...


@dataclasses.dataclass
class FlashAttentionMetadata:
    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    max_seq_len: int
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    max_dcp_context_kv_len: typing.Any = None
    dcp_context_kv_lens: typing.Any = None
    num_decode_reqs: int = 0
    num_prefill_reqs: int = 0
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    scheduler_metadata: typing.Any = None
    max_num_splits: int = 0
    causal: typing.Any = True
    mm_prefix_query_range_tensor: typing.Any = None
    rswa_prefix_lens: typing.Any = None
    rswa_window: typing.Any = None
    rswa_window_tensor: typing.Any = None


class FlashAttentionMetadataBuilder:
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.aot_schedule = True


class FlashAttentionImpl:
    dcp_world_size = 1

    def __init__(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype,
                 logits_soft_cap=None, attn_type=AttentionType.DECODER, kv_sharing_target_layer_name=None, sinks=None):
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes)
        self.sliding_window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.kv_cache_dtype, self.logits_soft_cap, self.sinks = kv_cache_dtype, logits_soft_cap or 0, sinks

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None,
                output_block_scale=None): ...


@pytest.fixture
def vllm(monkeypatch):
    """The modules of vLLM that the plugin imports; `registered` gets what it registers."""
    registered = {}
    contents = {"vllm": {}, "vllm.v1": {}, "vllm.v1.attention": {}, "vllm.v1.attention.backends": {},
                "vllm.v1.attention.backend": dict(AttentionType=AttentionType, MultipleOf=MultipleOf),
                "vllm.v1.attention.backends.flash_attn": {
                    c.__name__: c for c in (FlashAttentionBackend, FlashAttentionImpl, FlashAttentionMetadataBuilder)},
                "vllm.v1.attention.backends.registry": dict(
                    AttentionBackendEnum=types.SimpleNamespace(CUSTOM="CUSTOM"),
                    register_backend=lambda backend, class_path=None: registered.update({backend: class_path}))}
    for name, given in contents.items():
        module = types.ModuleType(name)
        module.__dict__.update(given, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "tessera._vllm_backend", raising=False)
    return registered


def backend():
    import importlib
    return importlib.import_module("tessera._vllm_backend")


def test_registers_for_its_version_alone(vllm, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"vllm": "0.34.1"}[name])
    with pytest.warns(UserWarning, match="expected vLLM 0.33, got 0.34.1"):
        tessera.vllm.register()
    assert not vllm
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.33.0")
    tessera.vllm.register()
    assert vllm == {"CUSTOM": "tessera._vllm_backend.Backend"}


def test_the_backend_answers_what_vllm_asks(vllm):
    of = backend().Backend
    assert of.get_name() == "CUSTOM" and of.get_impl_cls() is backend().Impl
    assert [size.base for size in of.get_supported_kernel_block_sizes()] == [1]
    assert of.supports_head_size(80) and not of.supports_head_size(512)
    assert of.supports_kv_cache_dtype("bfloat16") and not of.supports_kv_cache_dtype("fp8")
    assert of.supports_attn_type("decoder") and not of.supports_attn_type("encoder")
    assert of.supports_sink() and not of.supports_mm_prefix() and not of.supports_rswa()
    assert of.supports_combination(64, torch.bfloat16, None, 16, False, True, False, False, None) is None
    assert of.get_builder_cls()(None, [], None, None).aot_schedule is False
    assert list(inspect.signature(of.get_impl_cls().forward).parameters) == list(
        inspect.signature(FlashAttentionImpl.forward).parameters)


class Step:
    """A step of five requests: decoding, a prefill, a chunk of a prefill, and two of padding with lengths 0."""
    heads, heads_kv, dim, block = 4, 2, 32, 784
    lengths, new = [900, 17, 60, 0, 0], [1, 17, 8, 0, 0]

    def __init__(self):
        torch.manual_seed(0)
        blocks = torch.full((9, 3, self.heads_kv, self.block, 2 * self.dim), NAN)  # three layers in a block
        self.kv_cache = blocks[:, 1]
        self.table = torch.tensor([[4, 7], [2, -1], [6, 10**6], [-1, 5], [0, 3]], dtype=torch.int32)
        self.rows = [torch.randn(length, self.heads_kv, 2 * self.dim) for length in self.lengths]
        for rows, pages in zip(self.rows, self.table.tolist()):
            for first in range(0, len(rows), self.block):
                part = rows[first:first + self.block]
                self.kv_cache[pages[first // self.block], :, :len(part)] = part.transpose(0, 1)
        self.tokens = sum(self.new)
        self.query = torch.randn(self.tokens + 6, self.heads, self.dim)  # six tokens of padding
        self.output = torch.full_like(self.query, 7.0)
        starts = torch.tensor([0, *self.new]).cumsum(0).to(torch.int32)
        self.metadata = FlashAttentionMetadata(self.tokens, 17, starts, 1568,
                                               torch.tensor(self.lengths, dtype=torch.int32), self.table,
                                               torch.zeros(self.tokens, dtype=torch.int64))

    def impl(self, **keywords):
        given = dict(num_heads=self.heads, head_size=self.dim, scale=0.2, num_kv_heads=self.heads_kv, alibi_slopes=None,
                     sliding_window=None, kv_cache_dtype="auto")
        return backend().Impl(**{**given, **keywords})

    def run(self, impl, **keywords):
        return impl.forward(None, self.query, None, None, self.kv_cache, self.metadata, self.output, **keywords)


@pytest.mark.parametrize("keywords,scores", [
    ({}, {}), (dict(sliding_window=20), dict(window=(19, 0))), (dict(logits_soft_cap=3.0), dict(softcap=3.0)),
    (dict(sinks=torch.tensor([0.5, -1.0, 2.0, 0.1], dtype=torch.bfloat16)), dict(sinks=torch.tensor([0.5, -1.0, 2.0, 0.1],
                                                                                                  dtype=torch.bfloat16))),
    (dict(alibi_slopes=[0.5, 0.25, 0.1, 0.7]), dict(alibi_slopes=torch.tensor([0.5, 0.25, 0.1, 0.7])))],
    ids=["plain", "window", "softcap", "sinks", "alibi"])
def test_a_step_is_that_of_fp64(vllm, keywords, scores):
    step = Step()
    assert step.run(step.impl(**keywords)) is step.output
    begin = 0
    for rows, new in zip(step.rows, step.new):
        k, v = rows.split(step.dim, -1)
        want, _ = reference.attention(step.query[None, begin:begin + new], k[None], v[None], causal="bottom-right",
                                      scale=0.2, **scores)
        if new:
            reference.expect_close(step.output[begin:begin + new], want[0], 3e-6, f"{new} rows")
        begin += new
    assert step.output[step.tokens:].eq(7).all(), "tokens of padding belong to nobody"


def test_a_window_without_causal_looks_both_ways(vllm):
    step = Step()
    step.metadata.causal = False
    step.run(step.impl(sliding_window=5))
    k, v = step.rows[1].split(step.dim, -1)
    want, _ = reference.attention(step.query[None, 1:18], k[None], v[None], window=(4, 4), scale=0.2)
    reference.expect_close(step.output[1:18], want[0], 3e-6, "o")


def test_a_run_that_measures_memory_gives_0(vllm):
    step = Step()
    step.metadata = None
    assert step.run(step.impl()).eq(0).all()


@pytest.mark.parametrize("change,words", [
    (dict(causal=torch.ones(5, dtype=torch.int32)), "^causal: expected a bool"),
    (dict(mm_prefix_query_range_tensor=torch.zeros(1)), "^mm_prefix_query_range_tensor: "),
    (dict(rswa_prefix_lens=torch.zeros(1)), "^rswa_prefix_lens: "),
    (dict(output_scale=torch.ones(1)), "^output_scale: "), (dict(kv_cache_dtype="fp8"), "^kv_cache_dtype: ")],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
def test_what_tessera_has_not_is_refused(vllm, change, words):
    step, of_layer, of_call = Step(), {}, {}
    for name, value in change.items():
        if name == "kv_cache_dtype":
            of_layer[name] = value
        elif name == "output_scale":
            of_call[name] = value
        else:
            setattr(step.metadata, name, value)
    with pytest.raises(NotImplementedError, match=words):
        step.run(step.impl(**of_layer), **of_call)
