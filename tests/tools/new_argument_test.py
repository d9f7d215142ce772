#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests what docs/architecture.md promises in "A new tensor argument" and "A new tensor of decode_block()".

    new_argument_test.py SOURCE_FOLDER COMPILER [FLAGS...]

First, the files that name alibi_slopes, a tensor that an option of the Problem switches on, must be those that the page
lists, and few; likewise for b_qkv, a tensor of decode_block(). Second, a copy of the source gets a tensor "gates" and an option of the same name, by edits of the four files
that describe them. The checks, the C ABI, the device copies and the command line must compile with it unedited, and the
checks must know it.
"""
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

SOURCE, COMPILER, FLAGS = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2], sys.argv[3:]
FOLDERS = ("include", "src", "toolkit", "cli", "python/tessera", "python/torch_ops")
ENDINGS = (".hpp", ".h", ".cc", ".cu", ".cuh", ".py")
KERNELS = ("src/cpu/", "src/cuda/", "src/reference/")
MOST_FILES, MOST_OF_KERNELS = 25, 10
MOST_OF_BLOCK = 10  # files for a tensor of decode_block()
# They have the arguments of other packages' functions, and a tensor of tessera's own does not touch them.
ADAPTERS = {f"python/tessera/{name}.py" for name in ("flash_attn", "ring_flash_attn", "_vllm_backend")}

PROGRAM = """
#include "core/arguments.hpp"
#include "core/checks.hpp"
#include "tessera/error.hpp"
#include <cstdio>
#include <string>
using namespace tessera;

/// Does the call fail, and is this argument named?
bool refused(const Problem& p, const ForwardArgs& args, const std::string& name) {
    try {
        check_tensors(p, args, Device{});
    } catch (const Error& e) {
        std::puts(e.what());
        return e.argument() == name;
    }
    return false;
}

int main() {
    static float memory[4][64];
    Problem p = Problem::dense(1, 4, 2, 8);
    const auto rows = [&](int i) { return dense_view(memory[i], DType::fp32, {1, 4, 2, 8}); };
    ForwardArgs args{.q = rows(0), .k = rows(1), .v = rows(2), .o = rows(3)};
    float gates[2] = {};
    check_tensors(p, args, Device{});
    args.gates.data = gates;  // of rank 0: not given
    check_tensors(p, args, Device{});
    if (only_given(args).gates.data != nullptr) return 1;
    args.gates = dense_view(gates, DType::fp32, {2});
    if (!refused(p, args, "gates")) return 2;  // without its option
    p.gates = true;
    check_tensors(p, args, Device{});
    if (inputs_of<BackwardArgs>(args).gates.data != gates) return 3;
    args.gates = dense_view(gates, DType::bf16, {2});
    if (!refused(p, args, "gates")) return 4;
    args.gates = dense_view(nullptr, DType::fp32, {2});
    if (!refused(p, args, "gates")) return 5;
    args.gates = dense_view(memory[3], DType::fp32, {2});
    if (!refused(p, args, "o")) return 6;  // the output overlaps it
    args.gates = {};
    return refused(p, args, "gates") ? 0 : 7;
}
"""


def listed(heading):
    """The files that docs/architecture.md lists under this heading, up to the tensors that interfaces pass on."""
    page = (SOURCE / "docs/architecture.md").read_text()
    section = re.search(rf"\n### {re.escape(heading)}\n(.*?)\n(?:##|Two interfaces)", page, re.DOTALL)[1]
    return {name for name in re.findall(r"`([^`\s]+/[^`\s]+)`", section) if (SOURCE / name).is_file()}


def naming(word):
    for folder in FOLDERS:
        for path in (SOURCE / folder).rglob("*"):
            if path.suffix in ENDINGS and re.search(rf"\b{word}\b", path.read_text()):
                yield str(path.relative_to(SOURCE))


def edit(path, pattern, replacement, count=1):
    text = path.read_text()
    changed, found = re.subn(pattern, replacement, text)
    assert found == count, f"{path}: {found} places match {pattern}, expected {count}"
    path.write_text(changed)


def add_argument(copy):
    include = copy / "include/tessera"
    edit(include / "problem.hpp", r"(    bool alibi = false;[^\n]*\n)", r"\1    bool gates = false;  ///< gates will be given\n")
    edit(include / "attention.hpp", r"(    TensorView o_residual\{\};\n)", r"\1    TensorView gates{};  ///< fp32 [heads_q]\n", 2)
    edit(include / "tessera.h", r"(\} tessera_(?:forward|backward)_args;)", r"    tessera_tensor gates; /* fp32 [heads_q] */\n\1", 2)
    edit(include / "tessera.h", r"(\} tessera_problem;)", r"    int32_t gates; /* 0; 1: gates will be given */\n    int32_t reserved_too;\n\1")
    core = copy / "src/core"
    edit(core / "arguments.hpp", r'(        "(?:First key of each sequence of a cache that counts, int32 \[batch\]|Gradient of the sinks)"\))\n',
         r'\1 \\\n    row(gates, "gates", input, with_option, gates, alibi_slopes, fp32, "Gates, fp32 [heads]")\n', 2)
    edit(core / "arguments.hpp", r"(inline constexpr TensorOption none\{\};\n)",
         r'\1inline constexpr TensorOption gates{"gates", &Problem::gates};\n')
    edit(core / "problem_fields.hpp", r"(    row\(flag,   sinks, [^\n]*\))\n", r"\1 \\\n    row(flag, gates, gates)\n")


def compiled(copy, source, output, *flags):
    command = [COMPILER, *FLAGS, "-std=c++20", "-O0", "-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Werror",
               *(f"-I{copy / folder}" for folder in ("include", "src", "toolkit", "cli")), *flags, str(source)]
    subprocess.run(command + (["-o", str(output)] if output else []), check=True)


def main():
    block, found = listed("A new tensor of decode_block()"), set(naming("b_qkv"))
    assert found <= block and len(block) <= MOST_OF_BLOCK, (sorted(found - block), len(block))
    print(f"b_qkv stands in {len(found)} files; docs/architecture.md lists {len(block)}")
    promised, found = listed("A new tensor argument"), set(naming("alibi_slopes"))
    assert found <= promised, f"docs/architecture.md does not list {sorted(found - promised)}"
    promised -= ADAPTERS
    kernels = [name for name in promised if name.startswith(KERNELS)]
    assert len(promised) <= MOST_FILES and len(kernels) <= MOST_OF_KERNELS, (len(promised), len(kernels))
    print(f"alibi_slopes stands in {len(found)} files, of them {len([f for f in found if f.startswith(KERNELS)])} of kernels; "
          f"docs/architecture.md lists {len(promised)} and {len(kernels)}, without the adapters")
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        for name in ("include", "src", "toolkit", "cli"):
            shutil.copytree(SOURCE / name, copy / name)
        add_argument(copy)
        for source in ("src/c_api.cc", "toolkit/device/device_copy.cc", "cli/inputs.cc", "cli/generated.cc"):
            compiled(copy, copy / source, None, "-fsyntax-only")
        program = copy / "program.cc"
        program.write_text(PROGRAM)
        objects = []
        for source in (program, *(copy / f"src/core/{name}.cc" for name in ("checks", "overlap", "tensor", "problem"))):
            objects.append(source.with_suffix(".o"))
            compiled(copy, source, objects[-1], "-c")
        subprocess.run([COMPILER, *map(str, objects), "-lfmt", "-o", str(copy / "program")], check=True)
        subprocess.run([str(copy / "program")], check=True)
    print("ok")


if __name__ == "__main__":
    main()
