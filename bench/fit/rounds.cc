// SPDX-License-Identifier: Apache-2.0
//
// Measures the spread of a call's time on a shared CPU. All calls of `tessera calibrate` and drawn ones run in one
// process, round after round in a new random order. Each is timed together with the core's rates just before and after.
//
//     host_rounds --seconds 30 [--pin] [--huge] [--no-probes] [--seed N] [--name plain] [DRAWN.jsonl] > rounds.jsonl
//     host_rounds --states > states.jsonl
//     host_rounds --roofs rounds.machine.json
//
// Each line is a Record of one timing with further fields: `name`, `round`; `at`, seconds; `own_ms`, of the calling
// thread; `before`, `after`: the rates of the call's threads in a few microseconds of each kind of work; `cpus`: the
// CPUs of its threads. medians_of_rounds.py makes Records of the medians. --pin gives each thread its own core as long
// as there are any; --huge asks for huge pages. --states samples the rates on each CPU in turn, and on one with its
// sibling busy.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>

#include "core/extent.hpp"
#include "core/numeric.hpp"
#include "host_rates.hpp"
#include "measure/accuracy.hpp"
#include "measure/calibrate.hpp"
#include "measure/calibrate_kernels.hpp"
#include "measure/cold_cache.hpp"
#include "measure/host.hpp"
#include "measure/machine_file.hpp"
#include "measure/timer.hpp"
#include "parallel.hpp"
#include "tessera/attention.hpp"
#include "tessera/error.hpp"

namespace tessera::fit {
namespace {

using measure::Timer;

struct Asked {
    double seconds = 30;
    unsigned seed = 1;
    bool pin = false, huge = false, states = false, probes = true;
    std::string name = "plain", roofs;
    std::vector<std::string> paths;
};

/// One call: a probe of calibrate, or a drawn Record.
struct Case {
    Problem problem;
    Pass pass;
    Schedule schedule;
    int threads;
    bool drawn;
    std::vector<std::pair<std::int64_t, std::int64_t>> sequences;
};

/// Memory that lives as long as the process; every page is touched.
class Arena {
 public:
    Arena(std::size_t bytes, bool huge) : bytes_(bytes) {
        void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        if (huge) madvise(memory, bytes, MADV_HUGEPAGE);
        begin_ = static_cast<std::byte*>(memory);
        std::memset(begin_, 0, bytes);
    }
    std::byte* at(std::size_t offset) const { return begin_ + offset; }
    std::size_t size() const { return bytes_; }

 private:
    std::byte* begin_;
    std::size_t bytes_;
};

/// Allocates tensors one after another from an offset in an arena, each at a page boundary.
class Places {
 public:
    Places(const Arena& arena, std::size_t first) : arena_(arena), at_(first) {}
    std::byte* take(std::size_t bytes) {
        constexpr std::size_t kPage = 4096, kLine = 64;
        const std::size_t from = (at_ + kPage - 1) / kPage * kPage + kLine;
        at_ = from + bytes;
        if (at_ > arena_.size()) throw Error(ErrorCode::out_of_memory, "arena", "expected smaller tensors");
        return arena_.at(from);
    }

 private:
    const Arena& arena_;
    std::size_t at_;
};

std::vector<Case> cases_of(const Asked& asked, int cores) {
    std::vector<Case> cases;
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
        if (!asked.probes) break;
        for (const Pass pass : {Pass::forward, Pass::backward}) {
            for (const measure::KernelProbe& probe : measure::kernel_probes(Schedule::fa2, pass, cores))
                cases.push_back({measure::problem_of(probe, dtype), pass, Schedule::fa2, probe.threads, false, {}});
        }
    }
    for (const std::string& path : asked.paths) {
        for (const measure::Record& r : measure::read_records(path))
            cases.push_back({measure::problem_of(r), r.pass == "backward" ? Pass::backward : Pass::forward,
                             Schedule::fa2, std::min(r.threads, cores), true, measure::sequences_of(r)});
    }
    return cases;
}

class Rounds {
 public:
    explicit Rounds(const Asked& asked)
        : asked_(asked),
          inputs_(kInputBytes, asked.huge),
          outputs_(kOutputBytes, asked.huge),
          cache_(host_.cache_bytes),
          cases_(cases_of(asked, host_.cores)),
          random_(asked.seed) {
        if (asked.pin) {
            const std::vector<int> order = cores_in_turn(host_.cores);
            on_all(host_.cores, [&](int worker) { run_on(order[static_cast<std::size_t>(worker)]); });
        }
        std::uint32_t state = 1;
        for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
            std::byte* begin = inputs_.at(part_of(dtype) * kPartBytes);
            for (std::size_t i = 0; i < kPartBytes / size_of(dtype); ++i) {
                state = state * 1664525U + 1013904223U;
                if (i < kPattern) store_from_double(begin + i * size_of(dtype), dtype, state * 0x1p-31 - 1);
                else break;
            }
            const std::size_t known = kPattern * size_of(dtype);
            for (std::size_t done = known; done < kPartBytes; done += known)
                std::memcpy(begin + done, begin, std::min(known, kPartBytes - done));
        }
    }

    void run() {
        std::vector<std::size_t> order(cases_.size());
        for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
        for (int round = 0; timer_.seconds() < asked_.seconds; ++round) {
            std::shuffle(order.begin(), order.end(), random_);
            for (const std::size_t i : order) {
                if (timer_.seconds() >= asked_.seconds) return;
                time(cases_[i], round);
            }
        }
    }

 private:
    static constexpr std::size_t kPartBytes = std::size_t{448} << 20;
    static constexpr std::size_t kInputBytes = 3 * kPartBytes;
    static constexpr std::size_t kOutputBytes = std::size_t{512} << 20;
    static constexpr std::size_t kPattern = 8191 * 4;

    static std::size_t part_of(DType dtype) { return dtype == DType::fp32 ? 0 : dtype == DType::bf16 ? 1 : 2; }

    /// The tensors of a call, at random offsets in the arenas.
    struct Tensors {
        ForwardArgs forward;
        BackwardArgs backward;
        std::vector<TensorView> views;
        std::vector<std::int32_t> of_q{0}, of_kv{0};
    };

    void place(const Case& c, Tensors& t) {
        const Problem& p = c.problem;
        constexpr std::size_t kSlack = std::size_t{16} << 20;
        std::uniform_int_distribution<std::size_t> somewhere(0, kSlack);
        Places in(inputs_, part_of(p.dtype) * kPartBytes + somewhere(random_)), out(outputs_, somewhere(random_));
        const auto tensor = [&](Places& places, bool queries, std::int64_t heads, std::int64_t dim) {
            const std::int64_t rows = queries ? p.rows_q() : p.rows_kv();
            std::byte* at = places.take(static_cast<std::size_t>(rows * heads * dim) * size_of(p.dtype));
            const TensorView view = p.ragged
                                        ? dense_view(at, p.dtype, {rows, heads, dim})
                                        : dense_view(at, p.dtype, {p.batch, queries ? p.len_q : p.len_kv, heads, dim});
            t.views.push_back(view);
            return view;
        };
        ForwardArgs& f = t.forward;
        f.q = tensor(in, true, p.heads_q, p.head_dim), f.k = tensor(in, false, p.heads_kv, p.head_dim);
        f.v = tensor(in, false, p.heads_kv, p.head_dim_v), f.o = tensor(out, true, p.heads_q, p.head_dim_v);
        std::byte* lse = out.take(static_cast<std::size_t>(p.rows_q() * p.heads_q) * 4);
        f.lse = p.ragged ? dense_view(lse, DType::fp32, {p.heads_q, p.rows_q()})
                         : dense_view(lse, DType::fp32, {p.batch, p.heads_q, p.len_q});
        t.views.push_back(f.lse);
        if (p.ragged) {
            for (const auto& [q, kv] : c.sequences) {
                t.of_q.push_back(t.of_q.back() + static_cast<std::int32_t>(q));
                t.of_kv.push_back(t.of_kv.back() + static_cast<std::int32_t>(kv));
            }
            f.cu_seqlens_q = dense_view(t.of_q.data(), DType::int32, {p.batch + 1});
            f.cu_seqlens_kv = dense_view(t.of_kv.data(), DType::int32, {p.batch + 1});
        }
        if (c.pass == Pass::forward) return;
        t.backward = {.q = f.q,
                      .k = f.k,
                      .v = f.v,
                      .cu_seqlens_q = f.cu_seqlens_q,
                      .cu_seqlens_kv = f.cu_seqlens_kv,
                      .o = f.o,
                      .lse = f.lse,
                      .d_o = tensor(in, true, p.heads_q, p.head_dim_v),
                      .dq = tensor(out, true, p.heads_q, p.head_dim),
                      .dk = tensor(out, false, p.heads_kv, p.head_dim),
                      .dv = tensor(out, false, p.heads_kv, p.head_dim_v)};
    }

    void time(const Case& c, int round) {
        Tensors t;
        place(c, t);
        const auto plan_of = [&](Pass pass, int threads) {
            return plan(c.problem, {.pass = pass, .backend = Backend::cpu, .schedule = c.schedule, .threads = threads});
        };
        const bool backwards = c.pass == Pass::backward;
        const Plan timed = plan_of(c.pass, c.threads);
        const Workspace memory(timed);
        if (backwards) {
            const Plan before = plan_of(Pass::forward, host_.cores);
            forward(before, t.forward, Workspace(before));
        }
        const auto call = [&] {
            if (backwards) backward(timed, t.backward, memory);
            else forward(timed, t.forward, memory);
        };
        call();
        const std::vector<Rates> first = rates_of(c.threads);
        constexpr int kRepeat = 2;
        std::vector<double> ms, own_ms;
        for (int i = 0; i < kRepeat; ++i) {
            cache_.evict(t.views);
            const Timer timer;
            const measure::ThreadTimer own;
            call();
            ms.push_back(timer.milliseconds()), own_ms.push_back(own.milliseconds());
        }
        const std::vector<Rates> last = rates_of(c.threads);
        measure::Record record = measure::record_of(timed, measure::summarize(ms), 0);
        record.device = measure::text_of(host_);
        record.date = measure::utc_date();
        for (const auto& [q, kv] : c.sequences) record.lens_q.push_back(q), record.lens_kv.push_back(kv);
        Json json = measure::to_json(record);
        json["name"] = asked_.name, json["drawn"] = c.drawn, json["round"] = round;
        json["at"] = std::round(timer_.seconds() * 1e3) / 1e3;
        json["all_ms"] = ms, json["own_ms"] = own_ms;
        json["before"] = json_of(first), json["after"] = json_of(last);
        std::cout << json.dump() << '\n';
    }

    Asked asked_;
    measure::Host host_ = measure::describe_host();
    Timer timer_;
    Arena inputs_, outputs_;
    measure::ColdCache cache_;
    std::vector<Case> cases_;
    std::mt19937 random_;
};

int run(int argc, char** argv) {
    Asked asked;
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        if (argument == "--seconds" && i + 1 < argc) asked.seconds = std::stod(argv[++i]);
        else if (argument == "--seed" && i + 1 < argc) asked.seed = static_cast<unsigned>(std::stoul(argv[++i]));
        else if (argument == "--name" && i + 1 < argc) asked.name = argv[++i];
        else if (argument == "--roofs" && i + 1 < argc) asked.roofs = argv[++i];
        else if (argument == "--pin") asked.pin = true;
        else if (argument == "--huge") asked.huge = true;
        else if (argument == "--no-probes") asked.probes = false;
        else if (argument == "--states") asked.states = true;
        else asked.paths.push_back(argument);
    }
    if (!asked.roofs.empty()) measure::write_machine(asked.roofs, measure::measure_roofs(0, [](const std::string&) {}));
    else if (asked.states) write_states(std::cout);
    else Rounds(asked).run();
    return 0;
}

}  // namespace
}  // namespace tessera::fit

int main(int argc, char** argv) {
    try {
        return tessera::fit::run(argc, argv);
    } catch (const std::exception& error) {
        std::cerr << "host_rounds: " << error.what() << '\n';
        return 1;
    }
}
