"""The house rules: imports run downward, folders stay within their budget, the source is tidy, imports are light."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lines import count

ROOT = Path(__file__).parents[1]


def run(*command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_imports_run_downward():
    tool = Path(sys.executable).with_name("lint-imports")
    if not tool.exists():
        pytest.skip("import-linter is not installed")
    result = run(str(tool), "--no-cache")
    assert result.returncode == 0, result.stdout


def test_ruff_is_content():
    tool = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if not tool:
        pytest.skip("ruff is not installed")
    for command in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
        result = run(tool, *command, "minipar", "tests")
        assert result.returncode == 0, result.stdout


def test_folders_keep_to_their_budget():
    assert [(names, lines) for names, lines, budget in count() if lines > budget] == []


def test_import_is_light():
    heavy = "cupy", "mpi4py.MPI", "matplotlib", "rich"
    code = f"import sys, minipar, minipar.nn, minipar.parallel; print([m for m in {heavy} if m in sys.modules])"
    assert run(sys.executable, "-c", code).stdout == "[]\n"


def test_nothing_names_a_machine_or_a_registry():
    for path in ROOT.glob("**/*"):
        inside = path.relative_to(ROOT).parts
        if path.suffix in (".py", ".md", ".toml", ".json") and not inside[0].startswith("."):
            text = path.read_text()
            assert "/ho" + "me/" not in text and "py" + "pi.org" not in text, path
