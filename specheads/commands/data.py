"""`specheads data model=llama2-7b`: make the data set that heads and drafts are trained on."""

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from data_gen.ray_runner import on_workers
from data_gen.run import generate_data
from data_gen.settings import Generation
from specheads.commands.command import command, next_command
from specheads.commands.compose import load_configured_pair, model_config, settings_of, source_of
from specheads.errors import UserError
from specheads.pair import Pair
from specheads.processes import after_first
from specheads.prompts.generated_data import GeneratedData
from specheads.prompts.prompt import SPLITS, LoadedPrompts, Prompt, unique


def data_cache(
    cfg: DictConfig, pair: Pair, splits: Collection[str] = SPLITS, prompts: Sequence[Prompt] | None = None, labelled: bool = True
) -> GeneratedData:
    """Return the data set of a composed config, with its prompts in `splits`; missing shards are made first.

    The first process of a launcher makes it, and the others wait. `prompts` are those of its source, if they are
    loaded already; see generate_data for `labelled`.
    """
    return after_first(partial(_data_cache, cfg, pair, splits, prompts, labelled))


def _data_cache(
    cfg: DictConfig, pair: Pair, splits: Collection[str], prompts: Sequence[Prompt] | None, labelled: bool
) -> GeneratedData:
    if (settings := settings_of(Generation, cfg)).runner == "ray":
        on_workers(settings, Path(cfg.paths.data), make_in_worker, argument_of(cfg, splits, labelled))
    return _made_here(cfg, pair, splits, prompts, labelled)


def _made_here(
    cfg: DictConfig, pair: Pair, splits: Collection[str] = SPLITS, prompts: Sequence[Prompt] | None = None, labelled: bool = True
) -> GeneratedData:
    settings, source = settings_of(Generation, cfg), source_of(cfg)
    prompts = unique(source.load(pair.chats)) if prompts is None else prompts
    folder = generate_data(pair, LoadedPrompts(prompts), settings, Path(cfg.paths.data), splits, labelled)
    return GeneratedData(folder, prompts, settings.limits)


def make_data(cfg: DictConfig, splits: Collection[str] = SPLITS, labelled: bool = True) -> Path:
    """Return the folder of the data set of a composed config, which this process makes, with others if there are any."""
    if settings_of(Generation, cfg).by_vllm:  # its responses first, without another target in memory
        responses = _made_here(cfg, load_configured_pair(cfg, only_draft=True), splits, labelled=False)
        if not labelled:
            return responses.folder
    return _made_here(cfg, load_configured_pair(cfg), splits, labelled=labelled).folder


def argument_of(cfg: DictConfig, splits: Collection[str] = SPLITS, labelled: bool = True) -> dict[str, Any]:
    """Return what a worker on another machine needs to make a part of a data set, as plain data."""
    config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
    config["paths"]["data"] = str(Path(cfg.paths.data).absolute())
    return {"config": config, "splits": list(splits), "labelled": labelled}


def make_in_worker(argument: dict[str, Any]) -> str:
    """Make the data set of an argument with other workers; return its folder."""
    return str(make_data(OmegaConf.create(argument["config"]), argument["splits"], argument["labelled"]))


def _made(cfg: DictConfig) -> str:
    """Return the folder of the data set of a composed config, which this process or workers make."""
    if (settings := settings_of(Generation, cfg)).runner == "ray":
        return on_workers(settings, Path(cfg.paths.data), make_in_worker, argument_of(cfg))
    return str(make_data(cfg))


def check_data(cfg: DictConfig) -> None:
    """Raise UserError for mistakes in the settings of prompts and generation that show before models are loaded."""
    settings = settings_of(Generation, cfg)
    if settings.by_vllm and (name := model_config(cfg).quantization):
        raise UserError(
            f"model.quantization={name} is of this process, and vLLM reads the target by itself; leave it out, or use "
            "runner=local."
        )
    source_of(cfg)


@command("data_gen", lambda cfg: [Generation])
def main(cfg: DictConfig) -> None:
    """Generate the data and print where it is."""
    check_data(cfg)
    print(f"data: {_made(cfg)}\nnext: {next_command('train')}")
