#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the compiled CUDA kernels, without a GPU, and prints the resources of each one.

    check_kernels.py [--library FILE] OBJECT...

Fails when a kernel
- uses local memory (spilled registers, arrays with run-time indices) beyond LOCAL_MEMORY,
- made ptxas serialise its wgmma (messages C75xx in OBJECT.log, which tools/keep_compiler_log.py writes),
- lacks instructions that NEEDS lists for it, or is not listed there,
- is in a list of compiled shapes (src/cuda/*/host/*config.h) but was not compiled, or the reverse.

The script needs only Python: it reads kernels from the ELF images inside the objects (tools/cubin.py).
"""
import argparse
import pathlib
import re
import sys
from typing import NamedTuple

sys.dont_write_bytecode = True  # writes nothing into the source tree
import cubin  # noqa: E402

# Kernels, by their names, and the instructions that they must contain. The first row that matches the whole name
# counts.
NEEDS = [
    (r"fa3::forward_kernel<.*>", {"HGMMA", "UTMALDG", "UTMASTG", "STSM", "USETMAXREG", "MUFU"}),
    (r"fa3::(reset|list)_kernel", set()),
    (r"fa3::backward::backward_kernel<.*>", {"HGMMA", "UTMALDG", "UTMASTG", "STSM", "USETMAXREG", "MUFU"}),
    (r"fa3::backward::delta_kernel<.*>", {"HGMMA", "UTMALDG", "USETMAXREG", "MUFU"}),
    (r"fa3::backward::bias_gradient_kernel<.*>", {"HGMMA", "UTMALDG", "USETMAXREG", "MUFU"}),
    (r"fa3::backward::(dq_convert|dkdv_reduce)_kernel<.*>", set()),
    (r"(fa3::backward::list_kernel<.*>|gradient::list_kernel)", set()),
    (r"fa3::backward::dq_kernel<.*>", {"HGMMA", "UTMALDG", "UTMASTG", "STSM", "USETMAXREG", "MUFU"}),
    (r"(fa3::backward|gradient)::delta_(of|from)_output_kernel<.*>", {"FFMA"}),  # no MMA
    (r"fa2::forward_fp32_kernel<HeadDim256Fp32>", {"HMMA", "LDSM", "MUFU"}),  # registers do not suffice for copies
    (r"fa2::forward_fp32_kernel<.*>", {"HMMA", "LDGSTS", "LDSM", "MUFU"}),
    (r"fa2::forward_kernel<.*>", {"HMMA", "LDGSTS", "LDSM", "MUFU"}),
    (r"fa2::backward_parts_kernel<.*>", {"HMMA", "LDGSTS", "LDSM", "MUFU"}),
    (r"fa2::backward_fp32_kernel<.*>", {"FFMA", "MUFU"}),  # no tensor cores
    (r"fa2::backward_kernel<.*>", {"HMMA", "LDGSTS", "LDSM", "MUFU"}),
    (r"fa1::backward_kernel<.*>", {"HMMA", "LDGSTS", "LDSM", "MUFU"}),
    (r"gradient::(delta|bias)_fp32_kernel<.*>", {"FFMA", "MUFU"}),
    (r"gradient::delta_from_output_fp32_kernel<.*>", {"FFMA"}),
    (r"gradient::(delta|bias)_kernel<.*>", {"HMMA", "LDGSTS", "LDSM", "MUFU"}),
    (r"gradient::dq_(fp32_)?kernel<.*>", set()),
    (r"gradient::(dkdv_reduce|fp16_scale)_kernel<.*>", set()),
    (r"decode::split_kernel<.*(Rows32|Rows64|HeadDim192)> on 90", {"HGMMA", "LDGSTS", "MUFU"}),
    (r"decode::split_kernel<.*>", {"HMMA", "LDGSTS", "LDSM", "MUFU"}),
    (r"decode::combine_kernel<.*>", {"MUFU"}),
    (r"append_rows::append_kernel<.*>", set()),
    (r"rows::(add|copy)_kernel<.*>", set()),
    (r"block::block_kernel<.*>", {"HMMA", "LDGSTS", "LDSM", "MUFU"}),
    (r"block::gemm_kernel<.*>", {"HMMA", "LDSM"}),
    (r"fa3::backward::sink_gradient_kernel<.*>", {"MUFU"}),
    (r"(gradient|standard)::sink_gradient_kernel", {"MUFU"}),
    (r"fa1::forward_kernel<.*>", {"HMMA", "LDGSTS", "LDSM", "MUFU"}),
    (r"standard::(scores|values|gemm|dq|key_gemm)_kernel<.*>", {"HMMA", "LDGSTS", "LDSM"}),
    (r"standard::(softmax|row_gradient)_kernel<.*>", {"MUFU"}),
    (r"standard::bias_gradient_kernel<.*>", set()),
]

# The kernels that a list of compiled shapes makes: folder and list, name of the kernel, its types.
COMPILED = [
    ("fa3", "Shapes", "fa3::forward_kernel<{dtype}, {shape}>", ("bf16", "fp16")),
    ("fa3/backward", "Shapes", "fa3::backward::backward_kernel<{dtype}, {shape}>", ("bf16", "fp16")),
    ("fa3/backward", "DeltaShapes", "fa3::backward::delta_kernel<{dtype}, {shape}>", ("bf16", "fp16")),
    ("fa3/backward", "ShapesTakingBias", "fa3::backward::bias_gradient_kernel<{dtype}, {shape}>", ("bf16", "fp16")),
    ("fa3/backward", "ReduceShapes", "fa3::backward::dkdv_reduce_kernel<{dtype}, {shape}>", ("bf16", "fp16")),
    ("fa3/backward", "ShapesAddingDq", "fa3::backward::dq_convert_kernel<{dtype}, {shape}>", ("bf16", "fp16")),
    ("fa3/backward", "ShapesSplitDvDk", "fa3::backward::dq_kernel<{dtype}, {shape}>", ("bf16", "fp16")),
    ("fa3/backward", "DeltaShapes", "fa3::backward::delta_from_output_kernel<{dtype}, {shape}>", ("bf16", "fp16")),
    ("fa2", "Shapes", "fa2::forward_kernel<{dtype}, {shape}>", ("bf16", "fp16")),
    ("fa2", "ShapesFp32", "fa2::forward_fp32_kernel<{shape}>", ("fp32",)),
    ("fa2", "BackwardShapes", "fa2::backward_kernel<{dtype}, {shape}>", ("bf16", "fp16")),
    ("fa2", "BackwardShapesParts", "fa2::backward_parts_kernel<{shape}>", ("fp32",)),
    ("fa2", "BackwardShapesFp32", "fa2::backward_fp32_kernel<{shape}>", ("fp32",)),
    ("gradient", "RowShapes", "gradient::delta_kernel<{dtype}, {shape}>", ("bf16", "fp16")),
    ("gradient", "BiasShapes", "gradient::bias_kernel<{dtype}, {shape}>", ("bf16", "fp16")),
    ("gradient", "RowShapesFp32", "gradient::delta_fp32_kernel<{shape}>", ("fp32",)),
    ("gradient", "RowShapesFp32", "gradient::bias_fp32_kernel<{shape}>", ("fp32",)),
    ("fa1", "Shapes", "fa1::forward_kernel<{dtype}, {shape}>", ("bf16", "fp16")),
    ("fa1", "BackwardShapes", "fa1::backward_kernel<{dtype}, {shape}>", ("bf16", "fp16")),
    ("decode", "Shapes", "decode::split_kernel<{dtype}, {shape}>", ("bf16", "fp16")),
    ("block", "Shapes", "block::block_kernel<{shape}>", ("bf16",)),
    ("block", "Shapes", "block::gemm_kernel<{shape}, 0>", ("bf16",)),
    ("block", "Shapes", "block::gemm_kernel<{shape}, 1>", ("bf16",)),
    ("standard", "Shapes", "standard::scores_kernel<{dtype}, {shape}>", ("bf16", "fp16")),
    ("standard", "Shapes", "standard::values_kernel<{dtype}, {shape}>", ("bf16", "fp16")),
    ("standard", "Shapes", "standard::gemm_kernel<{dtype}, {shape}>", ("bf16", "fp16")),
    ("standard", "Shapes", "standard::dq_kernel<{dtype}, {shape}>", ("bf16", "fp16")),
    ("standard", "Shapes", "standard::key_gemm_kernel<{dtype}, {shape}>", ("bf16", "fp16")),
]
WITHOUT_SHAPES = {f"standard::{kernel}_kernel<{dtype}>" for kernel in ("softmax", "row_gradient", "bias_gradient")
                  for dtype in ("bf16", "fp16")} | {
    "fa3::reset_kernel", "fa3::list_kernel", "gradient::list_kernel", "gradient::fp16_scale_kernel<fp16>",
    "gradient::sink_gradient_kernel", "standard::sink_gradient_kernel",
    "gradient::delta_from_output_fp32_kernel<256>"} | {
    f"fa3::backward::sink_gradient_kernel<{block_q}>" for block_q in (64, 128)} | {
    f"fa3::backward::list_kernel<{block_q}, {block_kv}>" for block_q, block_kv in ((64, 64), (64, 128), (128, 128))} | {
    f"gradient::dkdv_reduce_kernel<{dtype}>" for dtype in ("bf16", "fp16")} | {
    f"gradient::delta_from_output_kernel<{dtype}, {chunks}>" for dtype in ("bf16", "fp16") for chunks in (1, 2, 4)} | {
    f"gradient::{kernel}{dim}>" for kernel in ("dq_kernel<bf16, ", "dq_kernel<fp16, ", "dq_fp32_kernel<")
    for dim in (64, 128, 256)} | {
    f"decode::combine_kernel<{dtype}, {dim}, {parallel}>" for dtype in ("bf16", "fp16") for dim in (64, 128, 192, 256)
    for parallel in (0, 1)} | {f"append_rows::append_kernel<{dtype}>" for dtype in ("bf16", "fp16", "float")} | {
    f"rows::copy_kernel<{chunk}>" for chunk in (2, 16)} | {
    f"rows::add_kernel<{kind}>" for kind in ("bf16, 8", "bf16, 1", "fp16, 8", "fp16, 1", "float, 4", "float, 1")}


class Allowed(NamedTuple):
    """Local memory that is known and has a reason. The numbers are limits."""
    name: str  # matches the whole name of the kernel
    frame_bytes: int
    accesses: int  # LDL and STL instructions
    reason: str


# This list should only shrink: delete a row that the output marks NO LONGER NEEDED.
LOCAL_MEMORY = [
    Allowed(r"fa2::forward_kernel<.*HeadDim128>", 8, 4, "one value, when compiled for sm_80"),
    Allowed(r"gradient::delta_kernel<bf16, RowsHeadDim64>", 8, 6, "8 bytes kept over the tiles of queries of a thread block"),
    Allowed(r"fa2::backward_kernel<fp16, BackwardHeadDim64>", 16, 22, "numbers kept over a step, when compiled for sm_80"),
    Allowed(r"fa2::backward_kernel<fp16, BackwardHeadDim256>", 8, 7, "one value, when compiled for sm_80"),
    Allowed(r"fa2::backward_parts_kernel<BackwardHeadDim128Fp32>", 32, 60, "numbers kept over a step"),
    Allowed(r"fa3::backward::delta_kernel<fp16, HeadDim64Bias>", 8, 2, "one value, in a kernel for rows with a large LSE"),
    Allowed(r"fa3::backward::backward_kernel<.*HeadDim64Alibi>", 8, 2, "one value, kept over a step"),
    Allowed(r"fa3::forward_kernel<.*HeadDim64>", 64, 81, "scalars of the tile transition and of the producer; none in the main loop"),
]

# Messages of ptxas about a wgmma pipeline that are allowed: code -> reason.
ALLOWED_MESSAGES: dict[str, str] = {}

MESSAGE = re.compile(r"\((C75\d\d)\)\s*(.*)")


def problems_of(kernel, needs, local_memory):
    names = kernel.name, f"{kernel.name} on {kernel.architecture}"
    row = next((instructions for name, instructions in needs if any(re.fullmatch(name, n) for n in names)), None)
    if row is None:
        yield "is not listed in NEEDS (tools/check_kernels.py)"
    for instruction in sorted(row or ()):
        if not kernel.counts[instruction]:
            yield f"has no {instruction}"
    accesses = kernel.counts["LDL"] + kernel.counts["STL"]
    if kernel.frame_bytes == 0 and accesses == 0:
        return
    allowed = next((a for a in local_memory if re.fullmatch(a.name, kernel.name)), Allowed("", 0, 0, ""))
    if kernel.frame_bytes > allowed.frame_bytes or accesses > allowed.accesses:
        yield (f"uses local memory: {kernel.frame_bytes} bytes a thread, {accesses} accesses "
               f"(allowed: {allowed.frame_bytes} and {allowed.accesses})")


def messages_of(log: str, allowed):
    """Returns ptxas's messages about wgmma, each kind once per function."""
    seen = set()
    for match in MESSAGE.finditer(log):
        function = re.search(r"function '(\w+)'", match[2])
        key = (match[1], function[1] if function else "")
        if match[1] not in allowed and key not in seen:
            seen.add(key)
            yield f"{cubin.readable(key[1])}: {match[1]} {match[2][:90]}"


def listed_shapes(config: str, name: str):
    """Returns the shapes of a list in a config.h: using Shapes = ShapeList<HeadDim64, HeadDim128>;"""
    found = re.search(rf"using {name} =\s*ShapeList<([^>]*)>;", config)
    if not found:
        raise ValueError(f"no list of compiled shapes called {name}")
    return re.findall(r"\w+", found[1])


def config_of(source: pathlib.Path, folder: str):
    """Returns the header with the lists of compiled shapes of a folder of src/cuda."""
    headers = {"fa3": "fa3/host/forward_config.h", "fa3/backward": "fa3/host/backward_config.h"}
    return source / "src/cuda" / headers.get(folder, f"{folder}/host/config.h")


def listed_kernels(source: pathlib.Path):
    """Returns the names of all kernels that the lists of compiled shapes make."""
    return WITHOUT_SHAPES | {
        kernel.format(dtype=dtype, shape=shape)
        for folder, name, kernel, dtypes in COMPILED
        for shape in listed_shapes(config_of(source, folder).read_text(), name) for dtype in dtypes}


def differences(compiled, listed, local_memory):
    yield from (f"{name}: is listed in its config.h, and was not compiled" for name in sorted(listed - compiled))
    yield from (f"{name}: was compiled, and no config.h lists it" for name in sorted(compiled - listed))
    for allowed in local_memory:
        if not any(re.fullmatch(allowed.name, name) for name in listed):
            yield f"LOCAL_MEMORY allows {allowed.name}, which no config.h lists"


def check(objects, needs=None, local_memory=None, allowed_messages=None):
    """Returns (kernels, problems)."""
    needs = NEEDS if needs is None else needs
    local_memory = LOCAL_MEMORY if local_memory is None else local_memory
    allowed_messages = ALLOWED_MESSAGES if allowed_messages is None else allowed_messages
    kernels, problems = [], []
    for path in map(pathlib.Path, objects):
        try:
            found = cubin.kernels_of(path.read_bytes())
        except ValueError as error:
            problems.append(f"{path.name}: {error}")
            continue
        if not found:
            problems.append(f"{path.name}: no kernels found")
        kernels += found
        for kernel in found:
            problems += [f"{kernel.name}, {kernel.architecture}: {p}" for p in problems_of(kernel, needs, local_memory)]
        log = path.with_name(path.name + ".log")
        if not log.is_file():
            problems.append(f"{path.name}: no {log.name} of the compiler beside it")
            continue
        problems += messages_of(log.read_text(errors="replace"), allowed_messages)
    return kernels, problems


def table(kernels):
    """Formats one line per kernel. Shared memory is the static part; launches add their own. Copies are LDGSTS and
    UTMALDG."""
    yield (f"{'kernel':<45}{'arch':>5}{'regs':>5}{'shared':>7}{'local':>6}{'LDL+STL':>8}{'code':>7}"
           f"{'HGMMA':>6}{'HMMA':>5}{'copies':>7}")
    for k in sorted(kernels, key=lambda k: (k.name, k.architecture)):
        yield (f"{k.name[:45]:<45}{k.architecture:>5}{k.registers:>5}{k.shared_bytes:>7}{k.frame_bytes:>6}"
               f"{k.counts['LDL'] + k.counts['STL']:>8}{k.code_bytes:>7}"
               f"{k.counts['HGMMA']:>6}{k.counts['HMMA']:>5}{k.counts['UTMALDG'] + k.counts['LDGSTS']:>7}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("objects", nargs="+")
    parser.add_argument("--library", type=pathlib.Path, help="whose size is reported")
    options = parser.parse_args()
    kernels, problems = check(options.objects)
    listed = listed_kernels(pathlib.Path(__file__).resolve().parent.parent)
    problems += differences({k.name for k in kernels}, listed, LOCAL_MEMORY)
    print("\n".join(table(kernels)))
    code = sum(k.code_bytes for k in kernels)
    stored = sum(cubin.device_bytes(pathlib.Path(o).read_bytes()) for o in options.objects)
    print(f"{len(kernels)} kernels: {code / 1e6:.2f} MB of code in {stored / 1e6:.2f} MB for devices "
          "(most of the rest: line numbers for profilers)")
    if options.library:
        print(f"{options.library.name}: {options.library.stat().st_size / 1e6:.2f} MB")
    for a in LOCAL_MEMORY:
        used = [k for k in kernels if re.fullmatch(a.name, k.name) and k.frame_bytes + k.counts["LDL"] + k.counts["STL"]]
        print(f"allowed local memory, {'used' if used else 'NO LONGER NEEDED'}: {a.name}: {a.reason}")
    print("\n".join(problems) or "kernels ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
