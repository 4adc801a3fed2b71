"""README and docs: their snippets run, their links lead somewhere, every public name is
documented.
"""

import ast
import re
from pathlib import Path

import pytest
import torch
from warm_processes import run

import specheads
from specheads.commands.verbs import VERBS
from specheads.heads.head import AcceptanceHead, HeadConfig, save_head

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]
PAGES += [
    page
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if "_build" not in page.parts and not page.is_relative_to(ROOT / "docs" / "commands")
]
VARIABLE = re.compile(r"[A-Z][A-Z0-9]*_[A-Z0-9_]+")
# Torchrun's and srun's, for their processes; bash's, for what completes words.
OF_LAUNCHERS = ("TORCHELASTIC_", "COMP_", "SLURM_", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK")
OF_OTHER_PACKAGES = {"OMP_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE", "HF_TOKEN"}
SNIPPET = re.compile(r"^( *)```python\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
# What a snippet leaves to the reader, and sizes that take seconds.
FILLED = {
    '"mini"': '"nano"',
    "outputs/head/<date_time>/heads/lookahead-d3-r1": "head",
    "NanoSource(200, 50, 50)": "NanoSource(8, 4, 4)",
    "DataGeneration()": "DataGeneration(max_new_tokens=12)",
    'HeadTraining(heads="lookahead")': (
        'HeadTraining(heads="lookahead", trainer={"max_epochs": 1}, calibration=None)'
    ),
    "Evaluation(num_prompts=32)": (
        "Evaluation(num_prompts=2, num_dev_prompts=2, num_live_prompts=1, max_new_tokens=8,"
        " timing_seconds=1)"
    ),
    "specheads.Distillation()": (
        'specheads.Distillation(trainer={"max_epochs": 1}, num_dev_prompts=2)'
    ),
}
NEED_VLLM = "LLM("  # of snippets that begin so only the syntax is checked


def snippets():
    found = [
        (page.relative_to(ROOT), match[2])
        for page in PAGES
        if page.name != "own_pair.md"  # its blocks run in order, in test_guide.py
        for match in SNIPPET.finditer(page.read_text())
    ]
    return [
        pytest.param(page, text, id=f"{page}-{number}") for number, (page, text) in enumerate(found)
    ]


@pytest.mark.parametrize(("page", "text"), snippets())
def test_snippets_run(page, text, nano, tmp_path):
    if text.startswith(NEED_VLLM):
        ast.parse(text)
        return
    for reader, here in FILLED.items():
        text = text.replace(reader, here)
    torch.manual_seed(0)
    draft = {"id": nano.draft_id, "revision": nano.draft_revision}
    head = AcceptanceHead(HeadConfig(nano.draft_lm.hidden_size, draft=draft))
    torch.nn.init.normal_(head.readout.weight)
    save_head(head.eval(), tmp_path / "head")
    script = tmp_path / "snippet.py"
    script.write_text(text)
    done = run(tmp_path, str(script))
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_public_name_is_documented():
    text = (ROOT / "docs" / "api.md").read_text()
    modules = {"drafting", "stopping", "verification"}
    for name in specheads.__all__:
        wanted = (
            rf"automodule:: specheads\.decoding\.{name}$"
            if name in modules
            else rf":: specheads\.{name}$"
        )
        assert re.search(wanted, text, re.MULTILINE), name
        assert getattr(specheads, name).__doc__, name


def anchors(page):
    """Return the anchors of a page's headings, as GitHub and the documentation make them."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere_and_named_files_exist(page):
    text = page.read_text()
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        if not target.startswith("https://"):
            leads_to = page.parent / target if target else page
            assert leads_to.exists(), target
            assert not anchor or anchor in anchors(leads_to), f"{target}#{anchor}"
    folders = "specheads|data_gen|benchmarks|conf|examples|tests"
    for name in re.findall(rf"`((?:{folders})/[\w/.-]+)`", text):
        assert (ROOT / name).exists(), name


def test_every_verb_has_a_page():
    """Their pages are written when the documentation is built."""
    listed = re.findall(
        r"^commands/(\w+)$", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE
    )
    assert set(listed) == VERBS.keys() - {"runs"}  # a line of help


def test_every_environment_variable_is_explained():
    """A page names all that the packages' code and the tests read or set, and none that is not
    there, but for those that other packages read.
    """
    names = set(re.findall(r"SPECHEADS_[A-Z_]+\b", (ROOT / "tests" / "vllm" / "run").read_text()))
    for folder in ("specheads", "data_gen"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            # Names are constants there, some in a table or a module's variable.
            nodes = ast.walk(ast.parse(text)) if "environ" in text else []
            strings = [str(node.value) for node in nodes if isinstance(node, ast.Constant)]
            names |= set(filter(VARIABLE.fullmatch, strings))
    assert {"SPECHEADS_ENGINE", "SPECHEADS_CACHE", "TORCHINDUCTOR_CACHE_DIR"} <= names
    page = (ROOT / "docs" / "environment.md").read_text()
    explained = set(re.findall(r"`([A-Z][A-Z0-9]*_[A-Z0-9_]+)`", page))
    assert {name for name in names if not name.startswith(OF_LAUNCHERS)} <= explained
    assert explained - names == OF_OTHER_PACKAGES
