# SPDX-License-Identifier: Apache-2.0
"""The seeds of random numbers in tests, as random_seed() of tests/long_run.hpp has them."""
import os

OF_RUN = int(os.environ.get("TESSERA_SEED") or 0)


def random_seed(fixed):
    """`fixed` in most runs, so that they check the same numbers; TESSERA_SEED is added to it."""
    return fixed + OF_RUN
