"""Models whose states cannot be cut back: the engine that keeps the model's own cache, and what is
done without any memory.
"""

import pytest
import torch
from architectures import VOCAB_SIZE, tiny_config, tiny_model, tiny_pair

from specheads import SpeculativeDecoder, UserError, Warp, stopping
from specheads.decoding.branches import Branches, ReadTexts, TextReader
from specheads.decoding.decoder import Baseline
from specheads.decoding.engine import EagerEngine, OwnCacheEngine, cache_of, make_engine
from specheads.decoding.engine.own_cache import MOST_AGAIN
from specheads.pair.language_model import LanguageModel

GREEDY = Warp(temperature=0)
# Convolutions, one token at a time, states in a list, local attention
NAMES = ["lfm2", "mamba", "rwkv", "gpt_neo"]


def language_model(name, **more):
    return LanguageModel(tiny_model(tiny_config(name, **more), seed=4), VOCAB_SIZE)


@pytest.fixture(scope="module", params=NAMES)
def pair(request):
    return tiny_pair(request.param)


def text_of(count, seed=0):
    return torch.randint(VOCAB_SIZE, (1, count), generator=torch.Generator().manual_seed(seed))


def test_states_are_those_of_one_pass_after_any_rewind(pair):
    lm = pair.target_lm
    text = text_of(60)
    expected = lm.hidden_states(text, use_cache=False)
    engine = make_engine("auto", lm, 60)
    random = torch.Generator().manual_seed(1)
    assert type(engine) is OwnCacheEngine
    for _ in range(40):
        count = min(60 - engine.length, int(torch.randint(1, MOST_AGAIN + 4, (), generator=random)))
        start = engine.length
        states = engine.forward(text[:, start : start + count]).hidden
        # Recurrences run in float32.
        torch.testing.assert_close(states, expected[:, start : start + count], atol=1e-5, rtol=1e-3)
        engine.rewind(max(0, engine.length - int(torch.randint(0, 9, (), generator=random))))
        if engine.length == 60:
            engine.rewind(20)
    with pytest.raises(RuntimeError, match="cannot rewind"):
        engine.rewind(engine.length + 1)


def test_each_round_reads_only_accepted_tokens_again_and_one_copy_is_kept(pair):
    """A target that decodes alone makes no copies."""
    engine = make_engine("eager", pair.target_lm, 100)
    for token in text_of(60)[0]:
        engine.forward(token[None, None])
    assert engine._copy is None
    read = []
    hook = pair.target_lm.input_embedding.register_forward_hook(
        lambda module, args, out: read.append(args[0].shape[1])
    )
    engine.forward(text_of(5))
    engine.rewind(engine.length - 3)  # the first time, all is read again
    for _ in range(6):
        engine.forward(text_of(5))
        engine.rewind(engine.length - 3)
    hook.remove()
    if cache_of(pair.target_lm).together:
        assert read[:3] == [5, 62, 5] and max(read[3:]) <= 5 + MOST_AGAIN
    else:
        assert [count for count in read if count > 1] == [62]
        assert sum(read) == 5 + 62 + 5 + 5 * (2 + 5)


def test_batches_and_the_target_alone_are_plain_generation(pair):
    texts = [text_of(count, seed=count)[0].tolist() for count in (5, 20, 1)]
    expected = []
    for text in texts:
        prompt = torch.tensor([text])
        out = pair.target.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, pad_token_id=0
        )
        expected.append(out[0, len(text) :].tolist())
    decoder = SpeculativeDecoder(pair, stopping=stopping.FixedLength(4), warp=GREEDY)
    for other in (decoder, Baseline(pair, GREEDY)):
        assert [other.generate(text, 16).tokens.tolist() for text in texts] == expected
        found = other.generate_batch(texts, max_batch=2, max_new_tokens=16)
        assert [found[number].tokens.tolist() for number in range(3)] == expected


def test_branches_of_texts_are_read_without_memory(pair):
    texts = torch.cat([text_of(12), text_of(12, seed=1)])
    lm = pair.draft_lm
    read = ReadTexts.of(lm, texts)
    uniform = torch.rand(3, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    torch.testing.assert_close(read.hidden, lm.hidden_states(texts, use_cache=False))
    begun = Branches(
        torch.tensor([0, 1, 1]),
        torch.tensor([12, 4, 9]),
        torch.tensor([[3], [4], [5]]),
        torch.tensor([4, 3, 4]),
    )

    def draw(rows, depth, hidden):
        return GREEDY.draw(GREEDY(lm.logits(hidden)), uniform[rows, depth])

    grown = read.grow(begun, 4, draw, pair.stop_tokens, 40)
    for row, (text, prefix, length) in enumerate(
        zip(begun.text, begun.prefix, begun.lengths, strict=True)
    ):
        path = [*texts[text, :prefix].tolist(), int(begun.tokens[row])]
        for _ in range(length - 1):
            path.append(
                int(
                    lm.logits(lm.hidden_states(torch.tensor([path]), use_cache=False))[
                        0, -1
                    ].argmax()
                )
            )
        assert grown.tokens[row, :length].tolist() == path[prefix:]
    reader = TextReader(lm)
    branches = grown.rows(slice(1, 3))
    reader.read(texts[1].tolist())
    row, depth = branches.used.nonzero(as_tuple=True)
    assert reader.states(branches, row[:0], depth[:0]).shape == (0, lm.hidden_size)
    for states, number, place in zip(reader.states(branches, row, depth), row, depth, strict=True):
        path = [
            *texts[1, : branches.prefix[number]].tolist(),
            *branches.tokens[number, :place].tolist(),
        ]
        expected = lm.hidden_states(torch.tensor([path]), use_cache=False)[0, -1]
        # GPT-Neo's attention runs in float32
        torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-3)


def test_other_engines_and_trees_are_refused(monkeypatch):
    monkeypatch.delenv("SPECHEADS_ENGINE", raising=False)
    lm = language_model("lfm2")
    for engine in ("compiled", "cuda_graph"):
        with pytest.raises(UserError, match="layers of the kind conv. Use engine=eager"):
            make_engine(engine, lm, 40)
    with pytest.raises(UserError, match="decodes no trees"):
        make_engine("auto", lm, 40, spare_capacity=8)


@pytest.mark.parametrize("name", ["llama", "falcon", "deepseek_v3", "gemma3_text", "gpt_oss"])
def test_attention_keeps_static_memory(name):
    assert type(make_engine("eager", language_model(name), 40)) is EagerEngine


def test_what_masks_cannot_say_is_found_by_the_check():
    assert (
        cache_of(language_model("falcon", alibi=True)).obstacle
        == "on static memory it computes something else"
    )
    with pytest.raises(UserError, match="XLNetLMHeadModel cannot be decoded"):
        cache_of(LanguageModel(tiny_model(tiny_config("xlnet"), seed=4).float(), VOCAB_SIZE))


def test_sparse_attention_reads_one_token_at_a_time():
    """Several at once choose other keys, in texts longer than those of the check."""
    assert not cache_of(language_model("doge")).together


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa", "hy_v4", "moshi"])
def test_models_whose_long_texts_come_out_otherwise_are_refused(name):
    with pytest.raises(UserError, match="cannot be decoded"):
        cache_of(language_model(name))
