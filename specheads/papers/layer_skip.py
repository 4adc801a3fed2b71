"""Draft & Verify (Zhang et al. 2023): the target drafts for itself, without some of its layers."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads.decoding.drafting import Autoregressive
from specheads.errors import UserError
from specheads.pair.initial_draft import PLAIN, logits_differ
from specheads.pair.language_model import place_of_layers
from specheads.pair.pair import Pair
from specheads.settings import Count, argument


@dataclass(eq=False)
class LayerSkip(Autoregressive):
    """`drafting=layer_skip`: chains of the target with the layers `skipped` left out.

    The pair's draft is not run.

    Source: Zhang et al. 2023 (Draft & Verify), section 3.
    """

    skipped: Sequence[int] = argument(
        ..., "the numbers of layers, from 0, for example [2,3]", tuple[Count, ...]
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.skipped)) < len(self.skipped) or not len(self.skipped):
            raise UserError(
                f"drafting.skipped={list(self.skipped)} must name at least one layer, and each"
                " layer once."
            )
        self.skipped = tuple(sorted(self.skipped))

    def pair(self, pair: Pair) -> Pair:
        """Return the pair whose draft is the target without these layers.

        Raises UserError for layers that it does not have.
        """
        name = f"{pair.target_id} without layers {', '.join(map(str, self.skipped))}"
        revision = f"{pair.target_revision}-{'-'.join(map(str, self.skipped))}"
        return replace(
            pair,
            draft=without_layers(pair.target, self.skipped),
            draft_id=name,
            draft_revision=revision,
        )


class _Skipped(nn.Module):
    """Replaces a layer: returns its input in the form of that layer's output, and has the layer's
    plain settings, by some of which models choose masks.
    """

    def __init__(self, layer: nn.Module, output: object) -> None:
        super().__init__()
        for key, value in vars(layer).items():
            if isinstance(value, PLAIN) and not hasattr(self, key):
                setattr(self, key, value)
        # What comes after the state in the layer's output: as many times nothing
        self.form = type(output) if isinstance(output, tuple | list) else None
        self.rest = [None] * (len(output) - 1) if isinstance(output, tuple | list) else []

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> object:
        return hidden_states if self.form is None else self.form([hidden_states, *self.rest])


def without_layers(model: PreTrainedModel, skipped: Sequence[int]) -> PreTrainedModel:
    """Return `model` with some layers skipped, on the same weights.

    Raises UserError for layers that it does not have, and for those whose output others need.
    """
    count = model.config.get_text_config().num_hidden_layers
    if wrong := [layer for layer in skipped if layer >= count]:
        raise UserError(
            f"drafting.skipped names layer {wrong[0]}, but {type(model).__name__} has layers 0 to"
            f" {count - 1}."
        )
    if len(skipped) == count:
        raise UserError(f"drafting.skipped leaves out all {count} layers; keep at least one.")
    place = place_of_layers(model)
    weights = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    other = copy.deepcopy(model, weights)  # what is in `weights` is not copied
    layers = other.get_submodule(place)
    try:
        for number in skipped:
            output = _output_of(model, model.get_submodule(place)[number])
            layers[number] = _Skipped(layers[number], output)
        difference = logits_differ(other.eval(), model, set(skipped))
    except Exception as error:  # noqa: BLE001 - models raise whatever for what they miss
        difference = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if difference is not None:
        raise UserError(
            f"drafting.skipped={list(skipped)}: {type(model).__name__} does not work without these"
            f" layers, as others need what they return ({difference}); skip other layers."
        )
    return other.eval()


@torch.no_grad()
def _output_of(model: PreTrainedModel, layer: nn.Module) -> object:
    """Return what a layer of this model returned in a forward pass of one token."""
    outputs: list[object] = []
    handle = layer.register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        token = torch.zeros(
            1, 1, dtype=torch.long, device=model.get_input_embeddings().weight.device
        )
        model.base_model(input_ids=token, use_cache=False)
    finally:
        handle.remove()
    return outputs[0]
