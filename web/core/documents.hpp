// SPDX-License-Identifier: Apache-2.0
//
// The queries of the page. Each takes a JSON object and returns a JSON document. ask_command() runs the command; the
// others return data for pictures that a terminal cannot show.
#pragma once

#include <nlohmann/json.hpp>

namespace tessera::web {

using Json = nlohmann::ordered_json;

/// Takes {"args": ["roofline", "--device", "h200", "--json"]} and returns what `tessera` prints, as {"status", "text",
/// "errors"}. Commands: walk, which, roofline.
Json ask_command(const Json& question);

/// Returns the mask's tiles, the pairs computed in vain, and whether a tile fits in fast memory. It takes {"len_q",
/// "len_kv", "head_dim", "dtype", "causal", "window", "block_q", "block_kv", "device"}.
Json ask_tiles(const Json& question);

/// Returns the steps of every schedule on one SM, each with its time. It takes the members of ask_tiles() and "pass".
Json ask_race(const Json& question);

/// Takes {"args": those of `tessera roofline`}. Returns the data of the figure that --svg draws, and the length limits.
Json ask_roofline(const Json& question);

/// Returns fa2's backward on "workers" SMs, tile by tile, with the places where two add to the same dQ. It takes the
/// members of ask_tiles() except the device.
Json ask_backward(const Json& question);

/// Returns all machines known by name, with the quantities that the page shows.
Json ask_devices(const Json& question);

/// Takes {"answers": [...]}, those of learn.json. Returns all lessons in order: each with its exercises' tasks, and
/// what the answers say about them.
Json ask_lessons(const Json& question);

/// Takes {"answers": [...]}. Returns the recaps, the exam and its estimates, each with its questions, as ask_lessons().
/// "model" is the model of the estimates: {"device": "h200", "layers": 32, "heads": "32/8", "head_dim", "len",
/// "causal": true, "share": 0.3}; a missing member has its default.
Json ask_quizzes(const Json& question);

/// Takes {"exercise": "7a", "answer": "19/4"}, and for an estimate the "model". Returns {"right", "text"}, as `tessera
/// learn` prints it.
Json ask_grade(const Json& question);

/// Takes {"exercise": "7a"}, and for an estimate the "model". Returns {"text"}: its answer and why, or the model
/// answer.
Json ask_solution(const Json& question);

}  // namespace tessera::web
