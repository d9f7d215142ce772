# SPDX-License-Identifier: Apache-2.0
"""Slow memory that counts. A kernel reads rows of a Matrix by load() and writes them by store() or add(); what it holds
in between is its fast memory."""
import numpy


class Matrix:
    """Rows of numbers in slow memory."""

    def __init__(self, rows):
        self.rows = numpy.array(rows, dtype=numpy.float64)
        self.loaded = 0  # numbers read
        self.stored = 0  # numbers written

    def __len__(self):
        return len(self.rows)

    @property
    def width(self):
        return self.rows.shape[1]

    def load(self, begin, end):
        """A copy of the rows begin to end - 1. Rows after the last are left out."""
        if not 0 <= begin <= end:
            raise ValueError(f"load({begin}, {end}): expected 0 <= begin <= end")
        rows = self.rows[begin:end].copy()
        self.loaded += rows.size
        return rows

    def store(self, begin, rows):
        """Writes rows from row `begin` on."""
        rows = numpy.asarray(rows, dtype=numpy.float64)
        target = self.rows[begin:begin + len(rows)]
        if rows.shape != target.shape:
            raise ValueError(f"store({begin}): expected at most {len(self) - begin} rows of {self.width} numbers, "
                             f"got an array of shape {list(rows.shape)}")
        target[:] = rows
        self.stored += rows.size

    def add(self, begin, rows):
        """Adds to rows: reads them, adds, and writes them back."""
        rows = numpy.asarray(rows, dtype=numpy.float64)
        self.store(begin, self.load(begin, begin + len(rows)) + rows)
