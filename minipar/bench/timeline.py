"""Draw a pipeline schedule without running a model: when each rank does what, the bubble, and what is held.

python -m minipar timeline 1f1b -p 4 -m 8                       in the terminal
python -m minipar timeline zb-h1 -p 4 -m 8 --costs c=0.1 -o zb.svg
python -m minipar timeline mine.py -p 2 -m 4                    a file that defines schedule(p, m)
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from minipar.errors import ScheduleError
from minipar.parallel.pipeline import SCHEDULES, Costs, make, simulate, validate
from minipar.trace import perfetto
from minipar.trace.blocks import draw_blocks, render_blocks

UNIT = 1e-3  # a cost of 1 is a millisecond in a trace


def add_options(parser):
    parser.add_argument("schedule", metavar="SCHEDULE", help=f"{', '.join(SCHEDULES)}, or FILE.py with schedule(p, m)")
    parser.add_argument("-p", type=int, default=4, help="ranks (default 4)")
    parser.add_argument("-m", type=int, default=8, help="micro-batches (default 8)")
    parser.add_argument("-v", type=int, help="interleaved: stages a rank (default 2)")
    parser.add_argument(
        "--costs", default="", metavar="f=1,b=1,w=1,c=0",
        help="forward, input gradient, weight gradient, one transfer; a whole backward costs b + w (default 1,1,1,0)",
    )  # fmt: skip
    parser.add_argument("-o", metavar="FILE", help="draw to FILE.svg or FILE.png")
    parser.add_argument(
        "--text", action="store_true", help="draw in the terminal (default if nothing else is asked for)"
    )
    parser.add_argument("--perfetto", metavar="FILE", help="write a trace for ui.perfetto.dev")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write the figures to FILE, or to standard output"
    )


def costs(text):
    """Costs of a text like f=1,b=1.5; ScheduleError for another."""
    values = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.partition("=")
        try:
            values[name.strip()] = float(number)
        except ValueError:
            values[name.strip()] = -1.0
        if name.strip() not in ("f", "b", "w", "c") or not 0 <= values[name.strip()] < float("inf"):
            raise ScheduleError(
                f"--costs {part!r} is not allowed: f, b, w or c, =, and a number from 0, as in f=1,c=0.1."
            )
    return Costs(**values)


def run(args):
    """Do what the options say; a MiniparError is the caller's to tell."""
    if args.o and Path(args.o).suffix not in (".svg", ".png"):
        sys.exit(f"minipar: -o {args.o!r} must end in .svg or .png.")
    for path in filter(None, (args.o, args.perfetto, args.json if args.json != "-" else None)):
        try:
            perfetto.check_writable(path)
        except OSError as error:
            sys.exit(f"minipar: nothing can be written to {path!r}: {error.strerror or error}.")
    schedule = make(args.schedule, args.p, args.m, args.v)
    peaks = validate(schedule)
    simulation = simulate(schedule, costs(args.costs))
    timeline, bubble = simulation.timeline(UNIT), simulation.bubble
    head = (
        f"{schedule.name}: {len(schedule.ranks)} ranks, {schedule.stages} stages, {schedule.microbatches} micro-batches"
    )
    if args.text or not (args.o or args.perfetto or args.json):
        console = Console(highlight=False)
        console.print(f"{head}; length {simulation.makespan:g}", soft_wrap=True)
        console.print(render_blocks(timeline, console.width, UNIT))
        console.print(
            f"\nbubble: {bubble.ratio_to_ideal:.1%} of the ideal time   {bubble.share_of_makespan:.1%} of the whole "
            f"time   {bubble.internal_share:.1%} between a rank's first and last action\n"
            f"micro-batches held at most, by stage: {', '.join(map(str, peaks.values()))}", soft_wrap=True
        )  # fmt: skip
    if args.o:
        from minipar.trace import figure

        def paint(picture):
            axes = picture.subplots()
            title = f"{head}: length {simulation.makespan:g}, bubble {bubble.share_of_makespan:.1%}"
            handles = draw_blocks(axes, timeline, title, unit=UNIT, label="time (units of cost)")
            picture.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)

        path, size = Path(args.o), (16, 1.6 + 0.7 * len(schedule.ranks))
        figure.figure(paint, path.with_suffix(""), size=size, kinds=[path.suffix[1:]])
    if args.perfetto:
        perfetto.write(timeline, args.perfetto)
    if args.json:
        result = {
            "schedule": schedule.name, "ranks": len(schedule.ranks), "stages": schedule.stages,
            "microbatches": schedule.microbatches, "makespan": simulation.makespan, "bubble": asdict(bubble),
            "peak_held_by_stage": list(peaks.values()), "peak_memory_by_rank": simulation.peak_memory,
            "actions": [" ".join(map(str, actions)) for actions in schedule.ranks],
        }  # fmt: skip
        text = json.dumps(result, indent=2, allow_nan=False) + "\n"
        if args.json == "-":
            sys.stdout.write(text)
        else:
            perfetto.write_atomically(args.json, text.encode())
