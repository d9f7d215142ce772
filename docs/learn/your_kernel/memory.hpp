// SPDX-License-Identifier: Apache-2.0
//
// Slow memory that counts, for kernels in C++. A kernel reads rows of a Matrix by load() and writes them by store() or
// add(); what it holds in between is its fast memory. The matrices are those of memory.py, which counts.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

constexpr double infinity = std::numeric_limits<double>::infinity();

/// A few rows of numbers in fast memory.
class Tile {
 public:
    Tile(long rows, long width, double value = 0) : rows_(rows), width_(width) {
        numbers_.assign(static_cast<std::size_t>(rows * width), value);
    }

    long rows() const { return rows_; }
    long width() const { return width_; }
    double* data() { return numbers_.data(); }
    const double* data() const { return numbers_.data(); }

    /// Number c of row r. Throws std::out_of_range.
    double& operator()(long r, long c) { return numbers_[place(r, c)]; }
    double operator()(long r, long c) const { return numbers_[place(r, c)]; }

    /// Row r: width() numbers.
    std::span<const double> row(long r) const {
        return {numbers_.data() + place(r, 0), static_cast<std::size_t>(width_)};
    }

 private:
    std::size_t place(long r, long c) const {
        if (r < 0 || r >= rows_ || c < 0 || c >= width_) {
            throw std::out_of_range("a tile of " + std::to_string(rows_) + " x " + std::to_string(width_) +
                                    " has no number (" + std::to_string(r) + ", " + std::to_string(c) + ")");
        }
        return static_cast<std::size_t>(r * width_ + c);
    }

    long rows_, width_;
    std::vector<double> numbers_;
};

/// The sum of a[i] * b[i].
inline double dot(std::span<const double> a, std::span<const double> b) {
    double sum = 0;
    for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) sum += a[i] * b[i];
    return sum;
}

/// Rows of numbers in slow memory. Passed from judge.py, so its layout is that of compiled.py.
struct Matrix {
    long index, rows_, width_;
    long (*load_)(long index, long begin, long end, double* to);  // returns the rows, or -1
    int (*store_)(long index, long begin, long rows, long width, const double* from, int adds);

    long rows() const { return rows_; }
    long width() const { return width_; }

    /// A copy of the rows begin to end - 1. Rows after the last are left out.
    Tile load(long begin, long end) const {
        Tile tile(std::clamp(end - begin, 0L, rows_), width_);
        const long rows = load_(index, begin, end, tile.data());
        if (rows < 0) throw std::runtime_error("load");
        Tile read(rows, width_);
        std::copy_n(tile.data(), rows * width_, read.data());
        return read;
    }

    /// Writes the rows of the tile from row `begin` on.
    void store(long begin, const Tile& tile) { write(begin, tile, 0); }

    /// Adds to rows: reads them, adds, and writes them back.
    void add(long begin, const Tile& tile) { write(begin, tile, 1); }

 private:
    void write(long begin, const Tile& tile, int adds) {
        if (store_(index, begin, tile.rows(), tile.width(), tile.data(), adds) != 0) throw std::runtime_error("store");
    }
};
