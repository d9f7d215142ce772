# SPDX-License-Identifier: Apache-2.0
"""Reads compiled CUDA kernels out of object files: registers, local memory, and counts of instructions.

An object has a section .nv_fatbin: containers (magic 0xBA55ED50) of entries, each PTX or an ELF image ("cubin") for one
architecture. In an image, kernel K is the section .text.K, and .nv.info has its registers and stack frame.

On sm_70 and later an instruction has 128 bits. Its lowest 12 bits are the opcode: 9 bits name the instruction, 3 bits
give the form of its operands (register, constant, immediate, uniform register). OPCODES comes from a comparison of
images with the output of nvdisasm 13.0 for sm_80, sm_90 and sm_90a; tests/tools/check_kernels_test.py repeats the
comparison if an nvdisasm is installed.
"""
import collections
import re
import struct
from typing import NamedTuple

OPCODES = {
    0x1F0: "HGMMA",       # wgmma
    0x03C: "HMMA",        # mma.sync
    0x1B4: "UTMALDG",     # cp.async.bulk.tensor, global to shared
    0x1B5: "UTMASTG",     # cp.async.bulk.tensor, shared to global
    0x1AE: "LDGSTS",      # cp.async
    0x03B: "LDSM",        # ldmatrix
    0x044: "STSM",        # stmatrix
    0x183: "LDL",         # load from local memory
    0x187: "STL",         # store to local memory
    0x108: "MUFU",        # special functions, ex2 among them
    0x023: "FFMA",
    0x1C8: "USETMAXREG",  # setmaxnreg
}

FATBIN_MAGIC = 0xBA55ED50
KIND_ELF = 2
ATTRIBUTE_REGISTERS = 0x2F  # in .nv.info: (symbol, value)
ATTRIBUTE_FRAME = 0x11


class Kernel(NamedTuple):
    name: str          # "fa3::forward_kernel<bf16, HeadDim64>"
    symbol: str        # the mangled name in the image
    architecture: str  # "90" (also of images for 90a)
    registers: int
    frame_bytes: int   # local memory per thread
    shared_bytes: int  # static
    code_bytes: int
    counts: collections.Counter  # per instruction in OPCODES


class Section(NamedTuple):
    name: str
    kind: int
    size: int
    data: bytes


SHT_SYMTAB, SHT_NOBITS = 2, 8


def sections_of(elf: bytes):
    """Yields the sections of a 64-bit little-endian ELF file."""
    offset, = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, offset + i * size) for i in range(count)]
    names_at = headers[names_index][4]

    def text(at):
        return elf[names_at + at:elf.index(b"\0", names_at + at)].decode()
    for name, kind, _, _, at, length in headers:
        yield Section(text(name), kind, length, b"" if kind == SHT_NOBITS else elf[at:at + length])


def images_of(fatbin: bytes):
    """Yields the ELF images in a .nv_fatbin section."""
    at = 0
    while at + 16 <= len(fatbin):
        magic, _, header_bytes, length = struct.unpack_from("<IHHQ", fatbin, at)
        if magic != FATBIN_MAGIC:
            at += 8  # padding between containers
            continue
        entry, end = at + header_bytes, at + header_bytes + length
        while entry < end:
            kind, _, entry_header, entry_length = struct.unpack_from("<HHIQ", fatbin, entry)
            payload = fatbin[entry + entry_header:entry + entry_header + entry_length]
            if kind == KIND_ELF:
                if not payload.startswith(b"\x7fELF"):
                    raise ValueError("a compressed image; to have it checked, build with CUDAFLAGS=--no-compress")
                yield payload
            entry += entry_header + entry_length
        at = end


def fatbins_of(binary: bytes):
    return [s.data for s in sections_of(binary) if s.name == ".nv_fatbin"]


def device_bytes(binary: bytes) -> int:
    """Returns the total size of the device code in a binary: images and PTX."""
    return sum(map(len, fatbins_of(binary)))


def attributes_of(info: bytes):
    """Yields (attribute, payload) of .nv.info. Format 4 stores a payload of its own, other formats 16 bits in place."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == 4:
            yield attribute, info[at:at + value]
            at += value


def count_instructions(code: bytes) -> collections.Counter:
    words = struct.unpack(f"<{len(code) // 8}Q", code[:len(code) // 16 * 16])[::2]
    return collections.Counter(OPCODES.get(word & 0x1FF, "other") for word in words)


def kernels_of_image(image: bytes):
    sections = list(sections_of(image))
    by_name = {s.name: s.data for s in sections}
    shared = {s.name[len(".nv.shared."):]: s.size for s in sections if s.name.startswith(".nv.shared.")}
    symbols = next(s.data for s in sections if s.kind == SHT_SYMTAB)
    strings = by_name[".strtab"]
    values = collections.defaultdict(dict)  # attributes, by symbol
    for attribute, payload in attributes_of(by_name[".nv.info"]):
        if attribute in (ATTRIBUTE_REGISTERS, ATTRIBUTE_FRAME):
            index, value = struct.unpack("<II", payload)
            name_at, = struct.unpack_from("<I", symbols, index * 24)
            name = strings[name_at:strings.index(b"\0", name_at)].decode()
            values[name][attribute] = value
    flags, = struct.unpack_from("<I", image, 0x30)
    # The ELF flags hold the architecture in bits 8-15 for ABI version 8 and later, in bits 0-7 for older ones.
    architecture = f"{flags >> 8 & 0xFF if image[8] >= 8 else flags & 0xFF}"
    for s in sections:
        if s.name.startswith(".text.") and s.data:
            symbol = s.name[len(".text."):]
            yield Kernel(readable(symbol), symbol, architecture, values[symbol].get(ATTRIBUTE_REGISTERS, 0),
                         values[symbol].get(ATTRIBUTE_FRAME, 0), shared.get(symbol, 0), len(s.data), count_instructions(s.data))


def kernels_of(binary: bytes):
    """Returns all kernels in an object, library or program."""
    return [k for fatbin in fatbins_of(binary) for image in images_of(fatbin) for k in kernels_of_image(image)]


SHORT = {"__nv_bfloat16": "bf16", "__half": "fp16"}
LETTERS = {"f": "float", "d": "double", "i": "int", "b": "bool"}


def readable(symbol: str) -> str:
    """Demangles the names of kernels: "_ZN7tessera4cuda3fa23runI6__halfLi64EEEvNS_1pE" is "fa2::run<fp16, 64>"."""
    if not symbol.startswith("_Z"):
        return symbol
    path, arguments, at, inside = [], [], 2, False
    while at < len(symbol):
        identifier = re.match(r"\d+", symbol[at:])
        literal = re.match(r"L[a-z](n?\d+)E", symbol[at:])
        if literal:
            arguments.append(literal[1].replace("n", "-"))
            at += literal.end()
        elif identifier:
            begin = at + identifier.end()
            at = begin + int(identifier[0])
            name = symbol[begin:at]
            (arguments if inside else path).append(SHORT.get(name, name))
        elif re.match(r"NS?\d*_", symbol[at:]):  # a name in a scope that is a back reference
            at += re.match(r"NS?\d*_", symbol[at:]).end()
        elif symbol[at] == "I" and not inside:
            inside = True
            at += 1
        elif symbol[at] == "E" and inside and symbol[at:at + 2] in ("EE", "Ev"):
            if symbol[at + 1] == "v" or symbol[at + 2:at + 3] in ("E", "v", ""):
                break
            at += 1
        elif not inside and path and symbol[at] == "E":
            break
        else:
            if inside and symbol[at] in LETTERS:
                arguments.append(LETTERS[symbol[at]])
            at += 1
    if path and path[0].startswith("_GLOBAL"):
        path = path[1:]
    scope = [p for p in path if p not in ("tessera", "cuda", "_GLOBAL__N_1") and not p.startswith("_INTERNAL")]
    return "::".join(scope) + (f"<{', '.join(arguments)}>" if arguments else "")
