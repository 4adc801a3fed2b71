import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from energy_fakes import Machine, tree
from fakes import tiny_pair

from specheads.evaluation.energy import metering
from specheads.evaluation.energy.meter import EnergyMeter, NotMeasurable
from specheads.evaluation.energy.metering import counters_of, metering_of

GPUS = {"GPU-11111111-aaaa": 250.0, "GPU-22222222-bbbb": 100.0}  # watts by id
CUDA = [torch.device("cuda", 1), torch.device("cuda", 0)]


class NVMLError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch):
    """A pynvml whose counters move every 100 ms of its machine's clock, and a torch that sees both of its GPUs."""
    module, module.machine, module.refused = ModuleType("pynvml"), Machine(), set()

    def energy(handle):
        if handle in module.refused:
            raise NVMLError("Not Supported")
        return int(1000 * GPUS[handle] * 0.1 * (module.machine.now // 0.1))

    module.NVMLError, module.nvmlInit = NVMLError, lambda: None
    module.nvmlDeviceGetHandleByUUID, module.nvmlDeviceGetTotalEnergyConsumption = lambda uuid: uuid, energy
    monkeypatch.setitem(sys.modules, "pynvml", module)
    ids = [uuid.removeprefix("GPU-") for uuid in GPUS]
    properties = lambda device: SimpleNamespace(name=f"GPU {device.index}", uuid=ids[device.index])  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    return module


def test_the_energy_of_gpus_is_that_of_their_boards(nvml, tmp_path):
    counters = counters_of(CUDA, tree(tmp_path, {"intel-rapl:0": ("package-0", 0)}))
    assert [counter.name for counter in counters] == ["NVML GPU 0", "NVML GPU 1"]
    meter = EnergyMeter(counters, 2.0, nvml.machine.clock, nvml.machine.sleep)
    assert meter.idle.watts == pytest.approx(350, rel=0.02) and meter.idle.update_seconds == pytest.approx(0.1, rel=0.02)
    start = meter.read()
    nvml.machine.sleep(10)
    assert meter.read().since(start).joules == pytest.approx(3500, abs=35)


def test_a_gpu_that_does_not_count_is_named(nvml):
    nvml.refused.add("GPU-22222222-bbbb")
    with pytest.raises(NotMeasurable, match=r"does not count the energy of cuda:1 \(Not Supported\).*MIG"):
        counters_of(CUDA)


def test_the_real_library_has_what_is_called(monkeypatch, nvml):
    """Where there is no driver it raises its own error, which becomes the message."""
    monkeypatch.delitem(sys.modules, "pynvml")
    real = pytest.importorskip("pynvml")
    assert all(hasattr(real, name) for name in vars(nvml) if name.lower().startswith("nvml"))
    if not torch.cuda.is_available():
        with pytest.raises(NotMeasurable, match="does not count the energy of cuda:0"):
            counters_of(CUDA[1:])


def test_without_its_library_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NotMeasurable, match=r"pip install 'specheads\[energy\]'"):
        counters_of(CUDA)


def test_a_pair_on_processors_is_measured_by_their_packages(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(metering, "EnergyMeter", lambda counters: made.append(counters) or "a meter")
    zones = tree(tmp_path, {"intel-rapl:0": ("package-0", 0), "intel-rapl:0:0": ("core", 0)})
    assert metering_of(tiny_pair(), zones).meter == "a meter"
    assert [counter.name for counter in made[0]] == ["RAPL package-0"]


def test_where_nothing_counts_the_context_says_why(tmp_path):
    context = metering_of(tiny_pair(), tmp_path / "absent").context()
    assert list(context) == ["not_measurable"] and "no zone of a package" in context["not_measurable"]
