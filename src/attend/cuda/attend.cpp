#include "src/attend/cuda/attend.h"

#include <algorithm>
#include <cstring>

namespace ta {

using cuda::AttendArgs;
using cuda::SequenceArgs;

Status check_device_memory(const CudaDevice& device, const void* data, const char* name) {
    if (!data) return {};
    cudaPointerAttributes a{};
    TA_RETURN_IF_ERROR(device.check(cudaPointerGetAttributes(&a, data), "looking at a pointer"));
    if (a.type == cudaMemoryTypeUnregistered) {
        return fail(TA_E_INVALID, "%s lies in pageable host memory; on a GPU context tensors lie in device memory", name);
    }
    if (a.type == cudaMemoryTypeDevice && a.device != device.ordinal()) {
        return fail(TA_E_INVALID, "%s lies on GPU %d; the context is on GPU %d", name, a.device, device.ordinal());
    }
    return {};
}

void set_options(const AttendSettings& settings, AttendArgs& args) {
    args.scale = settings.scale;
    args.causal = settings.mask == TA_MASK_CAUSAL;
    args.window = int32_t(std::min<int64_t>(settings.window, kMaxCudaKeys));
    args.softcap = settings.softcap;
    args.alibi_slope = settings.alibi_slopes;
    args.sink = settings.sinks;
    args.exp = settings.exp;
}

void set_p(ta_p p, int64_t rows, int32_t range_pages, AttendArgs& args) {
    const PFormat format = p_format(p, rows);
    args.p_levels = format.levels;
    args.p_running = format.running;
    args.range_pages = range_pages;
}

ManyRowsKey choose_for_many_rows(const CudaDevice& device, ta_p p, AttendArgs& args) {
    set_p(p, cuda::kDecodeRows + 1, kPromptRangePages, args);
    const auto* kernel = cuda::choose_prefill(device.kernel_generation(), device.properties().major,
                                              int(device.properties().sharedMemPerBlockOptin), args);
    ManyRowsKey key{args.group, args.causal, args.window, kernel};
    if (!kernel) return key;
    key.kv_heads = args.kv_heads;
    key.resident_keys = kernel->resident_keys(args);
    key.most_expanded = int(kMostExpandedBytes / cuda::expanded_page_bytes(args.head_dim, args.kv_heads));
    if (args.heads) key.expands = ManyRowsKey::Expands::kOften;
    // SAS drops keys by the maximum of a range of pages, so ranges must not be split. Under a window rows begin within a range.
    const bool sas = args.exp == ExpMode::kSas;
    if (!sas || args.window == 0) key.ctas = device.properties().multiProcessorCount;
    if (sas) key.cut_every = kPromptRangePages;
    return key;
}

namespace {

// Calls fn(chunk, position of its first query token) for each chunk of up to 16 rows that the key wants. A chunk has the whole
// pages that its rows see: what a page's tokens share must be as in the sequence.
template <class Fn>
void for_each_chunk(const ManyRowsKey& key, std::span<const SequenceArgs> sequences, Fn fn) {
    const int32_t tokens = cuda::kDecodeRows / key.group;
    for (const SequenceArgs& s : sequences) {
        int32_t begin = 0, end = s.n_query;
        if (key.observed != ManyRowsKey::kAll) {
            begin = std::max(0, s.n_query - int32_t(kObservedTokens)) + key.observed * tokens;
            end = std::min(end, begin + tokens);
        }
        for (int32_t first = begin; first < end; first += tokens) {
            SequenceArgs c = s;
            c.n_query = std::min(tokens, end - first);
            c.row = s.row + first;
            const int32_t position = s.n_keys - s.n_query + first, last = position + c.n_query - 1;
            const int32_t keys = cuda::visible_keys(key.causal, key.window, s.n_keys, last).end;
            // Pages before the window.
            const int32_t lowest = key.trees ? s.n_keys - s.n_query : position;  // a tree's token may have a lower position
            const int32_t left_out =
                cuda::visible_keys(key.causal, key.window, s.n_keys, lowest).begin / kPageTokens * kPageTokens;
            c.n_keys = std::min<int32_t>(s.n_keys, (keys + kPageTokens - 1) / kPageTokens * kPageTokens) - left_out;
            c.first_entry += left_out / kPageTokens;
            fn(c, position - left_out);
        }
    }
}

}  // namespace

// A sequence counts as a tree by its number of query tokens, so that a graph has all possible trees in the same launch.
std::vector<SequenceArgs> prompts_of(std::span<const SequenceArgs> sequences, int group, ManyRowsKey::Only only,
                                     ManyRowsKey::Blocks blocks, std::span<const Missing> missing) {
    using Only = ManyRowsKey::Only;
    using Blocks = ManyRowsKey::Blocks;
    const auto are_wanted = [blocks](Missing m) {
        if (blocks == Blocks::kWhole || blocks == Blocks::kLacking) return (m == Missing::kNone) == (blocks == Blocks::kWhole);
        return (m != Missing::kAmong) == (blocks == Blocks::kPacked);
    };
    std::vector<SequenceArgs> prompts(sequences.begin(), sequences.end());
    for (size_t i = 0; i < prompts.size(); ++i) {
        SequenceArgs& s = prompts[i];
        const bool wanted = (only == Only::kAll || only == (s.n_query <= kTreeTokens ? Only::kTrees : Only::kChains)) &&
                            (blocks == Blocks::kAll || are_wanted(missing[i]));
        if (!wanted || s.n_query * int64_t(group) <= cuda::kDecodeRows) s.n_query = 0;
    }
    return prompts;
}

int count_observed_chunks(int group, std::span<const SequenceArgs> sequences) {
    const int tokens = cuda::kDecodeRows / group;
    int most = 0;
    for (const SequenceArgs& s : sequences) most = std::max(most, std::min(s.n_query, int32_t(kObservedTokens)));
    return (most + tokens - 1) / tokens;
}

ManyRows::ManyRows(const ManyRowsKey& key, std::span<const SequenceArgs> sequences, std::span<const cuda::BlockWalk> walks)
    : kernel(key.kernel), ctas(key.ctas) {
    if (kernel) {
        const cuda::PrefillShape shape{key.group, key.causal, key.window, key.kv_heads, key.ctas, key.cut_every, kernel->rows};
        tiles = cuda::PrefillPlan(sequences, shape, walks);
        bytes = tiles.bytes();
        if (key.resident_keys > 0) resident = cuda::PrefillPlan::resident(sequences, shape, key.resident_keys, key.ctas, walks);
        resident_at = round_up(bytes, 16);
        if (!resident.tiles().empty()) bytes = resident_at + resident.bytes();
        entries_at = room = round_up(bytes, 16);
        if (key.expands == ManyRowsKey::Expands::kNever) return;
        room += size_t(key.most_expanded) * sizeof(uint32_t);
        entries = tiles.entries();
        // The first of two tiles may see one page less.
        const bool often = 2 * tiles.pages() >= (2 * kernel->least_reads - 1) * int64_t(entries.size());
        const bool wanted = often || key.expands == ManyRowsKey::Expands::kAlways;
        if (!wanted || entries.size() > size_t(key.most_expanded)) entries.clear();
        if (!entries.empty()) bytes = entries_at + entries.size() * sizeof(uint32_t);
        return;
    }
    for_each_chunk(key, sequences, [this](const SequenceArgs& c, int32_t) {
        ++chunks;
        pages += (c.n_keys + kPageTokens - 1) / kPageTokens;
    });
    max_rows_of_one = cuda::kDecodeRows / key.group * key.group;
    counts_at = round_up(size_t(chunks) * sizeof(SequenceArgs), 16);
    positions_at = counts_at + size_t(chunks + 1) * sizeof(int32_t);
    bytes = room = positions_at + size_t(chunks) * sizeof(int32_t);
}

void ManyRows::write(const ManyRowsKey& key, std::span<const SequenceArgs> sequences, uint8_t* to) const {
    if (kernel) {
        tiles.write(to);
        std::copy(entries.begin(), entries.end(), reinterpret_cast<uint32_t*>(to + entries_at));
        if (!resident.tiles().empty()) resident.write(to + resident_at);
        return;
    }
    auto* const first = reinterpret_cast<SequenceArgs*>(to);
    SequenceArgs* next = first;
    auto* position = reinterpret_cast<int32_t*>(to + positions_at);
    for_each_chunk(key, sequences, [&](const SequenceArgs& c, int32_t first_position) {
        *next++ = c;
        *position++ = first_position;
    });
    cuda::count_pages({first, next}, reinterpret_cast<int32_t*>(to + counts_at));
}

Status plan_few_rows(const CudaDevice& device, const AttendArgs& args, int max_rows, bool q_rest, AttendWork& work) {
    work.args = args;
    const cuda::DecodeShape shape{args.head_dim, args.kv_heads, args.group, args.batch, max_rows, 0, q_rest};
    return device.check(cuda::plan_decode(device.ordinal(), shape, &work.plan), "planning attention");
}

Status plan_many_rows(const CudaDevice& device, const AttendArgs& args, const ManyRows& rows, AttendWork& work) {
    work = {};
    work.args = args;
    if (rows.kernel) {
        work.kernel = rows.kernel;
        // A graph that captures this call may need the parts when it is replayed.
        work.parts_bytes = cuda::prefill_workspace_bytes(rows.kernel->rows, args.head_dim, rows.ctas);
        work.args.long_tiles = args.long_tiles && rows.tiles.has_long_tiles();
        work.args.resident = args.resident && !args.heads && !rows.resident.tiles().empty();
        work.expand.pages = args.heads ? int32_t(rows.entries.size()) : 0;
        return {};
    }
    if (rows.pages * args.kv_heads > INT32_MAX) {
        return fail(TA_E_LIMIT, "the queries, 16 rows of a kv head at a time, read %lld pages; the limit is 2^31 - 1",
                    (long long)(rows.pages * args.kv_heads));
    }
    work.args.batch = rows.chunks;
    return plan_few_rows(device, work.args, rows.max_rows_of_one, false, work);
}

void set_schedule(const ManyRows& rows, uint8_t* schedule, AttendWork& work) {
    if (rows.kernel) {
        work.schedule = schedule + (work.args.resident ? rows.resident_at : 0);
        work.expand.entries = reinterpret_cast<const uint32_t*>(schedule + rows.entries_at);
        return;
    }
    work.args.sequences = reinterpret_cast<const SequenceArgs*>(schedule);
    work.args.pages_before = reinterpret_cast<const int32_t*>(schedule + rows.counts_at);
    work.args.first_position = reinterpret_cast<const int32_t*>(schedule + rows.positions_at);
}

Status launch_attend(const CudaDevice& device, const AttendWork& work, void* workspace, cudaStream_t stream) {
    if (work.kernel) {
        const int ctas = device.properties().multiProcessorCount;
        AttendArgs args = work.args;
        if (work.expand.pages > 0) {
            TA_RETURN_IF_ERROR(device.check(cudaError_t(cuda::launch_expand(args, work.expand, stream)), "expanding pages"));
            args.table = work.expand.table, args.heads = nullptr;
        }
        return device.check(work.kernel->launch(args, work.schedule, work.parts, ctas, stream), "a prefill");
    }
    const cuda::DecodeMass* mass = work.mass.page_lse ? &work.mass : nullptr;
    return device.check(cuda::launch_decode(work.plan, work.args, workspace, stream, mass, work.tree), "attention");
}

}  // namespace ta
