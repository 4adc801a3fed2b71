"""A draft model with a head as vLLM's proposer of drafted tokens; the head decides when the draft of each request ends.

vLLM gets this class by name, and the draft and its head by `additional_config` (see docs/decoders.md):

    speculative_config={
        "method": "custom_class", "model": "specheads.integrations.vllm.HeadProposer", "num_speculative_tokens": 20
    }
    additional_config={"specheads": {"draft": "<folder or hub id>", "head": "<folder or hub id>"}}

The contract (vllm/v1/spec_decode/custom_class_proposer.py): after each step vLLM asks for the tokens to verify next. It passes
the tokens of all requests but no hidden states, and takes token ids but no probabilities. This class therefore runs the draft
itself, with a separate KV cache, and drafts greedily. Requests have no names, and their rows move when others end, so a row is
identified by its text. Drafts are made for one request after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from specheads.errors import UserError
from specheads.features import drafting_features
from specheads.integrations.vllm_head import HEAD_KEYS, HeadInVllm, checked, given_to
from specheads.language_model import LanguageModel, load_language_model

REQUIRED = ("draft", "head")
KEYS = HEAD_KEYS | {"draft", "max_requests", "device", "dtype"}
MAX_REQUESTS = 32


@dataclass
class Request:
    """The tokens of a request that the draft has read; the first `num_verified` of them are part of the request's text."""

    cache: DynamicCache
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    num_verified: int = 0
    num_expected: float | None = None  # accepted tokens that the head expected of the draft that is being verified

    def continues_as(self, text: np.ndarray) -> bool:
        """Whether this may be the request whose text is now `text`: a text only grows."""
        count = self.num_verified
        return count <= len(text) and np.array_equal(self.tokens[:count], text[:count])

    def rewind(self, text: np.ndarray) -> None:
        """Forget the tokens that are not in `text`, and its last token, which is read again to predict the next one."""
        shared = min(len(self.tokens), len(text) - 1)
        differing = np.flatnonzero(self.tokens[:shared] != text[:shared])
        kept = int(differing[0]) if len(differing) else shared
        if len(self.tokens):  # even if all tokens stay: layers with a window then forget what lies beyond it
            self.cache.crop(kept - len(self.tokens))
        self.tokens, self.num_verified = text[:kept].astype(np.int64), kept


class HeadProposer:
    """vLLM's `custom_class` proposer.

    Keys of `additional_config["specheads"]`: `draft` and `head`, folders or hub ids; `threshold`, `min_tokens` and `max_tokens`
    of HeadThreshold (by default what the head recommends, or else the usual ones), where vLLM's num_speculative_tokens is an
    upper bound; `max_requests`, 32 by default, the number of requests at the start of the batch that get drafts, as the draft's
    KV cache takes memory next to vLLM's; `device` and `dtype` of the draft; `any_draft`, which accepts a head that was trained
    for another draft.

    Raises:
        UserError: keys that are unknown or missing; a head of another draft, or one that reads the target's hidden states, which
            vLLM does not pass.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Load the head; the draft is loaded by `load_model`."""
        given = checked(given_to(vllm_config), REQUIRED, KEYS)
        self.window = int(vllm_config.model_config.max_model_len)
        self._where: dict[str, Any] = {name: given[name] for name in ("device", "dtype") if given.get(name)}
        sizes = getattr(vllm_config.model_config, "get_vocab_size", None)
        self._vocab_size = None if sizes is None else int(sizes())
        self._draft_location = given["draft"]
        self.stopping = HeadInVllm(given, int(vllm_config.speculative_config.num_speculative_tokens))
        self._max_requests = int(given.get("max_requests", MAX_REQUESTS))
        self._requests: list[Request] = []  # by the row they had last
        self._draft: LanguageModel | None = None

    @property
    def draft(self) -> LanguageModel:
        """The draft, which is loaded here if vLLM has not called `load_model`."""
        if self._draft is None:
            self._draft = self._loaded_draft()
        return self._draft

    def load_model(self, *arguments: Any, **others: Any) -> None:
        """Load the draft; vLLM calls this while it loads models, so that it does not count the draft's memory as free."""
        self._draft = self._loaded_draft()

    def _loaded_draft(self) -> LanguageModel:
        """Return the draft, checked against the head, with the head on its device."""
        draft, revision = load_language_model(self._draft_location, **self._where)
        target_size = self._vocab_size
        if target_size is not None and draft.vocab_size > target_size:
            raise UserError(
                f"the draft {self._draft_location} knows {draft.vocab_size} tokens, the target {target_size}; choose a draft "
                "with the target's tokenizer."
            )
        # The vocabulary that the head was trained on, where the draft's folder has no tokenizer from which to count it.
        draft.vocab_size = self.stopping.head.config.vocab_size or draft.vocab_size
        self.stopping.fit_to(str(self._draft_location), revision, draft.hidden_size, draft.device)
        ends = draft.model.generation_config.eos_token_id
        self._ends = frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)
        return draft

    @torch.no_grad()
    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Sequence[int],
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return drafted tokens for each request, at most num_speculative_tokens.

        Args:
            sampled_token_ids: by request, the tokens of the last step; none for a request that is still reading its prompt, and
                gets no draft.
            num_tokens_no_spec: by request, the number of its tokens, these included.
            token_ids_cpu: (rows, max_model_len); the first rows are the requests.
            slot_mappings: of vLLM's KV cache, not used here.
        """
        texts = [
            np.asarray(token_ids_cpu[row][: int(num_tokens_no_spec[row])])
            for row in range(len(sampled_token_ids[: self._max_requests]))
        ]
        self._requests = self._matched(texts)
        for request, sampled in zip(self._requests, sampled_token_ids, strict=False):
            if len(sampled) and request.num_expected is not None:
                self.stopping.note(len(sampled) - 1, request.num_expected)
            request.num_expected = None
        return [
            self._drafted(request, text) if len(sampled) else []
            for request, text, sampled in zip(self._requests, texts, sampled_token_ids, strict=False)
        ] + [[] for _ in sampled_token_ids[self._max_requests :]]

    def _expected(self, state: Any) -> float | None:
        """Return how many tokens of a draft the head expected to be accepted, None if it speaks of other drafts.

        Drafts are greedy here. A head that learned from sampled tokens predicts how often those are accepted.
        """
        return float(state.num_expected) if self.stopping.predicts(greedy=True) else None

    def _matched(self, texts: Sequence[np.ndarray]) -> list[Request]:
        """Return the request of each row: most stay in their row, some have moved, others are new."""
        left, matched = dict(enumerate(self._requests)), {}
        for row, text in enumerate(texts):
            if row in left and left[row].continues_as(text):
                matched[row] = left.pop(row)
        for row, text in enumerate(texts):
            if row not in matched:
                moved = [place for place, request in left.items() if request.continues_as(text)]
                longest = max(moved, key=lambda place: left[place].num_verified, default=None)
                matched[row] = self._new_request() if longest is None else left.pop(longest)
        return [matched[row] for row in range(len(texts))]

    def _new_request(self) -> Request:
        cache = DynamicCache(config=self.draft.config)
        cache.activate_past_recording()  # so that drafts that go beyond a window can be rewound
        return Request(cache)

    def _drafted(self, request: Request, text: np.ndarray) -> list[int]:
        draft, rule, drafted = self.draft, self.stopping.rule, list[int]()
        limit = min(rule.max_tokens, min(self.window, draft.window) - len(text))
        if limit < 1:
            return []
        request.rewind(text)
        state = rule.start_round(rule.start_prompt(1, draft.device))
        pending = torch.as_tensor(text[len(request.tokens) :], dtype=torch.long, device=draft.device)[None]
        request.num_verified = len(text)
        while True:
            hidden = draft.hidden_states(pending, past_key_values=request.cache, use_cache=True)[:, -1]
            request.tokens = np.concatenate([request.tokens, pending[0].cpu().numpy()])
            logits = draft.logits(hidden)
            token = logits.argmax(dim=-1)
            drafted.append(int(token))
            state, stop = rule.step(state, drafting_features(rule.needs, logits, token, hidden, draft.embed))
            if len(drafted) >= limit or bool(stop) or drafted[-1] in self._ends:
                request.num_expected = self._expected(state)
                return drafted
            pending = token[:, None]
