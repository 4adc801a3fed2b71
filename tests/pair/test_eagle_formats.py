"""Folders of EAGLE-3 drafts: both formats read and written, mistakes in them found."""

import json
import logging
import math
import shutil

import pytest
import torch
from commands import ROOT
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from specheads import UserError
from specheads.pair.draft_vocabulary import borrow_embedding, borrows_embedding, kept_tokens
from specheads.pair.eagle_formats import read_feature_draft, write_safeailab, write_speculators
from specheads.pair.language_model import LanguageModel

FIXTURES = ROOT / "tests" / "fixtures" / "eagle3"
CASES = sorted(folder.name for folder in FIXTURES.iterdir())
SIZES = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2}
TARGET = LlamaConfig(**SIZES, num_hidden_layers=8)
ANGLES = {"rope_type": "default", "rope_theta": 500.0}
GENERATOR = torch.Generator().manual_seed(0)


def changed(folder, name="llama", *, keys=(), layer=(), tensors=(), without=()):
    """Copy a fixture with some keys of its config and some tensors changed; None: left out."""
    shutil.copytree(FIXTURES / name, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | dict(keys)
    config["transformer_layer_config"] |= dict(layer)
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in without}))
    stored = load_file(folder / "model.safetensors") | dict(tensors)
    save_file(
        {key: each for key, each in stored.items() if key not in without},
        folder / "model.safetensors",
    )
    return folder


def flat(folder, name, pickled=False, **keys):
    """Write a fixture in the format of SafeAILab."""
    folder.mkdir()
    config = json.loads((FIXTURES / name / "config.json").read_text())
    of_draft = {"architectures": ["LlamaForCausalLMEagle3"], "torch_dtype": "float32"}
    of_draft["draft_vocab_size"] = config["draft_vocab_size"]
    content = config["transformer_layer_config"] | of_draft | keys
    (folder / "config.json").write_text(json.dumps(content))
    tensors = {}
    for key, tensor in load_file(FIXTURES / name / "model.safetensors").items():
        if key != "embed_tokens.weight":
            tensors[key.replace("layers.0.", "midlayer.")] = tensor
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


@torch.no_grad()
def outputs(model):
    """Return the outputs of two steps over random features and tokens."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(1, 5, model.fc.in_features, generator=generator)
    tokens = torch.randint(40, (1, 5), generator=generator)
    first = model(tokens, model.first_states(features.to(model.dtype)))
    second = model(tokens, first.state)
    return torch.cat([*first, model.lm_head(second.hidden)], dim=-1)


@pytest.mark.parametrize("name", CASES)
def test_a_written_draft_is_read_again(name, tmp_path):
    model = read_feature_draft(FIXTURES / name, TARGET)
    write_speculators(model, tmp_path, "a-target", ["LlamaForCausalLM"], num_tokens=3)
    again = read_feature_draft(tmp_path, TARGET)
    assert torch.equal(outputs(again), outputs(model))
    stored = load_file(tmp_path / "model.safetensors")
    before = load_file(FIXTURES / name / "model.safetensors")
    assert stored.keys() == before.keys()
    assert all(torch.equal(stored[key], before[key]) for key in before)
    config = json.loads((tmp_path / "config.json").read_text())
    reference = json.loads((FIXTURES / name / "config.json").read_text())
    verifier = config["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "a-target", "architectures": ["LlamaForCausalLM"]}
    unlike = {key for key in config if config[key] != reference.get(key)}
    assert unlike <= {"speculators_config", "target_hidden_size", "transformer_layer_config"}


@pytest.mark.parametrize("num_layers", [8, 12])  # the same layers are those of the paper, or not
@pytest.mark.parametrize("name", ["llama", "llama_full_vocabulary"])
def test_a_draft_is_written_for_safeailab_and_read_again(name, num_layers, tmp_path):
    changes = {"keys": {"norm_before_residual": False}, "layer": {"rope_parameters": ANGLES}}
    model = read_feature_draft(changed(tmp_path / "before", name, **changes), TARGET)
    write_safeailab(model, tmp_path / "after", num_layers)
    target = LlamaConfig(**SIZES, num_hidden_layers=num_layers)
    again = read_feature_draft(tmp_path / "after", target)
    assert torch.equal(outputs(again), outputs(model))
    assert again.config.target_layers == (2, 4, 5)
    config = json.loads((tmp_path / "after" / "config.json").read_text())
    named = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}  # by their outputs
    assert config.get("eagle_config") == (None if num_layers == 8 else named)
    inputs = config.get("eagle_aux_hidden_state_layer_ids")  # of vLLM
    assert inputs == (None if num_layers == 8 else [2, 4, 5])
    assert config["rope_theta"] == 500.0 and config["architectures"] == ["LlamaForCausalLMEagle3"]
    names = load_file(tmp_path / "after" / "model.safetensors").keys()
    assert "midlayer.mlp.up_proj.weight" in names and not any("layers.0" in each for each in names)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen3", "the draft, which has a qwen3 layer; use eagle3.format=speculators"),
        ("llama_3_1", "which has fc_norm, norm_output; use eagle3.format=speculators"),
    ],
)
def test_a_draft_that_safeailabs_format_cannot_describe_is_rejected(name, message, tmp_path):
    model = read_feature_draft(FIXTURES / name, TARGET)
    with pytest.raises(UserError, match=message):
        write_safeailab(model, tmp_path / "after", 8)
    assert not (tmp_path / "after").exists()


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("name", ["llama_full_vocabulary", "llama_3_1"])
def test_the_flat_format_is_the_same_draft(name, pickled, tmp_path):
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}  # outputs of layers: inputs of the next
    norms = {"fc_norm": True, "norm_output": True} if name == "llama_3_1" else {}
    folder = flat(tmp_path / "flat", name, pickled, eagle_config=ids, **norms)
    model = read_feature_draft(folder, TARGET)
    expected = read_feature_draft(FIXTURES / name, TARGET)
    assert borrows_embedding(model) and not borrows_embedding(expected)
    borrow_embedding(model, expected)
    assert torch.equal(outputs(model), outputs(expected))
    assert model.config.target_layers == expected.config.target_layers == (2, 4, 5)
    assert kept_tokens(model) is None or torch.equal(kept_tokens(model), kept_tokens(expected))


def test_keys_of_a_flat_draft_that_are_none_are_rejected(tmp_path):
    folder = flat(tmp_path / "flat", "llama", eagle_config=[1, 3, 4])
    with pytest.raises(UserError, match=r"eagle_config=\[1, 3, 4\] must be a set of keys"):
        read_feature_draft(folder, TARGET)


def test_layers_without_names_are_those_of_the_paper(tmp_path):
    folder = flat(tmp_path / "flat", "llama")
    deeper = LlamaConfig(**SIZES, num_hidden_layers=36)
    assert read_feature_draft(folder, deeper).config.target_layers == (2, 18, 33)


def rms(states, weight):
    return weight * states * (states.pow(2).mean(dim=-1, keepdim=True) + 1e-6).rsqrt()


def rotated(states, angles):
    half = states.shape[-1] // 2
    turned = torch.cat([-states[..., half:], states[..., :half]], dim=-1)
    return states * angles.cos() + turned * angles.sin()


def by_formula(tensors, embeddings, states):
    """Return the layer's output (T, H), for embeddings and states (T, H): two heads of 8, one of
    keys.
    """
    part = {key.removeprefix("layers.0."): weight for key, weight in tensors.items()}
    normed = rms(embeddings, part["input_layernorm.weight"])
    both = torch.cat([normed, rms(states, part["hidden_norm.weight"])], dim=-1)
    places = torch.arange(len(states))
    angles = places[:, None] / 10000.0 ** (torch.arange(4) / 4)
    angles = torch.cat([angles, angles], dim=-1)
    key = rotated(both @ part["self_attn.k_proj.weight"].T, angles)
    value = both @ part["self_attn.v_proj.weight"].T
    heads = []
    for query in (both @ part["self_attn.q_proj.weight"].T).split(8, dim=-1):
        scores = rotated(query, angles) @ key.T / math.sqrt(8)
        seen = scores.masked_fill(places > places[:, None], -torch.inf)
        heads.append(seen.softmax(dim=-1) @ value)
    hidden = states + torch.cat(heads, dim=-1) @ part["self_attn.o_proj.weight"].T
    normed = rms(hidden, part["post_attention_layernorm.weight"])
    gate = torch.nn.functional.silu(normed @ part["mlp.gate_proj.weight"].T)
    wide = gate * (normed @ part["mlp.up_proj.weight"].T)
    return hidden + wide @ part["mlp.down_proj.weight"].T


@torch.no_grad()
def test_a_flat_draft_computes_the_papers_formulas(tmp_path):
    """Its own state is the layer's output before the last norm; the residual is not normalized."""
    model = read_feature_draft(flat(tmp_path / "flat", "llama"), TARGET)
    tensors = load_file(FIXTURES / "llama" / "model.safetensors")
    model.embed_tokens.weight.copy_(tensors["embed_tokens.weight"])
    features = torch.randn(6, 48, generator=GENERATOR)
    tokens = torch.randint(40, (6,), generator=GENERATOR)
    output = model(tokens[None], model.first_states(features[None]))
    embeddings = tensors["embed_tokens.weight"][tokens]
    expected = by_formula(tensors, embeddings, features @ tensors["fc.weight"].T)
    torch.testing.assert_close(output.state[0], expected, atol=1e-5, rtol=0)
    logits = rms(expected, tensors["norm.weight"]) @ tensors["lm_head.weight"].T
    torch.testing.assert_close(model.lm_head(output.hidden)[0], logits, atol=1e-5, rtol=0)


def test_tokens_may_stand_in_any_order(tmp_path):
    stored = load_file(FIXTURES / "llama" / "model.safetensors")
    order = torch.randperm(24, generator=GENERATOR)
    tokens = (stored["d2t"] + torch.arange(24))[order]
    mixed = {"d2t": tokens - torch.arange(24), "lm_head.weight": stored["lm_head.weight"][order]}
    model = read_feature_draft(changed(tmp_path / "mixed", tensors=mixed), TARGET)
    expected = read_feature_draft(FIXTURES / "llama", TARGET)
    assert torch.equal(outputs(model), outputs(expected))
    lm = LanguageModel(model, 40)
    logits = lm.logits(torch.ones(1, 16))
    assert torch.equal(logits.isfinite()[0], stored["t2d"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_angles_stay_exact_in_any_type(dtype):
    model = read_feature_draft(FIXTURES / "llama_3_1", TARGET, dtype=dtype)
    expected = outputs(read_feature_draft(FIXTURES / "llama_3_1", TARGET))
    assert model.dtype == dtype and model.rotary_emb.inv_freq.dtype == torch.float32
    nearness = 1e-4 if dtype == torch.float64 else 0.2
    torch.testing.assert_close(outputs(model).float(), expected, atol=nearness, rtol=0)


def test_the_log_says_which_layers_and_norms_were_taken(caplog, tmp_path):
    with caplog.at_level(logging.INFO):
        read_feature_draft(FIXTURES / "qwen3_norm_output", TARGET)
    assert "the inputs of layers 2, 4, 5 of the target (norm_before_fc, norm_output)" in caplog.text
    assert "24 of 40 tokens" in caplog.text
    folder = flat(tmp_path / "flat", "llama_3_1", fc_norm=True, norm_output=True)
    read_feature_draft(folder, TARGET)
    assert "SpecForge before September 2026" in caplog.text


def test_a_missing_norm_before_residual_is_speculators(tmp_path):
    folder = changed(tmp_path / "older", without=("norm_before_residual",))
    assert read_feature_draft(folder, TARGET).config.norm_before_residual
    of_safeailab = read_feature_draft(flat(tmp_path / "flat", "llama"), TARGET)
    assert not of_safeailab.config.norm_before_residual


MISTAKES = {
    "without d2t": ({"without": ("d2t",)}, "draft_vocab_size=24 of 40 tokens, but no tensor d2t"),
    "tokens twice": ({"tensors": {"d2t": -torch.arange(24)}}, "a row for each of 24 different"),
    "another t2d": ({"tensors": {"t2d": torch.ones(40).bool()}}, "d2t and t2d name other tokens"),
    "layer too high": (
        {"keys": {"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}},
        r"layers \[2, 4, 8\], but the target has the layers 0 to 7",
    ),
    "no layer": ({"keys": {"eagle_aux_hidden_state_layer_ids": ["2"]}}, r"layers \['2'\]"),
    "two layers": (
        {"keys": {"eagle_aux_hidden_state_layer_ids": [2, 4]}},
        "columns of fc.weight=48, but expected 32",
    ),
    "another target": ({"layer": {"vocab_size": 50}}, "vocab_size=50, but expected 40"),
    "another size": (
        {"keys": {"target_hidden_size": 24}},
        "target_hidden_size=24, but expected 16",
    ),
    "more layers": ({"layer": {"num_hidden_layers": 2}}, "num_hidden_layers=2, but expected 1"),
    "other sizes": (
        {"layer": {"intermediate_size": 32}},
        r"down_proj.weight as float32 \[16, 24\], but its config.json asks for float32 \[16, 32\]",
    ),
    "another layer": ({"layer": {"model_type": "gemma2"}}, "expected llama or qwen3"),
    "no config of a layer": ({"layer": {"hidden_size": "16"}}, "not one of llama .*hidden_size"),
    "a norm without weights": ({"keys": {"norm_before_fc": True}}, "lacks input_norm.weight"),
    "weights without a norm": (
        {"tensors": {"input_norm.weight": torch.ones(48)}},
        "also has input_norm.weight; .*norm_before_fc=False",
    ),
    "two norms": ({"keys": {"norm_before_fc": True, "fc_norm": True}}, "exclude each other"),
    "quantized": ({"keys": {"quantization_config": {"bits": 4}}}, "is quantized"),
    "another kind": ({"keys": {"speculators_model_type": "dflash"}}, "of the kind 'dflash'"),
    "no draft": ({"without": ("fc.weight",)}, "no tensor fc.weight"),
}


@pytest.mark.parametrize(("changes", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_reported_in_one_message(changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        read_feature_draft(changed(tmp_path / "wrong", **changes), TARGET)


def test_a_folder_without_a_readable_config_is_rejected(tmp_path):
    with pytest.raises(UserError, match="has no config.json; give the folder of an EAGLE-3 draft"):
        read_feature_draft(tmp_path, TARGET)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="config.json.*; download .* again"):
        read_feature_draft(tmp_path, TARGET)


def test_weights_in_several_files_or_with_code_are_rejected(tmp_path):
    folder = changed(tmp_path / "sharded")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    with pytest.raises(UserError, match="with its weights in one file"):
        read_feature_draft(folder, TARGET)
    torch.save({"fc.weight": print}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="holds more than tensors"):
        read_feature_draft(folder, TARGET)
