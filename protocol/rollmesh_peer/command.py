"""The ``rollmesh`` command: finds its sub-commands by entry point and turns errors into one sentence and a status.

A sub-command is a module, named in the entry-point group ``rollmesh.commands``, with ``add_parser(subparsers)`` and
``run(arguments) -> int``. Nothing of it is imported before it is asked for: the list of commands takes each one's line
from the first line of its module's docstring, read as text.

Exit status: 0 done, 1 this machine or a peer could not do it, 2 a flag, file or join line is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast

from rollmesh_protocol.errors import Refused, RollmeshError, UsageError

GROUP: Final = "rollmesh.commands"
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
"""128 + SIGINT, as a shell reports it."""
EXIT_BROKEN_PIPE: Final = 141
"""128 + SIGPIPE: whoever read our output has gone."""

if TYPE_CHECKING:
    SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 - argparse has no public name for it


class SubCommand(Protocol):
    """What a module in the entry-point group offers."""

    def add_parser(self, subparsers: SubParsers) -> object:
        """Add this command's own parser, under the name of its entry point."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do what was asked and return the exit status."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; ``argv`` is without the program's name."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _dispatch(words)
        sys.stdout.flush()
    except BrokenPipeError:
        return _nobody_reads()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except RollmeshError as error:
        return _report(error)
    except BaseExceptionGroup as group:
        return _report_group(group)
    return status


def _dispatch(words: list[str]) -> int:
    entries = _entries()
    parser = argparse.ArgumentParser(
        prog="rollmesh",
        description="Train a language model with rollouts from volunteers' machines, over a peer-to-peer mesh.",
        epilog=_listing(entries),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rollmesh {metadata.version('rollmesh')}")
    name = words[0] if words else ""
    if not words:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    if name not in entries:
        parser.add_argument("command", choices=list(entries), metavar="command", help="one of those below")
        parser.parse_args(words[:1])  # help, version, or what is wrong with the words: always exits
        return EXIT_USAGE
    command = _load(name, entries[name])
    command.add_parser(parser.add_subparsers(dest="command", required=True, metavar=name))
    return command.run(parser.parse_args(words))


def _entries() -> dict[str, str]:
    """The module of each sub-command by its name."""
    return {entry.name: entry.value for entry in sorted(metadata.entry_points(group=GROUP), key=lambda e: e.name)}


def _load(name: str, module: str) -> SubCommand:
    try:
        return cast("SubCommand", importlib.import_module(module))
    except ModuleNotFoundError as error:
        missing = error.name or module
        own = missing.partition(".")[0].startswith("rollmesh_")
        mend = "this installation lacks it" if own else f"install it with: pip install 'rollmesh[{name}]'"
        raise UsageError(f"`rollmesh {name}` needs {missing}: {mend}") from error


def _listing(entries: dict[str, str]) -> str:
    width = max(map(len, entries), default=0)
    lines = [f"  {name:<{width}}  {_summary(module)}".rstrip() for name, module in entries.items()]
    return "\n".join(["commands:", *lines, "", "`rollmesh <command> --help` says more."])


def _summary(module: str) -> str:
    """The first line of a module's docstring, without importing the module or the packages around it."""
    top, *rest = module.split(".")
    spec = PathFinder.find_spec(top)
    if spec is None:
        return ""
    places = [Path(folder, *rest) for folder in spec.submodule_search_locations or []]
    found = [Path(spec.origin)] if spec.origin and not rest else []
    found += [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
    for file in found:
        if file.is_file():
            return (ast.get_docstring(ast.parse(file.read_bytes())) or "").partition("\n")[0]
    return ""


def _report(error: RollmeshError) -> int:
    for line in error.detail.splitlines() or [type(error).__name__]:
        print(f"rollmesh: {line}", file=sys.stderr)
    if isinstance(error, Refused) and error.advice:
        print(f"rollmesh: ({error.code}) {error.advice}", file=sys.stderr)
    return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED


def _report_group(group: BaseExceptionGroup[BaseException]) -> int:
    """Nurseries wrap what ends them. Our own errors are told, an interruption is obeyed, a bug keeps its trace."""
    leaves = list(_leaves(group))
    if not all(isinstance(leaf, RollmeshError | KeyboardInterrupt | BrokenPipeError) for leaf in leaves):
        raise group
    told = next((leaf for leaf in leaves if isinstance(leaf, RollmeshError)), None)
    if told is not None:
        return _report(told)
    return EXIT_INTERRUPTED if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves) else _nobody_reads()


def _nobody_reads() -> int:
    """Python flushes stdout once more on its way out: give it somewhere to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_BROKEN_PIPE


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


if __name__ == "__main__":
    sys.exit(main())
