"""A timeline as coloured text: one row a rank, one letter for what the rank did most in that slice of time."""

from rich.text import Text

LETTERS = {  # kind: (letter, style, what the legend says)
    "forward": ("F", "black on dodger_blue1", "forward"),
    "backward": ("B", "black on spring_green3", "backward"),
    "weight_gradient": ("W", "black on light_sky_blue1", "weight gradient"),
    "optimizer": ("O", "black on orchid", "optimizer"),
    "communication": ("C", "black on orange1", "communication"),
    "wait": ("·", "grey50", "waiting"),
    "idle": ("·", "grey50", "waiting"),
}


def render(timeline, width=100):
    """The timeline as rich Text of `width` columns: a row a rank, an axis in milliseconds, a legend."""
    label = len(f"rank {timeline.ranks - 1} ")
    columns = max(10, width - label - 1)
    text, used = Text(), set()
    for rank in range(timeline.ranks):
        text.append(f"rank {rank} ".rjust(label))
        for kind in _cells(timeline.flat(rank), timeline.end, columns):
            used.add(kind)
            text.append(LETTERS[kind][0], LETTERS[kind][1])
        text.append("\n")
    end = f"{timeline.end * 1e3:.0f} ms"
    text.append(" " * label + "0 ms" + end.rjust(columns - 4) + "\n\n" + " " * label)
    legend = {LETTERS[kind] for kind in used}
    for letter, style, name in dict.fromkeys(entry for entry in LETTERS.values() if entry in legend):
        text.append(letter, style)
        text.append(f" {name}   ")
    return text


def _cells(spans, end, columns):
    """For each of `columns` equal slices of time, the kind that takes most of it."""
    cells = [{} for _ in range(columns)]
    for s in spans:
        first, last = s.start / end * columns, s.end / end * columns
        for i in range(int(first), min(columns, int(last) + 1)):
            cells[i][s.kind] = cells[i].get(s.kind, 0.0) + min(i + 1, last) - max(i, first)
    return [max(cell, key=cell.get) if cell else "idle" for cell in cells]
