"""Threads with decoders of their own, and threads that load pairs, do not disturb each other."""

import threading

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from specheads import SpeculativeDecoder, Warp, load_pair, stopping

PROMPTS = ["def mean(values):", "import os\n"]


def in_threads(*calls):
    """Return what the calls return that begin together; raises the first one's exception."""
    barrier = threading.Barrier(len(calls), timeout=60)
    results = [None] * len(calls)
    failures = []

    def run(number, call):
        try:
            barrier.wait()
            results[number] = call()
        except Exception as error:  # noqa: BLE001 - it is raised in the first thread
            failures.append(error)

    threads = [
        threading.Thread(target=run, args=(number, call)) for number, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


@pytest.mark.parametrize("engine", ["eager", "compiled", "cuda_graph"])
def test_decoders_of_two_threads_next_to_another_model(nano, engine):
    def decode():
        rule = stopping.FixedLength(3)
        decoder = SpeculativeDecoder(nano, stopping=rule, warp=Warp(1.0, top_k=20), engine=engine)
        decoder.warm_up()
        return [
            decoder.generate(prompt, 24, seed=seed).tokens.tolist()
            for seed in range(3)
            for prompt in PROMPTS
        ]

    expected = decode()
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2)
    other = GPT2LMHeadModel(config).eval()
    tokens = torch.arange(12)[None]
    done = threading.Event()

    def read():
        logits = [other(tokens).logits]
        while not done.is_set():
            logits.append(other(tokens).logits)
        return all(torch.equal(each, logits[0]) for each in logits)

    reading = threading.Thread(target=lambda: results.append(read()))
    results = []
    with torch.no_grad():
        reading.start()
        try:
            assert in_threads(decode, decode) == [expected, expected]
        finally:
            done.set()
            reading.join()
    assert results == [True]


def test_pairs_are_loaded_by_several_threads():
    pairs = in_threads(*[lambda: load_pair("nano", device="cpu", dtype="float32")] * 3)
    tokens = torch.arange(5, 25)[None]
    logits = [pair.draft(tokens).logits for pair in pairs]
    assert all(torch.equal(each, logits[0]) for each in logits)
