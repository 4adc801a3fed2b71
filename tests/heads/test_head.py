import pytest
import torch
from torch import nn

from specheads.errors import UserError
from specheads.heads.head import AcceptanceHead, HeadConfig, set_scale
from specheads.heads.portable.network import ResidualBlock

# hidden and embedding size
H = 16
E = 12
KINDS = ["input_token", "next_token"]


def config(predicts="next_token", depth=3, **kwargs):
    return HeadConfig(hidden_size=H, embedding_size=E, predicts=predicts, depth=depth, **kwargs)


def new_head(*args, seed=0, **kwargs):
    """A head with random blocks; a fresh one has blocks that do nothing."""
    torch.manual_seed(seed)
    head = AcceptanceHead(config(*args, **kwargs))
    for block in head.blocks:
        nn.init.normal_(block.linear.weight, std=0.3)
        nn.init.normal_(block.linear.bias, std=0.3)
    return head


def features(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*shape, *size, generator=generator, dtype=torch.float64).to(dtype)

    probs = {
        name: torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name in ("draft_prob", "max_prob")
    }
    return {"hidden": normal(H), "embedding": normal(E), **probs, "entropy": normal().abs()}


# --- shapes


def test_chosen_inputs_enter_in_their_order_with_the_logarithm_of_the_draft_probability():
    head = new_head(inputs=("entropy", "hidden", "draft_prob"))
    inputs = features(4)
    expected = torch.cat(
        [inputs["entropy"][:, None], inputs["hidden"], inputs["draft_prob"].log()[:, None]], dim=1
    )
    assert torch.equal(head.assemble(inputs), expected)
    assert head.config.input_size == H + 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("predicts", KINDS)
def test_a_head_computes_in_float32_whatever_the_drafts_type(predicts, dtype):
    head = new_head(predicts)
    inputs = features(4, dtype=dtype)
    logits = head(inputs)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, head({name: value.float() for name, value in inputs.items()}))


# --- the network


def test_a_head_is_blocks_of_x_plus_silu_between_projection_and_readout():
    head = new_head("next_token", 2).double()
    inputs = features(6, dtype=torch.float64)
    x = head.assemble(inputs) @ head.projection.weight.T + head.projection.bias
    for block in head.blocks:
        z = x @ block.linear.weight.T + block.linear.bias
        x = x + z / (1 + torch.exp(-z))
    torch.testing.assert_close(
        head(inputs), x @ head.readout.weight[0] + head.readout.bias, atol=1e-12, rtol=0
    )


def test_a_fresh_block_is_the_identity_and_can_still_learn():
    block = ResidualBlock(H)
    x = features(5)["hidden"]
    out = block(x)
    assert torch.equal(out, x)
    out.pow(2).sum().backward()
    assert block.linear.weight.grad.abs().min() > 0 and block.linear.bias.grad.abs().min() > 0


# --- standardising


def test_standardised_inputs_have_mean_zero_and_variance_one():
    head = new_head().double()
    sample = (
        torch.randn(500, head.config.input_size, dtype=torch.float64)
        * torch.linspace(0.01, 30, head.config.input_size)
        - 7
    )
    set_scale(head, sample)
    entering = []
    head.projection.register_forward_pre_hook(lambda module, args: entering.append(args[0]))
    head.score(sample)
    torch.testing.assert_close(
        entering[0].mean(dim=0), torch.zeros(H + E + 3, dtype=torch.float64), atol=1e-9, rtol=0
    )
    torch.testing.assert_close(entering[0].std(dim=0), torch.ones(H + E + 3, dtype=torch.float64))


# --- whether it fits


# --- the config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"predicts": "last_token"},
            "head's predicts=last_token must be one of 'next_token' or 'input_token'",
        ),
        ({"depth": -1}, "head's depth=-1 must be a non-negative integer"),
        (
            {"inputs": ("hidden", "phase_of_the_moon")},
            (
                r"head\.inputs names 'phase_of_the_moon'; a head with predicts=next_token can read"
                r" hidden, embedding"
            ),
        ),
    ],
)
def test_a_meaningless_value_is_a_user_error_that_names_the_key(values, message):
    with pytest.raises(UserError, match=message):
        HeadConfig(hidden_size=H, **values)


@pytest.mark.parametrize("name", ["embedding", "draft_prob"])
def test_an_input_token_head_cannot_read_features_of_the_next_token(name):
    # When the decoder asks such a head about y_i, the embedding and probability at hand are those
    # of y_{i+1}; in training they would be y_i's.
    with pytest.raises(UserError, match=rf"head\.inputs names '{name}'"):
        HeadConfig(hidden_size=H, predicts="input_token", inputs=("hidden", name))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "its config is not that of a head"),
        (
            {"model_type": "llama"},
            "its config is not that of a head; give the folder of a head",
        ),
        ({"format_version": 1}, "it has head format 1; this version reads 2"),
        (
            HeadConfig(hidden_size=H).to_dict() | {"recommended": {"threshold": [0.5]}},
            "the head's recommended",
        ),
        (
            HeadConfig(hidden_size=H).to_dict() | {"train": {"num_prompts": "many"}},
            "the head's train",
        ),
    ],
    ids=["a list", "a model", "an old format", "recommended", "train"],
)
def test_what_is_no_config_of_a_head_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        HeadConfig.from_dict(values)
