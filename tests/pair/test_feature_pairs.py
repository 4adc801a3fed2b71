"""Pairs whose draft reads its target, loaded from folders in both formats."""

import json

import pytest
import torch
from feature_drafts import feature_draft
from safetensors.torch import load_file, save_file

from specheads import UserError, load_pair
from specheads.pair.draft_vocabulary import borrows_embedding
from specheads.pair.eagle_formats import is_feature_draft, write_speculators
from specheads.pair.initial_draft import NewFeatureDraft
from specheads.pair.pair import load_draft
from specheads.pair.quantization import lattice_of

TARGET = "embedded:nano/target"
LAYERS = (1, 3, 4)


@pytest.fixture(scope="module")
def draft(nano):
    kept = torch.arange(0, nano.vocab_size, 2)
    return feature_draft(nano.target, LAYERS, kept, borrows=True)


@pytest.fixture
def folder(draft, tmp_path):
    write_speculators(draft, tmp_path / "draft", "nano", ["LlamaForCausalLM"], num_tokens=3)
    return tmp_path / "draft"


def change(folder, **keys):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


def flatten(folder, pickled, **marks):
    """Rewrite a folder in the format of SafeAILab."""
    stored = json.loads((folder / "config.json").read_text())
    ids = stored["eagle_aux_hidden_state_layer_ids"]  # of inputs, outside of `eagle_config`
    flat = {"eagle_aux_hidden_state_layer_ids": ids, "draft_vocab_size": 1024, **marks}
    (folder / "config.json").write_text(json.dumps(stored["transformer_layer_config"] | flat))
    tensors = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        tensors[key.replace("layers.0.", "midlayer.")] = tensor
    if pickled:
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")


def test_a_folder_of_speculators_is_a_draft_that_reads_its_target(folder, draft, nano):
    pair = load_pair("nano", draft=folder)
    lm = pair.draft_lm
    assert lm.reads_layers == LAYERS and lm.vocab_size == nano.vocab_size
    assert lm.kept_tokens.tolist() == list(range(0, nano.vocab_size, 2))
    assert borrows_embedding(pair.draft)
    assert lm.input_embedding.weight.data_ptr() == pair.target_lm.input_embedding.weight.data_ptr()
    for name, weight in draft.named_parameters():
        assert torch.equal(pair.draft.get_parameter(name), weight)
    assert pair.draft_revision == load_pair("nano", draft=folder).draft_revision
    again = load_draft(folder, nano)
    assert again.reads_layers == LAYERS
    assert torch.equal(again.output_embedding.weight, lm.output_embedding.weight)


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLMEagle3", "LlamaForCausalLM"])
def test_a_flat_folder_is_the_same_draft(architecture, pickled, folder, draft):
    flatten(folder, pickled, architectures=[architecture])
    pair = load_pair("nano", draft=folder)
    assert pair.draft_lm.reads_layers == LAYERS
    assert torch.equal(pair.draft.fc.weight, draft.fc.weight)


def test_other_layers_may_be_named_than_a_folder_does(folder, nano):
    """They are part of what the draft is: data of it with others is not taken for its."""
    pair = load_pair("nano", draft=folder, draft_layers=[0, 2, 5])
    assert pair.draft_lm.reads_layers == (0, 2, 5)
    usual = load_pair("nano", draft=folder)
    assert pair.draft_revision == f"{usual.draft_revision} of layers 0, 2, 5"
    # A folder that was converted names numbers of another count
    change(folder, eagle_aux_hidden_state_layer_ids=[1, 46, 90])
    assert load_pair("nano", draft=folder, draft_layers=LAYERS).draft_lm.reads_layers == LAYERS


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"draft_layers": [1, 3, 6]}, r"layers \[1, 3, 6\], but the target has the layers 0 to 5"),
        ({"draft_layers": [1, 3]}, "columns of fc.weight=768, but expected 512"),
        ({"draft_layers": []}, r"model.draft_layers=\[\] must not be empty"),
        ({"draft_layers": [1, -3, 2]}, "model.draft_layers=-3 must be a non-negative integer"),
        (
            {"draft_layers": [1, 2], "draft": "embedded:nano/draft"},
            r"model.draft_layers=\[1,2\]: the draft embedded:nano/draft reads no layers",
        ),
        (
            {"draft_layers": [1, 2], "new_draft": NewFeatureDraft("eagle3")},
            "'a new eagle3 draft' is made; leave it out, or use eagle3.target_layers=",
        ),
    ],
)
def test_layers_that_cannot_be_read_are_one_message(keys, message, folder):
    with pytest.raises(UserError, match=message):
        load_pair("nano", **{"draft": folder} | keys)


@pytest.mark.parametrize("location", [TARGET, "embedded:nano/draft", "synthetic:llama3.2-1b"])
def test_other_models_read_no_target(location):
    assert not is_feature_draft(location)


MISTAKES = {
    "another target": (
        {"target": "embedded:nano/draft"},
        {},
        "but the target has the layers 0 to 1;",
    ),
    "layers": ({}, {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, "has the layers 0 to 5"),
    "another kind": ({}, {"speculators_model_type": "dflash"}, "expected eagle3"),
}


@pytest.mark.parametrize(("given", "keys", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_folder_that_does_not_fit_is_one_message(given, keys, message, folder):
    change(folder, **keys)
    with pytest.raises(UserError, match=message):
        load_pair("nano", **{"draft": folder} | given)


def test_its_weights_are_rounded_as_those_of_other_drafts(folder):
    plain, rounded = (
        load_pair("nano", draft=folder, device="cpu", dtype="float32", **keys)
        for keys in ({}, {"draft_quantization": "int8"})
    )
    assert rounded.draft_revision != plain.draft_revision
    num_rounded = 0
    for before, after in zip(plain.draft.modules(), rounded.draft.modules(), strict=True):
        if isinstance(after, torch.nn.Linear) and after.in_features % 32 == 0:
            assert torch.equal(after.weight, lattice_of(before.weight, "Q8_0").weight())
            num_rounded += not torch.equal(after.weight, before.weight)
    assert num_rounded > 5


def test_weights_that_are_no_numbers_are_named(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"][0, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"weights fc\.weight hold 1 of"):
        load_pair("nano", draft=folder)


@pytest.mark.parametrize("pickled", [False, True])
def test_a_file_that_is_cut_is_named(pickled, folder):
    flatten(folder, pickled, architectures=["LlamaForCausalLMEagle3"])
    file = folder / ("pytorch_model.bin" if pickled else "model.safetensors")
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match=f"{file.name} cannot be read .*; download .* again"):
        load_pair("nano", draft=folder)
