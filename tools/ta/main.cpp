// ta: what one does with the library by hand.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/ta/bench_share.h"
#include "tools/ta/bench_tiers.h"
#include "tools/ta/machine.h"

namespace {

using nlohmann::json;
using namespace ta::tools;

std::unique_ptr<Machine> machine_for(const std::string& device) {
    if (device == "cpu") return make_cpu_machine();
    if (device == "auto") {
        try {
            return make_gpu_machine(0);
        } catch (const Failure&) {
            return make_cpu_machine();
        }
    }
    int ordinal = 0;
    const auto [end, bad] = std::from_chars(device.data(), device.data() + device.size(), ordinal);
    if (bad != std::errc() || end != device.data() + device.size())
        throw Failure("--device is '" + device + "'; it takes cpu, auto or a GPU's number");
    return make_gpu_machine(ordinal);
}

std::string text_of(const json& value) {
    if (value.is_string()) return value.get<std::string>();
    if (value.is_number_unsigned()) return std::to_string(value.get<uint64_t>());
    char text[32];
    std::snprintf(text, sizeof text, "%.4g", value.get<double>());
    return text;
}

// Markdown: a table for each part, whose columns are the keys of its first row.
class Tables {
  public:
    void add(const json& row) {
        if (row["part"] != part_) {
            part_ = row["part"];
            std::printf("\n");
            print(row, [](const auto& item) { return item.key(); });
            print(row, [](const auto&) { return std::string("---"); });
        }
        print(row, [](const auto& item) { return text_of(item.value()); });
        std::fflush(stdout);
    }

  private:
    template <class Cell>
    static void print(const json& row, const Cell& cell) {
        for (const auto& item : row.items()) std::printf("| %s ", cell(item).c_str());
        std::printf("|\n");
    }
    std::string part_;
};

// Prints what run(row) reports.
int report(const std::string& device, bool as_json,
           const std::function<void(const std::function<void(const json&)>& row)>& run) {
    json rows = json::array();
    Tables tables;
    const bool progress = as_json && isatty(STDERR_FILENO);
    if (!as_json) std::printf("%s, %s\n", ta_build_info(), device.c_str());
    run([&](const json& row) {
        if (!as_json) tables.add(row);
        if (progress) std::fprintf(stderr, "\r%zu results, %s          ", rows.size() + 1, text_of(row["part"]).c_str());
        rows.push_back(row);
    });
    if (progress) std::fprintf(stderr, "\n");
    if (as_json) std::printf("%s\n", json{{"library", ta_build_info()}, {"device", device}, {"rows", rows}}.dump(1).c_str());
    return 0;
}

int run_bench_tiers(const std::string& device, const BenchTiersOptions& options, bool as_json) {
    const std::unique_ptr<Machine> machine = machine_for(device);
    return report(machine->name(), as_json, [&](const auto& row) { bench_tiers(*machine, options, row); });
}

int run_bench_share(const std::vector<std::string>& devices, const BenchShareOptions& options, bool as_json) {
    std::vector<std::unique_ptr<Machine>> machines;
    std::string names;
    for (const std::string& d : devices) {
        machines.push_back(machine_for(d));
        names += (names.empty() ? "" : " + ") + machines.back()->name();
    }
    return report(names, as_json, [&](const auto& row) { bench_share(machines, options, row); });
}

}  // namespace

int main(int argc, char** argv) {
    CLI::App app{"TurboAttention's command line"};
    app.require_subcommand(1);
    std::string device = "auto";
    bool as_json = false;
    CLI::App* info = app.add_subcommand("info", "What was built and what this machine has");
    CLI::App* bench = app.add_subcommand("bench", "Benchmarks");
    bench->require_subcommand(1);
    CLI::App* tiers =
        bench->add_subcommand("tiers", "Moves of blocks between tiers, against the ceiling measured in the same run");
    BenchTiersOptions options;
    tiers->add_option("--device", device, "cpu, a GPU's number, or auto")->capture_default_str();
    tiers->add_option("--parts", options.parts, bench_tiers_parts())->delimiter(',');
    tiers->add_option("--memory", options.memory_bytes, "bytes that a case may take in each tier")
        ->transform(CLI::AsSizeValue(false));
    tiers->add_option("--disk", options.disk_bytes, "bytes on disk")->transform(CLI::AsSizeValue(false));
    tiers->add_option("--folder", options.disk_folder, "where the disk tier's file goes; default TMPDIR or /tmp");
    tiers->add_option("--node", options.host_node,
                      "1 + the NUMA node of the host tier; default: the GPU's and, for moves, the farthest one too");
    tiers->add_option("--repeats", options.repeats, "of each case")->check(CLI::Range(3, 10000));
    bool quick = false;
    tiers->add_flag("--quick", quick, "a quarter of the memory, the disk and the repeats");
    tiers->add_flag("--json", as_json, "JSON instead of markdown");
    CLI::App* share = bench->add_subcommand("share", "Sequences between the ranks of a group, and spread over them");
    std::vector<std::string> devices = {"0", "1"};
    BenchShareOptions share_options;
    share->add_option("--devices", devices, "of the ranks: cpu or a GPU's number for each")
        ->delimiter(',')
        ->capture_default_str();
    share->add_option("--parts", share_options.parts, bench_share_parts())->delimiter(',');
    share->add_option("--kind", share_options.kind, "of the group")
        ->transform(CLI::CheckedTransformer(
            std::map<std::string, ta_group_kind>{{"local", TA_GROUP_LOCAL}, {"host", TA_GROUP_HOST}, {"nccl", TA_GROUP_NCCL}}));
    share->add_flag("--hosts-apart", share_options.hosts_apart, "an NCCL group takes each rank for one of another host");
    share->add_option("--memory", share_options.memory_bytes, "bytes that a case may take on each rank")
        ->transform(CLI::AsSizeValue(false));
    share->add_option("--repeats", share_options.repeats, "of each case")->check(CLI::Range(3, 10000));
    share->add_flag("--json", as_json, "JSON instead of markdown");
    CLI11_PARSE(app, argc, argv);
    try {
        if (info->parsed()) {
            std::printf("%s\n%s\n", ta_build_info(), machine_for("auto")->name().c_str());
            return 0;
        }
        if (share->parsed()) return run_bench_share(devices, share_options, as_json);
        if (quick) {
            options.memory_bytes /= 4;
            options.disk_bytes /= 4;
            options.repeats = std::max(3, options.repeats / 4);
        }
        return run_bench_tiers(device, options, as_json);
    } catch (const std::exception& e) {
        std::fprintf(stderr, "ta: %s\n", e.what());
        return 1;
    }
}
