"""python -m lab TABLE [--short] [--out DIR] [options of the table]"""

import argparse
import importlib
import os
import sys

# One thread for matrix products: tables use processes. Before numpy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

TABLES = ["formats", "int_flash", "turbo", "distr", "blocks"]


def main():
    parser = argparse.ArgumentParser(prog="python -m lab", description="Makes a table: markdown, JSON and SVG.")
    commands = parser.add_subparsers(dest="table", required=True)
    for name in TABLES:
        module = importlib.import_module(f"lab.table_{name}")
        command = commands.add_parser(name, help=module.__doc__, description=module.__doc__)
        command.add_argument("--short", action="store_true", help="small sizes: seconds")
        command.add_argument("--out", default="results", help="folder of the files (results)")
        command.set_defaults(module=module)
        module.add_options(command)
    options = parser.parse_args()

    from lab import report

    origin = report.origin(" ".join(["python -m lab", *sys.argv[1:]]))
    tables = options.module.run(options)
    report.write(tables, options.out, origin)
    for table in tables:
        print(table.markdown(), end="\n\n")


if __name__ == "__main__":
    main()
