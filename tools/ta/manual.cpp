#include "tools/ta/manual.h"

#include <functional>
#include <vector>

namespace ta::tools {
namespace {

std::vector<const CLI::Option*> options_of(const CLI::App& app) {
    return app.get_options([](const CLI::Option* o) { return !o->get_group().empty(); });
}
std::vector<const CLI::App*> commands_of(const CLI::App& app) {
    return app.get_subcommands([](const CLI::App* a) { return !a->get_group().empty(); });
}

// The values that an option accepts, taken from its type name, such as "TEXT:{bash,zsh,fish}".
std::vector<std::string> choices_of(const CLI::Option& option) {
    const std::string type = option.get_type_name();
    const size_t open = type.find('{'), close = type.find('}');
    std::vector<std::string> choices;
    if (open == std::string::npos || close == std::string::npos) return choices;
    std::string word;
    for (size_t i = open + 1; i <= close; ++i) {
        if (type[i] != ',' && type[i] != '}') {
            word += type[i];
            continue;
        }
        choices.push_back(word);
        word.clear();
    }
    return choices;
}
bool takes_file(const CLI::Option& option) {
    return option.get_type_name().find("FILE") != std::string::npos;
}
std::vector<std::string> names_of(const CLI::Option& option) {
    std::vector<std::string> names;
    for (const std::string& s : option.get_snames()) names.push_back("-" + s);
    for (const std::string& s : option.get_lnames()) names.push_back("--" + s);
    return names;
}

// Calls `use` for every command, with the words that name it: "ta", "ta bench", "ta bench tiers".
void for_each_command(const CLI::App& app, const std::string& words,
                      const std::function<void(const std::string& words, const CLI::App& app)>& use) {
    use(words, app);
    for (const CLI::App* sub : commands_of(app)) for_each_command(*sub, words + " " + sub->get_name(), use);
}

// ---- the manual page

std::string roff(const std::string& text) {
    std::string out;
    for (const char c : text) {
        if (c == '\\') {
            out += "\\e";
        } else if (c == '-') {
            out += "\\-";
        } else if ((c == '.' || c == '\'') && (out.empty() || out.back() == '\n')) {
            out += "\\&";
            out += c;
        } else {
            out += c;
        }
    }
    return out;
}

std::string joined(const std::vector<std::string>& words, const char* between) {
    std::string out;
    for (const std::string& w : words) out += (out.empty() ? "" : between) + w;
    return out;
}

std::string usage(const std::string& words, const CLI::App& app) {
    std::string line = ".B " + roff(words) + "\n";
    bool options = false;
    for (const CLI::Option* o : options_of(app)) {
        options |= !o->get_positional();
        if (o->get_positional())
            line += (o->get_required() ? ".I " + roff(o->get_name(true)) : ".RI [ " + roff(o->get_name(true)) + " ]") +
                    (o->get_expected_max() > 1 ? " ..." : "") + "\n";
    }
    return line + (options ? ".RI [ OPTION \" ...\" ]\n" : "");
}

void describe_options(const CLI::App& app, std::string& page) {
    for (const CLI::Option* o : options_of(app)) {
        page += ".TP\n";
        if (o->get_positional()) {
            page += ".I " + roff(o->get_name(true)) + "\n";
        } else {
            page += ".B " + roff(joined(names_of(*o), ", "));
            const std::vector<std::string> choices = choices_of(*o);
            if (!choices.empty()) {
                page += roff(" {" + joined(choices, ",") + "}");
            } else if (o->get_items_expected_max() > 0) {
                std::string type = o->get_type_name();
                page += roff(" " + type.substr(0, type.find_first_of(" :")));
            }
            page += "\n";
        }
        page += roff(o->get_description());
        if (!o->get_default_str().empty()) page += roff(" (default: " + o->get_default_str() + ")");
        page += "\n";
    }
}

// ---- completions. All three scripts do the same: the words typed so far select the command.

std::string bash_completion(const CLI::App& app) {
    std::string out =
        "# Completion of ta for bash, made by `ta completion bash`.\n"
        "_ta() {\n"
        "    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]} command=ta word\n"
        "    COMPREPLY=()\n"
        "    for word in \"${COMP_WORDS[@]:1:COMP_CWORD-1}\"; do\n"
        "        case \"$command $word\" in\n";
    std::string options, values;
    for_each_command(app, "ta", [&](const std::string& words, const CLI::App& command) {
        if (words != "ta") out += "            \"" + words + "\") command=\"" + words + "\" ;;\n";
        std::vector<std::string> first, choices;
        bool files = false;
        for (const CLI::App* sub : commands_of(command)) first.push_back(sub->get_name());
        for (const CLI::Option* o : options_of(command)) {
            const std::vector<std::string> names = names_of(*o), of = choices_of(*o);
            if (o->get_positional()) {
                choices.insert(choices.end(), of.begin(), of.end());
                files |= takes_file(*o);
                continue;
            }
            for (const std::string& name : names) {
                first.push_back(name);
                if (!of.empty()) {
                    values += "        \"" + words + " " + name + "\") mapfile -t COMPREPLY < <(compgen -W \"" +
                              joined(of, " ") + "\" -- \"$current\"); return ;;\n";
                } else if (o->get_items_expected_max() > 0) {
                    values +=
                        "        \"" + words + " " + name + "\") " +
                        (takes_file(*o) ? "mapfile -t COMPREPLY < <(compgen -f -- \"$current\"); return ;;\n" : "return ;;\n");
                }
            }
        }
        first.insert(first.end(), choices.begin(), choices.end());
        options += "        \"" + words + "\") mapfile -t COMPREPLY < <(compgen " + (files ? "-f " : "") + "-W \"" +
                   joined(first, " ") + "\" -- \"$current\") ;;\n";
    });
    out += "        esac\n    done\n    case \"$command $previous\" in\n" + values + "    esac\n    case \"$command\" in\n" +
           options + "    esac\n}\ncomplete -o filenames -F _ta ta\n";
    return out;
}

// Quotes with single quotes. zsh and fish end a quoted word in the same way.
std::string quoted(const std::string& text, bool brackets = false) {
    std::string out = "'";
    for (const char c : text) {
        if (c == '\'') {
            out += "'\\''";
        } else if (brackets && (c == '[' || c == ']' || c == ':')) {
            out += std::string("\\") + c;
        } else {
            out += c;
        }
    }
    return out + "'";
}

std::string zsh_completion(const CLI::App& app) {
    std::string out =
        "#compdef ta\n# Completion of ta for zsh, made by `ta completion zsh`.\n_ta() {\n"
        "    local command=ta word i\n    local -a commands\n"
        "    for ((i = 2; i < CURRENT; ++i)); do\n        case \"$command $words[i]\" in\n";
    std::string cases;
    for_each_command(app, "ta", [&](const std::string& words, const CLI::App& command) {
        if (words != "ta") out += "            \"" + words + "\") command=\"" + words + "\" ;;\n";
        cases += "        \"" + words + "\")\n";
        const auto subs = commands_of(command);
        if (!subs.empty()) {
            cases += "            commands=(";
            for (const CLI::App* sub : subs) cases += quoted(sub->get_name() + ":" + sub->get_description()) + " ";
            cases += ")\n            _describe command commands\n";
        }
        cases += "            _arguments";
        for (const CLI::Option* o : options_of(command)) {
            const std::vector<std::string> choices = choices_of(*o);
            const std::string action = !choices.empty() ? ":value:(" + joined(choices, " ") + ")"
                                       : takes_file(*o) ? ":file:_files"
                                                        : ":value:";
            if (o->get_positional()) {
                cases += " " + quoted("*" + action);
                continue;
            }
            for (const std::string& name : names_of(*o)) {
                const std::string described = quoted(name + "[", false);
                cases += " " + described.substr(0, described.size() - 1) + quoted(o->get_description(), true).substr(1);
                cases.pop_back();
                cases += "]" + (o->get_items_expected_max() > 0 ? action : std::string()) + "'";
            }
        }
        cases += "\n            ;;\n";
    });
    return out + "        esac\n    done\n    case \"$command\" in\n" + cases + "    esac\n}\n_ta \"$@\"\n";
}

std::string fish_completion(const CLI::App& app) {
    std::string out =
        "# Completion of ta for fish, made by `ta completion fish`.\n"
        "function __ta_at\n"
        "    set -l command ta\n"
        "    for word in (commandline -opc)[2..]\n"
        "        switch \"$command $word\"\n";
    std::string lines;
    for_each_command(app, "ta", [&](const std::string& words, const CLI::App& command) {
        if (words != "ta") out += "            case '" + words + "'\n                set command '" + words + "'\n";
        const std::string here = "complete -c ta -n \"__ta_at '" + words + "'\"";
        bool files = false;
        for (const CLI::App* sub : commands_of(command))
            lines += here + " -f -a " + sub->get_name() + " -d " + quoted(sub->get_description()) + "\n";
        for (const CLI::Option* o : options_of(command)) {
            const std::vector<std::string> choices = choices_of(*o);
            if (o->get_positional()) {
                files |= takes_file(*o);
                if (!choices.empty()) lines += here + " -a " + quoted(joined(choices, " ")) + "\n";
                continue;
            }
            lines += here;
            for (const std::string& s : o->get_snames()) lines += " -s " + s;
            for (const std::string& l : o->get_lnames()) lines += " -l " + l;
            if (!choices.empty())
                lines += " -x -a " + quoted(joined(choices, " "));
            else if (takes_file(*o))
                lines += " -r -F";
            else if (o->get_items_expected_max() > 0)
                lines += " -x";
            lines += " -d " + quoted(o->get_description()) + "\n";
        }
        if (!files) lines += here + " -f\n";
    });
    return out + "        end\n    end\n    test \"$command\" = \"$argv[1]\"\nend\n" + lines;
}

}  // namespace

std::string manual_page(const CLI::App& app, const std::string& version) {
    std::string page = ".TH TA 1 \"\" \"TurboAttention " + version + "\" \"User Commands\"\n.SH NAME\nta \\- " +
                       roff(app.get_description()) + "\n.SH SYNOPSIS\n";
    for_each_command(app, "ta", [&](const std::string& words, const CLI::App& command) {
        if (commands_of(command).empty()) page += usage(words, command) + ".br\n";
    });
    page +=
        ".SH DESCRIPTION\nTurboAttention computes attention over long, compressed KV caches. This command shows what the "
        "library has on this machine,\nlooks into the files that it writes, computes sizes, and measures.\n.SH OPTIONS\n";
    describe_options(app, page);
    page += ".SH COMMANDS\nNumbers are decimal. Bytes may have a unit: 1MB is 1000000 bytes, 1MiB is 1048576.\n";
    for_each_command(app, "ta", [&](const std::string& words, const CLI::App& command) {
        if (&command == &app) return;
        page += ".SS " + roff(words) + "\n" + roff(command.get_description()) + ".\n";
        describe_options(command, page);
    });
    page +=
        ".SH EXIT STATUS\n.TP\n.B 0\nAll is well.\n.TP\n.B 1\nWhat was asked for failed, or\n.B ta verify\nfound "
        "damage.\n.TP\n.B 2\n"
        "The command line is wrong, or a file cannot be read or is none of the library.\n"
        ".SH SEE ALSO\nThe documents of TurboAttention, among them docs/FORMAT.md, docs/tiers.md and docs/benchmarks.md.\n";
    return page;
}

std::string completion(const CLI::App& app, const std::string& shell) {
    return shell == "bash" ? bash_completion(app) : shell == "zsh" ? zsh_completion(app) : fish_completion(app);
}

}  // namespace ta::tools
