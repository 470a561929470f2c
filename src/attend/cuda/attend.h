// How a call of attention runs on a GPU: which kernels, what they read, the launches. Steps of plans and dense calls share it.
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

// Of a plan, for expanded pages.
inline constexpr size_t kMostExpandedBytes = size_t{256} << 20;

inline constexpr int64_t kMaxCudaKeys = int64_t{1} << 30;  // of a sequence, so that positions and slopes fit 32 bits with room

inline cuda::TensorArgs tensor_args(const TensorView& v) {
    return {v.data, v.stride_token, v.stride_head, v.dtype};
}

// TA_E_INVALID unless kernels of the device can read the memory; nullptr is fine.
Status check_device_memory(const CudaDevice& device, const void* data, const char* name);
// A tensor without tokens may point anywhere.
inline Status check_device_memory(const CudaDevice& device, const TensorView& v, const char* name) {
    return check_device_memory(device, v.tokens > 0 ? v.data : nullptr, name);
}

// The options of a call: mask, scale and what else is the same for all kernels.
void set_options(const AttendSettings& settings, cuda::AttendArgs& args);

// More query rows of a sequence than the decode kernel takes at once. The inputs of their schedule beside lengths.
struct ManyRowsKey {
    int group;
    bool causal;
    int window;
    const cuda::PrefillVariant* kernel;  // nullptr: the decode kernel, with chunks of the queries
    int observed = kAll;                 // only this chunk of each sequence's last kObservedTokens query tokens
    // Of a prefill kernel.
    int kv_heads = 0;
    int ctas = 0;           // if it may split the pages of rows between them, else 0
    int cut_every = 2;      // at which pages it may
    int resident_keys = 0;  // of its resident tiles
    // Channel pages: if so many tiles read them that it pays, or always, since the kernel knows none.
    enum class Expands : uint8_t { kNever, kOften, kAlways };
    Expands expands = Expands::kNever;
    int most_expanded = 0;  // pages, of those that a plan has memory for
    // Of a step with token trees: the sequences that may be one, or the others.
    enum class Only : uint8_t { kAll, kTrees, kChains };
    Only only = Only::kAll;
    bool trees = false;  // some of the sequences may be token trees
    static constexpr int kAll = -1;
    auto operator<=>(const ManyRowsKey&) const = default;
};
// The sequences that have more rows than the decode kernel takes at once; the others' n_query is 0.
std::vector<cuda::SequenceArgs> prompts_of(std::span<const cuda::SequenceArgs> sequences, int group,
                                           ManyRowsKey::Only only = ManyRowsKey::Only::kAll);
// Chunks of the observed query tokens, of the sequence that has most.
int count_observed_chunks(int group, std::span<const cuda::SequenceArgs> sequences);

// P's format for up to `rows` rows per kv head, and the ranges of pages that go with it.
void set_p(ta_p p, int64_t rows, int32_t range_pages, cuda::AttendArgs& args);
// Sets P's format in `args` and chooses.
ManyRowsKey choose_for_many_rows(const CudaDevice& device, ta_p p, cuda::AttendArgs& args);

// A prefill kernel's tiles or, if none can run the call, chunks of up to 16 rows for the decode kernel: query tokens [i, i + c) of
// a sequence, with their positions and the pages that they see something of.
struct ManyRows {
    size_t bytes = 0;
    size_t room = 0;                               // as many or more: entries do not add to it
    const cuda::PrefillVariant* kernel = nullptr;  // ManyRowsKey's
    cuda::PrefillPlan tiles;                       // the prefill kernel's
    cuda::PrefillPlan resident;     // the same rows as resident tiles, where they can be; for calls that allow it
    size_t resident_at = 0;         // behind the others
    std::vector<uint32_t> entries;  // of the block table, whose channel pages are expanded first
    size_t entries_at = 0;          // behind all else, with room for ManyRowsKey::most_expanded
    int ctas = 0;                   // ManyRowsKey's
    int chunks = 0;                 // sequences that the decode kernel sees
    size_t counts_at = 0;           // their pages_before
    size_t positions_at = 0;        // their first_position
    int64_t pages = 0;              // of all of them
    int max_rows_of_one = 0;        // query tokens x group of any of them

    ManyRows() = default;
    // Leaves out sequences without queries. `walks`: which of each sequence's blocks a prefill kernel reads; empty: all.
    ManyRows(const ManyRowsKey& key, std::span<const cuda::SequenceArgs> sequences,
             std::span<const cuda::BlockWalk> walks = {});
    // Writes the `bytes` of the same sequences to host memory.
    void write(const ManyRowsKey& key, std::span<const cuda::SequenceArgs> sequences, uint8_t* to) const;
};

// One launch: of the decode kernel or a prefill kernel.
struct AttendWork {
    cuda::AttendArgs args{};
    const cuda::PrefillVariant* kernel = nullptr;  // nullptr: the decode kernel
    cuda::DecodePlan plan{};                       // the decode kernel's
    uint8_t* schedule = nullptr;                   // the prefill kernel's
    size_t parts_bytes = 0;                        // of the memory that parts of its tiles need
    void* parts = nullptr;                         // that memory; none where no tile is split
    cuda::ExpandArgs expand{};                     // pages that are expanded first; or none
    cuda::DecodeMass mass{};                       // the decode kernel's, unless page_lse is nullptr
    const TreeRow* tree = nullptr;                 // the decode kernel's
};
// Sequences of at most `max_rows` query rows for the decode kernel. P's format is set already.
Status plan_few_rows(const CudaDevice& device, const cuda::AttendArgs& args, int max_rows, bool q_rest, AttendWork& work);
// The sequences that `rows` was made of.
Status plan_many_rows(const CudaDevice& device, const cuda::AttendArgs& args, const ManyRows& rows, AttendWork& work);
// Sets the addresses of what `rows` wrote, which will lie in device memory at `schedule`.
void set_schedule(const ManyRows& rows, uint8_t* schedule, AttendWork& work);
// `workspace`: work.plan.workspace_bytes of device memory, none where that is 0. work.parts points to work.parts_bytes.
Status launch_attend(const CudaDevice& device, const AttendWork& work, void* workspace, cudaStream_t stream);

}  // namespace ta
