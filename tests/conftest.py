import gc
import os
import tempfile

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start, too: see below
os.environ["SPECHEADS_ENGINE"] = (
    "eager"  # what `auto` means: compiling takes longer than most tests
)
# Code in folders; each process its own.
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="specheads-modules-")
# Nothing from earlier runs.
os.environ.setdefault("SPECHEADS_CACHE", tempfile.mkdtemp(prefix="specheads-tests-"))

import torch
from hypothesis import HealthCheck, Phase, settings

from specheads import load_pair
from specheads.prompts.sources import NanoSource

# Models this small gain nothing from a second thread, and lose a lot where another job wants that
# core.
torch.set_num_threads(1)

# Properties (tests/properties): the same examples in every run of the suite; many more, and others,
# with `--hypothesis-profile=long`. No test asserts a time.
FOR_ALL = {
    "deadline": None,
    "suppress_health_check": [
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
        HealthCheck.data_too_large,
    ],
    "phases": set(Phase) - {Phase.explain},
}
settings.register_profile("suite", max_examples=15, derandomize=True, database=None, **FOR_ALL)
settings.register_profile("long", max_examples=200, print_blob=True, **FOR_ALL)
settings.load_profile("suite")


# The files that take ten seconds or more, the longest first, so that processes that share the tests
# end together.
LONGEST = (
    "test_pipeline",
    "test_wheel",
    "test_decoder",
    "test_distillation",
    "test_replay",
    "test_transformers",
    "test_checkpoints",
    "test_pairings",
    "test_mistakes",
    "test_examples",
    "test_engines",
    "test_configs",
    "test_vllm",
    "test_page",
    "test_responses",
    "test_rules",
    "test_evaluate",
    "test_reproduction",
    "test_compile_ahead",
    "test_light_imports",
    "test_families",
    "test_numerics",
    "test_help",
    "test_vllm_runner",
    "test_lossless",
    "test_published_pairs",
    "test_trees",
    "test_distill_module",
    "test_response_tree",
)


def pytest_configure(config):
    if config.option.markexpr == "full":
        config.option.durations = 0  # all of them


def pytest_collection_finish():
    # What was imported and collected outlives the tests: the collector need not look at it again
    # and again
    gc.freeze()


def pytest_collection_modifyitems(items):
    items.sort(
        key=lambda item: (
            LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST)
        )
    )


@pytest.fixture(scope="session")
def nano():
    return load_pair("nano")


@pytest.fixture(scope="session")
def nano64():
    return load_pair("nano", dtype="float64")


@pytest.fixture(scope="session")
def prompts(nano):
    """Eight prompts that nano was not trained on, as ids."""
    return [nano.encode_instruction(prompt.text) for prompt in NanoSource(8, 0, 0).load(nano.chats)]
