"""Folders of EAGLE-3 drafts: speculators' format, and that of SafeAILab and SpecForge.

The second has a flat config.json, and `midlayer.` in place of `layers.0.`. Wrong layers or norms
fail nowhere and lower acceptance, so what a config says must agree with the tensors, and the log
says which ones were taken.
"""

import logging
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.initialization import no_init_weights

from specheads.errors import UserError, is_count, is_out_of_memory
from specheads.pair.draft_vocabulary import (
    BORROWS,
    OFFSETS,
    OUTPUT,
    SIZE,
    kept_tokens,
    set_stored_output,
    stored_as,
)
from specheads.pair.feature_draft import (
    ARCHITECTURES,
    NORMS,
    FeatureDraft,
    FeatureDraftConfig,
    usual_layers,
)
from specheads.pair.revisions import file_of
from specheads.pair.synthetic import is_synthetic
from specheads.storage.files import read_json, write_json, write_whole

logger = logging.getLogger(__name__)

# keys of config.json
_KIND = "speculators_model_type"  # of speculators' alone
_LAYER = "transformer_layer_config"
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_TARGET_SIZE = "target_hidden_size"
_OF_FLAT = "eagle_config"  # of SafeAILab's and SpecForge's
_OF_DRAFT = (SIZE, _LAYERS, _TARGET_SIZE, *NORMS, _OF_FLAT, "architectures")
_QUANTIZATIONS = ("quantization_config", "compression_config")
# tensors
_INPUT = "fc.weight"
_EMBEDDING = "embed_tokens.weight"
_KNOWN = "t2d"  # (V,) bool, the tokens of `d2t`
_OF_TRAINING = ("verifier_lm_head.weight", "verifier_norm.weight")
_LAYER_PREFIX = "layers.0."
_FLAT_PREFIX = "midlayer."
_WEIGHTS = "model.safetensors"
_PICKLED = "pytorch_model.bin"
_EXPECTED = "give the folder of an EAGLE-3 draft of speculators, SafeAILab or SpecForge"


def is_feature_draft(location: str | Path, revision: str | None = None) -> bool:
    """Whether a folder or hub id holds a draft that reads its target, by its config.json.

    Some of SafeAILab's have the config of another draft with an output over some tokens. Such a
    draft is stored in safetensors, and has no map of features.
    """
    try:
        if is_synthetic(location) or file_of(location, "config.json", revision) is None:
            return False
    except OSError:  # it is gated, for example, which loading it reports
        return False
    stored = _read_config(location, revision)
    names = str(stored.get("architectures"))
    if _KIND in stored or _OF_FLAT in stored or "Eagle3" in names:
        return True
    if SIZE not in stored:
        return False
    path = file_of(location, _WEIGHTS, revision)
    if path is None:
        return file_of(location, _PICKLED, revision) is not None
    try:
        with safe_open(path, "pt") as tensors:
            return _INPUT in set(tensors.keys())
    except SafetensorError:  # loading it reports what is wrong
        return False


def read_feature_draft(
    location: str | Path,
    target: PreTrainedConfig,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    layers: Sequence[int] | None = None,
) -> FeatureDraft:
    """Return the EAGLE-3 draft of a folder or hub id, on the CPU, for inference.

    Args:
        target: the config of the model that the draft reads.
        dtype: of its weights; None: as stored.
        layers: of the target, whose inputs it reads; None: those that its config names.

    One without embeddings must be given those of its target (`borrow_embedding`). Raises UserError
    for a folder of another kind, a config that does not agree with its tensors or with the target,
    and weights that are quantized or in several files.
    """
    stored = _read_config(location, revision)
    is_flat = _KIND not in stored
    if not is_flat and stored[_KIND] != "eagle3":
        raise UserError(
            f"{location} is a draft of the kind {stored[_KIND]!r} ({_KIND} in its config.json);"
            " expected eagle3, the only kind that is read."
        )
    if any(stored.get(key) for key in _QUANTIZATIONS):
        raise UserError(
            f"the EAGLE-3 draft {location} is quantized; give its checkpoint in bfloat16, float16"
            " or float32."
        )
    tensors = _read_tensors(location, revision)
    if _INPUT not in tensors:
        raise UserError(
            f"{location} has no tensor {_INPUT}, which every EAGLE-3 draft has; {_EXPECTED}."
        )
    # vLLM takes it for true where speculators' config lacks it, and for false in a flat one.
    keys = _of_flat(stored, location) if is_flat else {"norm_before_residual": True} | stored
    if layers is not None:
        keys[_LAYERS] = list(layers)
    try:
        config = _config_of(keys, tensors[_INPUT], target, location)
        with no_init_weights():
            model = FeatureDraft._from_config(config, dtype=dtype or tensors[_INPUT].dtype)
    except UserError:
        raise
    except Exception as error:  # transformers raises a dozen kinds for sizes that do not fit
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"{location}: no layer can be made by its config.json ({type(error).__name__}:"
            f" {' '.join(str(error).split())[:200]}); download it again, or correct it."
        ) from error
    _load(model, tensors, location)
    model.name_or_path = config.name_or_path = str(location)
    _say(model, location, "SafeAILab's and SpecForge's" if is_flat else "speculators'")
    return model.requires_grad_(False).eval()


def _read_config(location: str | Path, revision: str | None) -> dict[str, Any]:
    path = file_of(location, "config.json", revision)
    if path is None:
        raise UserError(f"{location} has no config.json; {_EXPECTED}.")
    try:
        stored: dict[str, Any] = read_json(Path(path))
    except ValueError as error:
        raise UserError(
            f"{path} cannot be read ({error}); download {location} again, or correct the file."
        ) from error
    if not isinstance(stored, dict):
        raise UserError(f"{path} must hold keys with values; {_EXPECTED}.")
    return stored


def _read_tensors(location: str | Path, revision: str | None) -> dict[str, Tensor]:
    """Return the tensors of a draft, by speculators' names."""
    path = file_of(location, _WEIGHTS, revision) or file_of(location, _PICKLED, revision)
    if path is None:
        raise UserError(
            f"{location} has neither {_WEIGHTS} nor {_PICKLED}; {_EXPECTED}, with its weights in"
            " one file."
        )
    try:
        if path.endswith(_WEIGHTS):
            tensors = load_file(path)
        else:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path} holds more than tensors, which is not read; convert it into {_WEIGHTS}."
        ) from error
    except (SafetensorError, EOFError, RuntimeError) as error:
        raise UserError(
            f"{path} cannot be read ({' '.join(str(error).split())[:200]}); download {location}"
            " again."
        ) from error
    named = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix("model.")
        if plain.startswith(_FLAT_PREFIX):
            plain = _LAYER_PREFIX + plain.removeprefix(_FLAT_PREFIX)
        if plain not in _OF_TRAINING and not plain.endswith("rotary_emb.inv_freq"):
            named[plain] = tensor
    return named


def _of_flat(stored: Mapping[str, Any], location: str | Path) -> dict[str, Any]:
    """Return the keys that a flat config has in speculators' format."""
    of_draft = stored.get(_OF_FLAT) or {}
    if not isinstance(of_draft, dict):
        raise UserError(
            f"{location}: {_OF_FLAT}={of_draft!r:.100} must be a set of keys; correct it in"
            " config.json."
        )
    keys = {**stored, **of_draft}
    if keys.get("norm_output"):
        logger.warning(
            "%s has norm_output=true: its own states are read normalized, as EAGLE-3.1's. SpecForge"
            " before September 2026 wrote it for EAGLE-3; if few tokens are accepted, set it to"
            " false in config.json",
            location,
        )
    layers: Any = keys.get(_LAYERS)
    if _LAYERS in of_draft and _are_counts(layers):
        # SpecForge and SGLang name those whose outputs are read: inputs of the next ones
        layers = [layer + 1 for layer in layers]
    named: dict[str, Any] = {norm: keys.get(norm, False) for norm in NORMS}
    return named | {
        _LAYER: {key: value for key, value in stored.items() if key not in _OF_DRAFT},
        SIZE: keys.get(SIZE),
        _TARGET_SIZE: keys.get(_TARGET_SIZE),
        _LAYERS: layers,
    }


def _config_of(
    keys: Mapping[str, Any], fc: Tensor, target: PreTrainedConfig, location: str | Path
) -> FeatureDraftConfig:
    """Return the config of a draft whose keys are speculators', and whose first weights are `fc`
    (H, L H_target).
    """
    of_target = target.get_text_config()
    layer = {"model_type": "llama"} | keys.get(_LAYER, {})
    if layer["model_type"] not in ARCHITECTURES:
        raise UserError(
            f"{location} has a layer of the architecture {layer['model_type']}; expected"
            f" {' or '.join(ARCHITECTURES)}."
        )
    try:
        text_config = AutoConfig.for_model(**layer)
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise UserError(
            f"{location}: the config of its layer is not one of {layer['model_type']}"
            f" ({' '.join(str(error).split())}); correct its config.json."
        ) from error
    size = keys.get(_TARGET_SIZE) or text_config.hidden_size
    layers = _layers_of(keys.get(_LAYERS), of_target.num_hidden_layers, location)
    expected = {
        _TARGET_SIZE: (size, of_target.hidden_size),
        "vocab_size": (text_config.vocab_size, of_target.vocab_size),
        "num_hidden_layers": (text_config.num_hidden_layers, 1),
        "rows of fc.weight": (fc.shape[0], text_config.hidden_size),
        "columns of fc.weight": (fc.shape[1], len(layers) * size),
    }
    for what, (found, right) in expected.items():
        if found != right:
            name = of_target.name_or_path or of_target.model_type
            raise UserError(
                f"{location} has {what}={found}, but expected {right} for the target {name} and the"
                f" inputs of its layers {list(layers)}; give the target that the draft was trained"
                " for, or correct its config.json."
            )
    if "sliding_attention" in (getattr(text_config, "layer_types", None) or ()):
        raise UserError(
            f"{location} has a layer with sliding attention, which is not supported; give a draft"
            " with full attention."
        )
    norms = {norm: bool(keys.get(norm, False)) for norm in NORMS}
    if norms["norm_before_fc"] and norms["fc_norm"]:
        raise UserError(
            f"{location} has norm_before_fc=true and fc_norm=true, which exclude each other; set"
            " the one to false whose tensors it does not have."
        )
    return FeatureDraftConfig(
        text_config=text_config,
        target_layers=layers,
        target_hidden_size=size,
        draft_vocab_size=keys.get(SIZE) or text_config.vocab_size,
        **norms,
    )


def _are_counts(layers: object) -> bool:
    return isinstance(layers, list) and all(is_count(layer) for layer in layers)


def _layers_of(given: Any, count: int, location: str | Path) -> tuple[int, ...]:
    """Return the layers of a target of `count` layers whose inputs a draft reads.

    Without names they are those of the paper's implementation.
    """
    layers = given or list(usual_layers(count))
    if not _are_counts(layers) or max(layers) >= count or len(set(layers)) < len(layers):
        raise UserError(
            f"{location} reads the inputs of the layers {layers}, but the target has the layers 0"
            f" to {count - 1}; give the target that it was trained for, or name its layers:"
            " model.draft_layers=."
        )
    return tuple(layers)


@torch.no_grad()
def _load(model: FeatureDraft, tensors: Mapping[str, Tensor], location: str | Path) -> None:
    """Give a draft its weights, and its output over some tokens."""
    weights = dict(tensors)
    offsets = weights.pop(OFFSETS, None)
    known = weights.pop(_KNOWN, None)
    size = model.config.draft_vocab_size
    vocab_size = model.config.text_config.vocab_size
    expected = model.state_dict()
    missing = sorted(expected.keys() - weights.keys() - {_EMBEDDING})
    unused = sorted(weights.keys() - expected.keys())
    if missing or unused:
        lacks = f"lacks {', '.join(missing)}" if missing else f"also has {', '.join(unused)}"
        chosen = ", ".join(f"{norm}={getattr(model.config, norm)}" for norm in NORMS)
        raise UserError(
            f"{location} {lacks}; expected the tensors of one {model.config.text_config.model_type}"
            f" layer with {chosen}; correct these keys in config.json."
        )
    for name, weight in weights.items():
        if weight.shape != expected[name].shape or not weight.is_floating_point():
            raise UserError(
                f"{location} has {name} as {_shape(weight)}, but its config.json asks for"
                f" {_shape(expected[name])}; correct config.json, and give weights that are not"
                " quantized."
            )
    if size != vocab_size:
        if offsets is None:
            raise UserError(
                f"{location} has {SIZE}={size} of {vocab_size} tokens, but no tensor {OFFSETS},"
                " which says what tokens they are; give a folder with it."
            )
        set_stored_output(model, weights.pop(OUTPUT), offsets, location)
        kept = kept_tokens(model)
        assert kept is not None  # it was just set
        if known is not None and not torch.equal(known.bool().nonzero()[:, 0], kept):
            raise UserError(
                f"{location}: {OFFSETS} and {_KNOWN} name other tokens; expected"
                f" {_KNOWN}[i + {OFFSETS}[i]] to be true for each of {size} tokens i, and no other;"
                " write them again."
            )
    model.load_state_dict(weights, strict=False)
    setattr(model, BORROWS, _EMBEDDING not in weights)


def _shape(weight: Tensor) -> str:
    return f"{str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}"


def _say(model: FeatureDraft, location: str | Path, whose: str) -> None:
    """Log what was taken from a folder."""
    config = model.config
    logger.info(
        "%s is an EAGLE-3 draft in %s format: %s; %d of %d tokens, %s embeddings",
        location,
        whose,
        model.described,
        config.draft_vocab_size,
        config.text_config.vocab_size,
        "the target's" if getattr(model, BORROWS) else "its own",
    )


def write_speculators(
    model: FeatureDraft,
    folder: Path,
    target_id: str,
    target_architectures: Sequence[str],
    num_tokens: int,
    given: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a draft into a folder in speculators' format, of version 0.9.

    Args:
        num_tokens: how many an engine shall draft by default.
        given: other weights than the model's, in the type in which they are stored.
    """
    config = model.config
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    content = {
        "architectures": ["Eagle3DraftModel"],
        _KIND: "eagle3",
        "speculators_version": "0.9.0",
        SIZE: config.draft_vocab_size,
        _TARGET_SIZE: config.target_hidden_size,
        _LAYERS: list(config.target_layers),
        **{norm: getattr(config, norm) for norm in NORMS},
        "tie_word_embeddings": False,
        _LAYER: config.text_config.to_diff_dict(),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target_id, "architectures": list(target_architectures)},
        },
    }
    _write(folder, content, _stored(model, given))


def check_safeailab(config: FeatureDraftConfig) -> None:
    """Raise UserError for a draft that SafeAILab's format cannot describe."""
    found = [norm for norm in NORMS if getattr(config, norm)]
    if config.text_config.model_type != "llama":
        found.append(f"a {config.text_config.model_type} layer")
    if 0 in config.target_layers:
        found.append("the input of layer 0")
    if found:
        raise UserError(
            f"eagle3.format=safeailab cannot describe the draft, which has {', '.join(found)}; use"
            " eagle3.format=speculators, or train a new draft (draft_kind=eagle3)."
        )


def write_safeailab(
    model: FeatureDraft, folder: Path, num_layers: int, given: Mapping[str, Tensor] | None = None
) -> None:
    """Write a draft into a folder in the format of SafeAILab and SpecForge.

    Args:
        num_layers: of the target.
        given: other weights than the model's, in the type in which they are stored.

    Raises UserError as `check_safeailab`.
    """
    config = model.config
    check_safeailab(config)
    content = config.text_config.to_diff_dict()
    ropes = dict(content.pop("rope_parameters"))  # the name since transformers 5
    content["rope_theta"] = ropes.pop("rope_theta")
    content["rope_scaling"] = None if ropes["rope_type"] == "default" else ropes
    content["architectures"] = ["LlamaForCausalLMEagle3"]
    content[SIZE] = config.draft_vocab_size
    if config.target_hidden_size != config.text_config.hidden_size:
        # Only then: with this key SafeAILab's code takes no embeddings of the target
        content[_TARGET_SIZE] = config.target_hidden_size
    if config.target_layers != usual_layers(num_layers):
        content[_LAYERS] = list(config.target_layers)  # which vLLM takes first, for inputs
        content[_OF_FLAT] = {_LAYERS: [layer - 1 for layer in config.target_layers]}
    weights = {}
    for name, weight in _stored(model, given).items():
        weights[name.replace(_LAYER_PREFIX, _FLAT_PREFIX)] = weight
    _write(folder, content, weights)


def _stored(model: FeatureDraft, given: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Return the tensors of a draft's folder, by speculators' names."""
    given = model.state_dict() if given is None else given
    weights = stored_as(model, given, given[_INPUT].dtype)
    kept = kept_tokens(model)
    if kept is not None:
        known = torch.zeros(model.config.text_config.vocab_size, dtype=torch.bool)
        weights[_KNOWN] = known.index_fill(0, kept.cpu(), True)
    return weights


def _write(folder: Path, content: Mapping[str, object], weights: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {name: weight.contiguous() for name, weight in weights.items()}
    metadata = {"format": "pt"}  # without it transformers reads no safetensors
    write_whole(folder / _WEIGHTS, lambda path: save_file(contiguous, path, metadata))
    write_json(folder / "config.json", content)
