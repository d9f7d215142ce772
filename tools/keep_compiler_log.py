#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiler launcher: runs the command, and keeps the compiler's messages beside the object, in OBJECT.log.

    keep_compiler_log.py COMMAND... -o OBJECT

ptxas reports serialised wgmma in messages that do not fail a build; tools/check_kernels.py reads them from the log.
"""
import pathlib
import subprocess
import sys


def main() -> int:
    command = sys.argv[1:]
    done = subprocess.run(command, capture_output=True, check=False)
    sys.stdout.buffer.write(done.stdout)
    sys.stderr.buffer.write(done.stderr)
    if "-o" in command[:-1]:
        log = pathlib.Path(command[command.index("-o") + 1] + ".log")
        if log.parent.is_dir():
            log.write_bytes(done.stdout + done.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
