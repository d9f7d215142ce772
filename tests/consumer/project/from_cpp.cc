// SPDX-License-Identifier: Apache-2.0
//
// All scores are equal (q = 0), so every output is the mean of the values that the query sees.
#include <cstdio>
#include <vector>

#include "tessera/tessera.hpp"

int main() {
    using namespace tessera;
    Problem problem = Problem::dense(1, 4, 1, 8);
    problem.mask.causal = Causal::top_left;
    std::vector<float> q(32), k(32, 1.0F), v(32), o(32);
    for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i / 8);
    const auto view = [](std::vector<float>& data) { return dense_view(data.data(), DType::fp32, {1, 4, 1, 8}); };
    const Plan chosen = plan(problem);
    forward(chosen, {.q = view(q), .k = view(k), .v = view(v), .o = view(o)}, Workspace(chosen));
    std::printf("C++ %.4f %.4f %.4f %.4f\n", o[0], o[8], o[16], o[24]);
    Problem on_gpu = Problem::dense(1, 4096, 16, 128);
    on_gpu.dtype = DType::bf16;
    const Prediction slow = predict(on_gpu, Schedule::standard, Pass::forward, *find_machine("h200"));
    const Prediction fast = predict(on_gpu, Schedule::fa3, Pass::forward, *find_machine("h200"));
    std::printf("fa3 %s\n", fast.ms < slow.ms && fast.memory.total() < slow.memory.total() ? "wins" : "loses");
    try {
        problem.head_dim = 0;
        plan(problem);
    } catch (const Error& error) {
        std::printf("error %d %s\n", static_cast<int>(error.code()), error.argument().c_str());
    }
}
