// Copies of scattered blocks between the device and the host by kernel: every byte of them, and none beside them. With --bench
// how fast, against one copy of 64 MiB by the copy engine.
#include <cstring>
#include <numeric>
#include <random>

#include "kernels/cuda/any/moves/move_blocks.h"
#include "kernels/cuda/common/generation.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/gpu.h"

namespace ta::cuda::testing {
namespace {

class Pinned {
  public:
    explicit Pinned(size_t n) { CHECK(cudaHostAlloc(&p_, n, cudaHostAllocMapped)); }
    ~Pinned() { cudaFreeHost(p_); }
    Pinned(const Pinned&) = delete;
    Pinned& operator=(const Pinned&) = delete;
    uint8_t* get() const { return static_cast<uint8_t*>(p_); }

  private:
    void* p_ = nullptr;
};

int generation() {
    int g = 0;
    CHECK(kernel_generation(&g));
    return g;
}

// Blocks of these sizes, in another order on either side, with gaps of poison between them. False when a byte is wrong.
bool moves(const std::vector<size_t>& sizes, bool to_host, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<size_t> order(sizes.size());
    std::iota(order.begin(), order.end(), 0);
    const auto place = [&] {
        std::vector<size_t> at(sizes.size());
        std::shuffle(order.begin(), order.end(), random);
        size_t end = 16 * (1 + random() % 9);
        for (const size_t i : order) {
            at[i] = end;
            end += sizes[i] + 16 * (1 + random() % 9);
        }
        return std::pair(at, end);
    };
    const auto [from_at, from_bytes] = place();
    const auto [to_at, to_bytes] = place();
    std::vector<uint8_t> source(from_bytes), want(to_bytes, 0xEE);
    for (uint8_t& b : source) b = uint8_t(random());
    for (size_t i = 0; i < sizes.size(); ++i) std::memcpy(&want[to_at[i]], &source[from_at[i]], sizes[i]);

    const size_t device_bytes = to_host ? from_bytes : to_bytes, host_bytes = to_host ? to_bytes : from_bytes;
    Device<uint8_t> device(device_bytes);
    Pinned host(host_bytes);
    uint8_t *from = to_host ? device.get() : host.get(), *to = to_host ? host.get() : device.get();
    if (to_host) {
        device.set(source);
        std::memset(host.get(), 0xEE, host_bytes);
    } else {
        std::memcpy(host.get(), source.data(), host_bytes);
        device.set(std::vector<uint8_t>(device_bytes, 0xEE));
    }
    std::vector<BlockCopy> copies;
    for (size_t i = 0; i < sizes.size(); ++i)
        copies.push_back({uint64_t(uintptr_t(to + to_at[i])), uint64_t(uintptr_t(from + from_at[i])), sizes[i]});
    const Stream stream;
    CHECK(launch_move_blocks(copies.data(), copies.size(), generation(), stream.get()));
    // The table is the launch's own.
    std::fill(copies.begin(), copies.end(), BlockCopy{});
    CHECK(cudaStreamSynchronize(stream.get()));
    std::vector<uint8_t> got(to_bytes);
    CHECK(cudaMemcpy(got.data(), to, to_bytes, cudaMemcpyDefault));
    for (size_t i = 0; i < to_bytes; ++i) {
        if (got[i] == want[i]) continue;
        std::printf("    byte %zu of %zu is %02x, not %02x\n", i, to_bytes, got[i], want[i]);
        return false;
    }
    return true;
}

bool test() {
    bool good = true;
    const auto one = [&](const char* what, const std::vector<size_t>& sizes) {
        for (const bool to_host : {true, false}) {
            if (moves(sizes, to_host, sizes.size() + to_host)) continue;
            std::printf("FAILED: %s, %s\n", what, to_host ? "to the host" : "to the device");
            good = false;
        }
    };
    one("no block", {});
    one("16 bytes", {16});
    one("around a piece", {16384 - 16, 16384, 16384 + 16, 32768, 49152 - 16});
    one("one of 70 KB", {70144});
    one("one of 2.2 MB", {2261376});
    std::mt19937_64 random(5);
    std::vector<size_t> sizes(64);
    for (size_t& s : sizes) s = 16 * (1 + random() % 9000);
    one("64 of many sizes", sizes);
    sizes.push_back(48);
    one("65 of many sizes", sizes);
    sizes.resize(2500);
    for (size_t& s : sizes) s = 16 * (1 + random() % 700);
    one("more than a launch takes", sizes);
    BlockCopy odd{4096, 8192, 24};
    if (launch_move_blocks(&odd, 1, generation(), nullptr) != cudaErrorInvalidValue) {
        std::puts("FAILED: 24 bytes were not refused");
        good = false;
    }
    return good;
}

void bench() {
    constexpr size_t kBytes = size_t{512} << 20, kMoved = size_t{128} << 20;
    uint8_t *device[2], *host[2];
    Stream streams[2];
    for (int i = 0; i < 2; ++i) {
        CHECK(cudaMalloc(&device[i], kBytes));
        CHECK(cudaHostAlloc(&host[i], kBytes, cudaHostAllocMapped));
        std::memset(host[i], i + 1, kBytes);
    }
    cudaEvent_t start, end[2];
    for (cudaEvent_t* e : {&start, &end[0], &end[1]}) CHECK(cudaEventCreate(e));
    const auto rate = [&](int directions, auto&& enqueue) {
        std::vector<double> seconds;
        for (int repeat = 0; repeat < 7; ++repeat) {
            CHECK(cudaDeviceSynchronize());
            CHECK(cudaEventRecord(start, streams[0].get()));
            CHECK(cudaStreamWaitEvent(streams[1].get(), start));
            float most = 0;
            for (int i = 0; i < 2; ++i) {
                if (directions >> i & 1) enqueue(i);
                CHECK(cudaEventRecord(end[i], streams[i].get()));
            }
            for (int i = 0; i < 2; ++i) {
                float ms = 0;
                CHECK(cudaEventSynchronize(end[i]));
                CHECK(cudaEventElapsedTime(&ms, start, end[i]));
                most = std::max(most, ms);
            }
            seconds.push_back(1e-3 * most);
        }
        std::sort(seconds.begin(), seconds.end());
        return double(kMoved) * (directions == 3 ? 2 : 1) / seconds[3] * 1e-9;
    };
    const auto engine = [&](int i) {
        CHECK(cudaMemcpyAsync(i ? device[1] : host[0], i ? host[1] : device[0], kMoved, cudaMemcpyDefault, streams[i].get()));
    };
    std::printf("GB/s             to host  to device   both\n%-16s %7.1f  %9.1f  %5.1f\n", "one copy", rate(1, engine),
                rate(2, engine), rate(3, engine));
    for (const size_t size : {4096, 8192, 70144, 280576, 2261376}) {
        const size_t stride = (size + 4095) / 4096 * 4096, n = kMoved / size;
        std::vector<size_t> order(kBytes / stride);
        std::iota(order.begin(), order.end(), 0);
        std::mt19937_64 random(1);
        std::vector<BlockCopy> copies[2];
        for (int i = 0; i < 2; ++i) {
            std::shuffle(order.begin(), order.end(), random);
            const std::vector<size_t> on_host = order;
            std::shuffle(order.begin(), order.end(), random);
            for (size_t k = 0; k < n; ++k) {
                const auto d = uint64_t(uintptr_t(device[i] + order[k] * stride)),
                           h = uint64_t(uintptr_t(host[i] + on_host[k] * stride));
                copies[i].push_back(i ? BlockCopy{d, h, size} : BlockCopy{h, d, size});
            }
        }
        const auto kernel = [&](int i) { CHECK(launch_move_blocks(copies[i].data(), n, generation(), streams[i].get())); };
        const double share = double(n * size) / double(kMoved);
        std::printf("%-16zu %7.1f  %9.1f  %5.1f\n", size, share * rate(1, kernel), share * rate(2, kernel),
                    share * rate(3, kernel));
    }
}

}  // namespace
}  // namespace ta::cuda::testing

int main(int argc, char** argv) {
    using namespace ta::cuda::testing;
    if (without_gpu()) return kSkipped;
    if (argc > 1 && !std::strcmp(argv[1], "--bench")) {
        bench();
        return 0;
    }
    const bool good = test();
    std::puts(good ? "move_blocks: all good" : "move_blocks: FAILED");
    return good ? 0 : 1;
}
