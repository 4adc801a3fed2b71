"""Train mini from scratch: `python -m specheads.mini.build --out <folder>`."""

from pathlib import Path

import torch

from specheads import nano
from specheads.embedded import build
from specheads.embedded.recipe import PairRecipe

SHAPES = {
    "target": {
        "num_hidden_layers": 8,
        "hidden_size": 448,
        "intermediate_size": 1216,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
    },
    "draft": {
        "num_hidden_layers": 2,
        "hidden_size": 160,
        "intermediate_size": 432,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
    },
}
MINI = PairRecipe(
    "mini",
    SHAPES,
    steps={"target": 3400, "draft": 5000},
    dtype=torch.bfloat16,
    tokenizer=Path(nano.__file__).parent,  # the same prompts, and no second file of merges
    manifest=Path(__file__).with_name("corpus.json"),
)


def main(argv: list[str] | None = None) -> int:
    """Build mini and return the exit code."""
    return build.main(MINI, argv)


if __name__ == "__main__":
    raise SystemExit(main())
