// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include "emu.hpp"
namespace emu_memory {
alignas(128) char memory[240000];
}
#include "cuda/gradient/split_loop.cuh"
using namespace tessera;
using namespace tessera::cuda;
using namespace tessera::cuda::gradient;
struct Case {
    const char* name;
    int dim, dim_v, len_q, len_kv, heads_q, heads_kv;
    Mask mask;
    bool vectors = true;
    double level = 1;
    int hidden = 0;
    bool no_dq = false;
    int batch = 1;
    bool ragged = false;
};
template <class T>
T make(double x) {
    return ptx::rounded<T>(float(x));
}
template <class T, Config kConfig, bool kSplit>
int run(const Case& c, int policy) {
    const int B = c.ragged ? 2 : c.batch, M = c.ragged ? 1 : B, D = c.dim, DV = c.dim_v, NQ = c.len_q, NK = c.len_kv,
              H = c.heads_q, HK = c.heads_kv, G = H / HK;
    std::mt19937 rng(5 + policy);
    std::normal_distribution<double> normal;
    const int pad = c.vectors ? 0 : 1;  // strides that are no multiples of 16 bytes
    const auto rows = [&](std::vector<T>& data, int n, int h, int d, bool fill) {
        data.assign(std::size_t(M) * n * h * (d + pad) + 8, make<T>(fill ? 0 : NAN));
        if (fill)
            for (auto& x : data) x = make<T>(c.level * normal(rng));
        Rows r;
        r.data = reinterpret_cast<char*>(data.data());
        r.batch = c.ragged ? 0 : std::int64_t(n) * h * (d + pad);
        r.row = h * (d + pad);
        r.head = d + pad;
        r.column = 1;
        return r;
    };
    std::vector<T> q, k, v, d_o, dq, dk, dv;
    Launch l;
    ForwardParams& p = l.params.forward;
    p.q = rows(q, NQ, H, D, true);
    p.k = rows(k, NK, HK, D, true);
    p.v = rows(v, NK, HK, DV, true);
    l.params.d_o = rows(d_o, NQ, H, DV, true);
    l.params.dq = rows(dq, NQ, H, D, false);
    l.params.dk = rows(dk, NK, HK, D, false);
    l.params.dv = rows(dv, NK, HK, DV, false);
    if (c.no_dq) l.params.dq.data = nullptr;
    p.batch = B;
    p.len_q = NQ;
    p.len_kv = NK;
    p.heads_q = H;
    p.heads_kv = HK;
    p.group = G;
    p.head_dim = D;
    p.head_dim_v = DV;
    p.mask = c.mask;
    p.scale = float(1 / std::sqrt(double(D)));
    // Members of a ragged batch: a third and two thirds of the queries, half of the keys each.
    const int cu_q[3] = {0, NQ / 3, NQ}, cu_kv[3] = {0, NK / 2, NK};
    if (c.ragged) {
        p.cu_seqlens_q = cu_q;
        p.cu_seqlens_kv = cu_kv;
        p.total_q = NQ;
        p.total_kv = NK;
    }
    const auto first_q = [&](int b) { return c.ragged ? cu_q[b] : b * NQ; };
    const auto first_kv = [&](int b) { return c.ragged ? cu_kv[b] : b * NK; };
    const auto len_q = [&](int b) { return c.ragged ? cu_q[b + 1] - cu_q[b] : NQ; };
    const auto len_kv = [&](int b) { return c.ragged ? cu_kv[b + 1] - cu_kv[b] : NK; };
    // Hidden NaN: the last key (of K and V) and the first query (of Q and dO), where a mask hides them from most.
    if (c.hidden & 1) {
        k[(NK - 1) * HK * (D + pad) + 3] = make<T>(NAN);
    }
    if (c.hidden & 2) {
        v[(NK - 1) * HK * (DV + pad) + 1] = make<T>(INFINITY);
    }
    if (c.hidden & 4) {
        q[5] = make<T>(NAN);
        d_o[7] = make<T>(INFINITY);
    }
    const auto at = [&](const std::vector<T>& x, const Rows& r, int b, int row, int head, int i) {
        const bool of_keys = &r == &p.k || &r == &p.v;
        const int first = c.ragged ? of_keys ? first_kv(b) : first_q(b) : 0;
        return double(ptx::number(x[b * r.batch + (first + row) * r.row + head * r.head + i]));
    };
    // reference
    std::vector<double> rq(std::size_t(M) * NQ * H * D), rk(std::size_t(M) * NK * HK * D),
        rv(std::size_t(M) * NK * HK * DV);
    Counts* counts = nullptr;
    (void)counts;
    l.q_tiles = (NQ + 63) / 64;
    l.key_blocks = (NK + kConfig.block_kv() - 1) / kConfig.block_kv();
    l.tiles_of_head = c.ragged ? NQ / 64 + 1 + B : B * l.q_tiles;
    l.parts = !c.mask.trivial() && HK * l.key_blocks >= kFewestInParts ? kParts : 1;
    const auto first_tile = [&](int b) { return c.ragged ? cu_q[b] / 64 + b : b * l.q_tiles; };
    std::vector<RowTile> tiles(H * l.tiles_of_head);
    for (auto& t : tiles)
        for (int i = 0; i < 64; ++i) {
            t.offset[i] = INFINITY;
            t.delta[i] = 0;
            t.norm[i] = 0;
            t.max[i] = 0;
        }
    for (int b = 0; b < B; ++b)
        for (int h = 0; h < H; ++h)
            for (int i = 0; i < len_q(b); ++i) {
                const Band band = c.mask.bind(len_q(b), len_kv(b));
                std::vector<double> s(NK), dp(NK);
                double m = -INFINITY, sum = 0, delta = 0;
                const Range see = band.row(i);
                if (see.empty()) continue;
                for (int j = int(see.begin); j < see.end; ++j) {
                    double x = 0;
                    for (int e = 0; e < D; ++e) x += at(q, p.q, b, i, h, e) * at(k, p.k, b, j, h / G, e);
                    s[j] = x * p.scale;
                    m = std::fmax(m, s[j]);
                    double y = 0;
                    for (int e = 0; e < DV; ++e) y += at(d_o, l.params.d_o, b, i, h, e) * at(v, p.v, b, j, h / G, e);
                    dp[j] = y;
                }
                for (int j = int(see.begin); j < see.end; ++j) {
                    s[j] = std::exp(s[j] - m);
                    sum += s[j];
                }
                for (int j = int(see.begin); j < see.end; ++j) {
                    s[j] /= sum;
                    delta += s[j] * dp[j];
                }
                RowTile& t = tiles[h * l.tiles_of_head + first_tile(b) + i / 64];
                const double lse = m + std::log(sum);
                t.offset[i % 64] = float(lse * kLog2E);
                t.delta[i % 64] = float(delta);
                if (std::fabs(lse) > 256) {
                    t.max[i % 64] = float(m);
                    t.norm[i % 64] = float(1 / sum);
                }
                for (int j = int(see.begin); j < see.end; ++j) {
                    const double ds = s[j] * (dp[j] - delta);
                    for (int e = 0; e < DV; ++e)
                        rv[((first_kv(b) + j) * HK + h / G) * DV + e] += s[j] * at(d_o, l.params.d_o, b, i, h, e);
                    for (int e = 0; e < D; ++e) {
                        rq[((first_q(b) + i) * H + h) * D + e] += p.scale * ds * at(k, p.k, b, j, h / G, e);
                        rk[((first_kv(b) + j) * HK + h / G) * D + e] += p.scale * ds * at(q, p.q, b, i, h, e);
                    }
                }
            }
    using Dq = DqTile<kConfig.head_dim>;
    std::vector<float> sums(2 * l.all_tiles() * Dq::kFloats, NAN);
    std::vector<int> done(2 * l.all_tiles(), 0);
    Progress progress;
    std::vector<float> limits(B * H, 64.0F);
    l.rows = tiles.data();
    l.dq = sums.data();
    l.progress = &progress;
    l.done = done.data();
    l.limits = limits.data();
    l.vector_q = l.vector_k = l.vector_v = l.vector_do = l.vector_dq = l.vector_dk = l.vector_dv =
        c.vectors && D % 8 == 0 && DV % 8 == 0;
    emu::policy = policy;
    emu::random_.seed(policy);
    emu::shared_base = emu_memory::memory;
    for (std::int64_t block = 0; block < l.thread_blocks(); ++block) {
        std::memset(emu_memory::memory, 0xFF, sizeof emu_memory::memory);
        alignas(KeyWork) static char work_memory[sizeof(KeyWork)];
        take_ticket(work_memory, l, kConfig.block_kv(), kSplit ? kConfig.query_tiles : 1);
        KeyWork& work = *reinterpret_cast<KeyWork*>(work_memory);
        if (!work.exists()) continue;
        emu::run(256, [&] {
            const KeyThread<T, kConfig> thread{{l, work, emu_memory::memory}, work};
            if constexpr (kSplit) SplitLoop<T, kConfig>{{{thread}}}.run_block(work);
            else KeyLoop<T, kConfig>{thread}.run_block(work);
        });
    }
    // dQ out of the workspace
    std::vector<double> gq(rq.size());
    for (int b = 0; b < B; ++b)
        for (int h = 0; h < H; ++h)
            for (int t = 0; t < l.q_tiles; ++t)
                for (int thread = 0; thread < 256; ++thread)
                    for (int m = 0; m < Dq::kRowTiles; ++m)
                        for (int n = 0; n < Dq::kColumnTiles; ++n)
                            for (int e = 0; e < 4; ++e) {
                                const std::int64_t index = h * l.tiles_of_head + first_tile(b) + t;
                                double x = 0;
                                for (int sweep = 0; sweep < 2; ++sweep)
                                    if (done[sweep * l.all_tiles() + index])
                                        x += sums[(sweep * l.all_tiles() + index) * Dq::kFloats +
                                                  Dq::offset(m, n, thread) + e];
                                const int lane = thread % 32,
                                          row = t * 64 + Dq::first_row(thread / 32) + 16 * m + lane / 4 + e / 2 * 8,
                                          col = (Dq::first_chunk(thread / 32) + n) * 8 + lane % 4 * 2 + e % 2;
                                if (row < len_q(b) && col < D)
                                    gq[((std::int64_t(first_q(b)) + row) * H + h) * D + col] =
                                        x * p.scale / gradient_unit<T>(l, b, h);
                            }
    int bad = 0;
    const auto compare = [&](const char* what, const std::vector<double>& right, auto get) {
        double e2 = 0, r2 = 0, worst = 0;
        int special = 0;
        for (std::size_t i = 0; i < right.size(); ++i) {
            const double got = get(i);
            if (!std::isfinite(right[i]) || !std::isfinite(got)) {
                if (std::isfinite(right[i]) != std::isfinite(got)) ++special;
                continue;
            }
            e2 += (got - right[i]) * (got - right[i]);
            r2 += right[i] * right[i];
            worst = std::fmax(worst, std::fabs(got - right[i]));
        }
        const double error = std::sqrt(e2 / (r2 + 1e-300));
        const bool ok = special == 0 && (error < 6e-3 || r2 < 1e-20);
        if (!ok) {
            bad = 1;
            std::printf(
                "   %s: %s error %.2e of %.2e, worst %.2e, not finite where it should be or the other way round: %d\n",
                c.name, what, error, std::sqrt(r2), worst, special);
        }
        return error;
    };
    double eq = 0;
    if (!c.no_dq) eq = compare("dQ", rq, [&](std::size_t i) { return gq[i]; });
    const double ek = compare("dK", rk, [&](std::size_t i) {
        const int e = i % D;
        const std::size_t r = i / D;
        return double(ptx::number(
            dk[(r / HK) / NK * l.params.dk.batch + (r / HK) % NK * l.params.dk.row + (r % HK) * l.params.dk.head + e]));
    });
    const double ev = compare("dV", rv, [&](std::size_t i) {
        const int e = i % DV;
        const std::size_t r = i / DV;
        return double(ptx::number(
            dv[(r / HK) / NK * l.params.dv.batch + (r / HK) % NK * l.params.dv.row + (r % HK) * l.params.dv.head + e]));
    });
    std::printf("%s %s, %s, policy %d: dQ %.1e dK %.1e dV %.1e\n", bad ? "BAD" : "ok ", kSplit ? "split" : "pairs",
                c.name, policy, eq, ek, ev);
    std::fflush(stdout);
    return bad;
}
int main(int argc, char** argv) {
    const Mask full{};
    Mask causal;
    causal.causal = Causal::bottom_right;
    Mask top;
    top.causal = Causal::top_left;
    Mask window;
    window.window_left = 70;
    window.window_right = 30;
    constexpr Config k64{.head_dim = 64, .key_tiles = 2, .general = false, .stages = 3, .query_tiles = 2},
        k128{.head_dim = 128, .key_tiles = 2, .general = false, .stages = 3},
        k256{.head_dim = 256, .key_tiles = 1, .general = false};
    using T = __nv_bfloat16;
    int bad = 0;
    const bool quick = argc > 1;
    for (const int policy : quick ? std::vector<int>{2} : std::vector<int>{2, 0, 3, 1}) {
        bad += run<T, k64, true>({"64 full", 64, 64, 320, 512, 1, 1, full}, policy);
        bad += run<T, k128, true>({"128 full", 128, 128, 256, 256, 1, 1, full}, policy);
        bad += run<T, k256, true>({"256 causal", 256, 256, 192, 128, 1, 1, causal}, policy);
        bad += run<T, k64, true>({"64 causal, odd", 64, 64, 333, 461, 2, 1, causal}, policy);
        bad += run<T, k128, true>({"128 causal, odd", 128, 128, 333, 301, 2, 1, causal}, policy);
        bad += run<T, k128, true>({"128 square", 128, 128, 700, 700, 2, 1, causal}, policy);
        if (quick) continue;
        bad += run<T, k64, true>({"64 square", 64, 64, 1100, 1100, 1, 1, causal}, policy);
        bad += run<T, k256, true>({"256 square", 256, 256, 330, 330, 1, 1, top}, policy);
        bad += run<T, k64, true>({"64 ragged", 64, 64, 300, 600, 2, 1, causal, true, 1, 0, false, 2, true}, policy);
        bad += run<T, k128, true>({"128 ragged", 128, 128, 250, 270, 2, 2, top, true, 1, 0, false, 2, true}, policy);
        bad += run<T, k64, true>({"64 window", 64, 64, 500, 500, 1, 1, window}, policy);
        bad += run<T, k128, true>({"128 window", 128, 128, 400, 300, 1, 1, window}, policy);
        bad += run<T, k64, true>({"40, 24, top left, two members", 40, 24, 100, 300, 2, 2, top, true, 1, 0, false, 2},
                                 policy);
        bad += run<T, k128, true>({"72, strides", 72, 80, 130, 140, 2, 1, causal, false}, policy);
        bad += run<T, k128, true>({"128 large scores", 128, 128, 130, 140, 1, 1, causal, true, 9}, policy);
        bad += run<T, k64, true>({"64 large scores", 64, 64, 130, 300, 1, 1, full, true, 9}, policy);
        bad += run<T, k64, true>({"64 hidden K V", 64, 64, 300, 300, 1, 1, causal, true, 1, 3}, policy);
        bad += run<T, k128, true>({"128 hidden Q dO", 128, 128, 200, 300, 1, 1, top, true, 1, 4}, policy);
        bad += run<T, k64, true>({"64 hidden all", 64, 64, 200, 300, 1, 1, causal, true, 1, 7}, policy);
        bad += run<T, k256, true>({"256 hidden K V", 256, 256, 100, 100, 1, 1, causal, true, 1, 3}, policy);
        bad += run<T, k64, true>({"64 no dQ, one query", 64, 64, 1, 300, 1, 1, causal, true, 1, 0, true}, policy);
        bad += run<T, k128, true>({"128 more queries than keys", 128, 128, 300, 40, 1, 1, causal}, policy);
        bad += run<T, k64, false>({"64 causal, odd", 64, 64, 333, 461, 2, 1, causal}, policy);
        bad += run<__half, Config{.head_dim = 64, .key_tiles = 4, .general = false, .stages = 3}, false>(
            {"64 fp16 hidden", 64, 64, 200, 300, 1, 1, causal, true, 1, 7}, policy);
        bad += run<__half, k128, false>({"128 fp16 causal", 128, 128, 200, 200, 1, 1, causal}, policy);
    }
    std::printf("%d bad\n", bad);
    return bad != 0;
}
