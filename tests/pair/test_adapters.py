"""Models with PEFT adapters decode as they are, or are refused where they would be taken for those
without.
"""

import shutil
from dataclasses import replace

import pytest
from fakes import tiny_pair
from torch import nn

from specheads import SpeculativeDecoder, Warp, load_pair, stopping
from specheads.data_gen.run import generate_data
from specheads.data_gen.settings import DataGeneration
from specheads.errors import UserError
from specheads.heads.head import AcceptanceHead, HeadConfig
from specheads.pair.language_model import LanguageModel
from specheads.pair.revisions import resolve
from specheads.prompts.prompt import GeneratedData, Prompt
from specheads.training.distill.distillation import distill
from specheads.training.distill.settings import Distillation
from specheads.training.heads.head_training import train_heads
from specheads.training.heads.settings import HeadTraining


class Adapted(nn.Module):
    """A layer with an adapter, as peft puts it into a model."""

    __module__ = "peft.tuners.lora.layer"

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, states):
        return 1.5 * self.layer(states)


class PeftModelForCausalLM(nn.Module):
    """What peft wraps a model in."""

    __module__ = "peft.peft_model"


def adapted_pair(role):
    pair = tiny_pair(8, scale=2.0)
    for layer in getattr(pair, role).model.layers:
        layer.mlp.down_proj = Adapted(layer.mlp.down_proj)
    return pair


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_folder_with_a_model_and_an_adapter_is_refused(role, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(resolve(f"embedded:nano/{role}"), folder)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(UserError, match="holds a PEFT adapter next to a model; merge it"):
        load_pair("nano", **{role: folder})
    (folder / "adapter_config.json").unlink()
    load_pair("nano", **{role: folder})


def test_a_wrapped_model_is_refused():
    with pytest.raises(UserError, match="PeftModelForCausalLM wraps a model.*merge_and_unload"):
        LanguageModel(PeftModelForCausalLM())


@pytest.mark.parametrize("role", ["target", "draft"])
def test_models_with_adapters_decode_the_targets_tokens(role):
    pair = adapted_pair(role)
    warp = Warp(temperature=0)
    decoder = SpeculativeDecoder(pair, stopping=stopping.FixedLength(3), warp=warp, engine="auto")
    ids = [1, 2, 3]
    for token in decoder.generate(ids, max_new_tokens=8).tokens:
        logits = pair.target_lm.logits(pair.target_lm.hidden_states(pair.encode(ids)[None]))
        assert token == logits[0, -1].argmax()
        ids.append(token)


def generate(pair, folder):
    generate_data(pair, [Prompt("ab", "train", "abc")], DataGeneration(), folder)


def train(pair, folder):
    train_heads(pair, GeneratedData(folder, []), HeadTraining(), folder)


def distil(pair, folder):
    distill(pair, GeneratedData(folder, []), Distillation(), folder)


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("use", [generate, train, distil])
def test_nothing_is_made_for_models_with_adapters(use, role, tmp_path):
    with pytest.raises(UserError, match=f"the {role} tiny-{role} has PEFT adapters; merge them"):
        use(adapted_pair(role), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_head_does_not_take_an_adapted_draft_for_its_own():
    pair = adapted_pair("draft")
    trained_for = {"id": pair.draft_id, "revision": pair.draft_revision}
    config = HeadConfig(hidden_size=pair.draft_lm.hidden_size, draft=trained_for)
    AcceptanceHead(config).check_fits(tiny_pair(8))
    with pytest.raises(UserError, match="the draft tiny-draft has PEFT adapters"):
        AcceptanceHead(config).check_fits(pair)
    AcceptanceHead(replace(config, draft={})).check_fits(pair)
