"""What bfloat16 is worth on a CPU, and what it does to labels.

    python benchmarks/precision.py [--repeats 5] [--engine auto]

Speed: responses, labels, a head's features, a step of distillation and decoding, of nano and of a random pair whose models have
21 M parameters each. Both types take turns, and a figure is the median over repeats. Labels: both models of nano read the same
responses in both types, and the acceptance probabilities of the same drafted tokens are compared.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, add_result_option, prompt_record, text_of, write_result
from data_gen.labels import label_responses
from specheads import Distillation, Pair, SpeculativeDecoder, Warp, load_pair, stopping
from specheads.decoding.baseline import Baseline
from specheads.decoding.responses import Responder, row_uniforms
from specheads.features import FEATURES
from specheads.heads.batch import HeadBatch, head_features
from specheads.language_model import LanguageModel
from specheads.padding import right_padded
from specheads.prompts.encoding import ResponseLimits
from specheads.prompts.nano_source import NanoSource
from specheads.prompts.prompt import Prompt
from specheads.sampling import accept_prob, overlap, sample
from specheads.training.distill.distill_module import DistillModule
from specheads.training.distill.distillation import prepare
from specheads.training.distill.samples import Sample

TYPES = (torch.float32, torch.bfloat16)
WARP = Warp(temperature=1.0, top_k=50)
NEW_TOKENS, DECODED_TOKENS = 64, 96
SHAPE = {"hidden_size": 448, "intermediate_size": 1216, "num_hidden_layers": 8, "num_attention_heads": 7}  # 21 M parameters
DRAFTED = ("hidden", "draft_prob", "max_prob", "entropy")

Texts = tuple[list[list[int]], list[list[int]]]  # prompts and responses
Stage = Callable[[], int]  # does the work; returns the number of tokens


def main() -> None:
    """Measure, print the tables and keep them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engine", default="auto", help="of the decoder")
    add_result_option(parser, "precision")
    given = parser.parse_args()
    nano = {dtype: load_pair("nano", dtype=dtype, device="cpu") for dtype in TYPES}
    prompts = list(NanoSource(0, given.prompts, 0).load(nano[torch.float32].chats))
    texts = nano_texts(nano[torch.float32], prompts)
    speeds = [
        Table(key, f"Time per token of {title}, median of {given.repeats}", SPEED_COLUMNS, speed_rows(pairs, texts, given))
        for key, title, pairs in (("nano", "nano", nano), ("random", "a random pair of 21 M parameters each", random_pairs()))
    ]
    count = sum(map(len, texts[1]))
    title = f"Labels of bfloat16 less those of float32, at {count:,} positions of nano's responses"
    tables = [*speeds, Table("labels", title, LABEL_COLUMNS, label_rows(nano, texts))]
    title = f"Tokens that differ between bfloat16 and float32, at {count:,} positions of nano's responses"
    tables.append(Table("tokens", title, [Column("token"), Column("share that differs", "percent:1")], token_rows(nano, texts)))
    for table in tables:
        print(f"{table.title}\n\n{text_of(table)}\n")
    write_result(given.result, tables, split="dev", seeds=[0], prompts=prompt_record(prompt.prompt_id for prompt in prompts))


LABEL_COLUMNS = [Column("label"), Column("distribution")]
LABEL_COLUMNS += [Column(name, "fixed:4") for name in ("mean", "mean size", "99 % are smaller than", "largest size")]
SPEED_COLUMNS = [Column("stage"), Column("float32", "ms:3"), Column("bfloat16", "ms:3"), Column("float32 / bfloat16", "ratio:2")]


def nano_texts(pair: Pair, prompts: Sequence[Prompt]) -> Texts:
    """Return prompts and the target's sampled responses."""
    ids = [pair.encode_instruction(prompt.text) for prompt in prompts]
    uniform = np.stack([row_uniforms(0, prompt.prompt_id, NEW_TOKENS)[0] for prompt in prompts])
    return ids, [response.ids for response in responder_to(pair, ids).respond(ids, uniform, WARP)]


def responder_to(pair: Pair, prompts: Sequence[Sequence[int]]) -> Responder:
    """Return what makes responses to these prompts."""
    return Responder(pair, list(map(len, prompts)), ResponseLimits(NEW_TOKENS))


def random_pairs() -> dict[torch.dtype, Pair]:
    """Return pairs with nano's tokenizer and models of 21 M random weights, by type."""
    nano = load_pair("nano")

    def model(seed: int, dtype: torch.dtype) -> PreTrainedModel:
        torch.manual_seed(seed)
        config = LlamaConfig(**SHAPE, vocab_size=nano.vocab_size, max_position_embeddings=nano.window, eos_token_id=None)
        return cast(PreTrainedModel, LlamaForCausalLM(config).to(dtype).requires_grad_(False).eval())

    return {dtype: replace(nano, target=model(0, dtype), draft=model(1, dtype), name="random") for dtype in TYPES}


def speed_rows(pairs: Mapping[torch.dtype, Pair], texts: Texts, given: argparse.Namespace) -> list[list[str | float]]:
    """Return rows of SPEED_COLUMNS."""
    stages = {dtype: stages_of(pair, texts, given.engine) for dtype, pair in pairs.items()}
    rows = []
    for name in stages[torch.float32]:
        seconds: dict[torch.dtype, list[float]] = {dtype: [] for dtype in TYPES}
        for repeat in range(given.repeats + 1):
            for dtype in TYPES:
                start = time.perf_counter()
                tokens = stages[dtype][name]()
                if repeat:  # the first one warms up
                    seconds[dtype].append((time.perf_counter() - start) / tokens)
        plain, half = (statistics.median(seconds[dtype]) for dtype in TYPES)
        rows.append([name, plain, half, plain / half])
    return rows


def stages_of(pair: Pair, texts: Texts, engine: str) -> dict[str, Stage]:
    """Return what is timed, by name."""
    prompts, responses = texts
    num_tokens = sum(map(len, responses))
    uniform = np.random.default_rng(0).random((len(prompts), 1, NEW_TOKENS))
    batch, responder = feature_batch(texts), responder_to(pair, prompts)

    def respond() -> int:
        return sum(len(response.ids) for response in responder.respond(prompts, uniform[:, 0], WARP))

    def label() -> int:
        label_responses(pair, prompts, responses, uniform, WARP)
        return num_tokens

    def read_features() -> int:
        names = frozenset(name for name in DRAFTED if FEATURES[name].stored)
        head_features(pair.draft_lm, batch, "next_token", names)
        return len(batch.row)

    stages = {"responses": respond, "labels": label, "features": read_features, "distillation": distillation_step(pair, texts)}
    return stages | decoding_stages(pair, prompts[0], engine)


def feature_batch(texts: Texts) -> HeadBatch:
    """Return the texts' response tokens as drafted tokens."""
    whole = [[*prompt, *response] for prompt, response in zip(*texts, strict=True)]
    places = [(row, index) for row, prompt in enumerate(texts[0]) for index in range(len(prompt), len(whole[row]))]
    row, index = torch.tensor(places).T
    tokens = right_padded(whole)
    return HeadBatch(tokens, row, index, tokens[row, index], labels={}, start=index)


def distillation_step(pair: Pair, texts: Texts) -> Stage:
    """Return a step of distillation: both models read the texts, and weights in float32 are changed."""
    copied = replace(pair, draft=LlamaForCausalLM(pair.draft.config).to(pair.draft.dtype))
    copied.draft.load_state_dict(pair.draft.state_dict())
    mixed = pair.draft.dtype == torch.bfloat16
    prepare(copied.draft)
    module = DistillModule(copied, Distillation(), NEW_TOKENS)
    optimizer = torch.optim.AdamW(copied.draft.parameters(), lr=1e-5)
    pairs = zip(*texts, strict=True)
    samples = [Sample((0, row), "target", np.array(p), np.array(r)) for row, (p, r) in enumerate(pairs)]

    def step() -> int:
        with torch.autocast("cpu", torch.bfloat16) if mixed else nullcontext():
            losses, _ = module.losses(samples)
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return len(losses)

    return step


def decoding_stages(pair: Pair, prompt: Sequence[int], engine: str) -> dict[str, Stage]:
    """Return decoding by the target alone and, where the draft is smaller, with drafts of 4 tokens."""
    decoders: dict[str, Baseline | SpeculativeDecoder] = {"the target alone": Baseline(pair, WARP, engine)}
    if pair.draft.num_parameters() < pair.target.num_parameters():
        fixed = stopping.FixedLength(4)
        decoders["4 drafted tokens per round"] = SpeculativeDecoder(pair, stopping=fixed, warp=WARP, engine=engine)
    return {
        name: partial(lambda decoder: len(decoder.generate(prompt, DECODED_TOKENS, stop_tokens=()).tokens), decoder)
        for name, decoder in decoders.items()
    }


def label_rows(pairs: Mapping[torch.dtype, Pair], texts: Texts) -> list[list[str | float]]:
    """Return rows of LABEL_COLUMNS: labels of the tokens that the draft of float32 samples, with nano's warp and with none."""
    batch, rows = feature_batch(texts), []
    uniform = torch.from_numpy(np.random.default_rng(0).random(len(batch.row)))
    for name, warp in (("temperature 1, top-k 50", WARP), ("temperature 1", Warp(temperature=1.0))):
        drafted = sample(distributions(pairs[torch.float32], batch, warp)[1], uniform)
        plain, half = (labels_of(*distributions(pairs[dtype], batch, warp), drafted) for dtype in TYPES)
        for label, values in plain.items():
            difference = (half[label] - values).double()
            size = difference.abs()
            figures = (difference.mean(), size.mean(), size.quantile(0.99), size.max())
            rows.append([label, name, *(figure.item() for figure in figures)])
    return rows


def labels_of(target: Tensor, draft: Tensor, drafted: Tensor) -> dict[str, Tensor]:
    """Return labels (N,) by name from both distributions (N, V) and the drafted tokens (N,)."""
    target_prob, draft_prob = (probs.gather(1, drafted[:, None])[:, 0] for probs in (target, draft))
    return {"acceptance probability": accept_prob(target_prob, draft_prob), "overlap": overlap(target, draft)}


def token_rows(pairs: Mapping[torch.dtype, Pair], texts: Texts) -> list[list[str | float]]:
    """Return for some choices of a token the share of positions where the types choose differently."""
    batch = feature_batch(texts)
    uniform = torch.from_numpy(np.random.default_rng(0).random(len(batch.row)))
    plain, half = (distributions(pairs[dtype], batch, WARP) for dtype in TYPES)
    choices: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "the target's most likely one": lambda target, draft: target.argmax(1),
        "the draft's most likely one": lambda target, draft: draft.argmax(1),
        "the one sampled from the draft with the same random number": lambda target, draft: sample(draft, uniform),
    }
    return [[name, (choose(*plain) != choose(*half)).double().mean().item()] for name, choose in choices.items()]


@torch.no_grad()
def distributions(pair: Pair, batch: HeadBatch, warp: Warp) -> tuple[Tensor, Tensor]:
    """Return the target's and the draft's warped distributions (N, V) of the batch's tokens."""

    def of(lm: LanguageModel) -> Tensor:
        hidden = lm.hidden_states(batch.tokens, use_cache=False)[batch.row, batch.index - 1]
        return warp(lm.logits(hidden))

    return of(pair.target_lm), of(pair.draft_lm)


if __name__ == "__main__":
    main()
