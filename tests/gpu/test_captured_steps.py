"""Replays of captured steps: no wait for the device, no trace of another engine, and no use of
weights that have moved.
"""

import contextlib

import pytest
import torch
from families import WINDOW

from specheads import SpeculativeDecoder, Warp, generate_baseline, stopping
from specheads.decoding.decoder import Baseline
from tests.gpu.checks import family_there, moved, plain_greedy, random_head, random_prompt

GREEDY = Warp(temperature=0)
NUM_TOKENS = 30
REPEATS = 3


@pytest.fixture(scope="module")
def pair(device):
    return family_there("llama", device)


@contextlib.contextmanager
def no_waiting(device):
    """Raise an error where the host waits for the device."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="nothing waits on a CPU")
def test_waiting_is_noticed(device):
    """Or the test below would say nothing."""
    with pytest.raises(RuntimeError), no_waiting(device):
        torch.ones(1, device=device).item()


@torch.no_grad()
@pytest.mark.parametrize("warp", [GREEDY, Warp(1.0, top_k=5)], ids=["greedy", "sampled"])
def test_replays_do_not_wait_for_the_device(pair, device, warp):
    rule = stopping.HeadThreshold(random_head(pair), 0.5)
    decoder = SpeculativeDecoder(pair, stopping=rule, warp=warp, engine="cuda_graph", window=WINDOW)
    alone = Baseline(pair, warp, decoder.target_engine)
    for each in (decoder, alone):
        each.prepare()
    steps = [
        alone.target_step(40),
        *(decoder.verification_step(count, 40) for count in range(20)),
    ]
    for run in steps:
        run()
    prepared = decoder.target_engine.num_prepared
    with no_waiting(device):
        for run in steps:
            for _ in range(REPEATS):
                run()
    assert decoder.target_engine.num_prepared == prepared


def test_a_head_that_moves_is_captured_again(pair):
    head = random_head(pair)
    rule = stopping.HeadThreshold(head, 0.5, max_tokens=6)
    decoder = SpeculativeDecoder(
        pair, stopping=rule, warp=GREEDY, engine="cuda_graph", window=WINDOW
    )

    def longest(bias):
        state = {name: torch.zeros_like(value) for name, value in head.state_dict().items()}
        head.load_state_dict(
            state | {"readout.bias": torch.full_like(head.readout.bias, bias)}, assign=True
        )
        return max(r.num_drafted for r in decoder.generate([0, 1], NUM_TOKENS).rounds)

    assert longest(9.0) == 6
    before = decoder.draft_engine.num_prepared
    assert longest(-9.0) == 1
    assert decoder.draft_engine.num_prepared > before


def test_a_model_that_moves_is_captured_again(device):
    pair = family_there("llama", device)
    decoder = SpeculativeDecoder(pair, warp=GREEDY, engine="cuda_graph", window=WINDOW)
    prompt = random_prompt(5)
    before = decoder.generate(prompt, NUM_TOKENS).tokens.tolist()
    torch.manual_seed(0)
    state = {
        name: value + 0.5 * torch.randn_like(value)
        for name, value in pair.target.state_dict().items()
    }
    pair.target.load_state_dict(state, assign=True)
    after = decoder.generate(prompt, NUM_TOKENS).tokens.tolist()
    assert after == plain_greedy(pair, prompt, NUM_TOKENS) != before


def test_two_engines_leave_each_other_alone(pair, device):
    """Their rounds alternate, and each is captured while the other is in use."""
    other = family_there("qwen2", device)
    prompts = [random_prompt(7, seed) for seed in range(4)]
    expected = [
        [plain_greedy(each, prompt, NUM_TOKENS) for prompt in prompts] for each in (pair, other)
    ]
    decoders = [
        SpeculativeDecoder(
            each,
            stopping=stopping.FixedLength(length),
            warp=GREEDY,
            engine="cuda_graph",
            window=WINDOW,
        )
        for each, length in ((pair, 3), (other, 5))
    ]
    for number, prompt in enumerate(prompts):
        for decoder, of_pair in zip(decoders, expected, strict=True):
            assert (
                decoder.generate(prompt, NUM_TOKENS, stop_tokens=()).tokens.tolist()
                == of_pair[number]
            )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_in_one_process():
    """Each engine captures on the device of its model, whichever is current."""
    expected = plain_greedy(family_there("llama", "cpu"), random_prompt(5), NUM_TOKENS)
    for place in ("cuda:1", "cuda:0"):
        there = family_there("llama", place)
        made = generate_baseline(
            there, random_prompt(5), NUM_TOKENS, warp=GREEDY, engine="cuda_graph"
        )
        assert made.tokens.tolist() == expected
    split = moved(family_there("llama", "cuda:0"), "cuda:0")
    split.draft.to("cuda:1")
    decoder = SpeculativeDecoder(split, warp=GREEDY, engine="cuda_graph", window=WINDOW)
    assert decoder.generate(random_prompt(5), NUM_TOKENS).tokens.tolist() == expected
