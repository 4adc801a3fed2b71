"""Decoding with drafts that read their target, against plain loops over both models."""

import itertools
import os
from dataclasses import replace

import architectures
import pytest
import torch
from chains import Model, difference, emitted_distribution
from commands import ROOT
from draftings import DRAFTINGS
from fakes import CountingTokenizer, needs_compiler, tiny_pair
from families import CONFIGS, VOCAB_SIZE, family_pair
from feature_drafts import check_rounds, feature_draft, features_of, reading_pair
from statistics_helper import chi_square_p_value
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

from specheads import SpeculativeDecoder, UserError, Warp, generate_baseline, stopping, verification
from specheads.heads.batch import HeadBatch, head_features
from specheads.heads.config import KNOWN_INPUTS
from specheads.pair.eagle_formats import read_feature_draft
from specheads.pair.padding import right_padded
from specheads.pair.pair import Pair
from specheads.pair.unrolled import unrolled
from specheads.prompts.sources import NanoSource

FIXTURES = ROOT / "tests" / "fixtures" / "eagle3"
GREEDY = Warp(temperature=0)
SAMPLED = Warp(1.0, top_k=3)
NUM_TOKENS = 24
SIZE = 4
PROMPTS = [[3], [1, 2], [2, 0, 1, 3, 3, 3, 1, 0, 0, 2, 2, 1]]
KEPT = torch.tensor([0, 1, 3])
DRAFTS = {
    "plain": {},
    "reduced": {"kept": KEPT},
    "qwen3": {"kind": Qwen3Config, "norm_before_residual": True, "fc_norm": True},
    "eagle 3.1": {"norm_output": True, "norm_before_fc": True, "borrows": True},
}


def small_pair(seed=3, **choices):
    return reading_pair(tiny_pair(SIZE, scale=2.0), seed=seed, **choices)


def cases():
    """Every draft in every engine; compiled, which takes 20 seconds, most in a full run."""
    for name, engine in itertools.product(DRAFTS, ("eager", "cuda_graph", "compiled")):
        marks = []
        if engine == "compiled":
            marks = [needs_compiler] if name == "eagle 3.1" else [needs_compiler, pytest.mark.full]
        yield pytest.param(DRAFTS[name], engine, id=f"{name}-{engine}", marks=marks)


@pytest.mark.parametrize(("choices", "engine"), list(cases()))
def test_drafts_are_those_of_a_plain_loop(choices, engine):
    pair = small_pair(**choices)
    if engine == "compiled":  # with the operators in C++, which compute in float32
        pair.target.float()
        pair.draft.float()
    decoder = SpeculativeDecoder(pair, stopping=stopping.FixedLength(4), warp=GREEDY, engine=engine)
    decoder.warm_up()
    prepared = decoder.draft_engine.num_prepared + decoder.target_engine.num_prepared
    accepted = 0
    for prompt in PROMPTS:
        out = decoder.generate(prompt, NUM_TOKENS)
        expected = generate_baseline(pair, prompt, NUM_TOKENS, warp=GREEDY, engine="eager")
        assert out.tokens.tolist() == expected.tokens.tolist()
        check_rounds(pair, out, GREEDY)
        accepted += out.stats.num_accepted
    assert accepted > 9
    if engine == "compiled":  # texts shorter than a graph's tokens are captured when they are met
        assert decoder.draft_engine.num_prepared + decoder.target_engine.num_prepared == prepared


@pytest.mark.parametrize("rule", [stopping.FixedLength(3), stopping.MaxProbability(0.4, 4)])
def test_sampled_drafts_are_those_of_a_plain_loop(rule):
    pair = small_pair()
    decoder = SpeculativeDecoder(pair, stopping=rule, warp=SAMPLED, engine="eager")
    for prompt, seed in itertools.product(PROMPTS, range(3)):
        check_rounds(pair, decoder.generate(prompt, NUM_TOKENS, seed), SAMPLED, seed)


class Spy(stopping.FixedLength):
    """A fixed length that keeps every step's features."""

    needs = frozenset(KNOWN_INPUTS["next_token"])
    compile_key = "a spy"

    def __init__(self, num_tokens):
        super().__init__(num_tokens)
        self.seen = []

    def step(self, state, features):
        self.seen.append(features)
        return super().step(state, features)


def as_in_training(pair, out, drafts, predicts):
    """Return what training computes of the tokens that were drafted in the rounds of an output, in
    texts with the drafts of one round each.
    """
    text = [*out.prompt_ids.tolist(), *out.tokens.tolist(), *[0] * 8]
    mixed = []
    depths = []
    indices = []
    start = len(out.prompt_ids)
    for each, draft in zip(out.rounds, drafts, strict=True):
        mixed.append([*text[:start], *draft, *text[start + len(draft) :]])
        depths += range(len(draft))
        indices += range(start, start + len(draft))
        start += len(each.tokens)
    tokens = right_padded(mixed)
    index = torch.tensor(indices)
    row = torch.arange(len(drafts)).repeat_interleave(
        torch.tensor([len(draft) for draft in drafts])
    )
    drafted = tokens[row, index]
    batch = HeadBatch(
        tokens,
        row,
        index,
        drafted,
        label=torch.zeros(len(row)),
        committed=right_padded([text] * len(drafts)),
        depth=torch.tensor(depths),
    )
    return head_features(pair, batch, predicts, frozenset(KNOWN_INPUTS[predicts]))


@pytest.mark.parametrize("predicts", ["next_token", "input_token"])
@pytest.mark.parametrize("name", ["reduced", "eagle 3.1"])
def test_a_head_gets_the_training_features_in_the_decoder(name, predicts):
    """A head on the state after a token predicts it in the step after that which drafted it."""
    pair = small_pair(**DRAFTS[name])
    weight = pair.draft.get_input_embeddings().weight
    lag = int(predicts == "input_token")
    spy = Spy(4)
    decoder = SpeculativeDecoder(pair, stopping=spy, warp=SAMPLED, engine="eager")
    compared = set()
    for prompt, seed in itertools.product(PROMPTS[1:], range(3)):
        spy.seen.clear()
        out = decoder.generate(prompt, NUM_TOKENS, seed)
        steps = iter(spy.seen)
        drafts = []
        seen = []
        for each in out.rounds:
            of_round = list(itertools.islice(steps, each.num_drafted))
            tokens = [int((weight - step["embedding"]).abs().sum(1).argmin()) for step in of_round]
            assert tokens[: each.num_accepted] == list(each.tokens[: each.num_accepted])
            drafts.append(tokens[: len(tokens) - lag])
            seen += of_round[lag:]
        expected = as_in_training(pair, out, drafts, predicts)
        assert expected.keys() == set(KNOWN_INPUTS[predicts])
        for feature, values in expected.items():
            found = torch.cat([step[feature] for step in seen])
            torch.testing.assert_close(found, values, atol=1e-10, rtol=0, msg=feature)
        compared |= set(expected["depth"].tolist())
    assert compared == set(range(lag, 4))


@pytest.mark.parametrize(
    "engine",
    [
        "eager",
        "cuda_graph",
        pytest.param("compiled", marks=[needs_compiler, pytest.mark.full]),
    ],
)
@pytest.mark.parametrize("max_batch", [1, 3])
def test_a_rule_reads_the_depth_in_every_engine(engine, max_batch):
    pair = small_pair()
    if engine == "compiled":
        pair.target.float()
        pair.draft.float()
    decoder = SpeculativeDecoder(pair, stopping=Deep(6), warp=GREEDY, engine=engine)
    prompts = [*PROMPTS[1:], [3, 3]]
    for out in decoder.generate_batch(prompts, max_batch=max_batch, max_new_tokens=NUM_TOKENS):
        left = NUM_TOKENS
        for each in out.rounds:
            assert each.num_drafted == min(3, left - 1)
            left -= len(each.tokens)


class Deep(stopping.FixedLength):
    """Stops at the first token that is two steps deep."""

    needs = frozenset({"depth"})
    compile_key = "deep"

    def step(self, state, features):
        state, stop = super().step(state, features)
        return state, stop | (features["depth"] >= 2)


@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_output_is_that_of_targets_of_any_family(family):
    pair = reading_pair(family_pair(family), layers=(0, 1))
    decoder = SpeculativeDecoder(
        pair, stopping=stopping.FixedLength(3), warp=GREEDY, engine="eager"
    )
    for length in (1, 11):
        prompt = [token % VOCAB_SIZE for token in range(3, 3 + 5 * length, 5)]
        expected = generate_baseline(pair, prompt, NUM_TOKENS, warp=GREEDY, engine="eager")
        out = decoder.generate(prompt, NUM_TOKENS)
        assert out.tokens.tolist() == expected.tokens.tolist()
        check_rounds(pair, out, GREEDY)


@pytest.mark.parametrize(
    "rule", [verification.TokenVerification(), verification.BlockVerification()]
)
def test_sampled_output_follows_the_targets_distribution(rule):
    """400 responses of three tokens, next to other prompts, with a draft whose output lacks one.

    A false alarm has probability 1e-6.
    """
    pair = reading_pair(tiny_pair(SIZE), kept=KEPT, gain=1.0)
    warp = Warp(1.0)
    paths = list(itertools.product(range(SIZE), repeat=3))
    texts = torch.tensor([[0, 1, *path] for path in paths])
    distributions = warp(pair.target_lm.logits(pair.target_lm.hidden_states(texts)))[:, 1:-1]
    distribution = distributions.gather(2, torch.tensor(paths)[:, :, None])[..., 0].prod(dim=1)
    decoder = SpeculativeDecoder(
        pair, stopping=stopping.FixedLength(2), verification=rule, warp=warp, engine="eager"
    )
    prompts = [[0, 1], [2, 3, 1, 0, 2]] * 400
    seeds = [seed for each in range(400) for seed in (each, 0)]
    outs = decoder.generate_batch(
        prompts, max_batch=2, max_new_tokens=3, seeds=seeds, stop_tokens=[]
    )[::2]
    counts = torch.zeros(len(paths), dtype=torch.float64)
    for out in outs:
        counts[paths.index(tuple(out.tokens.tolist()))] += 1
    assert sum(out.stats.num_accepted for out in outs) > 40
    assert chi_square_p_value(counts, distribution) > 1e-6


class TargetAlone(Model):
    """The warped distributions of a pair's target after a prompt."""

    def __init__(self, pair, prompt, warp):
        super().__init__(pair.vocab_size, seed=0)
        self.pair = pair
        self.prompt = prompt
        self.warp = warp

    def __call__(self, prefix):
        if prefix not in self._probs:
            tokens = torch.tensor([[*self.prompt, *prefix]])
            self._probs[prefix] = self.warp(self.logits(tokens))
        return self._probs[prefix]

    def logits(self, tokens):
        """Return the logits (V,) after `tokens` (1, T)."""
        return self.pair.target_lm.logits(self.pair.target_lm.hidden_states(tokens)[0, -1])


class InRound(TargetAlone):
    """The distributions of a draft that has read the target's states up to a round's start."""

    def __init__(self, pair, prompt, warp, start=()):
        super().__init__(pair, prompt, warp)
        self.start = start

    def in_round(self, start):
        return InRound(self.pair, self.prompt, self.warp, start)

    @torch.no_grad()
    def logits(self, tokens):
        draft = self.pair.draft
        depth = tokens.shape[1] - len(self.prompt) - len(self.start)
        features = features_of(self.pair.target, tokens[0], draft.config.target_layers)
        steps = unrolled(draft, tokens, features[None], tokens)
        hidden = next(itertools.islice(steps, depth, None))
        return self.pair.draft_lm.logits(hidden[0, -1])


@pytest.mark.parametrize("warp", [Warp(1.0), Warp(0.7, top_k=2)], ids=str)
@pytest.mark.parametrize(
    "rule", [verification.TokenVerification(), verification.BlockVerification()]
)
def test_every_output_has_the_targets_probability(rule, warp):
    """By enumeration of drafts, acceptances and the rounds after them."""
    pair = reading_pair(tiny_pair(3), kept=torch.tensor([0, 2]), gain=1.0, norm_output=True)
    target = TargetAlone(pair, [0, 1], warp)
    draft = InRound(pair, [0, 1], warp)
    emitted = emitted_distribution(rule, target, draft, num_drafted=2, num_tokens=3)
    assert difference(emitted, target) < 1e-9
    # What it drafts after the same tokens depends on where the round began
    both = torch.stack([draft.in_round(start)((2,)) for start in ((), (2,))])
    assert (both[0] - both[1]).abs().max() > 0.01


def drafted(out):
    """Return the numbers of drafted and accepted tokens of each round."""
    return [(each.num_drafted, each.num_accepted) for each in out.rounds]


@pytest.mark.parametrize(
    ("engine", "warp"),
    [
        ("eager", GREEDY),
        ("eager", SAMPLED),
        ("cuda_graph", SAMPLED),
        pytest.param("compiled", GREEDY, marks=needs_compiler),
    ],
)
def test_rows_of_a_batch_decode_as_a_single_text(engine, warp):
    pair = small_pair(norm_output=True)
    if engine == "compiled":
        pair.target.float()
        pair.draft.float()
    rule = stopping.Confidence(0.5, 4)
    prompts = [*PROMPTS, [0], [1, 1, 3], list(range(SIZE)) * 4]
    single = SpeculativeDecoder(pair, stopping=rule, warp=warp, engine="eager")
    decoder = SpeculativeDecoder(pair, stopping=rule, warp=warp, engine=engine)
    found = decoder.generate_batch(prompts, max_batch=4, max_new_tokens=NUM_TOKENS, seeds=5)
    for number, (prompt, out) in enumerate(zip(prompts, found, strict=True)):
        expected = single.generate(prompt, NUM_TOKENS, seed=5 + number)
        assert out.tokens.tolist() == expected.tokens.tolist()
        assert drafted(out) == drafted(expected)


@pytest.mark.parametrize("max_batch", [1, 3])
@pytest.mark.parametrize("name", ["lfm2", "mamba", "rwkv", "gpt_neo"])
def test_targets_on_their_own_cache_are_read(name, max_batch):
    pair = reading_pair(architectures.tiny_pair(name))
    decoder = SpeculativeDecoder(pair, stopping=stopping.FixedLength(3), warp=GREEDY)
    prompts = [[4, 1, 3], [2], [5, 6, 2, 2, 1, 3, 1]]
    found = decoder.generate_batch(prompts, max_batch=max_batch, max_new_tokens=16)
    for prompt, out in zip(prompts, found, strict=True):
        expected = generate_baseline(pair, prompt, 16, warp=GREEDY)
        assert out.tokens.tolist() == expected.tokens.tolist()
        check_rounds(pair, out, GREEDY)


@pytest.mark.parametrize("engine", ["eager", "cuda_graph"])
@pytest.mark.parametrize("max_batch", [1, 2])
def test_prompts_are_read_whole_however_long(engine, max_batch):
    """Some are read alone, and some with others."""
    pair = reading_pair(tiny_pair(SIZE, scale=2.0, window=800), seed=3)
    generator = torch.Generator().manual_seed(0)
    prompts = []
    for length in (300, 20, 250, 600):
        prompts.append(torch.randint(SIZE, (length,), generator=generator).tolist())
    decoder = SpeculativeDecoder(pair, stopping=stopping.FixedLength(3), warp=GREEDY, engine=engine)
    for out in decoder.generate_batch(prompts, max_batch=max_batch, max_new_tokens=12):
        check_rounds(pair, out, GREEDY)


@pytest.mark.parametrize("max_batch", [1, 3])
def test_the_target_goes_on_alone_where_its_draft_ends(max_batch):
    pair = tiny_pair(SIZE, scale=2.0)
    draft = feature_draft(pair.target, seed=3)
    draft.config.text_config.max_position_embeddings = 24
    pair = replace(pair, draft=draft)
    prompts = [[1, 2, 3], [0, 1, 2, 3] * 7, [3] * 23, [1] * 24, [2] * 25]
    decoder = SpeculativeDecoder(pair, warp=GREEDY, engine="eager")
    found = decoder.generate_batch(prompts, max_batch=max_batch, max_new_tokens=60)
    for prompt, out in zip(prompts, found, strict=True):
        expected = generate_baseline(pair, prompt, 60, warp=GREEDY, engine="eager")
        assert out.tokens.tolist() == expected.tokens.tolist()
        check_rounds(pair, out, GREEDY)
    assert found[0].stats.num_drafted > 5 and found[1].stats.num_drafted == 0


@pytest.mark.parametrize("max_batch", [1, 2])
def test_a_nan_of_the_draft_is_reported_and_leaves_no_trace(max_batch):
    pair = small_pair()
    decoder = SpeculativeDecoder(pair, stopping=stopping.FixedLength(3), warp=GREEDY)
    prompts = [[0, 1, 2], [3, 1]]
    expected = decoder.generate_batch(prompts, max_batch=max_batch, max_new_tokens=12)
    weight = pair.draft.fc.weight
    kept = weight.clone()
    weight.fill_(float("nan"))
    with pytest.raises(UserError, match="reads-its-target"):
        decoder.generate_batch(prompts, max_batch=max_batch, max_new_tokens=12)
    weight.copy_(kept)
    again = decoder.generate_batch(prompts, max_batch=max_batch, max_new_tokens=12)
    assert list(map(drafted, again)) == list(map(drafted, expected))


@pytest.mark.parametrize(
    "engine",
    ["cuda_graph", pytest.param("compiled", marks=[needs_compiler, pytest.mark.full])],
)
def test_changed_weights_of_the_draft_are_noticed(engine):
    """Those that the target's steps read, too."""
    pair = small_pair()
    if engine == "compiled":  # with the operators in C++, which compute in float32
        pair.target.float()
        pair.draft.float()
    decoder = SpeculativeDecoder(pair, stopping=stopping.FixedLength(3), warp=GREEDY, engine=engine)
    decoder.generate(PROMPTS[2], NUM_TOKENS)
    weight = pair.draft.fc.weight
    weight.data = torch.randn_like(weight)
    check_rounds(pair, decoder.generate(PROMPTS[2], NUM_TOKENS), GREEDY)


def test_drafting_that_is_made_for_other_drafts_says_so():
    with pytest.raises(UserError, match="reads-its-target reads the target's states; use drafting"):
        SpeculativeDecoder(small_pair(), DRAFTINGS["tree"], warp=GREEDY)


def test_a_draft_on_another_device_is_one_message():
    pair = small_pair()
    pair.draft.to("meta")
    with pytest.raises(UserError, match="it is on meta, and the target on cpu; put both on one"):
        SpeculativeDecoder(pair, warp=GREEDY)


@pytest.mark.parametrize("folder", sorted(FIXTURES.iterdir()), ids=lambda folder: folder.name)
def test_folders_that_the_reference_wrote_are_decoded(folder):
    torch.manual_seed(0)
    target = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=32,
            num_attention_heads=2,
            num_hidden_layers=8,
            max_position_embeddings=64,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
    draft = read_feature_draft(folder, target.config)
    pair = Pair(target, draft, CountingTokenizer(40), "a", "target", "r1", "draft", "r2")
    decoder = SpeculativeDecoder(
        pair, stopping=stopping.FixedLength(3), warp=SAMPLED, engine="eager"
    )
    check_rounds(pair, decoder.generate([3, 1, 4], NUM_TOKENS), SAMPLED)


NUM_PROMPTS = int(os.environ.get("SPECHEADS_GREEDY_PROMPTS", "6"))


@pytest.fixture(scope="module")
def taught(nano64):
    """Prompts with nano's greedy responses, and a draft that has learned some of these."""
    texts = []
    for prompt in NanoSource(0, 0, NUM_PROMPTS).load(chats=False):
        ids = nano64.encode_instruction(prompt.text)
        response = generate_baseline(nano64, ids, NUM_TOKENS, warp=GREEDY, engine="eager").tokens
        texts.append((ids, response.tolist()))
    kept = torch.arange(0, nano64.vocab_size, 1)
    draft = feature_draft(nano64.target, (1, 3, 4), kept, borrows=True, gain=1.0).float()
    layers = draft.config.target_layers
    pairs = []
    for ids, response in texts:
        tokens = torch.tensor([[*ids, *response]])
        with nano64.target_lm.noting_inputs(layers) as inputs:
            nano64.target_lm.hidden_states(tokens, use_cache=False)
        features = torch.cat([inputs[layer] for layer in layers], dim=-1).float()
        pairs.append((tokens[:, 1:-1], features[:, :-2], tokens[0, 2:]))
    learned = [draft.fc.weight, draft.lm_head.weight, *draft.layers.parameters()]
    optimizer = torch.optim.Adam([weight.requires_grad_(True) for weight in learned], 2e-3)
    for tokens, features, nexts in pairs * 8:
        output = draft(tokens, draft.first_states(features))
        later = draft(tokens[:, 1:], output.state[:, :-1])
        for hidden, expected in ((output.hidden, nexts), (later.hidden, nexts[1:])):
            loss = nn.functional.cross_entropy(draft.lm_head(hidden)[0], expected)
            loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
    draft.requires_grad_(False).double()
    return replace(nano64, draft=draft, draft_id="taught"), texts


@pytest.mark.parametrize("max_batch", [1, 4])
def test_acceptance_by_chance_is_reported_once(nano, max_batch, caplog):
    pair = reading_pair(nano, layers=(1, 3, 4), norm_output=True)
    decoder = SpeculativeDecoder(pair, stopping=stopping.FixedLength(1), warp=GREEDY)
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12], [13, 14]]
    for _ in range(3):
        decoder.generate_batch(prompts, max_batch=max_batch, max_new_tokens=20, stop_tokens=())
    (warning,) = [each.message for each in caplog.records if "by chance" in each.message]
    assert "first tokens of 5" in warning and "drafts of reads-its-target, 0 were" in warning
    assert "the inputs of layers 1, 3, 4 of the target (norm_output)" in warning


@pytest.mark.parametrize("max_batch", [1, 4])
def test_greedy_responses_of_nano_are_the_targets(taught, max_batch, caplog):
    pair, texts = taught
    decoder = SpeculativeDecoder(
        pair, stopping=stopping.MaxProbability(0.3, 6), warp=GREEDY, engine="eager"
    )
    prompts = [ids for ids, _ in texts]
    found = decoder.generate_batch(prompts, max_batch=max_batch, max_new_tokens=NUM_TOKENS)
    for (_, expected), out in zip(texts, found, strict=True):
        assert out.tokens.tolist() == expected
    lengths = [each.num_accepted for out in found for each in out.rounds]
    assert max(lengths) > 1 and sum(lengths) > len(lengths) // 2
    assert len(lengths) >= 50 and "by chance" not in caplog.text
