"""A draft and a target that fit together: load them, check that they do, and name the point where heads listen.

The *tap* is the input of a model's output embedding: what `model.base_model` returns. Training and decoding both read it
through `LanguageModel`, so a head sees the same vector in both.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import extract_commit_hash

from specheads.errors import UserError
from specheads.sampling import at_least_float32
from specheads.synthetic import is_synthetic, synthetic_model, synthetic_tokenizer

EMBEDDED = "embedded:"  # models that ship inside the package, `embedded:nano/target`
INSTRUCTION = "{instruction}"  # where an instruction format takes the text


class LanguageModel:
    """A causal language model as two steps: tokens -> hidden states (the tap) -> logits over the shared vocabulary.

    A model may be spread over devices; what comes in and goes out is on that of its input embedding.
    """

    def __init__(self, model: PreTrainedModel, vocab_size: int | None = None) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        self.output_embedding = model.get_output_embeddings()
        self.vocab_size = vocab_size or self.output_embedding.weight.shape[0]
        self.softcap = getattr(self.config, "final_logit_softcapping", None)

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @property
    def hidden_size(self) -> int:
        return self.output_embedding.weight.shape[1]

    @property
    def window(self) -> int:
        """Positions the model was made for."""
        return getattr(self.config, "max_position_embeddings", None) or getattr(self.config, "seq_length", None) or 2**31

    @property
    def probs_dtype(self) -> torch.dtype:
        """What probabilities are computed in, float32 or wider."""
        return torch.promote_types(self.output_embedding.weight.dtype, torch.float32)

    def hidden_states(self, tokens: Tensor, **kwargs: Any) -> Tensor:
        """Return the hidden states (B, T, H) that the output embedding reads, for `tokens` (B, T)."""
        return self.model.base_model(input_ids=tokens, **kwargs).last_hidden_state.to(self.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (..., V) of `hidden` (..., H), float32 or wider; logits of padded vocabulary entries are left out."""
        hidden = hidden.to(self.output_embedding.weight.device)
        logits = at_least_float32(self.output_embedding(hidden)[..., : self.vocab_size]).to(self.device)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input embeddings (..., E) of `tokens` (...)."""
        return self.model.get_input_embeddings()(tokens)

    @torch.no_grad()
    def check(self) -> None:
        """Raise UserError unless `logits(hidden_states(x))` is what the whole model computes (for example a scaled output)."""
        tokens = torch.arange(4, device=self.device)[None] % self.vocab_size
        expected = self.model(input_ids=tokens, use_cache=False).logits[..., : self.vocab_size].float()
        found = self.logits(self.hidden_states(tokens, use_cache=False)).float().to(expected.device)
        if not torch.allclose(found, expected, atol=1e-2 * expected.abs().max().item(), rtol=0, equal_nan=True):
            raise UserError(
                f"{type(self.model).__name__} changes its logits after the output embedding in a way that is not known here "
                f"(largest difference {(found - expected).abs().max():.3g}); use a model of a supported family (Llama, Qwen2, "
                "Qwen3, Gemma 2, OPT, BLOOM, GPT-NeoX)."
            )


@dataclass
class Pair:
    """Target, draft and their tokenizer: ordinary transformers objects, plus who they are."""

    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    target_id: str
    target_revision: str
    draft_id: str
    draft_revision: str
    chat: bool | None = None  # whether instructions go through the chat template; None: if the tokenizer has one
    instruction_format: str | None = None  # how instructions are wrapped instead, "[INST] {instruction} [/INST]"

    @cached_property
    def vocab_size(self) -> int:
        """Tokens that the tokenizer knows; embeddings may be padded beyond it."""
        return max(self.tokenizer.get_vocab().values()) + 1

    @cached_property
    def target_lm(self) -> LanguageModel:
        return LanguageModel(self.target, self.vocab_size)

    @cached_property
    def draft_lm(self) -> LanguageModel:
        return LanguageModel(self.draft, self.vocab_size)

    @property
    def window(self) -> int:
        """Positions that both models reach."""
        return min(self.target_lm.window, self.draft_lm.window)

    @property
    def stop_tokens(self) -> frozenset[int]:
        """End-of-sequence tokens, as the target's generation config names them (an integer or a list)."""
        stop = self.target.generation_config.eos_token_id
        stop = self.target.config.eos_token_id if stop is None else stop
        stop = self.tokenizer.eos_token_id if stop is None else stop
        return frozenset([] if stop is None else [stop] if isinstance(stop, int) else stop)

    @property
    def chats(self) -> bool:
        """Whether instructions are wrapped as a user's message; a pair that does not chat goes on with the text."""
        if self.instruction_format is not None:
            return True
        return bool(self.tokenizer.chat_template) if self.chat is None else self.chat

    def encode(self, prompt: str | Sequence[dict[str, str]] | Sequence[int] | Tensor) -> Tensor:
        """Return prompt ids (T,) long of a string, chat messages or ids; raises UserError for an empty or overlong prompt."""
        if isinstance(prompt, Tensor) and (prompt.ndim > 2 or (prompt.ndim == 2 and len(prompt) != 1)):
            raise UserError(
                f"the prompt has shape {tuple(prompt.shape)}; one prompt at a time is decoded, so give ids of shape (T,)."
            )
        if isinstance(prompt, str):
            ids = self._ids(prompt) if prompt else []
        elif isinstance(prompt, Tensor):
            ids = prompt.flatten().tolist()
        elif len(prompt) and isinstance(prompt[0], dict):
            ids = self._ids(self._render(prompt), add_special_tokens=False)
        else:
            ids = [int(token) for token in prompt]
        if not ids:
            raise UserError("the prompt is empty; give at least one token to continue from.")
        if len(ids) >= self.window:
            raise UserError(f"the prompt has {len(ids)} tokens, but the pair's context is {self.window}; shorten it.")
        wrong = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if wrong is not None:
            raise UserError(
                f"prompt id {wrong} is outside the vocabulary of {self.vocab_size} tokens; encode with pair.tokenizer."
            )
        return torch.tensor(ids, dtype=torch.long)

    def encode_instruction(self, text: str) -> list[int]:
        """Return the ids of one user instruction, as a message where this pair chats and as plain text elsewhere."""
        if self.instruction_format is not None:
            return self._ids(self.instruction_format.replace(INSTRUCTION, text.strip()))
        if not self.chats:
            return self._ids(text)
        return self._ids(self._render([{"role": "user", "content": text}]), add_special_tokens=False)

    def encoding_fingerprint(self) -> str:
        """Return what identifies how text becomes ids: vocabulary, merges, special tokens, and how instructions are wrapped."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        rules = backend.to_str() if backend is not None else json.dumps(sorted(self.tokenizer.get_vocab().items()))
        template = self.instruction_format or (None if self.chat is False else self.tokenizer.chat_template)
        return hashlib.sha256(f"{rules} {template} {self.chat}".encode()).hexdigest()[:16]

    def _ids(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return ids with one begin token where text and tokenizer both write one."""
        ids = self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        begin = self.tokenizer.bos_token_id
        return ids[1:] if begin is not None and ids[:2] == [begin, begin] else ids

    def _render(self, messages: Sequence[dict[str, str]]) -> str:
        """Return chat messages as text; the template writes the begin token itself, so none is added in front of it."""
        if not self.tokenizer.chat_template:
            raise UserError(
                f"the tokenizer of {self.target_id} has no chat template for chat messages; give a string, or set model.chat=false."
            )
        return self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)

    def decode(self, tokens: Sequence[int] | Tensor) -> str:
        """Return the text of `tokens`, special tokens left out."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def config_folder() -> Path:
    """Return the folder of YAML configs: beside the package in a source tree, inside it in an installed wheel."""
    package = Path(__file__).parent
    beside = package.parent / "conf"
    return beside if (beside / "model").is_dir() else package / "conf"


class NewDraft(Protocol):
    """A draft that does not exist yet."""

    name: str

    def make(self, target: PreTrainedModel) -> PreTrainedModel: ...


def load_pair(name: str | None = None, **keys: Any) -> Pair:
    """Load a pair by config name (`"nano"`), or by `draft=` and `target=`; other keys as in conf/model/*.yaml.

    Args:
        name: a file of conf/model; its keys are the defaults of those below.
        draft, target: a folder or hub id. `draft_revision`, `target_revision`: a hub commit or tag.
        tokenizer: where it lies, if not with the target.
        dtype: a torch dtype or its name; "auto" takes the checkpoint's.
        device: where the draft goes, and the target unless `device_map` says otherwise; None: cuda if there is one.
        device_map: for a target that is spread over devices ("auto").
        chat: whether instructions go through the tokenizer's chat template; None: if it has one.
        instruction_format: how instructions are wrapped instead of that, such as "[INST] {instruction} [/INST]".
        trust_remote_code: run code that comes with a model. Off unless said.
        only_draft: leave the target without weights, for a process that only asks what shape it has.
        new_draft: what makes the draft from the target, in place of one that is loaded.

    Raises:
        UserError: an unknown name, a folder or id that cannot be loaded, models that do not fit together.
    """
    if name is not None:
        path = config_folder() / "model" / f"{name}.yaml"
        if not path.is_file():
            known = ", ".join(sorted(p.stem for p in path.parent.glob("*.yaml")))
            raise UserError(f"there is no model config {name!r}; known: {known}; or give draft= and target=.")
        config = OmegaConf.load(path)
        keys = {k: v for k, v in OmegaConf.to_container(config).items() if k != "defaults"} | keys
    return _load(**keys)


def _load(
    draft: str | Path,
    target: str | Path,
    name: str | None = None,
    tokenizer: str | Path | None = None,
    draft_revision: str | None = None,
    target_revision: str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    device_map: str | None = None,
    chat: bool | None = None,
    instruction_format: str | None = None,
    trust_remote_code: bool = False,
    only_draft: bool = False,
    new_draft: NewDraft | None = None,
) -> Pair:
    if target is None or (draft is None and new_draft is None):
        raise UserError(f"draft={draft} and target={target}: a pair needs both; give folders or hub ids.")
    check_instruction_format(instruction_format)
    device = checked_device(device)
    shared = {"dtype": checked_dtype(dtype), "device": device, "trust_remote_code": trust_remote_code}
    target_tokenizer = _load_tokenizer(tokenizer or target, None if tokenizer else target_revision, trust_remote_code)
    for own, revision in ((draft, draft_revision), (target, target_revision)):
        if own == draft and new_draft:
            continue
        if tokenizer is None or (Path(resolve(own)) / "tokenizer_config.json").is_file():
            own_tokenizer = _load_tokenizer(own, revision, trust_remote_code)
            check_tokenizers(own_tokenizer, target_tokenizer, str(own), str(tokenizer or target))
    # The draft first: a target that may spread takes what is left.
    draft_model = None if new_draft else _load_model(draft, draft_revision, **shared)
    where = {"weightless": True} if only_draft else {"device_map": device_map}
    target_model = _load_model(target, target_revision, **shared, **where)
    if device_map and device.startswith("cuda"):
        check_placement(getattr(target_model, "hf_device_map", {}), str(target))
    if new_draft:
        draft, draft_model = new_draft.name, new_draft.make(target_model)
    for model in (draft_model, target_model):
        model.requires_grad_(False).eval()
    pair = Pair(
        target=target_model,
        draft=draft_model,
        tokenizer=target_tokenizer,
        name=name or f"{Path(draft).name}-to-{Path(target).name}",
        target_id=str(target),
        target_revision=revision_of(target_model, target),
        draft_id=str(draft),
        draft_revision="not saved" if new_draft else revision_of(draft_model, draft),
        chat=chat,
        instruction_format=instruction_format,
    )
    check_vocabulary(pair)
    if not only_draft:
        pair.target_lm.check()
    pair.draft_lm.check()
    return pair


def load_draft(location: str | Path, pair: Pair, dtype: str | torch.dtype = "auto") -> LanguageModel:
    """Return another draft for a pair, on its draft's device. Raises UserError for one that cannot be loaded or does not fit."""
    model = _load_model(location, None, checked_dtype(dtype), str(pair.draft_lm.device), trust_remote_code=False)
    model.requires_grad_(False).eval()
    check_vocabulary(replace(pair, draft=model))
    return LanguageModel(model, pair.vocab_size)


def load_language_model(
    location: str | Path, device: str | None = None, dtype: str | torch.dtype = "auto", trust_remote_code: bool = False
) -> tuple[LanguageModel, str]:
    """Return a model without a pair, and its revision; its vocabulary is that of its own tokenizer, where it has one.

    Raises:
        UserError: a folder or id that cannot be loaded, or a model whose states and logits are not known how to take apart.
    """
    model = _load_model(location, None, checked_dtype(dtype), checked_device(device), trust_remote_code=trust_remote_code)
    model.requires_grad_(False).eval()
    has_tokenizer = not Path(resolve(location)).is_dir() or (Path(resolve(location)) / "tokenizer_config.json").is_file()
    vocabulary = _load_tokenizer(location, None, trust_remote_code).get_vocab() if has_tokenizer else {}
    found = LanguageModel(model, max(vocabulary.values()) + 1 if vocabulary else None)
    found.check()
    return found, revision_of(model, location)


def resolve(location: str | Path) -> str:
    """Return the folder of an `embedded:` location, or the location itself."""
    location = str(location)
    return str(Path(__file__).parent / location.removeprefix(EMBEDDED)) if location.startswith(EMBEDDED) else location


def _load_tokenizer(location: str | Path, revision: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    if is_synthetic(location):
        return synthetic_tokenizer(str(location))
    return _from_hub(AutoTokenizer, location, revision, trust_remote_code=trust_remote_code)


def _load_model(
    location: str | Path,
    revision: str | None,
    dtype: str | torch.dtype,
    device: str,
    device_map: str | None = None,
    weightless: bool = False,
    **kwargs: Any,
) -> PreTrainedModel:
    if weightless and not is_synthetic(location):
        config = _from_hub(AutoConfig, location, revision, **kwargs)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=config.dtype if dtype == "auto" else dtype, **kwargs)
    if is_synthetic(location):
        return synthetic_model(str(location), dtype, device)
    if device_map:
        return _from_hub(AutoModelForCausalLM, location, revision, dtype=dtype, device_map=device_map, **kwargs)
    return _from_hub(AutoModelForCausalLM, location, revision, dtype=dtype, **kwargs).to(device)


def _from_hub(loader: Any, location: str | Path, revision: str | None, **kwargs: Any) -> Any:
    try:
        return loader.from_pretrained(resolve(location), **({"revision": revision} if revision else {}), **kwargs)
    except (OSError, ValueError) as error:  # what transformers raises for a missing or unreadable model
        what = "tokenizer" if loader is AutoTokenizer else "model"
        raise UserError(
            f"the {what} {str(location)!r} could not be loaded; expected a local folder, or a hub id that is reachable or cached. "
            f"Reason: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from error


def check_instruction_format(instruction_format: str | None) -> None:
    """Raise UserError for a format without a place for the instruction."""
    if instruction_format is not None and (not isinstance(instruction_format, str) or INSTRUCTION not in instruction_format):
        raise UserError(
            f"model.instruction_format={instruction_format!r} does not say where the instruction goes; "
            f"write {INSTRUCTION} there, as in '[INST] {INSTRUCTION} [/INST]'."
        )


def check_placement(device_map: Mapping[str, Any], target_id: str) -> None:
    """Raise UserError for a target of which `device_map` (module -> device) left parts off the GPUs."""
    outside = [name for name, place in device_map.items() if str(place) in ("cpu", "disk")]
    if outside:
        raise UserError(
            f"the target {target_id} does not fit: {len(outside)} of {len(device_map)} parts, {outside[0]!r} first, would lie outside "
            "the GPUs, where every token waits for them. Use more or larger GPUs, model.dtype=bfloat16, or move the draft with "
            "model.device=cuda:1."
        )


def checked_device(device: str | None) -> str:
    """Return where to put models: `device`, or cuda where there is one, each process of a training on its own. Raises UserError for a
    device that is not there.
    """
    if device is None:
        own = os.environ.get("LOCAL_RANK")
        return ("cuda" if own is None else f"cuda:{own}") if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # what torch raises for unknown names, and for a build without that device
        raise UserError(
            f"device={device!r} cannot be used here ({str(error).splitlines()[0]}); use cpu, or null to choose."
        ) from None
    return device


def checked_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """Return "auto" or the torch dtype of a name. Raises UserError for anything else."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype == "auto" or (isinstance(found, torch.dtype) and found.is_floating_point):
        return "auto" if dtype == "auto" else found
    raise UserError(f"dtype={dtype!r} is no floating-point type; use auto, float32, bfloat16, float16 or float64.")


def check_tokenizers(draft: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase, draft_id: str, target_id: str) -> None:
    """Raise UserError unless both tokenizers give every text the same ids; sizes of embeddings do not matter."""
    ours, theirs = draft.get_vocab(), target.get_vocab()
    differing = sorted((token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)), key=str)
    probe = "def f(x):\n    return x ** 2  # \u00e9, \u4e2d, 1234"
    if differing or draft(probe, add_special_tokens=False)["input_ids"] != target(probe, add_special_tokens=False)["input_ids"]:
        example = f"{len(differing)} tokens differ, for example {differing[0]!r}" if differing else "the same text gets other ids"
        raise UserError(
            f"draft {draft_id} and target {target_id} have different tokenizers ({example}); "
            "speculative decoding needs a draft with the target's own tokenizer."
        )


def check_vocabulary(pair: Pair) -> None:
    """Raise UserError unless both models have a logit for every token of the tokenizer."""
    for role, model in (("draft", pair.draft), ("target", pair.target)):
        size = model.get_output_embeddings().weight.shape[0]
        if size < pair.vocab_size:
            raise UserError(
                f"the {role} has {size} logits, but the tokenizer knows {pair.vocab_size} tokens; "
                "choose models that were made for the same tokenizer."
            )


def revision_of(model: nn.Module, location: str | Path) -> str:
    """Return what tells two versions of a model apart: the hub commit, or `folder_revision` of a local one."""
    return getattr(model.config, "_commit_hash", None) or folder_revision(location)


def revision_at(location: str | Path) -> str:
    """Return `revision_of` a model that is not loaded. Raises UserError for one that is not there."""
    folder = Path(resolve(location))
    if folder.is_dir() or str(location).startswith(".") or str(location).count("/") != 1:
        return extract_commit_hash(str(folder / "config.json"), None) or folder_revision(location)
    return _from_hub(AutoConfig, location, None)._commit_hash


def folder_revision(location: str | Path) -> str:
    """Return a hash of a local folder's weight files.

    Of each file 64 pieces of 64 KiB are read, spread evenly, so that a model of 140 GB takes no time.

    Raises:
        UserError: a folder without weights, or none at all.
    """
    folder = Path(resolve(location))
    files = sorted(f for f in folder.iterdir() if f.suffix in (".safetensors", ".bin")) if folder.is_dir() else []
    if not files:
        raise UserError(f"{location} holds no .safetensors or .bin weights, so its version cannot be told; save the model there.")
    digest = hashlib.sha256()
    piece, num_pieces = 2**16, 64
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as stream:
            for number in range(num_pieces):
                stream.seek(max(0, size - piece) * number // (num_pieces - 1))
                digest.update(stream.read(piece))
    return digest.hexdigest()[:16]
