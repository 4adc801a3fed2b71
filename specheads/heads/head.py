"""The acceptance head: a small residual network on the draft's hidden state that predicts how
likely a drafted token is accepted.

With `predicts=input_token` (SpecDec++) it reads the draft's state after the token, one forward pass
after that was sampled. With `predicts=next_token` (look-ahead) it reads the state that the token
was sampled from, its embedding and the draft's certainty.
"""

import copy
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn

from specheads.errors import UserError
from specheads.heads.config import HeadConfig
from specheads.heads.head_folder import HeadFiles, read_files, unreadable, write_files
from specheads.heads.portable.network import Network, load_tensors
from specheads.heads.train_prompts import TrainPrompts
from specheads.pair.language_model import has_adapters
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp
from specheads.storage.files import read_json
from specheads.storage.runs import has_ended

logger = logging.getLogger(__name__)

NUM_GOLDEN = 32  # golden inputs that are kept
LEAST_SPREAD = 1e-6  # logits with a smaller standard deviation count as constant

Scoring = Callable[[Network, Tensor], Tensor]


def _score(network: Network, inputs: Tensor) -> Tensor:
    return network.score(inputs)


_scoring: ContextVar[Scoring] = ContextVar("scoring", default=_score)


@contextmanager
def scoring_with(score: Scoring) -> Iterator[None]:
    """While it is active, this thread's heads compute logits (...) of assembled inputs (...,
    input_size) by `score`.

    Engines compute with copies of weights.
    """
    before = _scoring.set(score)
    try:
        yield
    finally:
        _scoring.reset(before)


class AcceptanceHead(Network, PyTorchModelHubMixin):
    """A network that knows its config. It computes in float32 (SpecDec++, section 3.2).

    `save_pretrained`, `from_pretrained` and `push_to_hub` are huggingface_hub's; they use the
    folder of `specheads.save_head`.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(vars(config))
        self.config = config
        self.golden_inputs: Tensor | None = (
            None  # (N, input_size), on which a loaded head was checked
        )
        self.train_prompts: TrainPrompts | None = (
            None  # None: not known, for heads that were exported without them
        )

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        return _scoring.get()(self, self.assemble(features))

    def _save_pretrained(self, save_directory: Path) -> None:
        save_head(self, save_directory)

    @classmethod
    def from_pretrained(  # type: ignore[override]  # the mixin names the hub's arguments, which are passed on by `hub` here
        cls, location: str | Path, *, any_draft: bool = False, **hub: Any
    ) -> "AcceptanceHead":
        """Return the head of a folder or hub id.

        See `specheads.load_head`, which raises the same errors.
        """
        files = read_files(location, hub)
        config = replace(files.config, draft={}, target={}) if any_draft else files.config
        try:
            head = load_tensors(lambda: cls(config), vars(config), files.tensors)
            if files.golden is not None:
                head._check_vectors(files.golden)
                head.golden_inputs = files.golden["inputs"]
        except ValueError as error:
            raise unreadable(files.folder, error) from None
        head.train_prompts = files.train_prompts
        return head

    def _check_vectors(self, golden: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless this head computes the golden logits, and they are not all the
        same.
        """
        inputs = golden["inputs"]
        logits = golden["logits"]
        if inputs.shape != (len(logits), self.config.input_size):
            raise ValueError("golden.safetensors has tensors of other shapes")
        self.check_golden(inputs, logits)
        if logits.std().item() < LEAST_SPREAD:
            raise ValueError("it predicts a constant, so no threshold can separate drafts")

    def extra_repr(self) -> str:
        """Return what the layers do not show; names of compiled code depend on it."""
        weight = self.readout.weight
        config = self.config
        return (
            f"predicts={config.predicts}, inputs={config.inputs}, {weight.dtype}, {weight.device},"
            f" training={self.training}"
        )

    def check_fits(self, pair: Pair) -> None:
        """Raise UserError unless this head was trained for the pair's draft, and for its target if
        it reads that.
        """
        size = pair.draft_lm.hidden_size
        if self.config.hidden_size != size:
            raise UserError(
                f"the head reads hidden states of size {self.config.hidden_size} of"
                f" {self.config.draft.get('id', 'another draft')}, but the draft {pair.draft_id}"
                f" has size {size}; train one for this pair."
            )
        if self.config.draft and has_adapters(pair.draft):
            pair.check_merged()
        self.check_trained_for(pair.draft_id, pair.draft_revision)

    def check_trained_for(self, name: str, revision: str) -> None:
        """Raise UserError if this head was trained for another revision of the draft."""
        trained = dict(self.config.draft)
        if trained and trained.get("revision") != revision:
            raise UserError(
                f"the head was trained for draft {trained.get('id')} at revision"
                f" {trained.get('revision')}, but this pair's draft is {name} at revision"
                f" {revision}; load that draft, train another head, or give any_draft=true."
            )


@torch.no_grad()
def set_scale(network: nn.Module, inputs: Tensor) -> None:
    """Set the buffers `input_mean` and `input_scale` of a network so that inputs (N, input_size)
    enter with unit variance.
    """
    network.get_buffer("input_mean").copy_(inputs.mean(dim=0))
    network.get_buffer("input_scale").copy_(1 / inputs.std(dim=0).clamp_min(1e-6))


def save_head(head: AcceptanceHead, folder: Path, golden_inputs: Tensor | None = None) -> Path:
    """Write a head to `folder`, which is made, or whose files are replaced one by one.

    Return the folder.

    `golden_inputs` (N, input_size) are those of real tokens; by default those that it was loaded
    with, or random ones.
    """
    same = copy.deepcopy(head).cpu().eval()  # this one may be decoding
    inputs = head.golden_inputs if golden_inputs is None else golden_inputs
    if inputs is None:  # random ones, at the scale that this head was trained on
        sample = torch.randn(
            NUM_GOLDEN, head.config.input_size, generator=torch.Generator().manual_seed(0)
        )
        inputs = sample / same.input_scale + same.input_mean
    inputs = inputs[:NUM_GOLDEN].float().cpu().contiguous()
    with torch.no_grad():
        golden = {"inputs": inputs, "logits": same.score(inputs)}
    return write_files(
        folder, HeadFiles(head.config, same.state_dict(), golden, head.train_prompts)
    )


def load_head(location: str | Path, any_draft: bool = False, **hub: Any) -> AcceptanceHead:
    """Load a head from a folder or hub id, on the CPU in float32.

    The SpecDec++ authors' checkpoints are read, too.

    Args:
        any_draft: whether to forget for which draft and target the head was trained, so that it
            decodes with any draft of its size, for example one that was distilled a little further.
            Its predictions are then less accurate.
        hub: arguments of huggingface_hub's snapshot_download, such as `revision` and `token`.

    Raises:
        UserError: no such head; a tensor that is missing, extra or of another shape; golden logits
            that it does not compute.
    """
    return AcceptanceHead.from_pretrained(location, any_draft=any_draft, **hub)


def latest_head(outputs: Path, pair: Pair) -> Path:
    """Return the newest head folder `**/heads/<name>` under `outputs` that a run trained for the
    pair; else UserError.
    """
    configs = sorted(outputs.glob("**/heads/*/config.json"), key=_trained_at, reverse=True)
    revisions = {"draft": pair.draft_revision, "target": pair.target_revision}
    for path in configs:
        if not has_ended(path, outputs):
            continue  # it may yet be calibrated, or be the first of a learning curve
        try:
            config = HeadConfig.from_dict(read_json(path))
        except (ValueError, OSError):
            continue  # a folder that was never finished, or was damaged, is no candidate
        if all(
            getattr(config, role).get("revision") == revision
            for role, revision in revisions.items()
        ):
            return path.parent
    others = f" ({len(configs)} for other pairs)" if configs else ""
    raise UserError(
        f"there is no head for draft {pair.draft_id} with target {pair.target_id} under"
        f" {outputs}{others}; train one with specheads train model={pair.name}."
    )


def _trained_at(config: Path) -> float:
    """Return when a head's weights were written.

    An evaluation may have written into its config since.
    """
    weights = config.with_name("model.safetensors")
    return (weights if weights.exists() else config).stat().st_mtime


@dataclass(frozen=True)
class LocatedHead:
    """A head and its folder or hub id."""

    head: AcceptanceHead
    where: str


def find_heads(
    head: str | None, pair: Pair, outputs: Path, warp: Warp, any_draft: bool = False
) -> dict[str, LocatedHead]:
    """Return the heads of a folder or hub id by name: one, or all of a bank's folder.

    None for None, the newest for `latest`.

    With `any_draft`, heads for another draft are taken. Raises UserError for no such head, or one
    that does not fit the pair.
    """
    if head is None:
        return {}
    where = latest_head(outputs, pair).parent if head == "latest" else os.path.expanduser(head)
    folders: dict[str, Path | str] = {
        path.parent.name: path.parent
        for path in sorted(Path(where).glob("*/config.json"))
        if (path.parent / "model.safetensors").exists()
    }
    if (Path(where) / "config.json").exists() or not folders:
        folders = {Path(where).name: where}
    located = {}
    for name, folder in folders.items():
        loaded = load_head(folder, any_draft)
        loaded.check_fits(pair)
        trained = loaded.config.warp
        if trained and {**asdict(Warp()), **trained} != asdict(warp):
            message = (
                "head %s was trained under %s, but decoding uses %s; the keys warp.* give others"
            )
            logger.warning(message, name, dict(trained), warp.values())
        located[name] = LocatedHead(loaded, str(folder))
    return located
