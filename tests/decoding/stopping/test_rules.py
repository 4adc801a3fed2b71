"""What all stopping rules share: rows that do not see each other, states of one shape, steps that
can be traced, configs.
"""

import copy
import inspect

import pytest
import torch
from fakes import tiny_pair
from hydra.utils import get_class
from omegaconf import OmegaConf
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from specheads import AcceptanceHead, HeadConfig, UserError, Warp, stopping
from specheads.decoding.drafting import ChainState, ChainStep
from specheads.decoding.engine import ForwardOutput
from specheads.decoding.engine.compiled_program import modules_in
from specheads.decoding.step_inputs import DraftMemory
from specheads.decoding.stopping.survival import SurvivalRule
from specheads.pair.config import config_folder

CPU = torch.device("cpu")
HIDDEN = 3
VOCAB = 5


def random_head(predicts):
    torch.manual_seed(0)
    calibration = {"slope": [0.5, 1.5, 1.0], "intercept": [0.5, -0.5, 0.0]}
    head = AcceptanceHead(
        HeadConfig(HIDDEN, 1, predicts, ("hidden", "max_prob"), HIDDEN, calibration=calibration)
    )
    nn.init.normal_(head.readout.weight)
    # In float32, products of nine rows and of one differ on some processors
    return head.double().requires_grad_(False)


NEXT = random_head("next_token")
INPUT = random_head("input_token")
WEIGHTS = {
    "logit_max_prob": 0.7,
    "log_draft_prob": 0.3,
    "max_prob": 0.4,
    "entropy": -0.2,
    "bias": 0.5,
}
# Rules, and with each one with the same compile key: only numbers differ.
PAIRS = [
    (stopping.FixedLength(3), stopping.FixedLength(5)),
    (stopping.MaxProbability(0.4), stopping.MaxProbability(0.7, 5)),
    (stopping.Confidence(0.2, max_tokens=8), stopping.Confidence(0.5, max_tokens=8)),
    (stopping.DraftProduct(0.9), stopping.DraftProduct(0.5, 2, 5)),
    (stopping.Logistic(WEIGHTS), stopping.Logistic(dict.fromkeys(WEIGHTS, 0.1), 0.5, 2, 5)),
    (
        stopping.OnlineLogistic(max_tokens=8),
        stopping.OnlineLogistic(0.5, 0.1, 3.0, 0.6, 2, max_tokens=8),
    ),
    (stopping.HeadThreshold(NEXT), stopping.HeadThreshold(NEXT, 0.4, 2, 5)),
    (stopping.HeadThreshold(INPUT), stopping.HeadThreshold(INPUT, 0.4, 1, 5)),
    (stopping.OnlineHead(NEXT, max_tokens=8), stopping.OnlineHead(NEXT, 0.4, 2, 8, prior=2.0)),
    (stopping.OnlineHead(INPUT, max_tokens=8), stopping.OnlineHead(INPUT, 0.4, 1, 8, prior=2.0)),
]
RULES = [rule for pair in PAIRS for rule in pair]


def named(rule):
    rule = rule[0] if isinstance(rule, tuple) else rule
    return type(rule).__name__


every_rule = pytest.mark.parametrize("rule", RULES, ids=named)


def random_features(batch, generator, dtype=torch.float32):
    """Features of a step, of draft distributions that are often sure."""
    first = torch.rand(batch, generator=generator, dtype=dtype) ** 0.3
    values = {
        "max_prob": first,
        "draft_prob": first * torch.rand(batch, generator=generator, dtype=dtype) ** 0.2,
    }
    values["entropy"] = 2.5 * (1 - first) * torch.rand(batch, generator=generator, dtype=dtype)
    return values | {"hidden": torch.randn(batch, HIDDEN, generator=generator, dtype=dtype)}


@every_rule
@pytest.mark.parametrize("batch", [1, 2])
def test_what_a_rule_remembers_is_on_the_device_of_its_features(rule, batch):
    """On "meta", where a tensor that is made elsewhere is refused, as one on the CPU next to a
    GPU's.
    """
    meta = torch.device("meta")
    generator = torch.Generator().manual_seed(1)
    if hasattr(rule, "head"):
        rule = copy.copy(rule)
        rule.head = copy.deepcopy(rule.head).to(meta)
    state = rule.start_prompt(batch, meta)
    for _ in range(2):
        features = {
            name: value.to(meta)
            for name, value in random_features(batch, generator, torch.float64).items()
        }
        state, stop = rule.step(state, features)
        state = rule.start_round(
            rule.end_round(state, *torch.ones(2, batch, dtype=torch.long, device=meta))
        )
    assert {leaf.device for leaf in (*tree_leaves(state), stop)} == {meta}


@every_rule
def test_a_round_without_a_draft_teaches_nothing(rule):
    generator = torch.Generator().manual_seed(2)
    state = rule.start_round(
        rule.end_round(
            rule.step(rule.start_prompt(2, CPU), random_features(2, generator))[0],
            *torch.tensor([[1, 1], [1, 0]]),
        )
    )
    after = rule.start_round(rule.end_round(state, *torch.zeros(2, 2, dtype=torch.long)))
    assert all(map(torch.equal, tree_leaves(state), tree_leaves(after)))


@every_rule
def test_a_rule_that_forgets_steps_after_a_round_as_in_the_first(rule):
    assert not (rule.learns and not rule.remembers)
    if rule.remembers:
        return
    generator = torch.Generator().manual_seed(4)
    first = rule.start_round(rule.start_prompt(64, CPU))
    later = first
    for _ in range(3):
        later, _ = rule.step(later, random_features(64, generator))
    later = rule.start_round(rule.end_round(later, *torch.ones(2, 64, dtype=torch.long)))
    for _ in range(5):
        features = random_features(64, generator)
        first, stop_first = rule.step(first, features)
        later, stop_later = rule.step(later, features)
        assert torch.equal(stop_first, stop_later)


def test_a_rule_remembers_unless_it_says_that_it_forgets():
    class Mine(SurvivalRule):
        threshold, min_tokens, max_tokens = 0.5, 1, 8

    assert Mine().remembers


class Halving(stopping.FixedLength):
    """Halves its longest draft after each round, with numbers of another type."""

    def learn(self, state, num_drafted, num_accepted):
        return state._replace(max_tokens=state.max_tokens / 2)


def test_what_a_rule_learns_has_the_types_of_its_state():
    rule = Halving(8)
    state = rule.end_round(rule.start_prompt(2, CPU), *torch.tensor([[8, 0], [1, 0]]))
    assert (state.max_tokens.tolist(), state.max_tokens.dtype) == ([4, 8], torch.long)


@every_rule
def test_a_prompt_starts_afresh(rule):
    generator = torch.Generator().manual_seed(3)
    first = rule.start_prompt(2, CPU)
    kept = tree_map(torch.clone, rule.start_prompt(2, CPU))
    state = first
    for _ in range(9):
        state, _ = rule.step(state, random_features(2, generator))
        state = rule.start_round(rule.end_round(state, *torch.tensor([[1, 1], [1, 0]])))
    for again in (first, rule.start_prompt(2, CPU)):  # nothing was written in place
        assert all(map(torch.equal, tree_leaves(again), tree_leaves(kept)))


def test_compile_keys_differ_where_shapes_or_networks_do():
    logit = {"logit_max_prob": 1.0}
    groups = [
        [stopping.OnlineLogistic(max_tokens=5), stopping.OnlineLogistic(max_tokens=6)],
        [
            stopping.Logistic(logit),
            stopping.Logistic(logit | {"bias": 1.0}),
            stopping.Logistic({"entropy": 1.0}),
        ],
        [
            stopping.HeadThreshold(NEXT),
            stopping.HeadThreshold(INPUT),
            stopping.OnlineHead(NEXT),
        ],
        [
            stopping.OnlineHead(NEXT),
            stopping.OnlineHead(INPUT),
            stopping.OnlineHead(NEXT, max_tokens=6),
        ],
    ]
    for rules in groups:
        assert len({rule.compile_key for rule in rules}) == len(rules)
    assert len({first.compile_key for first, _ in PAIRS}) == len(PAIRS)


class Traced(nn.Module):
    """A draft step after a forward pass, which owns the head that it reads."""

    def __init__(self, step):
        super().__init__()
        self.step = step
        self.others = nn.ModuleList(modules_in(step.compile_key))

    def forward(self, hidden, logits, index, uniform, ends, state):
        state = self.step(
            ForwardOutput(torch.zeros(1, 1, dtype=torch.long), hidden, logits),
            index,
            uniform,
            ends,
            state,
        )
        return state, self.step.memory.sequence.clone(), self.step.memory.probs.clone()


@pytest.mark.parametrize("pair", PAIRS, ids=named)
def test_a_traced_step_serves_all_rules_of_its_compile_key(pair):
    def arguments(rule, seed):
        generator = torch.Generator().manual_seed(seed)
        logits, hidden = (torch.randn(1, 1, size, generator=generator) for size in (VOCAB, HIDDEN))
        uniform = torch.rand(1, generator=generator, dtype=torch.float64)
        state = (
            rule.start_prompt(1, CPU)
            if seed == 0
            else rule.step(rule.start_prompt(1, CPU), random_features(1, generator))[0]
        )
        state = tree_map(torch.clone, state)
        index = torch.tensor([1])
        ends = torch.zeros(VOCAB, dtype=torch.bool)
        return (
            hidden,
            logits,
            index,
            uniform,
            ends,
            ChainState(torch.zeros(1, dtype=torch.bool), state),
        )

    memory = DraftMemory(4, VOCAB, torch.float32, CPU)
    first, other = (ChainStep(tiny_pair(VOCAB).draft_lm, Warp(), rule, memory) for rule in pair)
    with torch.no_grad():
        traced = torch.export.export(Traced(first), arguments(first.rule, 0), strict=False).module()
        for step, seed in ((first, 0), (first, 1), (other, 2), (other, 3)):
            given = arguments(step.rule, seed)
            actual = traced(*given)
            expected = Traced(step)(*given)
            for a, b in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
                assert (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(a, b)


# One file may list others, and some are policies for batches.
NAMED = [
    path
    for path in sorted((config_folder() / "stopping").glob("*.yaml"))
    if "_target_" in OmegaConf.load(path)
]
CONFIGS = [
    path
    for path in NAMED
    if issubclass(get_class(OmegaConf.load(path)["_target_"]), stopping.StoppingRule)
]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_have_every_parameter(path):
    text = path.read_text()
    assert text.startswith(f"# @package stopping.{path.stem}\n# ")
    sweep = {"fixed_lengths": [2, 4], "thresholds": [0.3, 0.7], "cost_ratios": [5, 10]}
    given = OmegaConf.to_container(OmegaConf.merge(sweep, OmegaConf.load(path)), resolve=True)
    kind = get_class(given.pop("_target_"))
    given = {name: value for name, value in given.items() if name not in sweep}
    parameters = inspect.signature(kind).parameters
    assert set(given) == set(parameters) - {"head"} and ("head" in parameters) == kind.uses_head
    head = {"head": NEXT} if kind.uses_head else {}
    if "weights" in given:
        with pytest.raises(UserError, match="specheads evaluate fits those that are null"):
            kind(given["weights"])
        given["weights"] = dict.fromkeys(given["weights"], 1.0)
    for last in (
        0,
        -1,
        # A list: each of these is tried; null, where that is no value of the rule's: found on dev
        # prompts
    ):
        chosen = {
            name: value[last] if isinstance(value, list) else value for name, value in given.items()
        }
        chosen = {
            name: parameters[name].default if value is None else value
            for name, value in chosen.items()
        }
        assert kind(**head, **chosen).max_tokens > 0
