// The file of a persistent disk tier, edited, and hashes mended as the input says: the pool that opens it says what is wrong or
// works. Where no hash was mended, what it serves under a key is what was published under it.
//
// Input: which file, which hashes stay as they are (a bit for each kind), edits (parts.h).
#include <sys/stat.h>

#include <cmath>
#include <filesystem>

#include "kernels/format/hash.h"
#include "support/files.h"
#include "support/handles.h"
#include "tests/fuzz/pages.h"
#include "tiering/disk/format.h"

namespace ta::fuzz {
namespace {

using namespace testing;

constexpr uint32_t kLayers = 1, kHeads = 1, kDim = 64;
constexpr int32_t kBlocks = 2;  // of each sequence: a token block, because it is a sink, and a channel block

const Geometry& geometry() {
    static const Geometry g = Geometry::make({.layers = kLayers, .kv_heads = kHeads, .head_dim = kDim, .bits = 4}).value();
    return g;
}
const Folder& folder() {
    static const Folder f;
    return f;
}
const testing::Context& context() {
    static const testing::Context c = make_context(1);
    return c;
}

ta_status open(const std::string& path, KvPool& pool, ta_error& err) {
    auto tiers = sized<ta_tier_options>();
    tiers.disk_path = path.c_str();
    tiers.disk_bytes = 144 << 10;
    auto options = pool_options(kLayers, kHeads, kDim);
    options.budget_bytes = 256 << 10;
    options.max_sequences = 8;
    options.tiers = &tiers;
    ta_kv_pool* p = nullptr;
    const ta_status s = ta_kv_pool_create(context().get(), &options, &p, &err);
    pool.reset(p);
    return s;
}
ta_namespace new_space(const KvPool& pool) {
    auto options = sized<ta_namespace_options>();
    options.salt[0] = 1;
    ta_namespace space = 0;
    ta_error err;
    testing::require(ta_namespace_create(pool.get(), &options, &space, &err), err);
    return space;
}
struct Keys {
    uint8_t bytes[kBlocks * 32] = {};
    explicit Keys(int what) {
        for (int i = 0; i < kBlocks; ++i) bytes[32 * i] = uint8_t(what), bytes[32 * i + 1] = uint8_t(i);
    }
};

// Tokens that depend on what they are published under alone.
void append(const Plan& plan, ta_seq seq, int32_t n, uint64_t seed) {
    Random random(seed);
    begin(plan, {seq}, {n}, {1});
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
        Tensor k(random.normals(n * kHeads * kDim), n, kHeads, kDim), v(random.normals(n * kHeads * kDim), n, kHeads, kDim);
        Tensor q(random.normals(kHeads * kDim), 1, kHeads, kDim), out(1, kHeads, kDim);
        testing::append(plan, layer, k, v);
        attend(plan, layer, q, out);
        for (float x : out.values()) fuzz::require(std::isfinite(x), "attention is not finite");
    }
    end(plan);
}
ta_status publish(const KvPool& pool, ta_namespace space, int what, ta_error& err) {
    const Plan plan = make_plan(pool);
    const ta_seq seq = make_sequence(pool);
    append(plan, seq, kBlocks * 64, uint64_t(what));
    const ta_status s = ta_seq_publish(pool.get(), seq, space, Keys(what).bytes, kBlocks, &err);
    ta_seq_release(pool.get(), seq, nullptr);
    return s == TA_OK ? ta_namespace_flush(pool.get(), space, &err) : s;
}

// -------------------------------------------------------------------------------------------------- files

struct Base {
    Parts parts;               // superblocks, headers of records, their slots with padding, and what lies between
    std::vector<size_t> kind;  // [part] 0: none that has a hash; 1: superblock; 2: header, its slot is the next part
};
enum Mends { kPages = 1, kPayloads = 2, kHeaders = 4, kSuperblocks = 8 };

Base parse(const std::string& path) {
    Base base;
    const std::vector<char> read = read_file(path);
    const Bytes file(read.begin(), read.end());
    const auto part = [&](size_t from, size_t to, size_t kind) {
        if (to > from)
            base.parts.emplace_back(file.begin() + ptrdiff_t(from), file.begin() + ptrdiff_t(to)), base.kind.push_back(kind);
    };
    part(0, kDiskPage, 1);
    part(kDiskPage, kDiskRegionsOffset, 1);
    size_t between = kDiskRegionsOffset, records = 0;
    for (size_t at = between; at + kDiskPage <= file.size(); at += kDiskPage) {
        const auto h = get<RecordHeader>(file, at);
        if (h.magic != kRecordMagic) continue;
        part(between, at, 0);
        part(at, at + kDiskPage, 2);
        between = at + record_bytes(h.slot_bytes);
        part(at + kDiskPage, between, 0);
        at = between - kDiskPage;
        ++records;
    }
    part(between, file.size(), 0);
    fuzz::require(records >= 2, "a disk tier's file has no records");
    return base;
}

template <class Header>
void mend_page(Bytes& page) {
    if (page.size() != kDiskPage) return;
    put(page, offsetof(Header, hash), uint64_t{0});
    put(page, offsetof(Header, hash), hash_bytes(page.data(), page.size()));
}
void mend(const Base& base, Parts& parts, int left) {
    for (size_t i = 0; i < parts.size(); ++i) {
        if (base.kind[i] == 1 && !(left & kSuperblocks) &&
            std::any_of(parts[i].begin(), parts[i].end(), [](uint8_t x) { return x; }))
            mend_page<Superblock>(parts[i]);
        if (base.kind[i] != 2) continue;
        Bytes &header = parts[i], &slot = parts[i + 1];
        if (header.size() == kDiskPage) {
            const auto h = get<RecordHeader>(header, 0);
            const auto kind = PageKind(h.slot_class);
            if (h.slot_bytes <= slot.size()) {
                if (!(left & kPages) && h.slot_class <= 1) mend_pages(geometry(), kind, slot);
                if (!(left & kPayloads))
                    put(header, offsetof(RecordHeader, payload_hash), hash_bytes(slot.data(), h.slot_bytes));
            }
        }
        if (!(left & kHeaders)) mend_page<RecordHeader>(header);
    }
}

// -------------------------------------------------------------------------------------------------- one file

constexpr int kPublished = 2;  // sets of keys in a file

// The stored K of what is published under a set of keys, wherever it lies.
const std::vector<float>& reference(int what) {
    static const std::vector<std::vector<float>> all = [] {
        std::vector<std::vector<float>> k;
        for (int i = 0; i < kPublished; ++i) {
            const KvPool pool = make_pool(context(), pool_options(kLayers, kHeads, kDim));
            const ta_seq seq = make_sequence(pool);
            append(make_plan(pool), seq, kBlocks * 64, uint64_t(i));
            k.push_back(dequantize(pool, seq, 0, 0, kBlocks * 64, kHeads * kDim).k);
        }
        return k;
    }();
    return all[size_t(what)];
}

// How many blocks the file served.
int64_t try_file(const std::string& path, bool mended) {
    int64_t served = 0;
    KvPool pool;
    ta_error err;
    const ta_status opened = open(path, pool, err);
    if (opened != TA_OK) {
        fuzz::require(opened == TA_E_CORRUPT || opened == TA_E_INVALID || opened == TA_E_UNSUPPORTED ||
                          opened == TA_E_TIER_FULL || opened == TA_E_LIMIT,
                      "not an error of a bad file:", err.message);
        return 0;
    }
    const ta_namespace space = new_space(pool);
    for (int what = 0; what < kPublished; ++what) {
        ta_seq seq = 0;
        int64_t length = 0;
        testing::require(ta_seq_match_prefix(pool.get(), space, Keys(what).bytes, kBlocks, &seq, &length, &err), err);
        const Plan plan = make_plan(pool);
        const int32_t n = 1;
        const ta_status begun = ta_plan_begin(plan.get(), 1, &seq, &n, nullptr, nullptr, &err);
        fuzz::require(begun == TA_OK || begun == TA_E_CORRUPT, "not an error of bad records:", err.message);
        if (begun != TA_OK || length == 0) continue;
        ta_plan_abort(plan.get(), nullptr);
        const std::vector<float> k = dequantize(pool, seq, 0, 0, length, kHeads * kDim).k;
        if (!mended) fuzz::require(std::equal(k.begin(), k.end(), reference(what).begin()), "another block than was published");
        append(plan, seq, 1, 9);
        served += length / 64;
    }
    const ta_status s = publish(pool, space, 5, err);
    fuzz::require(s == TA_OK || s == TA_E_TIER_FULL || s == TA_E_CORRUPT, "publishing behind bad records:", err.message);
    return served;
}
int64_t try_parts(const Parts& parts, bool mended) {
    const std::string path = folder().file("file");
    const Bytes all = joined(parts);
    std::filesystem::remove(path);
    write_file(path, {all.begin(), all.end()});
    const int64_t served = try_file(path, mended);
    KvPool pool;
    ta_error first, again;
    // The rest of the file opens as often as one likes.
    const ta_status s = open(path, pool, first);
    pool.reset();
    fuzz::require(open(path, pool, again) == s, "a file opens once:", again.message);
    return served;
}

// A file, its older state, and another file with other blocks under the same keys.
std::vector<Base> make_bases() {
    std::vector<Base> bases;
    const std::string path = folder().file("base");
    ta_error err;
    for (int other = 0; other < 2; ++other) {
        std::filesystem::remove(path);
        for (int what = 0; what < kPublished; ++what) {
            {
                KvPool pool;
                testing::require(open(path, pool, err), err);
                testing::require(publish(pool, new_space(pool), what, err), err);
            }
            bases.push_back(parse(path));
        }
    }
    return bases;
}

struct Bases {
    std::vector<Base> all = make_bases();
    std::vector<Parts> parts;
    Bases() {
        for (const Base& b : all) {
            parts.push_back(b.parts);
            Parts mended = b.parts;
            mend(b, mended, 0);
            fuzz::require(mended == b.parts, "mending a file that needs none changes it");
        }
        // An edit of a slot is served when it is mended, and only then.
        const Base& base = all[1];
        fuzz::require(try_parts(base.parts, false) == 2 * kBlocks, "a file as it was left does not serve all of it");
        Parts edited = base.parts;
        const size_t header = size_t(std::find(base.kind.begin(), base.kind.end(), 2) - base.kind.begin());
        edited[header + 1][0] ^= 1;
        fuzz::require(try_parts(edited, false) < 2 * kBlocks, "an edited record is served");
        mend(base, edited, 0);
        fuzz::require(try_parts(edited, true) == 2 * kBlocks, "an edited and mended record is not served");
    }
};
const Bases& bases() {
    static const Bases b;
    return b;
}

}  // namespace

Seeds seeds() {
    const auto start = [](int base, int left) { return Writer().add({base, left}); };
    constexpr int kNone = 0xff;
    return {
        {"as_left", start(1, 0).bytes},
        {"other_file_as_left", start(3, 0).bytes},
        {"records_of_the_older_state",
         start(1, kNone).add({int(Edit::kCopyPart), 2, 0, 2, int(Edit::kCopyPart), 3, 0, 3}).bytes},
        {"records_of_another_file", start(1, kNone).add({int(Edit::kCopyPart), 2, 3, 2, int(Edit::kCopyPart), 3, 3, 3}).bytes},
        {"superblocks_change_places", start(1, kNone).add({int(Edit::kSwapParts), 0, 1}).bytes},
        {"no_superblock", start(1, kNone).add({int(Edit::kFill), 0, 255, 0, 0, 0, int(Edit::kFill), 1, 255, 0, 0, 0}).bytes},
        {"file_ends", start(1, 0).add({int(Edit::kResize), 5, 0, 0}).bytes},
        {"odd_superblock", start(1, 0).add({int(Edit::kOdd), 1, 1, 40, 0, 8}).bytes},
        {"odd_record", start(1, 0).add({int(Edit::kOdd), 2, 1, 56, 0, 8}).bytes},
        {"more_keys", start(1, 0).add({int(Edit::kSet), 2, 0, 120, 0, 3}).bytes},
        {"steps", start(1, 0).add({int(Edit::kFill), 5, 255, 0, 16, 127}).bytes},
    };
}

}  // namespace ta::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    using namespace ta::fuzz;
    static const mode_t private_files [[maybe_unused]] = umask(077);
    Input in(data, size);
    const Bases& known = bases();
    const Base& base = known.all[in.below(known.all.size())];
    const int left = in.byte();
    Parts parts = base.parts;
    edit(in, parts, known.parts);
    mend(base, parts, left);
    constexpr int kAll = kPages | kPayloads | kHeaders | kSuperblocks;
    try_parts(parts, (left & kAll) != kAll);
    return 0;
}
