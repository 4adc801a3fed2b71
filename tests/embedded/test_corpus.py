import ast
import textwrap

import pytest

from specheads.embedded import corpus

SOURCE = '''
import os

class Shape:
    def area(self, scale=1):
        """Return the area.

        More words that a prompt leaves out.
        """
        # in square units
        return self.width * self.height * scale

    def todo(self):
        """Not there yet."""
        raise NotImplementedError

def undocumented(x):
    return x

def one_line(): """Doc."""; return 1

@property
def quoted(x):
    \'\'\'Say "hello" to """x""".\'\'\'
    if x:
        return """
        text"""
    return None
'''


def test_a_function_becomes_signature_docstring_and_body():
    second, first = corpus.functions_in(SOURCE, "shape.py")
    assert first.prompt == 'def area(self, scale=1):\n    """Return the area."""\n'
    assert first.body == "    # in square units\n    return self.width * self.height * scale\n"
    assert second.prompt.startswith("def quoted(x):\n")
    for function in (first, second):
        ast.parse(function.prompt + function.body)
        assert function.source == "shape.py"


def test_text_that_is_not_python_has_no_functions():
    assert list(corpus.functions_in("def broken(:\n", "x.py")) == []


def test_bodies_that_differ_in_comments_and_layout_are_duplicates():
    def function(body):
        return corpus.Function("def f(x):\n", textwrap.indent(body, "    "), "x.py")

    same = [function("return x + 1\n"), function("# a comment\nreturn (x\n        + 1)\n")]
    kept = list(corpus.deduplicated([*same, function("return x + 2\n")], set()))
    assert kept == [same[0], function("return x + 2\n")]


def test_files_decide_the_split_and_it_is_the_same_everywhere():
    names = [f"package{i}/module.py" for i in range(4000)]
    shares = {split: sum(corpus.split_of(name) == split for name in names) / 4000 for split in ("train", "dev", "test")}
    assert abs(shares["dev"] - 0.5) < 0.04 and abs(shares["test"] - 0.25) < 0.04  # five standard errors
    assert [corpus.split_of(name) for name in ("json/decoder.py", "heapq.py", "textwrap.py")] == ["dev", "dev", "train"]


def test_the_sides_of_the_standard_library_share_no_file():
    files = {split: {function.source for function in corpus.standard_library(split)} for split in ("train", "dev", "test")}
    assert all(files.values())
    assert not files["train"] & files["dev"] and not files["train"] & files["test"] and not files["dev"] & files["test"]


def test_dependencies_are_permissive_and_named(monkeypatch):
    def names():
        return {distribution.metadata["Name"].lower() for distribution, _ in corpus.dependencies()}

    assert {"torch", "transformers", "hydra-core"} <= names()
    licence_of = corpus.licence_of
    monkeypatch.setattr(corpus, "licence_of", lambda d: "GPL-3.0" if d.metadata["Name"] == "torch" else licence_of(d))
    assert "torch" not in names() and "transformers" in names()


def test_functions_with_a_held_out_prompt_are_left_out():
    held_out = corpus.Function("def f(x):\n", "    return 1\n", "x.py")
    others = [corpus.Function("def f(x):\n", "    return 2\n", "y.py"), corpus.Function("def g(x):\n", "    return 3\n", "y.py")]
    assert list(corpus.deduplicated(others, {held_out.key}, {held_out.prompt})) == others[1:]


@pytest.mark.parametrize(
    ("licence", "permissive"),
    [
        ("MIT", True),
        ("Apache Software License", True),
        ("3-Clause BSD License", True),
        ("Apache-2.0 OR BSD-2-Clause", True),
        ("BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0", True),
        ("Apache-2.0 AND Apache-2.0 WITH LLVM-exception AND BSL-1.0 AND MIT", True),
        ("MIT License; Apache Software License", True),
        ("MIT-CMU", True),
        ("MPL-2.0 AND MIT", False),
        ("GNU Lesser General Public License v3 (LGPLv3); MIT License", False),
        ("GPL-3.0-only", False),
        ("Smithsonian", False),
        ("", False),
    ],
)
def test_every_part_of_a_licence_has_to_be_permissive(licence, permissive):
    assert corpus.is_permissive(licence) == permissive
