# SPDX-License-Identifier: Apache-2.0
"""What every test of the package shares."""
import pytest


@pytest.fixture
def rng():
    """A NumPy generator with a fixed seed."""
    import numpy
    return numpy.random.default_rng(20261122)
