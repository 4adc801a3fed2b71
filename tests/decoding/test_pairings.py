"""Every drafting with every rule that takes it: greedy output is the target's, sampled output
follows its distribution, others are refused.
"""

import itertools

import pytest
import torch
from draftings import DRAFTINGS, RULES
from fakes import cut, needs_compiler, tiny_pair
from families import CONFIGS, CUT, VOCAB_SIZE, family_pair
from statistics_helper import chi_square_p_value

from specheads import (
    AcceptanceHead,
    HeadConfig,
    SpeculativeDecoder,
    UserError,
    Warp,
    generate_baseline,
    stopping,
)
from specheads.decoding.drafting import check_pairing
from specheads.papers.mjsd import BlockSearch

LOSSLESS = [
    (name, rule)
    for (name, way), (rule, make) in itertools.product(DRAFTINGS.items(), RULES.items())
    if way.kind in make.takes and make().lossless
]
NUM_TOKENS = 24


FAMILIES = [*CONFIGS, CUT]
CAPTURED = [("tree", "tree_match"), ("graph", "tree_match"), ("layer_skip", "token")]


def cases():
    """One family with every drafting and rule, and the others with some each, so that each drafting
    meets several; the rest in a full run.
    """
    for (number, family), (way, rule) in itertools.product(enumerate(FAMILIES), LOSSLESS):
        usual = isinstance(DRAFTINGS[way].usual_verification(), RULES[rule])
        chosen = family in ("llama", CUT) or (
            usual and (number + list(DRAFTINGS).index(way)) % 3 == 0
        )
        yield pytest.param(family, way, rule, marks=[] if chosen else pytest.mark.full)


def captured_cases():
    """Every family with one drafting, in turn; the rest in a full run."""
    for (number, family), (place, case) in itertools.product(
        enumerate(FAMILIES), enumerate(CAPTURED)
    ):
        yield pytest.param(family, *case, marks=[] if number % 3 == place else pytest.mark.full)
    for family, way in itertools.product(FAMILIES, ("multi", "beam")):
        yield pytest.param(family, way, "tree_match", marks=pytest.mark.full)


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request):
    return family_pair(request.param)


@pytest.fixture(scope="module")
def references(pair):
    expected = []
    for seed in range(2):
        prompt = torch.randint(
            VOCAB_SIZE, (2 + 9 * seed,), generator=torch.Generator().manual_seed(seed)
        ).tolist()
        expected.append(
            (
                prompt,
                generate_baseline(
                    pair, prompt, NUM_TOKENS, warp=Warp(0), engine="eager"
                ).tokens.tolist(),
            )
        )
    return expected


def check_greedy(pair, references, way, rule, engine, stop=None):
    stop = stop or stopping.FixedLength(4)
    decoder = SpeculativeDecoder(
        pair, DRAFTINGS[way], stop, RULES[rule](), Warp(temperature=0), engine
    )
    decoder.warm_up()
    prepared = decoder.draft_engine.num_prepared + decoder.target_engine.num_prepared
    for prompt, expected in references:
        out = decoder.generate(prompt, NUM_TOKENS)
        assert out.tokens.tolist() == expected
        assert sum(len(record.tokens) for record in out.rounds) == NUM_TOKENS
    # Nothing in mid-generation
    assert decoder.draft_engine.num_prepared + decoder.target_engine.num_prepared == prepared
    return out


@pytest.mark.parametrize(("pair", "way", "rule"), list(cases()), indirect=["pair"])
def test_greedy_output_is_that_of_the_target(pair, references, way, rule):
    check_greedy(pair, references, way, rule, "eager")


@pytest.mark.parametrize(("pair", "way", "rule"), list(captured_cases()), indirect=["pair"])
def test_captured_steps_emit_the_same_tokens(pair, references, way, rule):
    check_greedy(pair, references, way, rule, "cuda_graph")


@needs_compiler
@pytest.mark.full  # a minute each
@pytest.mark.parametrize(("way", "rule"), [("tree", "tree_match"), ("layer_skip", "token")])
def test_compiled_steps_emit_the_same_tokens(pair, references, way, rule):
    check_greedy(pair, references, way, rule, "compiled")


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_trees_and_graphs_are_more_than_chains(pair, references):
    """Or the tests above would say little."""
    for way in ("tree", "graph"):
        out = check_greedy(pair, references, way, "tree_match", "eager")
        assert out.stats.num_drafted > 6 * out.stats.num_target_calls and out.stats.num_accepted > 0


def test_a_head_prunes_along_every_path():
    torch.manual_seed(0)
    pair = family_pair("llama")
    sizes = []
    prompt = [3, 1, 4, 1, 5]
    expected = generate_baseline(
        pair, prompt, NUM_TOKENS, warp=Warp(0), engine="eager"
    ).tokens.tolist()
    size = pair.draft.get_input_embeddings().weight.shape[1]
    head = AcceptanceHead(
        HeadConfig(pair.draft_lm.hidden_size, embedding_size=size, depth=1, predicts="next_token")
    )
    torch.nn.init.normal_(head.readout.weight, std=0.3)
    for threshold in (0.6, 0.9):
        stop = stopping.HeadThreshold(head.requires_grad_(False), threshold, max_tokens=6)
        stats = check_greedy(pair, [(prompt, expected)], "tree", "tree_match", "eager", stop).stats
        sizes.append(stats.num_drafted / stats.num_target_calls)
    assert 3 < sizes[0] < sizes[1]


@pytest.mark.parametrize("way", ["tree", "graph", "multi", "beam", "chain"])
@pytest.mark.parametrize("engine", ["eager", "cuda_graph"])
def test_nan_logits_of_a_draft_are_reported_and_cleared_from_memory(way, engine):
    pair = tiny_pair(4)
    prompt = [0, 1, 2]
    decoder = SpeculativeDecoder(
        pair, DRAFTINGS[way], stopping.FixedLength(3), warp=Warp(0), engine=engine
    )
    expected = decoder.generate(prompt, 12)
    weight = pair.draft.lm_head.weight
    kept = weight.clone()
    weight.fill_(float("nan"))
    with pytest.raises(UserError, match="tiny-draft"):
        decoder.generate(prompt, 12)
    weight.copy_(kept)
    again = decoder.generate(prompt, 12)
    assert (
        torch.equal(again.tokens, expected.tokens)
        and again.stats.num_drafted == expected.stats.num_drafted
    )


def test_a_search_of_a_target_with_nan_logits_is_reported():
    pair = tiny_pair(4)
    pair.target.lm_head.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="tiny-target"):
        BlockSearch(pair, 3, 2).generate([0, 1], 6)


def test_rules_of_a_decoder_share_its_compiled_steps():
    """Whatever their lengths, up to the usual longest: with each new size everything would be
    captured again.
    """
    for way in ("tree", "graph", "multi", "beam"):
        decoder = SpeculativeDecoder(
            tiny_pair(4), DRAFTINGS[way], stopping.FixedLength(3), warp=Warp(0), engine="cuda_graph"
        )
        decoder.warm_up()
        before = decoder.draft_engine.num_prepared
        decoder.with_stopping(stopping.FixedLength(6)).generate([0, 1, 2], 8)
        # Whose pending tokens are more
        assert decoder.draft_engine.num_prepared == before or way == "graph"


# Those of every run, without a head
SAMPLED = [("batch", "multi_round"), ("multi", "spectr"), ("known_text", "tree_match")]
LOGISTIC = {"log_draft_prob": 1.0, "bias": 1.0}
STOPS = {
    "fixed_length": lambda head: stopping.FixedLength(2),
    "max_probability": lambda head: stopping.MaxProbability(0.4, 3),
    "confidence": lambda head: stopping.Confidence(0.4, 3),
    "draft_product": lambda head: stopping.DraftProduct(0.6, max_tokens=3),
    "logistic": lambda head: stopping.Logistic(LOGISTIC, 0.4, max_tokens=3),
    "online_logistic": lambda head: stopping.OnlineLogistic(threshold=0.6, max_tokens=3),
    "head_threshold": lambda head: stopping.HeadThreshold(head, 0.6, max_tokens=3),
    "online_head": lambda head: stopping.OnlineHead(head, 0.6, max_tokens=3),
}


def sampled_cases():
    """Every pairing with every stopping rule; most in a full run."""
    for pairing, stop in itertools.product(LOSSLESS, STOPS):
        if pairing[0] == "known_text" and stop != "fixed_length":
            continue  # no draft model runs whose probabilities a rule could read
        chosen = pairing in SAMPLED and stop == "fixed_length"
        yield pytest.param(
            *pairing, stop, id="-".join([*pairing, stop]), marks=[] if chosen else pytest.mark.full
        )


@pytest.mark.parametrize(("way", "rule", "stop"), list(sampled_cases()))
def test_sampled_output_follows_the_targets_distribution(way, rule, stop):
    """400 responses of three tokens, with a draft whose output lacks a token.

    Chains are decoded beside other prompts.

    A false alarm has probability 1e-6 for each case.
    """
    pair = cut(tiny_pair(4), [0, 1, 3])
    warp = Warp(1.0)
    number = 400
    size = 4
    paths = list(itertools.product(range(size), repeat=3))
    texts = torch.tensor([[0, 1, *path] for path in paths])
    distributions = warp(pair.target_lm.logits(pair.target_lm.hidden_states(texts)))[:, 1:-1]
    distribution = distributions.gather(2, torch.tensor(paths)[:, :, None])[..., 0].prod(dim=1)
    torch.manual_seed(0)
    head = AcceptanceHead(
        HeadConfig(pair.draft_lm.hidden_size, depth=1, predicts="next_token")
    ).requires_grad_(False)
    torch.nn.init.normal_(head.readout.weight, std=0.3)
    decoder = SpeculativeDecoder(
        pair, DRAFTINGS[way], STOPS[stop](head), RULES[rule](), warp, "eager"
    )
    if way in ("chain", "layer_skip"):
        prompts = [[0, 1], [2, 3, 1, 0, 2]] * number
        seeds = [seed for each in range(number) for seed in (each, 0)]
        outs = decoder.generate_batch(
            prompts, max_batch=2, max_new_tokens=3, seeds=seeds, stop_tokens=[]
        )[::2]
    else:
        outs = [decoder.generate([0, 1], 3, seed=seed, stop_tokens=[]) for seed in range(number)]
    counts = torch.zeros(len(paths), dtype=torch.float64)
    accepted = 0
    for out in outs:
        counts[paths.index(tuple(out.tokens.tolist()))] += 1
        accepted += out.stats.num_accepted
    assert accepted > 0.1 * number or way == "known_text"
    assert chi_square_p_value(counts, distribution) > 1e-6


def test_every_kind_of_draft_has_a_default_rule():
    for way in DRAFTINGS.values():
        check_pairing(way, way.usual_verification())


def test_a_rule_has_the_name_of_its_config():
    assert {rule.name: rule for rule in RULES.values()} == RULES


@pytest.mark.parametrize(
    ("way", "rule", "message"),
    [
        (
            "tree",
            "token",
            (
                "token verification does not take what Tree drafts, a tree of chosen tokens; use"
                " for example verification=tree_match"
            ),
        ),
        ("multi", "block", "use for example verification=multi_round"),
        ("beam", "token", "use for example verification=joint"),
        (
            "known_text",
            "joint",
            "joint verification, threshold 0.1 does not take what KnownText drafts",
        ),
    ],
)
def test_an_impossible_pairing_is_refused_and_the_message_lists_possible_ones(way, rule, message):
    with pytest.raises(UserError, match=message):
        SpeculativeDecoder(tiny_pair(3), DRAFTINGS[way], verification=RULES[rule]())
