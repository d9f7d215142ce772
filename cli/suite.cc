// SPDX-License-Identifier: Apache-2.0
#include "suite.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>

#include "parse.hpp"
#include "session.hpp"
#include "tessera/error.hpp"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

/// Replaces "all" by the schedules that have kernels on the backend in this build.
std::string schedule_list(const std::string& schedules, Backend backend) {
    if (schedules != "all") return schedules;
    std::string text;
    for (const Schedule s : kSchedules) {
        for (const KernelInfo& kernel : kernels()) {
            if (kernel.schedule != s || kernel.backend != backend) continue;
            text += (text.empty() ? "" : ",") + std::string(name_of(s));
            break;
        }
    }
    return text.empty() ? "auto" : text;
}

[[noreturn]] void bad_suite(const std::string& path, const std::string& where, const std::string& what) {
    throw Error(ErrorCode::bad_data, path, where.empty() ? what : where + ": " + what);
}

/// Converts a number, a text, or a list of those to the text of an option.
std::string option_text(const std::string& path, const std::string& where, const Json& value) {
    if (value.is_string()) return value.get<std::string>();
    if (value.is_number()) return value.dump();
    if (!value.is_array() || value.empty())
        bad_suite(path, where, "expected a text, a number or a list of those that is not empty");
    std::vector<std::string> parts;
    for (const Json& part : value) {
        if (!part.is_string() && !part.is_number()) bad_suite(path, where, "expected texts or numbers in the list");
        parts.push_back(option_text(path, where, part));
    }
    return fmt::format("{}", fmt::join(parts, ","));
}

BenchSet read_set(const std::string& path, const std::string& where, const Json& json) {
    if (!json.is_object()) bad_suite(path, where, "expected an object");
    BenchSet set;
    const std::map<std::string, std::string*> texts = {
        {"batch", &set.shape.batch},   {"len", &set.shape.len},          {"len-q", &set.shape.len_q},
        {"len-kv", &set.shape.len_kv}, {"heads", &set.shape.heads},      {"head-dim", &set.shape.head_dim},
        {"dtype", &set.shape.dtype},   {"ragged", &set.shape.ragged},    {"kv-lengths", &set.shape.kv_lengths},
        {"pages", &set.shape.pages},   {"causal", &set.scores.causal},   {"window", &set.scores.window},
        {"scale", &set.scores.scale},  {"softcap", &set.scores.softcap}, {"dropout", &set.scores.dropout},
        {"seed", &set.scores.seed},    {"backend", &set.how.backend},    {"schedule", &set.how.schedule},
        {"tile", &set.how.tile},       {"threads", &set.how.threads},    {"pass", &set.pass.text}};
    const std::map<std::string, bool*> flags = {
        {"alibi", &set.shape.alibi}, {"sinks", &set.shape.sinks}, {"bias", &set.shape.bias}};
    for (const auto& [key, value] : json.items()) {
        const std::string field = where + "." + key;
        if (const auto flag = flags.find(key); flag != flags.end()) {
            if (!value.is_boolean()) bad_suite(path, field, "expected true or false");
            *flag->second = value.get<bool>();
            continue;
        }
        const auto text = texts.find(key);
        if (text == texts.end()) {
            std::vector<std::string> names;
            for (const auto& [name, unused] : texts) names.push_back(name);
            bad_suite(path, field, fmt::format("expected one of {}, alibi, sinks, bias", fmt::join(names, ", ")));
        }
        *text->second = option_text(path, field, value);
    }
    return set;
}

Suite read_file(const fs::path& path) {
    std::error_code error;
    const fs::file_type type = fs::status(path, error).type();
    if (type == fs::file_type::directory || type == fs::file_type::character || type == fs::file_type::block)
        throw Error(ErrorCode::cannot_open, path.string(), "expected a file, got a folder or a device");
    std::ifstream file(path, std::ios::binary);
    if (!file) throw Error(ErrorCode::cannot_open, path.string(), "can't be opened");
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    const Json json = Json::parse(text, nullptr, false);
    if (json.is_discarded()) bad_suite(path.string(), "", "expected JSON, got text that is none");
    if (!json.is_object()) bad_suite(path.string(), "", "expected an object with about and sets, got another value");
    Suite suite{.name = path.stem().string()};
    for (const auto& [key, value] : json.items()) {
        if (key == "about" && value.is_string()) suite.about = value.get<std::string>();
        else if (key != "sets" || !value.is_array() || value.empty())
            bad_suite(path.string(), key, "expected about, a text, and sets, a list that is not empty");
    }
    if (!json.contains("sets")) bad_suite(path.string(), "sets", "expected a list of sets, got none");
    for (std::size_t i = 0; i < json["sets"].size(); ++i)
        suite.sets.push_back(read_set(path.string(), fmt::format("sets[{}]", i), json["sets"][i]));
    return suite;
}

/// The files of suites: beside the installed command, or in the checkout of this build.
std::vector<fs::path> suite_files() {
    std::error_code error;
    const fs::path command = fs::read_symlink("/proc/self/exe", error);
    std::vector<fs::path> files;
    for (const char* folder : {"share/tessera/suites", "bench/suites"}) {
        const fs::path path = command.parent_path().parent_path() / folder;
        for (const auto& entry : fs::directory_iterator(path, error)) {
            if (entry.path().extension() == ".json") files.push_back(entry.path());
        }
        if (!files.empty()) break;
    }
    std::sort(files.begin(), files.end());
    return files;
}

}  // namespace

std::vector<Plan> BenchSet::plans(bool may_be_empty) const {
    std::vector<Plan> result;
    std::optional<Error> reason;
    const Backend backend = how.plan_options(Pass::forward, "auto").backend.value_or(Backend::cpu);
    const auto schedules = parse_list("--schedule", schedule_list(how.schedule, backend));
    expect_each_once("--schedule", how.schedule, schedules);
    for (const Problem& problem : shape.problems(scores)) {
        for (const Pass one : pass.list()) {
            for (const std::string& schedule : schedules) {
                const PlanOptions options = how.plan_options(one, schedule);
                try {
                    result.push_back(plan_with(problem, options));
                } catch (const Error& error) {
                    if (error.code() != ErrorCode::unsupported) throw;
                    reason = error;
                    print_note(fmt::format("skipped schedule {}, {}, {}", schedule, name_of(one), problem.describe()));
                }
            }
        }
    }
    if (result.empty() && reason && !may_be_empty) throw Error(*reason);
    return result;
}

Suite read_suite(const std::string& name) {
    if (name.find('/') != std::string::npos || name.ends_with(".json")) return read_file(name);
    std::vector<std::string> names;
    for (const fs::path& path : suite_files()) {
        if (path.stem() == name) return read_file(path);
        names.push_back(path.stem().string());
    }
    std::error_code error;
    if (fs::exists(name, error)) return read_file(name);
    throw Error(ErrorCode::cannot_open, "--suite",
                names.empty() ? fmt::format("expected a file, because no suites are installed here, got \"{}\"", name)
                              : fmt::format("expected one of {}, or a file, got \"{}\"", fmt::join(names, ", "), name));
}

std::vector<Suite> find_suites() {
    std::vector<Suite> suites;
    for (const fs::path& path : suite_files()) suites.push_back(read_file(path));
    return suites;
}

}  // namespace tessera::cli
