"""The --help of verbs with many options: under headings, flags written out in full, most of them on one line."""

import inspect
import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand

_FLAGS_WIDTH = 34


class GroupedCommand(TyperCommand):
    """A command whose options are listed by their panel, in the order in which they are defined."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes usage, the docstring, the options and the examples."""
        width = min(shutil.get_terminal_size().columns, 110)
        parameters: list[Any] = list(self.get_params(ctx))
        arguments = [p for p in parameters if p.param_type_name == "argument"]
        usage = " ".join([ctx.command_path, "[OPTIONS]", *map(_argument, arguments)])
        formatter.write(f"Usage: {usage}\n\n{inspect.cleandoc(self.help or '')}\n")
        groups: dict[str, list[Any]] = {"Arguments": arguments} if arguments else {}
        groups["Options"] = []
        for parameter in parameters:
            if parameter.param_type_name == "option":
                groups.setdefault(parameter.rich_help_panel or "Options", []).append(parameter)
        for heading, members in groups.items():
            formatter.write(f"\n{heading}:\n")
            for member in members:
                formatter.write("\n".join(_lines(member, width)) + "\n")
        if self.epilog:
            formatter.write(f"\n{self.epilog}\n")


def _lines(parameter: Any, width: int) -> Iterator[str]:
    """One parameter: flags on the left, help on the right, and below them what does not fit."""
    left = "  " + (parameter.metavar if parameter.param_type_name == "argument" else _flags(parameter))
    text = parameter.help or ""
    if parameter.show_default and parameter.default is not None and not parameter.is_flag:
        text += f" [{parameter.default}]"
    right = textwrap.wrap(text, width - _FLAGS_WIDTH, break_on_hyphens=False)
    if len(left) >= _FLAGS_WIDTH - 1:
        yield left
    else:
        yield f"{left:<{_FLAGS_WIDTH}}{right[0]}"
        right = right[1:]
    yield from (" " * _FLAGS_WIDTH + line for line in right)


def _argument(argument: Any) -> str:
    text = argument.metavar if argument.required else f"[{argument.metavar}]"
    return text + ("..." if argument.nargs == -1 else "")


def _flags(parameter: Any) -> str:
    if parameter.secondary_opts:
        return f"--[no-]{parameter.opts[0].removeprefix('--')}"
    text = ", ".join(sorted(parameter.opts, key=len))
    return text if parameter.is_flag else f"{text} {parameter.metavar}"
