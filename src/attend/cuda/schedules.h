// Schedules of a plan's calls with more rows than the decode kernel takes at once: one for each combination of options that the
// plan has met. Also keeps what captured calls read of them. Only CUDA builds include this.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "src/attend/cuda/attend.h"
#include "src/attend/cuda/tables.h"
#include "src/device/cuda/memory.h"

namespace ta {

// What a captured launch depends on beside tables and schedules.
using KindOfStep = std::vector<uint64_t>;

class CudaSchedules {
  public:
    explicit CudaSchedules(CudaDevice& device) : device_(device) {}

    struct Schedule {
        explicit Schedule(CudaDevice& device) : buffer(device) {}
        DeviceBuffer buffer;
        PinnedBuffer pinned;
        uint64_t step = 0;      // the step that it was made for
        uint64_t table = 0;     // CudaTables::moves_of_entries() at that time
        int unread = 0;         // how often it was made since a call read it
        bool captured = false;  // a captured call reads it
        ManyRows rows;
    };

    // To be called when a step begins, after its tables were sent. Makes the schedules that its calls, or graphs in their
    // place, may read.
    Status begin(const CudaTables& tables, cudaStream_t stream);
    // When a call begins.
    void begin_call() {
        read_.clear();
        group_read_ = {};
    }
    // The step's schedule for a call; makes it if there is none yet.
    Result<Schedule*> find(const ManyRowsKey& key, const CudaTables& tables, cudaStream_t stream);
    // Notes that the present call reads the schedule.
    void add_read(Schedule& schedule) { read_.push_back(&schedule); }
    // Notes that the present call reads a group's sequences at their present place. `whole`: it cannot handle steps that lack
    // blocks.
    void add_group(int group, const void* at, bool whole) { group_read_ = {group, at, whole}; }
    // To be called when a call was enqueued: see_call() remembers what a captured call reads. Then, if it was captured,
    // see_kind().
    void see_call();
    void see_kind(KindOfStep kind) { capture_kind_ = std::move(kind); }
    // Ends the step.
    void end(const CudaTables& tables);

    bool any_captured() const { return captured_; }
    // True if there are graphs, and the step's calls were not seen.
    bool left_to_graph() const { return captured_ && !seen_calls_; }
    // True if a graph was captured in a step of this kind and all that it reads is current.
    bool serves(const KindOfStep& kind, const CudaTables& tables) const;

  private:
    // Something that a captured call reads, and expects in its place.
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
    bool captured_ = false;        // some call was captured
    bool seen_calls_ = false;      // calls of this step were seen
    std::vector<Schedule*> read_;  // by the present call
    GroupRead group_read_;         // by the present call
    // By captured calls: first of this step, then of all steps.
    KindOfStep capture_kind_;
    std::vector<CapturedRead> capture_reads_;
    std::map<KindOfStep, std::vector<CapturedRead>> captured_kinds_;
};

}  // namespace ta
