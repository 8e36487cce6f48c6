"""Batches: every token and target by value, the same rows on any number of processes, exact resumption."""

import hashlib
import itertools
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from k3jax.config import DataConfig
from k3jax.data import ByteTokenizer, Document, FileTokenizer, PackedDocuments, TextDataset, load_dataset

ROOT = pathlib.Path(__file__).parents[2]


def config(paths=(), **changes):
    fields = {"source": "files", "paths": tuple(map(str, paths)), "seq_len": 16, "batch_size": 4}
    return DataConfig(**(fields | {"heldout_fraction": 0.2} | changes))


def documents(count=29, longest=50, seed=0):
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, 128, rng.integers(1, longest), np.uint8).tobytes() for _ in range(count)]
    return [Document(text, hashlib.sha256(text).digest()) for text in texts]


def packed(seq_len=16, seed=0, **kwargs):
    return PackedDocuments(documents(**kwargs), ByteTokenizer(), seq_len, seed)


def take(iterator, count):
    return list(itertools.islice(iterator, count))


def assert_same(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        for x, y in zip(a, b, strict=True):
            assert x.dtype == y.dtype == np.int32
            np.testing.assert_array_equal(x, y)


def dataset(rows, batch_size=4):
    return TextDataset(rows, rows, [], ByteTokenizer(), batch_size, None)


def segments(row):
    """(inputs, targets) of each segment of a row, by its ids."""
    return [
        (row.tokens_BT[row.segment_ids_BT == s].tolist(), row.targets_BT[row.segment_ids_BT == s].tolist())
        for s in range(1, row.segment_ids_BT.max() + 1)
    ]


def test_rows_by_hand():
    texts = [b"abcdef", b"xy"]
    rows = PackedDocuments([Document(t, t) for t in texts], ByteTokenizer(), seq_len=5)
    # Pieces: D a b c d | e f, and D x y; the short ones share a row, in either order.
    found = [rows.row(r) for r in range(rows.num_rows)]
    assert sorted(itertools.chain(*map(segments, found))) == [
        ([101, 102], [102, 256]),
        ([256, 97, 98, 99, 100], [97, 98, 99, 100, 101]),
        ([256, 120, 121], [120, 121, 256]),
    ]
    assert sorted(row.segment_ids_BT.tolist() for row in found) in (
        [[1] * 5, [1, 1, 2, 2, 2]],
        [[1] * 5, [1, 1, 1, 2, 2]],
    )
    assert (rows.num_rows, rows.num_tokens, rows.num_targets, rows.num_bytes, rows.efficiency) == (2, 10, 10, 8, 1.0)


def all_segments(rows):
    return sorted(itertools.chain(*(segments(rows.row(r)) for r in range(rows.num_rows))))


@pytest.mark.parametrize("seq_len", [1, 2, 7, 16, 64])
def test_an_epoch_has_every_token_and_target_once(seq_len):
    rows = packed(seq_len)
    for epoch in (0, 5):
        pieces = []
        for r in range(rows.num_rows):
            row = rows.row(epoch * rows.num_rows + r)
            used = int((row.segment_ids_BT > 0).sum())
            # Ids go 1, 2, ... and padding is one run at the end, inert.
            assert set(np.diff(row.segment_ids_BT[:used])) <= {0, 1} and row.segment_ids_BT[0] == 1
            assert not row.segment_ids_BT[used:].any() and not row.tokens_BT[used:].any()
            assert (row.targets_BT[used:] == -1).all() and (row.targets_BT[:used] >= 0).all()
            pieces += segments(row)
        want = []
        for document in documents():
            stream = [256, *document.text, 256]
            for at in range(0, len(stream) - 1, seq_len):
                end = min(at + seq_len, len(stream) - 1)
                want.append((stream[at:end], stream[at + 1 : end + 1]))
        assert sorted(pieces) == sorted(want)


def test_tokenizers_file_with_and_without_document_token(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "c": 2, "<d>": 3}, unk_token="a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "t.json"))
    texts = [Document(text, text) for text in (b"a b c a b", b"c", b"   ")]
    # Without a token to open and close documents, the last token has no target, and a text without words is left out.
    rows = PackedDocuments(texts, FileTokenizer(str(tmp_path / "t.json")), seq_len=3)
    found = all_segments(rows)
    assert found == [([0, 1], [1, -1]), ([0, 1, 2], [1, 2, 0]), ([2], [-1])]
    assert (rows.num_tokens, rows.num_targets) == (6, 4)
    rows = PackedDocuments(texts, FileTokenizer(str(tmp_path / "t.json"), "<d>"), seq_len=4)
    found = all_segments(rows)
    assert found == [([0, 1], [1, 3]), ([3], [3]), ([3, 0, 1, 2], [0, 1, 2, 0]), ([3, 2], [2, 3])]
    assert (rows.num_tokens, rows.num_targets) == (9, 9)


def test_batches_are_the_rows_in_order_across_epochs():
    rows = packed()
    steps = 3 * rows.num_rows // 4 + 1
    assert rows.num_rows % 4, "an epoch should end inside a batch"
    for step, batch in enumerate(take(dataset(rows).train_batches(), steps)):
        assert batch.tokens_BT.shape == (4, 16)
        for i in range(4):
            assert_same([[array[i] for array in batch]], [rows.row(4 * step + i)])


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_together_serve_what_one_serves(processes):
    rows = packed()
    one = take(dataset(rows).train_batches(), 25)
    shares = [take(dataset(packed()).train_batches(p, processes), 25) for p in range(processes)]
    joined = [type(one[0])(*map(np.concatenate, zip(*parts, strict=True))) for parts in zip(*shares, strict=True)]
    assert_same(joined, one)


def test_resume_at_every_position_equals_the_uninterrupted_run():
    rows = packed()
    window = 2 * rows.num_rows // 4 + 2
    whole = take(dataset(rows).train_batches(), window + 3)
    running = dataset(rows).train_batches()
    for position in range(window):
        state = json.loads(json.dumps(running.get_state()))
        assert state == {"next_row": 4 * position}
        fresh = dataset(packed()).train_batches()
        fresh.set_state(state)
        assert_same(take(fresh, 3), whole[position : position + 3])
        fresh.close()
        assert_same([next(running)], whole[position : position + 1])


def test_state_moves_a_used_iterator_and_survives_close():
    iterator = dataset(packed()).train_batches()
    whole = take(iterator, 12)
    iterator.set_state({"next_row": 8})
    assert_same(take(iterator, 3), whole[2:5])
    iterator.close()
    assert_same(take(iterator, 3), whole[5:8])
    assert iterator.get_state() == {"next_row": 32}
    assert_same(take(dataset(packed()).train_batches(next_row=16), 2), whole[4:6])


def test_resume_on_another_number_of_processes():
    whole = take(dataset(packed()).train_batches(), 20)
    one = dataset(packed()).train_batches()
    take(one, 9)
    two = [dataset(packed()).train_batches(p, 2) for p in range(2)]
    for iterator in two:
        iterator.set_state(one.get_state())
    halves = [take(iterator, 5) for iterator in two]
    for step, (low, high) in enumerate(zip(*halves, strict=True), 9):
        assert_same([map(np.concatenate, zip(low, high, strict=True))], [whole[step]])
    assert two[0].get_state() == two[1].get_state()
    four = dataset(packed()).train_batches(3, 4)
    four.set_state(two[1].get_state())
    assert_same([next(four)], [[array[3:] for array in whole[14]]])


def test_far_resumption_plans_one_epoch(monkeypatch):
    from k3jax.data import packing

    rows = packed()
    planned, real = [], packing.plan_epoch
    monkeypatch.setattr(packing, "plan_epoch", lambda *args: planned.append(args[-1]) or real(*args))
    iterator = dataset(rows).train_batches(next_row=10**9 * rows.num_rows)
    batch = next(iterator)
    iterator.close()
    # What read-ahead reaches is planned too, each epoch once; nothing before it is.
    assert batch.segment_ids_BT.any() and min(planned) == 10**9 and len(planned) == len(set(planned))
    assert max(planned) - min(planned) <= 2


_NEW_PROCESS = """
import sys, json, hashlib
from k3jax.config import DataConfig
from k3jax.data import load_dataset
config, state, steps = json.loads(sys.argv[1])
iterator = load_dataset(DataConfig(**config | {"paths": tuple(config["paths"])})).train_batches()
iterator.set_state(state)
hashed = hashlib.sha256()
for _ in range(steps):
    for array in next(iterator):
        hashed.update(array.tobytes())
print(hashed.hexdigest(), json.dumps(iterator.get_state()))
"""


def test_resume_in_a_new_process(tmp_path):
    for i, document in enumerate(documents(40)):
        (tmp_path / f"{i}.txt").write_bytes(b"-" + document.text)
    settings = config([tmp_path])
    iterator = load_dataset(settings).train_batches()
    take(iterator, 6)
    state = iterator.get_state()
    hashed = hashlib.sha256()
    for batch in take(iterator, 20):
        for array in batch:
            hashed.update(array.tobytes())
    arguments = json.dumps([vars(settings), state, 20])
    run = subprocess.run(
        [sys.executable, "-c", _NEW_PROCESS, arguments], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert run.stdout.split(maxsplit=1) == [hashed.hexdigest(), json.dumps(iterator.get_state()) + "\n"]


def test_load_dataset_splits_and_counts(tmp_path):
    texts = [b"file %d " % i * 5 for i in range(60)]
    for i, text in enumerate([*texts, *texts[:20]]):
        (tmp_path / f"{i}.txt").write_bytes(text)
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    loaded = load_dataset(config([tmp_path]))
    served = {}
    for name, rows in [("train", loaded.train), ("heldout", loaded.heldout)]:
        # Bytes of a document's pieces, without document tokens, make up the split's texts.
        inputs = list(itertools.chain(*(tokens for tokens, _ in all_segments(rows))))
        served[name] = sum(token < 256 for token in inputs)
        assert (len(inputs), served[name]) == (rows.num_tokens, rows.num_bytes)
    assert loaded.skipped.counts["not_utf8"] == 1
    assert loaded.train.num_bytes + loaded.heldout.num_bytes == sum(map(len, texts)) + sum(map(len, texts[:20]))
    assert len(loaded.heldout_bytes()) == loaded.heldout.num_bytes > 0
    assert loaded.tokenizer.decode(np.frombuffer(loaded.heldout_bytes(), np.uint8)).startswith("file ")
    assert load_dataset(config([tmp_path], heldout_fraction=0.0)).heldout_bytes() == b""


def test_limits_keep_the_rest_apart(tmp_path):
    for i in range(60):
        (tmp_path / f"{i}.txt").write_text(f"file {i:02}")
    everything = load_dataset(config([tmp_path]))
    limited = load_dataset(config([tmp_path], heldout_max_bytes=25))
    assert (limited.train.num_bytes, limited.heldout.num_bytes) == (everything.train.num_bytes, 21)
    assert everything.heldout_bytes().startswith(limited.heldout_bytes())


def test_heldout_rows_once_padded_at_the_end():
    rows = packed()
    data = dataset(rows)
    batches = list(data.heldout_batches())
    assert len(batches) == -(-rows.num_rows // 4)
    flat = [[array[i] for array in batch] for batch in batches for i in range(4)]
    assert_same(flat[: rows.num_rows], [rows.row(r) for r in range(rows.num_rows)])
    assert len(flat) > rows.num_rows
    for tokens, targets, segment_ids in flat[rows.num_rows :]:
        assert not tokens.any() and not segment_ids.any() and (targets == -1).all()
    halves = [list(data.heldout_batches(p, 2)) for p in range(2)]
    for low, high, whole in zip(*halves, batches, strict=True):
        assert_same([map(np.concatenate, zip(low, high, strict=True))], [whole])
    none = TextDataset(rows, PackedDocuments([], ByteTokenizer(), 16), [], ByteTokenizer(), 4, None)
    assert list(none.heldout_batches()) == []


def test_fingerprint_tells_a_changed_corpus(tmp_path):
    for i in range(10):
        (tmp_path / f"{i}.txt").write_text(f"file {i}")
    first = load_dataset(config([tmp_path])).fingerprint
    (tmp_path / "0.txt").rename(tmp_path / "renamed.txt")
    assert load_dataset(config([tmp_path])).fingerprint == first
    assert load_dataset(config([tmp_path], batch_size=8)).fingerprint == first
    changed = [load_dataset(config([tmp_path], seq_len=17)), load_dataset(config([tmp_path], heldout_fraction=0.5))]
    (tmp_path / "3.txt").write_text("file three")
    changed.append(load_dataset(config([tmp_path])))
    assert len({first, *(data.fingerprint for data in changed)}) == 4


def test_impossible_values(tmp_path):
    (tmp_path / "a.txt").write_text("some text\nand more\n" * 10)
    data = load_dataset(config([tmp_path]))
    with pytest.raises(ValueError, match="batch_size is 4: use a multiple of the 3 processes"):
        data.train_batches(0, 3)
    with pytest.raises(ValueError, match="process_index is 2"):
        data.train_batches(2, 2)
    for state in [{}, {"next_row": -1}, {"next_row": 1.5}, {"next_row": True}, None]:
        with pytest.raises(ValueError, match="data state"):
            data.train_batches().set_state(state)


def test_importing_the_package_imports_no_jax():
    code = "import sys, k3jax.data; sys.exit('jax' in sys.modules or 'grain' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
