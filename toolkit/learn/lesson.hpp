// SPDX-License-Identifier: Apache-2.0
//
// The lessons of docs/learn as data: their titles and exercises. Schedules, the model, the example by hand and the name
// readers compute every number of an answer; none is typed here. The pages, `tessera learn` and the web page share this
// data.
#pragma once

#include <array>
#include <span>
#include <string>
#include <vector>

namespace tessera::learn {

/// A common wrong answer, and the misunderstanding behind it.
struct Mistake {
    double value = 0;
    std::string text;
    std::string word{};  ///< set if the answer is a word
};

/// The kinds of exercises.
enum class Kind : unsigned char {
    compute,  ///< a number or a word, worked out with a pencil
    predict,  ///< a number or a word, guessed first; then a command shows it
    explain   ///< a sentence of the learner's own, who compares it with a model answer and says yes or no
};

/// "compute", "predict, then run" or "explain".
const char* name_of(Kind kind);

struct Exercise {
    Kind kind = Kind::compute;
    std::string task;    ///< with every number that the answer needs
    std::string unit{};  ///< the answer's unit: "MiB"; empty: a plain number, or words
    double value = 0;
    double tolerance = 1e-3;           ///< relative: the largest accepted distance from `value`
    std::vector<std::string> words{};  ///< accepted words; if there are any, the answer is a word
    std::string answer{};              ///< the answer in its printed form: "23/16"; explain: the model answer
    std::string why{};                 ///< the derivation; empty in explain
    std::vector<Mistake> mistakes{};
    std::string hint{};     ///< the first step towards the answer, without a number of it
    std::string command{};  ///< predict: the command that shows the answer
};

struct Lesson {
    int number = 0;
    int part = 0;
    const char* slug;  ///< the page is docs/learn/SLUG.md, the picture docs/learn/SLUG.svg
    const char* title;
    /// The exercises a, b and c; null after the last. Progress files name an exercise by its letter, so a new one comes
    /// last.
    std::array<Exercise (*)(), 3> exercises;

    /// The slug without its number: "one-tile". It stays when lessons are renumbered, and progress files use it.
    const char* name() const;
    int exercise_count() const;
};

struct Quiz;

/// An exercise by its place: 7b of lesson 7, or a question of a recap or of the exam (quiz.hpp).
struct ExerciseId {
    const Lesson* lesson = nullptr;  ///< null: a question of `quiz`
    int index = 0;                   ///< 0 is a
    const Quiz* quiz = nullptr;

    std::string text() const;   ///< "7b", "recap 2a", "exam 7", "estimate a"
    std::string saved() const;  ///< as in progress files: "one-tile b", "recap 2a", "exam 7", "estimate a"
    Exercise make() const;      ///< an estimate: for the default model
    bool operator==(const ExerciseId&) const = default;
};

/// All lessons in order.
std::span<const Lesson> lessons();

/// The title of a part, such as "Why attention waits".
const char* part_title(int part);

/// The lesson of this number. Throws Error(invalid_argument) naming "lesson".
const Lesson& lesson(int number);

/// The exercises of one lesson, of all lessons, or the questions of a recap or of the exam, in order.
std::vector<ExerciseId> exercises_of(const Lesson& lesson);
std::vector<ExerciseId> all_exercises();
std::vector<ExerciseId> exercises_of(const Quiz& quiz);

/// The exercise of ExerciseId::text(). Throws Error(invalid_argument) naming "exercise".
ExerciseId exercise_of(const std::string& text);

// The exercises, in the order of the lessons; each is defined in the file of its part.
Exercise definition_row_exercise();
Exercise scale_exercise();
Exercise definition_sizes_exercise();
Exercise traffic_exercise();
Exercise traffic_time_exercise();
Exercise faster_cores_exercise();
Exercise scratchpad_exercise();
Exercise largest_scores_exercise();
Exercise scratchpad_not_cache_exercise();
Exercise matrix_exercise();
Exercise longer_exercise();
Exercise linear_exercise();
Exercise reorder_exercise();
Exercise queries_loaded_exercise();
Exercise last_digits_exercise();
Exercise tile_size_exercise();
Exercise tile_traffic_exercise();
Exercise tall_tile_exercise();
Exercise running_maximum_exercise();
Exercise order_of_keys_exercise();
Exercise any_maximum_exercise();
Exercise one_tile_exercise();
Exercise rescales_exercise();
Exercise late_division_exercise();
Exercise weight_again_exercise();
Exercise stored_weights_exercise();
Exercise recompute_exercise();
Exercise score_gradient_exercise();
Exercise value_gradient_exercise();
Exercise row_sum_exercise();
Exercise causal_exercise();
Exercise causal_row_exercise();
Exercise alignment_exercise();
Exercise loops_exercise();
Exercise larger_tile_exercise();
Exercise idle_sms_exercise();
Exercise overlap_exercise();
Exercise slower_memory_exercise();
Exercise producer_exercise();
Exercise kernel_name_exercise();
Exercise tile_of_name_exercise();
Exercise profile_exercise();
Exercise family_exercise();
Exercise mask_tensor_exercise();
Exercise receptionist_exercise();
Exercise amdahl_exercise();
Exercise a100_win_exercise();
Exercise no_win_exercise();
Exercise waves_exercise();
Exercise fewer_heads_exercise();
Exercise blind_exercise();
Exercise merge_exercise();
Exercise parts_cost_exercise();
Exercise why_split_exercise();
Exercise pages_exercise();
Exercise group_exercise();
Exercise page_size_exercise();
Exercise fp8_exercise();
Exercise spacing_exercise();
Exercise outlier_exercise();
Exercise lazy_rescale_exercise();
Exercise polynomial_exercise();
Exercise stale_exercise();
Exercise sink_exercise();
Exercise window_exercise();
Exercise dropout_exercise();
Exercise block_floor_exercise();
Exercise removed_gaps_exercise();
Exercise resident_exercise();

}  // namespace tessera::learn
