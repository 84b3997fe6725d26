"""The corpus: what ranks read, in which order, and that a model learns from it within seconds."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.model import Corpus, Transformer, loss, preset

LONG = 65_536  # few windows an epoch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads that wait for each other on a busy machine take minutes over operations this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plain(window: torch.Tensor) -> bytes:
    return window.to(torch.uint8).numpy().tobytes()


def rows(corpus: Corpus, steps: int) -> list[bytes]:
    """The windows of the next steps, with the byte that follows each."""
    taken = []
    for tokens, targets in (corpus.next() for _ in range(steps)):
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        taken += [plain(t) + plain(u[-1:]) for t, u in zip(tokens, targets, strict=True)]
    return taken


def test_it_is_pythons_own_source_byte_by_byte():
    library = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    for split in ("train", "valid"):
        for text in rows(Corpus(split, batch=4, length=100), 5):
            assert text[:50] in library or text[50:] in library  # a file may end in the middle, and another follow


def test_a_tenth_of_the_files_is_kept_apart():
    train, valid = (plain(Corpus(split).text) for split in ("train", "valid"))
    assert 0.02 < len(valid) / len(train) < 0.3
    assert all(valid[at : at + 200] not in train for at in range(1000, len(valid), len(valid) // 10))


@settings(max_examples=8, deadline=None)
@given(ranks=st.integers(1, 5), batch=st.integers(1, 4), seed=st.integers(0, 3))
def test_ranks_share_an_epoch_without_overlap(ranks, batch, seed):
    corpora = [Corpus(rank=r, ranks=ranks, batch=batch, length=LONG, seed=seed) for r in range(ranks)]
    steps = {c.steps for c in corpora}
    assert len(steps) == 1, "all ranks take equally many"
    epochs = [[plain(t) for tokens, _ in c for t in tokens] for c in corpora]
    windows = [w for epoch in epochs for w in epoch]
    assert len(set(windows)) == len(windows) == corpora[0].windows - corpora[0].left_over
    assert {len(e) for e in epochs} == {batch * corpora[0].steps}
    assert 0 <= corpora[0].left_over < ranks * batch


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_ranks_batches_together_are_one_ranks_batch(ranks):
    whole = Corpus(batch=2 * ranks, length=LONG)
    parts = [Corpus(rank=r, ranks=ranks, batch=2, length=LONG) for r in range(ranks)]
    for _ in range(2 * whole.steps + 1):  # over the end of two epochs
        tokens, targets = whole.next()
        each = [part.next() for part in parts]
        assert torch.equal(tokens, torch.cat([t for t, _ in each]))
        assert torch.equal(targets, torch.cat([t for _, t in each]))
        assert all(t.is_contiguous() and t.dtype == torch.int64 for pair in each for t in pair)


def test_an_epoch_reads_what_the_last_did_in_another_order():
    corpus = Corpus(batch=1, length=LONG)
    first, second = (rows(corpus, corpus.steps) for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second)
    assert corpus.epoch == 1
    assert rows(Corpus(batch=1, length=LONG, seed=1), corpus.steps) != first


def test_a_for_loop_is_one_epoch():
    corpus = Corpus(batch=7, length=LONG)
    corpus.next()
    assert [len(list(corpus)) for _ in range(3)] == [corpus.steps - 1, corpus.steps, corpus.steps]


def test_order_leaves_torchs_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    Corpus(length=LONG).next()
    assert torch.equal(torch.rand(3), expected)


def test_another_process_reads_the_same():
    code = "from labkit.model import Corpus; c = Corpus(batch=3, seed=4); print(c.next()[0].tolist(), c.state_dict())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    corpus = Corpus(batch=3, seed=4)
    assert out.strip() == f"{corpus.next()[0].tolist()} {corpus.state_dict()}"


@pytest.mark.parametrize("read", [0, 3, 16])
def test_a_position_can_be_saved_and_taken_up(read):
    corpus = Corpus(batch=9, length=LONG)
    rows(corpus, read)
    state = corpus.state_dict()
    expected = rows(corpus, 12)
    again = Corpus(batch=9, length=LONG)
    again.load_state_dict(state)
    assert rows(again, 12) == expected


def test_a_position_saved_on_four_ranks_is_taken_up_on_two():
    four = [Corpus(rank=r, ranks=4, batch=2, length=1024) for r in range(4)]
    for corpus in four:
        rows(corpus, 3)
    two = [Corpus(rank=r, ranks=2, batch=4, length=1024) for r in range(2)]
    for corpus in two:
        corpus.load_state_dict(four[0].state_dict())
    assert [w for c in two for w in rows(c, 1)] == [w for c in four for w in rows(c, 1)]


@pytest.mark.parametrize("other", [{"split": "valid"}, {"length": 32}, {"seed": 1}])
def test_a_position_in_other_windows_is_refused(other):
    (name,) = other
    with pytest.raises(ValueError, match=f"the saved position has {name}="):
        Corpus().load_state_dict(Corpus(**other).state_dict())


def test_a_position_in_another_library_is_refused():
    with pytest.raises(ValueError, match="crc32=1, this corpus"):
        Corpus().load_state_dict({**Corpus().state_dict(), "crc32": 1})


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"split": "test"}, ValueError, "split='test': expected one of 'train', 'valid'"),
        ({"split": "vaild"}, ValueError, "'train', 'valid'; did you mean 'valid'"),
        ({"rank": 2, "ranks": 2}, ValueError, "rank=2: expected 0 … 1, since ranks=2"),
        ({"rank": -1}, ValueError, "rank=-1: expected at least 0"),
        ({"batch": 0}, ValueError, "batch=0: expected at least 1"),
        ({"length": 6.5}, TypeError, "length is 6.5: expected a whole number"),
        ({"length": 10**9}, ValueError, "are 8,000,000,000 bytes: expected less than"),
    ],
)
def test_what_is_refused(given, error, says):
    with pytest.raises(error, match=says):
        Corpus(**given)


def test_it_says_what_is_left_over():
    corpus = Corpus(rank=1, ranks=3, batch=5, length=LONG)
    assert f"rank 1 of 3: {corpus.steps} steps of 5 windows of {LONG} bytes; {corpus.left_over} of" in repr(corpus)


def test_batches_go_where_they_are_told():
    assert Corpus(device="meta").next()[0].device.type == "meta"
    with torch.device("meta"):
        assert Corpus().next()[1].device.type == "meta"


@pytest.mark.parametrize("name", ["tiny_gpt", "tiny_llama"])
def test_a_tiny_model_learns_within_seconds(name):
    """30 steps of 512 bytes: from no better than chance, ln 256 = 5.5, to which bytes are frequent."""
    torch.manual_seed(0)
    model, corpus = Transformer(preset(name)), Corpus(batch=8, length=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(30):
        tokens, targets = corpus.next()
        total, count = loss(model(tokens), targets)
        mean = total / count
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(mean.detach()))
    assert losses[0] > 5.2
    assert sum(losses[-5:]) / 5 < 3.5
