// The attention that blocks get in a plan's steps on a GPU. Decode kernels add it up by entry of the block table. The end of a
// step sends the sums to pinned memory. Whoever needs them next, a later begin or an eviction, adds them to the blocks. Only
// CUDA builds include this.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "kernels/cuda/any/decode/decode.h"
#include "kernels/cuda/any/mass/page_mass.h"
#include "src/attend/cuda/tables.h"
#include "src/device/cuda/memory.h"
#include "src/kv/pool.h"

namespace ta {

class CudaMass final : public AttentionSource {
  public:
    // Does nothing in a pool that does not observe attention.
    CudaMass(Pool& pool, CudaDevice& device);
    ~CudaMass() override;

    bool on() const { return on_; }
    // Before the step's calls: zeroes the sums of all table entries, and takes the memory for end().
    Status begin(const Step& step, const CudaTables& tables, cudaStream_t stream);
    // Takes memory for calls of at most so many rows.
    Status reserve(const CudaTables& tables, int rows);
    // Arguments for a call's launches. args(): for the first; without_heads(): for the others.
    cuda::DecodeMass args() const;
    cuda::DecodeMass without_heads() const {
        cuda::DecodeMass mass = args();
        mass.heads = nullptr;
        return mass;
    }
    // To be called after the step's calls: sends the sums.
    Status end(const Step& step, const CudaTables& tables, cudaStream_t stream);
    void take_in(bool wait) override;

    // The address of the sums. Captured launches have it.
    uint64_t address() const { return uint64_t(uintptr_t(sums_.data())); }

  private:
    struct Member {
        uint32_t slot, generation;
        int64_t observed;      // query tokens
        size_t first, blocks;  // position in the record's weights, and count
    };
    struct Record {  // of a step
        PinnedBuffer pinned;
        cuda::MassRow* rows = nullptr;
        float* weight = nullptr;
        uint64_t* heads = nullptr;
        std::vector<Member> members;
        uint32_t at = 0;           // Decay::now() of the step
        bool counts_anew = false;  // the counter of heads was 0 when the step began
    };
    static constexpr size_t kHeader = 16;  // the counter of heads; the entries' weights follow

    size_t lse_bytes(const CudaTables& tables, int rows) const {
        return tables.capacity() * pool_.geometry().most_kv_heads * size_t(rows) * sizeof(float);
    }
    Status take_in_locked(bool wait, uint64_t most_left);
    void take_in(Record& record);

    Pool& pool_;
    CudaDevice& device_;
    const bool on_;
    DeviceBuffer sums_, page_lse_;
    size_t entries_ = 0;
    bool unsent_ = false;  // the sums are of a step that did not end
    bool counts_anew_ = false;

    std::mutex mutex_;  // guards all below
    Record records_[4];
    uint64_t sent_ = 0, taken_ = 0;  // steps
    uint64_t heads_ = 0;             // counter of heads after the last step taken in
};

}  // namespace ta
