"""Compiled steps as flat functions: weights stay with the module, sizes stay open, and a file gives
the same function.
"""

from typing import NamedTuple

import torch
from fakes import needs_compiler
from torch import Tensor, nn
from torch._inductor.output_code import CompiledFxGraph
from torch.utils._pytree import tree_leaves

from specheads.decoding.engine.compiled_program import (
    OPTIONS,
    CompiledProgram,
    _first_call,
)

pytestmark = needs_compiler


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Sum(nn.Module):
    """Writes into memory and reads weights, memory and what it is called with."""

    def __init__(self, table=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3), requires_grad=False)
        self.table = table

    def forward(self, tokens, start, places, memory, inputs):
        (keys, values) = memory[0]
        (x, pair) = inputs
        keys.index_copy_(0, start + torch.arange(tokens.shape[1]), tokens[0].float())
        total = (keys[: places.shape[0]].sum() + values.sum()) * self.weight.sum() + x
        return total if self.table is None else total + self.table.sum(), Pair(
            pair.second, (pair.first, tokens + 1)
        )


def arguments(count, size):
    memory = [(torch.zeros(16), torch.ones(2))]
    inputs = (torch.full((1,), 5.0), Pair(torch.full((1,), 1.0), torch.full((1,), 2.0)))
    return torch.arange(3, 3 + count)[None], torch.tensor(2), torch.zeros(size), memory, inputs


def compiled(module):
    return CompiledProgram.compile(module, arguments(5, 8), {0: 1, 2: 0}, {})


def test_a_compiled_program_computes_what_its_module_computes(tmp_path):
    module = Sum()
    compiled_program = compiled(module)
    assert compiled_program.is_general
    for loaded in (compiled_program, CompiledProgram.from_bytes(compiled_program.to_bytes())):
        for count, size, weight in ((5, 8, 1.0), (3, 12, 1.0), (2, 4, -2.0)):
            module.weight.fill_(weight)
            tokens, start, places, memory, inputs = arguments(count, size)
            expected = module(tokens, start, places, [tuple(x.clone() for x in memory[0])], inputs)
            call = loaded.bind(module, memory)
            # The first call finds the compiled code, the second one is a call of it
            for _ in range(2):
                memory[0][0].zero_()
                actual = call(tokens, start, places, inputs)
                assert isinstance(actual[1], Pair)
                assert [x.tolist() for x in tree_leaves(actual)] == [
                    x.tolist() for x in tree_leaves(expected)
                ]
                assert memory[0][0][2 : 2 + count].tolist() == tokens[0].tolist()


def test_a_kept_program_is_loaded_without_building_anything(monkeypatch, tmp_path):
    """Kernels are found by what they are built with, options included."""
    from torch._inductor import codecache

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    content = CompiledProgram.compile(Sum(), arguments(5, 8), {0: 1, 2: 0}, OPTIONS).to_bytes()
    built = []
    compile_file = codecache.CppBuilder.build
    monkeypatch.setattr(
        codecache.CppBuilder, "build", lambda self: built.append(self) or compile_file(self)
    )
    codecache.CppPythonBindingsCodeCache.cache_clear()
    codecache.CppCodeCache.cache_clear()
    compiled_program = CompiledProgram.from_bytes(content)
    module = Sum()
    (tokens, start, places, memory, inputs) = arguments(5, 8)
    compiled_program.bind(module, memory)(tokens, start, places, inputs)
    assert built == []


def test_a_weight_that_no_module_owns_is_not_kept():
    assert compiled(Sum(torch.ones(3))).is_general
    assert not compiled(Sum(torch.ones(1000))).is_general


class Graph(CompiledFxGraph):
    """Compiled code that appends its first input to its results."""

    def __init__(self):
        self.compiled_fn_runner = None

    def __call__(self, inputs):
        return self.current_callable(inputs)

    def current_callable(self, inputs):
        return [inputs[0] + 1, inputs[0]]


def test_wrappers_that_do_more_than_pass_results_on_are_called_each_time():
    graph = Graph()
    x = torch.ones(2)
    for artifact, number in (
        (lambda *args: graph(args)[:1], 1),
        (lambda *args: [graph(args)[0] + 1, x], 2),
        (lambda *args: [args[0] + 1], 1),  # no compiled code at all
    ):
        results, run = _first_call(artifact, [x])
        again = run([x])
        assert len(results) == len(again) == number
        for first, second in zip(results, again, strict=True):
            assert torch.equal(first, second)
    _, run = _first_call(lambda *args: graph(args), [x])
    assert run.__func__ is Graph.current_callable
    assert run([2 * x])[0].tolist() == [3, 3]
