"""The `specheads` command: every verb is handed on to what runs it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import shell
from warm_processes import run as run_warm

import specheads
from specheads.commands import main as main_module
from specheads.commands.main import VERB_OF_PARENT, function_of
from specheads.commands.verbs import VERBS
from specheads.settings import Settings

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_every_verb_has_a_function_and_settings_for_its_config(verb):
    assert callable(function_of(verb))
    assert all(issubclass(cls, Settings) for cls in verb.settings())
    assert (verb.config is None) == (not verb.classes)


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_help_lists_all_verbs_in_a_screen(run, words):
    code, text, _ = run(*words)
    assert code == 0 and len(text.splitlines()) < 24 and max(map(len, text.splitlines())) <= 80
    for name, verb in VERBS.items():
        assert f"  {name} " in text and verb.about in text


def test_the_version_is_that_of_the_package(run):
    assert run("--version") == (0, f"specheads {specheads.__version__}\n", "")


def test_a_further_process_of_a_run_has_the_verb_of_the_first(run, monkeypatch):
    assert run("distill", "--help")[0] == 0
    assert os.environ[VERB_OF_PARENT] == "distill"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert "usage: specheads distill" in run("--help", parent="distill")[1]


# A command line, and below it a part of its message.
MISTAKES = """
train lr=1e-3
    lr=1e-3: there is no such key; did you mean optimizer.lr?
train batch_size=4
    did you mean generation.batch_size or loader.batch_size?
train seed=1 --config-dir . model=nosuch
    model=nosuch: there is no such choice;
evaluate head=a/b/c
    there is no head folder 'a/b/c'; train one with specheads train, or use head=latest.
trian
    specheads trian: there is no such verb; did you mean train? use probe, data, train, distill
runs sed=3
    'sed=3' is not known; it takes outputs=
"""
LINES = MISTAKES.strip().splitlines()


@pytest.mark.parametrize(("line", "told"), list(zip(LINES[::2], LINES[1::2], strict=True)))
def test_a_mistake_in_the_words_is_one_sentence_with_the_remedy(
    run, tmp_path, monkeypatch, line, told
):
    monkeypatch.chdir(tmp_path)
    code, _, error = run(*line.split())
    assert code == 2 and error.startswith("error: ") and told.strip() in error
    assert len(error.splitlines()) == 1


def test_the_command_runs_as_a_module_and_a_reader_that_stops_reading_is_no_error(tmp_path):
    python = f"{sys.executable} -m specheads"
    line = f"set -o pipefail; {python} --help | true; {python} inspekt"
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=shell(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: specheads inspekt: there is no such verb")


def test_a_pair_of_a_folder_of_configs_is_used_and_passed_on(tmp_path):
    """As docs/own_pair.md has it: two local folders, and a config with their keys outside the
    project.
    """
    for role in ("draft", "target"):
        shutil.copytree(ROOT / "specheads" / "nano" / role, tmp_path / role)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ROOT / "specheads" / "nano" / name, tmp_path / role)
    (tmp_path / "my-conf" / "model").mkdir(parents=True)
    (tmp_path / "my-conf" / "model" / "my-pair.yaml").write_text("draft: draft\ntarget: target\n")
    rows = [json.dumps({"instruction": f"Say {number}."}) for number in range(6)]
    (tmp_path / "mine.jsonl").write_text("\n".join(rows))
    sizes = ["data.num_train=2", "data.num_dev=2", "data.num_test=2", "data.max_new_tokens=4"]
    words = ["data", "--config-dir", "my-conf", "model=my-pair", "data.path=mine.jsonl", *sizes]
    done = run_warm(tmp_path, "specheads", *words, SPECHEADS_ENGINE="eager")
    assert done.returncode == 0, done.stderr
    assert f"next: specheads train {' '.join(words[1:])}" in done.stdout


def test_the_list_of_verbs_imports_no_library():
    large = {"torch", "pydantic", "hydra", "rich", "yaml"}
    script = f"import sys; from {main_module.__name__} import run; run(['--help'])"
    script += f"; assert not {large} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, env=shell(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
