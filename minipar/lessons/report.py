"""What every lesson shares: its options, its voice (rank 0 alone speaks), its progress bar and its JSON."""

import argparse
import json
import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import minipar
from minipar.errors import MiniparError

MEASURED, COUNTED, PREDICTED = "[cyan]measured[/]", "[green]counted[/]", "[magenta]predicted[/]"


def parser(doc, sizes, steps):
    """The options that all lessons take. doc: the lesson's docstring; sizes: names of model sizes, default second."""
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ranks", type=int, help="thread ranks (default 4); under mpirun, what mpirun started")
    p.add_argument("--steps", type=int, default=steps, help="training steps (default %(default)s)")
    p.add_argument("--size", choices=list(sizes), default=list(sizes)[1], help="model size (default %(default)s)")
    p.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--dropout", type=float, default=0.0, help="dropout probability (default %(default)s)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--text", metavar="FILE", help="train on this file instead of Python's own sources")
    p.add_argument("--json", metavar="FILE", help="write all figures to FILE")
    p.add_argument("--no-figure", action="store_true", help="draw no picture and write no trace")
    p.add_argument("--live", action=argparse.BooleanOptionalAction, help="moving progress bar (default: on a terminal)")
    return p


def start(lesson, args):
    """Run `lesson(world, args)` on every rank; errors of minipar end it in one sentence instead of a traceback."""
    try:
        minipar.run(lesson, args.ranks, args)
    except MiniparError as error:
        sys.exit(f"{Path(sys.argv[0]).stem}: {error}")


class Report:
    """Prints from rank 0, keeps the figures for --json."""

    def __init__(self, world, args):
        self.speaks, self.args, self.figures = world.rank == 0, args, {}
        # Under mpirun no rank's output is a terminal, so a moving bar must be asked for.
        live = sys.stdout.isatty() if args.live is None else args.live
        width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", 110))
        self.console = Console(quiet=not self.speaks, force_terminal=live or None, width=width, highlight=False)
        self.live = live and self.speaks

    def print(self, text=""):
        self.console.print(text)

    def heading(self, text):
        self.console.print()
        self.console.rule(f"[bold]{text}", align="left")

    def table(self, title, columns, rows):
        """columns: (heading, justify) pairs; rows of strings."""
        table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
        for heading, justify in columns:
            table.add_column(heading, justify=justify)
        for row in rows:
            table.add_row(*map(str, row))
        self.console.print(table)

    @contextmanager
    def progress(self, what, total):
        """Yields advance(text): a moving bar on a terminal, else a line every two seconds."""
        if not self.live:
            yield self._lines(what, total)
            return
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, TextColumn("{task.fields[text]}"), console=self.console) as bar:
            task = bar.add_task(what, total=total, text="")
            yield lambda text="": bar.update(task, advance=1, text=text)

    def _lines(self, what, total):
        done, shown = 0, time.monotonic()

        def advance(text=""):
            nonlocal done, shown
            done += 1
            if time.monotonic() - shown >= 2 or done == total:
                shown = time.monotonic()
                self.console.print(f"  {what} {done}/{total} {text}")

        return advance

    def save(self):
        """Write the figures to --json FILE, whole or not at all; `-` is standard output."""
        if not (self.speaks and self.args.json):
            return
        text = json.dumps(self.figures, indent=2, allow_nan=False)
        if self.args.json == "-":
            print(text)
            return
        path = Path(self.args.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(text + "\n")
        partial.replace(path)
