"""Pipeline parallelism: how does the order of the work decide how long ranks wait, and how much they hold?

    mpirun -n 4 python -m minipar.lessons.pp      MPI processes
    python -m minipar.lessons.pp                  4 threads

The lesson runs naive, GPipe, 1F1B, interleaved and zero-bubble schedules of one model, proves that each computes what
one process computes, and lays their timelines under one another: bubble and memory by formula, by simulation, and as
measured. --schedule FILE.py adds one of your own: a function schedule(p, m) that returns a list of actions a rank.
"""

import time
from contextlib import contextmanager
from dataclasses import replace
from statistics import median

import numpy as np

from minipar import arrays
from minipar.autograd.tensor import saved_bytes
from minipar.collectives import all_gather
from minipar.context import current
from minipar.data import ByteCorpus
from minipar.errors import ScheduleError, ShapeError
from minipar.lessons.report import COUNTED, MEASURED, Report, main, parser
from minipar.nn import GPT, GPTConfig
from minipar.optim import SGD
from minipar.parallel import DeviceMesh, Pipeline
from minipar.parallel.pipeline import SCHEDULES, Bubble, Costs, make, simulate, validate
from minipar.parallel.verify import relative_error
from minipar.trace import Recorder, Timeline

SIZES = {  # name: (model, samples in a micro-batch); a model gets two blocks for each rank
    "tiny": (GPTConfig(context=8, width=16, heads=2), 1),
    "small": (GPTConfig(context=32, width=64, heads=4), 1),
    "medium": (GPTConfig(context=128, width=256, heads=8), 1),
}
SYNCHRONOUS = [name for name in SCHEDULES if name != "pipedream"]
SHOWN = ["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]
PACE = {"tiny": 0.004, "small": 0.008, "medium": 0.04}  # seconds of a stage's F, of its I and of its W
TOLERANCE = {"float32": (1e-6, 1e-5), "float64": (1e-12, 1e-10)}  # loss, gradients


def lesson(world, args):
    p, m = world.size, args.m
    if m < 1:
        raise ShapeError(f"-m {m} is not allowed: at least one micro-batch.")
    config, samples = SIZES[args.size]
    config = replace(config, layers=2 * p, dtype=args.dtype, dropout=args.dropout, seed=args.seed)
    report, xp = Report(world, args, "pp"), arrays.device(args.device)
    current().seed = args.seed
    batch = ByteCorpus(args.text, seed=args.seed).batch(0, samples * m, config.context)
    names = ["gpipe", "1f1b", args.schedule] if args.schedule else SYNCHRONOUS
    schedules = {name: make(name, p, m) for name in names if name != "dualpipe-v" or m >= 2 * p}

    report.machine()
    pace = PACE[args.size] if world.size > report.cores or world.transport != "MPI" else None
    predict(report, schedules, p, m)
    runs = run_all(report, schedules, config, batch, world, xp, pace)
    sweep = [] if args.schedule else sweep_m(report, config, samples, p, m, world, xp, pace)
    if not args.schedule and p > 1:
        staleness(report, config, p, world, xp)
    ask(report)
    if report.speaks and not args.no_figure:
        draw(report, runs, sweep, p, m, pace)
    report.save()


# --- 1. what must come out -------------------------------------------------------------------------------------------


def formula(name, p, m):
    """The bubble as a ratio to the ideal time if F = I = W, where the literature has one for this m; else None.

    Sources: Narayanan et al. 2021 (GPipe, 1F1B, interleaved), Qi et al. 2023, table 2 (ZB-H1, ZB-H2).
    """
    zero_bubble = (p - 1) * (1 + 1 - 1) / (3 * m)  # (p-1)(F + I - W) of m (F + I + W)
    known = {
        "naive": p - 1,
        "gpipe": (p - 1) / m,
        "1f1b": (p - 1) / m,
        "interleaved": (p - 1) / (2 * m) if m >= p else None,
        "zb-h1": zero_bubble if m >= p else None,
        "zb-h2": zero_bubble if m >= p else None,  # from its first to its last action a rank waits less: see the table
    }
    return known.get(name)


def predict(report, schedules, p, m):
    report.heading("1  What must come out")
    report.print(
        f"{p} ranks have the layers of one model, {m} micro-batches pass through them: forward F, then backward,\n"
        "whole (B) or as input gradient (I) and weight gradient (W) apart. F, I and W take one unit each, B takes two."
    )
    rows, figures = [], {}
    for name, schedule in schedules.items():
        simulation, peak = simulate(schedule), validate(schedule)
        bubble, known = simulation.bubble, formula(name, p, m)
        exact = known is None or abs(bubble.ratio_to_ideal - known) < 1e-9
        if not exact:
            raise ScheduleError(f"{schedule.name}: the simulation gives {bubble.ratio_to_ideal}, the formula {known}.")
        memory = [held * p / schedule.stages for held in simulation.peak_memory]
        rows.append(
            (schedule.name, f"{simulation.makespan * p / schedule.stages:g}", "-" if known is None else f"{known:.1%}",
             f"{bubble.ratio_to_ideal:.1%}", f"{bubble.share_of_makespan:.1%}", f"{bubble.internal_share:.1%}",
             " ".join(f"{held:g}" for held in memory))
        )  # fmt: skip
        figures[name] = {"bubble": vars(bubble), "formula": known, "peak_by_stage": peak, "memory_by_rank": memory}
    report.table(
        "A bubble is three things, and a figure without its definition says nothing",
        [("schedule", "left"), ("length", "right"), ("idle / ideal, formula", "right"), ("simulated", "right"),
         ("idle / whole time", "right"), ("inside", "right"), ("held by rank", "right")],
        rows,
    )  # fmt: skip
    report.print(
        "Inside: idle between a rank's own first and last action, of the whole time. Held: micro-batches' activations\n"
        "of a rank's layers, at most. (A rank that has two stages holds each of them as a half.)\n"
    )
    same = all(
        simulate(make("gpipe", q, n)).makespan == simulate(make("1f1b", q, n)).makespan
        for q in range(1, 9) for n in range(1, 17)
    )  # fmt: skip
    report.print(
        "Often told, and wrong: that 1F1B has a smaller bubble than GPipe. For 1 to 8 ranks and 1 to 16 micro-batches\n"
        f"both take {'exactly the same time' if same else 'DIFFERENT times'}. What 1F1B saves is memory: "
        f"{min(p, m)} micro-batches on the first rank instead of {m}."
    )
    report.figures["predicted"], report.figures["gpipe_equals_1f1b"] = figures, same


# --- 2. and 3. every schedule for real -------------------------------------------------------------------------------


class Paced(Pipeline):
    """A pipeline whose actions all last what `pace` says: {kind: seconds}, the rest of the time asleep."""

    pace = None

    @contextmanager
    def _region(self, action):
        with super()._region(action):
            start = time.perf_counter()
            yield
            if self.pace:
                time.sleep(max(0.0, start + self.pace[action.kind] - time.perf_counter()))


def one_step(pipeline, batch, world, rounds=2):
    """The shortest of some measured steps: its Timeline on rank 0, None elsewhere."""
    best = None
    for _ in range(rounds):
        pipeline.zero_grad()
        world.barrier("barrier before a step")
        current().recorder = recorder = Recorder(world.rank)
        pipeline.forward_backward(*batch)
        current().recorder = None
        timeline = Timeline.gather(world, recorder)
        if timeline and (best is None or timeline.end < best.end):
            best = timeline
    return best


def compare(schedule, timeline):
    """The measured timeline beside the simulation with its own costs: Bubble measured, Bubble simulated, order kept."""
    spans = {s.name: s for s in timeline.spans if s.kind in ("forward", "backward", "weight_gradient")}
    durations = {}
    for s in spans.values():
        kind = s.name.lstrip("0123456789")[0]
        durations.setdefault((kind, int(s.name.split(kind)[0])), []).append(s.end - s.start)
    cost = {key: median(values) for key, values in durations.items()}
    stages = range(schedule.stages)
    w = [cost.get(("W", s), 0.0) for s in stages]
    b = [cost.get(("I", s), cost.get(("B", s))) for s in stages]
    simulation = simulate(schedule, Costs([cost["F", s] for s in stages], b, w))
    ranks = [[s for s in spans.values() if s.rank == rank] for rank in range(timeline.ranks)]
    busy = [sum(s.end - s.start for s in own) for own in ranks]
    first, last = [min(s.start for s in own) for own in ranks], [max(s.end for s in own) for own in ranks]
    begin = min(first)
    measured = Bubble.of(busy, [t - begin for t in first], [t - begin for t in last], max(last) - begin)
    sources = [(spans[str(a)], spans[str(schedule.source(a))]) for a in schedule.actions if schedule.source(a)]
    in_order = all(s.start >= source.end - 1e-4 for s, source in sources)
    in_order &= all(
        [str(a) for a in actions if str(a) in spans] == [s.name for s in sorted(own, key=lambda s: s.start)]
        for actions, own in zip(schedule.ranks, ranks, strict=True)
    )
    return measured, simulation, in_order


def run_all(report, schedules, config, batch, world, xp, pace):
    """Run each schedule, compare with one process, measure: {name: (schedule, timeline, measured, simulation)}."""
    p, m = world.size, next(iter(schedules.values())).microbatches
    whole = GPT(config).to(xp)
    loss = whole.loss(*(xp.asarray(part) for part in batch))
    held = saved_bytes(loss)
    loss.backward()
    expected = {name: q.grad for name, q in whole.named_parameters()}
    floor = max(float(abs(grad).max()) for grad in expected.values()) / 1000
    report.heading("2  Every schedule for real")
    mesh, rows, timings, runs = DeviceMesh(world, dp=1, pp=p), [], [], {}
    report.figures["runs"] = {}
    with report.progress("running", len(schedules)) as advance:
        for name, schedule in schedules.items():
            pipeline = Paced(GPT(config).to(xp), mesh, schedule)
            if pace:
                unit = pace * p / schedule.stages
                pipeline.pace = {"F": unit, "I": unit, "W": unit, "B": 2 * unit}
            value = pipeline.forward_backward(*batch)
            errors = [relative_error(np.array(value), loss.data)]
            errors.append(max(relative_error(q.grad, expected[n], floor) for n, q in pipeline.named_parameters()))
            counted = gathered(world, pipeline.peak, schedule.stages)
            errors = np.max(gathered_rows(world, errors), axis=0)
            timeline = one_step(pipeline, batch, world)
            peak = validate(schedule)
            if report.speaks:
                limit = TOLERANCE[config.dtype]
                right = errors[0] <= limit[0] and errors[1] <= limit[1] and counted == list(peak.values())
                rows.append((schedule.name, describe(pipeline), f"{errors[0]:.1e}", f"{errors[1]:.1e}",
                             " ".join(map(str, counted)), "yes" if right else "NO"))  # fmt: skip
                measured, simulation, in_order = compare(schedule, timeline)
                known = formula(name, p, m)
                share = "-" if known is None else f"{known / (1 + known):.1%}"
                timings.append((schedule.name, f"{timeline.end * 1e3:.0f} ms", share,
                                f"{simulation.bubble.share_of_makespan:.1%}", f"{measured.share_of_makespan:.1%}",
                                "yes" if in_order else "NO"))  # fmt: skip
                runs[name] = schedule, timeline, measured, simulation
                report.figures["runs"][name] = {
                    "loss_error": float(errors[0]), "gradient_error": float(errors[1]), "held_by_stage": counted,
                    "equal": bool(right), "step_ms": timeline.end * 1e3, "in_order": bool(in_order),
                    "bubble_measured": vars(measured), "bubble_simulated": vars(simulation.bubble),
                }  # fmt: skip
            advance(schedule.name)
    report.table(
        f"Loss and gradients of one step against one process, {config.dtype}; micro-batches held, counted",
        [("schedule", "left"), ("layers of each stage", "left"), ("loss error", "right"), ("gradient error", "right"),
         (f"held at most by stage ({COUNTED})", "right"), ("as predicted", "left")],
        rows,
    )  # fmt: skip
    report.print(f"One process that keeps all {m} micro-batches' activations holds {held:,} bytes of them ({COUNTED}).")
    report.heading("3  How long ranks wait")
    if pace:
        report.print(
            f"{p} ranks ({world.transport}) on {report.cores} cores do not all compute at once. So that the order can\n"
            f"be seen, each action sleeps until it has taken its time: F, I and W of a rank {pace * 1e3:g} ms, half\n"
            "of that for half of its layers."
        )
    report.table(
        "Bubble: idle share of the whole step",
        [("schedule", "left"), (f"step ({MEASURED})", "right"), ("formula, F = I = W", "right"),
         ("simulated with measured costs", "right"), (MEASURED, "right"), ("in the predicted order", "left")],
        timings,
    )  # fmt: skip
    if pace:
        report.print(
            "Measured is more than simulated by what passes between two actions: messages, and waiting for a core to\n"
            "wake up on. With a core for each rank (mpirun -n 2 on 2 cores) nothing sleeps, and the two differ by less."
        )
    return runs


def describe(pipeline):
    """How many layers each stage has; all embeddings count as one layer, the head with the loss as another."""
    return " ".join(str(len(layers)) for layers in pipeline.split)


def gathered_rows(world, row):
    return all_gather(np.array([row], np.float64), world, sizes=[1] * world.size)


def gathered(world, mine, stages):
    """{stage: count} of all ranks as a list by stage."""
    return [int(n) for n in gathered_rows(world, [mine.get(s, 0) for s in range(stages)]).sum(axis=0)]


def held_over_time(schedule, timeline, rank):
    """When the rank's held activations change, and how many full ranks' worth of a micro-batch they then are."""
    own = [s for s in timeline.spans if s.rank == rank]
    events = [(s.start, 1) for s in own if s.kind == "forward"] + [(s.end, -1) for s in own if set(s.name) & set("BW")]
    times, changes = zip(*sorted(events), strict=True)
    return np.array(times), np.cumsum(changes) * timeline.ranks / schedule.stages


# --- 4. more micro-batches -------------------------------------------------------------------------------------------


def sweep_m(report, config, samples, p, m, world, xp, pace):
    """Bubble and memory over the number of micro-batches: lines simulated, points run. Returns rows for the picture."""
    report.heading("4  More micro-batches")
    counts = sorted({p, 2 * p, 4 * p})
    rows, mesh = [], DeviceMesh(world, dp=1, pp=p)
    with report.progress("running", len(SHOWN) * len(counts)) as advance:
        for name in SHOWN:
            for n in counts:
                batch = ByteCorpus(report.args.text, seed=config.seed).batch(0, samples * n, config.context)
                pipeline = Paced(GPT(config).to(xp), mesh, make(name, p, n))
                unit = (pace or 0) * p / pipeline.schedule.stages
                pipeline.pace = {"F": unit, "I": unit, "W": unit, "B": 2 * unit}
                timeline = one_step(pipeline, batch, world, rounds=1)
                if timeline:
                    held = [held_over_time(pipeline.schedule, timeline, rank)[1].max() for rank in range(p)]
                    share = compare(pipeline.schedule, timeline)[0].share_of_makespan
                    rows.append({"name": name, "m": n, "bubble": share, "held": float(max(held))})
                advance(f"{name}, {n} micro-batches")
    report.table(
        f"Bubble (share of the whole time, {MEASURED}) and most micro-batches held by a rank ({COUNTED})",
        [("schedule", "left"), *((f"m = {n}", "right") for n in counts)],
        [[make(name, p, p).name, *(f"{r['bubble']:.1%}, {r['held']:g}" for r in rows if r["name"] == name)]
         for name in SHOWN],
    )  # fmt: skip
    report.print(
        "More micro-batches make every bubble smaller but the naive one. GPipe pays with memory; the others do not."
    )
    report.figures["sweep"] = rows
    return rows


# --- 5. updates without waiting --------------------------------------------------------------------------------------


def staleness(report, config, p, world, xp):
    """PipeDream: no wait at the end of a step, but gradients from old weights."""
    report.heading("5  No bubble, at another price: PipeDream")
    config, updates, rate = replace(config, tied=False, dropout=0.0), 64, 0.5
    batch = ByteCorpus(report.args.text, seed=config.seed).batch(0, 4 * updates, config.context)
    schedule, mesh = make("pipedream", p, updates), DeviceMesh(world, dp=1, pp=p)
    pipeline = Pipeline(GPT(config).to(xp), mesh, schedule, optimizer=lambda params: SGD(params, rate))
    pipeline.forward_backward(*batch)
    stale = [float(pipeline.losses[k]) for k in sorted(pipeline.losses)]
    stale = np.array(gathered_rows(world, stale or [0.0] * updates).max(axis=0))
    model = GPT(config).to(xp)
    optimizer, fresh = SGD(model.parameters(), rate), []
    for x, y in zip(*(np.array_split(part, updates) for part in batch), strict=True):
        model.zero_grad()
        loss = model.loss(x, y)
        loss.backward()
        optimizer.step()
        fresh.append(float(loss.data))
    share = simulate(schedule).bubble.share_of_makespan
    report.print(
        f"PipeDream updates a stage's weights after each micro-batch and never drains: the bubble of {updates}\n"
        f"updates is {share:.1%} of the time. A micro-batch's backward uses the weights of its forward (a stash: the\n"
        f"graph holds the old array), but on rank 0 they are up to {p - 1} updates old. Same samples, SGD, rate {rate}:"
    )
    for name, losses in (("updates in order", np.array(fresh)), ("PipeDream", stale)):
        report.print(f"  {name:18} {report.sparkline(losses)}  mean of the last 16: {losses[-16:].mean():.3f}")
    report.figures["pipedream"] = {
        "in_order": fresh, "stale": stale.tolist(), "bubble": share, "updates_old": [p - 1 - r for r in range(p)],
    }  # fmt: skip


# --- 6. questions ----------------------------------------------------------------------------------------------------


def ask(report):
    report.heading("6  Three questions (think first; the answers are computed)")
    needed = next(m for m in range(1, 1000) if simulate(make("1f1b", 8, m)).bubble.share_of_makespan <= 0.1)
    slow = simulate(make("1f1b", 4, 8), Costs(f=[1, 1, 2, 1], b=[1, 1, 2, 1], w=[1, 1, 2, 1])).makespan
    even = simulate(make("1f1b", 4, 8), Costs(f=1.25, b=1.25, w=1.25)).makespan
    halves = lambda c: simulate(make("interleaved", 4, 8), Costs(0.5, 0.5, 0.5, c)).makespan  # noqa: E731
    dear = next(c / 8 for c in range(100) if halves(c / 8) > simulate(make("1f1b", 4, 8), Costs(c=c / 8)).makespan)
    report.print(
        "a) How many micro-batches keep 1F1B's bubble on 8 ranks to a tenth of the time?\n"
        f"   {needed}: (p-1)/(m+p-1) <= 1/10."
    )
    report.print(
        "b) One of 4 stages has twice the layers of each other. What does it cost, at m = 8, against an even split?\n"
        f"   {slow:g} units instead of {even:g}: every other stage waits for the slow one, micro-batch for micro-batch."
    )
    report.print(
        "c) Interleaving halves the bubble, with twice the transfers. From which cost of a transfer on is it slower\n"
        f"   than 1F1B (4 ranks, m = 8, nothing hidden)?   {dear:g} times a rank's forward."
    )
    report.figures["answers"] = {"microbatches": needed, "slow_stage": slow, "even": even, "transfer": dear}


# --- the pictures ----------------------------------------------------------------------------------------------------


def draw(report, runs, sweep, p, m, pace):
    """figures/pp.png: timelines under one another, memory beside; figures/pp_sweep.png: bubble and memory over m."""
    from minipar.trace import figure
    from minipar.trace.blocks import draw_blocks

    shown = {name: run for name, run in runs.items() if name in SHOWN or name == report.args.schedule}
    end = max(run[1].end for name, run in shown.items() if name != "naive") if len(shown) > 1 else None

    last = list(shown)[-1]

    def paint(picture):
        panels, handles = picture.subplots(len(shown), 2, width_ratios=[4, 1], squeeze=False), {}
        for (left, right), (name, (schedule, timeline, measured, simulation)) in zip(
            panels, shown.items(), strict=True
        ):
            known = formula(name, p, m)
            said = "" if known is None else f"formula {known / (1 + known):.1%}, "
            title = f"{schedule.name}: bubble {said}simulated {simulation.bubble.share_of_makespan:.1%}, "
            title += f"measured {measured.share_of_makespan:.1%}"
            drawn = draw_blocks(left, timeline, title, end, 1e-3, "time (ms)" if name == last else "")
            for axes in (left, right):
                axes.tick_params(labelbottom=name == last)
            handles |= {handle.get_label(): handle for handle in drawn}
            draw_memory(right, schedule, timeline, end or timeline.end)
        panels[0, 1].set_title("micro-batches held")
        panels[-1, 1].set_xlabel("time (ms)")
        panels[-1, 1].legend(loc="upper left", bbox_to_anchor=(-0.1, -0.35), ncols=4, frameon=False, fontsize=11,
                             handlelength=1, columnspacing=0.8)  # fmt: skip
        paced = f"each action {pace * 1e3:g} ms by sleeping" if pace else f"{report.cores} cores"
        title = f"measured, {p} ranks, {paced}; number: micro-batch; pale: a rank's second stage"
        picture.legend(handles=list(handles.values()), loc="outside lower left", ncols=4, frameon=False, title=title)

    def draw_memory(axes, schedule, timeline, end):
        for rank in range(p):
            times, held = held_over_time(schedule, timeline, rank)
            axes.step(times * 1e3, held, where="post", color=figure.LINES[rank % 9], label=f"rank {rank}")
        axes.set_xlim(0, end * 1e3)
        axes.set_ylim(0, m + 0.5)
        axes.yaxis.get_major_locator().set_params(integer=True)

    def paint_sweep(picture):
        left, right = picture.subplots(1, 2)
        counts = range(p, 4 * p + 1)
        for i, name in enumerate(SHOWN):
            simulations = [simulate(make(name, p, n)) for n in counts]
            scale = p / simulations[0].schedule.stages
            style = {"color": figure.LINES[i], "linewidth": 2.5, "label": make(name, p, p).name}
            style["linestyle"] = "--" if name == "1f1b" else "-"  # GPipe's bubble lies under it
            own = [r for r in sweep if r["name"] == name]
            for axes, values, key in (
                (left, [s.bubble.share_of_makespan * 100 for s in simulations], "bubble"),
                (right, [max(s.peak_memory) * scale for s in simulations], "held"),
            ):
                axes.plot(counts, values, **style)
                points = [r[key] * (100 if key == "bubble" else 1) for r in own]
                axes.plot([r["m"] for r in own], points, "o", color=figure.LINES[i], markersize=9)
        left.set_title("Bubble")
        left.set_ylabel("idle share of the whole time (%)")
        left.set_ylim(0)
        right.set_title("Memory")
        right.set_ylabel("micro-batches held by a rank, at most")
        right.set_ylim(0)
        for axes in (left, right):
            axes.set_xlabel("micro-batches m")
            axes.set_xticks([p, 2 * p, 3 * p, 4 * p])
        handles = left.get_legend_handles_labels()[0]
        picture.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False,
                       title=f"{p} ranks; lines: formula or simulation with F = I = W; points: as run")  # fmt: skip

    written = []
    report.draw(paint, "pp", size=(18, 1.2 + 2.35 * len(shown)))
    written += report.figures["figures"]
    if sweep:
        report.draw(paint_sweep, "pp_sweep")
        written += report.figures["figures"]
    report.figures["figures"] = written


if __name__ == "__main__":
    options = parser(__doc__, SIZES)
    options.add_argument("--dropout", type=float, default=0.0, help="dropout probability (default %(default)s)")
    options.add_argument("--text", metavar="FILE", help="read this file instead of Python's own sources")
    options.add_argument("-m", type=int, default=8, help="micro-batches (default 8)")
    options.add_argument("--schedule", metavar="FILE.py", help="run GPipe, 1F1B and the schedule(p, m) of this file")
    main(lesson, options)
