"""Packed copies of linear maps compute what the maps compute, are shared, follow every change, and
are optional.
"""

import logging
from functools import cache

import pytest
import torch
from fakes import needs_compiler, tiny_pair
from families import CONFIGS, VOCAB_SIZE, family_pair
from torch import nn

from specheads import SpeculativeDecoder, Warp, generate_baseline, stopping
from specheads.decoding.engine import artefacts, compiled, cpu
from specheads.decoding.engine.compiled import MOST_TOKENS
from specheads.decoding.engine.compiled_program import CompiledProgram, Weights
from specheads.decoding.engine.cpu import CpuStep, load_operators, packed
from specheads.decoding.engine.cpu.packed import _pack, packed_model
from specheads.pair.language_model import LanguageModel

pytestmark = [needs_compiler, pytest.mark.usefixtures("built_operators")]

# The numbers of outputs of the maps of one layer, those together that read the same input, and of
# the maps before and after.
GATED = [[32, 16, 16], [32], [48, 48], [32]]
SIZES = {name: [*GATED, *GATED, [VOCAB_SIZE]] for name in ("qwen3", "gemma2")}
SIZES |= {name: ["a layer", "a layer", [VOCAB_SIZE]] for name in ("llama", "llama, tied", "qwen2")}
OPT = [[32, 32, 32], [32], [48], [32]]
SIZES |= {"opt": [*OPT, *OPT, [VOCAB_SIZE]], "opt-350m": [[32], *OPT, *OPT, [16], [VOCAB_SIZE]]}
SIZES |= {
    "bloom": [*[[96], [32], [128], [32]] * 2, [VOCAB_SIZE]],
    "gpt-neox": [*[[96], [32], [48], [32]] * 2, [VOCAB_SIZE]],
}


@pytest.fixture
def lm():
    return family_pair("qwen3").target_lm


def logits_of(lm, tokens):
    return lm.logits(lm.hidden_states(tokens, use_cache=False))


def packed_logits(lm, tokens):
    return logits_of(packed_model(lm, []).lm, tokens)


def random_tokens(*shape):
    return torch.randint(VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(sum(shape)))


def assert_packed_as_it_is(lm):
    tokens = random_tokens(2, 7)
    torch.testing.assert_close(packed_logits(lm, tokens), logits_of(lm, tokens), atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_maps_that_read_the_same_input_are_one_map(name):
    copies = packed_model(family_pair(name).target_lm, []).copies
    assert sorted(str(getattr(copied, "sizes", "a layer")) for copied in copies) == sorted(
        map(str, SIZES[name])
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_model_computes_the_same_logits(name):
    lm = family_pair(name).target_lm
    linears = [module for module in lm.model.modules() if type(module) is nn.Linear]
    copies = packed_model(lm, [])
    for shape in ((1, 1), (1, 5), (3, 4), (1, MOST_TOKENS)):
        expected = logits_of(lm, random_tokens(*shape))
        replaced = [module for module in copies.lm.model.modules() if "forward" in vars(module)]
        assert len(
            {
                id(part.weight)
                for module in replaced
                for part in module.modules()
                if type(part) is nn.Linear
            }
        ) == len({id(linear.weight) for linear in linears})
        actual = logits_of(copies.lm, random_tokens(*shape))
        assert not any("forward" in vars(module) for module in lm.model.modules())
        torch.testing.assert_close(actual, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ["llama, tied", "qwen2", "qwen3", "opt"])
def test_a_model_that_fits_16_bits_is_packed_in_them_and_keeps_its_bits(name, monkeypatch):
    lm = family_pair(name).target_lm
    lm.model.to(torch.bfloat16).to(torch.float32)
    copies = packed_model(lm, [])
    tokens = random_tokens(2, 7)
    narrow = logits_of(copies.lm, tokens)
    panels = [
        tensor
        for copied in copies.copies
        for name, tensor in copied.named_buffers()
        if name != "bias"
    ]
    assert {panel.dtype for panel in panels} == {torch.bfloat16}
    monkeypatch.setattr(packed, "_storage", lambda *weights: weights[0].dtype)
    packed._copies.clear()
    assert torch.equal(packed_logits(lm, tokens), narrow)


def test_maps_with_and_without_bias_are_separate(lm):
    attention = lm.model.model.layers[0].self_attn
    attention.k_proj.bias = nn.Parameter(torch.randn(16, dtype=torch.float64), requires_grad=False)
    assert [copied.sizes for copied in packed_model(lm, []).copies][1:3] == [[32, 16], [16]]
    assert_packed_as_it_is(lm)


def test_maps_that_someone_changed_are_left_as_they_are(lm):
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    attention = lm.model.model.layers[0].self_attn
    weight = attention.o_proj.weight
    attention.o_proj = Doubled(32, 32, bias=False)
    attention.o_proj.weight = weight
    assert [copied.sizes for copied in packed_model(lm, []).copies][1:3] == [[32, 16, 16], [48, 48]]
    assert_packed_as_it_is(lm)


def test_copies_are_shared_by_all_engines_of_a_model(lm):
    first = packed_model(lm, [])
    second = packed_model(lm, [])
    assert all(one is other for one, other in zip(first.copies, second.copies, strict=True))


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
    lm = family_pair("qwen2").target_lm
    before = packed_logits(lm, random_tokens(1, 5))
    CHANGES[change](lm.model)
    assert not torch.allclose(logits_of(lm, random_tokens(1, 5)), before)
    assert_packed_as_it_is(lm)


def test_only_copies_of_changed_weights_are_renewed(lm):
    before = packed_model(lm, []).copies
    lm.model.model.layers[1].mlp.up_proj.weight.mul_(2)
    renewed = [
        one is not other for one, other in zip(before, packed_model(lm, []).copies, strict=True)
    ]
    assert [number for number, is_new in enumerate(renewed) if is_new] == [7]


def test_copies_follow_weights_that_are_replaced_twice(lm):
    """Memory that one change frees may be where the next one puts its weights."""
    for _ in range(4):
        assert_packed_as_it_is(lm)
        for _ in range(2):
            lm.model.load_state_dict(changed_weights(lm.model), assign=True)
    assert_packed_as_it_is(lm)


def test_a_model_that_is_cast_is_packed_again(lm):
    packed_model(lm, [])
    lm.model.float()
    tokens = random_tokens(1, 5)
    assert {copied.panels.dtype for copied in packed_model(lm, []).copies} == {torch.float32}
    torch.testing.assert_close(packed_logits(lm, tokens), logits_of(lm, tokens), atol=1e-3, rtol=0)


def test_copies_go_with_their_model():
    lm = tiny_pair().target_lm
    number = len(packed._copies)
    copies = packed_model(lm, [])
    assert len(packed._copies) == number + len(copies.copies)
    del lm, copies
    assert len(packed._copies) == number


def test_too_little_memory(lm, monkeypatch, caplog):
    artefacts.warn_once.cache_clear()
    needed = sum(module.weight.nbytes for module in lm.model.modules() if type(module) is nn.Linear)
    monkeypatch.setattr(packed, "available_memory", lambda: 1.2 * needed)
    assert packed_model(lm, []) is None and packed_model(lm, []) is None
    (record,) = caplog.records
    assert "linear maps are not packed, and verification is slower" in record.message
    monkeypatch.setattr(packed, "available_memory", lambda: 1.3 * needed)
    assert packed_model(lm, []) is not None and len(caplog.records) == 1


def test_too_little_memory_is_said_once(lm, monkeypatch, caplog):
    """Every step asks, and the available memory is never the same twice."""
    artefacts.warn_once.cache_clear()
    for available in (0.0, 3e6, 6e6):
        monkeypatch.setattr(packed, "_SPARE_MEMORY", 1e-6)
        monkeypatch.setattr(packed, "available_memory", lambda available=available: available)
        assert packed_model(lm, []) is None and packed_model(tiny_pair().draft_lm, []) is None
    assert len(caplog.records) == 1


def test_memory_for_copies_that_exist_is_not_needed_again(lm, monkeypatch):
    packed_model(lm, [])
    monkeypatch.setattr(packed, "available_memory", lambda: 0.0)
    assert packed_model(lm, []) is not None


@pytest.fixture
def traced(monkeypatch):
    """The names of the operations of every step that is traced, by the class of its epilogue.

    Steps then run uncompiled.
    """
    names = {}

    def compile_program(module, args, open_sizes, options, open_inputs):
        shapes = tuple(
            {open_sizes[i]: torch.export.Dim.DYNAMIC} if i in open_sizes else None
            for i in range(len(args))
        )
        shapes = (
            *shapes[:3],
            [(None, None)] * len(args[3]),
            torch.utils._pytree.tree_map(lambda leaf: None, args[4]),
        )
        exported = torch.export.export(module, args, dynamic_shapes=shapes, strict=False)
        kind = type(module.step[0]).__name__, args[0].shape[1]
        names[kind] = [
            str(node.target) for node in exported.graph.nodes if node.op == "call_function"
        ]
        raise RuntimeError("only traced")

    monkeypatch.setattr(CompiledProgram, "compile", compile_program)
    monkeypatch.delenv("SPECHEADS_ENGINE")
    monkeypatch.setenv("SPECHEADS_CACHE", "/dev/null/none")
    return names


# Not `matmul`, with which transformers up to 5.18 computes rotary positions.
PLAIN = ("linear.default", "mm.default", "scaled_dot_product_attention.default")


def is_replaced(names):
    """Return whether linear maps and attention, or layers, are operators.

    None where only a part of them is.
    """
    ours = {
        f"specheads.{name}.default"
        for name in ("packed_linear", "masked_attention", "decoder_layer")
    } & set(names)
    plain = [name for name in names if name.startswith("aten.") and name.split(".", 1)[1] in PLAIN]
    return (
        len(ours) == 2 and "specheads.packed_linear.default" in ours and not plain
        if ours
        else False
        if plain
        else None
    )


def test_steps_over_few_tokens_are_made_of_the_operators(traced):
    pair = tiny_pair(window=2 * MOST_TOKENS)
    decoder = SpeculativeDecoder(
        pair, stopping=stopping.FixedLength(3), warp=Warp(temperature=0), engine="auto"
    )
    decoder.warm_up()
    decoder.generate(list(range(3)) * (MOST_TOKENS // 2), 8)
    assert {count == 1 for (_, count) in traced} == {True, False}
    for (_, count), names in traced.items():
        assert is_replaced(names) is (count <= MOST_TOKENS), names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_in_rows_are_packed_for_any_number_of_tokens_in_float32(dtype):
    lm = LanguageModel(tiny_pair().target.to(dtype))
    engine = compiled.CompiledEngine(lm, 32, num_rows=2, operations=CpuStep)
    in_rows = compiled.StepKind(all_logits=True, rows=True)
    few, many = (engine._shape(count, 32, in_rows) for count in (MOST_TOKENS, MOST_TOKENS + 1))
    assert (few == many) is (dtype == torch.float32)
    assert engine._shape(MOST_TOKENS, 32, compiled.StepKind()) != engine._shape(
        MOST_TOKENS + 1, 32, compiled.StepKind()
    )


WARP = Warp(temperature=0)


def tokens_of(engine):
    """Return what a pair decodes, whose two engines have steps of three kinds."""
    decoder = SpeculativeDecoder(
        tiny_pair(), stopping=stopping.FixedLength(3), warp=WARP, engine=engine
    )
    return decoder.generate([0, 1, 2], 24).tokens.tolist()


@pytest.mark.full
def test_decoding_without_memory_for_copies(monkeypatch, caplog):
    artefacts.warn_once.cache_clear()
    monkeypatch.setattr(packed, "available_memory", lambda: 0.0)
    assert tokens_of("compiled") == tokens_of("eager")
    assert ["not packed" in record.message for record in caplog.records].count(True) == 1


def test_decoding_without_operators(monkeypatch, caplog):
    def fail(path):
        raise RuntimeError("no such header\nand more")

    monkeypatch.setattr(cpu, "_load_library", fail)
    monkeypatch.setattr(cpu, "load_operators", cache(load_operators.__wrapped__))
    texts = [
        generate_baseline(tiny_pair(), [0, 1, 2], 24, warp=WARP, engine=name).tokens.tolist()
        for name in ("compiled", "eager")
    ]
    assert texts[0] == texts[1]
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.message.endswith("operators cannot be built: no such header")


def test_operators_that_fail_without_a_reason(monkeypatch, caplog):
    def fail(path):
        raise NotImplementedError

    monkeypatch.setattr(cpu, "_load_library", fail)
    assert load_operators.__wrapped__() is False
    assert "operators cannot be built" in caplog.text


def test_the_panels_of_a_group_are_those_of_its_weights_in_turn(lm):
    layer = lm.model.model.layers[0].mlp
    assert torch.equal(
        packed_model(lm, []).copies[3].panels,
        _pack(torch.cat([layer.gate_proj.weight, layer.up_proj.weight])),
    )


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
    weight = Scaled(torch.ones(4, 6, dtype=torch.int8), torch.tensor(0.5))
    module = nn.Module()
    module.weight = nn.Parameter(weight, requires_grad=False)
    weight = module.weight
    weights = Weights(module)
    assert weights.are_those_of(module)
    weight.scale.fill_(2.0)
    assert not weights.are_those_of(module) and Weights(module).are_those_of(module)
    weights = Weights(module)
    weight.numbers = (
        weight.numbers.clone()
    )  # a module that is moved keeps the weight and exchanges what it is made of
    assert not weights.are_those_of(module)
    weights = Weights(module)
    module.weight = nn.Parameter(Scaled(weight.numbers, weight.scale), requires_grad=False)
    assert not weights.are_those_of(module)


def test_a_layer_with_a_weight_that_is_made_of_tensors_is_left_as_it_is():
    lm = family_pair("llama").target_lm
    layer = lm.model.model.layers[0]
    weight = layer.mlp.up_proj.weight
    layer.mlp.up_proj.weight = nn.Parameter(
        Scaled(weight.round().to(torch.int8), torch.ones((), dtype=weight.dtype)), False
    )
    assert not packed.is_layer(layer) and not packed._is_packable(layer.mlp.up_proj)
    assert packed.is_layer(lm.model.model.layers[1]) and packed._is_packable(layer.mlp.down_proj)
