"""ZeRO: what does a rank have to keep, and what does it cost to keep less?

    mpirun -n 4 python -m minipar.lessons.zero      MPI processes
    python -m minipar.lessons.zero                  4 threads

The lesson predicts the bytes that every rank of a data-parallel run holds and sends, at each stage of ZeRO, trains a
small GPT in each of them, counts both, and shows that all four learn the same.
"""

import time
from dataclasses import replace
from statistics import median

import numpy as np

from minipar import arrays, rng
from minipar.autograd import saved_bytes
from minipar.collectives import all_gather
from minipar.collectives.ring import all_gather_traffic, all_reduce_traffic, reduce_scatter_traffic
from minipar.context import current
from minipar.data import ByteCorpus
from minipar.lessons.report import COUNTED, MEASURED, PREDICTED, Report, main, parser
from minipar.nn import GPT, GPTConfig
from minipar.optim import AdamW
from minipar.parallel import DeviceMesh, ZeRO, full_state, replicas_equal
from minipar.parallel.verify import relative_error
from minipar.trace import Recorder, Timeline
from minipar.training import held_bytes

SIZES = {  # name: (model, samples a rank)
    "tiny": (GPTConfig(context=16, width=32, layers=3, heads=4), 2),
    "small": (GPTConfig(context=64, width=128, layers=4, heads=4), 2),
    "medium": (GPTConfig(), 4),
}
KINDS = ("parameters", "gradients", "optimizer")
STAGES = range(4)
ROUNDS = 5


def lesson(world, args):
    config, samples = SIZES[args.size]
    config = replace(config, dtype=args.dtype, dropout=args.dropout, seed=args.seed)
    report, xp = Report(world, args, "zero"), arrays.device(args.device)
    for operation in ("all_reduce", "reduce_scatter", "all_gather"):
        world.preferred[operation] = "ring"  # whose bytes are counted as messages
    corpus = ByteCorpus(args.text, seed=args.seed)
    current().seed = args.seed
    corpus.batch(0, samples * world.size, config.context)  # a text that is too short ends here in one sentence

    report.machine()
    explain(report)
    memory = hold(report, config, world, xp)
    volume = send(report, config, corpus, samples, world, xp)
    learn(report, config, corpus, samples, world, xp)
    timeline = see(report, config, corpus, samples, world, xp)
    ask(report, world)
    if timeline and not args.no_figure:
        draw(report, memory, volume, timeline)
    report.save()


def formula(stage, ranks, k=12):
    """Bytes a parameter that a rank holds: {"parameters", "gradients", "optimizer"}, 16-bit training with Adam.

    k: weight, mean and square in float32. Rajbhandari et al. 2020, figure 1.
    """
    return {
        "parameters": 2 / (ranks if stage == 3 else 1),
        "gradients": 2 / (ranks if stage >= 2 else 1),
        "optimizer": k / (ranks if stage >= 1 else 1),
    }


# --- 1. what there is to keep ----------------------------------------------------------------------------------------


def explain(report):
    report.heading("1  What there is to keep")
    report.print(
        "Mixed precision with Adam keeps for each parameter: itself in 16 bits (2 bytes), its gradient (2), and in\n"
        "float32 the optimizer's own weight, mean and square (K = 12). Plain data parallelism keeps it on every rank.\n"
        "ZeRO lets each of n ranks keep an n-th: of the optimizer (stage 1), the gradients (2), the parameters (3)."
    )
    rows, billions = [], 7.5e9
    for stage in STAGES:
        total = sum(formula(stage, 64).values()) * billions / 1e9
        rows.append(
            (stage, ["2 + 2 + K", "2 + 2 + K / n", "2 + (2 + K) / n", "(2 + 2 + K) / n"][stage], f"{total:.1f}")
        )
    report.table(
        f"7.5 billion parameters on n = 64 ranks ({PREDICTED}, the paper's figure 1)",
        [("stage", "right"), ("bytes a parameter", "left"), ("GB a rank (1e9 bytes)", "right")],
        rows,
    )


# --- 2. memory -------------------------------------------------------------------------------------------------------


def hold(report, config, world, xp):
    """Train two steps in float16 with float32 master weights at each stage, and count what each rank then holds."""
    report.heading("2  What a rank holds")
    config = replace(config, dtype="float16", dropout=0.0)
    count = sum(p.size for p in GPT(config).parameters())
    tokens = rng.integers(config.vocab_size, 9, world.rank, "lesson").reshape(1, 9) % config.vocab_size
    rows, result = [], []
    with report.progress("stage", len(STAGES)) as advance:
        for stage in STAGES:
            model = ZeRO(GPT(config).to(xp), DeviceMesh(world), stage, master_dtype=np.float32)
            optimizer = AdamW(model.parameters())
            for _ in range(2):
                model.zero_grad()
                loss = model.loss(tokens[:, :-1], tokens[:, 1:])
                activations, gathered = saved_bytes(loss), held_bytes(model, optimizer)["gathered"]
                loss.backward()
                optimizer.step()
            held = held_bytes(model, optimizer)
            own = np.array([[*(held[kind] for kind in KINDS), gathered, activations]])
            table = all_gather(own, world, sizes=[1] * world.size)
            padding = len(model.units) * 16  # every unit is cut by whole elements: at most one of them more a rank
            predicted = {kind: of * count for kind, of in formula(stage, world.size).items()}
            for i, kind in enumerate(KINDS):
                largest = int(table[:, i].max())
                if abs(largest - predicted[kind]) > 0.01 * predicted[kind] + padding:
                    raise SystemExit(f"minipar: stage {stage} holds {largest} B of {kind}, not {predicted[kind]:.0f}.")
            most = table.max(axis=0)
            cells = (f"{predicted[kind] / count:.2f} / {most[i] / count:.2f}" for i, kind in enumerate(KINDS))
            total, all_ = sum(predicted.values()), int(most[:3].sum())
            rows.append((stage, *cells, f"{total / count:.2f} / {all_ / count:.2f}", f"{all_ / 2**20:.2f} MiB",
                         f"{most[3] / count:.2f}", f"{most[4] / 2**20:.2f} MiB"))  # fmt: skip
            result.append({"stage": stage, "predicted": predicted, "gathered": int(most[3]),
                           "activations": int(most[4]), **dict(zip(KINDS, most.tolist(), strict=False))})  # fmt: skip
            advance(f"stage {stage}")
    report.table(
        f"float16 with float32 masters, {count:,} parameters, {world.size} rank{'s' * (world.size > 1)}:\n"
        f"bytes a parameter on the rank that holds most, {PREDICTED} / {COUNTED}",
        [("stage", "right"), *((kind, "right") for kind in KINDS), ("together", "right"), ("", "right"),
         ("and gathered in a step", "right"), ("activations", "right")],
        rows,
    )  # fmt: skip
    report.print(
        "All within 1 % of the formula and the rounding to whole elements. What stage 3 gathers in a step comes on\n"
        "top: two layers at a time and what belongs to no layer, here the embeddings; of a deeper model it is less.\n"
        "Activations are nobody else's: ZeRO does not touch them."
    )
    report.figures["memory"] = {"parameters": count, "stages": result}
    return result


# --- 3. communication ------------------------------------------------------------------------------------------------


def volume_of(units, stage, itemsize, comm):
    """Bytes of parameters and gradients that this rank sends in one step, by a ring; units: [elements of each rank]."""
    total = 0
    for sizes in units:
        if stage == 0:
            total += all_reduce_traffic(sum(sizes), itemsize, comm.size, comm.rank).bytes
        elif comm.size > 1:
            gather = all_gather_traffic(sizes, itemsize, comm.rank).bytes
            total += reduce_scatter_traffic(sizes, itemsize, comm.rank).bytes + gather * (2 if stage == 3 else 1)
    return total


def bookkeeping(parameters, comm):
    """What DataParallel sends besides: who has how many targets, the mean loss, and which parameters were used."""
    if comm.size == 1:
        return 0
    counts = all_gather_traffic([2] * comm.size, 8, comm.rank)
    return (counts + all_reduce_traffic(1 + parameters, 8, comm.size, comm.rank)).bytes


def make(config, stage, world, xp):
    model = ZeRO(GPT(config).to(xp), DeviceMesh(world), stage)
    return model, AdamW(model.parameters(), lr=1e-3)


def own_part(corpus, step, samples, config, world):
    batch = corpus.batch(step, samples * world.size, config.context)
    return tuple(x[samples * world.rank : samples * (world.rank + 1)] for x in batch)


def train_step(model, optimizer, part):
    recorder = current().recorder or Recorder(0)
    model.zero_grad()
    with recorder.region("forward", "forward"):
        loss = model.loss(*part)
    with recorder.region("backward", "backward"):
        loss.backward()
    with recorder.region("optimizer", "AdamW"):
        optimizer.step()
        model.publish()
    return loss.item()


def send(report, config, corpus, samples, world, xp):
    report.heading("3  What a rank sends")
    rows, result, part = [], [], own_part(corpus, 0, samples, config, world)
    for stage in STAGES:
        model, optimizer = make(config, stage, world, xp)
        train_step(model, optimizer, part)
        before = world.sent.bytes
        train_step(model, optimizer, part)
        counted = world.sent.bytes - before
        named = list(model.named_parameters())
        units = [unit.sizes for unit in model.units]
        predicted = volume_of(units, stage, np.dtype(config.dtype).itemsize, world) + bookkeeping(len(named), world)
        if counted != predicted:
            raise SystemExit(f"minipar: stage {stage} sends {counted} bytes, not {predicted}.")
        first = result[0]["bytes"] if result else counted
        times = counted / first if first else 1.0
        paper = "1.5x" if stage == 3 else "1x"
        rows.append((stage, ["all-reduce gradients", "reduce-scatter gradients, all-gather parameters",
                             "the same", "the same, and all-gather once more"][stage], f"{predicted:,}", f"{counted:,}",
                     f"{times:.2f}x", paper))  # fmt: skip
        result.append({"stage": stage, "bytes": counted, "predicted": predicted, "times": times})
    report.table(
        f"Bytes that rank 0 sends in a step of {config.dtype}",
        [("stage", "right"), ("what", "left"), (PREDICTED, "right"), (COUNTED, "right"), ("times stage 0", "right"),
         ("paper", "right")],
        rows,
    )  # fmt: skip
    report.print(
        "An all-reduce is a reduce-scatter and an all-gather; stages 1 and 2 do the optimizer's step in between, on\n"
        "what each rank owns, so the saving of memory is free. Stage 3 has dropped the parameters before the backward\n"
        "pass comes to them, and gathers them a second time."
    )
    report.figures["volume"] = result
    return result


# --- 4. the same numbers ---------------------------------------------------------------------------------------------


def learn(report, config, corpus, samples, world, xp):
    report.heading("4  Do they learn the same?")
    runs, states, equal = [], [], []
    with report.progress("step", len(STAGES) * report.args.steps) as advance:
        for stage in STAGES:
            model, optimizer = make(config, stage, world, xp)
            losses = []
            for step in range(report.args.steps):
                current().step = step
                losses.append(train_step(model, optimizer, own_part(corpus, step, samples, config, world)))
                advance(f"stage {stage}: loss {losses[-1]:.3f}")
            runs.append(losses)
            states.append(full_state(model)["parameters"])
            equal.append(stage == 3 or replicas_equal(model.model, world))
    rows, figures = [], []
    for stage in STAGES:
        off = max(relative_error(states[stage][name], states[0][name]) for name in states[0])
        loss = f"{runs[stage][-1]:.4f}" if runs[stage] else "-"
        ranks = "nothing is kept twice" if stage == 3 else "bitwise equal" if equal[stage] else "DIFFERENT"
        rows.append((stage, loss, report.sparkline(runs[stage], 30) if runs[stage] else "", f"{off:.1e}", ranks))
        figures.append({"stage": stage, "losses": runs[stage], "parameter_relative_error": off,
                        "replicas_equal": bool(equal[stage])})  # fmt: skip
    report.table(
        f"{report.args.steps} steps ({MEASURED})",
        [("stage", "right"), ("last loss", "right"), ("loss", "left"), ("parameters against stage 0", "right"),
         ("between ranks", "left")],
        rows,
    )  # fmt: skip
    report.figures["training"] = figures


# --- 5. time ---------------------------------------------------------------------------------------------------------


def see(report, config, corpus, samples, world, xp):
    """Step times of all stages in turn, and the timeline of a step in stage 3: on rank 0, None elsewhere."""
    report.heading("5  What it costs in time")
    part = own_part(corpus, 0, samples, config, world)
    sides = [make(config, stage, world, xp) for stage in STAGES]
    times = [[] for _ in STAGES]
    for _ in range(ROUNDS + 1):
        for stage, side in enumerate(sides):
            world.barrier("barrier between measurements")
            start = time.perf_counter()
            train_step(*side, part)
            times[stage].append(time.perf_counter() - start)
    own = np.array([[median(t[1:]) for t in times]])
    ms = all_gather(own, world, sizes=[1] * world.size).max(axis=0) * 1e3
    report.table(
        f"Step time on {world.size} ranks, median of {ROUNDS}, the slowest rank ({MEASURED})",
        [("stage", "right"), ("ms", "right"), ("times stage 0", "right")],
        [(stage, f"{t:.1f}", f"{t / ms[0]:.2f}x") for stage, t in enumerate(ms)],
    )
    report.figures["step_ms"] = ms.tolist()
    world.barrier()
    recorder = current().recorder = Recorder(world.rank)
    train_step(*sides[3], part)
    current().recorder = None
    timeline = Timeline.gather(world, recorder)
    if timeline:
        report.print("Stage 3. While a layer computes, the communication stream gathers the next one:")
        report.timeline(timeline)
    return timeline


# --- 6. questions ----------------------------------------------------------------------------------------------------


def largest(stage, ranks, memory=80e9):
    """Parameters of the largest model whose states fit into so many bytes a rank."""
    return memory / sum(formula(stage, ranks).values())


def ask(report, world):
    report.heading("6  Three questions (think first; the answers are computed)")
    fits = [largest(stage, 8) / 1e9 for stage in STAGES]
    report.print(
        "a) What is the largest model whose states fit 8 GPUs of 80 GB, at each stage?\n   "
        + ", ".join(f"{x:.0f}" for x in fits)
        + " billion parameters, before a single activation is kept."
    )
    most = [largest(stage, 1e12) / 1e9 for stage in STAGES[:3]]
    report.print(
        "b) And with any number of GPUs?\n   "
        + ", ".join(f"{x:.0f}" for x in most)
        + " billion: what is kept whole sets the limit. In stage 3 there is none."
    )
    rate, psi = 25e9, 7.5e9
    extra = 2 * psi / rate  # 2 bytes for each parameter, once more
    report.print(
        "c) How much longer does stage 3 take for 7.5 billion parameters at 25 GB/s a rank, if nothing is hidden?\n"
        f"   One all-gather more of 15 GB: {extra:.1f} s a step. It hides behind computation that takes longer:\n"
        "   large batches make stage 3 free, and small ones do not."
    )
    report.figures["answers"] = {"largest_on_8_billions": fits, "largest_on_any_billions": most,
                                 "stage_3_extra_seconds": extra}  # fmt: skip


# --- the picture -----------------------------------------------------------------------------------------------------


def draw(report, memory, volume, timeline):
    """figures/zero.png and .svg: bytes held and sent by stage, beside the timeline of a step in stage 3."""
    from minipar.trace import figure

    count, ranks = report.figures["memory"]["parameters"], report.figures["ranks"]

    def paint(picture):
        axes = picture.subplot_mosaic(
            [["held", "time"], ["sent", "time"]], width_ratios=[1, 2.1], height_ratios=[1.7, 1]
        )
        held, sent, bottom = axes["held"], axes["sent"], np.zeros(4)
        for kind, colour in zip(KINDS, ("#56B4E9", "#D55E00", figure.COLOURS["optimizer"]), strict=True):
            values = np.array([row[kind] / count for row in memory])
            held.bar(STAGES, values, bottom=bottom, color=colour, label=kind)
            bottom += values
        for stage, row in enumerate(memory):
            predicted = sum(row["predicted"].values()) / count
            held.plot([stage - 0.45, stage + 0.45], [predicted] * 2, "k--", linewidth=2,
                      label=None if stage else "formula")  # fmt: skip
            held.text(stage, bottom[stage] + 0.4, f"{bottom[stage]:.1f}", ha="center")
        held.set_ylim(0, 19)
        held.set_ylabel("bytes a parameter")
        held.set_title("Held by each rank (counted)")
        held.legend(frameon=False, fontsize=13)
        sent.bar(STAGES, [row["times"] for row in volume], color=figure.COLOURS["communication"])
        for row in volume:
            sent.text(row["stage"], row["times"] + 0.05, f"{row['times']:.2f}x", ha="center")
        sent.set_ylim(0, 2)
        sent.set_ylabel("over stage 0")
        sent.set_title("Sent in a step (counted)")
        sent.set_xlabel("ZeRO stage")
        for panel in (held, sent):
            panel.set_xticks(STAGES)
        figure.draw_timeline(axes["time"], timeline, f"A step in stage 3: {ranks} ranks on {report.cores} cores")

    report.draw(paint, "zero")


if __name__ == "__main__":
    main(lesson, parser(__doc__, SIZES, steps=20))
