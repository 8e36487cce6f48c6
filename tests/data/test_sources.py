"""Sources: what is read, what is skipped and counted, and that no content is on both sides of the split."""

import hashlib
import json
import logging
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from k3jax.data import Document, check_source, limit_bytes, read_documents, split_heldout
from k3jax.errors import UserError


def doc(text: bytes) -> Document:
    return Document(text, hashlib.sha256(text).digest())


def docs(*texts: bytes) -> list[Document]:
    return sorted(map(doc, texts), key=lambda d: d.digest)


def texts(documents) -> list[bytes]:
    return sorted(d.text for d in documents)


def test_files_directories_and_globs(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "a.txt").write_bytes("aé\r\n".encode())
    (tmp_path / "b.weird").write_bytes(b"b")
    (tmp_path / "sub" / "c.py").write_bytes(b"c")
    (tmp_path / ".hidden" / "d.txt").write_bytes(b"d")
    assert texts(read_documents("files", [str(tmp_path)]).documents) == texts(docs("aé\r\n".encode(), b"b", b"c"))
    assert texts(read_documents("files", [f"{tmp_path}/*.txt"]).documents) == ["aé\r\n".encode()]
    assert texts(read_documents("files", [f"{tmp_path}/**/*.py"]).documents) == [b"c"]
    # The same file by three ways is one document; equal files at two places are two.
    once = read_documents("files", [f"{tmp_path}/a.txt", f"{tmp_path}/sub/../a.txt", f"{tmp_path}/a*"])
    assert len(once.documents) == 1
    (tmp_path / "sub" / "copy.txt").write_bytes(b"b")
    assert texts(read_documents("files", [str(tmp_path)]).documents).count(b"b") == 2


def test_linked_folders_are_followed_once(tmp_path):
    (tmp_path / "data" / "sub").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.txt").write_bytes(b"b")
    (tmp_path / "data" / "a.txt").write_bytes(b"a")
    (tmp_path / "data" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "sub" / "circle").symlink_to(tmp_path / "data")
    assert texts(read_documents("files", [f"{tmp_path}/data"]).documents) == [b"a", b"b"]


def test_folder_that_cannot_be_listed_is_unreadable(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"a")
    (tmp_path / "closed").mkdir()
    real = os.scandir

    def scandir(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr("os.scandir", scandir)
    skipped = read_documents("files", [str(tmp_path)]).skipped
    assert skipped.counts["unreadable"] == 1 and "closed" in skipped.examples["unreadable"][0]


def test_order_depends_on_contents_alone(tmp_path):
    for folder, order in [("x", "0123456789"), ("y", "9876543210")]:
        (tmp_path / folder).mkdir()
        for i, content in enumerate(order):
            (tmp_path / folder / f"{i}.txt").write_text(f"text {content}")
    x, y = (read_documents("files", [f"{tmp_path}/{folder}"]).documents for folder in "xy")
    assert x == y
    forward = read_documents("files", [f"{tmp_path}/x/{i}.txt" for i in range(10)]).documents
    backward = read_documents("files", [f"{tmp_path}/x/{i}.txt" for i in reversed(range(10))]).documents
    assert forward == backward == x


def test_jsonl(tmp_path):
    lines = [
        "\ufeff" + json.dumps({"body": "one é"}),
        "",
        json.dumps({"body": "two\nlines", "text": "no"}),
        "{broken",
        json.dumps({"text": "wrong field"}),
        json.dumps({"body": 3}),
        json.dumps({"body": None}),
        json.dumps(["body"]),
        json.dumps({"body": ""}),
        '{"body": "\\ud800"}',
        "[" * 100_000,
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes("\n".join(lines).encode() + b'\n{"body": "\xff"}\n')
    found = read_documents("files", [str(path)], text_field="body")
    assert texts(found.documents) == ["one é".encode(), b"two\nlines"]
    assert found.skipped.counts == {"unreadable": 0, "empty": 1, "not_utf8": 1, "malformed": 7}
    assert found.skipped.examples["malformed"][0].startswith(f"{path}:4")
    assert len(found.skipped.examples["malformed"]) == 3
    assert found.skipped.total == 9


def test_parquet(tmp_path):
    strings = pa.array(["one", None, "", "two é"])
    pq.write_table(pa.table({"text": strings, "n": [1, 2, 3, 4]}), tmp_path / "a.parquet", row_group_size=2)
    pq.write_table(pa.table({"other": ["x"]}), tmp_path / "missing_column.parquet")
    pq.write_table(pa.table({"text": [1]}), tmp_path / "numbers.parquet")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "no_rows.parquet")
    pq.write_table(pa.table({"text": pa.array(["three"], pa.large_string())}), tmp_path / "large.parquet")
    pq.write_table(pa.table({"text": pa.array(["four"]).dictionary_encode()}), tmp_path / "dictionary.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    found = read_documents("files", [str(tmp_path)])
    assert texts(found.documents) == texts(docs(b"one", "two é".encode(), b"three", b"four"))
    assert found.skipped.counts == {"unreadable": 1, "empty": 2, "not_utf8": 0, "malformed": 3}
    assert any("missing_column" in example for example in found.skipped.examples["malformed"])


@pytest.mark.parametrize("cut_at", [40, 200])
def test_truncated_parquet_is_reported(tmp_path, cut_at):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x" * 100] * 10}), path)
    path.write_bytes(path.read_bytes()[:cut_at])
    (tmp_path / "b.txt").write_text("b")
    assert read_documents("files", [str(tmp_path)]).skipped.counts["unreadable"] == 1


def test_bad_files_are_counted_and_logged(tmp_path, caplog):
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "blank.txt").write_bytes(b" \n")
    (tmp_path / "latin1.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "binary.bin").write_bytes(bytes(range(256)))
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.txt")
    with caplog.at_level(logging.INFO):
        found = read_documents("files", [str(tmp_path)])
    assert texts(found.documents) == [b"good"]
    assert found.skipped.counts == {"unreadable": 2, "empty": 2, "not_utf8": 2, "malformed": 0}
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "read 1 documents, 4 bytes" in message and "skipped 6: 2 unreadable (first: " in message
    assert "\n" not in message


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_forbidden_file_is_unreadable(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "b.txt").chmod(0)
    assert read_documents("files", [str(tmp_path)]).skipped.counts["unreadable"] == 1


def test_file_that_fails_while_reading_is_unreadable(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    real = open

    def failing(path, *args, **kwargs):
        if str(path).endswith("b.txt"):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", failing)
    skipped = read_documents("files", [str(tmp_path)]).skipped
    assert skipped.counts["unreadable"] == 1 and "Permission denied" in skipped.examples["unreadable"][0]


def test_nothing_usable_is_one_line(tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"no usable text in .*1 empty .*1 not UTF-8") as error:
        read_documents("files", [str(tmp_path)])
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="nothing matches"):
        read_documents("files", [f"{tmp_path}/*.none"])
    with pytest.raises(ValueError, match="paths is empty"):
        read_documents("files")
    with pytest.raises(ValueError, match="source is 'web'"):
        read_documents("web")
    with pytest.raises(ValueError, match="paths is for source 'files'"):
        read_documents("python", ["x"])
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match=r"no usable text in .*/nothing: it holds no files"):
        read_documents("files", [f"{tmp_path}/nothing"])


@pytest.mark.parametrize("read", [read_documents, check_source])
@pytest.mark.parametrize(
    ("name", "line", "advice"),
    [
        ("a.jsonl", '{"body": "x", "id": 1}', "set DataConfig.text_field to the one that holds the text: body, id"),
        ("a.jsonl", '{"text": 3}', "'text' is int, not text); give text in 'text', or set DataConfig.text_field"),
        ("a.jsonl", '["text"]', "not a JSON object); give a JSON object on each line"),
        ("a.jsonl", "{}", "no field 'text' among none); give a JSON object on each line, with the text in 'text'"),
        ("a.txt", " ", "give readable, non-empty UTF-8 files"),
    ],
)
def test_advice_fits_what_is_wrong(tmp_path, read, name, line, advice):
    (tmp_path / name).write_text(line)
    with pytest.raises(UserError) as error:
        read("files", [str(tmp_path)])
    assert advice in str(error.value)


def test_advice_names_the_columns_of_a_parquet_file(tmp_path):
    pq.write_table(pa.table({"content": ["x"], "text": [1]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"'text' is int, not text.*set DataConfig.text_field to .*: content$"):
        check_source("files", [str(tmp_path)])


def test_checking_a_source_reads_to_the_first_text_only(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    read = []
    monkeypatch.setattr("k3jax.data.sources._read_file", lambda path, *args: read.append(path) or iter([b"x"]))
    check_source("files", [str(tmp_path)])
    assert len(read) == 1


def test_python_source_reads_code_but_not_tests(tmp_path, monkeypatch):
    for name in ["a.py", "b.txt", "test/c.py", "x/tests/d.py", "site-packages/e.py", "encodings/f.py", "g.so"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    assert texts(read_documents("python").documents) == [b"# a.py", b"# b.txt"]


def test_python_source_without_text(tmp_path, monkeypatch):
    (tmp_path / "only.pyc").write_bytes(b"\0")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match="no usable text in the Python standard library"):
        read_documents("python")


def test_installed_python_is_enough():
    found = read_documents("python")
    assert sum(len(d.text) for d in found.documents) > 3_000_000
    with open(os.__file__, "rb") as file:
        assert doc(file.read()) in found.documents


def test_split_is_disjoint_by_content_and_near_its_fraction():
    unique = [b"text %d " % i * (1 + i % 7) for i in range(2000)]
    documents = docs(*unique, *unique[:500], *unique[:100])
    split = split_heldout(documents, 0.1)
    train, heldout = set(texts(split.train)), set(texts(split.heldout))
    assert not train & heldout
    assert train | heldout == set(unique)
    assert texts([*split.train, *split.heldout]) == texts(documents)
    share = sum(map(len, texts(split.heldout))) / sum(map(len, texts(documents)))
    assert 0.07 < share < 0.13
    assert split_heldout(documents, 0.1) == split


def test_split_keeps_documents_held_out_as_the_corpus_grows():
    before = split_heldout(docs(*(b"text %d" % i for i in range(300))), 0.2).heldout
    after = split_heldout(docs(*(b"text %d" % i for i in range(400))), 0.2).heldout
    assert before and set(before) < set(after)


def test_split_never_holds_out_one_huge_document():
    # Whatever its digest: of 40 variants about 20 would be held out at a fraction of a half.
    small = [b"small %d" % i for i in range(50)]
    for variant in range(40):
        huge = b"huge %d " % variant * 1000
        split = split_heldout(docs(huge, *small), 0.5)
        assert huge in texts(split.train) and split.heldout


@pytest.mark.parametrize("count", [2, 3, 5])
def test_few_documents_still_give_both_sides(count):
    for variant in range(20):
        for fraction in (0.01, 0.99):
            split = split_heldout(docs(*(b"v%d doc %d" % (variant, i) for i in range(count))), fraction)
            assert split.train and split.heldout
            assert len(split.train) + len(split.heldout) == count


def test_lone_document_gives_its_tail():
    lines = b"".join(b"line %03d\n" % i for i in range(100))
    split = split_heldout([doc(lines)], 0.05)
    assert split.train[0].text + split.heldout[0].text == lines
    assert split.heldout[0].text == b"".join(b"line %03d\n" % i for i in range(95, 100))
    assert split.train[0] == doc(split.train[0].text)
    one_line = "é".encode() * 101
    split = split_heldout([doc(one_line)], 0.05)
    assert split.train[0].text.decode() + split.heldout[0].text.decode() == "é" * 101
    # Copies of one text are one content: the tail may be in none of them.
    split = split_heldout([doc(lines)] * 3, 0.05)
    assert len(split.train) == 3 and not any(split.heldout[0].text in d.text for d in split.train)
    with pytest.raises(ValueError, match="too short"):
        split_heldout([doc(b"a")], 0.05)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 2, float("nan")])
def test_impossible_fraction(fraction):
    with pytest.raises(ValueError, match="heldout_fraction"):
        split_heldout(docs(b"a", b"b"), fraction)


def test_no_heldout():
    assert split_heldout(docs(b"a", b"b"), 0) == (docs(b"a", b"b"), [])


def test_limit_bytes():
    documents = [doc(b"aaaa"), doc(b"bb"), doc(b"ccccc"), doc(b"d")]
    assert [d.text for d in limit_bytes(documents, 7)] == [b"aaaa", b"bb", b"d"]
    assert [d.text for d in limit_bytes([doc("ééé".encode())], 3)] == ["é".encode()]
    assert [d.text for d in limit_bytes([doc("ééé".encode())], 1)] == ["é".encode()]
    assert limit_bytes([], 5) == []
