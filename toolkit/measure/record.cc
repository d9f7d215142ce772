// SPDX-License-Identifier: Apache-2.0
#include "measure/record.hpp"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <tuple>
#include <type_traits>

#include "core/problem_fields.hpp"
#include "measure/work.hpp"
#include "tessera/error.hpp"

namespace tessera::measure {
namespace {

using Json = nlohmann::ordered_json;

std::string side_text(std::int64_t side) { return side == unbounded ? "unbounded" : std::to_string(side); }

void join(std::string& text, const std::string& part) {
    if (!text.empty()) text += ", ";
    text += part;
}

/// Lists all fields once: f(name, field, required). A field that is not required is left out if it is empty.
template <class R, class F>
void for_each_field(R& r, F&& f) {
    f("what", r.what, true), f("by", r.by, true), f("schedule", r.schedule, true), f("kernel", r.kernel, false);
    f("pass", r.pass, true), f("dtype", r.dtype, true), f("batch", r.batch, true);
    f("len_q", r.len_q, true), f("len_kv", r.len_kv, true);
    f("heads_q", r.heads_q, true), f("heads_kv", r.heads_kv, true);
    f("head_dim", r.head_dim, true), f("head_dim_v", r.head_dim_v, true);
    f("lens_q", r.lens_q, false), f("lens_kv", r.lens_kv, false);
    f("mask", r.mask, true), f("features", r.features, false), f("deterministic", r.deterministic, true);
    f("ms", r.ms, true), f("ms_spread", r.ms_spread, false), f("tflops", r.tflops, false);
    f("bound", r.bound, false), f("percent_of_bound", r.percent_of_bound, false), f("bytes", r.bytes, false);
    f("device", r.device, true), f("threads", r.threads, false), f("clock_mhz", r.clock_mhz, false);
    f("watts", r.watts, false);
    f("versions", r.versions, false), f("date", r.date, true), f("commit", r.commit, false);
}

struct Writer {
    Json json = Json::object();

    template <class T>
    void operator()(const char* name, const T& field, bool required) {
        if (required || field != T{}) json[name] = field;
    }
    void operator()(const char* name, const std::optional<double>& field, bool) {
        if (field) json[name] = *field;
    }
};

struct Reader {
    const Json& json;

    template <class T>
    void operator()(const char* name, T& field, bool required) const {
        const auto found = json.find(name);
        if (found == json.end()) {
            if (required) throw Error(ErrorCode::bad_data, name, "expected this field in a record, got none");
            return;
        }
        bool valid = true;
        try {
            valid = is_exact(*found, field);
            if (valid) read(*found, field);
        } catch (const Json::exception&) {
            valid = false;
        }
        if (!valid) {
            const std::string got = found->dump(-1, ' ', true, Json::error_handler_t::replace);
            throw Error(ErrorCode::bad_data, name, fmt::format("expected {}, got {}", type_text(field), got));
        }
    }
    /// Rejects values that the JSON library would round, such as 1.5 as a size.
    template <class T>
    static bool is_exact(const Json& value, const T&) {
        if (!std::is_integral_v<T> || std::is_same_v<T, bool> || !value.is_number_float()) return true;
        constexpr double kExact = 0x1p53;
        const double number = value.get<double>();
        return number == std::floor(number) && std::abs(number) <= kExact;
    }
    template <class T>
    static const char* type_text(const T&) {
        if constexpr (std::is_same_v<T, std::string>) return "a text";
        else if constexpr (std::is_same_v<T, bool>) return "true or false";
        else if constexpr (std::is_integral_v<T>) return "a whole number";
        else if constexpr (std::is_same_v<T, double> || std::is_same_v<T, std::optional<double>>) return "a number";
        else if constexpr (std::is_same_v<T, std::vector<std::int64_t>>) return "a list of whole numbers";
        else return "an object";
    }
    template <class T>
    static void read(const Json& value, T& field) {
        field = value.get<T>();
    }
    static void read(const Json& value, std::optional<double>& field) { field = value.get<double>(); }
    /// Accepts a plain number as a version, as cuDNN has.
    static void read(const Json& value, std::map<std::string, std::string>& field) {
        for (const auto& [name, text] : value.items())
            field[name] = text.is_number_integer() ? text.dump() : text.get<std::string>();
    }
};

}  // namespace

std::string mask_text(const Mask& mask) {
    std::string text;
    if (mask.causal == Causal::bottom_right) join(text, "causal bottom-right");
    if (mask.causal == Causal::top_left) join(text, "causal top-left");
    if (mask.window_left != unbounded || mask.window_right != unbounded) {
        join(text, fmt::format("window {},{}", side_text(mask.window_left), side_text(mask.window_right)));
    }
    return text.empty() ? "none" : text;
}

std::string features_text(const Problem& problem) {
    std::string text;
    if (problem.ragged) join(text, fmt::format("ragged rows {} x {}", problem.total_q, problem.total_kv));
    if (const std::string features = describe_features(problem); !features.empty()) join(text, features);
    return text;
}

Record record_of(const Plan& plan, const Summary& milliseconds, double operations) {
    const Problem& p = plan.problem;
    return {.schedule = name_of(plan.kernel->schedule),
            .kernel = plan.kernel->name,
            .pass = name_of(plan.pass),
            .dtype = name_of(p.dtype),
            .batch = p.batch,
            .len_q = p.len_q,
            .len_kv = p.len_kv,
            .heads_q = p.heads_q,
            .heads_kv = p.heads_kv,
            .head_dim = p.head_dim,
            .head_dim_v = p.head_dim_v,
            .mask = mask_text(p.mask),
            .features = features_text(p),
            .ms = milliseconds.median,
            .ms_spread = milliseconds.spread,
            .tflops = gflops(operations, milliseconds.median) / 1e3,
            .threads = plan.threads};
}

bool same_case(const Record& a, const Record& b) {
    const auto identity = [](const Record& r) {
        return std::tie(r.what, r.by, r.schedule, r.kernel, r.pass, r.dtype, r.batch, r.len_q, r.len_kv, r.heads_q,
                        r.heads_kv, r.head_dim, r.head_dim_v, r.mask, r.features, r.deterministic, r.device, r.threads);
    };
    return identity(a) == identity(b);
}

Json to_json(const Record& record) {
    Writer writer;
    for_each_field(record, writer);
    return std::move(writer.json);
}

Record record_from_json(const Json& json) {
    if (!json.is_object()) throw Error(ErrorCode::bad_data, "record", "expected a JSON object");
    Record record;
    for_each_field(record, Reader{json});
    return record;
}

}  // namespace tessera::measure
