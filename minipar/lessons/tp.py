"""Tensor parallelism: what is gained, and what is paid, when every layer is split over several ranks?

    mpirun -n 4 python -m minipar.lessons.tp          four processes
    python -m minipar.lessons.tp                      four threads of one process, no MPI needed

A small GPT reads the Python standard library's own sources. The lesson predicts the bytes that the split model must
send, proves that it computes the whole model's numbers, trains it, and sets its speedup beside the timeline of a step.
"""

import time
from dataclasses import asdict, replace
from statistics import median

import numpy as np

from minipar import arrays
from minipar.autograd import no_grad, saved_bytes
from minipar.collectives import all_gather
from minipar.collectives.ring import all_reduce_traffic
from minipar.comm import NullCommunicator
from minipar.context import current
from minipar.data import ByteCorpus
from minipar.lessons.report import COUNTED, MEASURED, PREDICTED, Report, main, parser
from minipar.nn import GPT, GPTConfig
from minipar.optim import AdamW
from minipar.parallel import DeviceMesh, equivalent, replicas_equal, tensor_parallel
from minipar.trace import Recorder, Timeline

SIZES = {  # name: (model, samples a batch)
    "tiny": (GPTConfig(context=16, width=32, layers=2, heads=4), 4),
    "small": (GPTConfig(), 8),
    "medium": (GPTConfig(context=256, width=512, layers=6, heads=8), 8),
}
ROUNDS = 7  # timed steps for each number of ranks, taken in turn


def lesson(world, args):
    config, samples = SIZES[args.size]
    config = replace(config, dtype=args.dtype, dropout=args.dropout, seed=args.seed)
    report, xp = Report(world, args, "tp"), arrays.device(args.device)
    world.preferred["all_reduce"] = "ring"  # the one whose messages are easy to count, and to see
    corpus = ByteCorpus(args.text, seed=args.seed)
    current().seed = args.seed
    # Before anything is printed: a text that is too short, or an impossible split, ends here in one sentence.
    corpus.batch(0, samples, config.context), corpus.held_out_batch(samples, config.context)
    model = tensor_parallel(GPT(config), DeviceMesh(world, tp=world.size)).to(xp)

    report.machine()
    show_split(report, config, model)
    predicted = predict(report, config, samples, world)
    prove(report, config, corpus.batch(0, samples, config.context), world, xp)
    train(report, config, model, corpus, samples, world)
    timeline = one_step(report, model, corpus.batch(1, samples, config.context), predicted, world)
    speedups = measure(report, config, corpus.batch(2, samples, config.context), world, xp)
    ask(report, config, samples, predicted["one step"], speedups, world)
    if timeline and not args.no_figure:
        report.draw_speedup_and_timeline(speedups, timeline, "Tensor parallelism", "tp")
    report.save()


# --- 1. what is split ------------------------------------------------------------------------------------------------


def show_split(report, config, model):
    report.heading("1  What is split, and why")
    report.print(
        "A layer's matrices are cut so that what lies between the cuts needs no other rank: the first of two by\n"
        "columns, the second by rows, attention by heads, the vocabulary by rows. Layer norms and position\n"
        "embeddings are small: every rank keeps them whole."
    )
    split = {
        "qkv": "columns, by head",
        "attn.proj": "rows, by head",
        "fc": "columns",
        "mlp.proj": "rows",
        "wte": "rows",
    }
    rows = []
    for (name, part), (_, whole) in zip(model.named_parameters(), GPT(config).named_parameters(), strict=True):
        if name.startswith(("blocks.0.", "wte", "wpe")) and part.ndim == 2:
            how = next((text for key, text in split.items() if key in name), "whole on every rank")
            rows.append((name, shape(whole), shape(part), how))
    report.table("Matrices (inputs x outputs)", [("parameter", "left"), ("whole", "right"), ("rank 0 has", "right"),
                 ("cut by", "left")], rows)  # fmt: skip


def shape(parameter):
    return " x ".join(map(str, parameter.shape))


# --- 2. what it must cost --------------------------------------------------------------------------------------------


def bytes_sent(config, samples, comm):
    """Bytes that this rank sends in one training step, by where (Shoeybi et al. 2019, section 3)."""
    itemsize, tokens = np.dtype(config.dtype).itemsize, samples * config.context
    once, peak, sums = (
        all_reduce_traffic(n, itemsize, comm.size, comm.rank).bytes for n in (tokens * config.width, tokens, 2 * tokens)
    )
    loss = peak + sums
    return {
        "one layer, forward": 2 * once,
        "one layer, backward": 2 * once,
        "embedding, forward": once,
        "head, backward": once,
        "loss (3 numbers a token)": loss,
        "one step": (4 * config.layers + 2) * once + loss,
    }


def predict(report, config, samples, world):
    """Print and return what bytes_sent says, and where the formula comes from."""
    predicted, n = bytes_sent(config, samples, world), world.size
    size = samples * config.context * config.width * np.dtype(config.dtype).itemsize
    report.heading("2  What it must cost")
    report.print(
        "The cuts cost a layer two all-reduces forward and two backward, each of batch x time x width numbers:\n"
        f"S = {samples} x {config.context} x {config.width} x {np.dtype(config.dtype).itemsize} bytes = {mib(size)}.\n"
        f"For each of them every rank of a ring of n = {n} sends 2 (n - 1) / n x S = "
        f"{mib(predicted['embedding, forward'])}."
    )
    rows = [(where, f"{count:,}", mib(count)) for where, count in predicted.items()]
    report.table(f"Bytes that rank 0 sends ({PREDICTED})", [("where", "left"), ("bytes", "right"), ("", "right")], rows)
    report.figures["predicted"] = {"bytes_sent_per_step": predicted["one step"]}
    return predicted


def mib(count):
    return f"{count / 2**20:.2f} MiB"


# --- 3. is it the same model? ----------------------------------------------------------------------------------------


def prove(report, config, batch, world, xp):
    report.heading("3  Is it the same model?")
    if compare(report, config, batch, world, xp):
        return
    report.print("Is that rounding, or a mistake? float64 decides.")
    if config.dtype == "float64" or not compare(report, replace(config, dtype="float64"), batch, world, xp):
        raise SystemExit("minipar: the split model is NOT the whole one.")


def compare(report, config, batch, world, xp):
    """Print how far the split model is from the whole one; returns whether that is near enough for the dtype."""
    parallel = tensor_parallel(GPT(config), DeviceMesh(world, tp=world.size)).to(xp)
    result = equivalent(GPT(config).to(xp), parallel, batch, world)
    report.print(
        f"Against the whole model on one process, {config.dtype}, {result.steps} steps of SGD ({MEASURED}):\n"
        f"  loss             largest relative error {result.loss_relative_error:.1e}\n"
        f"  gradients        largest relative error {result.gradient_relative_error:.1e} ({result.worst_parameter})\n"
        f"  parameters       largest relative error {result.parameter_relative_error:.1e}\n"
        f"  whole parameters {'bitwise equal' if result.replicated_equal else 'DIFFERENT'} on all ranks"
    )
    loss, gradient = (1e-6, 1e-5) if config.dtype == "float32" else (1e-10, 1e-10)
    same = result.within(loss, gradient)
    verdict = "It is the same model" if same else "That is too far"
    report.print(f"{verdict}: at most {loss:g} was allowed for the loss, {gradient:g} for gradients.")
    report.figures["equality"] = asdict(result)
    return same


# --- 4. training -----------------------------------------------------------------------------------------------------


def train_step(model, optimizer, batch):
    """One step, recorded if the rank has a recorder. Returns the loss and the bytes that the forward pass kept."""
    recorder = current().recorder or Recorder(0)
    model.zero_grad()
    with recorder.region("forward", "forward"):
        loss = model.loss(*batch)
    kept = saved_bytes(loss)
    with recorder.region("backward", "backward"):
        loss.backward()
    with recorder.region("optimizer", "AdamW"):
        optimizer.step()
    return loss.item(), kept


def held_out_loss(model, corpus, samples, context):
    with no_grad():
        loss = model.eval().loss(*corpus.held_out_batch(4 * samples, context)).item()
    model.train()
    return loss


def train(report, config, model, corpus, samples, world):
    report.heading("4  Training")
    optimizer, losses = AdamW(model.parameters(), lr=1e-3), []
    before = held_out_loss(model, corpus, samples, config.context)
    with report.progress("step", report.args.steps) as advance:
        for step in range(report.args.steps):
            current().step = step
            losses.append(train_step(model, optimizer, corpus.batch(step, samples, config.context))[0])
            advance(f"loss {losses[-1]:.3f}")
    after = held_out_loss(model, corpus, samples, config.context)
    same = replicas_equal(model, world)
    if losses:
        report.print(f"Loss in nats a byte ({MEASURED}):  {report.sparkline(losses)}")
        report.print(f"  first step {losses[0]:.3f}, mean of the last {len(losses[-10:])} {np.mean(losses[-10:]):.3f}")
    report.print(f"On text that it never saw: {before:.3f} -> {after:.3f} (guessing gives ln 256 = {np.log(256):.3f})")
    report.print(
        f"After {len(losses)} steps the whole parameters are {'bitwise equal' if same else 'DIFFERENT'} on all ranks."
    )
    report.figures["training"] = {"losses": losses, "held_out_before": before, "held_out_after": after,
                                  "replicated_equal": same}  # fmt: skip


# --- 5. one step under the magnifying glass --------------------------------------------------------------------------


def one_step(report, model, batch, predicted, world):
    """Record one step; returns its timeline on rank 0, None elsewhere."""
    report.heading("5  One step, rank by rank")
    optimizer = AdamW(model.parameters(), lr=1e-3)
    train_step(model, optimizer, batch)
    world.barrier()
    recorder = current().recorder = Recorder(world.rank)
    before = world.sent.bytes
    _, kept = train_step(model, optimizer, batch)
    counted = world.sent.bytes - before
    current().recorder = None
    timeline = Timeline.gather(world, recorder)
    own = [[sum(p.size for p in model.parameters()), kept, counted]]
    everyone = all_gather(np.array(own, np.int64), world, sizes=[1] * world.size).tolist()
    report.print(f"Rank 0 sent {counted:,} bytes ({COUNTED}); {predicted['one step']:,} were {PREDICTED}.")
    report.figures["counted"] = {"bytes_sent_per_step": counted}
    if timeline:
        ranks = []
        for rank, (parameters, activations, sent) in enumerate(everyone):
            share = timeline.shares(rank)
            ranks.append({"rank": rank, "parameters": parameters, "activation_bytes": activations, "bytes_sent": sent,
                          **{f"{kind}_share": value for kind, value in share.items()}})  # fmt: skip
        report.figures["ranks_detail"] = ranks
        report.table(
            f"Each rank ({COUNTED}; shares of the step {MEASURED})",
            [("rank", "right"), ("parameters", "right"), ("activations kept", "right"), ("sent", "right"),
             ("compute", "right"), ("communication", "right"), ("waiting", "right")],
            [(r["rank"], f"{r['parameters']:,}", mib(r["activation_bytes"]), mib(r["bytes_sent"]),
              f"{r['compute_share']:.0%}", f"{r['communication_share']:.0%}", f"{r['waiting_share']:.0%}")
             for r in ranks],
        )  # fmt: skip
        report.timeline(timeline)
    return timeline


# --- 6. the speedup --------------------------------------------------------------------------------------------------


def measure(report, config, batch, world, xp):
    """Step times on 1, 2, 4, ... ranks of this run, in turn, so that all meet the same state of the machine.

    "measured" is the wall clock of a step; "compute" the CPU time of the busiest rank with communication left out.
    """
    report.heading("6  The speedup")
    counts = sorted({n for n in (1, 2, 4, 8, 16, 32) if n < world.size} | {world.size})
    groups = {n: world.split(0 if world.rank < n else None) for n in counts}
    mine = {n: group for n, group in groups.items() if group is not None}
    models = {n: tensor_parallel(GPT(config), {"tp": group}).to(xp) for n, group in mine.items()}
    alone = {n: tensor_parallel(GPT(config), {"tp": NullCommunicator(g.rank, n)}).to(xp) for n, g in mine.items()}
    optimizers = {m: AdamW(m.parameters()) for m in (*models.values(), *alone.values())}
    walls, cpus = {n: [] for n in counts}, {n: [] for n in counts}
    with report.progress("measure", ROUNDS * len(counts)) as advance:
        for _ in range(ROUNDS):
            for n in counts:
                world.barrier("barrier between measurements")
                if n in mine:
                    start = time.perf_counter()
                    train_step(models[n], optimizers[models[n]], batch)
                    walls[n].append(time.perf_counter() - start)
                    start = time.thread_time()
                    train_step(alone[n], optimizers[alone[n]], batch)
                    cpus[n].append(time.thread_time() - start)
                advance(f"{n} rank{'s' * (n > 1)}")
    own = [[median(times[n]) if times[n] else 0.0 for times in (walls, cpus) for n in counts]]
    slowest = all_gather(np.array(own), world, sizes=[1] * world.size).max(axis=0).reshape(2, len(counts))
    tokens = batch[0].size
    rows = [{"ranks": n, "step_ms": wall * 1e3, "tokens_per_second": tokens / wall, "speedup": slowest[0, 0] / wall,
             "compute_ms": cpu * 1e3, "compute_speedup": slowest[1, 0] / cpu}
            for n, wall, cpu in zip(counts, *slowest.tolist(), strict=True)]  # fmt: skip
    report.table(
        f"Step time, median of {ROUNDS} ({MEASURED})",
        [("ranks", "right"), ("step", "right"), ("tokens/s", "right"), ("speedup", "right"),
         ("compute of the busiest rank (CPU time)", "right"), ("speedup of compute alone", "right")],
        [(r["ranks"], f"{r['step_ms']:.0f} ms", f"{r['tokens_per_second']:,.0f}", f"{r['speedup']:.2f}x",
          f"{r['compute_ms']:.0f} ms", f"{r['compute_speedup']:.2f}x") for r in rows],
    )  # fmt: skip
    if report.cores < world.size:
        report.print(
            f"{world.size} ranks share {report.cores} cores here, so the wall clock cannot show more than "
            f"{report.cores}x, whatever is split;\n"
            "the CPU time of a rank shows what a core of its own would make of it."
        )
    report.figures["measured"] = rows
    return rows


# --- 7. questions ----------------------------------------------------------------------------------------------------


def ask(report, config, samples, sent, speedups, world):
    report.heading("7  Three questions (think first; the answers are computed)")
    if world.size == 1:
        report.print("One rank sends nothing and gains nothing: start the lesson with more, as in mpirun -n 4.")
        return
    last, n = speedups[-1], world.size
    wide = replace(config, width=2 * config.width)
    more_bytes = bytes_sent(wide, samples, world)["one step"] / sent
    more_work = wide.multiplications / config.multiplications
    report.print(
        "a) With twice the width, how many more bytes does a step send, and how much more does it compute?\n"
        f"   {more_bytes:.2f} times the bytes, but {more_work:.1f} times the work: wide layers make the split pay."
    )
    link = sent / (last["compute_ms"] / 10 * 1e-3) / 1e9
    report.print(
        "b) Each rank on a core of its own: how fast must a link be for sending to take a tenth of computing?\n"
        f"   {sent / 2**20:.1f} MiB in {last['compute_ms'] / 10:.1f} ms: {link:.2f} GB/s for every rank."
    )
    serial = max(0.0, (n / last["compute_speedup"] - 1) / (n - 1))
    limit = f"{1 / serial:.1f}x" if serial > 1e-3 else "beyond measuring"
    answer = (
        f"   By Amdahl's law {serial:.1%} of the work is done by every rank (layer norms, residuals, the calls):\n"
        f"   with any number of ranks the limit is {limit}. Sequence parallelism splits that part too."
    )
    if serial >= 1:
        answer = "   The pieces are so small that the calls cost more than what they compute: try a larger --size."
    report.print(f"c) Why {last['compute_speedup']:.2f}x for compute alone and not {n}x? What is the limit?\n{answer}")
    report.figures["answers"] = {"bytes_at_twice_the_width": more_bytes, "work_at_twice_the_width": more_work,
                                 "link_gbps_for_a_tenth": link, "serial_share": serial}  # fmt: skip


if __name__ == "__main__":
    main(lesson, parser(__doc__, SIZES, steps=50))
