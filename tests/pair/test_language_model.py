"""What is set up where models are read."""

import json

import pytest
import torch
from architectures import LENGTH, VOCAB_SIZE, tiny_config, tiny_model
from fakes import tiny_pair

from specheads import UserError
from specheads.pair.language_model import LanguageModel, load_model
from specheads.pair.source import ModelSource


@pytest.fixture
def cudnn_attention():
    """Switched on, as torch begins."""
    kept = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(kept)


@pytest.mark.usefixtures("cudnn_attention")
def test_a_model_that_is_read_does_not_use_cudnn_attention():
    """Whoever reads it: a pair's models for generation, labels and training, and one that a user
    made.
    """
    pair = tiny_pair()
    assert torch.backends.cuda.cudnn_sdp_enabled()
    assert pair.draft_lm.vocab_size and not torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    LanguageModel(pair.target)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert (
        torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()
    )


@pytest.mark.parametrize(
    "damage",
    [{"hidden_act": [None]}, {"tie_word_embeddings": -1}, {"num_attention_heads": 5}],
    ids=str,
)
def test_a_config_that_breaks_its_own_rules_is_a_message(damage, tmp_path):
    tiny_pair(8).target.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | damage))
    with pytest.raises(
        UserError,
        match=f"^the model '{tmp_path}' could not be loaded; .* Reason: .*[Vv]alidation error for ",
    ):
        load_model(ModelSource(str(tmp_path)))


@pytest.mark.parametrize(
    "name", ["granite", "hyperclovax", "minicpm3", "cohere2", "falcon_h1", "recurrent_gemma", "mpt"]
)
def test_logits_that_a_model_multiplies_are_its_own(name):
    """Granite and MiniCPM divide, HyperCLOVA X, Cohere and Falcon multiply, Gemma caps.

    MPT's `logit_scale` does nothing.
    """
    numbers = {
        "falcon_h1": {"lm_head_multiplier": 3.0},
        "recurrent_gemma": {"logits_soft_cap": 2.0},
        "mpt": {"logit_scale": 3.0},
    }
    model = tiny_model(tiny_config(name, **numbers.get(name, {})), seed=4)
    lm = LanguageModel(model, VOCAB_SIZE)
    tokens = torch.arange(6)[None]
    torch.testing.assert_close(
        lm.logits(lm.hidden_states(tokens, use_cache=False)), model(tokens, use_cache=False).logits
    )
    assert (lm.factor != 1 or lm.softcap == 2) == (name != "mpt")


def test_a_window_ends_where_frequencies_change():
    ropes = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
    }
    ropes |= {"original_max_position_embeddings": 40, "factor": 4.0}
    model = tiny_model(
        tiny_config("phi3", rope_parameters=ropes, original_max_position_embeddings=40), seed=4
    )
    assert LanguageModel(model).window == 40
    assert LanguageModel(tiny_model(tiny_config("phi3"), seed=4)).window == LENGTH
