"""A head decodes in another decoder's environment: integrations and decoder import torch, transformers and their dependencies."""

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
    "pydantic",
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
importlib.util.find_spec = lambda name, package=None: None if blocked(name) else present(name, package)
"""
RULES = str(Path(__file__).parents[2] / "conf" / "stopping")
EVERY_RULE = """
import importlib, inspect, sys
from pathlib import Path
import yaml
import specheads
pair = specheads.load_pair("nano")
head = specheads.AcceptanceHead(specheads.HeadConfig(pair.draft_lm.hidden_size, depth=1))

SHARED = {"${fixed_lengths}": 3, "${thresholds}": 0.5}

def closed(value):
    # One value in place of what a config leaves open (null), of several values, and of other keys of the config.
    if isinstance(value, dict):
        return {key: closed(part) for key, part in value.items()}
    value = SHARED[value] if isinstance(value, str) and value in SHARED else value
    return 0.5 if value is None else value[0] if isinstance(value, list) else value

configs = [yaml.safe_load(path.read_text()) for path in Path(sys.argv[1]).glob("*.yaml")]
rules = [config for config in configs if ".stopping." in config.get("_target_", "")]  # the others are policies of batches
assert len(rules) > 10, rules
for arguments in rules:
    module, _, name = arguments.pop("_target_").rpartition(".")
    rule = getattr(importlib.import_module(module), name)
    known = inspect.signature(rule).parameters
    optional = {key for key, value in arguments.items() if value is None and known[key].default is None}
    arguments = {key: closed(value) for key, value in arguments.items() if key not in optional}
    arguments |= {"head": head} if "head" in known else {}
    decoder = specheads.SpeculativeDecoder(pair, stopping=rule(**arguments), engine="eager")
    decoder.generate([5, 6, 7], max_new_tokens=4)
"""


def run(code):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code, RULES], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "code",
    [
        "import specheads.integrations.vllm",
        "import specheads.integrations.transformers",
        "import specheads; specheads.load_head; specheads.AcceptanceHead",
        "from specheads.decoding.decoder import SpeculativeDecoder",
        EVERY_RULE,
    ],
    ids=["vllm", "transformers", "heads", "decoder", "every stopping rule on nano"],
)
def test_heads_and_the_decoder_need_no_training_library(code):
    done = run(WITHOUT + code)
    assert done.returncode == 0, done.stderr
