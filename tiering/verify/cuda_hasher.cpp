#include "tiering/verify/cuda_hasher.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "src/device/cuda/moves.h"

namespace ta {

Status CudaHasher::open() {
    const Geometry& g = pages_.geometry;
    if (offsets_.data()) return {};
    std::vector<uint64_t> offsets(2 * (size_t(g.layers) + 1));  // of channel blocks, then of token blocks
    std::copy(g.channel_page_offset.begin(), g.channel_page_offset.end(), offsets.begin());
    std::copy(g.token_page_offset.begin(), g.token_page_offset.end(), offsets.begin() + g.layers + 1);
    const size_t bytes = offsets.size() * sizeof offsets[0];
    return offsets_.reserve(bytes, "the places of pages",
                            [&](uint8_t* data) { return device_.write(data, offsets.data(), bytes); });
}

Status CudaHasher::stage(std::span<const PlacedBlock> blocks, PinnedBuffer& pinned, size_t extra_bytes, cuda::HashArgs& args) {
    const Geometry& g = pages_.geometry;
    TA_RETURN_IF_ERROR(open());
    TA_RETURN_IF_ERROR(pinned.take(device_, blocks.size() * sizeof(cuda::HashTask) + extra_bytes));
    auto* tasks = static_cast<cuda::HashTask*>(pinned.part(blocks.size() * sizeof(cuda::HashTask)));
    for (size_t i = 0; i < blocks.size(); ++i) {
        const Block& b = *blocks[i].block;
        const uint64_t content_id = blocks[i].content_id ? blocks[i].content_id : b.content_id();
        tasks[i] = {uint64_t(uintptr_t(blocks[i].slot)), content_id, blocks[i].index, b.content_id(), blocks[i].kind, {}};
    }
    args.tasks = tasks;
    args.n_tasks = uint32_t(blocks.size());
    args.layers = g.layers;
    args.lasting_layers = g.lasting_layers;
    args.fingerprint = pages_.fingerprint;
    args.channel_page_offset = reinterpret_cast<const uint64_t*>(offsets_.data());
    args.token_page_offset = args.channel_page_offset + g.layers + 1;
    args.low_page_bytes = g.low_page_bytes;
    args.own_scales_bytes = g.own_scales_bytes(PageKind::kToken);
    for (size_t kind = 0; kind < kPageKinds; ++kind) args.slot_bytes[kind] = g.slot_bytes(PageKind(kind));
    return {};
}

Status CudaHasher::seal(std::span<const PlacedBlock> blocks, cudaStream_t stream) {
    if (blocks.empty()) return {};
    cuda::HashArgs args{};
    PinnedBuffer& pinned = pinned_[++uses_ % std::size(pinned_)];
    TA_RETURN_IF_ERROR(stage(blocks, pinned, 0, args));
    TA_RETURN_IF_ERROR(device_.check(cudaError_t(cuda::launch_seal(args, stream)), "hashing blocks"));
    return pinned.record(device_, stream);
}

Status CudaHasher::start_verify(std::span<const PlacedBlock> blocks, bool adopt, PinnedBuffer& pinned, cudaStream_t stream,
                                const uint32_t** mismatch) {
    const size_t pages = blocks.size() * pages_.geometry.layers;
    cuda::HashArgs args{};
    TA_RETURN_IF_ERROR(stage(blocks, pinned, pages * sizeof(uint32_t), args));
    auto* found = static_cast<uint32_t*>(pinned.part(pages * sizeof(uint32_t)));
    std::memset(found, 0, pages * sizeof(uint32_t));
    *mismatch = found;
    const auto launch = adopt ? cuda::launch_adopt : cuda::launch_verify;
    TA_RETURN_IF_ERROR(device_.check(cudaError_t(launch(args, found, stream)), "hashing blocks"));
    return pinned.record(device_, stream);
}

namespace {

// Shared by a verifier and its checks, which may outlive a call of the verifier but not the device.
class Checks {
  public:
    Checks(const Pages& pages, CudaDevice& gpu, bool behind_steps)
        : device(gpu), layer_at(pages.geometry.layer_at), behind_steps_(behind_steps), hasher_(pages, gpu) {}
    ~Checks() {
        const CudaScope scope(device.ordinal());
        if (stream_) cudaStreamDestroy(stream_);
    }

    Status open() {
        const CudaScope scope(device.ordinal());
        std::lock_guard lock(mutex_);
        return hasher_.open();
    }
    Status start(std::span<const PlacedBlock> blocks, bool adopt, cudaEvent_t arrival, std::unique_ptr<PinnedBuffer>& pinned,
                 const uint32_t** mismatch) {
        const CudaScope scope(device.ordinal());
        std::lock_guard lock(mutex_);
        if (!stream_) {
            TA_RETURN_IF_ERROR(device.check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream"));
        }
        if (idle_.empty()) {
            pinned = std::make_unique<PinnedBuffer>();
        } else {
            pinned = std::move(idle_.back());
            idle_.pop_back();
        }
        if (behind_steps_) TA_RETURN_IF_ERROR(device.wait_for_fences(stream_, nullptr, true));
        if (arrival) TA_RETURN_IF_ERROR(device.check(cudaStreamWaitEvent(stream_, arrival, 0), "waiting for a move"));
        return hasher_.start_verify(blocks, adopt, *pinned, stream_, mismatch);
    }
    void give(std::unique_ptr<PinnedBuffer> pinned) {
        std::lock_guard lock(mutex_);
        try {
            idle_.push_back(std::move(pinned));
        } catch (const std::bad_alloc&) {  // it is destroyed
        }
    }

    CudaDevice& device;
    const std::vector<uint32_t> layer_at;  // the layer of each place

  private:
    const bool behind_steps_;
    std::mutex mutex_;
    CudaHasher hasher_;
    cudaStream_t stream_ = nullptr;
    std::vector<std::unique_ptr<PinnedBuffer>> idle_;
};

class CudaCheck final : public ArrivalCheck {
  public:
    CudaCheck(std::shared_ptr<Checks> checks, std::span<const PlacedBlock> blocks) : checks_(std::move(checks)) {
        for (const PlacedBlock& b : blocks) indices_.push_back(int64_t(b.index));
    }
    ~CudaCheck() override {
        if (!pinned_) return;
        (void)pinned_->wait(checks_->device);
        checks_->give(std::move(pinned_));
    }
    Status start(std::span<const PlacedBlock> blocks, bool adopt, cudaEvent_t arrival) {
        return checks_->start(blocks, adopt, arrival, pinned_, &mismatch_);
    }
    Status wait(std::span<Status> statuses) override {
        TA_RETURN_IF_ERROR(pinned_->wait(checks_->device));
        const size_t layers = checks_->layer_at.size();
        for (size_t i = indices_.size() * layers; i-- > 0;) {
            const uint32_t found = std::atomic_ref(const_cast<uint32_t&>(mismatch_[i])).load(std::memory_order_relaxed);
            if (found == 0) continue;
            const int64_t index = indices_[i / layers];
            statuses[i / layers] =
                found == 2 ? fail(TA_E_CORRUPT, "the block's trailer does not name the block that is asked for").block(index)
                           : fail(TA_E_CORRUPT, "a page does not match its hash")
                                 .layer(int64_t(checks_->layer_at[i % layers]))
                                 .block(index);
        }
        return {};
    }

  private:
    const std::shared_ptr<Checks> checks_;
    std::vector<int64_t> indices_;
    std::unique_ptr<PinnedBuffer> pinned_;
    const uint32_t* mismatch_ = nullptr;
};

class CudaVerifier final : public BlockVerifier {
  public:
    CudaVerifier(const Pages& pages, CudaDevice& device, bool behind_steps)
        : checks_(std::make_shared<Checks>(pages, device, behind_steps)) {}
    Status open() override { return checks_->open(); }
    Status verify(std::span<const PlacedBlock> blocks, std::span<Status> statuses) override {
        if (blocks.empty()) return {};
        CudaCheck check(checks_, blocks);
        TA_RETURN_IF_ERROR(check.start(blocks, false, nullptr));
        return check.wait(statuses);
    }
    Result<std::unique_ptr<ArrivalCheck>> start(std::span<const PlacedBlock> blocks, const DeviceTransfer& arrival) override {
        return start(blocks, false, &arrival);
    }
    Result<std::unique_ptr<ArrivalCheck>> start_adopting(std::span<const PlacedBlock> blocks,
                                                         const DeviceTransfer* arrival) override {
        return start(blocks, true, arrival);
    }

  private:
    Result<std::unique_ptr<ArrivalCheck>> start(std::span<const PlacedBlock> blocks, bool adopt,
                                                const DeviceTransfer* arrival) {
        auto check = std::make_unique<CudaCheck>(checks_, blocks);
        // A CUDA device makes only CudaTransfers.
        const cudaEvent_t there = arrival ? static_cast<const CudaTransfer*>(arrival)->done() : nullptr;
        TA_RETURN_IF_ERROR(check->start(blocks, adopt, there));
        return std::unique_ptr<ArrivalCheck>(std::move(check));
    }

    const std::shared_ptr<Checks> checks_;
};

}  // namespace

std::unique_ptr<BlockVerifier> make_cuda_verifier(CudaDevice& device, const Pages& pages, bool behind_steps) {
    return std::make_unique<CudaVerifier>(pages, device, behind_steps);
}

}  // namespace ta
