#include "src/attend/cuda/staging.h"

#include <algorithm>
#include <new>

#include "kernels/cuda/any/decode/decode.h"
#include "src/device/cuda/moves.h"
#include "src/kv/partition.h"

namespace ta {

using cuda::TablePatch;

CudaStaging::~CudaStaging() {
    const CudaScope scope(device_.ordinal());
    if (copies_) {
        cudaStreamSynchronize(copies_);
        cudaStreamDestroy(copies_);
    }
    release();  // if a step ended within a capture
    for (const Part& part : parts_) {
        if (part.arrived) cudaEventDestroy(part.arrived);
        if (part.read) cudaEventDestroy(part.read);
    }
}

Status CudaStaging::begin(const Step& step, const CudaTables& tables, bool replays, cudaStream_t stream) {
    step_ = &step;
    step_tables_ = &tables;
    undecided_ =
        pool_.residency().has_memory_below() && pool_.tier_settings().staging != StagingMode::kNever && step.total_query > 0;
    const bool known = tables.group() > 0 && (known_.rows_at_once > 0 || !tables.any_prefill());
    return undecided_ && known && !replays ? decide(known_, stream) : Status();
}

Status CudaStaging::decide(const Call& call, cudaStream_t stream) {
    undecided_ = false;
    if (!choose_pages(call) || !take_ring()) return {};
    TA_RETURN_IF_ERROR(open());
    TA_RETURN_IF_ERROR(send_tables(stream));
    // The slots may have been others', and the plan's last step may still read its ring.
    TA_RETURN_IF_ERROR(device_.wait_for_fences(copies_, nullptr));
    active_ = true;
    const uint32_t layers = pool_.geometry().layers;
    for (uint32_t layer = 0; layer < std::min(uint32_t(ring_.parts), layers); ++layer) TA_RETURN_IF_ERROR(load(layer));
    return {};
}

// Counts how often a call reads a page of each member.
std::vector<HostPages> CudaStaging::count_reads(const Call& call) const {
    const int group = step_tables_->group();
    std::vector<HostPages> host(step_->members.size());
    const StepQueries* before = nullptr;
    int64_t reads = 0;  // reads of the same pages so far
    for (const StepQueries& q : step_->queries) {
        const bool many = q.n_query * group > cuda::kDecodeRows;
        if (!before || before->member != q.member || before->first_block != q.first_block) reads = 0;
        reads += many ? reads_of_page(q.n_query, group, call.rows_at_once, call.window) : std::min<int64_t>(q.n_query, 1);
        host[q.member].reads = std::max(host[q.member].reads, reads);
        before = &q;
    }
    return host;
}

// By kind: the page's size in the layer where it is largest; 0: the pool has no such kind.
CudaStaging::PageSizes CudaStaging::largest_pages() const {
    const Geometry& g = pool_.geometry();
    PageSizes largest{};
    for (uint32_t layer = 0; layer < g.layers; ++layer) {
        for (const PageKind kind :
             {PageKind::kToken, PageKind::kChannel, PageKind::kLow, PageKind::kPassedToken, PageKind::kPassedChannel}) {
            if (g.slot_bytes(kind) > 0 && g.has_page(kind, layer))
                largest[size_t(kind)] = std::max(largest[size_t(kind)], g.page_bytes(kind, layer));
        }
    }
    return largest;
}

// Calls fn(where it is stored, block, bytes) for the member's pages in memory below the device. Skips pages before all keys
// that its first query token sees.
template <class Fn>
void CudaStaging::for_each_host_page(const StepMember& m, int64_t window, const PageSizes& largest, Fn fn) const {
    const size_t most = pool_.geometry().slot_bytes(ring_kind());
    const Partition* partition = m.sequence->partition.get();
    const int64_t seen = window > 0 ? m.first_query - window + 1 : 0;
    for (int64_t b = std::max<int64_t>(seen, 0) / kPageTokens; b < Step::untouched_blocks(m); ++b) {
        const Block& block = *m.sequence->blocks[size_t(b)];
        if (!is_memory_below(block.tier()) || (partition && !partition->owns(b))) continue;
        const Block::Stored at = block.stored();
        const size_t bytes = largest[size_t(at.kind)];
        if (bytes > 0 && bytes <= most) fn(at, b, bytes);
    }
}

// Chooses the pages in memory below the device of the sequences for which staging pays. False: there are none.
bool CudaStaging::choose_pages(const Call& call) {
    const int64_t least = pool_.tier_settings().staging == StagingMode::kAuto ? 2 : 1;
    std::vector<HostPages> host = count_reads(call);
    const auto may_gain = [least](const HostPages& pages) { return pages.reads >= least; };
    if (std::none_of(host.begin(), host.end(), may_gain)) return false;  // mostly decode, for which no block is looked at
    const PageSizes largest = largest_pages();
    for (size_t i = 0; i < host.size(); ++i) {
        if (!may_gain(host[i])) continue;
        for_each_host_page(step_->members[i], call.window, largest,
                           [&](const Block::Stored&, int64_t, size_t bytes) { host[i].bytes += bytes; });
    }
    pages_.clear();
    page_bytes_.clear();
    for (const uint32_t i : choose_staged(host, pool_.tier_settings().staging, device_.moves().up_bytes_per_s())) {
        const StepMember& m = step_->members[i];
        const int64_t first_entry = step_tables_->first_entry(*m.sequence);
        for_each_host_page(m, call.window, largest, [&](const Block::Stored& at, int64_t b, size_t bytes) {
            const Tenant tenant = m.sequence->tenant_of(b);
            tenant_ = pages_.empty() || tenant_ == tenant ? tenant : kUnknownTenant;
            pages_.push_back({at.slot, at.kind, uint32_t(first_entry + b)});
            page_bytes_.push_back(uint32_t(bytes));
        });
    }
    return !pages_.empty();
}

// Takes free slots of the pool, as many as are needed and allowed. False: there are none.
bool CudaStaging::take_ring() {
    const Geometry& g = pool_.geometry();
    const size_t slot_bytes = g.slot_bytes(ring_kind());
    const size_t wanted = count_ring_slots(page_bytes_, g.layers > 1 ? 2 : 1, slot_bytes);
    slots_ =
        pool_.blocks().acquire_scratch(ring_kind(), std::min(wanted, size_t(pool_.tier_settings().staging_bytes / slot_bytes)));
    ring_ = cut_ring(page_bytes_, slots_.size(), slot_bytes);
    pages_.resize(ring_.pages);
    return !pages_.empty();
}

Status CudaStaging::open() {
    if (copies_) return {};
    int least = 0, greatest = 0;
    // High priority: if a kernel makes the copies, it must run before the layers' kernels. It takes few multiprocessors, and
    // these kernels hold theirs for long.
    TA_RETURN_IF_ERROR(device_.check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for stream priorities"));
    for (Part& part : parts_) {
        for (cudaEvent_t* e : {&part.arrived, &part.read}) {
            if (!*e)
                TA_RETURN_IF_ERROR(device_.check(cudaEventCreateWithFlags(e, cudaEventDisableTiming), "creating an event"));
        }
    }
    return device_.check(cudaStreamCreateWithPriority(&copies_, cudaStreamNonBlocking, greatest), "creating a stream");
}

// Makes a copy of the step's table for each part of the ring, with the addresses there.
Status CudaStaging::send_tables(cudaStream_t stream) {
    const size_t bytes = round_up(step_tables_->entries_bytes(), 16);
    TA_RETURN_IF_ERROR(tables_.reserve(2 * bytes, "block tables of staged pages"));
    for (int p = 0; p < ring_.parts; ++p) {
        TA_RETURN_IF_ERROR(device_.check(cudaMemcpyAsync(tables_.data() + size_t(p) * bytes, step_tables_->entries(), bytes,
                                                         cudaMemcpyDeviceToDevice, stream),
                                         "copying a block table"));
    }
    PinnedBuffer& pinned = patches_[sent_++ % std::size(patches_)];
    TA_RETURN_IF_ERROR(pinned.take(device_, ring_.places.size() * sizeof(TablePatch)));
    auto* patch = static_cast<TablePatch*>(pinned.part(ring_.places.size() * sizeof(TablePatch)));
    cuda::StepTablesArgs args{};
    args.patches = patch;
    args.n_patches = ring_.places.size();
    args.table = reinterpret_cast<uint64_t*>(tables_.data());
    for (size_t i = 0; i < ring_.places.size(); ++i) {
        const Page& page = pages_[i % ring_.pages];
        const uint64_t flags = cuda::kEntrySingleLayer | cuda::entry_flags(page.kind);
        const StagingRing::Place& place = ring_.places[i];
        const uint64_t address = uint64_t(uintptr_t(slots_[place.slot].slot)) + place.offset;
        *patch++ = {i / ring_.pages * (bytes / sizeof(uint64_t)) + page.entry, address | flags};
    }
    TA_RETURN_IF_ERROR(device_.check(cudaError_t(cuda::launch_step_tables(args, stream)), "sending a block table"));
    return pinned.record(device_, stream);
}

// Starts to copy a layer's pages, after the kernels that read its part of the ring.
Status CudaStaging::load(uint32_t layer) {
    const Geometry& g = pool_.geometry();
    const size_t p = layer % uint32_t(ring_.parts);
    Part& part = parts_[p];
    part.layer = -1;
    if (part.is_read) TA_RETURN_IF_ERROR(device_.check(cudaStreamWaitEvent(copies_, part.read, 0), "waiting for a layer"));
    copies_of_layer_.clear();
    uint64_t bytes = 0;
    for (size_t i = 0; i < pages_.size(); ++i) {
        const StagingRing::Place& place = ring_.places[p * ring_.pages + i];
        const PageKind kind = pages_[i].kind;
        if (!g.has_page(kind, layer)) continue;  // no call looks for it
        copies_of_layer_.push_back(
            {slots_[place.slot].slot + place.offset, pages_[i].slot + g.page_offset(kind, layer), g.page_bytes(kind, layer)});
        bytes += copies_of_layer_.back().bytes;
    }
    started_ = true;
    TA_RETURN_IF_ERROR(device_.moves().enqueue(copies_of_layer_, false, route(bytes), copies_));
    TA_RETURN_IF_ERROR(device_.check(cudaEventRecord(part.arrived, copies_), "recording an event"));
    part.layer = layer;
    Pool::Counters& counters = pool_.counters();
    counters.staged_pages += pages_.size();
    counters.staged_bytes += bytes;
    return {};
}

// Loads a layer early. If that fails, it is loaded when it is attended to.
void CudaStaging::load_ahead(uint32_t layer) {
    try {
        (void)load(layer);
    } catch (const std::bad_alloc&) {
        parts_[layer % uint32_t(ring_.parts)].layer = -1;
    }
}

// Uses the kernel only for pages for which the engine takes twice as long: the kernel takes multiprocessors from the layers
// that run meanwhile, and copies that end before these layers delay nothing.
MoveRoute CudaStaging::route(uint64_t bytes) const {
    const MoveRoute route = pool_.mover()->route();
    if (route != MoveRoute::kCalibrated) return route;
    return 2 * bytes >= device_.move_crossover().to_device * pages_.size() ? MoveRoute::kCopyEngine : MoveRoute::kKernel;
}

void CudaStaging::see(const Call& call) {
    if (call.rows_at_once > 0) known_.rows_at_once = call.rows_at_once;
    const bool wider = call.window == 0 || (known_.window > 0 && call.window > known_.window);
    if (!seen_ || wider) known_.window = call.window;
    seen_ = true;
}

Result<const uint64_t*> CudaStaging::before_attend(uint32_t layer, const Call& call, bool* staged, cudaStream_t stream) {
    *staged = false;
    see(call);
    if (undecided_) TA_RETURN_IF_ERROR(decide(known_, stream));
    if (!active_) return step_tables_->entries();
    const bool in_order = last_layer_ + 1 == layer || last_layer_ < 0;
    // Loads a layer that comes out of order only now: late, but correct.
    if (part_of(layer).layer != layer) TA_RETURN_IF_ERROR(load(layer));
    // The part of the layer before may be overwritten: that layer's attend has been enqueued, and this is no second one.
    if (ring_.parts == 2 && in_order && layer + 1 < pool_.geometry().layers && part_of(layer + 1).layer != layer + 1)
        load_ahead(layer + 1);
    staged_part_ = layer % ring_.parts;
    TA_RETURN_IF_ERROR(device_.check(cudaStreamWaitEvent(stream, parts_[staged_part_].arrived, 0), "waiting for staged pages"));
    last_layer_ = layer;
    *staged = true;
    return reinterpret_cast<const uint64_t*>(tables_.data() +
                                             size_t(staged_part_) * round_up(step_tables_->entries_bytes(), 16));
}

Status CudaStaging::after_attend(cudaStream_t stream) {
    if (staged_part_ < 0) return {};
    Part& part = parts_[staged_part_];
    staged_part_ = -1;
    used_ = true;
    part.is_read = true;
    TA_RETURN_IF_ERROR(device_.check(cudaEventRecord(part.read, stream), "recording an event"));
    // With one part the next layer's copies start after this attend, not after what the caller does in between. A step without
    // new tokens may attend to this layer again.
    const int64_t next = last_layer_ + 1;
    if (ring_.parts == 2 || step_->total_new == 0 || next == pool_.geometry().layers) return {};
    load_ahead(uint32_t(next));
    return {};
}

void CudaStaging::finish(cudaStream_t stream) {
    if (used_) ++pool_.counters().staged_steps;
    // Waits for copies that no attend has waited for: the step was aborted, or left to a graph.
    if (started_ && cudaEventRecord(parts_[0].arrived, copies_) == cudaSuccess)
        cudaStreamWaitEvent(stream, parts_[0].arrived, 0);
    step_ = nullptr;
    undecided_ = active_ = used_ = started_ = seen_ = false;
    last_layer_ = staged_part_ = -1;
    for (Part& part : parts_) part.layer = -1, part.is_read = false;
}

void CudaStaging::release() {
    for (const BlockStore::Scratch& slot : slots_) pool_.blocks().release_scratch(ring_kind(), slot, tenant_);
    slots_.clear();
}

}  // namespace ta
