"""Tokenizers: bytes by value, and a `tokenizers` file whose stored settings must not lose or join documents."""

import numpy as np
import pytest

from k3jax.data import ByteTokenizer, FileTokenizer, load_tokenizer

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture
def tokenizer_file(tmp_path):
    """Words a, b, c with ids 1, 2, 3; <doc> is a special token with id 9, so ids have holes."""
    model = tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "c": 3, "<doc>": 9}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<doc>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<doc> $A", special_tokens=[("<doc>", 9)]
    )
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=7, pad_id=9, pad_token="<doc>")
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def test_bytes():
    tokenizer = load_tokenizer("bytes")
    text = "aé\0".encode()
    (ids,) = tokenizer.encode([text])
    assert ids.tolist() == [97, 0xC3, 0xA9, 0]
    assert (tokenizer.vocab_size, tokenizer.document_token) == (257, 256)
    assert tokenizer.decode(ids) == "aé\0"
    assert tokenizer.decode(np.array([256, 97, 0xC3, 98, 256, 300])) == "a\ufffdb"


def test_file_ignores_stored_truncation_padding_and_template(tokenizer_file):
    tokenizer = load_tokenizer(tokenizer_file, "<doc>")
    assert [ids.tolist() for ids in tokenizer.encode([b"a b c a b c a b c", b"c"])] == [[1, 2, 3] * 3, [3]]
    assert (tokenizer.vocab_size, tokenizer.document_token) == (10, 9)
    assert tokenizer.decode(np.array([9, 1, 3, 77])) == "a c"


def test_text_cannot_forge_the_document_token(tmp_path):
    model = tokenizers.models.BPE(
        vocab={c: i for i, c in enumerate("<>abcdo")} | {"<doc>": 7}, merges=[], unk_token=None
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(["<doc>"])
    tokenizer.save(str(tmp_path / "t.json"))
    (ids,) = FileTokenizer(str(tmp_path / "t.json"), "<doc>").encode([b"a<doc>b"])
    assert ids.tolist() == [2, 0, 5, 6, 4, 1, 3]


def test_fingerprints_differ(tokenizer_file):
    prints = {
        ByteTokenizer().fingerprint,
        FileTokenizer(tokenizer_file).fingerprint,
        FileTokenizer(tokenizer_file, "<doc>").fingerprint,
    }
    assert len(prints) == 3


def test_errors_are_one_line(tokenizer_file, tmp_path):
    (tmp_path / "bad.json").write_text("{}")
    for name, token, match in [
        (tokenizer_file, "<end>", "document_token '<end>' is not in"),
        (str(tmp_path / "missing.json"), None, "cannot read .*missing.json"),
        (str(tmp_path / "bad.json"), None, "cannot read .*bad.json"),
        ("bytes", "<doc>", "bytes has its own"),
    ]:
        with pytest.raises(ValueError, match=match) as error:
            load_tokenizer(name, token)
        assert "\n" not in str(error.value)
