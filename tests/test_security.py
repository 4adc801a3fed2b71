"""What SECURITY.md promises: files of others run no code, code with models needs consent, exports
name exact versions.
"""

import ast
import json
import pickle
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from dangerous_calls import dangerous_calls
from fakes import tiny_llama
from report_example import report_example

from specheads import AcceptanceHead, UserError, Warp, load_pair
from specheads.evaluation.page.document import html_of
from specheads.evaluation.report import TextSample
from specheads.heads.head import save_head
from specheads.pair.config import PairConfig
from specheads.pair.revisions import content_of, revision_at, revision_of
from specheads.training.distill.distillation import draft_provenance
from specheads.training.distill.settings import Distillation
from specheads.training.heads.settings import HeadTraining
from specheads.training.trainer import Checkpoints, checkpoint_to_resume

ROOT = Path(__file__).parents[1]
CODE = ("specheads", "data_gen", "benchmarks", "examples", "train.py", "evaluate.py")
# Compiled steps of this user, in a folder that nobody else can write to.
ALLOWED = {"specheads/decoding/engine/compiled_program.py": ["pickle.loads"]}


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def trace(tmp_path):
    """A path that exists once code of a file has run."""
    return tmp_path / "code-has-run"


# --- the source


def sources():
    paths = [
        path
        for place in CODE
        for path in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py"))
    ]
    assert len(paths) > 180
    return paths


def test_no_source_runs_what_a_file_or_a_model_says():
    listed = {str(path.relative_to(ROOT)): dangerous_calls(path.read_text()) for path in sources()}
    assert {path: calls for path, calls in listed.items() if calls} == ALLOWED


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("eval('1')", ["eval"]),
        ("model.eval(); re.compile('a'); torch.compile(f)", []),
        ("import pickle as p\np.loads(b'')", ["pickle.loads"]),
        ("from pickle import load\nload(f)", ["pickle.load"]),
        ("from os import system as run\nrun('ls')", ["os.system"]),
        ("import subprocess\nsubprocess.run('ls', shell=True)", ["subprocess.run(shell)"]),
        ("import subprocess\nsubprocess.run(['ls'], shell=False)", []),
        ("import yaml\nyaml.load(f, Loader=L)\nyaml.safe_load(f)", ["yaml.load"]),
        (
            "import torch\ntorch.load(f)\ntorch.load(f, weights_only=flag)",
            ["torch.load(weights_only)"] * 2,
        ),
        ("import torch\ntorch.load(f, weights_only=True)", []),
        (
            "import numpy as np\nnp.load(f)\nnp.load(f, allow_pickle=True)",
            ["numpy.load(allow_pickle)"],
        ),
        ("M.from_pretrained(x, trust_remote_code=True)", ["from_pretrained(trust_remote_code)"]),
        ("M.from_pretrained(x, trust_remote_code=asked)", []),
    ],
)
def test_dangerous_calls_are_found_under_any_name(source, names):
    assert dangerous_calls(source) == names


# --- files of others


def test_a_checkpoint_that_holds_code_is_refused_and_does_not_run_it(tmp_path, trace, caplog):
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    path.parent.mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text(json.dumps({"resumed": True}))
    checkpoints = Checkpoints(path, every_steps=1, provenance={})
    checkpoints.provenance = {"seed": 1}
    torch.save({"provenance": {"seed": 1}, "state_dict": Trap(trace)}, path)
    assert checkpoint_to_resume(checkpoints) is None and "training starts again" in caplog.text
    assert not trace.exists()
    # The trap is one: an ordinary unpickler springs it, and then fails to find a dictionary.
    with pytest.raises(TypeError):
        dict(pickle.loads(pickle.dumps(Trap(trace))))
    assert trace.exists()


def test_weights_that_hold_code_are_refused_and_do_not_run_it(tmp_path, trace):
    folder = tmp_path / "draft"
    tiny_llama(5, seed=0).save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Trap(trace)}, folder / "pytorch_model.bin")
    with pytest.raises((UserError, pickle.UnpicklingError)):
        load_pair(draft=folder, target="embedded:nano/target", tokenizer="embedded:nano")
    assert not trace.exists()


# --- code that comes with models


@pytest.fixture
def with_code(tmp_path, trace):
    """A function that writes nano's model of a role with code of its own, and returns its
    folder.
    """

    def write(role):
        folder = shutil.copytree(ROOT / "specheads" / "nano" / role, tmp_path / role)
        config = json.loads((folder / "config.json").read_text())
        config |= {"model_type": f"mine_{role}", "architectures": ["Mine"]}
        config["auto_map"] = {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.Mine"}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "mine.py").write_text(
            "from pathlib import Path\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
            f"Path({str(trace)!r}).touch()\n\n\n"
            f"class MyConfig(LlamaConfig):\n    model_type = 'mine_{role}'\n\n\n"
            "class Mine(LlamaForCausalLM):\n    config_class = MyConfig\n"
        )
        return folder

    return write


@pytest.mark.parametrize("role", ["draft", "target"])
def test_code_with_a_model_runs_only_where_that_model_is_trusted(with_code, trace, role):
    other = "target" if role == "draft" else "draft"
    keys = {
        role: with_code(role),
        other: f"embedded:nano/{other}",
        "tokenizer": "embedded:nano",
        "dtype": "float32",
    }
    for trusted in ({}, {"trust_remote_code": False}, {"trust_remote_code": other}):
        with pytest.raises(UserError, match="trust_remote_code"):
            load_pair(**keys, **trusted)
        assert not trace.exists()
    for trusted in (role, True):
        pair = load_pair(**keys, trust_remote_code=trusted)
        assert type(getattr(pair, role)).__name__ == "Mine" and trace.exists()


def test_nobody_is_trusted_by_default():
    assert PairConfig().trust_remote_code is False
    configs = list((ROOT / "conf" / "model").glob("*.yaml"))
    assert configs and not any("trust_remote_code" in path.read_text() for path in configs)


# --- exact versions

COMMITS = {"draft": "d" * 40, "target": "a" * 40}


@pytest.fixture
def from_hub(tmp_path, monkeypatch):
    """A pair of the hub, as it lies in the cache after a download."""
    for role, commit in COMMITS.items():
        repository = tmp_path / f"models--somebody--{role}"
        folder = repository / "snapshots" / commit
        shutil.copytree(ROOT / "specheads" / "nano" / role, folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ROOT / "specheads" / "nano" / name, folder)
        (repository / "refs").mkdir()
        for name in ("main", "v1"):
            (repository / "refs" / name).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return load_pair(
        draft="somebody/draft", target="somebody/target", target_revision="v1", dtype="float32"
    )


def test_exports_name_the_commits_of_both_models(from_hub, tmp_path):
    revisions = {role: content_of(f"embedded:nano/{role}") for role in COMMITS}
    assert (from_hub.draft_revision, from_hub.target_revision) == (
        revisions["draft"],
        revisions["target"],
    )
    assert (
        revision_of(from_hub.draft.config, "somebody/draft")
        == revision_at("somebody/draft")
        == revisions["draft"]
    )
    expected = {
        role: {"id": f"somebody/{role}", "revision": revisions[role], "commit": commit}
        for role, commit in COMMITS.items()
    }
    (spec,) = HeadTraining(heads="lookahead", warp=Warp()).specs(from_hub)
    head = AcceptanceHead(spec.config)
    folder = save_head(head, tmp_path / "head", torch.randn(4, head.config.input_size))
    written = json.loads((folder / "config.json").read_text())
    assert {role: written[role] for role in COMMITS} == expected
    assert all(
        f"somebody/{role} (commit {commit})" in (folder / "README.md").read_text()
        for role, commit in COMMITS.items()
    )
    provenance = draft_provenance(from_hub, Distillation(), tmp_path, 1)
    assert {role: provenance[role] for role in COMMITS} == expected


# --- what a model wrote

TEXTS = [
    "<script>document.title = 'run'</script>",
    "</pre></article><img src=x onerror=alert(1)>",
    "[click](javascript:alert(1)) **bold** `code` | a | b |",
    "{{ 7 * 7 }} {% raw %} ${x} <!-- ",
    "\x1b[31mred [bold]not markup[/bold]",
]


class Tags(HTMLParser):
    """The tags of a page with their attributes, in order."""

    def __init__(self, html):
        super().__init__()
        self.tags = []
        self.text = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, attrs))

    def handle_data(self, data):
        self.text.append(data)


def test_responses_and_prompts_are_text_on_the_page_whatever_they_hold():
    report = report_example()

    def page_with(texts):
        pieces = [[("accepted", text), ("rejected", text), ("target", text)] for text in texts]
        samples = [
            TextSample("fixed_length(num_tokens=5)", text, each)
            for text, each in zip(texts, pieces, strict=True)
        ]
        return Tags(html_of(replace(report, texts=samples)))

    harmless = [f"harmless {number}" for number in range(len(TEXTS))]
    plain = page_with(harmless)
    page = page_with(TEXTS)
    assert page.tags == plain.tags
    for text, other in zip(TEXTS, harmless, strict=True):
        assert "".join(page.text).count(text) == "".join(plain.text).count(other) > 0
    assert any(
        tag == "meta" and "default-src 'none'" in (dict(attrs).get("content") or "")
        for tag, attrs in page.tags
    )


# --- what is promised


def test_every_promise_names_tests_that_exist():
    text = (ROOT / "SECURITY.md").read_text()
    promises = [line for line in text.splitlines() if line.startswith("- ")]
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text)
    assert promises and len(named) >= len(promises)
    for path, name in named:
        functions = [
            node.name
            for node in ast.walk(ast.parse((ROOT / path).read_text()))
            if isinstance(node, ast.FunctionDef)
        ]
        assert name in functions, f"{path} has no {name}"
    blocks = re.split(r"\n- ", text)[1:]
    assert all(re.search(r"`tests/[\w/]+\.py::test_\w+`", block) for block in blocks)
