"""The folders of heads: finding those that `head=` names, and writing what was measured of them."""

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specheads.errors import UserError
from specheads.heads.card import card
from specheads.heads.head import AcceptanceHead, HeadConfig, latest_head, load_head
from specheads.heads.head_folder import GRAPH
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp
from specheads.storage.files import read_json, write_json, write_whole

logger = logging.getLogger(__name__)


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


def store_in_config(folder: Path, **values: Mapping[str, Any] | None) -> None:
    """Write values that were measured after a head's training into its config and card.

    Raises UserError for damaged ones.
    """
    path = folder / "config.json"
    try:
        before = read_json(path)
        content = before | values
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); export the head again.") from None
    if (
        before.get("calibration") != content.get("calibration")
        and (graph := folder / GRAPH).exists()
    ):
        graph.unlink()
        logger.warning(
            "%s held the earlier calibration and was removed; specheads export writes it again",
            graph,
        )
    text = card(HeadConfig.from_dict(content, str(path)))
    # The card first: with an old config, a run that was killed in between does both again.
    write_whole(folder / "README.md", lambda temporary: temporary.write_text(text))
    write_json(path, content)
