"""Pipeline schedules without a model: makespans, bubbles and memory of the papers, what is refused and what it says."""

import itertools
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minipar.errors import ScheduleError
from minipar.parallel.pipeline import SCHEDULES, Action, Bubble, Costs, Schedule, make, simulate, validate
from minipar.parallel.pipeline.simulation import OPEN

UNIT = Costs(f=1, b=0.5, w=0.5)  # a whole backward takes as long as a forward
THIRDS = Costs(f=1, b=1, w=1)  # a whole backward takes twice as long; its halves as long as a forward
SIZES = [(2, 4), (4, 4), (4, 8), (4, 16), (8, 8), (8, 16), (8, 32)]  # (p, m) of the tables
V_SHAPED = ("zb-v", "dualpipe-v")  # two half stages a rank


def schedule_of(name, p, m, v=2):
    return make(name, p, m, v if name == "interleaved" else None)


def makespan(name, p, m, costs):
    return simulate(schedule_of(name, p, m), costs).makespan


# --- the tables ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "costs", "table"),
    [
        ("gpipe", UNIT, [10, 14, 22, 38, 30, 46, 78]),
        ("1f1b", UNIT, [10, 14, 22, 38, 30, 46, 78]),
        ("gpipe", THIRDS, [15, 21, 33, 57, 45, 69, 117]),
        ("1f1b", THIRDS, [15, 21, 33, 57, 45, 69, 117]),
        ("zb-h1", THIRDS, [13, 15, 27, 51, 31, 55, 103]),
        ("zb-h2", THIRDS, [13, 15, 27, 51, 31, 55, 103]),
        ("interleaved", UNIT, [18, 22, 38, 70, 46, 78, 142]),
    ],
)
def test_makespans(name, costs, table):
    """The oracles, and the formulas that they come from."""
    assert [makespan(name, p, m, costs) for p, m in SIZES] == table
    for (p, m), expected in zip(SIZES, table, strict=True):
        zero_bubble, whole = 3 * m + p - 1, costs.f + costs.b + costs.w
        formula = 2 * (2 * m + p - 1) if name == "interleaved" else whole * (m + p - 1)
        assert expected == (zero_bubble if name.startswith("zb") else formula)


def test_the_three_numbers_that_everybody_compares():
    """p=4, m=8: 22 slots for 1F1B, 27 of another size for ZB-H1, 38 for interleaved with half stages."""
    assert makespan("1f1b", 4, 8, UNIT) == 22
    assert makespan("zb-h1", 4, 8, THIRDS) == 27
    assert makespan("interleaved", 4, 8, UNIT) == 38


@pytest.mark.parametrize("m", range(1, 13))
def test_naive_uses_one_rank_at_a_time(m):
    result = simulate(make("naive", 3, m), THIRDS)
    assert result.makespan == 9 * m and result.bubble.share_of_makespan == pytest.approx(2 / 3)
    assert validate(result.schedule) == {0: 1, 1: 1, 2: 1}


def test_interleaved_rounds_need_not_divide():
    """p=3, v=2, m=4: 22 is what rounds of 2 to 5 reach at best elsewhere; rounds cut blindly give 24."""
    assert makespan("interleaved", 3, 4, UNIT) <= 22
    for p, m, v in itertools.product((2, 3, 4), range(1, 14), (2, 3)):
        result = simulate(make("interleaved", p, m, v), UNIT)
        ideal = 2 * v * m
        if m % p == 0:
            assert result.makespan == ideal + 2 * (p - 1), (p, m, v)  # bubble (p-1)/(v m)
        assert result.makespan <= 2 * (v * (max(m, p) + p - 1)), (p, m, v)  # never longer than 1F1B


# --- bubbles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "m", "slots", "share"), [(8, 32, 78, 7 / 39), (4, 8, 22, 3 / 11), (4, 2, 10, 3 / 5)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_pp7_bubbles(name, p, m, slots, share):
    """1F1B does not shrink the bubble."""
    result = simulate(make(name, p, m), UNIT)
    assert result.makespan == slots == 2 * (m + p - 1)
    assert result.bubble.share_of_makespan == pytest.approx(share) == (p - 1) / (m + p - 1)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_three_definitions_of_the_bubble(name, p, m):
    """Idle to ideal, idle to all, and idle between a rank's own first and last action."""
    bubble = simulate(make(name, p, m), UNIT).bubble
    assert bubble.ratio_to_ideal == pytest.approx((p - 1) / m)
    assert bubble.share_of_makespan == pytest.approx((p - 1) / (m + p - 1))
    assert bubble.internal_share == pytest.approx((p - 1) / (2 * (m + p - 1)))  # rank r starts at r, ends r early


def test_bubble_of_nothing():
    assert Bubble.of([0.0, 0.0], [0.0, 0.0], [0.0, 0.0], 0.0) == Bubble(0.0, 0.0, 0.0)
    bubble = Bubble.of(busy=[2.0, 4.0], first=[0.0, 1.0], last=[4.0, 5.0], makespan=6.0)
    assert (bubble.ratio_to_ideal, bubble.share_of_makespan) == (1.0, 0.5)
    assert bubble.internal_share == pytest.approx(1 / 6)  # (2 + 0) / 2 of 6


COSTS = [(1, 1, 1), (1, 1, 0.5), (2, 2, 1), (3, 2, 1), (1.5, 1, 0.5), (2, 1, 1), (4, 3, 2), (1, 1.5, 0.25), (1, 2, 1)]


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize(("p", "m"), [size for size in SIZES if size[1] >= 2 * size[0] - 1])
def test_bubbles_of_zero_bubble(cost, p, m):
    """Qi et al. 2023, table 2. From the first start on it is at least (p-1) F, until the last rank has something."""
    f, b, w = cost
    costs = Costs(f, b, w)
    bubble = {name: makespan(name, p, m, costs) - m * (f + b + w) for name in ("1f1b", "zb-h1", "zb-h2")}
    assert bubble["1f1b"] == pytest.approx((p - 1) * (f + b + w))
    assert bubble["zb-h1"] == pytest.approx((p - 1) * (f + b - w))
    assert bubble["zb-h2"] == pytest.approx((p - 1) * max(f, f + b - 2 * w))


@pytest.mark.parametrize("cost", COSTS)
def test_notations_of_zero_bubble_and_dualpipe(cost):
    """Where B is the whole backward, ZB-H1's bubble reads F + B - 2W, and is the same number."""
    f, b, w = cost
    bubble = makespan("zb-h1", 4, 8, Costs(f, b, w)) - 8 * (f + b + w)
    whole = Costs(f, b, w).of(Action("B", 0, 0))
    assert whole == b + w and f + whole - 2 * w == pytest.approx(f + b - w)
    assert bubble == pytest.approx(3 * (f + whole - 2 * w))


@pytest.mark.parametrize("cost", [cost for cost in COSTS if cost != (1, 2, 1)])
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (2, 9), (4, 8), (4, 16), (8, 16)])
def test_dualpipe_v_is_no_worse_than_its_readme(cost, p, m):
    """(PP/2 - 1)(F&B + B - 3W) for PP = 2p, where F&B together take F + B; not as one block."""
    f, b, w = cost
    bubble = makespan("dualpipe-v", p, m, Costs(f, b, w)) - 2 * m * (f + b + w)
    assert -1e-9 <= bubble <= (p - 1) * ((f + b + w) + (b + w) - 3 * w) + 1e-9


@pytest.mark.parametrize("name", ["zb-h2", "zb-v"])
@pytest.mark.parametrize("p", range(1, 9))
def test_nobody_waits_once_begun(name, p):
    """With equal costs the bubble between a rank's first and last action is 0 from 2p - 1 micro-batches on."""
    for m in (2 * p - 1, 2 * p, 3 * p + 1, 16):
        if m >= 2 * p - 1:
            assert simulate(make(name, p, m), THIRDS).bubble.internal_share == 0, m
    assert p < 2 or simulate(make(name, p, 1), THIRDS).bubble.internal_share > 0


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "p", "m", "peaks"),
    [
        ("1f1b", 8, 32, [8, 7, 6, 5, 4, 3, 2, 1]),
        ("1f1b", 4, 8, [4, 3, 2, 1]),
        ("1f1b", 4, 2, [2, 2, 2, 1]),
        ("pipedream", 4, 8, [4, 3, 2, 1]),
        ("gpipe", 8, 32, [32] * 8),
        ("gpipe", 4, 2, [2] * 4),
        ("zb-h1", 4, 8, [4] * 4),
        ("zb-h2", 4, 8, [7] * 4),
    ],
)
def test_pp7_micro_batches_in_flight(name, p, m, peaks):
    assert list(validate(make(name, p, m)).values()) == peaks


@pytest.mark.parametrize("p", range(1, 9))
def test_micro_batches_in_flight_at_any_size(p):
    for m in range(1, 2 * p + 3):
        assert validate(make("gpipe", p, m)) == dict.fromkeys(range(p), m)
        assert validate(make("1f1b", p, m)) == {i: min(m, p - i) for i in range(p)}
        assert max(validate(make("zb-h1", p, m)).values()) == min(m, p)
        assert max(validate(make("zb-h2", p, m)).values()) == min(m, 2 * p - 1)


@pytest.mark.parametrize("kept", [0.0, 0.25, 32 / (34 + 5 * 4), 1.0])
@pytest.mark.parametrize("cost", [(1, 1, 1), (2, 2, 1), (1, 1, 0.5)])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (3, 5), (4, 8), (8, 16)])
def test_memory_of_zero_bubble(p, m, cost, kept):
    """Device i from 1: H1 (p-i+1) M_B + (i-1) M_W, H2 (2p-2i+1) M_B + (2i-2) M_W; `kept` is M_W / M_B."""
    memory = {name: simulate(make(name, p, m), Costs(*cost, kept=kept)).peak_memory for name in ("zb-h1", "zb-h2")}
    assert memory["zb-h1"] == pytest.approx([(p - i + 1) + (i - 1) * kept for i in range(1, p + 1)])
    assert memory["zb-h2"] == pytest.approx([(2 * p - 2 * i + 1) + (2 * i - 2) * kept for i in range(1, p + 1)])


@pytest.mark.parametrize("p", range(1, 9))
def test_memory_of_v_shaped_schedules(p):
    """In half stages: ZB-V 2p, as much as 1F1B's p whole ones; DualPipe-V one more half, PP + 1 for PP = 2p."""
    assert simulate(make("zb-v", p, 2 * p), THIRDS).peak_memory == [2 * p] * p
    assert simulate(make("dualpipe-v", p, 2 * p), THIRDS).peak_memory == [2 * p + 1] * p


def test_memory_is_held_from_the_start_of_f_to_the_end_of_its_last_use():
    result = simulate(Schedule("two", [["0F0", "0F1", "0I0", "0B1", "0W0"]]), Costs(2, 3, 4, kept=0.25))
    assert result.memory == {0: [(0.0, 0.0), (0.0, 1.0), (2.0, 2.0), (7.0, 1.25), (14.0, 0.25), (18.0, 0.0)]}
    assert result.peak_memory == [2.0]


# --- other costs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("c", [0, 0.25, 3])
def test_messages_take_time_between_ranks_alone(c):
    for p in (1, 2, 3, 4):
        assert makespan("1f1b", p, 1, Costs(1, 2, 3, c=c)) == p * 6 + 2 * (p - 1) * c
        # Stages p - 1 and p are on one rank.
        assert makespan("zb-v", p, 1, Costs(1, 2, 0, c=c)) == 2 * p * 3 + 2 * (2 * p - 2) * c
        assert makespan("naive", p, 5, Costs(1, 1, 1, c=c)) == 5 * (3 * p + 2 * (p - 1) * c)


def test_stages_need_not_cost_alike():
    """The middle one takes twice as long: the others wait for it."""
    for m in range(1, 6):
        assert makespan("gpipe", 3, m, Costs([1, 2, 1], [1, 2, 1], [0, 0, 0])) == 4 * m + 4
        assert makespan("naive", 3, m, Costs([1, 2, 3], [4, 5, 6], [7, 8, 9])) == 45 * m
    assert Costs([1, 2], (3, 4), 5).of(Action("B", 1, 0)) == 9
    assert Costs().of(Action("REDUCE_GRAD", 0)) == Costs().of(Action("STEP", 0, 0)) == 0


def test_timeline():
    """A span for each action that takes time; a message for each that leaves its rank, under its reader's name."""
    timeline = simulate(make("1f1b", 2, 2), Costs(1, 1, 1, c=0.5)).timeline(unit=2.0)
    spans = {(s.rank, s.name): (s.kind, s.start, s.end) for s in timeline.spans}
    assert len(spans) == 8
    assert spans[0, "0F1"] == ("forward", 2.0, 4.0) and spans[1, "1F0"] == ("forward", 3.0, 5.0)
    assert spans[1, "1B0"] == ("backward", 5.0, 9.0)
    assert sorted(m.operation for m in timeline.messages) == ["0B0", "0B1", "1F0", "1F1"]
    first = next(m for m in timeline.messages if m.operation == "0B0")
    assert (first.source, first.dest, first.sent, first.received) == (1, 0, 9.0, 10.0)


# --- any schedule ----------------------------------------------------------------------------------------------------

sizes = st.tuples(st.sampled_from(list(SCHEDULES)), st.integers(1, 8), st.integers(1, 16), st.integers(1, 4))
time = st.floats(0, 4)


def valid(name, p, m, v):
    assume(name != "dualpipe-v" or m >= 2 * p)
    return schedule_of(name, p, m, v)


@given(sizes, st.tuples(time, time, time, time))
def test_every_schedule_runs_to_its_end(size, costs):
    schedule, costs = valid(*size), Costs(*costs)
    _, p, m, v = size
    assert len(schedule.ranks) == p and schedule.microbatches == m
    assert schedule.stages == {"interleaved": p * v, "zb-v": 2 * p, "dualpipe-v": 2 * p}.get(size[0], p)
    peaks = validate(schedule)
    assert sorted(peaks) == list(range(schedule.stages)) and all(1 <= peak <= m for peak in peaks.values())
    check_simulation(schedule, costs)


def check_simulation(schedule, costs):
    """Everything runs once, in its rank's order, after what it needs, and not two things at once on a rank."""
    result = simulate(schedule, costs)
    assert result.times.keys() == schedule.actions
    for rank, actions in enumerate(schedule.ranks):
        for one, next_one in itertools.pairwise(actions):
            assert result.times[one][1] <= result.times[next_one][0]
        for action in actions:
            for needed in schedule.needs(action):
                wait = costs.c if schedule.rank_of[needed.stage] != rank else 0
                assert result.times[needed][1] + wait <= result.times[action][0]
    busy = [sum(costs.of(a) for a in actions) for actions in schedule.ranks]
    assert result.makespan >= max(busy) - 1e-9
    assert all(curve[-1][1] == pytest.approx(0) for curve in result.memory.values())


@given(st.integers(1, 8), st.integers(1, 16))
def test_dualpipe_v_needs_twice_as_many_micro_batches_as_ranks(p, m):
    if m < 2 * p:
        with pytest.raises(ScheduleError, match=f"on {p} ranks needs at least {2 * p} micro-batches, not {m}"):
            make("dualpipe-v", p, m)
    else:
        validate(make("dualpipe-v", p, m))


@given(sizes)
def test_what_is_printed_can_be_read(size):
    schedule = valid(*size)
    assert all(Action.parse(str(action)) == action for action in schedule.actions)
    lines = str(schedule).splitlines()
    assert Schedule(schedule.name, [line.split() for line in lines]).ranks == schedule.ranks


@pytest.mark.parametrize(
    "text",
    ["", "F0", "0F", "0X1", "0f1", "0F-1", "-1F0", "0F1x", "0F 1", "0REDUCE_GRAD3", "0STEP", "0FB1", "0F1.5", "٠F0"],
)
def test_what_is_no_action(text):
    with pytest.raises(ScheduleError, match="is no action: write stage, kind"):
        Action.parse(text)


def mutated(schedule, how, draw):
    """`schedule` with two actions of a rank swapped, one left out, or one there twice."""
    ranks = [list(actions) for actions in schedule.ranks]
    actions = draw.choice(ranks)
    i, j = draw.randrange(len(actions)), draw.randrange(len(actions))
    if how == "swap":
        actions[i], actions[j] = actions[j], actions[i]
    elif how == "drop":
        del actions[i]
    else:
        actions.insert(j, actions[i])
    return Schedule("mutated", ranks)


@settings(max_examples=150)
@given(sizes, st.sampled_from(["swap", "drop", "double"]), st.integers(0, 10**6))
def test_a_wrong_schedule_is_refused_or_right_after_all(size, how, seed):
    """Two actions that may change places still make a schedule; one too few or too many never does."""
    schedule = valid(*size)
    changed = mutated(schedule, how, random.Random(seed))
    try:
        peaks = validate(changed)
    except ScheduleError:
        return
    # Where the only REDUCE_GRAD or STEP was dropped, reductions were put in place.
    assert how == "swap" or (how == "drop" and schedule.stages == 1)
    assert how == "swap" or {a.kind for a in changed.actions ^ schedule.actions} <= {"STEP", "REDUCE_GRAD"}
    assert sorted(peaks) == list(range(schedule.stages))
    check_simulation(changed, Costs(1, 1.5, 0.5, 0.25))


# --- what errors say -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([[], []], "has no forward"),
        ([["0F0", "0B0"], ["1F0"]], r"1B0 is missing: rank 1 has stage 1"),
        ([["0F0", "0B0"], ["1F0", "1I0"]], r"1W0 is missing: rank 1 has stage 1"),
        ([["0F0", "0B0"], ["1F0", "1B0", "1W0"]], r"1I0 is missing: rank 1 has stage 1"),
        ([["0F0", "0B0"], ["1F0", "1I0", "1B0", "1W0"]], r"rank 1 has 1B0 beside its two halves"),
        ([["0F0", "0F0", "0B0"]], r"rank 0 does 0F0 2 times"),
        ([["0F0", "0B0", "0B1"]], r"rank 0 cannot do 0B1: there are micro-batches 0 to 0"),
        ([["0F0", "0B0"], ["0F1", "0B1"]], r"stage 0 is on ranks 0 and 1: 0F1 is on rank 1"),
        ([["0F0", "0B0", "2F0", "2B0"]], r"1F0 is missing: no rank has stage 1"),
        ([["0F0", "0B0", "0REDUCE_GRAD"], ["1F0", "1B0"]], r"1REDUCE_GRAD is missing: rank 1 has stage 1"),
        ([["0F0", "0B0", "0STEP0", "0F1", "0B1"]], r"0STEP1 is missing: rank 0 has stage 0"),
        (
            [["0B0", "0F0"], ["1F0", "1B0"]],
            r"rank 0: 0B0 waits for the gradient of micro-batch 0 from stage 1 \(1B0 on rank 1\), which has not run\. "
            r"rank 1: 1F0 waits for the activations of micro-batch 0 from stage 0 \(0F0 on rank 0\)",
        ),
        (
            [["0F0", "0W0", "0I0"]],
            r"rank 0: 0W0 waits for the gradient of micro-batch 0 from stage 0 \(0I0 on rank 0\)",
        ),
        (
            [["0F0", "0F1", "0B0", "0REDUCE_GRAD", "0B1"]],
            r"rank 0: 0REDUCE_GRAD waits for the gradient of micro-batch 1 from stage 0 \(0B1 on rank 0\)",
        ),
        ([["0F0", "0STEP0", "0B0"]], r"rank 0: 0STEP0 waits for the gradient of micro-batch 0 .*0B0 on rank 0"),
    ],
)
def test_what_is_wrong_is_named(ranks, text):
    with pytest.raises(ScheduleError, match=text):
        validate(Schedule("wrong", ranks))


def test_a_schedule_that_only_unlimited_buffers_let_run():
    """Two stages a rank, one after the other for all micro-batches: in the end both ranks only send."""
    m = 3 * OPEN

    def both(p):
        ranks = [
            [
                Action(kind, s, k)
                for kind, order in (("F", (r, r + p)), ("B", (r + p, r)))
                for s in order
                for k in range(m)
            ]
            for r in range(p)
        ]
        return Schedule("all of a stage first", ranks)

    assert simulate(both(2)).times.keys() == both(2).actions
    with pytest.raises(
        ScheduleError, match=r"even if sends wait for their receiver: rank 0 sends what 1F\d reads, for"
    ):
        validate(both(2))
    validate(both(1))  # to itself nobody sends


def test_simulate_says_what_a_rank_waits_for():
    with pytest.raises(ScheduleError, match=r"rank 0: 0B0 waits for the gradient .* from stage 1 \(1B0 on rank 1\)"):
        simulate(Schedule("wrong", [["0B0", "0F0"], ["1F0", "1B0"]]))


def test_why_not():
    schedule = make("zb-h1", 2, 1)
    f0, f1, i1, i0, w0 = map(Action.parse, ("0F0", "1F0", "1I0", "0I0", "0W0"))
    assert schedule.why_not(f0, set()) is None
    assert "1F0 waits for the activations of micro-batch 0 from stage 0 (0F0 on rank 0)" in schedule.why_not(f1, set())
    assert "0I0 waits for the gradient of micro-batch 0 from stage 1 (1I0 on rank 1)" in schedule.why_not(i0, {f0, f1})
    assert "0I0 waits for the activations of micro-batch 0 from stage 0 (0F0 on" in schedule.why_not(i0, {i1})
    assert schedule.why_not(i0, {f0, i1}) is None
    reduction = Action("REDUCE_GRAD", 0)
    assert "waits for the weight gradients of micro-batch 0 from stage 0" in schedule.why_not(reduction, {i0})
    assert schedule.why_not(reduction, {w0}) is None
    hole = Schedule("hole", [["0F0", "0B0"], ["2F0"]])
    assert "from stage 1 (1B0 on no rank)" in hole.why_not(Action("B", 0, 0), {f0})


# --- make ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("1f1b", 0, 4), "p=0, m=4: each must be at least 1"),
        (("1f1b", 4, 0), "p=4, m=0"),
        (("interleaved", 2, 4, 0), "p=2, m=4, v=0"),
        (("1f1b", 2, 4, 2), "v=2 is for interleaved alone, not for 1f1b"),
        (("2f2b", 2, 4), "there is no schedule '2f2b': naive, gpipe, .*, or a FILE.py"),
        (("nowhere/there.py", 2, 4), "nowhere/there.py cannot be read: No such file"),
    ],
)
def test_what_make_refuses(arguments, text):
    with pytest.raises(ScheduleError, match=text):
        make(*arguments)


def test_a_schedule_from_a_file(tmp_path):
    """It returns texts or Actions; reductions are put in."""
    file = tmp_path / "mine.py"
    file.write_text(
        "def schedule(p, m):\n    return [[f'{r}{k}{i}' for i in range(m) for k in 'FB'] for r in range(p)]\n"
    )
    schedule = make(str(file), 3, 4)
    assert schedule.name == "mine.py" and schedule.ranks == make("naive", 3, 4).ranks
    validate(schedule)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("x = 1", "must define a function schedule"),
        ("def schedule(p, m:", "must define a function schedule"),
        ("def schedule(p, m): return 3", r"schedule\(2, 4\) of .* must return a list of a list"),
        ("def schedule(p, m): return ['0F0']", "must return a list of a list"),
        ("def schedule(p, m): return [['0F0', '0G0']]", "'0G0' is no action"),
    ],
)
def test_a_file_that_makes_no_schedule(tmp_path, text, error):
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(ScheduleError, match=error):
        make(str(file), 2, 4)
