"""Local files of every kind, through the source that reads them."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specheads.errors import UserError
from specheads.prompts.data_set_source import DatasetSource
from specheads.prompts.templates import as_json, from_json

FOUR = "\n".join(json.dumps({"a": letter}) for letter in "wxyz")


def written(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def texts(path, template="{a}", count=4):
    return [
        prompt.text
        for prompt in DatasetSource(
            str(path), None, "train", None, template, None, count, 0, 0
        ).load(chats=True)
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", FOUR),
        ("rows.json", FOUR + "\n\n"),
        ("ROWS.JSONL", "\ufeff" + FOUR.replace("\n", "\r\n")),
        (
            "rows.json",
            '\n[{"a": "w"}, {"a": "x", "b": [1]},\n {"a": "y", "b": "other"}, {"a": "z"}]',
        ),
        ("rows.jsonl", '[{"a": "w"}, {"a": "x"}, {"a": "y"}, {"a": "z"}]'),
        ("rows.csv", "a,b\nw,1\nx,\ny\n\nz,2\n"),
        ("rows.csv", "\ufeffb,a\r\n1,w\r\n2,x\r\n3,y\r\n4,z\r\n"),
    ],
)
def test_rows_of_every_kind_of_text_file_are_read(tmp_path, name, content):
    assert texts(written(tmp_path, name, content)) == ["w", "x", "y", "z"]


def test_a_parquet_file_is_read(tmp_path):
    path = tmp_path / "rows[1]*.parquet"
    pq.write_table(pa.table({"a": ["w", None, "x", "y", "z"], "other": [[1]] * 5}), path)
    assert texts(path) == ["w", "x", "y", "z"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", '{"a": "%s"}\n' * 4),
        ("rows.csv", "a\n" + '"%s"\n' * 4),
        ("rows.json", '[{"a": "%s"}, {"a": "%s"}, {"a": "%s"}, {"a": "%s"}]'),
    ],
)
def test_texts_that_look_like_other_types_stay_texts(tmp_path, name, content):
    cells = ("2024-01-01", "007", "NA", "True")
    assert texts(written(tmp_path, name, content % cells)) == list(cells)


def test_fields_that_the_template_does_not_name_may_hold_anything(tmp_path):
    path = written(
        tmp_path,
        "rows.jsonl",
        '{"a": "w", "b": 1}\n{"a": "x", "b": ["2"]}\n{"a": "y", "b": true}\n{"a": "z"}\n',
    )
    assert texts(path) == ["w", "x", "y", "z"]


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize(
    ("template", "nested"),
    [
        ("{a}", lambda cell: cell),
        ("{a[b]}", lambda cell: {"b": cell}),
        ("{a[1]}", lambda cell: [cell, cell]),
        ("{a[-1][b][0]}", lambda cell: [{"b": [cell]}]),
    ],
)
@pytest.mark.parametrize(
    ("cell", "becomes"),
    [
        ("w", ["w"]),
        (" \tw {a}\n", [" \tw {a}\n"]),
        (7, ["7"]),
        (-0.25, ["-0.25"]),
        ("", []),
        (None, []),
        (float("nan"), []),
        (True, "is true or false"),
        (float("inf"), "is an infinite number"),
        ({"c": 1}, "is an object"),
        (["w"], "is a list"),
        ("\ud800", "holds half a character"),
        ("a\0b", "holds a NUL character"),
        (b"w", "is bytes"),
    ],
)
def test_a_cell_is_its_text_or_empty_or_refused_with_its_row_and_field(
    tmp_path, kind, template, nested, cell, becomes
):
    path = tmp_path / f"rows.{kind}"
    rows = [{"a": nested(cell), "row": "1"}, {"a": nested(cell), "row": "2"}]
    try:
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text(
                json.dumps(rows) if kind == "json" else "\n".join(map(json.dumps, rows))
            )
    except (TypeError, UnicodeEncodeError):
        return  # such a value is in no file of this kind
    # A second text, so that a row whose first field is empty is left out visibly.
    both = DatasetSource(str(path), None, "train", None, [template, "{row}"], None, 4, 0, 0)
    if isinstance(becomes, str):
        place = "line" if kind == "jsonl" else "row"
        with pytest.raises(
            UserError, match=rf"{place} 1: the field '{re.escape(template[1:-1])}' {becomes}"
        ):
            both.load(chats=True)
    else:
        # A repeated text is left out.
        assert [prompt.text for prompt in both.load(chats=True)] == (becomes or ["1", "2"])


def test_a_long_cell_of_a_csv_file_is_read(tmp_path):
    assert texts(written(tmp_path, "rows.csv", f'a,b\n"{"w," * 150_000}",x\n,y\n')) == [
        "w," * 150_000
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("e.jsonl", "", r"e\.jsonl' has no rows; give a data set with some, or use data=nano"),
        ("e.csv", "a,b\n", "has no rows"),
        (
            "e.csv",
            "a,b\n,w\n ,x\n",
            "gives no prompt: .* 2 of 2 rows have no text in a, the fields of data.template",
        ),
        (
            "b.jsonl",
            '{"a": "w"}\n{"a": \n{"a": "x"}\n',
            r"line 2: no JSON \(Expecting value at column \d+\); expected one object per line",
        ),
        (
            "b.jsonl",
            '{"a": "w"}\n\n"x"\n',
            "line 3: a text instead of an object; expected one object per line",
        ),
        (
            "b.jsonl",
            '{"a": "w"}\n{"a": ' + "9" * 5000 + "}",
            r"line 2: no JSON \(.*digits",
        ),
        (
            "b.jsonl",
            '{"a": ' + "[" * 200_000,
            r"line 1: no JSON \(maximum recursion",
        ),
        ("b.jsonl", "[1]\n[2]\n", "line 2: no JSON .*or an array of objects"),
        ("b.json", '[{"a": "w"}, 3]', "row 2: a number instead of an object"),
        (
            "u.jsonl",
            '{"a": "w"}\n{"a": "é"}\n'.encode("latin-1"),
            r"u\.jsonl', line 2: not UTF-8 \(.*\); save the file as UTF-8",
        ),
        (
            "c.csv",
            'a,b\nw,1\n"x,2\ny,3\n',
            r"line 3: no CSV \(unexpected end of data\); check its quotes",
        ),
        ("c.csv", "a,b\nw, x, 1\n", "line 2: 3 cells under a header of 2; put quotes"),
        ("p.parquet", b"PAR1", r"p\.parquet' cannot be read \(.*\); write it again"),
    ],
)
def test_an_unusable_file_is_a_user_error_with_the_place(tmp_path, name, content, message):
    with pytest.raises(UserError, match=message) as caught:
        texts(written(tmp_path, name, content))
    assert name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (lambda: from_json("[" * 100_000, "tools"), "the field 'tools' .* no JSON .maximum rec"),
        (lambda: from_json("9" * 5_000, "tools"), "the field 'tools' .* no JSON .*digits"),
        (lambda: as_json(nested(100_000)), "the messages cannot be written as JSON .maximum rec"),
    ],
)
def test_json_within_rows_may_be_nested_no_deeper_than_json_is_read(read, reason):
    with pytest.raises(ValueError, match=reason):
        read()


def nested(depth):
    deep = []
    for _ in range(depth):
        deep = [deep]
    return deep


def test_messages_about_slices_have_the_places_of_the_file(tmp_path):
    path = written(tmp_path, "rows.jsonl", FOUR + '\n{"a": {}}')
    with pytest.raises(
        UserError,
        match=(
            "line 5: the field 'a' is an object; prompts are made of texts and numbers: convert it"
        ),
    ):
        DatasetSource(str(path), None, "train[2:]", None, "{a}", None, 9, 0, 0).load(chats=True)
