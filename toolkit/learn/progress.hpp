// SPDX-License-Identifier: Apache-2.0
//
// A learner's progress: every answer ever given, in one file.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "learn/standing.hpp"

namespace tessera::learn {

/// $XDG_STATE_HOME/tessera/learn.json, or ~/.local/state/tessera/learn.json; nothing if neither is an absolute path.
std::optional<std::string> progress_path();

/// Reads all answers, oldest first; none if there is no file. An entry with a "lesson" and no "exercise" is of the
/// first edition of the lessons, which had other numbers: it counts if its exercise is still asked, and is passed over
/// otherwise. Throws Error(cannot_open). Throws Error(bad_data) naming the file if add_answer() did not write it; the
/// file is left unchanged.
std::vector<SavedAnswer> read_progress(const std::string& path);

/// Adds one answer and keeps all others, including those that another process adds meanwhile. The file is replaced
/// atomically. Throws as read_progress() does, and Error(cannot_write).
void add_answer(const std::string& path, SavedAnswer given);

}  // namespace tessera::learn
