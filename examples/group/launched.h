// The rank that mpirun, torchrun or srun gives a process, and how its ranks learn the group's id: one writes it to a file.
#pragma once

#include <turboattention.h>

#include <cstdint>
#include <optional>
#include <string>

namespace group_example {

struct Place {
    uint32_t rank, ranks;
    int local_rank;   // among those of this host
    std::string job;  // the same for all of them, and no other job's
};

// Nothing if no launcher has started this process. Throws if it says what cannot be.
std::optional<Place> find_place();

// An id that rank 0 makes, for which the others wait up to a minute. `file`: where all of them see it; empty: in TMPDIR or /tmp.
// Rank 0 removes it, once the group has been in use.
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
