"""A head decodes in another decoder's environment: integrations and decoder import torch,
transformers and pydantic.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BLOCKED = (
    "datasets",
    "hydra",
    "lightning",
    "matplotlib",
    "omegaconf",
    "pandas",
    "plotly",
    "pyarrow",
    "pytorch_lightning",
    "rich",
    "wandb",
)
WITHOUT = f"""
import importlib.util, sys
BLOCKED = {BLOCKED}
present = importlib.util.find_spec

def blocked(name):
    return name.partition(".")[0] in BLOCKED

class Finder:
    def find_spec(self, name, path=None, target=None):
        if blocked(name):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Finder())
# Libraries that ask whether an optional package is installed must be told that it is not.
def find_spec(name, package=None):
    return None if blocked(name) else present(name, package)

importlib.util.find_spec = find_spec
"""
ROOT = Path(__file__).parents[2]
RULES = str(ROOT / "conf" / "stopping")
EVERY_RULE = """
import importlib, inspect, sys
from pathlib import Path
import yaml
import specheads
specheads.load_head  # what loads heads needs no training library either
pair = specheads.load_pair("nano")
head = specheads.AcceptanceHead(specheads.HeadConfig(pair.draft_lm.hidden_size, depth=1))

SHARED = {"${fixed_lengths}": 3, "${thresholds}": 0.5}

def closed(value):
    # One value in place of what a config leaves open (null), of several values, and of other keys
    # of the config.
    if isinstance(value, dict):
        return {key: closed(part) for key, part in value.items()}
    value = SHARED[value] if isinstance(value, str) and value in SHARED else value
    return 0.5 if value is None else value[0] if isinstance(value, list) else value

configs = [yaml.safe_load(path.read_text()) for path in Path(sys.argv[1]).glob("*.yaml")]
# The others are policies of batches.
rules = [config for config in configs if ".stopping." in config.get("_target_", "")]
assert len(rules) >= 9, rules
for arguments in rules:
    module, _, name = arguments.pop("_target_").rpartition(".")
    rule = getattr(importlib.import_module(module), name)
    known = inspect.signature(rule).parameters
    unset = {key for key, value in arguments.items() if value is None}
    optional = {key for key in unset if known[key].default is None}
    arguments = {key: closed(value) for key, value in arguments.items() if key not in optional}
    arguments |= {"head": head} if "head" in known else {}
    decoder = specheads.SpeculativeDecoder(pair, stopping=rule(**arguments), engine="eager")
    decoder.generate([5, 6, 7], max_new_tokens=4)
"""

CODES = {
    "vllm": "import specheads.integrations.vllm",
    "transformers": "import specheads.integrations.transformers",
    "every stopping rule on nano": EVERY_RULE,
    "an evaluation": ("from specheads.evaluation import evaluate, assembly, presentation"),
    "an export": "import specheads.commands.export",
}
# What some of them may import, too: neither draws, logs or reads data sets before it has to.
ALLOWED = {"an evaluation": ("omegaconf", "pandas", "pyarrow", "pydantic", "rich")}
ALLOWED["an export"] = (*ALLOWED["an evaluation"], "matplotlib", "plotly")
# Each in a fork of one process, which has imported the libraries that all of them may use.
IN_FORKS = """
import os, torch, transformers.generation, transformers.modeling_utils, yaml
torch.set_num_threads(1)
for name, code in CODES.items():
    process = os.fork()
    if not process:
        BLOCKED = set(BLOCKED) - set(ALLOWED.get(name, ()))
        os.dup2(os.open(f"{name}.txt", os.O_WRONLY | os.O_CREAT), 2)
        exec(code, {})
        raise SystemExit
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
"""


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """The exit code and the errors of each code."""
    folder = tmp_path_factory.mktemp("codes")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    script = f"{WITHOUT}CODES, ALLOWED = {CODES!r}, {ALLOWED!r}\n{IN_FORKS}"
    done = subprocess.run(
        [sys.executable, "-c", script, RULES],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    codes = map(int, done.stdout.split())
    return {
        name: (code, (folder / f"{name}.txt").read_text())
        for name, code in zip(CODES, codes, strict=True)
    }


@pytest.mark.parametrize("name", CODES)
def test_heads_and_the_decoder_need_no_training_library(name, ends):
    code, errors = ends[name]
    assert code == 0, errors
