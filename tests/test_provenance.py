"""What decides the numbers of a store is in the key of its folder, and nothing else is: a store is
found again, and never for other numbers.
"""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from specheads.data_gen.run import cache_provenance
from specheads.data_gen.settings import DataGeneration
from specheads.pair.sampling import Warp
from specheads.prompts.prompt import Prompt, ResponseLimits, encode_prompts
from specheads.replay.recording import Recorder
from specheads.replay.response_tree import RecordSettings
from specheads.storage.shards import fingerprint
from specheads.training.distill.samples import Samples, TargetStore
from specheads.training.heads.mixed_responses import FeatureStore, MixedResponses

PROMPTS = [Prompt(str(number), "train", f"x = {number}") for number in range(3)]
WARP = Warp(1.0, top_k=50)
RESPONSE = np.arange(5, dtype=np.int32)
SETTINGS = {"warp": WARP, "seed": 0, "max_new_tokens": 12}


def in_bfloat16(model):
    return copy.deepcopy(model).to(torch.bfloat16)


def responses(pair, prompts, settings):
    return cache_provenance(pair, prompts, DataGeneration(**settings), labelled=False)


def labels(pair, prompts, settings):
    return cache_provenance(pair, prompts, DataGeneration(**settings), labelled=True)


def recording(pair, prompts, settings):
    given = DataGeneration(**settings)
    recorder = Recorder(
        pair,
        given.warp,
        given.limits,
        RecordSettings(given.samples_per_position),
        given.seed,
        folder=FOLDER,
    )
    return recorder._store(encode_prompts(pair, prompts, ResponseLimits())).provenance


def distributions(pair, prompts, settings):
    answers = [[RESPONSE[: settings["max_new_tokens"] - 8]] for _ in prompts]
    ids = [np.frombuffer(prompt.text.encode(), np.uint8).astype(np.int32) for prompt in prompts]
    return TargetStore(FOLDER, pair, Samples(ids, answers)).provenance


def features(pair, prompts, settings):
    folder = FOLDER / fingerprint(labels(pair, prompts, settings))
    row = {name: [1, 2] for name in ("prompt_ids", "response_ids", "draft_ids", "accept_prob")}
    rows = [{**row, "more_draft_ids": [], "more_accept_prob": []} for _ in prompts]
    data = {"train": MixedResponses(rows, "next_token", 1.0, settings["seed"], 1)}
    return FeatureStore(folder, pair, data, frozenset({"hidden"})).provenance


FOLDER = Path("data")

STORES = (responses, labels, recording, distributions, features)
OF_DRAFT = {labels, recording, features}
OF_SAMPLING = {responses, labels, recording, features}
EACH = set(STORES)
# What changes, and the stores whose numbers it decides
CHANGES = {
    "the target": (lambda pair: {"target_revision": "another"}, EACH),
    "the target's type": (lambda pair: {"target": in_bfloat16(pair.target)}, EACH),
    "the draft": (lambda pair: {"draft_revision": "another"}, OF_DRAFT),
    "the draft's type": (lambda pair: {"draft": in_bfloat16(pair.draft)}, OF_DRAFT),
    "how text is encoded": (lambda pair: {"instruction_format": "Q: {instruction}"}, OF_SAMPLING),
}
SETTINGS_CHANGED = {
    "temperature": ({"warp": Warp(0.5, top_k=50)}, OF_SAMPLING),
    "top_k": ({"warp": Warp(1.0, top_k=49)}, OF_SAMPLING),
    "top_p": ({"warp": Warp(1.0, top_k=50, top_p=0.9)}, OF_SAMPLING),
    "min_p": ({"warp": Warp(1.0, top_k=50, min_p=0.1)}, OF_SAMPLING),
    "seed": ({"seed": 1}, OF_SAMPLING),
    "max_new_tokens": ({"max_new_tokens": 11}, EACH),
    "samples_per_position": ({"samples_per_position": 3}, OF_DRAFT),
}


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "FOLDER", tmp_path)


@pytest.fixture
def keys(nano):
    return {store: fingerprint(store(nano, PROMPTS, SETTINGS)) for store in STORES}


def changed(keys, *arguments):
    return {store for store in STORES if fingerprint(store(*arguments)) != keys[store]}


@pytest.mark.parametrize("what", CHANGES)
def test_each_part_of_a_pair_is_in_the_keys_that_it_decides(nano, keys, what):
    change, expected = CHANGES[what]
    assert changed(keys, replace(nano, **change(nano)), PROMPTS, SETTINGS) == expected


@pytest.mark.parametrize("what", SETTINGS_CHANGED)
def test_each_setting_is_in_the_keys_that_it_decides(nano, keys, what):
    settings, expected = SETTINGS_CHANGED[what]
    assert changed(keys, nano, PROMPTS, SETTINGS | settings) == expected


def test_prompts_are_in_every_key(nano, keys):
    assert changed(keys, nano, PROMPTS[:2], SETTINGS) == EACH
    other = [*PROMPTS[:2], replace(PROMPTS[2], prompt_id="9", text="y = 9")]
    # The rows of the features are those of the data set, whose folder they are in
    assert changed(keys, nano, other, SETTINGS) == EACH
    assert changed(keys, nano, PROMPTS, SETTINGS) == set()
