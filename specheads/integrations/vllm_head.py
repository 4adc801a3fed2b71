"""A head in vLLM, whichever class drafts: its settings in `additional_config`, its rule, and whether its predictions hold."""

import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch

from specheads.decoding.expectation import Drift
from specheads.decoding.stopping import HeadThreshold
from specheads.errors import UserError
from specheads.features import reads_target
from specheads.heads.checkpoint import load_head
from specheads.heads.portable.standalone_head import bounds_of

logger = logging.getLogger(__name__)

BOUNDS = ("threshold", "min_tokens", "max_tokens")
HEAD_KEYS = {"head", "any_draft", *BOUNDS}


def given_to(vllm_config: Any) -> Any:
    """Return what `additional_config` has under `specheads`, None if nothing."""
    config = getattr(vllm_config, "additional_config", None)
    return config.get("specheads") if isinstance(config, dict) else None


def checked(given: Any, required: Collection[str], keys: Collection[str]) -> dict[str, Any]:
    """Return what `additional_config` says; raises UserError for a missing key of `required`, or one that is not in `keys`."""
    missing = [name for name in required if not isinstance(given, dict) or not given.get(name)]
    if missing:
        example = ", ".join(f'"{name}": "<folder or hub id>"' for name in required)
        raise UserError(
            f"vLLM's additional_config names no {' and no '.join(missing)} to draft with; give it "
            f'additional_config={{"specheads": {{{example}}}}}.'
        )
    if unknown := sorted(given.keys() - keys):
        raise UserError(f"additional_config names {unknown[0]!r}, which is not known; it takes {', '.join(sorted(keys))}.")
    return dict(given)


class HeadInVllm:
    """A head with its rule, for drafts of at most `longest` tokens.

    Args:
        given: the settings, with the keys HEAD_KEYS.
        longest: vLLM's num_speculative_tokens.

    Raises:
        UserError: a head that reads the target's hidden states, which vLLM does not pass.
    """

    def __init__(self, given: Mapping[str, Any], longest: int) -> None:
        any_draft = bool(given.get("any_draft", False))
        self.location = str(given["head"])
        self.head = load_head(self.location, any_draft)
        config = self.head.config
        if reads_target(config.inputs):
            raise UserError(
                f"the head {self.location} reads the target's hidden state, which vLLM does not pass; train one without "
                "target_hidden in head.inputs."
            )
        bounds = {name: given.get(name) for name in BOUNDS}
        most = min(bounds_of(config.to_dict(), **bounds)["max_tokens"], longest)
        self.rule = HeadThreshold(self.head, **bounds_of(config.to_dict(), **bounds | {"max_tokens": most}))
        self.drift = Drift()

    def fit_to(self, location: str, revision: str, hidden_size: int, device: torch.device) -> None:
        """Move the head to its draft's device; raises UserError for another draft than the head's."""
        config = self.head.config
        if hidden_size != config.hidden_size:
            raise UserError(
                f"the head {self.location} reads hidden states of size {config.hidden_size}, but the draft {location} has "
                f"{hidden_size}; it was trained for {config.draft.get('id', 'another draft')}."
            )
        self.head.check_trained_for("draft", location, revision)
        self.head.to(device).requires_grad_(False).eval()

    def predicts(self, greedy: bool) -> bool:
        """Whether the head predicts the acceptance of such drafts, of every token that goes to verification.

        It speaks of greedy drafts of a greedy target if it learned from those; of requests that are sampled vLLM knows more
        settings than heads do, so nothing is said of them.
        """
        return greedy and self.head.config.warp.get("temperature") == 0 and self.head.config.predicts == "next_token"

    def note(self, accepted: int, expected: float) -> None:
        """Count what was accepted of a draft beside what the head expected of it, and log it now and then."""
        if (report := self.drift.add(accepted, expected)) is not None:
            text, drifted = report
            logger.log(logging.WARNING if drifted else logging.INFO, "%s", text)
