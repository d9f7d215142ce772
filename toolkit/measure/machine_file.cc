// SPDX-License-Identifier: Apache-2.0
#include "measure/machine_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "io/atomic_file.hpp"
#include "io/file.hpp"
#include "io/other_format.hpp"
#include "tessera/error.hpp"

namespace tessera::measure {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kSchema = "tessera.machine/1";

[[noreturn]] void bad(const std::string& field, const std::string& expected, const Json& got) {
    // A list or an object is not printed: dump() recurses, and the depth is the file's choice.
    constexpr std::size_t kShown = 60;
    const std::string came = got.is_null()     ? "nothing"
                             : got.is_array()  ? "a list"
                             : got.is_object() ? "an object"
                                               : got.dump(-1, ' ', true, Json::error_handler_t::replace);
    throw Error(ErrorCode::bad_data, field, fmt::format("expected {}, got {}", expected, came.substr(0, kShown)));
}

const Json& member(const Json& json, std::string_view name) {
    static const Json nothing;
    const auto found = json.find(name);
    return found == json.end() ? nothing : *found;
}

std::string text_of(const Json& json, const std::string& name, const std::string& field) {
    const Json& value = member(json, name);
    if (!value.is_string() || value.get<std::string>().empty()) bad(field, "a text", value);
    // Tables show these texts, so they must not break lines or move a terminal's cursor.
    const auto is_control = [](char c) { return (c >= 0 && c < ' ') || c == '\x7f'; };
    const auto text = value.get<std::string>();
    if (std::any_of(text.begin(), text.end(), is_control) || text.find("\xc2\x9b") != std::string::npos)
        bad(field, "a text of one line without control characters", value);
    return value.get<std::string>();
}

model::Quantity quantity_of(const Json& json, const std::string& name, const std::string& unit) {
    const Json& value = member(json, name);
    if (!value.is_object()) bad(name, "an object with value, unit and source", value);
    for (const auto& [key, unused] : value.items()) {
        if (key != "value" && key != "unit" && key != "source") bad(name + "." + key, "value, unit or source", key);
    }
    if (!member(value, "value").is_number()) bad(name + ".value", "a number", member(value, "value"));
    const Json& got = member(value, "unit");
    if (!got.is_string() || got.get<std::string>() != unit) bad(name + ".unit", fmt::format("\"{}\"", unit), got);
    return {member(value, "value").get<double>(), text_of(value, "source", name + ".source")};
}

/// The key of older machine files for a number of measured kernels; nullptr if it has one name.
const char* older_name(std::string_view name) {
    if (name == "gemm_share") return "product_share";
    if (name == "extra_tiles") return "last";
    if (name == "loop_starts") return "loops";
    if (name == "contended_speed") return "crowd";
    return nullptr;
}

/// Reads "kernels": [{"kernels": "bf16 forward", "gemm_share": 0.5, ..., "source": "..."}].
std::vector<MeasuredKernels> kernels_of(const Json& json) {
    std::vector<MeasuredKernels> result;
    const Json& list = member(json, "kernels");
    if (!json.contains("kernels")) return result;
    if (!list.is_array()) bad("kernels", "a list", list);
    for (std::size_t i = 0; i < list.size(); ++i) {
        const std::string at = fmt::format("kernels[{}]", i);
        if (!list[i].is_object()) bad(at, "an object", list[i]);
        std::set<std::string> known{"kernels", "source"};
        MeasuredKernels one;
        one.kernels = text_of(list[i], "kernels", at + ".kernels");
        one.source = text_of(list[i], "source", at + ".source");
        for_each_share(one.shares, [&](const char* name, double& share) {
            known.insert(name);
            Json value = member(list[i], name);
            if (const char* older = older_name(name); value.is_null() && older != nullptr) {
                known.insert(older);
                value = member(list[i], older);
            }
            if (value.is_null() && std::string_view(name) == "mask_share")  // absent in files of older versions
                bad(at + "." + name, "a number (an older tessera wrote the file: calibrate again)", value);
            if (!value.is_number()) bad(at + "." + name, "a number", value);
            share = value.get<double>();
        });
        for (const auto& [key, value] : list[i].items()) {
            if (!known.contains(key)) bad(at + "." + key, "a number of measured kernels", value);
        }
        result.push_back(std::move(one));
    }
    return result;
}

Json to_json(const MeasuredKernels& one) {
    Json json{{"kernels", one.kernels}};
    for_each_share(one.shares, [&](const char* name, const double& share) { json[name] = share; });
    json["source"] = one.source;
    return json;
}

}  // namespace

Json to_json(const model::Machine& machine) {
    Json json{{"schema", kSchema},
              {"name", machine.name},
              {"title", machine.title},
              {"kind", machine.kind == model::MachineKind::gpu ? "gpu" : "cpu"}};
    for_each_quantity(machine, [&](const char* name, const char* unit, const model::Quantity& quantity) {
        json[name] = Json{{"value", quantity.value}, {"unit", unit}, {"source", quantity.source}};
    });
    for (const MeasuredKernels& one : measured_kernels(machine)) json["kernels"].push_back(to_json(one));
    return json;
}

model::Machine machine_from_json(const Json& json) {
    if (!json.is_object()) bad("machine", "a JSON object", json);
    model::Machine machine;
    std::set<std::string> known{"schema", "name", "title", "kind", "kernels"};
    if (const Json& schema = member(json, "schema"); !schema.is_null() && schema != kSchema)
        bad("schema", fmt::format("\"{}\"", kSchema), schema);
    machine.name = text_of(json, "name", "name");
    machine.title = text_of(json, "title", "title");
    const std::string kind = text_of(json, "kind", "kind");
    if (kind != "gpu" && kind != "cpu") bad("kind", "gpu or cpu", kind);
    machine.kind = kind == "gpu" ? model::MachineKind::gpu : model::MachineKind::cpu;
    for_each_quantity(machine, [&](const char* name, const char* unit, model::Quantity& quantity) {
        known.insert(name);
        quantity = quantity_of(json, name, unit);
    });
    for (const auto& [key, value] : json.items()) {
        if (!known.contains(key)) bad(key, "a field of a machine", value);
    }
    set_measured_kernels(machine, kernels_of(json));
    validate(machine);
    return machine;
}

model::Machine read_machine(const std::string& path) {
    const io::FileBytes bytes = io::read_file(path);
    const std::string_view text(reinterpret_cast<const char*>(bytes.data.get()), bytes.size);
    const Json json = Json::parse(text, nullptr, false);
    if (json.is_discarded()) {
        const std::string what = io::other_format(io::MemorySource(bytes.span(), path)).what;
        throw Error(ErrorCode::bad_data, path,
                    "expected a machine file: one JSON object" + (what.empty() ? "" : ", it is " + what));
    }
    if (json.is_string()) {
        if (const model::Machine* known = model::find_machine(json.get<std::string>())) return *known;
        throw Error(ErrorCode::bad_data, path,
                    fmt::format("expected the name of a built-in machine, got {}", json.dump()));
    }
    try {
        return machine_from_json(json);
    } catch (const Error& error) {
        throw Error(ErrorCode::bad_data, path, error.what());
    }
}

std::optional<model::Machine> machine_beside(const std::string& records) {
    constexpr std::string_view kEnd = ".jsonl";
    if (!records.ends_with(kEnd)) return std::nullopt;
    const std::string path = records.substr(0, records.size() - kEnd.size()) + ".machine.json";
    std::error_code error;
    if (!std::filesystem::exists(path, error)) return std::nullopt;
    return read_machine(path);
}

void write_machine(const std::string& path, const model::Machine& machine) {
    const std::string text = to_json(machine).dump(2) + "\n";
    io::AtomicFile file(path);
    file.write(std::as_bytes(std::span(text)));
    file.commit();
}

}  // namespace tessera::measure
