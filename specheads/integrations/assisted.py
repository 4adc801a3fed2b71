"""A head in transformers' assisted generation: it says when a draft is long enough, and everything else stays transformers' own.

So streamers, stopping criteria, logits processors, sampling and outputs are what users of `generate` know. transformers hides the draft's hidden
states from what ends a draft; hooks on both models catch them. One prompt at a time, with a dynamic cache, as all assisted generation.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import StoppingCriteria, StoppingCriteriaList
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from specheads.integrations.standalone_head import DraftRound, StandaloneHead
from specheads.sampling import certainty

REPLACED = "_get_candidate_generator"  # a method of a target, not part of transformers' public interface


class Tap:
    """What a model's output embedding read last, `hidden` (1, T, H), and the `logits` (1, T, V) that the model gave; within a `with`."""

    hidden: Tensor
    logits: Tensor

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __enter__(self) -> Self:
        reads, gives = self._model.get_output_embeddings(), self._model
        self._hooks = [reads.register_forward_pre_hook(self._read), gives.register_forward_hook(self._gave)]
        return self

    def __exit__(self, *raised: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _read(self, module: torch.nn.Module, given: tuple[Tensor, ...]) -> None:
        self.hidden = given[0]

    def _gave(self, module: torch.nn.Module, given: tuple[Any, ...], output: Any) -> None:
        self.logits = output.logits


class HeadCandidates(AssistedCandidateGenerator):
    """Drafts of one generation, each as long as a head wants it.

    Source: the classes of transformers' generation/candidate_generator.py, which are not part of its public interface.
    """

    def __init__(self, assisted: "Assisted", **arguments: Any) -> None:
        super().__init__(assistant_model=assisted.draft, **arguments)
        self._assisted = assisted
        self.generation_config.assistant_confidence_threshold = 0.0  # its own rule; None would be the usual value
        self.num_assistant_tokens = assisted.new_round().max_tokens
        self._target_hidden: Tensor | None = None

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the text (1, T) with a draft behind it, and the logits that the draft was chosen by."""
        if self._assisted.reads_target and self._target_hidden is None:
            self._target_hidden = self._assisted.state_before(input_ids, self.assistant_kwargs.get("attention_mask"))
        self._round, self._tap = self._assisted.new_round(), Tap(self.assistant_model)
        with self._tap:
            return super().get_candidates(input_ids, **kwargs)

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Take in a verification: scores (1, drafted + 1, V), of which the first `num_matches` agreed."""
        num_drafted, num_matches = scores.shape[1] - 1, int(num_matches)
        self._assisted.rounds.append((num_drafted, num_matches))
        if self._assisted.reads_target:
            hidden = self._assisted.target_tap.hidden
            self._target_hidden = hidden[:, hidden.shape[1] - 1 - num_drafted + num_matches]

    def _prepare_generation_args(self, *arguments: Any) -> dict[str, Any]:
        return super()._prepare_generation_args(*arguments) | {"stopping_criteria": StoppingCriteriaList([_Enough(self._stops)])}

    def _stops(self, text: Tensor) -> bool:
        token, logits = text[:, -1], self._tap.logits[:, -1]
        known = dict(zip(("draft_prob", "max_prob", "entropy"), certainty(logits, token), strict=True))
        known |= {"hidden": self._tap.hidden[:, -1], "embedding": self.assistant_model.get_input_embeddings()(token)}
        if self._target_hidden is not None:
            known["target_hidden"] = self._target_hidden.to(token.device)
        return self._round.stops(known)


class _Enough(StoppingCriteria):
    """What transformers asks after every drafted token, beside the end of the text and the longest draft."""

    def __init__(self, stops: Callable[[Tensor], bool]) -> None:
        self._stops = stops

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), self._stops(input_ids), dtype=torch.bool, device=input_ids.device)


class Assisted:
    """A target whose assisted generation by one draft asks a head, until `remove()` or the end of a `with`.

    `rounds` are those of the last generation: how many tokens were drafted, and how many of them accepted.
    """

    rounds: list[tuple[int, int]]

    def __init__(self, target: PreTrainedModel, draft: PreTrainedModel, head: StandaloneHead, **bounds: float | None) -> None:
        """`bounds` are those of DraftRound.

        Raises:
            ValueError: hidden states of another size than the head reads.
        """
        self.target, self.draft, self.bounds, self.rounds = target, draft, bounds, []
        self.reads_target = "target_hidden" in head.inputs
        sizes = {"draft": (draft, head.config["hidden_size"])} | (
            {"target": (target, head.config["target_size"])} if self.reads_target else {}
        )
        for role, (model, size) in sizes.items():
            found = model.get_output_embeddings().weight.shape[1]
            if found != size:
                raise ValueError(
                    f"the head reads hidden states of size {size} of the {role}, but those of {model.name_or_path} have {found}; it was trained "
                    f"for {head.config[role].get('id', f'another {role}')}. Use that one, or train a head for this pair."
                )
        self.head = head.to(draft.device)
        self.target_tap = Tap(target)
        if self.reads_target:
            self.target_tap.__enter__()
        self._before = target._get_candidate_generator
        self._replaced = vars(target).get(REPLACED)  # another head's, if it assists, too
        setattr(target, REPLACED, self._candidates)

    def remove(self) -> None:
        """Give the target its own assisted generation back."""
        delattr(self.target, REPLACED)
        if self._replaced is not None:
            setattr(self.target, REPLACED, self._replaced)
        if self.reads_target:
            self.target_tap.__exit__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.remove()

    def new_round(self) -> DraftRound:
        """Return what ends the next draft."""
        return DraftRound(self.head, **self.bounds)

    @torch.no_grad()
    def state_before(self, text: Tensor, mask: Tensor | None) -> Tensor:
        """Return the target's state (1, H) that the last token of `text` (1, T) was decided from; before a response nobody has asked for it."""
        if text.shape[1] < 2:
            return torch.zeros(1, self.head.config["target_size"], device=text.device)
        known = {} if mask is None else {"attention_mask": mask[:, : text.shape[1] - 1].to(self.target.device)}
        self.target(input_ids=text[:, :-1].to(self.target.device), use_cache=False, **known)
        return self.target_tap.hidden[:, -1]

    def _candidates(self, assistant_model: PreTrainedModel | None = None, **arguments: Any) -> Any:
        """Stand in for the target's `_get_candidate_generator`; another draft than ours has nothing to do with the head."""
        others = {name: arguments.pop(name, None) for name in ("target_tokenizer", "assistant_tokenizer")}
        if assistant_model is not self.draft:
            return self._before(assistant_model=assistant_model, **arguments, **others)
        if all(other is not None for other in others.values()):
            raise ValueError("the head knows the draft's tokens, not another tokenizer's; leave out assistant_tokenizer=.")
        self.rounds = []
        return HeadCandidates(self, **arguments)
