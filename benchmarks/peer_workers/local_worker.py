"""This project's decoders, or transformers' plain and assisted generation, for `benchmarks/peers.py`; `peer` says which."""

import copy
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import transformers

from benchmarks.peer_workers.protocol import Generate, answers, serve, settings
from specheads import SpeculativeDecoder, Warp, load_head, load_pair
from specheads.decoding.decoder import Baseline
from specheads.decoding.stopping import FixedLength, HeadThreshold
from specheads.decoding.verification import BlockVerification, TokenVerification
from specheads.pair.pair import Pair

Decoder = SpeculativeDecoder | Baseline


def _specheads_generation(setup: Mapping[str, Any]) -> Generate:
    """Return what decodes by this project; decoders are made when first asked for, those of a warp share their memory."""
    pair = load_pair(setup["model"], **setup["pair_keys"])

    @cache
    def basis(greedy: bool) -> SpeculativeDecoder:
        return SpeculativeDecoder(pair, warp=Warp(temperature=0) if greedy else Warp(top_k=50), engine=setup["engine"])

    @cache
    def head() -> torch.nn.Module:
        return load_head(setup["head"]).requires_grad_(False)

    def new(options: Mapping[str, Any], greedy: bool) -> Decoder:
        verification = BlockVerification() if options.get("verification") == "block" else TokenVerification()
        match options["rule"]:
            case "alone":
                return Baseline(pair, basis(greedy).warp, basis(greedy).target_engine)
            case "fixed":
                return basis(greedy).with_stopping(FixedLength(options["length"]), verification)
            case "head":
                return basis(greedy).with_stopping(HeadThreshold(head(), options["threshold"]), verification)
        raise ValueError(f"rule {options['rule']!r} is not known")

    @cache
    def warm(options: frozenset[tuple[str, Any]], greedy: bool) -> Decoder:
        decoder = new(dict(options), greedy)
        decoder.warm_up()
        return decoder

    def generate(options: Mapping[str, Any], greedy: bool, prompt: list[int], length: int, seed: int) -> tuple[list[int], float]:
        decoder = warm(frozenset(options.items()), greedy)
        start = time.perf_counter()
        out = decoder.generate(prompt, length, seed=seed, stop_tokens=())
        seconds = time.perf_counter() - start
        return out.tokens.tolist(), seconds

    return generate


def transformers_generation(pair: Pair) -> Generate:
    """Return what decodes by transformers, whose options are settings of the draft; without any, the target decodes alone."""

    @cache
    def assistant(options: frozenset[tuple[str, Any]], greedy: bool) -> Any:
        """Return the draft's settings, one object for all calls: the heuristic continues from its last length."""
        config = copy.deepcopy(pair.draft.generation_config)
        for name, value in options:
            setattr(config, name, value)
        return config

    def generate(options: Mapping[str, Any], greedy: bool, prompt: list[int], length: int, seed: int) -> tuple[list[int], float]:
        chosen: dict[str, Any] = {"max_new_tokens": length, "pad_token_id": 0, "do_sample": not greedy}
        if not greedy:
            chosen |= {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0}
        if options:
            pair.draft.generation_config = assistant(frozenset(options.items()), greedy)
            chosen["assistant_model"] = pair.draft
        ids = torch.tensor([prompt], device=pair.target_lm.device)
        torch.manual_seed(seed)
        start = time.perf_counter()
        out = pair.target.generate(ids, attention_mask=torch.ones_like(ids), **chosen)
        seconds = time.perf_counter() - start
        return out[0, len(prompt) :].tolist(), seconds

    return generate


def _endless_generation(setup: Mapping[str, Any]) -> Generate:
    """Return what decodes by transformers so that no token ends a response."""
    pair = load_pair(setup["model"], **setup["pair_keys"])
    pair.target.generation_config.eos_token_id = pair.draft.generation_config.eos_token_id = None
    return transformers_generation(pair)


PEERS: dict[str, tuple[Callable[[Mapping[str, Any]], Generate], Mapping[str, str]]] = {
    "specheads": (_specheads_generation, {"torch": torch.__version__}),
    "transformers": (_endless_generation, {"transformers": transformers.__version__}),
}


def main() -> None:
    setup = settings()
    torch.set_num_threads(setup["threads"])
    with answers() as channel:
        make, versions = PEERS[setup["peer"]]
        serve(channel, versions, make(setup))


if __name__ == "__main__":
    main()
