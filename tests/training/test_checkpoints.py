"""A training run that is killed anywhere and started again has the same numbers as an uninterrupted
run.
"""

import errno
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from training_runs import KillAt, Killed, curves_of, quiet_trainer, with_curves

from specheads.heads.batch import collate
from specheads.heads.head import HeadConfig
from specheads.interrupts import Interrupted, Request
from specheads.storage.files import write_json
from specheads.training.heads.bank import HeadBank
from specheads.training.heads.head_module import HeadModule
from specheads.training.heads.mixed_responses import MixedResponses
from specheads.training.heads.settings import HeadSpec
from specheads.training.loaders import ResumableData
from specheads.training.settings import Optimizer
from specheads.training.trainer import Checkpoints, checkpoint_to_resume, differences

pytestmark = pytest.mark.filterwarnings("ignore:Experiment logs directory")

# 14 rows in batches of 4; a checkpoint every 2 steps
EPOCHS = 3
BATCHES = 4
EVERY = 2


@pytest.fixture(scope="module")
def rows(nano, prompts):
    generator = np.random.default_rng(0)
    made = []
    for i in range(14):
        length = int(generator.integers(4, 9))
        drafted = generator.integers(2, 12, size=length)
        columns = {
            "response_ids": generator.integers(2, 12, size=length).tolist(),
            "draft_ids": drafted.tolist(),
        }
        columns |= {
            "accept_prob": np.where(drafted % 2, 0.1, 1.0).tolist(),
            "more_draft_ids": [],
            "more_accept_prob": [],
        }
        made.append({"prompt_ids": prompts[i % 8][:4], **columns})
    return made


def attempt(nano, rows, folder, predicts, moment=None, request=None, **changes):
    """One start of the same command.

    Returns its curves, weights and counters, or None if it was killed.
    """
    splits = {"train": rows, "dev": rows[:6], "test": rows[6:11]}
    data = ResumableData(
        {n: MixedResponses(r, predicts, 0.15, 0) for n, r in splits.items()},
        4,
        seed=0,
        collate=collate,
    )
    spec = HeadSpec(
        "head", HeadConfig(hidden_size=nano.draft_lm.hidden_size, predicts=predicts, depth=1)
    )
    module = HeadModule(HeadBank([spec], seed=0), nano, Optimizer(lr=1e-2))
    checkpoints = Checkpoints(folder / "last.ckpt", EVERY, {"data": "rows"})
    checkpoints.request = request or Request()
    killer = KillAt(moment, request)
    trainer = quiet_trainer(
        folder, EPOCHS, callbacks=[checkpoints, killer], **with_curves(folder), **changes
    )
    earlier = folder / "last.ckpt"
    try:
        trainer.fit(module, data, ckpt_path=earlier if earlier.exists() else None)
        trainer.test(module, data, verbose=False)
    except (Killed, Interrupted):
        return None
    saved = torch.load(earlier, weights_only=True)
    return {
        "history": module.history,
        "weights": [p.detach().clone() for p in module.bank.parameters()],
        "buffers": [b.clone() for b in module.bank.buffers()],
        "test": module.test_results,
        "steps": saved["global_step"],
        "epochs": saved["epoch"],
        "optimizer": saved["optimizer_states"][0]["state"],
        "schedule": saved["lr_schedulers"],
        "csv": curves_of(folder),
        "moments": killer.count,
    }


def assert_same(first, other):
    for key in ("history", "test", "steps", "epochs", "schedule", "csv"):
        assert first[key] == other[key], key
    for key in ("weights", "buffers"):
        assert all(map(torch.equal, first[key], other[key])), key
    ours = first["optimizer"]
    theirs = other["optimizer"]
    assert ours.keys() == theirs.keys() and len(ours)
    assert all(torch.equal(ours[i][name], theirs[i][name]) for i in ours for name in ours[i])


@pytest.fixture(scope="module", params=["next_token", "input_token"])
def predicts(request):
    return request.param


@pytest.fixture(scope="module")
def whole_run(nano, rows, tmp_path_factory):
    return cache(
        lambda predicts, **changes: attempt(
            nano, rows, tmp_path_factory.mktemp("whole"), predicts, **changes
        )
    )


@pytest.fixture
def uninterrupted(whole_run, predicts):
    return whole_run(predicts)


def test_the_uninterrupted_run_has_the_assumed_steps(uninterrupted):
    assert uninterrupted["steps"] == EPOCHS * BATCHES
    train, dev = (
        [s for s, point in uninterrupted["history"] if f"{part}/head/loss" in point]
        for part in ("train", "dev")
    )
    assert train == list(range(EPOCHS * BATCHES)) and dev == [
        BATCHES * (e + 1) for e in range(EPOCHS)
    ]
    assert uninterrupted["moments"] == MOMENTS


MOMENTS = EPOCHS * (3 * BATCHES + 4) + 3


PER_EPOCH = 3 * BATCHES + 4
# All around an epoch's end and of the run's end; between them some others.
KILLED = {
    *range(1, PER_EPOCH - 4, 3),
    *range(PER_EPOCH - 4, PER_EPOCH + 3),
    *range(PER_EPOCH + 5, MOMENTS - 5, 7),
    *range(MOMENTS - 5, MOMENTS + 1),
}


def kills():
    """The moments at which a run is killed; in a full run all of them."""
    yield "input_token", 24
    for moment in range(1, MOMENTS + 1):
        yield pytest.param(
            "next_token", moment, marks=[] if moment in KILLED else [pytest.mark.full]
        )


@pytest.mark.parametrize(("predicts", "moment"), list(kills()), indirect=["predicts"])
def test_a_run_killed_at_any_moment_resumes_to_the_same_numbers(
    nano, rows, predicts, uninterrupted, tmp_path, moment
):
    assert attempt(nano, rows, tmp_path, predicts, moment=moment) is None
    assert_same(attempt(nano, rows, tmp_path, predicts), uninterrupted)


def test_a_run_killed_repeatedly_ends_with_the_same_numbers(
    nano, rows, predicts, uninterrupted, tmp_path
):
    num_attempts = 0
    done = None
    while done is None:
        done = attempt(nano, rows, tmp_path, predicts, moment=17)
        num_attempts = num_attempts + 1
    assert num_attempts > 2
    assert_same(done, uninterrupted)


@pytest.mark.parametrize("max_steps", [2 * BATCHES, EPOCHS * BATCHES - 1])
def test_a_run_with_a_number_of_steps_resumes_to_the_same_numbers(nano, rows, tmp_path, max_steps):
    """Wherever it was killed, most of all after an epoch whose end was saved."""
    whole = attempt(nano, rows, tmp_path / "whole", "next_token", max_steps=max_steps)
    assert whole["steps"] == max_steps
    for moment in (7, PER_EPOCH, PER_EPOCH + 1, 2 * PER_EPOCH):
        folder = tmp_path / str(moment)
        killed = attempt(nano, rows, folder, "next_token", moment=moment, max_steps=max_steps)
        assert killed is None
        assert_same(attempt(nano, rows, folder, "next_token", max_steps=max_steps), whole)


@pytest.mark.parametrize(
    ("moment", "step"),
    [
        (1, 1),
        (8, 3),
        (9, 4),
        (13, 4),
        (16, 5),
        (PER_EPOCH + 16, 9),
        (3 * PER_EPOCH + 2, 12),
    ],
)
def test_a_run_asked_to_stop_saves_its_current_step(nano, rows, whole_run, tmp_path, moment, step):
    """In an epoch's last step and in validation, that is the epoch's end.

    After a step was looked at, the next one.
    """
    assert attempt(nano, rows, tmp_path, "next_token", moment=moment, request=Request()) is None
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == step
    assert_same(attempt(nano, rows, tmp_path, "next_token"), whole_run("next_token"))


@pytest.mark.parametrize(
    ("changes", "moments"),
    [
        ({"accumulate_grad_batches": 2}, (5, 14, 20)),
        ({"val_check_interval": 2}, (9, 17, 23)),
        ({"limit_train_batches": 3}, (5, 14)),
    ],
    ids=str,
)
def test_other_arguments_of_the_trainer_change_nothing(
    nano, rows, whole_run, tmp_path, changes, moments
):
    for moment in moments:
        folder = tmp_path / str(moment)
        assert attempt(nano, rows, folder, "next_token", moment=moment, **changes) is None
        again = attempt(nano, rows, folder, "next_token", **changes)
        assert_same(again, whole_run("next_token", **changes))


# --- what a checkpoint is of


def test_a_checkpoint_has_its_provenance(tmp_path):
    torch.save({"provenance": {"data": "a", "seed": 1}}, tmp_path / "last.ckpt")
    assert differences(tmp_path / "last.ckpt", {"data": "a", "seed": 1}) == []
    assert differences(tmp_path / "last.ckpt", {"data": "b", "heads": []}) == [
        "data",
        "heads",
        "seed",
    ]


# --- which checkpoint a run resumes

HERE = {"data": "a", "seed": 1}


@pytest.fixture
def stopped(tmp_path):
    """The checkpoints of an interrupted run."""
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    path.parent.mkdir(parents=True)
    torch.save({"provenance": HERE}, path)
    write_json(tmp_path / "run" / "run.json", {"resumed": True})
    return Checkpoints(path, 1, HERE)


def test_an_interrupted_run_resumes_from_its_checkpoint(stopped):
    assert checkpoint_to_resume(stopped) == stopped.path
    write_json(stopped.path.parents[1] / "run.json", {"resumed": False})
    assert checkpoint_to_resume(stopped) is None


def test_a_checkpoint_of_other_settings_is_left_with_a_warning(stopped, caplog):
    stopped.provenance["seed"] = 2
    assert checkpoint_to_resume(stopped) is None
    assert "was written with another seed" in caplog.text


@pytest.mark.parametrize("damage", ["empty", "other", "cut off", "foreign", "a changed bit"])
def test_a_damaged_checkpoint_is_left_with_a_warning(stopped, caplog, damage):
    torch.save({"provenance": HERE, "weight": torch.ones(1000)}, stopped.path)
    content = bytearray(stopped.path.read_bytes())
    place = content.index(torch.ones(8).numpy().tobytes())
    changed = bytes([*content[:place], content[place] ^ 1, *content[place + 1 :]])
    contents = {"empty": b"", "other": b"not a checkpoint", "cut off": content[:300]}
    stopped.path.write_bytes(contents.get(damage, changed))
    if damage == "foreign":
        torch.save({"state_dict": {}}, stopped.path)
    assert checkpoint_to_resume(stopped) is None
    assert "training starts again" in caplog.text


def test_a_checkpoint_that_a_full_disk_does_not_take_leaves_nothing(tmp_path):
    def save_a_part(path, weights_only):
        path.write_bytes(b"a part")
        raise OSError(errno.ENOSPC, "full", str(path))

    module = torch.nn.Linear(1, 1)
    trainer = SimpleNamespace(lightning_module=module, loggers=[], save_checkpoint=save_a_part)
    with pytest.raises(OSError, match="full"):
        Checkpoints(tmp_path / "last.ckpt", 1, {}).save(trainer)
    assert list(tmp_path.iterdir()) == []
