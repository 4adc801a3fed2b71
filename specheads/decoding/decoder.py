"""The loop of speculative decoding: draft -> stop? -> verify -> commit. It knows no strategy by name.

One prompt at a time; `generate_batch` hands many to batch/decoder.py. Positions in memory trail the committed text: the target
always has all but the last committed token, the draft has at most that, and reads the missing ones first in its next forward
pass. `_rounds` is the whole algorithm; examples/speculative_decoding.py is the same without caches.
"""

import copy
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from specheads.decoding.arguments import check_count
from specheads.decoding.batch.decoder import BatchDecoder
from specheads.decoding.batch.load_aware import LengthPolicy
from specheads.decoding.batch.rounds import SpeculativeRounds
from specheads.decoding.drafting import Autoregressive, Drafting, DraftMemory
from specheads.decoding.engine import Engine, compile_ahead, make_engine
from specheads.decoding.expectation import expected_of
from specheads.decoding.host_numbers import HostNumbers
from specheads.decoding.pairing import check_pairing, default_verification
from specheads.decoding.recommendation import recommended_rules
from specheads.decoding.records import CHAIN, Draft, DraftTree, Generation, Round
from specheads.decoding.session import Prompt, Session, checked_window, end_flags, start_session
from specheads.decoding.stopping import MAX_TOKENS, FixedLength, StoppingRule
from specheads.decoding.verification import Verification, VerificationRule
from specheads.decoding.verifier import ChainVerifier, Outcome, Verifier
from specheads.errors import UserError
from specheads.heads.head import AcceptanceHead
from specheads.pair import Pair
from specheads.sampling import Warp, check_no_nan


class SpeculativeDecoder:
    """A pair, and one choice on each axis.

    Args:
        pair: draft and target.
        drafting: how tokens are proposed; default a chain.
        stopping: when a draft is long enough; default the verification rule's stopping rule, or five tokens.
        verification: how much of a draft is accepted; default token verification for chains, and for others
            what the drafting method names.
        warp: temperature, top-k, top-p of both models.
        engine: `auto`, `eager`, `compiled` or `cuda_graph`.
        window: positions of KV memory, for prompt and response together; default those that both models reach, at most
            MAX_WINDOW.
    """

    def __init__(
        self,
        pair: Pair,
        drafting: Drafting | None = None,
        stopping: StoppingRule | None = None,
        verification: Verification | None = None,
        warp: Warp | None = None,
        engine: str = "auto",
        window: int | None = None,
    ) -> None:
        self.drafting = drafting or Autoregressive()
        self.pair = pair = self.drafting.pair(pair)
        self.verification = verification or default_verification(self.drafting)
        check_pairing(self.drafting, self.verification)
        self.stopping = stopping or self.verification.stopping or FixedLength()
        self.warp, self._engine_name = warp or Warp(), engine
        window = checked_window(pair, window)
        self._longest = max(self.stopping.max_tokens, MAX_TOKENS)
        # A chain ends within the window; a tree may have more nodes than positions are left in it.
        spare_capacity = 0 if self.drafting.single_candidate else self.drafting.most_verified(self._longest)
        self.draft_engine = self.target_engine = make_engine(engine, pair.target_lm, window, spare_capacity)
        if self.drafting.reads_draft:
            self.draft_engine = make_engine(engine, pair.draft_lm, window, self.drafting.most_read(self._longest))
        self._memory: DraftMemory | None = None
        self._row_engines: dict[int, list[Engine]] = {}  # by the number of rows; decoders that share an engine share them, too
        self.startup_seconds = 0.0  # spent on warming up, which no generation's seconds contain
        self._bind()

    @classmethod
    def recommended(cls, pair: Pair, head: AcceptanceHead, **choices: Any) -> "SpeculativeDecoder":
        """Return a decoder with the rules that `specheads evaluate` found best for a head and stored in it.

        Args:
            choices: warp, engine and window, as for a decoder.

        Raises:
            UserError: nothing is stored, as the head was not evaluated or something else was faster.
        """
        stopping, verification = recommended_rules(head)
        return cls(pair, stopping=stopping, verification=verification, **choices)

    def with_stopping(self, stopping: StoppingRule, verification: VerificationRule | None = None) -> "SpeculativeDecoder":
        """Return a decoder with other rules that shares this one's memory; only one of them may be decoding at a time."""
        other = copy.copy(self)
        other.stopping, other.verification, other.startup_seconds = stopping, verification or self.verification, 0.0
        check_pairing(self.drafting, other.verification)
        drafting, longest = self.drafting, max(stopping.max_tokens, self._longest)
        if drafting.kind != CHAIN and any(
            nodes(longest) > nodes(self._longest) for nodes in (drafting.most_read, drafting.most_verified)
        ):
            raise UserError(
                f"{type(stopping).__name__} drafts up to {stopping.max_tokens} tokens, but this decoder has memory for paths of "
                f"{self._longest}; make it with that rule."
            )
        other._bind()
        return other

    def _bind(self) -> None:
        """Prepare drafting and verification with the rules."""
        device, most_tokens = self.draft_engine.lm.device, self.stopping.max_tokens
        self.stopping.bind(self.pair, device)
        # Capacity for the longest draft, and at least what most rules need: few sizes mean few compiled steps.
        most = self.target_engine.padded(max(most_tokens, MAX_TOKENS) + 1) - 1
        if self._memory is None or self._memory.most != most:  # decoders that share an engine share it, too
            draft = self.pair.draft_lm
            self._memory = DraftMemory(most, draft.vocab_size, draft.probs_dtype, device)
        self._drafter = self.drafting.drafter(self.draft_engine, self.warp, self.stopping, self._memory)
        self._verifier: Verifier
        sizes = self.drafting.most_verified(most_tokens), most_tokens
        if isinstance(self.verification, VerificationRule):
            self._verifier = ChainVerifier(self.target_engine, self.warp, self.verification, self._memory, most_tokens)
        else:
            self._verifier = self.verification.verifier(self.target_engine, self.warp, *sizes)
        self._reads_planned = self.verification.reads_planned
        self._counts = HostNumbers((2,), device)
        self._num_drafted, self._num_accepted = self._counts.tensor.split(1)
        self._batch_key: Any = None  # what the batch was made for: rows, and a policy's longest draft
        self._batch: BatchDecoder | None = None
        self._batch_rounds: SpeculativeRounds
        self.is_warm = False

    def warm_up(self) -> float:
        """Compile, load or capture all that generation will run; return the seconds. The first generation does it otherwise."""
        start = time.perf_counter()
        compile_ahead([self.prepare])
        self.prepare()
        self.is_warm = True
        self.startup_seconds += time.perf_counter() - start
        return time.perf_counter() - start

    @torch.no_grad()
    def prepare(self) -> None:
        """Prepare all that generation will run, one step after another."""
        self._drafter.warm_up(self._end_flags(()))
        self._verifier.warm_up()

    def generate(
        self, prompt: Prompt, max_new_tokens: int = 256, seed: int = 0, stop_tokens: Sequence[int] | None = None
    ) -> Generation:
        """Return the response to `prompt`: ids (T,), a string, or chat messages.

        Args:
            max_new_tokens: the response ends there at the latest, or at the end of the models' window.
            seed: of everything random in this generation.
            stop_tokens: ids that end the response; default: the target's generation config.
        """
        session = self._start(prompt, max_new_tokens, seed, stop_tokens)
        return session.finish(self.pair, list(self._rounds(session)))

    def stream(
        self, prompt: Prompt, max_new_tokens: int = 256, seed: int = 0, stop_tokens: Sequence[int] | None = None
    ) -> Iterator[str]:
        """Yield the response's text piece by piece, whole characters only; only one stream at a time may use a decoder."""
        return self._pieces(self._start(prompt, max_new_tokens, seed, stop_tokens))

    def generate_batch(
        self,
        prompts: Iterable[Prompt],
        max_batch: int = 8,
        max_new_tokens: int = 256,
        seeds: Sequence[int] | None = None,
        stop_tokens: Sequence[int] | None = None,
        policy: LengthPolicy | None = None,
    ) -> Iterator[tuple[int, Generation]]:
        """Yield `(number, generation)` for each prompt as its response ends, which is not the order of `prompts`.

        Up to `max_batch` prompts are decoded together; one that ends makes room for the next. The tokens of each are those that
        `generate` returns, up to the rounding of sums. Only one batch at a time may use a decoder.

        Args:
            prompts: each as for `generate`; read as there is room.
            max_batch: rows of KV memory, which are allocated once for each number.
            seeds: one for each prompt, which are then read at once; default 0 for all.
            max_new_tokens, stop_tokens: as for `generate`.
            policy: decides by the load how many tokens all rows draft, in place of the decoder's stopping rule. Then a row's
                tokens depend on the number of its neighbours; their distribution does not.

        Raises:
            UserError: a choice that decodes one prompt at a time; or, after the others have ended, prompts that failed.
        """
        return self._batch_of(max_batch, policy).generate(prompts, max_new_tokens, seeds, stop_tokens)

    def _batch_of(self, max_batch: int, policy: LengthPolicy | None) -> BatchDecoder:
        check_count("max_batch", max_batch, least=1)
        if not isinstance(self.drafting, Autoregressive) or not isinstance(self.verification, VerificationRule):
            raise UserError(
                f"{type(self.drafting).__name__} with {type(self.verification).__name__} decodes one prompt at a time; batches "
                "need chains, for example drafting=autoregressive and verification=token."
            )
        if policy is not None and self.verification.reads_planned:
            raise UserError(
                f"{type(self.verification).__name__} needs lengths that are known before a round; a policy on the load goes with "
                "verification=token or block."
            )
        longest = None if policy is None else max(1, policy.max_tokens)
        if self._batch_key != (max_batch, longest):
            self._batch_rounds = SpeculativeRounds(
                self.pair,
                self._engines_of(max_batch),
                self.stopping if longest is None else FixedLength(longest),
                self.verification,
                self.warp,
                max_batch,
                by_policy=policy is not None,
            )
            self._batch = BatchDecoder(self.pair, self._batch_rounds, max_batch)
            self._batch_key = max_batch, longest
        assert self._batch is not None
        self._batch_rounds.policy = policy
        return self._batch

    def _engines_of(self, max_batch: int) -> list[Engine]:
        """Return the target's and the draft's engine for a batch."""
        if max_batch not in self._row_engines:
            self._row_engines.clear()  # memory of one size at a time
            self._row_engines[max_batch] = [
                make_engine(self._engine_name, engine.lm, engine.capacity, num_rows=max_batch + 1)
                for engine in (self.target_engine, self.draft_engine)
            ]
        return self._row_engines[max_batch]

    def _pieces(self, session: Session) -> Iterator[str]:
        shown = read = 0  # tokens before `shown` are out; [shown, read) decoded to the text that the next piece extends
        for _ in self._rounds(session):
            response = session.response
            before, text = self.pair.decode(response[shown:read]), self.pair.decode(response[shown:])
            # A replacement character at the end is a character whose remaining bytes are still to come.
            if len(text) > len(before) and (not text.endswith("\ufffd") or session.finish_reason):
                yield text[len(before) :]
                shown, read = read, len(response)

    def _start(self, prompt: Prompt, max_new_tokens: int, seed: int, stop_tokens: Sequence[int] | None) -> Session:
        if not self.is_warm:
            self.warm_up()
        engines = (self.target_engine, self.draft_engine) if self.drafting.reads_draft else (self.target_engine,)
        return start_session(self.pair, prompt, max_new_tokens, seed, stop_tokens, engines)

    @torch.no_grad()
    def _rounds(self, session: Session) -> Iterator[Round]:
        """Decode until the response ends: draft, verify, commit."""
        ends = self._end_flags(session.stop_tokens)
        state, rule_state = self.stopping.start_prompt(1, ends.device), self._verifier.start_prompt()
        num_probs_needed = 0
        while session.finish_reason is None:
            start = session.clock.mark()
            limit = session.num_open - 1  # the target adds a token after the accepted ones
            state = self.stopping.start_round(state, session.target_hidden)
            planned = self._planned(state, limit) if self._reads_planned else 0
            draft = self._drafter.draft(session.committed, state, limit, session.draft_uniforms, ends, num_probs_needed)
            self._check_no_nan(draft.nan, False, session)
            drafted = session.clock.mark()

            last, uniforms = session.committed[-1], session.verify_uniforms
            outcome, rule_state = self._verifier.verify(last, draft, planned, uniforms, rule_state)
            self._check_no_nan(outcome.draft_nan, outcome.target_nan, session)
            num_probs_needed = outcome.num_probs_needed
            session.target_hidden = outcome.target_hidden if self.stopping.reads_target else None
            verified = session.clock.mark()

            state, self._counts.numbers[0], self._counts.numbers[1] = self._drafter.after(outcome.path)
            self._counts.send()
            state = self.stopping.end_round(state, self._num_drafted, self._num_accepted)
            self._drafter.keep(outcome.path)
            emitted = session.commit([*outcome.tokens, outcome.next_token])
            times = session.clock.read(start, drafted, verified, session.clock.mark())
            if session.finish_reason is not None:
                session.num_expected = expected_of(self.stopping, self.verification, state)
            yield _round(draft, outcome, emitted, times, is_chain=self.drafting.single_candidate)

    def _planned(self, state: Any, limit: int) -> int:
        """Return how many tokens the stopping rule will draft whatever they are; 0 if that depends on them."""
        planned = self.stopping.planned_length(state)
        return 0 if planned is None else min(int(planned), limit, self.stopping.max_tokens)

    def _end_flags(self, stop_tokens: Sequence[int] | frozenset[int]) -> Tensor:
        return end_flags(self.pair.vocab_size, stop_tokens, self.draft_engine.lm.device)

    def _check_no_nan(self, draft: bool, target: bool, session: Session) -> None:
        """Raise UserError if a model's logits were NaN, after clearing both memories."""
        if draft or target:
            self.draft_engine.clear()
            self.target_engine.clear()
            check_no_nan(self.pair.draft_id, draft, len(session.response))
            check_no_nan(self.pair.target_id, target, len(session.response))


def _round(draft: Draft, outcome: Outcome, emitted: Sequence[int], times: Sequence[float], is_chain: bool) -> Round:
    """Return the record of a round; `times` at which it began, had drafted, had verified and ended."""
    num_copies = 0 if draft.copied is None else int(draft.copied[list(outcome.path)].sum())
    num_accepted = len(outcome.path)
    began, drafted, verified, ended = times
    return Round(
        tokens=emitted,
        num_drafted=draft.num_drafted,
        num_accepted=num_accepted,
        num_discarded=draft.num_drafted - (num_accepted - num_copies),
        num_draft_calls=draft.num_draft_calls,
        draft_seconds=drafted - began,
        verify_seconds=verified - drafted,
        commit_seconds=ended - verified,
        used_copy=num_copies > 0,
        tree=None if is_chain else _tree(draft, outcome),
    )


def _tree(draft: Draft, outcome: Outcome) -> DraftTree:
    """Return the nodes of a draft of several candidates, with those that were accepted."""
    tokens, parents, is_graph = draft.tokens.tolist(), draft.parents.tolist(), draft.copied is not None
    return DraftTree(tokens, parents, draft.num_drafted, outcome.path, is_graph)
