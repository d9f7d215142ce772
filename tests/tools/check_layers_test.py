#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/check_layers.py finds each kind of violation, and nothing in a tree without any."""
import pathlib
import subprocess
import sys
import tempfile

CHECKER = pathlib.Path(sys.argv[1])
LICENSE = "// SPDX-License-Identifier: Apache-2.0\n"

CLEAN = {
    "include/tessera/a.hpp": LICENSE + "#include <vector>\n",
    "src/core/a.hpp": LICENSE + '#include "tessera/a.hpp"\n',
    "src/core/b.cc": LICENSE + '#include "core/a.hpp"\n#include <fmt/format.h>\n',
    "src/cpu/simd/w.hpp": LICENSE + '#include "core/a.hpp"\n#include <hwy/highway.h>\n',
    "src/cpu/matrix/w.hpp": LICENSE + '#include "cpu/simd/w.hpp"\n',
    "src/cpu/fa1/f.hpp": LICENSE + '#include "core/a.hpp"\n',
    "src/cpu/k.hpp": LICENSE + '#include "cpu/simd/w.hpp"\n// asm in a comment\nconst char* s = "asm";\n',
    "src/cuda/ptx/p.cuh": LICENSE + 'asm("mma");\n',
    "src/cuda/fa1/f.cuh": LICENSE + '#include "cuda/ptx/p.cuh"\n#include "cuda/device.hpp"\n',
    "src/cuda/device.hpp": LICENSE + "#include <cuda_runtime_api.h>\n",
    "toolkit/device/d.hpp": LICENSE + '#include "core/a.hpp"\n#include <cuda_runtime_api.h>\n',
    "toolkit/check/c.cc": LICENSE + '#include "device/d.hpp"\n',
    "src/registry.cc": LICENSE + '#include "cpu/k.hpp"\n',
    "cli/main.cc": LICENSE + '#include "core/a.hpp"\n#include "generated.hpp"\n#include <CLI/CLI.hpp>\n',
}

# File, text, and a piece of the expected line.
VIOLATIONS = [
    ("include/tessera/bad.hpp", '#include "core/a.hpp"\n', "include may not include core"),
    ("include/tessera/bad.hpp", "#include <fmt/format.h>\n", "include does not use <fmt/format.h>"),
    ("src/core/bad.cc", '#include "cpu/k.hpp"\n', "core may not include cpu"),
    ("src/core/bad.cc", '\n#include "../cpu/k.hpp"\n', "src/core/bad.cc:3: core may not include cpu"),
    ("src/core/bad.cc", "#include <tbb/tbb.h>\n", "core does not use <tbb/tbb.h>"),
    ("src/cpu/simd/bad.cc", '#include "cpu/k.hpp"\n', "cpu/simd may not include cpu"),
    ("src/cpu/simd/bad.cc", '#include "cpu/matrix/w.hpp"\n', "cpu/simd may not include cpu/matrix"),
    ("src/cpu/steps/simd/step.cc", '#include "cpu/fa1/f.hpp"\n', "cpu/steps may not include cpu"),
    ("src/cuda/fa2/bad.cuh", '#include "cuda/fa1/f.cuh"\n', "cuda/fa2 may not include cuda/fa1"),
    ("src/core/bad.cc", "#include <cuda_runtime_api.h>\n", "core does not use <cuda_runtime_api.h>"),
    ("toolkit/device/bad.cc", '#include "cuda/device.hpp"\n', "device may not include cuda/shared"),
    ("toolkit/check/bad.cc", '#include "cpu/k.hpp"\n', "check may not include cpu"),
    ("cli/bad.cc", '#include "cpu/k.hpp"\n', "cli may not include cpu"),
    ("examples/bad.cc", '#include "core/a.hpp"\n', "examples may not include core"),
    ("src/core/bad.cc", 'void f() { asm("nop"); }\n', "asm is allowed"),
    ("src/core/bad.cc", "// TO" + "DO later\n", "an open point is left"),
    ("src/core/bad.cc", "\n" * 600, "601 lines"),
    ("tools/bad.py", "\n" * 601, "601 lines"),
]


def run(files):
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            path = pathlib.Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        result = subprocess.run([sys.executable, CHECKER, folder], capture_output=True, text=True, check=False)
        return result.returncode, result.stdout + result.stderr


def main() -> int:
    failures = []
    status, output = run(CLEAN)
    if status != 0:
        failures.append(f"clean tree: status {status}\n{output}")
    for name, text, expected in VIOLATIONS:
        status, output = run(CLEAN | {name: (LICENSE if name.endswith((".cc", "hpp", "cuh")) else "") + text})
        if status != 1 or expected not in output or "1 violations" not in output:
            failures.append(f"{name}: expected {expected!r}, status {status}\n{output}")
    status, output = run(CLEAN | {"src/core/bad.cc": "int x;\n"})
    if status != 1 or "does not name the license" not in output:
        failures.append(f"no license: status {status}\n{output}")
    print("\n".join(failures) or f"{len(VIOLATIONS) + 2} cases ok")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
