"""Rows, batches, tokenizers and files preserve the training text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import recollect as rc

pytest.importorskip("transformers")

from transformers import AutoTokenizer

from recollect.lm.data.rows import (
    PackedDataset,
    PackedRow,
    PackedStream,
    collate,
    pack,
    read_rows,
)
from recollect.lm.data.sources import BadLinePolicy, FileDocuments, HubDocuments, find_files
from recollect.lm.data.tokenizers import byte_tokenizer, encode, load_tokenizer, train_bpe
from recollect.lm.memory_estimate.flops import measure_peak_flops, model_flops

BYTES = byte_tokenizer()
TEXTS = ["abc", "de", "f" * 11, "ghijk", "", "lm"]


# -- tokenizers ----------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.text(max_size=30))
def test_byte_tokens_are_the_bytes_of_utf8(text: str) -> None:
    result = encode(BYTES, text).tolist()
    assert result == [*text.encode("utf-8"), 256]
    assert BYTES.backend_tokenizer.encode(text, add_special_tokens=False).ids == result[:-1]
    assert BYTES.decode(result[:-1]) == text


def test_tokenizers_load_without_recollect(tmp_path: Path) -> None:
    BYTES.save_pretrained(tmp_path)
    repeated = AutoTokenizer.from_pretrained(tmp_path)
    assert repeated("né").input_ids == list("né".encode())
    assert repeated.eos_token_id == 256
    assert encode(load_tokenizer(str(tmp_path)), "né").tolist() == [*"né".encode(), 256]
    with pytest.raises(ValueError, match=r"\[data\] tokenizer .*nowhere': there is no such folder"):
        load_tokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"\[model\] start .*: this folder holds no tokenizer"):
        load_tokenizer(str(tmp_path / ".."), key="[model] start")


def test_trained_bpe_has_the_requested_size_and_is_lossless() -> None:
    text = "the memory writes the value at the key; the memory reads at the query. " * 5
    tokenizer = train_bpe([text], 290)
    assert len(tokenizer) == 290
    result = encode(tokenizer, text)
    assert len(result) < len(text) / 2
    assert result[-1] == tokenizer.eos_token_id
    strange = "née ☃ \x00"
    assert tokenizer.decode(encode(tokenizer, strange)[:-1]) == strange
    with pytest.raises(ValueError, match="at least 257"):
        train_bpe([text], 200)


# -- rows ----------------------------------------------------------------------------------------


@given(st.lists(st.text(st.characters(codec="ascii"), max_size=12), max_size=12), st.integers(2, 9))
def test_rows_hold_the_documents_in_order(texts: list[str], context: int) -> None:
    rows = list(pack(texts, BYTES, context=context))
    stream = [token for text in texts for token in [*text.encode(), 256]]
    starts = np.cumsum([0, *(len(text.encode()) + 1 for text in texts)])[:-1]
    assert len(rows) == len(stream) // context
    for i, row in enumerate(rows):
        span = range(i * context, (i + 1) * context)
        assert row.tokens.tolist() == stream[span.start : span.stop]
        expected = {0, *(int(b) - span.start for b in starts if b in span)}
        assert row.starts == tuple(sorted(expected))


def row(*tokens: int, starts: tuple[int, ...] = (0,)) -> PackedRow:
    return PackedRow(tokens=np.array(tokens, dtype=np.int32), starts=starts)


def test_the_order_is_a_function_of_the_seed() -> None:
    rows = [row(i, i) for i in range(7)]

    def order(seed: int | None, length: int = 21) -> list[int]:
        result = PackedDataset(rows, length=length, seed=seed)
        return [int(result[i].tokens[0]) for i in range(len(result))]

    first = order(5)
    assert first == order(5)
    assert first != order(6)
    for epoch in range(3):  # every row once in each, in another order
        assert sorted(first[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert first[:7] != first[7:14]
    assert order(5, length=10) == first[:10]
    assert order(None) == [*range(7)] * 3


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_stream_gives_the_same_rows_and_begins_again(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(json.dumps({"body": text}) for text in TEXTS))
    else:
        parquet(path, [*TEXTS])
    source = FileDocuments(files=(path,), column="body")
    rows = list(pack([text for text in TEXTS if text], BYTES, context=5))
    stream = PackedStream(source, BYTES, context=5, length=2 * len(rows), shuffle=1, seed=0)
    result = list(stream)
    assert len(stream) == len(result)
    for one, two in zip(result, [*rows, *rows], strict=True):
        assert one.tokens.tolist() == two.tokens.tolist()
        assert one.starts == two.starts
    mixed = PackedStream(source, BYTES, context=5, length=len(rows), shuffle=3, seed=0)
    tokens = [r.tokens.tolist() for r in mixed]
    assert sorted(tokens) == sorted(r.tokens.tolist() for r in rows)
    with pytest.raises(ValueError, match="does not fill one row of 99"):
        next(iter(PackedStream(["short"], BYTES, context=99, length=1, shuffle=1, seed=0)))
    with pytest.raises(ValueError, match="does not fill one row of 99"):
        read_rows(["short"], BYTES, context=99)


# -- long documents are read in chunks -------------------------------------------------------------

PROSE = "The memory writes\n\nthe value,  at the key: 12 34.\nIt reads\r\n  at the query.\n" * 40


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record texts that are encoded, of at most 256 characters."""
    texts: list[str] = []

    def record(tokenizer: Any, text: str, **options: Any) -> Any:
        texts.append(text)
        return encode(tokenizer, text, **options)

    monkeypatch.setattr("recollect.lm.data.sources.CHUNK_CHARS", 256)
    monkeypatch.setattr("recollect.lm.data.rows.encode", record)
    return texts


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_a_long_document_is_tokenized_in_chunks(
    suffix: str, encoded: list[str], tmp_path: Path
) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_bytes((PROSE if suffix == "txt" else json.dumps({"text": PROSE})).encode())
    bpe = train_bpe([PROSE], 300)
    rows, stats = read_rows(FileDocuments(files=(path,)), bpe, context=7)
    assert "".join(encoded) == PROSE
    assert len(encoded) > 10 and max(map(len, encoded)) <= 256
    tokens = encode(bpe, PROSE)
    assert np.array_equal(
        np.concatenate([r.tokens for r in rows]), tokens[: len(tokens) // 7 * 7]
    ), "the tokens of the whole text, with one end of the document"
    assert (stats.tokens, stats.bytes) == (len(tokens), len(PROSE))
    assert {r.starts for r in rows} == {(0,)}, "a chunk starts no document"


def test_a_stream_reads_a_text_file_as_far_as_its_rows(encoded: list[str], tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(PROSE.encode())
    stream = PackedStream(FileDocuments(files=(path,)), BYTES, 32, length=64, shuffle=4, seed=0)
    assert len(next(iter(stream)).tokens) == 32
    assert len("".join(encoded)) <= 256 < len(PROSE)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text("ab \n-", max_size=60), st.sampled_from(["", "-", "\n\n", "\n-\n", "--"]))
def test_chunks_do_not_change_the_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, separator: str
) -> None:
    monkeypatch.setattr("recollect.lm.data.sources.CHUNK_CHARS", 5)
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    documents = text.split(separator) if separator else [text]
    source = FileDocuments(files=(path,), separator=separator)
    assert list(source) == [x for x in documents if x.strip()]
    assert max((len(chunk.text) for chunk in source.chunks()), default=0) <= 5


# -- batches: packed documents are separate -------------------------------------------------------


@pytest.mark.parametrize("name", ["gated_delta_net", "softmax_attention", "titans", "rwkv7", "rls"])
def test_packed_documents_are_separate(name: str) -> None:
    """Loss and every gradient of a packed batch equal a sum over its separate documents."""
    torch.manual_seed(0)
    config = rc.lm.RecollectConfig.from_recipes(
        name, vocab_size=264, hidden_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    model = rc.lm.RecollectForCausalLM(config)
    rows = list(pack(TEXTS * 2, BYTES, context=16))[:2]
    batch = collate(rows, reset_memory=True)
    assert "cu_seqlens" in batch
    packed = model(**batch).loss
    packed.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    total, count = torch.zeros(()), 0
    for r in rows:
        for start, stop in zip(r.starts, [*r.starts[1:], len(r.tokens)], strict=True):
            ids = torch.from_numpy(r.tokens[start:stop]).long()[None]
            logits = model(input_ids=ids).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
            total, count = total + loss, count + ids.shape[1] - 1
    single = total / count
    single.backward()
    torch.testing.assert_close(packed, single, atol=1e-5, rtol=1e-5)
    for n, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(gradients[n], p.grad, atol=2e-5, rtol=2e-4, msg=n)


def test_batches_without_borders_stay_rows_and_streams_have_none() -> None:
    plain = collate([row(1, 2, 3), row(4, 5, 6)], reset_memory=True)
    assert set(plain) == {"input_ids", "labels"}
    assert plain["input_ids"].shape == (2, 3)
    rows = [row(1, 2, 3, starts=(0, 2)), row(4, 5, 6)]
    packed = collate(rows, reset_memory=True)
    assert packed["cu_seqlens"].tolist() == [0, 2, 3, 6]
    assert packed["labels"].tolist() == [[-100, 2, -100, -100, 5, 6]]
    assert set(collate(rows, reset_memory=False)) == {"input_ids", "labels"}


# -- files ---------------------------------------------------------------------------------------


def parquet(path: Path, texts: list[str | None], *, group: int = 2) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    writer = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"id": list(range(len(texts))), "body": texts})
    writer.write_table(table, path, row_group_size=group)
    return path


def test_every_kind_of_file_gives_its_documents(tmp_path: Path) -> None:
    lines = tmp_path / "b.jsonl"
    lines.write_text('{"body": "one"}\n\n{"body": "two", "id": 3}\n{"body": ""}\n')
    plain = tmp_path / "a.txt"
    plain.write_text("three\n---\nfour\n---\n\n")
    shard = parquet(tmp_path / "c.parquet", ["five", "six", "seven"])
    files = find_files([str(tmp_path)], key="train")
    assert files == (plain, lines, shard)
    source = FileDocuments(files=files, column="body", separator="\n---\n")
    expected = ["three", "four", "one", "two", "five", "six", "seven"]
    assert list(source) == expected
    assert list(source) == expected  # a second pass from the start
    assert find_files([str(tmp_path / "*.parquet")], key="train") == (shard,)
    with pytest.raises(ValueError, match=r"\[data\] heldout: no file matches .*x\*.txt'"):
        find_files([str(tmp_path / "x*.txt")], key="heldout")


BROKEN = [
    (b'{"text": "half\n', r":3: not JSON"),
    (b'["text"]\n', r":3: a list, not an object with 'text'"),
    (b'{"txt": "x"}\n', r":3: no field 'text'; its fields are: txt"),
    (b'{"text": 5}\n', r":3: 'text' is of type int, not text"),
    (b'{"text": "\xff"}\n', r":3: not UTF-8"),
    (b'{"text": "half \\ud800"}\n', r":3: 'text' has half of a surrogate pair"),
]


@pytest.mark.parametrize(("line", "says"), BROKEN)
def test_a_corrupt_line_is_named_with_file_and_line(line: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n' + line + b'{"text": "two"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl" + says):
        list(FileDocuments(files=(path,)))
    bad = BadLinePolicy(skip=True)
    assert list(FileDocuments(files=(path,), bad_lines=bad)) == ["one", "two"]
    assert bad.count == 1
    assert "a.jsonl:3" in bad.examples[0]


def test_corrupt_text_and_parquet_are_named(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_bytes(b"good\nba\xffd\n")
    with pytest.raises(ValueError, match=r"a.txt:2: not UTF-8 at byte 7"):
        list(FileDocuments(files=(text,)))
    assert list(FileDocuments(files=(text,), bad_lines=BadLinePolicy(skip=True))) == ["good\nbad\n"]
    hole = parquet(tmp_path / "a.parquet", ["one", None, "two"])
    with pytest.raises(ValueError, match=r"a.parquet: row 2: 'body' is of type NoneType"):
        list(FileDocuments(files=(hole,), column="body"))
    assert list(
        FileDocuments(files=(hole,), column="body", bad_lines=BadLinePolicy(skip=True))
    ) == ["one", "two"]
    with pytest.raises(ValueError, match=r"no column 'text'; it has id, body"):
        list(FileDocuments(files=(hole,)))
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(hole.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"cut.parquet: not a Parquet file"):
        list(FileDocuments(files=(cut,), column="body"))
    assert (
        list(FileDocuments(files=(cut,), column="body", bad_lines=BadLinePolicy(skip=True))) == []
    )


@pytest.mark.filterwarnings("ignore")  # of the library and its imports
def test_a_dataset_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the library's loader, from a folder in place of the hub."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "data").mkdir()
    parquet(tmp_path / "data" / "train-0.parquet", ["one", "two", None])
    parquet(tmp_path / "data" / "test-0.parquet", ["three"])
    source = HubDocuments(path=str(tmp_path), column="body", bad_lines=BadLinePolicy(skip=True))
    assert list(source) == ["one", "two"]
    assert source.bad_lines.count == 1
    assert list(HubDocuments(path=str(tmp_path), split="test", column="body")) == ["three"]
    with pytest.raises(ValueError, match=r"train, row 3: 'body' is of type NoneType, not text"):
        list(HubDocuments(path=str(tmp_path), column="body"))
    with pytest.raises(ValueError, match=r"dataset '.*nothing' cannot be streamed"):
        list(HubDocuments(path=str(tmp_path / "nothing")))


# -- operations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["linear_attention", "gated_delta_net"])
def test_model_flops_against_the_count_of_torch(name: str) -> None:
    """torch counts the products that run, and our count is of the necessary ones."""
    from torch.utils.flop_counter import FlopCounterMode

    sizes: dict[str, Any] = {
        "vocab_size": 264,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = rc.lm.RecollectConfig.from_recipes(name, **sizes)
    model = rc.lm.RecollectForCausalLM(config)
    ids = torch.randint(256, (1, 128))
    with FlopCounterMode(display=False) as counter:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
    assert model_flops(config, context=128) * 128 == pytest.approx(
        counter.get_total_flops(), rel=0.1
    )


def test_the_ceiling_is_a_rate() -> None:
    assert 1e8 < measure_peak_flops("cpu", torch.float32) < 1e15
