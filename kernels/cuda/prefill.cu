// Host side of prefill: the schedule, and the launch.
#include <algorithm>
#include <cstring>
#include <queue>
#include <utility>
#include <vector>

#include "kernels/cuda/prefill.h"
#include "kernels/cuda/prefill_kernel.cuh"

namespace ta::cuda {
namespace {

// What a tile costs beside its pages, in pages: loading and rotating queries, the first and the last block.
constexpr int64_t kTileCost = 6;

int64_t tile_cost(const PrefillTile& t) {
    return t.page_end - t.page_begin + kTileCost;
}

template <int D, bool kFractions>
cudaError_t launch(const AttendArgs& args, const void* schedule, int ctas, cudaStream_t stream) {
    const auto kernel = prefill::prefill_kernel<D, kFractions>;
    constexpr size_t kBytes = sizeof(prefill::SharedMemory<D>);
    static_assert(kBytes <= 227 * 1024, "what a CTA of Hopper may have");
    if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kBytes));
        e != cudaSuccess)
        return e;
    kernel<<<ctas, prefill::kThreads, kBytes, stream>>>(args, static_cast<const uint8_t*>(schedule));
    return cudaGetLastError();
}

}  // namespace

int64_t count_prefill_tiles(std::span<const SequenceArgs> sequences, int group, int kv_heads) {
    int64_t n = 0;
    for (const SequenceArgs& s : sequences) n += (int64_t(s.n_query) * group + kPrefillRows - 1) / kPrefillRows * kv_heads;
    return n;
}

void plan_prefill(std::span<const SequenceArgs> sequences, int group, int kv_heads, bool causal, int window, int ctas,
                  void* schedule) {
    std::vector<PrefillTile> tiles;
    tiles.reserve(size_t(count_prefill_tiles(sequences, group, kv_heads)));
    for (size_t n = 0; n < sequences.size(); ++n) {
        const SequenceArgs& s = sequences[n];
        const int64_t rows = int64_t(s.n_query) * group;
        for (int head = 0; head < kv_heads; ++head) {
            for (int64_t row = 0; row < rows; row += kPrefillRows) {
                const int64_t last = std::min(row + kPrefillRows, rows) - 1;
                // Both ends of the visible range grow with the position.
                const int position = s.n_keys - s.n_query;
                const KeyRange low = visible_keys(causal, window, s.n_keys, position + int(row / group));
                const KeyRange high = visible_keys(causal, window, s.n_keys, position + int(last / group));
                PrefillTile t{};
                t.head = head;
                t.first_row = int32_t(row);
                t.page_begin = low.begin / kPageTokens;
                t.page_end = std::max(t.page_begin, (high.end + kPageTokens - 1) / kPageTokens);
                t.n_keys = s.n_keys;
                t.n_query = s.n_query;
                t.row = s.row;
                t.first_entry = s.first_entry;
                t.sequence = int32_t(n);
                tiles.push_back(t);
            }
        }
    }
    std::stable_sort(tiles.begin(), tiles.end(),
                     [](const PrefillTile& a, const PrefillTile& b) { return tile_cost(a) > tile_cost(b); });
    std::vector<std::vector<int32_t>> lists(size_t(ctas), std::vector<int32_t>{});
    std::priority_queue<std::pair<int64_t, int>, std::vector<std::pair<int64_t, int>>, std::greater<>> least;
    for (int c = 0; c < ctas; ++c) least.emplace(0, c);
    for (size_t n = 0; n < tiles.size(); ++n) {
        const auto [work, cta] = least.top();
        least.pop();
        lists[size_t(cta)].push_back(int32_t(n));
        least.emplace(work + tile_cost(tiles[n]), cta);
    }
    auto* begin = static_cast<int32_t*>(schedule);
    auto* out = reinterpret_cast<PrefillTile*>(static_cast<uint8_t*>(schedule) + prefill_tiles_offset(ctas));
    int32_t written = 0;
    for (int c = 0; c < ctas; ++c) {
        begin[c] = written;
        for (int32_t n : lists[size_t(c)]) out[written++] = tiles[size_t(n)];
    }
    begin[ctas] = written;
}

const char* prefill_refusal(const AttendArgs& args) {
    if (args.head_dim != 128 && args.head_dim != 64) return "head_dim other than 64 and 128";
    if (args.p_levels != 255 || args.p_running) return "P other than 8 bits of 255 levels";
    return nullptr;
}

cudaError_t launch_prefill(const AttendArgs& args, const void* schedule, int ctas, cudaStream_t stream) {
    if (prefill_refusal(args)) return cudaErrorInvalidValue;
    if (args.head_dim == 128)
        return args.heads ? launch<128, true>(args, schedule, ctas, stream) : launch<128, false>(args, schedule, ctas, stream);
    return args.heads ? launch<64, true>(args, schedule, ctas, stream) : launch<64, false>(args, schedule, ctas, stream);
}

}  // namespace ta::cuda
