// SPDX-License-Identifier: Apache-2.0
//
// Statements about a Call whose fields may be unknown. A statement is true, false, or unknown because some fields are
// (Kleene's logic: false and unknown is false, true or unknown is true).
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera::diagnose {

class Fact {
 public:
    Fact(bool holds) : holds_(holds) {}
    /// A fact that is unknown because this field of the Call is.
    static Fact unknown(const std::string& field) {
        Fact fact(false);
        fact.missing_fields_ = {field};
        return fact;
    }

    bool is_true() const { return missing_fields_.empty() && holds_; }
    bool is_false() const { return missing_fields_.empty() && !holds_; }
    bool is_unknown() const { return !missing_fields_.empty(); }
    /// The unknown fields that would decide the fact; empty if it is known.
    const std::vector<std::string>& missing_fields() const { return missing_fields_; }

    Fact operator!() const { return is_unknown() ? *this : Fact(!holds_); }
    friend Fact operator&&(const Fact& a, const Fact& b) {
        if (a.is_false() || b.is_false()) return false;
        return a.is_true() ? b : b.is_true() ? a : joined(a, b);
    }
    friend Fact operator||(const Fact& a, const Fact& b) { return !(!a && !b); }

 private:
    static Fact joined(Fact a, const Fact& b) {
        for (const std::string& field : b.missing_fields_) {
            if (std::find(a.missing_fields_.begin(), a.missing_fields_.end(), field) == a.missing_fields_.end())
                a.missing_fields_.push_back(field);
        }
        return a;
    }

    bool holds_;
    std::vector<std::string> missing_fields_{};
};

/// A field of a Call, with its name for messages.
template <class T>
struct Value {
    std::optional<T> value{};
    std::string field;

    template <class F>
    Fact is(F&& test) const {
        return value ? Fact(test(*value)) : Fact::unknown(field);
    }
    Fact operator==(const T& other) const {
        return is([&](const T& v) { return v == other; });
    }
    Fact operator!=(const T& other) const { return !(*this == other); }
    Fact operator<(const T& other) const {
        return is([&](const T& v) { return v < other; });
    }
    Fact operator>(const T& other) const {
        return is([&](const T& v) { return v > other; });
    }
    Fact operator>=(const T& other) const { return !(*this < other); }
    Fact operator<=(const T& other) const { return !(*this > other); }
};

/// True if two fields have the same value.
template <class T>
Fact same(const Value<T>& a, const Value<T>& b) {
    if (!b.value) return a.value ? Fact::unknown(b.field) : (Fact::unknown(a.field) && Fact::unknown(b.field));
    return a == *b.value;
}

/// True if a field lies in a range that includes both bounds.
template <class T>
Fact between(const Value<T>& value, const T& low, const T& high) {
    return (value >= low) && (value <= high);
}

inline Fact multiple_of(const Value<std::int64_t>& value, std::int64_t of) {
    return value.is([&](std::int64_t v) { return v % of == 0; });
}

}  // namespace tessera::diagnose
