"""Imports run downward only: the rooms of the package, from the top, and what each may use."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1] / "labkit"

#: Room → the rooms it may import, besides itself. One line a room, from the lowest up; see the design's picture.
MAY_IMPORT = {
    "model": set(),
    "words": set(),
    "trace": set(),
    "theory": set(),
    "device": {"trace"},
    "pace": {"trace"},
    "world": {"trace", "device", "pace"},
    "progress": set(),
    "turns": set(),
    # Of the pipeline's room, show needs plain data only: schedules and timelines, which import no torch.
    "show": {"pipeline", "progress", "trace"},
    "memory": {"trace", "device"},
    "collectives": {"trace", "device"},
    "tensor_parallel": {"collectives", "device", "model", "trace"},
    "context_parallel": {"collectives", "trace"},
    "sequence_parallel": {"collectives", "device", "model", "tensor_parallel", "trace"},
    "data_parallel": {"collectives", "device", "trace"},
    "pipeline": {"collectives", "device", "model", "trace"},
    "tricks": {"collectives", "device", "trace"},
    "zero": {"collectives", "data_parallel", "device", "trace", "tricks"},
    "train": {
        "collectives",
        "data_parallel",
        "device",
        "model",
        "pipeline",
        "sequence_parallel",
        "tensor_parallel",
        "trace",
        "tricks",
        "zero",
    },
    "checks": {
        "collectives",
        "data_parallel",
        "pace",
        "progress",
        "run",
        "trace",
        "device",
        "show",
        "theory",
        "world",
        "tensor_parallel",
        "sequence_parallel",
        "context_parallel",
        "pipeline",
        "tricks",
        "zero",
    },
    "bench": {
        "collectives",
        "data_parallel",
        "memory",
        "model",
        "pipeline",
        "run",
        "sequence_parallel",
        "tensor_parallel",
        "trace",
        "train",
        "tricks",
        "zero",
        "device",
        "world",
    },
    "cli": {"*"},
}
#: Files at the top of the package that belong to the command line.
COMMAND_LINE = {"cli", "doctor", "execute", "lab", "stop", "workcopy"}


def room(module: str) -> str:
    name = module.split(".")[1] if "." in module else "run"
    return "cli" if name in COMMAND_LINE else name


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "labkit":
                found |= {f"labkit.{a.name}" for a in node.names if (ROOT / a.name).exists()
                          or (ROOT / f"{a.name}.py").exists()} or {"labkit"}  # fmt: skip
            else:
                found.add(node.module)
    return found


def test_every_import_goes_down():
    wrong = []
    for path in ROOT.rglob("*.py"):
        mine = room("labkit." + str(path.relative_to(ROOT)).split("/")[0].removesuffix(".py"))
        if mine == "__init__" or "*" in MAY_IMPORT[mine]:
            continue
        for module in imports(path):
            if module.split(".")[0] == "labkit" and room(module) not in MAY_IMPORT[mine] | {mine}:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong


def test_no_cycles_between_modules():
    graph = {}
    for path in ROOT.rglob("*.py"):
        name = "labkit." + ".".join(path.relative_to(ROOT).with_suffix("").parts)
        graph[name.removesuffix(".__init__")] = {m for m in _at_the_top(path) if m.startswith("labkit.")}

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join([*path, module])
        for imported in graph.get(module, ()):
            visit(imported, (*path, module))

    for module in graph:
        visit(module, ())


def _at_the_top(path: Path) -> set[str]:
    """Imports that happen when the module is loaded: not inside functions, not for type checkers only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{a.name}" for a in node.names}
            if not all(_is_module(f"{node.module}.{a.name}") for a in node.names):  # else its parts, not the room
                found.add(node.module)
    return found


def _is_module(name: str) -> bool:
    path = ROOT.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def test_the_fork_server_imports_nothing_of_labkit():
    """It runs by path and keeps third-party modules only, so that new code needs new ranks and no new server."""
    top = _at_the_top(ROOT / "world" / "forkserver.py")
    assert not [m for m in top if m.startswith("labkit")]
    assert "torch" not in top, "it is imported by name, after the server's set-up"


def test_plain_data_rooms_do_not_import_torch():
    for name in ("trace.py", "theory", "show"):
        for path in (ROOT / name).rglob("*.py") if (ROOT / name).is_dir() else [ROOT / name]:
            assert not [m for m in imports(path) if m.split(".")[0] in ("torch", "numpy")], path


def test_what_a_rank_needs_is_light():
    """A verdict imports no figure, and ZeRO none of torch's checkpoints: each rank would pay for it."""
    code = (
        "import sys, labkit.checks, labkit.zero, labkit.train\n"
        "heavy = {'labkit.show.tracefigure', 'torch.distributed.checkpoint', 'torch._dynamo'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
        "from labkit import show\n"
        "assert all(getattr(show, name).__module__ == f'labkit.show.{home}' for name, home in show._HOME.items())"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
