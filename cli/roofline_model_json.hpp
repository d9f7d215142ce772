// SPDX-License-Identifier: Apache-2.0
//
// The answer of tessera roofline --model for one machine and length, as JSON and as rows of CSV.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "measure/whole_model.hpp"
#include "session.hpp"

namespace tessera::cli {

inline constexpr double kBytesOfGib = 1073741824.0;

/// The answer for one machine and one length.
struct ModelAnswer {
    const model::Machine* machine;
    std::int64_t len;
    DType dtype;
    measure::ModelCost cost;
    std::vector<std::string> by_tessera;  ///< calls that only --by tessera predicts
};

/// "full", "window 4,096".
std::string kind_text(const measure::LayerGroup& group);

/// True if weights, K and V fit; nothing if the file's weights have another size than the counted ones.
std::optional<bool> fits_memory(const measure::ModelCost& cost, const model::Machine& machine);

Json config_json(const measure::ModelConfig& config);
Json answer_json(const ModelAnswer& answer, std::int64_t batch);

/// A line for each call and group of layers; a call that is not answered as a whole has one line with the reason.
void add_csv_rows(const ModelAnswer& answer, std::int64_t batch, Json& rows);

}  // namespace tessera::cli
