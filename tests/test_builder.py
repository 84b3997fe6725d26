"""The schedule builder: which blocks may stand where, in which words it refuses, and the grid in a page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import show
from labkit.pipeline import IllegalSchedule, Schedule, gpipe, one_f_one_b, simulate, zero_bubble_h1
from labkit.pipeline.building import Building, Refused, par
from labkit.show import live
from labkit.show.boardfigure import LEVELS
from labkit.show.boardwidget import make, receive, state
from labkit.show.figure import NARROW, WIDE, style

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports test files alone: their helpers are beside them

import show_boxes as boxes

FIGURES = Path(__file__).parent / "figures"


def first_round(ranks: int = 4) -> list[tuple[str, int, int]]:
    """1F1B up to the first F and B of the steady state: (kind, rank, slot)."""
    warm_up = [("F", r, r + i) for r in range(ranks) for i in range(ranks - r)]
    backward = [("B", r, 2 * ranks - 1 - r) for r in reversed(range(ranks))]
    return [*warm_up, *backward, *(("F", r, 2 * ranks - r) for r in range(ranks))]


def filled(grid: Building, moves: list[tuple[str, int, int]]) -> Building:
    for kind, rank, slot in moves:
        grid.place(kind, rank, slot)
    return grid


# The engine, without a page


def test_one_round_by_hand_and_its_repetition_are_1f1b():
    grid = filled(Building(4, 8, cap=4), first_round())
    assert not grid.finished
    assert len(grid.repeat()) == 2 * 4 * 8 - 18
    assert grid.finished
    assert (grid.makespan, grid.peaks) == (22, (4, 3, 2, 1))
    assert grid.schedule.text() == one_f_one_b(4, 8).text()
    assert len(grid.undo()) == 46, "a repetition is one move"
    assert len(grid.slots) == 18


@pytest.mark.parametrize("order", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (1, 3), (2, 2), (3, 5), (4, 2), (4, 8)])
def test_a_text_is_placed_as_early_as_it_can_be(order, ranks, micro_batches):
    schedule = order(ranks, micro_batches)
    grid = Building(ranks, micro_batches)
    grid.write(schedule.text())
    line = simulate(schedule, forward=1, backward=1, weight=0)
    assert {e.action: e.start for e in line.events} == grid.slots
    assert grid.schedule.actions == schedule.actions
    assert grid.peaks == schedule.stash()
    assert grid.finished


def test_a_split_text_is_placed_as_zero_bubble_is_simulated():
    grid = Building(4, 4, split=True)
    grid.write(zero_bubble_h1(4, 4).text())
    assert grid.makespan == simulate(zero_bubble_h1(4, 4)).makespan == 15
    assert grid.peaks == zero_bubble_h1(4, 4).stash()


@pytest.mark.parametrize(("moves", "move", "reason", "blocker", "end"), [
    ([], ("B", 0, 0), "missing", ("F", 0, 0), None),
    ([], ("F", 1, 4), "missing", ("F", 0, 0), None),
    ([("F", 0, 3)], ("F", 1, 3), "late", ("F", 0, 0), 4),
    ([("F", 0, 3)], ("F", 0, 3), "taken", ("F", 0, 0), 4),
    ([("F", 0, 0), ("F", 0, 1)], ("F", 0, 2), "full", ("B", 0, 0), None),
    ([("F", 0, 0), ("F", 1, 1), ("B", 1, 6)], ("B", 0, 6), "late", ("B", 0, 1), 7),
])  # fmt: skip
def test_what_cannot_stand_there_is_refused_and_changes_nothing(moves, move, reason, blocker, end):
    grid = filled(Building(2, 4, cap=2), moves)
    before = dict(grid.slots)
    with pytest.raises(Refused) as refused:
        grid.place(*move)
    assert (refused.value.reason, tuple(refused.value.blocker), refused.value.end) == (reason, blocker, end)
    assert grid.slots == before
    assert grid.refusal(refused.value.action, move[2]).reason == reason


def test_a_block_in_a_gap_counts_against_the_cap_until_its_b():
    grid = filled(Building(2, 3, cap=2), [("F", 0, 0), ("F", 1, 1), ("B", 1, 2), ("B", 0, 5), ("F", 0, 7), ("F", 0, 3)])
    assert grid.held(0) == [1, 1, 1, 2, 2, 2, 1, 2]
    with pytest.raises(Refused, match="F2 cannot stand on rank 0 in slot 4: full"):
        filled(Building(2, 3, cap=2), [("F", 0, 0), ("F", 0, 1), ("F", 0, 4)])


def test_with_w_a_micro_batch_is_held_until_its_w():
    grid = filled(Building(1, 2, cap=1, split=True), [("F", 0, 0), ("B", 0, 1)])
    with pytest.raises(Refused) as refused:
        grid.place("F", 0, 2)
    assert tuple(refused.value.blocker) == ("W", 0, 0)
    filled(grid, [("W", 0, 2), ("F", 0, 3)])
    assert grid.held(0) == [1, 1, 1, 1]
    apart = filled(Building(1, 1, split=True), [("F", 0, 0), ("B", 0, 1), ("W", 0, 4)])
    assert apart.held(0) == [1, 1, 1, 1, 1]
    assert filled(Building(1, 2), [("F", 0, 0), ("B", 0, 1), ("F", 0, 4)]).held(0) == [1, 1, 0, 0, 1]


def test_the_tray_has_what_can_be_placed_and_from_when_on():
    grid = filled(Building(2, 2, cap=1), [("F", 0, 0), ("F", 1, 4)])
    assert [[(str(a), slot) for a, slot in grid.ready(rank)] for rank in (0, 1)] == [[], [("B0.1", 5)]]
    grid.place("B", 1, 5)
    assert [(str(a), slot) for a, slot in grid.ready(0)] == [("B0.0", 6)]


def test_undo_takes_back_one_move_at_a_time():
    grid = filled(Building(2, 1), [("F", 0, 0), ("F", 1, 1)])
    assert [str(a) for a in grid.undo()] == ["F0.1"]
    assert [str(a) for a in grid.undo()] == ["F0.0"]
    assert grid.undo() == []
    assert (grid.makespan, grid.peaks) == (0, (0, 0))


def test_nothing_is_repeated_before_there_is_a_round():
    grid = filled(Building(2, 3), [("F", 0, 0), ("F", 1, 1)])
    with pytest.raises(Refused) as refused:
        grid.repeat()
    assert (refused.value.reason, tuple(refused.value.action)) == ("no-round", ("B", 0, 0))
    filled(grid, [("B", 1, 2), ("B", 0, 3)])
    grid.repeat()
    assert grid.makespan == 8, "F1 fits into slots 2 and 3, after the first F, in no shorter period than two"
    with pytest.raises(Refused) as refused:
        grid.repeat()
    assert refused.value.reason == "none-left"


def test_what_a_text_cannot_be_placed_as_is_refused():
    grid = filled(Building(2, 2, cap=1), [("F", 0, 0)])
    for text, error, message in [
        ("r0: F0 B0 \n r1: B0 F0", IllegalSchedule, "can never run"),
        ("r0: F0 B0 \n r1: F0", IllegalSchedule, "B0 of stage 1"),
        ("r0: F0 F1 \n r1:", Refused, "F1 cannot stand on rank 0 in slot 1: full, B0 on rank 0"),
        ("r0: F0", ValueError, "the text has 1 lines and 1 stages: expected 2"),
        ("r0: F0 F0 \n r1:", IllegalSchedule, "F0"),
        ("r0: F0 \n r1: F0.0", IllegalSchedule, "F0"),
        ("r0: F0 W0 \n r1:", ValueError, "the text has W0: expected blocks F, B"),
        ("r0: F2 \n r1:", ValueError, "there is no micro-batch 2"),
        ("r0: X \n r1:", ValueError, "line 1, word 1: 'X' is no action"),
    ]:
        with pytest.raises(error, match=re.escape(message)):
            grid.write(text)
        assert len(grid.slots) == 1, "nothing has changed"


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ((0, 1), ValueError, "ranks is 0"), ((1, "2"), TypeError, "micro_batches is '2'"),
    ((2, 2, 0), ValueError, "cap is 0"), ((2, 2, [1]), ValueError, "cap has 1 numbers, but there are 2 ranks"),
])  # fmt: skip
def test_bad_grids_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        Building(*arguments)


@pytest.mark.parametrize(("move", "message"), [
    (("W", 0, 0), "kind is 'W': expected one of F, B"), (("F", 2, 0), "rank is 2"), (("F", 0, -1), "slot is -1"),
])  # fmt: skip
def test_bad_moves_are_named(move, message):
    with pytest.raises(ValueError, match=message):
        Building(2, 2).place(*move)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_what_is_built_by_any_legal_moves_can_run(data):
    """Independent: the checker of schedules and the simulator, which know no grid and no cap."""
    ranks, micro_batches = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    split, cap = data.draw(st.booleans()), data.draw(st.integers(1, 3))
    grid = Building(ranks, micro_batches, cap, split)
    while not grid.finished:
        offers = [(a, s) for rank in range(ranks) for a, s in grid.ready(rank)]
        action, slot = data.draw(st.sampled_from(offers))
        grid.place(action.kind, action.stage, slot + data.draw(st.integers(0, 1)))
    schedule = grid.schedule
    schedule.check()
    assert max(schedule.stash()) <= cap
    assert schedule.stash() == grid.peaks
    both = 1 if split else 0
    assert simulate(schedule, forward=1, backward=1, weight=both).makespan <= grid.makespan
    again = Building(ranks, micro_batches, cap, split)
    again.write(schedule.text())
    assert again.schedule.actions == schedule.actions


def test_the_period_is_the_shortest_that_fits():
    """B0 of rank 0 stands in slot 4, where period 2 puts F2; with 3 the last B, B2, is in slot 4 + 2 · 3."""
    grid = filled(Building(2, 3), [("F", 0, 0), ("F", 1, 1), ("B", 1, 2), ("B", 0, 4)])
    grid.repeat()
    assert grid.finished
    assert grid.makespan == 11
    round_ = [("F", 0, 0), ("F", 0, 1), ("F", 1, 1), ("F", 1, 2), ("B", 1, 3), ("B", 0, 4)]
    wrong = filled(Building(2, 3), round_)
    before = dict(wrong.slots)
    wrong.caps = (None, 1)  # rank 0 could go on, but rank 1 with no period: it has held two
    with pytest.raises(Refused):
        wrong.repeat()
    assert wrong.slots == before


# Par


@cache
def shortest(ranks: int, micro_batches: int, cap: int | None, split: bool) -> int:
    """The least makespan there is, by trying all: breadth first over what each rank may do in a slot."""
    kinds = 3 if split else 2
    start = tuple((0,) * kinds for _ in range(ranks))  # rank → how many F, B, W it has done, in order
    goal = tuple((micro_batches,) * kinds for _ in range(ranks))
    seen, now, slot = {start}, {start}, 0
    while goal not in now:
        after = set()
        for done in now:
            options = [[None, *(k for k in range(kinds) if _may(done, r, k, micro_batches, cap))] for r in range(ranks)]
            partial = [()]
            for option in options:
                partial = [(*p, o) for p in partial for o in option]
            for choice in partial:
                after.add(tuple(tuple(n + (k == c) for k, n in enumerate(counts))
                                for counts, c in zip(done, choice, strict=True)))  # fmt: skip
        now = after - seen
        seen |= after
        slot += 1
    return slot


def _may(done, rank: int, kind: int, micro_batches: int, cap: int | None) -> bool:
    own, number = done[rank], done[rank][kind]
    if number == micro_batches:
        return False
    if kind == 0:
        room = cap is None or own[0] - own[-1] < cap
        return room and (rank == 0 or done[rank - 1][0] > number)
    if kind == 1:
        return own[0] > number and (rank == len(done) - 1 or done[rank + 1][1] > number)
    return own[1] > number


@pytest.mark.parametrize("level", [(2, 2, None, False), (3, 3, None, False), (3, 3, 2, False), (2, 4, 2, False),
                                   (2, 3, 2, True), (2, 4, 1, False)])  # fmt: skip
def test_par_is_the_shortest_there_is(level):
    """Of small grids, with the micro-batches of each kind in their order."""
    assert par(*level) == shortest(*level)


def test_the_pars_of_the_levels():
    """2(m+p−1) where p micro-batches fit; ZB-H1's 3m + p − 1 with W; at cap 2, F3 cannot begin before slot 10."""
    assert [par(*LEVELS[n]) for n in LEVELS] == [6, 14, 10 + 2 * 4, 22, 15]
    assert par(4, 8, cap=[4, 3, 2, 1]) == 22
    assert par(4, 8, cap=4, split=True) == 27


# The grid in a page


def words(figure, width=WIDE) -> list[str]:
    return [w for _, w, _ in boxes.texts(figure.draw(width, None))]


def played(level: int = 4, moves: list[tuple[str, int, int]] | None = None) -> show.boardfigure.Builder:
    board = show.builder(level)
    for kind, rank, slot in first_round() if moves is None else moves:
        board.point(rank, slot)
        board.press(kind)
        assert "needs" not in board.said
    return board


def test_the_line_and_the_titles():
    board = played()
    assert board.line == "makespan 9, par 22 · peaks 4 3 2 1, cap 4"
    assert board.title == "4 ranks, 8 micro-batches, room for 4 on a rank: end by slot 22"
    board.press("repeat")
    assert board.title == "Complete, on par: makespan 22"
    assert board.said == "46 blocks repeat the pattern; makespan 22, par 22 · peaks 4 3 2 1, cap 4"
    slow = show.builder(ranks=2, micro_batches=2, cap=1)
    assert slow.title.endswith("room for 1 on a rank: end by slot 8")
    free = show.builder(2).write(gpipe(4, 4).text())
    assert free.line == "makespan 14, par 14 · peaks 4 4 4 4"
    wide = played(
        1, [("F", 0, 0), ("F", 1, 2), ("B", 1, 3), ("B", 0, 5), ("F", 0, 6), ("F", 1, 7), ("B", 1, 8), ("B", 0, 9)]
    )
    assert wide.title == "Complete, makespan 10: 4 over par 6"
    best = show.builder(ranks=4, micro_batches=4, cap=4, split=True)
    best.par = 16
    assert best.write(zero_bubble_h1(4, 4).text()).title == "Complete, makespan 15: 1 below par 16"


@pytest.mark.parametrize(("moves", "place", "key", "said"), [
    ([("F", 0, 0), ("F", 0, 1)], (0, 2), "F", "F2 is more than rank 0 may hold, 2: B0 has to free one first"),
    ([("F", 0, 0), ("F", 1, 1), ("B", 1, 6)], (0, 6), "B", "B0 on rank 0 needs B0 on rank 1, which ends at 7"),
    ([("F", 0, 0)], (0, 1), "B", "B0 on rank 0 needs B0 on rank 1, which is not placed yet"),
    ([("F", 0, 0)], (0, 1), "repeat", "Nothing to repeat yet: rank 0 has no B"),
    ([("F", 0, 6)], (0, 6), "F", "Slot 6 of rank 0 has F0"),
])  # fmt: skip
def test_a_refusal_is_a_sentence(moves, place, key, said):
    board = show.builder(ranks=2, micro_batches=3, cap=2)
    for kind, rank, slot in moves:
        board.point(rank, slot)
        board.press(kind)
    board.point(*place)
    board.press(key)
    assert board.said == said
    assert len(board.building.slots) == len(moves)


def test_there_are_no_more_blocks_than_micro_batches():
    board = show.builder(ranks=1, micro_batches=1)
    board.press("F")
    board.press("F")
    assert board.said == "Rank 0 has every F already"


def test_the_blocker_is_outlined():
    board = played(4, [("F", 0, 0), ("F", 1, 1), ("F", 2, 2), ("F", 3, 3), ("B", 3, 4)])
    board.point(2, 4)
    board.press("B")
    assert board.said == "B0 on rank 2 needs B0 on rank 3, which ends at 5"
    marked = {n.get("class"): n for n in boxes.tree(board.figure(cursor=True).draw(WIDE, None)).iter("rect")}
    assert float(marked["lk-needs"].get("x")) == float(marked["lk-cursor"].get("x")), "both in slot 4"
    assert float(marked["lk-needs"].get("y")) > float(marked["lk-cursor"].get("y"))
    board.press("right")
    assert "lk-needs" not in "".join(board.figure(cursor=True).draw(WIDE, None).parts)


def test_keys_move_place_and_take_back():
    board = show.builder(4)
    for command in ("left", "up", "F", "F", "down", "first", "right", "F"):
        board.press(command)
    assert board.text.splitlines()[:2] == ["r0: F0 F1", "r1: F0"]
    assert board.cursor == (1, 2)
    board.press("last")
    assert board.said == "rank 1, slot 2: F1"
    board.press("back")
    assert board.said == "Taken back: F0 on rank 1, 1 in all"
    for _ in range(3):
        board.press("back")
    assert board.said == "There is nothing to take back"
    board.press("W")
    assert board.said == "There is no W here"


def test_the_next_legal_cells_are_dotted():
    board = played(4, [("F", 0, 0), ("F", 1, 1), ("F", 2, 2), ("F", 3, 3)])
    offers = [g.find("text").text for g in boxes.tree(board.figure().draw(WIDE, None)).iter("g")
              if g.get("class") == "lk-offer"]  # fmt: skip
    assert offers == ["F1", "B0"], "on ranks 0 and 3; F1 of the others waits for rank 0"
    board.point(0, 1)
    board.press("F")
    for rank, slot in ((1, 2), (2, 3)):
        board.point(rank, slot)
        board.press("F")
    board.point(3, 5)
    board.press("B")
    offers = [g.find("text").text for g in boxes.tree(board.figure().draw(WIDE, None)).iter("g")
              if g.get("class") == "lk-offer"]  # fmt: skip
    assert offers == ["F2", "B0", "F1"], "rank 1 waits for F2 of rank 0, and for B0 of rank 2"


def test_the_page_sends_keys_cells_and_text():
    board = show.builder(1)
    receive(board, {"cell": [0, 3]})
    assert board.cursor == (0, 3)
    receive(board, {"command": "F"})
    assert state(board)["text"] == "r0: F0\nr1:"
    receive(board, {"text": "r0: F0 B0 F1\nr1: B0 F0"})
    assert state(board)["said"].startswith("B0 on rank 1, at place 0, can never run")
    receive(board, {"text": "r0: F0 Q\nr1:"})
    assert state(board)["said"].startswith("line 1, word 2: 'Q' is no action")
    receive(board, {"text": one_f_one_b(2, 2).text()})
    assert board.title == "Complete, on par: makespan 6"
    receive(board, {"other": 3})
    assert isinstance(board.schedule, Schedule)
    assert board.schedule.actions == one_f_one_b(2, 2).actions


@pytest.fixture
def displayed(monkeypatch):
    """As in a notebook with a kernel: what is displayed, and updated, as (bundle, name of the display)."""
    make(show.builder(1)).close()  # what it loads asks for the true IPython
    seen = []

    def note(data, raw, display_id=None):
        seen.append((data, display_id))

    monkeypatch.delenv("LABKIT_STATIC", raising=False)
    kernel = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(live.sys.modules, "IPython", kernel)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=note, update_display=note))
    return seen


def test_live_it_is_a_picture_that_stays_and_a_grid_that_goes_with_the_kernel(displayed):
    board = show.builder(1)
    board._ipython_display_()
    (still, name), (form, _) = displayed
    assert set(still) == {"text/html", "text/plain"}
    assert set(form) == {"application/vnd.jupyter.widget-view+json"}
    assert name in still["text/html"]
    assert board.widget.hides == name
    board.widget._handle_custom_msg({"text": one_f_one_b(2, 2).text()}, [])
    assert board.widget.state["text"] == one_f_one_b(2, 2).text()
    assert displayed[-1][1] == name
    assert "Complete, on par" in displayed[-1][0]["text/html"]
    board.widget.close()


def test_without_a_kernel_it_is_a_picture_and_words(displayed, monkeypatch):
    monkeypatch.setenv("LABKIT_STATIC", "1")
    board = show.builder(4)
    with pytest.raises(NotImplementedError):  # IPython then asks for the bundle
        board._ipython_display_()
    data = board._repr_mimebundle_()
    assert set(data) == {"text/html", "text/plain"}
    assert "<script" not in data["text/html"]
    assert "par 22" in data["text/plain"]
    assert displayed == []


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_script_is_valid_javascript(tmp_path):
    script = tmp_path / "board.mjs"
    script.write_text(Path(show.__file__).with_name("board.js").read_text(encoding="utf-8"), encoding="utf-8")
    subprocess.run(["node", "--check", str(script)], check=True, capture_output=True)


@pytest.mark.browser
def test_the_grid_in_a_browser(tmp_path):
    """The widget's own page, with its messages handed to Python: keys, a click, a refusal and a text."""
    sync_api = pytest.importorskip("playwright.sync_api")
    board = show.builder(4)
    widget = make(board)
    board.show_again = lambda: None
    code = Path(show.__file__).with_name("board.js").read_text(encoding="utf-8")
    page_file = tmp_path / "page.html"
    script = code.replace("export default", "window.view =")
    page = f"<meta charset=utf-8><div id=here></div><script type=module>{script}</script>"
    page_file.write_text(page, encoding="utf-8")

    def send(message):
        widget._handle_custom_msg(message, [])
        return dict(widget.state)

    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 800, "height": 900})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.expose_function("python", send)
        page.goto(page_file.as_uri())
        page.evaluate(
            """data => {
                let changed = () => {};
                const model = {
                    get: (name) => data[name], off() {}, on: (_, f) => { changed = f; },
                    send: async (message) => { data.state = await window.python(message); changed(); },
                };
                window.view.render({ model, el: document.querySelector("#here") });
            }""",
            {"state": dict(widget.state), "words": dict(widget.words), "hides": widget.hides},
        )
        said = page.locator(".lk-say")
        page.locator(".lk-board").focus()
        for key in ("f", "f", "f", "f", "f"):
            page.keyboard.press(key)
        sync_api.expect(said).to_have_text("F4 is more than rank 0 may hold, 4: B0 has to free one first")
        page.locator(".lk-wide [data-cell='1 1']").click()
        page.keyboard.press("F")
        sync_api.expect(page.locator("textarea")).to_have_value("r0: F0 F1 F2 F3\nr1: F0\nr2:\nr3:")
        page.locator("textarea").fill(one_f_one_b(4, 8).text())
        page.keyboard.press("Control+Enter")
        sync_api.expect(page.locator(".lk-title")).to_contain_text("Complete, on par: makespan 22")
        assert all(box["height"] >= 24 for box in (b.bounding_box() for b in page.locator("button").all()))
        assert errors == []
        browser.close()
    widget.close()


def full() -> show.boardfigure.Builder:
    return show.builder(4).write(one_f_one_b(4, 8).text())


PICTURES = {
    "empty": lambda: show.builder(1).figure(),
    "round": lambda: played().figure(cursor=True),
    "full": lambda: full().figure(),
    "split": lambda: show.builder(5).write(zero_bubble_h1(4, 4).text()).figure(),
    "large": lambda: show.builder(ranks=8, micro_batches=16).write(gpipe(8, 16).text()).figure(),
}


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_is_small_and_nothing_lies_outside_or_on_another(name):
    for width in (WIDE, NARROW):
        drawing = PICTURES[name]().draw(width, None)
        whole = type(drawing)(drawing.width, drawing.height, drawing.parts)  # the strip repeats the names
        assert boxes.overlapping(whole) == []
        assert boxes.outside(whole) == []
        assert drawing.width <= width or drawing.strip is not None
    assert PICTURES["round"]().draw(WIDE, None).width == WIDE


@pytest.mark.parametrize("name", ["round"])
def test_a_picture_is_the_one_on_file(name):
    html = PICTURES[name]().to_html().replace(style("bars", "timeline", "board"), "")
    pretty = re.sub(r"(?=<(?:g|div|svg|p|tr|details|path|text)\b)", "\n", html).strip() + "\n"
    path = FIGURES / f"board_{name}.html"
    if os.environ.get("REGENERATE"):
        path.write_text(pretty, encoding="utf-8")
    assert pretty == path.read_text(encoding="utf-8"), f"{path.name} changed: look at it, then REGENERATE=1"


def test_rules_stay_inside_the_figure():
    css = Path(show.__file__).with_name("board.css").read_text(encoding="utf-8")
    css = re.sub(r"@media[^{]*{", "", re.sub(r"/\*.*?\*/", "", css, flags=re.S))
    for selector in re.findall(r"([^{}]+){", css):
        assert all(
            one.strip().startswith((".lk", ".jp-OutputArea-child:has(.lk-built)")) for one in selector.split(",")
        )


@pytest.mark.parametrize(("arguments", "message"), [
    ({"level": 6}, "level is 6: expected one of 1, 2, 3, 4, 5"), ({"level": True}, "level is True"),
    ({"level": 1, "ranks": 2}, "level is 1, but ranks"), ({"ranks": 2}, "micro_batches is None: expected both"),
    ({"cap": 2}, "expected both, or a level"), ({"ranks": 2, "micro_batches": 0}, "micro_batches is 0"),
])  # fmt: skip
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        show.builder(**arguments)


def test_the_keys_of_the_page_are_commands_too():
    board = show.builder(level=1)
    for key in ("f", "back", "F"):
        board.press(key)
    assert board.text.splitlines()[0] == "r0: F0"
