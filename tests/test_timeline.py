"""`python -m minipar timeline`: pictures, traces and figures of schedules that nobody runs."""

import json

import pytest

from minipar.__main__ import main


def timeline(*options):
    main(["timeline", *options])


def refused(capsys, *options):
    with pytest.raises(SystemExit) as ended:
        timeline(*options)
    return str(ended.value.code)


def test_figures(capsys):
    timeline("zb-h1", "-p", "4", "-m", "8", "--json")
    figures = json.loads(capsys.readouterr().out)
    assert figures["makespan"] == 27 and figures["peak_held_by_stage"] == [4, 4, 4, 4]
    assert figures["bubble"]["ratio_to_ideal"] == pytest.approx(3 / 24)
    timeline("1f1b", "--costs", "f=1,b=0.5,w=0.5", "--json")
    figures = json.loads(capsys.readouterr().out)
    assert figures["makespan"] == 22 and figures["peak_held_by_stage"] == [4, 3, 2, 1]
    assert figures["bubble"]["share_of_makespan"] == pytest.approx(3 / 11)
    timeline("interleaved", "-v", "4", "--json")
    assert json.loads(capsys.readouterr().out)["stages"] == 16


def test_in_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    timeline("1f1b", "-p", "2", "-m", "2")
    out = capsys.readouterr().out
    assert "rank 0 F0  F1  ········B0      ····B1" in out and "50.0% of the ideal" in out
    assert "held at most, by stage: 2, 1" in out


def test_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    timeline("zb-v", "-p", "2", "-o", "a.svg", "--perfetto", "a.json", "--json", "b.json")
    assert capsys.readouterr().out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.svg", "b.json"]
    assert (tmp_path / "a.svg").read_text().count("<text") > 40
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    (tmp_path / "own.py").write_text("def schedule(p, m):\n    return [['0F0', '0B0']]\n")
    timeline("own.py", "--json")
    assert json.loads(capsys.readouterr().out)["schedule"] == "own.py"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["nothing"], "there is no schedule 'nothing'"),
        (["dualpipe-v", "-m", "7"], "at least 8 micro-batches, not 7"),
        (["gpipe", "-p", "0"], "p=0"),
        (["gpipe", "-v", "2"], "interleaved alone"),
        (["gpipe", "--costs", "f=x"], "'f=x' is not allowed"),
        (["gpipe", "--costs", "c=-1"], "'c=-1' is not allowed"),
        (["gpipe", "-o", "a.jpg"], ".svg or .png"),
        (["gpipe", "-o", "bad.py/a.svg"], "nothing can be written"),
        (["missing.py"], "cannot be read"),
        (["bad.py"], "must define a function schedule(p, m)"),
        (["list.py"], "must return a list"),
        (["number.py"], "3 is no action"),
        (["stuck.py"], "0B0 waits for the activations of micro-batch 0 from stage 0"),
    ],
)
def test_refusals(options, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text("x = 1\n")
    (tmp_path / "list.py").write_text("def schedule(p, m):\n    return 3\n")
    (tmp_path / "number.py").write_text("def schedule(p, m):\n    return [[3]]\n")
    (tmp_path / "stuck.py").write_text("def schedule(p, m):\n    return [['0B0', '0F0']]\n")
    assert says in refused(capsys, *options)
