"""What SECURITY.md promises: files of others run no code, code with models needs consent, exports
name exact versions.
"""

import ast
import json
import pickle
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
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
# Ruff's rules against eval, exec, shells, unsafe YAML and everything that unpickles.
RUNS_CODE = "S102,S301,S302,S307,S506,S602,S604,S605"
# Compiled steps of this user, in a folder that nobody else can write to.
ALLOWED = ROOT / "specheads" / "decoding" / "engine" / "compiled_program.py"


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


def test_no_source_runs_what_a_file_or_a_model_says():
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--ignore-noqa", "--no-cache"]
    ruff += ["--output-format=json", f"--select={RUNS_CODE}", *CODE]
    found = json.loads(subprocess.run(ruff, cwd=ROOT, capture_output=True, check=False).stdout)
    assert [place["filename"] for place in found] == [str(ALLOWED)]
    paths = [path for name in CODE for path in (ROOT / name, *(ROOT / name).rglob("*.py"))]
    calls = [
        (path, node)
        for path in filter(Path.is_file, paths)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]
    assert len(calls) > 1000
    for path, call in calls:
        given = {each.arg: ast.unparse(each.value) for each in call.keywords}
        assert "True" not in (given.get("allow_pickle"), given.get("trust_remote_code")), path
        if ast.unparse(call.func) == "torch.load":
            assert given.get("weights_only") == "True", path


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
    keys = {role: with_code(role), other: f"embedded:nano/{other}"}
    keys |= {"tokenizer": "embedded:nano", "dtype": "float32"}
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
    models = {"draft": "somebody/draft", "target": "somebody/target"}
    return load_pair(**models, target_revision="v1", dtype="float32")


def test_exports_name_the_commits_of_both_models(from_hub, tmp_path):
    revisions = {role: content_of(f"embedded:nano/{role}") for role in COMMITS}
    loaded = {"draft": from_hub.draft_revision, "target": from_hub.target_revision}
    assert loaded == revisions
    found = revision_of(from_hub.draft.config, "somebody/draft")
    assert found == revision_at("somebody/draft") == revisions["draft"]
    expected = {
        role: {"id": f"somebody/{role}", "revision": revisions[role], "commit": commit}
        for role, commit in COMMITS.items()
    }
    (spec,) = HeadTraining(heads="lookahead", warp=Warp()).specs(from_hub)
    head = AcceptanceHead(spec.config)
    folder = save_head(head, tmp_path / "head", torch.randn(4, head.config.input_size))
    written = json.loads((folder / "config.json").read_text())
    provenance = draft_provenance(from_hub, Distillation(), tmp_path, 1)
    card = (folder / "README.md").read_text()
    for role, commit in COMMITS.items():
        assert written[role] == provenance[role] == expected[role]
        assert f"somebody/{role} (commit {commit})" in card


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
    def page_with(texts):
        samples = [
            TextSample("K=5", text, [(kind, text) for kind in ("accepted", "rejected", "target")])
            for text in texts
        ]
        return Tags(html_of(replace(report_example(), texts=samples)))

    harmless = [f"harmless {number}" for number in range(len(TEXTS))]
    plain = page_with(harmless)
    page = page_with(TEXTS)
    assert page.tags == plain.tags
    for text, other in zip(TEXTS, harmless, strict=True):
        assert "".join(page.text).count(text) == "".join(plain.text).count(other) > 0
    policies = [str(dict(attrs).get("content")) for tag, attrs in page.tags if tag == "meta"]
    assert any("default-src 'none'" in policy for policy in policies)


# --- what is promised


def test_every_promise_names_tests_that_exist():
    promises = re.split(r"\n- ", (ROOT / "SECURITY.md").read_text())[1:]
    assert promises
    for promise in promises:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", promise)
        assert named, promise
        for path, name in named:
            assert f"def {name}(" in (ROOT / path).read_text(), f"{path} has no {name}"
