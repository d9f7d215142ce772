// SPDX-License-Identifier: Apache-2.0
#include "learn/lesson.hpp"

#include <fmt/format.h>

#include "tessera/error.hpp"

namespace tessera::learn {
namespace {

constexpr Lesson kLessons[] = {
    {1, 1, "01-memory-traffic", "Attention is slow because of its memory traffic", traffic_exercise},
    {2, 1, "02-scratchpad", "Fast memory is a scratchpad", scratchpad_exercise},
    {3, 1, "03-matrix", "The N x N matrix that need not exist", matrix_exercise},
    {4, 1, "04-same-maths", "Same maths, another schedule", reorder_exercise},
    {5, 2, "05-tiles", "Cut the matrix until it fits the scratchpad", tile_size_exercise},
    {6, 2, "06-running-maximum", "The running maximum that streams the softmax exactly", running_maximum_exercise},
    {7, 2, "07-one-tile", "Walk one Q tile through every K tile on paper", one_tile_exercise},
    {8, 2, "08-backward", "The backward that never stored the matrix", backward_exercise},
    {9, 2, "09-causal", "Causal tiles that are not wasted", causal_exercise},
    {10, 3, "10-fa2", "FA2 flips the loops", loops_exercise},
    {11, 3, "11-fa3", "FA3 overlaps instead of waiting", overlap_exercise},
    {12, 3, "12-which", "Which version is running", kernel_name_exercise},
    {13, 3, "13-family", "SDPA, xFormers and the family tree", family_exercise},
    {14, 4, "14-roofline", "Draw the roofline, predict the win", prediction_exercise},
    {17, 5, "17-decoding", "Decoding: split the keys, merge by LSE", merge_exercise},
    {18, 5, "18-cache", "Grouped heads, and a cache in pages", pages_exercise},
    {19, 5, "19-fp8", "fp8 and its errors", fp8_exercise},
    {20, 5, "20-blackwell", "Blackwell: exponentials become the bottleneck", lazy_rescale_exercise},
    {21, 5, "21-sinks", "Sinks, windows and dropout", sink_exercise},
};

constexpr const char* kParts[] = {"Why attention waits", "The algorithm, by hand", "The versions", "The prediction",
                                  "Serving, and after FA3"};

}  // namespace

std::span<const Lesson> lessons() { return kLessons; }

const char* part_title(int part) { return kParts[part - 1]; }

const Lesson& lesson(int number) {
    for (const Lesson& one : kLessons) {
        if (one.number == number) return one;
    }
    throw Error(ErrorCode::invalid_argument, "lesson",
                fmt::format("expected a lesson from {} to {}, got {}", std::begin(kLessons)->number,
                            std::rbegin(kLessons)->number, number));
}

}  // namespace tessera::learn
