"""`python -m minipar`, and every command of the README."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def minipar(*arguments, cwd=ROOT):
    command = [sys.executable, "-m", "minipar", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100)


def test_lessons_and_doctor():
    assert "tp " in minipar("lessons").stdout
    doctor = minipar("doctor")
    assert doctor.returncode == 0
    assert all(word in doctor.stdout for word in ("cores", "mpirun", "MPI library", "GPU"))


@pytest.mark.slow
def test_bench_step_figures(tmp_path):
    result = minipar("bench", "step", "--rounds", "1", "--json", "-", cwd=tmp_path)
    figures = json.loads(result.stdout)
    assert figures["minipar_ms"] > figures["limit_ms"] > 0 and figures["threads"] == figures["ranks"] == 1
    assert "its matrix products alone" in result.stderr


def test_errors_are_sentences():
    assert "must be a whole number from 1 on" in minipar("bench", "step", "--rounds", "0").stderr
    result = minipar("bench", "step", "--rounds", "1", "--against", "torch")
    assert result.returncode == 0 or result.stderr.startswith("minipar: PyTorch is not installed")


def commands(readme):
    """Every line of the README's shell blocks."""
    return [line for block in re.findall(r"```sh\n(.*?)```", readme, re.DOTALL) for line in block.splitlines() if line]


def test_readme_names_its_commands():
    assert {"make lesson", "make test"} <= set(commands(README))
    assert set(re.findall(r"`(minipar/[a-z_/]+)`", README)) <= {
        str(p.relative_to(ROOT)) for p in ROOT.rglob("minipar/**")
    }


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("command", [c for c in commands(README) if not c.startswith("make test")])
def test_readme_command(command, tmp_path):
    """In a copy of the repository with this environment as its .venv; lessons, but for make's, at their smallest."""
    if not (ROOT / ".venv" / "ready").exists() or not Path(sys.executable).with_name("mpirun").exists():
        pytest.skip("this is not the environment that make setup made")
    if (ROOT / "pyproject.toml").stat().st_mtime > (ROOT / ".venv" / "ready").stat().st_mtime:
        pytest.fail("pyproject.toml is newer than the environment: run make setup, or the copy would take it over")
    names = ["minipar", "pyproject.toml", "Makefile", "README.md", "LICENSE"]
    for name in names:
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, tmp_path / name)
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI", "MAKE", "MFLAGS"))}
    if "minipar.lessons" in command and "--size" not in command:
        command += " --size tiny"
    result = subprocess.run(
        command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_readme_python(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        subprocess.run([sys.executable, "-c", block], cwd=tmp_path, check=True, timeout=60)
