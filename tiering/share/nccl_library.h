// libnccl.so.2, opened when a group wants it: our own declarations of what we call, for any release from 2.27 on. NCCL's header
// is Copyright NVIDIA; tests/tiering/share/nccl_header_test.cpp compares with it where there is one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "src/core/status.h"

namespace ta::share::nccl {

struct Communicator;  // ncclComm
using Comm = Communicator*;
struct UniqueId {
    char bytes[128];
};
using Stream = struct CUstream_st*;

inline constexpr int kSuccess = 0, kInProgress = 7;  // ncclResult_t
inline constexpr int kBytes = 1;                     // ncclUint8

// The fields of ncclConfig_t in NCCL 2.18; later fields get their defaults.
struct Config {
    size_t size = sizeof(Config);
    unsigned magic = 0xcafebeef;
    unsigned version = 21800;
    int blocking = kUnset, cga_cluster_size = kUnset, min_ctas = kUnset, max_ctas = kUnset;
    const char* net_name = nullptr;
    int split_share = kUnset;
    static constexpr int kUnset = INT32_MIN;
};

struct Library {
    int version;  // 22809: 2.28.9
    int (*GetVersion)(int*);
    int (*GetUniqueId)(UniqueId*);
    int (*CommInitRankConfig)(Comm*, int ranks, UniqueId, int rank, Config*);
    int (*CommAbort)(Comm);
    int (*CommGetAsyncError)(Comm, int*);
    int (*CommCount)(Comm, int*);
    int (*CommUserRank)(Comm, int*);
    int (*AllGather)(const void*, void*, size_t count, int type, Comm, Stream);
    int (*Send)(const void*, size_t count, int type, int peer, Comm, Stream);
    int (*Recv)(void*, size_t count, int type, int peer, Comm, Stream);
    int (*GroupStart)();
    int (*GroupEnd)();
    const char* (*GetErrorString)(int);

    // TA_E_UNSUPPORTED: there is no NCCL, or it is too old.
    static Result<const Library*> open();
};

}  // namespace ta::share::nccl
