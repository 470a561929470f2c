// The schedules of a plan's calls that have more rows than the decode kernel takes at once, one for each combination of options
// that the plan has met, and what graphs of captured calls read of them. Only CUDA builds include this.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "src/attend/cuda/attend.h"
#include "src/attend/cuda/tables.h"
#include "src/device/cuda/memory.h"

namespace ta {

// All that a captured launch depends on beside the tables and schedules.
using KindOfStep = std::vector<uint64_t>;

class CudaSchedules {
  public:
    explicit CudaSchedules(CudaDevice& device) : device_(device) {}

    struct Schedule {
        explicit Schedule(CudaDevice& device) : buffer(device) {}
        DeviceBuffer buffer;
        PinnedBuffer pinned;
        uint64_t step = 0;      // that it was made for
        uint64_t table = 0;     // CudaTables::moves_of_entries() then
        int unread = 0;         // times it was made since a call read it
        bool captured = false;  // a captured call reads it
        ManyRows rows;
    };

    // When a step begins, after its tables were sent: makes what its calls, or graphs in their place, may read.
    Status begin(const CudaTables& tables, cudaStream_t stream);
    // When a call begins.
    void begin_call() {
        read_.clear();
        group_read_ = {};
    }
    // For a call of the step: the schedule of this step, which is made where there is none yet.
    Result<Schedule*> find(const ManyRowsKey& key, const CudaTables& tables, cudaStream_t stream);
    // The call at hand reads it.
    void add_read(Schedule& schedule) { read_.push_back(&schedule); }
    // The call at hand reads the sequences of a group, where the tables have them now. `whole`: it knows no step that lacks blocks.
    void add_group(int group, const void* at, bool whole) { group_read_ = {group, at, whole}; }
    // A call of the step has been enqueued; remembers what is captured. Then, of a captured one, the kind of the step.
    void see_call();
    void see_kind(KindOfStep kind) { capture_kind_ = std::move(kind); }
    // The step is over.
    void end(const CudaTables& tables);

    bool any_captured() const { return captured_; }
    // True when there are graphs, and no call of the step was seen.
    bool left_to_graph() const { return captured_ && !seen_calls_; }
    // True if a graph was captured in a step of this kind and finds what it reads.
    bool serves(const KindOfStep& kind, const CudaTables& tables) const;

  private:
    // An input that a captured call expects to find unchanged.
    struct CapturedRead {
        enum class What : uint8_t { kSchedule, kSequences, kWholeSteps };  // kWholeSteps: no sequence lacks blocks
        What what;
        const Schedule* schedule = nullptr;
        int number = 0;            // chunks of the schedule, or the group of the sequences
        const void* at = nullptr;  // where the call reads it
        bool operator==(const CapturedRead&) const = default;
    };
    struct GroupRead {
        int group = 0;
        const void* at = nullptr;
        bool whole = false;
    };

    Status make(const ManyRowsKey& key, Schedule& schedule, const CudaTables& tables, cudaStream_t stream);
    bool is_current(const CapturedRead& read, const CudaTables& tables) const;
    void remember(const CapturedRead& read);

    CudaDevice& device_;
    std::map<ManyRowsKey, Schedule> schedules_;
    uint64_t steps_ = 0;
    bool captured_ = false;        // some call was
    bool seen_calls_ = false;      // in this step
    std::vector<Schedule*> read_;  // by a call
    GroupRead group_read_;         // likewise
    // Of this step, if calls of it are captured; then of all that were.
    KindOfStep capture_kind_;
    std::vector<CapturedRead> capture_reads_;
    std::map<KindOfStep, std::vector<CapturedRead>> captured_kinds_;
};

}  // namespace ta
