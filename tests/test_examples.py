"""The examples run, and do what the decoder does."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from fakes import tiny_pair
from warm_processes import run as run_warm

import specheads
from examples.new_stopping_rule import UnsureTokens
from examples.speculative_decoding import speculative_decode
from specheads import (
    AcceptanceHead,
    HeadConfig,
    SpeculativeDecoder,
    Warp,
    generate_baseline,
    stopping,
)
from specheads.heads.head import save_head

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NUM_TOKENS = 30
KNOWN_TEXT = "verification=tree_match stopping=[fixed_length]"


def run(folder, *words, **variables):
    """Run a command line of a user who has the examples on the path."""
    return run_warm(
        folder, *map(str, words), PYTHONPATH=f"{EXAMPLES}{os.pathsep}{ROOT}", **variables
    )


def uneven_head(hidden_size, spread=1.0):
    """A head whose drafts have many lengths."""
    torch.manual_seed(3)
    calibration = {"slope": [1.2, 0.8], "intercept": [1.0, 0.5]}
    head = AcceptanceHead(HeadConfig(hidden_size, 1, width=8, calibration=calibration))
    torch.nn.init.normal_(head.readout.weight, std=spread)
    return head.eval().requires_grad_(False)


@pytest.mark.parametrize(
    "warp", [Warp(0), Warp(), Warp(0.8, top_k=5)], ids=["greedy", "sampled", "warped"]
)
@pytest.mark.parametrize("threshold", [0.3, 0.8])
def test_the_decoder_emits_the_tokens_of_the_algorithm(warp, threshold):
    pair = tiny_pair(vocab_size=7, scale=1.5)
    prompt = [3, 1, 4]
    lengths = set()
    num_accepted = 0
    head = uneven_head(pair.draft_lm.hidden_size)
    decoder = SpeculativeDecoder(pair, stopping=stopping.HeadThreshold(head, threshold), warp=warp)
    for seed in range(4):
        out = decoder.generate(prompt, NUM_TOKENS, seed=seed)
        expected = speculative_decode(pair, head, prompt, NUM_TOKENS, warp, threshold, seed)
        assert out.tokens.tolist() == expected
        lengths |= {each.num_drafted for each in out.rounds}
        num_accepted += out.stats.num_accepted
    assert len(lengths) > 2 and num_accepted > 10


def test_the_algorithm_ends_at_a_stop_token():
    pair = tiny_pair(vocab_size=7, scale=1.5)
    prompt = [3, 1, 4]
    free = generate_baseline(pair, prompt, NUM_TOKENS, warp=Warp(0)).tokens.tolist()
    pair.target.generation_config.eos_token_id = free[7]
    head = uneven_head(pair.draft_lm.hidden_size)
    response = speculative_decode(pair, head, prompt, NUM_TOKENS, Warp(0))
    assert response == free[: free.index(free[7]) + 1]


def test_a_pair_of_folders_is_decoded_with_a_head(nano, tmp_path):
    for name in ("draft", "target"):
        shutil.copytree(ROOT / "specheads" / "nano" / name, tmp_path / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ROOT / "specheads" / "nano" / file, tmp_path / name)
    save_head(uneven_head(nano.draft_lm.hidden_size), tmp_path / "head")
    done = run(
        tmp_path,
        EXAMPLES / "own_pair.py",
        "target",
        "draft",
        "head",
        "def mean(values):\n",
        SPECHEADS_ENGINE="eager",
    )
    assert done.returncode == 0, done.stderr
    assert "tokens per forward pass of the target" in done.stdout.splitlines()[-1]
    assert "<target> <draft> <head>" in run(tmp_path, EXAMPLES / "own_pair.py").stderr


def test_a_new_rule_stops_after_unsure_tokens():
    rule = UnsureTokens(threshold=0.5, patience=2, max_tokens=4)
    state = rule.start_prompt(2, torch.device("cpu"))
    seen = []
    for first, second in [(0.4, 0.6), (0.9, 0.6), (0.4, 0.6), (0.3, 0.6)]:
        state, stop = rule.step(state, {"draft_prob": torch.tensor([first, second])})
        seen.append(stop.tolist())
    assert seen == [[False, False]] * 3 + [[True, True]]  # two in a row; the longest draft
    state = rule.start_round(state)
    assert [numbers.tolist() for numbers in state] == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("unsure_tokens", "stopping=[fixed_length,unsure_tokens] live=none"),
        ("known_text", f"drafting=known_text drafting.file={ROOT}/README.md {KNOWN_TEXT}"),
    ],
)
def test_what_is_new_is_evaluated_from_the_command_line(name, words, tmp_path):
    sizes = ["model=nano", "data.num_train=8", "data.num_dev=4", "data.num_test=4", "head=null"]
    sizes += ["data.max_new_tokens=16", "num_prompts=4", "num_live_prompts=2", "engine=eager"]
    words = ["--config-dir", EXAMPLES / "conf", *words.split(), *sizes, "fixed_lengths=[2,4]"]
    done = run(tmp_path, "specheads", "evaluate", *words)
    assert done.returncode == 0, done.stderr
    report = next(tmp_path.glob("outputs/evaluate/*/report.json")).read_text()
    assert ("unsure_tokens" in report) == (name == "unsure_tokens")


def test_a_new_input_is_learned_and_decoded_with(tmp_path):
    script = tmp_path / "learn.py"
    script.write_text(
        "import sys, pathlib, new_head_input; new_head_input.main(pathlib.Path(sys.argv[1]), 12)\n"
    )
    # In a process of its own, as it changes the table of features.
    done = run(tmp_path, script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "'second_share')" in done.stdout and "num_drafted=" in done.stdout


def test_a_new_data_set_is_generated(tmp_path):
    folders = [f"paths.data={tmp_path}/data", f"paths.outputs={tmp_path}/out"]
    words = ["data=questions", "data.max_new_tokens=4", "model=nano", *folders]
    done = run(ROOT, "specheads", "data", "--config-dir", EXAMPLES / "conf", *words)
    assert done.returncode == 0, done.stderr
    assert "data: " in done.stdout and list(tmp_path.glob("data/*/*.parquet"))


CLUSTER = EXAMPLES / "cluster"


def test_the_batch_script_is_a_shell_script():
    script = CLUSTER / "specheads.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    if shellcheck := shutil.which(
        "shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ):
        subprocess.run([shellcheck, script], check=True)
    options = re.findall(r"^#SBATCH (--[a-z-]+)=\S+", script.read_text(), re.MULTILINE)
    assert len(options) == script.read_text().count("#SBATCH") == len(set(options)) > 5


def test_the_cluster_of_ray_is_what_ray_expects():
    ray = pytest.importorskip("ray")
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    text = (CLUSTER / "ray.yaml").read_text()
    cluster = yaml.safe_load(text)
    jsonschema.validate(cluster, schema)
    assert cluster["head_node_type"] in cluster["available_node_types"]
    needs = {key: int(count) for key, count in re.findall(r"ray\.(\w+)=(\d+)", text)}
    machine = cluster["available_node_types"]["worker"]["resources"]
    assert needs["gpus_per_worker"] <= machine["GPU"] and needs["cpus_per_worker"] <= machine["CPU"]
    assert needs["num_workers"] <= cluster["max_workers"]


def test_examples_import_what_is_public_or_documented():
    documented = set(re.findall(r"automodule:: (\S+)", (ROOT / "docs" / "api.md").read_text()))
    for path in (ROOT / "examples").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("specheads"):
                is_public = node.module == "specheads"
                names = {alias.name for alias in node.names} - {"papers"}
                assert names <= {*specheads.__all__} if is_public else node.module in documented
