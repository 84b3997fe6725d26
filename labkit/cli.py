"""The `labkit` command. Each subcommand imports what it needs when it runs, so that `--help` is instant."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from labkit import __version__
from labkit.workcopy import Update, WorkCopyError, default_work_dir, find_chapter, reset, source_dir, update

RELOAD = "If it is open in JupyterLab: File → Reload Notebook from Disk."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit code (2 for a mistake of the user, told in one sentence)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["bench"]:  # has a parser of its own
        return _bench(words[1:])
    options = parser().parse_args(words)
    try:
        return options.run(options)
    except WorkCopyError as error:
        print(f"labkit: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `labkit doctor | head`; nothing more can be said, also not by the exit's flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="labkit", description="A lab for distributed training that runs what it teaches."
    )
    top.add_argument("--version", action="version", version=f"labkit {__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    lab = commands.add_parser("lab", help="open the notebooks in JupyterLab, in a working copy of your own")
    lab.add_argument("chapter", nargs="?", metavar="NN", help="open this chapter, as in 00")
    _add_dir(lab)
    lab.add_argument("--port", type=int, help="first port to try (default: Jupyter's, 8888)")
    lab.add_argument("--ip", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    lab.add_argument("--no-browser", action="store_true", help="print the address instead of opening it")
    lab.set_defaults(run=_lab)

    again = commands.add_parser("reset", help="restore a chapter; your version is kept beside it")
    again.add_argument("chapter", metavar="NN", help="the chapter, as in 00")
    _add_dir(again)
    again.set_defaults(run=_reset)

    doctor = commands.add_parser("doctor", help="check that this machine is fit for the lab")
    _add_dir(doctor)
    doctor.set_defaults(run=_doctor)

    stop = commands.add_parser("stop", help="end all of your ranks, whichever notebook they belong to")
    stop.add_argument("--stale", action="store_true", help="only those whose notebook is gone")
    stop.set_defaults(run=_stop)

    progress = commands.add_parser("progress", help="what you have done: exercises and guesses")
    progress.set_defaults(run=_progress)

    check = commands.add_parser("check", help="try the exercises of many working copies; for an instructor")
    check.add_argument("--all", type=Path, metavar="DIR", required=True, help="a folder with a working copy a learner")
    check.set_defaults(run=_check)

    room = commands.add_parser("class", help="where a class stands; for an instructor")
    room.add_argument(
        "folder", nargs="?", type=Path, metavar="DIR", help="the shared folder (default: LABKIT_CLASS_DIR)"
    )
    room.set_defaults(run=_class)

    late = commands.add_parser("catchup", help="put solutions into a chapter's unwritten exercises")
    late.add_argument("chapter", metavar="NN", help="the chapter, as in 02")
    _add_dir(late)
    late.set_defaults(run=_catchup)

    commands.add_parser("bench", help="measure against torch's own; `labkit bench --help`", add_help=False)
    return top


def _add_dir(command: argparse.ArgumentParser) -> None:
    command.add_argument("--dir", type=Path, metavar="PLACE", help="the working copy (default: work)")


def _work(options: argparse.Namespace) -> Path:
    return (options.dir or default_work_dir()).expanduser().absolute()


def _lab(options: argparse.Namespace) -> int:
    from labkit import lab

    work, source = _work(options), source_dir()
    wanted = find_chapter(source, options.chapter).name if options.chapter else None
    done = update(source, work)
    print(report(done, work), end="")
    first = done.issued[0] if done.issued else None
    lab.start(work, wanted or first, options.ip, options.port, not options.no_browser)


def report(done: Update, work: Path) -> str:
    """What an update did, in a line each; empty when it did nothing."""
    told = [
        (done.issued, f"new in {work}:", ""),
        (done.refreshed, "updated:", ""),
        (done.kept, "has a newer version, yours is kept:", " (`labkit reset NN` gets it and keeps yours beside it)"),
        (done.unreadable, "is not a readable notebook, left alone:", " (`labkit reset NN` moves it aside)"),
    ]
    return "".join(f"{before} {', '.join(names)}{after}\n" for names, before, after in told if names)


def _reset(options: argparse.Namespace) -> int:
    target, kept = reset(source_dir(), _work(options), options.chapter)
    print(f"{target} is as it was issued" + (f"; yours is {kept.name}" if kept else ""))
    if kept:
        print(RELOAD)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from labkit import doctor

    return doctor.main(_work(options))


def _stop(options: argparse.Namespace) -> int:
    from labkit.stop import stop

    done = stop(stale_only=options.stale)
    ranks, notebooks = _count(done.ranks, "rank"), _count(done.servers, "notebook")
    print(f"stopped {ranks} of {notebooks}, removed {_count(done.directories, 'private director', 'y', 'ies')}")
    return 0


def _progress(options: argparse.Namespace) -> int:
    from labkit.checks import report

    print(report.text())
    return 0


def _check(options: argparse.Namespace) -> int:
    from labkit.checks import grade

    try:
        print(grade.table(options.all), end="")
    except ValueError as error:
        print(f"labkit: {error}", file=sys.stderr)
        return 2
    return 0


def _class(options: argparse.Namespace) -> int:
    from labkit.checks import classroom

    folder = options.folder or Path(os.environ.get("LABKIT_CLASS_DIR", ""))
    try:
        print(classroom.text(folder))
    except ValueError as error:
        print(f"labkit: {error}", file=sys.stderr)
        return 2
    return 0


def _catchup(options: argparse.Namespace) -> int:
    from labkit.checks.catchup import fill

    source, work = source_dir(), _work(options)
    update(source, work)
    target = work / find_chapter(source, options.chapter).name
    try:
        done = fill(target)
    except (ValueError, OSError) as error:
        print(f"labkit: {error}", file=sys.stderr)
        return 2
    print(f"{target.name}: " + (f"solutions are in {', '.join(done)}" if done else "nothing was unwritten"))
    if done:
        print(RELOAD)
    return 0


def _count(number: int, noun: str, one: str = "", more: str = "s") -> str:
    return f"{number} {noun}{one if number == 1 else more}"


def _bench(arguments: list[str]) -> int:
    try:
        from labkit import bench
    except ImportError as error:
        print(f"labkit: the benchmarks are not installed: {error}", file=sys.stderr)
        return 2
    return bench.main(arguments) or 0


if __name__ == "__main__":
    sys.exit(main())
