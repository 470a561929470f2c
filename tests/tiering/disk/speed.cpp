// How fast the disk tier is against plain sequential direct I/O on the same file in the same run.
// usage: test_tiering.disk.speed [folder] [MiB] [block KiB] [least share of the ceiling, in percent]
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "tiering/disk/disk.h"

namespace {

using Clock = std::chrono::steady_clock;
using ta::BlockIdentity;
using ta::DiskRequest;
using ta::DiskTier;
using ta::Slot;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

// Counts completions.
struct Client final : ta::DiskClient {
    std::mutex mutex;
    std::condition_variable changed;
    size_t done = 0, wrong = 0;
    const size_t expected;
    explicit Client(size_t n) : expected(n) {}
    void on_done(ta::DiskCompletion c) noexcept override {
        std::lock_guard lock(mutex);
        ++done;
        wrong += !c.status.ok();
        if (done == expected) changed.notify_all();
    }
    void wait() {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return done == expected; });
    }
};

// Sequential, `depth` operations in flight, as `fio --rw=write --direct=1 --ioengine=io_uring` does. Seconds.
double sequential(int fd, bool write, uint8_t* buffers, size_t block, size_t bytes, unsigned depth) {
    std::string reason;
    const auto files = ta::system_files();
    std::unique_ptr<ta::IoQueue> queue = ta::make_uring(depth, reason);
    if (!queue) {
        queue = ta::make_blocking_queue(*files);
        depth = 1;
    }
    const auto start = Clock::now();
    size_t next = 0, flying = 0;
    std::vector<uint8_t*> idle;
    for (unsigned i = 0; i < depth; ++i) idle.push_back(buffers + i * block);
    while (next < bytes || flying > 0) {
        while (next < bytes && !idle.empty()) {
            ta::IoOp op;
            op.kind = write ? ta::IoOp::Kind::kWrite : ta::IoOp::Kind::kRead;
            op.fd = fd;
            op.data = idle.back();
            op.bytes = block;
            op.offset = next;
            op.user = idle.back();
            if (queue->submit(op) < 0) std::exit(3);
            idle.pop_back();
            next += block;
            ++flying;
        }
        ta::IoResult results[16];
        const size_t n = queue->wait(results);
        for (size_t i = 0; i < n; ++i) {
            if (results[i].result != int64_t(block)) std::exit(3);
            idle.push_back(static_cast<uint8_t*>(results[i].user));
            --flying;
        }
    }
    return seconds_since(start);
}

// Others use the disk too: the best of the runs, which take turns, is what it can do.
double best(const std::vector<double>& v) {
    return *std::min_element(v.begin(), v.end());
}

}  // namespace

int main(int argc, char** argv) {
    const std::string folder = argc > 1 ? argv[1] : "/tmp";
    const size_t total = size_t(argc > 2 ? std::atoi(argv[2]) : 64) << 20;
    const size_t block = (size_t(argc > 3 ? std::atoi(argv[3]) : 2048) << 10) - 4096;  // with its header a round number
    const double least = argc > 4 ? std::atof(argv[4]) : 0;
    const size_t n = total / (block + 4096);
    const int repeats = argc > 2 ? 7 : 2;

    std::printf("disk_speed %s %zu %zu: %zu blocks of %zu bytes, best of %d runs\n", folder.c_str(), total >> 20,
                (block + 4096) >> 10, n, block, repeats);
    std::vector<uint8_t> memory(n * block);
    for (size_t i = 0; i < memory.size(); ++i) memory[i] = uint8_t(i * 2654435761u >> 13);
    std::vector<uint8_t> out(n * block);
    double worst = 1e9;
    const auto files = ta::system_files();
    for (const bool persistent : {false, true}) {
        for (const bool uring : {true, false}) {
            const std::string path = folder + "/ta-disk-speed-" + std::to_string(getpid());
            ta::DiskTierOptions o;
            o.path = persistent ? path : folder;
            o.persistent = persistent;
            o.slot_bytes[1] = block;
            o.budget = total + (total >> 3) + (8 << 20);
            o.use_uring = uring;
            ta::Result<std::unique_ptr<DiskTier>> opened = DiskTier::open(files, o);
            if (!opened.ok()) {
                std::printf("%s\n", std::move(opened).status().detail()->message);
                return 2;
            }
            DiskTier& tier = *opened.value();
            const std::vector<uint8_t> wanted(n, 1);
            ta::Result<std::vector<Slot>> slots = tier.acquire(wanted);
            if (!slots.ok()) return 2;
            // The ceiling is that of a file of its own, made alike and as large, since the tier's holds blocks.
            const std::string plain = path + ".plain";
            const int fd = open(plain.c_str(), O_RDWR | O_CREAT | (tier.direct_io() ? O_DIRECT : 0), 0600);
            if (fd < 0 || unlink(plain.c_str()) != 0 || posix_fallocate(fd, 0, off_t(total)) != 0) return 2;
            constexpr unsigned kDepth = 32;
            auto* buffers = static_cast<uint8_t*>(
                mmap(nullptr, kDepth * (block + 4096), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
            std::memset(buffers, 1, kDepth * (block + 4096));
            size_t wrong = 0;
            for (const bool write : {true, false}) {
                std::vector<double> ceiling, ours;
                // The first round of writes turns preallocated extents into written ones and is not counted.
                for (int run = write ? -1 : 0; run < repeats; ++run) {
                    if (write) {
                        // New slots, as a block that is demoted takes one.
                        tier.release(slots.value());
                        while (tier.stats().used > 0) usleep(100);
                        slots = tier.acquire(wanted);
                        if (!slots.ok()) return 2;
                    }
                    const double c = sequential(fd, write, buffers, block + 4096, n * (block + 4096), kDepth);
                    Client client(n);
                    std::vector<DiskRequest> requests(n);
                    for (size_t i = 0; i < n; ++i) {
                        DiskRequest& r = requests[i];
                        r.kind = write ? DiskRequest::Kind::kWrite : DiskRequest::Kind::kRead;
                        r.slot = slots.value()[i];
                        r.bytes = block;
                        r.memory = (write ? memory.data() : out.data()) + i * block;
                        r.identity.block_index = i;
                        r.identity.content_id = i + 1;
                        r.identity.tokens = 64;
                    }
                    const auto start = Clock::now();
                    if (!tier.submit(requests, client).ok()) return 3;
                    client.wait();
                    const double t = seconds_since(start);
                    wrong += client.wrong;
                    if (run < 0) continue;
                    ceiling.push_back(c);
                    ours.push_back(t);
                }
                if (!write) wrong += memory != out;
                const double gb = double(n * block) / 1e9;
                const double share = best(ceiling) / best(ours) * double(block) / double(block + 4096);
                worst = std::min(worst, share);
                std::printf("%-10s %-8s %-8s %-6s %6.2f GB/s  ceiling %6.2f GB/s  %5.1f%%  #wrong %zu\n",
                            persistent ? "persistent" : "anonymous", tier.io_uring() ? "io_uring" : "threads",
                            tier.direct_io() ? "direct" : "buffered", write ? "write" : "read", gb / best(ours),
                            double(n * (block + 4096)) / 1e9 / best(ceiling), 100 * share, wrong);
            }
            munmap(buffers, kDepth * (block + 4096));
            close(fd);
            opened.value().reset();
            if (persistent) unlink(path.c_str());
            if (wrong > 0) return 1;
        }
    }
    return 100 * worst < least;
}
