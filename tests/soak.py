"""Does anything grow or drift while one process works for long?

    python -m tests.soak growth [--minutes 20]
    python -m tests.soak outputs [--generations 10000]

growth: single and batched decoding and data generation take turns on nano; after each turn memory,
open files and threads are noted, and what they gained between the second and the last quarter of
the turns is printed. outputs: the same prompts are decoded before, amid and after very many others,
single and batched. The exit code is 1 where something grew by more than 2 % or an output changed.
"""

import argparse
import ctypes
import gc
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from specheads import (
    AcceptanceHead,
    HeadConfig,
    Pair,
    SpeculativeDecoder,
    Warp,
    load_pair,
    stopping,
)
from specheads.data_gen.run import generate_data
from specheads.data_gen.settings import DataGeneration
from specheads.prompts.sources import NanoSource

# rows of a batch; tokens of a response that is one of very many
BATCH = 8
SHORT = 12
LARGEST_GROWTH = 0.02
HEAP_COUNTS = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
)
Tokens = list[list[int]]


class HeapInfo(ctypes.Structure):
    """What glibc's `mallinfo2` returns, in its order."""

    _fields_ = [(name, ctypes.c_size_t) for name in HEAP_COUNTS]


def usage() -> dict[str, float]:
    """Return what this process holds; needs Linux with glibc 2.33 or later."""
    # Python itself looks for cycles among old objects only after a quarter more were made
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = HeapInfo
    info = mallinfo()
    return {
        "resident memory, bytes": 1024.0 * int(status["VmRSS"].split()[0]),
        "C heap in use, bytes": float(info.uordblks + info.hblkhd),
        "Python's blocks in use": float(sys.getallocatedblocks()),
        "open files": float(len(os.listdir("/proc/self/fd"))),
        "threads": float(status["Threads"]),
    }


def growth(pair: Pair, given: argparse.Namespace) -> bool:
    """Take turns for some minutes and return whether something grew."""
    with tempfile.TemporaryDirectory() as folder:
        turns = turns_of(pair, given, Path(folder))
        start = time.perf_counter()
        samples = list[Mapping[str, float]]()
        for number in itertools.count():
            for turn in turns:
                turn(number)
            samples.append(usage())
            if time.perf_counter() - start >= 60 * given.minutes and len(samples) >= 4:
                break
    gained = gains(samples)
    for name, value in gained.items():
        print(f"{name:<24}{samples[-1][name]:>16,.0f}{value:>+10.2%}")
    return any(value > LARGEST_GROWTH for value in gained.values())


def gains(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return by how much the mean of the last quarter exceeds that of the second.

    Caches fill in the first.
    """
    quarter = len(samples) // 4

    def mean(name: str, part: Sequence[Mapping[str, float]]) -> float:
        return sum(sample[name] for sample in part) / len(part)

    second = samples[quarter : 2 * quarter]
    last = samples[-quarter:]
    return {name: mean(name, last) / mean(name, second) - 1 for name in samples[0]}


def turns_of(pair: Pair, given: argparse.Namespace, folder: Path) -> list[Callable[[int], object]]:
    """Return what is done in a turn of a number."""
    prompts = prompts_of(pair, 4 * given.size)
    decoder = decoder_of(pair, given.engine)

    def single(number: int) -> object:
        return [decoder.generate(prompt, 32, seed=number) for prompt in prompts[: given.size]]

    def batched(number: int) -> object:
        return decoder.generate_batch(
            prompts, max_batch=BATCH, max_new_tokens=32, seeds=[number] * len(prompts)
        )

    def data(number: int) -> object:
        made = DataGeneration(
            max_new_tokens=16, rows_per_shard=16, samples_per_position=2, seed=number
        )
        generate_data(pair, NanoSource(2 * given.size, 0, 0), made, folder / "data")
        return shutil.rmtree(folder / "data")

    return [single, batched, data]


def outputs(pair: Pair, given: argparse.Namespace) -> bool:
    """Decode very many prompts and return whether any of those that are decoded again has
    changed.
    """
    prompts = prompts_of(pair, 2000)
    decoder = decoder_of(pair, given.engine)
    changed = False
    for way in (single_tokens, batched_tokens):
        checked = prompts[: given.checked]
        seeds = list(range(given.checked))
        before = way(decoder, checked, seeds)
        for half in range(2):
            for first in range(0, given.generations // 2, 250):
                numbers = [
                    first + number for number in range(min(250, given.generations // 2 - first))
                ]
                way(decoder, [prompts[number % len(prompts)] for number in numbers], numbers)
            again = way(decoder, checked, seeds)
            differing = sum(ours != theirs for ours, theirs in zip(before, again, strict=True))
            print(
                f"{way.__name__:<16}{'after' if half else 'amid':<6}{differing} of {len(checked)}"
                " differ",
                flush=True,
            )
            changed |= differing > 0
    return changed


def single_tokens(
    decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]], seeds: Sequence[int]
) -> Tokens:
    """Return the tokens of prompts that are decoded one after another."""
    return [
        decoder.generate(prompt, SHORT, seed).tokens.tolist()
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]


def batched_tokens(
    decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]], seeds: Sequence[int]
) -> Tokens:
    """Return the tokens of prompts that are decoded together."""
    done = decoder.generate_batch(prompts, max_batch=BATCH, max_new_tokens=SHORT, seeds=seeds)
    return [done[number].tokens.tolist() for number in range(len(prompts))]


def prompts_of(pair: Pair, number: int) -> list[list[int]]:
    """Return prompts that the pair was trained on."""
    return [
        pair.encode_instruction(prompt.text) for prompt in NanoSource(number, 0, 0).load(pair.chats)
    ]


def decoder_of(pair: Pair, engine: str) -> SpeculativeDecoder:
    """Return a decoder that stops by an untrained head whose predictions vary."""
    torch.manual_seed(0)
    head = AcceptanceHead(HeadConfig(pair.draft_lm.hidden_size, depth=1))
    torch.nn.init.normal_(head.readout.weight, std=0.2)
    torch.nn.init.constant_(head.readout.bias, 1.5)
    rule = stopping.HeadThreshold(head.requires_grad_(False).eval(), 0.7)
    return SpeculativeDecoder(pair, stopping=rule, warp=Warp(top_k=50), engine=engine)


PARTS = {"growth": growth, "outputs": outputs}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=__doc__.splitlines()[0]
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--minutes", type=float, default=20.0, help="of the turns")
    parser.add_argument("--size", type=int, default=8, help="prompts of a turn")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--generations", type=int, default=10_000, help="single and batched")
    parser.add_argument("--checked", type=int, default=100, help="prompts that are decoded again")
    given = parser.parse_args(argv)
    return int(PARTS[given.part](load_pair("nano", device="cpu"), given))


if __name__ == "__main__":
    raise SystemExit(main())
