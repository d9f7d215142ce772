#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Replaces a shared library by a stub that a linker takes for an older release of it.

    stub_library.py COMPILER LIBRARY...

The stub has the library's name, soname and exported symbols, without any code. It leaves out each symbol whose version
is newer than manylinux_2_28 allows (LIMITS). A program linked against stubs therefore cannot need such a symbol: the
linker takes an older version of it, or says that it is undefined. COMPILER assembles and links for the architecture of
the library.
"""
import collections
import os
import re
import subprocess
import sys
import tempfile

# The newest versions that manylinux_2_28 allows: glibc 2.28, and libstdc++ and libgcc of GCC 8, as on RHEL 8.
LIMITS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}

Symbol = collections.namedtuple("Symbol", "name version value size kind weak")

# A line of `readelf --dyn-syms`: number, value, size, type, binding, visibility (and flags of the processor), section,
# name and version. A symbol that is not defined here has the number of its version after that.
LINE = re.compile(r"\s*\d+: ([0-9a-f]+)\s+(0x[0-9a-f]+|\d+) (\S+)\s+(\S+)\s+\S+(?: \[[^]]*\])?\s+(\S+) "
                  r"([^@\s]+)(?:@@?(\S+))?$")


def allowed(version):
    """Whether manylinux_2_28 has this version; CXXABI_TM_1 and the like have no number and are old."""
    family, _, number = version.partition("_")
    if family not in LIMITS or version == "GLIBC_PRIVATE":
        return False
    numbers = re.fullmatch(r"\d+(\.\d+)*", number)
    return not numbers or tuple(map(int, number.split("."))) <= LIMITS[family]


def exported(text):
    """The symbols that `readelf --dyn-syms` lists as defined with an allowed version."""
    symbols = set()
    for line in text.splitlines():
        match = LINE.match(line)
        if not match:
            continue
        value, size, kind, binding, section, name, version = match.groups()
        if section in ("UND", "ABS") or version is None or not allowed(version):
            continue
        kind = {"IFUNC": "FUNC", "NOTYPE": "FUNC"}.get(kind, kind)
        symbols.add(Symbol(name, version, int(value, 16), int(size, 0), kind, binding != "GLOBAL"))
    return symbols


def number_of(version):
    return [int(part) for part in re.findall(r"\d+", version)]


def assembly(symbols):
    """One label for each symbol. Aliases share their address, which relocations that copy data depend on."""
    newest = {}
    for symbol in symbols:
        if symbol.name not in newest or number_of(symbol.version) > number_of(newest[symbol.name]):
            newest[symbol.name] = symbol.version
    lines = []
    sections = {"FUNC": ".text", "OBJECT": ".data", "TLS": '.section .tbss,"awT",%nobits'}
    by_place = collections.defaultdict(list)
    for symbol in symbols:
        by_place[symbol.kind, symbol.value].append(symbol)
    for number, ((kind, _), aliases) in enumerate(sorted(by_place.items())):
        lines += [sections[kind], ".balign 16"]
        for alias, symbol in enumerate(sorted(aliases)):
            label = "stub_%d_%d" % (number, alias)
            default = "@@" if newest[symbol.name] == symbol.version else "@"
            type_of_label = {"FUNC": "function", "OBJECT": "object", "TLS": "tls_object"}[kind]
            lines += ["%s %s" % (".weak" if symbol.weak else ".globl", label),
                      ".type %s, %%%s" % (label, type_of_label),
                      ".size %s, %d" % (label, symbol.size), "%s:" % label,
                      ".symver %s, %s%s%s, remove" % (label, symbol.name, default, symbol.version)]
        lines.append(".zero %d" % (1 if kind == "FUNC" else max(1, *(symbol.size for symbol in aliases))))
    return "\n".join(lines + ['.section .note.GNU-stack,"",%progbits', ""])


def listing(option, file):
    return subprocess.run(["readelf", "-W", option, file], check=True, capture_output=True, text=True).stdout


def replace(compiler, library):
    soname = re.search(r"soname: \[(.*)\]", listing("-d", library)).group(1)
    symbols = exported(listing("--dyn-syms", library))
    if not symbols:
        sys.exit("%s: no symbol with a version that manylinux_2_28 allows" % library)
    with tempfile.TemporaryDirectory() as folder:
        source, versions = os.path.join(folder, "stub.s"), os.path.join(folder, "stub.map")
        with open(source, "w") as file:
            file.write(assembly(symbols))
        with open(versions, "w") as file:
            for version in sorted({symbol.version for symbol in symbols}):
                file.write("%s { };\n" % version)
        made = library + ".stub"
        subprocess.run([compiler, "-shared", "-nostdlib", "-Wl,-soname," + soname, "-Wl,--version-script=" + versions,
                        "-Wl,--build-id=none", "-o", made, source], check=True)
    os.replace(made, library)


def main(arguments):
    if len(arguments) < 2:
        sys.exit("usage: stub_library.py COMPILER LIBRARY...")
    for library in arguments[1:]:
        replace(arguments[0], library)


if __name__ == "__main__":
    main(sys.argv[1:])
