"""A head on top of vLLM's own draft model: it decides when the draft of each request ends, inside vLLM's drafting.

    speculative_config={"method": "draft_model", "model": "<the draft>", "num_speculative_tokens": 8}
    additional_config={"specheads": {"head": "<folder or hub id>"}}

vLLM finds this module by the entry point `vllm.general_plugins` of an installed specheads. The draft runs in vLLM's runner and
paged memory, for all requests together; after each of its steps the head looks at its last hidden states, and drafting ends
when it has ended for all requests. Requests get drafts of different lengths. Drafts by argmax and drafts that are sampled
(`draft_sample_method="probabilistic"`) are both lossless. Without `specheads` in `additional_config` nothing changes.

Made for vLLM's model runner V1 (vllm/v1/spec_decode/llm_base_proposer.py); the other one keeps drafts of one length on the
device.
"""

import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specheads.decoding.stopping import HeadThreshold
from specheads.errors import UserError
from specheads.features import drafting_features, reads_target
from specheads.heads.checkpoint import load_head
from specheads.heads.portable.standalone_head import bounds_of
from specheads.revisions import DRAFT_TEMPERATURE, revision_at

logger = logging.getLogger(__name__)

KEYS = {"head", "threshold", "min_tokens", "max_tokens", "any_draft"}
USAGE = 'additional_config={"specheads": {"head": "<folder or hub id>"}}'
RUNNER, DRAFT_MODEL = "vllm.v1.worker.gpu_model_runner", "vllm.v1.spec_decode.draft_model"


class DraftsEnded(Exception):
    """The drafts of all requests have ended; it leaves vLLM's loop over draft steps."""


@dataclass
class DraftedRound:
    """One round of R requests while it is drafted."""

    state: Any  # of the stopping rule
    lengths: Tensor  # (R,) long, tokens of the drafts so far; those of ended ones stay
    going: Tensor  # (R,) bool
    tokens: list[Tensor] = field(default_factory=list)  # (R,) for each step
    probs: list[Tensor] = field(default_factory=list)  # (R, V) for each step, where drafts are sampled

    def ragged(self) -> list[list[int]]:
        """Return the drafts."""
        tokens = torch.stack(self.tokens, dim=1).tolist()
        return [row[:length] for row, length in zip(tokens, self.lengths.tolist(), strict=True)]


class HeadStopping:
    """A head with its rule, for the drafts of many requests."""

    def __init__(self, given: dict[str, Any], longest: int) -> None:
        self.any_draft = bool(given.get("any_draft", False))
        self.location = str(given["head"])
        self.head = load_head(self.location, self.any_draft)
        if reads_target(self.head.config.inputs):
            raise UserError(
                f"the head {self.location} reads the target's hidden state, which vLLM does not pass to a draft; train one "
                "without target_hidden in head.inputs."
            )
        bounds = {name: given.get(name) for name in ("threshold", "min_tokens", "max_tokens")}
        most = min(bounds_of(self.head.config.to_dict(), **bounds)["max_tokens"], longest)
        self.rule = HeadThreshold(self.head, **bounds_of(self.head.config.to_dict(), **bounds | {"max_tokens": most}))
        self.ends = torch.zeros(0, dtype=torch.long)
        self.temperature = 1.0  # of the draft alone, which vLLM does not know; heads learned from logits that it divides

    def fit_to(self, draft: Any, location: str, hidden_size: int, device: torch.device) -> None:
        """Move the head to the draft's device, and learn the tokens that end a response; raises UserError for another draft."""
        if hidden_size != self.head.config.hidden_size:
            raise UserError(
                f"the head {self.location} reads hidden states of size {self.head.config.hidden_size}, but the draft {location} "
                f"has {hidden_size}; it was trained for {self.head.config.draft.get('id', 'another draft')}."
            )
        if not self.any_draft:
            self.head.check_trained_for("draft", location, revision_at(location))
        self.head.to(device).requires_grad_(False).eval()
        ends = getattr(draft.config, "eos_token_id", None)
        self.ends = torch.tensor([] if ends is None else [ends] if isinstance(ends, int) else ends, dtype=torch.long).to(device)

    def start(self, num_requests: int, device: torch.device) -> DraftedRound:
        """Return a round of so many requests."""
        state = self.rule.start_round(self.rule.start_prompt(num_requests, device))
        zeros = torch.zeros(num_requests, dtype=torch.long, device=device)
        return DraftedRound(state, zeros, torch.ones(num_requests, dtype=torch.bool, device=device))

    def step(self, drafted: DraftedRound, logits: Tensor, token: Tensor, hidden: Tensor, embed: Any, longest: int) -> None:
        """Take in a token of each request; raises DraftsEnded once all drafts have ended.

        Args:
            logits, hidden: (R, V) and (R, H), from which the tokens (R,) were taken.
            embed: the draft's input embedding.
            longest: tokens of the longest draft.
        """
        size = self.head.config.vocab_size or logits.shape[-1]
        features = drafting_features(self.rule.needs, logits[:, :size].float(), token, hidden, embed)
        drafted.state, stop = self.rule.step(drafted.state, features)
        drafted.tokens.append(token)
        drafted.lengths = drafted.lengths + drafted.going
        drafted.going = drafted.going & ~stop & ~torch.isin(token, self.ends)
        if len(drafted.tokens) >= longest or not bool(drafted.going.any()):
            raise DraftsEnded


def settings_of(vllm_config: Any) -> dict[str, Any] | None:
    """Return what `additional_config` says of a head for vLLM's draft model; None if nothing. Raises UserError for mistakes."""
    config = getattr(vllm_config, "additional_config", None)
    given = config.get("specheads") if isinstance(config, dict) else None
    if given is None:
        return None
    if not isinstance(given, dict) or not given.get("head"):
        raise UserError(f"vLLM's additional_config names no head for its draft model; give it {USAGE}, or leave specheads out.")
    if unknown := sorted(given.keys() - KEYS):
        raise UserError(
            f"additional_config names {unknown[0]!r}, which is not known; for method=draft_model it takes "
            f"{', '.join(sorted(KEYS))}."
        )
    return given


def check_supported(vllm_config: Any) -> None:
    """Raise UserError for settings of vLLM under which drafts of different lengths cannot be handed over."""
    spec = vllm_config.speculative_config
    if getattr(vllm_config.scheduler_config, "async_scheduling", False):
        raise UserError(
            "a head gives each request a draft of its own length, which vLLM's asynchronous scheduling cannot take; add "
            "async_scheduling=False."
        )
    for name in ("parallel_drafting", "use_local_argmax_reduction", "use_heterogeneous_vocab"):
        if getattr(spec, name, False):
            raise UserError(f"speculative_config has {name}=True, under which a head cannot follow the draft; leave it out.")


def proposer_class(base: type) -> type:
    """Return a subclass of vLLM's draft-model proposer that asks a head, where `additional_config` names one."""

    class HeadDraftModel(base):
        """vLLM's draft model; a head ends the draft of each request."""

        def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
            given = settings_of(vllm_config)
            if given is not None:
                check_supported(vllm_config)
            super().__init__(vllm_config, device, runner)
            longest = self.speculative_config.num_speculative_tokens
            self.stopping = None if given is None else HeadStopping(given, longest)
            self.drafted: DraftedRound | None = None

        def load_model(self, target_model: Any) -> None:
            """Load the draft, and check that the head was trained for it."""
            super().load_model(target_model)
            if self.stopping is not None:
                location = self.speculative_config.draft_model_config.model
                self.stopping.fit_to(self.model, location, self.hidden_size, self.device)
                config = self.speculative_config.draft_model_config.hf_config
                self.stopping.temperature = float(getattr(config.get_text_config(), DRAFT_TEMPERATURE, 1.0))
                logger.info("the head %s ends the drafts of %s", self.stopping.location, location)

        def propose(self, *, num_speculative_tokens: int, common_attn_metadata: Any, **others: Any) -> Any:
            """Return drafted tokens: of different lengths as lists, or what vLLM does without a head."""
            given = {"num_speculative_tokens": num_speculative_tokens, "common_attn_metadata": common_attn_metadata, **others}
            if self.stopping is None or not num_speculative_tokens:
                return super().propose(**given)
            self.drafted = self.stopping.start(common_attn_metadata.batch_size(), self.device)
            with suppress(DraftsEnded):
                super().propose(**given)
            drafted, self.drafted = self.drafted, None
            self._last_draft_probs = torch.stack(drafted.probs, dim=1).contiguous() if drafted.probs else None
            return drafted.ragged()

        def _sample_draft_tokens(self, hidden_states: Tensor, sampling_metadata: Any) -> tuple[Tensor, Tensor | None]:
            """Return a token for each request, and show it to the head."""
            if self.stopping is None or self.drafted is None:
                return super()._sample_draft_tokens(hidden_states, sampling_metadata)
            logits = self.model.compute_logits(hidden_states) / self.stopping.temperature
            token, probs = self._sample_from_logits(logits, sampling_metadata)
            if probs is not None:
                self.drafted.probs.append(probs)
            longest = min(self.num_speculative_tokens, self.stopping.rule.max_tokens)
            self.stopping.step(self.drafted, logits, token, hidden_states, self.model.embed_input_ids, longest)
            return token, probs

    return HeadDraftModel


def register() -> None:
    """Put heads onto vLLM's draft models; vLLM calls this in each of its processes."""
    from importlib import import_module

    module = import_module(DRAFT_MODEL)
    if getattr(module.DraftModelProposer, "takes_heads", False):
        return
    made = proposer_class(module.DraftModelProposer)
    made.takes_heads = True  # type: ignore[attr-defined]
    module.DraftModelProposer = made  # type: ignore[attr-defined]
    if RUNNER in sys.modules:  # it has the name already
        sys.modules[RUNNER].DraftModelProposer = made  # type: ignore[attr-defined]


__all__: Sequence[str] = ("register",)
