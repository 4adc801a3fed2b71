"""The library that the sources in kernels/ become, built once per machine: compiled at the same time, complete or absent on disk.

It is kept among the compiler's files, named by a hash of all that it depends on.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import shlex
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from specheads.decoding.engine.artefacts import keep_kernels_private, machine

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).with_name("kernels")
# The sources that one process compiles, in about equal times. Reading torch's headers takes a process as long as compiling one of
# the smaller sources, so that a process for each would cost more than it saves where few cores are free.
GROUPS = (("layers.cpp",), ("products.cpp", "networks.cpp", "sampling.cpp", "torch.cpp"))
MOST_CHARACTERS = 200  # of an error that a compiler reports


def library_path() -> Path:
    """Return where the library is or will be, named by its sources, the compiler's options and this machine."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # takes seconds to import

    keep_kernels_private()
    texts = [(path.name, path.read_text()) for path in sorted(FOLDER.iterdir()) if path.suffix in (".cpp", ".h")]
    commands = [_command(name, ["source"], Path("folder")) for name in ("object.o", "library.so")]
    digest = hashlib.sha256(repr((texts, GROUPS, commands, machine())).encode()).hexdigest()
    return Path(cache_dir(), f"operators-{digest[:24]}.so")


def load_library(path: Path) -> ctypes.CDLL:
    """Return the library, built if it is not there or cannot be loaded; its symbols are visible to libraries loaded later.

    Raises:
        RuntimeError: a source cannot be compiled.
        OSError: there is no compiler, or the library cannot be written or loaded.
    """
    build(path)
    try:
        return ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    except OSError as error:
        logger.warning("the operators in %s cannot be loaded and are built again: %s", path, error)
    path.unlink(missing_ok=True)
    build(path)
    return ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)


def build(path: Path) -> None:
    """Build the library if it is not there; of processes that want to, one builds and the others wait.

    Raises:
        RuntimeError: a source cannot be compiled.
        OSError: there is no compiler, or the library cannot be written.
    """
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # until the file is closed, and no longer than this process lives
        if path.exists():
            return
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="operators-") as name:
            folder = Path(name)
            with ThreadPoolExecutor(len(GROUPS)) as pool:
                objects = list(pool.map(lambda names: _compile(names, folder), GROUPS))
            _run(_command("library.so", objects, folder))
            os.replace(folder / "library.so", path)


def _compile(names: tuple[str, ...], folder: Path) -> str:
    """Compile sources together; return the path of their object in `folder`."""
    together = folder / f"with_{names[0]}"
    together.write_text("".join(f'#include "{FOLDER / name}"\n' for name in names))
    _run(_command(f"{together.stem}.o", [str(together)], folder))
    return str(together.with_suffix(".o"))


def _command(name: str, inputs: list[str], folder: Path) -> str:
    """Return the command that compiles or links a file of `folder`, with the options by which steps are compiled."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    compiles = name.endswith(".o")
    options = CppTorchDeviceOptions(device_type="cpu", vec_isa=pick_vec_isa(), compile_only=compiles)
    builder = CppBuilder(name=Path(name).stem, sources=inputs, BuildOption=options, output_dir=str(folder))
    return builder.get_command_line()


def _run(command: str) -> None:
    done = subprocess.run(shlex.split(command), check=False, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.splitlines()
        reasons = [line for line in lines if "error" in line] or lines or [f"the compiler ended with {done.returncode}"]
        raise RuntimeError(reasons[0][-MOST_CHARACTERS:])
