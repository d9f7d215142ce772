// SPDX-License-Identifier: Apache-2.0
//
// The room "learn": the lessons' exercises, grades and progress, which are those of `tessera learn`.
#include "documents.hpp"
#include "learn/answer.hpp"
#include "learn/lesson.hpp"
#include "learn/standing.hpp"

namespace tessera::web {
namespace {

learn::ExerciseId exercise_of(const Json& question) {
    return learn::exercise_of(question.at("exercise").get<std::string>());
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

Json exercises_of(const learn::Lesson& lesson, const std::vector<learn::SavedAnswer>& answers) {
    Json list = Json::array();
    for (const learn::ExerciseId& id : learn::exercises_of(lesson)) {
        const learn::Exercise exercise = id.make();
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
                        {"exercises", exercises_of(lesson, answers)}});
    }
    return list;
}

Json ask_grade(const Json& question) {
    const learn::Grade grade =
        learn::grade_answer(exercise_of(question).make(), question.at("answer").get<std::string>());
    return {{"right", grade.right}, {"text", grade.text}};
}

Json ask_solution(const Json& question) { return {{"text", learn::solution_of(exercise_of(question).make())}}; }

}  // namespace tessera::web
