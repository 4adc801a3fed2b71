"""Train mini from scratch: `python -m specheads.mini.build --out <folder>`."""

from pathlib import Path

import torch

from specheads import nano
from specheads.embedded import build
from specheads.embedded.recipe import PairRecipe

# In real pairs a target step costs ten draft steps and more. Deep and narrow, because at batch 1 a layer costs time of its own:
# with weights in the cache, which is the lowest ratio, a step of this target costs 11 of this draft; 8 layers x 448, of equal
# size, cost 7, and 12 x 384 cost 9. The draft has two layers, because one cannot look up what followed the same token earlier,
# and nearly all parameters that a draft may have: the overlap with a target of 18 M needs them.
SHAPES = {
    "target": {
        "num_hidden_layers": 16,
        "hidden_size": 320,
        "intermediate_size": 896,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
    },
    "draft": {
        "num_hidden_layers": 2,
        "hidden_size": 160,
        "intermediate_size": 512,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
    },
}
MINI = PairRecipe(
    "mini",
    SHAPES,
    steps={"target": 3500, "draft": 5000},  # of the target: two passes over the text
    dtype=torch.bfloat16,
    tokenizer=Path(nano.__file__).parent,  # the same prompts, and no second file of merges
    manifest=Path(__file__).with_name("corpus.json"),
)


def main(argv: list[str] | None = None) -> int:
    """Build mini and return the exit code."""
    return build.main(MINI, argv)


if __name__ == "__main__":
    raise SystemExit(main())
