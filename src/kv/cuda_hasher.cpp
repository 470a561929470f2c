#include "src/kv/cuda_hasher.h"

#include <cstring>

namespace ta {

Status CudaHasher::stage(std::span<const PlacedBlock> blocks, size_t extra_bytes, cuda::HashArgs& args) {
    const Geometry& g = pool_.geometry();
    if (!channel_offsets_.data() && !g.all_8_bits) {
        const std::vector<uint64_t> offsets(g.channel_page_offset.begin(), g.channel_page_offset.end());
        TA_RETURN_IF_ERROR(channel_offsets_.reserve(offsets.size() * sizeof offsets[0], "the places of pages"));
        TA_RETURN_IF_ERROR(device_.write(channel_offsets_.data(), offsets.data(), offsets.size() * sizeof offsets[0]));
    }
    Staging& staging = staging_[++uses_ % std::size(staging_)];
    TA_RETURN_IF_ERROR(staging.take(device_, blocks.size() * sizeof(cuda::HashTask) + extra_bytes));
    auto* tasks = static_cast<cuda::HashTask*>(staging.part(blocks.size() * sizeof(cuda::HashTask)));
    for (size_t i = 0; i < blocks.size(); ++i) {
        const Block& b = *blocks[i].block;
        tasks[i] = {uint64_t(uintptr_t(blocks[i].slot)), b.content_id(), blocks[i].index, b.kind(), {}};
    }
    args.tasks = tasks;
    args.n_tasks = uint32_t(blocks.size());
    args.layers = g.layers;
    args.fingerprint = pool_.fingerprint();
    args.channel_page_offset = reinterpret_cast<const uint64_t*>(channel_offsets_.data());
    args.token_page_bytes = g.token_page_bytes;
    args.slot_bytes[size_t(PageKind::kToken)] = g.token_slot_bytes;
    args.slot_bytes[size_t(PageKind::kChannel)] = g.channel_slot_bytes;
    return {};
}

Status CudaHasher::seal(std::span<const PlacedBlock> blocks, cudaStream_t stream) {
    if (blocks.empty()) return {};
    cuda::HashArgs args{};
    TA_RETURN_IF_ERROR(stage(blocks, 0, args));
    TA_RETURN_IF_ERROR(device_.check(cudaError_t(cuda::launch_seal(args, stream)), "hashing blocks"));
    TA_RETURN_IF_ERROR(staging_[uses_ % std::size(staging_)].record(device_, stream));
    for (const PlacedBlock& b : blocks) b.block->mark_sealed();
    return {};
}

Status CudaHasher::verify(std::span<const PlacedBlock> blocks, std::span<Status> statuses, cudaStream_t stream) {
    if (blocks.empty()) return {};
    const size_t layers = pool_.geometry().layers, pages = blocks.size() * layers;
    cuda::HashArgs args{};
    TA_RETURN_IF_ERROR(stage(blocks, pages * sizeof(uint32_t), args));
    Staging& staging = staging_[uses_ % std::size(staging_)];
    auto* mismatch = static_cast<uint32_t*>(staging.part(pages * sizeof(uint32_t)));
    std::memset(mismatch, 0, pages * sizeof(uint32_t));
    TA_RETURN_IF_ERROR(device_.check(cudaError_t(cuda::launch_verify(args, mismatch, stream)), "hashing blocks"));
    TA_RETURN_IF_ERROR(staging.record(device_, stream));
    TA_RETURN_IF_ERROR(device_.check(cudaStreamSynchronize(stream), "hashing blocks"));
    for (size_t i = pages; i-- > 0;) {
        if (mismatch[i] == 0) continue;
        const int64_t index = int64_t(blocks[i / layers].index);
        statuses[i / layers] =
            mismatch[i] == 2 ? fail(TA_E_CORRUPT, "the block's trailer does not name the block that is asked for").block(index)
                             : fail(TA_E_CORRUPT, "a page does not match its hash").layer(int64_t(i % layers)).block(index);
    }
    return {};
}

namespace {

class CudaVerifier final : public BlockVerifier {
  public:
    CudaVerifier(const Pool& pool, CudaDevice& device) : device_(device), hasher_(pool, device) {}
    ~CudaVerifier() override {
        const CudaScope scope(device_.ordinal());
        if (stream_) cudaStreamDestroy(stream_);
    }
    Status verify(std::span<const PlacedBlock> blocks, std::span<Status> statuses) override {
        const CudaScope scope(device_.ordinal());
        std::lock_guard lock(mutex_);
        if (!stream_) {
            TA_RETURN_IF_ERROR(device_.check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream"));
        }
        TA_RETURN_IF_ERROR(device_.wait_for_fences(stream_, nullptr));
        return hasher_.verify(blocks, statuses, stream_);
    }

  private:
    CudaDevice& device_;
    std::mutex mutex_;
    CudaHasher hasher_;
    cudaStream_t stream_ = nullptr;
};

}  // namespace

std::unique_ptr<BlockVerifier> CudaDevice::make_verifier(const Pool& pool) {
    return std::make_unique<CudaVerifier>(pool, *this);
}

}  // namespace ta
