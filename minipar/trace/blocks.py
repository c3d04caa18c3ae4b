"""Pipelines in pictures: a block for each action with its micro-batch's number in it, and what is held in memory.

Spans are told by their names, as 2F0: stage 2, forward, micro-batch 0.
"""

import re

from rich.text import Text

from minipar.trace.terminal import LETTERS
from minipar.trace.timeline import INNER

ACTION = re.compile(r"(\d+)([FBIW])(\d+)$")


def blocks(timeline):
    """(rank, start, end, kind, chunk, letter, micro-batch) of each action; chunk: the how manieth stage of its rank."""
    found = [(s, ACTION.match(s.name)) for s in timeline.spans if s.kind not in INNER]  # a message has the same name
    found = [(s, match) for s, match in found if match]
    stages = {}
    for s, match in found:
        stages.setdefault(s.rank, set()).add(int(match[1]))
    order = {rank: sorted(own) for rank, own in stages.items()}
    for s, match in found:
        yield s.rank, s.start, s.end, s.kind, order[s.rank].index(int(match[1])), match[2], match[3]


def draw_blocks(axes, timeline, title, end=None, unit=1.0, label="time"):
    """One row a rank; later stages of a rank are paler. end: where the axis ends; unit: seconds of one of its units.

    Returns handles for a legend.
    """
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    from minipar.trace.figure import COLOURS, NAMES

    end = (end or timeline.end) / unit or 1.0
    used, bars = {}, {}
    width = axes.get_figure().get_size_inches()[0] * axes.get_position().width * 72  # points
    for rank, start, stop, kind, chunk, letter, microbatch in blocks(timeline):
        start, stop, pale = start / unit, stop / unit, 0.45 * min(chunk, 1)
        colour = tuple(pale + (1 - pale) * c for c in to_rgb(COLOURS[kind]))
        bars.setdefault((rank, colour), []).append((start, stop - start))
        name = "input gradient" if letter == "I" else NAMES.get(kind, kind)
        used.setdefault(kind, Patch(color=COLOURS[kind], label=name))
        room = (stop - start) / end * width
        if room > 5.5 * len(microbatch) and start < end:
            dark = chunk or kind == "weight_gradient"
            style = {"fontsize": min(13, room / len(microbatch) * 1.3), "color": "black" if dark else "white"}
            number = axes.text((start + stop) / 2, rank, microbatch, ha="center", va="center", clip_on=True, **style)
            number.set_in_layout(False)  # hundreds of them, all inside the axes
    for (rank, colour), spans in bars.items():
        axes.broken_barh(spans, (rank - 0.45, 0.9), facecolors=[colour], edgecolor="white", lw=0.6)
    if timeline.end / unit > end * 1.0001:
        axes.text(end, -0.75, f"goes on to {timeline.end / unit:.0f} →", ha="right", va="bottom", fontsize=12)
    axes.set_yticks(range(timeline.ranks), [f"rank {rank}" for rank in range(timeline.ranks)])
    axes.set_ylim(timeline.ranks - 0.5, -0.55)
    axes.set_xlim(0, end)
    axes.set_xlabel(label)
    axes.set_title(title, pad=12)
    axes.set_facecolor(COLOURS["waiting"])
    axes.tick_params(left=False)
    return [used[kind] for kind in COLOURS if kind in used]


def render_blocks(timeline, width=110, unit=1.0):
    """The timeline as rich Text: a row a rank, in each block its letter and micro-batch as far as there is room."""
    found = list(blocks(timeline))
    label = len(f"rank {timeline.ranks - 1} ")
    shortest = min((stop - start for _, start, stop, *_ in found if stop > start), default=1.0)
    scale = min((width - label) / (timeline.end or 1.0), 4 / shortest)  # characters a second
    text, used = Text(), {}
    for rank in range(timeline.ranks):
        text.append(f"rank {rank} ".rjust(label))
        at = 0
        for _, start, stop, kind, chunk, letter, microbatch in sorted(b for b in found if b[0] == rank):
            first, last = round(start * scale), round(stop * scale)
            text.append("·" * (first - at), "grey50")
            room = max(0, last - max(first, at))
            name = f"{letter}{microbatch}" if chunk == 0 else f"{letter.lower()}{microbatch}"
            text.append((name if len(name) <= room else name[:room]).ljust(room), LETTERS[kind][1])
            used[letter] = LETTERS[kind]
            at = max(at, last)
        text.append("·" * (round(timeline.end * scale) - at) + "\n", "grey50")
    ends = f"{timeline.end / unit:.4g}"
    text.append(" " * label + "0" + ends.rjust(round(timeline.end * scale) - 1) + "\n\n" + " " * label)
    names = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
    for letter in filter(used.get, names):
        text.append(letter, used[letter][1])
        text.append(f" {names[letter]}   ")
    text.append("· waiting   small letters: the rank's later stages" if any(b[4] for b in found) else "· waiting")
    return text
