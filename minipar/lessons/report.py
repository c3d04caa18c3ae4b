"""What every lesson shares: its options, its voice (rank 0 alone speaks), its progress bar and its JSON."""

import argparse
import json
import shutil
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import minipar
from minipar.errors import DeviceError, LaunchError, ScheduleError, ShapeError
from minipar.launch import available_cores, blas_threads
from minipar.trace import perfetto, terminal

OPTIONS = ("device", "dtype", "size", "steps", "dropout", "seed", "text")  # those that figures depend on
MEASURED, COUNTED, PREDICTED = "[cyan]measured[/]", "[green]counted[/]", "[magenta]predicted[/]"


def parser(doc, sizes, steps=None):
    """The options that all lessons take, and with `steps` those of lessons that train.

    doc: the lesson's docstring; sizes: names of sizes, the second is the default; steps: default training steps.
    """
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ranks", type=int, help="thread ranks (default 4); under mpirun, what mpirun started")
    p.add_argument("--size", choices=list(sizes), default=list(sizes)[1], help="how large (default %(default)s)")
    p.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", metavar="FILE", help="write all figures to FILE")
    p.add_argument("--no-figure", action="store_true", help="draw no picture and write no trace")
    p.add_argument("--live", action=argparse.BooleanOptionalAction, help="moving progress bar (default: on a terminal)")
    if steps is not None:
        p.add_argument("--steps", type=int, default=steps, help="training steps (default %(default)s)")
        p.add_argument("--dropout", type=float, default=0.0, help="dropout probability (default %(default)s)")
        p.add_argument("--text", metavar="FILE", help="train on this file instead of Python's own sources")
    return p


def main(lesson, options):
    """Parse the command line and run `lesson(world, args)` on every rank; what a user got wrong ends in a sentence."""
    args = options.parse_args()
    if args.json == "":
        options.error("--json needs a file, or - for standard output")
    if getattr(args, "steps", 0) < 0:
        options.error(f"--steps must be 0 or more, not {args.steps}")

    def rank_main(world):
        try:
            if world.rank == 0:
                _check_outputs(args)
            lesson(world, args)
        except (ShapeError, DeviceError, ScheduleError) as error:
            raise SystemExit(f"minipar: {error}") from error

    try:
        minipar.run(rank_main, args.ranks)
    except LaunchError as error:
        raise SystemExit(f"minipar: {error}") from error


def _check_outputs(args):
    """Before minutes of work: can the results be written? Ends in a sentence if not."""
    paths = [] if args.json in (None, "-") else [args.json]
    if not args.no_figure:
        paths += ["figures/x", "traces/x"]
    for path in paths:
        try:
            perfetto.check_writable(path)
        except OSError as error:
            raise SystemExit(f"minipar: nothing can be written to {path!r}: {error.strerror or error}.") from error


class Report:
    """Prints from rank 0 alone, keeps the figures for --json, draws the pictures."""

    def __init__(self, world, args, lesson):
        self.speaks, self.args, self.cores = world.rank == 0, args, available_cores()
        self.figures = {
            "lesson": lesson,
            "ranks": world.size,
            "transport": world.transport,
            "cores": self.cores,
            "blas_threads_per_rank": blas_threads(),
            **{name: value for name, value in vars(args).items() if name in OPTIONS},
            "minipar": minipar.__version__,
            "numpy": np.__version__,
            "figures": [],
        }
        # Under mpirun no rank's output is a terminal, so a moving bar must be asked for.
        self.live = (sys.stdout.isatty() if args.live is None else args.live) and self.speaks
        width = None if sys.stdout.isatty() else shutil.get_terminal_size((110, 24)).columns
        stream = sys.stderr if args.json == "-" else sys.stdout
        self.console = Console(
            file=stream, quiet=not self.speaks, force_terminal=self.live or None, width=width, highlight=False
        )

    def machine(self):
        """What this run is: ranks, transport, cores, threads, device."""
        f = self.figures
        ranks = f"{f['ranks']} rank{'s' * (f['ranks'] > 1)} ({f['transport']})"
        self.print(
            f"[bold]minipar lesson: {f['lesson']}[/]\n{ranks} on {self.cores} cores, {f['blas_threads_per_rank']} BLAS "
            f"thread(s) a rank, {f['dtype']}, device {f['device']}, size {f['size']}"
        )

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

    def sparkline(self, values, width=40):
        """`values` as a row of bars, the largest highest; long lists are averaged in pieces."""
        pieces = [p for p in np.array_split(np.asarray(values), min(width, len(values)))]
        means = np.array([p.mean() for p in pieces])
        low, span = means.min(), np.ptp(means) or 1.0
        return "".join("▁▂▃▄▅▆▇█"[int((m - low) / span * 7)] for m in means)

    def timeline(self, timeline):
        self.print("Timeline of the step (measured):")
        self.console.print(terminal.render(timeline, self.console.width))
        if self.cores < timeline.ranks:
            self.print(
                f"\n{timeline.ranks} ranks take turns on {self.cores} cores: a rank that has no core for the moment "
                "still counts as doing what it was at."
            )

    def draw_speedup_and_timeline(self, speedups, timeline, title, name):
        """figures/NAME.png and .svg with the speedup beside the timeline; traces/NAME.json for ui.perfetto.dev."""
        from minipar.trace import figure  # matplotlib takes half a second to load: only here

        def draw(picture):
            left, right = picture.subplots(1, 2, width_ratios=[1, 2.1])
            ranks, cores = self.figures["ranks"], self.cores
            figure.draw_speedup(
                left,
                [row["ranks"] for row in speedups],
                [row["speedup"] for row in speedups],
                [row["compute_speedup"] for row in speedups],
                cores,
                f"{title}: speedup",
            )
            figure.draw_timeline(right, timeline, f"One training step, {ranks} ranks on {cores} cores")

        paths = figure.figure(draw, Path("figures") / name)
        trace = Path("traces") / f"{name}.json"
        perfetto.write(timeline, trace)
        self.figures["figures"] = [str(path) for path in (*paths, trace)]
        self.print(f"\nWritten: {', '.join(self.figures['figures'])} (open the trace at ui.perfetto.dev)")

    def draw(self, paint, name, **options):
        """figures/NAME.png and .svg, filled by paint(figure); options: size, as in figure.figure."""
        from minipar.trace import figure

        self.figures["figures"] = [str(path) for path in figure.figure(paint, Path("figures") / name, **options)]
        self.print(f"\nWritten: {', '.join(self.figures['figures'])}")

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
        perfetto.write_atomically(self.args.json, (text + "\n").encode())
