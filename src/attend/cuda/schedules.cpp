#include "src/attend/cuda/schedules.h"

#include <algorithm>
#include <new>

#include "src/device/cuda/capture.h"

namespace ta {
namespace {

constexpr int kMostUnread = 64;  // so many begins in a row make an unread schedule

}  // namespace

Status CudaSchedules::begin(const CudaTables& tables, cudaStream_t stream) {
    ++steps_;
    seen_calls_ = false;
    read_.clear();
    capture_kind_.clear();
    capture_reads_.clear();
    if (tables.group() == 0) return {};
    // Makes the schedules of all groups: each graph reads its own, whatever the last call used. A schedule that calls have not
    // read for long is made when a call needs it.
    for (auto& [key, schedule] : schedules_) {
        if (schedule.captured || schedule.unread <= kMostUnread) TA_RETURN_IF_ERROR(make(key, schedule, tables, stream));
    }
    return {};
}

// Makes a schedule for the step. If the step has no prompts for calls of the group, nobody reads it.
Status CudaSchedules::make(const ManyRowsKey& key, Schedule& schedule, const CudaTables& tables, cudaStream_t stream) {
    std::vector<cuda::SequenceArgs> prompts = tables.prompts(key.group, key.only, key.blocks);
    if (std::none_of(prompts.begin(), prompts.end(), [](const cuda::SequenceArgs& s) { return s.n_query > 0; })) return {};
    // The prefill kernel reads every page. If blocks are missing, calls use another kernel. A graph with the prefill kernel
    // then finds no work, and its step is refused at the end.
    if (key.kernel && key.blocks == ManyRowsKey::Blocks::kAll && tables.lacks_blocks()) prompts.clear();
    schedule.rows = ManyRows(key, prompts, tables.walks());
    const size_t bytes = schedule.rows.bytes;
    const size_t room = std::max<size_t>(schedule.rows.room, 1 << 16);
    const bool renews = schedule.captured && schedule.table != tables.moves_of_entries();
    if (schedule.captured && (renews || !schedule.buffer.holds(room))) {
        // Graphs that still read the old place find no work there.
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
            if (schedule.step == 0) schedules_.erase(key);  // later begins do not try again
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

// Notes the reads of the step's captured calls. Earlier graphs of the same kind serve as long as what they read is current.
// Drops reads that are no longer current, so that no later step is refused for them.
void CudaSchedules::end(const CudaTables& tables) {
    if (capture_kind_.empty()) return;
    try {
        std::vector<CapturedRead>& reads = captured_kinds_[capture_kind_];
        std::erase_if(reads, [&](const CapturedRead& r) { return !is_current(r, tables); });
        for (const CapturedRead& r : capture_reads_) {
            if (std::find(reads.begin(), reads.end(), r) == reads.end()) reads.push_back(r);
        }
    } catch (const std::bad_alloc&) {
        captured_kinds_.clear();  // refuses replays rather than allow one whose reads are unknown
    }
    capture_kind_.clear();
    capture_reads_.clear();
}

}  // namespace ta
