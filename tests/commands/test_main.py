"""The `specheads` command: every verb is handed on, to its module or to the verbs for heads."""

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
from specheads.commands import compose
from specheads.commands import main as main_module
from specheads.commands.command import CommandLine
from specheads.commands.help import PROGRAMS
from specheads.commands.main import VERB_OF_PARENT, VERBS

ROOT = Path(__file__).parents[2]


def test_every_verb_has_a_module_and_a_config():
    commands = {name: verb.load() for name, verb in VERBS.items() if verb.config}
    assert {command.name for command in commands.values()} == PROGRAMS.keys()
    assert all(PROGRAMS[command.name] == f"specheads {verb}" for verb, command in commands.items())


def test_a_verb_is_handed_on_with_its_words(run, monkeypatch):
    called = []
    monkeypatch.setattr(CommandLine, "run", lambda line: called.append((line.name, sys.argv[1:])))
    assert (
        run("evaluate", "head=mine")[0] == run("distill", "model=nano")[0] == run("train")[0] == 0
    )
    assert called == [("evaluate", ["head=mine"]), ("distill", ["model=nano"]), ("train", [])]


def test_a_further_process_of_a_run_has_the_verb_of_the_first(run, monkeypatch):
    called = []
    monkeypatch.setattr(CommandLine, "run", lambda line: called.append((line.name, sys.argv[1:])))
    run("distill", "model=nano")
    assert os.environ[VERB_OF_PARENT] == "distill"
    monkeypatch.setenv("LOCAL_RANK", "1")
    run("-cp", "conf", "model=nano")
    assert called[1] == ("distill", ["-cp", "conf", "model=nano"])


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_help_lists_all_verbs_in_a_screen(run, words):
    code, text, _ = run(*words)
    assert code == 0 and len(text.splitlines()) < 24 and max(map(len, text.splitlines())) <= 80
    for name, about in ({name: entry.about for name, entry in VERBS.items()}).items():
        assert f"  {name} " in text and about in text


def test_the_version_is_that_of_the_package(run):
    assert run("--version") == (0, f"specheads {specheads.__version__}\n", "")


@pytest.mark.parametrize(
    ("line", "word", "expected"),
    [
        ("specheads tr", "tr", ["train "]),
        ("specheads train head.de", "head.de", ["head.depth="]),
        ("specheads train model=na", "na", ["nano"]),  # bash's word begins after "="
        ("specheads train model=na", "model=na", ["model=nano"]),
        ("specheads train experiment=th", "th", ["thorough"]),
        ("specheads export h", "h", []),
    ],
)
def test_tab_completes_verbs_keys_and_choices(run, monkeypatch, line, word, expected):
    monkeypatch.setenv("COMP_LINE", f"{line} more")
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    assert [
        each for each in run("--complete", "specheads", word, "before")[1].split("\n") if each
    ] == expected


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train", "lr=1e-3"], "lr=1e-3: there is no such key; did you mean optimizer.lr? "),
        (["train", "batch_size=4"], "did you mean generation.batch_size or loader.batch_size? "),
        (["train", "hed.depth=2"], "hed.depth=2: there is no such key; did you mean head.depth? "),
        (
            ["train", "+experiment=specdecpp"],
            "+experiment=: a plus adds what is not listed, and experiment is listed; ",
        ),
        (
            ["evaluate", "stopping=fixed"],
            "stopping=fixed: there is no such choice; did you mean fixed_length? ",
        ),
        (
            ["train", "--head.depth=2"],
            "--head.depth=2 is no option; keys have no dashes: write head.depth=<value>.",
        ),
        (
            ["train", "--model", "nano"],
            "--model is no option; keys have no dashes: write model=<value>.",
        ),
        (
            ["train", "seed=1", "--config-dir", "{folder}", "model=nosuch"],
            "model=nosuch: there is no such choice; ",
        ),
        (
            ["evaluate", "head=a/b/c"],
            "there is no head folder 'a/b/c'; train one with specheads train, or use head=latest.",
        ),
        (["trian"], "specheads trian: there is no such verb; did you mean train? "),
    ],
)
def test_a_mistake_in_the_words_is_one_sentence_with_the_remedy(
    run, tmp_path, monkeypatch, words, told
):
    monkeypatch.chdir(tmp_path)
    code, _, error = run(*(word.format(folder=tmp_path) for word in words))
    assert (
        code == 2 and error.startswith("error: ") and told in error and len(error.splitlines()) == 1
    )


def test_an_unknown_verb_is_one_message(run):
    code, out, error = run("prob")
    assert (
        code == 2
        and not out
        and error.startswith(
            "error: specheads prob: there is no such verb; did you mean probe? use probe, data,"
            " train, distill"
        )
    )


@pytest.mark.parametrize(
    "words", [["-m", "specheads"], ["-c", "from specheads.commands.main import main; main()"]]
)
def test_the_command_runs_as_a_module_too(words, tmp_path):
    done = subprocess.run(
        [sys.executable, *words, "inspekt"],
        cwd=tmp_path,
        env=shell(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and done.stderr.startswith(
        "error: specheads inspekt: there is no such verb"
    ), done.stderr


def test_a_reader_that_stops_reading_is_no_error(tmp_path):
    line = (  # which has ended when the help is printed
        f"set -o pipefail; {sys.executable} -m specheads --help | true"
    )
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=shell(), capture_output=True, text=True, check=True
    )
    assert not done.stdout and not done.stderr


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
    done = run_warm(tmp_path, "specheads", *words)
    assert done.returncode == 0, done.stderr
    assert f"next: specheads train {' '.join(words[1:])}" in done.stdout


@pytest.mark.parametrize(
    ("words", "large"),
    [
        (["--help"], {"torch", "transformers", "lightning", "hydra", "rich", "yaml"}),
        (["train", "--help"], {"torch", "transformers", "lightning"}),
    ],
)
def test_help_imports_no_large_library(words, large, tmp_path):
    script = (
        f"import sys; from {main_module.__name__} import run; run({words}); assert not {large} &"
        " set(sys.modules)"
    )
    variables = shell(SPECHEADS_CACHE=str(tmp_path))
    for _ in range(1 + ("train" in words)):  # the first one notes the keys
        done = subprocess.run(
            [sys.executable, "-c", script],
            check=False,
            env=variables,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr


def test_noted_keys_are_read_until_the_source_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECHEADS_CACHE", str(tmp_path))
    keys = compose.keys_of("train")
    (note,) = (tmp_path / "keys").iterdir()
    assert (
        compose.keys_of("train") == keys
        and keys.defaults["head"]["depth"] == 3
        and "residual" in keys.sentences["head.depth"]
    )
    content = json.loads(note.read_text())
    note.write_text(json.dumps(content | {"keys": [{}, {"noted": "so"}]}))
    assert compose.keys_of("train").sentences == {"noted": "so"}
    for stale in ("{", "[]", json.dumps({"state": "another", "keys": [{}, {}]})):
        note.write_text(stale)
        assert compose.keys_of("train") == keys
