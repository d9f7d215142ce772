// SPDX-License-Identifier: Apache-2.0
//
// Schemas of the operators, in the library for the CPU alone. A schema is append-only: a new argument comes last and
// has a default.
//
// The operators whose names begin with attention are registered with autograd; the others run the same
// kernels past it, for the autograd.Function of python/tessera/torch/_operators.py and for calls without gradients.
#include <torch/csrc/stable/library.h>

// Arguments of both passes. Lengths are SymInt, so that a compiled graph may have symbolic ones.
#define TESSERA_SHARED_ARGUMENTS                                                                               \
    "Tensor? bias, Tensor? alibi_slopes, Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, Tensor? seed, "          \
    "SymInt max_len_q, SymInt max_len_kv, int causal, SymInt window_left, SymInt window_right, float? scale, " \
    "float softcap, float dropout_p, str? kernel"

#define TESSERA_FORWARD_ARGUMENTS "(Tensor q, Tensor k, Tensor v, " TESSERA_SHARED_ARGUMENTS ", bool heads_first=False)"

// Arguments of most calls.
#define TESSERA_FEW_ARGUMENTS                                                                                      \
    "(Tensor q, Tensor k, Tensor v, int causal=0, bool heads_first=False, float? scale=None, int window_left=-1, " \
    "int window_right=-1)"

#define TESSERA_BACKWARD                                                                                       \
    "(Tensor d_o, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, " TESSERA_SHARED_ARGUMENTS \
    ", bool bias_gradient, bool heads_first=False, Tensor? o_residual=None) -> (Tensor, Tensor, Tensor, Tensor)"

#define TESSERA_FORWARD_WITH_SINKS \
    "(Tensor q, Tensor k, Tensor v, " TESSERA_SHARED_ARGUMENTS ", bool heads_first, Tensor sinks)"

#define TESSERA_BACKWARD_WITH_SINKS                                                                            \
    "(Tensor d_o, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, " TESSERA_SHARED_ARGUMENTS \
    ", bool bias_gradient, bool heads_first, Tensor sinks, Tensor? o_residual=None) "                          \
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"

// The operators of ranks.cc, which write into tensors of the caller's.
#define TESSERA_TO_ARGUMENTS                                                                   \
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, int max_len_q, int max_len_kv, int causal, " \
    "int window_left, int window_right, float? scale, float softcap, str? kernel)"

#define TESSERA_FORWARD_TO                                                                                       \
    "(Tensor(a!) o, Tensor(b!) lse, Tensor(c!)? o_residual, Tensor q, Tensor k, Tensor v, " TESSERA_TO_ARGUMENTS \
    " -> bool"

#define TESSERA_BACKWARD_TO                                                                                  \
    "(Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor d_o, Tensor? dlse, Tensor q, Tensor k, Tensor v, " \
    "Tensor o, Tensor lse, Tensor? o_residual, " TESSERA_TO_ARGUMENTS " -> ()"

STABLE_TORCH_LIBRARY(tessera, m) {
    m.def("attention" TESSERA_FORWARD_ARGUMENTS " -> (Tensor, Tensor)");
    m.def("attention_with_residual" TESSERA_FORWARD_ARGUMENTS " -> (Tensor, Tensor, Tensor)");
    m.def("attention_backward" TESSERA_BACKWARD);
    m.def("attention_with_sinks" TESSERA_FORWARD_WITH_SINKS " -> (Tensor, Tensor)");
    m.def("attention_with_sinks_and_residual" TESSERA_FORWARD_WITH_SINKS " -> (Tensor, Tensor, Tensor)");
    m.def("attention_with_sinks_backward" TESSERA_BACKWARD_WITH_SINKS);
    m.def("forward" TESSERA_FORWARD_ARGUMENTS " -> (Tensor, Tensor)");
    m.def("forward_with_residual" TESSERA_FORWARD_ARGUMENTS " -> (Tensor, Tensor, Tensor)");
    m.def("forward_few" TESSERA_FEW_ARGUMENTS " -> (Tensor, Tensor)");
    m.def("forward_few_with_residual" TESSERA_FEW_ARGUMENTS " -> (Tensor, Tensor, Tensor)");
    m.def("forward_o" TESSERA_FEW_ARGUMENTS " -> Tensor");
    m.def("backward" TESSERA_BACKWARD);
    m.def("forward_to" TESSERA_FORWARD_TO);
    m.def("backward_to" TESSERA_BACKWARD_TO);
    m.def("copy_rows(Tensor(a!) first, Tensor(b!) second, Tensor k, Tensor v, Tensor from_rows, Tensor to_rows) -> ()");
    m.def("add_parts(Tensor(a!) dk, Tensor(b!) dv, Tensor parts, Tensor first, Tensor sources) -> ()");
}
