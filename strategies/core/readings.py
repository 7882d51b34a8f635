"""What a paper prints, what its released code does, and what a plain run here does, wherever these may differ.

Each method lists its readings in its own file (:attr:`strategies.core.method.Method.readings`). ``goldfinch list
METHOD`` and docs/methods.md print them; ``goldfinch list alterations`` has those in which a plain run is neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OptionValue = str | float | bool | None

NOT_KNOWN = "-"
"""The value of a paper or a release that is silent, could not be read, or does not exist."""


@dataclass(frozen=True)
class Point:
    """One point of a method, as its paper, its released code and a plain run have it.

    Args:
        about: what is read, in a few words; unique in its method.
        paper: the paper's, or :data:`NOT_KNOWN`.
        released: that of the authors' released code, or :data:`NOT_KNOWN`.
        ours: a plain run's: ``paper``, ``released``, or what it does instead; empty if ``setting`` has it.
        setting: the option of the method whose values the three are; a plain run has its default.
        meanings: what values of ``setting`` do at this point.
        tables: values in the rows of papers' tables that are not those of :meth:`printed`, by table or paper.
    """

    about: str
    paper: OptionValue = NOT_KNOWN
    released: OptionValue = NOT_KNOWN
    ours: str = ""
    setting: str = ""
    meanings: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[str, OptionValue] = field(default_factory=dict)

    @property
    def known(self) -> tuple[OptionValue, ...]:
        """What is known of paper and release."""
        return tuple(value for value in (self.paper, self.released) if value != NOT_KNOWN)

    def of(self, method: object) -> OptionValue:
        """Return what a method with its options does: the option's value, or a plain run's words."""
        if self.setting:
            value: OptionValue = getattr(method, self.setting)
            return value
        return {"paper": self.paper, "released": self.released}.get(self.ours, self.ours)

    def printed(self, table: str, table_paper: str, own_paper: bool, plain: object) -> OptionValue:
        """Return what a printed row of a table has.

        Args:
            table: the table's name.
            table_paper: the paper that prints it.
            own_paper: whether this is the method's own paper: its numbers come from the released code, if there is one.
            plain: the method with its defaults.
        """
        for name in (table, table_paper):
            if name in self.tables:
                return self.tables[name]
        if own_paper and self.known:
            return self.known[-1]
        return self.of(plain)

    def is_exception(self, method: object) -> bool:
        """Return whether paper or code are known and the method has neither."""
        return bool(self.known) and self.of(method) not in self.known

    def words(self, chosen: OptionValue) -> str:
        """Return a value as it is printed: ``setting=value`` and what it does, or the words themselves."""
        if chosen == NOT_KNOWN or not self.setting:
            return str(chosen)
        written = str(chosen)
        if chosen is None:
            written = "null"
        if isinstance(chosen, bool):
            written = str(chosen).lower()
        meaning = self.meanings.get(str(chosen), "")
        if meaning:
            return f"{self.setting}={written}: {meaning}"
        return f"{self.setting}={written}"
