// A whole pool as a file: its sequences, the published blocks, and every block once, however many share it. docs/FORMAT.md,
// section 9.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "src/kv/files/block_file.h"

namespace ta {

// Writes the file `path`, which must not exist, and exists only when it is complete. TA_E_BUSY: a sequence is in a plan.
Status save_pool(Pool& pool, const std::string& path, bool published, const Progress& progress, FileSystem& files);

struct LoadedSequence {
    ta_seq saved, loaded;  // ids there and here
};
// The number of sequences in the file. Checks the file's index, not its blocks.
Result<uint64_t> count_sequences(Pool& pool, const std::string& path, FileSystem& files);
// Adds all of the file to the pool, or nothing. TA_E_INVALID: it has more than `most` sequences.
Result<std::vector<LoadedSequence>> load_pool(Pool& pool, const std::string& path, uint64_t most, const Progress& progress,
                                              FileSystem& files);

}  // namespace ta
