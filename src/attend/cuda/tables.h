// A step's tables in device memory: the blocks that append writes, the block table, and the sequences. The block table persists
// between steps; only changed entries are sent. Only CUDA builds include this.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/cuda/any/append/append.h"
#include "kernels/cuda/any/tables/step_tables.h"
#include "kernels/cuda/common/block_walk.h"
#include "src/attend/cuda/attend.h"
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

    // Sends what a step on `stream` needs: also its sequences for each group that calls of the last steps, or graphs, have
    // used. `has_graphs`: graphs read the tables.
    Status begin(const Step& step, bool has_graphs, cudaStream_t stream);
    // Selects the group, query heads per kv head, for the functions below that tell of sequences. False: the device does not
    // have it.
    bool use_group(int group);
    // A graph reads the selected group's sequences: they are sent in all later steps.
    void keep_group() { used_->captured = true; }
    // Sends the step's sequences for calls with this group, and selects it.
    Status send_sequences(const Step& step, int group, cudaStream_t stream);
    // The step became part of its sequences: its entries stay good.
    void committed(const Step& step);

    const int32_t* n_tasks() const { return reinterpret_cast<const int32_t*>(tasks_at_); }
    const cuda::AppendTask* tasks() const { return reinterpret_cast<const cuda::AppendTask*>(tasks_at_ + 16); }
    const uint64_t* entries() const { return reinterpret_cast<const uint64_t*>(entries_.data()); }
    size_t entries_bytes() const { return used_entries_ * sizeof(uint64_t); }  // of all rows in use, other sequences' too
    // Sequences for the decode kernel: those with more query rows per kv head than it takes have n_query = 0.
    const cuda::SequenceArgs* sequences() const { return reinterpret_cast<const cuda::SequenceArgs*>(used_->memory.data()); }
    const int32_t* pages_before() const { return numbers_at(0); }
    // [total_new], in a step with token trees.
    const TreeRow* trees() const { return reinterpret_cast<const TreeRow*>(trees_.data()); }

    // Writes the tasks of drafts' blocks that are redone to host memory, `first` [redone blocks]. Returns how many.
    size_t write_redone(const Step& step, cuda::AppendTask* first) const;

    // If the sequences are spread over ranks, sequence i has the blocks first_block()[i] and every block_stride()-th after it
    // here.
    int32_t block_stride() const { return block_stride_; }  // 1: they are not spread
    const int32_t* first_block() const { return numbers_at(2); }
    const int32_t* own_pages_before() const { return numbers_at(1); }  // counts only the blocks here

    int group() const { return used_ ? used_->heads : 0; }   // the selected group; 0: none yet
    int max_decode_rows() const { return used_->max_rows; }  // the most query tokens x group of the sequences that decode takes
    bool any_prefill() const { return used_->any_prefill; }  // some sequences are left for prefill
    bool any_prefill_of_any_group() const;
    // Where calls with this group find the sequences; nullptr: the device does not have them.
    const void* sequences_of(int group) const;
    std::span<const cuda::SequenceArgs> queries() const { return queries_; }  // for each of Step::queries
    std::span<const cuda::BlockWalk> walks() const { return walks_; }         // for each of them, the blocks that are here
    std::vector<cuda::SequenceArgs> prompts(int group, ManyRowsKey::Only only, ManyRowsKey::Blocks blocks) const {
        return prompts_of(blocks == ManyRowsKey::Blocks::kPacked ? packed_ : queries_, group, only, blocks, missing_);
    }

    static int64_t blocks_of(const StepMember& m) { return Step::untouched_blocks(m) + int64_t(m.touched.size()); }
    // Entries of a member. Under batch_invariant touched blocks have two: as later steps find them, and after all blocks, at
    // stage 1. If prompts may lack blocks, the blocks that are there may have second entries after all, without gaps.
    int64_t entries_of(const StepMember& m) const {
        const int64_t blocks = blocks_of(m);
        if (pool_.numerics().batch_invariant) return blocks + int64_t(m.touched.size());
        return packs_ && m.n_query > 1 ? 2 * blocks : blocks;
    }
    // The `touched`-th block's stage 1 entry, relative to the member's first entry.
    static int32_t own_entry(const StepMember& m, int32_t touched) { return int32_t(blocks_of(m)) + touched; }
    uint32_t first_entry(const Sequence& s) const { return rows_[s.slot].first; }  // of a member of the step
    size_t capacity() const { return entries_.bytes() / sizeof(uint64_t); }        // in entries
    // How often the block table has moved while there were graphs. Data for the new table must not lie where a graph that reads
    // the old one finds it.
    uint64_t moves_of_entries() const { return moves_of_entries_; }
    bool pages_begin() const { return pages_begin_; }    // some page of the step begins, or begins anew
    bool lacks_blocks() const { return lacks_blocks_; }  // some blocks of the step are dropped or forgotten
    bool may_lack_blocks() const {
        return may_lack_blocks_;
    }                                                                 // lacks_blocks(), or drop_coldest is on, or other ranks
                                                                      // have some
    bool may_have_channel_blocks() const { return channel_blocks_; }  // some blocks of the step

    // Adds the addresses in captured launches. The workspace's pages are in the tables.
    void addresses(std::vector<uint64_t>& out) const;

  private:
    // A sequence's entries in the table: where they are, and which are right.
    struct Row {
        uint32_t generation = 0;
        uint32_t first = 0, capacity = 0;
        uint64_t version = 0;  // of the sequence, when the `clean` entries were right
        uint64_t moves = 0;    // of the pool's blocks, at that time
        int64_t clean = 0;
        bool lacks_blocks = false;  // some of the clean entries are of missing blocks
        bool committed = false;     // the step of these entries was committed, which changed the sequence's version once
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
    void write_packed(const StepMember& m, uint64_t entry, cuda::TablePatch*& patch) const;
    void find_missing(const StepMember& m, const StepQueries& q);
    // Arrays of numbers: one for each of the step's queries, and one more.
    static constexpr size_t kNumbers = 3;
    static size_t bytes_of_numbers(size_t batch) { return round_up((batch + 1) * sizeof(int32_t), 16); }
    static size_t sequence_bytes(size_t batch) {
        return batch * sizeof(cuda::SequenceArgs) + kNumbers * bytes_of_numbers(batch);
    }
    // The queries for calls of one group (query heads per kv head), each with the keys of a sequence.
    struct Group {
        Group(CudaDevice& device, int group) : heads(group), memory(device) {}
        int32_t* numbers_at(size_t array) const {
            return reinterpret_cast<int32_t*>(memory.data() + capacity * sizeof(cuda::SequenceArgs) +
                                              array * bytes_of_numbers(capacity));
        }
        const int heads;
        DeviceBuffer memory;  // SequenceArgs [capacity], then arrays of numbers
        size_t capacity = 0;
        bool sent = false;  // the device has them for this step
        bool captured = false;
        int unread = 0;  // how often they were sent since a call read them
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
    // Entries of the table have flags in the low bits of addresses.
    size_t workspace_stride() const {
        const Geometry& g = pool_.geometry();
        return round_up(layers_in_order_ ? g.largest_token_page_bytes : g.token_slot_bytes, cuda::kEntryFlags + 1);
    }
    Status launch(const cuda::StepTablesArgs& args, cudaStream_t stream);

    const Pool& pool_;
    CudaDevice& device_;
    DeviceBuffer tasks_;           // int32 count, at 16: AppendTask
    uint8_t* tasks_at_ = nullptr;  // this step's part of tasks_
    DeviceBuffer entries_;         // uint64, cut into rows
    DeviceBuffer workspace_;       // INT8 pages of blocks that are opened and closed in one step
    DeviceBuffer trees_;
    bool layers_in_order_ = false;  // the workspace has pages of one layer
    DeviceBuffer nothing_;          // entries of missing blocks point here; graphs of earlier steps may read it
    std::vector<std::unique_ptr<Group>> groups_;
    Group* used_ = nullptr;
    std::vector<Row> rows_;  // by slot of the sequence
    size_t used_entries_ = 0;
    uint64_t moves_of_entries_ = 0;
    uint64_t moves_ = 0;  // of the pool's blocks, when the step began
    bool has_graphs_ = false;
    int32_t block_stride_ = 1;
    bool pages_begin_ = false, lacks_blocks_ = false, may_lack_blocks_ = false, channel_blocks_ = false;
    std::vector<cuda::SequenceArgs> queries_;
    std::vector<cuda::BlockWalk> walks_;
    std::vector<cuda::SequenceArgs> packed_;  // queries_ without gaps, if Missing::kBefore
    std::vector<Missing> missing_;            // for each of queries_
    bool packs_ = false;                      // prompts of the step that lack blocks have second entries without gaps
    PinnedBuffer pinned_[4];
    uint64_t uploads_ = 0;
};

}  // namespace ta
