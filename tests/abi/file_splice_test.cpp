// Parts of honest files put together: every file that is none of those that were saved is refused, though nobody computed a hash.
#define XXH_INLINE_ALL
#include <algorithm>
#include <map>
#include <string>

#include "abi/prefix_steps.h"
#include "support/files.h"
#include "support/saved_file.h"

namespace ta::testing {
namespace {

using Bytes = std::vector<char>;
using Record = SavedFile::Record;

class FileSplice : public PrefixSteps {
  protected:
    void SetUp() override {
        // The second pool takes the same steps with other tokens: its content ids are those of the first.
        for (uint64_t pool_number : {0, 10}) {
            const KvPool pool = make_pool(context, options());
            ta_seq seqs[2];
            for (uint64_t tenant : {1, 2}) {
                const ta_namespace space = make_namespace(pool, uint8_t(tenant));
                seqs[tenant - 1] = match(pool, space, 0, 0).first;
                grow(pool, seqs[tenant - 1], 230, pool_number + tenant);
                publish(pool, seqs[tenant - 1], space, tenant, 3);
            }
            for (bool later : {false, true}) {
                save_all(pool, seqs);
                if (later) continue;
                grow(pool, seqs[0], 10, pool_number + 1);  // into the open block
                truncate(pool, seqs[1], 128);
                grow(pool, seqs[1], 100, pool_number + 3);
            }
        }
    }
    void save_all(const KvPool& pool, const ta_seq (&seqs)[2]) {
        const std::string file = folder.file("saved");
        const auto take = [&](std::vector<SavedFile>& files) {
            files.emplace_back(read_file(file));
            std::filesystem::remove(file);
        };
        require(ta_kv_pool_save(pool.get(), file.c_str(), TA_SAVE_PUBLISHED, nullptr, &err), err);
        take(pool_files);
        for (ta_seq seq : seqs) {
            require(ta_seq_save(pool.get(), seq, file.c_str(), nullptr, &err), err);
            take(sequence_files);
        }
    }
    ta_status load(const Bytes& bytes, bool is_pool) {
        const std::string file = folder.file("spliced");
        write_file(file, bytes);
        ta_loaded_seq out[4] = {};
        uint64_t n = 0;
        return is_pool ? ta_kv_pool_load(target.get(), file.c_str(), nullptr, out, 4, &n, &err)
                       : ta_seq_load(target.get(), file.c_str(), nullptr, &out[0].loaded, &err);
    }
    // `block`: the one that the error must name; -1: any.
    void refuse(const Bytes& bytes, const std::vector<SavedFile>& honest, const std::string& what, int64_t block = -1) {
        for (const SavedFile& file : honest) {
            if (file.bytes == bytes) return void(++same);
        }
        ++refused[what];
        const ta_status s = load(bytes, honest[0].is_pool);
        EXPECT_EQ(s, TA_E_CORRUPT) << what << ": " << ta_status_name(s) << " " << err.message;
        EXPECT_EQ(stats(target).sequences, 0u) << what;
        EXPECT_EQ(stats(target).bytes_used, 0u) << what;
        if (block >= 0) {
            EXPECT_EQ(err.block, block) << what << ": " << err.message;
        }
    }
    // `to` with n bytes at `at` of another file in place of `replaced` bytes.
    static Bytes with(const SavedFile& to, size_t at, size_t replaced, const SavedFile& from, size_t from_at, size_t n) {
        Bytes bytes(to.bytes.begin(), to.bytes.begin() + std::ptrdiff_t(at));
        bytes.insert(bytes.end(), from.bytes.begin() + std::ptrdiff_t(from_at),
                     from.bytes.begin() + std::ptrdiff_t(from_at + n));
        bytes.insert(bytes.end(), to.bytes.begin() + std::ptrdiff_t(at + replaced), to.bytes.end());
        return bytes;
    }
    void sweep(const std::vector<SavedFile>& files) {
        const size_t header = SavedFile::kRecordHeader;
        for (const SavedFile& to : files) {
            ASSERT_EQ(load(to.bytes, to.is_pool), TA_OK) << err.message;
            target = make_pool(context, options());
            for (const SavedFile& from : files) {
                for (const Record& r : to.records) {
                    for (const Record& other : from.records) {
                        const int64_t block = r.bytes == other.bytes ? int64_t(r.index) : -1;
                        refuse(with(to, r.at, r.bytes, from, other.at, other.bytes), files, "another record", block);
                        refuse(with(to, r.at, header, from, other.at, header), files, "another record's header",
                               int64_t(r.index));
                        refuse(with(to, r.at + header, r.bytes - header, from, other.at + header, other.bytes - header), files,
                               "another record's slot", block);
                        if (block >= 0) {
                            const size_t half = r.bytes / 2;
                            refuse(with(to, r.at, half, from, other.at, half), files, "half of another record", block);
                            refuse(with(to, r.entry, 32, from, other.entry, 32), files, "another block in the index");
                        }
                        refuse(with(to, r.at, 0, from, other.at, other.bytes), files, "a record more");
                        if (&to == &from && r.at < other.at) {
                            SavedFile swapped(with(to, other.at, other.bytes, to, r.at, r.bytes));
                            swapped.bytes = with(swapped, r.at, r.bytes, to, other.at, other.bytes);
                            refuse(swapped.bytes, files, "two records swapped", block);
                        }
                    }
                    refuse(with(to, r.at, r.bytes, from, 0, 0), files, "a record less");
                }
                const size_t index = to.header_bytes + to.index_bytes, other_index = from.header_bytes + from.index_bytes;
                refuse(with(to, 0, to.header_bytes, from, 0, from.header_bytes), files, "another file's header");
                refuse(with(to, to.header_bytes, to.index_bytes, from, from.header_bytes, from.index_bytes), files,
                       "another file's index");
                refuse(with(to, 0, index, from, 0, other_index), files, "another file's header and index");
                refuse(with(to, to.bytes.size(), 0, from, 0, from.bytes.size()), files, "another file behind");
            }
        }
    }
    void report() const {
        size_t all = 0;
        for (const auto& [what, n] : refused) {
            std::printf("%-34s %zu\n", what.c_str(), n);
            all += n;
        }
        std::printf("%zu spliced files were refused; %zu splices were what was saved\n", all, same);
    }

    const Folder folder;
    std::vector<SavedFile> pool_files, sequence_files;
    KvPool target = make_pool(context, options());
    ta_error err;
    std::map<std::string, size_t> refused;
    size_t same = 0;
};

TEST_F(FileSplice, SequenceFiles) {
    sweep(sequence_files);
    report();
}

TEST_F(FileSplice, PoolFiles) {
    sweep(pool_files);
    report();
}

}  // namespace
}  // namespace ta::testing
