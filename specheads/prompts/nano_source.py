"""Prompts for the embedded pairs: functions of this machine's standard library that they were not trained on."""

import hashlib
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from specheads.embedded import corpus
from specheads.errors import UserError, is_count
from specheads.prompts.counts import check_counts
from specheads.prompts.prompt import FINAL, SPLITS, Prompt, text_id

DEV_FILES = 0.12  # share of the held-out "dev" files whose prompts are the head's dev set

# Test prompts that recipes were compared on: data.num_test is no more, and the final split begins after them.
NUM_READ = 300
FINAL_PER_FILE = 30  # final prompts of one file at most: a few files have hundreds of functions, which resemble each other
NUM_PARTS = 10


@dataclass(frozen=True)
class NanoSource:
    """`data=nano`: functions of this machine's standard library that no embedded pair was trained on.

    Train and dev prompts come from its dev files, test prompts from its test files; no file is in two splits. The final split
    holds the prompts of the test files after the first NUM_READ, in NUM_PARTS parts. The part of a prompt depends on its text
    alone, so parts are nearly the same under every Python version.

    Args:
        num_train: train prompts, from dev files; fewer where there are not as many.
        num_dev: dev prompts, from other dev files.
        num_test: test prompts, from test files, at most 300: the final split follows them.
        num_final: prompts of specheads evaluate split=final; null: all of the parts that final_part names.
        final_part: part of the final split, 0 to 9, or a list of parts; null: none. A part is read once, when a figure is
            published; benchmarks/final_parts.json lists the parts that were read.
    """

    num_train: int
    num_dev: int
    num_test: int
    num_final: int | None = None
    final_part: int | Sequence[int] | None = None

    def check(self) -> None:
        """Raise UserError for a value that is not a count or a part, and if there would be no prompts."""
        check_counts(self.num_train, self.num_dev, self.num_test, self.num_final or 0)
        for part in self.final_parts:
            if not is_count(part) or part >= NUM_PARTS or self.final_parts.count(part) > 1:
                raise UserError(
                    f"data.final_part={self.final_part} must be a part of the final split: a number from 0 to {NUM_PARTS - 1}, a "
                    "list of different numbers, or null for none."
                )
        if self.num_test > NUM_READ:
            raise UserError(
                f"data.num_test={self.num_test} reaches into the final prompts, which begin after the first {NUM_READ} test "
                f"prompts; set it to at most {NUM_READ}. For a figure that is published, name a part of the final prompts: "
                f"split={FINAL} data.final_part={NUM_PARTS - 1}."
            )

    def check_final(self) -> None:
        """Raise UserError unless final prompts are asked for."""
        if not self.final_parts or self.num_final == 0:
            raise UserError(
                f"split={FINAL} needs final prompts, but data.final_part={self.final_part} and data.num_final={self.num_final} "
                f"ask for none; name a part that no result has read, for example data.final_part={NUM_PARTS - 1}, and leave "
                "data.num_final=null."
            )

    @property
    def final_parts(self) -> list[int]:
        """The parts of the final split that are asked for."""
        parts = self.final_part
        if parts is None:
            return []
        return list(parts) if isinstance(parts, Sequence) and not isinstance(parts, str) else [parts]

    def provenance(self) -> dict[str, str]:
        """Return the Python version, whose standard library decides the prompts together with the keys of data."""
        return {"python": platform.python_version()}

    def load(self, chats: bool, responses: bool = False) -> Iterator[Prompt]:
        """Yield up to the wanted number of prompts per split, in an order that looks random but is fixed.

        They are code to continue, whether the pair takes instructions (`chats`) or not. With `responses`, each has the body of
        its function.
        """
        self.check()
        wanted = {"train": self.num_train, "dev": self.num_dev, "test": self.num_test}
        prompts = _prompts_by_split(responses)
        for split in SPLITS:
            yield from sorted(prompts[split].values(), key=lambda prompt: prompt.prompt_id)[: wanted[split]]
        if self.final_parts:
            yield from self._final(prompts)

    def _final(self, prompts: Mapping[str, Mapping[str, Prompt]]) -> list[Prompt]:
        """Return the final prompts that are asked for, out of the prompts of all splits by id."""
        unread = [prompts["test"][prompt_id] for prompt_id in sorted(prompts["test"])[NUM_READ:]]
        per_file: Counter[str] = Counter()
        kept = []
        for prompt in unread:
            if prompt.prompt_id in prompts["train"] or prompt.prompt_id in prompts["dev"]:
                continue  # a text that dev files hold too, on which heads are trained
            file = prompt.group or ""
            per_file[file] += 1
            if per_file[file] <= FINAL_PER_FILE and int(prompt.prompt_id, 16) % NUM_PARTS in self.final_parts:
                kept.append(replace(prompt, split=FINAL))
        return kept[: self.num_final]


def _prompts_by_split(responses: bool) -> dict[str, dict[str, Prompt]]:
    """Return all prompts of the standard library by split and id."""
    prompts: dict[str, dict[str, Prompt]] = {split: {} for split in SPLITS}
    for side in ("dev", "test"):
        for function in corpus.standard_library(side):
            split = "test" if side == "test" else "dev" if _share(function.source) < DEV_FILES else "train"
            prompt_id = text_id(function.prompt)
            # A prompt that several files share belongs to the first of them by name, in whatever order they are read.
            known = prompts[split].get(prompt_id)
            group = min(known.group, function.source) if known is not None and known.group else function.source
            prompts[split][prompt_id] = Prompt(prompt_id, split, function.prompt, function.body if responses else None, group)
    return prompts


def _share(name: str) -> float:
    return int.from_bytes(hashlib.sha256(b"head " + name.encode()).digest()[:4], "big") / 2**32
