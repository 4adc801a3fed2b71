"""Quantized models: what is refused, what is loaded, that the output stays the target's, and that
caches tell them apart.
"""

from dataclasses import replace

import pytest
import torch
from families import CONFIGS, tiny_model

import specheads.pair.quantization
from specheads import SpeculativeDecoder, UserError, Warp, load_pair
from specheads.decoding.stopping import FixedLength
from specheads.pair import config, language_model
from specheads.pair.config import pair_config
from specheads.pair.initial_draft import TargetLayers
from specheads.pair.language_model import chosen_dtype
from specheads.pair.quantization import (
    QUANTIZATIONS,
    check_quantization,
    is_quantized,
    lattice_of,
    on_lattice,
    round_weights,
)
from specheads.pair.source import ModelSource
from specheads.prompts.prompt import response_provenance
from specheads.training.distill.distillation import distill
from specheads.training.distill.settings import Distillation


def test_every_name_of_the_config_is_a_way_to_store_weights():
    assert tuple(QUANTIZATIONS) == config.QUANTIZATIONS


def test_an_unknown_quantization_is_refused():
    with pytest.raises(
        UserError,
        match=(
            r"model.quantization=int3 is not known; expected int8, fp8, int4, nf4, llm_int8, or"
            r" null"
        ),
    ):
        pair_config("nano", quantization="int3")
    with pytest.raises(UserError, match=r"model.draft_quantization=8 is not known"):
        pair_config("nano", draft_quantization=8)


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_a_missing_package_is_refused_with_the_line_that_installs_it(name, monkeypatch):
    package = QUANTIZATIONS[name].package
    usable: set[str] = set()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(specheads.pair.quantization, "_is_usable", lambda asked: asked in usable)
    with pytest.raises(
        UserError,
        match=(
            rf"model.quantization={name} needs the package {package}, .*\(pip install -U"
            rf" {package}\)"
        ),
    ):
        ModelSource.of(pair_config("nano", quantization=name), "target")
    usable.add(package)
    assert check_quantization(name) == name


def test_a_quantization_of_gpus_is_refused_on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        UserError, match="model.quantization=fp8 is for GPUs; on a CPU use int8 or int4"
    ):
        ModelSource.of(pair_config("nano", quantization="fp8"), "target")


def test_a_draft_is_not_made_of_a_quantized_target():
    with pytest.raises(UserError, match="is made of a target whose weights are not quantized"):
        load_pair("nano", quantization="int8", new_draft=TargetLayers(1))


# --- on a CPU


@pytest.fixture(scope="module")
def quantized():
    return load_pair("nano", device="cpu", quantization="int4", draft_quantization="int8")


def test_weights_are_rounded_in_groups_and_the_models_stay_close(quantized, nano, prompts):
    for model, same, forms in (
        (quantized.target, nano.target, ("Q4_1",)),
        (quantized.draft, nano.draft, ("Q8_0",)),
    ):
        assert not is_quantized(model) and model.dtype == same.dtype == torch.float32
        weight, exact = (each.model.layers[0].mlp.up_proj.weight for each in (model, same))
        lattice = lattice_of(exact, *forms)
        assert torch.equal(weight, lattice.weight()) and not torch.equal(weight, exact)
        assert on_lattice(weight, *forms) and on_lattice(
            model.get_output_embeddings().weight, "Q8_0"
        )
        logits = [each(torch.tensor([prompts[0]])).logits for each in (model, same)]
        assert 0 < (logits[0] - logits[1]).abs().max() < 0.2 * logits[1].abs().max()


@pytest.mark.parametrize("form", ["Q4_1", "Q4_0", "Q8_0"])
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e-4, 1.0, 1e4])
def test_a_rounded_weight_is_found_again_whatever_its_size(form, scale):
    weight = scale * torch.randn(7, 96, generator=torch.Generator().manual_seed(0))
    weight[2] = 0.0
    weight[3, :32] = scale
    weight[4, :32] = -scale
    lattice = lattice_of(weight, form)
    rounded = lattice.weight()
    step = lattice.d.float().abs().expand(-1, -1, 32).flatten(1)
    small = 2**-24 * (8 if form == "Q4_0" else 128)  # float16 has no smaller numbers
    assert (
        (rounded - weight).abs()
        <= (1.05 if form == "Q4_0" else 0.55) * step + 2e-3 * weight.abs() + small
    ).all()
    assert torch.equal(on_lattice(rounded, form).weight(), rounded)
    rounded[6, 95] += (scale / 50 + small) / 3
    assert on_lattice(rounded, form) is None


def test_weights_are_found_as_gguf_rounds_them():
    gguf = pytest.importorskip("gguf")
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    for form in ("Q4_1", "Q4_0", "Q8_0"):
        stored = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[form])
        theirs = torch.tensor(gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[form]))
        assert torch.equal(on_lattice(theirs, form).weight(), theirs)
        assert (lattice_of(weight, form).weight() - theirs).abs().mean() < 1e-4


def test_maps_with_other_inputs_and_input_embeddings_stay_as_they_are():
    model = tiny_model(CONFIGS["llama"], seed=0).float()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    share = round_weights(model, "Q8_0")
    changed = {
        name: weight.numel()
        for name, weight in model.named_parameters()
        if not torch.equal(weight, before[name])
    }
    assert changed.keys() == {"lm_head.weight"} | {
        name for name in before if "_proj" in name and "down_proj" not in name
    }
    assert share == sum(changed.values()) / model.num_parameters()


def test_a_rounded_model_runs_in_float32_whatever_the_cpu_has(monkeypatch):
    monkeypatch.setattr(language_model, "_has_instructions", lambda *names: True)
    for quantization, dtype in (("int8", torch.float32), (None, torch.bfloat16)):
        config = pair_config("nano", device="cpu", dtype="auto", quantization=quantization)
        assert chosen_dtype(ModelSource.of(config, "target")) == dtype


def test_caches_tell_quantized_models_apart(quantized, nano):
    assert (quantized.target_revision, quantized.draft_revision) == (
        f"{nano.target_revision}-Q4_1",
        f"{nano.draft_revision}-Q8_0",
    )
    entries = [response_provenance(pair, [], Warp(), 0) for pair in (quantized, nano)]
    assert [key for key in entries[0] if entries[0][key] != entries[1][key]] == ["target", "draft"]


def test_a_quantized_draft_leaves_the_output_as_it_is(quantized, nano, prompts):
    mixed = replace(nano, draft=quantized.draft)
    decoders = [
        SpeculativeDecoder(pair, stopping=FixedLength(4), warp=Warp(0), engine="eager")
        for pair in (nano, mixed)
    ]
    for prompt in prompts[:3]:
        exact, same = (decoder.generate(prompt, 24) for decoder in decoders)
        assert torch.equal(exact.tokens, same.tokens)


def test_a_quantized_pair_is_not_distilled(tmp_path):
    pair = load_pair("nano")
    pair.draft.config.quantization_config = {"quant_method": "torchao"}
    with pytest.raises(UserError, match="the draft embedded:nano/draft is quantized"):
        distill(pair, lambda: pytest.fail("data was made"), Distillation(), tmp_path)


def test_a_checkpoint_that_is_quantized_is_not_rounded(monkeypatch):
    monkeypatch.setattr(language_model, "is_quantized", lambda model: True)
    with pytest.raises(
        UserError, match="embedded:nano/target is quantized already; leave out quantization=int8"
    ):
        load_pair("nano", device="cpu", quantization="int8")


def test_a_synthetic_model_is_not_quantized():
    with pytest.raises(
        UserError,
        match=(
            "quantization=int8 is for models that are read from files; leave it out for"
            " synthetic:tiny"
        ),
    ):
        load_pair("synthetic-tiny", draft_quantization="int8")


@pytest.mark.parametrize(
    ("device", "quantization", "expected"),
    [("cuda", None, 2), ("cuda", "nf4", 0.5), ("cuda", "int8", 1), ("cpu", "int8", 2)],
)
def test_quantized_weights_take_fewer_bytes_unless_they_are_rounded(device, quantization, expected):
    source = ModelSource("anywhere", device=device, quantization=quantization)
    assert source.bytes_per_weight(torch.bfloat16) == expected
