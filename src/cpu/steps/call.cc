// SPDX-License-Identifier: Apache-2.0
#include "cpu/steps/call.hpp"

namespace tessera::cpu {

TileTally::~TileTally() {
    if (counters_ == nullptr) return;
    counters_->full += full_;
    counters_->partial += partial_;
    counters_->skipped += skipped_;
    counters_->computed_pairs += computed_pairs_;
}

TileReport report_of(TileStep step, const Head& head, const Panel& panel, Range keys, Coverage coverage) {
    TileReport report{.step = step, .batch = head.sequence.batch, .query_head = head.query_head};
    report.queries = {panel.first, panel.first + panel.queries};
    report.keys = keys;
    report.coverage = coverage;
    report.lanes = panel.lanes;
    return report;
}

}  // namespace tessera::cpu
