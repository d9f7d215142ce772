#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the seed files of the fuzzers: corpus/{safetensors,npy}/valid_* are files that the readers take, attack_* hold
one attack each; corpus/{trace,name} are small traces, and the names of tests/diagnose/names.tsv. Needs only the standard
library; running it again gives the same bytes."""

import gzip
import json
import struct
from pathlib import Path

CORPUS = Path(__file__).resolve().parent / "corpus"
WRAP = 1 << 32  # its square is 0 in 64 bits


def safetensors(header, payload=b"", length=None):
    """A file; `header` is JSON text, bytes or an object, `length` replaces the true length of the header."""
    if isinstance(header, dict):
        header = json.dumps(header, separators=(",", ":"))
    if isinstance(header, str):
        header = header.encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + payload


def tensor(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def npy(header, payload=b"", version=(1, 0), length=None):
    if isinstance(header, str):
        header = header.encode()
    length = len(header) if length is None else length
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H" if version[0] == 1 else "<I", length) + header + payload


def array(descr, shape, fortran=False):
    return f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}, }}\n"


ONE = tensor("F32", [2], 0, 8)
DATA = bytes(range(8))

SAFETENSORS = {
    "valid_empty": safetensors("{}"),
    "valid_f32": safetensors({"q": tensor("F32", [2, 3], 0, 24)}, bytes(range(24))),
    "valid_mixed": safetensors(
        {
            "__metadata__": {"causal": "1", "scale": "0.125"},
            "a": tensor("F64", [1, 2], 0, 16),
            "b": tensor("F32", [3], 16, 28),
            "c": tensor("F16", [2, 1, 1, 2], 28, 36),
            "d": tensor("BF16", [3], 36, 42),
        },
        bytes(range(42)),
    ),
    "valid_scalar": safetensors({"s": tensor("F32", [], 0, 4)}, b"\0\0\x80\x3f"),
    "valid_zero_size": safetensors({"a": tensor("F32", [2, 0, 3], 0, 0), "b": tensor("I64", [1], 0, 8)}, DATA),
    "valid_nan": safetensors({"x": tensor("F32", [2], 0, 8)}, b"\x01\0\xa0\x7f\0\0\x80\xff"),
    "valid_not_viewable": safetensors(
        {"a": tensor("I8", [3], 0, 3), "b": tensor("BOOL", [1], 3, 4), "c": tensor("F4", [2], 4, 5)}, bytes(5)
    ),
    "valid_rank_5": safetensors({"a": tensor("F16", [1, 1, 1, 1, 2], 0, 4)}, bytes(4)),
    "valid_padded": safetensors('{"a":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}}      ', bytes(4)),
    "valid_unordered": safetensors({"b": tensor("F32", [1], 4, 8), "a": tensor("F32", [1], 0, 4)}, DATA),
    "valid_unaligned": safetensors({"a": tensor("U8", [1], 0, 1), "b": tensor("F64", [1], 1, 9)}, bytes(9)),
    "attack_too_short": b"\1\0\0",
    "attack_header_oversized": safetensors({"a": ONE}, DATA, length=(1 << 63) + 5),
    "attack_header_wraps": safetensors({"a": ONE}, DATA, length=(1 << 64) - 8),
    "attack_header_past_end": safetensors({"a": ONE}, DATA, length=200),
    "attack_header_empty": safetensors("", DATA),
    "attack_header_cut": safetensors({"a": ONE}, DATA, length=20),
    "attack_not_an_object": safetensors("[1]"),
    "attack_leading_space": safetensors(" {}"),
    "attack_nul_after_json": safetensors(b"{}\0}"),
    "attack_second_document": safetensors("{}{}"),
    "attack_bad_utf8": safetensors(b'{"\xff":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', DATA),
    "attack_lone_surrogate": safetensors('{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', DATA),
    "attack_negative_offset": safetensors({"a": tensor("F32", [2], -8, 0)}, DATA),
    "attack_negative_shape": safetensors({"a": tensor("F32", [-2], 0, 8)}, DATA),
    "attack_offset_past_end": safetensors({"a": tensor("F32", [4], 0, 16)}, DATA),
    "attack_end_before_begin": safetensors({"a": tensor("F32", [2], 8, 0)}, DATA),
    "attack_overlap_bomb": safetensors({f"t{i}": tensor("F32", [2], 0, 8) for i in range(5)}, DATA),
    "attack_hole": safetensors({"a": tensor("F32", [1], 0, 4), "b": tensor("F32", [1], 8, 12)}, bytes(12)),
    "attack_trailing_bytes": safetensors({"a": ONE}, DATA + b"PK\5\6"),
    "attack_shape_mismatch": safetensors({"a": tensor("F32", [1], 0, 8)}, DATA),
    "attack_product_wraps_to_zero": safetensors({"a": tensor("F32", [WRAP, WRAP], 0, 0)}),
    "attack_product_wraps_32_bits": safetensors({"a": tensor("F32", [65536, 65536], 0, 0)}),
    "attack_duplicate_tensor": safetensors(
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        '"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        DATA,
    ),
    "attack_duplicate_field": safetensors('{"a":{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}}', DATA),
    "attack_duplicate_metadata": safetensors('{"__metadata__":{"a":"1","a":"2"}}'),
    "attack_metadata_number": safetensors('{"__metadata__":{"a":1}}'),
    "attack_metadata_nested": safetensors('{"__metadata__":{"a":{"b":"c"}}}'),
    "attack_unknown_field": safetensors(
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"stride":[1]}}', DATA
    ),
    "attack_missing_field": safetensors('{"a":{"dtype":"F32","shape":[2]}}', DATA),
    "attack_unknown_dtype": safetensors({"a": tensor("F128", [1], 0, 8)}, DATA),
    "attack_sub_byte": safetensors({"a": tensor("F4", [3], 0, 1)}, bytes(1)),
    "attack_float_number": safetensors('{"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}}', DATA),
    "attack_exponent": safetensors('{"a":{"dtype":"F32","shape":[2e0],"data_offsets":[0,8]}}', DATA),
    "attack_number_2_63": safetensors({"a": tensor("F32", [1 << 63], 0, 8)}, DATA),
    "attack_number_huge": safetensors({"a": tensor("F32", [1 << 70], 0, 8)}, DATA),
    "attack_deep": safetensors('{"a":' + "[" * 300 + "]" * 300 + "}"),
    "attack_rank_9": safetensors({"a": tensor("F32", [1] * 9, 0, 4)}, bytes(4)),
    "attack_one_offset": safetensors('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}}', DATA),
    "attack_three_offsets": safetensors('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8,8]}}', DATA),
    "attack_long_name": safetensors({"n" * 4097: ONE}, DATA),
}

NPY = {
    "valid_f4": npy(array("<f4", "(2, 3)"), bytes(range(24))),
    "valid_f2_fortran": npy(array("<f2", "(2, 3)", True), bytes(range(12))),
    "valid_f8_scalar": npy(array("<f8", "()"), bytes(8)),
    "valid_i4_version_2": npy(array("<i4", "(2,)"), bytes(8), (2, 0)),
    "valid_i8_version_3": npy(array("<i8", "(1, 1, 1, 1)"), bytes(8), (3, 0)),
    "valid_zero_size": npy(array("<f4", "(0, 5)")),
    "valid_nan": npy(array("<f4", "(2,)"), b"\x01\0\xa0\x7f\0\0\x80\xff"),
    "valid_u1": npy(array("|u1", "(3,)"), bytes(3)),
    "valid_rank_5": npy(array("<f2", "(1, 1, 1, 1, 2)"), bytes(4)),
    "valid_other_order": npy('{"shape":(2,),"fortran_order":False,"descr":"<f2"}', bytes(4)),
    "valid_bf16_v2": npy(array("|V2", "(2, 2)"), bytes(8)),
    "valid_bf16_u2": npy(array("<u2", "(4,)", True), bytes(8)),
    "valid_f4_big_endian": npy(array(">f4", "(1,)"), bytes(4)),
    "valid_python_2": npy(array("<f4", "(1L, 2L)"), bytes(8)),
    "attack_too_short": b"\x93NUMPY\1",
    "attack_magic": b"\x93NUMPX" + npy(array("<f4", "(1,)"), bytes(4))[6:],
    "attack_version_4": npy(array("<f4", "(1,)"), bytes(4), (4, 0)),
    "attack_version_1_1": npy(array("<f4", "(1,)"), bytes(4), (1, 1)),
    "attack_header_past_end": npy(array("<f4", "(1,)"), bytes(4), length=60000),
    "attack_header_4_gib": b"\x93NUMPY\2\0\xff\xff\xff\xff",
    "attack_header_cut": npy(array("<f4", "(1,)"), bytes(4), length=20),
    "attack_header_empty": npy("", bytes(4)),
    "attack_version_2_as_1": npy(array("<f4", "(1,)"), bytes(4), (2, 0))[:6] + b"\1\0"
    + npy(array("<f4", "(1,)"), bytes(4), (2, 0))[8:],
    "attack_32_gib": npy(array("<f8", "(65536, 65536)")),
    "attack_product_wraps_to_zero": npy(array("<f4", f"({WRAP}, {WRAP})")),
    "attack_size_2_63": npy(array("<f4", f"({1 << 63},)")),
    "attack_size_huge": npy(array("<f4", "(" + "9" * 60 + ",)")),
    "attack_negative": npy(array("<f4", "(-1,)")),
    "attack_payload_short": npy(array("<f4", "(4,)"), bytes(12)),
    "attack_trailing_bytes": npy(array("<f4", "(1,)"), bytes(4) + b"PK\5\6"),
    "attack_object": npy(array("|O", "(1,)"), b"\x80\3cos\nsystem\n."),
    "attack_structured": npy("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }\n", bytes(4)),
    "attack_empty_descr": npy(array("", "(1,)"), bytes(4)),
    "attack_duplicate_key": npy("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,), }", bytes(4)),
    "attack_missing_key": npy("{'descr': '<f4', 'shape': (1,), }", bytes(4)),
    "attack_extra_key": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'x': 1}", bytes(4)),
    "attack_code": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (__import__('os'),), }", bytes(4)),
    "attack_deep": npy("{'descr': '<f4', 'fortran_order': False, 'shape': " + "(" * 300 + ")" * 300 + "}"),
    "attack_not_a_tuple": npy(array("<f4", "(1)"), bytes(4)),
    "attack_rank_9": npy(array("<f4", "(1, 1, 1, 1, 1, 1, 1, 1, 1)"), bytes(4)),
    "attack_text_after_dict": npy(array("<f4", "(1,)").rstrip() + " x\n", bytes(4)),
    "attack_nul_in_dict": npy(b"{'descr': '<f4\0', 'fortran_order': False, 'shape': (1,), }\n", bytes(4)),
    "attack_unfinished_string": npy("{'descr': '<f4"),
}


def kernel(name, start, **args):
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": start, "dur": 9.5, "args": args}


FLASH = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>, false, true>(Flash_fwd_params)"
SDPA = {
    "ph": "X", "cat": "cpu_op", "name": "aten::scaled_dot_product_attention", "pid": 1, "tid": 1, "ts": 1, "dur": 50,
    "args": {"External id": 5, "Input Dims": [[1, 2, 16, 64]] * 3, "Input type": ["c10::Half"] * 3,
             "Concrete Inputs": ["", "", "", "", "0.", "True"]},
}  # fmt: skip
LAUNCH = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 9, "dur": 1,
          "args": {"correlation": 3}}  # fmt: skip
BY_HAND = [kernel(n, 10 * i) for i, n in enumerate(["gemm", "elementwise_kernel", "softmax_warp_forward", "gemm"])]

TRACE = {
    "pytorch": json.dumps({"deviceProperties": [{"name": "H200", "computeMajor": 9, "computeMinor": 0}],
                           "traceEvents": [SDPA, LAUNCH, kernel(FLASH, 60, correlation=3, stream=7)]}).encode(),
    "by_hand": json.dumps(BY_HAND).encode(),
    "jax": json.dumps({"traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0"}},
        {"ph": "X", "name": "cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "pid": 1, "tid": 2, "ts": 1, "dur": 2}
    ]}).encode(),
    "nsys_csv": b"Time (%),Total Time (ns),Instances,Name\n60.0,6000,3,\"f<1, 2>\"\n40.0,4,2,gemm\n",
    "ncu_csv": b'"ID","Kernel Name","CC","Metric Name","Metric Unit","Metric Value"\n"0","f","9.0","Duration","us","1,5"\n',
    "nsys_printed": b" Time (%)  Total Time (ns)  Instances  Name\n --------  ---------------  ---------  ----\n"
                    b"     60.0            6,000          3  f<1, 2>\n\nend\n",
    "pytorch_printed": b"----  ---------  ---------  ----------\nName  CPU total  Self CUDA  # of Calls\n"
                       b"----  ---------  ---------  ----------\n   f    0.000us    6.500ms           3\n----  ---------  ---------  ----------\n",
    "names": b"flash_fwd_kernel\nnobody_knows\n",
    "gzip": gzip.compress(json.dumps(BY_HAND).encode(), mtime=0),
}  # fmt: skip


def names():
    lines = (CORPUS.parents[1] / "diagnose" / "names.tsv").read_text().splitlines()
    return {f"name_{i:03}": line.split("\t")[6].encode() for i, line in enumerate(lines) if not line.startswith("#")}


def main():
    for folder, files in (("safetensors", SAFETENSORS), ("npy", NPY), ("trace", TRACE), ("name", names())):
        (CORPUS / folder).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (CORPUS / folder / name).write_bytes(content)


if __name__ == "__main__":
    main()
