"""Jinja2 as all pages use it: values are escaped, and a missing name is an error."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from common.text import counted, duration, listing, size


def templates(folder: Path, *, escape: bool = True) -> Environment:
    """Return the environment with the templates in ``folder``.

    Args:
        folder: where the templates are.
        escape: whether to escape every value that is not ``Markup``, as HTML needs.
    """
    made = Environment(
        loader=FileSystemLoader(folder),
        autoescape=escape,  # noqa: S701  # Markdown is the one format without
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    made.filters.update(size=size, duration=duration, listing=listing)
    made.globals.update(counted=counted, size=size, duration=duration)
    return made
