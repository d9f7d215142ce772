#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes web/dist/index.html: page, style, modules, core and sample in one file, which opens from a disk too.

Browsers load no ES modules from file://, so the modules of web/page become one classic script: each import names a module of
the same folder, which is put before it once.

Usage: bundle.py CORE_FOLDER OUTPUT_FOLDER
"""
import base64
import gzip
import json
import pathlib
import re
import struct
import sys

from lessons import lessons

WEB = pathlib.Path(__file__).resolve().parent
SAMPLE = WEB.parent / "examples/data/kjv-layer2.safetensors"
TOKENS = 128  # of the sample that the page carries, of its first head
MOST_BYTES = 3_000_000

IMPORT = re.compile(r"^import \{([^}]*)\} from '\./([\w.]+)';\n", re.MULTILINE)
EXPORT = re.compile(r"^export (?:async )?(?:const|let|function) (\w+)", re.MULTILINE)


def script(entry: str) -> str:
    """All modules that `entry` needs, each a function with names of its own, in an order in which each comes after those
    that it imports."""
    exports, parts = {}, []

    def add(module: str, path: tuple):
        if module in path:
            raise SystemExit(f"{module}: modules import each other: {' -> '.join(path)}")
        if module in exports:
            return
        text = (WEB / "page" / module).read_text(encoding="utf-8")
        for imported, other in IMPORT.findall(text):
            add(other, path + (module,))
            missing = {name.strip() for name in imported.split(",")} - set(exports[other])
            if missing:
                raise SystemExit(f"{module}: {other} does not export {', '.join(sorted(missing))}")
        exports[module] = EXPORT.findall(text)
        body = IMPORT.sub(lambda match: f"const {{{match[1]}}} = modules['{match[2]}'];\n", text)
        body = re.sub(r"^export ", "", body, flags=re.MULTILINE)
        parts.append(f"modules['{module}'] = (() => {{\n{body}return {{{', '.join(exports[module])}}};\n}})();\n")

    add(entry, ())
    return "(() => {\n'use strict';\nconst modules = {};\n" + "".join(parts) + "})();\n"


def sample() -> bytes:
    """q, k, v of the first TOKENS tokens of head 0, as a .safetensors of the layout [batch, heads, len, head_dim]."""
    data = SAMPLE.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    parts, content, tensors = 0, b"", {}
    for name in ("k", "q", "v"):
        info = header[name]
        row = info["shape"][3] * 4
        begin = 8 + size + info["data_offsets"][0]
        content += data[begin:begin + TOKENS * row]
        tensors[name] = {"dtype": "F32", "shape": [1, 1, TOKENS, info["shape"][3]], "data_offsets": [parts, len(content)]}
        parts = len(content)
    tensors["__metadata__"] = {"layout": "batch,heads,seq,head_dim", "source": header["__metadata__"]["source"]}
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + content


def main() -> None:
    core, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    page = (WEB / "page/index.html").read_text(encoding="utf-8")
    glue = (core / "core.js").read_text(encoding="utf-8").replace("</script", "<\\/script")
    carried = sample()
    packed = gzip.compress((core / "core.wasm").read_bytes(), 9, mtime=0)
    for place, text in {"/*STYLE*/": (WEB / "page/style.css").read_text(encoding="utf-8"), "<!--GLUE-->": glue,
                        "<!--SCRIPT-->": script("main.js"), "<!--CORE-->": base64.b64encode(packed).decode(),
                        "<!--SAMPLE-->": base64.b64encode(carried).decode(),
                        "<!--LESSONS-->": json.dumps(lessons()).replace("</", "<\\/")}.items():
        if page.count(place) != 1:
            raise SystemExit(f"index.html: expected {place} once")
        page = page.replace(place, text)
    out.mkdir(parents=True, exist_ok=True)
    (out / "index.html").write_text(page, encoding="utf-8")
    (out / "sample.safetensors").write_bytes(carried)
    (out / "card.png").write_bytes((WEB / "page/card.png").read_bytes())  # the picture of a shared link
    size = len(page.encode())
    print(f"{out / 'index.html'}: {size / 1e6:.2f} MB, of which the core {len(packed) * 4 / 3 / 1e6:.2f} MB")
    if size > MOST_BYTES:
        raise SystemExit(f"expected at most {MOST_BYTES} bytes")


if __name__ == "__main__":
    main()
