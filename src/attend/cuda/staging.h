// Layer-ahead staging on a GPU: copies pages of blocks in host memory to free slots of the pool's device memory, while the
// layers before theirs run. The layer's kernels get a block table with the new addresses. Attention reads the same bytes either
// way. Only CUDA builds include this.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "src/attend/cuda/tables.h"
#include "src/attend/staging.h"
#include "src/attend/step.h"
#include "src/device/cuda/memory.h"

namespace ta {

class CudaStaging {
  public:
    CudaStaging(Pool& pool, CudaDevice& device) : pool_(pool), device_(device), tables_(device) {}
    ~CudaStaging();
    CudaStaging(const CudaStaging&) = delete;
    CudaStaging& operator=(const CudaStaging&) = delete;

    // Properties of an attend call.
    struct Call {
        int64_t rows_at_once = 0;  // for sequences with more rows than the decode kernel takes at once; 0: there are none
        int64_t window = 0;        // 0: none
    };
    // To be called when a step begins, after its tables were sent. Expects calls like those of the last step, decides what to
    // stage, and starts to copy the first layers. Leaves that to the first call if nothing is known yet, or if `replays`: calls
    // captured into a graph read in place.
    Status begin(const Step& step, const CudaTables& tables, bool replays, cudaStream_t stream);
    // Returns the block table for the layer's attend, which the caller enqueues next. `*staged`: that launch must not overlap
    // the one before it. Not for captured calls.
    Result<const uint64_t*> before_attend(uint32_t layer, const Call& call, bool* staged, cudaStream_t stream);
    // To be called when that attend was enqueued, or a part of it.
    Status after_attend(cudaStream_t stream);
    // Ends the step; nothing of it is enqueued after this.
    void finish(cudaStream_t stream);
    // Gives the slots back. To be called when the plan's fence was recorded after finish().
    void release();

  private:
    struct Page {
        const uint8_t* slot;  // of the block
        PageKind kind;
        uint32_t entry;  // of the block table
    };
    struct Part {  // a part of the ring
        cudaEvent_t arrived = nullptr, read = nullptr;
        int64_t layer = -1;  // the layer whose pages are in it, or on their way
        bool is_read = false;
    };

    using PageSizes = std::array<size_t, kPageKinds>;

    Status decide(const Call& call, cudaStream_t stream);
    std::vector<HostPages> count_reads(const Call& call) const;
    PageSizes largest_pages() const;
    template <class Fn>
    void for_each_host_page(const StepMember& member, int64_t window, const PageSizes& largest, Fn fn) const;
    bool choose_pages(const Call& call);
    bool take_ring();
    Status open();
    Status send_tables(cudaStream_t stream);
    Status load(uint32_t layer);
    void load_ahead(uint32_t layer);
    MoveRoute route(uint64_t bytes) const;
    void see(const Call& call);
    PageKind ring_kind() const {
        return pool_.geometry().all_8_bits ? PageKind::kToken : PageKind::kChannel;
    }  // of the ring's
       // slots
    Part& part_of(int64_t layer) { return parts_[layer % ring_.parts]; }

    Pool& pool_;
    CudaDevice& device_;
    cudaStream_t copies_ = nullptr;
    Part parts_[2];
    DeviceBuffer tables_;  // [2]: copies of the step's table with the addresses of staged pages
    PinnedBuffer patches_[4];
    uint64_t sent_ = 0;
    Call known_;         // of the last step with calls; the window is the widest
    bool seen_ = false;  // a call of this step was seen, and known_ is of this step

    // The present step.
    const Step* step_ = nullptr;
    const CudaTables* step_tables_ = nullptr;
    bool undecided_ = false, active_ = false;
    bool used_ = false;         // by an attend
    bool started_ = false;      // some copies were started
    int64_t last_layer_ = -1;   // the last one attended to
    int64_t staged_part_ = -1;  // read by the present attend
    Tenant tenant_ = 0;
    std::vector<BlockStore::Scratch> slots_;
    StagingRing ring_;
    std::vector<Page> pages_;
    std::vector<uint32_t> page_bytes_;
    std::vector<DeviceCopy> copies_of_layer_;
};

}  // namespace ta
