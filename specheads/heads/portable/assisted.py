"""A head in transformers' assisted generation: it says when a draft is long enough, and everything else stays transformers' own.

So streamers, stopping criteria, logits processors, sampling and outputs are what users of `generate` know. transformers hides the draft's hidden
states from what ends a draft; hooks on both models catch them. One prompt at a time, with a dynamic cache, as all assisted generation.
"""

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import StoppingCriteria, StoppingCriteriaList
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from specheads.heads.portable.standalone_head import DraftRound, StandaloneHead
from specheads.sampling import certainty

REPLACED = "_get_candidate_generator"  # a method of a target, not part of transformers' public interface
_LOCK = threading.Lock()


class Tap:
    """What a model's output embedding read last in this thread, `hidden` (1, T, H), and what `logits` (1, T, V) it gave, within a `with`."""

    hidden: Tensor
    logits: Tensor

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        reads, gives = self._model.get_output_embeddings(), self._model
        self._hooks = [reads.register_forward_pre_hook(self._read), gives.register_forward_hook(self._gave)]
        return self

    def __exit__(self, *raised: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _read(self, module: torch.nn.Module, given: tuple[Tensor, ...]) -> None:
        if threading.get_ident() == self._thread:
            self.hidden = given[0]

    def _gave(self, module: torch.nn.Module, given: tuple[Any, ...], output: Any) -> None:
        if threading.get_ident() == self._thread:
            self.logits = output.logits


class HeadCandidates(AssistedCandidateGenerator):
    """Drafts of one generation, each as long as a head wants it.

    Source: the classes of transformers' generation/candidate_generator.py, which are not part of its public interface.
    """

    def __init__(self, assisted: "Assisted", **arguments: Any) -> None:
        super().__init__(assistant_model=assisted.draft, **arguments)
        self._assisted, self._rounds = assisted, assisted.rounds
        self.generation_config.assistant_confidence_threshold = 0.0  # its own rule; None would be the usual value
        self.generation_config.stop_strings = None  # the target looks for them, as it has the tokenizer
        self._target_hidden: Tensor | None = None
        self._target_tap = Tap(assisted.target)

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the text (1, T) with a draft behind it, and the logits that the draft was chosen by."""
        if self._assisted.reads_target and self._target_hidden is None:
            self._target_hidden = self._assisted.state_before(input_ids, self.assistant_kwargs.get("attention_mask"))
        self._round, self._tap = self._assisted.new_round(), Tap(self.assistant_model)
        with self._tap:
            found = super().get_candidates(input_ids, **kwargs)
        if self._assisted.reads_target:
            self._target_tap.__enter__()  # until the verification, which comes next, is told
        return found

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Take in a verification: scores (1, drafted + 1, V), of which the first `num_matches` agreed."""
        num_drafted, num_matches = scores.shape[1] - 1, int(num_matches)
        self._rounds.append((num_drafted, num_matches))
        if self._assisted.reads_target:
            self._target_tap.__exit__()
            hidden = self._target_tap.hidden
            self._target_hidden = hidden[:, hidden.shape[1] - 1 - num_drafted + num_matches]

    def _calculate_new_tokens(self, input_ids: Tensor) -> tuple[int, int]:
        # The length that transformers adapts is put back, as it goes into the draft's config when generation ends.
        before, self.num_assistant_tokens = self.num_assistant_tokens, self._assisted.new_round().max_tokens
        try:
            return super()._calculate_new_tokens(input_ids)
        finally:
            self.num_assistant_tokens = before

    def _prepare_generation_args(self, *arguments: Any) -> dict[str, Any]:
        return super()._prepare_generation_args(*arguments) | {"stopping_criteria": StoppingCriteriaList([_Enough(self._stops)])}

    def _stops(self, text: Tensor) -> bool:
        token, logits = text[:, -1], self._tap.logits[:, -1, : self._assisted.head.config.get("vocab_size")]
        known = dict(zip(("draft_prob", "max_prob", "entropy"), certainty(logits, token.to(logits.device)), strict=True))
        known |= {"hidden": self._tap.hidden[:, -1], "embedding": self.assistant_model.get_input_embeddings()(token)}
        if self._target_hidden is not None:
            known["target_hidden"] = self._target_hidden
        return self._round.stops(known)


class _Enough(StoppingCriteria):
    """What transformers asks after every drafted token, beside the end of the text and the longest draft."""

    def __init__(self, stops: Callable[[Tensor], bool]) -> None:
        self._stops = stops

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), self._stops(input_ids), dtype=torch.bool, device=input_ids.device)


class Assisted:
    """A target whose assisted generation by one draft asks a head, until `remove()` or the end of a `with`.

    `rounds` are those of the generation that began last: how many tokens were drafted, and how many of them accepted. Of several for one draft the
    latest is asked; with `this_thread` it serves only the thread that made it. Generations of different threads do not disturb each other.
    """

    rounds: list[tuple[int, int]]

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel,
        head: StandaloneHead,
        this_thread: bool = False,
        **bounds: float | None,
    ) -> None:
        """`bounds` are those of bounds_of.

        Raises:
            ValueError: bounds that bound nothing, models that do not fit the head, or of different vocabularies.
        """
        self.target, self.draft, self.bounds, self.rounds = target, draft, bounds, []
        self.reads_target = "target_hidden" in head.inputs
        self._thread = threading.get_ident() if this_thread else None
        self._num_generations = 0
        _check(target, draft, head, self.reads_target)
        device = draft.get_input_embeddings().weight.device
        same = head.readout.weight.device == device
        self.head = head if same else copy.deepcopy(head).to(device)  # it may serve another draft elsewhere
        self.new_round()
        self._dispatcher = _Dispatcher.serving(target, self)

    def remove(self) -> None:
        """Give the target its own assisted generation back."""
        self._dispatcher.take_out(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self.remove()
        if kind is None and not self._num_generations:
            warnings.warn(
                "the head was never asked: the target generated nothing with assistant_model= the draft that it was given for.",
                stacklevel=2,
            )

    def new_round(self) -> DraftRound:
        """Return what ends the next draft."""
        return DraftRound(self.head, **self.bounds)

    @torch.no_grad()
    def state_before(self, text: Tensor, mask: Tensor | None) -> Tensor:
        """Return the target's state (1, H) that the last token of `text` (1, T) was decided from; before a response nobody has asked for it."""
        if text.shape[1] < 2:
            return torch.zeros(1, self.head.config["target_size"], device=text.device)
        device = self.target.get_input_embeddings().weight.device
        known = {} if mask is None else {"attention_mask": mask[:, : text.shape[1] - 1].to(device)}
        # What the output embedding would read; without it there are no logits of a long prompt to hold.
        return self.target.base_model(input_ids=text[:, :-1].to(device), use_cache=False, **known).last_hidden_state[:, -1]

    def serves(self, assistant_model: PreTrainedModel | None) -> bool:
        """Whether a generation that begins in this thread is ours."""
        return assistant_model is self.draft and self._thread in (None, threading.get_ident())

    def candidates(self, target_tokenizer: Any = None, assistant_tokenizer: Any = None, **arguments: Any) -> HeadCandidates:
        """Return the drafts of a new generation."""
        if target_tokenizer is not None and assistant_tokenizer is not None:
            raise ValueError("the head knows the draft's tokens, not another tokenizer's; leave out assistant_tokenizer=.")
        self.rounds = []
        self._num_generations += 1
        return HeadCandidates(self, **arguments)


class _Dispatcher:
    """Stands in for a target's own method that makes drafts, as long as there is somebody who assists."""

    def __init__(self, target: PreTrainedModel) -> None:
        if not hasattr(target, REPLACED):
            raise ValueError(
                f"{type(target).__name__} of this transformers has no {REPLACED}, where a head is put in; it is there in versions 5.17 to 5.23."
            )
        self._target, self._before, self._users = target, getattr(target, REPLACED), []
        self._had = vars(target).get(REPLACED)  # of a copy of this code, for example, which a head's folder carries

    @classmethod
    def serving(cls, target: PreTrainedModel, user: Assisted) -> "_Dispatcher":
        """Return the target's dispatcher, the one that is there or a new one, which from now on asks `user`, too."""
        with _LOCK:
            there = getattr(vars(target).get(REPLACED), "__self__", None)
            found = there if isinstance(there, cls) else cls(target)
            found._users.append(user)
            setattr(target, REPLACED, found.candidates)
        return found

    def take_out(self, user: Assisted) -> None:
        with _LOCK:
            if user in self._users:
                self._users.remove(user)
            if not self._users and getattr(vars(self._target).get(REPLACED), "__self__", None) is self:
                delattr(self._target, REPLACED)
                if self._had is not None and getattr(
                    getattr(self._had, "__self__", None), "_users", True
                ):  # whose own heads may have gone meanwhile
                    setattr(self._target, REPLACED, self._had)

    def candidates(self, assistant_model: PreTrainedModel | None = None, **arguments: Any) -> Any:
        """Return what makes drafts; for another draft than somebody's the head has nothing to say."""
        for user in reversed(self._users):
            if user.serves(assistant_model):
                return user.candidates(**arguments)
        return self._before(assistant_model=assistant_model, **arguments)


def _check(target: PreTrainedModel, draft: PreTrainedModel, head: StandaloneHead, reads_target: bool) -> None:
    """Raise ValueError for models that do not fit the head, or of which transformers takes one for another tokenizer's."""
    sizes = {"draft": (draft, head.config["hidden_size"])}
    sizes |= {"target": (target, head.config["target_size"])} if reads_target else {}
    for role, (model, size) in sizes.items():
        found, trained = model.get_output_embeddings().weight.shape[1], (head.config.get(role) or {}).get("id", f"another {role}")
        if found != size:
            raise ValueError(
                f"the head reads hidden states of size {size} of the {role}, but those of {model.name_or_path} have {found}; it was trained for "
                f"{trained}. Use that one, or train a head for this pair."
            )
    ours, theirs = (model.config.get_text_config().vocab_size for model in (draft, target))
    if ours != theirs:
        raise ValueError(
            f"the draft has {ours} logits and the target {theirs}, which transformers takes for different tokenizers. If they share one, give both "
            "as many: model.resize_token_embeddings(len(tokenizer))."
        )
