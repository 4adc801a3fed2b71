"""What is wrong with a composed config, before anything is imported that takes seconds, and before
the folder of a run is made.
"""

from collections.abc import Mapping, Sequence

from omegaconf import DictConfig, ListConfig, OmegaConf

from specheads.commands.compose import (
    RunSettings,
    keys_of_choice,
    model_config,
    plain,
    settings_of,
    source_of,
)
from specheads.commands.verbs import Verb
from specheads.data_gen.settings import DataGeneration
from specheads.errors import UserError
from specheads.pair.locations import check_available
from specheads.settings import Settings, joined, key_of, secrets_in, shown, unknown_key
from specheads.training.settings import Training

# Their classes import torch, and so are checked afterwards.
_STRATEGIES = ("stopping", "drafting", "verification")


def check(verb: Verb, cfg: DictConfig) -> None:
    """Raise UserError for the first mistake in a config of a verb."""
    secrets = secrets_in(OmegaConf.to_container(cfg)) if verb.has_run else iter(())
    if key := next(secrets, None):
        raise UserError(
            f"{key} holds a password or another secret, which logs and the folder of the run would"
            " show; leave it out. A server's key is read from the variable OPENAI_API_KEY, the"
            " hub's from HF_TOKEN; of data that need a password, give a file that you have"
            " downloaded."
        )
    head = cfg.get("head")
    if isinstance(head, str) and head != "latest":
        check_available("head", head)
    classes = verb.settings()
    check_keys(cfg, classes)
    found = []
    for cls in classes:
        strategies = dict.fromkeys(name for name in _STRATEGIES if name in cls.model_fields)
        found.append(settings_of(cls, cfg, **strategies))
    for settings in found:
        if isinstance(settings, Training):
            _check_splits(cfg)
            settings.check_processes()
    if "live_rules" in cfg:
        _check_live_rules(cfg)
    if "data" in cfg:
        check_data(cfg)
    pair = model_config(cfg)
    starts_new = any(getattr(each, "makes_draft", False) for each in found)
    pair.check_available(draft=not starts_new)


def check_keys(cfg: DictConfig, classes: Sequence[type[Settings]]) -> None:
    """Raise UserError for a key of a composed config that is in none of the classes of settings of
    its command.
    """
    settings_of(RunSettings, cfg)  # it refuses unknown folders
    # The keys of each group; these three are not the fields of one class.
    groups = {"": {"model", "data", "logger"}}
    all_classes: list[type[Settings]] = [RunSettings, *classes]
    for cls in all_classes:
        for name, field in cls.model_fields.items():
            key = key_of(name, field)
            group, _, last = key.rpartition(".")
            groups.setdefault(group, set()).add(last)
            groups[""].add(key.partition(".")[0])
    groups.pop("data", None)  # its keys depend on the source of prompts
    for group in sorted(groups):
        node = OmegaConf.select(cfg, group, default={}) if group else cfg
        if not isinstance(node, Mapping | DictConfig):
            raise UserError(f"{group}={shown(plain(node))} must be a set of keys.")
        for name, value in node.items():
            if name not in groups[group]:
                raise unknown_key(joined(group, str(name)), plain(value), sorted(groups[group]))


def check_data(cfg: DictConfig) -> None:
    """Raise UserError for mistakes in the settings of prompts and generation."""
    settings = settings_of(DataGeneration, cfg)
    if settings.by_vllm and (name := model_config(cfg).quantization):
        raise UserError(
            f"model.quantization={name} is of this process, and vLLM reads the target by itself;"
            " leave it out, or use runner=local."
        )
    source_of(cfg)


def _check_splits(cfg: DictConfig) -> None:
    for key in ("num_train", "num_dev", "num_test"):
        if not cfg.data[key]:
            raise UserError(
                f"data.{key}={shown(cfg.data[key])} must be a positive integer; training needs"
                " prompts of every split."
            )


def _check_live_rules(cfg: DictConfig) -> None:
    if not isinstance(cfg.live_rules, list | ListConfig):
        raise UserError(
            f"live_rules={cfg.live_rules} must be a list; write for example"
            f" 'live_rules=[{cfg.live_rules}]'."
        )
    for name in cfg.live_rules:
        keys_of_choice("live_rules", "stopping", name, {})
