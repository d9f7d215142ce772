# SPDX-License-Identifier: Apache-2.0
"""python -m tessera doctor: what is installed and what runs here. Everything else goes to the command tessera."""
import sys

if sys.argv[1:2] == ["doctor"]:
    from ._doctor import main
    if len(sys.argv) > 2:
        sys.exit(f"tessera doctor: expected no arguments, got {' '.join(sys.argv[2:])}")
else:
    from ._command import main
sys.exit(main())
