"""A head on top of vLLM's own draft model: it decides when the draft of each request ends, inside
vLLM's drafting.

    speculative_config={
        "method": "draft_model",
        "model": "<the draft>",
        "num_speculative_tokens": 8,
    }
    additional_config={"specheads": {"head": "<folder or hub id>"}}

vLLM finds this module by the entry point `vllm.general_plugins` of an installed specheads. Drafts
end where they pay no more by the times of rounds that are measured meanwhile, one by one and all
together (see pace.py), down to none. With a `threshold` a request's draft ends by it, and the
drafting of all ends once the mean of their survival, 0 where a draft has ended, is below what the
threshold asks of one. Other keys: `min_tokens`, `max_tokens`, at most vLLM's
num_speculative_tokens, and `any_draft`, which accepts a head of another draft. Drafts by argmax and
drafts that are sampled are both lossless.

Made for vLLM's model runner V1 (vllm/v1/spec_decode/llm_base_proposer.py); configurations that
would ignore the head are refused. In runner V2 StandaloneARSpeculator drafts
(vllm/v1/worker/gpu/spec_decode/standalone_ar), one length for all requests.
"""

import logging
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from specheads.decoding.engine.compiled_program import CPU_OPTIONS, OPTIONS, CompiledProgram
from specheads.decoding.stopping import HeadThreshold
from specheads.decoding.stopping.rule import State
from specheads.errors import UserError
from specheads.heads.features import drafting_features
from specheads.heads.head import load_head
from specheads.heads.portable.standalone_head import bounds_of
from specheads.integrations.pace import KNOTS, Bounds, Pace
from specheads.pair.draft_vocabulary import SIZE
from specheads.pair.revisions import draft_temperature, revision_at

logger = logging.getLogger(__name__)

VllmObject: TypeAlias = Any  # a config or a model of vLLM, which need not be installed
BOUNDS = ("threshold", "min_tokens", "max_tokens")
KEYS = ("any_draft", "head", *BOUNDS)
RUNNER = "vllm.v1.worker.gpu_model_runner"
DRAFT_MODEL = "vllm.v1.spec_decode.draft_model"


class _DraftsEnded(Exception):
    """No request's draft goes on; it leaves vLLM's loop over draft steps."""


class _Progress(NamedTuple):
    state: State  # of the stopping rule
    lengths: Tensor  # (R,) long; those of ended drafts stay
    going: Tensor  # (R,) bool


class _AfterStep(nn.Module):
    """What follows a step of a draft model: features, head and rule, for one more token of each
    draft.
    """

    end_tokens: Tensor  # the tokens that end a response

    def __init__(self, rule: HeadThreshold, end_tokens: Tensor) -> None:
        super().__init__()
        self.rule = rule
        self.head = rule.head
        self.register_buffer("end_tokens", end_tokens)

    def forward(
        self,
        token: Tensor,
        logits: Tensor,
        hidden: Tensor,
        rest: tuple[Tensor, _Progress, Tensor, Tensor],
    ) -> tuple[_Progress, Tensor]:
        """Return the progress, and (2,) the summed gains of drafts that go on, and their number.

        The tokens (R,) long were taken from `logits` (R, V) of `hidden` (R, H). `rest` are their
        embedding (R, E), the progress before them, the gains (KNOTS,) of survivals, and the least
        gain () with which a draft goes on.
        """
        embedding, (state, lengths, going), gains, least = rest
        features = drafting_features(self.rule.needs, logits, token, hidden, lambda _: embedding)
        state, stop = self.rule.step(state, features)
        place = (len(gains) - 1) * state.survival
        below = place.floor().clamp(max=len(gains) - 2).long()
        gain = torch.lerp(gains[below], gains[below + 1], place - below)
        stop = stop | ((gain < least) & (state.num_drafted >= state.min_tokens))
        still = going & ~stop & ~torch.isin(token, self.end_tokens)
        totals = torch.stack([(still * gain).sum(), still.sum().to(gain)])
        return _Progress(state, lengths + going, still), totals


class DraftStopping:
    """A head with its rule, for the drafts of all requests: `begin`, `step` until _DraftsEnded,
    `drafts`.
    """

    def __init__(self, given: object, longest: int) -> None:
        if not isinstance(given, dict) or not given.get("head"):
            raise UserError(
                "vLLM's additional_config names no head to draft with; give it "
                'additional_config={"specheads": {"head": "<folder or hub id>"}}.'
            )
        if unknown := sorted(given.keys() - KEYS):
            raise UserError(
                f"additional_config names {unknown[0]!r}, which is not known; it takes"
                f" {', '.join(sorted(KEYS))}."
            )
        self.any_draft = bool(given.get("any_draft", False))
        self.location = str(given["head"])
        self.head = load_head(self.location, self.any_draft)
        config = self.head.config
        bounds = {name: given.get(name) for name in BOUNDS}
        most = min(bounds_of(config.to_dict(), **bounds)["max_tokens"], longest)
        bounds = bounds_of(config.to_dict(), **bounds | {"max_tokens": most})
        self.pace = Pace() if given.get("threshold") is None else None
        # The least gain, until times are known or where a threshold is given.
        self._usual = 1 - bounds["threshold"]
        self.rule = HeadThreshold(self.head, **bounds | ({"threshold": 1.0} if self.pace else {}))
        # vLLM does not know it; heads learned from logits that it divides.
        self.draft_temperature = 1.0
        self.probs: list[Tensor] = []  # (R, V) for each step, where drafts are sampled
        self._start = cache(self._new_progress)

    def prepare(
        self,
        draft: VllmObject,
        config: VllmObject,
        location: str,
        hidden_size: int,
        device: torch.device,
    ) -> None:
        """Fit the head to vLLM's draft and its config, UserError if it is another's, and compile
        what follows its steps.
        """
        trained = self.head.config
        if hidden_size != trained.hidden_size:
            raise UserError(
                f"the head {self.location} reads hidden states of size {trained.hidden_size}, but"
                f" the draft {location} has {hidden_size}; it was trained for"
                f" {trained.draft.get('id', 'another draft')}."
            )
        self.head.check_trained_for(location, "" if self.any_draft else revision_at(location))
        self.head.to(device).requires_grad_(False).eval()
        self.draft_temperature = draft_temperature(config)
        ends = getattr(draft.config, "eos_token_id", None)
        if ends is None or isinstance(ends, int):
            ends = [] if ends is None else [ends]
        end_tokens = torch.tensor(ends, dtype=torch.long, device=device)
        self._embed = draft.embed_input_ids
        self._after = self._compiled(_AfterStep(self.rule, end_tokens), draft, device)
        logger.info("the head %s ends the drafts of %s", self.location, location)

    @torch.no_grad()
    def _compiled(
        self, module: _AfterStep, draft: VllmObject, device: torch.device
    ) -> Callable[..., tuple[_Progress, Tensor]]:
        """Return the module's call, compiled for any number of requests.

        The module, where nothing can be compiled.
        """
        # As it is it consists of some sixty small operations, which together take a quarter of a
        # step of a small draft.
        token = torch.zeros(3, dtype=torch.long, device=device)
        embedding = self._embed(token).clone()
        hidden = embedding.new_zeros(3, self.head.config.hidden_size)
        progress = self._new_progress(3, device)
        # A survival is its gain where a threshold is given
        self._gains = torch.linspace(0, 1, KNOTS).to(progress.state.survival)
        rest = embedding, progress, self._gains, self._gains[0].clone()
        example = (token, self._known(draft.compute_logits(hidden)), hidden, rest)
        # One thread: these loops are short, and a second pool of threads would compete with
        # torch's.
        options = OPTIONS if device.type != "cpu" else CPU_OPTIONS | {"cpp.threads": 1}
        by_row = [(0,)] * 2  # of the embedding, and of all that is in the progress
        try:
            return CompiledProgram.compile(
                module, example, {0: 0, 1: 0, 2: 0}, options, by_row
            ).bind(module, [])
        except Exception as error:  # noqa: BLE001  # of many kinds; without it drafts are the same
            logger.warning(
                "the head %s is not compiled, so it is slower: %s",
                self.location,
                str(error).strip().split("\n")[0],
            )
            return module

    def _new_progress(self, num_requests: int, device: torch.device) -> _Progress:
        state = self.rule.start_round(self.rule.start_prompt(num_requests, device))
        lengths = torch.zeros(num_requests, dtype=torch.long, device=device)
        return _Progress(state, lengths, torch.ones_like(lengths, dtype=torch.bool))

    def _known(self, logits: Tensor) -> Tensor:
        """Return the logits of the vocabulary that the head was trained on; vLLM may pad it."""
        size = self.head.config.vocab_size
        return logits if not size or size == logits.shape[-1] else logits[:, :size].contiguous()

    def begin(self, num_requests: int, device: torch.device) -> None:
        self._progress = self._start(num_requests, device)
        self._tokens: list[Tensor] = []  # (R,) for each step
        self._survivals: list[Tensor] = []  # likewise
        self.probs = []
        bounds = None
        self._least = self._gains.new_zeros(())
        if self.pace is not None:
            bounds = self.pace.bounds(num_requests)
            self._gains = torch.from_numpy(self.pace.gains()).to(self._gains)
            self._least = self._gains.new_tensor(bounds.each if bounds else self._usual)
        self._bounds = bounds or Bounds(self._usual * num_requests, 0.0)

    def step(self, logits: Tensor, token: Tensor, hidden: Tensor, longest: int) -> None:
        """Take in tokens (R,) from `logits` (R, V) of `hidden` (R, H).

        Raises _DraftsEnded where drafting ends.
        """
        began = time.perf_counter()
        rest = self._embed(token), self._progress, self._gains, self._least
        self._progress, totals = self._after(token, self._known(logits), hidden, rest)
        self._tokens.append(token)
        gain, going = totals.tolist()
        if self.pace is not None:
            self._survivals.append(self._progress.state.survival)
            self.pace.step(began, time.perf_counter())
        num_drafted = len(self._tokens)
        pays = gain >= self._bounds.step + self._bounds.each * going
        goes_on = going and (pays or num_drafted < self.rule.min_tokens)
        if not goes_on or num_drafted >= min(longest, self.rule.max_tokens):
            raise _DraftsEnded

    def drafts(self) -> list[list[int]]:
        """Return the draft of each request, in the order of the rows."""
        tokens = torch.stack(self._tokens, dim=1).tolist()
        lengths = self._progress.lengths.tolist()
        if self.pace is not None:
            self.pace.end(
                time.perf_counter(), lengths, torch.stack(self._survivals).float().cpu().numpy()
            )
        return [row[:length] for row, length in zip(tokens, lengths, strict=True)]


def _check_supported(vllm_config: VllmObject) -> None:
    """Raise UserError for settings of vLLM under which drafts of different lengths cannot be handed
    over.
    """
    spec = vllm_config.speculative_config
    if getattr(vllm_config.scheduler_config, "async_scheduling", False):
        raise UserError(
            "a head gives the drafts of requests different lengths, which vLLM's asynchronous"
            " scheduling cannot take; add async_scheduling=False."
        )
    for name in ("parallel_drafting", "use_local_argmax_reduction", "use_heterogeneous_vocab"):
        if getattr(spec, name, False):
            raise UserError(
                f"speculative_config has {name}=True, under which a head cannot follow the draft;"
                " leave it out."
            )
    draft: VllmObject = getattr(spec, "draft_model_config", None)
    if getattr(getattr(draft, "hf_config", None), SIZE, None) is not None:
        raise UserError(
            f"the draft {draft.model} has an output over some tokens, which vLLM's draft models"
            " cannot have; decode with specheads, or use a draft with all tokens."
        )


def _check_asked(config: VllmObject, uses_v2: bool) -> None:
    """Raise UserError where `additional_config` names a head that vLLM would draft without."""
    given = getattr(config, "additional_config", None)
    spec = getattr(config, "speculative_config", None)
    if not isinstance(given, dict) or given.get("specheads") is None:
        return
    if (method := getattr(spec, "method", None)) != "draft_model":
        raise UserError(
            f"additional_config names a head, but speculative_config has the method {method}: it"
            ' would be ignored; heads end the drafts of speculative_config={"method":'
            ' "draft_model", ...}.'
        )
    if uses_v2:
        raise UserError(
            "additional_config names a head, but vLLM would run its model runner V2, where it would"
            " be ignored; set VLLM_USE_V2_MODEL_RUNNER=0 before vLLM starts."
        )


def proposer_class(base: type) -> type:
    """Return a subclass of vLLM's draft-model proposer that asks a head, where `additional_config`
    names one.
    """

    class HeadDraftModel(base):
        """vLLM's draft model; a head ends the draft of each request."""

        def __init__(
            self, vllm_config: VllmObject, device: torch.device, runner: VllmObject = None
        ) -> None:
            self.stopping: DraftStopping | None = None
            config = getattr(vllm_config, "additional_config", None)
            if isinstance(config, dict) and (given := config.get("specheads")) is not None:
                _check_supported(vllm_config)
                self.stopping = DraftStopping(
                    given, vllm_config.speculative_config.num_speculative_tokens
                )
            super().__init__(vllm_config, device, runner)
            self.drafting = False

        def load_model(self, target_model: VllmObject) -> None:
            super().load_model(target_model)
            if self.stopping is not None:
                draft = self.speculative_config.draft_model_config
                self.stopping.prepare(
                    self.model, draft.hf_config, draft.model, self.hidden_size, self.device
                )

        def propose(self, **given: VllmObject) -> VllmObject:
            """Return drafted tokens: of different lengths as lists, or what vLLM does without a
            head.
            """
            if self.stopping is None or not given["num_speculative_tokens"]:
                return super().propose(**given)
            stopping = self.stopping
            num_requests = given["common_attn_metadata"].batch_size()
            if stopping.pace is not None:
                self._begin_round(stopping.pace, given)
                most = min(given["num_speculative_tokens"], stopping.rule.max_tokens)
                length = stopping.pace.length(num_requests, most)
                if length is not None:  # without the head
                    fixed = given | {"num_speculative_tokens": length}
                    drafts: list[list[int]] = super().propose(**fixed).tolist()
                    lengths = [length] * len(drafts)
                    stopping.pace.end(time.perf_counter(), lengths, np.zeros((0, len(drafts))))
                    return drafts
            stopping.begin(num_requests, self.device)
            self.drafting = True
            with suppress(_DraftsEnded):
                super().propose(**given)
            self.drafting = False
            probs = stopping.probs
            self._last_draft_probs = torch.stack(probs, dim=1).contiguous() if probs else None
            return stopping.drafts()

        def _begin_round(self, pace: Pace, given: dict[str, VllmObject]) -> None:
            about = given["common_attn_metadata"]
            rejected = given.get("num_rejected_tokens_gpu")
            counts = None if rejected is None else rejected.tolist()
            # More than a draft and the target's token: a prompt is read.
            most = self.speculative_config.num_speculative_tokens if counts is not None else 0
            steady = about.max_query_len <= 1 + most
            num_read = about.num_actual_tokens
            pace.begin(time.perf_counter(), about.batch_size(), num_read, counts, steady)

        def _sample_draft_tokens(
            self, hidden_states: Tensor, sampling_metadata: VllmObject
        ) -> tuple[Tensor, Tensor | None]:
            """Return a token for each request, and show it to the head."""
            if self.stopping is None:
                return super()._sample_draft_tokens(hidden_states, sampling_metadata)
            logits = self.model.compute_logits(hidden_states)
            temperature = self.stopping.draft_temperature
            logits = logits if temperature == 1 else logits / temperature
            token, probs = self._sample_from_logits(logits, sampling_metadata)
            if not self.drafting:
                assert self.stopping.pace is not None
                self.stopping.pace.step(time.perf_counter())
                return token, probs
            if probs is not None:
                self.stopping.probs.append(probs)
            self.stopping.step(logits, token, hidden_states, self.num_speculative_tokens)
            return token, probs

    return HeadDraftModel


def register() -> None:
    """Put heads onto vLLM's draft models; vLLM calls this in each of its processes."""
    module = import_module(DRAFT_MODEL)
    if getattr(module.DraftModelProposer, "takes_heads", False):
        return
    config = import_module("vllm.config").VllmConfig
    # Each worker asks for it
    if isinstance(runner := getattr(config, "use_v2_model_runner", None), property):

        def use_v2_model_runner(self: VllmObject) -> bool:
            assert runner.fget is not None
            uses_v2 = runner.fget(self)
            _check_asked(self, uses_v2)
            return uses_v2

        config.use_v2_model_runner = property(use_v2_model_runner)
    made = proposer_class(module.DraftModelProposer)
    made.takes_heads = True  # type: ignore[attr-defined]
    module.DraftModelProposer = made  # type: ignore[attr-defined]
    if RUNNER in sys.modules:  # it has the name already
        sys.modules[RUNNER].DraftModelProposer = made  # type: ignore[attr-defined]
