"""This project's decoders, or transformers' generation, for `benchmarks/decoding.py`.

`peer` says which.
"""

import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import transformers

from benchmarks.gguf_file import output_over_all
from benchmarks.peer_workers.processes import Answer, Generate, serve
from specheads import SpeculativeDecoder, Warp, load_head, load_pair
from specheads.decoding.decoder import Baseline
from specheads.decoding.stopping import FixedLength, HeadThreshold
from specheads.decoding.verification import (
    BlockVerification,
    TokenVerification,
    VerificationRule,
)
from specheads.integrations.transformers import assist
from specheads.pair.pair import Pair


def _specheads(setup: Mapping[str, object], pair: Pair) -> Generate:
    """Return what decodes by this project.

    Decoders are made when first asked for, and share their memory.
    """
    warp = Warp(**setup["warp"])
    head = load_head(setup["head"]).requires_grad_(False) if setup["head"] else None
    basis = SpeculativeDecoder(pair, warp=warp, engine=setup["engine"])

    @cache
    def decoder_of(
        rule: str, value: float | None = None, block: bool = False
    ) -> SpeculativeDecoder | Baseline:
        verification: VerificationRule = BlockVerification() if block else TokenVerification()
        match rule:
            case "alone":
                decoder: SpeculativeDecoder | Baseline = Baseline(pair, warp, basis.target_engine)
            case "fixed":
                decoder = basis.with_stopping(FixedLength(value), verification)
            case "head":
                decoder = basis.with_stopping(HeadThreshold(head, value), verification)
            case _:
                raise ValueError(f"rule {rule!r} is not known")
        decoder.warm_up()
        return decoder

    def generate(
        options: Mapping[str, object], prompt: list[int], length: int, seed: int
    ) -> Answer:
        decoder = decoder_of(**options)
        start = time.perf_counter()
        out = decoder.generate(prompt, length, seed=seed, stop_tokens=())
        seconds = time.perf_counter() - start
        totals = {"rounds": out.stats.num_target_calls, "tokens": out.stats.num_tokens}
        for stage in ("draft", "verify", "commit"):
            totals[stage] = sum(getattr(each, f"{stage}_seconds") for each in out.rounds)
        return {"response": out.tokens.tolist(), "seconds": seconds, "totals": totals}

    return generate


def _transformers(setup: Mapping[str, object], pair: Pair) -> Generate:
    """Return what decodes by transformers: the target alone, or assisted by the draft and maybe a
    head.
    """
    head = load_head(setup["head"]) if setup["head"] else None
    for model in (pair.target, pair.draft):
        model.generation_config.eos_token_id = None  # no token ends a response
    pair.draft.set_output_embeddings(output_over_all(pair.draft))

    def generate(
        options: Mapping[str, object], prompt: list[int], length: int, seed: int
    ) -> Answer:
        chosen: dict[str, object] = {
            "max_new_tokens": length,
            "pad_token_id": 0,
            "do_sample": setup["warp"]["temperature"] > 0,
        }
        if chosen["do_sample"]:
            chosen |= {**setup["warp"], "repetition_penalty": 1.0}
        settings = dict(options)
        threshold = settings.pop("threshold", None)
        if looked_up := settings.pop("prompt_lookup_num_tokens", None):
            chosen["prompt_lookup_num_tokens"] = looked_up
        if settings:
            for name, value in settings.items():
                setattr(pair.draft.generation_config, name, value)
            chosen["assistant_model"] = pair.draft
        ids = torch.tensor([prompt])
        torch.manual_seed(seed)
        with (
            nullcontext()
            if threshold is None
            else assist(pair.target, pair.draft, head, threshold, any_draft=True)
        ):
            start = time.perf_counter()
            out = pair.target.generate(ids, attention_mask=torch.ones_like(ids), **chosen)
            return {
                "seconds": time.perf_counter() - start,
                "response": out[0, len(prompt) :].tolist(),
            }

    return generate


def _make(setup: Mapping[str, object]) -> tuple[Mapping[str, str], Generate]:
    torch.set_num_threads(setup["threads"])
    pair = load_pair(setup["model"], device="cpu")
    if setup["peer"] == "transformers":
        return {"transformers": transformers.__version__}, _transformers(setup, pair)
    return {"torch": torch.__version__}, _specheads(setup, pair)


if __name__ == "__main__":
    serve(_make)
