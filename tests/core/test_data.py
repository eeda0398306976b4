"""Recipes, splits, streams and windows. Truth: files written by hand, Python's own library, hand-counted windows."""

from __future__ import annotations

import hashlib
import random
import re
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.core import generated, texts, tiny
from gnomon.core.data import Batches, Corpus, Document, Split, corpus, split, token_stream, windows
from gnomon.core.errors import GnomonError, UsageError
from gnomon.core.refs import RECIPES

TOKENIZER = tiny.byte_tokenizer()


def made(*contents: str, name: str = "made") -> Corpus:
    return Corpus(name, tuple(Document(f"d{i}", text) for i, text in enumerate(contents)))


@pytest.fixture(scope="module")
def stdlib() -> Corpus:
    return corpus("stdlib")


def test_stdlib_holds_library_sources_whole(stdlib: Corpus) -> None:
    root = Path(sysconfig.get_path("stdlib"))
    names = [document.name for document in stdlib.documents]
    assert names == sorted(names) and len(names) > 100
    assert not any(re.search(r"(^|/)(tests?|idlelib|site-packages)/", name) for name in names)
    for document in stdlib.documents[::20]:
        assert document.text == (root / document.name).read_text(encoding="utf-8")
    size = sum(len(document.text) for document in stdlib.documents)
    assert texts.STDLIB_CHARACTERS <= size < texts.STDLIB_CHARACTERS + 60_000
    assert len({name[0] for name in names}) > 15  # spread over the alphabet, not cut off after a few letters


def test_topics_are_pydocs() -> None:
    assert {d.name: d.text for d in corpus("topics").documents} == topics


def test_mixed_is_balanced_and_fits_a_window(stdlib: Corpus) -> None:
    documents = corpus("mixed").documents
    parts = [document.name.split("/")[0] for document in documents]
    assert parts == ["stdlib", "topics", "generated"] * 50
    assert all(200 < len(document.text) <= 4_000 and document.text.endswith("\n") for document in documents)
    whole = {document.name: document.text for document in stdlib.documents}
    assert all(whole[d.name.removeprefix("stdlib/")].startswith(d.text) for d in documents[::3])


def test_generated_text_is_the_same_whatever_the_global_seed_and_grows_at_the_end() -> None:
    random.seed(1)
    short = corpus("generated:7")
    random.seed(2)
    long = corpus("generated:13")
    assert long.documents[:7] == short.documents and len(long.documents) == 13
    assert generated.documents(3, seed=1) != generated.documents(3)
    assert len({document.digest for document in corpus("generated:300").documents}) == 300


def test_generated_text_has_all_token_classes_and_right_sums() -> None:
    documents = corpus("generated:60").documents
    text = "".join(document.text for document in documents)
    assert min(len(document.text) for document in documents) >= generated.MINIMUM_CHARACTERS
    share = {kind: sum(map(test, text)) / len(text) for kind, test in _CLASSES.items()}
    assert (
        share["newline"] > 0.01
        and share["digit"] > 0.05
        and share["punctuation"] > 0.05
        and share["letter"] > 0.5
    )
    for mark in ("\n- ", "\n1. ", '"', "[", "(", "{", "?", ";", "%", "Dear ", "Q: "):
        assert mark in text
    sums = re.findall(r"(\d+) ([+*-]) (\d+) = (-?\d+)\.", text)
    apply = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    assert len(sums) > 100 and all(apply[sign](int(a), int(b)) == int(c) for a, sign, b, c in sums)


_CLASSES = {
    "newline": lambda c: c == "\n",
    "digit": str.isdigit,
    "letter": str.isalpha,
    "punctuation": lambda c: not c.isalnum() and not c.isspace(),
}


def test_hash_covers_names_and_texts_in_order() -> None:
    def sha(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()

    assert made("a", "b").sha256 == sha(f"d0\0{sha('a')}\nd1\0{sha('b')}\n")
    assert (
        made("a", "b", name="other").sha256 == made("a", "b").sha256
    )  # the place a text lies in doesn't count
    assert (
        len({made("a", "b").sha256, made("b", "a").sha256, made("ab").sha256, made("a", "b", "").sha256}) == 4
    )


def test_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.txt").write_text("hidden")
    (tmp_path / "b" / "one.md").write_text("# één\r\n")
    (tmp_path / "a.jsonl").write_text('{"text": "x\u2028y"}\n\n{"text": "z", "more": 1}\n')
    (tmp_path / "c.bin").write_bytes(b"\xff")
    whole = corpus(str(tmp_path))
    assert [(d.name, d.text) for d in whole.documents] == [
        ("a.jsonl:1", "x\u2028y"),
        ("a.jsonl:3", "z"),
        ("b/one.md", "# één\n"),
    ]
    assert whole.name == tmp_path.name
    assert [d.name for d in corpus(str(tmp_path / "a.jsonl")).documents] == ["a.jsonl:1", "a.jsonl:3"]


def test_a_long_file_is_cut_at_blank_lines_so_that_it_can_be_split(tmp_path: Path) -> None:
    text = "".join(f"Paragraph {i} " + "word " * 100 + "\n\n" for i in range(200))
    (tmp_path / "book.txt").write_text(text)
    whole = corpus(str(tmp_path / "book.txt"))
    assert "".join(document.text for document in whole.documents) == text
    assert all(document.text.startswith("Paragraph") for document in whole.documents)
    assert all(10_000 <= len(document.text) <= 20_000 for document in whole.documents)
    assert len(split(whole).train.documents) > 1


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["w" * 4_000, "\n\n", "\n", " ", "x"]), max_size=40))
def test_pieces_join_to_the_text(parts: list[str]) -> None:
    text = "".join(parts)
    pieces = list(texts._pieces(text))
    assert "".join(pieces) == text
    assert all(len(piece) <= 2 * texts.PIECE_CHARACTERS for piece in pieces)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("latin.txt", "é".encode("latin-1"), r"latin.txt is not UTF-8 \(byte 0: .*iconv"),
        ("empty.md", b" \n", "'empty.md' is empty: 1 documents"),
        ("bad.jsonl", b'{"text": "a"}\n{"txt": "b"}', "bad.jsonl, line 2: each line must be an object"),
        ("worse.jsonl", b"[1", "worse.jsonl, line 1: not JSON"),
        ("list.jsonl", b'["text"]', "line 1: each line must be an object"),
        ("page.html", b"<p>", r"of no kind that can be read as text \(.jsonl, .md"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, file: str, content: bytes, message: str) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(GnomonError, match=message):
        corpus(str(tmp_path / file))


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("", "Unknown text recipe ''"),
        ("stdlb", "Unknown text recipe 'stdlb'. Did you mean 'stdlib'"),
        ("generate:9", "Did you mean 'generated:200'"),
        ("generated:0", "from 1 to 100,000"),
        ("generated:many", "from 1 to 100,000"),
        ("nowhere/book", "no file or folder nowhere/book"),
        ("book.txt", "no file or folder book.txt"),
    ],
)
def test_unknown_recipes_are_refused(recipe: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        corpus(recipe)


def test_a_folder_without_text_and_one_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="holds no text: no file ending in"):
        corpus(str(tmp_path))
    (tmp_path / "a.txt").write_text("12345")
    monkeypatch.setattr(texts, "MAX_BYTES", 4)
    with pytest.raises(UsageError, match="holds 5 bytes of text; at most 4"):
        corpus(str(tmp_path))


def test_split_is_a_partition_that_keeps_equal_texts_together() -> None:
    whole = made(*(f"text {i % 30}" for i in range(45)))  # 15 of 30 texts occur twice
    parts = split(whole, valid=0.2, test=0.1, seed=4)
    documents = [part.documents for part in (parts.train, parts.valid, parts.test)]
    assert sorted(d.name for part in documents for d in part) == sorted(d.name for d in whole.documents)
    distinct = [{d.text for d in part} for part in documents]
    assert [len(part) for part in distinct] == [21, 6, 3]
    assert not distinct[0] & distinct[1] and not distinct[0] & distinct[2] and not distinct[1] & distinct[2]
    assert split(whole, valid=0.2, test=0.1, seed=4) == parts != split(whole, valid=0.2, test=0.1, seed=5)
    assert parts.train.name == "made/train"


@pytest.mark.parametrize("pair", [(0, 1), (0, 2), (1, 2)])
def test_a_leaking_split_is_refused(pair: tuple[int, int]) -> None:
    contents = [["a"], ["b"], ["c"]]
    for part in pair:
        contents[part].append("shared")
    with pytest.raises(GnomonError, match="leaks: 1 texts lie in two parts"):
        Split(*(made(*texts) for texts in contents))


@pytest.mark.parametrize(
    ("count", "shares", "message"),
    [
        (2, {}, "2 distinct documents: 1 for valid and 1 for test leave none"),
        (9, {"valid": 0.6, "test": 0.4}, "sum below 1"),
        (9, {"valid": 0.0}, "must be positive"),
        (9, {"test": float("nan")}, "must be positive"),
    ],
)
def test_impossible_splits_are_refused(count: int, shares: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        split(made(*map(str, range(count))), **shares)


def test_stream_is_bytes_and_separators() -> None:
    assert token_stream(made("aé", "", "b"), TOKENIZER).tolist() == [97, 195, 169, 257, 257, 98, 257]


def test_stream_has_no_bos_inside_and_needs_a_separator() -> None:
    from tokenizers import processors

    adds_bos = tiny.byte_tokenizer()
    adds_bos.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 256)]
    )
    assert adds_bos("a")["input_ids"] == [256, 97]
    assert token_stream(made("a", "b"), adds_bos).tolist() == [97, 257, 98, 257]
    adds_bos.eos_token = None
    assert token_stream(made("a"), adds_bos).tolist() == [97, 256]
    adds_bos.bos_token = None
    with pytest.raises(GnomonError, match="neither EOS nor BOS"):
        token_stream(made("a"), adds_bos)


def batches(seed: int, *, length: int = 4, tokens: int = 10, batch: int = 3) -> Batches:
    return Batches(
        torch.arange(tokens), batch=batch, length=length, generator=torch.Generator().manual_seed(seed)
    )


def test_batches_are_windows_from_every_place() -> None:
    drawn = torch.cat([next(batches(seed)) for seed in range(100)])
    assert drawn.shape == (300, 4)
    assert torch.equal(drawn - drawn[:, :1], torch.arange(4).expand(300, 4))  # of neighbouring tokens
    assert set(drawn[:, 0].tolist()) == set(range(7))  # 0..6: the first and the last start too
    assert next(batches(0, length=10)).tolist() == [list(range(10))] * 3


def test_batches_belong_to_their_generator_and_resume() -> None:
    torch.manual_seed(0)
    one, two = batches(0, tokens=1000), batches(0, tokens=1000)
    first = [next(one) for _ in range(3)]
    torch.manual_seed(1)
    assert all(torch.equal(a, next(two)) for a in first)
    assert not torch.equal(first[0], next(batches(1, tokens=1000))) and not torch.equal(first[0], first[1])
    state = one.state_dict()
    ahead = [next(one) for _ in range(3)]
    later = batches(7, tokens=1000)
    later.load_state_dict(state)
    assert all(torch.equal(a, next(later)) for a in ahead)


def test_windows_do_not_overlap_and_drop_the_rest() -> None:
    assert windows(torch.arange(7), 3).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert windows(torch.arange(3), 3).tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("length", [11, 0, -1])
def test_a_window_that_does_not_fit_is_refused(length: int) -> None:
    for use in (lambda: windows(torch.arange(10), length), lambda: batches(0, length=length)):
        with pytest.raises(UsageError, match=f"window of {length} tokens does not fit a stream of 10"):
            use()


def test_the_names_of_recipes_are_those_that_exist() -> None:
    assert tuple(texts.BUILT_IN) == RECIPES
