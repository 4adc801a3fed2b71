"""The wheel in an environment without the source tree: every way to decode with a head yields the same tokens there."""

import json
import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from warm_processes import Server

from specheads.heads.head import AcceptanceHead, HeadConfig, save_head

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "specheads", "data_gen", "conf")


def run(*words, cwd, **variables):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "WANDB_SERVICE")}
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**environment, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The programs of an environment with the wheel, the packages of this one, and nothing else of this project."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:  # copied, as building writes into the tree
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    built = run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source, cwd=folder)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    made = run(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    assert made.returncode == 0, made.stderr
    programs = folder / "env" / "bin"
    (packages,) = (folder / "env").glob("lib/python*/site-packages")
    # Paths that are added so are searched, but the editable installs among them are not followed.
    (packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in site.getsitepackages()))
    installed = run(
        sys.executable, "-m", "pip", "--python", programs / "python", "install", "--no-deps", "--no-index", wheel, cwd=folder
    )
    assert installed.returncode == 0, installed.stderr
    return programs


@pytest.mark.full
def test_every_path_decodes_the_same_tokens_in_the_same_rounds(environment, tmp_path):
    script = shutil.copy(Path(__file__).with_name("every_path.py"), tmp_path)
    done = run(environment / "python", script, tmp_path, cwd=tmp_path, SPECHEADS_ENGINE="eager", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report.pop("specheads").startswith(str(environment.parent))
    lengths = set()
    for ways in report.values():
        ours = ways.pop("decoder")
        assert ways.keys() >= {"transformers", "custom_generate", "standalone", "onnx"}
        for name, decoded in ways.items():
            assert [tokens for tokens, _ in decoded] == [tokens for tokens, _ in ours], name
            # custom_generate returns tokens alone; the forward passes of the draft are counted
            expected = [sum(drafts) for _, drafts in ours] if name == "custom_generate" else [drafts for _, drafts in ours]
            assert [drafts for _, drafts in decoded] == expected, name
        lengths |= {length for _, drafts in ours for length in drafts}
    assert len(report["next_token"]["onnx"]) == 20
    assert len(lengths) > 4  # the heads decide the lengths


@pytest.fixture(scope="module")
def server(environment):
    """Runs the programs of the environment."""
    server = Server(environment / "python", PYTHONPATH="")
    assert server.package.is_relative_to(environment.parent)
    return server


def test_every_command_runs_in_an_empty_folder(environment, server, tmp_path):
    """Data, a head, its evaluation, a probe and an export, with nothing but the installed command."""
    sizes = ["model=nano", "data.num_train=8", "data.num_dev=4", "data.num_test=4", "data.max_new_tokens=8"]

    def specheads(verb, *words):
        done = server.run(tmp_path, environment / "specheads", verb, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    two = ["trainer.devices=2", "trainer.accelerator=cpu"]  # Lightning starts the installed script a second time
    assert "next: specheads evaluate" in specheads("train", *sizes, "trainer.max_epochs=1", "calibration=null", *two)
    (head,) = {path.parent for path in tmp_path.glob("outputs/head/*/heads/*/config.json")}
    few = ["num_prompts=2", "num_dev_prompts=2", "live=none", "fixed_lengths=[1,2]", "thresholds=[0.5]"]
    few.append("stopping=[fixed_length,head_threshold]")
    assert "report.html" in specheads("evaluate", *sizes, "head=latest", *few)
    assert "next: specheads" in specheads("probe", *sizes, "num_prompts=2", "num_live_prompts=1", "repeats=1")
    assert "written" in specheads("export", f"head={head}", "format=standalone")
    assert "next: specheads train" in specheads("distill", *sizes, "trainer.max_epochs=1", "validation.num_prompts=2")
    assert not [path for path in tmp_path.iterdir() if path.name not in ("data", "outputs")]


def new_head(folder):
    torch.manual_seed(0)
    return save_head(AcceptanceHead(HeadConfig(hidden_size=160, depth=1, width=16)), folder)


def test_a_head_loads_by_the_wheel(environment, server, tmp_path):
    folder = new_head(tmp_path / "head")
    done = server.run(tmp_path, environment / "specheads", "export", f"head={folder}")
    assert done.returncode == 0, done.stderr
    assert "323 inputs, width 16, 1 residual blocks" in done.stdout


def test_the_wheel_has_the_sources_of_the_operators(server):
    """Other tests build them from the same files in the tree."""

    def sources(package):
        return {path.name: path.read_bytes() for path in (package / "decoding/engine/cpu").glob("*.[ch]*")}

    assert len(sources(ROOT / "specheads")) > 5
    assert sources(server.package.parent) == sources(ROOT / "specheads")


def truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def edited(change):
    def apply(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


DAMAGES = {
    "truncated": (truncated, "model.safetensors cannot be read"),
    "renamed": (
        edited(lambda tensors: tensors.update({"readout.gain": tensors.pop("readout.weight")})),
        "tensor 'readout.gain' is (1, 16), expected no such tensor",
    ),
    "wrong shape": (
        edited(lambda tensors: tensors.update({"readout.weight": torch.zeros(1, 8)})),
        "tensor 'readout.weight' is (1, 8), expected (1, 16)",
    ),
    "changed": (edited(lambda tensors: tensors["readout.bias"].add_(1)), "outputs differ from the golden vectors"),
}


def test_a_damaged_head_is_refused_by_name(environment, server, tmp_path):
    def check(folder):
        return server.run(tmp_path, environment / "specheads", "export", f"head={folder}")

    whole = new_head(tmp_path / "as it was")
    done = check(whole)
    assert done.returncode == 0 and "unchanged since its export" in done.stdout
    for name, (damage, message) in DAMAGES.items():
        folder = new_head(tmp_path / name)
        damage(folder)
        done = check(folder)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
        assert done.stderr.startswith("error: ") and str(folder) in done.stderr and message in done.stderr
