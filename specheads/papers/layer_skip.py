"""Draft & Verify (Zhang et al. 2023): the target drafts for itself, without some of its layers."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads.decoding.drafting import Autoregressive
from specheads.errors import UserError
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
    """Replaces a layer: returns its input in the form of that layer's output."""

    def __init__(self, layer: nn.Module, returns_tuple: bool) -> None:
        super().__init__()
        self.returns_tuple = returns_tuple
        if hasattr(layer, "attention_type"):  # some models choose a layer's mask by it
            self.attention_type = layer.attention_type

    def forward(
        self, hidden_states: Tensor, *args: object, **kwargs: object
    ) -> Tensor | tuple[Tensor]:
        return (hidden_states,) if self.returns_tuple else hidden_states


def without_layers(model: PreTrainedModel, skipped: Sequence[int]) -> PreTrainedModel:
    """Return `model` with some layers skipped, on the same weights.

    Raises UserError for layers that it does not have.
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
    tuples = _returns_tuple(model, model.get_submodule(place)[0])
    weights = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    other = copy.deepcopy(model, weights)  # what is in `weights` is not copied
    layers = other.get_submodule(place)
    for number in skipped:
        layers[number] = _Skipped(layers[number], tuples)
    return other.eval()


@torch.no_grad()
def _returns_tuple(model: PreTrainedModel, layer: nn.Module) -> bool:
    """Whether a layer of this model returns its state within a tuple; a forward pass shows it."""
    tuples: list[bool] = []
    handle = layer.register_forward_hook(
        lambda module, args, output: tuples.append(isinstance(output, tuple))
    )
    try:
        token = torch.zeros(
            1, 1, dtype=torch.long, device=model.get_input_embeddings().weight.device
        )
        model.base_model(input_ids=token, use_cache=False)
    finally:
        handle.remove()
    return tuples[0]
