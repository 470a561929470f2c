#include "src/attend/cuda/tables.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/cuda/any/decode/decode.h"
#include "src/kv/partition.h"

namespace ta {

static_assert(kNothingSeen == cuda::kNothingSeen);

using cuda::AppendTask;
using cuda::SequenceArgs;
using cuda::TablePatch;

namespace {

constexpr int kMostUnread = 64;  // so many begins in a row send an unread group's sequences

size_t bytes_of_tasks(size_t tasks) {
    return 16 + tasks * sizeof(AppendTask);
}

}  // namespace

// Finds the part of the buffer for the step's tasks: all steps of a kind have the same one. Zeroes the last step's part: a
// graph of another kind, launched by mistake, finds no tasks there.
Status CudaTables::place_tasks(const Step& step, cudaStream_t stream) {
    size_t most = 0;
    for (const StepMember& m : step.members) most += size_t(Step::most_touched(m.n_new));
    TA_RETURN_IF_ERROR(tasks_.reserve(std::max<size_t>(bytes_of_tasks(most), 1 << 16), "a step's new pages"));
    uint8_t* const before = std::exchange(tasks_at_, tasks_.data_of(bytes_of_tasks(most)));
    if (!before || before == tasks_at_) return {};
    return device_.check(cudaMemsetAsync(before, 0, bytes_of_tasks(0), stream), "emptying the table of new pages");
}

Status CudaTables::begin(const Step& step, bool has_graphs, cudaStream_t stream) {
    has_graphs_ = has_graphs;
    moves_ = pool_.blocks().moves();
    layers_in_order_ = step.layers_in_order;
    const bool partitioned = !step.members.empty() && step.members[0].sequence->partition;
    packs_ = pool_.residency().may_lack_blocks() && !pool_.numerics().batch_invariant && !partitioned;
    size_t tasks = 0, patches = 0;
    for (const StepMember& m : step.members) tasks += m.touched.size();
    TA_RETURN_IF_ERROR(place_tasks(step, stream));
    TA_RETURN_IF_ERROR(
        workspace_.reserve(std::max<size_t>(1, size_t(step.workspace_pages)) * workspace_stride(), "a step's INT8 pages"));
    if (pool_.blocks().has_forgotten()) {
        const size_t slot = pool_.geometry().token_slot_bytes;
        TA_RETURN_IF_ERROR(nothing_.reserve(slot, "forgotten blocks", [&](uint8_t* data) {
            return device_.check(cudaMemsetAsync(data, 0, slot, stream), "zeroing what stands for forgotten blocks");
        }));
    }
    const size_t tree_bytes = step.tree.size() * sizeof(TreeRow);
    if (tree_bytes > 0) TA_RETURN_IF_ERROR(trees_.reserve(std::max<size_t>(tree_bytes, 1 << 16), "a step's token trees"));
    for (const auto& g : groups_) {
        g->sent = false;
        TA_RETURN_IF_ERROR(hold_sequences(*g, step.queries.size(), stream));
    }
    TA_RETURN_IF_ERROR(place_rows(step, stream));
    for (const StepMember& m : step.members) patches += size_t(entries_of(m) - clean_entries(m));
    PinnedBuffer& pinned = pinned_[uploads_++ % std::size(pinned_)];
    const auto is_sent = [](const auto& g) { return g->captured || g->unread <= kMostUnread; };
    TA_RETURN_IF_ERROR(pinned.take(
        device_, bytes_of_tasks(tasks) + patches * sizeof(TablePatch) +
                     size_t(std::count_if(groups_.begin(), groups_.end(), is_sent)) * sequence_bytes(step.queries.size()) +
                     tree_bytes));
    cuda::StepTablesArgs args{};
    write_tasks(step, pinned, args);
    if (tree_bytes > 0) {
        void* staged = pinned.part(tree_bytes);
        std::memcpy(staged, step.tree.data(), tree_bytes);
        args.copies[cuda::StepTablesArgs::kCopies - 1] = {trees_.data(), staged, tree_bytes};
    }
    write_patches(step, pinned, args);
    write_queries(step);
    // One launch for the tables and one group, and one more for each further group.
    for (const auto& g : groups_) {
        if (!is_sent(g)) continue;
        ++g->unread;
        if (args.copies[1].bytes > 0) {
            TA_RETURN_IF_ERROR(launch(args, stream));
            args = {};
        }
        write_sequences(step, *g, pinned, args);
        g->sent = true;
    }
    TA_RETURN_IF_ERROR(launch(args, stream));
    TA_RETURN_IF_ERROR(pinned.record(device_, stream));
    for (const StepMember& m : step.members) {
        Row& row = rows_[m.sequence->slot];
        row.generation = m.sequence->generation;
        row.version = m.sequence->version;
        row.moves = moves_;
        row.clean = Step::untouched_blocks(m);
        row.committed = false;
    }
    return {};
}

CudaTables::Group* CudaTables::find_group(int group) const {
    const auto found = std::find_if(groups_.begin(), groups_.end(), [&](const auto& g) { return g->heads == group; });
    return found == groups_.end() ? nullptr : found->get();
}

bool CudaTables::use_group(int group) {
    Group* const g = find_group(group);
    if (!g || !g->sent) return false;
    used_ = g;
    g->unread = 0;
    return true;
}

const void* CudaTables::sequences_of(int group) const {
    const Group* const g = find_group(group);
    return g && g->sent ? g->memory.data() : nullptr;
}

bool CudaTables::any_prefill_of_any_group() const {
    return std::any_of(groups_.begin(), groups_.end(), [](const auto& g) { return g->sent && g->any_prefill; });
}

Status CudaTables::send_sequences(const Step& step, int group, cudaStream_t stream) {
    Group* g = find_group(group);
    if (!g) g = groups_.emplace_back(std::make_unique<Group>(device_, group)).get();
    TA_RETURN_IF_ERROR(hold_sequences(*g, step.queries.size(), stream));
    TA_RETURN_IF_ERROR(send_sequences(step, *g, stream));
    used_ = g;
    g->unread = 0;
    return {};
}

Status CudaTables::send_sequences(const Step& step, Group& group, cudaStream_t stream) {
    PinnedBuffer& pinned = pinned_[uploads_++ % std::size(pinned_)];
    TA_RETURN_IF_ERROR(pinned.take(device_, sequence_bytes(step.queries.size())));
    cuda::StepTablesArgs args{};
    write_sequences(step, group, pinned, args);
    TA_RETURN_IF_ERROR(launch(args, stream));
    TA_RETURN_IF_ERROR(pinned.record(device_, stream));
    group.sent = true;
    return {};
}

Status CudaTables::hold_sequences(Group& g, size_t batch, cudaStream_t stream) {
    if (batch <= g.capacity && g.capacity > 0) return {};
    const size_t capacity = std::max<size_t>(1024, 2 * batch);
    if (has_graphs_ && g.capacity > 0) TA_RETURN_IF_ERROR(empty_sequences(g, stream));
    TA_RETURN_IF_ERROR(g.memory.reserve(sequence_bytes(capacity), "a step's sequences"));
    g.capacity = capacity;
    return {};
}

void CudaTables::committed(const Step& step) {
    for (const StepMember& m : step.members) {
        Row& row = rows_[m.sequence->slot];
        row.committed = true;
        for (const PassingBlock& p : m.passing) row.clean = std::min(row.clean, p.index);  // another block comes there
    }
}

Status CudaTables::launch(const cuda::StepTablesArgs& args, cudaStream_t stream) {
    return device_.check(cudaError_t(cuda::launch_step_tables(args, stream)), "sending a step's tables");
}

// The number of the step's blocks whose entries are right already.
int64_t CudaTables::clean_entries(const StepMember& m) const {
    const Row& row = rows_[m.sequence->slot];
    const Sequence& s = *m.sequence;
    if (row.moves != moves_ || row.generation != s.generation || s.version != row.version + row.committed) return 0;
    return std::min(row.clean, Step::untouched_blocks(m));
}

// Zeroes the old place of the sequences: graphs that still read it find no work.
Status CudaTables::empty_sequences(const Group& g, cudaStream_t stream) {
    return device_.check(cudaMemsetAsync(g.memory.data(), 0, g.memory.bytes(), stream), "emptying a step's sequences");
}

// Grows the table to room for all blocks that the pool can have in memory: only forks need more. If attention is observed, each
// entry and kv head takes up to 64 more bytes, so the table grows by less. A graph that reads the old table finds no sequences,
// and its step is refused at the end.
Status CudaTables::grow_entries(size_t entries, cudaStream_t stream) {
    const Geometry& g = pool_.geometry();
    size_t slot = g.token_slot_bytes;
    for (const PageKind kind : {PageKind::kChannel, PageKind::kLow}) {
        if (g.slot_bytes(kind) > 0) slot = std::min(slot, g.slot_bytes(kind));
    }
    const uint64_t blocks = (pool_.blocks().budget() + pool_.tier_settings().host_budget) / slot;
    const size_t most = pool_.residency().observes_attention() ? (size_t{1} << 20) / g.most_kv_heads : size_t{1} << 24;
    const uint64_t wanted = std::clamp<uint64_t>(blocks + blocks / 4, 2 * entries, std::max(2 * entries, most));
    if (has_graphs_ && entries_.bytes() > 0) {
        for (const auto& held : groups_) {
            TA_RETURN_IF_ERROR(empty_sequences(*held, stream));
            TA_RETURN_IF_ERROR(held->memory.renew("a step's sequences"));
        }
        ++moves_of_entries_;
    }
    return entries_.reserve(std::max<size_t>(wanted * sizeof(uint64_t), 1 << 19), "a block table");
}

// Gives each of the step's sequences a row with room for its entries, and some more. If the table is full, gives up all rows
// first.
Status CudaTables::place_rows(const Step& step, cudaStream_t stream) {
    const auto capacity_for = [](int64_t entries) { return size_t(entries + entries / 4 + 16); };
    const size_t have = capacity();
    size_t pages = 0, all = 0, missing = 0;
    uint32_t slots = 0;
    for (const StepMember& m : step.members) slots = std::max(slots, m.sequence->slot + 1);
    if (rows_.size() < slots) rows_.resize(slots);
    for (const StepMember& m : step.members) {
        const size_t capacity = capacity_for(entries_of(m));
        all += capacity;
        if (rows_[m.sequence->slot].capacity < size_t(entries_of(m))) missing += capacity;
    }
    // Kernels count pages of all heads in 32 bits.
    for (const StepQueries& q : step.queries) pages += size_t((q.n_keys + kPageTokens - 1) / kPageTokens);
    const size_t most = INT32_MAX / pool_.geometry().most_kv_heads;
    if (pages > most)
        return fail(TA_E_LIMIT, "the step's queries see %zu blocks; with %u kv heads a GPU takes %zu", pages,
                    pool_.geometry().most_kv_heads, most);
    if (all > size_t{INT32_MAX})
        return fail(TA_E_LIMIT, "the step's sequences need %zu entries for blocks; a GPU takes 2^31 - 1", all);
    if (used_entries_ + missing > have) {
        if (all > have) TA_RETURN_IF_ERROR(grow_entries(all, stream));
        std::fill(rows_.begin(), rows_.end(), Row{});
        used_entries_ = 0;
    }
    for (const StepMember& m : step.members) {
        Row& row = rows_[m.sequence->slot];
        if (row.capacity >= size_t(entries_of(m)) && row.capacity > 0) continue;
        row = {};
        row.first = uint32_t(used_entries_);
        row.capacity = uint32_t(capacity_for(entries_of(m)));
        used_entries_ += row.capacity;
    }
    return {};
}

// The entry of the block before one of a member's touched blocks. 0: this rank does not have that block, or it was dropped.
uint64_t CudaTables::entry_before(const StepMember& m, const StepBlock& t) const {
    const int64_t n = t.index - m.touched.front().index;
    if (n > 0) return page_of(m.touched[size_t(n - 1)]);
    if (!m.sequence->all_ranks_have(t.index - 1)) return 0;
    const Block::Stored at = m.sequence->blocks[size_t(t.index - 1)]->stored();
    return at.slot ? uint64_t(uintptr_t(at.slot)) | cuda::entry_flags(at.kind) : 0;
}

uint64_t CudaTables::page_of(const StepBlock& t) const {
    if (t.workspace_page < 0) return uint64_t(uintptr_t(t.token->slot()));
    const uint64_t page = uint64_t(uintptr_t(workspace_.data())) + uint64_t(t.workspace_page) * workspace_stride();
    return layers_in_order_ ? page | cuda::kEntrySingleLayer : page;
}

// The entry under which later steps find the page.
uint64_t CudaTables::later_page_of(const StepBlock& t) const {
    const Block* const closed = t.closed_by_append(true);
    return closed ? uint64_t(uintptr_t(closed->slot())) | cuda::entry_flags(closed->kind()) : page_of(t);
}

AppendTask CudaTables::task_of(const StepMember& m, const StepBlock& t, int32_t index) const {
    AppendTask a{};
    a.token_page = page_of(t);
    a.copied_from = t.have > 0 && t.workspace_page >= 0 ? uint64_t(uintptr_t(t.token->slot())) : 0;
    const Block* const closed = t.closed_by_append(pool_.numerics().batch_invariant);
    a.channel_slot = closed ? uint64_t(uintptr_t(closed->slot())) : 0;
    a.row = int32_t(m.new_row + t.index * kPageTokens + t.have - m.length);
    a.sequence = int32_t(m.sequence->slot);
    a.have = uint8_t(t.have);
    a.end = uint8_t(t.end);
    a.stays_8_bits = t.stays_8_bits;
    a.scales_side = m.scales_side;
    a.index = index;
    a.previous = t.index > 0 ? entry_before(m, t) : 0;
    a.first_block = t.index == 0;
    a.begins_anew = t.begins_anew;
    return a;
}

// A redone block whose predecessor is not redone begins a run of tasks.
size_t CudaTables::write_redone(const Step& step, AppendTask* first) const {
    AppendTask* task = first;
    for (const StepMember& m : step.members) {
        int32_t index = 0;
        for (const StepBlock& t : m.touched) {
            if (t.redone) *task++ = task_of(m, t, index++);
        }
    }
    return size_t(task - first);
}

void CudaTables::write_tasks(const Step& step, PinnedBuffer& pinned, cuda::StepTablesArgs& args) {
    size_t tasks = 0;
    for (const StepMember& m : step.members) tasks += m.touched.size();
    const size_t bytes = bytes_of_tasks(tasks);
    auto* staged = static_cast<uint8_t*>(pinned.part(bytes));
    const int32_t header[4] = {int32_t(tasks), 0, 0, 0};
    std::memcpy(staged, header, sizeof header);
    auto* task = reinterpret_cast<AppendTask*>(staged + 16);
    pages_begin_ = false;
    for (const StepMember& m : step.members) {
        int32_t index = 0;
        for (const StepBlock& t : m.touched) {
            pages_begin_ |= t.have == 0 || t.begins_anew;
            *task++ = task_of(m, t, index++);
        }
    }
    args.copies[0] = {tasks_at_, staged, bytes};
}

void CudaTables::write_patches(const Step& step, PinnedBuffer& pinned, cuda::StepTablesArgs& args) {
    auto* const first = static_cast<TablePatch*>(pinned.part(0));
    TablePatch* patch = first;
    lacks_blocks_ = channel_blocks_ = false;
    may_lack_blocks_ = pool_.residency().may_drop();
    for (const StepMember& m : step.members) {
        const Partition* partition = m.sequence->partition.get();
        const auto is_here = [partition](int64_t b) { return !partition || partition->owns(b); };
        Row& row = rows_[m.sequence->slot];
        uint64_t entry = row.first;
        const int64_t clean = clean_entries(m), untouched = Step::untouched_blocks(m);
        row.lacks_blocks &= clean > 0;
        channel_blocks_ |= untouched > int64_t{pool_.numerics().sink_blocks};  // the blocks that the step writes are token
                                                                               // blocks
        entry += uint64_t(clean);
        for (int64_t b = clean; b < untouched; ++b) {
            const Block& block = *m.sequence->blocks[size_t(b)];
            const Block::Stored at = block.stored();
            const bool here = at.slot && is_here(b);
            *patch++ = {entry++, here ? uint64_t(uintptr_t(at.slot)) | cuda::entry_flags(at.kind) : lacking_entry()};
            row.lacks_blocks |= !at.slot && is_here(b);
        }
        // Counts a partition always: a graph of the step also serves steps in which this rank has other blocks.
        lacks_blocks_ |= row.lacks_blocks;
        may_lack_blocks_ |= row.lacks_blocks || partition;
        for (const StepBlock& t : m.touched) {
            if (pool_.numerics().batch_invariant) *patch++ = {entry++, later_page_of(t)};
        }
        for (const StepBlock& t : m.touched) *patch++ = {entry++, is_here(t.index) ? page_of(t) : lacking_entry()};
        if (row.lacks_blocks && packs_ && m.n_query > 1) write_packed(m, entry, patch);
    }
    args.patches = first;
    args.n_patches = size_t(patch - first);
    args.table = reinterpret_cast<uint64_t*>(entries_.data());
    pinned.part(args.n_patches * sizeof(TablePatch));
}

// Writes entries of the blocks that the member has, without gaps.
void CudaTables::write_packed(const StepMember& m, uint64_t entry, TablePatch*& patch) const {
    for (int64_t b = 0; b < Step::untouched_blocks(m); ++b) {
        const Block::Stored at = m.sequence->blocks[size_t(b)]->stored();
        if (at.slot) *patch++ = {entry++, uint64_t(uintptr_t(at.slot)) | cuda::entry_flags(at.kind)};
    }
    for (const StepBlock& t : m.touched) *patch++ = {entry++, page_of(t)};
}

// Finds which of the blocks that the queries see are missing, and the queries' place in the table without gaps. Matters only
// for prompts. If blocks lie below the device, the gaps stay: staging finds blocks by their entries.
void CudaTables::find_missing(const StepMember& m, const StepQueries& q) {
    cuda::SequenceArgs packed = queries_.back();
    Missing missing = Missing::kNone;
    const Row& row = rows_[m.sequence->slot];
    if (row.lacks_blocks && q.n_query == 1) missing = Missing::kAmong;
    if (row.lacks_blocks && q.n_query > 1) {
        const int64_t own = q.first_block + (q.n_keys - q.n_query) / kPageTokens,
                      stop = std::min(Step::untouched_blocks(m), q.first_block + (q.n_keys + kPageTokens - 1) / kPageTokens);
        packed.first_entry = int32_t(row.first + blocks_of(m));
        bool staged = !packs_;
        for (int64_t b = 0; b < stop; ++b) {
            const Block& block = *m.sequence->blocks[size_t(b)];
            const bool there = block.slot() != nullptr;
            staged |= there && block.tier() != TierKind::kDevice;
            if (b < q.first_block) {
                packed.first_entry += there;
            } else if (!there) {
                packed.n_keys -= kPageTokens;
                missing = b < own && missing != Missing::kAmong ? Missing::kBefore : Missing::kAmong;
            }
        }
        if (staged && missing == Missing::kBefore) missing = Missing::kAmong;
    }
    packed_.push_back(missing == Missing::kBefore ? packed : queries_.back());
    missing_.push_back(missing);
}

void CudaTables::write_queries(const Step& step) {
    const Partition* const partition = step.members.empty() ? nullptr : step.members[0].sequence->partition.get();
    block_stride_ = partition ? int32_t(partition->exchange->ranks()) : 1;
    queries_.clear();
    walks_.clear();
    packed_.clear();
    missing_.clear();
    for (const StepQueries& q : step.queries) {
        const StepMember& m = step.members[q.member];
        const int64_t first_entry = rows_[m.sequence->slot].first + q.first_block;
        queries_.push_back({int32_t(q.n_keys), int32_t(q.n_query), int32_t(q.row), int32_t(first_entry)});
        find_missing(m, q);
        walks_.push_back({partition ? m.sequence->partition->first_own() : 0, block_stride_});
    }
}

void CudaTables::write_sequences(const Step& step, Group& group, PinnedBuffer& pinned, cuda::StepTablesArgs& args) {
    const size_t batch = step.queries.size();
    std::span decode(static_cast<SequenceArgs*>(pinned.part(batch * sizeof(SequenceArgs))), batch);
    int32_t* numbers[kNumbers];
    for (int32_t*& n : numbers) n = static_cast<int32_t*>(pinned.part(bytes_of_numbers(batch)));
    const auto [pages_before, own_pages_before, first_block] = numbers;
    group.max_rows = 0;
    group.any_prefill = false;
    for (size_t i = 0; i < batch; ++i) {
        SequenceArgs s = queries_[i];
        const bool to_decode = s.n_query * int64_t(group.heads) <= cuda::kDecodeRows;
        if (to_decode) group.max_rows = std::max(group.max_rows, s.n_query * group.heads);
        group.any_prefill |= !to_decode;
        if (!to_decode) s.n_query = 0;
        decode[i] = s;
        first_block[i] = walks_[i].first;
    }
    cuda::count_pages(decode, pages_before);
    cuda::count_pages(decode, own_pages_before, first_block, block_stride_);
    args.copies[1] = {group.memory.data(), decode.data(), decode.size_bytes()};
    for (size_t n = 0; n < (block_stride_ > 1 ? kNumbers : 1); ++n)
        args.copies[2 + n] = {group.numbers_at(n), numbers[n], bytes_of_numbers(batch)};
}

void CudaTables::addresses(std::vector<uint64_t>& out) const {
    for (const uint8_t* data : {tasks_at_, entries_.data()}) out.push_back(uint64_t(uintptr_t(data)));
}

}  // namespace ta
