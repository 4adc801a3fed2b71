"""The pairs of conf/model whose models are on the hub: what is known of them, and tiny models of
their shapes in every stage.
"""

import pytest
import torch
import yaml
from published_shapes import SHAPES, tiny, weightless
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specheads import SpeculativeDecoder, Warp, load_pair, stopping
from specheads.pair.config import config_folder

CONFIGS = {
    path.stem: yaml.safe_load(path.read_text())
    for path in sorted((config_folder() / "model").glob("*.yaml"))
}
PAIRS = {
    name: (c["draft"], c["target"])
    for name, c in CONFIGS.items()
    if ":" not in c["draft"] and c["draft"] != "???"
}
# That the tokenizer knows, and that the embeddings have, as published ones are padded, too
NUM_TOKENS = 30
NUM_ROWS = 40
PROMPTS = ["3 1 4 1 5", "2 7 1 8", "1 1 2 3 5 8 13 21"]
CHAT = (
    "{% for message in messages %}{{ '1 ' + message['content'] }}{% endfor %} 2{% if"
    " enable_thinking %} 3{% endif %}"
)


def write_tokenizer(folder, chats):
    tokenizer = Tokenizer(
        models.WordLevel({str(number): number for number in range(NUM_TOKENS)}, unk_token="0")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = CHAT if chats else None
    fast.save_pretrained(folder)


@pytest.fixture(params=PAIRS)
def folders(request, tmp_path):
    """Folders of a draft and a target with the shapes of a published pair, and the pair's name."""
    draft, target = PAIRS[request.param]
    for role, location, hidden_size in (("draft", draft, 32), ("target", target, 48)):
        tiny(SHAPES[location], hidden_size, NUM_ROWS, seed=len(role)).save_pretrained(
            tmp_path / role
        )
        write_tokenizer(tmp_path / role, chats="Instruct" in target or "Qwen3" in target)
    return request.param, tmp_path / "draft", tmp_path / "target"


def test_both_models_of_a_pair_have_one_vocabulary_size_and_the_draft_is_smaller():
    known = yaml.safe_load((config_folder().parent / "docs" / "published_models.yaml").read_text())
    assert {location for pair in PAIRS.values() for location in pair} == set(SHAPES) == set(known)
    assert all(
        known[location][0] == weightless(shape).num_parameters()
        for location, shape in SHAPES.items()
    )
    assert len(PAIRS) == len(set(PAIRS.values())) >= 12
    for draft, target in PAIRS.values():
        assert SHAPES[draft].vocab_size == SHAPES[target].vocab_size
        assert (
            weightless(SHAPES[draft]).num_parameters() < weightless(SHAPES[target]).num_parameters()
        )


def test_a_pair_of_these_shapes_decodes_as_transformers_generates(folders):
    name, draft, target = folders
    pair = load_pair(
        name, draft=draft, target=target, dtype="float64", device="cpu", device_map=None
    )
    assert (pair.vocab_size, pair.target.get_output_embeddings().weight.shape[0]) == (
        NUM_TOKENS,
        NUM_ROWS,
    )
    decoder = SpeculativeDecoder(
        pair, stopping=stopping.FixedLength(3), warp=Warp(temperature=0), engine="eager"
    )
    for prompt in PROMPTS:
        ids = pair.encode_instruction(prompt)
        out = pair.target.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=16,
            do_sample=False,
            pad_token_id=0,
            # Which no tokenizer knows, and the engine leaves out
            suppress_tokens=list(range(NUM_TOKENS, NUM_ROWS)),
        )
        assert decoder.generate(ids, 16).tokens.tolist() == out[0, len(ids) :].tolist()


def test_instructions_are_wrapped_as_the_config_of_the_pair_says(folders):
    name, draft, target = folders
    pair = load_pair(
        name, draft=draft, target=target, dtype="float64", device="cpu", device_map=None
    )
    expected = {"llama2-7b": True, "llama2-7b-to-llama2-13b": True}.get(
        name, bool(pair.tokenizer.chat_template)
    )
    assert pair.chats == expected
    # 0: [INST], [/INST]
    wrapped = [1, 7, 8, 2] if pair.tokenizer.chat_template else [0, 7, 8, 0] if expected else [7, 8]
    assert pair.encode_instruction("7 8") == wrapped
