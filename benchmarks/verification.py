"""What does each verification rule cost next to the target's forward pass?

    python benchmarks/verification.py [--tokens 8] [--vocab 128256] [--repeats 30]

Times every rule for chains on one drafted block (sampled at temperature 1, top-k 50), eager and compiled, and a forward pass
of the target over the block at the shape of Llama 3.1 8B: one layer and the output matrix are timed, and the layer counts 32
times.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, add_result_option, text_of, write_result
from specheads import Warp
from specheads.decoding.verification import (
    BiasedVerification,
    BigLittle,
    Block,
    BlockVerification,
    GreedyBlockVerification,
    TokenVerification,
)

LAYERS, HIDDEN = 32, 4096


def median_seconds(call: Callable[[], object], device: torch.device, times: int = 50) -> float:
    """Return the median time of `call` after a warm-up."""
    taken = []
    for turn in range(times + 5):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if turn >= 5:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def forward_seconds(count: int, vocab: int, repeats: int, device: torch.device) -> float:
    """Return the time of a forward pass over `count` tokens in bfloat16, without context."""
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=vocab
    )
    config._attn_implementation = "sdpa"
    with torch.device(device):
        layer = LlamaDecoderLayer(config, 0).bfloat16().eval()
        output = torch.nn.Linear(HIDDEN, vocab, bias=False, dtype=torch.bfloat16)
        hidden = torch.randn(1, count, HIDDEN, dtype=torch.bfloat16)
        positions = LlamaRotaryEmbedding(config)(hidden, torch.arange(count)[None])
    layer_seconds = median_seconds(lambda: layer(hidden, position_embeddings=positions), device, repeats)
    return LAYERS * layer_seconds + median_seconds(lambda: output(hidden), device, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--repeats", type=int, default=30)
    add_result_option(parser, "verification")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    count, warp = arguments.tokens, Warp(temperature=1.0, top_k=50)
    logits = 4 * torch.randn(1, count + 1, arguments.vocab, device=device)
    draft, target = warp(logits), warp(logits + torch.randn_like(logits))
    tokens = torch.multinomial(draft[0, :-1], 1).T
    block = Block.of(tokens, draft, target)
    uniforms = torch.rand(2, 1, dtype=torch.float64, device=device)
    forward = forward_seconds(count + 1, arguments.vocab, arguments.repeats, device)
    rules = [TokenVerification(), BlockVerification(), GreedyBlockVerification(1), GreedyBlockVerification(4)]
    rules += [BiasedVerification(0.1), BigLittle()]
    steps = {f"softmax and top-k of {count + 1} distributions": lambda: warp(logits)}
    rows = []
    for rule in rules:
        label = f"{rule.label}, {rule.num_levels} levels" if isinstance(rule, GreedyBlockVerification) else rule.label
        state = rule.start_prompt(1, device)
        steps[label] = lambda rule=rule, state=state: rule(state, block, *uniforms)
    for label, step in steps.items():
        torch._dynamo.reset()
        times = [median_seconds(call, device, arguments.repeats) for call in (step, torch.compile(step))]
        rows.append([label, *(value for t in times for value in (t, t / forward))])
    title = f"{count} drafted tokens, vocabulary {arguments.vocab:,}; a forward pass of the target over {count + 1} tokens"
    title += f" at the shape of Llama 3.1 8B takes {1e3 * forward:.2f} ms; median of {arguments.repeats}"
    columns = [Column("step")]
    for way in ("eager", "compiled"):
        columns += [Column(way, "ms"), Column(f"{way}, of a forward pass", "percent:2")]
    table = Table("rules", title, columns, rows)
    print(f"{table.title}\n\n{text_of(table)}")
    write_result(arguments.result, [table], seeds=[0])


if __name__ == "__main__":
    with torch.no_grad():
        main()
