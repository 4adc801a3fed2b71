"""A draft and a target that fit together: load them, check that they do, and turn text into token
ids.
"""

import hashlib
import json
import logging
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads.errors import UserError, is_count
from specheads.pair.config import INSTRUCTION, PairConfig, pair_config
from specheads.pair.draft_vocabulary import borrow_embedding, borrows_embedding, kept_tokens
from specheads.pair.eagle_formats import is_feature_draft, read_feature_draft
from specheads.pair.feature_draft import FeatureDraft, FeatureLM
from specheads.pair.initial_draft import NewDraft
from specheads.pair.language_model import (
    INPUT_BITS,
    LanguageModel,
    chosen_dtype,
    has_adapters,
    load_model,
    load_tokenizer,
    round_to_form,
    stored_config,
    tokenizer_of,
    weightless_model,
)
from specheads.pair.quantization import is_quantized
from specheads.pair.revisions import (
    commit_of,
    draft_temperature,
    resolve,
    revision_of,
    set_draft_temperature,
)
from specheads.pair.source import ModelSource
from specheads.settings import shown
from specheads.storage.files import without_home

Message = Mapping[str, object]  # of a conversation: its role, content and the like

logger = logging.getLogger(__name__)

_LOADING = threading.RLock()

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)
_TEXT = (  # to which both tokenizers must give the same ids
    "def f(x):\n    return x ** 2  # \u00e9, \u4e2d, 1234"
)
# What `generate` does to outputs and no warp does, and the value besides None with which it does
# nothing.
_UNDONE: dict[str, object] = {
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "typical_p": 1,
    "guidance_scale": 1,
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "penalty_alpha": 0,
    "bad_words_ids": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "sequence_bias": (),
    "stop_strings": (),
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "top_h": None,
    "dola_layers": None,
    "watermarking_config": None,
}


def checked_ids(ids: Any) -> list[int]:
    """Return token ids as integers.

    Raises TypeError for numbers with a point, true or false, bytes, text and the like.
    """
    given = ids.flatten().tolist() if isinstance(ids, Tensor) else list(ids)
    if isinstance(ids, bytes | bytearray) or any(isinstance(each, bool) for each in given):
        raise TypeError(f"{ids!r} are no token ids")
    return list(map(index, given))


@dataclass(repr=False)
class Pair:
    """Target, draft and their tokenizer, which are ordinary transformers objects, with their ids
    and revisions.
    """

    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    target_id: str
    target_revision: str
    draft_id: str
    draft_revision: str
    chat: bool | None = (
        None  # whether instructions go through the chat template; None: if there is one
    )
    instruction_format: str | None = (
        None  # how instructions are wrapped instead, "[INST] {instruction} [/INST]"
    )
    known_to_draft: Tensor | None = None  # (V,) bool, the tokens that the draft knows; None: all
    # What weights of 8 and 5 bits are multiplied with on a CPU: one of INPUT_BITS
    activations: str = "float32"
    draft_activations: str = "int16"
    # More arguments of the chat template
    chat_template_kwargs: Mapping[str, object] = field(default_factory=dict)
    # For templates that write today's date into prompts
    loaded_at: datetime = field(default_factory=datetime.now)
    # Lines of the log that are not repeated
    said: set[str] = field(default_factory=set, repr=False, compare=False)

    def __repr__(self) -> str:
        return (
            f"Pair({self.name}: target {self.target_id}, draft {self.draft_id}, {self.vocab_size:,}"
            " tokens)"
        )

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens that the tokenizer knows and the target has logits for.

        Embeddings may be padded beyond it.
        """
        return _num_tokens(self.tokenizer, self.target)

    @cached_property
    def target_lm(self) -> LanguageModel:
        """The target in two steps, over the vocabulary of the tokenizer."""
        lm = LanguageModel(self.target, self.vocab_size)
        lm.input_bits = INPUT_BITS[self.activations]
        return lm

    @cached_property
    def draft_lm(self) -> LanguageModel:
        """The draft in two steps, over the vocabulary of the tokenizer, at its own temperature."""
        lm = _draft_lm(self.draft, self.vocab_size, self.known_to_draft)
        lm.input_bits = INPUT_BITS[self.draft_activations]
        return lm

    @property
    def window(self) -> int:
        """Number of positions that both models were made for."""
        return min(self.target_lm.window, self.draft_lm.window)

    @property
    def stop_tokens(self) -> frozenset[int]:
        """End-of-sequence tokens of the target's generation config, or else of its config or
        tokenizer.

        Raises UserError for what are no token ids.
        """
        named = {
            "generation_config.json": self.target.generation_config.eos_token_id,
            "config.json": self.target.config.eos_token_id,
            "the tokenizer": self.tokenizer.eos_token_id,
        }
        for source, value in named.items():
            if value is not None:
                return frozenset(_end_tokens(value, f"{source} of {self.target_id}"))
        return frozenset()

    @cached_property
    def appends_end(self) -> bool:
        """Whether the tokenizer ends every text with an end token; prompts are without it."""
        ids = self.tokenizer("a", add_special_tokens=True)["input_ids"]
        plain = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        if ids[-1:] == plain[-1:] or not ids:
            return False
        return ids[-1] in (*self.stop_tokens, self.tokenizer.eos_token_id)

    @property
    def chats(self) -> bool:
        """Whether instructions are wrapped as a user's message.

        Otherwise the models continue the text.
        """
        if self.instruction_format is not None:
            return True
        return bool(self.tokenizer.chat_template) if self.chat is None else self.chat

    @property
    def reads_chats(self) -> bool:
        """Whether instructions, and the conversations of a data set, go through the chat
        template.
        """
        return self.instruction_format is None and self.chats

    @property
    def chat_template(self) -> str | None:
        """The tokenizer's chat template, with the date of loading for today's: a run may last until
        another day.
        """
        template = self.tokenizer.chat_template
        if not isinstance(template, str) or "date_string" in self.chat_template_kwargs:
            return template
        return re.sub(
            r"strftime_now\(\s*(['\"])(.*?)\1\s*\)",
            lambda call: repr(self.loaded_at.strftime(call[2])),
            template,
        )

    def check_merged(self) -> None:
        """Raise UserError for adapters, which the models' revisions do not name: data and heads
        would be taken for those of the models without them.
        """
        for role in ("target", "draft"):
            if has_adapters(getattr(self, role)):
                raise UserError(
                    f"the {role} {getattr(self, f'{role}_id')} has PEFT adapters; merge them"
                    " (merge_and_unload), save the model, and load that."
                )

    def origin(self, role: str) -> dict[str, str]:
        """Return id and revision of the draft or the target, and its commit if it is of the hub."""
        commit = commit_of(getattr(self, role).config)
        origin = {"id": getattr(self, f"{role}_id"), "revision": getattr(self, f"{role}_revision")}
        return origin if commit is None else origin | {"commit": commit}

    def encode(self, prompt: str | Sequence[dict[str, str]] | Sequence[int] | Tensor) -> Tensor:
        """Return the ids (T,) long of a prompt: a string, chat messages or ids.

        Raises UserError unless they fit the target.
        """
        if isinstance(prompt, Tensor) and (
            prompt.ndim not in (1, 2) or (prompt.ndim == 2 and len(prompt) != 1)
        ):
            raise UserError(
                f"the prompt has shape {tuple(prompt.shape)}, but one prompt is decoded at a time;"
                " give ids of shape (T,)."
            )
        if isinstance(prompt, str):
            ids = self._ids(prompt) if prompt else []
        elif (
            isinstance(prompt, Sequence)
            and len(prompt)
            and all(isinstance(each, Mapping) for each in prompt)
        ):
            ids = self._ids(self.render(cast(Sequence[Message], prompt)), add_special_tokens=False)
        else:
            try:
                ids = checked_ids(
                    prompt if isinstance(prompt, Sequence | Tensor | np.ndarray) else None
                )
            except TypeError:
                raise UserError(
                    f"the prompt {prompt!r:.200} must be a text, a list of token ids, which are"
                    " integers, or a list of chat messages."
                ) from None
        if not ids:
            raise UserError("the prompt is empty; give at least one token to continue from.")
        if len(ids) >= (most := self.target_lm.window):
            raise UserError(
                f"the prompt has {len(ids)} tokens, but the target's context is {most}; shorten it."
            )
        wrong = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if wrong is not None:
            raise UserError(
                f"prompt id {wrong} is outside the vocabulary of {self.vocab_size} tokens; encode"
                " with pair.tokenizer."
            )
        return torch.tensor(ids, dtype=torch.long)

    def encode_instruction(self, text: str) -> list[int]:
        """Return the ids of one user instruction, wrapped as a message if this pair chats and as
        plain text if not.
        """
        if self.instruction_format is not None:
            return self._ids(self.instruction_format.replace(INSTRUCTION, text.strip()))
        if not self.chats:
            return self._ids(text)
        return self._ids(self.render([{"role": "user", "content": text}]), add_special_tokens=False)

    def text_before_instruction(self) -> str | None:
        """Return what precedes a user's instruction in this pair's format; None where instructions
        are plain texts.
        """
        if self.instruction_format is not None:
            return self.instruction_format.partition(INSTRUCTION)[0]
        if not self.chats:
            return None
        return self.render([{"role": "user", "content": INSTRUCTION}]).partition(INSTRUCTION)[0]

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] | None = None
    ) -> list[int]:
        """Return the ids of a conversation, through the chat template.

        Raises UserError for a pair that uses none.
        """
        if not self.reads_chats:
            raise UserError(
                f"{self.target_id} reads no conversations without a chat template, or with"
                " model.instruction_format or model.chat=false; take one text of them, for example"
                " 'data.template=\"{messages[0][content]}\"'."
            )
        return self._ids(self.render(messages, tools), add_special_tokens=False)

    def encoding_fingerprint(self) -> str:
        """Return a hash of all that decides how text becomes ids: vocabulary, merges, special
        tokens, instruction format.
        """
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        rules = (
            backend.to_str()
            if backend is not None
            else json.dumps(sorted(self.tokenizer.get_vocab().items()))
        )
        template = self.instruction_format or (None if self.chat is False else self.chat_template)
        keys = dict(self.chat_template_kwargs) if self.reads_chats else {}
        given = json.dumps(keys, sort_keys=True) if keys else ""
        given += " without end" if self.appends_end else ""
        return hashlib.sha256(f"{rules} {template} {self.chat}{given}".encode()).hexdigest()[:16]

    def _ids(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return ids with one begin token, and without an end that a tokenizer adds.

        Raises UserError for an unknown token.
        """
        # Says nothing of lengths
        ids = self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)[
            "input_ids"
        ]
        ids = ids[:-1] if add_special_tokens and self.appends_end else ids
        if (last := max(ids, default=0)) >= self.vocab_size:
            token = self.tokenizer.decode([last])
            raise UserError(
                f"a prompt holds the token {token!r}, which {self.target_id} does not know; take it"
                " out."
            )
        begin = self.tokenizer.bos_token_id
        return ids[1:] if begin is not None and ids[:2] == [begin, begin] else ids

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] | None = None
    ) -> str:
        """Return chat messages as text with the begin token.

        Raises UserError if the template is missing or refuses them.
        """
        if not self.tokenizer.chat_template:
            raise UserError(
                f"the tokenizer of {self.target_id} has no chat template, which chat messages need;"
                " give a string, or set model.chat=false."
            )
        given = dict(self.chat_template_kwargs) | ({"tools": list(tools)} if tools else {})
        if (template := self.chat_template) != self.tokenizer.chat_template:
            given["chat_template"] = template
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False, **given
            )
        # The others are of templates that expect other values.
        except (
            TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise UserError(
                f"the chat template of {self.target_id} refuses the messages of {roles} ({error});"
                " give others."
            ) from error

    def decode(self, tokens: Sequence[int] | Tensor) -> str:
        """Return the text of `tokens` without special tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def load_pair(
    name: str | None = None,
    *,
    only_draft: bool = False,
    new_draft: NewDraft | None = None,
    **keys: object,
) -> Pair:
    """Load a pair by config name (`"mini"`), with `keys` of PairConfig in place of those, or by
    `draft=` and `target=`.

    Args:
        only_draft: leave the target without weights, for a process that only needs its shape.
        new_draft: makes the draft of layers of the target, in place of one that is loaded.

    Raises UserError for an unknown name or key, a folder or id that cannot be loaded, models that
    do not fit together. Threads that load pairs wait for each other: transformers changes the whole
    process while it loads a model.
    """
    with _LOADING:
        return _load_pair(pair_config(name, **keys), only_draft, new_draft)


def _load_pair(config: PairConfig, only_draft: bool, new_draft: NewDraft | None) -> Pair:
    if not config.target or not (config.draft or new_draft):
        raise UserError(
            f"draft={config.draft or None} and target={config.target or None}: a pair needs both;"
            " give folders or hub ids."
        )
    if new_draft and (config.quantization or config.draft_quantization):
        raise UserError(
            f"the draft '{new_draft.name}' is made of a target whose weights are not quantized;"
            " leave out model.quantization and model.draft_quantization."
        )
    if new_draft and config.draft_layers is not None:
        raise UserError(
            f"model.draft_layers={shown(config.draft_layers)} is of a draft that is loaded, and"
            f" '{new_draft.name}' is made; leave it out, or use eagle3.target_layers=."
        )
    config.check_available(draft=new_draft is None)
    tokenizer, known = _tokenizer(config, new_draft)
    draft, target = _models(config, only_draft, new_draft)
    size = _num_tokens(tokenizer, target)
    if (
        known is None
        and kept_tokens(draft) is None
        and (of_draft := _num_tokens(tokenizer, draft)) < size
    ):
        known = torch.arange(size) < of_draft
    if known is not None:
        known = known[:size]
        _fit_to_vocabulary(draft, known)
    draft_id = new_draft.name if new_draft else str(config.draft)
    if config.draft_temperature is not None:
        set_draft_temperature(draft, config.draft_temperature)
    sources = {role: ModelSource.of(config, role) for role in ("target", "draft")}
    stored = {role: source.rounded_form or source.quantization for role, source in sources.items()}
    if config.activations == "int8":  # the same for all weights, of which it makes another model
        stored["target"] = "-".join(filter(None, (stored["target"], "int8-activations")))
    pair = Pair(
        target=target,
        draft=draft,
        tokenizer=tokenizer,
        name=config.name or f"{Path(draft_id).name}-to-{Path(config.target).name}",
        target_id=without_home(str(config.target)),
        target_revision=revision_of(target.config, config.target, stored["target"]),
        draft_id=without_home(draft_id),
        draft_revision=(
            f"{draft_id}, not saved"
            if new_draft
            else revision_of(draft.config, draft_id, stored["draft"], config.draft_layers)
        ),
        chat=config.chat,
        instruction_format=config.instruction_format,
        known_to_draft=known,
        activations=config.activations,
        draft_activations=config.draft_activations,
        chat_template_kwargs=config.chat_template_kwargs,
    )
    _check_vocabulary(pair)
    _check_chat_template(pair)
    for remark in remarks(pair):
        logger.warning("%s", remark)
    if not only_draft:
        pair.target_lm.check()
    pair.draft_lm.check()
    return pair


def remarks(pair: Pair) -> Iterator[str]:
    """Yield warnings: of what the target's generation config asks for in vain, and of a tokenizer
    with another end of texts.
    """
    config = getattr(pair.target, "generation_config", None)
    ends = pair.stop_tokens
    asked = list[str]()
    for name, off in _UNDONE.items():
        if getattr(config, name, None) not in (None, off, [], {}):
            asked.append(name)
    if asked:
        yield (
            f"the generation config of {pair.target_id} has {', '.join(asked)}, which is not done"
            " here: outputs follow the target's probabilities under the warp alone"
        )
    if (end := pair.tokenizer.eos_token_id) is not None and end not in ends:
        yield (
            f"the tokenizer of {pair.target_id} ends texts with token {end}"
            f" ({pair.tokenizer.eos_token}), but responses end with {sorted(ends)}, as its"
            f" generation config says; if they do not end in time, add {end} to its eos_token_id"
        )
    if pair.appends_end:
        yield (
            f"the tokenizer of {pair.target_id} appends an end token to every text; prompts go"
            " without it"
        )


def _end_tokens(value: object, source: str) -> list[int]:
    """Return the end tokens that a config names as `eos_token_id`: an id, or a list of ids.

    Raises UserError for anything else.
    """
    ids = list(value) if isinstance(value, list | tuple) else [value]
    if not all(is_count(each) for each in ids):
        raise UserError(
            f"{source}: eos_token_id={value!r} must be a token id, an integer from 0, or a list of"
            " token ids; correct it there."
        )
    return cast(list[int], ids)


def _num_tokens(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> int:
    """Return the number of tokens, without added ones at the end that a model was not resized for,
    often a pad token.
    """
    tokens = tokenizer.get_vocab().values()
    size = model.get_output_embeddings().weight.shape[0]
    beyond = {token for token in tokens if token >= size}
    return (
        size
        if beyond and beyond <= set(getattr(tokenizer, "get_added_vocab", dict)().values())
        else max(tokens) + 1
    )


def _tokenizer(
    config: PairConfig, new_draft: NewDraft | None
) -> tuple[PreTrainedTokenizerBase, Tensor | None]:
    """Return the pair's tokenizer, and which tokens the draft knows, None for all.

    Raises UserError if models have others.
    """
    location = config.tokenizer or config.target
    tokenizer = tokenizer_of(config)

    def compared(role: str) -> Tensor | None:
        source = ModelSource.of(config, role)
        try:
            theirs = load_tokenizer(source.location, source.revision, source.trust_remote_code)
        except UserError:
            if config.tokenizer is None or _has_tokenizer(source.location):
                raise
            return None  # weights alone
        return known_tokens(theirs, tokenizer, str(source.location), str(location))

    if compared("target") is not None:
        raise UserError(
            f"the tokenizer {location} has other tokens than the target {config.target}; leave"
            " model.tokenizer out."
        )
    # One that reads the target has its vocabulary, which is checked when it is loaded.
    has_other = not new_draft and not is_feature_draft(config.draft, config.draft_revision)
    known = compared("draft") if has_other else None
    if known is not None:
        lacking = tokenizer.convert_ids_to_tokens((~known).nonzero().squeeze(1).tolist())
        logger.warning(
            "the draft %s does not know %d of %d tokens (%s), so never proposes them; specheads"
            " probe says how likely they are",
            *(config.draft, len(lacking), len(known), ", ".join(map(str, lacking[:3]))),
        )
    return tokenizer, known


def _has_tokenizer(location: str | Path) -> bool:
    """Whether a folder holds a tokenizer, one that can be read or not."""
    folder = Path(resolve(location))
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _models(
    config: PairConfig, only_draft: bool, new_draft: NewDraft | None
) -> tuple[PreTrainedModel, PreTrainedModel]:
    # The draft first: a target that may be spread over devices takes what is left.
    source = ModelSource.of(config, "target")
    draft = None if new_draft else _draft_model(config, source)
    target = weightless_model(source) if only_draft else load_model(source)
    if config.device_map and source.device.startswith("cuda"):
        _check_spread(getattr(target, "hf_device_map", {}), str(config.target))
    if new_draft:
        return new_draft.make(target).requires_grad_(False).eval(), target
    if draft is not None and borrows_embedding(draft):
        borrow_embedding(draft, target, source.location, source.revision)
    return draft, target


def _draft_model(config: PairConfig, target: ModelSource) -> PreTrainedModel:
    """Return a draft for inference; one that reads its target runs in the target's type.

    Raises UserError if it cannot be loaded.
    """
    source = ModelSource.of(config, "draft")
    location = source.location
    layers = config.draft_layers
    if not is_feature_draft(location, source.revision):
        if layers is not None:
            raise UserError(
                f"model.draft_layers={shown(layers)}: the draft {location} reads no layers of its"
                " target; leave it out, or give an EAGLE-3 draft."
            )
        return load_model(source)
    if source.quantization is not None and source.rounded_form is None:
        raise UserError(
            f"draft_quantization={source.quantization}: the draft {location} reads its target, and"
            " such a draft is quantized on a CPU alone, to int8 or int4; leave"
            " model.draft_quantization out."
        )
    of_target = stored_config(target)
    dtype = chosen_dtype(target)
    if dtype == "auto":
        dtype = of_target.get_text_config().dtype
    model = read_feature_draft(location, of_target, source.revision, dtype, layers)
    round_to_form(model, source)
    return cast(PreTrainedModel, model.to(source.device))


def _draft_lm(
    model: PreTrainedModel, vocab_size: int, known: Tensor | None = None
) -> LanguageModel:
    temperature = draft_temperature(model.config)
    if isinstance(model, FeatureDraft):
        return FeatureLM(model, vocab_size, temperature)
    return LanguageModel(model, vocab_size, temperature, known)


def load_draft(
    location: str | Path, pair: Pair, dtype: Literal["auto"] | torch.dtype = "auto"
) -> LanguageModel:
    """Return another draft for a pair, on its draft's device.

    Raises UserError if it cannot be loaded or does not fit.
    """
    device = pair.draft_lm.device
    if is_feature_draft(location):
        read = read_feature_draft(location, pair.target.config, dtype=pair.target.dtype)
        model = cast(PreTrainedModel, read.to(device))
    else:
        model = load_model(ModelSource(location, dtype=dtype, device=str(device)))
    if borrows_embedding(model):
        borrow_embedding(model, pair.target)
    _check_vocabulary(replace(pair, draft=model))
    return _draft_lm(model, pair.vocab_size)


def _check_spread(device_map: Mapping[str, object], target_id: str) -> None:
    """Log what it costs if `device_map` spreads the target over devices.

    Raises UserError for parts outside the GPUs.
    """
    outside = [name for name, place in device_map.items() if str(place) in ("cpu", "disk")]
    if outside:
        raise UserError(
            f"the target {target_id} does not fit: {len(outside)} of {len(device_map)} parts,"
            f" {outside[0]!r} first, would lie outside the GPUs. Use more or larger GPUs,"
            " model.dtype=bfloat16, or move the draft with model.device=cuda:1."
        )
    devices = sorted({str(place) for place in device_map.values()})
    if len(devices) > 1:
        logger.warning(
            "the target %s is spread over %d devices (%s): it runs without compilation, with one"
            " device busy at a time. Faster are a target that fits one of them"
            " (model.quantization=fp8 model.device_map=null) and vLLM.",
            *(target_id, len(devices), ", ".join(devices)),
        )


def _check_chat_template(pair: Pair) -> None:
    """Raise UserError for arguments that the chat template does not read.

    Warn of one that writes the date into prompts.
    """
    template = str(pair.tokenizer.chat_template or "")
    for name, value in pair.chat_template_kwargs.items():
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise UserError(
                f"model.chat_template_kwargs={{{name}: {value}}}: the chat template of"
                f" {pair.target_id} reads no {name}; correct the name, or leave it out, of a config"
                f" with '~model.chat_template_kwargs.{name}'."
            )
    if pair.reads_chats and pair.chat_template != pair.tokenizer.chat_template:
        keep = (
            "; model.chat_template_kwargs='{date_string: \"26 Jul 2024\"}' keeps one"
            if "date_string" in template
            else ""
        )
        logger.warning(
            "the chat template of %s writes today's date, so another day gives a different"
            " data set%s",
            pair.target_id,
            keep,
        )


def _check_vocabulary(pair: Pair) -> None:
    """Raise UserError unless both models have a logit for every token of the tokenizer, or a draft
    says which it has.
    """
    for role, model in (("draft", pair.draft), ("target", pair.target)):
        size = model.get_output_embeddings().weight.shape[0]
        kept = kept_tokens(model)
        if kept is not None and role == "draft":
            fits = kept[-1] < pair.vocab_size
            has = f"logits for token {kept[-1]}"
        else:
            fits = size >= pair.vocab_size
            has = f"{size} logits"
        if not fits:
            raise UserError(
                f"the {role} has {has}, but the tokenizer knows {pair.vocab_size} tokens; choose"
                " models with the same tokenizer."
            )


def _ids_of_text(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return list(tokenizer(_TEXT, add_special_tokens=False)["input_ids"])


def known_tokens(
    draft: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase, draft_id: str, target_id: str
) -> Tensor | None:
    """Return which tokens of the target's vocabulary the draft knows, (V,) bool.

    None where it knows all.

    A draft never proposes an added token that it lacks. Raises UserError for tokenizers that differ
    in more than added tokens.
    """
    of_draft = draft.get_vocab()
    of_target = target.get_vocab()
    common = of_draft.keys() & of_target.keys()
    moved = [token for token in common if of_draft[token] != of_target[token]]
    single = of_draft.keys() ^ of_target.keys()
    added = set[str]()
    for tokenizer in (draft, target):
        added.update(getattr(tokenizer, "get_added_vocab", dict)())
    example = ""
    if differing := [*sorted(moved, key=str), *sorted(single - added, key=str)]:
        example = f"{len(differing)} tokens differ, for example {differing[0]!r}"
    elif _ids_of_text(draft) != _ids_of_text(target):
        example = "the same text gets other ids"
    if example:
        raise UserError(
            f"draft {draft_id} and target {target_id} have different tokenizers ({example});"
            " speculative decoding needs a draft with the target's own tokenizer, which may lack"
            " added tokens of it, or have others."
        )
    known = torch.zeros(max(of_target.values()) + 1, dtype=torch.bool)
    known[[place for token, place in of_target.items() if token in of_draft]] = True
    return None if known.all() or not single else known


@torch.no_grad()
def _fit_to_vocabulary(draft: PreTrainedModel, known: Tensor) -> None:
    """Give a draft in memory embeddings of all tokens of the target: the mean of the known ones
    for those not `known` (V,) bool.
    """
    if borrows_embedding(draft):
        return  # the target's own embeddings, which must not change
    if draft.get_input_embeddings().weight.shape[0] < len(known):
        if is_quantized(draft):
            raise UserError(
                f"the quantized draft has {draft.get_input_embeddings().weight.shape[0]}"
                f" embeddings, and the target knows {len(known)} tokens; use it without"
                " quantization."
            )
        output = draft.get_output_embeddings()
        draft.resize_token_embeddings(len(known), mean_resizing=False)
        if kept_tokens(draft) is not None:  # an output over some tokens does not change
            draft.set_output_embeddings(output)
        draft.requires_grad_(False)
    weight = draft.get_input_embeddings().weight
    place = known.to(weight.device)
    weight[: len(known)][~place] = weight[: len(known)][place].float().mean(dim=0).to(weight.dtype)
