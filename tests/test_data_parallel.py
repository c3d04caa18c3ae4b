"""Data parallelism and ZeRO equal one process: programs/data_parallel.py on threads and under MPI; what they refuse."""

import numpy as np
import pytest
from programs import data_parallel
from programs.data_parallel import MODES, TINY, Branches, Layers, tokens_of, wrap

import minipar
from minipar import nn
from minipar.errors import DTypeError, GraphError, ShapeError
from minipar.parallel import DataParallel, DeviceMesh, ZeRO, full_state, fully_shard

LONG = [pytest.param(data_parallel.check_replicas, marks=pytest.mark.slow)]
OTHERS = [check for check in data_parallel.CHECKS if check is not data_parallel.check_replicas]


@pytest.mark.parametrize("check", OTHERS + LONG, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("ranks", [2, pytest.param(5, marks=pytest.mark.slow)])  # 1, 3 and 4 run under MPI
def test_on_threads(check, ranks):
    minipar.run(check, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_under_mpi(mpi, programs, ranks):
    result = mpi([programs / "data_parallel.py"], ranks, timeout=170)
    assert (result.returncode, result.stdout) == (0, "ok\n" * ranks), result.stderr


def on_two(function, ranks=2):
    minipar.run(lambda world: function(world, DeviceMesh(world)), ranks)


def test_buckets_are_filled_in_the_order_of_the_backward_pass():
    def main(world, mesh):
        model = DataParallel(nn.GPT(TINY), mesh, bucket_bytes=3000)
        model.loss(*tokens_of(2)).backward()
        names = {p: name for name, p in model.named_parameters()}
        order = [names[p] for bucket in model.buckets for p in bucket.views]
        assert order == list(names.values())[::-1]
        sizes = [bucket.flat.nbytes for bucket in model.buckets]
        largest = max(p.data.nbytes for p in names)
        assert len(sizes) > 5 and max(sizes) <= max(3000, largest)
        for bucket in model.buckets:
            assert all(np.shares_memory(p.grad, bucket.flat) for p in bucket.views)  # a view: no copy

    on_two(main)


def test_reductions_start_before_the_backward_pass_has_ended():
    """With one bucket a parameter, the first is sent while later gradients have yet to come."""
    started = []

    def reduce(bucket, comm, operation):
        started.append(len(bucket.views))
        return minipar.parallel.data.all_reduce_bucket(bucket, comm, operation)

    def main(world, mesh):
        model = DataParallel(nn.GPT(TINY), mesh, bucket_bytes=1, reduce=reduce)
        sent = []
        first = model.parameters()[0]
        loss = model.loss(*tokens_of(2))
        first.register_hook(lambda _: sent.append(len(model.handles)))
        loss.backward()
        assert len(model.handles) == len(model.parameters()) > sent[0] > 10

    on_two(main)


@pytest.mark.parametrize("mode", MODES[:-1])
def test_a_gradient_that_is_no_part_of_the_mean_is_refused(mode):
    def main(world, mesh):
        model = wrap(mode, Layers((3, 1)), mesh)
        model.loss(np.ones((1, 3)), np.ones(1)).backward()
        with pytest.raises(GraphError, match=r"layers\.0\.\w+ is no part of the ranks' mean"):
            model.model.loss(np.ones((1, 3)), np.ones(1)).backward()

    on_two(main)


@pytest.mark.parametrize("mode", MODES)
def test_two_losses_in_one_backward_pass_are_refused(mode):
    """Their sum is not the mean over both: whoever wants it says so inside `average`."""

    def main(world, mesh):
        model = wrap(mode, Layers((3, 1)), mesh)
        losses = [model.loss(np.ones((1, 3)), np.ones(1)) for _ in range(2)]
        with pytest.raises(GraphError, match="a second loss of these ranks"):
            (losses[0] + losses[1]).backward()

    on_two(main)


def test_stage_3_keeps_no_parameters_between_steps():
    def main(world, mesh):
        model = fully_shard(nn.GPT(TINY), mesh)
        whole = sum(p.size for p in nn.GPT(TINY).parameters())
        for _ in range(2):
            model.loss(*tokens_of(2)).backward()
            for p in model.model.parameters():
                assert p.grad is None and np.isnan(p.data).all() and p.data.strides == (0,) * p.data.ndim
            held = [p.data.size + (0 if p.grad is None else p.grad.size) for p in model.parameters()]
            assert sum(held) <= 2 * (whole // world.size + len(model.units))

    on_two(main, 3)


def test_stage_3_says_what_it_cannot_do():
    def order(world, mesh):
        model = Branches()
        zero = ZeRO(model, mesh, 3)
        with pytest.raises(GraphError, match=r"stage 3 gathers a\.layers\.0, .* but after 0 of them came trunk"):
            zero.average(lambda: model.loss(np.ones((1, 3)), None, "a"), 1, 1)

    def inside(world, mesh):
        model = Layers((3, 1))
        ZeRO(model, mesh, 3)
        with pytest.raises(GraphError, match="in a forward pass of the ZeRO model"):
            model(np.ones((1, 3)))

    def stale(world, mesh):
        model = ZeRO(nn.GPT(TINY), mesh, 3)
        old = model.loss(*tokens_of(1))
        model.loss(*tokens_of(1)).backward()
        with pytest.raises(GraphError, match="was gathered anew since this forward pass"):
            old.backward()

    for function in (order, inside, stale):
        on_two(function)


def test_what_zero_refuses():
    def main(world, mesh):
        with pytest.raises(ShapeError, match="stages 0 to 3, not 4"):
            ZeRO(Layers((3, 1)), mesh, 4)
        model = Layers((3, 1))
        model.layers[0].bias.data = model.layers[0].bias.data.astype(np.float32)
        with pytest.raises(DTypeError, match=r"layers\.0 has parameters of float32, float64: ZeRO needs one dtype"):
            ZeRO(model, mesh, 1)

    on_two(main)


def test_zf4_state_that_only_one_rank_asks_for_is_told():
    def main(world, mesh):
        model = ZeRO(Layers((19, 3)), mesh, 3)
        if world.rank == 0:
            full_state(model)

    with pytest.raises(Exception, match=r"all_gather of pieces.*|.*has finished"):
        on_two(main, 4)


def test_unused_parameters_are_named_once(recwarn):
    def main(world, mesh):
        model = DataParallel(Branches(), mesh)
        for _ in range(2):
            model.average(lambda: model.model.loss(np.ones((1, 3)), None, "a"), 1, 1).backward()
        assert [name for name in model.unused if name[0] == "b"] == ["b.layers.0.weight", "b.layers.0.bias"]

    on_two(main)
    assert (
        len([w for w in recwarn if "no rank has used b.layers.0.weight, b.layers.0.bias, c.layers" in str(w.message)])
        == 1
    )
