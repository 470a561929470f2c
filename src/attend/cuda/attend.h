// How a call of attention runs on a GPU: which kernels, their inputs, the launches. Shared by steps of plans and dense calls.
// Only CUDA builds include this.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/any/decode/decode.h"
#include "kernels/cuda/any/expand/expand.h"
#include "kernels/cuda/common/attend_args.h"
#include "kernels/cuda/variants.h"
#include "src/attend/call.h"
#include "src/device/cuda/memory.h"

namespace ta {

// Most memory of a plan for expanded pages.
inline constexpr size_t kMostExpandedBytes = size_t{256} << 20;

inline constexpr int64_t kMaxCudaKeys = int64_t{1} << 30;  // of a sequence: positions and slopes stay well within 32 bits

inline cuda::TensorArgs tensor_args(const TensorView& v) {
    return {v.data, v.stride_token, v.stride_head, v.dtype};
}

// TA_E_INVALID: kernels of the device cannot read the memory. nullptr is allowed.
Status check_device_memory(const CudaDevice& device, const void* data, const char* name);
// A tensor without tokens may point anywhere.
inline Status check_device_memory(const CudaDevice& device, const TensorView& v, const char* name) {
    return check_device_memory(device, v.tokens > 0 ? v.data : nullptr, name);
}

// Sets the options that are the same for all kernels: mask, scale and so on.
void set_options(const AttendSettings& settings, cuda::AttendArgs& args);

// What a schedule depends on beside lengths. Schedules are for sequences with more query rows than the decode kernel takes at
// once.
struct ManyRowsKey {
    int group;
    bool causal;
    int window;
    const cuda::PrefillVariant* kernel;  // nullptr: the decode kernel, which gets the queries in chunks
    int observed = kAll;                 // only this chunk of each sequence's last kObservedTokens query tokens
    // For a prefill kernel.
    int kv_heads = 0;
    int ctas = 0;           // CTAs among which it may split the pages of rows; 0: it may not
    int cut_every = 2;      // pages between places where it may split
    int resident_keys = 0;  // keys of a resident tile
    // Whether channel pages are expanded: never; if enough tiles read them; always, as the kernel cannot read them.
    enum class Expands : uint8_t { kNever, kOften, kAlways };
    Expands expands = Expands::kNever;
    int most_expanded = 0;  // most pages that a plan has memory for
    // In a step with token trees: all sequences, those that may be trees, or the others.
    enum class Only : uint8_t { kAll, kTrees, kChains };
    Only only = Only::kAll;
    // In a step with missing blocks: which sequences, by Missing. kWhole: kNone. kLacking: not kNone. kPacked: not kAmong;
    // their missing blocks are left out of the table, so positions shift. kUnpacked: kAmong.
    enum class Blocks : uint8_t { kAll, kWhole, kLacking, kPacked, kUnpacked };
    Blocks blocks = Blocks::kAll;
    bool trees = false;  // some sequences may be token trees
    static constexpr int kAll = -1;
    auto operator<=>(const ManyRowsKey&) const = default;
};
// Dropped blocks that a sequence's queries would see: none; only some before the blocks of the queries themselves; others, too.
enum class Missing : uint8_t { kNone, kBefore, kAmong };
// The sequences with more rows than the decode kernel takes at once; the others get n_query = 0. `missing`: by sequence.
std::vector<cuda::SequenceArgs> prompts_of(std::span<const cuda::SequenceArgs> sequences, int group,
                                           ManyRowsKey::Only only = ManyRowsKey::Only::kAll,
                                           ManyRowsKey::Blocks blocks = ManyRowsKey::Blocks::kAll,
                                           std::span<const Missing> missing = {});
// The most chunks of observed query tokens in any sequence.
int count_observed_chunks(int group, std::span<const cuda::SequenceArgs> sequences);

// Sets P's format for up to `rows` rows per kv head, and the ranges of pages that belong to it.
void set_p(ta_p p, int64_t rows, int32_t range_pages, cuda::AttendArgs& args);
// Chooses the kernel, and sets P's format in `args`.
ManyRowsKey choose_for_many_rows(const CudaDevice& device, ta_p p, cuda::AttendArgs& args);

// A prefill kernel's tiles. If no prefill kernel can run the call: chunks of up to 16 rows for the decode kernel, each with
// query tokens [i, i + c) of a sequence, their positions, and the pages that they see.
struct ManyRows {
    size_t bytes = 0;
    size_t room = 0;                               // at least `bytes`; the number of entries does not change it
    const cuda::PrefillVariant* kernel = nullptr;  // ManyRowsKey's
    cuda::PrefillPlan tiles;                       // the prefill kernel's
    cuda::PrefillPlan resident;                    // the same rows as resident tiles, if possible; for calls that allow it
    size_t resident_at = 0;                        // after the parts above
    std::vector<uint32_t> entries;                 // entries of the block table whose channel pages are expanded first
    size_t entries_at = 0;                         // after all else, with room for ManyRowsKey::most_expanded
    int ctas = 0;                                  // ManyRowsKey's
    int chunks = 0;                                // number of chunks: the sequences that the decode kernel sees
    size_t counts_at = 0;                          // pages_before of the chunks
    size_t positions_at = 0;                       // first_position of the chunks
    int64_t pages = 0;                             // sum over the chunks
    int max_rows_of_one = 0;                       // the most query tokens x group of a chunk

    ManyRows() = default;
    // Leaves out sequences without queries. `walks`: the blocks of each sequence that a prefill kernel reads; empty: all.
    ManyRows(const ManyRowsKey& key, std::span<const cuda::SequenceArgs> sequences,
             std::span<const cuda::BlockWalk> walks = {});
    // Writes `bytes` bytes to host memory; the sequences are those of the constructor.
    void write(const ManyRowsKey& key, std::span<const cuda::SequenceArgs> sequences, uint8_t* to) const;
};

// One launch of the decode kernel or a prefill kernel.
struct AttendWork {
    cuda::AttendArgs args{};
    const cuda::PrefillVariant* kernel = nullptr;  // nullptr: the decode kernel
    cuda::DecodePlan plan{};                       // for the decode kernel
    uint8_t* schedule = nullptr;                   // for the prefill kernel
    size_t parts_bytes = 0;                        // of the memory for parts of its tiles
    void* parts = nullptr;                         // that memory; nullptr: no tile is split
    cuda::ExpandArgs expand{};                     // pages to expand first; or none
    cuda::DecodeMass mass{};                       // for the decode kernel, unless page_lse is nullptr
    const TreeRow* tree = nullptr;                 // for the decode kernel
};
// Plans a launch of the decode kernel for sequences of at most `max_rows` query rows. args has P's format already.
Status plan_few_rows(const CudaDevice& device, const cuda::AttendArgs& args, int max_rows, bool q_rest, AttendWork& work);
// Plans a launch for the sequences that `rows` was made from.
Status plan_many_rows(const CudaDevice& device, const cuda::AttendArgs& args, const ManyRows& rows, AttendWork& work);
// Sets the addresses of what `rows` has written; it will be in device memory at `schedule`.
void set_schedule(const ManyRows& rows, uint8_t* schedule, AttendWork& work);
// `workspace`: work.plan.workspace_bytes of device memory, nullptr if that is 0. work.parts: work.parts_bytes of it.
Status launch_attend(const CudaDevice& device, const AttendWork& work, void* workspace, cudaStream_t stream);

}  // namespace ta
