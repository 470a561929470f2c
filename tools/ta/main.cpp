// ta: the command line for using the library by hand.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <iostream>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "tools/ta/bench_attend.h"
#include "tools/ta/bench_share.h"
#include "tools/ta/bench_tiers.h"
#include "tools/ta/calibrate.h"
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
        throw WrongInput("--device is '" + device + "'; it takes cpu, auto or a GPU's number");
    return make_gpu_machine(ordinal);
}

// Runs a benchmark and prints its results. A table covers the rows of a part that have the same keys, and is printed as soon as
// it is complete.
int report(const std::string& device, bool as_json,
           const std::function<void(const std::function<void(const json&)>& row)>& run) {
    json rows = json::array();
    std::vector<Json> table;
    std::string printed;  // the part whose table was printed last
    Progress progress;
    const auto print = [&] {
        progress.clear();
        if (table.empty() || as_json) return;
        if (printed.empty()) {
            print_wrapped("library  ", ta_build_info());
            print_wrapped("device   ", device);
        }
        const std::string part = table.front()["part"];
        std::printf("\n");
        if (part != printed) std::printf("%s\n", part.c_str());
        print_table(table, columns_of_bench(table));
        printed = part;
    };
    const auto goes_on = [&](const json& row) {
        const Json& last = table.back();
        return last["part"].get<std::string>() == row["part"].get<std::string>() && last.size() == row.size() &&
               std::ranges::all_of(row.items(), [&](const auto& item) { return last.contains(item.key()); });
    };
    run([&](const json& row) {
        if (!table.empty() && !goes_on(row)) {
            print();
            table.clear();
        }
        table.push_back(Json::parse(row.dump()));
        rows.push_back(row);
        progress.show(std::to_string(rows.size()) + " results, " + row["part"].get<std::string>());
    });
    print();
    if (as_json) std::printf("%s\n", json{{"library", ta_build_info()}, {"device", device}, {"rows", rows}}.dump(1).c_str());
    return 0;
}

constexpr int kDamaged = 1, kWrongInput = 2;  // exit statuses; 1 also stands for all other failures

void print_json(const Json& j) {
    std::printf("%s\n", j.dump(1, ' ', false, Json::error_handler_t::replace).c_str());
}

// CLI11 would read a negative number of bytes as one near 2^64. The transform that is added last runs first.
const CLI::Validator no_minus(
    [](const std::string& text) { return text.starts_with('-') ? text + " is below 0" : std::string(); }, "");

// CLI11 would read 010 as 8 and 0x10 as 16.
const CLI::Validator decimal(
    [](std::string& text) {
        const size_t first = text.starts_with('-') || text.starts_with('+') ? 1 : 0;
        const auto is_digit = [&](size_t at) { return at < text.size() && std::isdigit(static_cast<unsigned char>(text[at])); };
        while (is_digit(first) && text[first] == '0' && is_digit(first + 1)) text.erase(first, 1);
        const bool has_prefix = is_digit(first) && text[first] == '0' && first + 2 < text.size();
        // 0b is 0 bytes, not a binary prefix.
        if (has_prefix && std::string_view("xXoObB").find(text[first + 1]) != std::string_view::npos &&
            std::isxdigit(static_cast<unsigned char>(text[first + 2])))
            return text + " is not decimal";
        return std::string();
    },
    "");
// Runs after the transforms of takes_bytes(), on a plain number of bytes.
const CLI::Validator one_mb_or_more(
    [](const std::string& bytes) { return bytes.size() < 7 ? bytes + " bytes are less than 1MB" : std::string(); }, "");
const CLI::Validator not_empty([](const std::string& text) { return text.empty() ? "is empty" : std::string(); }, "");

// Bytes with or without a unit: 1MB is 10^6 bytes and 1MiB 2^20, as in the output.
CLI::Option* takes_bytes(CLI::Option* option) {
    return option->transform(CLI::AsSizeValue(true))->transform(no_minus)->type_name("BYTES");
}

// Adds checks that hold for the options of all commands. Call it after all other transforms have been added.
void check_values(CLI::App& app) {
    for (CLI::Option* o : app.get_options([](const CLI::Option* option) { return option->get_items_expected_max() > 0; })) {
        const std::string type = o->get_type_name();
        constexpr std::array kNumbers = {"INT", "UINT", "FLOAT", "BYTES", "N"};
        if (std::ranges::any_of(kNumbers, [&](std::string_view number) { return type.starts_with(number); }))
            o->transform(decimal);
        o->transform(not_empty);
    }
    for (CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) check_values(*command);
}

// Ends a command that runs out of memory. It is a terminate handler because destructors of JSON values allocate, and no
// exception can leave a destructor.
constexpr const char* kNoMemory = "ta: out of memory\n";
std::terminate_handler terminate_before = nullptr;
[[noreturn]] void end_without_memory() {
    try {
        if (std::current_exception()) std::rethrow_exception(std::current_exception());
    } catch (const std::bad_alloc&) {
        [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, kNoMemory, std::char_traits<char>::length(kNoMemory));
        _exit(1);
    } catch (...) {
    }
    terminate_before();
    std::abort();
}

// Flushes standard output. Returns the exit status: `status`, or that of a failure if the output could not be written.
int finish(int status) {
    std::cout.flush();
    if (std::fflush(stdout) == 0 && !std::ferror(stdout) && std::cout.good()) return status;
    std::fprintf(stderr, "ta: standard output cannot be written\n");
    return status == 0 ? 1 : status;
}

// Checks every file, even if earlier ones are damaged.
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
        } catch (const std::bad_alloc&) {
            throw;
        } catch (const std::exception& e) {
            std::fprintf(stderr, "ta: %s: %s\n", file.c_str(), e.what());
            status = kWrongInput;
        }
    }
    if (as_json) print_json(all);
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

// A subcommand, and the function that runs it after its options were parsed. That returns the exit status.
struct Command {
    CLI::App* parsed;
    std::function<int()> run;
};

// The command keeps a reference to `as_json`, which must outlive it.
void add_json(CLI::App* command, bool& as_json) {
    command->add_flag("--json", as_json, "JSON instead of text");
}

Command add_info(CLI::App& app, bool& as_json) {
    CLI::App* command = app.add_subcommand("info", "The library, the devices of this machine, what is missing and why");
    add_json(command, as_json);
    return {command, [&as_json] {
                const Json j = collect_info();
                as_json ? print_json(j) : print_info(j);
                return 0;
            }};
}

Command add_inspect(CLI::App& app, bool& as_json) {
    struct Options {
        std::string file;
        bool all_blocks = false;
    };
    const auto o = std::make_shared<Options>();
    CLI::App* command = app.add_subcommand("inspect", "What a file of a sequence, a pool or a disk tier holds");
    command->add_option("FILE", o->file, "the file")->required()->type_name("FILE");
    command->add_flag("--all", o->all_blocks, "every block, not only the first 20");
    add_json(command, as_json);
    return {command, [o, &as_json] {
                const Json j = inspect(o->file, true);
                as_json ? print_json(j) : print_inspection(j, o->all_blocks ? UINT64_MAX : 20);
                return 0;
            }};
}

Command add_verify(CLI::App& app, bool& as_json) {
    const auto files = std::make_shared<std::vector<std::string>>();
    CLI::App* command = app.add_subcommand("verify", "Compares every hash in files of sequences, pools and disk tiers");
    command->add_option("FILE", *files, "the files")->required()->type_name("FILE");
    add_json(command, as_json);
    return {command, [files, &as_json] { return run_verify(*files, as_json); }};
}

Command add_map(CLI::App& app, bool& as_json) {
    struct Options {
        std::string model;
        MapOptions map;
        std::vector<std::string> bits;
        bool list = false;
    };
    const auto o = std::make_shared<Options>();
    CLI::App* command = app.add_subcommand("map", "How much memory a model's cache takes, and how many tokens fit");
    command->add_option("MODEL", o->model, "a name that --list shows, or the path of a Hugging Face config.json")
        ->type_name("FILE");
    command->add_flag("--list", o->list, "the models that are known by name");
    takes_bytes(command->add_option("--budget", o->map.budget_bytes, "for all blocks"))->default_str("16GB");
    command->add_option("--sequences", o->map.sequences, "how many sequences of one length share the budget")
        ->check(CLI::Range(1, 1000000000))
        ->type_name("N");
    command->add_option("--bits", o->bits, "which bits; 4/2: half of the heads have 4; k8v4: K has 8 and V 4")
        ->delimiter(',')
        ->allow_extra_args(false)
        ->check(CLI::IsMember({"8", "4", "4/2", "2", "k8v4"}));
    add_json(command, as_json);
    command->final_callback([o] {
        if (o->model.empty() && !o->list) throw CLI::RequiredError("MODEL or --list");
    });
    return {command, [o, &as_json] {
                if (o->list) {
                    print_models(as_json);
                    return 0;
                }
                for (const std::string& b : o->bits) o->map.bits.push_back(b == "4/2" ? 42 : b == "k8v4" ? 84 : b[0] - '0');
                const Json j = map_sizes(model_shape(o->model), o->map);
                as_json ? print_json(j) : print_map(j);
                return 0;
            }};
}

Command add_calibrate(CLI::App& app, bool& as_json) {
    struct Options {
        CalibrateOptions calibrate;
        bool all_units = false;
    };
    const auto o = std::make_shared<Options>();
    CLI::App* command = app.add_subcommand("calibrate", "Chooses the bits of each head by what fewer bits cost there");
    command->add_option("FILE", o->calibrate.costs, "costs as JSON: head_dim, k and v [layers][kv heads][8, 4, 2 bits]")
        ->required()
        ->type_name("FILE");
    command->add_option("--bits", o->calibrate.bits, "of an element of K and V, on average")
        ->check(CLI::Range(2.0, 8.0))
        ->capture_default_str();
    command->add_option("-o,--output", o->calibrate.output, "where the maps go as JSON: k_bits and v_bits")->type_name("FILE");
    command->add_flag("--all", o->all_units, "costs of every K and V, not of those in doubt alone; needs block costs");
    add_json(command, as_json);
    return {command, [o, &as_json] {
                const Json j = calibrate(o->calibrate);
                as_json ? print_json(j) : print_calibration(j, o->all_units);
                return 0;
            }};
}

Command add_plot(CLI::App& app) {
    struct Options {
        std::string file, picture, python = "python3";
    };
    const auto o = std::make_shared<Options>();
    CLI::App* command = app.add_subcommand("plot", "Draws the JSON of a benchmark; needs python3 and matplotlib");
    command->add_option("FILE", o->file, "what `ta bench ... --json` printed")->required()->type_name("FILE");
    command->add_option("-o,--output", o->picture, "the picture, .svg or .png")->required()->type_name("FILE");
    command->add_option("--python", o->python, "which Python")->capture_default_str()->type_name("FILE");
    return {command, [o] {
                plot(o->file, o->picture, o->python);
                return 0;
            }};
}

void add_parts(CLI::App* command, std::vector<std::string>& parts, const std::vector<std::string>& all) {
    command->add_option("--parts", parts, "of the benchmark; all if none is named")
        ->delimiter(',')
        ->allow_extra_args(false)
        ->check(CLI::IsMember(all));
}
// The memory that a case may take. With less than a few MB a case is one block, however large.
CLI::Option* takes_case_bytes(CLI::Option* option, const char* usual) {
    return takes_bytes(option)->check(one_mb_or_more)->default_str(usual);
}

Command add_bench_attend(CLI::App& bench, bool& as_json) {
    struct Options {
        std::string device = "auto";
        BenchAttendOptions bench;
    };
    const auto o = std::make_shared<Options>();
    CLI::App* command = bench.add_subcommand("attend", "Attention over a compressed cache, compared with exact attention");
    command->add_option("--device", o->device, "cpu, a GPU's number, or auto")->capture_default_str();
    add_parts(command, o->bench.parts, bench_attend_parts());
    command->add_option("--tokens", o->bench.tokens, "of each sequence, such as 8192,32768")
        ->delimiter(',')
        ->allow_extra_args(false)
        ->check(CLI::Range(int64_t{1}, int64_t{1} << 24))
        ->capture_default_str();
    command->add_option("--bits", o->bench.bits, "of keys and values")
        ->delimiter(',')
        ->allow_extra_args(false)
        ->check(CLI::IsMember({8, 4, 2}))
        ->capture_default_str();
    command->add_option("--batch", o->bench.batch, "sequences")->check(CLI::Range(1, 1024))->capture_default_str();
    command->add_option("--q-heads", o->bench.q_heads, "query heads")->check(CLI::Range(1, 1024))->capture_default_str();
    command->add_option("--kv-heads", o->bench.kv_heads, "heads of keys and values")
        ->check(CLI::Range(1, 1024))
        ->capture_default_str();
    command->add_option("--head-dim", o->bench.head_dim, "channels of a head")
        ->check(CLI::IsMember({64, 96, 128, 256}))
        ->capture_default_str();
    command->add_option("--chunk", o->bench.chunk, "query tokens of each sequence in a step of prefill")
        ->check(CLI::Range(2, 1 << 20))
        ->capture_default_str();
    command->add_flag("--batch-invariant", o->bench.batch_invariant, "in pools with ta_numerics.batch_invariant");
    command->add_option("--repeats", o->bench.repeats, "of each case")->check(CLI::Range(3, 10000))->capture_default_str();
    add_json(command, as_json);
    return {command, [o, &as_json] {
                const std::unique_ptr<Machine> machine = machine_for(o->device);
                return report(machine->name(), as_json, [&](const auto& row) { bench_attend(*machine, o->bench, row); });
            }};
}

Command add_bench_tiers(CLI::App& bench, bool& as_json) {
    struct Options {
        std::string device = "auto";
        BenchTiersOptions bench;
        bool quick = false;
    };
    const auto o = std::make_shared<Options>();
    CLI::App* command = bench.add_subcommand("tiers", "Moves of blocks between tiers, against the ceiling of the same run");
    command->add_option("--device", o->device, "cpu, a GPU's number, or auto")->capture_default_str();
    add_parts(command, o->bench.parts, bench_tiers_parts());
    takes_case_bytes(command->add_option("--memory", o->bench.memory_bytes, "that a case may take in each tier"), "1GiB");
    takes_case_bytes(command->add_option("--disk", o->bench.disk_bytes, "that a case may take on disk"), "1GiB");
    command->add_option("--folder", o->bench.disk_folder, "where the disk tier's file goes; default TMPDIR or /tmp");
    command->add_option("--node", o->bench.host_node, "1 + the host tier's NUMA node; default: the GPU's, moves also farthest");
    command->add_option("--repeats", o->bench.repeats, "of each case")->check(CLI::Range(3, 10000));
    command->add_flag("--quick", o->quick, "a quarter of the memory, the disk and the repeats");
    add_json(command, as_json);
    return {command, [o, &as_json] {
                if (o->quick) {
                    o->bench.memory_bytes /= 4;
                    o->bench.disk_bytes /= 4;
                    o->bench.repeats = std::max(3, o->bench.repeats / 4);
                }
                const std::unique_ptr<Machine> machine = machine_for(o->device);
                return report(machine->name(), as_json, [&](const auto& row) { bench_tiers(*machine, o->bench, row); });
            }};
}

Command add_bench_share(CLI::App& bench, bool& as_json) {
    struct Options {
        std::vector<std::string> devices = {"0", "1"};
        std::string kind = "local";
        BenchShareOptions bench;
    };
    const auto o = std::make_shared<Options>();
    CLI::App* command = bench.add_subcommand("share", "Sequences between the ranks of a group, and spread over them");
    command->add_option("--devices", o->devices, "of the ranks: cpu or a GPU's number for each")
        ->delimiter(',')
        ->allow_extra_args(false)
        ->capture_default_str();
    add_parts(command, o->bench.parts, bench_share_parts());
    command->add_option("--kind", o->kind, "of the group")
        ->check(CLI::IsMember({"local", "host", "nccl"}))
        ->capture_default_str();
    command->add_flag("--hosts-apart", o->bench.hosts_apart, "an NCCL group takes each rank for one of another host");
    takes_case_bytes(command->add_option("--memory", o->bench.memory_bytes, "that a case may take on each rank"), "4GiB");
    command->add_option("--repeats", o->bench.repeats, "of each case")->check(CLI::Range(3, 10000));
    add_json(command, as_json);
    return {command, [o, &as_json] {
                o->bench.kind = o->kind == "host" ? TA_GROUP_HOST : o->kind == "nccl" ? TA_GROUP_NCCL : TA_GROUP_LOCAL;
                std::vector<std::unique_ptr<Machine>> machines;
                std::string names;
                for (const std::string& d : o->devices) {
                    machines.push_back(machine_for(d));
                    names += (names.empty() ? "" : " + ") + machines.back()->name();
                }
                return report(names, as_json, [&](const auto& row) { bench_share(machines, o->bench, row); });
            }};
}

Command add_completion(CLI::App& app) {
    const auto shell = std::make_shared<std::string>();
    CLI::App* command = app.add_subcommand("completion", "The completion of a shell, to be sourced or installed");
    command->add_option("SHELL", *shell, "which one")->required()->check(CLI::IsMember({"bash", "zsh", "fish"}));
    return {command, [shell, &app] {
                std::fputs(completion(app, *shell).c_str(), stdout);
                return 0;
            }};
}

}  // namespace

int main(int argc, char** argv) {
    terminate_before = std::set_terminate(end_without_memory);
    CLI::App app{"what one does with TurboAttention by hand", "ta"};
    bool man = false, as_json = false;
    app.add_flag("--man", man)->group("");
    app.set_version_flag(
        "--version", [] { return std::string(ta_build_info()); }, "The library's version");
    std::vector<Command> commands = {add_info(app, as_json), add_inspect(app, as_json),   add_verify(app, as_json),
                                     add_map(app, as_json),  add_calibrate(app, as_json), add_plot(app)};
    CLI::App* const bench = app.add_subcommand("bench", "Benchmarks");
    bench->require_subcommand(1);
    for (const auto add : {add_bench_attend, add_bench_tiers, add_bench_share}) commands.push_back(add(*bench, as_json));
    commands.push_back(add_completion(app));
    check_values(app);

    try {
        app.parse(argc, argv);
        if (!man && app.get_subcommands().empty()) throw CLI::RequiredError("A subcommand");
    } catch (const CLI::Success& e) {
        return finish(app.exit(e));  // --help, --version
    } catch (const CLI::ParseError& e) {
        std::string words = "ta";
        for (const CLI::App* a = &app; !a->get_subcommands().empty(); words += " " + a->get_name())
            a = a->get_subcommands().front();
        std::fprintf(stderr, "ta: %s; see %s --help\n", e.what(), words.c_str());
        return kWrongInput;
    }
    try {
        int status = 0;
        if (man) {
            std::fputs(manual_page(app, library_version()).c_str(), stdout);
        } else {
            status = std::ranges::find_if(commands, [](const Command& c) { return c.parsed->parsed(); })->run();
        }
        return finish(status);
    } catch (const WrongInput& e) {
        std::fprintf(stderr, "ta: %s\n", e.what());
        return kWrongInput;
    } catch (const std::bad_alloc&) {
        std::fputs(kNoMemory, stderr);
        return 1;
    } catch (const std::exception& e) {
        std::fprintf(stderr, "ta: %s\n", e.what());
        return 1;
    }
}
