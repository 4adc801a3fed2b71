"""One process, two with torchrun's variables, and FSDP2 learn the same from the same batches, and
resume each other's runs.
"""

import json
import os
import socket

import process_curves
import pytest
from commands import ROOT
from process_curves import SETTINGS, checkpoint_of, curve
from warm_processes import server

pytestmark = pytest.mark.filterwarnings("ignore:The .*dataloader.*does not have many workers")
EXACT = {"abs": 1e-9, "rel": 1e-9}  # the draft is in float64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Curves of two processes, which also resume runs that one process began."""
    folder = tmp_path_factory.mktemp("curves")
    for name in ("target", "cut"):
        assert curve(folder, f"one_stopped_{name}", SETTINGS[name], stops=True) is None
        assert checkpoint_of(folder, f"one_stopped_{name}").is_file()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    shared |= {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    shared["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    words = [process_curves.__file__, folder]
    started = [server().start(ROOT, *words, RANK=rank, LOCAL_RANK=rank, **shared) for rank in "01"]
    for done in [process.wait() for process in started]:
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The curves of one process."""
    folder = tmp_path_factory.mktemp("whole")
    return {name: curve(folder, name, settings) for name, settings in SETTINGS.items()}


def assert_same(found, expected):
    assert [step for step, _ in found["points"]] == [step for step, _ in expected["points"]]
    for (_, ours), (_, theirs) in zip(found["points"], expected["points"], strict=True):
        assert ours == pytest.approx(theirs, **EXACT)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        assert found["weights"][name] == pytest.approx(weight, **EXACT), name


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("two_target", "target"),
        ("two_accumulated", "accumulated"),
        ("fsdp2_target", "target"),
        ("two_plain", "plain"),
        ("fsdp2_plain", "plain"),
        ("fsdp2_cut", "cut"),
        ("two_reading", "reading"),
        ("fsdp2_reading", "reading"),
        ("two_resumed", "target"),
        ("fsdp2_resumed", "target"),
        ("fsdp2_cut_resumed", "cut"),
    ],
)
def test_two_processes_have_the_curve_of_one(folder, whole, name, settings):
    assert_same(json.loads((folder / f"{name}.json").read_text()), whole[settings])


@pytest.mark.parametrize(
    ("stopped", "settings"),
    [("two_stopped", "target"), ("fsdp2_stopped", "target"), ("fsdp2_cut_stopped", "cut")],
)
def test_one_process_resumes_what_two_began(folder, whole, stopped, settings):
    assert checkpoint_of(folder, stopped).is_file()
    found = curve(folder, f"one_after_{stopped}", SETTINGS[settings], resumes=stopped)
    assert_same(found, whole[settings])


def test_the_curves_differ_where_the_settings_do(whole):
    """Or equal curves would say nothing."""
    last = [each["points"][-1][1]["dev/overlap"] for each in whole.values()]
    assert len(set(last)) == len(last)
