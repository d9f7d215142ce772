// SPDX-License-Identifier: Apache-2.0
//
// Each argument of forward() and backward() is wrong in turn. A typed error names it, and no byte changes.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "core/case.hpp"

namespace tessera::test::bad_calls_test {
namespace {

Problem dense_problem() {
    Problem p = Problem::dense(2, 5, 4, 8);
    p.len_kv = 6;
    p.heads_kv = 2;
    p.head_dim_v = 4;
    p.alibi = p.bias = p.bias_gradient = true;
    return p;
}

Case dense_case() { return Case(dense_problem()); }

Case ragged_case(DType cu_dtype = DType::int32) {
    Problem p = dense_problem();
    p.bias = p.bias_gradient = p.alibi = false;
    CaseOptions options{.cu_dtype = cu_dtype};
    set_ragged(p, options, {2, 0, 5}, {3, 1, 6});
    return Case(p, options);
}

using Bytes = std::vector<std::vector<std::byte>>;

Bytes all_bytes(const Case& c) {
    Bytes bytes;
    for (const Tensor* t : {&c.q, &c.k, &c.v, &c.bias, &c.alibi_slopes, &c.cu_seqlens_q, &c.cu_seqlens_kv, &c.o, &c.lse,
                            &c.d_o, &c.dlse, &c.dq, &c.dk, &c.dv, &c.dbias}) {
        bytes.push_back(t->bytes());
    }
    return bytes;
}

/// One way to spoil a call, and the arguments that the error may name.
template <class Args>
struct Spoiled {
    std::string what;
    std::set<std::string> arguments;
    std::function<void(Args&)> spoil;
};

void run(const Plan& p, const ForwardArgs& args, std::span<std::byte> workspace) { forward(p, args, workspace); }
void run(const Plan& p, const BackwardArgs& args, std::span<std::byte> workspace) { backward(p, args, workspace); }

template <class Args>
void expect_error(const Case& c, const Plan& p, const Args& args, std::span<std::byte> workspace, ErrorCode code,
                  const std::set<std::string>& arguments, const std::string& what) {
    const Bytes before = all_bytes(c);
    try {
        run(p, args, workspace);
        ADD_FAILURE() << what << ": expected an error about " << *arguments.begin();
    } catch (const Error& e) {
        EXPECT_EQ(e.code(), code) << what << ": " << e.what();
        EXPECT_EQ(arguments.count(e.argument()), 1u) << what << ": " << e.what();
    }
    EXPECT_TRUE(all_bytes(c) == before) << what << " changed memory";
}

/// A tensor of the call by its name in messages.
template <class Args>
struct Slot {
    const char* name;
    TensorView Args::*view;
    bool output = false;
    bool optional = false;
};

std::vector<Slot<ForwardArgs>> slots(const ForwardArgs&, bool ragged) {
    using A = ForwardArgs;
    std::vector<Slot<A>> list{
        {"q", &A::q}, {"k", &A::k}, {"v", &A::v}, {"o", &A::o, true}, {"lse", &A::lse, true, true}};
    if (ragged) list.insert(list.end(), {{"cu_seqlens_q", &A::cu_seqlens_q}, {"cu_seqlens_kv", &A::cu_seqlens_kv}});
    else list.insert(list.end(), {{"bias", &A::bias}, {"alibi_slopes", &A::alibi_slopes}});
    return list;
}

std::vector<Slot<BackwardArgs>> slots(const BackwardArgs&, bool ragged) {
    using A = BackwardArgs;
    std::vector<Slot<A>> list{{"q", &A::q},
                              {"k", &A::k},
                              {"v", &A::v},
                              {"o", &A::o},
                              {"lse", &A::lse},
                              {"do", &A::d_o},
                              {"dlse", &A::dlse, false, true},
                              {"dq", &A::dq, true, true},
                              {"dk", &A::dk, true, true},
                              {"dv", &A::dv, true, true}};
    if (ragged) list.insert(list.end(), {{"cu_seqlens_q", &A::cu_seqlens_q}, {"cu_seqlens_kv", &A::cu_seqlens_kv}});
    else list.insert(list.end(), {{"bias", &A::bias}, {"alibi_slopes", &A::alibi_slopes}, {"dbias", &A::dbias, true}});
    return list;
}

/// Everything that can be wrong with one tensor by itself. Sizes of 1 are right where they are broadcast.
std::vector<std::pair<std::string, std::function<void(TensorView&)>>> faults(const TensorView& good, bool broadcast) {
    std::vector<std::pair<std::string, std::function<void(TensorView&)>>> list;
    const auto add = [&](const std::string& what, std::function<void(TensorView&)> f) {
        list.emplace_back(what, std::move(f));
    };
    for (const int rank : {good.rank - 1, good.rank + 1, 9, std::numeric_limits<int>::max()}) {
        if (rank > 0 && !(rank == 2 && good.rank == 1)) add("rank", [rank](TensorView& t) { t.rank = rank; });
    }
    for (std::size_t d = 0; d < static_cast<std::size_t>(good.rank); ++d) {
        for (const std::int64_t size :
             {good.shape[d] + 1, good.shape[d] - 1, std::int64_t{0}, std::int64_t{-1}, std::int64_t{1} << 62}) {
            if (!(broadcast && size == 1)) add("shape", [d, size](TensorView& t) { t.shape[d] = size; });
        }
        add("far stride", [d](TensorView& t) { t.strides[d] = std::numeric_limits<std::int64_t>::max() / 2; });
        add("farthest stride", [d](TensorView& t) { t.strides[d] = std::numeric_limits<std::int64_t>::min(); });
    }
    for (const DType dtype : {DType::fp64, DType::fp16, DType::bf16, static_cast<DType>(77)}) {
        add("dtype", [dtype](TensorView& t) { t.dtype = dtype; });
    }
    add("dtype", [&](TensorView& t) { t.dtype = is_floating(t.dtype) ? DType::int32 : DType::fp32; });
    add("null", [](TensorView& t) { t.data = nullptr; });
    add("misaligned", [](TensorView& t) { t.data = static_cast<std::byte*>(t.data) + 1; });
    add("device", [](TensorView& t) { t.device = {DeviceType::cuda, 0}; });
    return list;
}

template <class Args>
std::vector<Spoiled<Args>> spoiled_calls(const Args& good, bool ragged) {
    std::vector<Spoiled<Args>> list;
    for (const Slot<Args>& slot : slots(good, ragged)) {
        const auto view = slot.view;
        const auto add = [&](const std::string& what, std::set<std::string> names, std::function<void(Args&)> f) {
            list.push_back({std::string(slot.name) + " " + what, std::move(names), std::move(f)});
        };
        if (!slot.optional) add("missing", {slot.name}, [view](Args& a) { a.*view = {}; });
        for (const auto& [what, fault] : faults(good.*view, std::string(slot.name) == "bias")) {
            add(what, {slot.name}, [view, change = fault](Args& a) { change(a.*view); });
        }
        if (!slot.output) continue;
        for (std::size_t d = 0; d < static_cast<std::size_t>((good.*view).rank); ++d) {
            add("with stride 0", {slot.name}, [view, d](Args& a) { (a.*view).strides[d] = 0; });
        }
        std::set<std::string> names;  // either of two outputs may be named, and a view may reach into a third
        for (const Slot<Args>& other : slots(good, ragged)) {
            if (other.output) names.insert(other.name);
        }
        for (const Slot<Args>& other : slots(good, ragged)) {
            if (other.view == view) continue;
            const auto other_view = other.view;
            add(std::string("over ") + other.name, names,
                [view, other_view](Args& a) { (a.*view).data = (a.*other_view).data; });
            add(std::string("over the end of ") + other.name, names, [view, other_view](Args& a) {
                const TensorView& o = a.*other_view;
                (a.*view).data = static_cast<std::byte*>(o.data) + (o.size() - 1) * size_of(o.dtype) / 4 * 4;
            });
        }
    }
    return list;
}

template <class Args>
void check_spoiled_calls(const Case& c, const Args& good, Pass pass) {
    const Plan p = plan(c.problem, {.pass = pass, .threads = 1});
    const Workspace workspace(p);
    for (const Spoiled<Args>& call : spoiled_calls(good, c.problem.ragged)) {
        Args args = good;
        call.spoil(args);
        expect_error(c, p, args, workspace, ErrorCode::invalid_argument, call.arguments, call.what);
    }
    EXPECT_NO_THROW(run(p, good, workspace));  // the call is right when it is not spoiled
}

TEST(BadCalls, each_tensor_of_forward_in_turn) {
    for (const Case& c : {dense_case(), ragged_case(), ragged_case(DType::int64)}) {
        check_spoiled_calls(c, c.forward_args(), Pass::forward);
    }
}

TEST(BadCalls, each_tensor_of_backward_in_turn) {
    for (const Case& c : {dense_case(), ragged_case(), ragged_case(DType::int64)}) {
        check_spoiled_calls(c, c.backward_args(), Pass::backward);
    }
}

TEST(BadCalls, tensors_that_the_problem_does_not_have) {
    Problem p = dense_problem();
    p.alibi = p.bias = p.bias_gradient = false;
    const Case c(p);
    const Case full = dense_case();
    const Plan forward_plan = plan(p, {.threads = 1});
    const Plan backward_plan = plan(p, {.pass = Pass::backward, .threads = 1});
    const Workspace workspace(std::max(forward_plan.workspace_bytes, backward_plan.workspace_bytes));
    const auto check = [&](const char* name, auto args, const Plan& how, auto view) {
        args.*view = full.bias;
        expect_error(c, how, args, workspace, ErrorCode::invalid_argument, {name}, std::string("unexpected ") + name);
    };
    check("bias", c.forward_args(), forward_plan, &ForwardArgs::bias);
    check("alibi_slopes", c.forward_args(), forward_plan, &ForwardArgs::alibi_slopes);
    check("cu_seqlens_q", c.forward_args(), forward_plan, &ForwardArgs::cu_seqlens_q);
    check("cu_seqlens_kv", c.forward_args(), forward_plan, &ForwardArgs::cu_seqlens_kv);
    check("dbias", c.backward_args(), backward_plan, &BackwardArgs::dbias);
}

TEST(BugFamilies, alibi_slopes_must_be_fp32_bug_52) {
    for (const DType dtype : {DType::fp16, DType::bf16, DType::fp64}) {
        const Case c = dense_case();
        const Tensor slopes(dtype, {4});
        ForwardArgs args = c.forward_args();
        args.alibi_slopes = slopes;
        const Plan p = plan(c.problem, {.threads = 1});
        expect_error(c, p, args, Workspace(p), ErrorCode::invalid_argument, {"alibi_slopes"}, name_of(dtype));
    }
}

TEST(BadCalls, dbias_must_have_the_shape_of_bias) {
    Problem p = dense_problem();
    const Case c(p, {.bias_shape = {1, 4, 5, 6}});
    const Tensor full(DType::fp32, {2, 4, 5, 6});
    BackwardArgs args = c.backward_args();
    args.dbias = full;
    const Plan how = plan(p, {.pass = Pass::backward, .threads = 1});
    expect_error(c, how, args, Workspace(how), ErrorCode::invalid_argument, {"dbias"}, "dbias of another shape");
}

TEST(BugFamilies, malformed_cu_seqlens_name_the_index_bug_64) {
    struct Malformed {
        std::vector<std::int64_t> cu;  // for 3 sequences, 7 queries in all, 5 at most in one
        const char* index;
    };
    const Malformed rows[] = {{{1, 2, 2, 7}, "index 0"},  {{-1, 2, 2, 7}, "index 0"}, {{0, 3, 2, 7}, "index 2"},
                              {{0, -1, 2, 7}, "index 1"}, {{0, 2, 3, 8}, "index 3"},  {{0, 6, 6, 7}, "index 1"},
                              {{0, 2, 7, 6}, "index 3"},  {{0, 0, 0, 7}, "index 3"}};
    for (const DType dtype : {DType::int32, DType::int64}) {
        const Case c = ragged_case(dtype);
        const Plan p = plan(c.problem, {.threads = 1});
        const Plan backward_plan = plan(c.problem, {.pass = Pass::backward, .threads = 1});
        for (const Malformed& row : rows) {
            const Tensor cu = cu_tensor(row.cu, dtype);
            ForwardArgs args = c.forward_args();
            args.cu_seqlens_q = cu;
            expect_error(c, p, args, Workspace(p), ErrorCode::invalid_argument, {"cu_seqlens_q"}, row.index);
            BackwardArgs back = c.backward_args();
            back.cu_seqlens_q = cu;
            expect_error(c, backward_plan, back, Workspace(backward_plan), ErrorCode::invalid_argument,
                         {"cu_seqlens_q"}, row.index);
            try {
                forward(p, args, Workspace(p));
            } catch (const Error& e) {
                EXPECT_NE(std::string(e.what()).find(row.index), std::string::npos) << e.what();
            }
        }
    }
    const Case c = ragged_case(DType::int64);
    ForwardArgs args = c.forward_args();
    const Tensor cu = cu_tensor({0, 3, std::numeric_limits<std::int64_t>::max(), 10}, DType::int64);
    args.cu_seqlens_kv = cu;
    const Plan p = plan(c.problem, {.threads = 1});
    expect_error(c, p, args, Workspace(p), ErrorCode::invalid_argument, {"cu_seqlens_kv"}, "a huge entry");
}

template <class Args>
void check_workspaces(const Case& c, const Args& args, Pass pass) {
    for (const KernelInfo& kernel : kernels()) {
        if (kernel.pass != pass || kernel.backend == Backend::cuda) continue;
        Plan p;
        try {
            p = plan(c.problem, {.pass = pass, .kernel = kernel.name, .threads = 2});
        } catch (const Error&) {
            continue;  // this kernel does not take the case
        }
        if (p.workspace_bytes == 0) continue;
        const Workspace memory(p.workspace_bytes + 64);
        const auto all = memory.span();
        const auto code = ErrorCode::workspace_too_small;
        expect_error(c, p, args, all.first(p.workspace_bytes - 1), code, {"workspace"},
                     kernel.name + " one byte short");
        expect_error(c, p, args, {}, code, {"workspace"}, kernel.name + " empty");
        expect_error(c, p, args, all.subspan(8), code, {"workspace"}, kernel.name + " misaligned");
        expect_error(c, p, args, std::span<std::byte>(static_cast<std::byte*>(nullptr), all.size()), code,
                     {"workspace"}, kernel.name + " null");
        EXPECT_NO_THROW(run(p, args, all.first(p.workspace_bytes)));
    }
}

/// Each tensor in turn begins with the workspace, ends in it, and lies beside it.
template <class Args>
void check_tensors_in_workspace(const Case& c, const Args& good, Pass pass) {
    for (const Schedule schedule : {Schedule::standard, Schedule::fa1, Schedule::fa2}) {
        const Plan p = plan(c.problem, {.pass = pass, .schedule = schedule, .threads = 2});
        if (p.workspace_bytes == 0) continue;
        constexpr std::size_t kRoom = std::size_t{1} << 16;  // more than any tensor here, on either side
        const Workspace memory(p.workspace_bytes + 2 * kRoom);
        const auto workspace = memory.span().subspan(kRoom, p.workspace_bytes);
        for (const Slot<Args>& slot : slots(good, c.problem.ragged)) {
            const auto bytes = static_cast<std::size_t>((good.*slot.view).size() * size_of((good.*slot.view).dtype));
            ASSERT_LE(bytes, kRoom);
            const auto place_at = [&](std::byte* at) {
                std::memcpy(at, (good.*slot.view).data, bytes);
                Args args = good;
                (args.*slot.view).data = at;
                return args;
            };
            const auto what = p.kernel->name + " " + slot.name;
            for (std::byte* at :
                 {workspace.data(), workspace.data() - bytes + 16, workspace.data() + workspace.size() - 16})
                expect_error(c, p, place_at(at), workspace, ErrorCode::invalid_argument, {"workspace"}, what);
            EXPECT_NO_THROW(run(p, place_at(workspace.data() - bytes), workspace)) << what;
            EXPECT_NO_THROW(run(p, place_at(workspace.data() + workspace.size()), workspace)) << what;
        }
    }
}

TEST(BadCalls, tensor_in_the_workspace) {
    for (const Case& c : {dense_case(), ragged_case(DType::int64)}) {
        check_tensors_in_workspace(c, c.forward_args(), Pass::forward);
        check_tensors_in_workspace(c, c.backward_args(), Pass::backward);
    }
}

TEST(BadCalls, workspace) {
    for (const Case& c : {dense_case(), ragged_case()}) {
        check_workspaces(c, c.forward_args(), Pass::forward);
        check_workspaces(c, c.backward_args(), Pass::backward);
    }
}

TEST(BadCalls, plan) {
    const Case c = dense_case();
    const Plan good = plan(c.problem, {.threads = 1});
    const Plan other = plan(c.problem, {.pass = Pass::backward, .threads = 1});
    const Workspace workspace(std::max(good.workspace_bytes, other.workspace_bytes));
    const auto expect_bad = [&](const Plan& p, const char* argument, const char* what) {
        expect_error(c, p, c.forward_args(), workspace, ErrorCode::invalid_argument, {argument}, what);
    };
    expect_bad(other, "plan", "plan of the other pass");
    expect_error(c, good, c.backward_args(), workspace, ErrorCode::invalid_argument, {"plan"},
                 "plan of the other pass");
    expect_bad(Plan{}, "plan", "default-constructed plan");
    Plan changed = other;
    changed.pass = Pass::forward;
    expect_bad(changed, "plan", "pass changed by hand");
    const KernelInfo copy = *good.kernel;
    changed = good, changed.kernel = &copy;
    expect_bad(changed, "plan", "copy of a kernel's description");
    changed = good, changed.threads = 0;
    expect_bad(changed, "plan", "no threads");
    changed = good, changed.problem.heads_kv = 3;
    expect_bad(changed, "heads_q", "problem broken by hand");
    changed = good, changed.problem.len_kv = 1000;
    expect_bad(changed, "k", "problem that does not fit the tensors");
    changed = good, changed.threads = 1000;
    if (plan(c.problem, {.kernel = good.kernel->name, .threads = 1000}).workspace_bytes > good.workspace_bytes) {
        expect_bad(changed, "plan", "more threads than the workspace was planned for");
    }
}

TEST(BadCalls, workspace_that_no_machine_has) {
    for (const std::size_t bytes :
         {std::numeric_limits<std::size_t>::max(), std::numeric_limits<std::size_t>::max() - 64,
          std::numeric_limits<std::size_t>::max() / 2}) {
        try {
            const Workspace workspace(bytes);
            ADD_FAILURE() << bytes;
        } catch (const Error& e) {
            EXPECT_EQ(e.code(), ErrorCode::out_of_memory);
        }
    }
    const Workspace empty(0);
    EXPECT_EQ(empty.span().size(), 0u);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(Workspace(100).span().data()) % Plan::kWorkspaceAlignment, 0u);
}

}  // namespace
}  // namespace tessera::test::bad_calls_test
