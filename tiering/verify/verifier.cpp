#include "tiering/verify/verifier.h"

#include "tiering/store/fall.h"

namespace ta {
namespace {

class CheckWhenWaited final : public ArrivalCheck {
  public:
    CheckWhenWaited(BlockVerifier& verifier, std::span<const PlacedBlock> blocks)
        : verifier_(verifier), blocks_(blocks.begin(), blocks.end()) {}
    Status wait(std::span<Status> statuses) override { return verifier_.verify(blocks_, statuses); }

  private:
    BlockVerifier& verifier_;
    const std::vector<PlacedBlock> blocks_;
};

class AdoptWhenWaited final : public ArrivalCheck {
  public:
    AdoptWhenWaited(BlockVerifier& verifier, const Pages& pages, std::span<const PlacedBlock> blocks)
        : verifier_(verifier), pages_(pages), blocks_(blocks.begin(), blocks.end()) {}
    Status wait(std::span<Status> statuses) override {
        TA_RETURN_IF_ERROR(verifier_.verify(blocks_, statuses));
        for (size_t i = 0; i < blocks_.size(); ++i) {
            const PlacedBlock& b = blocks_[i];
            if (statuses[i].ok())
                b.block->write_trailer(pages_.geometry, pages_.fingerprint, b.index, uint32_t(kPageTokens), b.slot);
        }
        return {};
    }

  private:
    BlockVerifier& verifier_;
    const Pages& pages_;
    const std::vector<PlacedBlock> blocks_;
};

class HostVerifier final : public BlockVerifier {
  public:
    HostVerifier(Device& device, const Pages& pages) : device_(device), pages_(pages) {}
    Status verify(std::span<const PlacedBlock> blocks, std::span<Status> statuses) override {
        TA_RETURN_IF_ERROR(device_.may_read());
        for (size_t i = 0; i < blocks.size(); ++i) {
            const PlacedBlock& b = blocks[i];
            statuses[i] = verify_slot(pages_.geometry, b.kind, b.slot, pages_.fingerprint, b.index,
                                      b.content_id ? b.content_id : b.block->content_id(), uint32_t(kPageTokens));
        }
        return {};
    }
    Result<std::unique_ptr<ArrivalCheck>> start_adopting(std::span<const PlacedBlock> blocks, const DeviceTransfer*) override {
        return std::unique_ptr<ArrivalCheck>(std::make_unique<AdoptWhenWaited>(*this, pages_, blocks));
    }

  private:
    Device& device_;
    const Pages& pages_;
};

class HostEncoder final : public BlockEncoder {
  public:
    HostEncoder(Device& device, const Pages& pages) : device_(device), pages_(pages) {}
    Status encode_lower(std::span<const PlacedBlock> blocks, std::span<uint8_t* const> to) override {
        TA_RETURN_IF_ERROR(device_.may_read());
        const Geometry& g = pages_.geometry;
        for (size_t i = 0; i < blocks.size(); ++i) {
            const PlacedBlock& b = blocks[i];
            TA_RETURN_IF_ERROR(ta::encode_lower(pages_, b.slot, b.kind, to[i], PageKind::kChannel, 0, g.layers));
            write_trailer(g, PageKind::kChannel, to[i], pages_.fingerprint, b.index, b.block->content_id(), kPageTokens, true);
        }
        return {};
    }

  private:
    Device& device_;
    const Pages& pages_;
};

}  // namespace

Result<std::unique_ptr<ArrivalCheck>> BlockVerifier::start(std::span<const PlacedBlock> blocks, const DeviceTransfer&) {
    return std::unique_ptr<ArrivalCheck>(std::make_unique<CheckWhenWaited>(*this, blocks));
}

std::unique_ptr<BlockVerifier> make_verifier(Device& device, const Pages& pages) {
#ifdef TA_HAVE_CUDA
    if (CudaDevice* cuda = device.cuda()) return make_cuda_verifier(*cuda, pages, true);
#endif
    return std::make_unique<HostVerifier>(device, pages);
}

std::unique_ptr<BlockVerifier> make_peer_verifier(Device& peer, const Pages& pages) {
#ifdef TA_HAVE_CUDA
    if (CudaDevice* cuda = peer.cuda()) return make_cuda_verifier(*cuda, pages, false);
#endif
    return std::make_unique<HostVerifier>(peer, pages);
}

std::unique_ptr<BlockEncoder> make_encoder(Device& device, const Pages& pages) {
#ifdef TA_HAVE_CUDA
    if (CudaDevice* cuda = device.cuda()) return make_cuda_encoder(*cuda, pages);
#endif
    return std::make_unique<HostEncoder>(device, pages);
}

}  // namespace ta
