"""How a target's generation config samples: the values of its warp."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BeforeValidator

from specheads.errors import UserError
from specheads.pair.warp import WarpValues
from specheads.settings import Built, Count, Settings, argument, setting

if TYPE_CHECKING:
    from specheads.pair.pair import Pair
    from specheads.pair.sampling import Warp
else:
    Warp = WarpValues  # the values are all that settings check, and sampling.py imports torch

logger = logging.getLogger(__name__)

NAMES = tuple(each.name for each in fields(WarpValues))


@dataclass(frozen=True)
class TargetWarp(WarpValues):
    """A warp whose values but the `given` ones are a target's.

    `of` takes them from it, until then they are those of transformers' generate.
    """

    top_k: Count = argument(
        50, "the number of most likely tokens to keep; 50 is transformers' default; 0: all"
    )
    given: tuple[str, ...] = ()

    def of(self, pair: "Pair") -> "Warp":
        """Return the warp for a pair, and log once where its values are from.

        Raises UserError for values that no warp has.

        `do_sample` is not read: false is what nearly all have, and from greedy data heads would
        learn 0 and 1 only.
        """
        from specheads.pair.sampling import Warp  # a pair is loaded, and torch with it

        config = getattr(pair.target, "generation_config", None)
        said = {name: value for name in NAMES if (value := getattr(config, name, None)) is not None}
        values: dict[str, Any] = self.values() | {"min_p": self.min_p}
        if said:
            values |= {name: float(value) for name, value in said.items()}
            values["top_k"] = max(0, int(said.get("top_k", 50)))  # some have -1 for all
        values |= {name: getattr(self, name) for name in self.given}
        try:
            warp = Warp(**values)
        except UserError as error:
            raise UserError(
                f"the generation config of {pair.target_id}: {error} Give another value by the keys"
                " warp.*"
            ) from None
        parts = []
        for name, value in values.items():
            source = "the target's" if name in said else "transformers' default"
            source = "given" if name in self.given else source
            parts.append(f"{name}={value:g} ({source})")
        line = "warp: " + ", ".join(parts)
        if line not in pair.said:
            logger.info("%s", line)
            pair.said.add(line)
        return warp


def _or_targets(value: object) -> object:
    """Return the values of a config as a TargetWarp.

    Those that are not there, or None, are the target's.
    """
    if value is None or isinstance(value, Mapping):
        given = {name: each for name, each in (value or {}).items() if each is not None}
        if not set(given) <= set(NAMES):
            return value
        try:
            return TargetWarp(**given, given=tuple(given))
        except UserError as error:
            raise UserError(f"warp.{error}") from None
    return value


class Warped(Settings):
    """Settings with a warp, which is the target's where it is not given."""

    warp: Annotated[Built[Warp], BeforeValidator(_or_targets)] = setting(
        None,
        "how draft and target turn logits into probabilities, in data, training and decoding; null:"
        " as the target's generation config says, or else temperature=1, top_k=50",
        config=dict.fromkeys(NAMES),
        decides=False,  # of a training: it is part of the data set's provenance
    )

    def for_pair(self, pair: "Pair") -> Self:
        """Return the settings with the warp for a pair. Raises UserError as `TargetWarp.of`."""
        return self.but(warp=self.warp.of(pair)) if isinstance(self.warp, TargetWarp) else self
