# SPDX-License-Identifier: Apache-2.0
"""The command `tessera`: runs the C++ program of the wheel in place of this process."""
import os
import pathlib
import sys


def program() -> pathlib.Path:
    """The path of the command in an installed wheel."""
    return pathlib.Path(__file__).parent / "bin" / "tessera"


def main() -> int:
    if sys.argv[1:2] == ["doctor"]:  # inspects Python packages, so Python answers it
        from . import _doctor
        return _doctor.main()
    try:
        os.execv(program(), ["tessera", *sys.argv[1:]])
    except OSError as error:
        print(f"tessera: {program()} can't be run: {error.strerror}", file=sys.stderr)
        return 70  # the status with which the program reports a fault of its own
