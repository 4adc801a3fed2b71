"""Train mini: `python -m specheads.mini.build --out <folder>` makes its target; its draft is distilled from nano's."""

# python -m specheads.mini.build --functions functions.jsonl
# specheads distill model=mini model.draft=embedded:nano/draft model.dtype=float32 data=alpaca trainer.max_epochs=5
#     data.path=functions.jsonl "data.template='{prompt}'" "data.response_template='{body}'" optimizer.name=muon
#     data.num_train=24000 data.num_dev=200 data.num_test=300 data.max_new_tokens=128 data.max_prompt_tokens=256
# python -m specheads.mini.build --out specheads/mini --draft outputs/distill/<date_time>/draft

from pathlib import Path

import torch

from specheads import nano
from specheads.embedded import build
from specheads.embedded.recipe import PairRecipe, Recipe
from specheads.nano import build as nano_build

# In real pairs a target step costs ten draft steps and more. Deep and narrow, because at batch 1 a layer costs time of its own:
# a step of this target costs 12 of this draft. Both grow from nano's models, which saw 11 and 25 million tokens of such text.
SHAPES = {
    "target": {**nano_build.SHAPES["target"], "num_hidden_layers": 16},
    "draft": nano_build.SHAPES["draft"],
}
MINI = PairRecipe(
    "mini",
    SHAPES,
    recipes={
        # The rate is between pretraining's and what keeps everything that nano's target knows: with 0.01 and only 520 steps the
        # dev loss of 64 functions was 2.407 after 200 steps, 2.326 after 400 and 2.260 at the end, where nano's target has 2.235.
        # Texts of 256 tokens take half the time of whole ones, but teach no later positions; the second stage does.
        "target": Recipe(
            steps=4000,
            tokens_per_step=4096,
            length=256,
            long_share=0.04,
            muon_lr=0.008,
            adamw_lr=1e-3,
            cooldown=1.0,
            then=Recipe(
                steps=210,
                tokens_per_step=4096,
                length=1024,
                long_share=0.28,
                muon_lr=0.004,
                adamw_lr=5e-4,
                warmup=10,
                cooldown=1.0,
            ),
        ),
    },
    dtype=torch.bfloat16,
    start=Path(nano.__file__).parent,
    tokenizer=Path(nano.__file__).parent,  # the same prompts, and no second file of merges
    manifest=Path(__file__).with_name("corpus.json"),
    figures_script="benchmarks/embedded_card.py mini",
)


def main(argv: list[str] | None = None) -> int:
    """Build mini and return the exit code."""
    return build.main(MINI, argv)


if __name__ == "__main__":
    raise SystemExit(main())
