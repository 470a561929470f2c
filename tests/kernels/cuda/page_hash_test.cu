// Trailers written by the device against kernels/format/hash.h, and what verification finds.
#include <cstring>
#include <random>

#include "kernels/cuda/any/hash/page_hash.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/gpu.h"
#include "kernels/format/hash.h"

namespace ta::cuda::testing {
namespace {

constexpr uint64_t kFingerprint = 0x1234567890ABCDEFu;

// Blocks of both kinds with pages of the given sizes.
class HashTest {
  public:
    HashTest(size_t token_page, std::vector<size_t> channel_pages, uint32_t blocks) : token_page_(token_page) {
        offsets_.push_back(0);
        for (size_t bytes : channel_pages) offsets_.push_back(offsets_.back() + bytes);
        const size_t payload[2] = {token_page * layers(), size_t(offsets_.back())};
        for (size_t kind = 0; kind < 2; ++kind) slot_bytes_[kind] = slot_bytes(payload[kind], layers());
        std::mt19937_64 random(token_page * 31 + blocks);
        for (uint32_t b = 0; b < blocks; ++b) {
            HashTask t{};
            t.kind = b % 3 == 2 ? PageKind::kToken : PageKind::kChannel;
            t.content_id = random();
            t.block_index = random() >> 20;
            t.adopted_id = random();
            t.slot = arena_.size();
            for (size_t i = 0; i < slot_bytes_[size_t(t.kind)]; ++i) arena_.push_back(uint8_t(random()));
            arena_.resize((arena_.size() + 127) / 128 * 128);
            tasks_.push_back(t);
        }
    }

    bool run() {
        Device<uint8_t> arena(arena_);
        Device<uint64_t> offsets(offsets_);
        std::vector<uint64_t> token_pages;
        for (uint64_t place = 0; place <= layers(); ++place) token_pages.push_back(place * token_page_);
        Device<uint64_t> token_offsets(token_pages);
        std::vector<HashTask> tasks = tasks_;
        for (HashTask& t : tasks) t.slot += uint64_t(uintptr_t(arena.get()));
        Device<HashTask> device_tasks(tasks);
        HashArgs args{};
        args.tasks = device_tasks.get();
        args.n_tasks = uint32_t(tasks.size());
        args.layers = args.lasting_layers = layers();
        args.fingerprint = kFingerprint;
        args.channel_page_offset = offsets.get();
        args.token_page_offset = token_offsets.get();
        std::copy_n(slot_bytes_, 2, args.slot_bytes);
        CHECK(launch_seal(args, nullptr));
        const std::vector<uint8_t> sealed = arena.copy();
        for (const HashTask& t : tasks_) seal(t);
        if (sealed != arena_) return say("a trailer differs from the library's");

        const std::vector<uint32_t> none(tasks.size() * layers(), 0);
        Device<uint32_t> mismatch(none);
        const auto verify = [&] {
            mismatch.set(none);
            CHECK(launch_verify(args, mismatch.get(), nullptr));
            return mismatch.copy();
        };
        if (verify() != none) return say("good blocks do not verify");
        std::mt19937_64 random(7);
        for (int i = 0; i < 40; ++i) {
            const size_t which = random() % tasks.size();
            const uint32_t layer = uint32_t(random() % layers());
            const bool token = tasks_[which].kind == PageKind::kToken;
            const size_t begin = token ? layer * token_page_ : offsets_[layer];
            const size_t bytes = token ? token_page_ : offsets_[layer + 1] - begin;
            // The first and the last bytes too.
            const size_t at = tasks_[which].slot + begin + (i == 0 ? 0 : i == 1 ? bytes - 1 : random() % bytes);
            std::vector<uint8_t> bad = arena_;
            bad[at] ^= uint8_t(1 << random() % 8);
            arena.set(bad);
            std::vector<uint32_t> want = none;
            want[which * layers() + layer] = 1;
            if (verify() != want) return say("a flipped bit of a page was not found, or more than it");
        }
        std::vector<uint8_t> bad = arena_;
        bad[tasks_[0].slot + size_t(payload_bytes(tasks_[0])) + offsetof(SlotTrailer, content_id)] ^= 1;
        arena.set(bad);
        std::vector<uint32_t> want = none;
        std::fill_n(want.begin(), layers(), 2);
        if (verify() != want) return say("another block's trailer was taken");

        const auto adopt = [&](const std::vector<uint8_t>& blocks) {
            arena.set(blocks);
            mismatch.set(none);
            CHECK(launch_adopt(args, mismatch.get(), nullptr));
            return mismatch.copy();
        };
        if (adopt(bad) != want) return say("another block was adopted");
        bad = arena_;
        bad[tasks_[0].slot] ^= 1;
        want = none;
        want[0] = 1;
        if (adopt(bad) != want) return say("a page with a flipped bit was adopted");
        if (adopt(arena_) != none) return say("good blocks are not adopted");
        for (HashTask& t : tasks_) {
            t.content_id = t.adopted_id;
            seal(t);
        }
        if (arena.copy() != arena_) return say("an adopted block differs from one that the library seals");
        return true;
    }

  private:
    uint32_t layers() const { return uint32_t(offsets_.size() - 1); }
    size_t payload_bytes(const HashTask& t) const {
        return t.kind == PageKind::kToken ? token_page_ * layers() : size_t(offsets_.back());
    }
    static bool say(const char* what) {
        std::printf("    %s\n", what);
        return false;
    }
    void seal(const HashTask& task) {
        uint8_t* slot = &arena_[task.slot];
        SlotTrailer t{};
        t.magic = kSlotMagic;
        t.version = kFormatVersion;
        t.kind = uint8_t(task.kind);
        t.fingerprint = kFingerprint;
        t.block_index = task.block_index;
        t.content_id = task.content_id;
        t.tokens = kPageTokens;
        t.layers = layers();
        const size_t payload = payload_bytes(task);
        std::memset(slot + payload, 0, slot_bytes_[size_t(task.kind)] - payload);
        std::memcpy(slot + payload, &t, sizeof t);
        for (uint32_t layer = 0; layer < layers(); ++layer) {
            const bool token = task.kind == PageKind::kToken;
            const size_t begin = token ? layer * token_page_ : offsets_[layer];
            PageIdentity id{};
            id.fingerprint = kFingerprint;
            id.block_index = task.block_index;
            id.content_id = task.content_id;
            id.layer = layer;
            id.tokens = kPageTokens;
            id.magic = kSlotMagic;
            id.version = kFormatVersion;
            id.kind = uint8_t(task.kind);
            id.payload_bytes = token ? token_page_ : offsets_[layer + 1] - begin;
            const uint64_t hash = page_hash(id, slot + begin);
            std::memcpy(slot + payload + sizeof t + layer * sizeof hash, &hash, sizeof hash);
        }
    }

    size_t token_page_, slot_bytes_[2];
    std::vector<uint64_t> offsets_;
    std::vector<uint8_t> arena_;
    std::vector<HashTask> tasks_;
};

}  // namespace
}  // namespace ta::cuda::testing

int main() {
    using namespace ta::cuda::testing;
    if (without_gpu()) return kSkipped;
    struct {
        size_t token_page;
        std::vector<size_t> channel_pages;
        uint32_t blocks;
    } const cases[] = {
        {256, {256}, 3},          // one stripe block, not full
        {1024, {1024, 1152}, 4},  // exactly one, and a little more
        {2048, {1920, 2048, 2176}, 7},
        {17408, {8832, 4736}, 5},  // as heads of 128 channels have them
        {139264, {70656, 70656, 37888}, 9},
    };
    int failed = 0;
    for (const auto& c : cases) {
        std::printf("pages of %zu bytes, %u blocks\n", c.token_page, c.blocks);
        if (!HashTest(c.token_page, c.channel_pages, c.blocks).run()) ++failed;
    }
    std::printf(failed ? "%d cases FAILED\n" : "all passed\n", failed);
    return failed ? 1 : 0;
}
