// SPDX-License-Identifier: Apache-2.0
//
// Fields of a config.json, checked as they are read.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "tessera/error.hpp"

namespace tessera::measure {

using ConfigJson = nlohmann::json;
using Names = std::initializer_list<const char*>;

inline constexpr std::int64_t kMostOfConfig = std::int64_t{1} << 28;  // keeps products of a few sizes below 2^63

inline bool is_one_of(std::string_view text, std::initializer_list<std::string_view> list) {
    return std::find(list.begin(), list.end(), text) != list.end();
}

/// Throws Error(bad_data): the field, what was expected, and what came.
[[noreturn]] inline void bad_field(const std::string& field, const std::string& expected, const ConfigJson& got) {
    // A list or an object is not printed: dump() recurses, and the depth is the file's choice.
    constexpr std::size_t kShown = 60;
    const std::string came = got.is_null()     ? "nothing"
                             : got.is_array()  ? "a list"
                             : got.is_object() ? "an object"
                                               : got.dump(-1, ' ', true, ConfigJson::error_handler_t::replace);
    throw Error(ErrorCode::bad_data, field, fmt::format("expected {}, got {}", expected, came.substr(0, kShown)));
}

/// Fields of a config by the names that model families give them; the first name is the usual one.
class Fields {
 public:
    /// `more`: an object with fields that count where `json` lacks them.
    explicit Fields(const ConfigJson& json, const ConfigJson* more = nullptr) : json_(json), more_(more) {}

    const ConfigJson& raw(Names names) const {
        static const ConfigJson nothing;
        for (const ConfigJson* json : {&json_, more_}) {
            if (json == nullptr) continue;
            for (const char* name : names) {
                const auto found = json->find(name);
                if (found != json->end() && !found->is_null()) return *found;
            }
        }
        return nothing;
    }

    /// A size of at least 1, or `otherwise` if none of the names is there.
    std::int64_t size(Names names, std::int64_t otherwise) const {
        const ConfigJson& value = raw(names);
        if (value.is_null()) return otherwise;
        return checked(names, value, 1);
    }

    std::int64_t required(Names names) const {
        const ConfigJson& value = raw(names);
        if (value.is_null()) {
            std::string others;
            for (const char* name : names)
                if (name != *names.begin()) others += fmt::format("{}{}", others.empty() ? "" : ", ", name);
            bad_field(*names.begin(), others.empty() ? "a whole number" : "a whole number (or " + others + ")", value);
        }
        return checked(names, value, 1);
    }

    /// A number of experts or layers, which may be 0.
    std::int64_t count(Names names, std::int64_t otherwise = 0) const {
        const ConfigJson& value = raw(names);
        return value.is_null() ? otherwise : checked(names, value, 0);
    }

    double number(Names names) const {
        const ConfigJson& value = raw(names);
        if (value.is_null()) return 0;
        if (!value.is_number()) bad_field(*names.begin(), "a number", value);
        return value.get<double>();
    }

    bool flag(const char* name, bool otherwise) const {
        const ConfigJson& value = raw({name});
        return value.is_boolean() ? value.get<bool>() : otherwise;
    }

    std::string text(const char* name) const {
        const ConfigJson& value = raw({name});
        return value.is_string() ? value.get<std::string>() : "";
    }

 private:
    static std::int64_t checked(Names names, const ConfigJson& value, std::int64_t least) {
        if (!value.is_number_integer()) bad_field(*names.begin(), "a whole number", value);
        const bool too_large = value.is_number_unsigned() && value.get<std::uint64_t>() > kMostOfConfig;
        if (too_large || value.get<std::int64_t>() < least)
            bad_field(*names.begin(), fmt::format("a whole number from {} to 2^28", least), value);
        return value.get<std::int64_t>();
    }

    const ConfigJson& json_;
    const ConfigJson* more_;
};

}  // namespace tessera::measure
