// Dense attention over the heads of one rank's tensors. That rank, the root, keeps some kv heads with their query heads, and
// gives the others to the other ranks in rounds. Two rounds are in work, so that the next one's bytes travel during attention.
// Heads are independent: each result has the bits of attend_dense() on the root.
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
    uint64_t room = 0;             // bytes that this rank has for its part; 0: the default
    uint32_t heads_per_round = 0;  // kv heads; 0: chosen here
    std::vector<uint32_t> heads;   // [ranks]: kv heads of each; empty: evenly
};

// The cost of one rank's part of a call. Times in nanoseconds.
struct ScatterStats {
    uint32_t heads = 0, rounds = 0, heads_per_round = 0;
    uint64_t bytes_sent = 0, bytes_received = 0;
    int64_t pack = 0;                    // copying heads together, and results to their places
    int64_t send = 0, longest_send = 0;  // writing to other ranks: in all rounds, and in the longest
    int64_t first_wait = 0, wait = 0;    // idle time: until the first round's bytes came, and in later rounds
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

    // For the root: returns when all results are there. The caller has checked all that check_dense() does not.
    Status give(const DenseCall& call, const ScatterSettings& settings, ScatterStats& stats);
    // For the other ranks: returns when the root has all results.
    Status take(const ScatterSettings& settings, ScatterStats& stats);

  private:
    struct Share;   // the heads of one rank, in rounds
    struct Peer;    // where bytes for another rank go
    struct Worker;  // the root's work for another rank
    struct Found {
        uint64_t number = 0, bytes = 0;
        std::shared_ptr<uint8_t> memory;
    };
    class Giving;
    class Taking;
    class InCall;

    Result<std::vector<Share>> share_out(const DenseCall& call, const ScatterSettings& settings,
                                         const std::vector<share::Rounds::Begin>& ranks) const;
    // Runs `part`, the work of one thread of a call. If it fails, fails the call on all ranks.
    template <class Part>
    Status guarded(Part&& part);

    share::Group& group_;
    Context& context_;
    share::Rounds rounds_;
    const uint32_t ranks_, rank_;
    // Kept for later calls; one runs at a time.
    std::vector<std::unique_ptr<ScatterMemory>> memory_;
    ScatterMemory& memory(size_t i);
    std::vector<Found> found_;  // [ranks]: found memory of other ranks' GPUs
    // Writes to another rank, and waits.
    Status write(const Peer& peer, const share::RemoteCopy& copy);
    // Finds so many bytes of memory that the peer named.
    Status find(Peer& peer, const share::MemoryName& name, uint64_t bytes);
    void forget();
};

}  // namespace ta
