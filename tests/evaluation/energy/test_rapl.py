from pathlib import Path

import pytest
from energy_fakes import RANGE, set_to, tree

from specheads.evaluation.energy.meter import NotMeasurable
from specheads.evaluation.energy.rapl import rapl_zones

SERVER = {
    "intel-rapl": ("no zone, but the driver", 0),
    "intel-rapl:0": ("package-0", 5_000_000),
    "intel-rapl:0:0": ("core", 1_000_000),
    "intel-rapl:0:1": ("dram", 7_000_000),
    "intel-rapl:1": ("package-1", 2_000_000),
    "intel-rapl:1:0": ("uncore", 0),
    "intel-rapl:1:1": ("dram", 9_000_000),
    "intel-rapl:2": ("psys", 40_000_000),
    "intel-rapl-mmio:0": ("package-0", 5_000_000),
}


def test_packages_and_memory_are_counted_each_joule_once(tmp_path):
    zones = rapl_zones(tree(tmp_path, SERVER))
    assert [zone.name for zone in zones] == ["RAPL package-0", "RAPL dram", "RAPL package-1", "RAPL dram"]
    for place, (_, microjoules) in SERVER.items():
        set_to(tmp_path, place, microjoules + 1_500_000)
    assert [zone.joules() for zone in zones] == pytest.approx([1.5] * 4)


def test_a_counter_that_begins_again_goes_on(tmp_path):
    """The joules since the first reading never fall, although the file does, twice."""
    (zone,) = rapl_zones(tree(tmp_path, {"intel-rapl:0": ("package-0", RANGE - 1_000_000)}))
    readings = []
    for microjoules in (RANGE - 400_000, 600_000, RANGE - 1_000_000, 1_000_000):
        set_to(tmp_path, "intel-rapl:0", microjoules)
        readings.append(zone.joules())
    assert readings == pytest.approx([0.6, 1.6, 1e-6 * RANGE, 1e-6 * RANGE + 2])


def test_without_zones_the_message_says_where_they_would_be(tmp_path):
    with pytest.raises(NotMeasurable, match=r"has no zone of a package .*virtual machines.*NVIDIA GPU"):
        rapl_zones(tmp_path / "absent")
    with pytest.raises(NotMeasurable, match="has no zone of a package"):
        rapl_zones(tree(tmp_path, {"intel-rapl:0": ("psys", 0)}))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            PermissionError(13, "Permission denied"),
            r"energy_uj may be read by root only.*sudo chmod a\+r .*/intel-rapl:\*/energy_uj",
        ),
        (OSError(61, "No data available"), r"energy_uj cannot be read \(No data available\)"),
    ],
)
def test_a_counter_that_may_not_be_read_is_named(tmp_path, monkeypatch, error, message):
    """The tests may run as root, who may read everything, so the file's reader refuses here."""
    tree(tmp_path, SERVER)
    read_text = Path.read_text

    def refusing(path, *args, **kwargs):
        if path.name == "energy_uj":
            raise error
        return read_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", refusing)
    with pytest.raises(NotMeasurable, match=message):
        rapl_zones(tmp_path)
