// SPDX-License-Identifier: Apache-2.0
#include "learn_list.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>

#include "learn/progress.hpp"
#include "learn/quiz.hpp"
#include "table.hpp"

namespace tessera::cli {
namespace {

using learn::ExerciseId;
using learn::Lesson;

/// The first lesson after this one that has an exercise without a right answer, or else the first such lesson; null if
/// none remains.
const Lesson* next_lesson(const std::vector<learn::SavedAnswer>& given, int after) {
    const Lesson* first = nullptr;
    for (const Lesson& lesson : learn::lessons()) {
        if (learn::done(given, lesson)) continue;
        if (lesson.number > after) return &lesson;
        if (first == nullptr) first = &lesson;
    }
    return first;
}

/// The state of a lesson or a quiz for the list: "done", "1 of 3", or nothing.
std::string state_of(const std::vector<learn::SavedAnswer>& given, const std::vector<ExerciseId>& exercises) {
    std::size_t right = 0;
    int tries = 0;
    for (const ExerciseId& id : exercises) {
        const learn::Standing standing = learn::standing_of(given, id);
        right += standing.done ? 1 : 0, tries += standing.tries;
    }
    if (right == exercises.size()) return "done";
    return tries == 0 ? "" : fmt::format("{} of {}", right, exercises.size());
}

Json standings_json(const std::vector<learn::SavedAnswer>& given, const std::vector<ExerciseId>& ids) {
    Json exercises = Json::array();
    for (const ExerciseId& id : ids) {
        const learn::Standing standing = learn::standing_of(given, id);
        exercises.push_back({{"exercise", id.text()},
                             {"kind", learn::name_of(id.make().kind)},
                             {"done", standing.done},
                             {"tries", standing.tries},
                             {"again", standing.again}});
    }
    return exercises;
}

Json lesson_json(const std::vector<learn::SavedAnswer>& given, const Lesson& lesson) {
    return {{"lesson", lesson.number},
            {"part", lesson.part},
            {"part_title", learn::part_title(lesson.part)},
            {"title", lesson.title},
            {"slug", lesson.slug},
            {"done", learn::done(given, lesson)},
            {"exercises", standings_json(given, learn::exercises_of(lesson))}};
}

}  // namespace

std::vector<learn::SavedAnswer> kept_answers() {
    const auto path = learn::progress_path();
    return path ? learn::read_progress(*path) : std::vector<learn::SavedAnswer>();
}

std::string next_text(const std::vector<learn::SavedAnswer>& given, int after) {
    const Lesson* next = next_lesson(given, after);
    std::string text = next == nullptr
                           ? "All lessons are done. Then: tessera learn exam, and tessera learn estimate"
                           : fmt::format("Next: docs/learn/{}.md, then tessera learn {}", next->slug, next->number);
    const std::vector<ExerciseId> missed = learn::missed_exercises(given);
    if (!missed.empty()) {
        text += "\nMissed:";
        for (const ExerciseId& id : missed) text += (id == missed.front() ? " " : ", ") + id.text();
        text += ". To repeat: tessera learn again";
    }
    return text;
}

void print_list(const Session& session) {
    const std::vector<learn::SavedAnswer> given = kept_answers();
    const auto path = learn::progress_path();
    if (session.json) {
        Json list = Json::array();
        for (const Lesson& lesson : learn::lessons()) list.push_back(lesson_json(given, lesson));
        Json quizzes = Json::array();
        for (const learn::Quiz& quiz : learn::quizzes()) {
            quizzes.push_back({{"quiz", quiz.name},
                               {"title", quiz.title},
                               {"exercises", standings_json(given, learn::exercises_of(quiz))}});
        }
        return session.print_json({{"lessons", list}, {"quizzes", quizzes}, {"kept_in", path ? Json(*path) : Json()}},
                                  "list");
    }
    std::string text;
    int part = 0;
    const auto add_line = [&](const std::string& name, const std::string& title, const std::string& state) {
        const std::string line = fmt::format("  {}  {:<{}}{}", name, title, 58 - name.size(), state);
        text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
    };
    for (const Lesson& lesson : learn::lessons()) {
        if (lesson.part != part) {
            part = lesson.part;
            text += fmt::format("{}Part {}: {}\n", part > 1 ? "\n" : "", part, learn::part_title(part));
        }
        add_line(fmt::format("{:>2}", lesson.number), lesson.title, state_of(given, learn::exercises_of(lesson)));
    }
    text += "\nQuestions\n";
    for (const learn::Quiz& quiz : learn::quizzes())
        add_line(fmt::format("{:<8}", quiz.name), quiz.title, state_of(given, learn::exercises_of(quiz)));
    session.print(text + "\n" + next_text(given) + "\n");
}

std::string wrapped_lines(const std::string& text) {
    const int width = terminal_width(STDOUT_FILENO);
    std::string result;
    for (std::size_t begin = 0; begin <= text.size();) {
        const std::size_t end = std::min(text.find('\n', begin), text.size());
        const std::string line = text.substr(begin, end - begin);
        if (line.starts_with(" ") || line.empty()) result += line + "\n";  // a name to be copied is not broken
        else
            for (const std::string& piece : wrapped(line, static_cast<std::size_t>(width))) result += piece + "\n";
        begin = end + 1;
    }
    return result;
}

std::string exercise_text(const ExerciseId& id, const learn::Exercise& exercise) {
    return fmt::format("{} ({})\n{}", id.text(), learn::name_of(exercise.kind), wrapped_lines(exercise.task));
}

Json exercise_json(const ExerciseId& id, const learn::Exercise& exercise) {
    const bool words = !exercise.words.empty();
    return {{"exercise", id.text()},
            {"kind", learn::name_of(exercise.kind)},
            {"task", exercise.task},
            {"expects", exercise.kind == learn::Kind::explain ? "yes or no"
                        : words                               ? "a word"
                                                              : "a number"},
            {"unit", exercise.unit}};
}

}  // namespace tessera::cli
