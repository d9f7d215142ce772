// SPDX-License-Identifier: Apache-2.0
//
// The list of a kernel's compiled shapes: types with a member kConfig, in the schedule's host/config.h. Registry,
// dispatch, instances/, the cost model and tools/check_kernels.py read that one list. Plain C++, since the model is
// built without CUDA too.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace tessera::cuda {

/// A shape's name as profilers show it: the name of its type, without the namespace.
template <class Shape>
std::string shape_name() {
    std::string_view text = __PRETTY_FUNCTION__;  // "... [with Shape = tessera::cuda::fa3::HeadDim64; ..."
    text.remove_prefix(text.find("Shape = "));
    text = text.substr(0, text.find_first_of(";]"));
    return std::string(text.substr(text.rfind(':') + 1));
}

/// Shapes in order of preference: the first that holds a Problem runs it.
template <class... Shapes>
struct ShapeList {
    static constexpr std::array kConfigs{Shapes::kConfig...};

    template <class Shape>
    static constexpr bool kHas = (std::is_same_v<Shape, Shapes> || ...);

    static std::vector<std::string> names() { return {shape_name<Shapes>()...}; }

    /// Index of the first shape whose Config `holds` accepts, or none.
    template <class Holds>
    static constexpr std::optional<std::size_t> first(const Holds& holds) {
        for (std::size_t i = 0; i < kConfigs.size(); ++i) {
            if (holds(kConfigs[i])) return i;
        }
        return std::nullopt;
    }

    /// Calls f(Shape{}) for the shape at `index`.
    template <class F>
    static auto call(std::size_t index, const F& f) {
        std::common_type_t<decltype(f(Shapes{}))...> result{};
        std::size_t at = 0;
        ((at++ == index ? void(result = f(Shapes{})) : void()), ...);
        return result;
    }
};

}  // namespace tessera::cuda
