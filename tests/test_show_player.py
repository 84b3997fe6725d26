"""What a notebook stores: with a kernel a player in the page, in static mode a picture and words; and the guesses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from labkit import show
from labkit.show import guesses, live
from labkit.show.player import make, pack, payload, script

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports test files alone: their helper is beside them

import show_traces as traces

WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def kernel(monkeypatch):
    """As in a notebook: IPython is there and has a kernel."""
    monkeypatch.delenv("LABKIT_STATIC", raising=False)
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(live.sys.modules, "IPython", shell)


@pytest.fixture(autouse=True)
def _no_guesses(monkeypatch, tmp_path):
    monkeypatch.setattr(guesses, "_guesses", {})
    monkeypatch.setattr(guesses, "_units", {})
    monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path / "progress.json"))


def test_a_live_figure_carries_its_player_in_the_page(kernel):
    data = show.trace(traces.ring())._repr_mimebundle_()
    assert set(data) == {"text/html", "text/plain"}  # no widget view: it is an error message once the kernel is gone
    assert data["text/html"].count("<script>") == 1


def test_a_figure_of_one_frame_needs_no_player(kernel):
    assert "<script" not in show.trace(traces.deadlock())._repr_mimebundle_()["text/html"]


@pytest.mark.usefixtures("kernel")
def test_static_mode_has_pictures_and_words_only(monkeypatch):
    monkeypatch.setenv("LABKIT_STATIC", "1")
    for shown in (show.trace(traces.ring()), show.predict("k", "How many?", unit="B")):
        data = shown._repr_mimebundle_()
        assert set(data) == {"text/html", "text/plain"}
        assert "<script" not in data["text/html"]


def test_static_mode_shows_the_last_frame_and_lists_every_step():
    html = show.trace(traces.ring(4, 3)).to_html()
    assert "step 6 of 6" in html
    assert set(re.findall(r"<td>(\d)</td>", html)) == set("123456")


def test_without_a_kernel_nothing_is_live(monkeypatch):
    monkeypatch.setitem(live.sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert "<script" not in show.trace(traces.ring())._repr_mimebundle_()["text/html"]


def test_equal_parts_are_sent_once():
    frames = [("a", "b"), ("a", "", "c"), ("a", "b")]
    packed = pack(frames)
    assert packed["parts"] == ["a", "b", "c"]
    assert ["".join(packed["parts"][i] for i in f) for f in packed["frames"]] == ["".join(f) for f in frames]


@pytest.mark.parametrize("name", traces.EVERY)
def test_the_player_gets_a_frame_and_a_sentence_a_step(name):
    figure = show.trace(traces.EVERY[name]())
    data = payload(figure)
    for layout, width in (("wide", 720), ("narrow", 300)):
        built = ["".join(data[layout]["parts"][i] for i in f) for f in data[layout]["frames"]]
        assert built == ["".join(figure.draw(width, k).parts) for k in range(len(figure.says))]
    assert len(data["says"]) == len(figure.says)


def test_the_payload_stays_small():
    assert len(script(show.trace(traces.ring(4, 3)))) < 60_000


def test_a_script_cannot_be_closed_by_a_name():
    text = script(show.trace(traces.hostile()))
    assert text.count("<") - text.split("attach(document", 1)[0].count("<") == 1  # only the closing tag


def test_two_players_share_nothing():
    """Each script finds its own figure: nothing global, no id."""
    text = script(show.trace(traces.ring()))
    assert text.startswith("<script>{")
    assert "currentScript.previousElementSibling" in text
    assert not re.search(r"window\.|getElementById|querySelector\('#", text)


def test_the_widget_is_the_same_player():
    widget = make(show.trace(traces.ring()))
    try:
        assert widget.data["says"] == list(show.trace(traces.ring()).says)
        assert "data-lm-suppress-shortcuts" in widget._esm
        assert not re.search(r"^\s*import |https?://", str(widget._esm), flags=re.M)
    finally:
        widget.close()


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_script_is_valid_javascript(tmp_path):
    text = script(show.trace(traces.ring())).removeprefix("<script>").removesuffix("</script>")
    (tmp_path / "player.js").write_text(text, encoding="utf-8")
    subprocess.run(["node", "--check", str(tmp_path / "player.js")], check=True, capture_output=True)
    json.loads(text[text.index("previousElementSibling,") + 23 : -2])


# Guesses


def test_a_guess_is_noted_and_shown_again():
    question = show.predict("bytes", "How many bytes?", unit="B")
    assert show.guess("bytes") is None
    assert question.note("1,536") == "Noted: 1,536 B"
    assert show.guess("bytes") == 1536
    again = show.predict("bytes", "How many bytes?", unit="B")
    assert str(again).endswith("Noted: 1,536 B")
    assert again.widget.children[1].children[0].value == "1536"


def test_the_form_notes_what_is_written():
    form = show.predict("bytes", "How many bytes?", unit="B").widget
    field, _, button, status = form.children[1].children
    field.value = "12.5"
    button.click()
    assert show.guess("bytes") == 12.5
    assert status.value == "Noted: 12.5 B"


def test_a_choice_is_noted():
    question = show.predict("who", "Who sends most?", choices=["rank 0", "all the same"])
    _, radio, status = question.widget.children
    assert radio.value is None
    assert question.note(None) == "Choose one first."
    radio.value = "rank 0"  # to choose is to note
    assert show.guess("who") == "rank 0"
    assert status.value == "Noted: rank 0"
    assert (
        show.predict("who", "Who sends most?", choices=["rank 0", "all the same"]).widget.children[1].value == "rank 0"
    )


def test_enter_in_the_field_notes_the_number():
    field = show.predict("bytes", "How many bytes?", unit="B").widget.children[1].children[0]
    assert not field.continuous_update, "else every digit would be a guess"
    field.value = "32"
    assert show.guess("bytes") == 32


def test_the_answer_stands_beside_the_guess():
    assert repr(show.reveal("bytes", 32, unit="B")) == "Here: 32 B · you noted no guess"
    show.predict("bytes", "How many bytes?", unit="B").note("24")
    assert repr(show.reveal("bytes", 32, unit="B")) == "Here: 32 B · you guessed 24 B"
    with pytest.raises(TypeError, match="expected a number or text"):
        show.reveal("bytes", None)


def test_no_number_is_answered_not_raised():
    question = show.predict("bytes", "How many bytes?")
    assert question.note("many") == "“many” is not a number; write one such as 12.5."
    assert question.note("nan") == "“nan” is not a number; write one such as 12.5."
    assert show.guess("bytes") is None


def test_a_number_and_its_unit_outlive_the_kernel(monkeypatch):
    show.predict("bytes", "How many bytes?", unit="MiB").note("1.5")
    monkeypatch.setattr(guesses, "_guesses", {})
    monkeypatch.setattr(guesses, "_units", {})
    assert show.guess("bytes") == 1.5
    assert guesses.guessed("bytes", "B") is None, "the unit is not known before the question is asked again"
    show.predict("bytes", "How many bytes?", unit="MiB")
    assert guesses.guessed("bytes", "B") == 1.5 * 2**20


@pytest.fixture
def displayed(kernel, monkeypatch):
    """What is displayed, and updated, as (bundle, the name of the display)."""
    seen = []

    def note(data, raw, display_id=None):
        assert raw
        seen.append((data, display_id))

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=note, update_display=note))
    return seen


def test_a_live_question_is_text_that_stays_and_a_form_that_goes_with_the_kernel(displayed):
    question = show.predict("who", "Who sends <b>most</b>?", choices=["rank 0", "all"])
    question._ipython_display_()
    (text, name), (form, _) = displayed
    assert set(form) == {WIDGET}
    assert set(text) == {"text/html", "text/plain"}
    assert text["text/plain"] == "Your guess first: Who sends <b>most</b>?\n  - rank 0\n  - all"
    for part in ("Who sends &lt;b&gt;most&lt;/b&gt;?", "<li>rank 0</li>", "To note a guess, run this cell.", name):
        assert part in text["text/html"]
    assert f".{name} .lk-still" in question.widget.children[0].value, "the form hides what it says itself"
    question.widget.children[1].value = "all"
    assert [shown for _, shown in displayed] == [name, None, name]
    assert "Noted: all" in displayed[-1][0]["text/html"]


@pytest.mark.parametrize("without", ["kernel", "ipywidgets"])
def test_without_a_form_the_question_is_one_output(displayed, monkeypatch, without):
    if without == "kernel":
        monkeypatch.setenv("LABKIT_STATIC", "1")
    else:
        monkeypatch.setitem(sys.modules, "ipywidgets", None)
    question = show.predict("bytes", "How many bytes?", unit="B")
    with pytest.raises(NotImplementedError):  # IPython then asks for the bundle
        question._ipython_display_()
    assert displayed == []
    data = question._repr_mimebundle_()
    assert set(data) == {"text/html", "text/plain"}
    assert "run this cell" not in data["text/html"]


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"key": 3}, TypeError, "key is 3"),
    ({"key": ""}, ValueError, "key is empty"),
    ({"question": None}, TypeError, "question is None"),
    ({"unit": 3}, TypeError, "unit is 3"),
    ({"choices": "abc"}, TypeError, "choices is 'abc': expected a list"),
    ({"choices": [1, 2]}, TypeError, "expected a list of texts"),
    ({"choices": ["a"]}, ValueError, "at least two"),
    ({"choices": ["a", "a"]}, ValueError, "all different"),
    ({"choices": ["a", "b"], "unit": "B"}, ValueError, "choices are given too"),
])  # fmt: skip
def test_bad_questions_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        show.predict(**{"key": "k", "question": "q", **arguments})


def test_a_guess_is_asked_for_by_text():
    with pytest.raises(TypeError, match="key is 3"):
        show.guess(3)
