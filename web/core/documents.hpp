// SPDX-License-Identifier: Apache-2.0
//
// The questions of the page. Each takes a JSON object and returns a JSON document. Where the command has an answer, the
// page asks the command (ask_command); the others are pictures that a terminal can't show.
#pragma once

#include <nlohmann/json.hpp>

namespace tessera::web {

using Json = nlohmann::ordered_json;

/// {"args": ["roofline", "--device", "h200", "--json"]} -> what `tessera` prints, as {"status", "text", "errors"}.
/// Commands: walk, which, roofline.
Json ask_command(const Json& question);

/// Which tiles the mask leaves, what is computed in vain, and what fits near: {"len_q", "len_kv", "head_dim", "dtype",
/// "causal", "window", "block_q", "block_kv", "device"}.
Json ask_tiles(const Json& question);

/// The steps of every schedule on one multiprocessor, with the time that each takes: the members of ask_tiles() and
/// "pass".
Json ask_race(const Json& question);

/// {"args": those of `tessera roofline`} -> the figure that --svg draws, as data, and the lengths that fit and win.
Json ask_roofline(const Json& question);

/// fa2's backward on "workers" multiprocessors, tile by tile, and where two add to the same dQ: the members of
/// ask_tiles() but for the device.
Json ask_backward(const Json& question);

/// Every machine that is known by name, with the quantities that the page shows.
Json ask_devices(const Json& question);

}  // namespace tessera::web
