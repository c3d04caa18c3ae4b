"""Code lines by folder (no blanks, comments, docstrings) beside the budget: `make lines`, and a test."""

import ast
import io
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "minipar"
BUDGET = {  # files and folders of minipar/ : most code lines that they may have together
    "arrays.py errors.py context.py rng.py": 200,
    "autograd": 720,
    "nn optim data": 700,
    "comm": 780,
    "launch": 260,
    "collectives": 720,
    "parallel": 1060,
    "parallel/pipeline": 770,
    "training": 500,
    "trace": 490,
    "bench __main__.py": 1100,
    "lessons/report.py": 160,
    "lessons/tp.py": 260,
    "lessons/collectives.py": 350,
    "lessons/compress.py": 330,
    "lessons/zero.py": 300,
    "lessons/dp.py": 360,
    "lessons/pp.py": 380,
}


def code_lines(path):
    """How many lines of a Python file hold code."""
    source = path.read_text()
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def count():
    """[(names, lines, budget)] for every entry of BUDGET."""
    rows = []
    for names, budget in BUDGET.items():
        paths = [PACKAGE / name for name in names.split()]
        files = [f for path in paths for f in (path.rglob("*.py") if path.is_dir() else [path])]
        # A folder with a budget of its own does not count for the one around it.
        within = {f for f in files if f.parent not in paths and str(f.parent.relative_to(PACKAGE)) in BUDGET}
        files = [f for f in files if f in paths or f not in within]
        rows.append((names, sum(map(code_lines, files)), budget))
    return rows


if __name__ == "__main__":
    for names, lines, budget in count():
        print(f"{lines:6} of {budget:5}  {names}")
