// SPDX-License-Identifier: Apache-2.0
//
// Names that are cut off or mangled, and templates of FlashAttention-3 that others changed.
#include <gtest/gtest.h>

#include "diagnose/kernel_text.hpp"
#include "diagnose/mangled.hpp"
#include "diagnose/name.hpp"

namespace tessera::diagnose::name_cut_test {
namespace {

/// FlashAttention-3's wrapper holds only its main kernels, so a name that is cut after the wrapper is still certain.
TEST(CutNames, is_sure_of_a_wrapped_kernel_that_is_cut) {
    for (const char* name : {"void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwd",
                             "void cutlass::device_kernel<flash::enable_sm90<flash::Fl...",
                             "void cutlass::device_kernel<flash::enable_sm80_to_sm89<f..."}) {
        const NameReading cut = read_name(name);
        EXPECT_EQ(cut.family, Family::fa3) << name;
        EXPECT_EQ(cut.role, Role::attention) << name;
        EXPECT_EQ(cut.confidence, Confidence::likely) << name;
    }
    const NameReading bare = read_name("void cutlass::device_kernel<flash::FlashAttnFwd...");
    EXPECT_EQ(bare.role, Role::helper);
    EXPECT_EQ(bare.confidence, Confidence::unsure);
    EXPECT_EQ(read_name("void cutlass::device_kernel<flash::enable_sm80_to_sm89<f...").arch, 80);
    EXPECT_EQ(read_name("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnBw...").arch, 90);
}

/// MagiAttention's kernels have FlashAttention-3's names, and other switches in the same place.
TEST(CutNames, tells_magi_attention_from_fa3) {
    const NameReading forward = read_name(
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<"
        "flash::CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1>, cute::C<1>, cute::C<1> >, cute::tuple<"
        "cute::C<128>, cute::C<128>, cute::C<64> >, cutlass::bfloat16_t, float, cutlass::arch::Sm90, true, true, true, "
        "false, false, 1, false, false, false>, flash::CollectiveEpilogueFwd<int>, int, false> > >");
    EXPECT_EQ(forward.family, Family::fa3);
    EXPECT_EQ(forward.library, "MagiAttention");
    EXPECT_EQ(forward.release, "");
    EXPECT_EQ(forward.mask, "");
    EXPECT_EQ(forward.head_dim, 64);
    EXPECT_EQ(forward.features, (std::vector<std::string>{"softcap", "ranges of keys"}));
    const std::string mainloop =
        "flash::enable_sm90_or_later<flash::FlashAttnBwdSm90<flash::CollectiveMainloopBwdSm90<2, 2, 2, cute::tuple<"
        "cute::C<1>, cute::C<1>, cute::C<1> >, cute::tuple<cute::C<64>, cute::C<128>, cute::C<128> >, "
        "cutlass::bfloat16_t, float, cutlass::arch::Sm90, false, true, false, true, false, false, false, false";
    const NameReading backward = read_name(mainloop + ", true, 1, 2, 1, 2, 1, false> > >");
    EXPECT_EQ(backward.library, "MagiAttention");
    EXPECT_EQ(backward.features, (std::vector<std::string>{"deterministic", "ranges of keys"}));
    EXPECT_EQ(read_name(mainloop + ", 2, 1, 2, 1, false> > >").mask, "window") << "FlashAttention-3 has eight switches";
    // A damaged name with the same number of arguments, but of another kind.
    EXPECT_EQ(
        read_name(
            "flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2, a, cutlass::arch::Sm90, "
            "b, c, d, e, f, g, h, i, j> > >")
            .family,
        Family::fa3);
    // Cut before it is clear whose template it is, nothing is said of its switches.
    EXPECT_EQ(read_name("flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2, "
                        "cute::tuple<cute::C<1>, cute::C<1>, cute::C<1> >, cute::tuple<cute::C<128>, cute::C<128>, "
                        "cute::C<64> >, cutlass::bfloat16_t, float, cutlass::arch::Sm90, false, true, tr...")
                  .mask,
              "");
}

/// A mangled name that is cut is read as far as it goes, with what it refers back to.
TEST(CutNames, closes_a_mangled_name_that_is_cut) {
    const std::string name =
        "_ZN7cutlass13device_kernelIN5flash20enable_sm90_or_laterINS1_16FlashAttnFwdSm90INS1_"
        "25CollectiveMainloopFwdSm90ILi2EN4cute5tupleIJNS5_1CILi2EEENS7_ILi1EEES9_EEENS6_IJNS7_ILi128EEENS7_"
        "ILi176EEESB_"
        "EEELi128ENS_10bfloat16_tEfNS_4arch4Sm90ELb1ELb0ELb0ELb1ELb0ELb0ELb0ELb1ELb1ELb0ELb0ELb0EEENS1_"
        "21CollectiveEpilogueFwdINS6_IJSB_";
    for (const std::size_t length : {name.size(), name.size() - 9, name.size() - 41}) {
        const NameReading cut = read_name(name.substr(0, length));
        EXPECT_TRUE(cut.cut);
        EXPECT_EQ(cut.head_dim, 128);
        EXPECT_EQ(cut.tile_q, 128);
        EXPECT_EQ(cut.tile_kv, 176);
        EXPECT_EQ(cut.mask, "causal");
        EXPECT_EQ(cut.features, (std::vector<std::string>{"varlen"}));
    }
    EXPECT_EQ(normalised("_ZN1a1fINS_1bILi12EEES1_Li3"), "a::f<a::b<12>,a::b...");
    EXPECT_EQ(normalised("_ZN1aI1b2c_...gemm_g"), "a<b,c_...gemm_g");
}

/// Each pair of references doubles what a demangler writes: 400 bytes would fill any memory.
TEST(CutNames, bounds_what_a_mangled_name_grows_to) {
    const std::string digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ";
    std::string name = "_Z1fI1A1BIS0_S0_E";
    for (std::size_t level = 0; level < 34; ++level) {
        EXPECT_LE(normalised(name + "Evv").size(), kLongestName) << level;
        name += std::string("S1_IS") + digits[level + 1] + "_S" + digits[level + 1] + "_E";
    }
    EXPECT_LE(normalised(name + "Evv").size(), kLongestName);
    EXPECT_EQ(read_name(name + "Evv").family, Family::unknown);
    EXPECT_GT(demangled_size(name), 1e7);
    EXPECT_LT(demangled_size("_Z1fI1A1BIS0_S0_EEvv"), 100);
}

}  // namespace
}  // namespace tessera::diagnose::name_cut_test
