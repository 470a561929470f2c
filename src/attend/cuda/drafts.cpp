#include "src/attend/cuda/drafts.h"

#include <algorithm>
#include <cstring>

#include "kernels/cuda/any/append/drafts.h"
#include "src/attend/cuda/attend.h"

namespace ta {

CudaDrafts::CudaDrafts(Pool& pool, CudaDevice& device)
    : pool_(pool),
      device_(device),
      rows_(device, "this many drafts"),
      types_(2 * size_t(pool.geometry().layers), uint8_t(DType::kF16)),
      end_tables_(device) {}

CudaDrafts::EndTables::EndTables(const Step& step, size_t n_types) {
    size_t tasks = 0;
    for (const StepMember& m : step.members) tasks += m.touched.size() + m.rejected.size();
    paths = round_up(step.members.size() * sizeof(cuda::KeptTokens), 16);
    types = paths + round_up(size_t(step.total_new) * sizeof(int32_t), 16);
    layers = types + round_up(n_types, 16);
    redone = layers + round_up(n_types / 2 * sizeof(cuda::AppendLayer), 16);
    bytes = redone + 16 + tasks * sizeof(cuda::AppendTask);
}

Status CudaDrafts::begin(const Step& step) {
    if (!step.drafts) return {};
    const Geometry& g = pool_.geometry();
    bytes_ = size_t(step.total_new) * g.most_channels * sizeof(float);
    TA_RETURN_IF_ERROR(rows_.reserve(std::max<size_t>(2 * g.layers * bytes_, 1 << 16), "a step's drafts"));
    const EndTables at(step, types_.size());
    TA_RETURN_IF_ERROR(end_tables_.reserve(std::max<size_t>(at.bytes, 1 << 16), "a step's drafts"));
    PinnedBuffer& upload = uploads_[ended_ % std::size(uploads_)];
    TA_RETURN_IF_ERROR(upload.take(device_, at.bytes));
    staged_ = static_cast<uint8_t*>(upload.part(at.bytes));
    sent_ = false;
    closed_up_ = 0;
    return {};
}

cuda::TensorArgs CudaDrafts::rows(uint32_t layer, bool v) const {
    const LayerShape& shape = pool_.geometry().shape(layer);
    const size_t tensor = 2 * size_t(layer) + v;
    return {rows_.data() + tensor * bytes_, int64_t(shape.kv_heads) * shape.head_dim, int64_t(shape.head_dim),
            DType(types_[tensor])};
}

void CudaDrafts::keep(uint32_t layer, int64_t tokens, cuda::AppendArgs& append) {
    types_[2 * layer] = uint8_t(append.layer.k.dtype);
    types_[2 * layer + 1] = uint8_t(append.layer.v.dtype);
    append.kept_k = rows_.data() + 2 * size_t(layer) * bytes_;
    append.kept_v = rows_.data() + (2 * size_t(layer) + 1) * bytes_;
    append.kept_rows = int32_t(tokens);
}

Status CudaDrafts::send_tables(const Step& step, const CudaTables& tables, std::span<const cuda::AppendLayer> layers,
                               cudaStream_t stream) {
    const EndTables at(step, types_.size());
    auto* tokens = reinterpret_cast<cuda::KeptTokens*>(staged_);
    auto* const paths = reinterpret_cast<int32_t*>(staged_ + at.paths);
    int32_t* path = paths;
    for (const StepMember& m : step.members) {
        const int32_t moved = m.path.empty() ? -1 : int32_t(path - paths);
        *tokens++ = {int32_t(m.new_row), int32_t(m.n_new), moved, int32_t(m.sequence->slot)};
        path = std::copy(m.path.begin(), m.path.end(), path);
    }
    std::copy(types_.begin(), types_.end(), staged_ + at.types);
    std::copy(layers.begin(), layers.end(), reinterpret_cast<cuda::AppendLayer*>(staged_ + at.layers));
    redone_ = tables.write_redone(step, reinterpret_cast<cuda::AppendTask*>(staged_ + at.redone + 16));
    const int32_t header[4] = {int32_t(redone_), 0, 0, 0};
    std::memcpy(staged_ + at.redone, header, sizeof header);
    cuda::StepTablesArgs table{};
    table.copies[0] = {end_tables_.data(), staged_, at.redone + 16 + redone_ * sizeof(cuda::AppendTask)};
    TA_RETURN_IF_ERROR(device_.check(cudaError_t(cuda::launch_step_tables(table, stream)), "sending the tables of drafts"));
    TA_RETURN_IF_ERROR(uploads_[ended_ % std::size(uploads_)].record(device_, stream));
    ++ended_;
    sent_ = true;
    return {};
}

Result<CudaDrafts::Redone> CudaDrafts::close_up(const Step& step, const CudaTables& tables,
                                                std::span<const cuda::AppendLayer> layers, cudaStream_t stream) {
    if (!sent_) TA_RETURN_IF_ERROR(send_tables(step, tables, layers, stream));
    const Geometry& g = pool_.geometry();
    const EndTables at(step, types_.size());
    uint8_t* const sent = end_tables_.data();
    cuda::CloseUpArgs kept{};
    kept.bytes = bytes_;
    kept.tokens = reinterpret_cast<const cuda::KeptTokens*>(sent);
    kept.paths = reinterpret_cast<const int32_t*>(sent + at.paths);
    kept.members = int32_t(step.members.size());
    kept.nonfinite = pool_.sequences().records().nonfinite();
    for (uint32_t end = 0; closed_up_ < g.layers; closed_up_ = end) {
        const uint32_t layer = closed_up_;
        end = g.end_of_run(layer);
        kept.drafts = rows_.data() + 2 * size_t(layer) * bytes_;
        kept.dtypes = sent + at.types + 2 * size_t(layer);
        kept.layers = int32_t(end - layer);
        kept.row_elements = int32_t(g.shape(layer).kv_heads * g.shape(layer).head_dim);
        TA_RETURN_IF_ERROR(device_.check(cudaError_t(cuda::launch_close_up(kept, stream)), "keeping a part of the drafts"));
    }
    return Redone{reinterpret_cast<const int32_t*>(sent + at.redone),
                  reinterpret_cast<const cuda::AppendTask*>(sent + at.redone + 16), redone_,
                  reinterpret_cast<const cuda::AppendLayer*>(sent + at.layers)};
}

void CudaDrafts::add_kind(KindOfStep& kind) const {
    kind.push_back(uint64_t(uintptr_t(rows_.data())));
    kind.insert(kind.end(), types_.begin(), types_.end());
}

}  // namespace ta
