"""Collectives: how do ranks add up their arrays, and which way is the fastest at which size?

    mpirun -n 4 python -m minipar.lessons.collectives      MPI processes
    python -m minipar.lessons.collectives                  4 threads

The lesson measures what a message and an addition cost here, predicts from these alone how long every algorithm must
take at every size, runs them, and lays the prediction over the measurement.
"""

import math
import time
from dataclasses import replace

import numpy as np

from minipar import arrays, rng
from minipar.bench import collectives as bench
from minipar.bench import links
from minipar.collectives import all_gather, all_reduce, ring, shared
from minipar.collectives.halving_doubling import largest_power_of_two
from minipar.collectives.tree import reaches
from minipar.comm import NullCommunicator
from minipar.comm.memory import ARENA_BYTES
from minipar.errors import DeviceError
from minipar.lessons.report import COUNTED, MEASURED, PREDICTED, Report, main, parser
from minipar.nn import GPT, GPTConfig

SIZES = {"tiny": 1 << 18, "small": 4 << 20, "large": 64 << 20}  # largest array, in bytes
ALGORITHMS = ["ring", "tree", "halving_doubling", "shared"]


def lesson(world, args):
    report = Report(world, args, "collectives")
    if arrays.device(args.device) is not np:
        raise DeviceError("this lesson measures host memory and messages: leave out --device cuda.")
    n, sizes = world.size, bench.sizes_between(64, SIZES[args.size], 4)
    algorithms = ALGORITHMS + ["native"] * (world.transport == "MPI")

    report.machine()
    explain_ring(report, n)
    counted = count(report, algorithms, world)
    if n == 1:
        report.print("\nOne rank has nobody to talk to: start the lesson with more, as in mpirun -n 4.")
        report.save()
        return
    costs = basic_costs(report, world)
    rows = measure(report, world, sizes, algorithms, args.dtype)
    compare(report, rows, costs, n)
    segments(report, world, SIZES[args.size], args.dtype)
    exposed(report, world, algorithms)
    ask(report, costs, n)
    if report.speaks and not args.no_figure:
        draw(report, rows, costs, n)
    report.figures["counted"] = counted
    report.save()


# --- 1. the ring -----------------------------------------------------------------------------------------------------


def ring_states(n):
    """After each round of a ring all-reduce: states[round][rank][chunk], how many ranks' numbers that chunk holds."""
    state = [[1] * n for _ in range(n)]
    states = [state]
    for round_ in range(2 * (n - 1)):
        new = [list(chunks) for chunks in state]
        for rank in range(n):
            left = (rank - 1) % n
            if round_ < n - 1:  # reduce-scatter: add what comes from the left
                i = (rank - round_ - 2) % n
                new[rank][i] = state[left][i] + 1
            else:  # all-gather: take it as it is
                i = (left - (round_ - n + 1)) % n
                new[rank][i] = state[left][i]
        state = new
        states.append(state)
    return states


def explain_ring(report, n):
    report.heading("1  The ring")
    report.print(
        f"Each of {n} ranks has an array of S bytes, and all want the sum. Cut it into {n} chunks. In every round each "
        "rank\nsends one chunk to its right and gets one from its left: first they are summed up on their way round, "
        "then the\nsums go round once more. A digit says how many ranks' numbers a chunk holds:"
    )
    states = ring_states(n)
    shown = sorted({0, 1, n - 1, len(states) - 1}) if n > 3 else range(len(states))
    report.print("\n        " + "   ".join(f"{f'round {i}':<{2 * n}}" for i in shown))
    for rank in range(n):
        cells = (" ".join(str(count) for count in states[i][rank]) for i in shown)
        report.print(f"rank {rank}  " + "   ".join(f"{cell:<{2 * n}}" for cell in cells))
    report.print(
        "\nEvery rank must give away its numbers once and get the sums once, but for its own n-th part:\n"
        f"2 (n - 1) / n x S = {2 * (n - 1) / n:.2f} S at least. The ring sends exactly that, in 2 (n - 1) = "
        f"{2 * (n - 1)} rounds."
    )


# --- 2. what is sent -------------------------------------------------------------------------------------------------


def formulas(algorithm, n):
    """(rounds, bytes over the busiest rank's link as multiples of S) of an all-reduce by messages on n ranks.

    Thakur, Rabenseifner, Gropp 2005, section 4. Beyond a power of two, halving and doubling has a round before and a
    round after that move the whole array.
    """
    if algorithm == "tree":
        return 2 * len(reaches(n)), 2 * len(reaches(n))
    if algorithm == "halving_doubling":
        inside = largest_power_of_two(n)
        outside = 2 * (n > inside)
        return 2 * (inside.bit_length() - 1) + outside, 2 * (inside - 1) / inside + outside
    return 2 * (n - 1), 2 * (n - 1) / n


def count(report, algorithms, world):
    """All-reduce 1 MiB by each algorithm, and count."""
    report.heading("2  What an all-reduce of S = 1 MiB sends")
    x, rows, counted = np.ones(1 << 18, np.float32), [], {}
    for name in algorithms:
        all_reduce(x, world, algorithm=name)  # the first one also sets up what shared memory needs
        before = replace(world.sent)
        all_reduce(x, world, algorithm=name)
        sent = world.sent.since(before)
        everyone = all_gather(np.array([[sent.rounds, sent.messages, sent.bytes]]), world, sizes=[1] * world.size)
        counted[name] = {"rounds": sent.rounds, "messages": sent.messages, "bytes_sent": everyone[:, 2].tolist()}
        if name == "native":
            rows.append((name, "the library's own affair", "", "", ""))
            continue
        rounds = "2 meetings" if name == "shared" else f"{formulas(name, world.size)[0]}"
        rows.append((name, rounds, sent.rounds, f"{everyone[:, 1].max()}",
                     f"{everyone[:, 2].min() / 2**20:.2f} to {everyone[:, 2].max() / 2**20:.2f} S"))  # fmt: skip
    report.table(
        "Each rank",
        [("algorithm", "left"), (f"rounds, {PREDICTED}", "right"), (f"rounds, {COUNTED}", "right"),
         (f"messages, {COUNTED}", "right"), (f"bytes sent, {COUNTED}", "right")],
        rows,
    )  # fmt: skip
    report.print(
        "shared sends no messages: each rank reads its slice from all memories and writes the sums to all; those\n"
        "bytes are counted. A tree has few rounds but carries the whole array in each; halving and doubling has few\n"
        "rounds and few bytes, but wants a power of two; a ring needs only links between neighbours."
    )
    return counted


# --- 3. what a message and an addition cost --------------------------------------------------------------------------


def basic_costs(report, world):
    """The costs that every prediction is made of, in seconds and seconds a byte; the same on every rank."""
    report.heading("3  What things cost here")
    sizes = bench.sizes_between(8, 4 << 20, 8)
    hop = links.alpha_beta(links.bench_hop(world, sizes, rounds=5))
    round_ = links.alpha_beta(links.bench_round(world, sizes, rounds=5))
    one = np.ones(1, np.float32)
    call = seconds(world, lambda: all_reduce(one, NullCommunicator(0, 2))) + seconds(
        world, lambda: world.agree("a call")
    )
    message, world.check_headers = links.bench_p2p(world, [8], rounds=5)[0]["time_us"], False
    bare, world.check_headers = links.bench_p2p(world, [8], rounds=5)[0]["time_us"], True
    a, b, c = (np.ones(1 << 18, np.float32) for _ in range(3))
    costs = {
        "call": call,
        "hop": hop,
        "round": round_,
        "add": seconds(world, lambda: np.add(a, b, out=c)) / a.nbytes,
        "copy": seconds(world, lambda: np.copyto(c, a)) / a.nbytes,
        "meet": seconds(world, lambda: world.meet("meeting")),
        "cores": report.cores,
        "slots": not world.sees_objects,
    }
    rate = lambda per_byte: f"1 / ({1 / max(per_byte, 1e-15) / 1e9:.1f} GB/s)"  # noqa: E731
    report.table(
        f"Measured: {world.transport}, {world.size} ranks",
        [("", "left"), ("what", "left"), (MEASURED, "right")],
        [("κ", "a call, before anything moves", f"{call * 1e6:.1f} us"),
         ("α", "a hop of a tree: rank 0 sends, rank 1 receives and adds", f"{hop[0] * 1e6:.1f} us"),
         ("β", "each byte of it", rate(hop[1])),
         ("α'", "a round of a ring: all send to the right, receive from the left and add", f"{round_[0] * 1e6:.1f} us"),
         ("β'", "each byte of it", rate(round_[1])),
         ("γ", "each byte added, all ranks at once", rate(costs["add"])),
         ("δ", "each byte copied, all ranks at once", rate(costs["copy"])),
         ("μ", "a meeting of all ranks in shared memory", f"{costs['meet'] * 1e6:.1f} us"),
         ("", "a message of 8 bytes, with and without the header that both sides compare",
          f"{message:.1f} and {bare:.1f} us")],
    )  # fmt: skip
    report.figures["costs"] = {
        "call_us": call * 1e6, "hop_alpha_us": hop[0] * 1e6, "hop_us_per_byte": hop[1] * 1e6,
        "round_alpha_us": round_[0] * 1e6, "round_us_per_byte": round_[1] * 1e6,
        "add_us_per_byte": costs["add"] * 1e6, "copy_us_per_byte": costs["copy"] * 1e6,
        "meet_us": costs["meet"] * 1e6, "message_us": message, "message_without_header_us": bare,
    }  # fmt: skip
    return costs


def seconds(world, run, calls=20):
    """Median seconds of a call when all ranks call at once, that of the slowest rank."""
    times = []
    for _ in range(7):
        world.barrier("barrier between measurements")
        start = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - start) / calls)
    return float(np.median(bench.everyone(world, times).max(axis=0)))


def predict(algorithm, n, nbytes, costs):
    """Seconds of an all-reduce; None for the library's own, whose ways we do not know.

    Each takes κ for the call. ring, halving_doubling: rounds x α' + bytes sent x β'. tree: rounds x (α + S β); where
    more ranks talk than there are cores they take turns. shared: meetings, and a rank's share of additions and copies.
    """
    add, copy, meet, call = costs["add"], costs["copy"], costs["meet"], costs["call"]
    if algorithm == "native":
        return None
    if algorithm == "shared":
        others = nbytes * (n - 1) / n
        if not costs["slots"]:
            return call + 2 * meet + others * (add + copy)
        if nbytes <= shared.ONE_SHOT_BYTES:
            return call + meet + nbytes * (copy + (n - 1) * add)
        return call + (1 + 2 * math.ceil(nbytes / ARENA_BYTES)) * meet + others * add + 2 * nbytes * copy
    if algorithm == "tree":
        alpha, beta = costs["hop"]
        pairs = [sum(place % (2 * reach) == 0 and place + reach < n for place in range(n)) for reach in reaches(n)]
        return call + sum(2 * max(1.0, 2 * count / costs["cores"]) * (alpha + nbytes * beta) for count in pairs)
    alpha, beta = costs["round"]
    rounds, sent = formulas(algorithm, n)
    return call + rounds * alpha + nbytes * sent * beta


# --- 4. prediction and measurement -----------------------------------------------------------------------------------


def measure(report, world, sizes, algorithms, dtype):
    report.heading("4  Prediction and measurement")
    with report.progress("measure", len(sizes)) as advance:
        return bench.bench(world, "all_reduce", sizes, algorithms, dtype, rounds=5,
                           advance=lambda rows: advance(f"{rows[0]['bytes']:,} bytes"))  # fmt: skip


def compare(report, rows, costs, n):
    """The table, how far off the predictions are, and which algorithm is the best where."""
    algorithms = list(dict.fromkeys(row["algorithm"] for row in rows))
    sizes = list(dict.fromkeys(row["bytes"] for row in rows))
    by = {(row["algorithm"], row["bytes"]): row["time_us"] for row in rows}
    table, factors = [], []
    for nbytes in sizes:
        cells = []
        for name in algorithms:
            predicted = predict(name, n, nbytes, costs)
            cells.append(f"{by[name, nbytes]:,.0f}" + (f" / {predicted * 1e6:,.0f}" if predicted else ""))
            if predicted:
                factors.append(max(predicted * 1e6 / by[name, nbytes], by[name, nbytes] / predicted / 1e6))
        table.append((f"{nbytes:,}", *cells))
    report.table(
        f"Time of an all-reduce in us: {MEASURED} / {PREDICTED}",
        [("bytes", "right"), *((name, "right") for name in algorithms)],
        table,
    )
    typical, worst = float(np.median(factors)), max(factors)
    report.print(
        f"Half of the predictions are within a factor of {typical:.2f} of the measurement, all within {worst:.1f}.\n"
        "They know nothing of caches, of the Python between two messages, or of who else is on the machine."
    )
    messages = [name for name in algorithms if name not in ("native", "shared")]
    found = {nbytes: min(messages, key=lambda name: by[name, nbytes]) for nbytes in sizes}
    expected = {nbytes: min(messages, key=lambda name: predict(name, n, nbytes, costs)) for nbytes in sizes}
    tree = {"predicted": crossing(expected, "tree"), "measured": crossing(found, "tree")}
    report.print(
        f"By messages, the tree is the fastest up to {tree['predicted']:,} bytes ({PREDICTED}), {tree['measured']:,} "
        f"bytes ({MEASURED});\nbeyond, how much the rounds carry counts for more than how many there are."
    )
    wrong = sum(row["wrong"] for row in rows)
    report.print(f"Every result was compared with NumPy's: {wrong} wrong numbers.")
    report.figures["measured"] = rows
    report.figures["prediction"] = {"median_factor": typical, "worst_factor": worst,
                                    "tree_fastest_up_to_bytes": tree}  # fmt: skip


def crossing(best, name):
    """The largest size up to which `name` is the best, 0 if it is not at first; best: {size: name}, ascending."""
    last = 0
    for nbytes, winner in best.items():
        if winner != name:
            break
        last = nbytes
    return last


# --- 5. pipelining a ring --------------------------------------------------------------------------------------------


def segments(report, world, nbytes, dtype):
    """Ring all-reduce with chunks cut into segments of different sizes."""
    report.heading("5  When it pays to cut the chunks")
    x, usual = np.ones(nbytes // np.dtype(dtype).itemsize, dtype), ring.SEGMENT_BYTES
    chunk = nbytes / world.size
    sizes = [s for s in (1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24) if s < 2 * chunk]
    times = {s: [] for s in sizes}
    for _ in range(6):
        for segment in sizes:
            world.barrier("barrier between measurements")
            ring.SEGMENT_BYTES = segment
            start = time.perf_counter()
            all_reduce(x, world, out=x, algorithm="ring")
            x[...] = 1
            times[segment].append(time.perf_counter() - start)
            world.barrier("barrier between measurements")
            ring.SEGMENT_BYTES = usual
    ms = {s: float(np.median(bench.everyone(world, t[1:]).max(axis=0))) * 1e3 for s, t in times.items()}
    best = min(ms, key=ms.get)
    report.table(
        f"Ring all-reduce of {nbytes / 2**20:g} MiB, chunks of {chunk / 2**20:g} MiB ({MEASURED})",
        [("segment", "right"), ("messages a round", "right"), ("ms", "right")],
        [(f"{s // 1024:,} KiB", math.ceil(chunk / s), f"{t:.2f}") for s, t in ms.items()],
    )
    report.print(
        f"Best here: {best // 1024:,} KiB. A chunk that travels whole is added only when all of it has come; cut into\n"
        "segments, one is added, still in the cache, while the next is under way. But each is a message more: it pays\n"
        "where adding a segment takes much longer than α, and where there is a core free to do both."
    )
    report.figures["segments_ms"] = {str(s): t for s, t in ms.items()}


# --- 6. what a training step sees of it ------------------------------------------------------------------------------


def exposed(report, world, algorithms):
    """A training step whose gradients are all-reduced at its end, on the world and on a null communicator."""
    report.heading("6  What a training step pays")
    config = GPTConfig(width=128, layers=2, context=64)
    model = GPT(config)
    tokens = rng.integers(config.vocab_size, 4 * (config.context + 1), world.rank, "lesson").reshape(4, -1)
    parameters = model.parameters()
    flat = np.zeros(sum(p.size for p in parameters), np.float32)
    null = NullCommunicator(world.rank, world.size)

    def step(comm, algorithm):
        model.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        np.concatenate([p.grad.reshape(-1) for p in parameters], out=flat)
        all_reduce(flat, comm, op="mean", out=flat, algorithm=algorithm)

    sides = {"compute alone (null communicator)": (null, "auto"), **{name: (world, name) for name in algorithms}}
    times = {name: [] for name in sides}
    for _ in range(6):
        for name, side in sides.items():
            world.barrier("barrier between measurements")
            start = time.perf_counter()
            step(*side)
            times[name].append(time.perf_counter() - start)
    ms = {name: float(np.median(bench.everyone(world, t[1:]).max(axis=0))) * 1e3 for name, t in times.items()}
    alone = ms["compute alone (null communicator)"]
    report.table(
        f"One step of a small GPT, {flat.nbytes / 2**20:.1f} MiB of gradients ({MEASURED})",
        [("", "left"), ("ms", "right"), ("exposed communication", "right")],
        [
            (name, f"{t:.1f}", "" if t == alone else f"{t - alone:.1f} ms, {(t - alone) / t:.0%}")
            for name, t in ms.items()
        ],
    )
    report.print(
        "The null communicator moves nothing and waits for nobody: what a step takes longer than on it is what\n"
        "communication costs that step. A difference below the noise may come out negative."
    )
    report.figures["step_ms"] = ms


# --- 7. questions ----------------------------------------------------------------------------------------------------


def ask(report, costs, n):
    report.heading("7  Three questions (think first; the answers are computed)")
    # On a cluster every rank has a core, and what two ranks do here any two can do at once.
    cluster = costs | {"round": costs["hop"], "cores": math.inf}
    grows = {s: predict("ring", 64, s, cluster) / predict("ring", 8, s, cluster) for s in (1 << 10, 1 << 30)}
    report.print(
        "a) From 8 to 64 ranks, each with a core and links like these: how much longer does a ring take?\n"
        f"   {grows[1 << 10]:.1f} times for 1 KiB, where the rounds count; {grows[1 << 30]:.2f} times for 1 GiB, as "
        "2 (n - 1) / n hardly changes."
    )
    sizes = [1 << i for i in range(3, 31)]
    ring_time, halving_time = ({s: predict(a, 64, s, cluster) for s in sizes} for a in ("ring", "halving_doubling"))
    twice = max((s for s in sizes if 2 * halving_time[s] < ring_time[s]), default=0)
    report.print(
        "b) Up to which size is halving and doubling more than twice as fast as a ring on 64 such ranks?\n"
        f"   {twice / 2**10:,.0f} KiB: 12 rounds instead of 126, and the same bytes."
    )
    (alpha, beta), even = costs["round"], math.inf
    if beta:
        even = n * alpha / beta
    report.print(
        f"c) At which size do latency and bytes cost a ring of {n} ranks the same here?\n"
        f"   2 (n - 1) α' = 2 (n - 1) / n S β' at S = n α' / β' = {even / 2**10:,.0f} KiB: buckets of gradients should "
        "be well above."
    )
    report.figures["answers"] = {"ring_64_over_8_1KiB": grows[1 << 10], "ring_64_over_8_1GiB": grows[1 << 30],
                                 "halving_twice_as_fast_up_to_bytes": twice, "even_bytes": even}  # fmt: skip


# --- the picture -----------------------------------------------------------------------------------------------------


def draw(report, rows, costs, n):
    """figures/collectives.png and .svg: the ring's rounds, beside the predicted curves over the measured points."""
    from minipar.trace import figure

    def paint(picture):
        left, right = picture.subplots(1, 2, width_ratios=[1, 1.35])
        figure.draw_ring(left, ring_states(n))
        colours = dict(zip(["ring", "tree", "halving_doubling", "shared", "native"], figure.LINES, strict=False))
        for name in dict.fromkeys(row["algorithm"] for row in rows):
            points = [(row["bytes"], row["time_us"]) for row in rows if row["algorithm"] == name]
            right.plot(*zip(*points, strict=True), "o", color=colours[name], markersize=9, label=name)
            curve = [(nbytes, predict(name, n, nbytes, costs)) for nbytes, _ in points]
            if curve[0][1]:
                right.plot([s for s, _ in curve], [t * 1e6 for _, t in curve], "-", color=colours[name], linewidth=2)
        right.set_xscale("log", base=2)
        right.set_yscale("log")
        ticks = [row["bytes"] for row in rows if row["algorithm"] == rows[0]["algorithm"]][::2]
        right.set_xticks(ticks, [figure.short_size(nbytes) for nbytes in ticks])
        right.set_xlabel("size of the array")
        right.set_ylabel("time of an all-reduce in µs")
        right.set_title(f"{n} ranks ({report.figures['transport']}) on {report.cores} cores")
        right.plot([], [], "k-", linewidth=2, label="predicted")
        right.plot([], [], "ko", markersize=9, label="measured")
        right.legend(frameon=False)
        right.grid(alpha=0.3)

    report.draw(paint, "collectives")


if __name__ == "__main__":
    main(lesson, parser(__doc__, SIZES))
