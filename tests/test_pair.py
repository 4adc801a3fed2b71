import json
import shutil

import pytest
import torch
from fakes import CountingTokenizer, tiny_llama, tiny_pair

from specheads import UserError, load_pair
from specheads.pair import LanguageModel, check_tokenizers, check_vocabulary, config_folder, resolve, revision_of


@pytest.fixture
def copies(tmp_path):
    """Folders of nano's target and draft, each with the tokenizer beside it, as a user's own pair would lie."""
    folders = {}
    for role in ("target", "draft"):
        folders[role] = tmp_path / role
        shutil.copytree(resolve(f"embedded:nano/{role}"), folders[role])
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(resolve(f"embedded:nano/{file}"), folders[role])
    return folders


def test_a_pair_of_folders_is_the_pair_of_that_name(nano, copies):
    pair = load_pair(draft=copies["draft"], target=copies["target"], device="cpu", dtype="float32")
    assert (pair.draft_revision, pair.target_revision) == (nano.draft_revision, nano.target_revision)
    assert pair.stop_tokens == nano.stop_tokens == {1}
    tokens = torch.arange(5, 25)[None]
    assert torch.equal(pair.target(tokens).logits, nano.target(tokens).logits)


def test_a_target_placed_by_device_map_is_the_same_model(nano):
    spread = load_pair("nano", device_map="auto", device=None)
    tokens = torch.arange(5, 25)[None].to(spread.target_lm.device)
    expected = nano.target_lm.logits(nano.target_lm.hidden_states(tokens.cpu()))
    torch.testing.assert_close(spread.target_lm.logits(spread.target_lm.hidden_states(tokens)).cpu(), expected, atol=1e-4, rtol=0)


def test_a_folder_without_weights_has_no_version(nano, tmp_path):
    with pytest.raises(UserError, match="holds no .safetensors"):
        revision_of(nano.draft, tmp_path)


def test_every_named_pair_has_the_same_keys():
    from omegaconf import OmegaConf

    keys = {path.stem: set(OmegaConf.load(path)) - {"defaults"} for path in (config_folder() / "model").glob("*.yaml")}
    assert len(keys) >= 2 and all(found == keys["nano"] for found in keys.values())


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"name": "nan"}, "no model config 'nan'; known: .*nano"),
        (
            {"draft": "/nowhere/draft", "target": "embedded:nano/target", "tokenizer": "embedded:nano"},
            "'/nowhere/draft'.*expected a local folder",
        ),
        (
            {"draft": "embedded:nano/draft", "target": "someone/not-cached"},
            "'someone/not-cached'.*hub id that is reachable or cached",
        ),
        ({"name": "nano", "dtype": "float61"}, "dtype='float61'.*use auto, float32"),
        ({"name": "nano", "device": "gpu9"}, "device='gpu9' cannot be used here"),
        ({"draft": None, "target": "embedded:nano/target"}, "a pair needs both"),
    ],
)
def test_models_that_cannot_be_loaded_are_named(arguments, message):
    with pytest.raises(UserError, match=message):
        load_pair(**arguments)


def test_tokenizers_are_compared_not_vocabulary_sizes(nano, copies):
    path = copies["draft"] / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]  # the same size, other ids
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="different tokenizers.*2 tokens differ"):
        load_pair(draft=copies["draft"], target=copies["target"])


def test_the_same_vocabulary_with_other_merges_is_noticed():
    class Reversed(CountingTokenizer):
        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": super().__call__(text)["input_ids"][::-1]}

    with pytest.raises(UserError, match="the same text gets other ids"):
        check_tokenizers(CountingTokenizer(5), Reversed(5), "a", "b")


def test_padded_embeddings_are_fine_and_their_logits_are_left_out():
    pair = tiny_pair(vocab_size=5)
    pair.target = tiny_llama(8, seed=1, layers=2)
    check_vocabulary(pair)
    tokens = torch.tensor([[1, 2]])
    logits = pair.target_lm.logits(pair.target_lm.hidden_states(tokens))
    assert logits.shape == (1, 2, 5)
    torch.testing.assert_close(logits, pair.target(tokens).logits[..., :5])


def test_a_model_with_too_few_logits_is_refused():
    pair = tiny_pair(vocab_size=5)
    pair.draft = tiny_llama(4, seed=1)
    with pytest.raises(UserError, match="draft has 4 logits.*5 tokens"):
        check_vocabulary(pair)


def test_logits_that_a_model_changes_afterwards_are_noticed():
    model = tiny_llama(8, seed=0)
    LanguageModel(model).check()
    plain = model.forward

    def scaled(**kwargs):
        out = plain(**kwargs)
        out.logits = out.logits * 3
        return out

    model.forward = scaled
    with pytest.raises(UserError, match="LlamaForCausalLM changes its logits"):
        LanguageModel(model).check()


def test_another_weight_is_another_revision(nano, copies):
    path = copies["draft"] / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    pair = load_pair(draft=copies["draft"], target=copies["target"], device="cpu")
    assert pair.draft_revision != nano.draft_revision
    assert pair.target_revision == nano.target_revision
