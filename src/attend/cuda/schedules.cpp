#include "src/attend/cuda/schedules.h"

#include <algorithm>
#include <new>

#include "src/device/cuda/capture.h"

namespace ta {
namespace {

constexpr int kMostUnread = 64;  // begins that make a schedule in vain, one after another

}  // namespace

Status CudaSchedules::begin(const CudaTables& tables, cudaStream_t stream) {
    ++steps_;
    seen_calls_ = false;
    read_.clear();
    capture_kind_.clear();
    capture_reads_.clear();
    if (tables.group() == 0) return {};
    // Of all groups: a graph reads its own, whatever was called for last. One that calls by hand have long not read is made
    // when one does.
    for (auto& [key, schedule] : schedules_) {
        if (schedule.captured || schedule.unread <= kMostUnread) TA_RETURN_IF_ERROR(make(key, schedule, tables, stream));
    }
    return {};
}

// For the step, unless that has no prompts for calls of its group: then nobody reads it.
Status CudaSchedules::make(const ManyRowsKey& key, Schedule& schedule, const CudaTables& tables, cudaStream_t stream) {
    std::vector<cuda::SequenceArgs> prompts = prompts_of(tables.queries(), key.group, key.only);
    if (std::none_of(prompts.begin(), prompts.end(), [](const cuda::SequenceArgs& s) { return s.n_query > 0; })) return {};
    // The prefill kernel reads every page. Where blocks are missing calls take the other, and a graph that has the prefill kernel
    // finds nothing to do; its step is refused when it ends.
    if (key.kernel && tables.lacks_blocks()) prompts.clear();
    schedule.rows = ManyRows(key, prompts, tables.walks());
    const size_t bytes = schedule.rows.bytes;
    const size_t room = std::max<size_t>(schedule.rows.room, 1 << 16);
    const bool renews = schedule.captured && schedule.table != tables.moves_of_entries();
    if (schedule.captured && (renews || !schedule.buffer.holds(room))) {
        // Graphs that go on to read it here find nothing to do.
        TA_RETURN_IF_ERROR(device_.check(cudaMemsetAsync(schedule.buffer.data(), 0, schedule.buffer.bytes(), stream),
                                         "emptying a prefill's schedule"));
    }
    if (renews) TA_RETURN_IF_ERROR(schedule.buffer.renew("a prefill's schedule"));
    schedule.table = tables.moves_of_entries();
    TA_RETURN_IF_ERROR(schedule.buffer.reserve(room, "a prefill's schedule"));
    TA_RETURN_IF_ERROR(schedule.pinned.take(device_, bytes));
    auto* staged = static_cast<uint8_t*>(schedule.pinned.part(bytes));
    schedule.rows.write(key, prompts, staged);
    if (bytes > 0) {
        TA_RETURN_IF_ERROR(device_.check(cudaMemcpyAsync(schedule.buffer.data(), staged, bytes, cudaMemcpyHostToDevice, stream),
                                         "copying a step's tables"));
    }
    TA_RETURN_IF_ERROR(schedule.pinned.record(device_, stream));
    schedule.step = steps_;
    ++schedule.unread;
    return {};
}

Result<CudaSchedules::Schedule*> CudaSchedules::find(const ManyRowsKey& key, const CudaTables& tables, cudaStream_t stream) {
    Schedule& schedule = schedules_.try_emplace(key, device_).first->second;
    if (schedule.step != steps_) {
        if (CaptureScope::captured()) return needs_a_run("these options");
        if (Status made = make(key, schedule, tables, stream); !made.ok()) {
            if (schedule.step == 0) schedules_.erase(key);  // later steps do not try again
            return made;
        }
    }
    schedule.unread = 0;
    return &schedule;
}

void CudaSchedules::see_call() {
    seen_calls_ = true;
    const std::vector<Schedule*> read = std::exchange(read_, {});
    if (!CaptureScope::captured()) return;
    captured_ = true;
    for (Schedule* s : read) {
        s->captured = true;
        remember({CapturedRead::What::kSchedule, s, s->rows.chunks, s->buffer.data()});
    }
    if (group_read_.at) remember({CapturedRead::What::kSequences, nullptr, group_read_.group, group_read_.at});
    if (group_read_.whole) remember({CapturedRead::What::kWholeSteps});
}

void CudaSchedules::remember(const CapturedRead& read) {
    if (std::find(capture_reads_.begin(), capture_reads_.end(), read) == capture_reads_.end()) capture_reads_.push_back(read);
}

bool CudaSchedules::is_current(const CapturedRead& read, const CudaTables& tables) const {
    if (read.what == CapturedRead::What::kWholeSteps) return !tables.lacks_blocks();
    if (read.what == CapturedRead::What::kSequences) return tables.sequences_of(read.number) == read.at;
    const Schedule& s = *read.schedule;
    return s.step == steps_ && s.buffer.data() == read.at && s.rows.chunks == read.number;
}

bool CudaSchedules::serves(const KindOfStep& kind, const CudaTables& tables) const {
    const auto reads = captured_kinds_.find(kind);
    return reads != captured_kinds_.end() && std::all_of(reads->second.begin(), reads->second.end(),
                                                         [&](const CapturedRead& r) { return is_current(r, tables); });
}

// Graphs that were captured earlier of the same kind of step serve while what they read is current. Reads that no longer are get
// dropped from the list, so that no later step is refused for it.
void CudaSchedules::end(const CudaTables& tables) {
    if (capture_kind_.empty()) return;
    try {
        std::vector<CapturedRead>& reads = captured_kinds_[capture_kind_];
        std::erase_if(reads, [&](const CapturedRead& r) { return !is_current(r, tables); });
        for (const CapturedRead& r : capture_reads_) {
            if (std::find(reads.begin(), reads.end(), r) == reads.end()) reads.push_back(r);
        }
    } catch (const std::bad_alloc&) {
        captured_kinds_.clear();  // rather no replay than one whose reads are not known
    }
    capture_kind_.clear();
    capture_reads_.clear();
}

}  // namespace ta
