"""docs/own_pair.md as a user follows it: its blocks, read from the page, run in order on a small
pair of folders, whose draft and head are those that the steps before have made.
"""

import importlib.metadata
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from warm_processes import run

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "own_pair.md"
BLOCK = re.compile(r"^   ```(bash|python)\n(.*?)^   ```", re.DOTALL | re.MULTILINE)
PLACEHOLDER = re.compile(r"outputs/(\w+)/<date_time>")
# What is appended to each command, so that it takes seconds.
PROMPTS = ["data.num_train=12", "data.num_dev=4", "data.num_test=4", "data.max_new_tokens=8"]
SMALL = {
    "probe": ["num_prompts=4", "data.max_new_tokens=8", "timing_seconds=1"],
    "distill": [*PROMPTS, "trainer.max_epochs=1", "loader.batch_size=4"],
    "train": [*PROMPTS, "trainer.max_epochs=1", "calibration=2"],
    "evaluate": [
        *PROMPTS,
        "num_prompts=2",
        "num_dev_prompts=2",
        "num_live_prompts=1",
        "timing_seconds=1",
    ],
    "export": [],
}
PAIR = {"model=mine", "model.target=my/target", "data.path=mine.jsonl"}


def blocks():
    """Return the kind and the text of each block of the guide, without its indentation."""
    guide = PAGE.read_text().partition("\n## ")[0]
    found = []
    for kind, text in BLOCK.findall(guide):
        found.append((kind, "\n".join(line[3:] for line in text.splitlines())))
    return found


@pytest.fixture
def folder(tmp_path):
    """A working folder with a pair in two folders, and prompts."""
    nano = ROOT / "specheads" / "nano"
    for role in ("draft", "target"):
        shutil.copytree(nano / role, tmp_path / "my" / role)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(nano / name, tmp_path / "my" / role)
    rows = [json.dumps({"instruction": f"def add_{number}(x):"}) for number in range(20)]
    (tmp_path / "mine.jsonl").write_text("\n".join(rows))
    return tmp_path


def has_vllm():
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def filled(text, folder):
    """Return a block with the folders of the runs that the steps before have left."""

    def newest(match):
        return str(max(folder.glob(f"outputs/{match[1]}/*")).relative_to(folder))

    return PLACEHOLDER.sub(newest, text)


def test_the_guide_has_one_pair_and_one_set_of_prompts():
    commands = [shlex.split(text) for kind, text in blocks() if kind == "bash"]
    assert [words[1] for words in commands] == [
        "probe",
        "distill",
        "distill",
        "train",
        "evaluate",
        "export",
    ]
    for words in commands[:-1]:
        assert set(words) >= PAIR and len([each for each in words if "draft=" in each]) == 1
    assert [kind for kind, _ in blocks()][-2:] == ["python", "python"]


def test_the_guide_runs_as_it_is_written(folder):
    for kind, text in blocks():
        text = filled(text, folder)
        if kind == "python":
            if "vllm" in text and not has_vllm():
                continue
            (folder / "serve.py").write_text(text)
            done = run(folder, str(folder / "serve.py"))
            assert done.returncode == 0, done.stderr[-3000:]
            assert "def mean(values):" in done.stdout
            continue
        program, verb, *words = shlex.split(text)
        before = set(folder.glob("outputs/*/*"))
        done = run(folder, program, verb, *words, *SMALL[verb], SPECHEADS_ENGINE="eager")
        assert done.returncode == 0, done.stderr[-3000:]
        made = set(folder.glob("outputs/*/*")) - before
        assert len(made) == (0 if verb == "export" or "--plan" in words else 1)
    assert (max(folder.glob("outputs/evaluate/*")) / "report.html").is_file()
    assert list(folder.glob("outputs/head/*/heads/lookahead-d3-r1/acceptance_head.py"))
