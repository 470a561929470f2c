// Dense attention over the heads of tensors that one rank of a group has, the root: it keeps a share of the kv heads, with their query
// heads, and gives the others theirs in rounds, two of which are in work, so that the bytes of the next are on their way while one is
// attended to. Heads are independent: each result has the bits of attend_dense() on the root.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "src/attend/dense/dense.h"
#include "src/attend/dense/scatter_device.h"
#include "src/kv/share/rounds.h"

namespace ta {

struct ScatterSettings {
    uint32_t root = 0;
    uint64_t tag = 0;
    uint64_t room = 0;             // bytes that this rank lends; 0: default
    uint32_t heads_per_round = 0;  // kv heads; 0: as many as suit
    std::vector<uint32_t> heads;   // [ranks] kv heads of each; empty: evenly
};

// Of one rank's part of a call. Times in nanoseconds.
struct ScatterStats {
    uint32_t heads = 0, rounds = 0, heads_per_round = 0;
    uint64_t bytes_sent = 0, bytes_received = 0;
    int64_t pack = 0;                    // copying heads together, and results apart
    int64_t send = 0, longest_send = 0;  // writing to other ranks, of all rounds, and of the longest
    int64_t first_wait = 0, wait = 0;    // for bytes of the first round, and of the others, with nothing else to do
    int64_t total = 0;
};

class DenseScatter {
  public:
    explicit DenseScatter(share::Group& group)
        : group_(group),
          context_(group.context()),
          rounds_(group),
          ranks_(group.settings().ranks),
          rank_(group.settings().rank),
          found_(ranks_) {}

    share::Rounds& rounds() { return rounds_; }

    // Of the root. Returns when all results are there. `call` is checked, but for what check_dense() checks.
    Status give(const DenseCall& call, const ScatterSettings& settings, ScatterStats& stats);
    // Of the others. Returns when the root has all results.
    Status take(const ScatterSettings& settings, ScatterStats& stats);

  private:
    struct Share;   // of one rank, in rounds
    struct Peer;    // where bytes for another rank go
    struct Worker;  // another rank, as the root serves it
    struct Found {
        uint64_t number = 0;
        std::shared_ptr<uint8_t> memory;
    };
    class Giving;
    class Taking;
    class InCall;

    Result<std::vector<Share>> share_out(const DenseCall& call, const ScatterSettings& settings,
                                         const std::vector<share::Rounds::Begin>& ranks) const;
    // Runs `part`, the work of one thread of a call. If it fails, the call fails at all ranks.
    template <class Part>
    Status guarded(Part&& part);

    share::Group& group_;
    Context& context_;
    share::Rounds rounds_;
    const uint32_t ranks_, rank_;
    // Kept for later calls, of which one runs at a time.
    std::vector<std::unique_ptr<ScatterMemory>> memory_;
    ScatterMemory& memory(size_t i);
    std::vector<Found> found_;  // [ranks] memory of others' GPUs
    // Writes to another rank; waits.
    Status write(const Peer& peer, const share::RemoteCopy& copy);
    Status find(Peer& peer, const share::MemoryName& name);
    void forget();
};

}  // namespace ta
