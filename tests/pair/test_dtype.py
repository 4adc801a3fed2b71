"""The type that models are loaded in: what `dtype=auto` chooses, that it is said, and that nothing
is reused in another type.
"""

import json

import pyarrow.parquet as pq
import pytest
import torch
from fakes import tiny_llama

from specheads import load_pair
from specheads.data_gen.run import generate_data
from specheads.data_gen.settings import DataGeneration
from specheads.pair.language_model import chosen_dtype, load_model, weightless_model
from specheads.pair.source import ModelSource
from specheads.prompts.sources import NanoSource

SMALL = {"max_new_tokens": 8, "samples_per_position": 2}


@pytest.fixture
def stored(tmp_path):
    """A function that writes a model in some type and returns its folder."""

    def write(dtype):
        tiny_llama(5, seed=0).to(dtype).save_pretrained(tmp_path)
        return tmp_path

    return write


@pytest.fixture
def with_instructions(monkeypatch):
    """A function that gives this CPU instructions, by the names that torch has for them."""

    def give(*names):
        monkeypatch.setattr(
            torch.cpu,
            "get_capabilities",
            lambda: dict.fromkeys(names, True) | {"architecture": "any"},
        )
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)

    return give


TYPES = (torch.float16, torch.bfloat16, torch.float32)
ALL_HALF = dict.fromkeys(TYPES, torch.bfloat16)
ALL_SINGLE = dict.fromkeys(TYPES, torch.float32)
CHOICES = [  # by the instructions of a CPU, the type for each type of a checkpoint
    (["avx2", "avx512_f"], ALL_SINGLE),
    (["avx512_f", "amx_tile", "amx_int8"], ALL_SINGLE),
    (["avx512_f", "avx512_bf16"], ALL_SINGLE | {torch.bfloat16: torch.bfloat16}),
    (["avx512_bf16", "amx_tile", "amx_bf16"], ALL_HALF),
    (["neon", "fp16_arith"], ALL_SINGLE),
    (["neon", "bf16"], ALL_HALF),
]


@pytest.mark.parametrize(
    ("names", "expected"),
    CHOICES,
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_auto_is_the_faster_type_of_a_cpu(stored, with_instructions, monkeypatch, names, expected):
    with_instructions(*names)
    for of_checkpoint, wanted in (expected | {torch.float64: torch.float64}).items():
        folder = stored(of_checkpoint)
        assert load_model(ModelSource(folder)).dtype == wanted
        # As the keys of caches name it
        assert weightless_model(ModelSource(folder)).dtype == wanted
        assert load_model(ModelSource(folder, dtype=torch.float16)).dtype == torch.float16
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert load_model(ModelSource(stored(torch.bfloat16))).dtype == torch.float32


def test_auto_leaves_the_type_to_the_checkpoint_on_a_gpu(monkeypatch):
    assert chosen_dtype(ModelSource("nowhere", device="cuda")) == "auto"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # The target is spread over GPUs
    assert chosen_dtype(ModelSource("nowhere", device_map="auto")) == "auto"


def test_bfloat16_without_instructions_works(with_instructions):
    with_instructions("avx2")
    pair = load_pair("synthetic-tiny", device="cpu")
    assert pair.target.dtype == pair.draft.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_data_of_a_pair_has_labels_in_float32(tmp_path, dtype):
    pair = load_pair("nano", dtype=dtype)
    folder = generate_data(pair, NanoSource(3, 0, 0), DataGeneration(**SMALL), tmp_path)
    assert (
        json.loads((folder / "manifest.json").read_text())["provenance"]["dtype"]
        == [f"torch.{dtype}"] * 2
    )
    (shard,) = folder.glob("*.parquet")
    rows = pq.read_table(shard)
    assert rows.schema.field("accept_prob").type.value_type == "float"
    probs = torch.tensor([prob for row in rows["accept_prob"].to_pylist() for prob in row])
    assert ((probs >= 0) & (probs <= 1)).all()
    # In bfloat16 they would be multiples of 1/512 from 1/2 on.
    fine = probs[(probs > 0.5) & (probs < 1)]
    assert len(fine) and ((fine * 512) % 1 > 0).any()
