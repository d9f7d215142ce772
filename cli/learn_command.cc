// SPDX-License-Identifier: Apache-2.0
//
// tessera learn: the exercises of docs/learn, and the learner's progress.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <span>
#include <tuple>

#include "commands.hpp"
#include "device_option.hpp"
#include "io/atomic_file.hpp"
#include "learn/answer.hpp"
#include "learn/estimate.hpp"
#include "learn/lesson.hpp"
#include "learn/pictures.hpp"
#include "learn/progress.hpp"
#include "learn/quiz.hpp"
#include "learn_list.hpp"
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
    learn::ModelShape model;  ///< of the estimates
    std::string heads;
    std::string mask;
    bool model_given = false;
    bool show = false;
    bool hint = false;
    bool solution = false;
};

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
        session.print_json({{"exercise", id.text()}, {"answer", answer}, {"right", grade.right}, {"text", grade.text}},
                           "answer");
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
    if (session.json) session.print_json({{"exercise", id.text()}, {"solution", text}}, "solution");
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
    unexpected("LESSON", "0 to " + last + ", an exercise such as 6a, recap 1 to recap 5, exam, estimate, or again",
               what);
}

void print_exercises(const Choice& choice, const learn::ModelShape& model, const Session& session) {
    if (session.json) {
        Json list = Json::array();
        for (const ExerciseId& id : choice.exercises) list.push_back(exercise_json(id, learn::exercise_for(id, model)));
        Json document = {{"exercises", list}};
        if (choice.lesson != nullptr)
            document["lesson"] = choice.lesson->number, document["title"] = choice.lesson->title;
        return session.print_json(document, "exercises");
    }
    for (const ExerciseId& id : choice.exercises)
        session.print((id == choice.exercises.front() ? "" : "\n") + exercise_text(id, learn::exercise_for(id, model)));
}

/// Asks the exercises one after another: all that were named, or of a lesson those without a right answer.
void ask_all(const Choice& choice, const learn::ModelShape& model, Session& session) {
    const auto given = kept_answers();
    const bool finished = choice.lesson != nullptr && learn::done(given, *choice.lesson);
    const bool whole = choice.exercises.size() > 1 && choice.lesson != nullptr;
    for (const ExerciseId& id : choice.exercises) {
        if (whole && !finished && learn::standing_of(given, id).done) continue;
        if (!ask(id, learn::exercise_for(id, model), session)) return;
    }
    const learn::Quiz* quiz = choice.exercises.front().quiz;
    if (quiz != nullptr && quiz->name == std::string("exam") && choice.exercises.size() > 1)
        session.print("\nThe last part of the exam: tessera learn estimate\n");
    session.print("\n" + next_text(kept_answers(), choice.lesson == nullptr ? -1 : choice.lesson->number) + "\n");
}

bool is_estimate(const Choice& choice) {
    return !choice.exercises.empty() && choice.exercises.front().quiz != nullptr &&
           choice.exercises.front().quiz->estimates();
}

/// The learner's model by the options; errors name the option.
learn::ModelShape model_of(const LearnOptions& options) {
    learn::ModelShape model = options.model;
    if (!options.heads.empty()) std::tie(model.heads_q, model.heads_kv) = parse_pair("--heads", options.heads, '/');
    if (!options.mask.empty())
        model.causal = parse_choice<bool>("--causal", options.mask, {{"none", false}, {"bottom-right", true}});
    try {
        learn::validate(model);
    } catch (const Error& error) {
        std::string option = "--" + error.argument();
        std::replace(option.begin(), option.end(), '_', '-');
        throw UsageError(option, std::string(error.what()).substr(error.argument().size() + 2));
    }
    return model;
}

/// Asks for the model, value by value. An empty line keeps the value in brackets; a wrong one is asked again.
learn::ModelShape ask_model(LearnOptions options, const Session& session) {
    using Set = void (*)(LearnOptions&, const std::string&);
    const learn::ModelShape kept = model_of(options);
    const auto ask = [&](const std::string& what, const std::string& value, Set set) {
        for (std::string line;;) {
            session.print(fmt::format("{} [{}]: ", what, value));
            if (!std::getline(std::cin, line) || line.find_first_not_of(" \t\r") == std::string::npos) return;
            try {
                LearnOptions tried = options;
                set(tried, line);
                model_of(tried);
                options = tried;
                return;
            } catch (const UsageError& error) {
                session.print(wrapped_lines(error.what()));
            }
        }
    };
    session.print("State your model. An empty line keeps the value in brackets.\n");
    ask("GPU", kept.device, [](LearnOptions& o, const std::string& text) { o.model.device = text; });
    ask("Layers", fmt::format("{}", kept.layers),
        [](LearnOptions& o, const std::string& text) { o.model.layers = parse_size("--layers", text); });
    ask("Heads of queries, or of queries/keys", fmt::format("{}/{}", kept.heads_q, kept.heads_kv),
        [](LearnOptions& o, const std::string& text) { o.heads = text; });
    ask("head_dim", fmt::format("{}", kept.head_dim),
        [](LearnOptions& o, const std::string& text) { o.model.head_dim = parse_size("--head-dim", text); });
    ask("Length in tokens", fmt::format("{}", kept.len),
        [](LearnOptions& o, const std::string& text) { o.model.len = parse_size("--len", text); });
    ask("Mask, none or bottom-right (causal)", kept.causal ? "bottom-right" : "none",
        [](LearnOptions& o, const std::string& text) { o.mask = text; });
    ask("Attention's share of the time, 0 to 1", fmt::format("{:g}", kept.share),
        [](LearnOptions& o, const std::string& text) { o.model.share = parse_number("--share", text); });
    return model_of(options);
}

void write_picture(const Lesson& lesson, const std::string& path, const Session& session) {
    expect_ending("--picture", path, {".svg"});
    expect_own_output(path, OutputKind::svg);
    const std::string svg = learn::picture(lesson.number);
    io::AtomicFile file(path);
    file.write(std::as_bytes(std::span(svg)));
    file.commit();
    if (session.json) session.print_json({{"lesson", lesson.number}, {"picture", path}}, "picture");
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
    const learn::Exercise exercise = learn::exercise_for(id, model_of(options));
    if (options.hint) {
        if (session.json) return session.print_json({{"exercise", id.text()}, {"hint", exercise.hint}}, "hint");
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
        throw UsageError(actions[0], fmt::format("has no effect with {}; leave it out", actions[1]));
    if (options.words.empty()) {
        if (actions.empty()) return print_list(session);
        const bool one = answered || options.hint || options.solution;
        throw UsageError(actions[0], fmt::format("expected {} with it: tessera learn {} {}",
                                                 one ? "an exercise" : "a lesson", one ? "6a" : "6", actions[0]));
    }
    const std::string what = fmt::format("{}", fmt::join(options.words, " "));
    const Choice choice = choice_of(what);
    if (options.model_given && !is_estimate(choice))
        throw UsageError("--device, --layers, --heads, --head-dim, --len, --causal, --share",
                         fmt::format("expected estimate with them, got {}", what));
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
    const learn::ModelShape model = model_of(options);
    if (options.show || session.json) return print_exercises(choice, model, session);
    if (::isatty(STDIN_FILENO) != 0)
        return ask_all(choice, what == "estimate" && !options.model_given ? ask_model(options, session) : model,
                       session);
    print_exercises(choice, model, session);
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
                     {"tessera learn estimate --device h100 --len 4096", "the win in your model: five estimates"},
                     {"tessera learn again", "the exercises that you missed"},
                     {"tessera learn 6a --answer 3/4", "answers one without a terminal; exit status 1: wrong"},
                     {"tessera learn 6 --picture maximum.svg", "the lesson's picture"}});
    auto options = std::make_shared<LearnOptions>();
    command
        ->add_option(
            "LESSON", options->words,
            fmt::format(
                "0 to {}, one exercise such as 6a, recap 1 to recap 5, exam, estimate, or again; without it the "
                "list",
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
    const auto add_model = [&](const char* name, auto& value, const char* type, const std::string& text) {
        command->add_option(name, value, text)->type_name(type)->group("Your model (estimate)");
    };
    add_model(kDeviceOption, options->model.device, "GPU", "The GPU; default h200");
    add_model("--layers", options->model.layers, "N", "Layers; default 32");
    add_model("--heads", options->heads, "Q/KV", "Heads of queries, and of keys if there are fewer; default 32/8");
    add_model("--head-dim", options->model.head_dim, "N", "Default 128");
    add_model("--len", options->model.len, "N", "Tokens of a text; default 8192");
    add_model("--causal", options->mask, "MASK", "none (default) or bottom-right");
    add_model("--share", options->model.share, "X", "Attention's share of the model's time; default 0.3");
    command->callback([options, command, &session] {
        for (const char* name : {"--device", "--layers", "--heads", "--head-dim", "--len", "--causal", "--share"})
            options->model_given = options->model_given || command->count(name) > 0;
        execute(*options, command->count("--answer") > 0, session);
    });
}

}  // namespace tessera::cli
