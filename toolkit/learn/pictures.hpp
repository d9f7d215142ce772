// SPDX-License-Identifier: Apache-2.0
//
// The pictures of the lessons, drawn from the schedules, the model and the example by hand.
#pragma once

#include <string>

namespace tessera::learn {

/// The picture of a lesson as SVG; the same bytes every time. Throws Error(invalid_argument) naming "lesson".
std::string picture(int lesson);

// The pictures, in the order of the lessons.
std::string definition_picture();
std::string traffic_picture();
std::string scratchpad_picture();
std::string matrix_picture();
std::string order_picture();
std::string tile_size_picture();
std::string running_maximum_picture();
std::string one_tile_picture();
std::string recompute_picture();
std::string gradients_picture();
std::string causal_picture();
std::string loops_picture();
std::string overlap_picture();
std::string kernel_name_picture();
std::string family_picture();
std::string prediction_picture();
std::string worksheet_picture();
std::string merge_picture();
std::string pages_picture();
std::string fp8_picture();
std::string blackwell_picture();
std::string window_picture();
std::string block_picture();

}  // namespace tessera::learn
