// SPDX-License-Identifier: Apache-2.0
//
// The room "learn": the lessons' exercises and grades, which are those of `tessera learn`.
#include "documents.hpp"
#include "learn/answer.hpp"
#include "learn/lesson.hpp"

namespace tessera::web {

Json ask_lessons(const Json&) {
    Json list = Json::array();
    for (const learn::Lesson& lesson : learn::lessons()) {
        list.push_back({{"lesson", lesson.number},
                        {"part", lesson.part},
                        {"part_title", learn::part_title(lesson.part)},
                        {"title", lesson.title},
                        {"slug", lesson.slug},
                        {"task", lesson.exercise().task}});
    }
    return list;
}

Json ask_grade(const Json& question) {
    const learn::Lesson& lesson = learn::lesson(question.at("lesson").get<int>());
    const learn::Exercise exercise = lesson.exercise();
    const learn::Grade grade = learn::grade_answer(exercise, question.at("answer").get<std::string>());
    return {{"right", grade.right}, {"text", grade.text}};
}

Json ask_solution(const Json& question) {
    const learn::Exercise exercise = learn::lesson(question.at("lesson").get<int>()).exercise();
    return {{"answer", exercise.answer}, {"why", exercise.why}};
}

}  // namespace tessera::web
