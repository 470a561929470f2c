// Lowers the bits of blocks in GPU memory before they leave: a kernel encodes them, another one hashes the result. Only in CUDA
// builds.
#include <algorithm>
#include <mutex>

#include "kernels/cuda/any/append/append.h"
#include "tiering/verify/cuda_hasher.h"

namespace ta {
namespace {

class CudaEncoder final : public BlockEncoder {
  public:
    CudaEncoder(const Pages& pages, CudaDevice& device) : pages_(pages), device_(device), hasher_(pages, device) {}
    ~CudaEncoder() override {
        const CudaScope scope(device_.ordinal());
        if (stream_) cudaStreamDestroy(stream_);
    }

    Status encode_lower(std::span<const PlacedBlock> blocks, std::span<uint8_t* const> to) override {
        const CudaScope scope(device_.ordinal());
        std::lock_guard lock(mutex_);
        if (!stream_) {
            TA_RETURN_IF_ERROR(device_.check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream"));
        }
        TA_RETURN_IF_ERROR(device_.wait_for_fences(stream_, nullptr));
        const Geometry& g = pages_.geometry;
        cuda::LowerArgs args{};
        args.head_dim = int32_t(g.common.head_dim);
        args.pieces = int32_t(g.heads());
        args.encode = pages_.numerics.encode;
        if (g.keeps_own_scales) args.token_own_scales = g.own_scales_offset(0, 0);
        std::vector<PlacedBlock> made;
        for (size_t first = 0; first < blocks.size(); first += size_t(args.blocks)) {
            args.blocks = int32_t(std::min<size_t>(blocks.size() - first, cuda::LowerArgs::kMostBlocks));
            for (size_t i = 0; i < size_t(args.blocks); ++i) {
                const PlacedBlock& b = blocks[first + i];
                args.from[i] = uint64_t(uintptr_t(b.slot));
                args.to[i] = uint64_t(uintptr_t(to[first + i]));
                made.push_back({b.block, b.index, to[first + i], PageKind::kChannel});
            }
            TA_RETURN_IF_ERROR(device_.check(cudaError_t(cuda::launch_lower(args, stream_)), "encoding blocks"));
        }
        TA_RETURN_IF_ERROR(hasher_.seal(made, stream_));
        return device_.check(cudaStreamSynchronize(stream_), "encoding blocks");
    }

  private:
    const Pages& pages_;
    CudaDevice& device_;
    std::mutex mutex_;
    CudaHasher hasher_;
    cudaStream_t stream_ = nullptr;
};

}  // namespace

std::unique_ptr<BlockEncoder> make_cuda_encoder(CudaDevice& device, const Pages& pages) {
    return std::make_unique<CudaEncoder>(pages, device);
}

}  // namespace ta
