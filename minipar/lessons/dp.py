"""Data parallelism: how do ranks that each read their own samples train one model, and who waits for whom?

    mpirun -n 4 python -m minipar.lessons.dp      MPI processes
    python -m minipar.lessons.dp                  4 threads

The lesson shows that ranks with different numbers of samples compute what one process computes, hides the exchange of
gradients behind the backward pass, slows one rank down and lets the others take work from it, and starves the ranks of
data; each time it predicts the length of a step, and measures it.
"""

import time
from dataclasses import asdict, replace
from statistics import median

import numpy as np

from minipar import arrays
from minipar.arrays import split_sizes
from minipar.collectives import all_gather, all_reduce
from minipar.collectives.ring import all_reduce_traffic
from minipar.context import current
from minipar.data import ByteCorpus, DistributedSampler, Loader
from minipar.lessons.report import COUNTED, MEASURED, PREDICTED, Report, main, parser
from minipar.nn import GPT, GPTConfig
from minipar.optim import AdamW
from minipar.parallel import DataParallel, DeviceMesh, equivalent, replicas_equal
from minipar.parallel.data import all_reduce_bucket
from minipar.trace import Recorder, Timeline

SIZES = {  # name: (model, samples a rank)
    "tiny": (GPTConfig(context=16, width=32, layers=2, heads=4), 4),
    "small": (GPTConfig(context=64, width=128, layers=4, heads=4), 8),
    "medium": (GPTConfig(context=128, width=256, layers=4, heads=8), 8),
}
ROUNDS = 5
ONE_BUCKET = 1 << 40  # bytes that no gradient reaches


def lesson(world, args):
    config, samples = SIZES[args.size]
    config = replace(config, dtype=args.dtype, dropout=args.dropout, seed=args.seed)
    report, xp = Report(world, args, "dp"), arrays.device(args.device)
    world.preferred["all_reduce"] = "ring"  # whose bytes are counted as messages
    corpus = ByteCorpus(args.text, seed=args.seed)
    current().seed = args.seed
    batch = corpus.batch(0, samples * world.size, config.context)  # a text that is too short ends here in one sentence

    report.machine()
    prove(report, config, batch, world, xp)
    train(report, config, corpus, samples, world, xp)
    shares = [samples] * world.size
    forward, backward, rest = parts_of_a_step(config, own(batch, shares, world), world, xp)
    pictures = {}
    if world.size == 1:
        report.print("\nOne rank has nobody to wait for: start the lesson with more, as in mpirun -n 4.")
    else:
        pictures |= overlap(report, config, batch, world, xp)
        pictures |= straggle(report, config, batch, samples, (forward + backward) / samples, world, xp)
    pictures |= starve(report, config, corpus, samples, forward + backward + rest, world, xp)
    ask(report, config, world)
    if report.speaks and not args.no_figure:
        draw(report, pictures)
    report.save()


def own(batch, shares, world):
    """This rank's samples of a global batch; shares: samples of each rank."""
    first = sum(shares[: world.rank])
    return tuple(x[first : first + shares[world.rank]] for x in batch)


# --- 1. the same model -----------------------------------------------------------------------------------------------


def uneven(samples, ranks):
    """As many samples in all, but not the same for each rank: the first one has one, the last the rest."""
    shares = [samples] * ranks
    shares[0], shares[-1] = (1, 2 * samples - 1) if ranks > 1 else (samples, samples)
    return shares


def prove(report, config, batch, world, xp):
    report.heading("1  Is it the same model?")
    shares = uneven(len(batch[0]) // world.size, world.size)
    report.print(
        "Every rank has the whole model and its own samples; a step adds up all ranks' gradients. The mean over all\n"
        "samples is not the mean of the ranks' means where they count differently: each is scaled by its share.\n"
        f"Here they have {', '.join(map(str, shares))} samples, {len(batch[0])} in all."
    )
    model = DataParallel(GPT(config).to(xp), DeviceMesh(world))
    result = equivalent(GPT(config).to(xp), model, batch, world, part=own(batch, shares, world))
    report.print(
        f"Against one process with all samples, {config.dtype}, {result.steps} steps of SGD ({MEASURED}):\n"
        f"  loss        largest relative error {result.loss_relative_error:.1e}\n"
        f"  gradients   largest relative error {result.gradient_relative_error:.1e} ({result.worst_parameter})\n"
        f"  parameters  {'bitwise equal' if result.replicated_equal else 'DIFFERENT'} on all ranks"
    )
    if not result.within(*((1e-6, 1e-5) if config.dtype == "float32" else (1e-10, 1e-10))):
        raise SystemExit("minipar: the data-parallel model is NOT that of one process.")
    report.figures["equality"] = asdict(result)


# --- 2. training, and what it sends ----------------------------------------------------------------------------------


def train_step(model, optimizer, part, slow=0.0):
    """One step, recorded if the rank has a recorder. slow: seconds that a sample takes longer on this rank."""
    recorder = current().recorder or Recorder(0)
    model.zero_grad()
    with recorder.region("forward", "forward"):
        loss = model.loss(*part)
        time.sleep(slow * len(part[0]) / 3)
    with recorder.region("backward", "backward"):
        time.sleep(slow * len(part[0]) * 2 / 3)
        loss.backward()
    with recorder.region("optimizer", "AdamW"):
        optimizer.step()
    return loss.item()


def make(config, world, xp, **options):
    model = DataParallel(GPT(config).to(xp), DeviceMesh(world), **options)
    return model, AdamW(model.parameters(), lr=1e-3)


def train(report, config, corpus, samples, world, xp):
    report.heading("2  Training")
    model, optimizer = make(config, world, xp)
    losses, shares = [], [samples] * world.size
    sent = world.sent.bytes
    with report.progress("step", report.args.steps) as advance:
        for step in range(report.args.steps):
            current().step = step
            batch = corpus.batch(step, samples * world.size, config.context)
            sent = world.sent.bytes
            losses.append(train_step(model, optimizer, own(batch, shares, world)))
            sent = world.sent.bytes - sent
            advance(f"loss {losses[-1]:.3f}")
    same = replicas_equal(model, world)
    gradients = sum(p.data.nbytes for p in model.parameters())
    if losses:
        predicted = sum(
            all_reduce_traffic(bucket.flat.size, bucket.flat.itemsize, world.size, world.rank).bytes
            for bucket in model.buckets
        )
        report.print(f"Loss in nats a byte ({MEASURED}):  {report.sparkline(losses)}  {losses[-1]:.3f} at last")
        report.print(
            f"A step's gradients are {gradients / 2**20:.2f} MiB, in {len(model.buckets)} bucket(s). A ring sends "
            f"2 (n - 1) / n of that:\n{predicted:,} bytes from rank 0 ({PREDICTED}); {sent:,} were sent ({COUNTED}), "
            "with numbers of targets and losses."
        )
        report.figures["bytes_sent_per_step"] = {"predicted": predicted, "counted": sent}
    report.print(
        f"After {len(losses)} steps the parameters are {'bitwise equal' if same else 'DIFFERENT'} on all ranks."
    )
    report.figures["training"] = {"losses": losses, "replicas_equal": same}


def parts_of_a_step(config, part, world, xp):
    """(forward, backward, rest) in seconds, of ranks that compute all at once and exchange nothing; the slowest's."""
    model, times = GPT(config).to(xp), []
    optimizer = AdamW(model.parameters())
    for _ in range(ROUNDS):
        world.barrier("barrier between measurements")
        recorder = current().recorder = Recorder(world.rank)
        train_step(model, optimizer, part)
        current().recorder = None
        seconds = {span.name: span.end - span.start for span in recorder.spans}
        times.append([seconds[name] for name in ("forward", "backward", "AdamW")])
    return all_reduce(np.median(times[1:], axis=0), world, "max", operation="slowest parts").tolist()


def measure(world, sides, rounds=ROUNDS):
    """{name: the slowest rank's median seconds} of the functions `sides`, in turn, after one round to warm up."""
    times = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, run in sides.items():
            world.barrier("barrier between measurements")
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    own_ = np.array([median(t[1:]) for t in times.values()])
    slowest = all_reduce(own_, world, "max", operation="slowest")
    return dict(zip(sides, slowest.tolist(), strict=True))


def record(world, run):
    """The Timeline of one run() on all ranks: on rank 0, None elsewhere."""
    world.barrier("barrier before a recording")
    recorder = current().recorder = Recorder(world.rank)
    run()
    current().recorder = None
    return Timeline.gather(world, recorder)


# --- 3. overlap ------------------------------------------------------------------------------------------------------


class SlowLink:
    """all_reduce_bucket over a slower link: for each byte that a ring sends it sleeps 1 / rate seconds."""

    def __init__(self, rate):
        self.rate = rate

    def seconds(self, bucket, comm):
        flat = bucket.flat
        return all_reduce_traffic(flat.size, flat.itemsize, comm.size, 0).bytes / self.rate

    def __call__(self, bucket, comm, operation):
        recorder = current().recorder or Recorder(0)
        result = all_reduce_bucket(bucket, comm, operation)
        with recorder.region("communication", f"{operation} (slow link)"):
            time.sleep(self.seconds(bucket, comm))
        return result


def step_length(forward, backward, rest, sends):
    """Seconds of a step whose buckets take `sends` to exchange, one after another, as predicted.

    Gradients come evenly over the backward pass, so a bucket is complete when as much of it has passed as of the bytes.
    """
    total, ready, free = sum(sends), 0.0, 0.0
    for seconds in sends:
        ready += seconds / total * backward
        free = max(free, ready) + seconds
    return forward + max(backward, free) + rest


def overlap(report, config, batch, world, xp):
    """Timelines without and with overlap, of ranks that have a core each; {} on the other ranks."""
    report.heading("3  Hiding the exchange")
    ranks = min(world.size, max(2, report.cores))
    group = world.split(0 if world.rank < ranks else None)
    shares = split_sizes(len(batch[0]), ranks)
    pictures = overlap_in(report, config, own(batch, shares, group), group, xp) if group else {}
    world.barrier("barrier for those who did not take part")
    return pictures


def overlap_in(report, config, part, group, xp):
    forward, backward, rest = parts_of_a_step(config, part, group, xp)
    gradients = sum(p.data.nbytes for p in GPT(config).parameters())
    link = SlowLink(all_reduce_traffic(gradients, 1, group.size, 0).bytes / (0.6 * backward))
    report.print(
        f"On {group.size} ranks forward takes {forward * 1e3:.0f} ms, backward {backward * 1e3:.0f} ms, the optimizer "
        f"{rest * 1e3:.0f} ms ({MEASURED}). To have something to hide,\n"
        f"the link is slowed down, by sleeping, to {link.rate / 1e6:.0f} MB/s: the exchange takes 60 % of backward.\n"
        "Gradients are sent in buckets, each as soon as its last one has come; only what is still under way at the\n"
        "end is waited for."
    )
    steps, rows, figures, pictures = {}, [], [], {}
    for name, bucket_bytes in (("no overlap", ONE_BUCKET), ("few", gradients // 3), ("more", gradients // 8)):
        side = make(config, group, xp, bucket_bytes=bucket_bytes, reduce=link)
        train_step(*side, part)
        steps[name] = side
    times = measure(group, {name: lambda side=side: train_step(*side, part) for name, side in steps.items()})
    for name, side in steps.items():
        sends = [link.seconds(bucket, group) for bucket in side[0].buckets]
        predicted, more = step_length(forward, backward, rest, sends), times[name] - forward - backward - rest
        rows.append(
            (name, len(sends), f"{predicted * 1e3:.0f} ms", f"{times[name] * 1e3:.0f} ms", f"{more * 1e3:.0f} ms")
        )
        figures.append({"name": name, "buckets": len(sends), "predicted_ms": predicted * 1e3,
                        "measured_ms": times[name] * 1e3})  # fmt: skip
    report.table(
        f"A step of {group.size} ranks on the slow link",
        [("", "left"), ("buckets", "right"), (PREDICTED, "right"), (MEASURED, "right"), ("above computing", "right")],
        rows,
    )
    report.print(
        "The prediction knows nothing of what an exchange costs besides: here it takes processor time and Python's\n"
        "lock from the backward pass, the more the more buckets there are. So they should be few, and large enough."
    )
    for name, title in (("no overlap", "One bucket: no overlap"), ("few", "Buckets: overlap")):
        tries = [record(group, lambda name=name: train_step(*steps[name], part)) for _ in range(ROUNDS)]
        pictures[title] = min(tries, key=lambda timeline: timeline.end) if group.rank == 0 else None
    if pictures["Buckets: overlap"]:
        report.print(f"With overlap, the shortest of {ROUNDS} steps:")
        report.timeline(pictures["Buckets: overlap"])
    report.figures["overlap"] = {"ranks": group.size, "link_MB_per_s": link.rate / 1e6, "rows": figures}
    return pictures


# --- 4. the slowest rank ---------------------------------------------------------------------------------------------


def balanced(samples, seconds):
    """Samples for each rank, `samples` in all, so that all take as long: in proportion to 1 / seconds a sample."""
    speed = 1 / np.asarray(seconds)
    ideal = samples * speed / speed.sum()
    shares = np.floor(ideal).astype(int)
    for rank in np.argsort(shares - ideal, kind="stable")[: samples - shares.sum()]:  # what was rounded down most
        shares[rank] += 1
    return shares.tolist()


def straggle(report, config, batch, samples, per_sample, world, xp):
    report.heading("4  The slowest rank sets the pace")
    slow = 3 * per_sample if world.rank == world.size - 1 else 0.0
    even = [samples] * world.size
    model, optimizer = make(config, world, xp)
    plain = GPT(config).to(xp)
    step = lambda shares, slow: train_step(model, optimizer, own(batch, shares, world), slow)  # noqa: E731

    def alone():  # what a rank computes when it waits for nobody
        plain.zero_grad()
        loss = plain.loss(*own(batch, even, world))
        loss.backward()
        time.sleep(slow * samples)

    seconds = []
    for _ in range(ROUNDS):
        world.barrier("barrier between measurements")
        start = time.perf_counter()
        alone()
        seconds.append((time.perf_counter() - start) / samples)
    seconds = all_gather(np.array([median(seconds[1:])]), world, sizes=[1] * world.size)
    shares = balanced(samples * world.size, seconds)
    times = measure(world, {"no straggler": lambda: step(even, 0.0), "straggler": lambda: step(even, slow),
                            "balanced": lambda: step(shares, slow)})  # fmt: skip
    longest = {"straggler": max(even * seconds), "balanced": max(shares * seconds)}
    predicted = longest["balanced"] / longest["straggler"]
    report.print(
        f"Rank {world.size - 1} now needs {slow_factor(seconds):.1f} times as long for a sample as the others "
        f"({MEASURED}; it sleeps). All wait for it\nin every step. Whoever measures how fast ranks are can deal out "
        "the samples so that all end together:\nthe gradient stays that of the same batch, as section 1 has shown."
    )
    report.table(
        f"{samples * world.size} samples a step on {world.size} ranks",
        [("", "left"), ("samples of each rank", "left"), (f"step ({MEASURED})", "right")],
        [("no straggler", shown(even), f"{times['no straggler'] * 1e3:.0f} ms"),
         ("straggler", shown(even), f"{times['straggler'] * 1e3:.0f} ms"),
         ("balanced", shown(shares), f"{times['balanced'] * 1e3:.0f} ms")],
    )  # fmt: skip
    report.print(
        f"Balanced over straggler: {predicted:.2f} ({PREDICTED}: the largest of samples x seconds a sample, for each), "
        f"{times['balanced'] / times['straggler']:.2f} ({MEASURED})."
    )
    if report.cores < world.size:
        report.print("A rank that sleeps leaves its core to the others: with a core for each, they gain less or more.")
    report.figures["straggler"] = {
        "seconds_a_sample": seconds.tolist(), "shares": shares, "predicted_ratio": predicted,
        **{f"{name.replace(' ', '_')}_ms": t * 1e3 for name, t in times.items()},
    }  # fmt: skip
    return {
        f"Rank {world.size - 1} is slow": record(world, lambda: step(even, slow)),
        "Samples by measured speed": record(world, lambda: step(shares, slow)),
    }


def slow_factor(seconds):
    return seconds[-1] / np.median(seconds[:-1])


def shown(shares):
    return " ".join(map(str, shares))


# --- 5. starving -----------------------------------------------------------------------------------------------------


def starve(report, config, corpus, samples, step_seconds, world, xp):
    report.heading("5  Starved ranks")
    delay, batches = 2 * step_seconds, 5
    workers = {"1 worker": 1, "4 workers": 4}
    report.print(
        f"A step takes {step_seconds * 1e3:.0f} ms, but reading its batch {delay * 1e3:.0f} ms (it sleeps, as if it "
        "waited for a disk). One worker thread\nthat reads ahead hides all but the difference; several read several "
        "batches at once."
    )
    samples_of_epoch = samples * world.size * (batches + 4)

    def fetch(share):
        time.sleep(delay)
        return corpus.take(share.indices % corpus.windows(config.context), config.context)

    model, optimizer = make(config, world, xp)
    rows, figures, pictures = [], [], {}
    for name, count in workers.items():
        sampler = DistributedSampler(
            samples_of_epoch, world.rank, world.size, samples * world.size, seed=report.args.seed
        )
        loader = iter(Loader(sampler, fetch, workers=count, ahead=count + 1))

        def some_steps(loader=loader, count=batches):
            for _ in range(count):
                train_step(model, optimizer, next(loader))

        some_steps(count=2)  # the first batch is never there
        world.barrier("barrier before a measurement")
        start = time.perf_counter()
        timeline = record(world, some_steps)
        seconds = (time.perf_counter() - start) / batches
        seconds = float(all_reduce(np.array([seconds]), world, "max", operation="slowest")[0])
        loader.close()
        predicted = max(step_seconds, delay / count)
        rows.append((name, f"{predicted * 1e3:.0f} ms", f"{seconds * 1e3:.0f} ms"))
        figures.append({"workers": count, "predicted_ms": predicted * 1e3, "measured_ms": seconds * 1e3})
        pictures[f"Reading ahead: {name}"] = timeline
    report.table(
        f"A step, mean of {batches}",
        [("loader", "left"), (f"{PREDICTED}: max(step, reading / workers)", "right"), (MEASURED, "right")],
        rows,
    )
    report.print('In the timeline starving looks like waiting for other ranks, but its name is "next batch".')
    report.figures["starving"] = {"step_ms": step_seconds * 1e3, "reading_ms": delay * 1e3, "rows": figures}
    return pictures


# --- 6. questions ----------------------------------------------------------------------------------------------------


def ask(report, config, world):
    report.heading("6  Three questions (think first; the answers are computed)")
    one, many = (step_length(1.0, 2.0, 0.1, [s / k for _ in range(k)]) for k, s in ((1, 1.2), (8, 1.2)))
    huge = step_length(1.0, 2.0, 0.1, [3.0 / 8] * 8)
    report.print(
        "a) Forward takes 1, backward 2, the optimizer 0.1, the exchange 1.2. What do 8 buckets save? And if the\n"
        f"   exchange takes 3?   {one:.2f} becomes {many:.2f}: all but the last bucket is hidden. With 3 it takes "
        f"{huge:.2f}: what is\n   longer than the backward pass cannot hide behind it."
    )
    shares = balanced(32, [1, 1, 1, 4])
    report.print(
        "b) 32 samples on 4 ranks, one of which needs 4 times as long. How are they dealt out, and what is gained?\n"
        f"   {shown(shares)}: the step takes {max(np.multiply(shares, [1, 1, 1, 4]))} instead of {8 * 4} units."
    )
    need = 4 / 25e9 / (6 / 4e14)
    report.print(
        "c) How many tokens a step must a GPU have, so that a ring of 16-bit gradients at 25 GB/s takes as long as\n"
        f"   its work at 4e14 operations a second? 4 P / 25e9 s against 6 P t / 4e14 s: t = {need:,.0f}, for any P."
    )
    report.figures["answers"] = {"one_bucket": one, "eight_buckets": many, "long_exchange": huge, "shares": shares,
                                 "tokens": need}  # fmt: skip


# --- the picture -----------------------------------------------------------------------------------------------------


def draw(report, pictures):
    """figures/dp.png and .svg: the timelines, two by two."""
    from minipar.trace import figure

    def paint(picture):
        panels, handles = picture.subplots(len(pictures) // 2, 2, squeeze=False), {}
        pairs = zip(*[iter(pictures.items())] * 2, strict=True)
        for row, pair in zip(panels, pairs, strict=True):
            end = max(timeline.end for _, timeline in pair)  # what is to be compared has one axis
            for axes, (title, timeline) in zip(row, pair, strict=True):
                drawn = figure.draw_timeline(axes, timeline, title, end, legend=False)
                handles |= {handle.get_label(): handle for handle in drawn}
        picture.legend(handles=list(handles.values()), loc="outside lower center", ncols=len(handles), frameon=False)

    report.draw(paint, "dp", size=(16, 4.2 * (len(pictures) // 2)))


if __name__ == "__main__":
    main(lesson, parser(__doc__, SIZES, steps=30))
