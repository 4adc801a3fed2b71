"""Train the embedded pair from scratch: `python -m specheads.nano.build --out <folder>`.

Reads Python functions from this machine (see corpus.py), trains one tokenizer on the training side, then the target and
the draft one after the other on the same token stream. Muon moves the matrices, AdamW the embedding and the norms, which
on 2 cores reaches a given loss in about half the steps of AdamW alone. The command announces its size before it starts;
the same command gives the same weights on the same machine.
"""

import argparse
import hashlib
import json
import logging
import math
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specheads.nano import corpus

logger = logging.getLogger("specheads.nano.build")

VOCAB_SIZE = 2048
MAX_POSITIONS = 2048
BOS, EOS = "<s>", "</s>"
# Few heads and shared keys and values keep long batches fast on a CPU. Two layers, because one cannot look up what followed the
# same token earlier: a draft of one layer and equal size overlapped 0.57 with this target after 1,400 steps, one of two layers
# 0.59 after 2,000, 0.63 after 3,000 and 0.68 after 5,000, whose held-out loss was only 0.38 nats above the target's.
SHAPES = {
    "target": {
        "num_hidden_layers": 6,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "draft": {
        "num_hidden_layers": 2,
        "hidden_size": 160,
        "intermediate_size": 432,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
    },
}
CHECKPOINT_STEPS = 100


@dataclass(frozen=True)
class Recipe:
    """What decides a model's weights, beside the corpus."""

    steps: int
    tokens_per_step: int = 8192
    length: int = 512  # tokens per sequence
    long_length: int = MAX_POSITIONS  # of the last steps, so that every position is trained
    long_share: float = 0.08
    muon_lr: float = 0.02
    adamw_lr: float = 3e-3
    warmup: int = 50
    cooldown: float = 0.5  # share of the steps over which the rate falls to zero
    seed: int = 0

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    def shape(self, step: int) -> tuple[int, int]:
        """Sequences and tokens per sequence of one step."""
        length = self.long_length if step >= self.steps * (1 - self.long_share) else self.length
        return self.tokens_per_step // length, length

    def rate(self, step: int) -> float:
        """The learning rate as a share of its peak: a linear warm-up, a plateau, a linear fall to zero."""
        fall = max(1, math.ceil(self.steps * self.cooldown))
        return min(1.0, (step + 1) / self.warmup, (self.steps - step) / fall)

    def batch(self, stream: torch.Tensor, step: int) -> torch.Tensor:
        """Windows (sequences, length + 1) at random places of the stream; a step's windows depend on the seed and the step."""
        sequences, length = self.shape(step)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(stream) - length - 1, (sequences,), generator=generator)
        return torch.stack([stream[s : s + length + 1] for s in starts.tolist()]).long()


def main(argv: list[str] | None = None) -> None:
    """Build the pair and leave tokenizer, weights and card under `--out`."""
    parser = argparse.ArgumentParser(prog="python -m specheads.nano.build", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/nano"), help="folder for tokenizer, target, draft and card")
    parser.add_argument("--target-steps", type=int, default=1400, help="optimiser steps of the target (8,192 tokens each)")
    parser.add_argument("--draft-steps", type=int, default=3000, help="optimiser steps of the draft (8,192 tokens each)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    arguments.out.mkdir(parents=True, exist_ok=True)

    start = time.perf_counter()
    held_out, training, sources = gather(arguments.seed)
    tokenizer = train_tokenizer([function.prompt + function.body for function in training])
    tokenizer.save_pretrained(arguments.out)
    stream = tokenize(tokenizer, training)
    logger.info("%d training functions, %d tokens", len(training), len(stream))

    results = {}
    for name, steps in (("target", arguments.target_steps), ("draft", arguments.draft_steps)):
        recipe = Recipe(steps=steps, seed=arguments.seed)
        model = new_model(name, arguments.seed)
        logger.info("%s: %d parameters, %d steps of %d tokens", name, model.num_parameters(), steps, recipe.tokens_per_step)
        seconds = fit(model, stream, recipe, arguments.out / f"{name}.ckpt")
        model.half().save_pretrained(arguments.out / name)
        (arguments.out / name / "model.safetensors").chmod(0o644)
        losses = {split: response_loss(model.float(), tokenizer, held_out[split]) for split in held_out}
        results[name] = {"parameters": model.num_parameters(), "recipe": asdict(recipe), "tokens": recipe.tokens}
        results[name] |= {"seconds": round(seconds), "loss": losses}
        logger.info("%s: %s nats per response token, %.0f s", name, losses, seconds)
    results |= {"sources": sources, "corpus_tokens": len(stream), "total_seconds": round(time.perf_counter() - start)}
    (arguments.out / "training.json").write_text(json.dumps(results, indent=2) + "\n")
    (arguments.out / "README.md").write_text(card(results))


def gather(seed: int) -> tuple[dict[str, list[corpus.Function]], list[corpus.Function], list[dict]]:
    """Return held-out functions per split, shuffled training functions, and a row per source with its licence."""
    held_out = {split: list(corpus.standard_library(split)) for split in ("dev", "test")}
    seen = {function.key for functions in held_out.values() for function in functions}
    prompts = {function.prompt for functions in held_out.values() for function in functions}
    training = list(corpus.deduplicated(corpus.standard_library("train"), seen, prompts))
    version = ".".join(map(str, sys.version_info[:3]))
    sources = [{"name": "Python standard library", "version": version, "licence": "PSF-2.0", "functions": len(training)}]
    for distribution, licence in corpus.dependencies():
        files = corpus.distribution_files(distribution)
        found = list(corpus.deduplicated(corpus.read_functions(files), seen, prompts))
        if found:
            row = {"name": distribution.name, "version": distribution.version, "licence": licence, "functions": len(found)}
            sources.append(row)
            training += found
            logger.info("%(name)s %(version)s (%(licence)s): %(functions)d functions", row)
    random.Random(seed).shuffle(training)
    return held_out, training, sources


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer that puts a begin token first and never merges across a line break."""
    tokenizer = Tokenizer(models.BPE())
    line_breaks = pre_tokenizers.Split(Regex("\n"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([line_breaks, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=[BOS, EOS], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[bos])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def tokenize(tokenizer: PreTrainedTokenizerFast, functions: list[corpus.Function]) -> torch.Tensor:
    """Return all samples as one stream (N,) int16: begin token, prompt, body, end token, and so on."""
    backend, eos = tokenizer.backend_tokenizer, tokenizer.eos_token_id
    encoded = backend.encode_batch([function.prompt + function.body for function in functions])
    return torch.from_numpy(np.concatenate([np.array([*row.ids, eos], dtype=np.int16) for row in encoded]))


def new_model(name: str, seed: int) -> LlamaForCausalLM:
    """Return the untrained `target` or `draft`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        **SHAPES[name],
    )
    return LlamaForCausalLM(config)


def fit(model: LlamaForCausalLM, stream: torch.Tensor, recipe: Recipe, checkpoint: Path | None = None) -> float:
    """Train `model` in place on random windows of `stream`; return the seconds it took.

    With `checkpoint`, the state is written there every hundred steps, and a run that finds one of the same recipe and
    stream goes on from it to the same weights.
    """
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon = torch.optim.Muon(matrices, lr=recipe.muon_lr, momentum=0.95, weight_decay=0.01, adjust_lr_fn="original")
    adamw = torch.optim.AdamW(others, lr=recipe.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0)
    trained = {"model": model, "muon": muon, "adamw": adamw}
    identity = f"{asdict(recipe)} {model.config.to_json_string()} {hashlib.sha256(stream.numpy().tobytes()).hexdigest()}"
    first, seconds = 0, 0.0
    if checkpoint is not None and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        if state["identity"] == identity:
            first, seconds = state["step"], state["seconds"]
            for name, part in trained.items():
                part.load_state_dict(state[name])
            logger.info("goes on from step %d of %s", first, checkpoint)
    model.train()
    start = time.perf_counter() - seconds
    for step in range(first, recipe.steps):
        for optimiser, peak in ((muon, recipe.muon_lr), (adamw, recipe.adamw_lr)):
            for group in optimiser.param_groups:
                group["lr"] = peak * recipe.rate(step)
        batch = recipe.batch(stream, step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(batch[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        for optimiser in (muon, adamw):
            optimiser.step()
            optimiser.zero_grad()
        done, elapsed = step + 1, time.perf_counter() - start
        if step % 25 == 0 or done == recipe.steps:
            remaining = elapsed / done * (recipe.steps - done)
            rate = done * recipe.tokens_per_step / elapsed
            logger.info("step %d  loss %.3f  %.0f tokens/s  %.0f s left", step, loss.item(), rate, remaining)
        if checkpoint is not None and (done % CHECKPOINT_STEPS == 0 or done == recipe.steps):
            state = {name: part.state_dict() for name, part in trained.items()}
            temporary = checkpoint.with_suffix(".tmp")
            torch.save({**state, "identity": identity, "step": done, "seconds": elapsed}, temporary)
            temporary.replace(checkpoint)
    model.eval()
    return time.perf_counter() - start


@torch.no_grad()
def response_loss(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, functions: list[corpus.Function]) -> float:
    """Return the mean loss in nats per response token (end token included) over held-out functions."""
    total, count = 0.0, 0
    for function in functions[:400]:
        prompt = tokenizer(function.prompt)["input_ids"]
        body = tokenizer(function.body, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([*prompt, *body, tokenizer.eos_token_id])[None, :MAX_POSITIONS]
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
        total += torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :], reduction="sum").item()
        count += ids.shape[1] - len(prompt)
    return round(total / count, 4)


def card(results: dict) -> str:
    """Return the pair's model card."""
    target, draft = results["target"], results["draft"]
    columns = [("parameters", "{parameters:,}"), ("tokens seen", "{tokens:,}"), ("seconds of training", "{seconds:,}")]
    rows = "".join(f"| {name} | {text.format(**target)} | {text.format(**draft)} |\n" for name, text in columns)
    figures = "".join(f"| {name} | {value} |\n" for name, value in results.get("figures", {}).items())
    sources = "".join("| {name} | {version} | {licence} | {functions:,} |\n".format(**row) for row in results["sources"])
    return (
        "---\nlicense: apache-2.0\n---\n# nano, the embedded pair\n\n"
        "Two Llama-architecture models and a byte-level BPE tokenizer, trained from scratch by `python -m specheads.nano.build` to "
        "write the body of a Python function from its signature and docstring. They exist so that every part of specheads runs on a "
        "laptop; their code is Python-like, not useful.\n\n"
        f"| | target | draft |\n|---|---|---|\n{rows}\n"
        "On functions that were held out, sampling at temperature 1, top-k 50 (`python benchmarks/nano_card.py` recomputes this "
        f"table):\n\n| | |\n|---|---|\n{figures}\n"
        f"Trained on {results['corpus_tokens']:,} tokens of documented functions found on one machine, de-duplicated by syntax tree; "
        f"seed {target['recipe']['seed']}, recipe in `training.json`; on a 2-core CPU that had other work to do. Files of the standard library were split by a hash of their path "
        "before training: half of them (dev) and a quarter (test) were never trained on, nor any function elsewhere with the same body "
        "or the same signature and docstring.\n\n"
        f"| source | version | licence | functions |\n|---|---|---|---|\n{sources}"
    )


if __name__ == "__main__":
    main()
