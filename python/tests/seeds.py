# SPDX-License-Identifier: Apache-2.0
"""The seeds of random numbers in tests and whether a run is long, as tests/long_run.hpp has them."""
import os

LONG = "TESSERA_LONG" in os.environ  # scripts/test.sh --long
OF_RUN = int(os.environ.get("TESSERA_SEED") or 0)


def random_seed(fixed):
    """`fixed` in most runs, so that they check the same numbers; TESSERA_SEED is added to it."""
    return fixed + OF_RUN
