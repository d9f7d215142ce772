// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "llama/engine.hpp"

namespace llama {

/// The tokens of a text, as bytes (a vocabulary of 256) or as numbers.
std::string text_of(std::int32_t token, bool bytes);

/// Prints several texts that grow at the same time, in the order of their requests: the first that has not ended
/// appears token by token, those after it wait in memory.
class Terminal {
 public:
    /// `prompts`: the texts that the requests begin with. `escape`: control characters appear as \xNN, so that a model
    /// cannot steer the terminal.
    Terminal(std::vector<std::string> prompts, bool bytes, bool escape);

    void show(const Token& token);

 private:
    void print(const std::string& text);
    void begin(std::size_t request);

    std::vector<std::string> waiting_;  // what is not printed yet, of each request
    std::vector<bool> ended_;
    std::size_t current_ = 0;
    bool bytes_;
    bool escape_;
};

}  // namespace llama
