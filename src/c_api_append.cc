// SPDX-License-Identifier: Apache-2.0
//
// The C ABI of append().
#include "c_api.hpp"
#include "core/append_tensors.hpp"

using namespace tessera;

static_assert(sizeof(tessera_append_args) ==
              offsetof(tessera_append_args, k) + kAppendTensors.size() * sizeof(tessera_tensor));

tessera_status tessera_append(const tessera_append_args* args, const tessera_options* options, void* stream) {
    return guarded([&] {
        const tessera_append_args a = read_struct("args", args);
        if (a.rotary_interleaved != 0 && a.rotary_interleaved != 1) {
            invalid("rotary_interleaved", fmt::format("expected 0 or 1, got {}", a.rotary_interleaved));
        }
        if (a.reserved != 0) invalid("reserved", fmt::format("expected 0, got {}", a.reserved));
        AppendArgs tensors;
#define TESSERA_READ(member) tensors.member = tensor_of(#member, a.member);
        TESSERA_APPEND_TENSORS(TESSERA_READ)
#undef TESSERA_READ
        AppendOptions how{.rotary_interleaved = a.rotary_interleaved == 1};
        if (a.norm_eps != 0) how.norm_eps = a.norm_eps;
        const tessera_options run = read_options(options);
        how.threads = run.threads;
        append(tensors, how, execution_of(run, stream));
    });
}
