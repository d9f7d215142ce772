// SPDX-License-Identifier: Apache-2.0
//
// Tables that profilers export or print, and bare names of kernels.
#include <gtest/gtest.h>

#include "diagnose/diagnosis.hpp"
#include "tessera/error.hpp"
#include "traces.hpp"

namespace tessera::diagnose::tables_test {
namespace {

Diagnosis diagnosis_of(const std::string& text) {
    Trace trace = read_trace_bytes(text, "t");
    return diagnose(trace);
}

TEST(Tables, of_nsight_systems_are_read) {
    const Diagnosis d = diagnosis_of(
        "Processing [run.sqlite] with [cuda_gpu_kern_sum.py]...\n\n"
        "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name\n"
        "60.0,6000,3,2000.0,2000.0,1,2,0.0,\"" +
        kFlashForward + "\"\n40.0,4000,2,2000.0,2000.0,1,2,0.0," + kGemm + "\n");
    EXPECT_EQ(d.tool, "Nsight Systems");
    EXPECT_EQ(d.runs, 5) << "the line above the table is no kernel";
    EXPECT_DOUBLE_EQ(d.gpu_us, 10);
    ASSERT_EQ(d.kinds.size(), 1U);
    EXPECT_EQ(d.kinds[0].calls, 3);
    EXPECT_DOUBLE_EQ(d.kinds[0].us, 6);
}

TEST(Tables, of_nsight_compute_are_read) {
    const Diagnosis d = diagnosis_of(
        "==PROF== Connected to process 1\n"
        "\"ID\",\"Process Name\",\"Kernel Name\",\"CC\",\"Metric Name\",\"Metric Unit\",\"Metric Value\"\n"
        "\"0\",\"python\",\"" +
        kFlashForward +
        "\",\"9.0\",\"Duration\",\"us\",\"1,234.5\"\n"
        "\"0\",\"python\",\"" +
        kFlashForward +
        "\",\"9.0\",\"Registers\",\"register\",\"255\"\n"
        "\"1\",\"python\",\"" +
        kGemm + "\",\"9.0\",\"Duration\",\"ms\",\"1\"\n");
    EXPECT_EQ(d.tool, "Nsight Compute");
    EXPECT_DOUBLE_EQ(d.gpu_us, 2234.5);
    EXPECT_EQ(d.gpus.at(0).capability, 90);
    ASSERT_EQ(d.kinds.size(), 1U);
    EXPECT_DOUBLE_EQ(d.kinds[0].us, 1234.5);
}

/// nsys stats without --format csv, as people paste it.
TEST(Tables, of_nsight_systems_are_read_as_they_are_printed) {
    const Diagnosis d = diagnosis_of(
        "Processing [run.sqlite] with [cuda_gpu_kern_sum.py]... \n\n"
        " ** CUDA GPU Kernel Summary (cuda_gpu_kern_sum):\n\n"
        " Time (%)  Total Time (ns)  Instances   Avg (ns)                                      Name\n"
        " --------  ---------------  ---------  -----------  "
        "----------------------------------------------------------\n"
        "     90.0    2,250,706,856    199,200     11,298.7  void "
        "flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<"
        "(int)128, (\xE2\x80\xA6\n"
        "     10.0      250,000,000         20     11,298.7  void marlin::Marlin<(long)1125899906910725, "
        "(long)1\xE2\x80\xA6\n"
        "\nProcessing [run.sqlite] with [cuda_gpu_mem_time_sum.py]... \n");
    EXPECT_EQ(d.tool, "Nsight Systems");
    EXPECT_EQ(d.runs, 199'220);
    EXPECT_DOUBLE_EQ(d.gpu_us, 2'500'706.856);
    ASSERT_EQ(d.kinds.size(), 1U);
    EXPECT_EQ(d.kinds[0].calls, 199'200);
    EXPECT_EQ(d.kinds[0].reading.head_dim, 128);
    EXPECT_TRUE(d.unknown.empty()) << d.unknown.front().kernel.name;
}

/// print(profile.key_averages().table()): its operators repeat the time of their kernels.
TEST(Tables, of_pytorchs_profiler_are_read_as_it_prints_them) {
    const auto line = [](const char* name, const char* cpu, const char* cpu_total, const char* cuda,
                         const char* calls) {
        return fmt::format("{:>40}  {:>12}  {:>12}  {:>12}  {:>12}\n", name, cpu, cpu_total, cuda, calls);
    };
    const std::string dashes = fmt::format("{:->40}  {:->12}  {:->12}  {:->12}  {:->12}\n", "", "", "", "", "");
    const Diagnosis d =
        diagnosis_of(dashes + line("Name", "Self CPU", "CPU total", "Self CUDA", "# of Calls") + dashes +
                     line("aten::_flash_attention_forward", "12.000us", "171.752us", "3.000ms", "2") +
                     line("void pytorch_flash::flash_fwd_kernel<...", "0.000us", "0.000us", "3.000ms", "2") +
                     line("nvjet_tst_192x192_64x4...", "0.000us", "0.000us", "1.000s", "1") + dashes +
                     "Self CPU time total: 171.752us\nSelf CUDA time total: 1.003s\n");
    EXPECT_EQ(d.tool, "PyTorch profiler's table");
    EXPECT_EQ(d.runs, 3);
    EXPECT_DOUBLE_EQ(d.gpu_us, 1'003'000);
    ASSERT_EQ(d.kinds.size(), 1U);
    EXPECT_EQ(d.kinds[0].reading.library, "PyTorch's own copy");
    EXPECT_DOUBLE_EQ(d.kinds[0].us, 3000);
}

/// PyTorch prints a hundred rows, or as many as row_limit says, and the sum over all.
TEST(Tables, say_if_rows_are_missing) {
    const std::string row =
        "flash_fwd_kernel  0.00%  0.000us  0.00%  0.000us  0.000us  3.000ms  30.00%  3.000ms  1.5ms  2\n";
    EXPECT_TRUE(diagnosis_of(row + "Self CUDA time total: 3.001ms\n").notes.empty());
    const Diagnosis d = diagnosis_of(row + "Self CPU time total: 171.752us\nSelf CUDA time total: 10.000ms\n");
    EXPECT_DOUBLE_EQ(d.gpu_us, 3000);
    ASSERT_EQ(d.notes.size(), 1U);
    EXPECT_NE(d.notes[0].find("30.0 % of the time"), std::string::npos) << d.notes[0];
}

/// Issues and notes hold tables in Markdown.
TEST(Tables, of_markdown_are_read) {
    const Diagnosis d = diagnosis_of(
        "| # | Kernel | Calls | Time (ms) | % |\n|---|:---|---:|---:|---:|\n"
        "| 1 | `void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128...` | 36 | 43.40 | 70.1 |\n"
        "| 2 | " +
        kGemm + " | 1,000 | 18.5 | 29.9 |\n");
    EXPECT_EQ(d.runs, 1036);
    EXPECT_DOUBLE_EQ(d.gpu_us, 61'900);
    ASSERT_EQ(d.kinds.size(), 1U);
    EXPECT_EQ(d.kinds[0].calls, 36);
    EXPECT_DOUBLE_EQ(d.kinds[0].us, 43'400);
    EXPECT_TRUE(d.notes.empty()) << d.notes.front();
    const Diagnosis with_units = diagnosis_of(
        "| kernel | time | runs |\n| --- | --- | --- |\n| flash_fwd_splitkv_kernel | 774.9 \xC2\xB5s | 2 |\n"
        "| flash_fwd_kernel | 1.5 ms | 1 |\n");
    EXPECT_NEAR(with_units.gpu_us, 2274.9, 1e-6);
    const Diagnosis averages =
        diagnosis_of("| kernel | calls | avg_us |\n| --- | --- | --- |\n| flash_fwd_kernel | 4 | 12.5 |\n");
    EXPECT_DOUBLE_EQ(averages.gpu_us, 50);
}

/// Rows of Markdown may be empty, and a table may have no column of kernels.
TEST(Tables, of_markdown_may_have_empty_cells) {
    for (const std::string& text : {std::string("| | |\n"), std::string("|||||\n"), std::string(100'000, '|') + "\n"}) {
        EXPECT_THROW(diagnosis_of(text), Error) << text.substr(0, 8);
        EXPECT_EQ(diagnosis_of(text + "flash_fwd_kernel\n").runs, 1) << text.substr(0, 8);
    }
}

/// Units stand in brackets of both kinds, after a line or in a row under the titles.
TEST(Tables, name_the_unit_of_their_times) {
    const auto us_of = [](const char* titles, const char* row) {
        return diagnosis_of(std::string(titles) + "\n" + row + "\n").gpu_us;
    };
    EXPECT_DOUBLE_EQ(us_of("Kernel,Calls,Duration [ms]", "flash_fwd_kernel,1,\"1,206.5\""), 1'206'500);
    EXPECT_DOUBLE_EQ(us_of("Kernel,Calls,Time [us]", "flash_fwd_kernel,4,12.5"), 12.5);
    EXPECT_DOUBLE_EQ(us_of("Kernel,Calls,time_ms", "flash_fwd_kernel,4,12.5"), 12'500);
    EXPECT_DOUBLE_EQ(us_of("Kernel,Calls,Time per call (ms)", "flash_fwd_kernel,4,12.5"), 50'000);
    EXPECT_DOUBLE_EQ(us_of("Kernel,Instances,Duration (s)", "flash_fwd_kernel,4,1"), 1e6);
    EXPECT_DOUBLE_EQ(us_of("Type,Time(%),Time,Calls,Avg,Min,Max,Name\n,%,ms,,us,us,us,",
                           "GPU activities,45.3,22.5,3,7500,7000,8000,flash_fwd_kernel"),
                     22'500);
    EXPECT_DOUBLE_EQ(us_of("Kernel Dur (ns),Total Dur (ns),Kernel Name", "2000,9000,flash_fwd_kernel"), 2);
}

/// A number without a unit is no time, and one with a comma for its point is no number.
TEST(Tables, without_a_unit_have_no_times) {
    for (const char* title : {"Time", "Duration", "Avg"}) {
        const Diagnosis d = diagnosis_of(fmt::format("Kernel,Calls,{}\nflash_fwd_kernel,36,43.4\n", title));
        EXPECT_FALSE(d.timed) << title;
        EXPECT_EQ(d.runs, 36) << title;
        ASSERT_EQ(d.notes.size(), 1U) << title;
        EXPECT_NE(d.notes[0].find("names a unit: 1"), std::string::npos) << d.notes[0];
    }
    const Diagnosis comma = diagnosis_of("Kernel,Calls,Time (ms)\nflash_fwd_kernel,36,\"43,4\"\n");
    EXPECT_FALSE(comma.timed);
    EXPECT_NE(comma.notes.at(0).find("numbers were not read"), std::string::npos) << comma.notes[0];
}

TEST(Tables, have_counts_under_many_titles) {
    for (const char* title : {"# calls", "n", "#Calls", "# of Calls", "Number of runs", "num_calls", "Launch Count"}) {
        const Diagnosis d = diagnosis_of(fmt::format("Kernel,{},Duration (us)\nflash_fwd_kernel,36,72\n", title));
        EXPECT_EQ(d.runs, 36) << title;
        EXPECT_DOUBLE_EQ(d.gpu_us, 72) << title;
        ASSERT_EQ(d.notes.size(), 1U) << title;
        EXPECT_NE(d.notes[0].find("sum of a row's runs"), std::string::npos) << d.notes[0];
    }
}

/// Rows are pasted without their titles.
TEST(Tables, without_titles_are_read_by_their_numbers) {
    const Diagnosis pytorch = diagnosis_of(
        "void pytorch_flash::flash_fwd_kernel<...         0.00%       0.000us         0.00%       0.000us       "
        "0.000us      "
        "43.400ms        70.12%      43.400ms       1.206ms            36\n");
    EXPECT_EQ(pytorch.runs, 36);
    EXPECT_DOUBLE_EQ(pytorch.gpu_us, 43'400);
    const Diagnosis nsys = diagnosis_of(
        "     90.0    2,250,706,856    199,200     11,298.7   10,000.0  9,000  20,000  1.5  void "
        "flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<(int)128, (\xE2\x80\xA6\n");
    EXPECT_EQ(nsys.runs, 199'200);
    EXPECT_DOUBLE_EQ(nsys.gpu_us, 2'250'706.856);
    const Diagnosis nvprof = diagnosis_of(
        " GPU activities:   45.35%  2.25071s    199200  11.298us  10.1us  12.9us  void flash_fwd_kernel<...>(int)\n");
    EXPECT_EQ(nvprof.runs, 199'200);
    EXPECT_DOUBLE_EQ(nvprof.gpu_us, 2'250'710);
}

TEST(Tables, of_every_report_of_nsight_systems_are_read) {
    const auto read = [](const char* titles, const std::string& row) {
        const Diagnosis d = diagnosis_of(std::string(titles) + "\n" + row + "\n");
        return std::pair(d.runs, d.gpu_us);
    };
    using Read = std::pair<std::int64_t, double>;
    EXPECT_EQ(
        read("Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),GridXYZ,BlockXYZ,Name",
             "60.0,6000,3,2000.0,2000.0,1,2,0.0,1 1 1,128 1 1,flash_fwd_kernel"),
        (Read{3, 6}));
    EXPECT_EQ(read("Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,Device,Ctx,Strm,Name",
                   "100,2500,7,1,1,1,128,1,1,255,NVIDIA H200 (0),1,7,flash_fwd_kernel"),
              (Read{1, 2.5}));
    EXPECT_EQ(read("Time (%),Total Time (ns),Instances,Avg (ns),Category,Operation",
                   "60.0,6000,3,2000.0,CUDA_KERNEL,flash_fwd_kernel"),
              (Read{3, 6}));
    EXPECT_EQ(read("NVTX Range,Style,PID,TID,NVTX Inst,Kern Inst,Total Time (ns),Avg (ns),Kernel Name",
                   ":step,PushPop,1,1,1,4,8000,2000.0,flash_fwd_kernel"),
              (Read{4, 8}));
    EXPECT_EQ(read("PID,TID,DevId,Count,QCount,AAvg (ns),QAvg (ns),KAvg (ns),TAvg (ns),API Name,Kernel Name",
                   "1,1,0,5,5,100,200,3000,3300,cudaLaunchKernel,flash_fwd_kernel"),
              (Read{5, 15}));
    EXPECT_EQ(read("Time(%),Total Time (us),Instances,Average (us),Name", "1,6,3,2,flash_fwd_kernel"), (Read{3, 6}));
}

/// Numbers that were not understood are not lost without a word.
TEST(Tables, say_which_numbers_were_not_read) {
    const Diagnosis d = diagnosis_of("flash_fwd_kernel took 36 43.40 ms 1.2 70 %\n");
    ASSERT_EQ(d.notes.size(), 1U);
    EXPECT_NE(d.notes[0].find("numbers were not read"), std::string::npos);
    const Diagnosis untimed = diagnosis_of("Name,Instances,Grid\nflash_fwd_kernel,3,1\n");
    EXPECT_EQ(untimed.runs, 3);
    EXPECT_FALSE(untimed.timed);
    ASSERT_EQ(untimed.notes.size(), 1U);
    EXPECT_NE(untimed.notes[0].find("no times"), std::string::npos);
}

/// Spreadsheets paste cells with tabs or semicolons between them.
TEST(Tables, have_cells_between_tabs_or_semicolons) {
    for (const char* separator : {"\t", ";"}) {
        const auto text = [&](std::string line) {
            for (std::size_t at; (at = line.find('|')) != std::string::npos;) line.replace(at, 1, separator);
            return line + "\n";
        };
        const Diagnosis titled = diagnosis_of(text("Name|Calls|Time (ms)") + text("flash_fwd_kernel|36|43.4"));
        EXPECT_EQ(titled.runs, 36);
        EXPECT_DOUBLE_EQ(titled.gpu_us, 43'400);
        const Diagnosis rows = diagnosis_of(text("flash_fwd_kernel|36|43.4 ms") + text(kGemm + "|2|1ms"));
        EXPECT_EQ(rows.runs, 38);
        EXPECT_DOUBLE_EQ(rows.gpu_us, 44'400);
        ASSERT_EQ(rows.kinds.size(), 1U);
        EXPECT_EQ(rows.kinds[0].reading.family, Family::fa2);
        EXPECT_NE(rows.notes.at(0).find("a time as their sum"), std::string::npos) << rows.notes.at(0);
        const Diagnosis unclear = diagnosis_of(text("7|flash_fwd_kernel|36|43.4 ms"));
        EXPECT_EQ(unclear.runs, 1);
        EXPECT_FALSE(unclear.timed);
        EXPECT_NE(unclear.notes.at(0).find("numbers were not read"), std::string::npos) << unclear.notes.at(0);
    }
}

TEST(Tables, say_that_a_number_beside_a_name_was_not_read) {
    for (const char* line : {"flash_fwd_kernel 36 calls 43.4ms", "flash_fwd_kernel 43.4ms", "flash_fwd_kernel 36",
                             "flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64... 36 calls"}) {
        const Diagnosis d = diagnosis_of(std::string(line) + "\n");
        ASSERT_EQ(d.notes.size(), 1U) << line;
        EXPECT_NE(d.notes[0].find("numbers were not read"), std::string::npos) << d.notes[0];
    }
    EXPECT_TRUE(diagnosis_of(kFlashForward + "\nvoid f(int, int) 1\n").notes.empty());
}

TEST(Tables, of_names_are_one_a_line) {
    const Diagnosis d = diagnosis_of("  flash_fwd_kernel\n\nnobody_knows\r\n");
    EXPECT_FALSE(d.timed);
    EXPECT_EQ(d.runs, 2);
    EXPECT_EQ(d.kinds.at(0).reading.family, Family::fa2);
    EXPECT_EQ(d.unknown.at(0).kernel.name, "nobody_knows");
}

/// A letter is no list of kernels, though it speaks of attention.
TEST(Tables, leave_sentences_out) {
    EXPECT_THROW(diagnosis_of("The tensor `attn_mask` hides what a query must not see.\n"
                              "Errors are of one type, `tessera::Error`, with the name of the argument.\nattn_mask\n"),
                 Error);
    EXPECT_EQ(diagnosis_of("The kernel that we saw most of all was flash_fwd_kernel<128>\n").kinds.size(), 1U);
    EXPECT_THROW(
        diagnosis_of("We turned on attention and all of it became slow.\n\nIs that the flash attention, or not?\n"),
        Error);
    const Diagnosis d =
        diagnosis_of("these are the kernels that I saw:\nflash_fwd_kernel\nMemcpy DtoD (Device -> Device)\n");
    EXPECT_EQ(d.runs, 2);
    EXPECT_EQ(d.kinds.size(), 1U);
    ASSERT_EQ(d.notes.size(), 1U);
    EXPECT_EQ(d.notes[0], "lines left out, because they are sentences and not kernel names: 1");
}

}  // namespace
}  // namespace tessera::diagnose::tables_test
