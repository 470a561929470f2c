// Files of sequences and of pools, edited, and hashes mended as the input says: what is refused changes nothing; what is loaded
// can be used, saved and loaded again. Where no hash was mended, only a file as it was saved may be loaded.
//
// Input: which file, which hashes stay as they are (a bit for each kind), edits (parts.h).
#include "support/files.h"

#include <cmath>
#include <filesystem>

#include "src/kv/files/block_file.h"
#include "support/handles.h"
#include "tests/fuzz/pages.h"

namespace ta::fuzz {
namespace {

using namespace testing;

constexpr uint32_t kLayers = 2, kHeads = 1, kDim = 64;

// Pools of profile paper have universal open scales.
const Geometry& geometry(ta_profile profile) {
    static const auto make = [](bool universal) {
        return Geometry::make(
                   {.layers = kLayers, .kv_heads = kHeads, .head_dim = kDim, .bits = 4, .keeps_own_scales = universal})
            .value();
    };
    static const Geometry accurate = make(false), paper = make(true);
    return profile == TA_PROFILE_PAPER ? paper : accurate;
}
const Folder& folder() {
    static const Folder f;
    return f;
}
const testing::Context& context() {
    static const testing::Context c = make_context(1);
    return c;
}

KvPool new_pool(ta_profile profile) {
    auto numerics = sized<ta_numerics>();
    numerics.profile = profile;
    auto options = pool_options(kLayers, kHeads, kDim, 4, &numerics);
    options.budget_bytes = 1 << 20;
    options.max_sequences = 8;
    return make_pool(context(), options);
}

// n tokens more, and what attention makes of the last one.
std::vector<float> step(const Plan& plan, ta_seq seq, int32_t n, uint64_t seed) {
    Random random(seed);
    begin(plan, {seq}, {n}, {1});
    std::vector<float> all;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
        Tensor k(random.normals(n * kHeads * kDim), n, kHeads, kDim), v(random.normals(n * kHeads * kDim), n, kHeads, kDim);
        Tensor q(random.normals(kHeads * kDim), 1, kHeads, kDim), out(1, kHeads, kDim);
        append(plan, layer, k, v);
        attend(plan, layer, q, out);
        const std::vector<float> values = out.values();
        all.insert(all.end(), values.begin(), values.end());
    }
    end(plan);
    return all;
}

// -------------------------------------------------------------------------------------------------- files, saved and loaded

void save(const KvPool& pool, ta_seq seq, const std::string& path) {
    ta_error err;
    std::filesystem::remove(path);
    testing::require(ta_seq_save(pool.get(), seq, path.c_str(), nullptr, &err), err);
}
void save(const KvPool& pool, const std::string& path) {
    ta_error err;
    std::filesystem::remove(path);
    testing::require(ta_kv_pool_save(pool.get(), path.c_str(), TA_SAVE_PUBLISHED, nullptr, &err), err);
}
ta_status load(const KvPool& pool, const std::string& path, bool of_pool, std::vector<ta_seq>& loaded, ta_error& err) {
    constexpr uint64_t kMost = 64;
    if (!of_pool) {
        loaded.resize(1);
        return ta_seq_load(pool.get(), path.c_str(), nullptr, loaded.data(), &err);
    }
    std::vector<ta_loaded_seq> ids(kMost);
    uint64_t n = 0, counted = 0;
    const ta_status s = ta_kv_pool_load(pool.get(), path.c_str(), nullptr, ids.data(), kMost, &n, &err);
    if (s != TA_OK) return s;
    fuzz::require(ta_kv_pool_load(pool.get(), path.c_str(), nullptr, nullptr, 0, &counted, nullptr) == TA_OK && counted == n,
                  "a file has another number of sequences than were loaded");
    for (uint64_t i = 0; i < n; ++i) loaded.push_back(ids[i].loaded);
    return s;
}

// Places of hashes, found in a good file by the bytes that they cover.
struct Base {
    ta_profile profile;
    bool of_pool;
    Parts parts;                             // header, index, and for each block its header and its slot
    size_t index_hash = 0;                   // in the header, whose own hash is at its end
    std::vector<std::vector<size_t>> slots;  // [block] in the index: hashes of its slot
};
enum Mends { kPages = 1, kSlots = 2, kBlockHeaders = 4, kIndexSlots = 8, kIndex = 16, kHeader = 32 };

uint64_t hash(const Bytes& bytes) {
    return hash_bytes(bytes.data(), bytes.size());
}
std::vector<size_t> places_of(uint64_t x, const Bytes& in) {
    std::vector<size_t> places;
    for (size_t at = 0; at + sizeof x <= in.size(); at += 8)
        if (get<uint64_t>(in, at) == x) places.push_back(at);
    return places;
}

Base parse(ta_profile profile, bool of_pool, const std::string& path) {
    Base base{profile, of_pool, {}, 0, {}};
    const std::vector<char> read = read_file(path);
    const Bytes file(read.begin(), read.end());
    const auto part = [&](size_t from, size_t to) {
        base.parts.emplace_back(file.begin() + ptrdiff_t(from), file.begin() + ptrdiff_t(to));
    };
    size_t header = 8;
    while (header + 8 < file.size() && get<uint64_t>(file, header) != hash_bytes(file.data(), header)) header += 8;
    header += 8;
    part(0, header);
    const auto is_block = [&](size_t at) {
        const auto h = get<BlockHeader>(file, at);
        return h.magic == kBlockMagic && h.hash == header_hash(h);
    };
    size_t at = header;
    while (at + sizeof(BlockHeader) <= file.size() && !is_block(at)) at += 4;
    part(header, at);
    while (at + sizeof(BlockHeader) <= file.size() && is_block(at)) {
        const auto h = get<BlockHeader>(file, at);
        const size_t slot = at + sizeof h;
        part(at, slot);
        at = slot + geometry(profile).slot_bytes(PageKind(h.kind));
        part(slot, at);
        base.slots.push_back(places_of(h.slot_hash, base.parts[1]));
    }
    const std::vector<size_t> index_hash = places_of(hash(base.parts[1]), base.parts[0]);
    fuzz::require(at == file.size() && base.parts.size() >= 6 && (base.parts[1].empty() || index_hash.size() == 1),
                  "a saved file is not what docs/FORMAT.md says");
    if (!index_hash.empty()) base.index_hash = index_hash[0];
    return base;
}

void mend(const Base& base, Parts& parts, int left) {
    const Geometry& shape = geometry(base.profile);
    for (size_t i = 2; i + 1 < parts.size(); i += 2) {
        Bytes &header = parts[i], &slot = parts[i + 1];
        const auto kind = slot.size() == shape.token_slot_bytes ? PageKind::kToken : PageKind::kChannel;
        if (!(left & kPages) && header.size() == sizeof(BlockHeader) &&
            get<BlockHeader>(header, 0).tokens == uint32_t(kPageTokens))
            mend_pages(shape, kind, slot);
        if (!(left & kSlots)) put(header, offsetof(BlockHeader, slot_hash), hash(slot));
        if (!(left & kBlockHeaders) && header.size() == sizeof(BlockHeader))
            put(header, offsetof(BlockHeader, hash), header_hash(get<BlockHeader>(header, 0)));
        for (size_t at : base.slots[i / 2 - 1])
            if (!(left & kIndexSlots)) put(parts[1], at, hash(slot));
    }
    Bytes& header = parts[0];
    if (!(left & kIndex) && base.index_hash > 0) put(header, base.index_hash, hash(parts[1]));
    if (!(left & kHeader) && header.size() >= 8) put(header, header.size() - 8, hash_bytes(header.data(), header.size() - 8));
}

// -------------------------------------------------------------------------------------------------- one file

// Checks an attempt to load the file at `path`.
ta_status try_file(const Base& base, const std::string& path) {
    const KvPool pool = new_pool(base.profile);
    const ta_kv_pool_stats before = stats(pool);
    std::vector<ta_seq> loaded;
    ta_error err;
    const ta_status s = load(pool, path, base.of_pool, loaded, err);
    if (s != TA_OK) {
        ta_kv_pool_stats after = stats(pool);
        after.bytes_cached = before.bytes_cached, after.bytes_peak = before.bytes_peak;  // blocks that were given up again
        fuzz::require(std::memcmp(&before, &after, sizeof after) == 0, "a load that failed has changed the pool:", err.message);
        fuzz::require(s == TA_E_CORRUPT || s == TA_E_INVALID || s == TA_E_UNSUPPORTED || s == TA_E_TIER_FULL || s == TA_E_LIMIT,
                      "not an error of a bad file:", err.message);
        return s;
    }
    const Plan plan = make_plan(pool);
    for (ta_seq seq : loaded) {
        fuzz::require(ta_seq_verify(pool.get(), seq, &err) == TA_OK, "what was loaded does not verify:", err.message);
        for (float x : dequantize(pool, seq, 0, 0, length(pool, seq), kHeads * kDim).k)
            fuzz::require(std::isfinite(x), "a loaded K is not finite");
    }
    const std::string again = folder().file("again");
    if (base.of_pool)
        save(pool, again);
    else
        save(pool, loaded.at(0), again);
    const KvPool other = new_pool(base.profile);
    std::vector<ta_seq> twice;
    fuzz::require(load(other, again, base.of_pool, twice, err) == TA_OK,
                  "what was loaded and saved does not load:", err.message);
    for (ta_seq seq : loaded) {
        if (length(pool, seq) > 4 * kPageTokens) continue;
        for (float x : step(plan, seq, 1, 3)) fuzz::require(std::isfinite(x), "attention to what was loaded is not finite");
    }
    return s;
}

ta_status try_parts(const Base& base, const Parts& parts) {
    const std::string path = folder().file("file");
    const Bytes all = joined(parts);
    write_file(path, {all.begin(), all.end()});
    return try_file(base, path);
}

// A sequence of three blocks, the last one open, its older state, and pools: the sequence, a fork that shares two of its blocks,
// and what both have published.
std::vector<Base> make_bases() {
    std::vector<Base> bases;
    const std::string path = folder().file("base");
    for (ta_profile profile : {TA_PROFILE_ACCURATE, TA_PROFILE_PAPER}) {
        const KvPool pool = new_pool(profile);
        const Plan plan = make_plan(pool);
        const ta_seq seq = make_sequence(pool);
        ta_error err;
        for (int32_t tokens : {140, 10}) {
            step(plan, seq, tokens, uint64_t(tokens));
            save(pool, seq, path);
            bases.push_back(parse(profile, false, path));
        }
        auto options = sized<ta_namespace_options>();
        options.salt[0] = 1;
        ta_namespace space = 0;
        testing::require(ta_namespace_create(pool.get(), &options, &space, &err), err);
        const uint8_t keys[2 * 32] = {1};
        testing::require(ta_seq_publish(pool.get(), seq, space, keys, 2, &err), err);
        step(plan, fork_sequence(pool, seq), 5, 5);
        save(pool, path);
        bases.push_back(parse(profile, true, path));
    }
    return bases;
}

// Mending is right, or the fuzzer would only try hashes: an edit of a page loads when it is mended, and only then.
void check_mending(const std::vector<Base>& bases) {
    for (const Base& base : bases) {
        fuzz::require(try_parts(base, base.parts) == TA_OK, "a file as it was saved does not load");
        Parts parts = base.parts;
        mend(base, parts, 0);
        fuzz::require(parts == base.parts, "mending a file that needs none changes it");
        uint8_t& code = parts[3][0];  // of the first block
        code ^= 1;
        fuzz::require(try_parts(base, parts) == TA_E_CORRUPT, "an edited file loads");
        mend(base, parts, 0);
        fuzz::require(try_parts(base, parts) == TA_OK, "an edited and mended file does not load");
    }
}

struct Bases {
    std::vector<Base> all = make_bases();
    std::vector<Parts> parts;
    std::vector<Bytes> files;
    Bases() {
        check_mending(all);
        for (const Base& b : all) {
            parts.push_back(b.parts);
            files.push_back(joined(b.parts));
        }
    }
};
const Bases& bases() {
    static const Bases b;
    return b;
}

}  // namespace

Seeds seeds() {
    const auto start = [](int base, int left) { return Writer().add({base, left}); };
    const int kNone = 0x3f;
    return {
        {"as_saved", start(0, 0).bytes},
        {"pool_as_saved", start(2, 0).bytes},
        {"paper_pool_as_saved", start(5, 0).bytes},
        {"blocks_change_places", start(0, kNone).add({int(Edit::kSwapParts), 2, 4, int(Edit::kSwapParts), 3, 5}).bytes},
        {"older_block", start(1, kNone).add({int(Edit::kCopyPart), 6, 0, 6, int(Edit::kCopyPart), 7, 0, 7}).bytes},
        {"older_block_mended", start(1, 0).add({int(Edit::kCopyPart), 6, 0, 6, int(Edit::kCopyPart), 7, 0, 7}).bytes},
        {"header_ends", start(0, 0).add({int(Edit::kResize), 0, 9}).bytes},
        {"no_index", start(2, 0).add({int(Edit::kResize), 1, 0}).bytes},
        {"huge_count", start(2, 0).add({int(Edit::kOdd), 0, 1, 16, 9}).bytes},
        {"index_odd", start(2, 0).add({int(Edit::kOdd), 1, 1, 32, 12}).bytes},
        {"steps_and_zeros", start(0, 0).add({int(Edit::kFill), 5, 255, 0, 16, 127}).bytes},
        {"scale_is_nan", start(0, 0).add({int(Edit::kOdd), 3, 0, 0, 32, 14}).bytes},
    };
}

}  // namespace ta::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    using namespace ta::fuzz;
    Input in(data, size);
    const Bases& known = bases();
    const Base& base = known.all[in.below(known.all.size())];
    const int left = in.byte();
    Parts parts = base.parts;
    edit(in, parts, known.parts);
    mend(base, parts, left);
    const ta_status s = try_parts(base, parts);
    const Bytes file = joined(parts);
    const bool was_saved = std::find(known.files.begin(), known.files.end(), file) != known.files.end();
    constexpr int kAll = kPages | kSlots | kBlockHeaders | kIndexSlots | kIndex | kHeader;
    if ((left & kAll) == kAll && !was_saved) require(s != TA_OK, "a file with wrong hashes loads");
    return 0;
}
