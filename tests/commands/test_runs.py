"""`specheads runs`, and the table that a multirun ends with."""

import json
import shutil
from pathlib import Path

import pytest


@pytest.fixture
def outputs(tmp_path, monkeypatch):
    """A run with two heads, an evaluation, an interrupted multirun whose jobs have one key in
    common, and damaged files.
    """
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def write(name, content):
        path = tmp_path / "outputs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))

    for run in ("head/a", "evaluate/b", "distill/d", "head/damaged"):
        write(f"{run}/run.json", {"finished": run != "head/damaged"})
    write("head/a/.hydra/overrides.yaml", "- model=nano\n- paths.outputs=outputs\n- head.depth=1\n")
    for name, kl in (("one", 0.25), ("two", 0.5)):
        write(
            f"head/a/heads/{name}/config.json",
            {"train": {"test": {"kl": kl, "auroc": 0.75, "ece": 0.1}}},
        )
    live = [{"name": "luckiest", "speedup": {"value": 1.9}}]
    answer = {"setting": "fixed_length(num_tokens=3)", "speedup": {"value": 1.3}}
    write("evaluate/b/report.json", {"live": live, "answer": answer})
    write("distill/d/draft/distill.json", {"test": {"after": {"acceptance": 0.625}}})
    write("head/damaged/heads/one/config.json", "{")
    write("head/damaged/.hydra/overrides.yaml", "{")
    for number, depth in ((0, 1), (10, 3), (2, 2)):
        write(f"head/sweep/{number}/run.json", {"finished": number == 0})
        write(f"head/sweep/{number}/.hydra/overrides.yaml", f"- model=nano\n- head.depth={depth}\n")
    write("head/sweep/run.json", {})
    return tmp_path


def test_runs_and_heads_are_listed_with_their_figures(outputs, run):
    code, text, _ = run("runs")
    assert code == 0 and f"relative to {outputs}" in text.replace("~", str(Path.home()))
    for path, about in (
        ("head/a/heads/one", "KL 0.250, AUROC 0.750; model=nano head.depth=1"),
        ("head/a/heads/two", "KL 0.500, AUROC 0.750; model=nano head.depth=1"),
        ("evaluate/b", "use fixed_length(num_tokens=3), 1.30 times the target alone"),
        ("distill/d/draft", "acceptance 0.625"),
        ("head/sweep/2", "unfinished; model=nano head.depth=2"),
    ):
        assert f"\noutputs/{path}\n  {about}\n" in text
    assert "\noutputs/head/damaged/heads/one\n" in text
    places = [text.index(f"head/sweep/{number}\n") for number in (0, 2, 10)]
    assert places == sorted(places)


def test_no_path_is_broken_in_a_narrow_terminal(outputs, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    long = outputs / "outputs" / "head" / "2026-11-30_01-44-34" / "heads" / "next_token-d3-r1-long"
    long.mkdir(parents=True)
    (long.parents[1] / "run.json").write_text("{}")
    (long / "config.json").write_text(json.dumps({"train": {"test": {"kl": 0.5}}}))
    lines = run("runs", f"outputs={outputs / 'outputs'}")[1].splitlines()
    assert str(long.relative_to(outputs)) in lines
    assert all(len(line) <= 40 for line in lines[1:] if line.startswith("  "))


@pytest.mark.parametrize("content", ["", "{}", "[]", "null", "7", '{"test": []}', '{"answer": {}}'])
def test_damaged_files_and_copies_of_folders_are_listed_without_figures(outputs, run, content):
    runs = outputs / "outputs"
    for name in (
        "head/a/heads/one/config.json",
        "evaluate/b/report.json",
        "distill/d/draft/distill.json",
        "head/a/.hydra/overrides.yaml",
        "head/a/run.json",
    ):
        (runs / name).write_text(content)
    shutil.copytree(runs / "head/sweep/0", runs / "head/sweep/0 copy")
    code, text, _ = run("runs")
    assert code == 0 and "outputs/head/a/heads/two" in text and "outputs/distill/d" in text
    assert "0 copy" not in text


def test_jobs_are_listed_by_what_differs(outputs, capsys):
    from specheads.commands.runs import jobs_of, print_runs

    print_runs(jobs_of(outputs / "outputs" / "head" / "sweep"))
    text = capsys.readouterr().out
    assert all(f"head.depth={depth}" in text for depth in (1, 2, 3)) and "model=nano" not in text
    assert jobs_of(outputs / "outputs" / "head" / "a") == []


def test_a_folder_without_runs_is_said(run, tmp_path):
    assert run("runs", f"outputs={tmp_path}")[2].startswith(
        f"error: outputs={tmp_path} has no runs; give the folder"
    )
    assert "specheads runs: 'head=x' is not known; it takes outputs=." in run("runs", "head=x")[2]
