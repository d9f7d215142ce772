// SPDX-License-Identifier: Apache-2.0
//
// A Communicator over NCCL, which is loaded when one is made: docs/decisions/nccl.md.
#include <dlfcn.h>
#include <fmt/format.h>

#include "tessera/context_parallel.hpp"
#include "tessera/error.hpp"

namespace tessera {
namespace {

/// The functions of NCCL's C API that are called, and its constants ncclSuccess, ncclInProgress and ncclInt8.
struct Nccl {
    static constexpr int kSuccess = 0;
    static constexpr int kInProgress = 7;
    static constexpr int kBytes = 0;

    int (*rank)(ncclComm*, int*) = nullptr;
    int (*ranks)(ncclComm*, int*) = nullptr;
    int (*begin)() = nullptr;
    int (*end)() = nullptr;
    int (*send)(const void*, std::size_t, int, int, ncclComm*, void*) = nullptr;
    int (*receive)(void*, std::size_t, int, int, ncclComm*, void*) = nullptr;
    int (*state)(ncclComm*, int*) = nullptr;
    const char* (*words)(int) = nullptr;
};

template <class F>
void find(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(::dlsym(library, name));
    if (function == nullptr)
        throw Error(ErrorCode::unsupported, "comm", fmt::format("expected an NCCL that has {}, got one without", name));
}

/// The NCCL of the process. A program that is linked with NCCL, or a library that has loaded it, decides which one.
const Nccl& nccl() {
    static const Nccl functions = [] {
        void* library = RTLD_DEFAULT;
        if (::dlsym(RTLD_DEFAULT, "ncclSend") == nullptr) {
            library = ::dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
            if (library == nullptr)
                throw Error(ErrorCode::unsupported, "comm", fmt::format("needs libnccl.so.2: {}", ::dlerror()));
        }
        Nccl found;
        find(library, "ncclCommUserRank", found.rank);
        find(library, "ncclCommCount", found.ranks);
        find(library, "ncclGroupStart", found.begin);
        find(library, "ncclGroupEnd", found.end);
        find(library, "ncclSend", found.send);
        find(library, "ncclRecv", found.receive);
        find(library, "ncclCommGetAsyncError", found.state);
        find(library, "ncclGetErrorString", found.words);
        return found;
    }();
    return functions;
}

void expect_success(int status, const char* what) {
    if (status != Nccl::kSuccess)
        throw Error(ErrorCode::device_unavailable, "comm", fmt::format("NCCL, {}: {}", what, nccl().words(status)));
}

class NcclCommunicator : public Communicator {
 public:
    explicit NcclCommunicator(ncclComm* comm) : comm_(comm) {
        if (comm == nullptr) throw Error(ErrorCode::invalid_argument, "comm", "expected an ncclComm_t, got null");
        expect_success(nccl().rank(comm, &rank_), "ncclCommUserRank");
        expect_success(nccl().ranks(comm, &ranks_), "ncclCommCount");
    }

    int rank() const override { return rank_; }
    int ranks() const override { return ranks_; }

    void exchange(std::span<const Message> sends, std::span<const Message> receives, void* stream) override {
        if (sends.empty() && receives.empty()) return;
        expect_success(nccl().begin(), "ncclGroupStart");
        int failed = Nccl::kSuccess;
        const char* what = "";
        for (const Message& m : sends) {
            if (failed != Nccl::kSuccess) break;
            failed = nccl().send(m.data, m.bytes, Nccl::kBytes, m.rank, comm_, stream);
            what = "ncclSend";
        }
        for (const Message& m : receives) {
            if (failed != Nccl::kSuccess) break;
            failed = nccl().receive(m.data, m.bytes, Nccl::kBytes, m.rank, comm_, stream);
            what = "ncclRecv";
        }
        int ended = nccl().end();  // of every group that began, so that the thread is in none after an error
        if (failed != Nccl::kSuccess && failed != Nccl::kInProgress) expect_success(failed, what);
        while (ended == Nccl::kInProgress) {  // a communicator that does not block
            if (const int asked = nccl().state(comm_, &ended); asked != Nccl::kSuccess) ended = asked;
        }
        expect_success(ended, "ncclGroupEnd");
    }

 private:
    ncclComm* comm_;
    int rank_ = 0;
    int ranks_ = 0;
};

}  // namespace

Communicator::~Communicator() = default;

std::unique_ptr<Communicator> nccl_communicator(ncclComm* comm) { return std::make_unique<NcclCommunicator>(comm); }

}  // namespace tessera
