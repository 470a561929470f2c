// A whole pool as a file: its sequences, each block once however many share it, and what is published. docs/FORMAT.md, section
// 9.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "src/kv/files/block_file.h"

namespace ta {

// Writes `path`, which must not exist; it does not until it is complete. TA_E_BUSY while a sequence is in a plan.
Status save_pool(Pool& pool, const std::string& path, bool published, const Progress& progress, FileSystem& files);

struct LoadedSequence {
    ta_seq saved, loaded;  // ids there and here
};
// How many sequences the file has; what it says of itself is checked, blocks are not.
Result<uint64_t> count_sequences(Pool& pool, const std::string& path, FileSystem& files);
// Adds all of the file to the pool, or nothing. `most`: TA_E_INVALID when it has more sequences.
Result<std::vector<LoadedSequence>> load_pool(Pool& pool, const std::string& path, uint64_t most, const Progress& progress,
                                              FileSystem& files);

}  // namespace ta
