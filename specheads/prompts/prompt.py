"""Prompts with their ids and groups, how many each split gets, and how a pair encodes them."""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from specheads.errors import UserError

if TYPE_CHECKING:  # importing torch takes seconds, and what describes prompts does without it
    from specheads.pair.pair import Pair
    from specheads.pair.sampling import Warp

logger = logging.getLogger(__name__)

SPLITS = ("train", "dev", "test")  # those that data is generated for
FINAL = (  # prompts on which nothing is chosen: each is read once, for a figure that is published
    "final"
)

# What usual formats put before an instruction
MARKS = ("<|im_start|>user", "<start_of_turn>user", "<|start_header_id|>user", "[INST]")
SHORTEST_MARK = 4  # of a format, in characters: shorter ones are in plain texts, too


@dataclass(frozen=True)
class Prompt:
    """One prompt."""

    prompt_id: str  # the same in every run
    split: str
    text: str  # goes through the pair's chat template, if it has one
    response: str | None = None  # that in the data set, if there is one and it was requested
    group: str | None = (
        # Of prompts whose responses resemble each other, as from one file; no id or cache depends
        # on it
        None
    )
    is_chat: bool = False  # the text is JSON of the arguments of `Pair.encode_chat`
    place: str | None = field(default=None, compare=False)  # that of the row in its data set

    @property
    def where(self) -> str:
        """What messages call it: its place, or else its beginning."""
        return self.place or f"the prompt {self.text[:40]!r}"


def unique(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Return the prompts without repeated ids, a text in its first split.

    Raises UserError if this leaves a split without any.
    """
    first = dict[str, Prompt]()
    counts = Counter[str]()
    for prompt in prompts:
        counts[prompt.split] += 1
        first.setdefault(prompt.prompt_id, prompt)
    if lost := counts.keys() - {prompt.split for prompt in first.values()}:
        raise UserError(
            f"all {lost.pop()} prompts are prompts of an earlier split, too; give others."
        )
    if num_repeated := counts.total() - len(first):
        message = "data: %d of %d prompts left out: earlier ones are the same"
        logger.info(message, num_repeated, counts.total())
    return list(first.values())


def groups_of(prompts: Iterable[Prompt]) -> list[str]:
    """Return the group of each prompt; a prompt without a group forms a group alone."""
    return [prompt.group or prompt.prompt_id for prompt in prompts]


def text_id(text: str) -> str:
    """Return the id of a prompt with this text: 64 bits of its hash."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def ids_hash(prompt_ids: Iterable[str]) -> str:
    """Return a key of a set of prompts, in whatever order: 64 bits of the hash of their ids."""
    return hashlib.sha256(" ".join(sorted(prompt_ids)).encode()).hexdigest()[:16]


def check_some(*counts: int) -> None:
    """Raise UserError if the numbers of prompts of all splits are 0."""
    if not any(counts):
        raise UserError("data.num_train, data.num_dev, data.num_test are all 0; ask for prompts.")


def scaled_down(counts: Sequence[int], available: int) -> list[int]:
    """Return counts in the proportions of `counts` with the sum `available`, which is less.

    None falls to 0 while that allows.
    """
    total = sum(counts)
    scaled = [max(count * available // total, min(count, 1)) for count in counts]
    while sum(scaled) < available:
        scaled[
            max(range(len(counts)), key=lambda i: counts[i] * available - scaled[i] * total)
        ] += 1
    # What keeps others from 0 comes from the largest, at a tie from the last.
    while sum(scaled) > available:
        scaled[max(reversed(range(len(counts))), key=scaled.__getitem__)] -= 1
    return scaled


EncodedPrompt = tuple[Prompt, list[int]]


@dataclass(frozen=True)
class ResponseLimits:
    """How long prompts and responses may be, and how many are answered together."""

    max_new_tokens: int = 512
    max_prompt_tokens: int = 1024  # longer prompts are left out
    batch_size: int = 64


def encode_prompts(
    pair: "Pair", prompts: Sequence[Prompt], limits: ResponseLimits
) -> list[EncodedPrompt]:
    """Return each prompt with its ids.

    Those over the limit or refused by the pair are left out and counted in the log.
    """
    encoded = list[EncodedPrompt]()
    refused = list[str]()
    for prompt in prompts:
        try:
            ids = (
                pair.encode_chat(**json.loads(prompt.text))
                if prompt.is_chat
                else pair.encode_instruction(prompt.text)
            )
            encoded.append((prompt, ids))
        except UserError as error:
            refused.append(f"{prompt.where}: {error}")
    _warn_of_rendered(pair, prompts)
    if refused:
        logger.warning(
            "data: %d of %d prompts left out, the first in %s",
            len(refused),
            len(prompts),
            refused[0],
        )
    most = min(limits.max_prompt_tokens, pair.window - 1)
    kept = [(prompt, ids) for prompt, ids in encoded if 0 < len(ids) <= most]
    if not kept:
        why = f"; the first: {refused[0]}" if refused else "; check data.template and the limits."
        raise UserError(f"none of {len(prompts)} prompts has between 1 and {most} tokens{why}")
    if len(kept) < len(encoded):
        logger.info(
            "data: %d of %d prompts left out, over %d tokens",
            len(encoded) - len(kept),
            len(prompts),
            most,
        )
    return kept


def _warn_of_rendered(pair: "Pair", prompts: Sequence[Prompt]) -> None:
    """Log a warning for texts that hold what the pair's format, or a usual other one, puts before
    an instruction: they will have one twice, or one within the other.
    """
    before = pair.text_before_instruction()
    if not before:
        return
    mark = (
        before.replace(getattr(pair.tokenizer, "bos_token", None) or "\0", "")
        .strip()
        .rpartition("\n")[2]
    )
    for each in dict.fromkeys((mark, *MARKS)):
        rendered = [prompt for prompt in prompts if not prompt.is_chat and each in prompt.text]
        if rendered and len(each) >= SHORTEST_MARK:
            logger.warning(
                "data: %d of %d prompts, the first in %s, hold %r already, and are put into the"
                " pair's format again, with %r; give texts without it, or messages, or set"
                " model.chat=false",
                len(rendered),
                len(prompts),
                rendered[0].where,
                each,
                mark,
            )
            return


def response_provenance(
    pair: "Pair", prompts: Sequence[Prompt], warp: "Warp", seed: int
) -> dict[str, object]:
    """Return the settings that decide responses, except for limits and sizes.

    They are in every cache's fingerprint. Raises UserError for models with adapters.
    """
    pair.check_merged()
    return {
        "target": pair.target_revision,
        "draft": pair.draft_revision,
        "dtype": [str(pair.target.dtype), str(pair.draft.dtype)],
        "encoding": pair.encoding_fingerprint(),
        "stop_tokens": sorted(pair.stop_tokens),
        "prompts": prompts_fingerprint(prompts),
        "warp": warp.values(),
        "seed": seed,
    }


def prompts_fingerprint(prompts: Sequence[Prompt]) -> str:
    """Return a key of a list of prompts, from whatever source: of their ids, their order and their
    splits.
    """
    return hashlib.sha256(
        "".join(f"{prompt.prompt_id} {prompt.split} " for prompt in prompts).encode()
    ).hexdigest()[:16]


@dataclass(frozen=True)
class GeneratedData:
    """The folder of a complete data set, its prompts with their groups, and the limits of its
    responses.
    """

    folder: Path
    prompts: Sequence[Prompt]
    limits: ResponseLimits = field(default_factory=ResponseLimits)
