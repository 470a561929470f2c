// The transport of a rank whose messages say what a test wants them to say. They are whole and have the right hash: what is wrong
// with them only the receiver's checks of their fields find.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <utility>

#include "tiering/share/transport.h"

namespace ta::testing {

class LyingTransport : public share::Transport {
  public:
    // May change the message to a peer; called in the order of sending. False: it is not sent.
    using Lie = std::function<bool(uint32_t to, share::MessageHeader& header, std::vector<uint8_t>& payload)>;
    LyingTransport(std::unique_ptr<Transport> real, Lie lie) : real_(std::move(real)), lie_(std::move(lie)) {}

    void send(uint32_t to, share::Packet packet, bool heartbeat) override {
        share::MessageHeader header{};
        std::memcpy(&header, packet.data(), sizeof header);
        std::vector<uint8_t> payload(packet.begin() + sizeof header, packet.end());
        if (lie_(to, header, payload)) real_->send(to, share::pack(header, payload), heartbeat);
    }
    std::optional<Received> receive(share::Time until) override { return real_->receive(until); }
    void wake() override { real_->wake(); }
    void when_stuck(std::function<void(const Status&)> tell) override { real_->when_stuck(std::move(tell)); }
    void give_back_lent() override { real_->give_back_lent(); }
    bool is_warm() const override { return real_->is_warm(); }
    Status health() const override { return real_->health(); }
    bool alive(uint32_t peer) const override { return real_->alive(peer); }
    std::optional<bool> has_joined(uint32_t peer) const override { return real_->has_joined(peer); }
    bool waits(uint32_t peer) const override { return real_->waits(peer); }
    void end_writes() override { real_->end_writes(); }
    void open_window(uint64_t window, uint32_t peer, share::WindowMemory memory) override {
        real_->open_window(window, peer, std::move(memory));
    }
    void close_window(uint64_t window) override { real_->close_window(window); }
    Status write(uint32_t to, uint64_t window, std::span<const share::RemoteCopy> copies, bool on_gpu) override {
        return real_->write(to, window, copies, on_gpu);
    }
    bool may_write_gpu(uint32_t peer) override { return real_->may_write_gpu(peer); }
    Result<bool> reaches(uint32_t peer) override { return real_->reaches(peer); }
    Route route(uint32_t peer) override { return real_->route(peer); }
    Result<bool> all_reach() override { return real_->all_reach(); }
    bool all_cpus() const override { return real_->all_cpus(); }
    Result<Shared> share_memory(std::shared_ptr<uint8_t> memory, uint64_t bytes) override {
        return real_->share_memory(std::move(memory), bytes);
    }
    Result<std::shared_ptr<uint8_t>> find_memory(uint32_t peer, const share::MemoryName& name, uint64_t bytes) override {
        return real_->find_memory(peer, name, bytes);
    }

  private:
    const std::unique_ptr<Transport> real_;
    const Lie lie_;
};

}  // namespace ta::testing
