// SPDX-License-Identifier: Apache-2.0
//
// The room "learn": the lessons' exercises, grades and progress, which are those of `tessera learn`.
#include "documents.hpp"
#include "learn/answer.hpp"
#include "learn/estimate.hpp"
#include "learn/lesson.hpp"
#include "learn/quiz.hpp"
#include "learn/standing.hpp"
#include "parse.hpp"

namespace tessera::web {
namespace {

learn::ExerciseId exercise_of(const Json& question) {
    return learn::exercise_of(question.at("exercise").get<std::string>());
}

/// The model of the estimates: {"device", "layers", "heads": "32/8", ...}; what is missing is the default's.
learn::ModelShape model_of(const Json& question) {
    learn::ModelShape model;
    const auto found = question.find("model");
    if (found == question.end()) return model;
    const Json& given = *found;
    model.device = given.value("device", model.device);
    model.layers = given.value("layers", model.layers);
    std::tie(model.heads_q, model.heads_kv) = cli::parse_pair("heads", given.value("heads", "32/8"), '/');
    model.head_dim = given.value("head_dim", model.head_dim);
    model.len = given.value("len", model.len);
    model.causal = given.value("causal", model.causal);
    model.share = given.value("share", model.share);
    return model;
}

learn::Exercise asked_exercise(const Json& question) {
    return learn::exercise_for(exercise_of(question), model_of(question));
}

/// The answers of the page, which keeps them in the form of learn.json.
std::vector<learn::SavedAnswer> answers_of(const Json& question) {
    std::vector<learn::SavedAnswer> answers;
    for (const Json& one : question.value("answers", Json::array())) {
        const std::string exercise = one.contains("exercise")
                                         ? one.at("exercise").get<std::string>()
                                         : learn::exercise_of_first_edition(one.at("lesson").get<int>());
        answers.push_back({.exercise = exercise, .answer = one.at("answer"), .right = one.at("right")});
    }
    return answers;
}

Json exercises_json(const std::vector<learn::ExerciseId>& ids, const std::vector<learn::SavedAnswer>& answers,
                    const learn::ModelShape& model = {}) {
    Json list = Json::array();
    for (const learn::ExerciseId& id : ids) {
        const learn::Exercise exercise = learn::exercise_for(id, model);
        const learn::Standing standing = learn::standing_of(answers, id);
        list.push_back({{"exercise", id.text()},
                        {"saved", id.saved()},
                        {"kind", learn::name_of(exercise.kind)},
                        {"task", exercise.task},
                        {"hint", exercise.hint},
                        {"done", standing.done},
                        {"tries", standing.tries},
                        {"misses", standing.misses},
                        {"again", standing.again}});
    }
    return list;
}

}  // namespace

Json ask_lessons(const Json& question) {
    const std::vector<learn::SavedAnswer> answers = answers_of(question);
    Json list = Json::array();
    for (const learn::Lesson& lesson : learn::lessons()) {
        list.push_back({{"lesson", lesson.number},
                        {"part", lesson.part},
                        {"part_title", learn::part_title(lesson.part)},
                        {"title", lesson.title},
                        {"slug", lesson.slug},
                        {"done", learn::done(answers, lesson)},
                        {"exercises", exercises_json(learn::exercises_of(lesson), answers)}});
    }
    return list;
}

Json ask_quizzes(const Json& question) {
    const std::vector<learn::SavedAnswer> answers = answers_of(question);
    Json list = Json::array();
    for (const learn::Quiz& quiz : learn::quizzes()) {
        list.push_back({{"quiz", quiz.name},
                        {"title", quiz.title},
                        {"exercises", exercises_json(learn::exercises_of(quiz), answers, model_of(question))}});
    }
    return list;
}

Json ask_grade(const Json& question) {
    const learn::Grade grade = learn::grade_answer(asked_exercise(question), question.at("answer").get<std::string>());
    return {{"right", grade.right}, {"text", grade.text}};
}

Json ask_solution(const Json& question) { return {{"text", learn::solution_of(asked_exercise(question))}}; }

}  // namespace tessera::web
