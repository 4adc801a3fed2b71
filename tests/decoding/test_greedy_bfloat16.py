"""Greedy decoding in bfloat16 against transformers: texts are equal, except where rounding decides
between two tokens.

Let `t` be the logits of exact arithmetic, and two computations of them with errors of at most `e`.
If one prefers token a and the other token b, then |t_a - t_b| <= 2 e. Exact arithmetic is stood in
for by float32 on the same weights; `e` is measured, not assumed, as the largest error of any logit
of either computation along the text.
"""

import copy

import pytest
import torch
from fakes import needs_compiler

from specheads import SpeculativeDecoder, Warp, load_pair, stopping
from specheads.decoding.engine import make_engine
from specheads.prompts.sources import NanoSource

NUM_PROMPTS = 8
NUM_TOKENS = 48
CHUNK = 5
# The largest error of a logit over the largest logit, in units of bfloat16's rounding, 2**-8. Each
# of nano's six layers rounds the residual stream twice, and the embedding, the last norm and the
# output once: 15 roundings,
# whose errors add up at worst.
MOST_ROUNDINGS = 15
ROUNDING = 2**-8


@pytest.fixture(scope="module")
def half():
    return load_pair("nano", dtype="bfloat16")


@pytest.fixture(scope="module")
def many_prompts(half):
    """Enough prompts that on most machines the text of one of them departs."""
    return [
        half.encode_instruction(prompt.text)
        for prompt in NanoSource(NUM_PROMPTS, 0, 0).load(half.chats)
    ]


@pytest.fixture(scope="module")
def transformers_output(half, many_prompts):
    """The tokens and logits of transformers' greedy responses."""
    outputs = []
    for prompt in many_prompts:
        settings = {
            "do_sample": False,
            "max_new_tokens": NUM_TOKENS,
            "return_dict_in_generate": True,
            "output_logits": True,
        }
        output = half.target.generate(torch.tensor([prompt]), **settings)
        outputs.append((output.sequences[0, len(prompt) :].tolist(), torch.cat(output.logits)))
    return outputs


class AllLogits:
    """The epilogue of a forward pass that returns its logits."""

    compile_key = ("all logits",)

    def __call__(self, output, uniform):
        return output.logits[0] + 0 * uniform


def logits_of(engine, text):
    """Return the logits (T, V) that an engine computes along a text, a few tokens at a time."""
    step = engine.compiled_step(AllLogits(), all_logits=True)
    unused = torch.zeros(1)
    engine.rewind(0)
    padded = [*text, *[0] * (-len(text) % CHUNK)]
    chunks = [
        torch.tensor([padded[first : first + CHUNK]]) for first in range(0, len(padded), CHUNK)
    ]
    with torch.no_grad():
        return torch.cat([step(chunk, unused).clone() for chunk in chunks])[: len(text)]


@pytest.mark.parametrize(
    "engine", ["eager", pytest.param("compiled", marks=[needs_compiler, pytest.mark.full])]
)
def test_texts_depart_from_transformers_only_within_rounding(
    engine, half, many_prompts, transformers_output
):
    exact = copy.deepcopy(half.target).float()
    decoder = SpeculativeDecoder(
        half, stopping=stopping.FixedLength(4), warp=Warp(temperature=0), engine=engine
    )
    reader = make_engine(engine, half.target_lm, half.window)
    num_equal = 0
    for prompt, (theirs, their_logits) in zip(many_prompts, transformers_output, strict=True):
        ours = decoder.generate(prompt, NUM_TOKENS).tokens.tolist()
        shared = next(
            (i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
            len(theirs),
        )
        num_equal += shared == len(theirs)
        text = [*prompt, *theirs[:shared]]
        with torch.no_grad():
            logits = exact(torch.tensor([text])).logits[0]
        our_error = (logits_of(reader, text) - logits)[-shared - 1 :].abs().max()
        count = min(shared + 1, len(theirs))
        their_error = (their_logits[:count] - logits[len(prompt) - 1 :][:count]).abs().max()
        error = max(our_error, their_error)
        assert error <= MOST_ROUNDINGS * ROUNDING * logits.abs().max()
        if shared < len(theirs):
            chosen = logits[-1, [ours[shared], theirs[shared]]]
            assert (chosen[0] - chosen[1]).abs() <= 2 * error
            assert (logits[-1].max() - chosen).max() <= 2 * error
    assert num_equal >= NUM_PROMPTS / 2
