"""The energy of processors and their memory, from the running average power limit (RAPL) as Linux shows it.

Packages are summed. Their parts (`core`, `uncore`) are in them already, and so are packages in the platform's zone (`psys`); only
memory (`dram`), which Linux lists below its package, is counted apart from it.
"""

from pathlib import Path

from specheads.evaluation.energy.meter import NotMeasurable

POWERCAP = Path("/sys/class/powercap")


class RaplZone:
    """One zone; `energy_uj` counts microjoules up to `max_energy_range_uj` and begins again with 0.

    It must be read more often than the counter takes for its range, which is minutes at full power.
    """

    def __init__(self, folder: Path) -> None:
        self.name = f"RAPL {_text(folder / 'name')}"
        self._file, self._range = folder / "energy_uj", int(_text(folder / "max_energy_range_uj"))
        self._last, self._microjoules = int(_text(self._file)), 0

    def joules(self) -> float:
        value = int(_text(self._file))
        self._microjoules += (value - self._last) % self._range
        self._last = value
        return 1e-6 * self._microjoules


def rapl_zones(folder: Path = POWERCAP) -> list[RaplZone]:
    """Return the zones that together count the processors and their memory, each joule once.

    Raises:
        NotMeasurable: there are none, or they may not be read.
    """
    zones = [path for path in sorted(folder.glob("intel-rapl:*")) if (path / "name").exists()]
    counted = [path for path in zones if _text(path / "name").startswith(("package", "dram"))]
    if not counted:
        raise NotMeasurable(
            f"{folder} has no zone of a package (intel-rapl:0), the counter of Intel's and AMD's processors; containers, virtual "
            "machines and other systems than Linux hide it. Measure on the machine itself, or on an NVIDIA GPU."
        )
    return [RaplZone(path) for path in counted]


def _text(path: Path) -> str:
    """Return a file's only line. Raises NotMeasurable if it cannot be read."""
    try:
        return path.read_text().strip()
    except PermissionError:
        raise NotMeasurable(
            f"{path} may be read by root only, because it reveals what other users compute (CVE-2020-8694); run as root, or "
            f"where no others matter: sudo chmod a+r {path.parent.parent}/intel-rapl:*/energy_uj, until the next start."
        ) from None
    except OSError as error:
        raise NotMeasurable(f"{path} cannot be read ({error.strerror}); measure on the machine itself.") from None
