#include "tiering/disk/disk.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace ta {
namespace {

constexpr unsigned kMostInFlight = 64;

// Runs DiskFile::open in a thread of its own: the caller cannot leave a system call that does not return.
Result<std::unique_ptr<DiskFile>> open_in_time(std::shared_ptr<FileSystem> files, const DiskFileOptions& options,
                                               std::chrono::milliseconds deadline) {
    struct Opening {
        std::mutex mutex;
        std::condition_variable changed;
        bool done = false;
        OpeningProgress progress;
        std::unique_ptr<DiskFile> file;
        Status status;
    };
    const auto opening = std::make_shared<Opening>();
    std::thread thread;
    try {
        thread = std::thread([opening, files = std::move(files), options] {
            std::unique_ptr<DiskFile> file;
            Status status;
            try {
                Result<std::unique_ptr<DiskFile>> result = DiskFile::open(files, options, opening->progress);
                if (result.ok()) {
                    file = result.take();
                } else {
                    status = std::move(result).status();
                }
            } catch (const std::bad_alloc&) {
                status = fail(TA_E_MEMORY, "no memory to open the disk tier's file");
            }
            std::lock_guard lock(opening->mutex);
            if (opening->progress.abandoned) return;  // `file` closes itself
            opening->file = std::move(file);
            opening->status = std::move(status);
            opening->done = true;
            opening->changed.notify_one();
        });
    } catch (const std::system_error&) {
        return fail(TA_E_LIMIT, "the threads of the disk tier could not be started");
    }
    std::unique_lock lock(opening->mutex);
    for (;;) {
        const auto end = opening->progress.last.load() + deadline;
        if (opening->changed.wait_until(lock, end, [&] { return opening->done; })) break;
        if (opening->progress.last.load() + deadline != end) continue;
        opening->progress.abandoned = true;
        thread.detach();
        return fail(TA_E_IO, "opening the disk tier's file %s did not go on for %lld ms", options.path.c_str(),
                    (long long)deadline.count());
    }
    lock.unlock();
    thread.join();
    if (!opening->status.ok()) return std::move(opening->status);
    return std::move(opening->file);
}

}  // namespace

Result<std::unique_ptr<DiskTier>> DiskTier::open(std::shared_ptr<FileSystem> files, const DiskTierOptions& options) {
    const uint64_t record = record_bytes(std::ranges::max(options.slot_bytes));
    if (record == 0 || record > UINT32_MAX)
        return fail(TA_E_INVALID, "a disk tier for blocks of %llu bytes; they have 1 to 2^32", (unsigned long long)record);
    const auto depth_for = [&](unsigned threads) {
        return unsigned(std::clamp<uint64_t>(options.buffer_bytes / record, threads, kMostInFlight));
    };
    DiskFileOptions file_options;
    file_options.path = options.path;
    file_options.persistent = options.persistent;
    file_options.budget = options.budget;
    std::copy(std::begin(options.slot_bytes), std::end(options.slot_bytes), file_options.slot_bytes);
    file_options.fingerprint = options.fingerprint;
    file_options.queue_depth = options.use_uring ? kMostInFlight : 0;
    Result<std::unique_ptr<DiskFile>> file = open_in_time(std::move(files), file_options, options.deadline);
    if (!file.ok()) return std::move(file).status();

    DiskEngine::Options engine_options;
    engine_options.threads = std::min(options.threads ? options.threads : file.value()->queue ? 4 : 8, kMostInFlight);
    // A thread with pread has one operation in flight.
    engine_options.depth = file.value()->queue ? depth_for(engine_options.threads) : engine_options.threads;
    engine_options.deadline = options.deadline;
    engine_options.retry_after = options.retry_after;
    engine_options.check = options.check;
    engine_options.check_found = options.check_found;
    engine_options.device = options.device;
    Result<std::shared_ptr<DiskEngine>> engine = DiskEngine::create(file.take(), std::move(engine_options));
    if (!engine.ok()) return std::move(engine).status();
    // The tier comes first: if a thread could not be started, its destructor stops the others, which keep the engine and its
    // file.
    std::unique_ptr<DiskTier> tier(new DiskTier(engine.take(), options.budget));
    TA_RETURN_IF_ERROR(DiskEngine::start(tier->engine_));
    return tier;
}

DiskTier::~DiskTier() {
    engine_->stop();
}

size_t DiskTier::slot_bytes(uint8_t slot_class) const {
    return slot_class < kSlotClasses ? engine_->file().context.slot_bytes[slot_class] : 0;
}

TierStats DiskTier::stats() const {
    TierStats s = engine_->stats();
    s.budget = budget_;
    return s;
}

}  // namespace ta
