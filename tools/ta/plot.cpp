#include "tools/ta/plot.h"

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "tools/ta/machine.h"
#include "tools/ta/plot_script.h"
#include "tools/ta/text_file.h"

namespace ta::tools {

void plot(const std::string& json_path, const std::string& out, const std::string& python) {
    if (!out.ends_with(".svg") && !out.ends_with(".png")) throw WrongInput(out + ": the picture's name ends in .svg or .png");
    const nlohmann::json report = nlohmann::json::parse(read_text(json_path), nullptr, false);
    if (!report.is_object() || !report.contains("rows") || !report["rows"].is_array() || report["rows"].empty())
        throw WrongInput(json_path + ": no report of `ta bench ... --json`");
    for (const auto& row : report["rows"]) {
        if (!row.is_object() || !row.contains("part") || !row["part"].is_string())
            throw WrongInput(json_path + ": no report of `ta bench ... --json`: a row without a part");
    }
    const char* argv[] = {python.c_str(), "-c", kPlotScript, json_path.c_str(), out.c_str(), nullptr};
    pid_t child = 0;
    if (const int failed = posix_spawnp(&child, python.c_str(), nullptr, nullptr, const_cast<char**>(argv), environ);
        failed != 0)
        throw Failure("plot needs " + python + ": " + std::strerror(failed));
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return;
    if (WIFEXITED(status) && WEXITSTATUS(status) == kPlotLacksMatplotlib)
        throw Failure("plot needs matplotlib, which " + python + " does not find: apt install python3-matplotlib, or --python");
    // posix_spawnp may tell so in the child's status.
    if (WIFEXITED(status) && WEXITSTATUS(status) == 127) throw Failure("plot needs " + python + ", which cannot be run");
    throw Failure(python + " could not draw " + json_path);
}

}  // namespace ta::tools
