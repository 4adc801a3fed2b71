"""`specheads data model=llama2-7b`: make the data set that heads and drafts are trained on."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from specheads.commands.command import next_command, print_log
from specheads.commands.compose import load_configured_pair, model_config, settings_of, source_of
from specheads.data_gen.ray_runner import on_workers
from specheads.data_gen.run import (
    Stage,
    generate_data,
    next_stage,
    tell_cut_thoughts,
    write_own_prompts,
)
from specheads.data_gen.settings import DataGeneration, OwnPrompts
from specheads.pair.language_model import tokenizer_of
from specheads.pair.pair import Pair
from specheads.processes import from_first
from specheads.prompts.prompt import SPLITS, GeneratedData, Prompt, unique


def data_cache(
    cfg: DictConfig,
    pair: Pair,
    splits: Collection[str] = SPLITS,
    prompts: Sequence[Prompt] | None = None,
    labelled: bool = True,
) -> GeneratedData:
    """Return the data set of a composed config.

    The first process of a launcher makes missing shards (see generate_data).
    """
    settings = settings_of(DataGeneration, cfg)
    root = Path(cfg.paths.data)
    prompts = unique(source_of(cfg).load(pair.chats)) if prompts is None else prompts

    def make() -> str:
        if settings.runner == "ray" and isinstance(
            next_stage(pair, prompts, settings, root, splits, labelled), Stage
        ):
            _on_workers(cfg, settings, splits, labelled)
        return str(generate_data(pair, prompts, settings, root, splits, labelled))

    return GeneratedData(Path(from_first(make)), prompts, settings.limits)


def _on_workers(
    cfg: DictConfig,
    settings: DataGeneration,
    splits: Collection[str] = SPLITS,
    labelled: bool = True,
) -> str:
    """Return the folder of a data set that the workers of a Ray cluster make, the responses
    first.
    """
    config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
    config["paths"]["data"] = str(Path(cfg.paths.data).absolute())
    common = {"config": config, "splits": list(splits)}
    stages: list[dict[str, object]] = [common | {"labelled": False}]
    if labelled:
        stages.append(common | {"labelled": True})
    return on_workers(settings, Path(cfg.paths.data), _open_stage, stages)


def _open_stage(argument: dict[str, Any]) -> Path | Stage:
    """Return the stage of an argument of `on_workers`, or its folder if it is done."""
    cfg = OmegaConf.create(argument["config"])
    labelled = argument["labelled"]
    settings = settings_of(DataGeneration, cfg)
    pair = load_configured_pair(cfg, only_draft=settings.by_vllm and not labelled)
    prompts = unique(source_of(cfg).load(pair.chats))
    return next_stage(pair, prompts, settings, Path(cfg.paths.data), argument["splits"], labelled)


def make_data(cfg: DictConfig) -> None:
    """Generate the data, or prompts for it, and print where it is."""
    wish = settings_of(OwnPrompts, cfg)
    settings = settings_of(DataGeneration, cfg)
    root = Path(cfg.paths.data)
    if wish.number:
        file = write_own_prompts(load_configured_pair(cfg), wish, settings, root)
        print(f"prompts: {file}")
        print_log()
        print(f"next: {next_command('data', 'data=alpaca', f'data.path={file}')}")
        return
    if settings.runner == "ray":
        folder: Path | str = _on_workers(cfg, settings)
        tell_cut_thoughts(tokenizer_of(model_config(cfg)), Path(folder))
    else:
        if settings.by_vllm:  # its responses first, without another target in memory
            generate_data(
                load_configured_pair(cfg, only_draft=True),
                source_of(cfg),
                settings,
                root,
                labelled=False,
            )
        folder = generate_data(load_configured_pair(cfg), source_of(cfg), settings, root)
    print(f"data: {folder}")
    print_log()
    print(f"next: {next_command('train')}")
