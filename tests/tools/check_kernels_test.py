#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/check_kernels.py finds what it is for in kernels that are wrong on purpose, and nothing in one that is right.

    check_kernels_test.py SOURCE_FOLDER NVCC
"""
import collections
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

SOURCE = pathlib.Path(sys.argv[1])
NVCC = sys.argv[2]
sys.dont_write_bytecode = True
sys.path.insert(0, str(SOURCE / "tools"))
import check_kernels  # noqa: E402
import cubin  # noqa: E402

KERNELS = r"""
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
using namespace tessera::cuda::ptx;

template <class T, int kN>
__global__ void product(float* out, unsigned long long a, unsigned long long b) {
    float d[kN / 2] = {};
    warpgroup_fence_operand(d);
    wgmma_fence();
    wgmma_ss<kN, T>(d, a, b, true);
    wgmma_commit();
    wgmma_wait<0>();
    warpgroup_fence_operand(d);
    for (int i = 0; i < kN / 2; ++i) out[threadIdx.x * kN / 2 + i] = exp2_approx(d[i]);
}
template __global__ void product<__half, 64>(float*, unsigned long long, unsigned long long);

__global__ void serialized(float* out, unsigned long long a, unsigned long long b) {
    float d[32] = {};
    for (int i = 0; i < 4; ++i) {
        wgmma_fence();
        wgmma_ss<64, __half>(d, a, b, true);
        wgmma_commit();
        d[3] += 1;  // touches accumulators that are under way
    }
    wgmma_wait<0>();
    for (int i = 0; i < 32; ++i) out[threadIdx.x * 32 + i] = d[i];
}

__global__ void __launch_bounds__(1024, 2) spills(float* x) {
    float r[64];
    for (int i = 0; i < 64; ++i) r[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
    for (int k = 0; k < 64; ++k) {
        for (int i = 0; i < 64; ++i) r[i] = r[i] * r[(i + 1) % 64] + r[(i + 7) % 64];
    }
    for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = r[i];
}
"""

failures = []


def expect(true, what):
    if not true:
        failures.append(what)


def compile_kernels(folder: pathlib.Path, *options: str) -> pathlib.Path:
    source, made = folder / "bad.cu", folder / "bad.cu.o"
    source.write_text(KERNELS)
    command = [sys.executable, SOURCE / "tools/keep_compiler_log.py", NVCC, "-std=c++20", "--expt-relaxed-constexpr", "-O3",
               "-gencode", "arch=compute_90a,code=sm_90a", "-I", SOURCE / "src", *options, "-c", source,
               "-o", made]
    subprocess.run(command, check=True, capture_output=True)
    return made


def problems_with(made, needs, local_memory=(), messages=None):
    return check_kernels.check([made], needs, list(local_memory), messages or {})[1]


def check_findings(made):
    anything = [(r".*", set())]
    problems = problems_with(made, anything)
    expect(any(p.startswith("spills, 90: uses local memory") for p in problems), f"spills not found in {problems}")
    expect(any(p.startswith("serialized: C75") for p in problems), f"serialised wgmma not found in {problems}")
    expect(not any("product" in p for p in problems), f"a clean kernel was blamed: {problems}")

    needs = [(r"product<fp16, 64>", {"HGMMA", "MUFU"}), (r"serialized", {"UTMALDG"})]
    problems = problems_with(made, needs)
    expect(not any("product" in p for p in problems), f"a clean kernel was blamed: {problems}")
    expect("serialized, 90: has no UTMALDG" in problems, f"the missing instruction was not found in {problems}")
    expect(any(p.startswith("spills, 90: is not listed") for p in problems), f"an unlisted kernel passed: {problems}")

    codes = dict.fromkeys(re.findall(r"C75\d\d", pathlib.Path(f"{made}.log").read_text()), "tested")
    allowed = check_kernels.Allowed("spills", 1 << 20, 1 << 20, "tested")
    expect(problems_with(made, anything, [allowed], codes) == [], "what is allowed was blamed")
    little = allowed._replace(frame_bytes=8)
    expect(len(problems_with(made, anything, [little], codes)) == 1, "more than what is allowed passed")

    pathlib.Path(f"{made}.log").unlink()
    expect(any("no bad.cu.o.log" in p for p in problems_with(made, anything)), "a missing log passed")


def check_opcodes(made):
    """The opcodes of cubin.py against what nvdisasm says."""
    disassembler = shutil.which("nvdisasm")
    if disassembler is None:
        return
    for fatbin in cubin.fatbins_of(made.read_bytes()):
        for image in cubin.images_of(fatbin):
            path = made.with_suffix(".cubin")
            path.write_bytes(image)
            text = subprocess.run([disassembler, "-c", path], check=True, capture_output=True, text=True).stdout
            words = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", text)
            printed = collections.Counter(w for w in words if w in cubin.OPCODES.values())
            counted = sum((k.counts for k in cubin.kernels_of_image(image)), collections.Counter())
            del counted["other"]
            expect(printed == counted, f"nvdisasm counts {printed}, cubin.py {counted}")


def check_lists():
    """Kernels that a list names and the build did not compile, or the other way round."""
    text = "using Shapes = ShapeList<HeadDim64,\n                         HeadDim96>;"
    expect(check_kernels.listed_shapes(text, "Shapes") == ["HeadDim64", "HeadDim96"], "a list was not read")
    listed = check_kernels.listed_kernels(SOURCE)
    expect("fa3::forward_kernel<bf16, HeadDim64Short>" in listed, f"a shape of fa3 is not among {sorted(listed)}")
    allowed = check_kernels.Allowed(r"gone<.*>", 8, 1, "tested")
    found = list(check_kernels.differences({"a", "b"}, {"b", "c"}, [allowed]))
    expect(len(found) == 3, f"a missing kernel, a stray one and a stale allowance, found {found}")
    expect(not list(check_kernels.differences(listed, listed, check_kernels.LOCAL_MEMORY)), "equal lists were blamed")


def main() -> int:
    check_lists()
    with tempfile.TemporaryDirectory() as folder:
        made = compile_kernels(pathlib.Path(folder))
        product = next(k for k in cubin.kernels_of(made.read_bytes()) if k.name.startswith("product"))
        expect(product.registers >= 32 and product.frame_bytes == 0 and product.code_bytes > 0, f"read {product}")
        check_opcodes(made)
        check_findings(made)
        if "--compress-mode" in subprocess.run([NVCC, "--help"], capture_output=True, text=True, check=True).stdout:
            compressed = compile_kernels(pathlib.Path(folder), "--compress-mode=size")
            found = problems_with(compressed, [(r".*", set())])
            expect(any("a compressed image" in p for p in found), f"a compressed image passed: {found}")
    print("\n".join(failures) or "check_kernels finds what it is for")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
