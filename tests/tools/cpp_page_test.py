#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The C++ and C code of docs/cpp.md compiles.

Usage: cpp_page_test.py ROOT CXX. Each block becomes the body of a function after declarations of the names that the
page leaves to the reader.
"""
import pathlib
import re
import subprocess
import sys
import tempfile

BLOCK = re.compile(r"^```(cpp|c)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SIZES = "const std::int64_t batch = 2, len = 64, heads = 8, head_dim = 64, pages_each = 4;"
VIEWS = "k_cache", "v_cache", "slots", "lengths", "table"  # and q, k, v, o, which are arrays in a block that makes views


def program(language: str, code: str) -> str:
    includes = "\n".join(re.findall(r"^#include.*$", code, re.MULTILINE))
    body = re.sub(r"^#include.*$", "", code, flags=re.MULTILINE)
    if language == "c":
        names = "void* workspace = 0; tessera_tensor q = {0}, k = {0}, v = {0}, o = {0};"
        return f"#include <stdio.h>\n{includes}\nvoid page(void) {{\n{names}\n{body}\n}}\n"
    kind, names = ("float*", ("q", "k", "v", "o")) if "const auto view" in body else (
        "tessera::TensorView", ("q", "k", "v", "o", *VIEWS))
    given = " ".join(f"{kind} {name}{{}};" for name in names)
    used = " ".join(f"(void){name};" for name in ("batch", "len", "heads", "head_dim", "pages_each"))
    return (f'#include <cstdint>\n#include <cstdio>\n#include "tessera/tessera.hpp"\nvoid page() {{\n{SIZES}\n{used}\n'
            f"{given}\n{body}\n}}\n")


def main() -> int:
    root, compiler = pathlib.Path(sys.argv[1]), sys.argv[2]
    blocks = BLOCK.findall((root / "docs/cpp.md").read_text())
    if len(blocks) < 3:
        sys.exit(f"expected 3 blocks of code or more, got {len(blocks)}")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for language, code in blocks:
            file = pathlib.Path(folder, f"page.{'cc' if language == 'cpp' else 'c'}")
            file.write_text(program(language, code))
            how = ["-std=c++20", "-x", "c++"] if language == "cpp" else ["-std=c11", "-x", "c"]
            done = subprocess.run([compiler, *how, "-fsyntax-only", f"-I{root / 'include'}", str(file)],
                                  capture_output=True, text=True)
            if done.returncode != 0:
                print(f"{code}\n{done.stderr}")
                failed += 1
    print(f"{len(blocks)} blocks of docs/cpp.md, {failed} do not compile")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
