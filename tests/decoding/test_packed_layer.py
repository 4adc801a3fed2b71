"""A decoder layer that one operator computes, computes what transformers' layer does, and others
are left to their maps.
"""

import pytest
import torch
from fakes import needs_compiler
from families import CONFIGS, VOCAB_SIZE, WINDOW, tiny_model
from torch import nn
from transformers import LlamaConfig, MistralConfig
from transformers.cache_utils import Cache

from specheads.decoding.engine import make_engine
from specheads.decoding.engine.artefacts import name_of
from specheads.decoding.engine.compiled import CompiledEngine, StepKind, StepModule, StepOperations
from specheads.decoding.engine.cpu import CpuStep
from specheads.decoding.engine.cpu.packed import _PackedLayer, is_layer, packed_model
from specheads.decoding.engine.reading import ChainLayer
from specheads.pair.language_model import LanguageModel
from specheads.pair.quantization import round_weights

pytestmark = [needs_compiler, pytest.mark.usefixtures("built_operators")]

SHAPE = CONFIGS["llama"].to_dict()
SIZES = {
    name: SHAPE[name]
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
}
SIZES |= {"num_hidden_layers": 2, "vocab_size": VOCAB_SIZE, "max_position_embeddings": WINDOW}
FAMILIES = {
    "llama": CONFIGS["llama"],
    "qwen2": CONFIGS["qwen2"],  # with biases
    "mistral": MistralConfig(**SIZES, intermediate_size=48, sliding_window=12),
    # A small last part
    "inputs in groups": LlamaConfig(
        **SIZES | {"hidden_size": 64, "head_dim": 16}, intermediate_size=288
    ),
    "sizes between vectors": LlamaConfig(
        hidden_size=70,
        intermediate_size=94,
        num_attention_heads=5,
        num_key_value_heads=5,
        head_dim=14,
        num_hidden_layers=2,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=WINDOW,
    ),
}
EVERY_LOGIT = StepKind(all_logits=True)
STARTS = (0, 7, 60)
COUNTS = (1, 2, 5, 12, 13, 25)


def lm_of(name, dtype=torch.float32):
    return LanguageModel(tiny_model(FAMILIES[name], seed=4).to(dtype))


def random_tokens(count, seed=0):
    return torch.randint(VOCAB_SIZE, (1, count), generator=torch.Generator().manual_seed(seed))


def logits_of(output, *_):
    return output.logits


logits_of.compile_key = "logits"


class Step:
    """Forward passes on static memory, in which a text of `start` tokens is already.

    With or without packed layers.
    """

    def __init__(self, lm, start):
        self.lm = lm
        self.start = start
        self.engine = CompiledEngine(lm, WINDOW - 64)
        if start:
            self.engine.forward(random_tokens(start, seed=1))

    def __call__(self, tokens, packed, kind=EVERY_LOGIT, inputs=(), at=None):
        memory = [(keys.clone(), values.clone()) for keys, values in self.engine._memory]
        start = torch.tensor(self.start if at is None else at)
        operations = (CpuStep if packed else StepOperations)(self.lm, [], few=True, rows=False)
        return (
            StepModule(operations, logits_of, kind)(
                tokens, start, self.engine._places[:128], memory, inputs
            ),
            memory,
        )


def largest_difference(ones, others):
    return max(
        float((one.double() - other.double()).abs().max())
        for one, other in zip(ones, others, strict=True)
    )


def parts(result):
    """Return logits, keys and values."""
    logits, memory = result
    return [logits, *(each for layer in memory for each in layer)]


def wide_copy(name, lm):
    """Return the same model in float64."""
    wide = LanguageModel(tiny_model(FAMILIES[name], seed=4))
    weights = {key: value.double() for key, value in lm.model.state_dict().items()}
    wide.model.load_state_dict(weights)
    return wide


@torch.no_grad()
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_has_the_logits_keys_and_values_of_transformers(name, start, threads):
    step = Step(lm_of(name), start)
    assert all(is_layer(layer) for layer in step.lm.model.model.layers)
    for count in COUNTS:
        tokens = random_tokens(count)
        actual = parts(step(tokens, packed=True))
        assert largest_difference(actual, parts(step(tokens, packed=False))) < 2e-4


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_is_as_exact_as_transformers(name, dtype):
    squares = {True: 0.0, False: 0.0}
    for start in STARTS[1:]:  # at the first position both compute the same maps
        step = Step(lm_of(name, dtype), start)
        wide_step = Step(wide_copy(name, step.lm), start)
        # Both read the same text before.
        for layers in zip(wide_step.engine._memory, step.engine._memory, strict=True):
            for exact, narrow in zip(*layers, strict=True):
                exact.copy_(narrow)
        for seed in range(8):
            tokens = random_tokens(20, seed)
            exact = parts(wide_step(tokens, packed=False))[0]
            for packs in (True, False):
                squares[packs] += (parts(step(tokens, packs))[0].double() - exact).square().mean()
    # Of one text the error differs by up to 1.8 times, of these sixteen by up to 1.12.
    assert squares[True] < 1.25**2 * squares[False]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "sizes between vectors"])
def test_a_token_has_the_same_bits_in_every_number_of_tokens(name, dtype, threads):
    step = Step(lm_of(name, dtype), 9)
    tokens = random_tokens(25)
    whole, _ = step(tokens, packed=True)
    for count in COUNTS[:-1]:
        logits, memory = step(tokens[:, :count], packed=True)
        assert torch.equal(logits, whole[:, :count])
    for (keys, values), (to_keys, to_values) in zip(memory, step.engine._memory, strict=True):
        to_keys.copy_(keys)
        to_values.copy_(values)
    logits, _ = step(tokens[:, 13:14], packed=True, at=9 + 13)
    assert torch.equal(logits[:, 0], whole[:, 13])


def storages_of(lm):
    """The types of a model's packed weights."""
    return {
        each.dtype
        for copied in packed_model(lm, []).copies
        for name, each in copied.named_buffers()
        if name != "bias"
    }


@torch.no_grad()
@pytest.mark.parametrize(
    ("form", "storage"), [("Q4_1", torch.uint8), ("Q8_0", torch.int8)], ids=str
)
# Sums over groups without the offset m are larger than those with it. 16 bits of activations are 9
# fewer than float32 has, and 8 bits 17.
@pytest.mark.parametrize(("input_bits", "most"), [(32, 2.5), (16, 2.5 * 2**9), (8, 2.5 * 2**17)])
def test_a_step_whose_weights_are_packed_in_groups_rounds_as_its_activations_do(
    form, storage, input_bits, most, threads
):
    lm = lm_of("inputs in groups", torch.float32)
    lm.input_bits = input_bits
    round_weights(lm.model, form)
    wide = wide_copy("inputs in groups", lm)
    tokens = random_tokens(20)
    step = Step(lm, 9)
    exact = parts(Step(wide, 9)(tokens, packed=False))[0]
    together, _ = step(tokens, packed=True)
    assert storages_of(lm) == {storage, torch.int8}
    errors = [
        (each.double() - exact).square().mean().sqrt()
        for each in (together, parts(step(tokens, packed=False))[0])
    ]
    assert errors[0] < most * errors[1]
    assert (errors[0] > 5 * errors[1]) == (input_bits < 32)
    for count in COUNTS[:-1]:
        assert torch.equal(step(tokens[:, :count], packed=True)[0], together[:, :count])


@torch.no_grad()
def test_rows_of_a_batch_are_computed_each_with_its_memory():
    lm = lm_of("qwen2")
    layer = lm.model.model.layers[0]
    hidden = torch.randn(3, 4, 32)
    copied = _PackedLayer(layer)
    mask = torch.ones(3, 1, 4, 16, dtype=torch.bool).tril(diagonal=5)
    mask[1, :, :, :2] = False  # a row that begins later
    angles = lm.model.model.rotary_emb(hidden, torch.arange(5, 9)[None])
    whole_keys = torch.randn(3, 2, 32, 8)
    whole_values = torch.randn(3, 2, 32, 8)

    def compute(rows):
        keys = whole_keys[rows].clone()
        values = whole_values[rows].clone()
        memory = Cache(layers=[ChainLayer(keys, values, 16, torch.tensor(5))])
        output = copied.compute(0, 32, layer, hidden[rows], angles, mask[rows], memory)
        return output, keys, values

    together = compute(slice(0, 3))
    for row in range(3):
        alone = compute(slice(row, row + 1))
        for one, every in zip(alone, together, strict=True):
            assert torch.equal(one[0], every[row])
    assert not torch.equal(together[0][0], together[0][1])


@torch.no_grad()
def test_too_many_tokens_for_the_memory_are_refused():
    step = Step(lm_of("llama"), 0)
    with pytest.raises(RuntimeError, match="5 tokens at 124 of row 0 do not fit"):
        step(random_tokens(5), packed=True, at=124)


@torch.no_grad()
def test_a_layer_outside_of_a_step_computes_as_it_did():
    lm = lm_of("llama")
    tokens = random_tokens(6)
    expected = lm.hidden_states(tokens, use_cache=False)
    assert torch.equal(packed_model(lm, []).lm.hidden_states(tokens, use_cache=False), expected)


def changed(change):
    layer = lm_of("llama").model.model.layers[0]
    change(layer)
    return layer


def put(module, name, value):
    setattr(module, name, value)


def twice(linear):
    class Other(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    other = Other(linear.in_features, linear.out_features, bias=False, dtype=linear.weight.dtype)
    other.weight = linear.weight
    return other


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: put(layer.mlp, "act_fn", nn.GELU()),
        lambda layer: put(layer.mlp, "up_proj", twice(layer.mlp.up_proj)),
        lambda layer: put(
            layer.mlp.down_proj, "bias", nn.Parameter(torch.ones(32, dtype=torch.float32))
        ),
        lambda layer: put(
            layer.self_attn.q_proj, "bias", nn.Parameter(torch.ones(32, dtype=torch.float32))
        ),
        lambda layer: layer.mlp.bfloat16(),
        lambda layer: layer.to(torch.float64),
        lambda layer: layer.self_attn.register_forward_hook(lambda *args: None),
        lambda layer: put(layer, "__class__", type("Mine", (type(layer),), {})),
    ],
    ids=[
        "activation",
        "class of a map",
        "bias",
        "one bias of three",
        "types",
        "another type",
        "hook",
        "class of the layer",
    ],
)
def test_a_layer_that_someone_changed_is_left_to_its_maps(change):
    assert is_layer(lm_of("llama").model.model.layers[0])
    assert not is_layer(changed(change))


@pytest.mark.parametrize("name", CONFIGS)
def test_which_families_have_the_operator(name):
    layers = [
        module for module in tiny_model(CONFIGS[name], seed=0).float().modules() if is_layer(module)
    ]
    assert len(layers) == (2 if name in ("llama", "llama, tied", "qwen2") else 0)


@needs_compiler
@torch.no_grad()
@pytest.mark.parametrize("engine", ["eager", "compiled", "cuda_graph"])
def test_a_model_whose_layers_are_read_stays_packed_and_kept(engine):
    """Layer inputs are transformers' hidden states, in prompts, steps and rows."""
    lm = lm_of("llama")
    tokens = random_tokens(9)
    # Transformers leaves hooks in the model that is asked for hidden states.
    states = lm.model(tokens, output_hidden_states=True, use_cache=False).hidden_states
    expected = torch.cat([states[0], states[1]], dim=-1)

    def of_layers(output, *inputs):
        return output.hidden * 1, output.layer_inputs * 1

    of_layers.compile_key = "layer inputs"
    reading = make_engine(engine, lm, 64, layers=(0, 1))
    prompt = reading.forward(tokens[:, :4]).layer_inputs
    assert name_of(lm, of_layers) is not None
    if engine == "compiled":
        operations = CpuStep(lm, [], few=True, rows=False)
        assert operations.packed is not None and all(map(is_layer, lm.model.model.layers))
    step = reading.compiled_step(of_layers)
    for start, end in ((4, 5), (5, 9)):
        _, inputs = step(tokens[:, start:end])
        torch.testing.assert_close(inputs, expected[:, start:end], atol=1e-4, rtol=0)
    torch.testing.assert_close(prompt, expected[:, :4], atol=1e-4, rtol=0)
    assert make_engine("eager", lm, 64).forward(tokens).layer_inputs is None
