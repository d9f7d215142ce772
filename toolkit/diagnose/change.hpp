// SPDX-License-Identifier: Apache-2.0
//
// Changes that a user can make to a call of attention, or to the software that it runs on.
#pragma once

#include <string>
#include <vector>

#include "diagnose/rules.hpp"

namespace tessera::diagnose {

/// One change, applied to a call.
struct Change {
    std::string name;    ///< "enable-gqa"; "torch-2.9" and "cudnn-9.14" carry their version
    std::string text;    ///< what to do, as an order: "set enable_gqa=True"
    std::string caveat;  ///< what it presumes or costs; empty: the result stays as it is
    int effort;          ///< the cheaper change is the smaller number
    Call after;
};

/// The changes that can be made to `call` for the sake of `wanted`, whether they help or not.
std::vector<Change> changes_of(const Call& call, SdpBackend wanted);

}  // namespace tessera::diagnose
