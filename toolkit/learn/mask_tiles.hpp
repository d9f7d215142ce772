// SPDX-License-Identifier: Apache-2.0
//
// The tiles of a mask, full, partial and skipped: the picture of lessons 10 and 21.
#pragma once

#include <string>

#include "learn/canvas.hpp"
#include "tessera/mask.hpp"

namespace tessera::learn {

/// The explanations beside the tiles: their positions, and what they say of partial and skipped ones.
struct MaskTexts {
    double first_row;
    double row_step;
    const char* partial;
    const char* skipped;
};

/// Draws the tiles of 128 x 128 of 1,024 queries and keys, and returns the canvas as SVG.
std::string tiles_of_mask(Canvas& canvas, const Mask& mask, const MaskTexts& texts);

}  // namespace tessera::learn
