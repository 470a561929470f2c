// Sequences saved and loaded: the same stored values, the same results afterwards, and no file that is not what was saved.
#define XXH_INLINE_ALL
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <xxhash.h>

#include <cstring>
#include <filesystem>
#include <system_error>

#include "support/files.h"
#include "support/tiers.h"

namespace ta::testing {
namespace {

constexpr uint32_t kLayers = 2, kHeads = 2, kDim = 64, kQHeads = 4;
constexpr int64_t kRow = kHeads * kDim;

using Bytes = std::vector<char>;

class SequenceFile : public ::testing::Test {
  protected:
    std::string path(const char* name) const { return folder.file(name); }
    void grow(const KvPool& pool, ta_seq seq, int32_t n) {
        const Plan plan = make_plan(pool);
        begin(plan, {seq}, {n});
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            Tensor k(random.normals(n * kRow), n, kHeads, kDim), v(random.normals(n * kRow), n, kHeads, kDim);
            append(plan, layer, k, v);
        }
        end(plan);
    }
    // What a step of one token sees.
    std::vector<float> look(const KvPool& pool, ta_seq seq, uint64_t seed) {
        Random values(seed);
        const Plan plan = make_plan(pool);
        std::vector<float> seen;
        begin(plan, {seq}, {1});
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            Tensor k(values.normals(kRow), 1, kHeads, kDim), v(values.normals(kRow), 1, kHeads, kDim);
            Tensor q(values.normals(kQHeads * kDim), 1, kQHeads, kDim), out(1, kQHeads, kDim);
            append(plan, layer, k, v);
            attend(plan, layer, q, out);
            const std::vector<float> x = out.values();
            seen.insert(seen.end(), x.begin(), x.end());
        }
        end(plan);
        return seen;
    }
    static ta_seq load(const KvPool& pool, const std::string& from) {
        ta_seq seq = 0;
        ta_error err;
        require(ta_seq_load(pool.get(), from.c_str(), nullptr, &seq, &err), err);
        return seq;
    }
    static void save(const KvPool& pool, ta_seq seq, const std::string& to) {
        ta_error err;
        require(ta_seq_save(pool.get(), seq, to.c_str(), nullptr, &err), err);
    }

    const Folder folder;
    Random random{11};
    Context context = make_context(2);
};

TEST_F(SequenceFile, WhatIsLoadedIsWhatWasSaved) {
    int files = 0;
    for (ta_profile profile : {TA_PROFILE_ACCURATE, TA_PROFILE_PAPER}) {
        for (uint32_t bits : {4u, 2u, 8u}) {
            auto numerics = sized<ta_numerics>();
            numerics.profile = profile;
            const auto options = pool_options(kLayers, kHeads, kDim, bits, &numerics);
            const KvPool from = make_pool(context, options), to = make_pool(make_context(1), options);
            for (int64_t n : {0, 1, 63, 64, 65, 200}) {
                SCOPED_TRACE(std::to_string(bits) + " bits, " + std::to_string(n) + " tokens");
                const ta_seq seq = make_sequence(from);
                if (n > 0) grow(from, seq, int32_t(n));
                const std::string file = path(std::to_string(files++).c_str());
                save(from, seq, file);
                const ta_seq copy = load(to, file);
                verify(to, copy);
                ASSERT_EQ(length(to, copy), n);
                for (uint32_t layer = 0; layer < kLayers && n > 0; ++layer)
                    ASSERT_TRUE(dequantize(from, seq, layer, 0, n, kRow) == dequantize(to, copy, layer, 0, n, kRow));
                for (uint64_t step = 0; step < 3; ++step) {
                    const std::vector<float> a = look(from, seq, step), b = look(to, copy, step);
                    ASSERT_EQ(std::memcmp(a.data(), b.data(), a.size() * 4), 0) << "step " << step;
                }
                struct stat info;
                ASSERT_EQ(stat(file.c_str(), &info), 0);
                EXPECT_EQ(info.st_mode & 07777, 0600u);
            }
        }
    }
}

TEST_F(SequenceFile, ForkedAndTruncatedSequences) {
    const KvPool pool = make_pool(context, pool_options(kLayers, kHeads, kDim));
    const ta_seq seq = make_sequence(pool);
    grow(pool, seq, 200);
    const ta_seq fork = fork_sequence(pool, seq);
    ta_error err;
    require(ta_seq_truncate(pool.get(), fork, 150, &err), err);
    save(pool, fork, path("fork"));
    const ta_seq copy = load(pool, path("fork"));
    EXPECT_TRUE(dequantize(pool, fork, 1, 0, 150, kRow) == dequantize(pool, copy, 1, 0, 150, kRow));
    const std::vector<float> a = look(pool, fork, 7), b = look(pool, copy, 7);
    EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * 4), 0);
}

TEST_F(SequenceFile, DamageIsFoundAndChangesNothing) {
    const KvPool pool = make_pool(context, pool_options(kLayers, kHeads, kDim));
    const ta_seq seq = make_sequence(pool);
    grow(pool, seq, 200);
    save(pool, seq, path("good"));
    const Bytes good = read_file(path("good"));
    const ta_kv_pool_stats before = stats(pool);
    const auto refuse = [&](const Bytes& bytes, const std::string& what) {
        write_file(path("bad"), bytes);
        ta_seq out = 77;
        ta_error err;
        const ta_status s = ta_seq_load(pool.get(), path("bad").c_str(), nullptr, &out, &err);
        EXPECT_TRUE(s == TA_E_CORRUPT || s == TA_E_INVALID || s == TA_E_UNSUPPORTED) << what << ": " << ta_status_name(s);
        EXPECT_EQ(out, 77u) << what;
        EXPECT_EQ(stats(pool).sequences, before.sequences) << what;
        EXPECT_EQ(stats(pool).bytes_used, before.bytes_used) << what;
    };
    for (size_t at = 0; at < 80 + 48; ++at) {  // both headers, every bit
        for (int bit = 0; bit < 8; ++bit) {
            Bytes bad = good;
            bad[at] = char(bad[at] ^ (1 << bit));
            refuse(bad, "bit " + std::to_string(bit) + " of byte " + std::to_string(at));
        }
    }
    for (int i = 0; i < 300; ++i) {
        Bytes bad = good;
        const size_t at = size_t(random.below(int64_t(bad.size())));
        bad[at] = char(bad[at] ^ (1 << random.below(8)));
        refuse(bad, "byte " + std::to_string(at));
    }
    for (size_t n : {size_t{0}, size_t{1}, size_t{79}, size_t{80}, size_t{100}, good.size() / 2, good.size() - 1}) {
        refuse(Bytes(good.begin(), good.begin() + std::ptrdiff_t(n)), "cut after " + std::to_string(n));
    }
    Bytes longer = good;
    longer.push_back(0);
    refuse(longer, "a byte more");
}

// A block whose bytes and hashes are right, of a kind that sequences do not have there: kernels rely on 8 bits in sink blocks.
TEST_F(SequenceFile, AForgedSinkIsRefused) {
    const KvPool pool = make_pool(context, pool_options(kLayers, kHeads, kDim));
    const ta_seq seq = make_sequence(pool);
    grow(pool, seq, 128);
    save(pool, seq, path("good"));
    const Bytes good = read_file(path("good"));
    const auto record_of = [&](uint64_t block, size_t* trailer) {
        auto info = sized<ta_x_block_info>();
        ta_error err;
        require(ta_x_seq_block(pool.get(), seq, block, &info, nullptr, 0, &err), err);
        *trailer = 48 + info.trailer_offset;
        return 48 + size_t(info.bytes);
    };
    // A file of one block, number `block`, that says of itself that it is the first.
    const auto forge = [&](uint64_t block) {
        size_t first_trailer, trailer;
        const size_t first = record_of(0, &first_trailer), bytes = record_of(block, &trailer);
        Bytes file(good.begin(), good.begin() + 80);
        file.insert(file.end(), good.begin() + 80 + int64_t(block * first), good.begin() + 80 + int64_t(block * first + bytes));
        const auto put = [&file](size_t at, uint64_t value) { std::memcpy(file.data() + at, &value, sizeof value); };
        const auto hash = [&file](size_t at, size_t n) { return XXH3_64bits(file.data() + at, n); };
        put(16, 64);  // tokens
        put(24, 1);   // blocks
        put(72, hash(0, 72));
        char* const record = file.data() + 80;
        const size_t page = (trailer - 48) / kLayers;
        put(80 + 16, 0);            // the index in the record
        put(80 + trailer + 16, 0);  // and in the trailer
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            Bytes identity(48 + 8);
            std::memcpy(identity.data(), record + trailer + 8, 24);           // fingerprint, index, content
            std::memcpy(identity.data() + 24, &layer, 4), identity[28] = 64;  // tokens
            std::memcpy(identity.data() + 32, record + trailer, 7);           // magic, version, kind
            const uint64_t payload[] = {page, hash(80 + 48 + layer * page, page)};
            std::memcpy(identity.data() + 40, payload, sizeof payload);
            put(80 + trailer + 64 + 8 * layer, XXH3_64bits(identity.data(), identity.size()));
        }
        put(80 + 32, hash(80 + 48, bytes - 48));
        put(80 + 40, hash(80, 40));
        return file;
    };
    write_file(path("first"), forge(0));
    EXPECT_EQ(length(pool, load(pool, path("first"))), 64);
    write_file(path("second"), forge(1));
    ta_seq out = 77;
    EXPECT_EQ(ta_seq_load(pool.get(), path("second").c_str(), nullptr, &out, nullptr), TA_E_CORRUPT);
    EXPECT_EQ(out, 77u);
}

TEST_F(SequenceFile, OfAPoolWithOtherScales) {
    auto per_token = sized<ta_numerics>(), universal = sized<ta_numerics>();
    per_token.profile = universal.profile = TA_PROFILE_PAPER;
    per_token.open_scale = TA_OPEN_SCALE_TOKEN;
    universal.open_scale = TA_OPEN_SCALE_UNIVERSAL;
    const KvPool a = make_pool(context, pool_options(kLayers, kHeads, kDim, 4, &per_token)),
                 b = make_pool(context, pool_options(kLayers, kHeads, kDim, 4, &universal));
    const auto save_one = [&](const KvPool& pool, const char* name) {
        const ta_seq seq = make_sequence(pool);
        grow(pool, seq, 100);
        save(pool, seq, path(name));
    };
    save_one(a, "a");
    save_one(b, "b");
    ta_seq out = 0;
    ta_error err;
    EXPECT_EQ(ta_seq_load(a.get(), path("b").c_str(), nullptr, &out, &err), TA_E_INVALID) << err.message;
    EXPECT_EQ(ta_seq_load(b.get(), path("a").c_str(), nullptr, &out, &err), TA_E_INVALID) << err.message;
}

// What a process of the same number left when it was killed in a save is in nobody's way, and stays.
TEST_F(SequenceFile, LeftoversOfAnEarlierProcess) {
    const KvPool pool = make_pool(context, pool_options(kLayers, kHeads, kDim));
    const ta_seq seq = make_sequence(pool);
    grow(pool, seq, 100);
    constexpr int kLeft = 200;
    char own[40];
    std::snprintf(own, sizeof own, ".turboattention-%016llx.new-", (unsigned long long)XXH3_64bits("file", 4));
    const std::string before = path(own) + std::to_string(getpid()) + "-";
    for (int i = 0; i < kLeft; ++i) write_file(before + std::to_string(i), {'x'});
    save(pool, seq, path("file"));
    verify(pool, load(pool, path("file")));
    EXPECT_EQ(folder.entries(), size_t{kLeft + 1});
    EXPECT_EQ(read_file(before + "199"), Bytes{'x'});
}

TEST_F(SequenceFile, NamesMayBeAsLongAsTheFileSystemHasThem) {
    const KvPool pool = make_pool(context, pool_options(kLayers, kHeads, kDim));
    const ta_seq seq = make_sequence(pool);
    grow(pool, seq, 100);
    const std::string file = path(std::string(255, 'n').c_str());
    save(pool, seq, file);
    verify(pool, load(pool, file));
}

TEST_F(SequenceFile, ItsModeIsNotTheUmasks) {
    const KvPool pool = make_pool(context, pool_options(kLayers, kHeads, kDim));
    const ta_seq seq = make_sequence(pool);
    const mode_t before = umask(0777);
    save(pool, seq, path("file"));
    umask(before);
    struct stat s;
    ASSERT_EQ(stat(path("file").c_str(), &s), 0);
    EXPECT_EQ(s.st_mode & 07777, 0600u);
}

TEST_F(SequenceFile, ErrorsOfLongAndOddNames) {
    const KvPool pool = make_pool(context, pool_options(kLayers, kHeads, kDim));
    const ta_seq seq = make_sequence(pool);
    const std::string reason = std::generic_category().message(ENOENT);
    const auto text = [&](const std::string& file) {
        ta_error err;
        ta_seq out = 0;
        EXPECT_EQ(ta_seq_save(pool.get(), seq, (file + "/x").c_str(), nullptr, &err), TA_E_IO);
        EXPECT_NE(std::string(err.message).find(reason), std::string::npos) << err.message;
        EXPECT_EQ(ta_seq_load(pool.get(), file.c_str(), nullptr, &out, &err), TA_E_IO);
        EXPECT_NE(std::string(err.message).find(reason), std::string::npos) << err.message;
        return std::string(err.message);
    };
    std::string folders;
    for (const char c : {'a', 'b', 'c'}) folders += "/" + std::string(100, c);
    EXPECT_NE(text(folder.path() + folders + "/name").find("ccc/name"), std::string::npos);
    // Not UTF-8, and a name that is cut within a character.
    EXPECT_NE(text(path("none/\xff\xfe.kv")).find("none/??.kv"), std::string::npos);
    int cut = 0;
    for (const char* last : {"x", "xx"}) {
        std::string name = "none/";
        for (int i = 0; i < 100; ++i) name += "\xc3\xa9";
        const std::string shown = text(path((name + last).c_str()));
        const size_t at = shown.find("...");
        ASSERT_NE(at, std::string::npos) << shown;
        cut += shown.substr(at, 6) == "...?\xc3\xa9";
    }
    EXPECT_EQ(cut, 1);
}

TEST_F(SequenceFile, WrongFilesAndCallbacks) {
    auto other_seed = sized<ta_numerics>();
    other_seed.hadamard_seed = 12;
    const KvPool pool = make_pool(context, pool_options(kLayers, kHeads, kDim)),
                 other = make_pool(context, pool_options(kLayers, kHeads, kDim, 2)),
                 turned = make_pool(context, pool_options(kLayers, kHeads, kDim, 4, &other_seed));
    const ta_seq seq = make_sequence(pool);
    grow(pool, seq, 300);
    save(pool, seq, path("file"));
    ta_error err;
    ta_seq out = 0;
    const auto save_to = [&](const char* to) { return ta_seq_save(pool.get(), seq, to, nullptr, &err); };
    const auto load_from = [&](const KvPool& into, const char* from) {
        return ta_seq_load(into.get(), from, nullptr, &out, &err);
    };
    const auto expect_argument = [&](int argument, const char* text) {
        EXPECT_EQ(err.argument, argument) << err.message;
        EXPECT_NE(std::string(err.message).find(text), std::string::npos) << err.message;
    };
    EXPECT_EQ(save_to(path("file").c_str()), TA_E_INVALID);
    expect_argument(2, "exists");
    EXPECT_EQ(save_to(path("none/file").c_str()), TA_E_IO) << err.message;
    EXPECT_EQ(save_to(""), TA_E_INVALID);
    expect_argument(2, "path is empty");
    EXPECT_EQ(load_from(other, path("file").c_str()), TA_E_INVALID);
    expect_argument(1, "of another shape or other bits: its blocks have ");
    EXPECT_EQ(load_from(turned, path("file").c_str()), TA_E_INVALID);
    expect_argument(1, "with another rotation");
    EXPECT_EQ(load_from(pool, path("absent").c_str()), TA_E_IO) << err.message;
    EXPECT_EQ(load_from(pool, folder.path().c_str()), TA_E_INVALID);
    expect_argument(1, "no regular file");
    EXPECT_EQ(load_from(pool, nullptr), TA_E_INVALID);
    EXPECT_EQ(load_from(pool, ""), TA_E_INVALID);
    expect_argument(1, "path is empty");
    EXPECT_EQ(ta_seq_save(pool.get(), seq + 1, path("x").c_str(), nullptr, &err), TA_E_STALE);
    expect_argument(1, "no living sequence");
    std::filesystem::create_symlink(path("file"), path("link"));
    EXPECT_EQ(ta_seq_load(pool.get(), path("link").c_str(), nullptr, &out, &err), TA_E_IO) << err.message;

    struct Calls {
        int left;
        uint64_t done = 0, total = 0;
    };
    const auto progress = [](void* user, uint64_t done, uint64_t total) -> int32_t {
        auto& c = *static_cast<Calls*>(user);
        EXPECT_GE(done, c.done);
        c.done = done;
        c.total = total;
        return c.left-- == 0;
    };
    for (int stop = 0; stop < 6; ++stop) {  // before each of five blocks, and at the end
        Calls c{stop};
        EXPECT_EQ(ta_seq_save(pool.get(), seq, path("stopped").c_str(), ReportTo(progress, &c), &err), TA_E_CANCELLED)
            << err.message;
        EXPECT_FALSE(std::filesystem::exists(path("stopped")));
        c = {stop};
        EXPECT_EQ(ta_seq_load(pool.get(), path("file").c_str(), ReportTo(progress, &c), &out, &err), TA_E_CANCELLED)
            << err.message;
    }
    EXPECT_EQ(out, 0u);
    EXPECT_EQ(stats(pool).sequences, 1u);
    Calls all{100};
    EXPECT_EQ(ta_seq_load(pool.get(), path("file").c_str(), ReportTo(progress, &all), &out, &err), TA_OK) << err.message;
    EXPECT_EQ(all.done, all.total);
    EXPECT_EQ(all.total, std::filesystem::file_size(path("file")));
    EXPECT_EQ(folder.entries(), 2u);  // the file and the link: nothing else is left behind
}

// A process that may not make files as large: with the signal that comes with it left as it is.
TEST_F(SequenceFile, FilesBeyondTheLimitOfTheProcess) {
    const auto plain = pool_options(kLayers, kHeads, kDim);
    const KvPool pool = make_pool(context, plain);
    const ta_seq seq = make_sequence(pool);
    grow(pool, seq, 300);
    auto tiers = sized<ta_tier_options>();
    tiers.disk_bytes = uint64_t{1} << 20;
    auto with_disk = plain;
    with_disk.tiers = &tiers;
    rlimit before{};
    ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
    const rlimit less{20000, before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &less), 0);
    ta_error err;
    const ta_status saved = ta_seq_save(pool.get(), seq, path("large").c_str(), nullptr, &err);
    ta_kv_pool* none = nullptr;
    const ta_status made = ta_kv_pool_create(context.get(), &with_disk, &none, &err);
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
    EXPECT_EQ(saved, TA_E_TIER_FULL);
    EXPECT_EQ(made, TA_E_TIER_FULL) << err.message;
    EXPECT_EQ(folder.entries(), 0u);
    save(pool, seq, path("large"));
}

// A sequence larger than the device tier, saved from all tiers and loaded into them.
TEST_F(SequenceFile, AcrossTiers) {
    const auto plain = pool_options(kLayers, kHeads, kDim);
    const ta_kv_pool_stats s = stats(make_pool(context, plain));
    auto options = plain;
    options.budget_bytes = 8 * s.token_block_bytes + 10 * s.channel_block_bytes;
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = tiers.disk_bytes = uint64_t{16} << 20;
    options.tiers = &tiers;
    const KvPool small = make_pool(context, options), large = make_pool(context, plain);
    const ta_seq seq = make_sequence(large);
    grow(large, seq, 3000);
    save(large, seq, path("large"));
    const ta_seq copy = load(small, path("large"));
    verify(small, copy);
    EXPECT_GT(residency(small, copy).host_blocks, 20u);
    EXPECT_EQ(move_now(small, copy, 5, 20, TA_TIER_DISK).moved, 20u);
    save(small, copy, path("again"));
    const ta_seq back = load(large, path("again"));
    EXPECT_TRUE(dequantize(large, seq, 1, 0, 3000, kRow) == dequantize(large, back, 1, 0, 3000, kRow));
    const std::vector<float> a = look(large, seq, 1), b = look(small, copy, 1);
    EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * 4), 0);
}

// Where room has to be made for a load, nothing moves before all of the file was found to be good and to fit.
TEST_F(SequenceFile, AFailedLoadLeavesOthersWhereTheyAre) {
    const auto plain = pool_options(kLayers, kHeads, kDim);
    const ta_kv_pool_stats sizes = stats(make_pool(context, plain));
    auto options = plain;
    options.budget_bytes = 8 * sizes.token_block_bytes + 20 * sizes.channel_block_bytes;
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = uint64_t{4} << 20;
    tiers.high_percent = 100;
    tiers.low_percent = 99;
    options.tiers = &tiers;
    options.max_sequences = 2;
    const KvPool pool = make_pool(context, options), large = make_pool(context, plain);
    const ta_seq other = make_sequence(pool), saved = make_sequence(large), huge = make_sequence(large);
    grow(pool, other, 15 * 64);
    grow(large, saved, 20 * 64 + 5);
    grow(large, huge, 40000);
    save(large, saved, path("good"));
    save(large, huge, path("huge"));
    const Bytes good = read_file(path("good"));
    const uint64_t used = stats(pool).bytes_used;
    const auto refuse = [&](const std::string& file, ta_status why, ta_progress_fn progress = nullptr, void* user = nullptr) {
        ta_seq out = 77;
        ta_error err;
        EXPECT_EQ(ta_seq_load(pool.get(), file.c_str(), ReportTo(progress, user), &out, &err), why) << err.message;
        EXPECT_EQ(out, 77u);
        EXPECT_EQ(residency(pool, other).device_blocks, 15u);
        EXPECT_EQ(stats(pool).bytes_used, used);
        EXPECT_EQ(tier_stats(pool, TA_TIER_DEVICE).evicted_blocks, 0u);
    };
    Bytes bad = good;
    bad[bad.size() - 100] ^= 1;
    write_file(path("bad"), bad);
    refuse(path("bad"), TA_E_CORRUPT);
    write_file(path("bad"), Bytes(good.begin(), good.end() - 1));
    refuse(path("bad"), TA_E_CORRUPT);
    bad = good;
    bad.push_back(0);
    write_file(path("bad"), bad);
    refuse(path("bad"), TA_E_CORRUPT);
    refuse(path("huge"), TA_E_TIER_FULL);
    const auto stop = [](void* user, uint64_t, uint64_t) -> int32_t { return --*static_cast<int*>(user) == 0; };
    int left = 18;  // while the rest of the file is checked
    refuse(path("good"), TA_E_CANCELLED, stop, &left);
    const ta_seq more = make_sequence(pool);
    refuse(path("good"), TA_E_LIMIT);
    ta_error err;
    require(ta_seq_release(pool.get(), more, &err), err);

    const ta_seq copy = load(pool, path("good"));
    verify(pool, copy);
    EXPECT_GT(residency(pool, other).host_blocks + residency(pool, copy).host_blocks, 0u);
    EXPECT_TRUE(dequantize(large, saved, 1, 0, 20 * 64 + 5, kRow) == dequantize(pool, copy, 1, 0, 20 * 64 + 5, kRow));
}

}  // namespace
}  // namespace ta::testing
