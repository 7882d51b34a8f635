"""Records as pandas DataFrames."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from common.errors import libraries_of

if TYPE_CHECKING:
    import pandas as pd


def library() -> Any:
    """Return pandas.

    Raises:
        ConfigError: it is not installed; how to install it.
    """
    with libraries_of("python", "DataFrames"):
        import pandas
    return pandas


def frame(rows: Sequence[Mapping[str, Any]], numbers: Collection[str]) -> pd.DataFrame:
    """Return rows of a CSV file as a DataFrame.

    Args:
        rows: the rows, all values texts.
        numbers: columns that hold numbers, besides those that begin with ``seconds`` or ``bytes``; an empty text
            becomes NaN.
    """
    pandas = library()
    table = pandas.DataFrame(list(rows))
    for column in table.columns:
        if column in numbers or column.startswith(("seconds", "bytes")):
            table[column] = pandas.to_numeric(table[column])
    return table
