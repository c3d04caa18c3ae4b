"""Timelines: cut, aligned, drawn, and written so that Perfetto opens them."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

import minipar
from minipar.collectives import all_reduce
from minipar.context import current
from minipar.trace import Message, Recorder, Span, Timeline, figure, perfetto, terminal


def example():
    spans = [
        Span(0, "forward", "forward", 0.0, 4.0),
        Span(0, "communication", 'all_reduce "é" \\', 1.0, 2.0),
        Span(0, "wait", "all_reduce", 2.0, 2.5),
        Span(1, "forward", "forward", 0.5, 3.0),
        Span(1, "backward", "backward", 3.0, 5.0),
    ]
    return Timeline(2, spans, [Message(1, 0, 1, 64, 1.0, 1.5, "x"), Message(2, 1, 0, 64, 1.2, 2.0, "x")])


def test_inner_spans_are_cut_out_and_gaps_are_idle():
    kinds = [(s.kind, s.start, s.end) for s in example().flat(0)]
    assert kinds == [
        ("forward", 0.0, 1.0),
        ("communication", 1.0, 2.0),
        ("wait", 2.0, 2.5),
        ("forward", 2.5, 4.0),
        ("idle", 4.0, 5.0),
    ]
    assert example().shares(0) == pytest.approx({"compute": 0.5, "communication": 0.2, "waiting": 0.3})
    assert sum(example().shares(1).values()) == pytest.approx(1)


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("shift", [11.5, -11.5])
def test_nb3_a_shifted_clock_is_found_out(ranks, shift):
    """In a ring messages go one way round only; the shift is known to within a trip's time."""
    rng = np.random.default_rng(0)
    spans, messages = [], []
    for i in range(60):
        source = i % ranks
        dest = (source + 1) % ranks
        sent = i * 0.01
        received = sent + 0.001 + 0.001 * rng.random()
        on = shift if source == 1 else 0, shift if dest == 1 else 0
        spans.append(Span(source, "forward", "f", sent + on[0], sent + 0.005 + on[0]))
        messages.append(Message(i, source, dest, 8, sent + on[0], received + on[1], "x"))
    offsets = Timeline(ranks, spans, messages).clock_offsets()
    assert offsets[1] == pytest.approx(shift, abs=0.001 * ranks)
    timeline = Timeline(ranks, spans, messages).aligned()
    assert all(0 <= m.sent <= m.received for m in timeline.messages)
    assert min(s.start for s in timeline.spans) == 0 and timeline.end < 1
    assert perfetto.validate(perfetto.trace_events(timeline)) == []


@pytest.mark.parametrize("shift", [11.5, -11.5])
def test_nb3_messages_that_go_one_way_only(shift):
    """0 -> 1 -> 2, as in a forward pass: a clock that is off is found from its bound alone."""
    spans = [Span(r, "forward", "f", r + shift * (r == 1), r + 0.5 + shift * (r == 1)) for r in range(3)]
    messages = [Message(0, 0, 1, 8, 0.5, 0.6 + shift, "x"), Message(1, 1, 2, 8, 1.5 + shift, 1.6, "x")]
    timeline = Timeline(3, spans, messages).aligned()
    assert timeline.end < 3 and all(m.sent <= m.received + 1e-9 for m in timeline.messages)
    assert perfetto.validate(perfetto.trace_events(timeline)) == []


def test_nested_regions_show_the_innermost():
    spans = [
        Span(0, "wait", "w", 3.0, 4.0),
        Span(0, "weight_gradient", "dW", 2.0, 4.0),
        Span(0, "backward", "b", 0.0, 10.0),
        Span(0, "communication", "c", 4.0, 5.0),
        Span(0, "other", "o", 4.0, 5.0),
    ]
    pieces = [(s.kind, s.start, s.end) for s in Timeline(1, spans).flat(0)]
    assert pieces == [
        ("backward", 0.0, 2.0),
        ("weight_gradient", 2.0, 3.0),
        ("wait", 3.0, 4.0),
        ("communication", 4.0, 5.0),
        ("backward", 5.0, 10.0),
    ]


def test_every_kind_can_be_shown():
    kinds = ["forward", "backward", "weight_gradient", "optimizer", "other", "communication", "wait"]
    timeline = Timeline(1, [Span(0, kind, "$x_{", i, i + 1) for i, kind in enumerate(kinds)])
    assert "W weight gradient" in str(terminal.render(timeline))
    picture = Figure()
    figure.draw_timeline(picture.subplots(), timeline, "t")
    picture.canvas.draw()


def test_messages_at_one_moment_keep_their_arrows():
    messages = [Message(i, 0, 1, 8, 1.0, 1.0 + 1e-8 * i, "x") for i in range(3)]
    timeline = Timeline(2, [Span(0, "forward", "f", 0.0, 2.0)], messages)
    assert perfetto.validate(perfetto.trace_events(timeline)) == []


def test_short_waits_keep_their_share_of_the_row():
    """Waits of a quarter of a column each: never the most of a column, yet a quarter of the row."""
    spans = [Span(0, "forward", "f", i, i + 0.75) for i in range(90)] + [Span(0, "wait", "w", 89.75, 90.0)]
    row = str(terminal.render(Timeline(1, spans), 98)).splitlines()[0]
    assert row.count("·") == pytest.approx(90 / 4, abs=1)


def test_trace_is_strict_json_with_paired_arrows(tmp_path):
    perfetto.write(example(), tmp_path / "t" / "trace.json")
    trace = json.loads((tmp_path / "t" / "trace.json").read_text(), parse_constant=pytest.fail)
    assert perfetto.validate(trace) == []
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}
    assert [e["ph"] for e in trace["traceEvents"] if e["ph"] in "sf"].count("s") == 2
    assert os.listdir(tmp_path / "t") == ["trace.json"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda e: e.update(dur=-1) if e["ph"] == "X" else None, "negative"),
        (lambda e: e.update(tid=9) if e["ph"] == "X" else None, "has no name"),
        (lambda e: e.update(ts=0) if e["ph"] == "f" else None, "sent once and received once"),
        (lambda e: e.update(dur=2e6) if e["ph"] == "X" else None, "overlap"),
        (lambda e: e.update(dur=float("nan")) if e["ph"] == "X" else None, "endless"),
        (lambda e: e.update(dur=0) if e["ph"] == "X" else None, "in no slice"),
        (lambda e: e.update(ph="B") if e["ph"] == "X" else None, "unknown phase"),
        (lambda e: e.update(ts=5e6 - e["ts"]) if e["ph"] == "X" else None, "comes after a later"),
    ],
)
def test_validation_finds_what_is_wrong(change, problem):
    trace = perfetto.trace_events(example())
    for event in trace["traceEvents"]:
        change(event)
    assert any(problem in found for found in perfetto.validate(trace))


def test_a_real_run_gathers_on_rank_0():
    def main(world):
        recorder = current().recorder = Recorder(world.rank)
        with recorder.region("forward", "forward"):
            all_reduce(np.ones(200_000), world, algorithm="ring")
            all_reduce(np.ones(200_000), world, algorithm="shared")
        current().recorder = None
        return Timeline.gather(world, recorder)

    timeline, *others = minipar.run(main, ranks=3)
    assert others == [None, None]
    assert {s.rank for s in timeline.spans} == {0, 1, 2} and timeline.messages
    assert perfetto.validate(perfetto.trace_events(timeline)) == []
    for rank in range(3):
        assert sum(timeline.shares(rank).values()) == pytest.approx(1)


def test_empty_timeline():
    empty = Timeline(1, []).aligned()
    assert empty.end == 0 and empty.shares(0)["waiting"] == 0
    assert perfetto.validate(perfetto.trace_events(empty)) == []
    assert "rank 0" in str(terminal.render(empty))


@pytest.mark.parametrize("width", [40, 80, 120])
def test_terminal_rows_fit(width):
    text = terminal.render(example(), width)
    console = Console(width=width, record=True, file=open(os.devnull, "w"))
    console.print(text)
    console.file.close()
    lines = console.export_text().splitlines()
    assert lines[0].startswith("rank 0 FF") and "C" in lines[0] and "B" in lines[1]
    assert max(map(len, lines)) <= width and "5000 ms" in lines[2]


def test_nb2_pictures_need_no_display(tmp_path):
    code = (
        "from test_trace import example; from minipar.trace import figure\n"
        "figure.figure(lambda f: figure.draw_timeline(f.subplots(), example(), 'x'), 'a')\n"
        "figure.figure(lambda f: figure.draw_speedup(f.subplots(), [1, 2], [1, 1.5], [1, 1.9], 2, 'x'), 'b')"
    )
    environment = {k: v for k, v in os.environ.items() if k != "DISPLAY"} | {"MPLBACKEND": "TkAgg"}
    tests = os.path.dirname(__file__)
    environment["PYTHONPATH"] = os.pathsep.join([tests, os.path.dirname(tests)])  # works where nothing is installed
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, timeout=60)
    assert sorted(os.listdir(tmp_path)) == ["a.png", "a.svg", "b.png", "b.svg"]
