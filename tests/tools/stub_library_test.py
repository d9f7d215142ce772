#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A program linked against a stub of the C library needs only what manylinux_2_28 has, and fails to link otherwise.

    stub_library_test.py SOURCE_FOLDER COMPILER
"""
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

SOURCE, COMPILER = pathlib.Path(sys.argv[1]), sys.argv[2]
spec = importlib.util.spec_from_file_location("stub_library", SOURCE / "tools/stub_library.py")
stub_library = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stub_library)

LISTING = """
   Num:    Value          Size Type    Bind   Vis      Ndx Name
     1: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND elsewhere@GLIBC_2.2.5 (2)
     2: 0000000000001000    40 FUNC    GLOBAL DEFAULT   13 pow@GLIBC_2.2.5
     3: 0000000000002000    40 FUNC    GLOBAL DEFAULT   13 pow@@GLIBC_2.29
     4: 0000000000003000     8 OBJECT  WEAK   DEFAULT   20 environ@@GLIBC_2.2.5
     5: 0000000000000000     0 OBJECT  GLOBAL DEFAULT  ABS GLIBC_2.2.5
     6: 0000000000004000     8 IFUNC   GLOBAL DEFAULT   13 memcpy@@GLIBC_2.14
     7: 0000000000000010     8 TLS     GLOBAL DEFAULT   19 slot@@GLIBC_PRIVATE
"""


def allows_what_the_platform_has():
    for version in ("GLIBC_2.2.5", "GLIBC_2.28", "GLIBCXX_3.4.24", "CXXABI_1.3.11", "CXXABI_TM_1", "GCC_7.0.0"):
        assert stub_library.allowed(version), version
    for version in ("GLIBC_2.29", "GLIBC_2.34", "GLIBCXX_3.4.25", "CXXABI_1.3.13", "GCC_12.0.0", "GLIBC_PRIVATE"):
        assert not stub_library.allowed(version), version


def reads_the_listing():
    found = {(symbol.name, symbol.version, symbol.kind, symbol.weak) for symbol in stub_library.exported(LISTING)}
    assert found == {("pow", "GLIBC_2.2.5", "FUNC", False), ("environ", "GLIBC_2.2.5", "OBJECT", True),
                     ("memcpy", "GLIBC_2.14", "FUNC", False)}, found
    text = stub_library.assembly(stub_library.exported(LISTING))
    assert "pow@@GLIBC_2.2.5" in text, "the newest version that is left becomes the default"


def library(name):
    said = subprocess.run([COMPILER, "-print-file-name=" + name], check=True, capture_output=True, text=True)
    return pathlib.Path(said.stdout.strip())


def links_against_the_stub(folder):
    """glibc has log() in version 2.29 and in an older one, which the stub leaves. A symbol that has no older version is
    undefined."""
    original = library("libm.so.6")
    if not original.is_absolute():
        print("no libm.so.6 here: linking is not tested")
        return
    stub = folder / "libm.so.6"
    shutil.copy(original, stub)
    stub_library.replace(COMPILER, str(stub))
    listed = stub_library.listing("--dyn-syms", original)
    versions = {}
    for line in listed.splitlines():
        match = stub_library.LINE.match(line)
        if match and match[5] not in ("UND", "ABS") and match[7]:
            versions.setdefault(match[6], set()).add(match[7])
    only_newer = sorted(name for name, of_name in versions.items() if not any(map(stub_library.allowed, of_name)))

    def link(function):
        source = folder / "program.c"
        source.write_text("double %s(double); double call(double x) { return %s(x); }" % (function, function))
        made = folder / "program.so"
        options = ["-shared", "-fPIC", "-fno-builtin", "-nostdlib", "-Wl,-z,defs"]
        done = subprocess.run([COMPILER, *options, "-o", made, source, stub], capture_output=True, text=True)
        return done, made

    done, made = link("log")
    assert done.returncode == 0, done.stderr
    version, = re.findall(r" log@(\S+)", stub_library.listing("--dyn-syms", made))
    assert stub_library.allowed(version), version
    for function in only_newer[:1]:
        done, _ = link(function)
        assert done.returncode != 0 and "undefined reference to `%s'" % function in done.stderr, (function, done.stderr)


allows_what_the_platform_has()
reads_the_listing()
with tempfile.TemporaryDirectory() as temporary:
    links_against_the_stub(pathlib.Path(temporary))
print("ok")
