"""`show.predict`: the learner's guess before the answer. It is noted, shown again, and never stands in the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import isfinite
from typing import Any
from uuid import uuid4

from labkit import progress
from labkit.show.figure import style
from labkit.show.live import is_live
from labkit.show.svg import el, escape
from labkit.show.words import say

_guesses: dict[str, float | str] = {}
#: Long answers need more than the one line that ipywidgets gives them.
_WRAPPED = ".lk-ask label{height:auto;white-space:normal;line-height:1.4;margin:3px 0}"
#: The form comes with the kernel and goes with it; what JupyterLab then says in its place helps nobody.
_NO_FORM = (
    ".jp-OutputArea-child:has(.lk-asked)+.jp-OutputArea-child .jp-OutputArea-output.jupyter-widgets:not(:has(*))"
    "{display:none}"
)
_units: dict[str, str | None] = {}
#: Units that people guess in, as multiples of bytes and of seconds.
_SCALES = {
    "B": {"B": 1, **{f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)}, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9},
    "s": {"s": 1, "ms": 1e-3, "µs": 1e-6, "us": 1e-6},
}


def predict(key: str, question: str, choices: Sequence[str] | None = None, unit: str | None = None) -> Question:
    """Ask for a guess: one of `choices`, or a number.

    Args:
        key: Under what name the guess is kept; `guess` gives it back. Asking again shows the former guess.
        question: What the learner is asked.
        choices: Answers to choose from; left out, a number is asked for.
        unit: What the number counts, such as ``"B"``; only without `choices`.

    Returns:
        A form, which a notebook shows when it is the cell's last line. The question stays where no kernel runs.

    Raises:
        TypeError: `key`, `question`, `unit` or a choice is no text.
        ValueError: `key` or `question` is empty, there are fewer than two choices or two the same, or both
            `choices` and `unit` are given.

    >>> print(predict("ring-bytes", "How many bytes does each rank send?", unit="B"))
    Your guess first: How many bytes does each rank send? (B)
    """
    for name, value in (("key", key), ("question", question), *([("unit", unit)] if unit is not None else [])):
        if not isinstance(value, str):
            raise TypeError(f"{name} is {value!r}: expected text")
        if not value.strip():
            raise ValueError(f"{name} is empty: expected text")
    if choices is not None:
        _check_choices(choices, unit)
    _units[key] = unit
    return Question(key, question, None if choices is None else tuple(choices), unit)


def _check_choices(choices: Sequence[str], unit: str | None) -> None:
    if not isinstance(choices, (list, tuple)) or not all(isinstance(c, str) for c in choices):
        raise TypeError(f"choices is {choices!r}: expected a list of texts, such as ['8 B', '16 B']")
    if len(choices) < 2 or len(set(choices)) < len(choices):
        raise ValueError(f"choices is {choices!r}: expected at least two, all different")
    if unit is not None:
        raise ValueError(f"unit is {unit!r}, but choices are given too: write the unit into the choices")


def guess(key: str) -> float | str | None:
    """The guess noted under `key`: a number, one of the choices, or ``None`` when there is none yet.

    Raises:
        TypeError: `key` is no text.

    >>> guess("never asked") is None
    True
    """
    if not isinstance(key, str):
        raise TypeError(f"key is {key!r}: expected the text that predict was given")
    if key not in _guesses and (kept := progress.read()["guesses"].get(key, {})):
        _guesses[key] = kept["guess"]
    return _guesses.get(key)


def guessed(key: str, unit: str) -> float | None:
    """The number guessed under `key`, in `unit`: a guess of 12 MiB is 12582912 B.

    ``None`` also where the question was not asked in this kernel: in which unit the guess is meant, only it knows.

    Raises:
        ValueError: the guess was asked for in another kind of unit.
    """
    value = guess(key)
    if value is None or isinstance(value, str) or key not in _units:
        return None
    asked = _units[key]
    if asked is None or asked == unit:
        return float(value)
    scales = _SCALES.get(unit, {})
    if asked not in scales:
        raise ValueError(f"the guess {key!r} was asked for in {asked}, which cannot be drawn in {unit or 'no unit'}")
    return float(value) * scales[asked]


def reveal(key: str, answer: float | str, unit: str | None = None) -> Revealed:
    """Put the answer beside the guess that was noted under `key`.

    Args:
        key: What `predict` was given.
        answer: What was measured.
        unit: What a number counts.

    Raises:
        TypeError: `answer` is neither number nor text.

    >>> reveal("never asked", 32, unit="B")
    Here: 32 B · you noted no guess
    """
    if isinstance(answer, bool) or not isinstance(answer, (int, float, str)):
        raise TypeError(f"answer is {answer!r}: expected a number or text")
    noted = guess(key)
    progress.note_answer(key, answer)
    told = say("reveal.none") if noted is None else say("reveal.guessed", guess=_told(noted, unit))
    return Revealed(f"{say('reveal.answer', answer=_told(answer, unit))} · {told}")


class Revealed(str):
    """A line that shows itself without quotation marks."""

    def __repr__(self) -> str:
        return str(self)


def _told(value: float | str, unit: str | None) -> str:
    words = value if isinstance(value, str) else f"{value:,.15g}"
    return f"{words} {unit}" if unit else words


def _number(text: str) -> float | None:
    """A finite number as people write it, "1,536" too; else ``None``."""
    try:
        value = float(text.replace(",", "").replace("_", ""))
    except ValueError:
        return None
    return value if isfinite(value) else None


class Question:
    """A question and, once noted, the learner's guess."""

    def __init__(self, key: str, question: str, choices: tuple[str, ...] | None, unit: str | None) -> None:
        self.key, self.question, self.choices, self.unit = key, question, choices, unit
        self.name = f"lk-{uuid4().hex}"  #: of its text in a page, which the form and a later guess refer to
        self.is_displayed = False

    def note(self, answer: str | None) -> str:
        """Keep an answer as the form gives it, and say what was kept, or why nothing was."""
        if self.choices is not None:
            if answer is None or answer not in self.choices:
                return say("predict.choose")
            _guesses[self.key] = answer
            progress.note_guess(self.key, answer)
        else:
            number = _number(answer or "")
            if number is None:
                return say("predict.bad", text=answer or "")
            _guesses[self.key] = number
            progress.note_guess(self.key, number)
        self._show_again()
        return self.status()

    def status(self) -> str:
        """What is noted now."""
        noted = guess(self.key)
        if noted is None:
            return say("predict.none")
        return say("predict.noted", guess=_told(noted, self.unit))

    @cached_property
    def widget(self) -> Any:
        """The form without the question, made when first asked for (it needs ipywidgets)."""
        import ipywidgets as widgets

        rules = f"{_WRAPPED}.{self.name} .lk-still{{display:none}}"
        head = widgets.HTML(el("style", rules), layout=widgets.Layout(display="none"))  # its rules hold all the same
        field = self._field(widgets)
        status = widgets.HTML(escape(self.status()))

        def noted(_: Any) -> None:
            status.value = escape(self.note(field.value))

        if self.choices is not None:  # to choose is to note
            field.observe(noted, "value")
            return widgets.VBox([head, field, status])
        field.observe(noted, "value")  # Enter, or leaving the field
        button = widgets.Button(description=say("predict.button"), layout=widgets.Layout(width="auto"))
        button.on_click(noted)
        unit = [widgets.Label(self.unit)] if self.unit else []
        row = widgets.HBox([field, *unit, button, status], layout=widgets.Layout(flex_flow="wrap"))
        return widgets.VBox([head, row])

    def _field(self, widgets: Any) -> Any:
        former = guess(self.key)
        if self.choices is None:
            before = f"{former:.15g}" if isinstance(former, float) else ""
            layout = widgets.Layout(width="10em")
            return widgets.Text(before, placeholder=say("predict.number"), continuous_update=False, layout=layout)
        chosen = former if former in self.choices else None
        field = widgets.RadioButtons(options=self.choices, value=chosen, layout=widgets.Layout(width="auto"))
        field.add_class("lk-ask")
        return field

    def to_html(self) -> str:
        return self._html(live=False)

    def _html(self, live: bool) -> str:
        """The question; in a live notebook the form below it hides what it says itself, as long as it is there."""
        pill = el("span", escape(say("predict.heading")), class_="lk-pill")
        items = el("ul", *(el("li", escape(c)) for c in self.choices)) if self.choices else ""
        status = el("p", escape(self.status()), class_="lk-note") if guess(self.key) is not None else ""
        title = el("p", escape(self._ask), " ", pill, class_="lk-title")
        if not live:
            return el("div", el("style", style()), title, items, status, class_="lk")
        still = el("div", items, status, el("p", escape(say("predict.again")), class_="lk-note"), class_="lk-still")
        return el("div", el("style", style() + _NO_FORM), title, still, class_=f"lk lk-asked {self.name}")

    @property
    def _ask(self) -> str:
        return f"{self.question} ({self.unit})" if self.unit else self.question

    def __str__(self) -> str:
        lines = [f"{say('predict.heading')}: {self._ask}", *(f"  - {c}" for c in self.choices or ())]
        return "\n".join([*lines, self.status()] if guess(self.key) is not None else lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/html": self.to_html(), "text/plain": str(self)}

    def _ipython_display_(self) -> None:
        """Live, two outputs: the question, which stays in the notebook, and the form, which works with the kernel."""
        if not is_live():
            raise NotImplementedError  # IPython goes on to the bundle above
        from IPython.display import display

        try:
            form = self.widget._repr_mimebundle_()
        except ImportError:  # without ipywidgets the question stands all the same
            raise NotImplementedError from None
        self.is_displayed = True
        display(self._text(), raw=True, display_id=self.name)
        display({kind: data for kind, data in form.items() if kind != "text/plain"}, raw=True)

    def _show_again(self) -> None:
        """Put a new guess into the text that stands in the notebook, for who opens it later."""
        if self.is_displayed:
            from IPython.display import update_display

            update_display(self._text(), raw=True, display_id=self.name)

    def _text(self) -> dict[str, str]:
        return {"text/html": self._html(live=True), "text/plain": str(self)}


def guessed_numbers(guess: Any, labels: Mapping[str, Any], unit: str) -> tuple[dict[str, float], float | None]:
    """The guesses that are numbers: those of single labels, and the one for all."""
    if guess is None or isinstance(guess, str):
        return {}, None if guess is None else guessed(guess, unit)
    if not isinstance(guess, Mapping):
        raise TypeError(f"guess is {guess!r}: expected the key of a show.predict, or label → key")
    if odd := [label for label in guess if label not in labels]:
        raise ValueError(f"guess has {odd[0]!r}, but the labels are {', '.join(labels)}")
    numbers = {label: guessed(key, unit) for label, key in guess.items()}
    return {label: n for label, n in numbers.items() if n is not None}, None
