"""Which drafts are refused because their weights do not fit a GPU; the GPU is a stand-in."""

import pytest

from specheads import UserError
from specheads.pair.config import PairConfig
from specheads.training.distill import memory
from specheads.training.distill.memory import check_config
from specheads.training.distill.settings import Distillation

SHAPES = {"draft": "synthetic:llama3.2-1b", "target": "synthetic:llama3.1-8b"}
# Weights; of the target, one layer
DRAFT = 1_235_814_400
TARGET = 8_030_261_248
LAYER = 218_112_000
NORMS = 33 * 2_048  # of the draft; its embeddings are its output
# Bytes; AdamW has two moments of a weight, Muon one of a matrix
STATE = 16 * DRAFT - 4 * (DRAFT - 128_256 * 2_048 - NORMS)
LAYER_STATE = 16 * (TARGET - 31 * LAYER) - 4 * (LAYER - 2 * 4_096)
# A layer of the target whose queries, keys and values are made of twice as much, the map of three
# inputs, and the output; embeddings are the target's, and not trained
WIDER = 4_096 * (4_096 + 2 * 1_024)
READING_MATRICES = LAYER - 2 * 4_096 + WIDER + 3 * 4_096**2
TABLE = 128_256 * 4_096
READING = READING_MATRICES + 4 * 4_096
READING_STATE = 16 * (READING + TABLE) + 4 * TABLE
FEW = 32_000 * 4_096  # of a reduced output
CUT = DRAFT + 8_192 * 2_048 - 128_256 * 2_048  # without embeddings, which were the output too
CUT_STATE = 16 * CUT + 4 * 128_256 * 2_048 - 4 * (DRAFT - 128_256 * 2_048 - NORMS)


@pytest.fixture
def gpu(monkeypatch):
    """Returns a function that gives the stand-in a number of bytes."""
    monkeypatch.setattr(memory, "checked_device", lambda device: device or "cuda")
    monkeypatch.setattr(
        "specheads.pair.language_model.load_model",
        lambda *args, **keys: pytest.fail("a model was loaded"),
    )
    return lambda free: monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free, 0))


@pytest.mark.parametrize(
    ("config", "settings", "state", "beside"),
    [
        ({}, {}, STATE, 2 * TARGET),
        ({"dtype": "float32"}, {}, STATE, 4 * TARGET),
        ({"quantization": "int8"}, {}, STATE, 1.0 * TARGET),
        ({"device_map": "auto"}, {}, STATE, 0),
        ({}, {"init_layers": 1}, LAYER_STATE, 2 * TARGET),
        ({}, {"draft_kind": "eagle3"}, READING_STATE, 2 * TARGET),
        (
            {},
            {"draft_kind": "eagle3", "draft_vocabulary": 32_000},
            READING_STATE + 16 * (FEW - TABLE),
            2 * TARGET,
        ),
        ({}, {"draft_vocabulary": 8_192, "embedding": "target"}, CUT_STATE, 2 * TARGET),
    ],
    ids=str,
)
def test_the_weights_with_their_state_must_fit_next_to_the_target(
    config, settings, state, beside, gpu, monkeypatch
):
    monkeypatch.setattr("specheads.pair.quantization._is_usable", lambda package: True)
    needed = state + beside
    gpu(1.001 * needed)
    check_config(PairConfig(**SHAPES, **config), Distillation(**settings))
    gpu(0.999 * needed)
    with pytest.raises(
        UserError, match=r"training the draft does not fit the GPU: at least .* are free\..*fsdp2"
    ):
        check_config(PairConfig(**SHAPES, **config), Distillation(**settings))


def test_nothing_is_refused_on_a_cpu_and_for_a_draft_that_is_spread(gpu):
    gpu(1)
    check_config(PairConfig(**SHAPES), Distillation(trainer={"strategy": "deepspeed_stage_3"}))
    check_config(PairConfig(**SHAPES, device="cpu"), Distillation())
