#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the example traces of docs/which.md in the format of PyTorch's profiler. The times are invented round numbers.
The output is the same in every run."""

import json
from pathlib import Path

FLASH = (
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t, "
    "Flash_kernel_traits<128, 128, 64, 4, cutlass::bfloat16_t> >, false, true, false, false, true, true, false, "
    "false>(pytorch_flash::Flash_fwd_params)"
)
EFFICIENT = (
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t, "
    "cutlass::arch::Sm80, true, 64, 128, 128, true, true>::Params)"
)
GEMM = "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN"
SOFTMAX = (
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, "
    "at::native::(anonymous namespace)::SoftMaxForwardEpilogue>(float*, float const*, int)"
)
MULTIPLY = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::AUnaryFunctor<float, float, float, "
    "at::native::binary_internal::MulFunctor<float> >, std::array<char*, 2ul> >(int)"
)
LAYERS = 4
QKV = [1, 32, 4096, 128]


def sdpa(start, mask):
    """An operator event with the inputs that record_shapes=True writes."""
    return {
        "ph": "X", "cat": "cpu_op", "name": "aten::scaled_dot_product_attention", "pid": 1, "tid": 1, "ts": start,
        "dur": 90,
        "args": {
            "Input Dims": [QKV, QKV, QKV, [1, 1, 4096, 4096] if mask else [], [], [], [], []],
            "Input type": ["c10::BFloat16"] * 3 + ["bool" if mask else "", "Scalar", "Scalar", "", "Scalar"],
            "Input Strides": [[16777216, 524288, 128, 1]] * 3
            + [[16777216, 16777216, 4096, 1] if mask else [], [], [], [], []],
            "Concrete Inputs": ["", "", "", "", "0.", "False" if mask else "True", "", "False"],
        },
    }  # fmt: skip


def trace(layer, mask=None):
    """LAYERS times the kernels of a layer, given as (name, microseconds, whether the operator launches it)."""
    events = []
    launches = 0
    gpu = 100.0
    for i in range(LAYERS):
        cpu = 100 + 1000 * i
        if mask is not None:
            events.append(sdpa(cpu, mask))
        for name, duration, inside in layer:
            launches += 1
            launch = cpu + 10 if inside else cpu + 200 + launches
            events.append({"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1,
                           "ts": launch, "dur": 1, "args": {"correlation": launches}})  # fmt: skip
            events.append({"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": gpu, "dur": duration,
                           "args": {"device": 0, "stream": 7, "correlation": launches}})  # fmt: skip
            gpu += duration + 2
    device = {"id": 0, "name": "NVIDIA H200", "computeMajor": 9, "computeMinor": 0}
    return {"schemaVersion": 1, "deviceProperties": [device], "traceEvents": events}


BY_HAND = [(GEMM, 600, False), (GEMM, 400, False), (MULTIPLY, 500, False), (MULTIPLY, 500, False),
           (SOFTMAX, 700, False), (MULTIPLY, 400, False), (GEMM, 400, False)]  # fmt: skip
TRACES = {
    "causal": trace([(FLASH, 600, True), (GEMM, 900, False)], mask=False),
    "padding": trace([(EFFICIENT, 1900, True), (GEMM, 900, False)], mask=True),
    "by_hand": trace(BY_HAND),
}
NAMES = """\
void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2, cute
void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16, (vllm::Fp8KVCacheDataType)0>
void qk_int_sv_f8_attn_kernel<128u, 64u, 32u, 64u, 128u, (DataType)1>
"""


def main():
    folder = Path(__file__).resolve().parent
    for name, content in TRACES.items():
        text = json.dumps(content, indent=None, separators=(",", ":")).replace('{"ph"', '\n{"ph"')
        (folder / f"{name}.json").write_text(text + "\n")
    (folder / "names.txt").write_text(NAMES)


if __name__ == "__main__":
    main()
