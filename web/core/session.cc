// SPDX-License-Identifier: Apache-2.0
//
// Implements cli/session.hpp without a terminal, which collects results, and cli/progress.hpp without threads, which
// shows nothing.
#include "session.hpp"

#include "csv.hpp"
#include "output.hpp"
#include "parallel.hpp"
#include "progress.hpp"
#include "schema.hpp"

namespace tessera::web {

Output& output() {
    static Output collected;
    return collected;
}

}  // namespace tessera::web

namespace tessera::cli {

void Session::print(std::string_view text) const { web::output().text += text; }
void Session::print_json(const Json& document, const std::string& variant) const {
    print(with_schema(document, command, variant).dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}
void Session::print_csv(const Json& rows) const { print(csv_text(rows)); }
void print_error(std::string_view message) { (web::output().errors += message) += '\n'; }
void print_note(std::string_view message) { print_error(message); }

Progress::Progress(std::int64_t steps) : steps_(steps) {}
Progress::~Progress() = default;
void Progress::step(const std::string&) {}
ParallelFor Progress::counted_parallel_for() { return default_parallel_for; }
std::unique_lock<std::mutex> terminal_without_progress() { return {}; }

}  // namespace tessera::cli
