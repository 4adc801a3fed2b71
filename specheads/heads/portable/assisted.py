"""A head in transformers' assisted generation: the head decides when a draft ends, and everything
else is left to transformers.

Streamers, stopping criteria, logits processors, sampling and outputs of `generate` therefore work
as usual. transformers does not pass the draft's hidden states to the criterion that ends a draft,
so hooks on the draft catch them. As in all assisted generation, one prompt is decoded at a time,
with a dynamic cache.
"""

import copy
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self, Unpack

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    CandidateGenerator,
)
from transformers.utils import ModelOutput

from specheads.heads.features import drafting_features
from specheads.heads.portable.standalone_head import Bounds, DraftRound, StandaloneHead

# A method of a target, not part of transformers' public interface.
REPLACED = "_get_candidate_generator"


@contextmanager
def _tapped(model: PreTrainedModel, temperature: float = 1.0) -> Iterator[dict[str, Tensor]]:
    """Yield a dict for the last `hidden` (1, T, H) that a model's output embedding reads, and the
    model's `logits` (1, T, V).

    A draft's temperature, which its config may name, divides these logits. Calls in other threads
    are ignored.
    """
    thread = threading.get_ident()
    last = dict[str, Tensor]()
    output_embedding = model.get_output_embeddings()

    def keep(module: torch.nn.Module, given: tuple[Tensor, ...], output: Any) -> None:
        if threading.get_ident() == thread and module is output_embedding:
            last["hidden"] = given[0]
        elif threading.get_ident() == thread:
            if temperature != 1:
                output.logits = output.logits / temperature
            last["logits"] = output.logits

    hooks = [module.register_forward_hook(keep) for module in (output_embedding, model)]
    try:
        yield last
    finally:
        for hook in hooks:
            hook.remove()


class HeadCandidates(AssistedCandidateGenerator):
    """The drafts of one generation; a head decides where each ends.

    The base class is not public in transformers.
    """

    num_assistant_tokens: int  # the base class sets it

    def __init__(self, assisted: "Assisted", **arguments: object) -> None:
        super().__init__(assistant_model=assisted.draft, **arguments)
        # transformers warns of a config next to settings of generation that are not in it.
        self.generation_config.use_cache = self.assistant_kwargs.pop("use_cache", True)
        self._assisted = assisted
        self._rounds = assisted.rounds
        # Switches off its rule; None would mean the default.
        self.generation_config.assistant_confidence_threshold = 0.0
        # The target looks for them, as it has the tokenizer.
        self.generation_config.stop_strings = None
        # Processors of logits and settings, once transformers has made them.
        self._prepared: tuple[LogitsProcessorList, GenerationConfig] | None = None

    def get_candidates(self, input_ids: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """Return the text (1, T) followed by a draft, and the logits that the draft was sampled
        from.
        """
        temperature = getattr(self.assistant_model.config, "draft_temperature", 1.0)
        self._round = self._assisted.new_round()
        with _tapped(self.assistant_model, temperature) as self._last:
            return super().get_candidates(input_ids, **kwargs)

    def update_candidate_strategy(
        self, input_ids: Tensor, scores: Tensor, num_matches: int
    ) -> None:
        """Take the result of a verification: scores (1, drafted + 1, V), and how many drafted
        tokens were accepted.
        """
        self._rounds.append((scores.shape[1] - 1, int(num_matches)))

    def _calculate_new_tokens(self, input_ids: Tensor) -> tuple[int, int]:
        # The length that transformers adapts is put back, as it goes into the draft's config when
        # generation ends.
        before = self.num_assistant_tokens
        self.num_assistant_tokens = self._assisted.new_round().max_tokens
        try:
            return super()._calculate_new_tokens(input_ids)
        finally:
            self.num_assistant_tokens = before

    def _prepare_generation_args(self, *arguments: object) -> dict[str, Any]:
        given = super()._prepare_generation_args(*arguments)
        # Lengths go into the config for the same reason as use_cache.
        config = copy.copy(given["generation_config"])
        config.min_new_tokens = given.pop("min_new_tokens")
        config.max_new_tokens = given.pop("max_new_tokens")
        return given | {
            "generation_config": config,
            "stopping_criteria": StoppingCriteriaList([self._stops]),
        }

    def _generate_candidates(self, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the text (1, T) followed by a draft, and the processed logits (1, drafted, V).

        transformers calls the draft's `generate` for every draft, which prepares the same things
        again and costs as much as two steps of a small draft. Here it does so for the first one;
        the steps of later ones are those of transformers' `_sample`.
        """
        model = self.assistant_model
        text = given[self.input_ids_key]
        inputs = dict(self.assistant_kwargs)
        bounds = given["generation_config"]
        scores = list[Tensor]()
        cache = inputs.get("past_key_values")
        masked = inputs.get("attention_mask") is not None and inputs.get("position_ids") is None
        if self._prepared is None or cache is None or masked or bounds.min_new_tokens:
            return super()._generate_candidates(given | {"custom_generate": self._first_draft})
        processors, config = self._prepared
        ends = config.eos_token_id
        end_tokens = {ends} if isinstance(ends, int) else set(ends or ())
        while len(scores) < bounds.max_new_tokens:
            unread = text.shape[1] - inputs["past_key_values"].get_seq_length()
            read = model.prepare_inputs_for_generation(text, next_sequence_length=unread, **inputs)
            with torch.no_grad():
                output = model(**read, return_dict=True)
            inputs = model._update_model_kwargs_for_generation(output, inputs)
            logits = output.logits[:, -1].to(text.device, torch.float32, copy=True)
            score = processors(text, logits)
            scores.append(score)
            if config.do_sample:
                token = score.softmax(-1).multinomial(1)
            else:
                token = score.argmax(-1, keepdim=True)
            text = torch.cat((text, token), dim=1)
            if self._stops(text).item() or token.item() in end_tokens:
                break
        return text, torch.stack(scores, dim=1)

    def _first_draft(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        generation_config: GenerationConfig,
        **given: object,
    ) -> Tensor | ModelOutput:
        """Return what transformers' `_sample` does.

        `generate` calls it with what it has prepared.
        """
        self._prepared = logits_processor, generation_config
        return model._sample(
            input_ids, logits_processor, generation_config=generation_config, **given
        )

    def _stops(self, text: Tensor, *others: object, **kwargs: object) -> Tensor:
        """Return whether the draft ends, (1,).

        Transformers asks after each token, besides its own criteria.
        """
        token = text[:, -1]
        logits = self._last["logits"][:, -1, : self._assisted.head.config.get("vocab_size")]
        embedding = self.assistant_model.get_input_embeddings()
        features = drafting_features(
            self._assisted.head.inputs,
            logits,
            token.to(logits.device),
            self._last["hidden"][:, -1],
            lambda ids: embedding(ids.to(embedding.weight.device)),
        )
        return torch.tensor([self._round.stops(features)], device=text.device)


class Assisted:
    """A target whose assisted generation by one draft uses a head, until `remove()` or the end of a
    `with`.

    `rounds` belong to the generation that began last: the numbers of drafted and of accepted
    tokens. Where several objects serve one draft, the latest is used. Raises ValueError for
    `bounds` of bounds_of or models that do not fit the head.
    """

    rounds: list[tuple[int, int]]

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel,
        head: StandaloneHead,
        **bounds: Unpack[Bounds],
    ) -> None:
        self.target = target
        self.draft = draft
        self.bounds = bounds
        self.rounds = []
        self.is_removed = False
        self._num_generations = 0
        _check(target, draft, head)
        device = draft.get_input_embeddings().weight.device
        # The original may serve another draft elsewhere.
        same = head.readout.weight.device == device
        self.head = head if same else copy.deepcopy(head).to(device)
        self.new_round()
        self.had = vars(target).get(REPLACED)
        self._before = getattr(target, REPLACED)
        setattr(target, REPLACED, self.generator)

    def remove(self) -> None:
        """Restore the target's original assisted generation, once no later object serves it."""
        self.is_removed = True
        while getattr(latest := self._latest(), "is_removed", False):
            if latest.had is None:
                delattr(self.target, REPLACED)
            else:
                setattr(self.target, REPLACED, latest.had)

    def _latest(self) -> Any:
        """Return the object that serves the target now, of this file or a copy."""
        return getattr(vars(self.target).get(REPLACED), "__self__", None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self.remove()
        if kind is None and not self._num_generations:
            warnings.warn(
                "the head was never used: the target generated nothing with the head's draft as"
                " assistant_model=.",
                stacklevel=2,
            )

    def new_round(self) -> DraftRound:
        return DraftRound(self.head, **self.bounds)

    def generator(
        self,
        assistant_model: PreTrainedModel | None = None,
        target_tokenizer: object = None,
        assistant_tokenizer: object = None,
        **arguments: object,
    ) -> CandidateGenerator:
        """Return the generator of drafts in place of the target's method: the head's for its draft,
        or else the earlier one.
        """
        if self.is_removed or assistant_model is not self.draft:
            return self._before(
                assistant_model=assistant_model,
                target_tokenizer=target_tokenizer,
                assistant_tokenizer=assistant_tokenizer,
                **arguments,
            )
        if target_tokenizer is not None and assistant_tokenizer is not None:
            raise ValueError(
                "the head reads the draft's tokens, so draft and target must share a tokenizer;"
                " leave out assistant_tokenizer=."
            )
        self.rounds = []
        self._num_generations += 1
        return HeadCandidates(self, **arguments)


def _check(target: PreTrainedModel, draft: PreTrainedModel, head: StandaloneHead) -> None:
    """Raise ValueError for models that do not fit the head, or for vocabularies of different
    sizes.
    """
    size = head.config["hidden_size"]
    actual = draft.get_output_embeddings().weight.shape[1]
    of_draft, of_target = (model.config.get_text_config().vocab_size for model in (draft, target))
    problem = None
    if actual != size:
        trained = (head.config.get("draft") or {}).get("id", "another draft")
        problem = (
            f"the head reads hidden states of size {size} of {trained}, but those of"
            f" {draft.name_or_path} have {actual}; use that draft, or train a head for this one"
        )
    elif not hasattr(target, REPLACED):
        problem = f"{type(target).__name__} has no {REPLACED}; use transformers 5.17 to 5.23"
    elif getattr(draft.config, "draft_vocab_size", None) is not None:
        problem = (
            f"transformers takes the outputs of {draft.name_or_path}, which are of some tokens, for"
            " all tokens; decode with specheads"
        )
    elif of_draft != of_target:
        problem = (
            f"the draft has {of_draft} logits and the target {of_target}; if they share a"
            " tokenizer, model.resize_token_embeddings(len(tokenizer)) gives both the same number"
        )
    if problem:
        raise ValueError(f"{problem}.")
