#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/check_loops.py finds what it is for in loops that are wrong on purpose, and nothing in loops that are right.

    check_loops_test.py SOURCE_FOLDER [CXX COMPILE_COMMANDS]

With a compiler, the tile product itself is compiled with more accumulators than there are registers, and (GCC 12) with
loops that are not unrolled.
"""
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

SOURCE = pathlib.Path(sys.argv[1])
sys.dont_write_bytecode = True
sys.path.insert(0, str(SOURCE / "tools"))
import check_loops  # noqa: E402
import disassembly  # noqa: E402
from check_loops import Kind, Shape  # noqa: E402

failures = []


def expect(true, what):
    if not true:
        failures.append(what)


# A loop of two multiply-adds inside another one. The test cases replace the marks.
TEXT = """
/build/x.o:     file format elf64-x86-64

Disassembly of section .text:

0000000000000000 <tile::N_AVX3::Matmul(tile::Product const&)>:
   0:	push   %rbp
   1:	mov    %rsp,{frame}
   4:	vxorps %xmm0,%xmm0,%xmm0
   8:	{outer}
  10:	nopw   0x0(%rax,%rax,1)
  18:	vmovaps (%rsi),%zmm2
  20:	vbroadcastss (%rdx),%zmm3
  28:	{inner}
  30:	vfmadd231ps %zmm2,%zmm3,%zmm0
  38:	vfmadd231ps (%rsi){{1to16}},%zmm3,%zmm1
  40:	add    $0x40,%rsi
  44:	cmp    %rax,%rsi
  47:	jne    18 <tile::N_AVX3::Matmul(tile::Product const&)+0x18>
  49:	vmovaps %zmm0,(%rdi)
  50:	dec    %rcx
  53:	jne    8 <tile::N_AVX3::Matmul(tile::Product const&)+0x8>
  55:	{after}
  60:	pop    %rbp
  61:	ret
"""
KIND = Kind(r"Matmul\(", r"vfmadd\d+ps.*%zmm", shapes=(Shape(2, 3, 2),))

# Replacements of marks, and a piece of the only problem; None: no problem.
CASES = [
    ({}, None),
    ({"inner": "vmovaps %zmm4,0x40(%rsp)"}, "loop of 2 vfmadd231ps: 1 moves of vectors to or from the stack"),
    ({"inner": "vmovups -0x40(%rbp),%zmm4"}, "loop of 2 vfmadd231ps: 1 moves"),
    ({"inner": "vaddps (%rsp,%rax,4),%zmm4,%zmm4"}, "loop of 2 vfmadd231ps: 1 moves"),
    ({"inner": "tilestored %tmm0,(%rsp,%rax,1)"}, "loop of 2 vfmadd231ps: 1 moves"),
    ({"inner": "mov    0x8(%rsp),%rbx"}, None),  # an address, not a sum
    ({"inner": "vxorps 0x40(%rbp),%zmm4,%zmm4", "frame": "%r8"}, "no inner loop of 2 multiply-adds, 3 loads"),  # one more
    ({"inner": "vmovups %zmm4,-0x40(%rbp)", "frame": "%r8"}, None),  # not a frame pointer
    ({"inner": "rep movsq %ds:(%rsi),%es:(%rdi)"}, "copies memory"),
    ({"outer": "rep movsq %ds:(%rsi),%es:(%rdi)"}, "1 moves of vectors to or from the stack around it"),
    ({"outer": "vmovaps %zmm0,-0x40(%rbp)"}, "1 moves of vectors to or from the stack around it"),
    ({"after": "vmovaps %zmm0,-0x40(%rbp)"}, None),
    ({"inner": "vfmadd231ps %zmm4,%zmm5,%zmm6"}, "no inner loop of 2 multiply-adds"),
    ({"inner": "vmovups (%r9),%zmm4"}, "no inner loop of 2 multiply-adds, 3 loads"),
]


def problems_with(places, kind=KIND):
    marks = {"frame": "%rbp", "outer": "nop", "inner": "nop", "after": "nop"} | places
    return check_loops.problems_of(kind, disassembly.parse(TEXT.format(**marks)))[1]


def check_text():
    for places, piece in CASES:
        problems = problems_with(places)
        if places.get("inner", "").startswith(("vmovups -", "vaddps")):  # they are loads, too
            problems = [p for p in problems if "no inner loop" not in p]
        right = problems == [] if piece is None else len(problems) == 1 and piece in problems[0]
        expect(right, f"{places}: {problems} instead of {piece}")
    whole = KIND._replace(whole=True)
    expect(problems_with({}, whole) == [], "a clean function was blamed")
    for after in ("vmovaps %zmm0,-0x40(%rbp)", "rep stos %rax,%es:(%rdi)"):
        expect(len(problems_with({"after": after}, whole)) == 1, f"{after} outside of loops passed")
    expect(problems_with({"inner": "vmovaps %zmm4,0x40(%rsp)"}, KIND._replace(share=0.5)) == [], "what is allowed was blamed")
    two_steps = problems_with({"inner": "vmovaps (%r9),%zmm4"}, KIND._replace(shapes=(Shape(1, 2, 1),)))
    expect(two_steps == [], "a loop of two steps in one was blamed")
    # A function without any loop must not pass.
    expect(problems_with({}, KIND._replace(functions="Other")) != [], "a function that isn't there passed")
    expect(problems_with({}, Kind("", r"vdpbf16ps", at_least=1)) != [], "a loop that isn't there passed")
    for file in check_loops.FILES:
        expect(check_loops.check(file, [])[1] != [], f"{file} without functions passed")


def compiled_with(change, compiler, commands):
    """The problems of matmul.cc when its sources are changed by change(path, text)."""
    command = next(c for c in json.loads(commands.read_text()) if c["file"].endswith("cpu/simd/matmul.cc"))
    with tempfile.TemporaryDirectory() as folder:
        tile, made = pathlib.Path(folder) / "cpu/simd", pathlib.Path(folder) / "matmul.cc.o"
        tile.mkdir(parents=True)
        for name in ("matmul.cc", "simd.hpp"):
            text = (SOURCE / "src/cpu/simd" / name).read_text()
            (tile / name).write_text(change(name, text))
        words = command["command"].replace(command["file"], str(tile / "matmul.cc"))
        check_loops.compile_like(command | {"command": words}, compiler, made, ["-I", folder])
        return check_loops.check("matmul.cc", disassembly.functions_of(made, disassembly.find_objdump()))[1]


def check_compiled(compiler, commands):
    def too_many_sums(name, text):
        changed = text.replace("kMaxRows = 6", "kMaxRows = 9")
        expect(name != "matmul.cc" or changed != text, "matmul.cc has no kMaxRows = 6 any more")
        return changed

    def not_unrolled(name, text):
        return "#pragma once\n#define TESSERA_UNROLL\n" if name == "simd.hpp" else text

    problems = compiled_with(too_many_sums, compiler, commands)
    expect(any("N_AVX3::Matmul, loop of 36 " in p and "moves of vectors" in p for p in problems),
           f"36 sums in 32 registers passed: {problems}")
    expect(any("no inner loop of 24 multiply-adds" in p for p in problems), f"a missing loop passed: {problems}")
    version = subprocess.run([compiler, "-dumpversion"], check=True, capture_output=True, text=True).stdout
    if version.strip() == "12":  # GCC 12 copies the accumulators around the inner loops; clang unrolls by itself
        problems = compiled_with(not_unrolled, compiler, commands)
        expect(any("moves of vectors to or from the stack" in p for p in problems),
               f"loops that are not unrolled passed: {problems}")


def main() -> int:
    check_text()
    if len(sys.argv) > 2 and disassembly.find_objdump() and shutil.which(sys.argv[2]):
        check_compiled(sys.argv[2], pathlib.Path(sys.argv[3]))
    print("\n".join(failures) or "check_loops finds what it is for")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
