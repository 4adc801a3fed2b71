"""`python -m data_gen model=nano data=nano`: make the data cache that train.py reads."""

import logging
from collections.abc import Collection, Sequence
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from data_gen.run import GenerationSettings, generate_data
from specheads.commands.command import command, load_configured_pair, next_command
from specheads.errors import UserError, is_count
from specheads.pair import Pair
from specheads.prompts.sources import SPLITS, LoadedPrompts, Prompt
from specheads.sampling import Warp

logger = logging.getLogger(__name__)


def data_cache(
    cfg: DictConfig, pair: Pair, splits: Collection[str] = SPLITS, prompts: Sequence[Prompt] | None = None, labelled: bool = True
) -> Path:
    """Return the complete cache for the prompts of a composed config in `splits`, making what is missing.

    `prompts` are those of its source, where they were loaded already; see generate_data for `labelled`.
    """
    source, settings = instantiate(cfg.data.source), generation_settings(cfg)
    source = source if prompts is None else LoadedPrompts(prompts)
    return generate_data(pair, source, Warp(**cfg.warp), settings, cfg.seed, Path(cfg.paths.data), splits, labelled)


def generation_settings(cfg: DictConfig) -> GenerationSettings:
    """Return the limits and sizes that a composed config asks for."""
    return GenerationSettings(cfg.data.max_new_tokens, cfg.data.max_prompt_tokens, **cfg.generation)


def check_data(cfg: DictConfig) -> None:
    """Raise UserError for settings of prompts and generation that can be known to be wrong before models are loaded."""
    instantiate(cfg.data.source).check()
    generation_settings(cfg)
    Warp(**cfg.warp)
    if not is_count(cfg.seed) or cfg.seed >= 2**32:
        raise UserError(f"seed={cfg.seed} is outside 0..{2**32 - 1}.")


@command("data_gen")
def main(cfg: DictConfig) -> None:
    """Generate the data and say where it is."""
    check_data(cfg)
    folder = data_cache(cfg, load_configured_pair(cfg))
    print(f"data: {folder}\nnext: {next_command('train.py')}")


if __name__ == "__main__":
    main()
