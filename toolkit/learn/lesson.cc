// SPDX-License-Identifier: Apache-2.0
#include "learn/lesson.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "learn/estimate.hpp"
#include "learn/quiz.hpp"
#include "tessera/error.hpp"

namespace tessera::learn {
namespace {

constexpr Lesson kLessons[] = {
    {0,
     1,
     "00-ten-lines",
     "Attention in ten lines",
     {definition_row_exercise, scale_exercise, definition_sizes_exercise}},
    {1,
     1,
     "01-memory-traffic",
     "Attention is slow because of its memory traffic",
     {traffic_exercise, traffic_time_exercise, faster_cores_exercise}},
    {2,
     1,
     "02-scratchpad",
     "Fast memory is a scratchpad",
     {scratchpad_exercise, largest_scores_exercise, scratchpad_not_cache_exercise}},
    {3, 1, "03-matrix", "The N x N matrix that need not exist", {matrix_exercise, longer_exercise, linear_exercise}},
    {4,
     1,
     "04-same-maths",
     "Same maths, another schedule",
     {reorder_exercise, queries_loaded_exercise, last_digits_exercise}},
    {5,
     2,
     "05-tiles",
     "Cut the matrix until it fits the scratchpad",
     {tile_size_exercise, tile_traffic_exercise, tall_tile_exercise}},
    {6,
     2,
     "06-running-maximum",
     "The running maximum that streams the softmax exactly",
     {running_maximum_exercise, order_of_keys_exercise, any_maximum_exercise}},
    {7,
     2,
     "07-one-tile",
     "Walk one Q tile through every K tile on paper",
     {one_tile_exercise, rescales_exercise, late_division_exercise}},
    {8,
     2,
     "08-recompute",
     "The backward that never stored the matrix",
     {weight_again_exercise, stored_weights_exercise, recompute_exercise}},
    {9,
     2,
     "09-gradients",
     "Push gradients through a tile",
     {score_gradient_exercise, value_gradient_exercise, row_sum_exercise}},
    {10,
     2,
     "10-causal",
     "Causal tiles that are not wasted",
     {causal_exercise, causal_row_exercise, alignment_exercise}},
    {11, 3, "11-fa2", "FA2 flips the loops", {loops_exercise, larger_tile_exercise, idle_sms_exercise}},
    {12, 3, "12-fa3", "FA3 overlaps instead of waiting", {overlap_exercise, slower_memory_exercise, producer_exercise}},
    {13, 3, "13-which", "Which version is running", {kernel_name_exercise, tile_of_name_exercise, profile_exercise}},
    {14,
     3,
     "14-family",
     "SDPA, xFormers and the family tree",
     {family_exercise, mask_tensor_exercise, receptionist_exercise}},
    {15, 4, "15-roofline", "Draw the roofline, predict the win", {amdahl_exercise, a100_win_exercise, no_win_exercise}},
    {16, 4, "16-worksheet", "Redo the prediction line by line", {waves_exercise, fewer_heads_exercise, blind_exercise}},
    {17,
     5,
     "17-decoding",
     "Decoding: split the keys, merge by LSE",
     {merge_exercise, parts_cost_exercise, why_split_exercise}},
    {18, 5, "18-cache", "Grouped heads, and a cache in pages", {pages_exercise, group_exercise, page_size_exercise}},
    {19, 5, "19-fp8", "fp8 and its errors", {fp8_exercise, spacing_exercise, outlier_exercise}},
    {20,
     5,
     "20-blackwell",
     "Blackwell: exponentials become the bottleneck",
     {lazy_rescale_exercise, polynomial_exercise, stale_exercise}},
    {21, 5, "21-sinks", "Sinks, windows and dropout", {sink_exercise, window_exercise, dropout_exercise}},
    {22,
     5,
     "22-megakernel",
     "A megakernel: what one launch removes",
     {block_floor_exercise, removed_gaps_exercise, resident_exercise}},
};

constexpr const char* kParts[] = {"Why attention waits", "The algorithm, by hand", "The versions", "The prediction",
                                  "Serving, and after FA3"};

}  // namespace

const char* name_of(Kind kind) {
    constexpr const char* kNames[] = {"compute", "predict, then run", "explain"};
    return kNames[static_cast<int>(kind)];
}

const char* Lesson::name() const { return slug + 3; }

int Lesson::exercise_count() const {
    return static_cast<int>(std::find(exercises.begin(), exercises.end(), nullptr) - exercises.begin());
}

std::string ExerciseId::text() const {
    if (quiz == nullptr) return fmt::format("{}{:c}", lesson->number, 'a' + index);
    const std::string name = quiz->name;
    if (name == "exam") return fmt::format("exam {}", index + 1);
    return fmt::format("{}{}{:c}", name, quiz->estimates() ? " " : "", 'a' + index);
}

std::string ExerciseId::saved() const {
    return quiz == nullptr ? fmt::format("{} {:c}", lesson->name(), 'a' + index) : text();
}

Exercise ExerciseId::make() const {
    const auto at = static_cast<std::size_t>(index);
    if (quiz == nullptr) return lesson->exercises[at]();
    return quiz->estimates() ? estimate_exercise(index, {}) : learn::exercise_of(quiz->questions[at]);
}

std::span<const Lesson> lessons() { return kLessons; }

const char* part_title(int part) { return kParts[part - 1]; }

const Lesson& lesson(int number) {
    for (const Lesson& one : kLessons) {
        if (one.number == number) return one;
    }
    throw Error(ErrorCode::invalid_argument, "lesson",
                fmt::format("expected 0 to {}, got {}", kLessons[std::size(kLessons) - 1].number, number));
}

std::vector<ExerciseId> exercises_of(const Lesson& lesson) {
    std::vector<ExerciseId> result;
    for (int index = 0; index < lesson.exercise_count(); ++index) result.push_back({.lesson = &lesson, .index = index});
    return result;
}

std::vector<ExerciseId> all_exercises() {
    std::vector<ExerciseId> result;
    for (const Lesson& lesson : kLessons) {
        for (const ExerciseId& id : exercises_of(lesson)) result.push_back(id);
    }
    return result;
}

std::vector<ExerciseId> exercises_of(const Quiz& quiz) {
    std::vector<ExerciseId> result;
    for (int index = 0; index < quiz.count(); ++index) result.push_back({.index = index, .quiz = &quiz});
    return result;
}

ExerciseId exercise_of(const std::string& text) {
    for (const ExerciseId& id : all_exercises()) {
        if (id.text() == text) return id;
    }
    for (const Quiz& quiz : quizzes()) {
        for (const ExerciseId& id : exercises_of(quiz)) {
            if (id.text() == text) return id;
        }
    }
    throw Error(ErrorCode::invalid_argument, "exercise",
                fmt::format("expected a lesson and a letter such as 6a, or a question such as recap 1a, exam 7 or "
                            "estimate a, got \"{}\"",
                            text));
}

}  // namespace tessera::learn
