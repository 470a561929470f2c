#include "launched.h"

#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <thread>

namespace group_example {
namespace {

namespace fs = std::filesystem;

struct Launcher {
    const char *rank, *ranks, *local_rank, *job;
};
constexpr Launcher kLaunchers[] = {
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "PMIX_NAMESPACE"},  // Open MPI's mpirun
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "PMI_PORT"},                                           // MPICH's
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"},                                               // torchrun
    {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID"},                                 // srun
};

uint32_t number(const char* name) {
    const char* const text = std::getenv(name);
    uint32_t n = 0;
    if (!text) throw std::runtime_error(std::string(name) + " is not set");
    const auto [end, bad] = std::from_chars(text, text + std::strlen(text), n);
    if (bad != std::errc() || *end != '\0') throw std::runtime_error(std::string(name) + " is '" + text + "', no number");
    return n;
}

}  // namespace

std::optional<Place> find_place() {
    for (const Launcher& l : kLaunchers) {
        if (!std::getenv(l.rank) || !std::getenv(l.ranks)) continue;
        Place p{number(l.rank), number(l.ranks), 0, ""};
        if (p.rank >= p.ranks) throw std::runtime_error(std::string(l.rank) + " is not below " + l.ranks);
        if (std::getenv(l.local_rank)) p.local_rank = int(number(l.local_rank));
        if (const char* const job = std::getenv(l.job)) p.job = job;
        for (char& c : p.job) {
            if (!std::isalnum(static_cast<unsigned char>(c))) c = '-';
        }
        return p;
    }
    return {};
}

SharedId::SharedId(const Place& place, ta_group_kind kind, const std::string& file)
    : file_(!file.empty() ? file : (fs::temp_directory_path() / ("turboattention-group-" + place.job)).string()),
      mine_(place.rank == 0) {
    if (mine_) {
        ta_error err{};
        if (ta_group_make_id(kind, &id_, &err) != TA_OK)
            throw std::runtime_error(std::string("ta_group_make_id: ") + err.message);
        std::ofstream(file_ + ".part", std::ios::binary).write(reinterpret_cast<const char*>(&id_), sizeof id_);
        fs::rename(file_ + ".part", file_);  // atomic: the file is complete or absent
        return;
    }
    for (int tries = 0; tries < 6000; ++tries) {
        if (std::ifstream in(file_, std::ios::binary); in.read(reinterpret_cast<char*>(&id_), sizeof id_)) return;
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    throw std::runtime_error("rank 0 has not written the group's id to " + file_ + " within a minute");
}

SharedId::~SharedId() {
    std::error_code ignored;
    if (mine_) fs::remove(file_, ignored);
}

}  // namespace group_example
