"""Gradient compression: how few bytes can a gradient be, and does the model still learn?

    mpirun -n 4 python -m minipar.lessons.compress      MPI processes
    python -m minipar.lessons.compress                  4 threads

The same small GPT is trained with its gradients whole, in 16 bits, as their largest entries, as thin matrices and as
single bits. The lesson predicts the bytes of every exchange, counts them, and compares what the runs have learned.
"""

import time
from dataclasses import replace
from functools import partial
from statistics import median

import numpy as np

from minipar import arrays, rng
from minipar.arrays import split_sizes
from minipar.collectives import all_reduce
from minipar.collectives.direct import all_to_all_traffic
from minipar.collectives.ring import all_gather_traffic, all_reduce_traffic
from minipar.comm import NullCommunicator
from minipar.context import current
from minipar.data import ByteCorpus
from minipar.lessons.report import COUNTED, MEASURED, PREDICTED, Report, main, parser
from minipar.nn import GPT, GPTConfig
from minipar.optim import SGD, AdamW
from minipar.parallel import DataParallel, DeviceMesh, Half, OneBitAdam, OneBitSign, PowerSGD, TopK, replicas_equal
from minipar.parallel.data import Bucket, all_reduce_bucket

SIZES = {  # name: (model, samples a rank)
    "tiny": (GPTConfig(context=16, width=32, layers=2, heads=4), 2),
    "small": (GPTConfig(context=64, width=128, layers=2, heads=4), 4),
    "medium": (GPTConfig(), 8),
}
EXCHANGES = {  # name: (how it is made for so many steps, what it sends)
    "none": (lambda steps: None, "all numbers, as they are"),
    "bfloat16": (lambda steps: Half("bfloat16"), "all, in 16 bits"),
    "top 1 %": (lambda steps: TopK(0.01), "the largest hundredth, and where they are"),
    "PowerSGD 4": (lambda steps: PowerSGD(4), "P and Q of M = P Q^T, of rank 4"),
    "sign": (lambda steps: OneBitSign(), "a bit a number"),
    "1-bit Adam": (lambda steps: OneBitAdam(warm_up(steps)), "a bit a number, after a quarter of the steps"),
}
LEARNING_RATE, PLAIN_RATE = 1e-3, 0.05  # of AdamW, and of plain SGD


def warm_up(steps):
    return max(1, steps // 4)


def lesson(world, args):
    config, samples = SIZES[args.size]
    config = replace(config, dtype=args.dtype, dropout=args.dropout, seed=args.seed)
    report, xp = Report(world, args, "compress"), arrays.device(args.device)
    world.preferred["all_reduce"] = "ring"  # whose bytes are counted as messages
    corpus = ByteCorpus(args.text, seed=args.seed)
    current().seed = args.seed
    corpus.batch(0, samples * world.size, config.context)  # a text that is too short ends here in one sentence
    model = GPT(config)

    report.machine()
    explain(report, model)
    sizes = count(report, model, world)
    show_error_feedback(report)
    runs = train(report, config, corpus, samples, world, xp)
    plain = forget(report, config, corpus, samples, world, xp)
    pays(report, model, sizes, world)
    ask(report, model)
    if report.speaks and not args.no_figure and args.steps:
        draw(report, runs, plain, sizes)
    report.save()


# --- 1. what is sent -------------------------------------------------------------------------------------------------


def explain(report, model):
    count = sum(p.size for p in model.parameters())
    report.heading("1  Four ways to say less")
    report.print(
        f"After every step {count:,} gradients go through the wire. What is it that one can leave out?\n"
        "  bits       16 instead of 32 for each number, or a single one: its sign, with one scale for many\n"
        "  numbers    only the largest, with their places\n"
        "  rank       a matrix M (a x b) as P (a x r) times Q^T (r x b), from one step of the power method\n"
        "Whatever is left out stays behind on its rank and is added to the next gradient: error feedback."
    )


def predicted_bytes(exchange, shapes, dtype, ranks, rank):
    """Bytes that `rank` sends for one bucket of parameters of these shapes and dtype; exchange None: as it is."""
    elements, itemsize = sum(int(np.prod(shape)) for shape in shapes), dtype.itemsize
    if ranks == 1:
        return 0
    if exchange is None:
        return all_reduce_traffic(elements, itemsize, ranks, rank).bytes
    if isinstance(exchange, TopK):
        k = exchange.count(elements)
        return sum(all_gather_traffic([k] * ranks, of, rank).bytes for of in (4, itemsize))
    if isinstance(exchange, PowerSGD):
        cuts = [exchange.sizes(shape) for shape in shapes]
        left = sum(c[0] * c[2] if c else int(np.prod(shape)) for c, shape in zip(cuts, shapes, strict=True))
        right = sum(c[1] * c[2] for c in cuts if c)
        return sum(all_reduce_traffic(n, max(4, itemsize), ranks, rank).bytes for n in (left, right))
    codes = [exchange.length(size) for size in split_sizes(elements, ranks)]
    table = all_gather_traffic([ranks] * ranks, 8, rank)  # all_to_all tells the sizes first
    return (table + all_to_all_traffic(codes, 1, rank) + all_gather_traffic(codes, 1, rank)).bytes


def count(report, model, world):
    """Exchange one step's gradients in each way; {name: {"bytes", "predicted"}} of rank 0."""
    report.heading("2  Bytes on the wire")
    rows, result = [], {}
    for name, (make, what) in EXCHANGES.items():
        exchange = make(0)
        wrapped = DataParallel(GPT(model.config), DeviceMesh(world), **hook(exchange))
        predicted = exchanged = 0
        for _ in range(2):  # 1-bit Adam is warm after the first
            before = world.sent.bytes
            fake_backward(wrapped, world)
            exchanged = world.sent.bytes - before
        for bucket in wrapped.buckets:
            shapes = [p.shape for p in bucket.views]
            predicted += predicted_bytes(exchange, shapes, bucket.flat.dtype, world.size, world.rank)
        predicted += overhead(wrapped, world)
        result[name] = {"bytes": exchanged, "predicted": predicted}
        factor = result["none"]["bytes"] / exchanged if exchanged else 1.0
        rows.append((name, what, f"{predicted:,}", f"{exchanged:,}", f"{factor:.1f}x"))
    report.table(
        f"One step on {world.size} rank{'s' * (world.size > 1)}, bytes that rank 0 sends",
        [("exchange", "left"), ("sends", "left"), (PREDICTED, "right"), (COUNTED, "right"), ("less by", "right")],
        rows,
    )
    if any(row["bytes"] != row["predicted"] for row in result.values()):
        raise SystemExit("minipar: the bytes counted are not those of the formula.")
    report.print(
        "A hundredth of the numbers is not a hundredth of the bytes: places cost as much as numbers, and every rank\n"
        f"gets the choices of all {world.size}: its saving shrinks as they grow. The others save the same on any\n"
        "number of ranks."
    )
    report.figures["bytes_per_step"] = result
    return result


def hook(exchange):
    return {} if exchange is None else {"reduce": exchange}


def fake_backward(wrapped, world):
    """A step's exchange without its computing: a loss that is a sum over the parameters."""
    wrapped.zero_grad()
    wrapped.average(lambda: sum((p * 0.5).sum() for p in wrapped.parameters()), 1, 1).backward()


def overhead(wrapped, world):
    """What DataParallel sends besides the buckets: the counts, the mean loss, and which parameters were used."""
    if world.size == 1:
        return 0
    counts = all_gather_traffic([2] * world.size, 8, world.rank)
    return (counts + all_reduce_traffic(1 + len(wrapped.parameters()), 8, world.size, world.rank)).bytes


# --- 3. error feedback -----------------------------------------------------------------------------------------------


def feedback_walk(gradients, encode, remember=True):
    """What arrives of a list of gradients, one after another: (sums of what came, what is left behind)."""
    error, came = np.zeros_like(gradients[0]), np.zeros_like(gradients[0])
    for gradient in gradients:
        sent = encode(gradient + error)
        error = gradient + error - sent if remember else error
        came = came + sent
    return came, error


def show_error_feedback(report):
    """Two numbers, of which only the larger may go."""
    report.heading("3  Error feedback, by hand")
    gradients = [np.array([1.0, 0.4])] * 5
    largest = lambda g: np.where(np.abs(g) == np.abs(g).max(), g, 0.0)  # noqa: E731
    with_it, left = feedback_walk(gradients, largest)
    without, _ = feedback_walk(gradients, largest, remember=False)
    show = lambda x: "(" + ", ".join(f"{v:.1f}" for v in x) + ")"  # noqa: E731
    report.print(
        "The gradient is (1.0, 0.4) five times, and each time only the larger number is sent. All of it is "
        f"{show(sum(gradients))}.\n"
        f"  forgetting the rest        {show(without)} has come: the second parameter never learns\n"
        f"  adding it the next time    {show(with_it)} has come, {show(left)} is still on the way"
    )
    report.figures["error_feedback"] = {"sum": sum(gradients).tolist(), "with": with_it.tolist(),
                                        "without": without.tolist(), "left": left.tolist()}  # fmt: skip


# --- 4. does it learn? -----------------------------------------------------------------------------------------------


def run(config, exchange, make_optimizer, corpus, samples, world, xp, steps, advance, remember=True):
    """Train with an exchange; {"losses", "replicas_equal"}. remember False: drop what was left out, every step."""
    model = DataParallel(GPT(config).to(xp), DeviceMesh(world), **hook(exchange))
    optimizer, losses = make_optimizer(model.parameters()), []
    own = slice(samples * world.rank, samples * (world.rank + 1))
    for step in range(steps):
        current().step = step
        tokens, targets = corpus.batch(step, samples * world.size, config.context)
        model.zero_grad()
        loss = model.loss(tokens[own], targets[own])
        loss.backward()
        optimizer.step()
        if not remember:
            exchange.errors.clear()
        losses.append(loss.item())
        advance(f"loss {losses[-1]:.3f}")
    return {"losses": losses, "replicas_equal": replicas_equal(model, world)}


def last(run_):
    """The mean of the last tenth of the losses."""
    losses = run_["losses"]
    return float(np.mean(losses[-max(1, len(losses) // 10) :])) if losses else float("nan")


def train(report, config, corpus, samples, world, xp):
    report.heading("4  Does it learn?")
    steps, runs = report.args.steps, {}
    with report.progress("step", steps * len(EXCHANGES)) as advance:
        for name, (make, _) in EXCHANGES.items():
            freeze = warm_up(steps) if name == "1-bit Adam" else None
            adam = partial(AdamW, lr=LEARNING_RATE, freeze_after=freeze)
            runs[name] = run(config, make(steps), adam, corpus, samples, world, xp, steps, advance)
    if not steps:
        report.print("No steps, no answer.")
        return runs
    rows = [
        (name, f"{last(r):.3f}", f"{last(r) - last(runs['none']):+.3f}",
         "equal" if r["replicas_equal"] else "DIFFERENT", report.sparkline(r["losses"], 30))
        for name, r in runs.items()
    ]  # fmt: skip
    report.table(
        f"Loss in nats a byte after {steps} steps, mean of the last tenth ({MEASURED})",
        [
            ("exchange", "left"),
            ("loss", "right"),
            ("against none", "right"),
            ("ranks bitwise", "left"),
            ("loss", "left"),
        ],
        rows,
    )
    report.print(
        "All with AdamW and one learning rate. Adam divides each gradient by the root of its mean square; signs give\n"
        "all of a piece the same size, so that this tells nothing any more. 1-bit Adam therefore learns the squares\n"
        f"from {warm_up(steps)} whole steps, keeps them, and sends the signs of the mean instead of the gradient's."
    )
    report.figures["training"] = {name: {**r, "last": last(r)} for name, r in runs.items()}
    return runs


def forget(report, config, corpus, samples, world, xp):
    """Plain SGD with all numbers, with the largest hundredth, and with that but no error feedback: {name: run}."""
    report.heading("5  And without error feedback?")
    steps, runs = report.args.steps, {}
    sides = {"none": (None, True), "top 1 %": (TopK(0.01), True), "top 1 %, forgetting the rest": (TopK(0.01), False)}
    sgd = partial(SGD, lr=PLAIN_RATE)
    with report.progress("step", 3 * steps) as advance:
        for name, (exchange, remember) in sides.items():
            runs[name] = run(config, exchange, sgd, corpus, samples, world, xp, steps, advance, remember)
    if steps:
        rows = [(name, f"{last(r):.3f}", report.sparkline(r["losses"], 30)) for name, r in runs.items()]
        report.table(
            f"Plain SGD, loss after {steps} steps ({MEASURED})",
            [("exchange", "left"), ("loss", "right"), ("loss", "left")],
            rows,
        )
        lost = last(runs["top 1 %, forgetting the rest"]) - last(runs["top 1 %"])
        report.print(
            f"Forgetting costs {lost:.3f} nats here: what is small in every step is never sent, though it adds up."
            if lost > 0
            else f"Forgetting does no harm here yet ({lost:.3f} nats): take more --steps."
        )
        report.print(
            "It is for plain SGD that error feedback is proven to cost nothing in the end. With Adam and momentum,\n"
            "too, numbers come late, and these go on in the old direction: there it can do more harm than good."
        )
        report.figures["plain_sgd"] = {name: {**r, "last": last(r)} for name, r in runs.items()}
    return runs


# --- 6. does it pay? -------------------------------------------------------------------------------------------------


LINKS = {"1 Gbit/s": 0.125e9, "10 Gbit/s": 1.25e9, "100 Gbit/s": 12.5e9, "400 Gbit/s": 50e9}


def pays(report, model, sizes, world):
    """What encoding and decoding take on this processor, and what a link must be slower than to be worth it."""
    report.heading("6  Does it pay?")
    null, times = NullCommunicator(world.rank, world.size), {}
    for name, (make, _) in EXCHANGES.items():
        exchange, seconds = make(0) or all_reduce_bucket, []
        bucket = whole_bucket(model)
        for _ in range(5):
            world.barrier("barrier between measurements")
            bucket.flat[...] = rng.normal(bucket.flat.shape, bucket.flat.dtype, "gradients")
            start = time.perf_counter()
            exchange(bucket, null, "exchange")
            seconds.append(time.perf_counter() - start)
        own = np.array([median(seconds[1:])])
        times[name] = float(all_reduce(own, world, "max", operation="slowest")[0])
    rows, figures = [], {}
    for name, seconds in times.items():
        sent = sizes[name]["bytes"]
        cells = [f"{(seconds + sent / rate) * 1e3:,.2f} ms" for rate in LINKS.values()]
        extra, saved = seconds - times["none"], sizes["none"]["bytes"] - sent
        limit = saved / extra if extra > 0 and saved > 0 else None
        rows.append((name, f"{seconds * 1e3:.2f} ms", *cells, f"{limit * 8e-9:.1f} Gbit/s" if limit else ""))
        figures[name] = {"encode_ms": seconds * 1e3, "pays_below_gbit": limit and limit * 8e-9}
    report.table(
        f"An exchange of all gradients: encoding ({MEASURED} here) + bytes / rate of the link ({PREDICTED})",
        [("exchange", "left"), ("encoding", "right"), *((link, "right") for link in LINKS), ("pays below", "right")],
        rows,
    )
    report.print("On a GPU encoding is some tens of times faster, and so are the links; the sum is the same one.")
    report.figures["pays"] = figures


def whole_bucket(model):
    parameters = model.parameters()
    return Bucket(parameters, np.zeros(sum(p.size for p in parameters), parameters[0].dtype))


# --- 7. questions ----------------------------------------------------------------------------------------------------


def ask(report, model):
    report.heading("7  Three questions (think first; the answers are computed)")
    shapes, dtype = [p.shape for p in model.parameters()], np.dtype(np.float32)
    ratio = lambda exchange, n: (  # noqa: E731
        predicted_bytes(None, shapes, dtype, n, 0) / predicted_bytes(exchange, shapes, dtype, n, 0)
    )
    top = {n: ratio(TopK(0.01), n) for n in (2, 8, 64)}
    report.print(
        "a) From how many ranks on does sending the largest hundredth save nothing?\n   "
        + ", ".join(f"{r:.1f} times less on {n} ranks" for n, r in top.items())
        + f": 2 (n - 1) / n x 4 S bytes against (n - 1) x 8 S / 100, even at n = {even_ranks(0.01)}."
    )
    power = {r: ratio(PowerSGD(r), 4) for r in (1, 2, 4)}
    report.print(
        "b) What does twice the rank cost PowerSGD?\n   "
        + ", ".join(f"{x:.1f} times less at rank {r}" for r, x in power.items())
        + ":\n   not quite twice the bytes, since vectors go whole at any rank."
    )
    share = 0.15
    bit = ratio(OneBitSign(), 4)
    total = 1 / (share + (1 - share) / bit)
    report.print(
        f"c) 1-bit Adam sends {bit:.1f} times less after its warm-up. That is {share:.0%} of the steps; and in all?\n"
        f"   1 / (w + (1 - w) / {bit:.1f}) = {total:.1f} times less: the whole steps at the beginning are most of it."
    )
    report.figures["answers"] = {"top_k_even_ranks": even_ranks(0.01), "top_k": {str(n): r for n, r in top.items()},
                                 "power_sgd": {str(r): x for r, x in power.items()}, "one_bit_adam": total}  # fmt: skip


def even_ranks(fraction):
    """Ranks on which TopK sends as much as a ring all-reduce of float32: 2 x 4 / n = 8 fraction."""
    return round(1 / fraction)


# --- the picture -----------------------------------------------------------------------------------------------------


def draw(report, runs, plain, sizes):
    """figures/compress.png and .svg: the loss of every run, beside the bytes that a step sends."""
    from minipar.trace import figure

    def smooth(losses):
        width = max(1, len(losses) // 15)
        return np.convolve(np.pad(losses, (width - 1, 0), mode="edge"), np.ones(width) / width, mode="valid")

    def curves(axes, runs, title, styles):
        for name, r in runs.items():
            axes.plot(smooth(r["losses"]), styles.get(name, "-"), color=colours[name], label=name,
                      linewidth=4 if name == "none" else 2.5)  # fmt: skip
        axes.set_xlabel("step")
        axes.set_title(title)
        axes.legend(frameon=False, fontsize=13)
        axes.grid(alpha=0.3)

    colours = dict(zip(runs, figure.LINES, strict=False))
    colours["top 1 %, forgetting the rest"] = colours["top 1 %"]

    def paint(picture):
        left, middle, right = picture.subplots(1, 3, width_ratios=[1.2, 1, 1.1])
        curves(left, runs, f"AdamW, {report.figures['ranks']} ranks", {})
        curves(middle, plain, "Plain SGD: error feedback", {"top 1 %, forgetting the rest": ":"})
        left.set_ylabel("loss (nats a byte)")
        names = list(runs)[::-1]
        kib = [sizes[name]["bytes"] / 1024 for name in names]
        right.barh(names, kib, color=[colours[name] for name in names])
        for y, (name, x) in enumerate(zip(names, kib, strict=True)):
            factor = sizes["none"]["bytes"] / max(1, sizes[name]["bytes"])
            if name == "none":
                right.text(x, y, f"{x:,.0f} KiB  ", va="center", ha="right", color="white")
            else:
                right.text(x, y, f"  {x:,.0f} KiB, 1 / {factor:.1f}", va="center")
        right.set_xlabel("KiB that a rank sends in a step")
        right.set_title("Counted on the wire")
        right.spines["left"].set_visible(False)
        right.tick_params(axis="y", length=0)

    report.draw(paint, "compress")


if __name__ == "__main__":
    main(lesson, parser(__doc__, SIZES, steps=60))
