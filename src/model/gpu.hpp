// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "model/family.hpp"
#include "model/parts.hpp"
#include "model/stage.hpp"

namespace tessera::model {

/// Clocks of one inner tile per unit, without interference of the others.
struct TileCycles {
    double gemms = 0;
    double exps = 0;
    double shared = 0;
    double adds = 0;   ///< additions to dQ in the L2
    double loads = 0;  ///< loads from the L2, a lower bound of the tile
    double draws = 0;  ///< random numbers of dropout
    double mask = 0;   ///< added for a partial tile
    double step = 0;   ///< total: GEMMs and the exposed part of the others, never less than loads
};

/// Predicts with the constants of `family`, which need not be in the table: bench/fit tries others.
void predict_family(const Question& question, const Family& family, Prediction& prediction);

/// The family whose constants a prediction uses.
const Family& family_of(const Question& question);

/// The Problem as a family's kernels see it: the query heads of a group may be rows of one head (PackGQA).
/// A call that writes the residual of O has none.
Problem as_packed(const Problem& problem, const Family& family, bool o_residual = false);

/// The workspace of cuda.decode.forward: O, m and l of every split that a row may have (cuda/decode/kernels.cc).
std::int64_t decode_workspace(const Problem& problem);

struct MatrixPass;  // gpu_passes.cc

/// Formats clocks for a worksheet: with five digits if they are few, so that results derived from them are
/// reproducible.
std::string clocks_text(double clocks);

/// The clocks of a kernel's thread blocks on the multiprocessors.
struct BlockClocks {
    double share;  ///< clocks of a multiprocessor if all were equally busy
    double idle;   ///< clocks beyond that until the last block is done
    double cut;    ///< partial tiles, which run the mask code
};

/// The state of one prediction for a GPU.
struct Gpu {
    const Question& q;
    const Family& family;
    const Constants& c;
    Prediction& out;
    Account account;
    Tile tile;
    double d, dv, e;  ///< head_dims as computed, bytes of an element
    double m, n;      ///< queries and keys of a tile
    double sms;
    schedule::Workload workload;
    Units units;
    TileCycles t;

    Gpu(const Question& question, const Family& f, Prediction& prediction);

    /// Does the kernel compute fp32 as three bf16 parts?
    bool in_parts() const;
    double parts_slowdown() const;
    /// FLOP/clk of a multiprocessor that the kernel's GEMMs reach.
    double gemm_rate() const;
    double flop_per_pair() const;
    /// Queries of a tile that are computed: fa3's tiles of three warpgroups skip those without rows.
    double rows_at_work() const;
    bool pads_head_dim() const { return static_cast<double>(q.problem.head_dim) < d; }
    bool one_warpgroup() const { return m < static_cast<double>(tile.block_q); }
    /// Is each key read by a single tile, because a head has no more rows than that?
    bool streams() const { return q.pass == Pass::forward && q.problem.len_q <= tile.block_q; }
    /// Constants::exp_exposed, plus uneven_exposed and padded_exposed as they apply.
    double exp_exposed() const;
    /// Is this fa3's backward with dV and dK split between warpgroups? S and dP are then computed twice, the second
    /// time for dQ.
    bool splits_dv_dk() const;
    /// Bytes through shared memory for one inner tile: loaded data is written once and read by each reader.
    double shared_bytes() const;
    /// Bytes a millisecond.
    double read_rate() const { return q.machine.dram_gbs * q.machine.dram_read_share * 1e6; }
    double copy_rate() const { return q.machine.dram_gbs * q.machine.dram_copy_share * 1e6; }

    /// Sets the clock for `cycles` in which `tiles` are computed; returns clocks a millisecond.
    double set_clock(double tiles, double cycles);
    /// Adds the parts of the tiles' time that GEMMs, exponentials, shared memory and adds leave exposed.
    void add_tile_parts(double tiles, double clocks_per_ms);
    void add_launches(int launches);

    /// The number of kernel launches: one more if keys are split.
    int launches() const { return launches_; }

    /// cuda.decode.forward; `asked` has the heads of a group apart.
    void decode(const Question& asked);
    void fused();     ///< fa2, fa3, and the backward of fa1
    void fa1();       ///< forward
    void standard();  ///< both passes

 private:
    int launches_ = 0;
    std::int64_t splits_ = 1;  ///< splits of the keys of a unit

    TileCycles tile_cycles() const;
    void note_tile();
    int split_keys();
    bool one_wave() const { return static_cast<double>(units.count) <= sms; }
    bool masks_all() const;
    bool adds_dq_in_order() const;
    bool writes_dq() const;
    std::int64_t heads_longest_first() const;
    double clocks_of_draws(double elements) const;
    Stage stage() const;
    Stage stage_of_fa1() const;
    double last_done(const Stage& stage, const Units& work, double share) const;
    std::string last_done_text(const Stage& stage, const Units& work, double share, double last) const;
    BlockClocks schedule_blocks(const Stage& stage, const Units& work);
    void add_dq_kernel();
    void add_gradient_passes();
    void add_head_splits(std::int64_t splits);
    int add_group_sums();
    void add_empty_blocks(std::int64_t splits);
    void add_residual(double clocks_per_ms);
    void add_pages(double main_ms);
    void add_sequences(double clocks_per_ms);
    bool is_ragged_flash3() const;
    bool has_small_tiles() const;
    void add_sequences_of_flash3(double clocks_per_ms);
    void add_rows(double elements);
    void add_pass(const MatrixPass& pass, double elements, double gemm_ms);
    void count_gradient_matrices();
    void note_dram();
    void add_stream(double main_ms);
    void add_combine();
    bool begins_cold() const;
    void add_cold_start();
};

/// The number of splits of a group's query heads in tessera's backward, each with its own thread blocks.
std::int64_t head_splits_of(const schedule::Workload& workload);

}  // namespace tessera::model
