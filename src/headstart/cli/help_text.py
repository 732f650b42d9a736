"""The --help of verbs with many options, and the error message for an unknown option.

Help is plain text under headings, with full flag names, most of them on one line.
"""

import inspect
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from headstart.cli.cli_options import add_values_to_switches
from headstart.config.option_hints import harmless_flag_takes_value, hint_for_unknown_flag, is_harmless_flag

_FLAGS_WIDTH = 34
_NAMES = "--served-model-name"  # takes several values after one flag, as in vLLM
_UsageError: Any = typer.BadParameter.__mro__[1]  # base class of all usage errors


class PanelHelpCommand(TyperCommand):
    """A command whose help lists the options by panel, in the order of their definition."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse argv; options that are also switches may be given without a value."""
        words = add_values_to_switches(args, {flag for p in self.params for flag in p.opts})
        return super().parse_args(ctx, self._known(ctx, words))

    def _known(self, ctx: Any, args: list[str]) -> list[str]:
        """Return the arguments without unknown options that have no effect, which get a warning each.

        Several names after one --served-model-name become one flag each.
        Raises a usage error for several unknown options, which names all, and for one with a hint.
        """
        has_value = {flag: not getattr(p, "is_flag", False) for p in self.params for flag in p.opts}
        has_value |= {flag: False for p in self.params for flag in p.secondary_opts}
        has_value |= dict.fromkeys(ctx.help_option_names, False)
        kept: list[str] = []
        unknown: list[str] = []
        has_argument = False
        words = iter(enumerate(args))
        for position, word in words:
            if word == "--":
                kept += args[position:]
                break
            flag, joined, _ = word.partition("=")
            if not word.startswith("-") or word == "-":
                kept.append(word)
                has_argument = True
            elif flag == _NAMES and not joined:
                names = list(takewhile(lambda after: not after.startswith("-"), args[position + 1 :]))
                names = names if has_argument or len(names) < 2 else names[:-1]  # the last one is the model
                kept += [part for name in names or [""] for part in (flag, name)]
                list(islice(words, len(names)))
            elif flag in has_value:
                kept += [word, *(value for _, value in islice(words, int(has_value[flag] and not joined)))]
            elif is_harmless_flag(flag):
                print(f"headstart: {flag} is left out: {hint_for_unknown_flag(flag)}", file=sys.stderr)
                if harmless_flag_takes_value(flag) and not joined:
                    next(words, None)
            else:
                kept.append(word)
                unknown.append(flag)
        if len(unknown) > 1:
            root = ctx.find_root().command
            raise _UsageError(f"No such options: {'; '.join(_with_hint(flag, root) for flag in unknown)}", ctx=ctx)
        if unknown and (hint := hint_for_unknown_flag(unknown[0])):  # before the parser reads -hf as -h and -f
            raise _UsageError(f"No such option: {unknown[0]}; {hint}", ctx=ctx)
        return kept

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, the docstring, the options and the examples."""
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


class PanelHelpGroup(TyperGroup):
    """A verb with many options and with verbs of its own, in the same form of help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of a command, and its verbs before the examples."""
        epilog, self.epilog = self.epilog, None
        PanelHelpCommand.format_help(self, ctx, formatter)  # type: ignore[arg-type]  # needs only what both have
        self.epilog = epilog
        formatter.write("\nVerbs:\n")
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            text = command.get_short_help_str(70) if command is not None else ""
            formatter.write(f"  {name:<{_FLAGS_WIDTH - 2}}{text}\n")
        if epilog:
            formatter.write(f"\n{epilog}\n")


def _lines(parameter: Any, width: int) -> Iterator[str]:
    """Yield the lines of one parameter: flags on the left, help on the right, wrapped below."""
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
    opts: list[str] = parameter.opts
    text = ", ".join(sorted(opts, key=len))
    return text if parameter.is_flag else f"{text} {parameter.metavar}"


def usage_error_message(error: Any, argv: Sequence[str]) -> str:
    """Return the message of a usage error; for an unknown option with a hint, or with the verbs that have it."""
    option = getattr(error, "option_name", None)
    if option is None or error.ctx is None or not error.message.startswith("No such option"):
        return error.format_message()
    flag = _as_written(option, argv)
    hint = _hint(flag, error.ctx.find_root().command)
    return f"No such option: {flag}; {hint}" if hint else error.format_message()


def _hint(flag: str, root: Any) -> str | None:
    """Return the hint for an unknown flag, or the verbs that have it."""
    owners = _owners(root, flag)
    return hint_for_unknown_flag(flag) or (f"it is an option of {' and '.join(owners)}" if owners else None)


def _with_hint(flag: str, root: Any) -> str:
    hint = _hint(flag, root)
    return f"{flag} ({hint})" if hint else flag


def _as_written(option: str, argv: Sequence[str]) -> str:
    """Return the flag as written in argv; of several letters after a hyphen (-ngl) the parser names only the first."""
    if option.startswith("--"):
        return option
    written = (word.partition("=")[0] for word in argv if word.startswith(option) and not word.startswith("--"))
    return next(written, option)


def _owners(command: Any, flag: str, path: str = "headstart") -> list[str]:
    """Return the verbs that have this flag, with their full names; benchmarks are skipped."""
    if flag in (name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)):
        return [path]
    below = getattr(command, "commands", {}).items()
    return [owner for name, verb in below if name != "bench" for owner in _owners(verb, flag, f"{path} {name}")]
