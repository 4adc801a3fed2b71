"""Engines agree with the eager one, are chosen as documented, and keep what they compile."""

import logging

import pytest
import torch
import torch._inductor.config
from fakes import needs_compiler, tiny_pair
from families import VOCAB_SIZE, WINDOW, family_pair
from torch.utils._pytree import tree_leaves

from specheads import (
    AcceptanceHead,
    HeadConfig,
    SpeculativeDecoder,
    Warp,
    generate_baseline,
    papers,
    stopping,
    verification,
)
from specheads.decoding.drafting import ChainState, ChainStep
from specheads.decoding.engine import EagerEngine, compiled, make_engine
from specheads.decoding.engine.artefacts import folder, name_of
from specheads.decoding.engine.cuda_graph import GraphEngine
from specheads.decoding.step_inputs import DraftMemory
from specheads.errors import UserError

RULES = [verification.TokenVerification(), verification.BlockVerification()]
RULES += [papers.BiasedVerification(), papers.BigLittle(), verification.SyntheticVerification()]


def fail(*args, **kwargs):
    raise RuntimeError("no such instruction\nand more")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.label)
@pytest.mark.parametrize(
    "engine", ["cuda_graph", pytest.param("compiled", marks=[needs_compiler, pytest.mark.full])]
)
def test_every_verification_rule_decides_the_same_in_every_engine(rule, engine):
    """In every run, `test_batching.py` compiles the rule in which there is most to get wrong."""
    outputs = []
    for name in ("eager", engine):
        decoder = SpeculativeDecoder(
            tiny_pair(scale=1.5),
            stopping=stopping.FixedLength(4),
            verification=rule,
            warp=Warp(top_k=3),
            engine=name,
        )
        outputs.append([decoder.generate([0, 1, 2], 40, seed=seed) for seed in range(4)])
    for eager, other in zip(*outputs, strict=True):
        assert other.tokens.tolist() == eager.tokens.tolist()
        assert [r.num_accepted for r in other.rounds] == [r.num_accepted for r in eager.rounds]


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_padding_reaches_beyond_the_window_without_harm(name):
    """OPT has an embedding per position, so a padded token has none there."""
    pair = family_pair(name)
    prompt = torch.arange(WINDOW - 20) % VOCAB_SIZE
    outputs = []
    for engine in ("eager", "cuda_graph"):
        decoder = SpeculativeDecoder(
            pair, stopping=stopping.FixedLength(6), warp=Warp(temperature=0), engine=engine
        )
        outputs.append(decoder.generate(prompt, 100))
    assert outputs[0].finish_reason == outputs[1].finish_reason == "context"
    assert outputs[0].tokens.tolist() == outputs[1].tokens.tolist()


def test_graphs_are_padded_to_few_sizes():
    engine = GraphEngine(tiny_pair(window=1000).target_lm, 1000)
    sizes = [engine.padded(count) for count in range(1, 41)]
    assert all(size >= count for count, size in enumerate(sizes, start=1))
    assert sorted(set(sizes)) == [4, 6, 8, 12, 16, 24, 32, 40]
    assert {engine._size(end) for end in range(1, 1001)} <= set(engine._sizes())


def test_no_verification_is_for_one_token_or_reads_all_memory():
    """What is compiled for a few tokens leaves out sizes that a compiler takes for constants."""
    lm = tiny_pair(window=2000).target_lm
    for kind, least in ((compiled.CompiledEngine, 2), (GraphEngine, 4)):
        for capacity in (64, 500, 1000, 1900):
            engine = kind(lm, capacity)
            assert min(engine.padded(count) for count in range(1, 40)) == least
            assert min(engine.padded_rows(count) for count in range(1, 40)) >= 3
            assert (
                max(engine._size(end) for end in range(1, capacity + 33))
                < engine._layers[0].capacity
            )
            assert max(engine._sizes()) < engine._layers[0].capacity


@needs_compiler
def test_auto_takes_the_compiler(monkeypatch):
    monkeypatch.delenv("SPECHEADS_ENGINE")
    assert isinstance(make_engine("auto", tiny_pair().target_lm, 64), compiled.CompiledEngine)


def test_auto_runs_eagerly_without_a_compiler_and_says_so(monkeypatch, caplog):
    monkeypatch.delenv("SPECHEADS_ENGINE")
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        engine = make_engine("auto", tiny_pair().target_lm, 64)
        with pytest.raises(UserError, match="Use engine=eager"):
            make_engine("compiled", tiny_pair().target_lm, 64)
    assert type(engine) is EagerEngine
    assert "no C++ compiler" in caplog.text


@needs_compiler
def test_a_model_that_cannot_be_compiled(monkeypatch, caplog):
    monkeypatch.delenv("SPECHEADS_ENGINE")
    monkeypatch.setattr(compiled, "load_or_compile", fail)
    pair = tiny_pair()
    warp = Warp(temperature=0)
    with pytest.raises(UserError, match="no such instruction.*engine=eager"):
        generate_baseline(pair, [0, 1], 8, warp=warp, engine="compiled")
    actual = generate_baseline(pair, [0, 1], 8, warp=warp, engine="auto")
    assert (
        actual.tokens.tolist()
        == generate_baseline(pair, [0, 1], 8, warp=warp, engine="eager").tokens.tolist()
    )
    assert "runs uncompiled" in caplog.text


@needs_compiler
def test_compiled_steps_are_kept_and_loaded(monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.DEBUG, "specheads")
    monkeypatch.setenv("SPECHEADS_CACHE", str(tmp_path))

    def tokens():
        caplog.clear()
        return generate_baseline(
            tiny_pair(), [0, 1], 8, warp=Warp(temperature=0), engine="compiled"
        ).tokens.tolist()

    expected = generate_baseline(
        tiny_pair(), [0, 1], 8, warp=Warp(temperature=0), engine="eager"
    ).tokens.tolist()
    assert tokens() == expected
    assert "compiled TargetStep" in caplog.text
    assert tokens() == expected
    assert "loaded TargetStep" in caplog.text
    (path,) = [path for path in folder().iterdir() if path.is_file()]
    path.write_bytes(path.read_bytes()[:100])
    assert tokens() == expected
    assert "is compiled again" in caplog.text


def test_the_environment_chooses_the_engine_of_auto(monkeypatch):
    monkeypatch.setenv("SPECHEADS_ENGINE", "cuda_graph")
    assert isinstance(make_engine("auto", tiny_pair().target_lm, 64), GraphEngine)
    monkeypatch.setenv("SPECHEADS_ENGINE", "warp")
    with pytest.raises(UserError, match="engine=warp must be one of auto, eager"):
        make_engine("auto", tiny_pair().target_lm, 64)


def test_a_nan_leaves_no_trace():
    pair = tiny_pair()
    decoder = SpeculativeDecoder(pair, warp=Warp(temperature=0), engine="cuda_graph")
    expected = decoder.generate([0, 1], 20).tokens.tolist()
    weight = pair.target.model.layers[0].self_attn.v_proj.weight
    kept = weight[0, 0].item()
    weight[0, 0] = float("nan")
    with pytest.raises(UserError, match="NaN"):
        decoder.generate([0, 1, 2, 1, 0, 2], 20)
    weight[0, 0] = kept
    assert decoder.generate([0, 1], 20).tokens.tolist() == expected


def test_drafts_as_long_as_the_window():
    pair = family_pair("llama")
    decoder = SpeculativeDecoder(
        pair, stopping=stopping.FixedLength(150), warp=Warp(temperature=0), engine="cuda_graph"
    )
    expected = generate_baseline(
        pair, [1, 2], 12, warp=Warp(temperature=0), engine="eager"
    ).tokens.tolist()
    assert decoder.generate([1, 2], 12).tokens.tolist() == expected


def test_a_model_that_is_cast_is_prepared_again():
    pair = tiny_pair()
    warp = Warp(temperature=0)
    decoder = SpeculativeDecoder(pair, warp=warp, engine="cuda_graph")
    decoder.generate([0, 1], 5)
    prepared = decoder.target_engine.num_prepared
    pair.target.load_state_dict(
        {k: v + 0.5 * torch.randn_like(v) for k, v in pair.target.state_dict().items()}, assign=True
    )
    actual = decoder.generate([0, 1], 20).tokens.tolist()
    assert decoder.target_engine.num_prepared > prepared
    assert actual == generate_baseline(pair, [0, 1], 20, warp=warp, engine="eager").tokens.tolist()


@pytest.mark.parametrize("between", [False, True], ids=["at once", "after another rule"])
def test_a_head_whose_weights_move_is_captured_again(between):
    head = AcceptanceHead(HeadConfig(16)).double().requires_grad_(False)

    def longest(bias):
        state = {name: torch.zeros_like(value) for name, value in head.state_dict().items()}
        head.load_state_dict(
            state | {"readout.bias": torch.full_like(head.readout.bias, bias)}, assign=True
        )
        if between:  # what another rule prepares must not hide that the head has moved
            decoder.with_stopping(stopping.FixedLength(2)).generate([0, 1], 30)
        return max(r.num_drafted for r in decoder.generate([0, 1], 30).rounds)

    decoder = SpeculativeDecoder(
        tiny_pair(),
        stopping=stopping.HeadThreshold(head, 0.5),
        warp=Warp(temperature=0),
        engine="cuda_graph",
    )
    longest(9.0)
    prepared = decoder.draft_engine.num_prepared
    assert longest(-9.0) == 1 < longest(9.0)
    assert decoder.draft_engine.num_prepared > prepared


def chain_step(lm, rule):
    return ChainStep(lm, Warp(), rule, DraftMemory(8, lm.vocab_size, lm.probs_dtype, lm.device))


def test_names_of_compiled_steps_tell_heads_and_models_apart():
    pair = tiny_pair()
    names = []

    def name(head=None, rule=None):
        rule = rule or stopping.HeadThreshold(head.requires_grad_(False))
        return name_of(pair.draft_lm, chain_step(pair.draft_lm, rule))

    for predicts, inputs in (
        ("input_token", ("hidden", "max_prob")),
        ("input_token", ("hidden", "entropy")),
        ("next_token", ("hidden", "entropy")),
        ("next_token", ("entropy", "hidden")),
    ):
        names.append(name(AcceptanceHead(HeadConfig(16, predicts=predicts, inputs=inputs))))
    names.append(
        name(
            AcceptanceHead(
                HeadConfig(16, predicts="next_token", inputs=("hidden", "entropy"))
            ).double()
        )
    )
    names.append(name(rule=stopping.FixedLength(3)))
    assert names[-1] == name(rule=stopping.FixedLength(4))
    pair.draft.train()
    names.append(name(rule=stopping.FixedLength(3)))
    assert len(set(names)) == len(names)


def test_an_epilogue_that_cannot_be_described_is_not_kept():
    class Mine(stopping.FixedLength):
        def __init__(self):
            super().__init__(2)
            self.compile_key = object()

    lm = tiny_pair().draft_lm
    assert name_of(lm, chain_step(lm, Mine())) is None


def test_code_whose_source_cannot_be_read_or_that_a_hook_may_change_is_not_kept():
    lm = tiny_pair().draft_lm
    step = chain_step(lm, stopping.FixedLength(2))
    assert name_of(lm, step) is not None
    handle = lm.model.model.norm.register_forward_hook(lambda *args: None)
    assert name_of(lm, step) is None
    handle.remove()
    mine = type("Mine", (stopping.FixedLength,), {"program": "mine", "__module__": "a notebook"})
    assert name_of(lm, chain_step(lm, mine(2))) is None


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_attention_without_masks_runs_eagerly(monkeypatch, caplog, attention):
    monkeypatch.delenv("SPECHEADS_ENGINE")
    lm = tiny_pair().target_lm
    lm.config._attn_implementation_internal = attention
    assert type(make_engine("auto", lm, 64)) is EagerEngine
    assert attention in caplog.text


@pytest.fixture(scope="module")
def state_reader():
    """A draft with one layer, so that its states come straight from a norm, and a step whose head
    reads them.
    """
    pair = tiny_pair(scale=2.0)
    torch.manual_seed(0)
    head = AcceptanceHead(HeadConfig(16, 1, inputs=("hidden",))).requires_grad_(False)
    torch.nn.init.normal_(head.readout.weight)
    step = chain_step(pair.draft_lm, stopping.HeadThreshold(head))
    return step, [make_engine(name, pair.draft_lm, 64) for name in ("eager", "compiled")]


@needs_compiler
@pytest.mark.parametrize("count", [2, 3])
def test_a_head_that_reads_the_last_of_several_states_does_not_change_the_distribution(
    count, state_reader
):
    step, engines = state_reader
    tokens = (torch.arange(count)[None] + 1) % 3
    actual = []
    for engine in engines:
        engine.rewind(0)
        engine.forward(torch.arange(7)[None] % 3, num_logits=0)
        state = ChainState(
            torch.zeros(1, dtype=torch.bool), step.rule.start_prompt(1, torch.device("cpu"))
        )
        uniform = torch.tensor([0.4]).double()
        ends = torch.zeros(3, dtype=torch.bool)
        new = engine.compiled_step(step)(tokens, step.memory.indices[1], uniform, ends, state)
        actual.append((step.memory.probs[0, 1].clone(), new.rule.survival.clone()))
    for first, other in zip(*actual, strict=True):
        torch.testing.assert_close(first, other, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def repeated():
    """A compiled draft of a tiny pair at position 60, next to the end of what a step reads first,
    and its draft step.
    """
    pair = tiny_pair(scale=2.0)
    pair.draft.float()
    torch.manual_seed(0)
    head = AcceptanceHead(HeadConfig(16, 1, inputs=("hidden",))).requires_grad_(False)
    step = chain_step(pair.draft_lm, stopping.HeadThreshold(head, 1.0))
    engine = make_engine("compiled", pair.draft_lm, 128)
    run = engine.compiled_step(step)
    uniform, ends, state = inputs_of(step)
    engine.warm_up(run, (1,), step.memory.indices[0], uniform[:1], ends, state)
    engine.forward(torch.arange(60)[None] % 3, num_logits=0)
    return engine, step, run


def inputs_of(step, end=None):
    """Return uniform numbers, the tokens that end a response, and a draft's first state."""
    ends = torch.zeros(3, dtype=torch.bool)
    if end is not None:
        ends[end] = True
    state = ChainState(
        torch.zeros(1, dtype=torch.bool), step.rule.start_prompt(1, torch.device("cpu"))
    )
    return torch.tensor([0.1, 0.7, 0.4, 0.9, 0.2, 0.6, 0.3, 0.8]).double(), ends, state


def run_steps(engine, step, run, end=None, most=8):
    """Return the number of steps until one stops, the last state, and what the memory then
    holds.
    """
    engine.rewind(60)
    uniform, ends, state = inputs_of(step, end)
    step.memory.set_last(1)
    for count in range(most):
        token = step.memory.sequence[:1, count : count + 1]
        state = run(token, step.memory.indices[count], uniform[count : count + 1], ends, state)
        if state.stopped.item():
            break
    return count + 1, state, step.memory.sequence.clone(), step.memory.probs.clone(), engine.length


def repeat_steps(engine, step, run, end=None, most=8):
    """The same by one call."""
    engine.rewind(60)
    uniform, ends, state = inputs_of(step, end)
    step.memory.set_last(1)
    columns = [step.memory.index[:most], uniform[:most]]
    count, state = engine.repeat(run, step.memory.read_from(0, most)[0], columns, ends, state)
    return count, state, step.memory.sequence.clone(), step.memory.probs.clone(), engine.length


@needs_compiler
@pytest.mark.parametrize("end", [None, 0, 1, 2])
def test_repeated_steps_are_single_steps(repeated, end):
    engine, step, run = repeated
    expected = run_steps(engine, step, run, end)
    actual = repeat_steps(engine, step, run, end)
    (runner,) = engine._step_of[run].runners.values()
    assert runner.bound is not None
    assert actual[0] == expected[0] and actual[-1] == expected[-1] == 60 + actual[0]
    for first, other in zip(tree_leaves(expected[1:-1]), tree_leaves(actual[1:-1]), strict=True):
        assert torch.equal(first, other)
    drafted = actual[2][0, 1 : 1 + actual[0]].tolist()
    assert end not in drafted[:-1] and (actual[0] == 8 or drafted[-1] == end)
    assert end != 0 or actual[0] < 8  # one that is drafted early


@needs_compiler
def test_calls_from_cpp_leave_no_tensor_held(repeated):
    engine, step, run = repeated
    uniform, ends, state = inputs_of(step)
    watched = [
        ends,
        uniform,
        *tree_leaves(state),
        step.memory.sequence,
        step.memory.probs,
        engine._start,
        *engine._memory[0],
    ]
    run_steps(engine, step, run)
    step.memory.read_from(0, 8), step.memory.read_from(0, 1)  # views that the memory keeps
    before = [tensor._use_count() for tensor in watched]
    for _ in range(3):
        engine.rewind(60)
        engine.repeat(
            run, step.memory.read_from(0, 8)[0], [step.memory.index[:8], uniform], ends, state
        )
        engine.rewind(60)
        run(step.memory.read_from(0, 1)[0], step.memory.indices[0], uniform[:1], ends, state)
    assert [tensor._use_count() for tensor in watched] == before


@needs_compiler
def test_an_error_in_a_step_that_cpp_calls_is_pythons(repeated):
    engine, step, run = repeated
    run_steps(engine, step, run)
    uniform, ends, state = inputs_of(step)
    tokens = torch.tensor([[10**6] * 8])
    for call in (
        lambda: engine.repeat(run, tokens, [step.memory.index[:8], uniform], ends, state),
        lambda: run(tokens[:, :1], step.memory.indices[0], uniform[:1], ends, state),
    ):
        engine.rewind(60)
        with pytest.raises(RuntimeError, match="index out of bounds"):
            call()
