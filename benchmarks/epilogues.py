"""What does everything cost that follows a forward pass in a compiled step: warp, verification, next token, NaN checks?

    python benchmarks/epilogues.py [--vocab 2048 32000 128256] [--repeats 200]

Compiles the steps' epilogues alone, as the compiled engine does on a CPU, and gives them random logits. Vocabularies of 2,048
have float32 logits, as nano, and others bfloat16.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, add_result_option, text_of, write_result
from specheads import Warp
from specheads.decoding.baseline import TargetStep
from specheads.decoding.drafting import DraftMemory
from specheads.decoding.engine import ForwardOutput
from specheads.decoding.engine.compiled import CPU_OPTIONS
from specheads.decoding.engine.compiled_program import CompiledProgram, modules_in
from specheads.decoding.engine.operators import load_operators, replaced_operations
from specheads.decoding.verification import BlockVerification, TokenVerification, VerificationRule, VerifyStep

WARPS = {
    "greedy": Warp(temperature=0),
    "sampled, top-k 50": Warp(top_k=50),
    "sampled, top-k 50, top-p 0.9": Warp(top_k=50, top_p=0.9),
}
DRAFTED, HIDDEN = 8, 8


class Epilogue(nn.Module):
    """An epilogue as a module of logits, without the forward pass before it."""

    def __init__(self, step: Callable[..., Any]) -> None:
        super().__init__()
        self.step, self.others = step, nn.ModuleList(modules_in(step.compile_key))

    def forward(self, tokens: Tensor, logits: Tensor, places: Tensor, inputs: tuple[Any, ...]) -> Any:
        with replaced_operations():
            return self.step(ForwardOutput(tokens, logits[..., :HIDDEN].clone(), logits), *inputs)


def compiled(step: Callable[..., Any], tokens: Tensor, logits: Tensor, inputs: tuple[Any, ...]) -> Callable[[], Any]:
    """Return a call of the compiled step; the number of tokens is left open, unless it is one."""
    module, places = Epilogue(step), torch.zeros(3)
    example = (tokens, logits, places, inputs)
    options = CPU_OPTIONS | {"cpp.threads": torch.get_num_threads()}
    call = CompiledProgram.compile(module, example, {0: 1, 1: 1} if tokens.shape[1] > 1 else {}, options).bind(module, [])
    return lambda: call(*example)


def epilogues(warp: Warp, vocab: int) -> dict[str, Callable[[], Any]]:
    """Return the calls that are timed, by name."""
    dtype = torch.float32 if vocab == 2048 else torch.bfloat16
    logits = (4 * torch.randn(1, DRAFTED + 1, vocab)).to(dtype)
    draft_probs = warp((logits[0].float() + torch.randn(DRAFTED + 1, vocab)).to(dtype))
    tokens = torch.zeros(1, DRAFTED + 1, dtype=torch.long)
    tokens[0, 1:] = torch.multinomial(draft_probs[:-1], 1).squeeze(1)
    uniforms, lengths = torch.rand(2, dtype=torch.float64), torch.full((3,), DRAFTED)
    calls = {"the target alone": compiled(TargetStep(warp), tokens[:, :1], logits[:, :1], (uniforms[:1],))}
    memory = DraftMemory(DRAFTED, vocab, draft_probs.dtype, logits.device)
    memory.probs[0] = draft_probs
    rules: list[VerificationRule] = [TokenVerification(), BlockVerification()]
    for rule in rules:
        inputs = uniforms, lengths, rule.start_prompt(1, logits.device)
        calls[f"{rule.label} of {DRAFTED} tokens"] = compiled(VerifyStep(warp, rule, memory), tokens, logits, inputs)
    return calls


def lower_quartiles(calls: dict[Any, Callable[[], Any]], repeats: int) -> dict[Any, float]:
    """Return seconds; calls take turns, and other work on the machine only ever adds time."""
    taken: dict[Any, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            call()  # brings its data into the caches
            start = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.quantiles(times, n=4)[0] for name, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, nargs="+", default=[2048, 32000, 128256])
    parser.add_argument("--repeats", type=int, default=200)
    add_result_option(parser, "epilogues")
    arguments = parser.parse_args()
    if not load_operators():
        raise SystemExit("the operators of compiled steps cannot be built here")
    torch.manual_seed(0)
    calls = {
        (label, name, vocab): call
        for vocab in arguments.vocab
        for label, warp in WARPS.items()
        for name, call in epilogues(warp, vocab).items()
    }
    times = lower_quartiles(calls, arguments.repeats)
    steps = dict.fromkeys((label, name) for label, name, _ in calls)
    rows = [[label, name, *(times[label, name, vocab] for vocab in arguments.vocab)] for label, name in steps]
    columns = [Column("warp"), Column("step"), *(Column(f"vocabulary {vocab:,}", "ms:3") for vocab in arguments.vocab)]
    title = f"What follows a forward pass in a compiled step on a CPU; lower quartile of {arguments.repeats}"
    table = Table("epilogues", title, columns, rows)
    print(f"{table.title}\n\n{text_of(table)}")
    write_result(arguments.result, [table], seeds=[0])


if __name__ == "__main__":
    with torch.no_grad():
        main()
