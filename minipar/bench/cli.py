"""Measure steps, memory, messages, collectives. Started plainly it makes thread ranks, under mpirun takes mpirun's."""

import argparse
import json
import math
import sys

import numpy as np
from rich.console import Console
from rich.table import Table

import minipar
from minipar.bench import collectives, links
from minipar.bench.data_parallel import bench_data_parallel
from minipar.bench.pipeline import bench_pipeline
from minipar.bench.step import bench_step
from minipar.collectives import ALGORITHMS, COMBINE
from minipar.errors import MiniparError, ShapeError
from minipar.launch import available_cores, launched_rank, launched_ranks
from minipar.nn import GPTConfig
from minipar.trace.perfetto import check_writable, write_atomically

HEADINGS = (
    "size (B)",
    "count",
    "type",
    "redop",
    "algorithm",
    "time (us)",
    "± (us)",
    "algbw (GB/s)",
    "busbw (GB/s)",
    "#wrong",
)
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size(text):
    """Bytes from a text like 8, 64K, 1M, 2G."""
    try:
        number = int(text[:-1]) * UNITS[text[-1].upper()] if text[-1:].upper() in UNITS else int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write bytes, or a number with K, M or G.")
    return number


def positive(text):
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, not {text!r}.")
    return int(text)


def add_options(bench):
    """Give the parser of `bench` its options."""
    bench.add_argument(
        "what",
        nargs="?",
        choices=["step", "dp", "pp", "copy", "p2p", *ALGORITHMS],
        metavar="WHAT",
        help="step: the training step of one rank; dp: that of data-parallel ranks; pp: that of a "
        "pipeline; copy: the memory; p2p: messages between two ranks; or a "
        f"collective: {', '.join(ALGORITHMS)}",
    )
    bench.add_argument("--algorithms", metavar="A,B", help="those to compare (default: all that can run here)")
    bench.add_argument("-b", "--begin", type=size, metavar="SIZE", help="smallest size (default 1K; p2p: 8)")
    bench.add_argument("-e", "--end", type=size, default=16 << 20, metavar="SIZE", help="largest size (default 16M)")
    bench.add_argument("-f", "--factor", type=float, default=4, help="from size to size (default 4)")
    bench.add_argument("--dtype", default="float32", choices=["float32", "float64", "float16", "int32", "int64"])
    bench.add_argument("--redop", default="sum", choices=list(COMBINE))
    bench.add_argument("--ranks", type=positive, help="thread ranks (default 2); under mpirun, what mpirun started")
    bench.add_argument("--check-headers", action="store_true", help="leave on what compares the ranks' calls")
    bench.add_argument("--against", choices=["torch", "gloo"], help="step, dp, pp: PyTorch; all_reduce: its gloo")
    bench.add_argument("--rounds", type=positive, default=11, help="measured rounds (default %(default)s)")
    bench.add_argument("--json", metavar="FILE", help="write the figures to FILE; - is standard output")
    bench.add_argument("--plot", metavar="FILE", help="draw busbw over size to FILE.png and FILE.svg")
    bench.add_argument("--tune", metavar="FILE", help="measure which algorithm is best, and keep it in the table FILE")


def run(args):
    """Do what the options say; a MiniparError is the caller's to tell."""
    if (args.what is None) == (args.tune is None):
        refuse("name either what to measure, or a table to --tune: python -m minipar bench --help")
    if args.what not in {"torch": ("step", "dp", "pp"), "gloo": ("all_reduce",)}.get(args.against, (args.what,)):
        refuse(f"--against {args.against} is not for {args.what or '--tune'}.")
    if args.plot and args.what not in ALGORITHMS:
        refuse("--plot is for collectives.")
    for path in (args.json if args.json != "-" else None, args.tune, args.plot and f"{args.plot}.png"):
        try:
            if path is not None:
                check_writable(path)
        except OSError as error:
            refuse(f"nothing can be written to {path!r}: {error.strerror or error}.")
    if args.what == "step":
        save(step(args, console(args, True)), args)
    else:
        minipar.run(rank_main, args.ranks if launched_ranks() else args.ranks or 2, args)


def refuse(why):
    """End this process; under mpirun they all do, and rank 0 says why."""
    sys.exit(1 if launched_rank() else f"minipar: {why}")


def console(args, speaks):
    return Console(stderr=args.json == "-", highlight=False, quiet=not speaks, soft_wrap=True)


def rank_main(world, args):
    """What every rank does; what a user got wrong ends in a sentence."""
    try:
        measure(world, args)
    except (MiniparError, ValueError) as error:
        raise SystemExit(f"minipar: {error}") from error


def measure(world, args):
    """Rank 0 alone speaks and writes."""
    out = console(args, world.rank == 0)
    world.check_headers = args.check_headers
    cores = available_cores()
    checks = "on" if args.check_headers else "off"
    out.print(
        f"{world.size} ranks ({world.transport}) on {cores} cores, header checks {checks}, NumPy {np.__version__}"
    )
    if args.tune:
        result = tune(world, args, out)
    else:
        begin = args.begin or (8 if args.what == "p2p" else 1024)
        sizes = collectives.sizes_between(begin, args.end, args.factor)
        kind = {"copy": copy, "p2p": p2p, "dp": data_parallel, "pp": pipeline}.get(args.what, collective)
        result = kind(world, args, sizes, out)
    if world.size > cores:
        out.print(f"{world.size} ranks take turns on {cores} cores: the times hold waiting for a core.")
    if world.rank == 0:
        save({"ranks": world.size, "transport": world.transport, "cores": cores, **result}, args)


def collective(world, args, sizes, out):
    names = args.algorithms.split(",") if args.algorithms else list(ALGORITHMS[args.what])
    if not args.algorithms:
        if world.transport != "MPI":
            names.remove("native")
            out.print("(Start it with mpirun to compare with the MPI library's own: algorithm native.)")
        elif args.dtype == "float16" and "reduce" not in args.what:
            names.remove("native")  # MPI has no such type, and these do not go by way of float32
        elif args.what == "all_reduce" and args.redop == "sum" and args.dtype != "float16":
            names += ["library"]
        names += ["symmetric", "limit"] if args.what == "all_reduce" else []
    names += ["gloo"] if args.against == "gloo" else []
    widths = [max(10, len(heading)) for heading in HEADINGS]
    widths[4] = max(map(len, names)) + 1
    out.print(
        f"{args.what}: {args.rounds} rounds of all algorithms in turn, ± half the distance of the quartiles; algbw and "
        "busbw in GB/s"
    )
    out.print(" ".join(f"{h:>{w}}" for h, w in zip(HEADINGS, widths, strict=True)))

    def show(rows):
        for row in rows:
            wrong = "n/a" if row["algorithm"] == "limit" else row["wrong"]
            cells = (
                f"{row['bytes']:,}", f"{row['count']:,}", row["dtype"], row["redop"], row["algorithm"],
                f"{row['time_us']:,.1f}", f"{row['spread_us']:,.1f}", short_number(row["algbw_gbps"]),
                short_number(row["busbw_gbps"]), wrong,
            )  # fmt: skip
            out.print(" ".join(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True)))

    rows = collectives.bench(world, args.what, sizes, names, args.dtype, args.redop, args.rounds, show)
    result = {"rows": rows}
    if "library" in names:
        out.print("library: mpi4py's Allreduce called directly, without minipar's checks and time limit.")
    if "limit" in names:
        out.print("symmetric: algorithm shared in place in a SymmetricBuffer. limit: what it must read and write at")
        out.print("least, by all ranks at once, without waiting for each other (its sums are wrong).")
    if args.plot:
        result["copy"] = links.bench_copy(world, sizes)
        if world.rank == 0:
            paths = plot(args, result, world)
            out.print(f"Written: {', '.join(map(str, paths))}")
    if sum(row["wrong"] for row in rows):
        raise SystemExit("minipar: some results are WRONG, see the last column.")
    return result


def short_number(x):
    """Three digits."""
    return f"{x:.{max(0, 2 - math.floor(math.log10(x)))}f}" if x else "0"


def copy(world, args, sizes, out):
    out.print(f"{'size (B)':>12} {'time (us)':>12} {'copied (GB/s)':>14}    every rank its own array, all at once")
    return {"rows": links.bench_copy(world, sizes, args.rounds, lambda rows: [
        out.print(f"{r['bytes']:>12,} {r['time_us']:>12.1f} {r['gbps']:>14.2f}") for r in rows
    ])}  # fmt: skip


def p2p(world, args, sizes, out):
    if world.size < 2:
        raise ShapeError("p2p needs at least 2 ranks.")
    out.print("ranks 0 and 1; one way: half a round trip; both ways: sent plus received at the same time")
    out.print(f"{'size (B)':>12} {'one way (us)':>14} {'(GB/s)':>8} {'both ways (GB/s)':>18}")
    rows = links.bench_p2p(world, sizes, args.rounds, lambda rows: [
        out.print(f"{r['bytes']:>12,} {r['time_us']:>14.2f} {r['gbps']:>8.2f} {r['both_gbps']:>18.2f}") for r in rows
    ])  # fmt: skip
    alpha, beta = links.alpha_beta(rows)
    out.print(
        f"time = {alpha * 1e6:.1f} us + bytes / ({1 / beta / 1e9 if beta else np.inf:.2f} GB/s), fitted to the first"
    )
    result = {"rows": rows, "alpha_us": alpha * 1e6, "beta_us_per_byte": beta * 1e6, "matrix_us": {}}
    for nbytes in (8, 1 << 20):
        times = links.matrix(world, nbytes)
        out.print(f"\nrank by rank, {nbytes:,} bytes one way (us)")
        out.print("      " + "".join(f"{r:>9}" for r in range(world.size)))
        for r, row in enumerate(times):
            out.print(f"{r:>6}" + "".join(f"{'-' if i == r else f'{t:.1f}':>9}" for i, t in enumerate(row)))
        result["matrix_us"][nbytes] = times.tolist()
    return result


def data_parallel(world, args, sizes, out):
    sides = {
        "dp": "DataParallel",
        "one_bucket": "DataParallel with one bucket: no overlap",
        "limit": "limit: the same ranks, unconnected",
        "one_rank": "one rank, the others wait",
        "torch": "PyTorch DistributedDataParallel, gloo",
    }
    result = training_steps(bench_data_parallel, world, args, out, "batch 8 on every rank", sides)
    out.print(
        f"{result['over_limit']:.3f} of the limit; exposed communication {result['exposed']:.1%} of the step "
        f"({result['exposed_one_bucket']:.1%} without overlap);\n"
        f"{result['efficiency']:.0%} of one rank's speed on each of {world.size}; "
        f"{result['tokens_per_second']:,.0f} tokens a second."
    )
    if args.against:
        out.print(f"minipar / PyTorch: {result['ratio']:.2f}")
    return result


def pipeline(world, args, sizes, out):
    if world.size > GPTConfig().layers + 2:
        raise ShapeError(f"bench pp has {GPTConfig().layers + 2} layers: not enough for {world.size} ranks.")
    sides = {
        "pipeline": f"1F1B on {world.size} stages",
        "limit": "limit: the same stages, unconnected, and the bubble",
        "unconnected": "the same stages, unconnected",
        "one_rank": "one rank, the whole batch, the others wait",
        "one_rank_micro": "one rank, in micro-batches",
        "torch": "PyTorch torch.distributed.pipelining, 1F1B, gloo",
    }
    result = training_steps(bench_pipeline, world, args, out, "batch 8 in 8 micro-batches", sides)
    out.print(
        f"{result['of_limit']:.3f} of the limit's speed, whose bubble is {result['bubble']:.1%} of the ideal time; "
        f"{result['speedup']:.2f} times as fast as one rank."
    )
    if args.against:
        out.print(f"minipar / PyTorch, time: {result['ratio']:.2f}")
    return result


def training_steps(bench, world, args, out, batch, sides):
    """Measure, and show a table of the `sides`, {key: what it is}."""
    with out.status("measuring") as status:
        result = bench(world, args.against, args.rounds, advance=lambda text: status.update(f"measuring, {text}"))
    out.print(
        f"One training step, {batch}: GPT of width 256, 4 layers, 8 heads, context 128, vocabulary 256;\n"
        f"AdamW, float32, one thread a rank. Medians of {args.rounds} rounds, the slowest rank's, all sides in turn."
    )
    table = Table()
    for heading in ("", "ms a step"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, text in sides.items():
        if f"{name}_ms" in result:
            table.add_row(text, f"{result[f'{name}_ms']:.1f}")
    out.print(table)
    return result


def tune(world, args, out):
    """Measure, and put this number of ranks into the table of the file."""
    show = lambda rows: out.print(  # noqa: E731
        f"  {rows[0]['op']} {rows[0]['bytes']:,} bytes: {min(rows, key=lambda r: r['time_us'])['algorithm']}"
    )
    found = collectives.tune(world, show)
    table = {}
    if world.rank == 0:
        try:
            with open(args.tune, encoding="utf-8") as file:
                table = json.load(file)["algorithms"]
        except (OSError, ValueError, KeyError, TypeError):
            table = {}  # a new file
        for operation, limits in found.items():
            table.setdefault(world.transport, {}).setdefault(operation, {})[str(world.size)] = limits
        write_atomically(args.tune, (json.dumps({"algorithms": table}, indent=1) + "\n").encode())
    out.print(f"Written: {args.tune}. It is used where the variable MINIPAR_TUNING names it.")
    return {"algorithms": found}


def plot(args, result, world):
    """busbw over size, a line an algorithm, and what copying memory reaches; returns the paths."""
    from minipar.trace import figure

    def draw(picture):
        axes = picture.subplots()
        names = list(dict.fromkeys(row["algorithm"] for row in result["rows"]))
        for name, colour, marker in zip(names, figure.LINES, "os^vDP*Xh", strict=False):
            rows = [row for row in result["rows"] if row["algorithm"] == name]
            style = "--" if name == "limit" else "-"
            axes.plot([r["bytes"] for r in rows], [r["busbw_gbps"] for r in rows], style, color=colour, marker=marker,
                      linewidth=2.5, markersize=8, label=name)  # fmt: skip
        axes.plot([r["bytes"] for r in result["copy"]], [r["gbps"] for r in result["copy"]], ":", color="#444444",
                  linewidth=2.5, label="copying memory")  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xticks([r["bytes"] for r in result["copy"]])
        axes.xaxis.set_major_formatter(lambda nbytes, _: figure.short_size(nbytes))
        axes.set_ylim(0)
        axes.set_xlabel("size of the array")
        axes.set_ylabel("bus bandwidth in GB/s")
        cores = available_cores()
        axes.set_title(f"{args.what}, {args.dtype}: {world.size} ranks ({world.transport}) on {cores} cores")
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        axes.grid(axis="y", alpha=0.3)

    return figure.figure(draw, args.plot, size=(13, 6.5))


def step(args, out):
    with out.status("measuring") as status:
        result = bench_step(args.against, args.rounds, lambda text: status.update(f"measuring, {text}"))
    out.print(
        "One training step: GPT of width 256, 4 layers, 8 heads, context 128, vocabulary 256;\n"
        "batch 8, AdamW, float32, one thread. "
        f"Medians of {result['rounds']} rounds, all sides in turn; NumPy {np.__version__}."
    )
    table = Table()
    for heading in ("", "ms a step", "minipar / this"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_row("minipar", f"{result['minipar_ms']:.1f}", "")
    if args.against:
        table.add_row("PyTorch, eager", f"{result['peer_ms']:.1f}", f"{result['ratio']:.2f}")
    limit = result["limit_ms"]
    table.add_row("its matrix products alone", f"{limit:.1f}", f"{result['minipar_ms'] / limit:.2f}")
    out.print(table)
    out.print(f"{result['tokens_per_second']:,.0f} tokens a second")
    return result


def save(result, args):
    if args.json == "-":
        print(json.dumps(result, indent=2))
    elif args.json:
        write_atomically(args.json, (json.dumps(result, indent=2) + "\n").encode())
