"""Prompts as token ids, the provenance of the responses to them, and a generated data set."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specheads.errors import UserError
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp
from specheads.prompts.prompt import Prompt

logger = logging.getLogger(__name__)

EncodedPrompt = tuple[Prompt, list[int]]


@dataclass(frozen=True)
class ResponseLimits:
    """How long prompts and responses may be, and how many are answered together."""

    max_new_tokens: int = 512
    max_prompt_tokens: int = 1024  # longer prompts are left out
    batch_size: int = 64


def encode_prompts(pair: Pair, prompts: Sequence[Prompt], limits: ResponseLimits) -> list[EncodedPrompt]:
    """Return each prompt with its ids; those over the limit are left out and counted in the log."""
    encoded = [(prompt, pair.encode_instruction(prompt.text)) for prompt in prompts]
    most = min(limits.max_prompt_tokens, pair.window - 1)
    kept = [(prompt, ids) for prompt, ids in encoded if 0 < len(ids) <= most]
    if not kept:
        raise UserError(
            f"none of {len(prompts)} prompts has between 1 and {most} tokens; check data.path, data.template and the limits."
        )
    if len(kept) < len(prompts):
        logger.info("data: %d of %d prompts left out, over %d tokens", len(prompts) - len(kept), len(prompts), most)
    return kept


def response_provenance(pair: Pair, prompts: Sequence[Prompt], warp: Warp, seed: int) -> dict[str, Any]:
    """Return the settings that decide responses, except for limits and sizes; they are in every cache's fingerprint."""
    return {
        "target": [pair.target_id, pair.target_revision],
        "draft": [pair.draft_id, pair.draft_revision],
        "dtype": [str(pair.target.dtype), str(pair.draft.dtype)],
        "encoding": pair.encoding_fingerprint(),
        "stop_tokens": sorted(pair.stop_tokens),
        "prompts": prompts_fingerprint(prompts),
        "warp": asdict(warp),
        "seed": seed,
    }


def prompts_fingerprint(prompts: Sequence[Prompt]) -> str:
    """Return a key of a list of prompts, from whatever source: of their ids, their order and their splits."""
    return hashlib.sha256("".join(f"{prompt.prompt_id} {prompt.split} " for prompt in prompts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class GeneratedData:
    """The folder of a complete data set, its prompts with their groups, and the limits of its responses."""

    folder: Path
    prompts: Sequence[Prompt]
    limits: ResponseLimits = field(default_factory=ResponseLimits)
