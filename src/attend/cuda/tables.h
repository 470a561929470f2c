// A step's tables in device memory: the blocks that append writes, the block table, and the sequences. The block table stays
// from step to step; only entries that changed are sent. Only CUDA builds include this.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/cuda/any/append/append.h"
#include "kernels/cuda/any/tables/step_tables.h"
#include "kernels/cuda/common/block_walk.h"
#include "src/attend/step.h"
#include "src/device/cuda/memory.h"

namespace ta {

class CudaTables {
  public:
    CudaTables(const Pool& pool, CudaDevice& device)
        : pool_(pool),
          device_(device),
          tasks_(device),
          entries_(device),
          workspace_(device),
          trees_(device),
          nothing_(device) {}

    // Sends what a step of `stream` needs, its sequences for all groups that calls of the last steps, or graphs, have used.
    // `has_graphs`: there are graphs that read the tables.
    Status begin(const Step& step, bool has_graphs, cudaStream_t stream);
    // From now on what is said of sequences is for calls with `group` query heads per kv head. False: the device does not have
    // that.
    bool use_group(int group);
    // A graph reads the sequences of the group that is used: they are sent in all steps to come.
    void keep_group() { used_->captured = true; }
    // The step's sequences, for such calls from now on.
    Status send_sequences(const Step& step, int group, cudaStream_t stream);
    // The step became part of its sequences.
    void committed(const Step& step);

    const int32_t* n_tasks() const { return reinterpret_cast<const int32_t*>(tasks_at_); }
    const cuda::AppendTask* tasks() const { return reinterpret_cast<const cuda::AppendTask*>(tasks_at_ + 16); }
    const uint64_t* entries() const { return reinterpret_cast<const uint64_t*>(entries_.data()); }
    size_t entries_bytes() const { return used_entries_ * sizeof(uint64_t); }  // with other sequences', all that are in use
    // Sequences for the decode kernel: those of more query rows per kv head than it takes have n_query = 0 here.
    const cuda::SequenceArgs* sequences() const { return reinterpret_cast<const cuda::SequenceArgs*>(used_->memory.data()); }
    const int32_t* pages_before() const { return numbers_at(0); }
    // [total_new] of a step that was given as token trees.
    const TreeRow* trees() const { return reinterpret_cast<const TreeRow*>(trees_.data()); }

    // Tasks of drafts' blocks that are redone, `first` [redone blocks] in host memory. Returns how many.
    size_t write_redone(const Step& step, cuda::AppendTask* first) const;

    // If the sequences are spread over ranks, their blocks here are first_block()[i] and every block_stride()-th after it.
    int32_t block_stride() const { return block_stride_; }  // 1: they are not
    const int32_t* first_block() const { return numbers_at(2); }
    const int32_t* own_pages_before() const { return numbers_at(1); }  // of these alone

    int group() const { return used_ ? used_->heads : 0; }   // that is used; 0: none yet
    int max_decode_rows() const { return used_->max_rows; }  // of the sequences that decode takes, query tokens x group
    bool any_prefill() const { return used_->any_prefill; }  // a sequence is left for prefill
    bool any_prefill_of_any_group() const;
    // The address at which calls of the group find the sequences; nullptr: there is none.
    const void* sequences_of(int group) const;
    std::span<const cuda::SequenceArgs> queries() const { return queries_; }  // Step::queries
    std::span<const cuda::BlockWalk> walks() const { return walks_; }         // of each, its blocks here

    static int64_t blocks_of(const StepMember& m) { return Step::untouched_blocks(m) + int64_t(m.touched.size()); }
    // Under batch_invariant touched blocks have two entries: as later steps find them and, behind all blocks, at stage 1.
    int64_t entries_of(const StepMember& m) const {
        return blocks_of(m) + (pool_.numerics().batch_invariant ? int64_t(m.touched.size()) : 0);
    }
    // The latter's place for the `touched`-th of them.
    static int32_t own_entry(const StepMember& m, int32_t touched) { return int32_t(blocks_of(m)) + touched; }
    uint32_t first_entry(const Sequence& s) const { return rows_[s.slot].first; }  // of a member of the step
    size_t capacity() const { return entries_.bytes() / sizeof(uint64_t); }        // in entries
    // How often the block table went elsewhere while there were graphs. Data written for the new one must not lie where a
    // graph finds it that reads the old one.
    uint64_t moves_of_entries() const { return moves_of_entries_; }
    bool pages_begin() const { return pages_begin_; }                 // of the step's, or begin anew
    bool lacks_blocks() const { return lacks_blocks_; }               // some of the step's were dropped
    bool may_lack_blocks() const { return may_lack_blocks_; }         // or drop_coldest is on, or they are other ranks'
    bool may_have_channel_blocks() const { return channel_blocks_; }  // of the step's

    // Adds the addresses that captured launches point at. The workspace's pages are in the tables.
    void addresses(std::vector<uint64_t>& out) const;

  private:
    // The entries of a sequence in the table: where they are, and which of them are right.
    struct Row {
        uint32_t generation = 0;
        uint32_t first = 0, capacity = 0;
        uint64_t version = 0;  // of the sequence when `clean` entries were right
        uint64_t moves = 0;    // of the pool's blocks until then
        int64_t clean = 0;
        bool lacks_blocks = false;  // some of the clean entries are of those
        bool committed = false;     // the sequence has changed once since, by the step that these entries were made for
    };
    struct Upload;

    Status place_tasks(const Step& step, cudaStream_t stream);
    Status place_rows(const Step& step, cudaStream_t stream);
    struct Group;
    Status hold_sequences(Group& group, size_t batch, cudaStream_t stream);
    Status send_sequences(const Step& step, Group& group, cudaStream_t stream);
    Status empty_sequences(const Group& group, cudaStream_t stream);
    Status grow_entries(size_t entries, cudaStream_t stream);
    int64_t clean_entries(const StepMember& m) const;
    void write_sequences(const Step& step, Group& group, PinnedBuffer& pinned, cuda::StepTablesArgs& args);
    void write_queries(const Step& step);
    // Arrays of a number for each of the step's queries and one more.
    static constexpr size_t kNumbers = 3;
    static size_t bytes_of_numbers(size_t batch) { return round_up((batch + 1) * sizeof(int32_t), 16); }
    static size_t sequence_bytes(size_t batch) {
        return batch * sizeof(cuda::SequenceArgs) + kNumbers * bytes_of_numbers(batch);
    }
    // The queries as calls of one number of query heads per kv head read them, each with the keys of a sequence.
    struct Group {
        Group(CudaDevice& device, int group) : heads(group), memory(device) {}
        int32_t* numbers_at(size_t array) const {
            return reinterpret_cast<int32_t*>(memory.data() + capacity * sizeof(cuda::SequenceArgs) +
                                              array * bytes_of_numbers(capacity));
        }
        const int heads;
        DeviceBuffer memory;  // SequenceArgs [capacity], then arrays of numbers
        size_t capacity = 0;
        bool sent = false;  // the device has this step's
        bool captured = false;
        int unread = 0;  // times they were sent since a call read them
        int max_rows = 0;
        bool any_prefill = false;
    };
    Group* find_group(int group) const;
    int32_t* numbers_at(size_t array) const { return used_->numbers_at(array); }
    void write_tasks(const Step& step, PinnedBuffer& pinned, cuda::StepTablesArgs& args);
    void write_patches(const Step& step, PinnedBuffer& pinned, cuda::StepTablesArgs& args);
    cuda::AppendTask task_of(const StepMember& m, const StepBlock& t, int32_t index) const;
    uint64_t page_of(const StepBlock& t) const;
    uint64_t later_page_of(const StepBlock& t) const;
    uint64_t entry_before(const StepMember& m, const StepBlock& t) const;
    uint64_t lacking_entry() const { return uint64_t(uintptr_t(nothing_.data())) | cuda::kEntryDropped; }
    // Low address bits of a table's entries are flags.
    size_t workspace_stride() const {
        const Geometry& g = pool_.geometry();
        return round_up(layers_in_order_ ? g.largest_token_page_bytes : g.token_slot_bytes, cuda::kEntryFlags + 1);
    }
    Status launch(const cuda::StepTablesArgs& args, cudaStream_t stream);

    const Pool& pool_;
    CudaDevice& device_;
    DeviceBuffer tasks_;           // int32 count, at 16: AppendTask
    uint8_t* tasks_at_ = nullptr;  // this step's
    DeviceBuffer entries_;         // uint64, in rows
    DeviceBuffer workspace_;       // INT8 pages of blocks that close in the step that opens them
    DeviceBuffer trees_;
    bool layers_in_order_ = false;  // the workspace has pages of one layer
    DeviceBuffer nothing_;          // what entries of forgotten blocks lead to: graphs of earlier steps read it in vain
    std::vector<std::unique_ptr<Group>> groups_;
    Group* used_ = nullptr;
    std::vector<Row> rows_;  // by slot of the sequence
    size_t used_entries_ = 0;
    uint64_t moves_of_entries_ = 0;
    uint64_t moves_ = 0;  // of the pool's blocks when the step began
    bool has_graphs_ = false;
    int32_t block_stride_ = 1;
    bool pages_begin_ = false, lacks_blocks_ = false, may_lack_blocks_ = false, channel_blocks_ = false;
    std::vector<cuda::SequenceArgs> queries_;
    std::vector<cuda::BlockWalk> walks_;
    PinnedBuffer pinned_[4];
    uint64_t uploads_ = 0;
};

}  // namespace ta
