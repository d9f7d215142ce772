// SPDX-License-Identifier: Apache-2.0
//
// The schemas of the operators; only the library of the CPU has this file. Schemas are append-only: a new argument
// comes last and has a default.
#include <torch/csrc/stable/library.h>

// The arguments that both passes share. Lengths are SymInt, so that a compiled graph may leave them open.
#define TESSERA_SHARED_ARGUMENTS                                                                               \
    "Tensor? bias, Tensor? alibi_slopes, Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, Tensor? seed, "          \
    "SymInt max_len_q, SymInt max_len_kv, int causal, SymInt window_left, SymInt window_right, float? scale, " \
    "float softcap, float dropout_p, str? kernel"

// What is left of them in most calls. PyTorch takes less time for an argument that is left out, so the rarest come
// last.
#define TESSERA_PLAIN_ARGUMENTS \
    "int causal=0, bool heads_first=False, float? scale=None, int window_left=-1, int window_right=-1"

STABLE_TORCH_LIBRARY(tessera, m) {
    m.def("forward(Tensor q, Tensor k, Tensor v, " TESSERA_SHARED_ARGUMENTS
          ", bool heads_first=False) -> (Tensor, Tensor)");
    m.def("attention(Tensor q, Tensor k, Tensor v, " TESSERA_SHARED_ARGUMENTS
          ", bool heads_first=False) -> (Tensor, Tensor)");
    m.def("attention_with_residual(Tensor q, Tensor k, Tensor v, " TESSERA_SHARED_ARGUMENTS
          ", bool heads_first) -> (Tensor, Tensor, Tensor)");
    m.def("plain(Tensor q, Tensor k, Tensor v, " TESSERA_PLAIN_ARGUMENTS ") -> (Tensor, Tensor)");
    m.def("plain_o(Tensor q, Tensor k, Tensor v, " TESSERA_PLAIN_ARGUMENTS ") -> Tensor");
    m.def("plain_with_residual(Tensor q, Tensor k, Tensor v, " TESSERA_PLAIN_ARGUMENTS ") -> (Tensor, Tensor, Tensor)");
    m.def(
        "backward(Tensor d_o, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor "
        "lse, " TESSERA_SHARED_ARGUMENTS
        ", bool bias_gradient, bool heads_first=False, Tensor? o_residual=None) -> (Tensor, Tensor, Tensor, Tensor)");
    m.def(
        "plain_backward(Tensor d_o, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
        "Tensor? o_residual, " TESSERA_PLAIN_ARGUMENTS ") -> (Tensor, Tensor, Tensor)");
}
