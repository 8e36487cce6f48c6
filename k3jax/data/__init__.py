"""Real text as packed, resumable batches: sources, tokenizers, packing and the grain pipeline."""

from k3jax.data.packing import EpochPlan, Packing, Pieces, cut, first_fit, pack, plan_epoch
from k3jax.data.pipeline import Batch, BatchIterator, PackedDocuments, TextDataset, load_dataset
from k3jax.data.skipped import SkipReport
from k3jax.data.sources import (
    Document,
    Documents,
    Split,
    check_source,
    limit_bytes,
    read_documents,
    split_heldout,
)
from k3jax.data.tokenize import ByteTokenizer, FileTokenizer, Tokenizer, check_vocabulary, load_tokenizer

__all__ = [
    "Batch",
    "BatchIterator",
    "ByteTokenizer",
    "Document",
    "Documents",
    "EpochPlan",
    "FileTokenizer",
    "PackedDocuments",
    "Packing",
    "Pieces",
    "SkipReport",
    "Split",
    "TextDataset",
    "Tokenizer",
    "check_source",
    "check_vocabulary",
    "cut",
    "first_fit",
    "limit_bytes",
    "load_dataset",
    "load_tokenizer",
    "pack",
    "plan_epoch",
    "read_documents",
    "split_heldout",
]
