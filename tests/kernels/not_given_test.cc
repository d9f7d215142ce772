// SPDX-License-Identifier: Apache-2.0
//
// A tensor of rank 0 is not given, on every kernel: whatever pointer its view has, nothing is read from there or
// written there. A tensor that is given has an address.
#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <string>

#include "core/arguments.hpp"
#include "kernels/support.hpp"

namespace tessera::check::not_given_test {
namespace {

void run(const Plan& plan, const ForwardArgs& args, std::span<std::byte> workspace) { forward(plan, args, workspace); }
void run(const Plan& plan, const BackwardArgs& args, std::span<std::byte> workspace) {
    backward(plan, args, workspace);
}

const ForwardArgs& set_args(Attention& a, ForwardArgs& args) { return args = a.forward_args(); }
const BackwardArgs& set_args(Attention& a, BackwardArgs& args) { return args = a.backward_args(); }

constexpr Tensor Attention::*kTensorsOfCase[] = {&Attention::q,  &Attention::k,         &Attention::v,  &Attention::d_o,
                                                 &Attention::o,  &Attention::lse,       &Attention::dq, &Attention::dk,
                                                 &Attention::dv, &Attention::o_residual};

/// Runs the kernel without the tensor, whose view is of rank 0 with the address of Q. False when the kernel refuses.
template <class Args>
bool run_without(Attention& a, const KernelInfo& kernel, TensorView Args::*missing, bool with_address) {
    Plan how;
    try {
        how = plan(a.problem, {.pass = kernel.pass, .kernel = kernel.name, .threads = 1});
    } catch (const Error& e) {
        if (e.code() != ErrorCode::unsupported && e.code() != ErrorCode::device_unavailable) throw;
        return false;
    }
    Args args;
    set_args(a, args);
    args.*missing = {};
    if (!how.o_residual) args.o_residual = {};
    for (const TensorArgument<Args>& argument : kTensors<Args>) {
        const TensorView& view = args.*argument.view;
        if (argument.use == Use::output && view.given())
            std::memset(view.data, 0xFF, static_cast<std::size_t>(view.size() * size_of(view.dtype)));
    }
    device::run_on_host_tensors(how, args, [&](const Args& on_device, std::span<std::byte> workspace) {
        Args called = on_device;
        if (with_address) (called.*missing).data = called.q.data;
        run(how, called, workspace);
    });
    return true;
}

template <class Args>
void expect_rank_0_is_nothing(Pass pass) {
    for (const DType dtype : kStorageTypes) {
        Attention start(make_problem(1, 70, 90, 2, 2, 64, dtype));
        if (dtype != DType::fp32) start.keep_residual();
        start.prepare_backward();
        for (const TensorArgument<Args>& argument : kTensors<Args>) {
            if (argument.need == Need::always) continue;
            for_each_kernel(pass, [&](const KernelInfo& kernel) {
                SCOPED_TRACE(argument.name);
                Attention without = start;
                Attention with_address = start;
                if (!run_without(without, kernel, argument.view, false)) return;
                ASSERT_TRUE(run_without(with_address, kernel, argument.view, true));
                for (Tensor Attention::*tensor : kTensorsOfCase) {
                    EXPECT_TRUE((with_address.*tensor).same_bits(without.*tensor)) << start.problem.describe();
                }
                EXPECT_TRUE(without.q.same_bits(start.q));
            });
        }
    }
}

TEST(NotGiven, an_address_alone_changes_no_bit_of_the_forward) { expect_rank_0_is_nothing<ForwardArgs>(Pass::forward); }

TEST(NotGiven, an_address_alone_changes_no_bit_of_the_backward) {
    expect_rank_0_is_nothing<BackwardArgs>(Pass::backward);
}

/// All tensors are given, but one has a null address: the error names it.
template <class Args>
void expect_null_is_refused(Attention& a, Pass pass, std::set<std::string>& refused) {
    const Plan how = plan(a.problem, {.pass = pass, .backend = Backend::cpu, .threads = 1});
    const Workspace workspace(how);
    for (const TensorArgument<Args>& argument : kTensors<Args>) {
        Args args;
        set_args(a, args);
        if (!(args.*argument.view).given()) continue;
        (args.*argument.view).data = nullptr;
        try {
            run(how, args, workspace);
            ADD_FAILURE() << argument.name << ": expected an error";
        } catch (const Error& e) {
            EXPECT_EQ(e.code(), ErrorCode::invalid_argument) << e.what();
            EXPECT_EQ(e.argument(), argument.name) << e.what();
        }
        refused.insert(argument.name);
    }
}

TEST(NotGiven, a_null_address_of_a_given_tensor_is_refused) {
    Problem p = make_problem(1, 5, 6, 2, 1, 8, DType::bf16);
    p.bias = p.bias_gradient = p.alibi = p.sinks = true;
    Attention dense(p);
    dense.keep_residual();
    dense.dlse = dense.lse;
    Attention ragged(make_ragged({3, 2}, {4, 2}, 2, 1, 8, DType::bf16), 1, {3, 2}, {4, 2});
    std::set<std::string> refused;
    for (Attention* a : {&dense, &ragged}) {
        a->prepare_backward();
        expect_null_is_refused<ForwardArgs>(*a, Pass::forward, refused);
        expect_null_is_refused<BackwardArgs>(*a, Pass::backward, refused);
    }
    for (const TensorArgument<BackwardArgs>& argument : kTensors<BackwardArgs>) {
        EXPECT_TRUE(refused.contains(argument.name)) << argument.name;
    }
}

TEST(NotGiven, a_negative_rank_is_no_rank) {
    Attention a(make_problem(1, 5, 6, 2, 2, 8));
    a.prepare_backward();
    const Plan how = plan(a.problem, {.backend = Backend::cpu, .threads = 1});
    ForwardArgs args = a.forward_args();
    args.lse.rank = -1;
    try {
        forward(how, args, Workspace(how));
        ADD_FAILURE() << "expected an error";
    } catch (const Error& e) {
        EXPECT_EQ(e.argument(), "lse") << e.what();
    }
}

}  // namespace
}  // namespace tessera::check::not_given_test
