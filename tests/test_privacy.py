"""No token, user name or home folder is in any file that a command writes, or in what it prints."""

import json
import os
import shlex
import shutil

import pyarrow.parquet as pq
import pytest
import torch
from commands import ROOT
from warm_processes import Server

from specheads import AcceptanceHead, HeadConfig, UserError, Warp, load_head, load_pair
from specheads.evaluation.head_folders import find_heads
from specheads.heads.head import save_head
from specheads.storage.files import without_home

USER, TOKEN, KEY = "gundula-mustermann", "hf_NotForOthersNotForOthers", "0123456789abcdef0123456789abcdef01234567"
SECRETS = {"user name": USER, "token": TOKEN, "key": KEY}
SMALL = ["data.max_new_tokens=8", "trainer.max_epochs=1"]
REPLAYED = ["num_prompts=2", "num_live_prompts=1", "max_new_tokens=8"]


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """The home folder of a user, after every kind of command has run in it, and what each printed.

    Models and prompts lie there, too, and are given by absolute paths: a pair without a config goes through every stage, and
    evaluate is the command that train names.
    """
    home = tmp_path_factory.mktemp("home") / USER
    project = home / "project"
    project.mkdir(parents=True)
    nano = shutil.copytree(ROOT / "specheads" / "nano", home / "nano", ignore=shutil.ignore_patterns("*.py"))
    rows = [json.dumps({"question": f"def add_{number}(a, b):\n"}) for number in range(40)]
    (home / "mine.jsonl").write_text("\n".join(rows))
    user = {"HOME": str(home), "USER": USER, "LOGNAME": USER, "USERNAME": USER, "HF_TOKEN": TOKEN, "WANDB_API_KEY": KEY}
    user |= {"SPECHEADS_CACHE": "", "HF_HOME": str(home / "hub"), "MPLCONFIGDIR": str(home.parent / "matplotlib")}
    pair = [f"model.{role}={nano / role}" for role in ("draft", "target")]
    shared = [
        "model=mine",
        *pair,
        f"model.tokenizer={nano}",
        "data=alpaca",
        f"data.path={home / 'mine.jsonl'}",
        "data.template='{question}'",
    ]
    lines = {
        "train": [*shared, *SMALL],
        "evaluate": [
            *REPLAYED,
            "num_dev_prompts=2",
            "stopping=[fixed_length,head_threshold]",
            "fixed_lengths=[1,2]",
            "thresholds=[0.5]",
        ],
        "probe": [*shared, *REPLAYED, "repeats=1"],
        "export": ["head={head}", "format=standalone"],
        "distill": [*shared, *SMALL],
    }
    printed, server = {}, Server(**user)
    for verb, words in lines.items():
        heads = [str(path.parent) for path in project.glob("outputs/head/*/heads/*/config.json")]
        if verb == "evaluate":
            (named,) = [line for line in printed["train"].splitlines() if line.startswith("next: ")]
            words = [*shlex.split(named)[3:], *words]
        filled = [word.replace("{head}", heads[0]) if heads else word for word in words]
        done = server.run(project, "specheads", verb, *filled)
        assert done.returncode == 0, done.stderr
        printed[verb] = done.stdout + done.stderr
    return home, printed


def content_of(path):
    """The bytes of a file; of a compressed table, its values and its description."""
    if path.suffix != ".parquet":
        return path.read_bytes()
    table = pq.read_table(path)
    return f"{table.schema.metadata} {table.to_pylist()}".encode()


@pytest.mark.parametrize("kind", SECRETS)
def test_no_file_names_the_user_or_a_secret(commands, kind):
    home, _ = commands
    files = [path for path in (home / "project").rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"report.html", "report.json", "probe.html", "train.log", "evaluate.log", "hydra.yaml", "manifest.json"} <= names
    assert {"README.md", "config.json", "last.ckpt", "speculation_profile.json", "distill.json", "acceptance_head.py"} <= names
    leaking = [str(path.relative_to(home)) for path in files if SECRETS[kind].encode() in content_of(path)]
    assert leaking == []


def test_prompts_without_counts_are_split_in_proportion(commands):
    _, printed = commands
    assert "in proportion: 31 train, 8 dev, 1 test" in printed["train"]


def test_the_models_are_named_below_the_home_folder(commands):
    home, _ = commands
    (config,) = (home / "project").glob("outputs/head/*/heads/*/config.json")
    assert json.loads(config.read_text())["draft"]["id"] == "~/nano/draft"


def test_what_is_printed_repeats_only_the_words_of_the_next_command(commands):
    _, printed = commands
    for text in printed.values():
        assert TOKEN not in text and KEY not in text
        assert [line for line in text.splitlines() if USER in line and not line.startswith("next: specheads ")] == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/ada", "~"),
        ("into /home/ada/runs, head=/home/ada", "into ~/runs, head=~"),
        ("/home/adam/runs /mnt/home/ada/runs /home/ada-2", "/home/adam/runs /mnt/home/ada/runs /home/ada-2"),
        ("file:///home/ada/x", "file://~/x"),
    ],
)
def test_the_home_folder_is_left_out_and_no_other(monkeypatch, text, shown):
    monkeypatch.setenv("HOME", "/home/ada")
    assert without_home(text) == shown


def test_a_link_to_the_home_folder_is_left_out_too(monkeypatch, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "ada").symlink_to(tmp_path / "disk")
    monkeypatch.setenv("HOME", str(tmp_path / "ada"))
    assert without_home(f"{tmp_path}/ada/a {tmp_path}/disk/b") == "~/a ~/b"
    monkeypatch.setenv("HOME", os.sep)
    assert without_home("/a /b") == "/a /b"


def test_models_and_heads_are_found_below_the_home_folder(monkeypatch, tmp_path, nano):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "nano").symlink_to(ROOT / "specheads" / "nano")
    pair = load_pair(draft="~/nano/draft", target=tmp_path / "nano" / "target", tokenizer="~/nano", dtype="float32")
    assert (pair.draft_id, pair.target_id) == ("~/nano/draft", "~/nano/target")
    assert (pair.draft_revision, pair.target_revision) == (nano.draft_revision, nano.target_revision)
    head = AcceptanceHead(HeadConfig(pair.draft_lm.hidden_size, depth=0))
    save_head(head, tmp_path / "head", torch.randn(4, head.config.input_size))
    assert list(find_heads("~/head", pair, tmp_path, Warp())) == ["head"]
    assert load_head("~/head").config == head.config
    with pytest.raises(UserError, match="there is no head folder '~/nowhere'"):
        load_head("~/nowhere")
