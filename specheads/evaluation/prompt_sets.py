"""The sets of prompts of an evaluation: dev prompts, on which rules are tuned, and others, on which nothing was learned or tuned.

Heads name the prompts that they learned from and those that they were calibrated on (heads/train_prompts.py). Both are left out of what is
reported, and what a head learned from is left out of the dev prompts, too.
"""

import logging
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig, OmegaConf

from data_gen.settings import Generation
from specheads.commands.compose import plain, settings_of
from specheads.errors import UserError
from specheads.evaluation.find import LocatedHead, known_data_sets, missing_remedy, split_of
from specheads.heads.train_prompts import numbers_of
from specheads.pair import Pair
from specheads.prompts.encoding import EncodedPrompt, encode_prompts
from specheads.prompts.prompt import FINAL, Prompt, PromptSource, groups_of, ids_hash
from specheads.prompts.sources import prompt_source

logger = logging.getLogger(__name__)

REPORTED = ("test", FINAL)  # what split= may be
WHY = "a head learned from them or was calibrated on them, or rules are tuned on them"


class ReportedSource(PromptSource, Protocol):
    """Prompts that can be reported on."""

    def check_final(self) -> None:
        """Raise UserError unless final prompts are asked for."""

    def provenance(self) -> Mapping[str, str]:
        """Return what decides the prompts, other than the keys of data."""


@dataclass(frozen=True)
class PromptSet:
    """Prompts, in order, with what they are reported by."""

    name: str
    role: str  # dev: rules are tuned on them; test: they are not
    prompts: Sequence[EncodedPrompt]
    num_left_out: int = 0  # prompts of the same source that heads learned from
    facts: Mapping[str, str] = field(default_factory=dict)  # what decides the prompts, other than settings

    def first(self, count: int) -> "PromptSet":
        """Return the first prompts as a set of the same name."""
        return replace(self, prompts=self.prompts[:count])

    @property
    def groups(self) -> list[Hashable]:
        """The group of each prompt; one without is its own."""
        return groups_of(prompt for prompt, _ in self.prompts)

    def provenance(self) -> dict[str, Any]:
        """Return what identifies the prompts: a hash of their ids, in whatever order, and their number."""
        told = {
            "role": self.role,
            "num_prompts": len(self.prompts),
            "sha256": ids_hash(prompt.prompt_id for prompt, _ in self.prompts),
        }
        return told | {"num_left_out": self.num_left_out, **self.facts}


class PromptSets:
    """All sets of prompts of one evaluation of `heads`; each is loaded when it is first needed."""

    def __init__(self, cfg: DictConfig, pair: Pair, heads: Mapping[str, LocatedHead]) -> None:
        self.cfg, self.pair = cfg, pair
        self.name = Path(str(cfg.data.get("path") or pair.name)).stem
        self.learned = {name: one.head.train_prompts for name, one in heads.items() if one.head.train_prompts is not None}
        self.silent = [name for name in heads if name not in self.learned]
        if self.silent:
            logger.warning("%s", _silence(self.silent))
        self._used: dict[str, PromptSet] = {}

    @cached_property
    def dev(self) -> PromptSet:
        """All dev prompts that no head learned from."""
        source = prompt_source(plain(self.cfg.data))
        prompts = split_of(source, self.pair, "dev", missing_remedy("dev"))
        return self._set(f"{self.name}, dev", "dev", source, prompts, self._numbers("train"), "data.num_dev")

    @cached_property
    def reported(self) -> PromptSet:
        """All prompts of the split that `split=` names, but for those that a head knows."""
        split, source = self.cfg.split, prompt_source(plain(self.cfg.data))
        prompts = split_of(source, self.pair, split, missing_remedy(split))
        name = self.name if split == "test" else f"{self.name}, {split}"
        return self._set(name, "test", source, prompts, self._numbers("train", "dev"), f"data.num_{split}")

    def recorded(self) -> dict[str, PromptSet]:
        """Return by name the prompts to record: dev prompts, the reported ones, and those of test_sets."""
        self._used |= self._recorded
        return self._recorded

    @cached_property
    def _recorded(self) -> dict[str, PromptSet]:
        sets = [self.dev.first(self.cfg.num_dev_prompts), self.reported.first(self.cfg.num_prompts)]
        known = self._numbers("train", "dev") | _numbers_of(prompt for prompt, _ in sets[0].prompts)
        for name, path in (self.cfg.test_sets or {}).items():
            own = name if name not in [one.name for one in sets] else f"{name}, more"
            sets.append(self._more(own, name, path, known))
        return {one.name: one for one in sets}

    def decoded(self) -> PromptSet:
        """Return the reported prompts that are decoded."""
        found = self.reported.first(self.cfg.num_live_prompts)
        self._used[f"{found.name}, decoded"] = found
        return found

    def groups_of(self, prompt_ids: Sequence[str]) -> list[Hashable]:
        """Return the group of each prompt of a recording."""
        groups = {prompt.prompt_id: prompt.group for one in self._used.values() for prompt, _ in one.prompts}
        return [groups.get(prompt_id) or prompt_id for prompt_id in prompt_ids]

    def context(self) -> dict[str, Any]:
        """Return what a report says of its prompts: the split, the parts of it where it has some, and each set's provenance."""
        parts = list(getattr(prompt_source(plain(self.cfg.data)), "final_parts", [])) if self.cfg.split == FINAL else []
        return {
            "split": self.cfg.split,
            "final_parts": parts,
            "prompts": {name: one.provenance() for name, one in self._used.items()},
        }

    def notes(self) -> list[str]:
        """Return what a reader should know of the prompts, as sentences."""
        sets = {one.name: one for one in self._used.values() if one.num_left_out}
        left_out = [f"{_counted(one.num_left_out, one.name)} left out: {WHY}." for one in sets.values()]
        return left_out + ([_silence(self.silent)] if self.silent else [])

    def _more(self, own: str, name: str, path: str | None, known: set[int]) -> PromptSet:
        """Return prompts of the data set conf/data/<name>.yaml: of its own test split, or any of the file `path`."""
        data = OmegaConf.load(known_data_sets({name: path})[name])
        if path is None:
            source = _source(data)
            prompts = split_of(source, self.pair, "test", f"give a file: test_sets={{{name}: <file>}}")
        elif "path" not in data:
            raise UserError(f"test_sets={{{name}: {path}}}: {name} reads no file; leave it out: test_sets={{{name}: null}}.")
        else:
            source, prompts = self._of_file(data, path, self.cfg.num_prompts)
            if not known.isdisjoint(_numbers_of(prompts)):
                source, prompts = self._of_file(data, path, self.cfg.num_prompts + len(known))
        return self._set(own, "test", source, prompts, known, f"test_sets={{{name}: <file>}}").first(self.cfg.num_prompts)

    def _of_file(self, data: DictConfig, path: str, count: int) -> tuple[ReportedSource, list[Prompt]]:
        """Return the first prompts of a file, whichever split they would belong to."""
        all_test = {"path": path, "test_split": None, "num_train": 0, "num_dev": 0, "num_test": count, "num_final": 0}
        source = _source(OmegaConf.merge(data, all_test))
        return source, split_of(source, self.pair, "test", "give a file with more rows")

    def _set(
        self, name: str, role: str, source: ReportedSource, prompts: Sequence[Prompt], known: set[int], key: str
    ) -> PromptSet:
        """Return a set of all `prompts` that are not `known`; raises UserError, which names the key, if that leaves none."""
        kept = [prompt for prompt in prompts if known.isdisjoint(_numbers_of([prompt]))]
        left_out = len(prompts) - len(kept)
        if not kept:
            numbers = _numbers_of(prompts)
            heads = [head for head, one in self.learned.items() if numbers & {*one.train.tolist(), *one.dev.tolist()}]
            raise UserError(
                f"{name} cannot be reported on: all {left_out} of its prompts would be left out, because {WHY} "
                f"(head={', '.join(heads) or None}); give other prompts by {key}, or a head that was trained on others."
            )
        if left_out:
            logger.info("data: %s left out: %s", _counted(left_out, f"{len(prompts)} of {name}"), WHY)
        encoded = encode_prompts(self.pair, kept, settings_of(Generation, self.cfg).limits)
        return PromptSet(name, role, encoded, left_out, source.provenance())

    def _numbers(self, *kinds: str) -> set[int]:
        """Return the numbers of prompts that any head was trained on (`train`) or calibrated on (`dev`)."""
        return {number for one in self.learned.values() for kind in kinds for number in getattr(one, kind).tolist()}


def check_split(cfg: DictConfig) -> None:
    """Raise UserError unless `split=` names prompts that are asked for."""
    if cfg.split not in REPORTED:
        raise UserError(f"split={cfg.split} cannot be reported on; use {' or '.join(REPORTED)}.")
    if cfg.split == FINAL:
        prompt_source(plain(cfg.data)).check_final()


def _source(data: DictConfig) -> ReportedSource:
    source = prompt_source(plain(data))
    source.check()
    return source


def _numbers_of(prompts: Iterable[Prompt]) -> set[int]:
    """Return all numbers that heads may know any of these prompts by."""
    return {number for prompt in prompts for number in numbers_of(prompt.prompt_id, prompt.text)}


def _counted(number: int, name: str) -> str:
    return f"1 prompt of {name} was" if number == 1 else f"{number} prompts of {name} were"


def _silence(names: Sequence[str]) -> str:
    """Return what follows from heads that do not name their prompts."""
    several = len(names) > 1
    return (
        f"{'Heads' if several else 'Head'} {', '.join(names)} {'do' if several else 'does'} not name the prompts that "
        f"{'they' if several else 'it'} learned from, so none are left out of what is reported."
    )
