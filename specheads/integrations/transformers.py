"""A head in transformers' own `generate(assistant_model=draft)`."""

from pathlib import Path

from transformers import PreTrainedModel

from specheads.errors import UserError
from specheads.heads.head import AcceptanceHead, load_head
from specheads.heads.portable.assisted import Assisted
from specheads.heads.portable.standalone_head import StandaloneHead
from specheads.pair.revisions import revision_of


def assist(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    head: AcceptanceHead | str | Path,
    threshold: float | None = None,
    min_tokens: int | None = None,
    max_tokens: int | None = None,
    any_draft: bool = False,
) -> Assisted:
    """Let a head end the drafts of `target.generate(assistant_model=draft)`, in a `with` of the
    result or until its `remove()`.

    Args:
        target, draft: transformers models that share a tokenizer; they decode one prompt at a time.
        head: a head, its folder or hub id.
        threshold, min_tokens, max_tokens: of HeadThreshold; by default what the head recommends, or
            else 0.7, 1 (2 for input_token) and 20.
        any_draft: accept a head that was trained for another draft of this size.

    Raises UserError for no such head, or one that was trained for another draft; ValueError for
    sizes that differ, or bounds.
    """
    head = head if isinstance(head, AcceptanceHead) else load_head(head)
    if head.config.draft and not any_draft:
        if not draft.name_or_path:
            raise UserError(
                "the draft was not loaded from a folder or hub id, so its revision is not known;"
                " any_draft=True accepts it without this check."
            )
        head.check_trained_for(draft.name_or_path, revision_of(draft.config, draft.name_or_path))
    standalone = StandaloneHead(head.config.to_dict())
    standalone.load_state_dict(head.state_dict())
    standalone.requires_grad_(False).eval()
    return Assisted(
        target, draft, standalone, threshold=threshold, min_tokens=min_tokens, max_tokens=max_tokens
    )
