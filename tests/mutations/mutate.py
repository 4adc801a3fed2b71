"""Random damage to the bytes of a file, and to the values of a JSON file."""

import json

VALUES = [None, True, "", "text", "../outside", "/etc/passwd", "\ud800", [], {}, [[]], [None]]
VALUES += [{"a": 1}, ["a", "b"], -1, 0, 1, 2**31, 2**70, -(2**63), 0.5, -0.5, 1e308]
VALUES += [float("nan"), float("inf"), -float("inf")]
REMOVED = 0.03  # of all mutations


def mutated(rng, content, others):
    """Return the name of a mutation and the content after it, None for a file that is removed.

    `others` are contents of other files of the same kind.
    """
    if rng.random() < REMOVED:
        return "removed", None
    values = json_values(content)
    name = rng.choice([*BYTES, *JSON] if values else list(BYTES))
    if name in BYTES:
        return name, BYTES[name](rng, content, others)
    # The outermost values may be replaced, too.
    JSON[name](rng, *rng.choice(places(values)))
    return name, "\n".join(map(json.dumps, values)).encode() + b"\n"


# --- bytes


def span(rng, content):
    """Return a random range of positions, mostly a short one."""
    start = rng.randrange(len(content) + 1)
    return start, min(len(content), start + rng.choice((1, 1, 2, 8, 64, 512, len(content))))


def flipped(rng, content, others):
    damaged = bytearray(content or b"\0")
    for _ in range(rng.choice((1, 1, 1, 2, 16))):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def cut_out(rng, content, others):
    start, end = span(rng, content)
    return content[:start] + content[end:]


def inserted(rng, content, others):
    place = rng.randrange(len(content) + 1)
    return content[:place] + rng.randbytes(rng.choice((1, 4, 100))) + content[place:]


def repeated(rng, content, others):
    start, end = span(rng, content)
    return content[:end] + content[start:]


def zeroed(rng, content, others):
    start, end = span(rng, content)
    return content[:start] + bytes(end - start) + content[end:]


def not_text(rng, content, others):
    place = rng.randrange(len(content) + 1)
    return content[:place] + rng.choice((b"\xff\xfe", b"\xc3", b"\xed\xa0\x80")) + content[place:]


BYTES = {
    "bits flipped": flipped,
    "cut out": cut_out,
    "inserted": inserted,
    "repeated": repeated,
    "zeroed": zeroed,
    "no UTF-8": not_text,
    "cut off": lambda rng, content, others: content[: rng.randrange(len(content) + 1)],
    "emptied": lambda rng, content, others: b"",
    "another file": lambda rng, content, others: rng.choice(others) if others else b"{}",
}


# --- JSON, or lines of it


def json_values(content):
    """Return the JSON value of a file, or those of its lines; none if it holds something else."""
    try:
        text = content.decode()
        try:
            return [json.loads(text)]
        except ValueError:
            return [json.loads(line) for line in text.splitlines()]
    except ValueError:
        return []


def places(value):
    """Return every place within a JSON value: the object or list, and the key or position in it."""
    keys = value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    return [place for key in keys for place in [(value, key), *places(value[key])]]


def replace(rng, inside, key):
    inside[key] = rng.choice(VALUES)


def remove(rng, inside, key):
    del inside[key]


def rename(rng, inside, key):
    value = inside.pop(key)
    if isinstance(inside, dict):
        inside[f"{key}_"] = value
    else:
        inside.insert(0, value)


def add(rng, inside, key):
    if isinstance(inside, dict):
        inside["unknown"] = rng.choice(VALUES)
    else:
        inside.append(inside[key])


def scale(rng, inside, key):
    value = inside[key]
    if isinstance(value, int | float):
        inside[key] = rng.choice((-value, value * 1000, value + 1, float(value), str(value)))
    else:
        inside[key] = [value]


JSON = {
    "value replaced": replace,
    "value replaced again": replace,  # the most telling, so it comes more often
    "value of another size": scale,
    "value removed": remove,
    "key renamed": rename,
    "value added": add,
}
