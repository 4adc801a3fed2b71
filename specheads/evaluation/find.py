"""What an evaluation is about: the heads that `head=` names, and prompts."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from specheads.errors import UserError
from specheads.heads.card import card
from specheads.heads.checkpoint import latest_head, load_head
from specheads.heads.head import AcceptanceHead, HeadConfig
from specheads.pair import Pair, config_folder
from specheads.prompts.prompt import Prompt, PromptSource, unique
from specheads.storage.files import write_json, write_whole

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LocatedHead:
    """A head and where it is."""

    head: AcceptanceHead
    where: str


def find_heads(cfg: DictConfig, pair: Pair) -> dict[str, LocatedHead]:
    """Return the heads that `head=` names, by name: one, or all of a bank's folder; none for null."""
    if cfg.head is None:
        return {}
    where = latest_head(Path(cfg.paths.outputs), pair) if cfg.head == "latest" else cfg.head
    folders = {path.parent.name: path.parent for path in sorted(Path(where).glob("*/config.json")) if _is_head(path)}
    if (Path(where) / "config.json").exists() or not folders:
        folders = {Path(where).name: where}
    found = {}
    for name, folder in folders.items():
        head = load_head(folder, cfg.any_draft)
        head.check_fits(pair)
        if head.config.warp and dict(head.config.warp) != dict(cfg.warp):
            logger.warning("head %s was trained under %s, but decoding uses %s", name, dict(head.config.warp), dict(cfg.warp))
        found[name] = LocatedHead(head, str(folder))
    return found


def _is_head(config: Path) -> bool:
    return (config.parent / "model.safetensors").exists()


def split_of(source: PromptSource, pair: Pair, split: str, remedy: str) -> list[Prompt]:
    """Return the prompts of one split of a source; raises UserError, which ends with the remedy, if there are none."""
    prompts = [prompt for prompt in unique(source.load(pair.chats)) if prompt.split == split]
    if not prompts:
        raise UserError(f"the data set has no {split} prompts; {remedy}.")
    return prompts


def missing_remedy(split: str) -> str:
    """Return what to do about a split of `data` that has no prompts, or too few."""
    return f"set data.num_{split}, or use a data set with more rows"


def known_data_sets(test_sets: Mapping[str, Any]) -> dict[str, Path]:
    """Return the file in conf/data of each name; raises UserError for names that are not there."""
    known = {path.stem: path for path in sorted((config_folder() / "data").glob("*.yaml"))}
    if not isinstance(test_sets, Mapping | DictConfig):
        raise UserError(f"test_sets={test_sets} names no files; write for example 'test_sets={{humaneval: humaneval.jsonl}}'.")
    if wrong := [name for name in test_sets if name not in known]:
        raise UserError(f"test_sets names {wrong[0]!r}; known prompt sets are {', '.join(known)}.")
    return {name: known[name] for name in test_sets}


def store_dev_prompts(folder: Path, head: AcceptanceHead, texts: Sequence[str]) -> None:
    """Add the dev prompts that a head was calibrated on to those that its folder names, if it names any."""
    if head.train_prompts is not None:
        head.train_prompts = head.train_prompts.calibrated_on(texts)
        head.train_prompts.write(folder)


def store_in_config(folder: Path, **values: Mapping[str, Any]) -> None:
    """Write what was found out about a head after its training into its config and its card."""
    path = folder / "config.json"
    content = json.loads(path.read_text()) | values
    write_json(path, content)
    text = card(HeadConfig.from_dict(content, str(path)))
    write_whole(folder / "README.md", lambda temporary: temporary.write_text(text))
