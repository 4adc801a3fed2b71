"""Every causal architecture of the installed transformers decodes as its own greedy generation
does, or is refused in a sentence.

Two architectures are tried in every run, others each day; `-m full` tries all.
"""

from datetime import date
from pathlib import Path

import pytest
import torch
from architectures import LENGTH, VOCAB_SIZE, WINDOW, tiny_pair
from feature_drafts import check_rounds, reading_pair
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specheads import SpeculativeDecoder, UserError, Warp, generate_baseline, stopping
from specheads.decoding.decoder import Baseline
from specheads.decoding.engine import cache_of

GREEDY = Warp(temperature=0)
NUM_TOKENS = 64
NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
# Of these no tiny model is made: parts that read images or sounds, other packages, or sizes that
# depend on each other. Whisper's decoder alone is made, but its own `generate` fails. Inkling takes
# minutes: the first of the two passed once.
NOT_MADE = {
    "blt",
    "cohere_compass_text",
    "dots3_note",
    "dots3_note_text",
    "gemma3n",
    "gemma4_assistant",
    "gemma4_unified_assistant",
    "inkling2_text",
    "inkling_text",
    "musicgen",
    "musicgen_melody",
    "qwen4_exp",
    "qwen4_exp_text",
    "whisper",
}
TRIED = [name for name in NAMES if name not in NOT_MADE]
EACH_DAY = [
    "llama",
    "afmoe",
    "mamba",
    "granite",
    "lfm2",
    "falcon",
    "rwkv",
    "cohere2",
    "gpt_neo",
    "llama4_text",
    "mpt",
    "mamba2",
]
PAGE = (Path(__file__).parents[2] / "docs/engines.md").read_text()
ROWS = [
    line.strip("| ").split(" | ")
    for line in PAGE.splitlines()
    if line.startswith("| ") and line.count(" | ") == 2
]
DOCUMENTED = {how: names.split(", ") for how, _, names in ROWS}
TODAY = {EACH_DAY[(2 * date.today().toordinal() + number) % len(EACH_DAY)] for number in range(2)}


def test_the_page_of_engines_names_each_architecture_once():
    counted = {how: int(number) for how, number, _ in ROWS if number.isdigit()}
    assert {how: len(names) for how, names in DOCUMENTED.items() if how in counted} == counted
    assert sorted(name for how in counted for name in DOCUMENTED[how]) == NAMES
    assert set(DOCUMENTED["not tried"]) == NOT_MADE


@pytest.mark.parametrize(
    "name",
    [name if name in TODAY else pytest.param(name, marks=pytest.mark.full) for name in TRIED],
)
def test_the_output_is_that_of_greedy_generation_or_the_pair_is_refused(name):
    pair = tiny_pair(name)
    refusal = ""
    try:
        for lm in (pair.target_lm, pair.draft_lm):
            lm.check()
        way = cache_of(pair.target_lm)
    except UserError as error:
        refusal = str(error)
    if refusal:
        assert type(pair.target).__name__ in refusal
        assert name in DOCUMENTED["refused"]
        return
    how = "every engine" if way.obstacle is None else "`eager`, its own cache"
    assert name in DOCUMENTED[how if way.together else f"{how}, token by token"]
    assert_greedy_equal(
        pair,
        (WINDOW - 7, WINDOW + 8),
        ("eager", "cuda_graph") if way.obstacle is None else ("eager",),
    )


# Their layers are not found, are another part's, or read several streams of states.
WITHOUT_INPUTS = {"gemma3n_text", "git", "hrm_text", "longcat_flash", "prophetnet"}


@pytest.mark.full  # a minute
@pytest.mark.parametrize("name", TRIED)
def test_a_draft_may_read_targets_of_every_architecture(name):
    pair = tiny_pair(name)
    try:
        pair.target_lm.check()
        cache_of(pair.target_lm)
    except UserError:  # it is refused as a target of any draft
        return
    pair = reading_pair(pair)
    if name in WITHOUT_INPUTS:
        with pytest.raises(UserError, match="reads the input of layer 0 of|layers of .* not found"):
            SpeculativeDecoder(pair, warp=GREEDY)
        return
    decoder = SpeculativeDecoder(pair, stopping=stopping.FixedLength(3), warp=GREEDY)
    prompts = [[4, 1, 3, 5, 6, 7, 4, 3, 4, 5, 1, 2, 8], [5, 6]]
    outs = decoder.generate_batch(prompts, max_batch=2, max_new_tokens=12, stop_tokens=[])
    for prompt, out in zip(prompts, outs, strict=True):
        expected = generate_baseline(pair, prompt, 12, warp=GREEDY, stop_tokens=[])
        assert out.tokens.tolist() == expected.tokens.tolist()
        check_rounds(pair, out, GREEDY)


def assert_greedy_equal(pair, lengths, engines):
    """Decode prompts of some lengths in every way on each engine, and expect what the target
    generates alone.
    """
    prompts = []
    expected = []
    for count in lengths:
        prompt = torch.randint(
            3, VOCAB_SIZE, (1, count), generator=torch.Generator().manual_seed(count)
        )
        options = {
            "max_new_tokens": NUM_TOKENS,
            "do_sample": False,
            "pad_token_id": 0,
            "eos_token_id": None,
        }
        out = pair.target.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        prompts.append(prompt[0].tolist())
        expected.append(out[0, count:].tolist())
    for engine in engines:
        decoder = SpeculativeDecoder(
            pair, stopping=stopping.FixedLength(4), warp=GREEDY, engine=engine
        )
        for each in (decoder, Baseline(pair, GREEDY, engine)):
            found = [
                each.generate(prompt, NUM_TOKENS, stop_tokens=[]).tokens.tolist()
                for prompt in prompts
            ]
            assert found == expected, engine
        batch = decoder.generate_batch(
            prompts, max_batch=2, max_new_tokens=NUM_TOKENS, stop_tokens=[]
        )
        assert [batch[number].tokens.tolist() for number in range(len(prompts))] == expected, engine


ROPES = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 40},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 40,
    },
    "longrope": {
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 120,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}


def test_every_way_to_turn_positions_is_tried():
    assert set(ROPE_INIT_FUNCTIONS) | {"default"} == set(ROPES)


@pytest.mark.parametrize("rope", ROPES)
def test_positions_are_turned_as_in_greedy_generation_up_to_the_end_of_the_window(rope):
    parameters = {"rope_type": rope, "rope_theta": 1e4, **ROPES[rope]}
    pair = tiny_pair("llama", rope_parameters=parameters)
    window = 120 if rope == "longrope" else LENGTH
    assert pair.window == window
    assert_greedy_equal(pair, (30, 50, window - NUM_TOKENS), ("eager", "cuda_graph"))
