import pytest
import torch
from fakes import tiny_pair
from families import CONFIGS, family_pair

from specheads import papers
from specheads.papers.layer_skip import without_layers


@pytest.mark.parametrize("family", CONFIGS)
def test_skipping_a_layer_is_leaving_its_residual_out(family):
    """The same as the model whose layer adds nothing.

    The model itself stays as it is, and weights are shared.
    """
    model = family_pair(family).target
    tokens = torch.arange(12)[None]
    before = model(tokens).logits
    skipped = without_layers(model, [1])
    logits = skipped(tokens).logits
    assert torch.equal(model(tokens).logits, before) and not torch.allclose(logits, before)
    assert {weight.data_ptr() for weight in skipped.parameters()} < {
        weight.data_ptr() for weight in model.parameters()
    }

    def unchanged(module, args, kwargs, output):
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    layers = next(
        part for part in model.modules() if isinstance(part, torch.nn.ModuleList) and len(part) == 2
    )
    layers[1].register_forward_hook(unchanged, with_kwargs=True)
    assert torch.equal(logits, model(tokens).logits)


def test_the_draft_of_the_pair_is_the_target_without_layers():
    pair = tiny_pair(4)
    other = papers.LayerSkip([1]).pair(pair)
    assert other.draft is not pair.draft and other.target is pair.target
    # Heads know it by them
    assert other.draft_revision == "r1-1" and other.draft_id == "tiny-target without layers 1"
