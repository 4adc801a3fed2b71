"""Tests of heads inside vLLM itself, on nano. `tests/vllm/run` makes an environment for them.

Elsewhere they are skipped.

They import nothing that heads in vLLM do not need.
"""

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
HAS_VLLM = (
    spec := find_spec("vllm")
) is not None and spec.origin is not None  # this folder's name is no package
collect_ignore_glob = [] if HAS_VLLM else ["test_*.py"]
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other one needs Triton
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no process between this one and the models
    "VLLM_NO_USAGE_STATS": "1",
}
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks" / "peer_workers")]
sys.path.append(str(ROOT / "tests"))
LONGEST = 6


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Return the folders of nano's draft and target, with their tokenizer."""
    made = {}
    for name in ("draft", "target"):
        made[name] = tmp_path_factory.mktemp(name)
        nano = ROOT / "specheads" / "nano"
        for path in (
            *(nano / name).iterdir(),
            nano / "tokenizer.json",
            nano / "tokenizer_config.json",
        ):
            shutil.copy(path, made[name])
    return made


@pytest.fixture(scope="session")
def head(folders, tmp_path_factory):
    """Return the folder of a head of random weights for nano's draft.

    Its drafts have many lengths.
    """
    from specheads.heads.head import AcceptanceHead, HeadConfig, save_head
    from specheads.pair.revisions import revision_at

    torch.manual_seed(1)
    trained_for = {"id": str(folders["draft"]), "revision": revision_at(str(folders["draft"]))}
    config = HeadConfig(
        hidden_size=160,
        depth=2,
        width=24,
        draft=trained_for,
        calibration={"slope": [1.5], "intercept": [1.5]},
    )
    made = AcceptanceHead(config)
    torch.nn.init.normal_(made.readout.weight, std=0.3)
    return save_head(made.eval().requires_grad_(False), tmp_path_factory.mktemp("head") / "head")


@pytest.fixture(scope="session")
def engine(folders, head):
    """Return a function that makes an engine: alone, or with the draft and its head.

    Other keywords are those of vLLM.
    """
    import vllm
    from vllm_worker import repair_sampling

    from specheads.integrations.vllm import register

    register()

    def made(alone=False, speculative=None, given=None, **options):
        usual = {
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": 4,
            "enforce_eager": True,
            "disable_log_stats": True,
        }
        if not alone:
            drafted = {
                "method": "draft_model",
                "model": str(folders["draft"]),
                "num_speculative_tokens": LONGEST,
            }
            usual["speculative_config"] = drafted | (speculative or {})
            usual["additional_config"] = {
                "specheads": {"head": str(head), "threshold": 0.6, **(given or {})}
            }
            usual["async_scheduling"] = False
        made = vllm.LLM(model=str(folders["target"]), **usual | options)
        repair_sampling()
        return made

    return made
