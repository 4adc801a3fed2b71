"""Heads go to a hub and come back as they were, through huggingface_hub's own client and a hub that
this test plays.
"""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from specheads.heads.head import AcceptanceHead, HeadConfig, load_head, save_head
from specheads.heads.head_folder import EXPORTED, GRAPH, store_in_config
from specheads.heads.train_prompts import TrainPrompts
from specheads.integrations.formats import FORMATS

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
THERE_AND_BACK = """
import sys
import torch
from huggingface_hub import PyTorchModelHubMixin
import specheads
from specheads.heads.head import AcceptanceHead
head = specheads.load_head(sys.argv[1])
assert isinstance(head, PyTorchModelHubMixin)
print(head.push_to_hub("somebody/a-head"))
for back in (
    AcceptanceHead.from_pretrained("somebody/a-head"),
    specheads.load_head("somebody/a-head", revision="main"),
):
    assert back.config == head.config and not back.training
    for name, value in head.state_dict().items():
        assert torch.equal(value, back.state_dict()[name])
    assert len(back.train_prompts.train) == 2
    assert back.train_prompts.dev.tolist() == head.train_prompts.dev.tolist() != []
"""


class Hub(BaseHTTPRequestHandler):
    """The few calls by which a repository of small files is made, filled in one commit and read."""

    files: dict[str, bytes]

    @property
    def own_address(self):
        return f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, content, headers=(), body=True):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(200)
        for name, value in {"Content-Length": str(len(content)), **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def do_POST(self):
        given = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            self.answer({"url": f"{self.own_address}/somebody/a-head", "id": "somebody/a-head"})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            self.answer(
                {
                    "files": [
                        {"path": operation["path"], "uploadMode": "regular", "shouldIgnore": False}
                        for operation in json.loads(given)["files"]
                    ]
                }
            )
        elif "/commit/" in self.path:
            for line in given.splitlines():
                operation = json.loads(line)
                if operation["key"] == "file":
                    self.files[operation["value"]["path"]] = base64.b64decode(
                        operation["value"]["content"]
                    )
                if operation["key"] == "deletedFile":
                    del self.files[operation["value"]["path"]]
            self.answer(
                {
                    "success": True,
                    "commitOid": COMMIT,
                    "commitUrl": f"{self.own_address}/somebody/a-head/commit/{COMMIT}",
                }
            )
        else:
            self.send_error(404)

    def do_GET(self, body=True):
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/somebody/a-head"):
            siblings = [{"rfilename": name} for name in self.files]
            if "/tree/" in path:
                self.answer(
                    [
                        {
                            "type": "file",
                            "path": name,
                            "size": len(content),
                            "oid": hashlib.sha1(content).hexdigest(),
                        }
                        for name, content in self.files.items()
                    ]
                )
            else:
                self.answer(
                    {
                        "id": "somebody/a-head",
                        "sha": COMMIT,
                        "siblings": siblings,
                        "private": False,
                        "downloads": 0,
                        "tags": [],
                    }
                )
            return
        name = path.rpartition("/resolve/")[2].partition("/")[2]
        if name in self.files:
            content = self.files[name]
            etag = hashlib.sha1(content).hexdigest()
            self.answer(
                content,
                {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"},
                body,
            )
        else:
            self.send_error(404)

    def do_HEAD(self):
        self.do_GET(body=False)

    def log_message(self, *given):
        pass


@pytest.fixture
def hub():
    handler = type("ThisHub", (Hub,), {"files": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler.files
    server.shutdown()


def new_head():
    torch.manual_seed(0)
    calibration = {"slope": [1.2, 0.8], "intercept": [0.1, 0.0]}
    head = AcceptanceHead(
        HeadConfig(
            hidden_size=8, depth=1, calibration=calibration, draft={"id": "a", "revision": "b"}
        )
    )
    for tensor in head.state_dict().values():
        tensor.add_(0.3 * torch.randn_like(tensor))
    return head


def test_push_to_hub_and_back(hub, tmp_path):
    endpoint, files = hub
    head = new_head()
    head.train_prompts = TrainPrompts.of(["five", "six"], ["seven"])
    folder = save_head(head, tmp_path / "head", torch.randn(32, 19))
    (folder / "notes.txt").write_text("of the user, not of the head")
    ours = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    settings = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_TOKEN": "hf_x",
        "HF_HUB_DISABLE_XET": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", THERE_AND_BACK, str(folder)],
        env={**ours, **settings, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {path: (folder / path).read_bytes() for path in files} == files
    assert files.keys() == {
        "README.md",
        "config.json",
        "custom_generate/generate.py",
        "custom_generate/requirements.txt",
        "golden.safetensors",
        "model.safetensors",
        "train_prompts.safetensors",
    }


def test_save_pretrained_and_from_pretrained(tmp_path):
    """Of a head that was never saved, too: its golden vectors are then random inputs of its
    scale.
    """
    head = new_head()
    head.save_pretrained(tmp_path / "head")
    back = AcceptanceHead.from_pretrained(tmp_path / "head")
    assert back.config == head.config and back.golden_inputs.shape == (32, 19)
    back.save_pretrained(tmp_path / "again")
    for name in ("config.json", "model.safetensors", "golden.safetensors", "README.md"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "head" / name).read_bytes()
    assert torch.equal(load_head(tmp_path / "again").readout.weight, head.readout.weight)


@pytest.fixture(scope="module")
def exported_once(tmp_path_factory):
    torch.manual_seed(0)
    calibration = {"slope": [1.2, 0.8], "intercept": [0.1, 0.0]}
    head = AcceptanceHead(
        HeadConfig(8, depth=1, predicts="input_token", width=8, calibration=calibration)
    )
    torch.nn.init.normal_(head.readout.weight)
    folder = save_head(head, tmp_path_factory.mktemp("exported") / "head", torch.randn(32, 8))
    for write in FORMATS.values():
        write(load_head(folder), folder)
    return folder


@pytest.fixture
def exported(exported_once, tmp_path):
    """The folder of a head that every format can hold, with all of them in it."""
    return shutil.copytree(exported_once, tmp_path / "head")


def test_a_folder_loses_what_was_exported_of_the_head_that_it_held(exported):
    assert all((exported / name).is_file() for name in EXPORTED)
    save_head(new_head(), exported)
    assert not [name for name in EXPORTED if (exported / name).exists()]


def test_a_new_calibration_removes_graphs_with_the_earlier_one(exported, caplog):
    store_in_config(exported, recommended={"threshold": 0.5})
    assert all((exported / name).exists() for name in EXPORTED)
    store_in_config(exported, calibration={"slope": [1.0], "intercept": [0.0]})
    assert {name for name in EXPORTED if not (exported / name).exists()} == {GRAPH}
    assert "head.onnx held the earlier calibration and was removed; export it again" in caplog.text
