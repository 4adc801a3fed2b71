"""Random damage to the bytes of a file, and to the values of a JSON file."""

import json
import random
from collections.abc import Callable, Sequence

VALUES = (
    *(
        None,
        True,
        False,
        "",
        "text",
        "../outside",
        "/etc/passwd",
        "\ud800",
        [],
        {},
        [[]],
        [None],
        {"a": 1},
        ["a", "b"],
    ),
    *(
        -1,
        0,
        1,
        2**31,
        2**70,
        -(2**63),
        0.5,
        -0.5,
        1e308,
        float("nan"),
        float("inf"),
        -float("inf"),
    ),
)

REMOVED = 0.03  # of all mutations
Damage = Callable[[random.Random, bytes, Sequence[bytes]], bytes]


def mutated(
    rng: random.Random, content: bytes, others: Sequence[bytes]
) -> tuple[str, bytes | None]:
    """Return the name of a mutation and the content after it, None for a file that is removed.

    `others` are contents of other files of the same kind.
    """
    if rng.random() < REMOVED:
        return "removed", None
    mutations = [*BYTES, *JSON] if _values(content) else list(BYTES)
    name = rng.choice(mutations)
    return name, (BYTES | JSON)[name](rng, content, others)


def _span(rng: random.Random, content: bytes) -> tuple[int, int]:
    """Return a random range of positions, mostly a short one."""
    start = rng.randrange(len(content) + 1)
    return start, min(len(content), start + rng.choice((1, 1, 2, 8, 64, 512, len(content))))


def _flipped(rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    damaged = bytearray(content or b"\0")
    for _ in range(rng.choice((1, 1, 1, 2, 16))):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def _cut_out(rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    start, end = _span(rng, content)
    return content[:start] + content[end:]


def _inserted(rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    place = rng.randrange(len(content) + 1)
    return content[:place] + rng.randbytes(rng.choice((1, 4, 100))) + content[place:]


def _repeated(rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    start, end = _span(rng, content)
    return content[:end] + content[start:]


def _zeroed(rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    start, end = _span(rng, content)
    return content[:start] + bytes(end - start) + content[end:]


def _not_text(rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    place = rng.randrange(len(content) + 1)
    return content[:place] + rng.choice((b"\xff\xfe", b"\xc3", b"\xed\xa0\x80")) + content[place:]


BYTES: dict[str, Damage] = {
    "bits flipped": _flipped,
    "cut out": _cut_out,
    "inserted": _inserted,
    "repeated": _repeated,
    "zeroed": _zeroed,
    "no UTF-8": _not_text,
    "cut off": lambda rng, content, others: content[: rng.randrange(len(content) + 1)],
    "emptied": lambda rng, content, others: b"",
    "another file": lambda rng, content, others: rng.choice(others) if others else b"{}",
}


def _values(content: bytes) -> list:
    """Return the JSON values of a file, one for each line of JSON lines.

    None if it holds something else.
    """
    try:
        text = content.decode()
        try:
            return [json.loads(text)]
        except ValueError:
            return [json.loads(line) for line in text.splitlines()]
    except ValueError:
        return []


def _places(value: object) -> list[tuple[dict | list, str | int]]:
    """Return every place within a JSON value: the object or list, and the key or position in it."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    return [place for key in keys for place in [(value, key), *_places(value[key])]]


def _in_json(change: Callable[[random.Random, dict | list, str | int], None]) -> Damage:
    def damage(rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
        values = _values(content)  # whose outermost values may be replaced, too
        change(rng, *rng.choice(_places(values)))
        return "\n".join(map(json.dumps, values)).encode() + b"\n"

    return damage


def _replace(rng: random.Random, inside: dict | list, key: str | int) -> None:
    inside[key] = rng.choice(VALUES)  # type: ignore[index, call-overload]


def _remove(rng: random.Random, inside: dict | list, key: str | int) -> None:
    del inside[key]  # type: ignore[arg-type]


def _rename(rng: random.Random, inside: dict | list, key: str | int) -> None:
    value = inside.pop(key)  # type: ignore[arg-type]
    inside.update({f"{key}_": value}) if isinstance(inside, dict) else inside.insert(0, value)


def _add(rng: random.Random, inside: dict | list, key: str | int) -> None:
    value = inside[key]  # type: ignore[index]
    (
        inside.update({"unknown": rng.choice(VALUES)})
        if isinstance(inside, dict)
        else inside.append(value)
    )


JSON: dict[str, Damage] = {
    "value replaced": _in_json(_replace),
    "value replaced again": _in_json(_replace),  # the most telling, so it comes more often
    "value of another size": _in_json(lambda rng, inside, key: _scale(rng, inside, key)),
    "value removed": _in_json(_remove),
    "key renamed": _in_json(_rename),
    "value added": _in_json(_add),
}


def _scale(rng: random.Random, inside: dict | list, key: str | int) -> None:
    value = inside[key]  # type: ignore[index]
    if isinstance(value, int | float):
        inside[key] = rng.choice((-value, value * 1000, value + 1, float(value), str(value)))  # type: ignore[index, call-overload]
    else:
        inside[key] = [value]  # type: ignore[index, call-overload]
