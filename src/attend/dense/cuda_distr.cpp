// TA_DENSE_DISTR on a GPU: converts K and V to tiles of F16, groups the channels of Q's blocks, and runs a kernel of
// kDistrVariants.
#include <algorithm>

#include "kernels/cuda/any/dense/dense.h"
#include "src/attend/cuda/attend.h"
#include "src/attend/dense/cuda_run.h"

namespace ta {
namespace {

using cuda::DistrArgs;
using cuda::DistrKeys;
using cuda::DistrRows;
using cuda::SequenceArgs;

class DistrRun final : public CudaDenseRun {
  public:
    using CudaDenseRun::CudaDenseRun;

    Status prepare() override;
    void write(uint8_t* inputs, uint8_t* base) const override;
    Status launch(const uint8_t* inputs, uint8_t* base, uint32_t* replaced, cudaStream_t stream) override;

  private:
    Status list_sequences();
    void order_blocks();
    DistrArgs args(uint8_t* base) const;

    const int d_ = int(call_.k.head_dim), kv_heads_ = int(call_.k.heads), q_heads_ = int(call_.q.heads);
    std::vector<SequenceArgs> sequences_;
    std::vector<DistrKeys> tiles_;
    std::vector<DistrRows> blocks_;
    size_t sequences_at_ = 0, tiles_at_ = 0, blocks_at_ = 0, nonfinite_at_ = 0, k_at_ = 0, v_at_ = 0, k_unit_at_ = 0,
           v_log2_at_ = 0, order_at_ = 0, q_at_ = 0, q_unit_at_ = 0;
};

Status DistrRun::list_sequences() {
    for (size_t b = 0; b + 1 < call_.k_offsets.size(); ++b) {
        const int64_t first = call_.k_offsets[b], n_keys = call_.k_offsets[b + 1] - first, row = call_.q_offsets[b],
                      n_query = call_.q_offsets[b + 1] - row;
        sequences_.push_back({int32_t(n_keys), int32_t(n_query), int32_t(row), int32_t(tiles_.size())});
        for (int64_t key = 0; key < n_keys; key += cuda::kDistrKeyTile)
            tiles_.push_back({int32_t(first + key), int32_t(std::min<int64_t>(cuda::kDistrKeyTile, n_keys - key))});
        for (int64_t r = 0; r < n_query; r += kDistrRows) blocks_.push_back({int32_t(b), int32_t(r)});
    }
    if (int64_t(tiles_.size()) * kv_heads_ > INT32_MAX || int64_t(blocks_.size()) * q_heads_ > INT32_MAX) {
        return fail(TA_E_LIMIT,
                    "the call has %zu tiles of 128 keys and %zu blocks of 128 query tokens; on a GPU their products "
                    "with the heads of k and q are at most 2^31 - 1",
                    tiles_.size(), blocks_.size());
    }
    return {};
}

// Sorts blocks that see the most keys to the front, so that none of them is left for the end.
void DistrRun::order_blocks() {
    const AttendSettings& options = call_.settings;
    const auto keys_of = [&](const DistrRows& block) {
        const SequenceArgs& s = sequences_[size_t(block.sequence)];
        const bool causal = options.mask == TA_MASK_CAUSAL;
        const int64_t first = int64_t(s.n_keys) - s.n_query + block.first_row,
                      last = first + std::min(s.n_query - block.first_row, kDistrRows) - 1;
        return visible_keys<int64_t>(causal, options.window, s.n_keys, last).end -
               visible_keys<int64_t>(causal, options.window, s.n_keys, first).begin;
    };
    std::stable_sort(blocks_.begin(), blocks_.end(),
                     [&](const DistrRows& a, const DistrRows& b) { return keys_of(a) > keys_of(b); });
}

Status DistrRun::prepare() {
    TA_RETURN_IF_ERROR(list_sequences());
    order_blocks();
    const size_t of_keys = tiles_.size() * size_t(kv_heads_), of_rows = blocks_.size() * size_t(q_heads_);
    sequences_at_ = layout_.take(sequences_.size() * sizeof(SequenceArgs));
    tiles_at_ = layout_.take(tiles_.size() * sizeof(DistrKeys));
    blocks_at_ = layout_.take(blocks_.size() * sizeof(DistrRows));
    inputs_end_ = layout_.bytes();
    nonfinite_at_ = layout_.take(sizeof(uint32_t));
    k_at_ = layout_.take(of_keys * size_t(cuda::distr_tile_bytes(d_)), 128);
    v_at_ = layout_.take(of_keys * size_t(cuda::distr_tile_bytes(d_)), 128);
    k_unit_at_ = layout_.take(of_keys * sizeof(float));
    v_log2_at_ = layout_.take(of_keys * sizeof(float));
    order_at_ = layout_.take(of_rows * size_t(d_));
    q_at_ = layout_.take(of_rows * size_t(kDistrRows * 2 * distr_stored_groups(d_, call_.group_size)));
    q_unit_at_ = layout_.take(of_rows * kDistrRows * sizeof(float));
    return {};
}

void DistrRun::write(uint8_t* inputs, uint8_t*) const {
    put(inputs, sequences_at_, sequences_);
    put(inputs, tiles_at_, tiles_);
    put(inputs, blocks_at_, blocks_);
}

DistrArgs DistrRun::args(uint8_t* base) const {
    DistrArgs a{};
    a.attend.head_dim = d_;
    a.attend.kv_heads = kv_heads_;
    a.attend.group = q_heads_ / kv_heads_;
    a.attend.batch = int32_t(sequences_.size());
    a.attend.sequences = at<SequenceArgs>(base, sequences_at_);
    a.attend.q = tensor_args(call_.q);
    a.attend.out = tensor_args(call_.out);
    a.attend.lse = call_.lse;
    a.attend.saturate = call_.saturate;
    a.attend.nonfinite = call_.saturate ? nullptr : at<uint32_t>(base, nonfinite_at_);
    set_options(call_.settings, a.attend);
    a.k = tensor_args(call_.k);
    a.v = tensor_args(call_.v);
    a.group_size = call_.group_size;
    a.n_tiles = int32_t(tiles_.size());
    a.n_blocks = int32_t(blocks_.size());
    a.tiles = at<DistrKeys>(base, tiles_at_);
    a.blocks = at<DistrRows>(base, blocks_at_);
    a.k_tiles = base + k_at_;
    a.v_tiles = base + v_at_;
    a.k_unit = at<float>(base, k_unit_at_);
    a.v_log2 = at<float>(base, v_log2_at_);
    a.order = base + order_at_;
    a.q_rows = base + q_at_;
    a.q_unit = at<float>(base, q_unit_at_);
    return a;
}

Status DistrRun::launch(const uint8_t* inputs, uint8_t* base, uint32_t* replaced, cudaStream_t stream) {
    const auto check = [this](int error, const char* what) { return device_.check(cudaError_t(error), what); };
    const DistrArgs a = args(base);
    const cuda::DistrVariant& kernel = cuda::choose_distr(device_.kernel_generation(), device_.properties().major, a);
    TA_RETURN_IF_ERROR(copy_tables(inputs, base, stream));
    if (a.attend.nonfinite) TA_RETURN_IF_ERROR(clear(base + nonfinite_at_, sizeof(uint32_t), stream));
    TA_RETURN_IF_ERROR(check(cuda::launch_distr_keys(a, stream), "preparing K and V"));
    TA_RETURN_IF_ERROR(check(cuda::launch_distr_rows(a, stream), "grouping channels"));
    TA_RETURN_IF_ERROR(check(kernel.launch(a, stream), "attention over grouped channels"));
    if (!a.attend.nonfinite) return {};
    return check(cuda::launch_dense_count(a.attend.nonfinite, 1, replaced, stream), "counting replaced values");
}

}  // namespace

std::unique_ptr<CudaDenseRun> make_distr_run(const CudaDevice& device, const DenseCall& call) {
    return std::make_unique<DistrRun>(device, call);
}

}  // namespace ta
