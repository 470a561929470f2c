"""A table as markdown, JSON and SVG, with what is needed to repeat it."""

import json
import os
import subprocess
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("MPLBACKEND", "svg")

HERE = Path(__file__).parent
WIDTH = 130  # columns


@dataclass
class Table:
    """rows: dicts by column. columns: {key: (heading, format spec)}; a value that is None shows as -, a text as it is.
    draw(figure) draws the rows; None: no SVG."""

    name: str
    title: str
    columns: dict
    rows: list
    text: str = ""  # what the rows are, above the table
    notes: list = field(default_factory=list)
    draw: object = None

    def markdown(self):
        def cell(row, key):
            value, spec = row.get(key), self.columns[key][1]
            return "-" if value is None else value if isinstance(value, str) else format(value, spec)

        lines = ["| " + " | ".join(heading for heading, _ in self.columns.values()) + " |",
                 "|" + "|".join("---" if spec == "" else "---:" for _, spec in self.columns.values()) + "|"]
        lines += ["| " + " | ".join(cell(row, key) for key in self.columns) + " |" for row in self.rows]
        return "\n".join(lines)


def commit():
    try:
        def git(*arguments):
            return subprocess.run(["git", "-C", HERE, *arguments], check=True, capture_output=True, text=True).stdout.strip()

        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("log", "-1", "--format=%h (%cs)") + (", with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine():
    names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} cores, {names[0] if names else 'an unnamed CPU'}"


def origin(command):
    """Call before the work, which may take longer than a commit lasts."""
    return {"command": command, "commit": commit(), "machine": machine()}


def write(tables, folder, origin):
    """tables: those of one command; the first one's name is that of the files."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    name = tables[0].name
    parts = [f"# {tables[0].title}\n\n`{origin['command']}`, {origin['commit']}, {origin['machine']}\n"]
    for table in tables:
        if table is not tables[0]:
            parts.append(f"## {table.title}\n")
        if table.text:
            parts.append("\n\n".join(textwrap.fill(paragraph, WIDTH) for paragraph in table.text.split("\n\n")) + "\n")
        parts.append(table.markdown() + "\n")
        if table.draw:
            parts.append(f"![{table.title}]({table.name}.svg)\n")
            draw(table, folder / f"{table.name}.svg")
        if table.notes:
            parts.append("\n".join(textwrap.fill(f"- {note}", WIDTH, subsequent_indent="  ") for note in table.notes) + "\n")
    (folder / f"{name}.md").write_text("\n".join(parts))
    rows = {table.name: {"title": table.title, "rows": table.rows} for table in tables}
    (folder / f"{name}.json").write_text(json.dumps({**origin, "tables": rows}, indent=1) + "\n")


def draw(table, path):
    import matplotlib
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": table.name, "svg.fonttype": "none", "font.size": 9})
    figure = pyplot.figure(layout="constrained")
    table.draw(figure)
    figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)
