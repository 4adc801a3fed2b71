"""A head on top of vLLM's own draft model: it decides when the draft of each request ends, inside vLLM's drafting.

    speculative_config={"method": "draft_model", "model": "<the draft>", "num_speculative_tokens": 8}
    additional_config={"specheads": {"head": "<folder or hub id>"}}

vLLM finds this module by the entry point `vllm.general_plugins` of an installed specheads. The draft runs in vLLM's runner and
paged memory, for all requests together; after each of its steps the head looks at its last hidden states. A request's draft
ends by the threshold, and the drafting of all ends once the mean of their survival, 0 where a draft has ended, is below what
the threshold asks of one request: a step then adds less for its time than a new round. So requests get drafts of different
lengths. Drafts by argmax and drafts that are sampled (`draft_sample_method="probabilistic"`) are both lossless. Without
`specheads` in `additional_config` nothing changes.

Keys: `head`; `threshold`, `min_tokens` and `max_tokens` of HeadThreshold (by default what the head recommends, or else the usual
ones), where vLLM's num_speculative_tokens is an upper bound; `any_draft`, which accepts a head of another draft.

Made for vLLM's model runner V1 (vllm/v1/spec_decode/llm_base_proposer.py); the other one keeps drafts of one length on the
device.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specheads.decoding.engine.compiled_program import CPU_OPTIONS, OPTIONS, CompiledProgram
from specheads.decoding.stopping import HeadThreshold
from specheads.errors import UserError
from specheads.features import drafting_features
from specheads.integrations.vllm_head import HEAD_KEYS, HeadInVllm, checked, given_to
from specheads.revisions import DRAFT_TEMPERATURE, revision_at

logger = logging.getLogger(__name__)

REQUIRED = ("head",)
RUNNER, DRAFT_MODEL = "vllm.v1.worker.gpu_model_runner", "vllm.v1.spec_decode.draft_model"


class DraftsEnded(Exception):
    """No request's draft goes on; it leaves vLLM's loop over draft steps."""


class Progress(NamedTuple):
    """How far the drafts of R requests are."""

    state: Any  # of the stopping rule
    lengths: Tensor  # (R,) long; those of ended drafts stay
    going: Tensor  # (R,) bool
    expected: Tensor  # (R,) float64, how many of these tokens the head expects to be accepted


@dataclass
class DraftedRound:
    """One round of R requests while it is drafted."""

    progress: Progress
    tokens: list[Tensor] = field(default_factory=list)  # (R,) for each step
    probs: list[Tensor] = field(default_factory=list)  # (R, V) for each step, where drafts are sampled

    def ragged(self) -> list[list[int]]:
        """Return the drafts."""
        tokens = torch.stack(self.tokens, dim=1).tolist()
        return [row[:length] for row, length in zip(tokens, self.progress.lengths.tolist(), strict=True)]

    def expected(self) -> list[tuple[int, float]]:
        """Return by draft its length, and how many of its tokens the head expects to be accepted."""
        return list(zip(self.progress.lengths.tolist(), self.progress.expected.tolist(), strict=True))


class AfterStep(nn.Module):
    """What follows a step of a draft model: features, head and rule, for one more token of each draft."""

    ends: Tensor

    def __init__(self, rule: HeadThreshold, ends: Tensor) -> None:
        """Make it for a rule on the draft's device; `ends` are the tokens that end a response."""
        super().__init__()
        self.rule, self.head = rule, rule.head
        self.register_buffer("ends", ends)

    def forward(self, token: Tensor, logits: Tensor, hidden: Tensor, rest: tuple[Tensor, Progress]) -> tuple[Progress, Tensor]:
        """Return the progress, and whether drafting goes on.

        Args:
            token: (R,) long.
            logits, hidden: (R, V) and (R, H), from which the tokens were taken.
            rest: the tokens' embedding (R, E), and the progress before them.
        """
        embedding, (state, lengths, going, expected) = rest
        features = drafting_features(self.rule.needs, logits, token, hidden, lambda _: embedding)
        state, stop = self.rule.step(state, features)
        still = going & ~stop & ~torch.isin(token, self.ends)
        # A draft step takes about as long for few requests as for many, so what it adds to all of them has to pay for it.
        pays = (still * state.survival).mean() >= 1 - state.threshold[0]
        pays = still.any() & (pays | (state.num_drafted[0] < state.min_tokens[0]))
        return Progress(state, lengths + going, still, expected + going * state.survival), pays


class DraftStopping(HeadInVllm):
    """A head with its rule, for the drafts of many requests."""

    def __init__(self, given: dict[str, Any], longest: int) -> None:
        super().__init__(given, longest)
        self.any_draft = bool(given.get("any_draft", False))
        self.draft_temperature = 1.0  # which vLLM does not know; heads learned from logits that it divides
        self.start = cache(self._start)

    def prepare(self, draft: Any, config: Any, location: str, hidden_size: int, device: torch.device) -> None:
        """Fit the head to the draft, vLLM's model with the config of transformers, and compile what follows its steps.

        Raises:
            UserError: another draft than the head's.
        """
        self.fit_to(location, "" if self.any_draft else revision_at(location), hidden_size, device)
        self.draft_temperature = float(getattr(config.get_text_config(), DRAFT_TEMPERATURE, 1.0))
        ends = getattr(draft.config, "eos_token_id", None)
        ends = torch.tensor([] if ends is None else [ends] if isinstance(ends, int) else ends, dtype=torch.long)
        self.embed = draft.embed_input_ids
        self._after = self._compiled(AfterStep(self.rule, ends.to(device)), draft, device)

    @torch.no_grad()
    def _compiled(self, module: AfterStep, draft: Any, device: torch.device) -> Callable[..., tuple[Progress, Tensor]]:
        """Return the module's call, compiled for any number of requests; the module, where nothing can be compiled.

        As it is it consists of some sixty small operations, which together take a quarter of a step of a small draft.
        """
        token = torch.zeros(3, dtype=torch.long, device=device)
        embedding = self.embed(token).clone()
        hidden = embedding.new_zeros(3, self.head.config.hidden_size)
        logits = self._known(draft.compute_logits(hidden))
        progress = self._start(3, device)
        options = OPTIONS if device.type != "cpu" else CPU_OPTIONS | {"cpp.threads": torch.get_num_threads()}
        by_row = [(0,)] * 2  # of the embedding, and of all that is in the progress
        try:
            compiled = CompiledProgram.compile(
                module, (token, logits, hidden, (embedding, progress)), {0: 0, 1: 0, 2: 0}, options, by_row
            )
        except Exception as error:  # noqa: BLE001  # of many kinds; without it drafts are the same
            logger.warning("the head %s is not compiled, so it is slower: %s", self.location, str(error).strip().split("\n")[0])
            return module
        return compiled.bind(module, [])

    def _start(self, num_requests: int, device: torch.device) -> Progress:
        """Return the progress of drafts without a token; nothing writes into it."""
        state = self.rule.start_round(self.rule.start_prompt(num_requests, device))
        zeros = torch.zeros(num_requests, dtype=torch.long, device=device)
        return Progress(state, zeros, torch.ones(num_requests, dtype=torch.bool, device=device), zeros.double())

    def _known(self, logits: Tensor) -> Tensor:
        """Return the logits of the vocabulary that the head was trained on; vLLM may pad it."""
        size = self.head.config.vocab_size
        return logits if not size or size == logits.shape[-1] else logits[:, :size].contiguous()

    def step(self, drafted: DraftedRound, logits: Tensor, token: Tensor, hidden: Tensor, longest: int) -> None:
        """Take in a token of each request; raises DraftsEnded where drafting ends.

        Args:
            logits, hidden: (R, V) and (R, H), from which the tokens (R,) were taken.
            longest: tokens of the longest draft.
        """
        drafted.progress, goes_on = self._after(token, self._known(logits), hidden, (self.embed(token), drafted.progress))
        drafted.tokens.append(token)
        if len(drafted.tokens) >= longest or not goes_on:
            raise DraftsEnded


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
            given = given_to(vllm_config)
            if given is not None:
                check_supported(vllm_config)
                given = checked(given, REQUIRED, HEAD_KEYS)
            super().__init__(vllm_config, device, runner)
            self.stopping = None
            if given is not None:
                self.stopping = DraftStopping(given, self.speculative_config.num_speculative_tokens)
            self.drafted: DraftedRound | None = None
            self.runner = runner
            self.expected: dict[str, tuple[int, float]] = {}  # by request, of the drafts that are verified next

        def load_model(self, target_model: Any) -> None:
            """Load the draft, and check that the head was trained for it."""
            super().load_model(target_model)
            if self.stopping is not None:
                draft = self.speculative_config.draft_model_config
                self.stopping.prepare(self.model, draft.hf_config, draft.model, self.hidden_size, self.device)
                logger.info("the head %s ends the drafts of %s", self.stopping.location, draft.model)

        def propose(self, *, num_speculative_tokens: int, common_attn_metadata: Any, **others: Any) -> Any:
            """Return drafted tokens: of different lengths as lists, or what vLLM does without a head."""
            given = {"num_speculative_tokens": num_speculative_tokens, "common_attn_metadata": common_attn_metadata, **others}
            if self.stopping is None or not num_speculative_tokens:
                return super().propose(**given)
            self.expected = {}
            self.drafted = DraftedRound(self.stopping.start(common_attn_metadata.batch_size(), self.device))
            with suppress(DraftsEnded):
                super().propose(**given)
            drafted, self.drafted = self.drafted, None
            self._last_draft_probs = torch.stack(drafted.probs, dim=1).contiguous() if drafted.probs else None
            if self.stopping.predicts(greedy=not drafted.probs and others["sampling_metadata"].all_greedy):
                self.expected = dict(zip(self.runner.input_batch.req_ids, drafted.expected(), strict=False))
            return drafted.ragged()

        def prepare_inputs_padded(self, common_attn_metadata: Any, spec_decode_metadata: Any, counts: Tensor) -> Any:
            """Compare what was accepted of the last drafts with what the head expected; then what vLLM does.

            Args:
                counts: (R,), by request the tokens that verification kept, its own included.
            """
            if self.stopping is not None and self.expected:
                lengths, kept = spec_decode_metadata.num_draft_tokens, counts.tolist()
                for name, length, count in zip(self.runner.input_batch.req_ids, lengths, kept, strict=False):
                    drafted, expected = self.expected.get(name, (0, 0.0))
                    if length and length == drafted:  # vLLM may have cut it
                        self.stopping.note(count - 1, expected)
            return super().prepare_inputs_padded(common_attn_metadata, spec_decode_metadata, counts)

        def _sample_draft_tokens(self, hidden_states: Tensor, sampling_metadata: Any) -> tuple[Tensor, Tensor | None]:
            """Return a token for each request, and show it to the head."""
            if self.stopping is None or self.drafted is None:
                return super()._sample_draft_tokens(hidden_states, sampling_metadata)
            logits, temperature = self.model.compute_logits(hidden_states), self.stopping.draft_temperature
            logits = logits if temperature == 1 else logits / temperature
            token, probs = self._sample_from_logits(logits, sampling_metadata)
            if probs is not None:
                self.drafted.probs.append(probs)
            longest = min(self.num_speculative_tokens, self.stopping.rule.max_tokens)
            self.stopping.step(self.drafted, logits, token, hidden_states, longest)
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
