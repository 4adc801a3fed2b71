"""`python -m data_gen model=nano data=nano`: make the data cache that train.py reads."""

import logging
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from data_gen.run import GenerationSettings, generate_data
from specheads.cli import command, load_configured_pair
from specheads.pair import Pair
from specheads.sampling import Warp

logger = logging.getLogger(__name__)


def data_cache(cfg: DictConfig, pair: Pair) -> Path:
    """Return the complete cache for a composed config, making what is missing."""
    settings = GenerationSettings(
        max_new_tokens=cfg.data.max_new_tokens, max_prompt_tokens=cfg.data.max_prompt_tokens, **cfg.generation
    )
    return generate_data(pair, instantiate(cfg.data.source), Warp(**cfg.warp), settings, cfg.seed, Path(cfg.paths.data))


@command("data_gen")
def main(cfg: DictConfig) -> None:
    """Generate the data and say where it is."""
    pair = load_configured_pair(cfg)
    folder = data_cache(cfg, pair)
    print(f"data: {folder}\nnext: python train.py model={cfg.model.name}")


if __name__ == "__main__":
    main()
