"""Start ranks: `minipar.run(fn, ranks=4)` calls fn(world) on each, as MPI processes under mpirun, else as threads."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

from threadpoolctl import threadpool_info, threadpool_limits

from minipar.comm.thread import ThreadCommunicator, ThreadWorld
from minipar.context import RankContext, activate
from minipar.errors import LaunchError
from minipar.launch import watch

GRACE = 5.0  # seconds that the other ranks get to end after one has failed


def run(fn, ranks=None, *args, timeout=60.0):
    """Call fn(world, *args) on every rank, each with a RankContext of its own.

    Under mpirun (or srun) the ranks are its processes, and `ranks`, if given, must be their number; the value is a list
    of this rank's result alone. Otherwise `ranks` threads (default 4) are started, and the value is the list of their
    results. timeout: seconds that any wait may take. An exception on one rank ends all of them.
    """
    launched = launched_ranks()
    if launched:
        return [_run_mpi(fn, ranks, args, timeout, launched)]
    return _run_threads(fn, 4 if ranks is None else ranks, args, timeout)


def available_cores():
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def blas_threads():
    """Threads that each rank's matrix products use now."""
    return max((pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"), default=1)


def blas_limit(local_ranks):
    """What minipar.run sets: an equal share of the cores, at least one, or MINIPAR_BLAS_THREADS."""
    own = os.environ.get("MINIPAR_BLAS_THREADS", "")
    if own and (not own.isdigit() or own == "0"):
        raise LaunchError(f"MINIPAR_BLAS_THREADS must be a whole number from 1 on, not {own!r}.")
    return int(own) if own else max(1, available_cores() // local_ranks)


def keep_memory():
    """Ask glibc to keep freed arrays for the next ones: fresh pages cost more than the arithmetic on them.

    Measured on a GPT training step: 8 % of its time. Where there is no mallopt, nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        for option, value in ((-3, 32 << 20), (-1, 1 << 30), (-2, 64 << 20)):  # M_MMAP_, M_TRIM_THRESHOLD, M_TOP_PAD
            mallopt(option, value)


# --- threads ---------------------------------------------------------------------------------------------------------


def _run_threads(fn, ranks, args, timeout):
    if ranks < 1:
        raise LaunchError(f"{ranks} ranks cannot be started: at least 1 is needed.")
    keep_memory()
    world, results, exits = ThreadWorld(ranks), [None] * ranks, []

    def rank_main(rank):
        comm = ThreadCommunicator(world, rank, timeout)
        try:
            with activate(RankContext(world=comm)) as context:
                results[rank] = fn(comm, *args)
                if context.stream:
                    context.stream.close()
            world.finish((rank, False))
        except BaseException as error:
            if isinstance(error, SystemExit) and error.code in (None, 0):
                exits.append(error)  # no failure, unless somebody still waits for this rank
                world.finish((rank, False))
            else:
                world.fail(rank, error)

    threads = [threading.Thread(target=rank_main, args=(r,), name=f"rank {r}", daemon=True) for r in range(ranks)]
    with threadpool_limits(blas_limit(ranks), "blas"):
        for thread in threads:
            thread.start()
        try:
            _join(threads, world)
        except KeyboardInterrupt as error:
            world.fail(None, error)
            _join(threads, world)
            raise
    if world.failure:
        rank, error = world.failure
        if rank is not None:
            error.add_note(f"raised on rank {rank} of {ranks} (threads)")
        raise error
    world.check_all_received()
    if exits:
        raise exits[0]
    return results


def _join(threads, world):
    """Wait for all threads, in short steps so that Ctrl-C is noticed; after a failure only for a while."""
    deadline = None
    while any(thread.is_alive() for thread in threads):
        for thread in threads:
            thread.join(0.05)
        if world.failure:
            deadline = deadline or time.monotonic() + GRACE
            if time.monotonic() > deadline:
                return


# --- MPI -------------------------------------------------------------------------------------------------------------


def launched_ranks():
    """How many processes the MPI launcher says it has started; None if this process was started plainly."""
    return _from_launcher("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def launched_rank():
    """This process's rank as the launcher says, which is known without MPI; None if it was started plainly."""
    return _from_launcher("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def _from_launcher(*names):
    return next((int(os.environ[name]) for name in names if os.environ.get(name)), None)


def mpirun_path():
    """The launcher that belongs to this Python: the one beside it, else the first on PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else "mpirun"


def mpi_world(launched):
    """mpi4py's COMM_WORLD; LaunchError, which says what to do, if it does not fit the launcher."""
    remedy = (
        'install one MPI with its mpirun, as in pip install "minipar[mpich]", and start with the mpirun beside python'
    )
    os.environ.setdefault("OMPI_MCA_osc", "^ucx")  # Open MPI: UCX says on every start that shared windows are not its
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, an MPI library is not
        raise LaunchError(f"{launched} ranks were launched, but MPI cannot be loaded ({error}): {remedy}.") from error
    if launched != MPI.COMM_WORLD.Get_size():
        library = MPI.Get_library_version().splitlines()[0].strip("\0 ")
        raise LaunchError(
            f"the launcher started {launched} ranks, but the MPI library ({library}) knows of "
            f"{MPI.COMM_WORLD.Get_size()}: they are different MPIs; {remedy} ({mpirun_path()})."
        )
    return MPI


def _run_mpi(fn, ranks, args, timeout, launched):
    try:
        MPI = mpi_world(launched)
    except LaunchError as error:
        if not launched_rank():
            print(f"minipar: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    from minipar.comm.mpi import MPICommunicator, make_board

    keep_memory()
    local = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    members = local.allgather(MPI.COMM_WORLD.Get_rank())
    nodes = MPI.COMM_WORLD.allgather(members[0])  # a node goes by the number of its first rank
    world = MPICommunicator(MPI.COMM_WORLD, timeout, nodes=nodes, board=make_board(local, members))
    threadpool_limits(blas_limit(local.Get_size()), "blas")
    with watch.over(local, world.rank, world.size), activate(RankContext(world=world)) as context:
        try:
            if ranks not in (None, world.size):
                raise SystemExit(
                    f"minipar: {ranks} ranks were asked for, but mpirun started {world.size}: leave one out."
                )
            result = fn(world, *args)
            if context.stream:
                context.stream.close()
            world.finish()
            return result
        except BaseException as error:
            if isinstance(error, SystemExit) and error.code in (None, 0):
                world.finish()
                raise
            _abort(error)


def _abort(error):
    """Say once what went wrong, then end every rank."""
    rank, size = launched_rank(), launched_ranks()
    if rank:
        # An error that all ranks make alike is told by rank 0, which ends this process meanwhile.
        time.sleep(0.5)
    where = f"minipar: rank {rank} of {size}"
    if isinstance(error, SystemExit):
        text = error.code if isinstance(error.code, str) else f"{where} called sys.exit({error.code})"
    elif isinstance(error, KeyboardInterrupt):
        text = f"{where} was interrupted"
    else:
        text = f"{where} failed:\n" + "".join(traceback.format_exception(error)).rstrip()
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
    time.sleep(0.2)  # the launcher passes on what was said, but drops it once it hears of the abort
    code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    watch.tell(watch.REASON_SAID)
    if "mpi4py.MPI" not in sys.modules:
        # To start MPI now would wait for ranks that may never start it, and a launcher overlooks an exit before that:
        # only a signal makes it end the others.
        os.kill(os.getpid(), signal.SIGKILL)
    code = 130 if isinstance(error, KeyboardInterrupt) else code
    sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(code)
    os._exit(code)  # Abort may return before its end has come: nothing of this rank may run on


def abort_on_uncaught():
    """Under a launcher, let exceptions outside `run`, and in other threads, end every rank too.

    `import minipar` calls it: an error while a program is still importing would leave the other ranks waiting.
    """
    if (launched_ranks() or 1) > 1:
        sys.excepthook = lambda kind, error, trace: _abort(error)
        threading.excepthook = lambda thread: thread.exc_type is SystemExit or _abort(thread.exc_value)


def mpirun(arguments, ranks, timeout=120.0, **options):
    """Run `python ARGUMENTS...` on `ranks` MPI processes; returns a CompletedProcess with text output.

    Ends all processes after `timeout` seconds or on an interrupt, and raises subprocess.TimeoutExpired.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI_", "PMIX", "HYDI_"))}
    # Open MPI refuses root and more ranks than cores unless it is told; MPICH ignores these.
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", **options.pop("env", {})}
    command = [mpirun_path(), "-n", str(ranks), sys.executable, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(3)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)
