// SPDX-License-Identifier: Apache-2.0
//
// The public predict() (tessera/predict.hpp) in this namespace.
#pragma once

#include "model/machine.hpp"
#include "schedule/schedule.hpp"
#include "tessera/predict.hpp"

namespace tessera::model {

using tessera::longest_that_fits;
using tessera::Part;
using tessera::predict;
using tessera::Prediction;
using tessera::PredictOptions;
using tessera::refusal;
using tessera::Roof;
using tessera::WorksheetLine;

/// predict() for Records of ragged backwards whose kernels had a grid of as many key blocks for each sequence as for
/// the longest one: with the time of the blocks that have no keys. The kernels start no such blocks.
Prediction predict_with_empty_blocks(const Problem& problem, Schedule schedule, Pass pass, const Machine& machine,
                                     const PredictOptions& options);

}  // namespace tessera::model
