"""`show.layer`: what is seen of a real layer, where boxes, cracks and symbols stand, and what is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import labkit
from labkit import show
from labkit.show.figure import NARROW, WIDE, style
from labkit.show.layerstages import layers_of
from labkit.show.player import payload

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports test files alone: their helpers are beside them

import programs_layer as programs
import show_boxes as boxes

FIGURES = Path(__file__).parent / "figures"
PLACES = ["X", "LN", "f", "QKV", "attn", "proj", "g", "X", "LN", "f", "W₁", "GeLU", "W₂", "g", "Y"]
#: Of each place: its width as a multiple of h, and the kind, in forward and in backward.
HELD = {"X": (1, "whole", "whole"), "LN": (1, "whole", "whole"), "QKV": (3, "columns", "columns"),
        "attn": (1, "columns", "columns"), "proj": (1, "share", "whole"), "W₁": (4, "columns", "columns"),
        "GeLU": (4, "columns", "columns"), "W₂": (1, "share", "whole"), "Y": (1, "whole", "whole")}  # fmt: skip
#: Shoeybi 2019, figure 3; Korthikanti 2022, figure 5, and the input gathered again for the weights' gradients.
CALLS = {
    "tp": {("f", "forward"): [], ("g", "forward"): ["all_reduce"],
           ("g", "backward"): [], ("f", "backward"): ["all_reduce"]},
    "sp": {("f", "forward"): ["all_gather"], ("g", "forward"): ["reduce_scatter"],
           ("g", "backward"): ["all_gather"], ("f", "backward"): ["all_gather", "reduce_scatter"]},
}  # fmt: skip


def made(how: str = "tp", ranks: int = 4, b: int = 2, s: int = 8, h: int = 16) -> list[show.LayerStage]:
    """The stages of a layer, as the papers have them."""
    stages = []
    for phase, order in (("forward", PLACES), ("backward", PLACES[::-1])):
        for n, name in enumerate(order):
            at = n if phase == "forward" else len(PLACES) - 1 - n
            part = "attention" if at < 7 else "mlp"
            if name in "fg":
                calls = CALLS[how][name, phase] or [None]
                size = 4 * b * s * h
                sent = size * (ranks - 1) // ranks * (2 if how == "tp" else 1)
                stages += [show.LayerStage(name=name, phase=phase, part=part, collective=c, nbytes=size if c else 0,
                                           sent=sent if c else 0) for c in calls]  # fmt: skip
                continue
            times, *kinds = HELD[name]
            kind = kinds[phase == "backward"]
            if kind == "whole" and how == "sp" and name not in ("proj", "W₂"):
                kind = "tokens"
            shape = (b, s // ranks if kind == "tokens" else s, h * times // (ranks if kind == "columns" else 1))
            stages.append(show.LayerStage(name=name, phase=phase, part=part, shapes=(shape,) * ranks, kind=kind,
                                          equal=True if kind == "whole" else None))  # fmt: skip
    return stages


def broken(at: int = 1) -> list[show.LayerStage]:
    stages = made()
    stages[at] = replace(stages[at], equal=False)
    return stages


def column(figure, x: float, width=WIDE, frame=None, cls: str = "lk-box") -> list[tuple[float, float]]:
    """Tops and heights of the boxes around `x`, of those in groups of a class."""
    found = []
    for group in boxes.tree(figure.draw(width, frame)).iter("g"):
        if cls in (group.get("class") or "").split():
            for node in group.iter("rect"):
                left, wide = float(node.get("x")), float(node.get("width"))
                if left <= x <= left + wide:
                    found.append((float(node.get("y")), float(node.get("height"))))
    return found


def place(figure, name: str, width=WIDE) -> list[float]:
    """The middles of the columns of this name."""
    tree = boxes.tree(figure.draw(width, None))
    return [float(n.get("x")) for n in tree.iter("text") if n.text == name and n.get("class") is None]


def symbols(figure, cls: str, width=WIDE, frame=None) -> list[list[tuple[float, float]]]:
    tree = boxes.tree(figure.draw(width, frame))
    return [list(boxes.points(n.get("d"))) for n in tree.iter("path") if cls in n.get("class", "").split()]


def words(figure, width=WIDE, frame=None) -> list[str]:
    return [w for _, w, _ in boxes.texts(figure.draw(width, frame))]


# Real layers


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("how", ["tp", "sp"])
def test_a_real_layer_is_that_of_the_papers(how, ranks):
    """Places, shapes, who holds what, collectives and bytes, against Megatron-LM's own figures and formulas."""
    layer = layers_of(labkit.run(programs.one_step, how, ranks=ranks).values)[""]
    assert list(layer.stages) == made(how, ranks)


def test_of_eight_collectives_none_is_a_second_gather_where_the_input_is_kept():
    layer = layers_of(labkit.run(programs.one_step, "sp-keep", ranks=2).values)[""]
    assert [s.collective for s in layer.calls("backward")] == ["all_gather", "reduce_scatter"] * 2


def test_llama_with_one_key_head_adds_up_its_matrices_too():
    run = labkit.run(programs.one_step, "tp", "tiny_llama", kv_heads=1, ranks=4)
    layer = layers_of(run.values)[""]
    d, h = 4, programs.HIDDEN
    assert [s.nbytes for s in layer.at(("attention", "f"), "backward")] == [1024, 4 * d * h, 4 * d * h]
    assert {s.name for s in layer.stages} >= {"RMS", "SiLU"}
    assert layer.at(("attention", "QKV"), "forward")[0].shapes == ((2, 8, 3 * d),) * 4


def test_a_native_collective_hides_what_it_sends():
    figure = show.layer(labkit.run(programs.one_step, algorithm="native", ranks=2).values)
    assert "4 of 4 collectives" in words(figure)
    assert [row[-1] for row in figure.twin.rows if row[6]] == [""] * 4


def test_digests_are_of_what_enters_and_of_the_norm():
    stages = labkit.run(programs.one_step, ranks=2).values[1]["stages"]
    assert tuple(s["digest"] for s in stages[:2]) == programs.norm_digest()


def test_a_wrong_seed_cracks_the_first_tensor():
    figure = show.layer(labkit.run(programs.wrong_seed, ranks=2).values)
    assert figure.title == "The ranks differ where they should hold the same bits; first in forward, attention, X"
    assert symbols(figure, "lk-crack")


def test_without_f_forward_is_whole_and_backward_cracked():
    figure = show.layer(labkit.run(programs.without_f, ranks=2).values)
    assert figure.title.endswith("first in backward, MLP, gradient at LN")
    assert len(symbols(figure, "lk-solid")) == 2
    assert len(symbols(figure, "lk-hollow")) == 6


def test_messages_outside_a_collective_are_seen():
    layer = layers_of(labkit.run(programs.by_hand, ranks=2).values)[""]
    (g,) = layer.at(("attention", "g"), "forward")
    assert (g.collective, g.sent) == ("send", 1024)


def test_a_collective_made_of_others_is_one():
    layer = layers_of(labkit.run(programs.two_halves, ranks=2).values)[""]
    (g,) = layer.at(("attention", "g"), "forward")
    assert (g.collective, g.nbytes, g.sent) == ("all_reduce", 1024, 1024)


def test_watching_changes_nothing():
    assert labkit.run(programs.leaves_no_trace, ranks=2).values == [True, True]


def test_what_watch_refuses():
    run = labkit.run(programs.refusals, ranks=2)
    assert run.values[0][0].startswith("watch was given Linear: expected a layer, such as model.blocks[0]")
    assert "call tensor_parallel.parallelize(model) first" in run.values[0][1]
    assert run.values[0][2].startswith("nobody records this process's collectives")
    assert "a second time under watch" in labkit.run(programs.twice, ranks=2).values[0]


# The picture


def test_f_and_g_are_mirrored_and_four_of_them_are_solid():
    figure = show.layer(made())
    assert figure.title == "4 collectives in the layer: g in forward, f in backward"
    for width in (WIDE, NARROW):
        fs, gs = (place(figure, name, width) for name in "fg")
        for cls, above, below in (("lk-solid", gs, fs), ("lk-hollow", fs, gs)):
            found = symbols(figure, cls, width)  # forward from left to right, then backward from right to left
            assert [left + 14 for (left, _), *_ in found] == pytest.approx([*above, *below[::-1]], abs=0.11)
            heights = [y for (_, y), *_ in found]
            assert heights[0] < heights[3]
            assert heights[1] < heights[2]


def test_a_replicated_tensor_is_one_box_and_a_shard_one_a_lane():
    figure = show.layer(made(ranks=4))
    (qkv,) = place(figure, "QKV")
    forward, backward = column(figure, qkv)[:4], column(figure, qkv)[4:]
    assert len(forward) == len(backward) == 4
    for x in place(figure, "LN"):
        above, below = column(figure, x)
        assert above == (forward[0][0], forward[-1][0] + forward[-1][1] - forward[0][0])
        assert below == (backward[0][0], backward[-1][0] + backward[-1][1] - backward[0][0])
    (proj,) = place(figure, "proj")
    assert len(column(figure, proj)) == 4 + 1, "shares in forward, the same gradient on every rank in backward"
    assert words(figure).count("×12") == 2 * 4
    assert not symbols(figure, "lk-crack")


def test_wide_boxes_split_along_the_sequence_in_sp():
    figure = show.layer(made("sp"))
    assert figure.title == "10 collectives in the layer: f and g in forward, f and g in backward"
    for x in [*place(figure, "X"), *place(figure, "LN"), *place(figure, "Y")]:
        assert len(column(figure, x)) == 4 + 4
    assert "2×2" in words(figure)
    left, right = 0, 0
    for first, second, third, *_ in symbols(figure, "lk-solid"):
        assert second[0] == third[0], "a triangle"
        left, right = left + (first[0] < second[0]), right + (first[0] > second[0])
    assert (left, right) == (6, 4), "gathers point left, scatters right"
    assert any("◁ all-gather, ▷ reduce-scatter" in note for note in figure.notes)


def test_a_crack_is_between_all_lanes_and_each_rank_has_its_shape():
    whole, cracked = show.layer(made()), show.layer(broken())
    for width in (WIDE, NARROW):
        assert len(symbols(cracked, "lk-crack", width)) == 3
        assert len(words(cracked, width)) - len(words(whole, width)) == 3 * 2
    unknown = [replace(s, equal=None) for s in made()]
    assert not symbols(show.layer(unknown), "lk-crack")
    assert "whole on every rank" in str(show.layer(unknown))


def test_steps_count_the_collectives_and_hide_what_is_to_come():
    figure = show.layer(made())
    counted = [next(w for w in words(figure, WIDE, k) if " of 4 collectives" in w) for k in range(31)]
    assert [int(w[0]) for w in counted] == [4] + [0] * 6 + [1] * 7 + [2] * 7 + [3] * 7 + [4] * 3
    assert counted[21] == "3 of 4 collectives · each rank sent 4.5 KiB of 6 KiB"
    first = figure.draw(WIDE, 1)
    assert [w for _, w, _ in boxes.texts(first)].count("×16") == 1, "the shape of X alone"
    assert figure.draw(WIDE, 0) == figure.draw(WIDE, None)
    assert figure.says[0] == figure.title
    assert figure.says[7] == "forward, attention, g: all-reduce 1 KiB, 1 of 4 collectives"
    assert figure.says[3] == "forward, attention, f: nothing is sent"
    assert figure.says[4] == "forward, attention, QKV: 2×8×12 each, each rank has its columns"


def test_the_stage_of_a_step_is_marked():
    figure = show.layer(made())
    for frame in range(1, len(figure.says)):
        tree = boxes.tree(figure.draw(WIDE, frame))
        (now,) = [g for g in tree.iter("g") if "lk-now" in (g.get("class") or "").split()]
        assert now.find("title").text == figure.says[frame]


def test_two_layers_are_compared_step_by_step():
    figure = show.layer({"TP": made(), "TP + SP": made("sp")})
    assert figure.title == ("TP: 4 collectives, 6 KiB sent by each rank; "
                            "TP + SP: 10 collectives, 7.5 KiB sent by each rank")  # fmt: skip
    assert figure.start == 31, "without a kernel the last layer is shown, whole"
    assert "TP + SP (2 of 2)" in words(figure)
    assert "TP (1 of 2)" in words(figure, WIDE, 30)
    assert place(figure, "QKV") == place(show.layer({"TP": made(), "b": made()}), "QKV")
    assert len({figure.draw(WIDE, k).height for k in range(len(figure.says))}) == 1
    wrong = show.layer({"right": made(), "wrong": broken()}).title
    assert wrong.startswith("right: 4 collectives, 6 KiB sent by each rank; wrong: The ranks differ")
    assert len(payload(figure)["wide"]["frames"]) == len(figure.says) == 31 + 33


def test_the_twin_is_what_is_drawn():
    table = show.layer(made("sp", ranks=2)).twin
    assert table.rows[0] == ("", "forward", "attention", "X", "2×4×16 each", "each rank has its tokens", "", "", "")
    assert table.rows[2] == ("", "forward", "attention", "f", "", "", "gather", "1 KiB", "512 B")
    assert table.rows[-1][3] == "gradient at X"
    odd = made(ranks=2)
    odd[3] = replace(odd[3], shapes=((2, 8, 3), (2, 8, 5)))
    assert show.layer(odd).twin.rows[3][4] == "rank 0 2×8×3, rank 1 2×8×5"


def test_ranks_keep_their_numbers():
    values = labkit.run(programs.one_step, ranks=4).values[2:]
    figure = show.layer([{**one} for one in values])
    assert {"rank 2", "rank 3"} <= set(words(figure))
    assert {"2", "3"} <= set(words(figure, NARROW))


PICTURES = {
    "tp": lambda: show.layer(made()),
    "sp": lambda: show.layer(made("sp")),
    "two": lambda: show.layer({"TP": made(), "TP + SP": made("sp")}),
    "cracked": lambda: show.layer(broken()),
    "one_rank": lambda: show.layer(made(ranks=1)),
    "eight": lambda: show.layer(made("sp", ranks=8)),
    "large": lambda: show.layer(made(b=4, s=4096, h=8192)),
    "forward": lambda: show.layer([s for s in made() if s.phase == "forward"]),
    "nothing": lambda: show.layer([replace(s, collective=None) for s in made()]),
    "long": lambda: show.layer({"a very long name of a layer, which no row has room for at all": made(), "b": made()}),
}  # fmt: skip


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_is_small_and_nothing_lies_outside_or_on_another(name):
    figure = PICTURES[name]()
    for width in (WIDE, NARROW):
        for frame in range(len(figure.says)):
            drawing = figure.draw(width, frame)
            assert drawing.width <= width
            assert boxes.outside(drawing) == []
            assert boxes.overlapping(drawing) == []


@pytest.mark.parametrize("name", ["tp", "sp", "cracked"])
def test_a_picture_is_the_one_on_file(name):
    html = PICTURES[name]().to_html().replace(style("layer"), "")
    pretty = re.sub(r"(?=<(?:g|div|svg|p|tr|details|path|text)\b)", "\n", html).strip() + "\n"
    path = FIGURES / f"layer_{name}.html"
    if os.environ.get("REGENERATE"):
        path.write_text(pretty, encoding="utf-8")
    assert pretty == path.read_text(encoding="utf-8"), f"{path.name} changed: look at it, then REGENERATE=1"


def test_shapes_lie_inside_their_boxes():
    for name in ("tp", "sp", "eight", "large"):
        for width in (WIDE, NARROW):
            drawing = PICTURES[name]().draw(width, None)
            tree = boxes.tree(drawing)
            for group in tree.iter("g"):
                if "lk-box" not in (group.get("class") or "").split():
                    continue
                rects = [(float(r.get("x")), float(r.get("x")) + float(r.get("width"))) for r in group.iter("rect")]
                for node in group.iter("text"):
                    half = show.svg.text_width(node.text, 12) / 2
                    x = float(node.get("x"))
                    assert any(a <= x - half and x + half <= b for a, b in rects), (name, width, node.text)


def test_fills_have_outlines_and_system_colours():
    css = Path(show.__file__).with_name("layer.css").read_text(encoding="utf-8")
    rules = re.sub(r"/\*.*?\*/", "", css, flags=re.S)
    for selector in re.findall(r"([^{}]+){", rules):
        assert all(one.strip().startswith(".lk") for one in selector.split(",")), selector
    assert not re.search(r"#[0-9a-f]{3,6}\b", rules), "its colours are figure.css's, which knows forced colours"


@pytest.mark.soak
def test_pictures_are_the_same_in_every_run():
    code = "import test_show_layer as t; print([(n, f().to_html()) for n, f in t.PICTURES.items()])"
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
    there = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True, text=True)
    assert there.stdout == f"{[(n, f().to_html()) for n, f in PICTURES.items()]}\n"


def test_names_are_escaped():
    html = show.layer({"<b>a</b>": [replace(s, name=s.name.replace("Y", "<i>")) for s in made()]}).to_html()
    assert "<b>" not in html
    assert "<i>" not in html


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: show.layer(3), TypeError, "values is int: pass the values of a run whose ranks return what"),
    (lambda: show.layer([]), TypeError, "values is list: pass the values"),
    (lambda: show.layer([None, None]), TypeError, r"values\[0\] is NoneType: pass the values"),
    (lambda: show.layer({}), ValueError, "values is empty"),
    (lambda: show.layer({"rank": 0, "stages": []}), TypeError, "values are those of one rank: expected all ranks'"),
    (lambda: show.layer({"a": "b"}), TypeError, r"values\['a'\] is str"),
    (lambda: show.layer([{"rank": 0, "stages": []}]), ValueError, "values holds no tensor: run the layer inside watch"),
    (lambda: show.layer(made()[15:]), ValueError, "in backward only: expected each place in forward too"),
    (lambda: show.layer([*made(), made(ranks=2)[0]]), ValueError, r"have shapes of \[2, 4\] ranks: expected"),
    (lambda: show.layer(made(ranks=32, s=32, h=32)), ValueError, "values has 32 ranks: expected at most 16"),
    (lambda: show.layer({"a": made(), "b": made(ranks=2)}), ValueError, "'b' has other ranks or places than 'a'"),
    (lambda: show.LayerStage(name="X", phase="up"), ValueError, "phase of 'X' is 'up': expected forward, backward"),
    (lambda: show.LayerStage(name="X", phase="forward", kind="rows"), ValueError, "kind of 'X' is 'rows': expected"),
    (lambda: show.layer(made(), source="guessed"), ValueError, "source is 'guessed'"),
])  # fmt: skip
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_ranks_that_went_other_ways_are_named():
    stage = {"part": "attention", "name": "X", "phase": "forward", "kind": "whole", "shape": (1, 2), "digest": ""}
    call = {"part": "attention", "name": "g", "phase": "forward", "collective": "all_reduce", "nbytes": 8, "sent": 8}
    ranks = [{"rank": 4, "stages": [stage, call]}, {"rank": 5, "stages": [stage, {**call, "collective": None}]}]
    with pytest.raises(ValueError, match="rank 5 went through other stages than rank 4"):
        show.layer(ranks)
