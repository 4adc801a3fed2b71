"""vLLM with EAGLE-3 drafts that were written here: they draft what they do here."""

import pytest
import torch
import vllm
from fakes import CountingTokenizer
from feature_drafts import plain_draft
from test_engine import greedy, noted_drafts, tokens
from transformers import LlamaConfig, LlamaForCausalLM

from specheads import Warp
from specheads.pair.draft_vocabulary import keep_tokens
from specheads.pair.eagle_formats import write_safeailab, write_speculators
from specheads.pair.initial_draft import NewFeatureDraft
from specheads.pair.pair import Pair
from specheads.pair.sampling import Uniforms

VOCAB_SIZE = 8  # so that some drafts of random weights are accepted
NUM_TOKENS = 60
NUM_DRAFTED = 3
GREEDY = Warp(temperature=0)


def random_pair(kind, form, layers):
    """Return a pair of random weights, whose draft has a reduced vocabulary."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        rope_theta=500.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    target = LlamaForCausalLM(config).eval()
    draft = NewFeatureDraft(kind, layers, form=form).make(target)
    keep_tokens(draft, torch.tensor([0, 2, 3, 4, 6, 7]))
    for model in (target, draft):
        for weight in model.parameters():
            if weight.ndim == 2:
                torch.nn.init.normal_(weight, std=1.5 / weight.shape[1] ** 0.5)
            else:
                torch.nn.init.uniform_(weight, 0.5, 1.5)
    return Pair(target, draft, CountingTokenizer(VOCAB_SIZE), "a", "target", "r1", "draft", "r2")


@pytest.mark.parametrize(
    ("kind", "form", "layers"),
    [
        ("eagle3", "speculators", None),
        ("eagle3.1", "speculators", [1, 3, 6]),
        ("eagle3", "safeailab", None),
        ("eagle3", "safeailab", [1, 3, 6]),
    ],
)
def test_vllm_drafts_as_the_same_draft_does_here(kind, form, layers, tmp_path):
    pair = random_pair(kind, form, layers)
    pair.target.save_pretrained(tmp_path / "target")
    folder = tmp_path / "draft"
    if form == "safeailab":
        write_safeailab(pair.draft, folder, num_layers=8)
    else:
        write_speculators(pair.draft, folder, "target", ["LlamaForCausalLM"], NUM_DRAFTED)
    options = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True}
    options |= {"max_model_len": 128, "max_num_seqs": 1}
    drafted = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": NUM_DRAFTED}
    engine = vllm.LLM(str(tmp_path / "target"), speculative_config=drafted, **options)
    drafts = noted_drafts(engine)
    prompt = [3, 1, 4, 1, 5]
    (said,) = tokens(engine, [{"prompt_token_ids": prompt}], greedy(NUM_TOKENS))
    num_accepted = 0
    uniforms = Uniforms(torch.device("cpu"), 0, 0)
    count = 1  # of the tokens that were said before a draft
    for draft in drafts:
        found = list(map(int, draft))
        assert found == plain_draft(pair, prompt + said[:count], NUM_DRAFTED, GREEDY, uniforms)
        accepted = 0
        while accepted < NUM_DRAFTED and said[count:][accepted : accepted + 1] == [found[accepted]]:
            accepted += 1
        num_accepted += accepted
        count += accepted + 1
        if count >= NUM_TOKENS:
            break
    assert count >= NUM_TOKENS and num_accepted > 5
    with torch.no_grad():
        logits = pair.target(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1]
    assert said == logits.argmax(dim=-1).tolist()
