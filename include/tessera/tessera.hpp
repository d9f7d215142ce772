// SPDX-License-Identifier: Apache-2.0
//
// The whole public API:
//
//     Problem problem = Problem::dense(batch, len, heads, head_dim);   // what
//     problem.mask.causal = Causal::bottom_right;
//     Plan plan = tessera::plan(problem);                              // how, and why so
//     Workspace workspace(plan);
//     forward(plan, {.q = q, .k = k, .v = v, .o = o, .lse = lse}, workspace);
//
// and, on a machine that need not be there:
//
//     double ms = predict(problem, Schedule::fa2, Pass::forward, *find_machine("h200")).ms;
#pragma once

#include "tessera/append.hpp"
#include "tessera/attention.hpp"
#include "tessera/context_parallel.hpp"
#include "tessera/cost.hpp"
#include "tessera/decode_block.hpp"
#include "tessera/dtype.hpp"
#include "tessera/error.hpp"
#include "tessera/kernel.hpp"
#include "tessera/machine.hpp"
#include "tessera/mask.hpp"
#include "tessera/plan.hpp"
#include "tessera/predict.hpp"
#include "tessera/predict_context_parallel.hpp"
#include "tessera/problem.hpp"
#include "tessera/tensor.hpp"
