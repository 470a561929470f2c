// Sequences as files: all of a sequence's blocks with their hashes. docs/FORMAT.md, section 8.
#pragma once

#include <string>

#include "src/kv/files/block_file.h"

namespace ta {

// Writes the file `path`, which must not exist, and exists only when it is complete. TA_E_CORRUPT names a block that does not
// match its hashes.
Status save_sequence(Pool& pool, ta_seq seq, const std::string& path, const Progress& progress, FileSystem& files);

// Writes a sequence into the file that `into_file` opens for it.
Status save_sequence(Pool& pool, ta_seq seq, const Progress& progress,
                     const std::function<Status(const std::function<Status(File&)>& write)>& into_file);

// Makes a sequence of the file's content, or nothing. TA_E_INVALID: the file is of another pool. TA_E_CORRUPT: it is damaged.
Result<ta_seq> load_sequence(Pool& pool, const std::string& path, const Progress& progress, FileSystem& files);

}  // namespace ta
