#include "tools/ta/machine.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>

namespace ta::tools {

namespace {

class CpuMachine final : public Machine {
  public:
    ta_device_kind kind() const override { return TA_DEVICE_CPU; }
    std::string name() const override { return "CPU, " + std::to_string(std::thread::hardware_concurrency()) + " threads"; }
    void* allocate(size_t bytes) override {
        void* p = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
        if (!p) throw std::bad_alloc();
        return p;
    }
    void release(void* p) override { std::free(p); }
    void write(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
    void read(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
    ta_stream stream() const override { return nullptr; }
    void wait() override {}
    double time(const std::function<void()>& calls) override {
        const auto start = std::chrono::steady_clock::now();
        calls();
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
    std::function<void()> capture(const std::function<void()>& calls) override { return calls; }
    double peer_bytes_per_s(Machine&, bool both) override { return copy_bytes_per_s(false, both); }
    // Each direction is one thread that runs memcpy.
    double copy_bytes_per_s(bool, bool both) override {
        constexpr size_t kBytes = size_t{64} << 20;
        constexpr int kRounds = 8;
        const std::vector<uint8_t> from(kBytes, 1);
        std::vector<uint8_t> to[2];
        for (std::vector<uint8_t>& t : to) t.resize(kBytes);
        const auto work = [&from](std::vector<uint8_t>& t) {
            for (int i = 0; i < kRounds; ++i) {
                std::memcpy(t.data(), from.data(), kBytes);
                asm volatile("" : : "r"(t.data()) : "memory");
            }
        };
        const auto start = std::chrono::steady_clock::now();
        if (both) {
            std::thread other([&] { work(to[1]); });
            work(to[0]);
            other.join();
        } else {
            work(to[0]);
        }
        const std::chrono::duration<double> s = std::chrono::steady_clock::now() - start;
        return double(kBytes) * kRounds * (both ? 2 : 1) / s.count();
    }
};

}  // namespace

thread_local ta_error error;

int farthest_node(int node) {
    const std::string nodes = "/sys/devices/system/node/";
    std::ifstream has_memory(nodes + "has_memory");
    std::vector<int> candidates;  // "0-1,4"
    for (int first, last; has_memory >> first; has_memory.ignore(1, ',')) {
        last = first;
        if (has_memory.peek() == '-') has_memory.ignore() >> last;
        for (int n = first; n <= last; ++n) candidates.push_back(n);
    }
    int farthest = -1, most = 0;
    for (const int n : candidates) {
        if (n == node) continue;
        // The distances of n to all online nodes, in order. They are indexed by node number, if the numbers have no gaps.
        std::ifstream distances(nodes + "node" + std::to_string(n) + "/distance");
        int distance = 0;
        for (int i = 0; i <= node && distances >> distance; ++i) {
        }
        if (distances && distance > most) {
            most = distance;
            farthest = n;
        }
    }
    return node < 0 ? -1 : farthest;
}

std::unique_ptr<Machine> make_cpu_machine() {
    return std::make_unique<CpuMachine>();
}

#ifndef TA_HAVE_CUDA
std::unique_ptr<Machine> make_gpu_machine(int) {
    throw Failure("this build has no CUDA; configure it with TA_ENABLE_CUDA=ON");
}
#endif

Rows::Rows(Machine& machine, int64_t tokens, int64_t heads, int64_t head_dim, uint64_t seed)
    : machine_(machine), view_(sized<ta_tensor>()) {
    std::vector<float> values(size_t(tokens * heads * head_dim));
    uint64_t state = seed;
    for (float& x : values) {
        float sum = 0;
        for (int i = 0; i < 4; ++i) {
            state = state * 6364136223846793005ull + 1442695040888963407ull;
            sum += float(state >> 40) * 0x1p-24f;
        }
        x = (sum - 2.0f) * 1.7320508f;
    }
    view_.dtype = TA_DTYPE_F32;
    view_.tokens = tokens;
    view_.heads = heads;
    view_.head_dim = head_dim;
    view_.data = machine.allocate(values.size() * sizeof(float));
    machine.write(view_.data, values.data(), values.size() * sizeof(float));
}

}  // namespace ta::tools
