// SPDX-License-Identifier: Apache-2.0
//
// tessera learn: the exercises of docs/learn, and the learner's progress.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <span>

#include "commands.hpp"
#include "io/atomic_file.hpp"
#include "learn/answer.hpp"
#include "learn/lesson.hpp"
#include "learn/pictures.hpp"
#include "learn/progress.hpp"
#include "learn/quiz.hpp"
#include "outputs.hpp"
#include "parse.hpp"
#include "table.hpp"
#include "tessera/error.hpp"

namespace tessera::cli {
namespace {

using learn::ExerciseId;
using learn::Lesson;

struct LearnOptions {
    std::vector<std::string> words;  ///< "6", "6a", "again", "recap" "2"
    std::string answer;
    std::string picture;
    bool show = false;
    bool hint = false;
    bool solution = false;
};

std::vector<learn::SavedAnswer> kept_answers() {
    const auto path = learn::progress_path();
    return path ? learn::read_progress(*path) : std::vector<learn::SavedAnswer>();
}

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

std::string next_text(const std::vector<learn::SavedAnswer>& given, int after = -1) {
    const Lesson* next = next_lesson(given, after);
    std::string text = next == nullptr
                           ? "All lessons are done."
                           : fmt::format("Next: docs/learn/{}.md, then tessera learn {}", next->slug, next->number);
    const std::vector<ExerciseId> missed = learn::missed_exercises(given);
    if (!missed.empty()) {
        text += "\nMissed:";
        for (const ExerciseId& id : missed) text += (id == missed.front() ? " " : ", ") + id.text();
        text += ". To repeat: tessera learn again";
    }
    return text;
}

/// The state of a lesson for the list: "done", "1 of 3", or nothing.
std::string state_of(const std::vector<learn::SavedAnswer>& given, const Lesson& lesson) {
    int right = 0, tries = 0;
    for (const ExerciseId& id : learn::exercises_of(lesson)) {
        const learn::Standing standing = learn::standing_of(given, id);
        right += standing.done ? 1 : 0, tries += standing.tries;
    }
    if (right == lesson.exercise_count()) return "done";
    return tries == 0 ? "" : fmt::format("{} of {}", right, lesson.exercise_count());
}

Json lesson_json(const std::vector<learn::SavedAnswer>& given, const Lesson& lesson) {
    Json exercises = Json::array();
    for (const ExerciseId& id : learn::exercises_of(lesson)) {
        const learn::Standing standing = learn::standing_of(given, id);
        exercises.push_back({{"exercise", id.text()},
                             {"kind", learn::name_of(id.make().kind)},
                             {"done", standing.done},
                             {"tries", standing.tries},
                             {"again", standing.again}});
    }
    return {{"lesson", lesson.number}, {"part", lesson.part}, {"part_title", learn::part_title(lesson.part)},
            {"title", lesson.title},   {"slug", lesson.slug}, {"done", learn::done(given, lesson)},
            {"exercises", exercises}};
}

void print_list(const Session& session) {
    const std::vector<learn::SavedAnswer> given = kept_answers();
    const auto path = learn::progress_path();
    if (session.json) {
        Json list = Json::array();
        for (const Lesson& lesson : learn::lessons()) list.push_back(lesson_json(given, lesson));
        return session.print_json({{"lessons", list}, {"kept_in", path ? Json(*path) : Json()}});
    }
    std::string text;
    int part = 0;
    for (const Lesson& lesson : learn::lessons()) {
        if (lesson.part != part) {
            part = lesson.part;
            text += fmt::format("{}Part {}: {}\n", part > 1 ? "\n" : "", part, learn::part_title(part));
        }
        std::string line = fmt::format("  {:>2}  {:<56}{}", lesson.number, lesson.title, state_of(given, lesson));
        text += line.erase(line.find_last_not_of(' ') + 1) + "\n";
    }
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

void save(const ExerciseId& id, const std::string& answer, bool right) {
    if (const auto path = learn::progress_path())
        learn::add_answer(*path, {.exercise = id.saved(), .answer = answer, .right = right});
    else print_note("answer not saved: neither XDG_STATE_HOME nor HOME is an absolute path");
}

/// Grades the answer and prints the grade before saving, so that a full disk does not hide it.
void take(const ExerciseId& id, const learn::Exercise& exercise, const std::string& answer, Session& session) {
    const learn::Grade grade = learn::grade_answer(exercise, answer);
    if (!grade.right) session.exit_code = kCheckFailed;
    if (session.json) {
        session.print_json({{"exercise", id.text()}, {"answer", answer}, {"right", grade.right}, {"text", grade.text}});
    } else {
        session.print(wrapped_lines(grade.text));
    }
    save(id, answer, grade.right);
}

/// Prints the solution: after two misses, where it counts as one more, or at once where the learner judges.
void print_solution(const ExerciseId& id, const learn::Exercise& exercise, const Session& session) {
    const bool judged = exercise.kind != learn::Kind::explain;
    const learn::Standing standing = learn::standing_of(kept_answers(), id);
    if (judged && !standing.done && standing.misses < learn::kMissesBeforeSolution) {
        throw UsageError("--solution", fmt::format("expected {} wrong answers to {} first, got {}",
                                                   learn::kMissesBeforeSolution, id.text(), standing.misses));
    }
    const std::string text = learn::solution_of(exercise);
    if (session.json) session.print_json({{"exercise", id.text()}, {"solution", text}});
    else session.print(wrapped_lines(text));
    if (judged && !standing.done) save(id, learn::kShown, false);
}

/// Reads a line of the terminal; nothing if it is empty or the input ends.
std::optional<std::string> line_of(const std::string& question, const Session& session) {
    session.print(question);
    std::string line;
    if (!std::getline(std::cin, line) || line.find_first_not_of(" \t\r") == std::string::npos) {
        session.print("\n");
        return {};
    }
    return line;
}

/// Asks for an explanation: the learner says it, sees the model answer and judges. False: the learner wants to stop.
bool ask_explanation(const ExerciseId& id, const learn::Exercise& exercise, Session& session) {
    if (!line_of("\nType your explanation, or a word if you said it aloud (empty: later): ", session)) return false;
    session.print("\n" + wrapped_lines(learn::solution_of(exercise)));
    while (const auto line = line_of("\nDid you say that? (yes or no; empty: later): ", session)) {
        try {
            session.exit_code = kOk;
            take(id, exercise, *line, session);
            return true;
        } catch (const Error& error) {
            if (error.argument() != "answer") throw;
            session.print(wrapped_lines(error.what()));
        }
    }
    return false;
}

/// Asks on the terminal until the answer is right or the solution was shown. False: the learner wants to stop.
bool ask(const ExerciseId& id, const learn::Exercise& exercise, Session& session) {
    session.print("\n" + exercise_text(id, exercise));
    if (exercise.kind == learn::Kind::explain) return ask_explanation(id, exercise, session);
    while (true) {
        const bool may_see = learn::standing_of(kept_answers(), id).misses >= learn::kMissesBeforeSolution;
        const auto line =
            line_of(fmt::format("\nYour answer (hint{}; empty: later): ", may_see ? ", show me" : ""), session);
        if (!line) return false;
        if (*line == "hint" || *line == "?") {
            session.print(wrapped_lines(exercise.hint));
            continue;
        }
        if (may_see && (*line == "show me" || *line == "show")) {
            print_solution(id, exercise, session);
            return true;
        }
        try {
            session.exit_code = kOk;
            take(id, exercise, *line, session);
        } catch (const Error& error) {
            if (error.argument() != "answer") throw;
            session.print(wrapped_lines(error.what()));
            continue;
        }
        if (session.exit_code == kOk) return true;
    }
}

/// The exercises that the learner named: one, all of a lesson, or those that were missed.
struct Choice {
    std::vector<ExerciseId> exercises;
    const Lesson* lesson = nullptr;
};

Choice choice_of(const std::string& what) {
    if (what == "again") return {.exercises = learn::missed_exercises(kept_answers())};
    for (const learn::Quiz& quiz : learn::quizzes()) {
        const std::vector<ExerciseId> questions = learn::exercises_of(quiz);
        if (what == quiz.name) return {.exercises = questions};
        for (const ExerciseId& id : questions) {
            if (what == id.text()) return {.exercises = {id}};
        }
    }
    const std::string last = fmt::format("{}", learn::lessons().back().number);
    const std::string number = what.substr(0, what.find_first_not_of("0123456789"));
    for (const Lesson& lesson : learn::lessons()) {
        if (number != fmt::format("{}", lesson.number)) continue;
        if (what == number) return {.exercises = learn::exercises_of(lesson), .lesson = &lesson};
        for (const ExerciseId& id : learn::exercises_of(lesson)) {
            if (what == id.text()) return {.exercises = {id}, .lesson = &lesson};
        }
        unexpected("LESSON", fmt::format("{}a to {}{:c}", number, number, 'a' + lesson.exercise_count() - 1), what);
    }
    unexpected("LESSON", "0 to " + last + ", an exercise such as 6a, recap 1 to recap 5, exam, or again", what);
}

void print_exercises(const Choice& choice, const Session& session) {
    if (session.json) {
        Json list = Json::array();
        for (const ExerciseId& id : choice.exercises) list.push_back(exercise_json(id, id.make()));
        Json document = {{"exercises", list}};
        if (choice.lesson != nullptr)
            document["lesson"] = choice.lesson->number, document["title"] = choice.lesson->title;
        return session.print_json(document);
    }
    for (const ExerciseId& id : choice.exercises)
        session.print((id == choice.exercises.front() ? "" : "\n") + exercise_text(id, id.make()));
}

/// Asks the exercises one after another: all that were named, or of a lesson those without a right answer.
void ask_all(const Choice& choice, Session& session) {
    const auto given = kept_answers();
    const bool finished = choice.lesson != nullptr && learn::done(given, *choice.lesson);
    const bool whole = choice.exercises.size() > 1 && choice.lesson != nullptr;
    for (const ExerciseId& id : choice.exercises) {
        if (whole && !finished && learn::standing_of(given, id).done) continue;
        if (!ask(id, id.make(), session)) return;
    }
    session.print("\n" + next_text(kept_answers(), choice.lesson == nullptr ? -1 : choice.lesson->number) + "\n");
}

void write_picture(const Lesson& lesson, const std::string& path, const Session& session) {
    expect_ending("--picture", path, {".svg"});
    expect_own_output(path, OutputKind::svg);
    const std::string svg = learn::picture(lesson.number);
    io::AtomicFile file(path);
    file.write(std::as_bytes(std::span(svg)));
    file.commit();
    if (session.json) session.print_json({{"lesson", lesson.number}, {"picture", path}});
}

/// The options that were given and exclude each other, in the order in which errors name them.
std::vector<const char*> actions_of(const LearnOptions& options, bool answered) {
    std::vector<const char*> given;
    if (options.show) given.push_back("--show");
    if (answered) given.push_back("--answer");
    if (options.hint) given.push_back("--hint");
    if (options.solution) given.push_back("--solution");
    if (!options.picture.empty()) given.push_back("--picture");
    return given;
}

void answer_one(const LearnOptions& options, const ExerciseId& id, Session& session) {
    const learn::Exercise exercise = id.make();
    if (options.hint) {
        if (session.json) return session.print_json({{"exercise", id.text()}, {"hint", exercise.hint}});
        return session.print(wrapped_lines(exercise.hint));
    }
    if (options.solution) return print_solution(id, exercise, session);
    try {
        return take(id, exercise, options.answer, session);
    } catch (const Error& error) {
        if (error.argument() != "answer") throw;
        throw UsageError("--answer", std::string(error.what()).substr(error.argument().size() + 2));
    }
}

void execute(const LearnOptions& options, bool answered, Session& session) {
    const std::vector<const char*> actions = actions_of(options, answered);
    if (actions.size() > 1)
        throw UsageError(actions[0], fmt::format("has no effect with {}: expected without it", actions[1]));
    if (options.words.empty()) {
        if (actions.empty()) return print_list(session);
        const bool one = answered || options.hint || options.solution;
        throw UsageError(actions[0], fmt::format("expected {} with it: tessera learn {} {}",
                                                 one ? "an exercise" : "a lesson", one ? "6a" : "6", actions[0]));
    }
    const std::string what = fmt::format("{}", fmt::join(options.words, " "));
    const Choice choice = choice_of(what);
    if (!options.picture.empty()) {
        if (choice.lesson == nullptr) unexpected("--picture", "a lesson with it", what);
        return write_picture(*choice.lesson, options.picture, session);
    }
    if (answered || options.hint || options.solution) {
        if (choice.exercises.size() != 1 || what == "again") {
            throw UsageError(actions[0], fmt::format("expected one exercise with it, such as {}a, got \"{}\"",
                                                     choice.lesson == nullptr ? 6 : choice.lesson->number, what));
        }
        return answer_one(options, choice.exercises.front(), session);
    }
    if (choice.exercises.empty() && !session.json) return session.print("Nothing was missed.\n");
    if (options.show || session.json) return print_exercises(choice, session);
    if (::isatty(STDIN_FILENO) != 0) return ask_all(choice, session);
    print_exercises(choice, session);
    print_note(fmt::format("standard input is no terminal: answer with tessera learn {} --answer ...",
                           choice.exercises.front().text()));
}

}  // namespace

void add_learn_command(CLI::App& app, Session& session) {
    CLI::App* command =
        add_command(app, session, "learn",
                    "Ask the exercises of docs/learn, explain the answers, and save your progress "
                    "(in $XDG_STATE_HOME/tessera, by default ~/.local/state/tessera)",
                    {{"tessera learn", "the lessons, your progress, and what you missed"},
                     {"tessera learn 6", "the exercises of lesson 6; asks for the answers"},
                     {"tessera learn recap 2", "five questions after part 2; exam: twenty at the end"},
                     {"tessera learn again", "the exercises that you missed"},
                     {"tessera learn 6a --answer 3/4", "answers one without a terminal; exit status 1: wrong"},
                     {"tessera learn 6 --picture maximum.svg", "the lesson's picture"}});
    auto options = std::make_shared<LearnOptions>();
    command
        ->add_option(
            "LESSON", options->words,
            fmt::format("0 to {}, one exercise such as 6a, recap 1 to recap 5, exam, or again; without it the list",
                        learn::lessons().back().number))
        ->group("What");
    command
        ->add_option("--answer", options->answer, "Your answer, instead of being asked (of an explanation: yes or no)")
        ->type_name("TEXT")
        ->group("What");
    command->add_flag("--hint", options->hint, "Show the first step of an exercise")->group("What");
    command
        ->add_flag("--solution", options->solution,
                   "Show the solution of an exercise, after two wrong answers; of an explanation at once")
        ->group("What");
    command->add_flag("--show", options->show, "Show the exercises and ask nothing")->group("What");
    command->add_option("--picture", options->picture, "Write the lesson's picture here, as SVG")
        ->type_name("FILE")
        ->group("What");
    command->callback([options, command, &session] { execute(*options, command->count("--answer") > 0, session); });
}

}  // namespace tessera::cli
