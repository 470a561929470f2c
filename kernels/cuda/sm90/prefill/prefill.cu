// Host side of prefill: the schedule, and the launch.
#include <algorithm>
#include <array>
#include <vector>

#include "kernels/cuda/sm90/prefill/kernel.cuh"
#include "kernels/cuda/sm90/prefill/prefill.h"

namespace ta::cuda {
namespace {

template <class Fn>
void for_each_tile(std::span<const SequenceArgs> sequences, int group, Fn fn) {
    for (size_t n = 0; n < sequences.size(); ++n) {
        const int64_t rows = int64_t(sequences[n].n_query) * group;
        for (int64_t row = 0; row < rows; row += kPrefillRows) fn(int(n), row, std::min(row + kPrefillRows, rows) - 1);
    }
}

// Loads the kernel and allows it its shared memory.
template <int D, bool kChannels, bool kOptions>
cudaError_t load() {
    constexpr size_t kBytes = sizeof(prefill::SharedMemory<D, kChannels>);
    static_assert(kBytes <= 227 * 1024, "what a CTA of Hopper may have");
    return cudaFuncSetAttribute(prefill::prefill_kernel<D, kChannels, kOptions>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                int(kBytes));
}

bool has_options(const AttendArgs& args) {
    return args.softcap > 0.0f || args.alibi_slope || args.exp == ExpMode::kSas;
}

template <int D, bool kChannels, bool kOptions>
cudaError_t launch(const AttendArgs& args, void* schedule, int ctas, cudaStream_t stream) {
    const auto kernel = prefill::prefill_kernel<D, kChannels, kOptions>;
    constexpr size_t kBytes = sizeof(prefill::SharedMemory<D, kChannels>);
    if (cudaError_t e = load<D, kChannels, kOptions>(); e != cudaSuccess) return e;
    kernel<<<ctas, prefill::kThreads, kBytes, stream>>>(args, static_cast<PrefillSchedule*>(schedule));
    return cudaGetLastError();
}

template <int D>
cudaError_t launch(const AttendArgs& args, void* schedule, int ctas, cudaStream_t stream) {
    const bool options = has_options(args);
    const auto kernel = args.heads ? (options ? launch<D, true, true> : launch<D, true, false>)
                                   : (options ? launch<D, false, true> : launch<D, false, false>);
    return kernel(args, schedule, ctas, stream);
}

}  // namespace

int64_t count_prefill_tiles(std::span<const SequenceArgs> sequences, int group) {
    int64_t n = 0;
    for (const SequenceArgs& s : sequences) n += (int64_t(s.n_query) * group + kPrefillRows - 1) / kPrefillRows;
    return n;
}

void plan_prefill(std::span<const SequenceArgs> sequences, int group, bool causal, int window, void* schedule) {
    // A counting sort by pages: this runs once per step, and the rows may be hundreds of thousands.
    constexpr int kClasses = 1024;
    std::array<int32_t, kClasses> place{};
    int32_t most_pages = 1;
    for (const SequenceArgs& s : sequences) most_pages = std::max(most_pages, (s.n_keys + kPageTokens - 1) / kPageTokens);
    const auto tile_of = [&](int n, int64_t row, int64_t last) {
        // Both ends of the visible range grow with the position.
        const SequenceArgs& s = sequences[size_t(n)];
        const int position = s.n_keys - s.n_query;
        const KeyRange low = visible_keys(causal, window, s.n_keys, position + int(row / group));
        const KeyRange high = visible_keys(causal, window, s.n_keys, position + int(last / group));
        PrefillTile t{};
        t.first_row = int32_t(row);
        t.page_begin = low.begin / kPageTokens;
        t.page_end = std::max(t.page_begin, (high.end + kPageTokens - 1) / kPageTokens);
        t.n_keys = s.n_keys, t.n_query = s.n_query, t.row = s.row, t.first_entry = s.first_entry;
        t.sequence = n;
        return t;
    };
    const auto class_of = [&](const PrefillTile& t) {
        return kClasses - 1 - int(int64_t(t.page_end - t.page_begin) * (kClasses - 1) / most_pages);
    };
    std::vector<PrefillTile> tiles;
    tiles.reserve(size_t(count_prefill_tiles(sequences, group)));
    for_each_tile(sequences, group, [&](int n, int64_t row, int64_t last) {
        tiles.push_back(tile_of(n, row, last));
        ++place[size_t(class_of(tiles.back()))];
    });
    int32_t before = 0;
    for (int32_t& n : place) {
        before += n;
        n = before - n;
    }
    auto* header = static_cast<PrefillSchedule*>(schedule);
    *header = {0, 0, int32_t(tiles.size()), 0};
    auto* out = reinterpret_cast<PrefillTile*>(header + 1);
    for (const PrefillTile& t : tiles) out[place[size_t(class_of(t))]++] = t;
}

const char* prefill_refusal(const AttendArgs& args) {
    if (args.head_dim != 128 && args.head_dim != 64) return "head_dim other than 64 and 128";
    if (args.p_levels > 255 || args.p_running) return "P of 16 bits, or in units of the running maximum";
    return nullptr;
}

cudaError_t load_prefill(const AttendArgs& args) {
    if (has_options(args)) return args.head_dim == 128 ? load<128, true, true>() : load<64, true, true>();
    return args.head_dim == 128 ? load<128, true, false>() : load<64, true, false>();
}

cudaError_t launch_prefill(const AttendArgs& args, void* schedule, int ctas, cudaStream_t stream) {
    if (prefill_refusal(args)) return cudaErrorInvalidValue;
    return args.head_dim == 128 ? launch<128>(args, schedule, ctas, stream) : launch<64>(args, schedule, ctas, stream);
}

}  // namespace ta::cuda
