"""Do the pairs that the other scripts time load here, how fast, how large are they, and are greedy tokens those of transformers?

    python -m benchmarks.gpu.build_pairs [--device cuda] [--tiny]

Their weights are random and made on the device (specheads/synthetic.py), so nothing is read from a disk or a network.
"""

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu.script import Part, Setup, run_script
from benchmarks.steps import now
from specheads import SpeculativeDecoder, Warp, load_pair
from specheads.pair import Pair

PAIRS = {"llama3": "synthetic-llama3", "llama2": "synthetic-llama2", "tiny": "synthetic-tiny"}
NUM_TOKENS = 12


def pair_of(setup: Setup, name: str = "llama3") -> Pair:
    """Return one of PAIRS on the script's device, or the smallest in its place."""
    return load_pair(PAIRS["tiny" if setup.tiny else name], device=str(setup.device), dtype=setup.dtype)


def made_up_prompts(pair: Pair, count: int, length: int) -> list[list[int]]:
    """Return prompts of random tokens: (count, length) ids, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(pair.vocab_size, (count, length), generator=generator).tolist()


def parts(setup: Setup) -> list[Part]:
    """Return what is measured: a part for each pair."""

    def llama3() -> dict[str, Any]:
        return checked_pair(setup, "llama3")

    def llama2() -> dict[str, Any]:
        return checked_pair(setup, "llama2")

    return [llama3] if setup.tiny else [llama3, llama2]


@torch.no_grad()
def checked_pair(setup: Setup, name: str) -> dict[str, Any]:
    """Return the seconds of loading a pair, its sizes, and whether greedy tokens are those of transformers' generation.

    In bfloat16 two almost equal logits may be ordered differently, so the number of equal tokens at the start is given.
    """
    start = now(setup.device)
    pair = pair_of(setup, name)
    loaded = now(setup.device) - start
    (prompt,) = made_up_prompts(pair, 1, 32)
    decoder = SpeculativeDecoder(pair, warp=Warp(temperature=0), engine="eager", window=64)
    tokens = decoder.generate(prompt, NUM_TOKENS).tokens.tolist()
    ids = torch.tensor([prompt], device=setup.device)
    out = pair.target.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0
    )
    expected = out[0, len(prompt) :].tolist()
    equal = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b), NUM_TOKENS)
    sizes = {
        f"{role}_bytes": sum(weight.nbytes for weight in model.parameters())
        for role, model in (("target", pair.target), ("draft", pair.draft))
    }
    return {"pair": pair.name, "load_seconds": loaded, **sizes, "equal_tokens": equal, "of_tokens": NUM_TOKENS}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script and return the exit code."""
    return run_script("build_pairs", __doc__, parts, argv)


if __name__ == "__main__":
    raise SystemExit(main())
