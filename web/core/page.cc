// SPDX-License-Identifier: Apache-2.0
//
// The one function that the page calls: JSON in, JSON out.
#include <functional>
#include <map>
#include <string>

#include "documents.hpp"
#include "tessera/error.hpp"

namespace tessera::web {
namespace {

Json answer(const std::string& text) {
    static const std::map<std::string, std::function<Json(const Json&)>> questions{
        {"command", ask_command},   {"tiles", ask_tiles},     {"race", ask_race},       {"backward", ask_backward},
        {"roofline", ask_roofline}, {"devices", ask_devices}, {"lessons", ask_lessons}, {"grade", ask_grade},
        {"solution", ask_solution}, {"quizzes", ask_quizzes}};
    try {
        const Json question = Json::parse(text);
        const auto asked = questions.find(question.at("ask").get<std::string>());
        if (asked == questions.end()) return {{"error", "ask: expected a question that the core knows"}};
        return {{"value", asked->second(question)}};
    } catch (const std::exception& error) {
        return {{"error", error.what()}};
    }
}

}  // namespace
}  // namespace tessera::web

/// Answers {"ask": "tiles", ...} with {"value": document} or {"error": "message"}, valid until the next call.
extern "C" const char* tessera_web_answer(const char* question) {
    static std::string last;
    last = tessera::web::answer(question).dump(-1, ' ', false, tessera::web::Json::error_handler_t::replace);
    return last.c_str();
}
