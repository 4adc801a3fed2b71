"""Plans against numbers computed by hand, the published shapes, and what the code that they describe stores and reads."""

import json
from dataclasses import replace

import pytest
from published_shapes import SHAPES as CONFIGS
from published_shapes import weightless

from data_gen import labels as labelling
from specheads import UserError
from specheads.commands.head_tool import run
from specheads.commands.plan import planned
from specheads.plan.machine import Machine, measured_overheads
from specheads.plan.models import SHAPES
from specheads.plan.settings import PlanSettings
from specheads.plan.stages import BANDWIDTH, COMPUTE, DISK, LABEL_BATCH, decode_cost, plan
from specheads.replay.response_tree import RecordSettings
from specheads.storage.data_set import SCHEMA
from specheads.training.distill.memory import ModelSizes


def stages_of(**keys):
    return {stage.name: stage for stage in planned(PlanSettings(**keys))[2]}


@pytest.mark.parametrize("location", sorted(SHAPES))
def test_shapes_are_those_of_the_configs(location):
    sizes = ModelSizes.of(weightless(CONFIGS[location]))
    assert ModelSizes(sizes.num_weights, *SHAPES[location]) == sizes
    assert set(SHAPES) == set(CONFIGS)


def test_a_step_of_70b_on_eight_h100():
    """138 GB of weights at full bandwidth: 137.95e9 / (8 * 3.35e12) = 5.15 ms; 256 rows compute for longer."""
    settings = PlanSettings(bytes_share=1, operations_share=1)
    pair, machine, _ = planned(settings)
    assert pair.target.size.weight_bytes == pytest.approx(137.95e9, rel=1e-4)
    assert pair.target.size.bytes_per_position == 2 * 80 * 8 * 128 * 2
    alone = decode_cost(pair.target, machine, 8, 1, 0)
    assert alone.reading == pytest.approx(5.1475e-3, rel=1e-4) and alone.computing == 0
    # 1000 positions of 327,680 bytes more
    assert decode_cost(pair.target, machine, 8, 1, 1000).reading - alone.reading == pytest.approx(0.32768e9 / 26.8e12)
    many = decode_cost(pair.target, machine, 8, 512, 0)  # 2 * 68.977e9 * 512 / (8 * 989e12)
    assert many.computing == pytest.approx(8.927e-3, rel=1e-3) and many.reading == 0


def test_labels_compute_on_a_single_gpu():
    """2 * (68.977 + 6.738) billion * 360 tokens * 1000 prompts / 989e12, whatever the number of GPUs."""
    for gpus in (8, 64):
        labels = stages_of(gpus=gpus, prompts=1000, operations_share=1)["labels"]
        assert labels.seconds == pytest.approx(55.12, rel=1e-3)
        assert (labels.gpus, labels.busy, labels.bound) == (gpus, 1, COMPUTE)
        assert labels.gpu_hours == pytest.approx(gpus * 55.12 / 3600, rel=1e-3)


def test_responses_gain_by_gpus_and_rows():
    eight, more = (stages_of(gpus=gpus)["responses"] for gpus in (8, 64))
    assert more.seconds == pytest.approx(eight.seconds / 8, rel=1e-2) and more.memory_bytes < eight.memory_bytes
    assert "tensor_parallel_size: 8, pipeline_parallel_size: 8, max_num_seqs: 2048" in more.command
    single = stages_of(runner="local", batch=1)["responses"]
    assert single.bound == BANDWIDTH and single.busy == 1 and single.seconds > 100 * eight.seconds


def test_rows_are_as_many_as_memory_holds():
    """21.6 GB of an RTX 4090 less 18.53 GB of weights hold 41 texts of 562 positions of 131,072 bytes."""
    stage = stages_of(model="llama3.2-1b-to-llama3.1-8b", gpu="rtx4090", gpus=1, runner="local", batch=64)["responses"]
    assert "generation.batch_size=41" in stage.command
    assert stage.memory_bytes <= 0.9 * 24e9


def test_branches_are_as_many_as_memory_holds():
    """An L40S holds 43.2 GB; branches of a draft of 7 B with 582 positions take 305 MB each."""
    stage = stages_of(model="llama2-7b-to-llama2-13b", gpu="l40s", gpus=1)["recording"]
    together = int(stage.command.split("record.batch_size=")[1].split()[0])
    assert 1 <= together < 64 and stage.memory_bytes <= 43.2e9 < stage.memory_bytes + 0.306e9


def test_predictions_read_every_recorded_token_with_both_models():
    """62,000 tokens of 200 responses, of 4 samples each 30 % rejected, after which 20 tokens are drafted; 10,000 of prompts."""
    stage = stages_of(operations_share=1)["predictions"]
    assert RecordSettings() == RecordSettings(num_samples=4, max_tokens=20)
    assert stage.tokens == pytest.approx(62_000 * 25)
    assert stage.seconds == pytest.approx(2 * (68.977e9 + 6.738e9) * (62_000 * 25 + 10_000) / 989e12, rel=1e-3)


def test_overheads_lengthen_what_is_not_the_disks():
    pair, machine, stages = planned(PlanSettings(prompts=520, disk=0.01))
    slower = plan(pair, replace(machine, overheads={"labels": 3.0, "heads": 3.0}), PlanSettings(prompts=520, disk=0.01))
    for before, after in zip(stages, slower, strict=True):
        factor = 3 if after.name in ("labels", "heads") else 1
        assert after.seconds_of == {name: value * (factor if name != DISK else 1) for name, value in before.seconds_of.items()}


def test_heads_store_states_that_fit_the_budget():
    """7 B drafts have states of 8192 bytes, and six numbers of 4 bytes."""
    small = stages_of(prompts=520)["heads"]
    assert small.stored_bytes == pytest.approx(500 * 310 * (8192 + 24))
    assert "features=cached" in small.command and small.tokens == pytest.approx(500 * 360)
    large = stages_of()["heads"]
    assert "features=online" in large.command and large.stored_bytes == 0
    assert large.tokens == pytest.approx(12 * 50_000 * 360)


def test_a_slow_disk_bounds_a_stage():
    assert stages_of(prompts=520, disk=0.001)["heads"].bound == "disk"


def test_what_labels_store_and_read_is_as_in_data_gen():
    per_token = [n for n in SCHEMA.names if n in labelling.Labels.__dataclass_fields__ and not n.startswith("more_")]
    stage = stages_of(prompts=10, samples=3)["labels"]
    assert stage.stored_bytes == 10 * 310 * 4 * (len(per_token) + 2 * 2)
    assert LABEL_BATCH == labelling.BATCH_TOKENS


def test_distillation_is_added_and_sharded():
    stage = stages_of(distill=True)["distilling"]
    assert "+trainer.strategy=fsdp" in stage.command and stage.tokens == pytest.approx(12 * 40_000 * 360)
    with pytest.raises(UserError, match="use more GPUs"):
        stages_of(gpu="h200", gpus=2, distill=True, max_new_tokens=60_000)


@pytest.mark.parametrize(
    "model", ["llama2-7b", "llama3.2-1b-to-llama3.1-8b", "qwen3-0.6b-to-qwen3-8b", "qwen3-0.6b-to-qwen3-32b", "nano"]
)
def test_tables_fit_80_columns(model, capsys, tmp_path):
    text = run(["plan", f"model={model}", "gpus=64", "price=2.5", "distill=true", f"out={tmp_path}"])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80 and "…" not in printed
    assert "specheads train" in text and "bound by" in text
    written = json.loads((tmp_path / "plan.json").read_text())
    assert [stage["name"] for stage in written["stages"]][3] == "distilling"
    assert written["stages"][0]["cost"] == pytest.approx(2.5 * written["stages"][0]["gpu_hours"])


def test_a_cpu_has_its_measured_rates(monkeypatch, tmp_path):
    assert Machine.of(PlanSettings(gpu="cpu", gpus=1)).accelerator.bytes_share == 1
    assert stages_of(model="nano", gpu="cpu", gpus=1, prompts=256)["responses"].seconds > 1
    assert set(measured_overheads()) == set(stages_of())
    monkeypatch.setattr("specheads.plan.machine.RESULTS", tmp_path)
    with pytest.raises(UserError, match="a source tree has"):
        Machine.of(PlanSettings(gpu="cpu", gpus=1))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpu=b9000"], "gpu=b9000 is not known; use one of h200"),
        (["gpus=1"], "needs 154 GB, but gpus=1 of gpu=h100 hold 72 GB.*use gpus=3"),
        (["gpu=cpu"], "write gpus=1"),
        (["epochs=x"], "epochs=x must be a positive integer"),
        (["model=mine"], "needs both models"),
        (["quantization=int3"], "use one of int8"),
        (["model=mine", "draft=a/b", "target=c/d"], "hf download a/b config.json"),
    ],
)
def test_mistakes_are_a_message(words, message):
    with pytest.raises(UserError, match=message):
        run(["plan", *words])
