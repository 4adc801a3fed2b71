"""Drafts before training that are layers of the target."""

from datetime import date
from itertools import islice

import pytest
import torch
from architectures import VOCAB_SIZE as FEW
from architectures import WINDOW, tiny_config, tiny_model
from families import CONFIGS, VOCAB_SIZE, family_pair
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specheads import UserError
from specheads.pair.draft_vocabulary import borrows_embedding, share_embedding
from specheads.pair.eagle_formats import read_feature_draft, write_safeailab
from specheads.pair.initial_draft import NewFeatureDraft, TargetLayers
from specheads.pair.language_model import LanguageModel, place_of_layers
from specheads.pair.reading import read_features
from specheads.pair.unrolled import unrolled
from specheads.papers.layer_skip import without_layers

TOKENS = torch.arange(14)[None] % VOCAB_SIZE
LONG = (7 * torch.arange(3 * WINDOW)[None] + 3) % FEW  # longer than windows
NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
TODAY = {NAMES[(5 * date.today().toordinal() + number) % len(NAMES)] for number in range(5)}
# No tiny model of these is made, see tests/decoding/test_architectures.py
NOT_MADE = {
    *("blt", "cohere_compass_text", "dots3_note", "dots3_note_text", "gemma3n"),
    *("gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody"),
    *("qwen4_exp", "qwen4_exp_text", "xmod"),
}
# What the last layer alone computes, no config of one layer says
LAST_IS_REFUSED = {
    *("beam", "big_bird", "diffllama", "gemma3n_text", "gemma4", "gemma4_text", "git"),
    *("inkling2_text", "jamba", "minicpm3", "minimax", "modernbert-decoder", "olmo_hybrid"),
    *("reformer", "rwkv", "xlm", "xlstm", "zamba", "zamba2", "zaya"),
}
FIRST_AND_LAST_ARE_REFUSED = {"gemma3n_text", "zamba", "zamba2"}
ALL_ARE_REFUSED = {
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "emu3", "hrm_text"),
    *("longcat_flash", "marian", "mbart", "mllama", "mvp", "pegasus", "plbart", "prophetnet"),
    "whisper",
}


# Layers that hand on more than a state
CANNOT_SKIP = {"big_bird", "git", "inkling2_text", "reformer", "rwkv", "zaya"}


def without(target, removed, tokens):
    """The logits of a model some of whose layers return what they are given."""

    def its_input(layer, args, kwargs, output):
        hidden = args[0] if args else kwargs["hidden_states"]
        return type(output)([hidden, *output[1:]]) if isinstance(output, tuple | list) else hidden

    layers = target.get_submodule(place_of_layers(target))
    hooks = [
        layers[number].register_forward_hook(its_input, with_kwargs=True) for number in removed
    ]
    with torch.no_grad():
        logits = target(tokens, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits


def assert_is_the_target_without_the_others(target, layers, folder):
    count = target.config.get_text_config().num_hidden_layers
    draft = TargetLayers(layers).make(target)
    draft.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(
        folder, dtype=target.dtype, experts_implementation="eager"
    )
    expected = without(target, set(range(count)) - set(layers), LONG)
    for model in (draft, again):
        with torch.no_grad():
            found = model(LONG, use_cache=False).logits
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "name",
    [
        name if name in TODAY else pytest.param(name, marks=pytest.mark.full)
        for name in NAMES
        if name not in NOT_MADE
    ],
)
def test_layers_of_every_architecture_are_the_target_without_the_others(name, tmp_path):
    target = tiny_model(tiny_config(name), 4)
    count = target.config.get_text_config().num_hidden_layers
    for layers, refused in (
        ([0, count - 1], FIRST_AND_LAST_ARE_REFUSED),
        ([count - 1], LAST_IS_REFUSED),
    ):
        if name in ALL_ARE_REFUSED | refused:
            with pytest.raises(UserError):
                TargetLayers(layers).make(target)
        else:
            assert_is_the_target_without_the_others(target, layers, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        name if name in TODAY else pytest.param(name, marks=pytest.mark.full)
        for name in NAMES
        if name not in NOT_MADE | ALL_ARE_REFUSED
    ],
)
def test_a_target_that_skips_layers_is_the_target_without_them(name):
    target = tiny_model(tiny_config(name), 4)
    count = target.config.get_text_config().num_hidden_layers
    for skipped in ([0], [count - 1], list(range(1, count))):
        if name in CANNOT_SKIP:
            with pytest.raises(UserError, match="does not work without these layers"):
                without_layers(target, skipped)
            break
        found = without_layers(target, skipped)(LONG, use_cache=False).logits
        torch.testing.assert_close(found, without(target, skipped, LONG), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "layers", "settings"),
    [
        ("smollm3", [0, 2, 5], {}),
        ("smollm3", [3], {}),
        ("llama4_text", [3, 5], {}),
        ("qwen3_moe", [0, 1, 2, 5], {"mlp_only_layers": [1, 3]}),
        ("qwen3_moe", [1, 2, 4], {"mlp_only_layers": [4], "decoder_sparse_step": 2}),
        ("qwen2_moe", [0, 3, 5], {"decoder_sparse_step": 2}),
        ("qwen2_moe", [2], {"decoder_sparse_step": 3}),
        ("deepseek_v3", [0, 1, 4], {"first_k_dense_replace": 2}),
        ("deepseek_v3", [4, 5], {"first_k_dense_replace": 2}),
        ("glm4_moe", [1, 4], {"first_k_dense_replace": 3}),
        ("ernie4_5_moe", [1, 3, 5], {"moe_layer_start_index": 2, "moe_layer_end_index": 4}),
        ("afmoe", [0, 2, 3], {"num_dense_layers": 2}),
        ("gpt_neo", [1, 2], {"attention_types": [[["global", "local"], 3]]}),
        ("qwen2", [0, 4], {"use_sliding_window": True, "max_window_layers": 3}),
        ("gemma3_text", [0, 5], {}),
        ("cohere2", [1, 3], {}),
        ("gpt_oss", [1, 4], {}),
    ],
)
def test_settings_of_single_layers_are_carried_over(name, layers, settings, tmp_path):
    target = tiny_model(tiny_config(name, least_layers=6, **settings), 4)
    assert target.config.num_hidden_layers == 6
    assert_is_the_target_without_the_others(target, layers, tmp_path)


@pytest.mark.parametrize(
    ("name", "layers", "settings"),
    [
        ("deepseek_v3", [4, 1], {"first_k_dense_replace": 2}),  # a sparse one before a dense one
        ("gpt2", [0, 3], {"scale_attn_by_inverse_layer_idx": True}),
        ("diffllama", [1, 2], {}),
        ("jamba", [1, 3], {}),
    ],
)
def test_layers_that_no_config_describes_are_refused(name, layers, settings):
    target = tiny_model(tiny_config(name, least_layers=6, **settings), 4)
    with pytest.raises(UserError, match=r"of these layers computes what they compute in the targe"):
        TargetLayers(layers).make(target)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_of_some_layers_is_the_target_without_the_others(family):
    target = family_pair(family).target
    # The scale of its embeddings is float32 in one of them
    near = 1e-5 if family == "gemma2" else 1e-12
    for layers in ([0], [1]):
        model = TargetLayers(layers).make(target)
        expected = without_layers(target, [1 - layers[0]])(TOKENS).logits
        torch.testing.assert_close(model(TOKENS).logits, expected, atol=near, rtol=0)
    both = TargetLayers([0, 1]).make(target)
    torch.testing.assert_close(both(TOKENS).logits, target(TOKENS).logits, atol=near, rtol=0)
    assert not {weight.data_ptr() for weight in both.parameters()} & {
        weight.data_ptr() for weight in target.parameters()
    }


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom"])
def test_a_saved_initial_draft_is_an_ordinary_model(family, tmp_path):
    model = TargetLayers([1]).make(family_pair(family).target)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(again(TOKENS).logits, model(TOKENS).logits, atol=1e-5, rtol=1e-5)


def test_layers_are_spread_from_the_first_to_the_last():
    assert TargetLayers(1).numbers(6) == [0] and TargetLayers(2).numbers(6) == [0, 5]
    assert TargetLayers(6).numbers(6) == list(range(6)) and TargetLayers(4).numbers(32) == [
        0,
        10,
        21,
        31,
    ]
    assert TargetLayers((3, 1)).numbers(6) == [3, 1]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([2], r"init_layers=\[2\] are not layers of a target that has the layers 0 to 1"),
        ([], "init_layers"),
        (3, "init_layers=3 must be an integer from 1 to 2"),
    ],
)
def test_layers_that_the_target_does_not_have_are_refused(layers, message):
    with pytest.raises(UserError, match=message):
        TargetLayers(layers).make(family_pair("llama").target)


# --- drafts that read the target


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["eagle3", "eagle3.1"])
def test_a_new_draft_that_reads_any_target_gives_logits_of_all_tokens(name, kind):
    target = family_pair(name).target
    draft = NewFeatureDraft(kind, [0, 1]).make(target)
    assert draft.config.norm_before_residual and draft.config.norm_output == (kind == "eagle3.1")
    output = target.get_output_embeddings().weight
    assert torch.equal(draft.lm_head.weight, output)
    assert draft.lm_head.weight.data_ptr() != output.data_ptr()  # or the target would be trained
    shared = draft.embed_tokens.weight
    assert shared.data_ptr() == target.get_input_embeddings().weight.data_ptr()
    assert borrows_embedding(draft) and not shared.requires_grad
    _, features = read_features(LanguageModel(target), TOKENS, (0, 1))
    found = torch.stack(list(islice(unrolled(draft, TOKENS, features, TOKENS), 3)))
    logits = LanguageModel(draft).logits(found)
    assert logits.shape == (3, *TOKENS.shape, VOCAB_SIZE) and logits.isfinite().all()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_new_draft_in_safeailabs_format_is_what_that_describes(name, tmp_path):
    target = family_pair(name).target
    draft = NewFeatureDraft("eagle3", [1], form="safeailab").make(target)
    count = target.config.get_text_config().num_hidden_layers
    write_safeailab(draft, tmp_path, count)
    again = read_feature_draft(tmp_path, target.config)
    assert again.config.target_layers == (1,) and not again.config.norm_before_residual
    states = torch.randn(1, 4, draft.config.text_config.hidden_size, dtype=draft.dtype)
    share_embedding(again, draft.embed_tokens.weight)
    found = again(TOKENS[:1, :4], states).state
    torch.testing.assert_close(found, draft(TOKENS[:1, :4], states).state)
    config = draft.config.text_config
    assert config.head_dim * config.num_attention_heads == config.hidden_size


def test_a_new_draft_is_the_same_for_the_same_seed():
    target = family_pair("qwen3").target
    state = torch.get_rng_state()
    first, again, other = [
        NewFeatureDraft("eagle3", [0, 1], seed).make(target) for seed in (1, 1, 2)
    ]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.fc.weight, again.fc.weight)
    assert not torch.equal(first.fc.weight, other.fc.weight)
    assert first.config.text_config.model_type == "qwen3"


@pytest.mark.parametrize(
    ("count", "layers"),
    [(4, (1, 2, 3)), (6, (1, 3, 4)), (7, (2, 3, 4)), (16, (2, 8, 13)), (36, (2, 18, 33))],
)
def test_small_targets_have_other_layers_than_those_of_the_paper(count, layers):
    assert NewFeatureDraft("eagle3").layers(count) == layers


@pytest.mark.parametrize(
    ("layers", "count", "message"),
    [
        (None, 3, r"the target has 3 layers; name some: eagle3.target_layers=\[0, 1, 2\]"),
        ([1, 6], 6, r"eagle3.target_layers=\[1, 6\] must be different.*layers 0 to 5"),
        ([1, 1], 6, r"\[1, 1\] must be different"),
        ([], 6, r"\[\] must be different"),
    ],
)
def test_layers_that_a_target_does_not_have_are_refused(layers, count, message):
    with pytest.raises(UserError, match=message):
        NewFeatureDraft("eagle3", layers).layers(count)


def test_a_target_without_plain_embeddings_is_refused():
    target = family_pair("llama").target
    target.lm_head = torch.nn.Linear(32, 40, bias=False).double()
    with pytest.raises(UserError, match=r"embeddings \(29, 32\) and output \(40, 32\)"):
        NewFeatureDraft("eagle3", [0, 1]).make(target)


def test_a_target_whose_layers_read_more_than_states_is_refused():
    target = tiny_model(tiny_config("xlnet"), 0)  # positions come first
    with pytest.raises(UserError, match="the input of layer 0 of XLNetLMHeadModel, which is of"):
        NewFeatureDraft("eagle3", [0, 1]).make(target)
