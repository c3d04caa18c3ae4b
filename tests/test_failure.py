"""Nothing hangs: whatever goes wrong on one rank ends all of them in seconds, with the first cause shown once."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import minipar
from minipar.collectives import all_reduce, broadcast
from minipar.errors import CommunicationTimeout, DeadlockError, LaunchError, MessageMismatch, RankFailed
from minipar.launch import mpirun_path

pytestmark = pytest.mark.timeout(90)


def no_process_left(output):
    """All processes that said their pid are gone, zombies apart; they get two seconds to go."""
    pids = re.findall(r"has pid (\d+)", output)
    deadline = time.monotonic() + 2
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("raise", 1, "minipar: rank 2 of 4 failed:"),
        ("exit", 3, "minipar: rank 2 of 4 called sys.exit(3)"),
        ("thread", 1, "IndexError"),
        ("import", None, "ImportError: planted"),
        ("early", None, "ImportError: planted"),
        ("kill", None, "minipar: rank 2 of 4 died without a word"),
        ("everywhere", 1, "minipar: rank 0 of 4 failed:"),
        ("done", 1, "rank 2, which has ended"),
        ("more", 1, "every rank must call the same"),
    ],
)
def test_mp1_one_rank_ends_all(mpi, programs, how, code, text):
    start = time.monotonic()
    result = mpi([programs / "fail.py", how], ranks=4)
    assert time.monotonic() - start < 15  # 10 s and the start of four interpreters
    assert result.returncode == code if code is not None else result.returncode != 0
    assert text in result.stdout + result.stderr
    assert (result.stdout + result.stderr).count("Traceback") <= 1
    assert no_process_left(result.stdout)


@pytest.mark.slow
def test_mp1_a_silent_rank_times_out_by_name(mpi, programs):
    result = mpi([programs / "fail.py", "silent", 2], ranks=3)
    assert result.returncode == 1
    assert re.search(r"rank \d waits in .*all_reduce.* rank \d; nothing came in 2 s", result.stderr)
    assert re.search(r"Meanwhile rank \d waits in .*all_reduce.*; rank 2 waits for nobody", result.stderr)


@pytest.mark.slow
def test_mp1_interrupt_ends_all(mpi, programs):
    command = [mpirun_path(), "-n", "4", sys.executable, str(programs / "fail.py"), "never"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    with subprocess.Popen(command, **pipes) as process:
        lines = [process.stdout.readline() for _ in range(4)]
        os.kill(process.pid, signal.SIGINT)
        start = time.monotonic()
        rest, _ = process.communicate(timeout=20)
    assert time.monotonic() - start < 10
    assert process.returncode != 0
    assert rest.count("Traceback") == 0
    assert no_process_left("".join(lines))


def test_thread_rank_raises():
    def main(world):
        if world.rank == 2:
            raise ValueError("planted")
        try:
            all_reduce(np.ones(100_000), world)
        except RankFailed as error:
            assert "rank 2 failed" in str(error)
            raise

    with pytest.raises(ValueError, match="planted") as caught:
        minipar.run(main, ranks=4)
    assert any("rank 2 of 4" in note for note in caught.value.__notes__)


def test_thread_timeout_names_everything():
    def main(world):
        if world.rank == 1:
            time.sleep(1)
        else:
            world.recv(np.empty(3), 1, "a gift")

    with pytest.raises(CommunicationTimeout, match=r"rank 0 waits in recv \(a gift, 24 bytes\) from rank 1.*0.2 s"):
        minipar.run(main, ranks=2, timeout=0.2)


def test_thread_deadlock_is_found_at_once():
    def main(world):
        big = np.zeros(100_000)
        world.send(big, 1 - world.rank, "first")  # too large to be buffered: both wait for a receiver
        world.recv(big, 1 - world.rank, "first")

    start = time.monotonic()
    with pytest.raises(DeadlockError) as caught:
        minipar.run(main, ranks=2)
    assert time.monotonic() - start < 2
    for rank in (0, 1):
        assert f"rank {rank} waits in send (first, 800000 bytes) to rank {1 - rank}" in str(caught.value)


def test_waiting_for_a_rank_that_has_finished_is_a_deadlock():
    with pytest.raises(DeadlockError, match="rank 1 has finished"):
        minipar.run(lambda world: world.rank or world.recv(np.empty(1), 1, "more"), ranks=2)


@pytest.mark.parametrize(
    ("array", "operation"), [(np.zeros(4), "x"), (np.zeros(3, np.float32), "x"), (np.zeros(3), "y")]
)
def test_thread_mismatch_names_both_sides(array, operation):
    def main(world):
        if world.rank == 0:
            world.send(array, 1, operation)
            world.recv(np.empty(1), 1, "end")
        else:
            world.recv(np.zeros(3), 0, "x")

    with pytest.raises(MessageMismatch, match=r"rank 0 sent .* but rank 1 expected 'x' \(float64, 24 bytes\)"):
        minipar.run(main, ranks=2)


@pytest.mark.parametrize("code", [None, 0])
def test_a_thread_rank_may_exit_without_a_failure_unless_others_wait(code):
    def leave(world, waits):
        if world.rank == 1:
            sys.exit(code)
        if waits:
            world.recv(np.empty(1), 1, "more")
        reached.append(world.rank)

    reached = []
    with pytest.raises(SystemExit) as caught:
        minipar.run(leave, 3, False)
    assert caught.value.code == code and sorted(reached) == [0, 2]
    with pytest.raises(DeadlockError, match=r"recv \(more, 8 bytes\) from rank 1.*rank 1 has finished"):
        minipar.run(leave, 2, True)


def test_interrupt_of_thread_ranks():
    def main(world):
        if world.rank == 0:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        world.recv(np.empty(1), 1 - world.rank, "never") if world.rank else time.sleep(2)

    # A process that a shell has started in the background ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            minipar.run(main, ranks=2)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_mp3_launcher_and_library_of_different_mpis(mpi, programs, variable):
    """A world of one while the launcher says four is an error, not four serial runs."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI"))} | {variable: "4"}
    code = "import minipar; minipar.run(lambda world: print('ran alone'))"
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=30)
    assert result.returncode == 1
    assert "4 ranks" in result.stderr and "mpirun" in result.stderr and "Traceback" not in result.stderr
    assert "ran alone" not in result.stdout


def test_mp4_without_mpi4py_threads_work_and_mpi_is_explained(tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('no mpi4py here')")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI"))}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), os.getcwd()])
    code = "import minipar; print(minipar.run(lambda world: world.rank, ranks=3))"
    run = {"capture_output": True, "text": True, "timeout": 30}
    plain = subprocess.run([sys.executable, "-c", code], env=environment, **run)
    assert plain.stdout == "[0, 1, 2]\n", plain.stderr
    launched = subprocess.run([sys.executable, "-c", code], env=environment | {"PMI_SIZE": "2", "PMI_RANK": "0"}, **run)
    assert launched.returncode == 1
    assert "no mpi4py here" in launched.stderr and "minipar[mpich]" in launched.stderr


def test_too_few_ranks():
    with pytest.raises(LaunchError, match="0 ranks"):
        minipar.run(lambda world: None, ranks=0)


def test_a_message_that_nobody_took_is_an_error():
    with pytest.raises(MessageMismatch, match=r"rank 0 sent 'lost' \(8 bytes\) to rank 1, which has ended"):
        minipar.run(lambda world: world.rank or world.send(np.ones(1), 1, "lost"), ranks=2)


def test_broadcast_from_two_roots_is_a_mismatch():
    with pytest.raises((MessageMismatch, DeadlockError)):
        minipar.run(lambda world: broadcast(np.ones(1), world, root=world.rank), ranks=3)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_whoever_is_killed_first_is_named(mpi, programs, victim):
    for _ in range(5):
        result = mpi([programs / "killed.py", victim], ranks=4)
        assert f"minipar: rank {victim} of 4 died without a word" in result.stderr
        assert result.stderr.count("died without a word") == 1


@pytest.mark.slow
def test_runs_inside_and_after_runs_end_quietly(mpi):
    code = (
        "import minipar, os\n"
        "inner = minipar.run(lambda w: minipar.run(lambda v: v.size))\n"
        "os.write(1, f'{inner} {minipar.run(lambda w: w.size)}\\n'.encode())"
    )
    result = mpi(["-c", code], ranks=2)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "[[2]] [2]\n" * 2


@pytest.mark.slow
def test_nothing_runs_on_after_a_failure(mpi):
    code = (
        "import minipar, os\n"
        "try:\n    minipar.run(lambda w: 1 / w.rank if w.rank == 0 else w.barrier())\n"
        "finally:\n    os.write(1, b'ran on')"
    )
    result = mpi(["-c", code], ranks=2)
    assert result.returncode and "ZeroDivisionError" in result.stderr and "ran on" not in result.stdout
