import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from specheads.papers.reproduction.decoding import energy_meter

GPUS = {"GPU-11111111-aaaa": 250, "GPU-22222222-bbbb": 100}  # joules by id


class NVMLError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch):
    """A pynvml, and a torch that sees both of its GPUs."""
    module, module.refused = ModuleType("pynvml"), set()

    def energy(handle):
        if handle in module.refused:
            raise NVMLError("Not Supported")
        return 1000 * GPUS[handle]

    module.NVMLError = NVMLError
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    module.nvmlDeviceGetTotalEnergyConsumption = energy
    monkeypatch.setitem(sys.modules, "pynvml", module)
    ids = [uuid.removeprefix("GPU-") for uuid in GPUS]
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=ids[device.index])
    )
    return module


def pair_on(*devices):
    """A pair whose weights are on devices."""
    lm = SimpleNamespace(
        model=SimpleNamespace(
            parameters=lambda: [SimpleNamespace(device=torch.device(*each)) for each in devices]
        )
    )
    return SimpleNamespace(target_lm=lm, draft_lm=lm)


def test_the_energy_is_that_of_all_boards(nvml):
    assert energy_meter(pair_on(("cuda", 0)))() == 250
    assert energy_meter(pair_on(("cuda", 0), ("cuda", 1), ("cpu",)))() == 350


def test_where_nothing_counts_the_log_says_why(nvml, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    assert (
        energy_meter(pair_on(("cpu",))) is None and "that of NVIDIA's GPUs" in caplog.messages[-1]
    )
    nvml.refused.add("GPU-22222222-bbbb")
    assert (
        energy_meter(pair_on(("cuda", 1))) is None
        and "Not Supported; NVML counts whole GPUs" in caplog.messages[-1]
    )
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert (
        energy_meter(pair_on(("cuda", 0))) is None
        and "pip install 'specheads[energy]'" in caplog.messages[-1]
    )


def test_the_real_library_has_what_is_called(nvml, monkeypatch):
    monkeypatch.delitem(sys.modules, "pynvml")
    real = pytest.importorskip("pynvml")
    assert all(hasattr(real, name) for name in vars(nvml) if name.lower().startswith("nvml"))
