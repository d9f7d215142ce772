// SPDX-License-Identifier: Apache-2.0
//
// tessera learn: the exercises of docs/learn, and the learner's progress.
#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <iostream>
#include <memory>
#include <span>

#include "commands.hpp"
#include "io/atomic_file.hpp"
#include "learn/answer.hpp"
#include "learn/lesson.hpp"
#include "learn/pictures.hpp"
#include "learn/progress.hpp"
#include "outputs.hpp"
#include "parse.hpp"
#include "table.hpp"
#include "tessera/error.hpp"

namespace tessera::cli {
namespace {

using learn::Lesson;

struct LearnOptions {
    std::string lesson;
    std::string answer;
    std::string picture;
    bool show = false;
};

std::vector<learn::SavedAnswer> kept_answers() {
    const auto path = learn::progress_path();
    return path ? learn::read_progress(*path) : std::vector<learn::SavedAnswer>();
}

/// The first lesson after this one that has no right answer yet, or else the first such lesson; null if none remains.
const Lesson* next_lesson(const std::vector<learn::SavedAnswer>& given, int after) {
    const Lesson* first = nullptr;
    for (const Lesson& lesson : learn::lessons()) {
        if (learn::done(given, lesson.number)) continue;
        if (lesson.number > after) return &lesson;
        if (first == nullptr) first = &lesson;
    }
    return first;
}

std::string next_text(const std::vector<learn::SavedAnswer>& given, int after = 0) {
    const Lesson* next = next_lesson(given, after);
    return next == nullptr ? "All lessons are done."
                           : fmt::format("Next: docs/learn/{}.md, then tessera learn {}", next->slug, next->number);
}

void print_list(const Session& session) {
    const std::vector<learn::SavedAnswer> given = kept_answers();
    const auto path = learn::progress_path();
    if (session.json) {
        Json list = Json::array();
        for (const Lesson& lesson : learn::lessons()) {
            list.push_back({{"lesson", lesson.number},
                            {"part", lesson.part},
                            {"part_title", learn::part_title(lesson.part)},
                            {"title", lesson.title},
                            {"slug", lesson.slug},
                            {"done", learn::done(given, lesson.number)},
                            {"tries", learn::tries(given, lesson.number)}});
        }
        return session.print_json({{"lessons", list}, {"kept_in", path ? Json(*path) : Json()}});
    }
    std::string text;
    int part = 0;
    for (const Lesson& lesson : learn::lessons()) {
        if (lesson.part != part) {
            part = lesson.part;
            text += fmt::format("{}Part {}: {}\n", part > 1 ? "\n" : "", part, learn::part_title(part));
        }
        const bool is_done = learn::done(given, lesson.number);
        const int tries = learn::tries(given, lesson.number);
        const std::string state = is_done ? "done" : tries > 0 ? fmt::format("{} tried", tries) : "";
        std::string line = fmt::format("  {:>2}  {:<56}{}", lesson.number, lesson.title, state);
        text += line.erase(line.find_last_not_of(' ') + 1) + "\n";
    }
    session.print(text + "\n" + next_text(given) + "\n");
}

std::string wrapped_lines(const std::string& text, int width) {
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

std::string exercise_text(const Lesson& lesson, const learn::Exercise& exercise) {
    return fmt::format("Lesson {}: {}\n\n{}", lesson.number, lesson.title,
                       wrapped_lines(exercise.task, terminal_width(STDOUT_FILENO)));
}

/// Grades the answer and prints the grade before saving, so that a full disk does not hide it.
void take(const Lesson& lesson, const learn::Exercise& exercise, const std::string& answer, Session& session) {
    const learn::Grade grade = learn::grade_answer(exercise, answer);
    if (!grade.right) session.exit_code = kCheckFailed;
    if (session.json) {
        session.print_json(
            {{"lesson", lesson.number}, {"answer", answer}, {"right", grade.right}, {"text", grade.text}});
    } else {
        session.print(wrapped_lines(grade.text, terminal_width(STDOUT_FILENO)));
    }
    if (const auto path = learn::progress_path())
        learn::add_answer(*path, {.lesson = lesson.number, .answer = answer, .right = grade.right});
    else print_note("answer not saved: neither XDG_STATE_HOME nor HOME is an absolute path");
}

/// Asks on the terminal until the answer is right, a line is empty, or the input ends.
void ask(const Lesson& lesson, const learn::Exercise& exercise, Session& session) {
    while (true) {
        session.print("\nYour answer (empty: later): ");
        std::string line;
        if (!std::getline(std::cin, line) || line.find_first_not_of(" \t\r") == std::string::npos) {
            session.print("\n");
            return;
        }
        try {
            session.exit_code = kOk;
            take(lesson, exercise, line, session);
        } catch (const Error& error) {
            if (error.argument() != "answer") throw;
            session.print(wrapped_lines(error.what(), terminal_width(STDOUT_FILENO)));
            continue;
        }
        if (session.exit_code != kOk) continue;
        return session.print("\n" + next_text(kept_answers(), lesson.number) + "\n");
    }
}

void print_exercise(const Lesson& lesson, const learn::Exercise& exercise, const Session& session) {
    if (session.json) {
        return session.print_json({{"lesson", lesson.number},
                                   {"title", lesson.title},
                                   {"task", exercise.task},
                                   {"expects", exercise.words.empty() ? "a number" : "a word"},
                                   {"unit", exercise.unit}});
    }
    session.print(exercise_text(lesson, exercise));
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

void execute(const LearnOptions& options, bool answered, Session& session) {
    if (options.lesson.empty()) {
        if (answered) throw UsageError("--answer", "expected a lesson with it: tessera learn 6 --answer ...");
        if (!options.picture.empty() || options.show)
            throw UsageError(options.show ? "--show" : "--picture", "expected a lesson with it");
        return print_list(session);
    }
    const std::int64_t number = parse_size("LESSON", options.lesson);
    const auto all = learn::lessons();
    const auto found =
        std::find_if(all.begin(), all.end(), [number](const Lesson& one) { return one.number == number; });
    if (found == all.end()) {
        unexpected("LESSON", fmt::format("a lesson from {} to {}", all.front().number, all.back().number),
                   options.lesson);
    }
    const Lesson& lesson = *found;
    if (!options.picture.empty() && (answered || options.show))
        throw UsageError(answered ? "--answer" : "--show", "has no effect with --picture: expected without it");
    if (answered && options.show) throw UsageError("--show", "has no effect with --answer: expected without it");
    if (!options.picture.empty()) return write_picture(lesson, options.picture, session);
    const learn::Exercise exercise = lesson.exercise();
    if (answered) {
        try {
            return take(lesson, exercise, options.answer, session);
        } catch (const Error& error) {
            if (error.argument() != "answer") throw;
            throw UsageError("--answer", std::string(error.what()).substr(error.argument().size() + 2));
        }
    }
    print_exercise(lesson, exercise, session);
    if (options.show || session.json) return;
    if (::isatty(STDIN_FILENO) != 0) return ask(lesson, exercise, session);
    print_note(fmt::format("standard input is no terminal: answer with tessera learn {} --answer ...", number));
}

}  // namespace

void add_learn_command(CLI::App& app, Session& session) {
    CLI::App* command =
        add_command(app, session, "learn",
                    "Ask the exercises of docs/learn, explain the answers, and save your progress "
                    "(in $XDG_STATE_HOME/tessera, by default ~/.local/state/tessera)",
                    {{"tessera learn", "the lessons, and your progress"},
                     {"tessera learn 6", "the exercise of lesson 6; asks for the answer"},
                     {"tessera learn 6 --answer 3/4", "answers it without a terminal; exit status 1: wrong"},
                     {"tessera learn 6 --picture maximum.svg", "the lesson's picture"}});
    auto options = std::make_shared<LearnOptions>();
    command->add_option("LESSON", options->lesson, "The number of a lesson; without it the list")->group("What");
    command->add_option("--answer", options->answer, "Your answer, instead of being asked")
        ->type_name("TEXT")
        ->group("What");
    command->add_flag("--show", options->show, "Show the exercise and ask nothing")->group("What");
    command->add_option("--picture", options->picture, "Write the lesson's picture here, as SVG")
        ->type_name("FILE")
        ->group("What");
    command->callback([options, command, &session] { execute(*options, command->count("--answer") > 0, session); });
}

}  // namespace tessera::cli
