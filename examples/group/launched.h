// The rank that mpirun, torchrun or srun gave this process, and how ranks learn the group's id: rank 0 writes it to a file.
#pragma once

#include <turboattention.h>

#include <cstdint>
#include <optional>
#include <string>

namespace group_example {

struct Place {
    uint32_t rank, ranks;
    int local_rank;   // rank among the processes of this host
    std::string job;  // the same at all ranks of the job, and at no other job's
};

// Nothing: no launcher started this process. Throws if the launcher's values are impossible.
std::optional<Place> find_place();

// The id that rank 0 makes; the other ranks wait up to a minute for it. `file`: a path that all ranks see; empty: a file in
// TMPDIR or /tmp. Rank 0 removes the file in the destructor.
class SharedId {
  public:
    SharedId(const Place& place, ta_group_kind kind, const std::string& file);
    ~SharedId();
    const ta_group_id& id() const { return id_; }

  private:
    const std::string file_;
    const bool mine_;
    ta_group_id id_{};
};

}  // namespace group_example
