// SPDX-License-Identifier: Apache-2.0
#include "diagnose/device.hpp"

#include <gtest/gtest.h>

#include "diagnose/diagnosis.hpp"
#include "traces.hpp"

namespace tessera::diagnose::device_test {
namespace {

Gpu gpu(const std::string& name, int capability, int multiprocessors, double gib) {
    return {.name = name, .capability = capability, .multiprocessors = multiprocessors, .memory_gib = gib};
}

TEST(Devices, that_are_listed_are_taken_as_they_are) {
    for (const Gpu& known : {gpu("NVIDIA H200", 90, 132, 139.8), gpu("NVIDIA H100 80GB HBM3", 90, 132, 79.1),
                             gpu("NVIDIA H100 PCIe", 90, 114, 79.1), gpu("NVIDIA A100-SXM4-80GB", 80, 108, 79.2)}) {
        const Device device = device_of(known);
        ASSERT_TRUE(device.machine) << known.name;
        EXPECT_EQ(device.caveat, "") << known.name;
        EXPECT_EQ(device.more_error, 0) << known.name;
    }
    EXPECT_EQ(device_of({.name = "h200"}).caveat, "");
}

/// A name that contains a listed card's may be another card.
TEST(Devices, of_another_name_or_size_are_named_and_scaled_with_a_wide_bar) {
    for (const Gpu& other :
         {gpu("NVIDIA Graphics Device", 90, 120, 94.5), gpu("NVIDIA H100 NVL", 90, 132, 93.1),
          gpu("NVIDIA H100 80GB HBM3", 90, 66, 79.1), gpu("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 80, 42, 39.5)}) {
        const Device device = device_of(other);
        ASSERT_TRUE(device.machine) << other.name;
        EXPECT_GE(device.more_error, 0.2) << other.name;
        EXPECT_NE(device.caveat.find(other.name), std::string::npos) << device.caveat;
        EXPECT_EQ(static_cast<double>(device.machine->cores), *other.multiprocessors) << other.name;
    }
    EXPECT_LT(static_cast<double>(device_of(gpu("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 80, 42, 39.5)).machine->dram_gbs),
              1200);
    EXPECT_NE(device_of({.name = "NVIDIA H100 NVL", .capability = 90}).caveat, "");
}

/// A variant is scaled from the card whose name it has, and never taken for it.
TEST(Devices, that_are_variants_are_scaled_from_their_own_card) {
    struct Variant {
        Gpu gpu;
        const char* card;
    };
    const Variant variants[] = {{{.name = "NVIDIA A100-PCIE-40GB", .capability = 80}, "a100-pcie"},
                                {{.name = "NVIDIA A800 80GB PCIe", .capability = 80}, "a100-pcie"},
                                {{.name = "NVIDIA GeForce RTX 3090 Ti", .capability = 86}, "rtx3090"},
                                {{.name = "NVIDIA GeForce RTX 5090 D", .capability = 120}, "rtx5090"},
                                {{.name = "NVIDIA H20-3e", .capability = 90}, "h20"},
                                {gpu("NVIDIA H100 NVL", 90, 132, 93.1), "h100"},
                                {gpu("NVIDIA GeForce RTX 4090 Laptop GPU", 89, 76, 15.6), "rtx4090"}};
    for (const Variant& variant : variants) {
        const Device device = device_of(variant.gpu);
        ASSERT_TRUE(device.machine) << variant.gpu.name;
        EXPECT_EQ(device.machine->name, variant.card) << variant.gpu.name;
        EXPECT_GE(device.more_error, 0.3) << variant.gpu.name;
        EXPECT_NE(device.caveat.find(variant.gpu.name), std::string::npos) << device.caveat;
    }
}

/// Names come from files, and must not break the lines of an answer.
TEST(Devices, have_names_of_one_line) {
    TraceText trace;
    trace.gpu("NVIDIA\\nH200", 132, 139.8).kernel(kFlashForward, 10);
    EXPECT_EQ(read_trace_bytes(trace.text(), "t").gpus.at(0).name, "NVIDIA\\x0aH200");
}

TEST(Devices, of_no_known_generation_predict_nothing) {
    EXPECT_FALSE(device_of({}).machine);
    EXPECT_EQ(device_of({}).missing, "the GPU's name is not known");
    EXPECT_FALSE(device_of(gpu("Some Card", 61, 20, 8)).machine);
    EXPECT_EQ(device_of(gpu("NVIDIA GB10", 121, 48, 119.6)).missing,
              "the model does not know the GPU \"NVIDIA GB10\", and has no card of compute capability 12.1 to scale");
    EXPECT_FALSE(device_of({.name = "Some Card", .capability = 90}).machine) << "nothing to scale by";
}

/// The trace's own properties are read, and decide.
TEST(Devices, are_those_of_the_trace) {
    TraceText trace;
    trace.gpu("NVIDIA H100 NVL", 132, 93.1).kernel(kFlashForward, 10);
    Trace read = read_trace_bytes(trace.text(), "t");
    const Diagnosis d = diagnose(read);
    ASSERT_EQ(d.gpus.size(), 1U);
    EXPECT_EQ(d.gpus[0].multiprocessors, 132);
    EXPECT_NEAR(d.gpus[0].memory_gib.value_or(0), 93.1, 0.01);
    EXPECT_EQ(text_of(d.gpus[0]), "NVIDIA H100 NVL (sm90, 132 multiprocessors, 93.1 GiB)");
    EXPECT_NE(device_of(d.gpus[0]).caveat.find("H100 NVL"), std::string::npos);
}

}  // namespace
}  // namespace tessera::diagnose::device_test
