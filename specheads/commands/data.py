"""`specheads data model=llama2-7b`: make the data set that heads and drafts are trained on."""

from collections.abc import Collection, Sequence
from pathlib import Path

from omegaconf import DictConfig

from data_gen.run import generate_data
from data_gen.settings import Generation
from specheads.commands.command import command, next_command
from specheads.commands.compose import load_configured_pair, model_config, settings_of, source_of
from specheads.errors import UserError
from specheads.pair import Pair
from specheads.prompts.generated_data import GeneratedData
from specheads.prompts.prompt import SPLITS, LoadedPrompts, Prompt, unique


def data_cache(
    cfg: DictConfig, pair: Pair, splits: Collection[str] = SPLITS, prompts: Sequence[Prompt] | None = None, labelled: bool = True
) -> GeneratedData:
    """Return the data set of a composed config, with its prompts in `splits`; missing shards are made first.

    `prompts` are those of its source, if they are loaded already; see generate_data for `labelled`.
    """
    settings, source = settings_of(Generation, cfg), source_of(cfg)
    prompts = unique(source.load(pair.chats)) if prompts is None else prompts
    folder = generate_data(pair, LoadedPrompts(prompts), settings, Path(cfg.paths.data), splits, labelled)
    return GeneratedData(folder, prompts, settings.limits)


def check_data(cfg: DictConfig) -> None:
    """Raise UserError for mistakes in the settings of prompts and generation that show before models are loaded."""
    settings = settings_of(Generation, cfg)
    if settings.runner == "vllm" and (name := model_config(cfg).quantization):
        raise UserError(
            f"model.quantization={name} is of this process, and runner=vllm reads the target by itself; leave it out, or use "
            "runner=local."
        )
    source_of(cfg)


@command("data_gen", lambda cfg: [Generation])
def main(cfg: DictConfig) -> None:
    """Generate the data and print where it is."""
    check_data(cfg)
    if settings_of(Generation, cfg).runner == "vllm":  # its responses first, without another target in memory
        data_cache(cfg, load_configured_pair(cfg, only_draft=True), labelled=False)
    folder = data_cache(cfg, load_configured_pair(cfg)).folder
    print(f"data: {folder}\nnext: {next_command('train')}")
