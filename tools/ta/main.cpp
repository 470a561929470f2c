// ta: what one does with the library by hand.
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

#include "tools/ta/bench_attend.h"
#include "tools/ta/bench_share.h"
#include "tools/ta/bench_tiers.h"
#include "tools/ta/info.h"
#include "tools/ta/inspect.h"
#include "tools/ta/machine.h"
#include "tools/ta/manual.h"
#include "tools/ta/plot.h"
#include "tools/ta/sizes.h"
#include "tools/ta/table.h"

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

// Runs a benchmark and prints what it reports: a table for each part as soon as it is complete.
int report(const std::string& device, bool as_json,
           const std::function<void(const std::function<void(const json&)>& row)>& run) {
    json rows = json::array();
    std::vector<Json> part;
    Progress progress;
    const auto print_part = [&] {
        progress.clear();
        if (part.empty() || as_json) return;
        std::printf("\n%s\n", part.front()["part"].get<std::string>().c_str());
        print_table(part, columns_of_bench(part));
    };
    if (!as_json) std::printf("%s, %s\n", ta_build_info(), device.c_str());
    run([&](const json& row) {
        if (!part.empty() && part.back()["part"].get<std::string>() != row["part"].get<std::string>()) {
            print_part();
            part.clear();
        }
        part.push_back(Json::parse(row.dump()));
        rows.push_back(row);
        progress.show(std::to_string(rows.size()) + " results, " + row["part"].get<std::string>());
    });
    print_part();
    if (as_json) std::printf("%s\n", json{{"library", ta_build_info()}, {"device", device}, {"rows", rows}}.dump(1).c_str());
    return 0;
}

int run_bench_attend(const std::string& device, const BenchAttendOptions& options, bool as_json) {
    const std::unique_ptr<Machine> machine = machine_for(device);
    return report(machine->name(), as_json, [&](const auto& row) { bench_attend(*machine, options, row); });
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

constexpr int kDamaged = 1, kWrongInput = 2;  // exit statuses; 1 is also that of every other failure

// Every file is looked at, whatever is wrong with those before it.
int run_verify(const std::vector<std::string>& files, bool as_json) {
    int status = 0;
    Json all = Json::array();
    for (const std::string& file : files) {
        try {
            const Json result = verify(file);
            if (result["good"] != true) status = std::max(status, kDamaged);
            if (!as_json) print_verification(result);
            all.push_back(result);
        } catch (const WrongInput& e) {
            std::fprintf(stderr, "ta: %s\n", e.what());
            status = kWrongInput;
        }
    }
    if (as_json) std::printf("%s\n", all.dump(1).c_str());
    return status;
}

void print_models(bool as_json) {
    std::vector<Json> rows;
    for (const ModelShape& m : known_models()) {
        rows.push_back(
            {{"model", m.name}, {"layers", m.layers}, {"kv_heads", m.kv_heads}, {"head_dim", m.head_dim}, {"note", m.note}});
        if (m.window > 0) rows.back()["window_layers"] = m.window_layers, rows.back()["window"] = m.window;
    }
    if (as_json) {
        std::printf("%s\n", Json(rows).dump(1).c_str());
        return;
    }
    print_table(rows, {{"model", "model"},
                       {"layers", "layers"},
                       {"kv_heads", "kv heads"},
                       {"head_dim", "head dim"},
                       {"window_layers", "with a window"},
                       {"window", "of tokens"}});
    std::printf("\nShapes as in the config.json of these models on Hugging Face. Of another model name its config.json.\n");
}

void print_json(const Json& j) {
    std::printf("%s\n", j.dump(1, ' ', false, Json::error_handler_t::replace).c_str());
}

}  // namespace

int main(int argc, char** argv) {
    CLI::App app{"what one does with TurboAttention by hand", "ta"};
    bool man = false, as_json = false;
    app.add_flag("--man", man)->group("");
    app.set_version_flag(
        "--version", [] { return std::string(ta_build_info()); }, "The library's version");
    const auto add_json = [&](CLI::App* command) { command->add_flag("--json", as_json, "JSON instead of text"); };

    CLI::App* info = app.add_subcommand("info", "The library, the devices of this machine, what is missing and why");
    add_json(info);

    std::string file;
    CLI::App* inspect_command = app.add_subcommand("inspect", "What a file of a sequence, a pool or a disk tier holds");
    inspect_command->add_option("FILE", file, "the file")->required()->type_name("FILE");
    bool all_blocks = false;
    inspect_command->add_flag("--all", all_blocks, "every block, not only the first 20");
    add_json(inspect_command);

    std::vector<std::string> files;
    CLI::App* verify_command = app.add_subcommand("verify", "Compares every hash in files of sequences, pools and disk tiers");
    verify_command->add_option("FILE", files, "the files")->required()->type_name("FILE");
    add_json(verify_command);

    std::string model;
    MapOptions map_options;
    std::vector<std::string> map_bits;
    bool list_models = false;
    CLI::App* map = app.add_subcommand("map", "How much memory a model's cache takes, and how many tokens fit");
    map->add_option("MODEL", model, "a name that --list shows, or the path of a Hugging Face config.json")->type_name("FILE");
    map->add_flag("--list", list_models, "the models that are known by name");
    map->add_option("--budget", map_options.budget_bytes, "bytes for all blocks, such as 16GB or 16GiB")
        ->transform(CLI::AsSizeValue(true))
        ->type_name("BYTES");
    map->add_option("--sequences", map_options.sequences, "how many sequences of one length share the budget")
        ->check(CLI::Range(1, 1000000000))
        ->type_name("N");
    map->add_option("--bits", map_bits, "which bits; 4/2: half of the heads have 4; k8v4: K has 8 and V 4")
        ->delimiter(',')
        ->check(CLI::IsMember({"8", "4", "4/2", "2", "k8v4"}));
    add_json(map);

    std::string picture, python = "python3";
    CLI::App* plot_command = app.add_subcommand("plot", "Draws the JSON of a benchmark; needs python3 and matplotlib");
    plot_command->add_option("FILE", file, "what `ta bench ... --json` printed")->required()->type_name("FILE");
    plot_command->add_option("-o,--output", picture, "the picture, .svg or .png")->required()->type_name("FILE");
    plot_command->add_option("--python", python, "which Python")->capture_default_str()->type_name("FILE");

    CLI::App* bench = app.add_subcommand("bench", "Benchmarks");
    bench->require_subcommand(1);
    std::string device = "auto";
    CLI::App* attend = bench->add_subcommand("attend", "Attention over a compressed cache, compared with exact attention");
    BenchAttendOptions attend_options;
    attend->add_option("--device", device, "cpu, a GPU's number, or auto")->capture_default_str();
    attend->add_option("--parts", attend_options.parts, bench_attend_parts())->delimiter(',');
    attend->add_option("--tokens", attend_options.tokens, "of each sequence, such as 8192,32768")
        ->delimiter(',')
        ->check(CLI::Range(int64_t{1}, int64_t{1} << 24))
        ->capture_default_str();
    attend->add_option("--bits", attend_options.bits, "of keys and values")
        ->delimiter(',')
        ->check(CLI::IsMember({8, 4, 2}))
        ->capture_default_str();
    attend->add_option("--batch", attend_options.batch, "sequences")->check(CLI::Range(1, 1024))->capture_default_str();
    attend->add_option("--q-heads", attend_options.q_heads, "query heads")->check(CLI::Range(1, 1024))->capture_default_str();
    attend->add_option("--kv-heads", attend_options.kv_heads, "heads of keys and values")
        ->check(CLI::Range(1, 1024))
        ->capture_default_str();
    attend->add_option("--head-dim", attend_options.head_dim, "channels of a head")
        ->check(CLI::IsMember({64, 96, 128, 256}))
        ->capture_default_str();
    attend->add_option("--chunk", attend_options.chunk, "query tokens of each sequence in a step of prefill")
        ->check(CLI::Range(2, 1 << 20))
        ->capture_default_str();
    attend->add_flag("--batch-invariant", attend_options.batch_invariant, "in pools with ta_numerics.batch_invariant");
    attend->add_option("--repeats", attend_options.repeats, "of each case")->check(CLI::Range(3, 10000))->capture_default_str();
    add_json(attend);
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
    add_json(tiers);
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
    add_json(share);

    std::string shell;
    CLI::App* completion_command = app.add_subcommand("completion", "The completion of a shell, to be sourced or installed");
    completion_command->add_option("SHELL", shell, "which one")->required()->check(CLI::IsMember({"bash", "zsh", "fish"}));

    try {
        app.parse(argc, argv);
        if (!man && app.get_subcommands().empty()) throw CLI::RequiredError("A subcommand");
        if (map->parsed() && model.empty() && !list_models) throw CLI::RequiredError("MODEL or --list");
    } catch (const CLI::Success& e) {
        return app.exit(e);  // --help, --version
    } catch (const CLI::ParseError& e) {
        std::fprintf(stderr, "ta: %s; see ta --help\n", e.what());
        return kWrongInput;
    }
    try {
        if (man) {
            const std::string version = library_version();
            std::fputs(manual_page(app, version).c_str(), stdout);
        } else if (completion_command->parsed()) {
            std::fputs(completion(app, shell).c_str(), stdout);
        } else if (info->parsed()) {
            const Json j = collect_info();
            as_json ? print_json(j) : print_info(j);
        } else if (inspect_command->parsed()) {
            const Json j = inspect(file, true);
            as_json ? print_json(j) : print_inspection(j, all_blocks ? UINT64_MAX : 20);
        } else if (verify_command->parsed()) {
            return run_verify(files, as_json);
        } else if (map->parsed()) {
            if (list_models) {
                print_models(as_json);
                return 0;
            }
            for (const std::string& b : map_bits) map_options.bits.push_back(b == "4/2" ? 42 : b == "k8v4" ? 84 : b[0] - '0');
            const Json j = map_sizes(model_shape(model), map_options);
            as_json ? print_json(j) : print_map(j);
        } else if (plot_command->parsed()) {
            plot(file, picture, python);
        } else if (attend->parsed()) {
            return run_bench_attend(device, attend_options, as_json);
        } else if (share->parsed()) {
            return run_bench_share(devices, share_options, as_json);
        } else {
            if (quick) {
                options.memory_bytes /= 4;
                options.disk_bytes /= 4;
                options.repeats = std::max(3, options.repeats / 4);
            }
            return run_bench_tiers(device, options, as_json);
        }
        return std::fflush(stdout) == 0 ? 0 : 1;
    } catch (const WrongInput& e) {
        std::fprintf(stderr, "ta: %s\n", e.what());
        return kWrongInput;
    } catch (const std::exception& e) {
        std::fprintf(stderr, "ta: %s\n", e.what());
        return 1;
    }
}
