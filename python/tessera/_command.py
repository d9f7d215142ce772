# SPDX-License-Identifier: Apache-2.0
"""The command `tessera`: the C++ program that the wheel carries, in place of this process."""
import os
import pathlib
import sys


def program() -> pathlib.Path:
    """Where the command lies in an installed wheel."""
    return pathlib.Path(__file__).parent / "bin" / "tessera"


def main() -> int:
    if sys.argv[1:2] == ["doctor"]:  # asks Python, so it is answered here
        from . import _doctor
        return _doctor.main()
    try:
        os.execv(program(), ["tessera", *sys.argv[1:]])
    except OSError as error:
        print(f"tessera: {program()} can't be run: {error.strerror}", file=sys.stderr)
        return 70  # as the program itself calls a fault of its own
