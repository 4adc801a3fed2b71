"""The arguments of the library from a composed config: typed settings, the source of prompts, the
pair, loggers.

It imports neither torch nor transformers, which take seconds: `--help` and mistakes in a command
line are answered without them.
"""

import contextlib
import hashlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import hydra
import yaml
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf

from specheads.commands.verbs import verb_of
from specheads.errors import UserError
from specheads.pair.config import PairConfig, pair_config
from specheads.processes import is_first_process
from specheads.progress import stage
from specheads.prompts.data_set_source import DatasetSource
from specheads.prompts.sources import PromptSource, prompt_source
from specheads.settings import (
    Flag,
    Settings,
    Text,
    config_folder,
    config_of,
    fields_of,
    key_of,
    setting,
    shown,
    unknown_key,
)
from specheads.storage.files import amount

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger

    from specheads.pair.initial_draft import NewDraft
    from specheads.pair.pair import Pair

logger = logging.getLogger(__name__)

_FREE_KEYS = ("model.chat_template_kwargs", "vllm.options")  # sets of keys that others define
_MISSING = object()  # stands for the value of a key that a config does not have

S = TypeVar("S", bound=Settings)


class _Paths(Settings):
    """The folders of a command."""

    data: Text = setting("data", "the folder of generated data, with one folder per fingerprint")
    outputs: Text = setting("outputs", "the folder of logs, checkpoints and results of every run")
    run: Text = setting("", "the folder of this run", config="${hydra:runtime.output_dir}")


class RunSettings(Settings):
    """Where a command writes, and whether it resumes a run."""

    command: Text = setting("", "the name of the folder of runs in paths.outputs")
    resume: Flag = setting(
        True,
        "true: resume the newest run of the same command if it is unfinished; false: start again",
    )
    paths: _Paths = setting(_Paths(), "the folders of a command")


def command_config(name: str, words: Sequence[str] = (), with_hydra: bool = False) -> DictConfig:
    """Return the config conf/<name>.yaml of a command with the words of a command line.

    Raises Hydra's errors.
    """
    register(name)
    with initialize_config_dir(str(config_folder().resolve()), version_base="1.3"):
        return hydra.compose(name, list(words), return_hydra_config=with_hydra)


@dataclass(frozen=True)
class Keys:
    """The keys of a command: their defaults, nested as in its config, and their sentences of
    help.
    """

    defaults: dict[str, object]
    sentences: dict[str, str]


@cache
def keys_of(name: str) -> Keys:
    """Return the keys of conf/<name>.yaml."""
    verb = verb_of(name)
    classes: list[type[Settings]] = [RunSettings, *verb.settings()]
    pair = config_of(PairConfig) | {"draft": "???", "target": "???"}
    parts = [{"model": pair}, *map(config_of, classes), {"command": verb.outputs or name}]
    defaults = OmegaConf.to_container(OmegaConf.merge(*parts))
    sentences = fields_of(PairConfig, "model")
    for cls in classes:
        for key, text in fields_of(cls).items():
            if text:
                sentences[key] = text
    return Keys(cast(dict[str, object], defaults), sentences)


def register(name: str) -> None:
    """Make the defaults of conf/<name>.yaml, and of the data sets that files of conf/data name,
    known to Hydra.
    """
    defaults = OmegaConf.create(keys_of(name).defaults)
    for key in _FREE_KEYS:
        node = OmegaConf.select(defaults, key)
        if node is not None:
            OmegaConf.set_struct(node, False)
    ConfigStore.instance().store(f"{name}_settings", defaults)
    data_set = {}
    for field in fields(DatasetSource):
        data_set[field.name] = "???" if field.default is MISSING else field.default
    ConfigStore.instance().store("data_set", data_set, group="data")


def names_of(group: str) -> list[str]:
    """Return the names of the files of a config group."""
    return sorted(path.stem for path in (config_folder() / group).glob("*.yaml"))


def keys_of_choice(
    where: str, group: str, name: object, given: Mapping[str, object]
) -> dict[str, object]:
    """Return the keys of conf/<group>/<name>.yaml with `given` in place of those in the file.

    Unknown: a UserError about `where`.
    """
    names = [each for each in names_of(group) if each != "all"]
    if name not in names:
        raise UserError(
            f"{where} names {name!r}, which is not in conf/{group}; use one of {', '.join(names)}."
        )
    content = yaml.safe_load((config_folder() / group / f"{name}.yaml").read_text("utf-8"))
    content.pop("defaults", None)
    for key, value in given.items():
        if key not in content:
            raise unknown_key(f"{where}: {key}", value, sorted(content.keys() - {"_target_"}))
    return content | dict(given)


def settings_of(cls: type[S], cfg: DictConfig, **objects: object) -> S:
    """Return settings with the keys that a composed config has, and `objects` unchanged.

    Raises UserError for a wrong value.
    """
    values = dict(objects)
    for name, field in cls.model_fields.items():
        if name not in objects:
            key = key_of(name, field)
            value = OmegaConf.select(cfg, key, default=_MISSING, throw_on_missing=True)
            if value is not _MISSING:
                values[name] = plain(value)
    return cls(**values)


def source_of(cfg: DictConfig) -> PromptSource:
    """Return the source of prompts of a composed config.

    Raises UserError for mistakes that show before data is read.
    """
    if not isinstance(cfg.data, DictConfig):
        raise UserError(f"data={shown(plain(cfg.data))} must be a prompt set of conf/data.")
    return prompt_source(cast(dict[str, object], plain(cfg.data)))


def load_configured_pair(
    cfg: DictConfig, only_draft: bool = False, new_draft: "NewDraft | None" = None
) -> "Pair":
    """Return the pair of `cfg.model`, as `load_pair` does, after logging what it is."""
    from specheads.pair.pair import load_pair

    config = model_config(cfg)
    if is_first_process():
        name = config.name or "without a name"
        logger.info("pair %s: draft %s for target %s", name, config.draft, config.target)
    with stage("pair") as say:
        pair = load_pair(only_draft=only_draft, new_draft=new_draft, **_model_keys(cfg))
        sizes = []
        for model in (pair.draft, pair.target):
            sizes.append(amount(model.num_parameters(), "billion", "million"))
        say(f"{pair.name or 'draft and target'}: {sizes[0]} parameters for {sizes[1]}")
    return pair


def model_config(cfg: DictConfig) -> PairConfig:
    """Return the description of a composed config's pair. Raises UserError for an unknown key."""
    # A config of the user need not name its pair.
    return pair_config(**{"name": None} | _model_keys(cfg))


def _model_keys(cfg: DictConfig) -> dict[str, Any]:
    keys = OmegaConf.to_container(cfg.model, resolve=True, throw_on_missing=True)
    return cast(dict[str, Any], keys)


def plain(value: object) -> object:
    """Return a value of a config as ordinary Python, with interpolations resolved and nested
    `_target_`s instantiated.
    """
    if isinstance(value, DictConfig | ListConfig):
        return instantiate(value, _convert_="all")
    return value


@contextlib.contextmanager
def open_loggers(cfg: DictConfig, run: Path) -> Iterator[list["Logger"]]:
    """Yield the loggers of `cfg.logger` for the run in a folder.

    End the W&B run, so that this process may begin another.
    """
    try:
        yield [_new_logger(logger, run) for logger in (cfg.get("logger") or {}).values()]
    finally:
        if "wandb" in sys.modules:
            sys.modules["wandb"].finish()


def _new_logger(cfg: DictConfig, run: Path) -> "Logger":
    """Return a logger.

    A W&B run without an id gets the id of its folder, so that an interrupted run is resumed.
    """
    if not cfg._target_.endswith("WandbLogger"):
        return instantiate(cfg)
    import wandb  # slow to import, and often not used

    # A job of a sweep has a number.
    name = f"{run.parent.name}-{run.name}" if run.name.isdigit() else run.name
    number = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:6]
    logger = instantiate(cfg, id=cfg.get("id") or f"{name}-{number}")
    try:
        _ = logger.experiment  # starts the run now, before an hour of generating data
    except wandb.errors.Error as error:
        raise UserError(
            f"{error} Log in with `wandb login`, or give logger.wandb.offline=true."
        ) from error
    return logger
