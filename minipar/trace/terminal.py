"""A timeline as coloured text: one row a rank, one letter a slice of time, as many of a letter as its share."""

import itertools

from rich.text import Text

LETTERS = {  # kind: (letter, style, what the legend says)
    "forward": ("F", "black on dodger_blue1", "forward"),
    "backward": ("B", "black on spring_green3", "backward"),
    "weight_gradient": ("W", "black on light_sky_blue1", "weight gradient"),
    "optimizer": ("O", "black on orchid", "optimizer"),
    "other": ("X", "black on grey62", "other"),
    "communication": ("C", "black on orange1", "communication"),
    "wait": ("·", "grey50", "waiting"),
    "idle": ("·", "grey50", "waiting"),
}


def render(timeline, width=100):
    """The timeline as rich Text of `width` columns: a row a rank, an axis in milliseconds, a legend."""
    label = max(len(f"rank {timeline.ranks - 1} "), 7 * (len(timeline.streams) > 1))
    columns = max(10, width - label - 1)
    text, used = Text(), set()
    for rank, stream in itertools.product(range(timeline.ranks), timeline.streams):
        text.append((f"rank {rank} " if stream == "compute" else "stream ").rjust(label))
        for kind in _cells(timeline.flat(rank, stream), timeline.end, columns):
            used.add(kind)
            text.append(LETTERS[kind][0], LETTERS[kind][1])
        text.append("\n")
    text.append(" " * label + _axis(timeline.end * 1e3, columns) + "\n\n" + " " * label)
    legend = {LETTERS[kind] for kind in used}
    for letter, style, name in dict.fromkeys(entry for entry in LETTERS.values() if entry in legend):
        text.append(letter, style)
        text.append(f" {name}   ")
    return text


def _axis(end, columns):
    """Four marks, each at the left of what it means, and the `end` (ms) at the right."""
    marks = [f"{end * i / 4:.0f}" if end >= 100 else f"{end * i / 4:.3g}" for i in range(5)]
    cuts = [columns * i // 4 for i in range(5)]
    fields = [mark.ljust(b - a) for mark, a, b in zip(marks, cuts, cuts[1:], strict=False)]
    last = f" {marks[-1]} ms"
    return "".join(fields)[: columns - len(last)] + last


def _cells(spans, end, columns):
    """The kind to show in each of `columns` equal slices of time.

    A slice's time is added to what each kind is owed; the kind that is owed most is shown, and pays one slice. So waits
    much shorter than a slice are not lost: they show as often as they add up to one.
    """
    cells = [{} for _ in range(columns)]
    for s in spans:
        first, last = s.start / end * columns, s.end / end * columns
        for i in range(int(first), min(columns, int(last) + 1)):
            cells[i][s.kind] = cells[i].get(s.kind, 0.0) + min(i + 1, last) - max(i, first)
    owed, shown = {}, []
    for cell in cells:
        for kind, share in cell.items():
            owed[kind] = owed.get(kind, 0.0) + share
        # Only what happened in the slice may stand there.
        shown.append(max(cell, key=owed.get) if cell else "idle")
        owed[shown[-1]] = owed.get(shown[-1], 0.0) - 1
    return shown
