"""A draft before training that is not the pair's: the target's embeddings and some of its layers,
or a new layer that also reads the target's hidden states.

Configs describe layers by their index in many ways. What is known of them is carried over; then
the draft is compared with the target without its other layers, so that nothing else passes.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from specheads.errors import UserError, is_count
from specheads.pair.draft_vocabulary import share_embedding
from specheads.pair.feature_draft import FeatureDraft, FeatureDraftConfig, usual_layers
from specheads.pair.language_model import LanguageModel, place_of_layers
from specheads.pair.quantization import is_quantized

# Lists that may be as long as there are layers by chance
NOT_BY_LAYER = ("time_step_limit", "mlp_multipliers", "ssm_multipliers")
# Settings that list numbers of layers
LAYER_NUMBERS = ("mlp_only_layers", "moe_layers", "attn_layer_indices", "hybrid_layer_ids")
# Settings that say how many layers come before the first sparse one
NUMBERS_BEFORE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
# Of the layer of an EAGLE-3 draft, where its target has no such heads
HEAD_SIZE = 64
ROPES = ("llama3", "yarn")  # kinds of angles that such a layer shares with its target
PLAIN = bool | int | float | str | tuple | None  # settings of a module that can be compared
NUM_TOKENS = 8  # that the comparison reads


@dataclass(frozen=True)
class TargetLayers:
    """Makes a draft of the target's embeddings and the given layers, in order, or of as many
    layers, spread evenly.
    """

    layers: Sequence[int] | int

    @property
    def name(self) -> str:
        """What the draft is called before it is saved."""
        return (
            "the target's layers"
            f" {self.layers if isinstance(self.layers, int) else list(self.layers)}"
        )

    def numbers(self, count: int) -> list[int]:
        """Return the numbers of the layers, of `count`.

        Raises UserError for layers that the target does not have.
        """
        if isinstance(self.layers, int):
            if not is_count(self.layers, least=1) or self.layers > count:
                raise UserError(
                    f"init_layers={self.layers} must be an integer from 1 to {count}, the number of"
                    " the target's layers."
                )
            return [
                round(number * (count - 1) / max(1, self.layers - 1))
                for number in range(self.layers)
            ]
        if not self.layers or any(not is_count(layer) or layer >= count for layer in self.layers):
            raise UserError(
                f"init_layers={list(self.layers)} are not layers of a target that has the layers 0"
                f" to {count - 1}; give for example init_layers=[0,{count - 1}]."
            )
        return list(self.layers)

    def make(self, target: PreTrainedModel) -> PreTrainedModel:
        """Return the draft.

        Raises UserError for layers that the target does not have, and for those that cannot stand
        alone: a model of this architecture that has them computes something else.
        """
        layers = self.numbers(target.config.get_text_config().num_hidden_layers)
        try:
            model = _model_of(target, layers)
            difference = _difference(model, target, layers)
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - transformers raises a dozen kinds for a config
            difference = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if difference is not None:
            raise UserError(
                f"init_layers={list(layers)}: no {type(target).__name__} of these layers computes"
                f" what they compute in the target ({difference}); take other layers, for example"
                " the first ones, or give a draft: model.draft=."
            )
        return model.to(target.device)


@dataclass(frozen=True)
class NewFeatureDraft:
    """Makes an EAGLE-3 draft: a random layer with the target's width, whose embeddings are the
    target's and whose output starts as the target's rows.

    `target_layers`: whose inputs it reads; None: those of the paper's implementation, and others
    where the target has fewer than 7.
    `form`: speculators, whose drafts add to normalized states, or safeailab, whose own code knows
    Llama's layer with plain angles alone.
    """

    kind: str  # eagle3, or eagle3.1, which normalizes features and own states
    target_layers: Sequence[int] | None = None
    seed: int = 0
    form: str = "speculators"

    @property
    def name(self) -> str:
        """What the draft is called before it is saved."""
        return f"a new {self.kind} draft"

    def layers(self, count: int) -> tuple[int, ...]:
        """Return the layers of a target of `count` layers whose inputs are read.

        Raises UserError for layers that the target does not have, or too few of them.
        """
        layers = self.target_layers
        if layers is None:
            if count < 4:
                raise UserError(
                    f"draft_kind={self.kind} reads the inputs of three layers after the first, but"
                    f" the target has {count} layers; name some: eagle3.target_layers="
                    f"{list(range(count))}."
                )
            middle = count // 2
            if count < 7:
                return 1, middle, max(middle + 1, 3 * count // 4)
            return usual_layers(count)
        if not layers or len(set(layers)) < len(layers) or max(layers) >= count:
            raise UserError(
                f"eagle3.target_layers={list(layers)} must be different layers of the target, which"
                f" has the layers 0 to {count - 1}."
            )
        return tuple(sorted(layers))

    def make(self, target: PreTrainedModel) -> FeatureDraft:
        """Return the draft.

        Raises UserError as `layers`, and for a target that is quantized, whose output has other
        rows than its embeddings, or whose layers read more than a state of each token.
        """
        output = target.get_output_embeddings().weight
        embedding = target.get_input_embeddings().weight
        if is_quantized(target):
            raise UserError(
                f"{self.name} is made of the target's output, which is quantized; give the"
                " checkpoint of the target in bfloat16, float16 or float32."
            )
        if output.shape != embedding.shape:
            raise UserError(
                f"{self.name} shares its target's embeddings {tuple(embedding.shape)} and output"
                f" {tuple(output.shape)}, which must have one shape; choose another target, or"
                " draft_kind=stand_alone."
            )
        of_target = target.config.get_text_config()
        layers = self.layers(of_target.num_hidden_layers)
        if target.device.type != "meta":
            LanguageModel(target).check_inputs(layers)
        is_plain = self.form == "safeailab"
        config = FeatureDraftConfig(
            text_config=_layer_config(target, is_plain),
            target_layers=layers,
            target_hidden_size=of_target.hidden_size,
            draft_vocab_size=len(output),
            norm_before_residual=not is_plain,
            fc_norm=self.kind == "eagle3.1",
            norm_output=self.kind == "eagle3.1",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            draft = FeatureDraft._from_config(config, dtype=target.dtype)
        draft.lm_head.weight = nn.Parameter(output.detach().clone())
        draft = draft.to(target.device)
        share_embedding(draft, embedding)
        return draft.eval()


NewDraft = TargetLayers | NewFeatureDraft


def _layer_config(target: PreTrainedModel, is_plain: bool) -> PretrainedConfig:
    """Return the config of a model with one layer of the target's sizes, of Qwen 3 for its family
    and else of Llama; with `is_plain` of Llama, with plain angles and heads that share its width.
    """
    lm = LanguageModel(target)
    of_layer = lm.layer_configs[-1]
    vocab_size, width = target.get_input_embeddings().weight.shape
    num_heads = getattr(of_layer, "num_attention_heads", None) or max(1, width // HEAD_SIZE)
    size = (not is_plain and getattr(of_layer, "head_dim", None)) or width // num_heads
    num_keys = getattr(of_layer, "num_key_value_heads", None) or num_heads
    if size % 2 or num_heads % num_keys:  # angles turn pairs of numbers
        num_heads, size = max(1, width // HEAD_SIZE), HEAD_SIZE
        num_keys = num_heads
    wide = getattr(of_layer, "intermediate_size", None) or getattr(of_layer, "ffn_dim", None)
    ropes = getattr(of_layer, "rope_parameters", None) or {}
    if is_plain or ropes.get("rope_type") not in ROPES:
        theta = ropes.get("rope_theta", 10000.0)
        ropes = {"rope_type": "default", "rope_theta": theta}
    kind = "qwen3" if lm.config.model_type.startswith("qwen3") and not is_plain else "llama"
    return AutoConfig.for_model(
        kind,
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=wide if isinstance(wide, int) else 4 * width,
        num_hidden_layers=1,
        num_attention_heads=num_heads,
        num_key_value_heads=num_keys,
        head_dim=size,
        max_position_embeddings=min(lm.window, 2**20),
        rms_norm_eps=1e-6,
        rope_parameters=dict(ropes),
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )


def _model_of(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    config = config_of(target, layers)
    with torch.random.fork_rng(devices=[]):  # its random weights are replaced
        model = AutoModelForCausalLM.from_config(
            config, dtype=target.dtype, **_implementations(target.config)
        )
    prefix = f"{place_of_layers(target)}."
    states = {}
    for name, tensor in target.state_dict().items():
        if not name.startswith(prefix):
            states[name] = tensor
            continue
        number, rest = name.removeprefix(prefix).split(".", 1)
        for new, layer in enumerate(layers):
            if layer == int(number):
                states[f"{prefix}{new}.{rest}"] = tensor
    model.load_state_dict(states)
    return model.eval()


def _implementations(config: PretrainedConfig) -> dict[str, str]:
    """Return by which of transformers' implementations a model computes; no file holds them."""
    chosen = {}
    for part in ("attn", "experts"):
        name = getattr(config, f"_{part}_implementation", None)
        if name is not None:
            chosen[f"{part}_implementation"] = name
    return chosen


def config_of(target: PreTrainedModel, layers: Sequence[int]) -> PretrainedConfig:
    """Return the config of a model of some of the target's layers, as its file would be read."""
    config = copy.deepcopy(target.config)
    text_config = config.get_text_config()
    for key, value in _carried(text_config, layers).items():
        setattr(text_config, key, value)
    text_config.num_hidden_layers = len(layers)
    return type(config).from_dict(config.to_dict())


def _carried(config: PretrainedConfig, layers: Sequence[int]) -> dict[str, object]:
    """Return the settings of single layers, for a model of some of the layers."""
    count = config.num_hidden_layers
    known = config.to_dict()
    carried: dict[str, object] = {}
    for key, value in known.items():
        if key in LAYER_NUMBERS and value is not None:
            carried[key] = [new for new, layer in enumerate(layers) if layer in value]
        elif isinstance(value, list | tuple) and _is_by_layer(key, len(value), count):
            carried[key] = [value[layer] for layer in layers]
        elif key == "per_layer_config" and value:  # by layer, where one differs
            of_layer = {int(layer): own for layer, own in value.items()}
            chosen = {new: of_layer.get(layer) for new, layer in enumerate(layers)}
            carried[key] = {new: own for new, own in chosen.items() if own is not None}
        elif key in NUMBERS_BEFORE and value is not None:
            carried[key] = sum(layer < value for layer in layers)
        elif key == "moe_layer_end_index":  # the last sparse layer
            carried[key] = sum(layer <= value for layer in layers) - 1
    if (step := known.get("decoder_sparse_step")) is not None:
        dense = known["mlp_only_layers"] or []
        carried["decoder_sparse_step"] = 1
        carried["mlp_only_layers"] = [
            new for new, layer in enumerate(layers) if layer in dense or (layer + 1) % step
        ]
    if (kinds := getattr(config, "attention_layers", None)) is not None:  # of GPT-Neo
        carried["attention_types"] = [[[kinds[layer]], 1] for layer in layers]
    return carried


def _is_by_layer(key: str, length: int, count: int) -> bool:
    """Whether a list of a config has an entry for each layer; SmolLM3's may be longer."""
    if key in NOT_BY_LAYER:
        return False
    return length == count or (key == "no_rope_layers" and length > count)


def _difference(
    model: PreTrainedModel, target: PreTrainedModel, layers: Sequence[int]
) -> str | None:
    """Return in words how a draft's layers differ from those of the target; None: in nothing."""
    theirs = target.get_submodule(place_of_layers(target))
    ours = model.get_submodule(place_of_layers(model))
    for new, layer in enumerate(layers):
        if different := _different_setting(ours[new], theirs[layer], {(new, layer)}):
            return f"layer {layer} as layer {new} has another {different}"
    in_order = all(first < second for first, second in pairwise(layers))
    if not in_order or target.device.type == "meta":
        return None
    return logits_differ(model.to(target.device), target, set(range(len(theirs))) - set(layers))


@torch.no_grad()
def logits_differ(model: PreTrainedModel, target: PreTrainedModel, removed: set[int]) -> str | None:
    """Return in words how a model's logits differ from those of the target without some layers;
    None: by rounding alone.
    """
    tokens = torch.arange(NUM_TOKENS, device=target.device)[None]
    tokens = tokens % target.get_input_embeddings().weight.shape[0]
    with _without(target, removed):
        expected = target(tokens, use_cache=False).logits.float()
    found = model(tokens, use_cache=False).logits.float()
    # Some models keep single numbers in float32, and compute them again.
    eps = max(torch.finfo(target.dtype).eps, torch.finfo(torch.float32).eps)
    nearness = 100 * eps * expected.abs().max()
    if torch.allclose(found, expected, rtol=0, atol=float(nearness)):
        return None
    return f"its logits are off by up to {float((found - expected).abs().max()):.2g}"


def _different_setting(
    ours: nn.Module, theirs: nn.Module, numbers: set[tuple[int, int]]
) -> str | None:
    """Return the name of a part, or of a plain setting of a part, that two layers do not share.

    `numbers` are the pairs of values that name the layers themselves.
    """
    parts = dict(theirs.named_modules())
    for name, our_part in ours.named_modules():
        their_part = parts.pop(name, None)
        if type(our_part) is not type(their_part):
            return name
        for key, value in vars(our_part).items():
            other = vars(their_part).get(key)
            are_plain = isinstance(value, PLAIN) and isinstance(other, PLAIN)
            if are_plain and value != other and (value, other) not in numbers:
                return f"{name}.{key}".lstrip(".")
    return next(iter(parts), None)


@contextmanager
def _without(model: PreTrainedModel, removed: set[int]) -> Iterator[None]:
    """While open, these layers of a model return their input."""

    def its_input(
        layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: object
    ) -> object:
        hidden = args[0] if args else kwargs["hidden_states"]
        if not isinstance(output, tuple | list):
            return hidden
        return type(output)((hidden, *output[1:]))

    layers = model.get_submodule(place_of_layers(model))
    with ExitStack() as handles:
        for number in removed:
            hook = layers[number].register_forward_hook(its_input, with_kwargs=True)
            handles.callback(hook.remove)
        yield
