"""The wheel in an environment without the source tree: every way to decode with a head yields the
same tokens there.

A user's whole way by it leaves no token, user name or home folder in any file, or in what is
printed.
"""

import json
import os
import shlex
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from warm_processes import Server

from specheads.heads.head import AcceptanceHead, HeadConfig, save_head

ROOT = Path(__file__).parents[2]
SOURCES = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "NOTICE",
    "licenses",
    "specheads",
    "data_gen",
    "conf",
)

USER = "gundula-mustermann"
TOKEN = "hf_NotForOthersNotForOthers"
KEY = "0123456789abcdef0123456789abcdef01234567"
SECRETS = {"user name": USER, "token": TOKEN, "key": KEY}
SMALL = ["data.max_new_tokens=8", "trainer.max_epochs=1"]
# Lightning starts the installed script a second time
TWO = ["trainer.devices=2", "trainer.accelerator=cpu"]
REPLAYED = ["num_prompts=2", "num_live_prompts=1", "max_new_tokens=8"]


def run(*words, cwd, **variables):
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "WANDB_SERVICE")
    }
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**environment, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The programs of an environment with the wheel, the packages of this one, and nothing else of
    this project.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    others = shutil.ignore_patterns("mini", "smollm2", "__pycache__")  # larger pairs
    for name in SOURCES:  # copied, as building writes into the tree
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=others)
        else:
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip"]
    words = ["--no-deps", "--no-build-isolation", "-w", folder, source]
    built = run(*pip, "wheel", *words, cwd=folder)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    made = run(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    assert made.returncode == 0, made.stderr
    programs = folder / "env" / "bin"
    (packages,) = (folder / "env").glob("lib/python*/site-packages")
    # Paths that are added so are searched, but the editable installs among them are not followed.
    (packages / "dependencies.pth").write_text(
        "".join(f"{path}\n" for path in site.getsitepackages())
    )
    words = ["--python", programs / "python", "install", "--no-deps", "--no-index", wheel]
    installed = run(*pip, *words, cwd=folder)
    assert installed.returncode == 0, installed.stderr
    return programs


@pytest.mark.full
def test_every_path_decodes_the_same_tokens_in_the_same_rounds(environment, tmp_path):
    script = shutil.copy(Path(__file__).with_name("every_path.py"), tmp_path)
    done = run(
        environment / "python",
        script,
        tmp_path,
        cwd=tmp_path,
        SPECHEADS_ENGINE="eager",
        HF_HUB_OFFLINE="1",
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report.pop("specheads").startswith(str(environment.parent))
    lengths = set()
    for ways in report.values():
        ours = ways.pop("decoder")
        assert ways.keys() >= {"transformers", "custom_generate", "standalone", "onnx"}
        for name, decoded in ways.items():
            assert [tokens for tokens, _ in decoded] == [tokens for tokens, _ in ours], name
            # custom_generate returns tokens alone; the forward passes of the draft are counted
            expected = (
                [sum(drafts) for _, drafts in ours]
                if name == "custom_generate"
                else [drafts for _, drafts in ours]
            )
            assert [drafts for _, drafts in decoded] == expected, name
        lengths |= {length for _, drafts in ours for length in drafts}
    assert len(report["next_token"]["onnx"]) == 20
    assert len(lengths) > 4  # the heads decide the lengths


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home") / USER
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def server(environment, home):
    """Runs the programs of the environment, for a user."""
    user = {"HOME": str(home), "HF_HOME": str(home / "hub"), "SPECHEADS_CACHE": ""}
    user |= dict.fromkeys(("USER", "LOGNAME", "USERNAME"), USER)
    user |= {"HF_TOKEN": TOKEN, "WANDB_API_KEY": KEY}
    user["MPLCONFIGDIR"] = str(home.parent / "matplotlib")
    server = Server(environment / "python", PYTHONPATH="", **user)
    assert server.package.is_relative_to(environment.parent)
    return server


@pytest.fixture(scope="module")
def commands(environment, home, server):
    """The home folder of a user, after every kind of installed command has run in it, and what each
    printed.

    Models and prompts lie there, too, and are given by absolute paths: a pair without a config goes
    through every stage, and evaluate is the command that train names.
    """
    project = home / "project"
    project.mkdir()
    nano = shutil.copytree(
        ROOT / "specheads" / "nano", home / "nano", ignore=shutil.ignore_patterns("*.py")
    )
    rows = [json.dumps({"question": f"def add_{number}(a, b):\n"}) for number in range(40)]
    (home / "mine.jsonl").write_text("\n".join(rows))
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
        "train": [*shared, *SMALL, *TWO],
        "evaluate": [
            *REPLAYED,
            "num_dev_prompts=2",
            "stopping=[fixed_length,head_threshold]",
            "fixed_lengths=[1,2]",
            "thresholds=[0.5]",
            "timing_seconds=1",
        ],
        "probe": [*shared, "num_prompts=2", "max_new_tokens=8"],
        "export": ["head={head}", "format=standalone"],
        "distill": [*shared, *SMALL],
    }
    printed = {}
    for verb, words in lines.items():
        heads = [str(path.parent) for path in project.glob("outputs/head/*/heads/*/config.json")]
        if verb == "evaluate":
            (named,) = [line for line in printed["train"].splitlines() if line.startswith("next: ")]
            words = [*shlex.split(named)[3:], *words]
        filled = [word.replace("{head}", heads[0]) if heads else word for word in words]
        done = server.run(project, environment / "specheads", verb, *filled)
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
    assert {
        "report.html",
        "report.json",
        "probe.json",
        "train.log",
        "evaluate.log",
        "hydra.yaml",
        "manifest.json",
    } <= names
    assert {"README.md", "config.json", "last.ckpt", "distill.json", "acceptance_head.py"} <= names
    leaking = [
        str(path.relative_to(home)) for path in files if SECRETS[kind].encode() in content_of(path)
    ]
    assert leaking == []


def test_every_command_runs_and_says_what_comes_next(commands):
    home, printed = commands
    wanted = {
        "train": "next: specheads evaluate",
        "evaluate": "report.html",
        "probe": "next: specheads",
        "export": "written",
    }
    for verb, text in (wanted | {"distill": "next: specheads train"}).items():
        assert text in printed[verb]
    assert {path.name for path in (home / "project").iterdir()} == {"data", "outputs"}


def test_what_is_printed_repeats_only_the_words_of_the_next_command(commands):
    _, printed = commands
    for text in printed.values():
        assert TOKEN not in text and KEY not in text
        assert [
            line
            for line in text.splitlines()
            if USER in line and not line.startswith("next: specheads ")
        ] == []


def new_head(folder):
    torch.manual_seed(0)
    return save_head(AcceptanceHead(HeadConfig(hidden_size=160, depth=1, width=16)), folder)


def test_a_head_loads_by_the_wheel(environment, server, tmp_path):
    folder = new_head(tmp_path / "head")
    done = server.run(tmp_path, environment / "specheads", "export", f"head={folder}")
    assert done.returncode == 0, done.stderr
    assert "323 inputs, width 16, 1 residual blocks" in done.stdout


def test_the_wheel_has_the_sources_of_the_operators(server):
    """Other tests build them from the same files in the tree."""

    def sources(package):
        return {
            path.name: path.read_bytes()
            for path in (package / "decoding/engine/cpu").glob("*.[ch]*")
        }

    assert len(sources(ROOT / "specheads")) > 5
    assert sources(server.package.parent) == sources(ROOT / "specheads")
