"""The program: its commands are registered here, each with its options; only what every command needs is imported."""

import inspect
import os
import select
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer.core import TyperCommand, TyperGroup

from common.errors import DISK_ADVICE, ConfigError, GoldfinchError, nearest
from common.extras import missing_library
from common.metrics import RULES
from common.text import printable, shell_line
from server.run.signals import Terminated, terminable

TRACEBACK = "GOLDFINCH_TRACEBACK"
"""Environment variable; if it is set, an unexpected exception is shown with its traceback."""

NOT_THE_USERS = (str(Path(__file__).resolve().parents[2]), sys.prefix, sys.base_prefix)
"""Folders of Goldfinch's code, Python's and the libraries'."""


def _unexpected(error: Exception) -> str:
    """Return the message for an exception that no command expects."""
    if isinstance(error, ModuleNotFoundError):
        remedy = missing_library(error)
        if remedy is not None:
            return printable(remedy)
    if isinstance(error, OSError) and error.strerror:
        message = error.strerror
        if error.filename:
            message = f"{error.filename}: {message}"
        if error.errno in DISK_ADVICE:
            message = f"{message}; {DISK_ADVICE[error.errno]}"
        return printable(message)
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}"]
    for frame in frames:  # the last line of the user's own code says more than Goldfinch's or a library's
        if Path(frame.filename).is_file() and not frame.filename.startswith(NOT_THE_USERS):
            places.append(f"{frame.filename}, line {frame.lineno}")
    return printable(f"{type(error).__name__}: {error} ({places[-1]})")


def _how_to_see_more() -> str:
    words = sys.argv[1:]
    if words[:1] == ["run"] and not {"resume=true", "overwrite=true"} & set(words):
        outputs = [Path(word.removeprefix("output=")) for word in words if word.startswith("output=")]
        if not outputs or (outputs[-1].expanduser() / "config.yaml").exists():
            words.append("resume=true")  # the folder may hold what was done until the error
    again = shell_line(["goldfinch", *words])
    return printable(f"{TRACEBACK}=1 {again} shows where it happened")


def _output_is_closed() -> bool:
    """Return whether the standard output was closed by its reader, as after ``goldfinch list | head``.

    If so, it is replaced, because Python would otherwise report the closed pipe again at its end.
    """
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):  # a test's or a notebook's output is no file
        return False
    poll = select.poll()
    poll.register(output, 0)
    closed = False
    for _, events in poll.poll(0):
        closed = bool(events & select.POLLERR)
    if closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return closed


class CommandGroup(TyperGroup):
    """Commands below one word; a word that is none of them gets the nearest one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, but a word that is no command gets the nearest one, or the group that it is in."""
        known = args[0] in self.commands or args[0].startswith("-")
        if not known and not ctx.resilient_parsing:  # which completion sets
            remedy = nearest(args[0], self.commands)
            for name, member in self.commands.items():
                if isinstance(member, click.Group) and args[0] in member.commands:
                    remedy = f"write {ctx.command_path} {name} {args[0]}"
            raise click.UsageError(f"{ctx.command_path} {args[0]}: no such command; {remedy}", ctx)
        return super().resolve_command(ctx, args)


class Commands(CommandGroup):
    """Goldfinch's commands, and the one place where every exception becomes a message and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; the exit code is 1 for an error, 130 for Ctrl-C and 143 for SIGTERM."""
        try:
            with terminable():
                return super().invoke(ctx)
        except GoldfinchError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as error:
            message = str(error) or "stopped"
            print(f"\n{message}", file=sys.stderr)
            raise typer.Exit(143 if isinstance(error, Terminated) else 130) from error
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except SystemExit as error:
            if isinstance(error.__context__, BrokenPipeError):  # rich ends so when its reader has gone
                raise typer.Exit(141) from error
            message = f"a package that was imported called sys.exit({error.code!r}); see --config-dir and _target_"
            print(f"error: {message}\n{_how_to_see_more()}", file=sys.stderr)
            raise typer.Exit(1) from error
        except Exception as error:
            if isinstance(error, BrokenPipeError) and _output_is_closed():
                raise typer.Exit(141) from error
            if os.environ.get(TRACEBACK):
                raise
            print(f"error: {_unexpected(error)}\n{_how_to_see_more()}", file=sys.stderr)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=Commands,
    rich_markup_mode=None,  # rich's help takes longer to import than everything else here
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _search(_: click.Context, __: click.Parameter, folders: Sequence[Path]) -> None:
    for folder in folders:
        from common.choices import search

        search(folder)


class Command(TyperCommand):
    """A command that prints its docstring as help, line by line. All commands accept ``--config-dir``."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        text = "A folder laid out as conf/, with methods, data sets ... of your own; repeatable."
        kind, names = click.Path(path_type=Path), ["--config-dir"]
        self.params.append(
            click.Option(
                names, multiple=True, type=kind, metavar="DIR", help=text, expose_value=False, callback=_search
            )
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does, but refuse what is empty, and a setting that is an option of this command.

        Raises:
            ConfigError: an argument or a value is empty, which would be the present folder or the default; or an
                argument such as ``trials=20``, where the command has ``--trials``.
        """
        options: set[str] = set()
        for parameter in self.params:
            options.update(parameter.opts)
        for argument in args:
            key, equals, value = argument.partition("=")
            empty = not argument.strip() or (key in options and equals and not value.strip())
            if empty and not ctx.resilient_parsing:
                raise ConfigError(
                    f"{ctx.command_path} {shell_line(args)}: {shell_line([argument])} has no value, as if a variable "
                    "of the shell were unset; give one, or leave it out"
                )
            if equals and f"--{key}" in options:
                flag = next(each for each in self.params if f"--{key}" in each.opts)
                written = f"--{key}" if getattr(flag, "is_flag", False) else f"--{key} {value or 'VALUE'}"
                raise ConfigError(f"goldfinch {self.name}: {argument} is an option here, no setting: write {written}")
        self._check_repeated(ctx, args)
        return super().parse_args(ctx, args)

    def _check_repeated(self, ctx: click.Context, args: list[str]) -> None:
        """Refuse an option that takes one value and is given several times; click would take the last value.

        Raises:
            ConfigError: it names the option.
        """
        if ctx.resilient_parsing:  # of which completion asks for what comes next
            return
        _, _, given = self.make_parser(ctx).parse_args(list(args))
        for parameter in self.params:
            single = isinstance(parameter, click.Option) and not parameter.multiple and not parameter.is_flag
            if single and given.count(parameter) > 1:
                raise ConfigError(f"goldfinch {self.name}: {parameter.opts[0]} is given twice, and takes one value")

    def get_help(self, ctx: click.Context) -> str:
        """Return the help. Typer escapes brackets for rich's markup, which is not used here."""
        return super().get_help(ctx).replace("\\[", "[")

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the docstring as it stands."""
        formatter.write("\n" + textwrap.indent(inspect.cleandoc(self.help or ""), "  ") + "\n")


command = partial(app.command, cls=Command)

devices = typer.Typer(
    cls=CommandGroup,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Certificates and keys: which devices take part.",
)
app.add_typer(devices, name="devices")
device_command = partial(devices.command, cls=Command)


def argument(metavar: str, **more: Any) -> Any:
    """Return a positional argument; the command's docstring explains it, since typer loses its help with click 8.5."""
    return typer.Argument(metavar=metavar, hidden=True, **more)


def option(*names: str, text: str, **more: Any) -> Any:
    """Return an option; ``text`` names its default."""
    return typer.Option(*names, help=text, show_default=False, **more)


def show_loading(quiet: bool) -> None:
    """Tell somebody who watches a terminal why nothing happens for some seconds."""
    if not quiet and sys.stderr.isatty():
        print("loading PyTorch and the data ...", file=sys.stderr)


def items_of(texts: Sequence[str] | None) -> tuple[str, ...]:
    """Return the items of an option that is written ``A,B`` or repeated, without spaces and without empty ones."""
    items = ",".join(texts or ()).split(",")
    return tuple(item.strip() for item in items if item.strip())


def seeds_of(texts: Sequence[str] | None) -> tuple[int, ...]:
    """Return the seeds of ``0,1,2``; none if the option is not given.

    Raises:
        ConfigError: a seed is not a whole number, or is there twice.
    """
    items = items_of(texts)
    text = ",".join(items)
    if not all(item.isascii() and item.isdecimal() for item in items):
        raise ConfigError(f"--seeds {text}: expected whole numbers with commas between them, such as --seeds 0,1,2")
    seeds = tuple(int(item) for item in items)
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {text}: a seed is there twice; leave it out")
    return seeds


def one_of(choices: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a function that completes one of ``choices``."""

    def complete(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return complete


Settings = Annotated[list[str], argument("[KEY=VALUE]...", default_factory=list)]
Runs = Annotated[list[str], argument("DIR...")]
Rule = Annotated[
    str,
    option(
        text="How a run is scored: final (default), last_n, best_round or validated.",
        metavar="RULE",
        autocompletion=one_of(RULES),
    ),
]
Labels = Annotated[
    list[str] | None,
    option("--label", text="Another name for a row or a method; repeat it.", metavar="OLD=NEW"),
]
Quiet = Annotated[bool, option("--quiet", text="Show nothing; errors are still shown.")]
Output = Annotated[Path | None, option("--output", text="The folder; by default one below outputs/.", metavar="DIR")]
Jobs = Annotated[int, option("--jobs", text="Runs at the same time; 1 by default.", min=1)]
