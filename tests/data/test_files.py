"""Reading local files: every kind gives the same records, every damage a message."""

import gzip
import io
import json

import pytest

from mars.data.files import read_file, read_prompts
from mars.errors import UserError

RECORDS = [{"question": "Été?", "answer": 'a, "b"\nc'}, {"question": "2", "answer": "d"}]


def write_csv() -> str:
    return 'question,answer\nÉté?,"a, ""b""\nc"\n2,d\n'


NESTED = b"[" * 100_000

CONTENTS = {
    "data.jsonl": "\n".join(json.dumps(record) for record in RECORDS) + "\n\n",
    "data.json": json.dumps(RECORDS, indent=1),
    "wrapped.json": json.dumps({"version": 1, "data": RECORDS}),
    "DATA.CSV": write_csv(),
}


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_text_files(tmp_path, name, compressed, bom):
    path = tmp_path / (name + ".gz" if compressed else name)
    content = (bom + CONTENTS[name]).encode()
    path.write_bytes(gzip.compress(content) if compressed else content)
    assert read_file(path) == RECORDS
    assert read_file(path, limit=1) == RECORDS[:1]


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path)
    assert read_file(path) == RECORDS
    path.write_bytes(b"not parquet")
    with pytest.raises(UserError, match="not a valid Parquet file"):
        read_file(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n\n{"a": \n', "a.jsonl, line 3: not valid JSON"),
        ("a.jsonl", b'{"a": 1}\n[2]\n', "a.jsonl, line 2: expected a JSON object"),
        ("a.jsonl", b"\n  \n", "no records"),
        ("a.jsonl", b'{"a": "\xff"}', "cannot be read"),
        ("a.jsonl.gz", b'{"a": 1}', "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}', mtime=0)[:-9], "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b"x" * 99, mtime=0)[:10] + b"\xff" * 40, "cannot be read"),
        ("a.json", b"", "no records"),
        ("a.json", b"[]", "no records"),
        ("a.json", b'[\n{"a": 1},\n]', "a.json, line [23]: not valid JSON"),
        ("a.json", b'{"a": 1}', "expected a list of records"),
        ("a.json", b'[{"a": 1}, 3]', "record 1: expected an object, got 3"),
        ("a.csv", b"", "no records"),
        ("a.csv", b"question,answer\n", "no records"),
        ("a.csv", b"question\n1\n2,3\n", "a.csv, line 3: more values than columns"),
        ("a.csv", b'question\n"1', "a.csv, line 2: not valid CSV"),
        ("a.jsonl", b'{"a": 1}\n{"a": ' + NESTED, "a.jsonl, line 2: the JSON is nested too deeply"),
        ("a.json", NESTED, "a.json: the JSON is nested too deeply"),
        ("a.txt", b"text", "unknown kind of file; accepted are .jsonl, .json, .csv, .parquet"),
        ("a.parquet.gz", b"text", "unknown kind of file"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_file(tmp_path / name)


def test_csv_with_a_long_field(tmp_path):
    (tmp_path / "a.csv").write_text("text\n" + "x" * 200_000 + "\n")
    assert read_file(tmp_path / "a.csv") == [{"text": "x" * 200_000}]


PROMPTS = (
    '\n  Say hi. \n{"prompt": "a\\nb", "id": 1}\n\n{"messages": [{"role": "user", "content": "c"}]}'
)


def test_prompts_of_a_file_and_a_stream(tmp_path):
    expected = ["  Say hi. ", "a\nb", [{"role": "user", "content": "c"}]]
    (tmp_path / "prompts.txt").write_text(PROMPTS)
    assert read_prompts(tmp_path / "prompts.txt") == expected
    assert read_prompts(str(tmp_path / "prompts.txt")) == expected
    assert read_prompts(io.StringIO(PROMPTS)) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\n \n", "no prompts"),
        ('a\n{"prompt": ', "line 2: not valid JSON"),
        ('a\n{"question": "x", "answer": "y"}', "line 2: .*its keys are: question, answer"),
        ('{"prompt": "a", "messages": []}', "line 1: needs either"),
        ('{"prompt": ""}', "line 1: 'prompt' is empty"),
        ('{"prompt": 3}', "line 1: 'prompt' must be text, got int"),
        ('{"messages": []}', "line 1: the list of messages is empty"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "line 1: message 0: role 'tool'"),
    ],
)
def test_bad_prompts(content, message):
    with pytest.raises(UserError, match=message):
        read_prompts(io.StringIO(content))


def test_prompts_file_that_does_not_exist(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_prompts(tmp_path / "none.txt")
