"""`show.zero`: what is read of real steps and of made-up ones, where bars stand, and what is refused."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

import labkit
from labkit import show
from labkit.show import choice, live
from labkit.show.figure import NARROW, WIDE
from labkit.show.zerosteps import FULL, NONE, SHARD, read
from labkit.theory import zero as theory
from labkit.trace import Event, Trace

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports test files alone: their helpers are beside them

import programs_show_zero as programs
import show_boxes as boxes

BLOCK, HEAD = 16 * 16 + 16, 16 * 2 + 2  # parameters
SETTINGS = {
    "stage 0": (0, {}), "stage 1": (1, {}), "stage 2": (2, {}), "stage 3": (3, {"prefetch": 0}),
    "stage 3, prefetch": (3, {}), "stage 3, kept": (3, {"keep_after_forward": True}),
}  # fmt: skip


def unit(parameters: int, name: str | None = None) -> show.ZeroUnit:
    """In fp32 with AdamW."""
    return show.ZeroUnit(4 * parameters, 4 * parameters, 8 * parameters, name)


SHARDED = {-1: unit(HEAD), **{n: unit(BLOCK) for n in range(3)}}


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    return {name: labkit.run(programs.step, stage, ranks=2, **options).trace
            for name, (stage, options) in SETTINGS.items()}  # fmt: skip


def bucketed(trace: Trace) -> dict[int, show.ZeroUnit]:
    """The buckets of a run, their elements as its first collective of each says."""
    found = {
        e.labels["bucket"]: e.nbytes // 4 for e in reversed(trace.of(0)) if e.kind == "span" and "bucket" in e.labels
    }
    return {number: unit(found[number]) for number in sorted(found)}


@pytest.fixture(scope="module")
def units(traces) -> dict[str, dict[int, show.ZeroUnit]]:
    return {name: SHARDED if "3" in name else bucketed(trace) for name, trace in traces.items()}


def play_of(traces, units, name):
    return read(name, traces[name], units[name])


# Real runs


@pytest.mark.parametrize("name", SETTINGS)
def test_the_odometer_counts_every_byte_that_was_sent(traces, units, name):
    """Against the trace's own count, and against the formula."""
    play, (stage, options) = play_of(traces, units, name), SETTINGS[name]
    labelled = [e for e in traces[name].events if e.kind == "send" and {"unit", "bucket"} & e.labels.keys()]
    sizes = [round(u.parameters / 4) for u in units[name].values()]
    for rank in range(2):
        assert play.sent(-1, rank) == sum(e.nbytes for e in labelled if e.rank == rank)
        by_formula = theory.sent(
            sizes, stage, 2, keep_after_forward=options.get("keep_after_forward", False), rank=rank
        )
        assert play.sent(-1, rank) == by_formula.total
        accounts = {"all-gather forward": "gather_forward", "all-gather backward": "gather_backward",
                    "reduce-scatter": "reduce", "all-gather": "gather", "all-reduce": "all_reduce"}  # fmt: skip
        assert {k: v for k, v in play.moments[-1].sent[rank].items() if v} == {
            accounts[k]: v for k, v in by_formula.items()
        }


@pytest.mark.parametrize(
    ("name", "parameters", "gradients"),
    [("stage 0", 4, 4), ("stage 1", 4, 4), ("stage 2", 4, 1), ("stage 3", 1, 1), ("stage 3, prefetch", 2, 2),
     ("stage 3, kept", 3, 2)],
)  # fmt: skip
def test_how_many_columns_are_full_at_once(traces, units, name, parameters, gradients):
    play = play_of(traces, units, name)
    assert len(play.blocks) == (3 if "3" in name else len(units[name]))
    parameters, gradients = (len(play.blocks) if n == 4 else n for n in (parameters, gradients))
    assert (play.most_full["P"], play.most_full["G"]) == (parameters, gradients)


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_left_at_the_end_is_what_the_stage_holds(traces, units, name):
    play, (stage, _) = play_of(traces, units, name), SETTINGS[name]
    sizes = [round(u.parameters / 4) for u in units[name].values()]
    live_bytes = theory.held(sizes, stage, 2).live
    for rank in range(2):
        assert play.held(-1, rank, "P") == live_bytes["parameters"]
        assert play.held(-1, rank, "O") == live_bytes["optimizer"]
        assert play.held(-1, rank, "G") == 4 * sum(sizes) / (1 if stage == 0 else 2)
    if stage == 1:
        assert max(play.held(m, 0, "G") for m in range(len(play.moments))) == live_bytes["gradients"]


def test_the_peak_of_stage_3_is_the_formulas(traces, units):
    """Units in the model's order, the root around them; gradients not yet there are none."""
    for name, ahead in (("stage 3", 0), ("stage 3, prefetch", 1)):
        worst = theory.held([BLOCK] * 3, 3, 2, root=HEAD, prefetch=ahead).worst
        play = play_of(traces, units, name)
        in_blocks = 4 * 2 * (BLOCK // 2) * (1 + ahead)
        assert worst["gathered units"] - 4 * HEAD == in_blocks
        assert max(play.held(m, 0, "P") for m in range(len(play.moments))) == pytest.approx(
            4 * (in_blocks // 4 + HEAD + (3 - 1 - ahead) * BLOCK / 2)
        )


def test_the_order_is_that_of_the_engine(traces, units):
    told = [(m.action.kind, m.action.column.label, m.action.phase)
            for m in play_of(traces, units, "stage 3").moments[1:] if m.action.column]  # fmt: skip
    forward = [step for n in range(3) for step in (("gather", n, "forward"), ("free", n, "forward"))]
    assert told[:8] == [("gather", -1, "forward"), *forward, ("free", -1, "forward")]
    backward = [told[n : n + 4] for n in range(8, len(told), 4)]
    assert [[kind for kind, *_ in one] for one in backward[1:]] == [["gather", "reduce", "free", "reduced"]] * 3
    assert [one[0][1] for one in backward] == [-1, 2, 1, 0]


def test_the_same_run_twice_is_the_same_picture(traces, units):
    again = labkit.run(programs.step, 3, ranks=2, prefetch=0).trace
    assert str(show.zero(again, SHARDED)) == str(show.zero(traces["stage 3"], SHARDED))
    assert show.zero(again, SHARDED).to_html() == show.zero(traces["stage 3"], SHARDED).to_html()


def test_accumulation_sends_three_times_k(traces):
    play = read("k", labkit.run(programs.step, 3, micro_batches=2, ranks=2, prefetch=0).trace, SHARDED)
    assert play.sent(-1, 0) / play.psi == 6
    phases = [m.action.phase for m in play.moments[1:]]
    turns = [phase for n, phase in enumerate(phases) if n == 0 or phases[n - 1] != phase]
    assert turns == ["forward", "backward"] * 2


def test_torchs_own_all_reduce_cannot_be_counted():
    native = labkit.run(programs.step, 0, native=True, ranks=2).trace
    with pytest.raises(ValueError, match=r"'stage 0' moves bucket 0 with torch's own all_reduce"):
        show.zero({"stage 0": native}, bucketed_like(native))


def bucketed_like(trace):
    return {e.labels["bucket"]: unit(1) for e in trace.events if "bucket" in e.labels}


# Made-up runs


class Line:
    """The events of one rank, in the order in which they begin."""

    def __init__(self, rank: int, column: str = "unit") -> None:
        self.rank, self.column, self.events = rank, column, []

    def add(self, kind, name, n=None, parent=None, long=False, **fields):
        at, labels = len(self.events), {} if n is None else {self.column: n}
        end = at + (100 if long else 0.5)
        self.events.append(Event(kind, name, self.rank, at, end, labels=labels, index=at, parent=parent, **fields))
        return at

    def collective(self, name, n, nbytes=8, parent=None, beside=False):
        """Asked for in a span of its own; `beside`: it goes on after that has ended."""
        asked = self.add("span", "ask", n, parent)
        span = self.add("span", f"{name} ring", n, asked, long=beside)
        if not beside:
            self.events[asked] = Event("span", "ask", self.rank, asked, span + 1, labels={self.column: n}, index=asked,
                                       parent=parent)  # fmt: skip
        self.add("send", "send", n, span, nbytes=nbytes, peer=1 - self.rank)

    def gather(self, *numbers, **options):
        for n in numbers:
            self.collective("all_gather", n, **options)
        return self

    def reduce(self, *numbers, **options):
        for n in numbers:
            self.collective("reduce_scatter", n, **options)
        return self

    def free(self, *numbers, parent=None):
        for n in numbers:
            self.add("span", "free", n, parent)
        return self


def pair(make, column="unit"):
    return Trace([e for rank in range(2) for e in make(Line(rank, column)).events], 2)


def states(play, column, letter, rank=0):
    at = "PGO".index(letter)
    return [m.cells[rank][column][at] for m in play.moments]


def test_a_shard_becomes_full_and_a_shard_again():
    play = read("", pair(lambda line: line.gather(0).free(0).gather(0).reduce(0).free(0)), {0: unit(4)})
    assert states(play, 0, "P") == [SHARD, FULL, SHARD, FULL, FULL, FULL, SHARD]
    assert states(play, 0, "G") == [NONE, NONE, NONE, NONE, FULL, SHARD, SHARD]
    assert states(play, 0, "O") == [SHARD] * 7
    assert [m.action.phase for m in play.moments[1:]] == ["forward"] * 2 + ["backward"] * 4


def test_a_unit_that_is_never_freed_stays_full_in_the_picture():
    play = read("", pair(lambda line: line.gather(0, 1).reduce(1, 0)), {0: unit(4), 1: unit(4)})
    assert states(play, 0, "P")[-1] == states(play, 1, "P")[-1] == FULL
    assert play.most_full["P"] == 2


def test_gradients_that_are_all_reduced_leave_everything_full():
    def run(line):
        line.collective("all_reduce", 0)
        return line

    play = read("", pair(run, "bucket"), {0: unit(4)})
    assert play.moments[-1].cells[0] == ((FULL, FULL, FULL),)


def test_what_is_reduced_after_backward_was_full_from_its_end():
    def late(line):
        line.add("span", "backward", phase="backward")
        return line.reduce(0, 1).gather(0, 1)

    play = read("", pair(late, "bucket"), {0: unit(4), 1: unit(4)})
    assert states(play, 1, "G") == [NONE, FULL, FULL, FULL, FULL, SHARD, SHARD, SHARD]
    assert states(play, 0, "P") == [FULL] * 8

    def early(line):
        inside = line.add("span", "backward", phase="backward")
        return line.reduce(0, parent=inside).reduce(1, parent=inside).gather(0, 1)

    play = read("", pair(early, "bucket"), {0: unit(4), 1: unit(4)})
    assert states(play, 1, "G") == [NONE, NONE, NONE, FULL, SHARD, SHARD, SHARD]


def test_a_reduction_beside_the_next_backward_is_over_before_the_next_reduction():
    def run(line):
        return line.gather(0, 1, 1).reduce(1, beside=True).gather(0).free(1).reduce(0, beside=True).free(0)

    play = read("", pair(run), {0: unit(4), 1: unit(4)})
    kinds = [(m.action.kind, m.action.column.label) for m in play.moments[1:]]
    assert kinds[2:] == [("reduce", 1), ("gather", 0), ("free", 1), ("reduced", 1), ("reduce", 0), ("free", 0),
                         ("reduced", 0)]  # fmt: skip

    def other(line):  # freed first: its gradients were there by then, and the other's too
        return line.gather(0, 1, 1).reduce(1, beside=True).gather(0).free(1, 0).reduce(0, beside=True)

    play = read("", pair(other), {0: unit(4), 1: unit(4)})
    kinds = [(m.action.kind, m.action.column.label) for m in play.moments[1:]]
    assert kinds[3:] == [("gather", 0), ("free", 1), ("reduce", 0), ("free", 0), ("reduced", 1), ("reduced", 0)]
    assert play.most_full["G"] == 2


def test_micro_batches_of_stage_2_keep_their_shards():
    """The end of the first backward fills nothing that only the second one reduces."""

    def run(line):
        for _ in range(2):
            line.reduce(0, 1, parent=line.add("span", "backward", phase="backward"))
        return line.gather(0, 1)

    play = read("", pair(run, "bucket"), {0: unit(4), 1: unit(4)})
    assert states(play, 0, "G") == [NONE, FULL, SHARD, SHARD, SHARD, FULL, SHARD, SHARD, SHARD, SHARD, SHARD]
    assert play.sent(-1, 0) == 6 * 8


def test_a_unit_in_several_pieces_is_one():
    """Frozen and trained parameters are gathered apart; what is freed before it is reduced had its gradients before."""
    for beside in (False, True):

        def run(line, beside=beside):
            line.gather(0, nbytes=3).gather(0, nbytes=5).gather(1)
            return line.free(0).reduce(0, nbytes=3, beside=beside).reduce(0, nbytes=5, beside=beside)

        play = read("", pair(run), {0: unit(4), 1: unit(4)})
        kinds = [m.action.kind for m in play.moments[1:]]
        assert kinds == ["gather", "gather", "reduce", "free", "reduced"]
        assert play.moments[1].sent[0] == {"gather_forward": 8}
        assert play.moments[-1].sent[0]["reduce"] == 8


def test_ranks_that_do_different_things_show_different_rows():
    lines = [Line(0).gather(0, 1), Line(1).gather(0).free(0).gather(1).free(1)]
    play = read("", Trace([e for line in lines for e in line.events], 2), {0: unit(4), 1: unit(4)})
    assert [states(play, column, "P")[-1] for column in (0, 1)] == [FULL, FULL]
    assert [states(play, column, "P", rank=1)[-1] for column in (0, 1)] == [SHARD, SHARD]
    assert [m.action.kind for m in play.moments[1:]] == ["gather", "free", "gather", "free"]
    assert play.full(-1) == [0, 1]
    words = [w for _, w, _ in boxes.texts(show.zero(Trace([e for line in lines for e in line.events], 2),
                                                     {0: unit(4), 1: unit(4)}).draw(WIDE, None))]  # fmt: skip
    assert any(w.startswith("rank 0, the fullest, holds") for w in words)


# Pictures


def bars(drawing, letter):
    """(left, top, width) of every filled bar of a letter."""
    found = []
    for group in boxes.tree(drawing).iter("g"):
        if f"lk-m{letter} lk-bits" in group.get("class", ""):
            for d in [p.get("d") for p in group.iter("path") if not p.get("class")]:
                for x, y, wide in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v16", d):
                    found.append((float(x), float(y), float(wide)))
    return found


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_bars_are_what_the_moment_holds(traces, units, width):
    play = play_of(traces, units, "stage 3, prefetch")
    figure = show.zero(traces["stage 3, prefetch"], SHARDED)
    cell = max(w for *_, w in bars(figure.draw(width, len(play.moments) - 1), "P")) * 2
    for moment, state in enumerate(play.moments):
        for n, letter in enumerate("PGO"):
            have = sorted(round(w / cell, 1) for *_, w in bars(figure.draw(width, moment), letter))
            want = sorted({SHARD: 0.5, FULL: 1.0}[c[n]] for row in state.cells for c in row if c[n] != NONE)
            assert have == want


def test_a_shard_stands_at_its_ranks_place(traces):
    figure = show.zero(traces["stage 3"], SHARDED)
    drawn = bars(figure.draw(WIDE, 0), "O")
    tops = sorted({y for _, y, _ in drawn})
    left = min(x for x, *_ in drawn)
    assert len(tops) == 2
    assert min(x for x, y, _ in drawn if y == tops[0]) == left
    assert min(x for x, y, _ in drawn if y == tops[1]) == pytest.approx(left + drawn[0][2], abs=0.2)


def test_axes_are_shared_between_settings(traces, units):
    """The same dashed line and the same place of Ψ, whatever a setting holds and sends."""
    made = show.zero(traces, units)
    for width in (WIDE, NARROW):
        lines, psi = set(), {}
        for name, figure in made.figures.items():
            drawing = figure.draw(width, None)
            paths = [p for p in boxes.tree(drawing).iter("path") if p.get("class") == "lk-line"]
            lines.add(len(paths))
            psi[name] = [b[0] for b, w, _ in boxes.texts(drawing) if w == "2Ψ"]
        assert lines == {1}
        assert max(p[0] for p in psi.values()) - min(p[0] for p in psi.values()) < 12  # buckets are padded, units apart


def test_titles_say_what_is_full(traces, units):
    made = show.zero(traces, units)
    titles = [figure.title for figure in made.figures.values()]
    assert titles[0] == "stage 0: Every rank holds everything; a rank sends 2Ψ"
    assert titles[1].startswith("stage 1: Only the optimizer is 1/2 all the time")
    assert titles[2].startswith("stage 2: Gradients and optimizer are 1/2, but for 1 full bucket of")
    assert titles[3:] == [
        "stage 3: Besides the root, at most 1 of 3 layers is full at once; a rank sends 3Ψ",
        "stage 3, prefetch: Besides the root, at most 2 of 3 layers are full at once; a rank sends 3Ψ",
        "stage 3, kept: All 3 layers are full when backward begins; a rank sends 2Ψ",
    ]


def test_the_twin_says_the_same(traces):
    figure = show.zero(traces["stage 3"], SHARDED)
    assert len(figure.twin.rows) == len(figure.says) == 25
    assert figure.says[2] == "forward · layer 0: gathered. Full parameters: root, layer 0. Sent 0.36Ψ of 3Ψ."
    assert figure.twin.rows[2][1:4] == ("forward · layer 0: gathered", "root, layer 0", "0.36Ψ")
    assert figure.says[0].startswith("At first: what each rank holds. Full parameters: none. Sent 0Ψ")
    assert "forward: 1Ψ sent" in str(figure)


@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_lies_outside_or_on_something_else(traces, units, name):
    figure = show.zero({name: traces[name]}, units)
    for width in (WIDE, NARROW):
        for frame in (None, 0, 1, len(figure.says) // 2, len(figure.says) - 1):
            assert boxes.outside(figure.draw(width, frame)) == []
            assert boxes.overlapping(figure.draw(width, frame)) == []


@pytest.mark.parametrize(("ranks", "columns"), [(8, 12), (1, 1), (8, 1)])
def test_many_ranks_and_columns_fit_or_scroll(ranks, columns):
    lines = [Line(rank).gather(*range(columns)).free(*range(columns)) for rank in range(ranks)]
    figure = show.zero(Trace([e for line in lines for e in line.events], ranks), {n: unit(8) for n in range(columns)})
    for width in (WIDE, NARROW):
        drawing = figure.draw(width, 1)
        assert boxes.outside(drawing) == []
        assert (drawing.strip is not None) == (drawing.width > width)
    assert len(figure.says) == 2 * columns + 1


def test_every_fill_has_its_letter_or_the_row_has(traces):
    figure = show.zero(traces["stage 3"], SHARDED)
    drawing = figure.draw(WIDE, None)
    letters = [w for _, w, _ in boxes.texts(drawing) if w in "PGO"]
    assert len(letters) >= sum(len(bars(drawing, letter)) for letter in "PGO") + 3  # and the key's
    many = [Line(rank).gather(*range(4)).free(*range(4)) for rank in range(8)]
    small = show.zero(Trace([e for line in many for e in line.events], 8), dict.fromkeys(range(4), unit(8)))
    words = [w for _, w, _ in boxes.texts(small.draw(NARROW, 0))]
    assert words.count("P") == 8 + 2  # at each row, in the key, in the line


# In the page


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in ("input", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.delenv("LABKIT_STATIC", raising=False)
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(live.sys.modules, "IPython", shell)


def test_a_choice_works_without_a_kernel(traces, units, monkeypatch):
    monkeypatch.setenv("LABKIT_STATIC", "1")
    made = show.zero(traces, units, first="stage 2")
    data = made._repr_mimebundle_()
    assert set(data) == {"text/html", "text/plain"}
    page = Tags()
    page.feed(data["text/html"])
    assert page.open == []
    kinds = [tag for tag, _ in page.seen]
    assert (kinds.count("style"), kinds.count("script"), kinds.count("details")) == (1, 0, 6)
    radios = [attrs for tag, attrs in page.seen if tag == "input"]
    assert [("checked" in radio) for radio in radios] == [False, False, True, False, False, False]
    assert all("data-lm-suppress-shortcuts" in radio for radio in radios)
    assert data["text/plain"].count("[measured]") == 6
    for n in range(1, 7):  # a rule for each setting hides the others
        assert f"label:nth-of-type({n}) :checked)~.lk-panel:not(.lk-p{n}){{display:none}}" in data["text/html"]


@pytest.mark.usefixtures("kernel")
def test_live_it_plays(traces, units):
    html = show.zero(traces, units)._repr_mimebundle_()["text/html"]
    assert html.count("<script>") == 1
    assert "export default" not in html
    assert len(html) < 1_000_000
    single = show.zero(traces["stage 3"], SHARDED)._repr_mimebundle_()["text/html"]
    assert single.count("<script>") == 1


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_module_is_javascript(tmp_path):
    (tmp_path / "choice.mjs").write_text(choice._code(), encoding="utf-8")
    subprocess.run(["node", "--check", str(tmp_path / "choice.mjs")], check=True, capture_output=True)


def test_both_forms_have_one_player_each():
    code = choice._code()
    assert code.count("function attach(") == code.count("function choose(") == code.count("function render(") == 1
    assert code.count("export default") == 1


def test_a_picture_is_quick(traces):
    figure = show.zero(traces["stage 3"], SHARDED)
    figure.draw(WIDE, 0)
    took = []
    for moment in range(len(figure.says)):
        start = time.perf_counter()
        figure.draw(WIDE, moment)
        took.append(time.perf_counter() - start)
    assert sorted(took)[len(took) // 2] < 0.02


# What is refused


def one():
    return pair(lambda line: line.gather(0).free(0))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: show.zero(3, {0: unit(4)}), TypeError, "runs is int: expected run.trace"),
        (lambda: show.zero({}, {0: unit(4)}), TypeError, "runs is dict"),
        (lambda: show.zero({"a": 3}, {0: unit(4)}), TypeError, "setting → trace"),
        (lambda: show.zero(one(), []), TypeError, "expected label → ZeroUnit"),
        (lambda: show.zero(one(), {}), TypeError, "expected label → ZeroUnit"),
        (lambda: show.zero(one(), {0: 12}), TypeError, "units has 12 for 0"),
        (lambda: show.zero(one(), {1: unit(4)}), ValueError, r"moves unit 0, but units has \[1\]"),
        (lambda: show.zero(one(), {0: unit(4)}, title=3), TypeError, "title is 3"),
        (lambda: show.zero(one(), {0: unit(4)}, source="guessed"), ValueError, "source is 'guessed'"),
        (lambda: show.zero({"a": one()}, {0: unit(4)}, first="b"), ValueError, "first is 'b': expected one of 'a'"),
        (lambda: show.zero(Trace([], 2), {0: unit(4)}), ValueError, "nothing in '' says which unit"),
        (lambda: show.zero(Trace([], 9), {0: unit(4)}), ValueError, "9 ranks: expected at most 8"),
        (lambda: show.zero(pair(lambda line: line.reduce(0), "bucket"), {0: unit(4)}), ValueError, "inside backward"),
        (lambda: show.zero(pair(lambda line: line.gather(*[0, 1] * 201)), {0: unit(4), 1: unit(4)}), ValueError,
         "402 moments: expected at most 400"),
        (lambda: show.ZeroUnit(-1, 0, 0), ValueError, "parameters of a unit is -1"),
        (lambda: show.ZeroUnit(1, "2", 0), TypeError, "gradients of a unit is '2'"),
        (lambda: show.ZeroUnit(1, 2, float("nan")), ValueError, "optimizer of a unit is nan"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()
