#include "tools/ta/plot.h"

#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "tools/ta/machine.h"
#include "tools/ta/plot_script.h"
#include "tools/ta/text_file.h"

namespace ta::tools {
namespace {

// An unnamed file with its position at the beginning. A child reads it as standard input, and may stop early.
class MemoryFile {
  public:
    explicit MemoryFile(const std::string& text) : file_(memfd_create("ta plot", MFD_CLOEXEC)) {
        size_t done = 0;
        while (file_ >= 0 && done < text.size()) {
            const ssize_t n = write(file_, text.data() + done, text.size() - done);
            if (n < 0 && errno == EINTR) continue;
            if (n <= 0) break;
            done += size_t(n);
        }
        if (file_ < 0 || done < text.size() || lseek(file_, 0, SEEK_SET) != 0)
            throw Failure(std::string("no memory for a file: ") + std::strerror(errno));
    }
    MemoryFile(const MemoryFile&) = delete;
    MemoryFile& operator=(const MemoryFile&) = delete;
    ~MemoryFile() { close(file_); }
    int descriptor() const { return file_; }

  private:
    const int file_;
};

// Starts argv[0] with this standard input. Returns 0, or the system's error.
int spawn(pid_t& child, const MemoryFile& input, const char* const* argv) {
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    int failed = posix_spawn_file_actions_adddup2(&actions, input.descriptor(), STDIN_FILENO);
    if (failed == 0) failed = posix_spawnp(&child, argv[0], &actions, nullptr, const_cast<char**>(argv), environ);
    posix_spawn_file_actions_destroy(&actions);
    return failed;
}

}  // namespace

void plot(const std::string& json_path, const std::string& out, const std::string& python) {
    if (!out.ends_with(".svg") && !out.ends_with(".png")) throw WrongInput(out + ": the picture's name ends in .svg or .png");
    const std::string text = read_text(json_path);  // read once, because it may be a pipe
    const nlohmann::json report = nlohmann::json::parse(text, nullptr, false);
    if (!report.is_object() || !report.contains("rows") || !report["rows"].is_array() || report["rows"].empty())
        throw WrongInput(json_path + ": no report of `ta bench ... --json`");
    for (const auto& row : report["rows"]) {
        if (!row.is_object() || !row.contains("part") || !row["part"].is_string())
            throw WrongInput(json_path + ": no report of `ta bench ... --json`: a row without a part");
    }
    const char* argv[] = {python.c_str(), "-c", kPlotScript, out.c_str(), nullptr};
    pid_t child = 0;
    if (const int failed = spawn(child, MemoryFile(text), argv); failed != 0)
        throw Failure("plot needs " + python + ": " + std::strerror(failed));
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return;
    if (WIFEXITED(status) && WEXITSTATUS(status) == kPlotLacksMatplotlib)
        throw Failure("plot needs matplotlib, which " + python + " does not find: apt install python3-matplotlib, or --python");
    // posix_spawnp may report a failed exec through the child's status.
    if (WIFEXITED(status) && WEXITSTATUS(status) == 127) throw Failure("plot needs " + python + ", which cannot be run");
    throw Failure(python + " could not draw " + json_path);
}

}  // namespace ta::tools
