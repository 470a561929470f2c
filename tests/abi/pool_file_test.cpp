// Whole pools saved and loaded: every sequence with its values, blocks shared as before, what is published; and no file that is
// not what was saved.
#define XXH_INLINE_ALL
#include <sys/stat.h>
#include <xxhash.h>

#include <chrono>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <thread>

#include "abi/prefix_steps.h"
#include "support/files.h"
#include "support/saved_file.h"
#include "support/slots.h"

namespace ta::testing {
namespace {

using Bytes = std::vector<char>;
constexpr size_t kHeaderBytes = 96;

class PoolFile : public PrefixSteps {
  protected:
    std::string path(const char* name) const { return folder.file(name); }
    static void save(const KvPool& pool, const std::string& to, ta_save_flags flags = 0) {
        ta_error err;
        require(ta_kv_pool_save(pool.get(), to.c_str(), flags, nullptr, &err), err);
    }
    static std::vector<ta_loaded_seq> load(const KvPool& pool, const std::string& from) {
        uint64_t n = 0, m = 0;
        ta_error err;
        require(ta_kv_pool_load(pool.get(), from.c_str(), nullptr, nullptr, 0, &n, &err), err);
        std::vector<ta_loaded_seq> loaded(n + 1);
        require(ta_kv_pool_load(pool.get(), from.c_str(), nullptr, loaded.data(), loaded.size(), &m, &err), err);
        EXPECT_EQ(n, m);
        loaded.resize(m);
        return loaded;
    }
    static ta_seq loaded_as(const std::vector<ta_loaded_seq>& all, ta_seq saved) {
        for (const ta_loaded_seq& s : all) {
            if (s.saved == saved) return s.loaded;
        }
        ADD_FAILURE() << "the sequence is not in the file";
        return 0;
    }

    const Folder folder;
};

TEST_F(PoolFile, AllSequencesComeBackSharingWhatTheyShared) {
    int files = 0;
    for (ta_profile profile : {TA_PROFILE_ACCURATE, TA_PROFILE_PAPER}) {
        for (uint32_t bits : {4u, 2u, 8u}) {
            SCOPED_TRACE(std::to_string(profile) + " at " + std::to_string(bits) + " bits");
            auto numerics = sized<ta_numerics>();
            numerics.profile = profile;
            const KvPool from = make_pool(context, options(bits, &numerics)),
                         to = make_pool(make_context(1), options(bits, &numerics));
            const ta_namespace space = make_namespace(from, 1);
            std::vector<ta_seq> seqs = {make_sequence(from), write(from, 1, 1), write(from, 64, 2), write(from, 200, 3),
                                        write(from, 300, 4)};
            seqs.push_back(fork_sequence(from, seqs[3]));  // shares an open block, too
            truncate(from, seqs.back(), 195);
            seqs.push_back(fork_sequence(from, seqs[4]));
            truncate(from, seqs.back(), 100);  // within a closed block
            publish(from, seqs[4], space, 4, 4);
            const ta_seq gone = write(from, 130, 5);
            publish(from, gone, space, 5, 2);
            release(from, gone);
            const std::string plain = path(std::to_string(files++).c_str()), with = path(std::to_string(files++).c_str());
            save(from, plain);
            save(from, with, TA_SAVE_PUBLISHED);
            struct stat info;
            ASSERT_EQ(stat(with.c_str(), &info), 0);
            EXPECT_EQ(info.st_mode & 07777, 0600u);
            EXPECT_LT(std::filesystem::file_size(plain), std::filesystem::file_size(with));

            const ta_seq before = write(to, 10, 9);
            const std::vector<ta_loaded_seq> all = load(to, with);
            ASSERT_EQ(all.size(), seqs.size());
            EXPECT_EQ(stats(to).sequences, seqs.size() + 1);
            EXPECT_EQ(stats(to).token_blocks + stats(to).channel_blocks,
                      stats(from).token_blocks + stats(from).channel_blocks + 1);
            EXPECT_EQ(length(to, before), 10);
            const ta_namespace there = make_namespace(to, 1);
            EXPECT_EQ(space_stats(to, there).entries, 6u);
            EXPECT_EQ(match(to, make_namespace(to, 2), 4, 4).second, 0);
            const auto [a, n] = match(from, space, 5, 3);
            const auto [b, m] = match(to, there, 5, 3);
            ASSERT_EQ(n, 128);
            ASSERT_EQ(m, 128);
            EXPECT_TRUE(same_bits(grow(from, a, 9, 6), grow(to, b, 9, 6)));
            for (ta_seq s : seqs) {
                const ta_seq copy = loaded_as(all, s);
                verify(to, copy);
                ASSERT_EQ(length(to, copy), length(from, s));
                ASSERT_TRUE(same_values(from, s, to, copy, length(from, s)));
            }
            for (ta_seq s : seqs) {
                ASSERT_TRUE(same_bits(grow(from, s, 5, 7), grow(to, loaded_as(all, s), 5, 7)));
                ASSERT_TRUE(same_bits(grow(from, s, 70, 8), grow(to, loaded_as(all, s), 70, 8)));
            }
            const KvPool third = make_pool(make_context(1), options(bits, &numerics));
            EXPECT_EQ(load(third, plain).size(), seqs.size());
            EXPECT_EQ(space_stats(third, make_namespace(third, 1)).entries, 0u);
        }
    }
}

TEST_F(PoolFile, OfAPoolWithOtherScales) {
    auto per_token = sized<ta_numerics>(), universal = sized<ta_numerics>();
    per_token.profile = universal.profile = TA_PROFILE_PAPER;
    per_token.open_scale = TA_OPEN_SCALE_TOKEN;
    universal.open_scale = TA_OPEN_SCALE_UNIVERSAL;
    const KvPool a = make_pool(context, options(4, &per_token)), b = make_pool(context, options(4, &universal));
    for (const KvPool* pool : {&a, &b}) publish(*pool, write(*pool, 100, 1), make_namespace(*pool, 1), 1, 1);
    for (const ta_save_flags flags : {ta_save_flags{0}, ta_save_flags{TA_SAVE_PUBLISHED}}) {
        const std::string of_a = path(flags ? "a with" : "a"), of_b = path(flags ? "b with" : "b");
        save(a, of_a, flags);
        save(b, of_b, flags);
        for (const auto& [pool, file] : {std::pair(&a, &of_b), std::pair(&b, &of_a)}) {
            ta_loaded_seq out[1];
            uint64_t n = 0;
            ta_error err;
            EXPECT_EQ(ta_kv_pool_load(pool->get(), file->c_str(), nullptr, out, 1, &n, &err), TA_E_INVALID) << err.message;
        }
    }
}

TEST_F(PoolFile, DamageIsFoundAndChangesNothing) {
    const KvPool from = make_pool(context, options()), pool = make_pool(context, options());
    const ta_namespace space = make_namespace(from, 1);
    const ta_seq seq = write(from, 200, 1);
    truncate(from, fork_sequence(from, seq), 100);
    publish(from, seq, space, 1, 3);
    save(from, path("good"), TA_SAVE_PUBLISHED);
    const Bytes good = read_file(path("good"));
    const ta_seq there = write(pool, 70, 3);
    const ta_namespace same = make_namespace(pool, 1);
    const ta_kv_pool_stats before = stats(pool);
    const auto refuse = [&](const Bytes& bytes, const std::string& what) {
        write_file(path("bad"), bytes);
        ta_loaded_seq out[4] = {{77, 77}, {77, 77}, {77, 77}, {77, 77}};
        uint64_t n = 77;
        ta_error err;
        const ta_status s = ta_kv_pool_load(pool.get(), path("bad").c_str(), nullptr, out, 4, &n, &err);
        EXPECT_TRUE(s == TA_E_CORRUPT || s == TA_E_INVALID || s == TA_E_UNSUPPORTED) << what << ": " << ta_status_name(s);
        EXPECT_EQ(n, 77u) << what;
        EXPECT_EQ(out[0].loaded, 77u) << what;
        EXPECT_EQ(stats(pool).sequences, before.sequences) << what;
        EXPECT_EQ(stats(pool).bytes_used, before.bytes_used) << what;
    };
    const size_t index = 2 * 32 + 6 * 8 + 3 * 56;
    for (size_t at = 0; at < kHeaderBytes + index + 48; ++at) {  // header, index and the first block's header, every bit
        for (int bit = 0; bit < 8; ++bit) {
            Bytes bad = good;
            bad[at] = char(bad[at] ^ (1 << bit));
            refuse(bad, "bit " + std::to_string(bit) + " of byte " + std::to_string(at));
        }
    }
    Random random(7);
    for (int i = 0; i < 200; ++i) {
        Bytes bad = good;
        const size_t at = size_t(random.below(int64_t(bad.size())));
        bad[at] = char(bad[at] ^ (1 << random.below(8)));
        refuse(bad, "byte " + std::to_string(at));
    }
    for (size_t n = 0; n < good.size(); n += 4096)
        refuse(Bytes(good.begin(), good.begin() + std::ptrdiff_t(n)), "cut after " + std::to_string(n));
    for (size_t n : {size_t{1}, kHeaderBytes - 1, kHeaderBytes, kHeaderBytes + 40, good.size() - 1})
        refuse(Bytes(good.begin(), good.begin() + std::ptrdiff_t(n)), "cut after " + std::to_string(n));
    Bytes longer = good;
    longer.push_back(0);
    refuse(longer, "a byte more");
    EXPECT_EQ(space_stats(pool, same).entries, 0u);
    verify(pool, there);
    write_file(path("bad"), good);
    EXPECT_EQ(load(pool, path("bad")).size(), 2u);
    EXPECT_EQ(space_stats(pool, same).entries, 3u);
}

// A file whose hashes are right and whose fields are not: refused, or a pool like any other.
TEST_F(PoolFile, ForgedFields) {
    for (ta_profile profile : {TA_PROFILE_ACCURATE, TA_PROFILE_PAPER}) {
        auto numerics = sized<ta_numerics>();
        numerics.profile = profile;
        const KvPool from = make_pool(context, options(4, &numerics)), pool = make_pool(context, options(4, &numerics));
        const ta_namespace space = make_namespace(from, 1);
        const ta_seq seq = write(from, 200, 1);
        truncate(from, fork_sequence(from, seq), 100);
        publish(from, seq, space, 1, 3);
        const std::string saved = path(profile == TA_PROFILE_PAPER ? "paper" : "accurate");
        save(from, saved, TA_SAVE_PUBLISHED);
        const Bytes good = read_file(saved);
        uint64_t index_bytes;
        std::memcpy(&index_bytes, good.data() + 72, sizeof index_bytes);
        const size_t end = kHeaderBytes + size_t(index_bytes), step = profile == TA_PROFILE_PAPER ? 4 : 8;
        int refused = 0, taken = 0;
        for (size_t at = 8; at + 8 <= end; at += step) {
            if (at >= 80 && at < kHeaderBytes) continue;  // the hashes
            uint64_t was;
            std::memcpy(&was, good.data() + at, sizeof was);
            for (uint64_t value : {uint64_t{0}, uint64_t{1}, was + 1, was - 1, was * 2, uint64_t{1} << 31, uint64_t{1} << 61,
                                   uint64_t{1} << 63, UINT64_MAX, uint64_t(good.size()), uint64_t{0x7fc00000}}) {
                SCOPED_TRACE(std::to_string(value) + " at " + std::to_string(at));
                Bytes bad = good;
                std::memcpy(bad.data() + at, &value, sizeof value);
                if (at >= kHeaderBytes) {
                    const uint64_t hash = XXH3_64bits(bad.data() + kHeaderBytes, end - kHeaderBytes);
                    std::memcpy(bad.data() + 80, &hash, sizeof hash);
                }
                const uint64_t hash = XXH3_64bits(bad.data(), 88);
                std::memcpy(bad.data() + 88, &hash, sizeof hash);
                write_file(path("bad"), bad);
                ta_loaded_seq out[4] = {};
                uint64_t n = 0;
                ta_error err;
                const ta_status s = ta_kv_pool_load(pool.get(), path("bad").c_str(), nullptr, out, 4, &n, &err);
                if (s == TA_OK) {
                    ++taken;
                    for (uint64_t i = 0; i < n; ++i) {
                        verify(pool, out[i].loaded);
                        grow(pool, out[i].loaded, 1, 2);
                        release(pool, out[i].loaded);
                    }
                    continue;
                }
                ++refused;
                EXPECT_TRUE(s == TA_E_CORRUPT || s == TA_E_INVALID || s == TA_E_UNSUPPORTED) << ta_status_name(s);
                EXPECT_EQ(stats(pool).sequences, 0u);
            }
        }
        EXPECT_GT(refused, 100);
        EXPECT_GT(taken, 10);  // ids, keys
    }
}

// Peak memory of this process since the last call, beyond what it had then.
int64_t peak_growth(bool start) {
    static int64_t before = 0;
    const auto line = [](const char* field) {
        std::ifstream status("/proc/self/status");
        for (std::string word; status >> word;) {
            int64_t kib = 0;
            if (word == field && status >> kib) return kib << 10;
        }
        return int64_t{-1};
    };
    if (!start) return line("VmHWM:") - before;
    std::ofstream("/proc/self/clear_refs") << '5';
    return before = line("VmRSS:");
}

// Counts that a file has no bytes for but holes: refused without memory or time for them.
TEST_F(PoolFile, LargeHolesAreRefusedAtOnce) {
    constexpr uint64_t kGib = uint64_t{1} << 30;
    auto numerics = sized<ta_numerics>();
    numerics.profile = TA_PROFILE_PAPER;
    for (const bool universal : {false, true}) {
        const KvPool from = make_pool(context, options(4, universal ? &numerics : nullptr));
        const ta_seq seq = write(from, 70, 1);
        publish(from, seq, make_namespace(from, 1), 1, 1);
        const std::string saved = path(universal ? "universal" : "plain"), sequence = saved + " sequence";
        save(from, saved, TA_SAVE_PUBLISHED);
        ta_error err;
        require(ta_seq_save(from.get(), seq, sequence.c_str(), nullptr, &err), err);
        // Which count, and what one takes in the index; where `holes` begin.
        struct Case {
            const std::string& of;
            size_t count;
            uint64_t each;
        };
        const uint64_t state = uint64_t{kLayers} * kHeads * 2 * 4;
        for (const Case& c : {Case{saved, 16, 32}, Case{saved, 24, 8}, Case{saved, 32, 56}, Case{saved, 40, state},
                              Case{saved, 48, 32}, Case{sequence, 24, 32}}) {
            SCOPED_TRACE(c.of + ", count at " + std::to_string(c.count));
            SavedFile file(read_file(c.of));
            const uint64_t records = file.bytes.size() - file.header_bytes - file.index_bytes;
            const uint64_t more = (c.count == 48 || !file.is_pool ? kGib / 50000 : (kGib - records) / c.each);
            file.put(c.count, file.get(c.count) + more);
            if (file.is_pool) file.put(72, file.get(72) + more * c.each);
            if (!file.is_pool) file.put(16, file.get(24) * 64);  // tokens
            file.put(file.header_bytes - 8, file.hash(0, file.header_bytes - 8));
            file.bytes.resize(file.header_bytes + file.index_bytes);
            write_file(path("holes"), file.bytes);
            std::filesystem::resize_file(path("holes"), 2 * kGib);
            const KvPool pool = make_pool(context, options(4, universal ? &numerics : nullptr));
            peak_growth(true);
            const std::clock_t start = std::clock();
            ta_loaded_seq out[4] = {};
            uint64_t n = 0;
            const ta_status s = file.is_pool ? ta_kv_pool_load(pool.get(), path("holes").c_str(), nullptr, out, 4, &n, &err)
                                             : ta_seq_load(pool.get(), path("holes").c_str(), nullptr, &out[0].loaded, &err);
            EXPECT_TRUE(s == TA_E_CORRUPT || s == TA_E_INVALID || s == TA_E_LIMIT) << ta_status_name(s) << " " << err.message;
            EXPECT_LT(peak_growth(false), int64_t{32} << 20);
            EXPECT_LT(std::clock() - start, CLOCKS_PER_SEC / 2);
        }
    }
}

// A file does not carry a tenant's tokens into another's namespace.
TEST_F(PoolFile, SequencesBelongToTheNamespaceThatTheyWereOf) {
    const KvPool from = make_pool(context, options());
    const ta_namespace space = make_namespace(from, 1), ends = make_namespace(from, 3);
    const ta_seq of = write(from, 130, 1), before = fork_sequence(from, of);
    publish(from, of, space, 1, 2);
    const auto [matched, n] = match(from, space, 1, 2);
    const auto [fresh, none] = match(from, space, 0, 0);
    grow(from, fresh, 70, 3);
    const ta_seq gone = write(from, 70, 4), free = write(from, 70, 5);
    publish(from, gone, ends, 4, 1);
    ta_error err;
    require(ta_namespace_destroy(from.get(), ends, &err), err);
    save(from, path("all"));
    const std::vector<ta_seq> seqs = {of, before, matched, fresh, gone, free};
    for (size_t i = 0; i < seqs.size(); ++i)
        require(ta_seq_save(from.get(), seqs[i], path(std::to_string(i).c_str()).c_str(), nullptr, &err), err);
    for (const bool one_by_one : {false, true}) {
        for (const bool there_already : {false, true}) {
            SCOPED_TRACE(std::string(one_by_one ? "sequences" : "a pool") + (there_already ? ", namespace there" : ""));
            const KvPool pool = make_pool(context, options());
            ta_namespace same = there_already ? make_namespace(pool, 1) : 0;
            std::vector<ta_seq> loaded(seqs.size());
            if (one_by_one) {
                for (size_t i = 0; i < seqs.size(); ++i)
                    require(ta_seq_load(pool.get(), path(std::to_string(i).c_str()).c_str(), nullptr, &loaded[i], &err), err);
            } else {
                const std::vector<ta_loaded_seq> all = load(pool, path("all"));
                for (size_t i = 0; i < seqs.size(); ++i) loaded[i] = loaded_as(all, seqs[i]);
            }
            const ta_namespace other = make_namespace(pool, 2);
            if (!same) same = make_namespace(pool, 1);
            const auto status = [&](size_t i, ta_namespace to) {
                return ta_seq_publish(pool.get(), loaded[i], to, keys(9 + i, 1).data(), 1, &err);
            };
            for (size_t i = 0; i < 5; ++i) EXPECT_EQ(status(i, other), TA_E_INVALID) << i;
            EXPECT_EQ(space_stats(pool, other).entries, 0u);
            for (size_t i = 0; i < 4; ++i) EXPECT_EQ(status(i, same), TA_OK) << i << ": " << err.message;
            EXPECT_EQ(status(4, same), TA_E_INVALID) << "of a namespace that had ended";
            EXPECT_EQ(status(4, make_namespace(pool, 3)), TA_E_INVALID) << "though its salt is here again";
            EXPECT_EQ(status(5, other), TA_OK) << "it was of none";
            EXPECT_EQ(status(5, same), TA_E_INVALID);
            for (size_t i = 0; i < 6; ++i) EXPECT_EQ(length(pool, loaded[i]), length(from, seqs[i]));
        }
    }
}

// A file of empty sequences, each of another namespace, with the blocks of `good`, which then belong to nothing.
Bytes many_namespaces(const Bytes& good, uint64_t n) {
    const SavedFile from(good);
    const size_t entries = from.records.size() * SavedFile::kEntryBytes;
    Bytes bytes(good.begin(), good.begin() + std::ptrdiff_t(kHeaderBytes + entries));
    for (uint64_t i = 0; i < n; ++i) {
        const uint64_t sequence[] = {i + 1, 0, UINT64_MAX, i + 1000};
        const auto* p = reinterpret_cast<const char*>(sequence);
        bytes.insert(bytes.end(), p, p + sizeof sequence);
    }
    bytes.insert(bytes.end(), good.begin() + std::ptrdiff_t(kHeaderBytes + from.index_bytes), good.end());
    const auto put = [&](size_t at, uint64_t value) { std::memcpy(bytes.data() + at, &value, sizeof value); };
    put(16, n);
    for (size_t at : {24u, 32u, 40u}) put(at, 0);  // references, entries, states
    put(72, entries + n * 32);
    SavedFile file(bytes);
    file.mend_index();
    return file.bytes;
}

// As many namespaces as files may name are not used up by files that are refused, or by sequences that are gone.
TEST_F(PoolFile, RefusedFilesNameNothing) {
    constexpr uint64_t kMostNamed = 65536;
    auto many = options();
    many.max_sequences = 2 * kMostNamed;
    const KvPool from = make_pool(context, options()), pool = make_pool(context, options()), third = make_pool(context, many);
    save(from, path("empty"));
    for (uint8_t salt : {1, 2, 3}) {
        const auto [seq, none] = match(from, make_namespace(from, salt), 0, 0);
        grow(from, seq, 70, salt);
        ta_error err;
        require(ta_seq_save(from.get(), seq, path(std::to_string(salt).c_str()).c_str(), nullptr, &err), err);
        if (salt == 1) save(from, path("one"));
    }
    const auto load_one = [&](const KvPool& to, const char* name, ta_seq& seq) {
        ta_error err;
        return ta_seq_load(to.get(), path(name).c_str(), nullptr, &seq, &err);
    };
    const auto publish_one = [&](const KvPool& to, ta_seq seq, uint8_t salt) {
        ta_error err;
        return ta_seq_publish(to.get(), seq, make_namespace(to, salt), keys(salt, 1).data(), 1, &err);
    };
    std::vector<ta_loaded_seq> out(kMostNamed);
    uint64_t n = 0;
    ta_seq seq = 0;
    ta_error err;
    write_file(path("blocks of nothing"), many_namespaces(read_file(path("one")), kMostNamed));
    EXPECT_EQ(ta_kv_pool_load(pool.get(), path("blocks of nothing").c_str(), nullptr, out.data(), kMostNamed, &n, &err),
              TA_E_CORRUPT)
        << err.message;
    EXPECT_EQ(load_one(pool, "1", seq), TA_OK);
    EXPECT_EQ(publish_one(pool, seq, 1), TA_OK);

    // One more can be named: what is refused does not take its place.
    write_file(path("taken"), many_namespaces(read_file(path("empty")), kMostNamed - 1));
    require(ta_kv_pool_load(third.get(), path("taken").c_str(), nullptr, out.data(), kMostNamed, &n, &err), err);
    Bytes bad = read_file(path("2"));
    bad.back() = char(bad.back() ^ 1);
    write_file(path("bad"), bad);
    EXPECT_EQ(load_one(third, "bad", seq), TA_E_CORRUPT);
    EXPECT_EQ(load_one(third, "3", seq), TA_OK);
    EXPECT_EQ(publish_one(third, seq, 3), TA_OK);

    // This namespace is one of the pool's own now. Sequences belong to the others, until they end.
    EXPECT_EQ(load_one(third, "2", seq), TA_OK);
    ta_seq last = 0;
    EXPECT_EQ(load_one(third, "1", last), TA_E_LIMIT);
    EXPECT_EQ(last, 0u);
    for (uint64_t i = 0; i < n; ++i) release(third, out[i].loaded);
    EXPECT_EQ(load_one(third, "1", last), TA_OK);
    EXPECT_EQ(publish_one(third, last, 1), TA_OK);
    EXPECT_EQ(publish_one(third, seq, 2), TA_OK);
}

TEST_F(PoolFile, WrongFilesRoomAndCallbacks) {
    const KvPool pool = make_pool(context, options()), other = make_pool(context, options(2));
    const ta_seq a = write(pool, 200, 1), b = write(pool, 100, 2);
    save(pool, path("file"));
    ta_error err;
    uint64_t n = 77;
    ta_loaded_seq out[2] = {{77, 77}, {77, 77}};
    const auto load_status = [&](const KvPool& to, const std::string& from, uint64_t most = 2) {
        return ta_kv_pool_load(to.get(), from.c_str(), nullptr, out, most, &n, &err);
    };
    EXPECT_EQ(ta_kv_pool_save(pool.get(), path("file").c_str(), 0, nullptr, &err), TA_E_INVALID) << err.message;
    EXPECT_EQ(err.argument, 1);
    EXPECT_EQ(ta_kv_pool_save(pool.get(), "", 0, nullptr, &err), TA_E_INVALID);
    EXPECT_STREQ(err.message, "path is empty");
    EXPECT_EQ(err.argument, 1);
    EXPECT_EQ(ta_kv_pool_save(pool.get(), path("new").c_str(), 2, nullptr, &err), TA_E_INVALID) << err.message;
    EXPECT_EQ(ta_kv_pool_save(pool.get(), path("none/file").c_str(), 0, nullptr, &err), TA_E_IO) << err.message;
    EXPECT_EQ(load_status(pool, ""), TA_E_INVALID);
    EXPECT_STREQ(err.message, "path is empty");
    EXPECT_EQ(err.argument, 1);
    EXPECT_EQ(load_status(other, path("file")), TA_E_INVALID) << err.message;
    EXPECT_EQ(err.argument, 1);
    EXPECT_EQ(load_status(pool, path("file"), 1), TA_E_INVALID) << err.message;
    EXPECT_EQ(err.argument, 5) << "it is `most` that is too small";
    EXPECT_EQ(load_status(pool, path("absent")), TA_E_IO) << err.message;
    EXPECT_EQ(load_status(pool, folder.path()), TA_E_INVALID) << err.message;
    EXPECT_EQ(err.argument, 1);
    EXPECT_EQ(ta_kv_pool_load(other.get(), path("file").c_str(), nullptr, nullptr, 0, &n, &err), TA_E_INVALID);
    EXPECT_EQ(err.argument, 1) << "asked for its number of sequences";
    std::filesystem::create_symlink(path("file"), path("link"));
    EXPECT_EQ(load_status(pool, path("link")), TA_E_IO) << err.message;
    require(ta_seq_save(pool.get(), a, path("sequence").c_str(), nullptr, &err), err);
    EXPECT_EQ(load_status(pool, path("sequence")), TA_E_CORRUPT) << err.message;
    auto few = options();
    few.max_sequences = 1;
    const KvPool tiny = make_pool(context, few);
    EXPECT_EQ(load_status(tiny, path("file")), TA_E_LIMIT) << err.message;
    EXPECT_EQ(stats(tiny).sequences, 0u);
    EXPECT_EQ(stats(tiny).bytes_used, 0u);
    EXPECT_GT(make_sequence(tiny), 0u);
    few = options();
    few.budget_bytes = stats(pool).token_block_bytes * 2;
    EXPECT_EQ(load_status(make_pool(context, few), path("file")), TA_E_TIER_FULL) << err.message;
    const Plan plan = make_plan(pool);
    begin(plan, {b}, {1});
    EXPECT_EQ(ta_kv_pool_save(pool.get(), path("new").c_str(), 0, nullptr, &err), TA_E_BUSY) << err.message;
    require(ta_plan_abort(plan.get(), &err), err);
    EXPECT_EQ(n, 77u);
    EXPECT_EQ(out[1].loaded, 77u);

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
    for (int stop = 0; stop < 7; ++stop) {  // before each of six blocks, and at the end
        Calls c{stop};
        EXPECT_EQ(ta_kv_pool_save(pool.get(), path("stopped").c_str(), 0, ReportTo(progress, &c), &err), TA_E_CANCELLED)
            << err.message;
        c = {stop};
        EXPECT_EQ(ta_kv_pool_load(pool.get(), path("file").c_str(), ReportTo(progress, &c), out, 2, &n, &err), TA_E_CANCELLED)
            << err.message;
    }
    EXPECT_EQ(stats(pool).sequences, 2u);
    Calls all{100};
    require(ta_kv_pool_load(pool.get(), path("file").c_str(), ReportTo(progress, &all), out, 2, &n, &err), err);
    EXPECT_EQ(all.done, all.total);
    EXPECT_EQ(all.total, std::filesystem::file_size(path("file")));
    EXPECT_EQ(folder.entries(), 3u);  // nothing else is left behind
}

// A pool larger than the device tier, saved from all tiers and loaded into them.
TEST_F(PoolFile, AcrossTiers) {
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = tiers.disk_bytes = uint64_t{8} << 20;
    const KvPool small = make_pool(context, small_options(20, &tiers)), large = make_pool(context, options());
    std::vector<ta_seq> seqs;
    for (uint64_t text = 0; text < 6; ++text) seqs.push_back(write(large, 700, text));
    save(large, path("large"));
    std::vector<ta_loaded_seq> there = load(small, path("large"));
    move(small, loaded_as(there, seqs[2]), 10, TA_TIER_DISK);
    EXPECT_EQ(residency(small, loaded_as(there, seqs[2])).disk_blocks, 10u);
    save(small, path("again"));
    const KvPool third = make_pool(context, options());
    const std::vector<ta_loaded_seq> back = load(third, path("again"));
    for (ta_seq s : seqs) {
        const ta_seq copy = loaded_as(there, s);
        EXPECT_TRUE(same_values(large, s, third, loaded_as(back, copy), 700));
        EXPECT_TRUE(same_bits(grow(large, s, 3, 9), grow(small, copy, 3, 9)));
    }
}

// A load goes on past a host tier that it fills, and past one that is pinned. Blocks that others have published stay.
TEST_F(PoolFile, ALoadUsesTheDiskBelowAHostTier) {
    const KvPool from = make_pool(context, options());
    std::vector<ta_seq> seqs;
    for (uint64_t text = 0; text < 6; ++text) seqs.push_back(write(from, 700, text));
    save(from, path("all"));
    ta_error err;
    require(ta_seq_save(from.get(), write(from, 6 * 700, 7), path("long").c_str(), nullptr, &err), err);
    for (const bool pinned : {false, true}) {
        SCOPED_TRACE(pinned ? "others pinned" : "others published");
        auto tiers = sized<ta_tier_options>();
        tiers.host_bytes = uint64_t{256} << 10;
        tiers.disk_bytes = uint64_t{8} << 20;
        const KvPool pool = make_pool(context, small_options(20, &tiers));
        const ta_namespace space = make_namespace(pool, 1);
        const ta_seq there = write(pool, 6 * 64, 8);
        publish(pool, there, space, 8, 6);
        if (pinned) {
            const ta_seq fills = write(pool, 20 * 64, 9);
            move(pool, fills, 20, TA_TIER_HOST);
            ASSERT_GT(residency(pool, fills).host_blocks, 5u);
            require(ta_seq_pin(pool.get(), fills, 0, 20, &err), err);
        } else {
            release(pool, there);
        }
        const std::vector<ta_loaded_seq> all = load(pool, path("all"));
        ta_seq alone = 0;
        require(ta_seq_load(pool.get(), path("long").c_str(), nullptr, &alone, &err), err);
        EXPECT_GT(tier_stats(pool, TA_TIER_DISK).blocks, 60u);
        EXPECT_EQ(space_stats(pool, space).entries, 6u);
        verify(pool, alone);
        for (ta_seq s : seqs) EXPECT_TRUE(same_values(from, s, pool, loaded_as(all, s), 700));
        // Then the disk is too small.
        tiers.disk_bytes = uint64_t{256} << 10;
        const KvPool small = make_pool(context, small_options(20, &tiers));
        EXPECT_EQ(ta_seq_load(small.get(), path("long").c_str(), nullptr, &alone, &err), TA_E_TIER_FULL);
        EXPECT_EQ(stats(small).bytes_used + tier_stats(small, TA_TIER_DISK).blocks, 0u);
    }
}

// Nor is more of it moved down, where it loses bits, than there is room wanted.
TEST_F(PoolFile, ALoadTakesNoBitsFromWhatFits) {
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = uint64_t{4} << 20;
    tiers.falling_precision = TA_ON;
    auto o = options(8);
    o.tiers = &tiers;
    const KvPool from = make_pool(context, o);
    const ta_seq seq = write(from, 30 * 64, 1);
    save(from, path("file"));
    o.budget_bytes = 27 * stats(from).token_block_bytes;
    const KvPool pool = make_pool(context, o);
    const ta_residency r = residency(pool, loaded_as(load(pool, path("file")), seq));
    EXPECT_EQ(r.device_blocks, 27u);
    EXPECT_EQ(tier_stats(pool, TA_TIER_HOST).fallen_blocks, 2u) << "three went, of which one is a sink";
}

// Blocks that a load brought and does not keep, or demoted to make room, belong to the namespace that the file names.
// In a pool without tiers published blocks that nobody uses make room, for files that are good and fit.
TEST_F(PoolFile, AFailedLoadDropsNothingThatIsPublished) {
    const KvPool from = make_pool(context, options());
    std::vector<ta_seq> seqs = {write(from, 6 * 64 + 3, 1), write(from, 5 * 64, 2)};
    save(from, path("good"));
    seqs.push_back(write(from, 24 * 64, 3));
    save(from, path("large"));
    Bytes bad = read_file(path("good"));
    bad[bad.size() - 100] ^= 1;
    write_file(path("bad"), bad);

    const KvPool to = make_pool(context, small_options(6));
    const ta_namespace space = make_namespace(to, 1);
    const ta_seq gone = write(to, 10 * 64, 9);
    publish(to, gone, space, 9, 10);
    release(to, gone);
    const auto refuse = [&](const char* name, ta_status why) {
        ta_loaded_seq loaded[4];
        uint64_t n = 0;
        ta_error err;
        EXPECT_EQ(ta_kv_pool_load(to.get(), path(name).c_str(), nullptr, loaded, 4, &n, &err), why) << err.message;
        EXPECT_EQ(stats(to).sequences, 0u);
        EXPECT_EQ(space_stats(to, space).entries, 10u) << name;
    };
    refuse("bad", TA_E_CORRUPT);
    refuse("large", TA_E_TIER_FULL);
    const std::vector<ta_loaded_seq> all = load(to, path("good"));
    for (const ta_loaded_seq& s : all) verify(to, s.loaded);
    EXPECT_TRUE(same_values(from, seqs[0], to, loaded_as(all, seqs[0]), 6 * 64 + 3));
    EXPECT_LT(space_stats(to, space).entries, 10u);
}

TEST_F(PoolFile, MemoryIsZeroedBehindLoads) {
    const auto all_alike = options(8);  // any slot can be the next block's
    const KvPool from = make_pool(context, all_alike);
    const ta_seq seq = write(from, 40 * 64, 1);
    publish(from, seq, make_namespace(from, 1), 1, 40);
    save(from, path("good"), TA_SAVE_PUBLISHED);
    Bytes bad = read_file(path("good"));
    bad.back() = char(bad.back() ^ 1);
    write_file(path("bad end"), bad);
    const auto stop_at_end = [](void*, uint64_t done, uint64_t total) -> int32_t { return done == total; };
    struct Case {
        const char* file;
        ta_progress_fn progress;
        bool tiered;
        ta_status status;
    };
    for (const Case& c : {Case{"bad end", nullptr, false, TA_E_CORRUPT}, Case{"good", stop_at_end, false, TA_E_CANCELLED},
                          Case{"good", nullptr, true, TA_OK}}) {
        SCOPED_TRACE(std::string(c.file) + ": " + ta_status_name(c.status));
        Slots slots;
        const Context own = slots.make_context();
        auto tiers = sized<ta_tier_options>();
        tiers.host_bytes = uint64_t{8} << 20;
        auto o = all_alike;
        if (c.tiered) o.budget_bytes = 12 * stats(from).token_block_bytes;
        if (c.tiered) o.tiers = &tiers;
        const KvPool pool = make_pool(own, o);
        ta_loaded_seq out[1];
        uint64_t n = 0;
        ta_error err;
        ASSERT_EQ(ta_kv_pool_load(pool.get(), path(c.file).c_str(), ReportTo(c.progress, nullptr), out, 1, &n, &err), c.status)
            << err.message;
        EXPECT_EQ(slots.returned_dirty.load(), 0) << "given back to the embedder while it read";
        if (c.tiered) {
            EXPECT_GT(residency(pool, out[0].loaded).host_blocks, 20u);
        }
        const ta_seq nobody = make_sequence(pool);
        const Plan plan = make_plan(pool);
        begin(plan, {nobody}, {10});
        EXPECT_EQ(slots.zero(), 1u) << "to a sequence of no namespace";
        require(ta_plan_abort(plan.get(), &err), err);
        require(ta_kv_pool_close(pool.get(), &err), err);
        EXPECT_GT(slots.returned.load(), 0);
        EXPECT_EQ(slots.returned_dirty.load(), 0) << "given back to the embedder";
    }
}

// Refused before a block is read: nothing makes room for what will not be.
TEST_F(PoolFile, MoreSequencesThanThePoolTakes) {
    const KvPool from = make_pool(context, options());
    for (uint64_t text = 0; text < 3; ++text) write(from, 700, text);
    save(from, path("three"));
    for (const uint32_t most : {2u, 4u}) {
        SCOPED_TRACE("at most " + std::to_string(most));
        auto tiers = sized<ta_tier_options>();
        tiers.host_bytes = uint64_t{8} << 20;
        auto o = small_options(20, &tiers);
        o.max_sequences = most;
        const KvPool pool = make_pool(context, o);
        const ta_seq mine[] = {write(pool, 700, 7), write(pool, 700, 8)};
        wait_for_moves(pool);
        const ta_kv_pool_stats before = stats(pool);
        const uint64_t moved = tier_stats(pool, TA_TIER_HOST).bytes_in;
        int blocks = 0;
        const auto count = [](void* user, uint64_t, uint64_t) -> int32_t { return ++*static_cast<int*>(user), 0; };
        ta_loaded_seq out[3] = {{77, 77}, {77, 77}, {77, 77}};
        uint64_t n = 77;
        ta_error err;
        EXPECT_EQ(ta_kv_pool_load(pool.get(), path("three").c_str(), ReportTo(count, &blocks), out, 3, &n, &err), TA_E_LIMIT)
            << err.message;
        EXPECT_EQ(blocks, 0);
        EXPECT_EQ(n, 77u);
        EXPECT_EQ(out[0].loaded, 77u);
        EXPECT_EQ(stats(pool).sequences, 2u);
        EXPECT_EQ(stats(pool).bytes_used, before.bytes_used);
        EXPECT_EQ(tier_stats(pool, TA_TIER_HOST).bytes_in, moved);
        release(pool, mine[0]);
        if (most == 4) {
            EXPECT_EQ(load(pool, path("three")).size(), 3u);
        }
    }
}

}  // namespace
}  // namespace ta::testing
