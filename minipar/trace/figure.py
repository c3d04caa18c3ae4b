"""Pictures: one style and one meaning for each colour in every lesson. Nothing here needs a display."""

import io
import itertools
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minipar.trace.perfetto import write_atomically
from minipar.trace.timeline import INNER, WAITING

# Okabe and Ito's palette: told apart with any colour vision.
COLOURS = {
    "forward": "#0072B2",
    "backward": "#009E73",
    "weight_gradient": "#56B4E9",
    "optimizer": "#CC79A7",
    "other": "#8C8C8C",
    "communication": "#E69F00",
    "waiting": "#E0E0E0",
}
LINES = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#8C8C8C", "#B8A800"]
NAMES = {"weight_gradient": "weight gradient", "optimizer": "optimizer step"}
STYLE = {
    "font.size": 15,
    "axes.titlesize": 17,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "minipar",
    "figure.facecolor": "white",
}


def figure(draw, path, size=(16, 6.5), kinds=("png", "svg")):
    """Make a Figure of `size` inches, let `draw(figure)` fill it, write path.png and path.svg; returns the paths."""
    with matplotlib.rc_context(STYLE):
        picture = Figure(size, layout="constrained")
        draw(picture)
        paths = []
        for kind in kinds:
            options = {"dpi": 110} if kind == "png" else {"metadata": {"Date": None}}
            data = io.BytesIO()
            picture.savefig(data, format=kind, **options)
            paths.append(Path(f"{path}.{kind}"))
            write_atomically(paths[-1], data.getvalue())
    return paths


def draw_timeline(axes, timeline, title, end=None, legend=True):
    """One row a rank, time in milliseconds from left to right; long regions of rank 0 are named above its row.

    Where ranks have a communication stream, its row lies below the rank's own. end: seconds that the axis is long, by
    default as long as the timeline. Returns the handles for a legend, which is drawn below unless `legend` is False.
    """
    end = end or timeline.end
    used = []
    places = {"compute": (-0.4, 0.8)}
    if len(timeline.streams) > 1:
        places = {"compute": (-0.4, 0.5), "communication": (0.12, 0.26)}
    for rank, (stream, (top, height)) in itertools.product(range(timeline.ranks), places.items()):
        bars = {}
        for s in timeline.flat(rank, stream):
            kind = "waiting" if s.kind in WAITING else s.kind
            if stream == "compute" or s.kind != "idle":
                bars.setdefault(kind, []).append((s.start * 1e3, (s.end - s.start) * 1e3))
        for kind, spans in bars.items():
            axes.broken_barh(spans, (rank + top, height), facecolors=COLOURS[kind], linewidth=0)
            used.append(kind)
    for s in timeline.spans:
        if s.rank == 0 and s.stream == "compute" and s.kind not in INNER and s.end - s.start > 0.15 * end:
            axes.text((s.start + s.end) * 500, -0.44, s.name, ha="center", va="bottom", color=COLOURS[s.kind],
                      weight="bold", parse_math=False)  # fmt: skip
    axes.set_yticks(range(timeline.ranks), [f"rank {rank}" for rank in range(timeline.ranks)])
    axes.set_ylim(timeline.ranks - 0.5, -0.5 - 0.06 * timeline.ranks)
    axes.set_xlim(0, end * 1e3 or 1)
    axes.set_xlabel("time (ms)")
    axes.set_title(title)
    axes.tick_params(left=False)
    axes.spines["left"].set_visible(False)
    handles = [Patch(color=COLOURS[kind], label=NAMES.get(kind, kind)) for kind in COLOURS if kind in used]
    if legend:
        axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=len(handles), frameon=False)
    return handles


def draw_speedup(axes, ranks, measured, by_compute, cores, title):
    """Speedup over one rank: as measured by the wall clock, by compute time alone, and the ideal line.

    ranks, measured, by_compute: lists of equal length. A line marks the number of cores, above which no clock can go.
    """
    axes.plot(ranks, ranks, color="#999999", linestyle=":", linewidth=2, label="ideal")
    axes.plot(ranks, by_compute, color=COLOURS["forward"], marker="s", markersize=10, linewidth=2.5,
              label="compute alone (CPU time)")  # fmt: skip
    axes.plot(ranks, measured, color="#D55E00", marker="o", markersize=10, linewidth=2.5, label="measured (wall clock)")
    if cores < max(ranks):
        limit = f"limit: {cores} core{'s' * (cores > 1)}"
        axes.axhline(cores, color="#555555", linewidth=1.5, linestyle="--", label=limit)
    for values, offset, colour in ((by_compute, 12, COLOURS["forward"]), (measured, -24, "#D55E00")):
        for x, y in list(zip(ranks, values, strict=True))[1:]:
            axes.annotate(f"{y:.2f}x", (x, y), (0, offset), textcoords="offset points", ha="center", color=colour,
                          bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip
    axes.set_xticks(ranks)
    axes.set_yticks(range(max(ranks) + 1) if max(ranks) <= 8 else [0, *ranks])
    axes.set_xlim(min(ranks) - 0.25, max(ranks) + 0.25)
    axes.set_ylim(0, max(ranks) + 0.4)
    axes.set_xlabel("tensor-parallel ranks")
    axes.set_ylabel("speedup over one rank")
    axes.set_title(title)
    axes.legend(loc="upper left", frameon=False)


def draw_ring(axes, states):
    """The rounds of a ring all-reduce; states[round][rank][chunk]: how many ranks' numbers that chunk holds.

    One column a round, one row a rank, one square a chunk: the darker, the more of the sum it holds. What has come in
    the round has a frame.
    """
    n = len(states[0])
    shades = matplotlib.colormaps["Blues"]
    for round_, state in enumerate(states):
        for rank, chunks in enumerate(state):
            for chunk, held in enumerate(chunks):
                arrived = round_ and held != states[round_ - 1][rank][chunk]
                x, y = round_ * (n + 1) + chunk, rank * 1.6
                axes.add_patch(
                    matplotlib.patches.Rectangle(
                        (x + 0.05, y), 0.9, 0.9, facecolor=shades(0.12 + 0.75 * (held - 1) / max(1, n - 1)),
                        edgecolor=COLOURS["communication"] if arrived else "none", linewidth=2.5,
                    )
                )  # fmt: skip
                axes.text(x + 0.5, y + 0.45, held, ha="center", va="center", fontsize=8 if n > 3 else 11,
                          color="white" if held > 0.6 * n else "black")  # fmt: skip
    rounds = len(states)
    axes.set_xlim(-0.3, rounds * (n + 1) - 0.7)
    axes.set_ylim(n * 1.6 - 0.5, -0.4)
    axes.set_xticks([r * (n + 1) + n / 2 for r in range(rounds)], ["start", *range(1, rounds)])
    axes.set_yticks([rank * 1.6 + 0.45 for rank in range(n)], [f"rank {rank}" for rank in range(n)])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(f"round: {n - 1} that add, {n - 1} that copy")
    axes.set_title("Ring all-reduce: ranks that each chunk holds")


def short_size(nbytes):
    """Bytes with a unit: 64K, 1M."""
    for unit, of in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if nbytes >= of:
            return f"{nbytes / of:g}{unit}"
    return f"{nbytes:g}"
