"""Quantized models: what is refused, what is loaded, that the output stays the target's, and that caches tell them apart."""

from dataclasses import replace

import pytest
import torch

import specheads.pair.quantization
from specheads import SpeculativeDecoder, UserError, Warp, load_pair
from specheads.decoding.drafting import ChainStep
from specheads.decoding.engine.artefacts import name_of
from specheads.decoding.step_inputs import DraftMemory
from specheads.decoding.stopping import FixedLength
from specheads.pair.config import PairConfig, pair_config
from specheads.pair.quantization import QUANTIZATIONS, check_quantization, is_quantized
from specheads.pair.revisions import revision_of
from specheads.prompts.prompt import response_provenance
from specheads.training.distill.distillation import distill
from specheads.training.distill.initial_draft import TargetLayers
from specheads.training.distill.memory import check_config
from specheads.training.distill.settings import Distillation


def test_an_unknown_quantization_is_refused():
    with pytest.raises(
        UserError, match=r"model.quantization=int3 is not known; expected int8, fp8, int4, nf4, llm_int8, or null"
    ):
        pair_config("nano", quantization="int3")
    with pytest.raises(UserError, match=r"model.draft_quantization=8 is not known"):
        pair_config("nano", draft_quantization=8)


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_a_missing_package_is_refused_with_the_line_that_installs_it(name, monkeypatch):
    package = QUANTIZATIONS[name].package
    monkeypatch.setattr(specheads.pair.quantization, "_is_usable", lambda asked: asked != package)
    with pytest.raises(
        UserError, match=rf"model.quantization={name} needs the package {package}, .*\(pip install -U {package}\)"
    ):
        load_pair("nano", quantization=name)
    monkeypatch.setattr(specheads.pair.quantization, "_is_usable", lambda asked: asked == package)
    assert check_quantization(name) == name


def test_a_revision_names_the_quantization(nano):
    assert revision_of(nano.draft, nano.draft_id, "int8") == f"{nano.draft_revision}-int8"


def test_a_draft_is_not_made_of_a_quantized_target(monkeypatch):
    monkeypatch.setattr(specheads.pair.quantization, "_is_usable", lambda package: True)
    with pytest.raises(UserError, match="is made of a target whose weights are as they are"):
        load_pair("nano", quantization="int8", new_draft=TargetLayers(1))


def test_a_quantized_draft_is_not_trained(monkeypatch):
    monkeypatch.setattr(specheads.pair.quantization, "_is_usable", lambda package: True)
    config = PairConfig(draft="a", target="b", draft_quantization="int8")
    with pytest.raises(UserError, match="the draft a is quantized, and its weights cannot be trained"):
        check_config(config, Distillation())


# --- with torchao


@pytest.fixture(scope="module")
def quantized():
    pytest.importorskip("torchao")
    return load_pair("nano", quantization="fp8", draft_quantization="int8")


def test_linear_weights_are_quantized_and_the_models_stay_close(quantized, nano, prompts):
    for model, same in ((quantized.target, nano.target), (quantized.draft, nano.draft)):
        assert is_quantized(model) and not is_quantized(same) and model.dtype == same.dtype == torch.float32
        weight, exact = (each.model.layers[0].mlp.up_proj.weight for each in (model, same))
        assert type(weight) is not type(exact)
        logits = [each(torch.tensor([prompts[0]])).logits for each in (model, same)]
        assert 0 < (logits[0] - logits[1]).abs().max() < 0.1 * logits[1].abs().max()


def test_caches_tell_quantized_models_apart(quantized, nano):
    assert (quantized.target_revision, quantized.draft_revision) == (f"{nano.target_revision}-fp8", f"{nano.draft_revision}-int8")
    entries = [response_provenance(pair, [], Warp(), 0) for pair in (quantized, nano)]
    assert [key for key in entries[0] if entries[0][key] != entries[1][key]] == ["target", "draft"]
    lms = [pair.draft_lm for pair in (quantized, nano)]
    steps = [ChainStep(lm, Warp(), FixedLength(2), DraftMemory(4, lm.vocab_size, lm.probs_dtype, lm.device)) for lm in lms]
    names = {name_of(lm, step) for lm, step in zip(lms, steps, strict=True)}  # of compiled steps
    assert len(names) == 2 and None not in names


def test_a_quantized_draft_leaves_the_output_as_it_is(quantized, nano, prompts):
    mixed = replace(nano, draft=quantized.draft)
    decoders = [SpeculativeDecoder(pair, stopping=FixedLength(4), warp=Warp(0), engine="eager") for pair in (nano, mixed)]
    for prompt in prompts[:3]:
        exact, same = (decoder.generate(prompt, 24) for decoder in decoders)
        assert torch.equal(exact.tokens, same.tokens)


def test_a_quantized_pair_is_not_distilled(quantized, tmp_path):
    with pytest.raises(UserError, match="the draft embedded:nano/draft is quantized"):
        distill(quantized, lambda: pytest.fail("data was made"), Distillation(), tmp_path)


def test_a_synthetic_model_is_not_quantized(monkeypatch):
    monkeypatch.setattr(specheads.pair.quantization, "_is_usable", lambda package: True)
    with pytest.raises(
        UserError, match="quantization=int8 is for models that are read from files; leave it out for synthetic:tiny"
    ):
        load_pair("synthetic-tiny", draft_quantization="int8")


def test_a_quantization_that_this_machine_cannot_make_is_refused():
    pytest.importorskip("torchao")
    if torch.cuda.is_available():
        pytest.skip("int4 is made for CUDA")
    with pytest.raises(UserError, match=r"embedded:nano/target cannot be loaded in quantization=int4 on this machine"):
        load_pair("nano", quantization="int4")
