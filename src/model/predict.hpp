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

}  // namespace tessera::model
