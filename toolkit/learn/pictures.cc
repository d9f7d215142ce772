// SPDX-License-Identifier: Apache-2.0
#include "learn/pictures.hpp"

#include <iterator>

#include "learn/lesson.hpp"

namespace tessera::learn {

std::string picture(int number) {
    constexpr std::string (*kPictures[])() = {
        definition_picture, traffic_picture,         scratchpad_picture, matrix_picture,      order_picture,
        tile_size_picture,  running_maximum_picture, one_tile_picture,   recompute_picture,   gradients_picture,
        causal_picture,     loops_picture,           overlap_picture,    kernel_name_picture, family_picture,
        prediction_picture, worksheet_picture,       merge_picture,      pages_picture,       fp8_picture,
        blackwell_picture,  window_picture,          block_picture};
    return kPictures[lesson(number).number]();
}

}  // namespace tessera::learn
