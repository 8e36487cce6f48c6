"""Tokenizers: bytes, or a `tokenizers` JSON file; both give integer ids and take them back to text."""

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from k3jax.config import Config
from k3jax.config_checks import require
from k3jax.errors import UserError


class Tokenizer(Protocol):
    """What the pipeline needs of a tokenizer.

    Attributes:
      vocab_size: ids run from 0 to vocab_size - 1.
      document_token: the id that opens every document and, as the target of its last token, closes it; None
        for none.
      fingerprint: bytes that change whenever the ids may.
    """

    vocab_size: int
    document_token: int | None
    fingerprint: bytes

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Ids of each UTF-8 text, without the document token; one integer array a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; what is not text is left out or replaced, never an error."""


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 is the document token."""

    vocab_size = 257
    document_token = 256
    fingerprint = b"bytes"

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Ids of each UTF-8 text, without the document token; one uint8 array a text."""
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; ids above 255 are left out, broken UTF-8 becomes U+FFFD."""
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A `tokenizers` JSON file.

    Truncation and padding stored in the file are turned off, no special tokens are added, and a special token
    that merely occurs in a document's text is encoded as the text it is: a document cannot end another.

    Args:
      path: the JSON file.
      document_token: name of the token that opens documents, or None.

    Raises:
      UserError: the file cannot be read, the token is not in it, or `tokenizers` is not installed.
    """

    def __init__(self, path: str, document_token: str | None = None):
        try:
            import tokenizers
        except ImportError:
            raise UserError(
                f"DataConfig.tokenizer is {path!r}, which needs the tokenizers package: pip install tokenizers"
            ) from None
        try:
            with open(path, "rb") as file:
                stored = file.read()
            self._tokenizer = tokenizers.Tokenizer.from_buffer(stored)
        except Exception as error:  # tokenizers raises plain Exception
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise UserError(
                f"DataConfig.tokenizer: cannot read {path!r} ({reason}); give a tokenizers JSON file, or 'bytes'"
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # Ids may have holes, so their number is not enough.
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.document_token = None
        if document_token is not None:
            self.document_token = self._tokenizer.token_to_id(document_token)
            if self.document_token is None:
                raise UserError(
                    f"DataConfig.document_token {document_token!r} is not in {path!r}: use a token it has, or None"
                )
        self.fingerprint = hashlib.sha256(stored + repr(self.document_token).encode()).digest()

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Ids of each UTF-8 text, without the document token; one int32 array a text."""
        encoded = self._tokenizer.encode_batch_fast([text.decode("utf-8") for text in texts], add_special_tokens=False)
        return [np.asarray(one.ids, np.int32) for one in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special tokens and ids outside the vocabulary are left out."""
        return self._tokenizer.decode([i for i in map(int, ids) if 0 <= i < self.vocab_size])


def load_tokenizer(name: str, document_token: str | None = None) -> Tokenizer:
    """The tokenizer that a configuration names.

    Args:
      name: "bytes", or the path of a `tokenizers` JSON file.
      document_token: name of the file's token that opens documents; None for none. The byte tokenizer has its
        own.

    Raises:
      UserError: a file that cannot be read, a token it lacks, or a document token for bytes.
    """
    if name != "bytes":
        return FileTokenizer(name, document_token)
    if document_token is not None:
        raise UserError("DataConfig.document_token is for tokenizers files: bytes has its own (256); set it to None")
    return ByteTokenizer()


def check_vocabulary(config: Config, vocabulary: int) -> None:
    """Refuses a model that has no row for some token.

    Args:
        config: a whole run.
        vocabulary: ids of the tokenizer run from 0 to vocabulary - 1.
    Raises:
        ConfigError: ModelConfig.vocab_size is smaller.
    """
    require(
        vocabulary <= config.model.vocab_size,
        config.model,
        "vocab_size",
        f"the tokenizer {config.data.tokenizer!r} has {vocabulary} tokens; set it to {vocabulary} or more",
    )
