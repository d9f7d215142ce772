// SPDX-License-Identifier: Apache-2.0
//
// Links between GPUs as data, each rate with its source.
#include <vector>

#include "tessera/predict_context_parallel.hpp"

namespace tessera {
namespace {

constexpr const char* kGathers =
    "measured: all_gather by NCCL of 8, 16 and 32 MiB from each of two H200 takes 59, 93 and 158 us; of 16, 32, 64 and "
    "256 MiB from each of four H100 247, 412, 750 and 2,555 us";
constexpr const char* kSends =
    "measured: all_to_all by NCCL of 8, 16 and 32 MiB on each of two H200, half of which stays, takes 40, 55 and 85 us";
constexpr const char* kCopies =
    "measured: a copy of 1, 8 and 32 MiB from the other one of two H200 takes 8, 27.5 and 95.5 us";
constexpr const char* kMeeting = "measured: a barrier of symmetric memory on two H200 takes 13.9 us";
constexpr const char* kEstimate = "estimate: not measured";
constexpr const char* kAsGathered = "estimate: as in an all_gather";

/// A link of one host, whose hosts are joined by InfiniBand.
Link of_host(const char* name) {
    Link link;
    link.name = name;
    link.gpus_of_host = 8;
    link.between_gbs = {45, "estimate: nine tenths of 400 Gbit/s, one adapter a GPU"};
    link.between_hop_us = {10, kEstimate};
    return link;
}

Link nvlink() {
    Link link = of_host("nvlink");
    link.copy_gbs = {370, kCopies};
    link.copy_us = {5, kCopies};
    link.meet_us = {14, kMeeting};
    link.gather_gbs = {290, kGathers};
    link.gather_us = {27, kGathers};
    link.hop_us = {24, kGathers};
    link.send_gbs = {280, kSends};
    link.send_us = {25, kSends};
    link.measured_gpus = 4;
    return link;
}

Link pcie() {
    Link link = of_host("pcie");
    link.copy_gbs = {24, kAsGathered};
    link.copy_us = {5, kEstimate};
    link.meet_us = {20, kEstimate};
    link.gather_gbs = {24, "estimate: three quarters of PCIe 4.0 x16 in one direction, 32 GB/s"};
    link.gather_us = {27, kEstimate};
    link.hop_us = {10, kEstimate};
    link.send_gbs = {24, kAsGathered};
    link.send_us = {27, kAsGathered};
    return link;
}

/// One adapter for each GPU, also between GPUs of one host.
Link infiniband() {
    Link link = of_host("ib");
    link.gather_gbs = link.send_gbs = link.between_gbs;
    link.hop_us = link.between_hop_us;
    link.gather_us = link.send_us = {27, kEstimate};
    link.gpus_of_host = 0;
    return link;
}

}  // namespace

std::span<const Link> links() {
    static const std::vector<Link> all = {nvlink(), pcie(), infiniband()};
    return all;
}

const Link* find_link(std::string_view name) {
    for (const Link& link : links())
        if (link.name == name) return &link;
    return nullptr;
}

}  // namespace tessera
