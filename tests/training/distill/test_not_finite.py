"""A text along which a model's logits are NaN is named, also among those that are read with it."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from families import family_pair
from training_runs import quiet_trainer

from specheads import Warp
from specheads.errors import UserError
from specheads.training.distill.distill_module import DistillModule
from specheads.training.distill.draft_quality import draft_quality
from specheads.training.distill.samples import Samples, TargetStore, held_out
from specheads.training.distill.settings import Distillation
from specheads.training.loaders import ResumableData

READ = 12  # positions from this on are NaN in a broken model
WARP = Warp(1.0)
SHORT = [np.array([number, 1, 2]) for number in range(6)]
LONG = np.arange(READ + 4) % 5
RESPONSE = np.array([3, 4])


def broken_pair(role):
    """A pair one of whose models reads no longer texts."""
    pair = family_pair("opt")
    model = copy.deepcopy(getattr(pair, role))
    with torch.no_grad():
        model.model.decoder.embed_positions.weight[READ:] = float("nan")
    return replace(pair, **{role: model})


def samples_with(long_ones):
    """Samples of which some are longer than a broken model can read."""
    prompts = [LONG if row in long_ones else prompt for row, prompt in enumerate(SHORT)]
    places = [f"mine.jsonl, line {row + 1}" for row in range(len(SHORT))]
    return Samples(prompts, [[RESPONSE] for _ in prompts], places=places)


def test_the_text_whose_distributions_are_stored(tmp_path):
    store = TargetStore(tmp_path, broken_pair("target"), samples_with({3}))
    with pytest.raises(UserError, match=r"mine\.jsonl, line 4: opt-target produced NaN logits"):
        store.make()


def test_the_text_that_the_draft_learns_from(tmp_path):
    pair = broken_pair("target")
    pair.draft.requires_grad_(True).train()
    splits = {
        "train": samples_with({4}),
        "dev": held_out(SHORT, [RESPONSE] * len(SHORT)),
        "test": held_out(SHORT, [RESPONSE] * len(SHORT)),
    }
    module = DistillModule(pair, Distillation(warp=WARP))
    data = ResumableData(splits, len(SHORT), 0, collate=list)
    with pytest.raises(UserError, match=r"mine\.jsonl, line 5: opt-target produced NaN logits"):
        quiet_trainer(tmp_path, 1).fit(module, data)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_text_on_which_a_draft_is_measured(role):
    with pytest.raises(UserError, match=rf"mine\.jsonl, line 2: opt-{role} produced NaN logits"):
        draft_quality(broken_pair(role), samples_with({1}), WARP, batch_size=4)
