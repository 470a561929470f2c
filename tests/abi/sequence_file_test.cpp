// Sequences saved and loaded: the same stored values, the same results afterwards, and no file that is not what was saved.
#define XXH_INLINE_ALL
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <limits>
#include <system_error>

#include "support/counting_allocator.h"
#include "support/files.h"
#include "support/saved_file.h"
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
    // The results of a step of one token.
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

// Tokens that were truncated away, or that a released sequence had in the slot, are not in the file of what is left.
TEST_F(SequenceFile, HasNothingOfTokensThatAreGone) {
    const KvPool pool = make_pool(make_context(), pool_options(kLayers, kHeads, kDim));
    const ta_seq gone = make_sequence(pool);
    grow(pool, gone, 60);
    ta_error err;
    require(ta_seq_release(pool.get(), gone, &err), err);
    const ta_seq seq = make_sequence(pool);
    grow(pool, seq, 50);
    require(ta_seq_truncate(pool.get(), seq, 10, &err), err);
    save(pool, seq, path("short"));
    load(pool, path("short"));  // refuses values of tokens that a block lacks
}

// The slot of an open block holds behind its tokens what was there before.
TEST_F(SequenceFile, HasNothingOfWhatMemoryHeld) {
    CountingAllocator allocator;
    allocator.fill = 0x5a;
    const ta_allocator hooks = allocator.hooks();
    auto options = sized<ta_context_options>();
    options.allocator = &hooks;
    const KvPool pool = make_pool(make_context(options), pool_options(kLayers, kHeads, kDim));
    const ta_seq seq = make_sequence(pool);
    grow(pool, seq, 10);
    save(pool, seq, path("short"));
    const Bytes file = read_file(path("short"));
    constexpr int kRun = 16;
    EXPECT_EQ(std::search_n(file.begin(), file.end(), kRun, char(allocator.fill)), file.end());
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
    const SavedFile parts(good);
    for (size_t at = 0; at < parts.records[0].at + 48; ++at) {  // both headers and the index, every bit
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
    // A file of one block, number `block`, that says of itself that it is the first.
    const auto forge = [&](uint64_t block) {
        auto info = sized<ta_x_block_info>();
        ta_error err;
        require(ta_x_seq_block(pool.get(), seq, block, &info, nullptr, 0, &err), err);
        const SavedFile all(good);
        const SavedFile::Record& r = all.records[size_t(block)];
        Bytes bytes(good.begin(), good.begin() + 80);
        for (const auto& [at, n] : {std::pair{r.entry, size_t{32}}, std::pair{r.at, r.bytes}})
            bytes.insert(bytes.end(), good.begin() + std::ptrdiff_t(at), good.begin() + std::ptrdiff_t(at + n));
        const uint64_t length = 64, blocks = 1;
        std::memcpy(bytes.data() + 16, &length, 8);
        std::memcpy(bytes.data() + 24, &blocks, 8);
        SavedFile file(bytes);
        const SavedFile::Record& only = file.records[0];
        for (size_t at : {only.entry + 16, only.at + 16, only.at + 48 + size_t(info.trailer_offset) + 16}) file.put(at, 0);
        file.mend_record(only, size_t(info.trailer_offset), kLayers);
        file.mend_index();
        return file.bytes;
    };
    write_file(path("first"), forge(0));
    EXPECT_EQ(length(pool, load(pool, path("first"))), 64);
    write_file(path("second"), forge(1));
    ta_seq out = 77;
    EXPECT_EQ(ta_seq_load(pool.get(), path("second").c_str(), nullptr, &out, nullptr), TA_E_CORRUPT);
    EXPECT_EQ(out, 77u);
}

// Hashes that are right do not make values good that no encoder writes: attention computes with none of them.
TEST_F(SequenceFile, ForgedValuesAreRefused) {
    for (uint32_t bits : {4u, 2u}) {
        const KvPool pool = make_pool(context, pool_options(kLayers, kHeads, kDim, bits));
        const ta_seq seq = make_sequence(pool);
        grow(pool, seq, 200);
        save(pool, seq, path(std::to_string(bits).c_str()));
        const SavedFile good(read_file(path(std::to_string(bits).c_str())));
        size_t payload[4];
        for (uint64_t block = 0; block < 4; ++block) {
            auto info = sized<ta_x_block_info>();
            ta_error err;
            require(ta_x_seq_block(pool.get(), seq, block, &info, nullptr, 0, &err), err);
            payload[block] = size_t(info.trailer_offset);
        }
        const float bad_scales[] = {-1.0f, 0x1p-127f, 0x1p55f, std::numeric_limits<float>::infinity(), std::nanf("")};
        struct Forgery {
            const char* what;
            uint64_t block;
            size_t at;  // in the piece of layer 1, head 1
            Bytes bytes;
            bool good = false;
        };
        const auto of_float = [](float x) {
            Bytes b(4);
            std::memcpy(b.data(), &x, 4);
            return b;
        };
        // Sections 2 and 3 of FORMAT.md.
        const size_t codes = 8 * kDim * bits, step = 2 * codes, scale = step + 4 * kDim + 32, token_scale = 128 * kDim;
        std::vector<Forgery> forgeries = {
            {"step 0", 2, step + 5, {0}},
            {"too large a step", 2, step + 5, {char(bits == 4 ? 17 : 81)}},
            {"V's step 0", 2, step + 2 * kDim + 5, {0}},
            {"values beyond INT8", 2, step, Bytes(kDim, char(bits == 4 ? 16 : 80))},
            {"V's values beyond INT8", 2, step + 3 * kDim, Bytes(kDim, 127)},
            {"padding", 2, scale + 8, {1}},
            {"other exponents", 2, step + 4 * kDim, {0x53}, true},
            {"a smaller scale", 2, scale, of_float(0x1p-126f), true},
            {"code -120", 0, 7, {-120}},
            {"code 127", 0, 64 * kDim + 7, {127}},
            {"a token that is not there", 3, 64 * kDim - 1, {1}},
            {"the scale of a token that is not there", 3, token_scale + 4 * 63, of_float(1.0f)},
            {"code 119", 0, 7, {119}, true},
        };
        for (float x : bad_scales) {
            for (size_t at : {scale, scale + 4}) forgeries.push_back({"a channel page's scale", 2, at, of_float(x)});
            for (size_t at : {token_scale, token_scale + 256 + 4 * 63})
                forgeries.push_back({"a token's scale", 0, at, of_float(x)});
        }
        for (const Forgery& f : forgeries) {
            SCOPED_TRACE(std::string(f.what) + " at " + std::to_string(bits) + " bits");
            SavedFile file = good;
            const SavedFile::Record& r = file.records[size_t(f.block)];
            const size_t piece = payload[f.block] / (kLayers * kHeads);
            std::copy(f.bytes.begin(), f.bytes.end(), file.bytes.begin() + std::ptrdiff_t(r.at + 48 + 3 * piece + f.at));
            file.mend_record(r, payload[f.block], kLayers);
            file.mend_index();
            write_file(path("forged"), file.bytes);
            ta_seq out = 0;
            ta_error err;
            const ta_status s = ta_seq_load(pool.get(), path("forged").c_str(), nullptr, &out, &err);
            EXPECT_EQ(s, f.good ? TA_OK : TA_E_CORRUPT) << err.message;
            if (s == TA_OK) continue;
            EXPECT_EQ(err.block, int64_t(f.block)) << err.message;
            if (f.block == 3) continue;
            EXPECT_EQ(err.layer, 1) << err.message;
            EXPECT_EQ(err.head, 1) << err.message;
        }
    }
}

// Nobody keeps files of versions that were never released.
TEST_F(SequenceFile, OfVersion2) {
    const KvPool pool = make_pool(context, pool_options(kLayers, kHeads, kDim));
    const ta_seq seq = make_sequence(pool);
    grow(pool, seq, 100);
    save(pool, seq, path("file"));
    SavedFile file(read_file(path("file")));
    file.bytes[4] = 2;
    file.mend_index();
    write_file(path("old"), file.bytes);
    ta_seq out = 0;
    ta_error err;
    EXPECT_EQ(ta_seq_load(pool.get(), path("old").c_str(), nullptr, &out, &err), TA_E_UNSUPPORTED);
    EXPECT_NE(std::string(err.message).find("version 2"), std::string::npos) << err.message;
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
    // Nor scales that no magnitude has: the last float of the index.
    for (float x : {-1.0f, 0x1p63f, std::numeric_limits<float>::infinity(), std::nanf("")}) {
        SavedFile file(read_file(path("b")));
        std::memcpy(file.bytes.data() + file.header_bytes + file.index_bytes - 4, &x, 4);
        file.mend_index();
        write_file(path("forged"), file.bytes);
        ta_seq none = 0;
        EXPECT_EQ(ta_seq_load(b.get(), path("forged").c_str(), nullptr, &none, nullptr), TA_E_CORRUPT) << x;
    }
    ta_seq out = 0;
    ta_error err;
    EXPECT_EQ(ta_seq_load(a.get(), path("b").c_str(), nullptr, &out, &err), TA_E_INVALID) << err.message;
    EXPECT_EQ(ta_seq_load(b.get(), path("a").c_str(), nullptr, &out, &err), TA_E_INVALID) << err.message;
}

// A process that is killed while it saves leaves nothing, where file systems have files without a name.
TEST_F(SequenceFile, NothingIsLeftOfAProcessThatIsKilled) {
    const KvPool pool = make_pool(context, pool_options(kLayers, kHeads, kDim));
    const pid_t child = fork();
    if (child == 0) {
        const Context own = make_context(1);
        const KvPool mine = make_pool(own, pool_options(kLayers, kHeads, kDim));
        const ta_seq seq = make_sequence(mine);
        grow(mine, seq, 200);
        const auto killed = [](void*, uint64_t done, uint64_t total) -> int32_t {
            if (done == total) kill(getpid(), SIGKILL);
            return 0;
        };
        (void)ta_seq_save(mine.get(), seq, path("file").c_str(), ReportTo(killed, nullptr), nullptr);
        _exit(1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status));
    EXPECT_EQ(folder.entries(), 0u);
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
    // Nothing in a name breaks the line or is another control character.
    EXPECT_NE(text(path("none/a\nb\x1b[31mc\x7f\xc2\x85\xe2\x80\xa8.kv")).find("none/a?b?[31mc??????.kv"), std::string::npos);
    ta_error err;
    ta_seq out = 0;
    EXPECT_EQ(ta_seq_load(pool.get(), path(std::string(5000, '\n').c_str()).c_str(), nullptr, &out, &err), TA_E_IO);
    EXPECT_EQ(std::string(err.message).find('\n'), std::string::npos);
    EXPECT_NE(std::string(err.message).find("ENAMETOOLONG"), std::string::npos) << err.message;
    // A tier's file, and what the log says of it.
    std::string logged;
    const auto log = [](ta_log_level, const char* line, void* user) { *static_cast<std::string*>(user) += line; };
    auto sink = sized<ta_log_sink>();
    sink.log = log;
    sink.user = &logged;
    sink.level = TA_LOG_DEBUG;
    auto with_log = sized<ta_context_options>();
    with_log.log = &sink;
    ta_context* raw = nullptr;
    require(ta_context_create(&with_log, &raw, &err), err);
    const Context logging(raw);
    auto tiers = sized<ta_tier_options>();
    const std::string disk = path("none/disk\nfile");
    tiers.disk_path = disk.c_str();
    tiers.disk_bytes = uint64_t{1} << 20;
    auto options = pool_options(kLayers, kHeads, kDim);
    options.tiers = &tiers;
    ta_kv_pool* none = nullptr;
    EXPECT_EQ(ta_kv_pool_create(logging.get(), &options, &none, &err), TA_E_IO);
    EXPECT_NE(std::string(err.message).find("disk?file"), std::string::npos) << err.message;
    EXPECT_EQ((err.message + logged).find('\n'), std::string::npos) << logged;
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

// If a load must make room, nothing moves before all of the file was found to be good and to fit.
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
