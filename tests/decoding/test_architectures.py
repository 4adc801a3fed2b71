"""Every causal architecture of the installed transformers decodes as its own greedy generation does, or is refused in a sentence.

Two architectures are tried in every run, others each day; `-m full` tries all.
"""

from datetime import date

import pytest
import torch
from architectures import VOCAB_SIZE, WINDOW, tiny_pair
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specheads import SpeculativeDecoder, UserError, Warp, stopping
from specheads.decoding.decoder import Baseline
from specheads.decoding.engine import way_of

GREEDY, NUM_TOKENS = Warp(temperature=0), 64
NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
# Of these no tiny model is made: parts that read images or sounds, other packages, or sizes that depend on each other. Whisper's
# decoder alone is made, but its own `generate` fails.
# fmt: off
NOT_MADE = {
    "blt", "cohere_compass_text", "dbrx", "dots3_note", "dots3_note_text", "emu3", "fuyu", "gemma3", "gemma3n", "gemma4",
    "gemma4_assistant", "gemma4_unified", "gemma4_unified_assistant", "git", "got_ocr2", "inkling2_text", "inkling_text",
    "kimi_linear", "llama4", "mllama", "moss_transcribe_diarize", "musicgen", "musicgen_melody", "phi4_multimodal", "qwen3_5",
    "qwen3_5_moe", "qwen4_exp", "qwen4_exp_text", "roc_bert", "whisper", "xlm", "zamba", "zamba2",
}
# fmt: on
TRIED = [name for name in NAMES if name not in NOT_MADE]
EACH_DAY = ["llama", "afmoe", "mamba", "granite", "lfm2", "falcon", "rwkv", "cohere2", "gpt_neo", "llama4_text", "mpt", "mamba2"]
TODAY = {EACH_DAY[(2 * date.today().toordinal() + number) % len(EACH_DAY)] for number in range(2)}


@pytest.mark.parametrize("name", [name if name in TODAY else pytest.param(name, marks=pytest.mark.full) for name in TRIED])
def test_the_output_is_that_of_greedy_generation_or_the_pair_is_refused(name):
    pair = tiny_pair(name)
    refusal = ""
    try:
        for lm in (pair.target_lm, pair.draft_lm):
            lm.check()
        way = way_of(pair.target_lm)
    except UserError as error:
        refusal = str(error)
    if refusal:
        assert type(pair.target).__name__ in refusal
        return
    prompts, expected = [], []
    for count in (WINDOW - 7, WINDOW + 8):
        prompt = torch.randint(3, VOCAB_SIZE, (1, count), generator=torch.Generator().manual_seed(count))
        options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        out = pair.target.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        prompts.append(prompt[0].tolist())
        expected.append(out[0, count:].tolist())
    for engine in ("eager", "cuda_graph") if way.obstacle is None else ("eager",):
        decoder = SpeculativeDecoder(pair, stopping=stopping.FixedLength(4), warp=GREEDY, engine=engine)
        for each in (decoder, Baseline(pair, GREEDY, engine)):
            found = [each.generate(prompt, NUM_TOKENS, stop_tokens=[]).tokens.tolist() for prompt in prompts]
            assert found == expected, engine
        batch = dict(decoder.generate_batch(prompts, max_batch=2, max_new_tokens=NUM_TOKENS, stop_tokens=[]))
        assert [batch[number].tokens.tolist() for number in range(2)] == expected, engine
