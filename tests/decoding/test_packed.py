"""Packed copies of linear maps and of heads' networks compute what those compute, are shared,
follow every change, and are optional.
"""

import logging
from dataclasses import replace

import pytest
import torch
from fakes import needs_compiler, tiny_pair
from families import CONFIGS, VOCAB_SIZE, family_pair
from torch import nn

from specheads import AcceptanceHead, HeadConfig, SpeculativeDecoder, Warp, stopping
from specheads.decoding.engine import artefacts, compiled, cpu
from specheads.decoding.engine.compiled import MOST_TOKENS
from specheads.decoding.engine.compiled_program import Weights
from specheads.decoding.engine.cpu import CpuEngine, CpuOperations, CpuStep, load_operators, packed
from specheads.decoding.engine.cpu.packed import (
    PackedNetwork,
    _is_network,
    _pack,
    is_layer,
    packed_model,
)
from specheads.decoding.engine.reading import computing
from specheads.pair.language_model import LanguageModel

pytestmark = [needs_compiler, pytest.mark.usefixtures("built_operators")]

# The numbers of outputs of the maps of one layer, those together that read the same input, and of
# the maps before and after.
GATED = [[32, 16, 16], [32], [48, 48], [32]]
OPT = [[32, 32, 32], [32], [48], [32]]
SIZES = {
    "llama": ["a layer", "a layer", [VOCAB_SIZE]],
    "qwen2": ["a layer", "a layer", [VOCAB_SIZE]],
    "qwen3": [*GATED, *GATED, [VOCAB_SIZE]],
    "gemma2": [*GATED, *GATED, [VOCAB_SIZE]],
    "opt-350m": [[32], *OPT, *OPT, [16], [VOCAB_SIZE]],
    "gpt-neox": [*[[96], [32], [48], [32]] * 2, [VOCAB_SIZE]],
}


def lm_of(name):
    lm = family_pair(name).target_lm
    lm.model.float()
    return lm


@pytest.fixture
def lm():
    return lm_of("qwen3")


def logits_of(lm, tokens):
    return lm.logits(lm.hidden_states(tokens, use_cache=False))


def packed_logits(lm, tokens):
    return logits_of(packed_model(lm, []).lm, tokens)


def random_tokens(*shape):
    return torch.randint(VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(sum(shape)))


def assert_packed_as_it_is(lm):
    tokens = random_tokens(2, 7)
    torch.testing.assert_close(packed_logits(lm, tokens), logits_of(lm, tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", SIZES)
def test_maps_that_read_the_same_input_are_one_map(name):
    copies = packed_model(lm_of(name), []).copies
    sizes = [getattr(copied, "sizes", "a layer") for copied in copies]
    assert sorted(map(str, sizes)) == sorted(map(str, SIZES[name]))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_model_computes_the_same_logits(name):
    lm = lm_of(name)
    copies = packed_model(lm, [])
    for shape in ((1, 1), (1, 5), (3, 4), (1, MOST_TOKENS)):
        tokens = random_tokens(*shape)
        torch.testing.assert_close(
            logits_of(copies.lm, tokens), logits_of(lm, tokens), atol=1e-4, rtol=0
        )
    assert not any("forward" in vars(module) for module in lm.model.modules())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_models_of_other_types_are_run_by_torch(dtype):
    lm = LanguageModel(tiny_pair().target.to(dtype))
    assert not CpuStep(lm, [], few=True, rows=True).has_operators


def test_compiled_steps_are_those_of_a_number_of_bits_of_activations(lm):
    wide = CpuStep(lm, [], few=True, rows=True).name
    lm.input_bits = 16
    assert CpuStep(lm, [], few=True, rows=True).name != wide


def test_maps_with_and_without_bias_are_separate(lm):
    attention = lm.model.model.layers[0].self_attn
    attention.k_proj.bias = nn.Parameter(torch.randn(16), requires_grad=False)
    assert [copied.sizes for copied in packed_model(lm, []).copies][1:3] == [[32, 16], [16]]
    assert_packed_as_it_is(lm)


def test_maps_that_someone_changed_are_left_as_they_are(lm):
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    lm.model.model.layers[0].self_attn.o_proj = Doubled(32, 32, bias=False).requires_grad_(False)
    assert [copied.sizes for copied in packed_model(lm, []).copies][1:3] == [[32, 16, 16], [48, 48]]
    assert_packed_as_it_is(lm)


def test_copies_are_shared_by_all_engines_of_a_model_and_go_with_it():
    lm = tiny_pair().target_lm
    lm.model.float()
    number = len(packed._copies)
    first = packed_model(lm, []).copies
    second = packed_model(lm, []).copies
    assert all(one is other for one, other in zip(first, second, strict=True))
    assert len(packed._copies) == number + len(first)
    del lm, first, second
    assert len(packed._copies) == number


def change_by_optimizer(model):
    for weight in model.parameters():
        weight.requires_grad_(True).grad = torch.ones_like(weight)
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    model.requires_grad_(False)


def changed_weights(model):
    return {name: value + 0.1 for name, value in model.state_dict().items()}


CHANGES = {
    "an optimizer": change_by_optimizer,
    "load_state_dict": lambda model: model.load_state_dict(changed_weights(model)),
    "load_state_dict with assign": lambda model: model.load_state_dict(
        changed_weights(model), assign=True
    ),
    "a number": lambda model: model.model.layers[1].mlp.up_proj.weight[3].fill_(2.0),
    "a sum through .data": lambda model: model.model.layers[1].mlp.up_proj.weight.data.add_(0.1),
    "a bias": lambda model: model.model.layers[1].self_attn.k_proj.bias.add_(1.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_copies_follow_a_change_of_weights(change):
    lm = lm_of("qwen2")
    before = packed_logits(lm, random_tokens(1, 5))
    CHANGES[change](lm.model)
    assert not torch.allclose(logits_of(lm, random_tokens(1, 5)), before)
    assert_packed_as_it_is(lm)


@pytest.mark.parametrize("part", ["model.layers.0.mlp.up_proj", "model.embed_tokens", "lm_head"])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_rows_that_change_through_data_are_seen_by_new_decoders_and_by_warm_up(part, is_transposed):
    """Neither place nor version tells of it, and few numbers change."""
    pair = family_pair("llama")
    pair = replace(pair, target=pair.target.float(), draft=pair.draft.float())
    weight = pair.target.get_submodule(part).weight
    if is_transposed:
        weight.data = weight.data.t().contiguous().t()

    def decoder(engine):
        return SpeculativeDecoder(pair, warp=Warp(0.0), engine=engine)

    def text(decoder):
        return decoder.generate([3, 4, 5], 24, stop_tokens=[]).tokens.tolist()

    old = decoder("compiled")
    before = text(old)
    weight.data[[1, 5, 7]] *= -20.0
    expected = text(decoder("eager"))
    assert expected != before
    assert text(decoder("compiled")) == expected
    assert text(old) == expected  # what the new one has found
    weight.data[[2, 6, 8]] *= -20.0
    expected = text(decoder("eager"))
    old.warm_up()
    assert text(old) == expected


def test_only_copies_of_changed_weights_are_renewed(lm):
    before = packed_model(lm, []).copies
    lm.model.model.layers[1].mlp.up_proj.weight.mul_(2)
    after = packed_model(lm, []).copies
    renewed = [one is not other for one, other in zip(before, after, strict=True)]
    assert [number for number, is_new in enumerate(renewed) if is_new] == [7]


def test_copies_follow_weights_that_are_replaced_twice(lm):
    """Memory that one change frees may be where the next one puts its weights."""
    for _ in range(4):
        assert_packed_as_it_is(lm)
        for _ in range(2):
            lm.model.load_state_dict(changed_weights(lm.model), assign=True)
    assert_packed_as_it_is(lm)


def test_too_little_memory_is_said_once(lm, monkeypatch, caplog):
    """Every step asks, and the available memory is never the same twice."""
    artefacts.warn_once.cache_clear()
    needed = sum(module.weight.nbytes for module in lm.model.modules() if type(module) is nn.Linear)
    memory = {"available": 0.0}
    monkeypatch.setattr(packed, "available_memory", lambda: memory["available"])
    for share in (0.0, 0.5, 1.2):
        memory["available"] = share * needed
        assert packed_model(lm, []) is None
    (record,) = caplog.records
    assert "linear maps are not packed, and verification is slower" in record.message
    memory["available"] = 1.3 * needed
    assert packed_model(lm, []) is not None
    memory["available"] = 0.0
    assert packed_model(lm, []) is not None  # copies that exist need no more


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_in_rows_are_packed_for_any_number_of_tokens_in_float32(dtype):
    lm = LanguageModel(tiny_pair().target.to(dtype))
    engine = CpuEngine(lm, 32, num_rows=2)
    in_rows = compiled.StepKind(all_logits=True, rows=True)
    alone = compiled.StepKind()
    few, many = (engine._shape(count, 32, in_rows) for count in (MOST_TOKENS, MOST_TOKENS + 1))
    assert (few == many) is (dtype == torch.float32)
    assert engine._shape(MOST_TOKENS, 32, alone) != engine._shape(MOST_TOKENS + 1, 32, alone)


def tokens_of(engine):
    """Return what a pair in float32 decodes, whose two engines have steps of three kinds."""
    pair = tiny_pair()
    pair.target.float()
    pair.draft.float()
    rule = stopping.FixedLength(3)
    decoder = SpeculativeDecoder(pair, stopping=rule, warp=Warp(temperature=0), engine=engine)
    return decoder.generate([0, 1, 2], 24).tokens.tolist()


def test_decoding_without_operators(monkeypatch, caplog):
    def fail(path):
        raise RuntimeError("no such header\nand more")

    loaded = [*cpu._loaded]
    cpu._loaded.clear()
    load_operators.cache_clear()
    monkeypatch.setattr(cpu, "_load_library", fail)
    try:
        assert tokens_of("compiled") == tokens_of("eager")
    finally:
        cpu._loaded.extend(loaded)
        load_operators.cache_clear()
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.message.endswith("operators cannot be built: no such header")


def test_the_panels_of_a_group_are_those_of_its_weights_in_turn(lm):
    layer = lm.model.model.layers[0].mlp
    together = _pack(torch.cat([layer.gate_proj.weight, layer.up_proj.weight]))
    assert torch.equal(packed_model(lm, []).copies[3].panels, together)


class Scaled(torch.Tensor):
    """A weight that is made of two tensors, as quantized ones are, and has no memory of its own."""

    @staticmethod
    def __new__(cls, numbers, scale):
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)

    def __init__(self, numbers, scale):
        self.numbers = numbers
        self.scale = scale

    def __tensor_flatten__(self):
        return ["numbers", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        return cls(parts["numbers"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scale)
        plain = [arg.numbers * arg.scale if isinstance(arg, Scaled) else arg for arg in args]
        return function(*plain, **(kwargs or {}))


def test_a_weight_that_is_made_of_tensors_has_their_places():
    module = nn.Module()
    numbers = torch.ones(4, 6, dtype=torch.int8)
    module.weight = nn.Parameter(Scaled(numbers, torch.tensor(0.5)), requires_grad=False)
    weight = module.weight
    weights = Weights(module)
    assert weights.are_those_of(module)
    weight.scale.fill_(2.0)
    assert not weights.are_those_of(module) and Weights(module).are_those_of(module)
    weights = Weights(module)
    # A module that is moved keeps the weight and exchanges what it is made of.
    weight.numbers = weight.numbers.clone()
    assert not weights.are_those_of(module)
    weights = Weights(module)
    module.weight = nn.Parameter(Scaled(weight.numbers, weight.scale), requires_grad=False)
    assert not weights.are_those_of(module)


def test_a_layer_with_a_weight_that_is_made_of_tensors_is_left_as_it_is():
    lm = lm_of("llama")
    layer = lm.model.model.layers[0]
    numbers = layer.mlp.up_proj.weight.round().to(torch.int8)
    layer.mlp.up_proj.weight = nn.Parameter(Scaled(numbers, torch.ones(())), False)
    assert not is_layer(layer) and not packed._is_packable(layer.mlp.up_proj)
    assert is_layer(lm.model.model.layers[1]) and packed._is_packable(layer.mlp.down_proj)


ALL = ("hidden", "embedding", "draft_prob", "max_prob", "entropy")
HEADS = {
    "default": HeadConfig(160, inputs=ALL, depth=3, width=20),
    "no blocks": HeadConfig(7, inputs=ALL, depth=0, width=5),
    "several panels": HeadConfig(70, inputs=ALL, depth=1, width=100),
    "shared by threads": HeadConfig(640, inputs=("hidden", "embedding"), depth=2, width=160),
    "SpecDec++'s, without a projection": HeadConfig(
        64, inputs=("hidden",), depth=4, predicts="input_token"
    ),
}


def random_head(name):
    torch.manual_seed(0)
    head = AcceptanceHead(HEADS[name]).requires_grad_(False)
    for tensor in (*head.parameters(), *head.buffers()):
        tensor.normal_(std=0.2)
    return head


def features_of(head, *shape):
    generator = torch.Generator().manual_seed(1)
    vectors = {"hidden": (head.config.hidden_size,), "embedding": (head.config.hidden_size,)}
    features = {}
    for name in head.config.inputs:
        features[name] = torch.rand((*shape, *vectors.get(name, ())), generator=generator)
    return features


def packed_head_logits(head, features):
    networks = packed_model(tiny_pair().draft_lm, [head]).networks
    assert isinstance(networks[head], PackedNetwork)
    with computing(CpuOperations(networks)):
        return head(features)


@pytest.mark.parametrize("name", HEADS)
def test_the_logits_of_a_head(name, threads):
    head = random_head(name)
    for shape in ((), (1,), (5,), (3, 14)):
        features = features_of(head, *shape)
        actual = packed_head_logits(head, features)
        torch.testing.assert_close(actual, head(features), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    "change",
    [
        lambda head: head.blocks[1].linear.weight.add_(0.5),
        lambda head: head.input_mean.add_(0.1),
        lambda head: head.blocks[1].linear.weight.data.mul_(1.5),
    ],
    ids=["learns", "is scaled again", "is written past the version counter"],
)
def test_a_head_that_changes_is_packed_again(change):
    head = random_head("default")
    features = features_of(head, 2)
    before = packed_head_logits(head, features)
    change(head)
    assert not torch.allclose(head(features), before)
    torch.testing.assert_close(
        packed_head_logits(head, features), head(features), atol=2e-5, rtol=2e-5
    )


class Shifted(AcceptanceHead):
    def score(self, inputs):
        return super().score(inputs) + 1


@pytest.mark.parametrize("part", ["the class", "a map", "a hook", "the type"])
def test_a_network_that_computes_something_else_is_left_to_torch(part):
    head = random_head("default")
    assert _is_network(head) and not _is_network(nn.Linear(3, 3))
    if part == "the class":
        head = Shifted(head.config)
    elif part == "a map":
        head.readout = type("Other", (nn.Linear,), {})(20, 1)
    elif part == "a hook":
        head.blocks[0].register_forward_hook(lambda block, inputs, output: 2 * output)
    else:
        head.double()
    assert not _is_network(head)
