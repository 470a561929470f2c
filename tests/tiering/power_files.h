// A file system that a power failure may hit at any moment: it knows which 4 KiB pages of the disk tier's file are on the medium
// for certain, and which were written since. An image of the file has any of these, or what was there before, page by page.
#pragma once

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "src/io/file_system.h"
#include "tiering/disk/format.h"

namespace ta::testing {

class PowerFiles final : public FileSystem {
  public:
    static constexpr size_t kPage = 4096;
    using Image = std::vector<uint8_t>;

    explicit PowerFiles(uint64_t seed) : random_(seed) {}
    // From now on what the medium may hold is kept at about one in `every` moments; 0: at none.
    void watch(uint64_t every) {
        std::lock_guard lock(mutex_);
        every_ = every;
    }
    std::vector<Image> take_images() {
        std::lock_guard lock(mutex_);
        return std::exchange(images_, {});
    }
    // One in so many syncs fails, and drops some of what it was to write, and the next superblock may not be written: 0: none.
    void fail_syncs(uint64_t one_in) {
        std::lock_guard lock(mutex_);
        failing_ = one_in;
        sync_failed_ &= one_in > 0;
    }
    Image image() {
        std::lock_guard lock(mutex_);
        return make_image();
    }
    // One in so many reads of a record fails: 0: none.
    void fail_reads(uint64_t one_in) {
        std::lock_guard lock(mutex_);
        failing_reads_ = one_in;
    }
    // The power came back: this is the file.
    void restart(const Image& image) {
        std::lock_guard lock(mutex_);
        cache_ = medium_ = image;
        written_.clear();
        dropped_.clear();
        ++boots_;
    }
    // What a process leaves that is killed now: restore() makes the file so again, whatever was written since, and returns what
    // processes then read.
    void keep_for_kill() {
        std::lock_guard lock(mutex_);
        kept_medium_ = medium_;
        kept_cache_ = cache_;
        kept_dropped_ = dropped_;
        kept_written_ = written_;
        kept_mark_lacks_ = mark_lacks_;
        for (auto page = kept_written_.begin(); page != kept_written_.end();) {
            std::erase_if(page->second, [](const Version& version) { return version.completed == UINT64_MAX; });
            page = page->second.empty() ? kept_written_.erase(page) : std::next(page);
        }
    }
    Image restore() {
        std::lock_guard lock(mutex_);
        medium_ = kept_medium_;
        cache_ = kept_cache_;
        dropped_ = kept_dropped_;
        written_ = kept_written_;
        mark_lacks_ = kept_mark_lacks_;
        return cache_;
    }
    uint64_t failed_syncs() const { return failed_syncs_; }
    // True if the last superblock was not written.
    bool lacks_mark() {
        std::lock_guard lock(mutex_);
        return mark_lacks_;
    }

    int open(const char* path, int flags, mode_t mode) override {
        const int fd = real_->open(path, flags, mode);
        std::lock_guard lock(mutex_);
        if (fd >= 0 && (flags & O_ACCMODE) == O_RDONLY) folder_ = fd;
        return fd;
    }
    int close(int fd) override {
        std::lock_guard lock(mutex_);
        if (fd == folder_) folder_ = -1;
        return real_->close(fd);
    }
    int64_t pread(int fd, void* data, size_t bytes, uint64_t offset) override {
        {
            std::lock_guard lock(mutex_);
            if (bytes > kPage && failing_reads_ > 0 && random_() % failing_reads_ == 0) return -EIO;
        }
        return real_->pread(fd, data, bytes, offset);
    }
    int64_t pwrite(int fd, const void* data, size_t bytes, uint64_t offset) override {
        std::vector<std::list<Version>::iterator> mine;
        {
            std::lock_guard lock(mutex_);
            if (offset < kDiskRegionsOffset) {
                mark_lacks_ = std::exchange(sync_failed_, false) && random_() % 2 == 0;
                if (mark_lacks_) return -EIO;
            }
            const auto* from = static_cast<const uint8_t*>(data);
            for (size_t at = 0; at < bytes; at += kPage) {
                std::list<Version>& page = written_[(offset + at) / kPage];
                mine.push_back(page.insert(page.end(), {Image(from + at, from + at + kPage), UINT64_MAX}));
            }
            look();
        }
        const int64_t r = real_->pwrite(fd, data, bytes, offset);
        std::lock_guard lock(mutex_);
        for (size_t i = 0; i < mine.size(); ++i) {
            put(cache_, offset / kPage + i, mine[i]->bytes);
            mine[i]->completed = ++clock_;
        }
        look();
        return r;
    }
    int fallocate(int fd, uint64_t offset, uint64_t bytes) override {
        {
            std::lock_guard lock(mutex_);
            medium_.resize(std::max<size_t>(medium_.size(), offset + bytes));
            cache_.resize(medium_.size());
        }
        return real_->fallocate(fd, offset, bytes);
    }
    int ftruncate(int fd, uint64_t bytes) override { return real_->ftruncate(fd, bytes); }
    // Writes that were completed when it starts are on the medium when it ends. The real file lies in memory.
    int fsync(int fd) override {
        std::lock_guard lock(mutex_);
        if (fd == folder_) return 0;
        look();
        const bool fails = failing_ > 0 && random_() % failing_ == 0;
        for (auto page = written_.begin(); page != written_.end();) {
            std::list<Version>& versions = page->second;
            while (!versions.empty() && versions.front().completed <= clock_) {
                if (!fails || random_() % 2 == 0) {
                    put(medium_, page->first, versions.front().bytes);
                    dropped_.erase(page->first);
                } else {
                    dropped_.insert(page->first);
                }
                versions.pop_front();
            }
            page = versions.empty() ? written_.erase(page) : std::next(page);
        }
        failed_syncs_ += fails;
        sync_failed_ |= fails;
        look();
        return fails ? -EIO : 0;
    }
    int fstat(int fd, FileInfo& info) override { return real_->fstat(fd, info); }
    int lstat(const char* path, FileInfo& info) override { return real_->lstat(path, info); }
    int rename(const char* from, const char* to) override { return real_->rename(from, to); }
    bool can_link(int fd) override { return real_->can_link(fd); }
    int link(int fd, const char* to) override { return real_->link(fd, to); }
    int list(const char* folder, const std::function<void(const char*)>& each) override { return real_->list(folder, each); }
    int unlink(const char* path) override { return real_->unlink(path); }
    int lock(int fd) override { return real_->lock(fd); }
    int unlock(int fd) override { return real_->unlock(fd); }
    int clear_direct(int fd) override { return real_->clear_direct(fd); }
    uint64_t boot() override { return ~boots_; }
    // Pages that a failed sync has dropped are what they were before.
    void drop_cache(int fd) override {
        std::lock_guard lock(mutex_);
        for (const uint64_t page : dropped_) {
            if (written_.contains(page)) continue;
            const auto* lost = medium_.data() + page * kPage;
            (void)real_->pwrite(fd, lost, kPage, page * kPage);
            put(cache_, page, Image(lost, lost + kPage));
        }
        dropped_.clear();
    }
    std::unique_ptr<IoQueue> make_queue(unsigned, std::string& reason) override {
        reason = "the test has no io_uring";
        return nullptr;
    }

  private:
    struct Version {
        Image bytes;
        uint64_t completed;
    };
    static void put(Image& image, uint64_t page, const Image& bytes) {
        if ((page + 1) * kPage <= image.size()) std::copy(bytes.begin(), bytes.end(), image.begin() + ptrdiff_t(page * kPage));
    }
    Image make_image() {
        Image image = medium_;
        const uint64_t kept = random_() % 5;  // quarters of the pages, about
        for (const auto& [page, versions] : written_) {
            if (random_() % 4 >= kept) continue;
            auto version = versions.begin();
            std::advance(version, ptrdiff_t(random_() % versions.size()));
            put(image, page, version->bytes);
        }
        return image;
    }
    void look() {
        if (every_ > 0 && random_() % every_ == 0) images_.push_back(make_image());
    }

    const std::shared_ptr<FileSystem> real_ = system_files();
    std::mutex mutex_;
    std::mt19937_64 random_;
    std::vector<Image> images_;
    uint64_t every_ = 0, failing_ = 0, failing_reads_ = 0, clock_ = 0, failed_syncs_ = 0;
    bool sync_failed_ = false, mark_lacks_ = false, kept_mark_lacks_ = false;
    int folder_ = -1;
    uint64_t boots_ = 1;
    using Pages = std::map<uint64_t, std::list<Version>>;
    Image medium_, cache_;        // cache_: what processes read
    std::set<uint64_t> dropped_;  // pages of which a failed sync has lost what the file shows
    Pages written_;               // since it was last on the medium for certain, by page
    Image kept_medium_, kept_cache_;
    std::set<uint64_t> kept_dropped_;
    Pages kept_written_;
};

}  // namespace ta::testing
