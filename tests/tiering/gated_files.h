// A file system whose next sync, write or read waits for the test, and may then fail.
#pragma once

#include <atomic>
#include <semaphore>

#include "tiering/faulty_files.h"

namespace ta::testing {

struct GatedFiles : FaultyFiles {
    struct Gate {
        std::binary_semaphore reached{0}, opens{0};
        int result = 0;
    };
    std::atomic<Gate*> sync{nullptr}, write{nullptr}, read{nullptr};  // of the next one

    static int pass(std::atomic<Gate*>& next) {
        Gate* gate = next.exchange(nullptr);
        if (!gate) return 0;
        gate->reached.release();
        gate->opens.acquire();
        return gate->result;
    }
    uint64_t boot() override { return system_files()->boot(); }
    int fsync(int fd) override {
        const int e = pass(sync);
        return e ? e : FaultyFiles::fsync(fd);
    }
    int64_t pwrite(int fd, const void* data, size_t bytes, uint64_t offset) override {
        const int e = pass(write);
        return e ? e : FaultyFiles::pwrite(fd, data, bytes, offset);
    }
    int64_t pread(int fd, void* data, size_t bytes, uint64_t offset) override {
        const int e = pass(read);
        return e ? e : FaultyFiles::pread(fd, data, bytes, offset);
    }
};

}  // namespace ta::testing
