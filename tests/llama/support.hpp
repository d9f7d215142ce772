// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "llama/engine.hpp"
#include "tessera/error.hpp"

namespace llama::test {

inline const std::string kTrained = std::string(TESSERA_SOURCE_DIR) + "/python/tests/data/kjv-llama";

/// The folder of a model that examples/llama/random_model.py wrote.
inline std::string random_model(const std::string& name) { return std::string(LLAMA_MODELS) + "/" + name; }

inline nlohmann::json read_json(const std::string& path) {
    std::ifstream file(path);
    if (!file) throw std::runtime_error("cannot read " + path);
    return nlohmann::json::parse(file);
}

/// The outcome of a request.
struct Text {
    std::vector<std::int32_t> tokens;  // new ones
    std::vector<float> logits;         // [new tokens, vocab_size]

    friend bool operator==(const Text&, const Text&) = default;
};

/// An engine that keeps the logits of every request.
struct Recorded {
    std::vector<Text> texts;
    HostMemory memory;
    Engine engine;

    Recorded(const std::string& folder, EngineOptions options)
        : engine(folder, recording(std::move(options)), memory) {}

    EngineOptions recording(EngineOptions options) {
        options.on_logits = [this](const Sequence& sequence, std::span<const float> logits) {
            std::vector<float>& all = texts[static_cast<std::size_t>(sequence.number)].logits;
            all.insert(all.end(), logits.begin(), logits.end());
        };
        return options;
    }

    void submit(const Request& request) {
        engine.submit(request);
        texts.emplace_back();
    }

    void run() {
        while (engine.busy()) {
            for (const Token& token : engine.step()) {
                texts[static_cast<std::size_t>(token.request)].tokens.push_back(token.token);
            }
        }
    }
};

inline std::vector<std::int32_t> bytes_of(const std::string& text) {
    std::vector<std::int32_t> tokens;
    for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
    return tokens;
}

/// The text of the Error that f() throws; empty if it throws none.
template <class F>
std::string error_of(const F& f) {
    try {
        f();
        return "";
    } catch (const tessera::Error& error) {
        return error.what();
    }
}

}  // namespace llama::test
