"""The contract of a device: what its owner lets a run read and compute, whatever a server asks.

A contract has terms. The owner *pins* a term in ``--node-config``. What decides which of the owner's files are read as
images and which cells as labels, and is not pinned, is *kept*: the first request that the device serves decides it, and
the device refuses a later request for anything else. With privacy the server decides it at no time: such a term must be
pinned, or be what the data alone say.

:meth:`Contract.check_terms` checks the terms on the device, before any image is read. What leaves is checked by
:func:`strategies.core.protection.check_request`, which the server calls as well before it asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.errors import ConfigError, ContractError, nearest
from common.text import printable

KIND, ROOT, CLIENTS, METHODS, EPOCHS = "data", "data-dir", "domain", "methods", "max-epochs"
PUBLIC = "public-images"
MECHANISM, UNIT = "privacy-mechanism", "privacy-unit"

PINS = (KIND, METHODS, EPOCHS, MECHANISM, UNIT, PUBLIC)
"""Keys of ``--node-config`` that pin a term. ``data-SETTING`` pins a setting of the data set, such as ``data-label``;
``data-dir`` and ``domain`` pin the root and the client."""

OF_DATA = "data-"
"""How the terms begin that are settings of the data set, and the root."""

_ANEW = (OF_DATA + "range", OF_DATA + "page")
"""Terms of how a file is read. Each run decides them, but for a private device: a refusal would tell of its pixels."""

UNITS = ("none", "sample", "group", "client")
"""Values of the term of the unit, in ascending order of what one change of the data may be."""

Terms = Mapping[str, str]
"""Values by term, as text. The items of a list are separated by commas."""


def is_pin(key: str) -> bool:
    """Return whether a key of ``--node-config`` pins a term."""
    return key in PINS or key.startswith(OF_DATA)


def is_kept(term: str) -> bool:
    """Return whether the first request decides a term that is not pinned."""
    return term in (KIND, CLIENTS, PUBLIC) or term.startswith(OF_DATA)


@dataclass(frozen=True)
class Contract:
    """What a device serves. An empty one fixes nothing.

    Args:
        pinned: terms that the owner fixed.
        kept: terms that earlier requests decided.
        file: where ``kept`` is written, for messages.
        simulated: whether this machine plays all clients, so that noise may be repeatable and nobody is asked.
        allows_keyed: whether the device allows noise that can be repeated by anyone who knows the run's seed.
        budget: the key of a limit of releases, with which the device sends no score of its training images; empty
            without one.
        max_epsilon: the key and the value of a limit of epsilon, with which the device sends nothing without noise;
            empty without one.
    """

    pinned: Terms = field(default_factory=dict)
    kept: Terms = field(default_factory=dict)
    file: str = ""
    simulated: bool = False
    allows_keyed: bool = False
    budget: str = ""
    max_epsilon: str = ""

    def check_terms(self, asked: Terms, undecided: Terms | None = None) -> None:
        """Check what a request asks against what is pinned and kept.

        Args:
            asked: every term of the request.
            undecided: for a private device, the terms that the data alone decide, without a choice of the server;
                ``None`` for others.

        Raises:
            ContractError: the request asks for something else; the message says what, and how the owner allows it.
            ConfigError: a pinned term is none of the request's data set.
        """
        for term in self.pinned:
            if term not in asked and term.startswith(OF_DATA) and term != ROOT:
                raise ConfigError(
                    f"--node-config: {term} is no setting of data={asked.get(KIND, '')}; {nearest(term, asked)}"
                )
        refused = [term for term, value in self.pinned.items() if not _allows(term, value, asked.get(term, value))]
        if refused:
            raise ContractError(
                f"this device serves {_texts(self.pinned, refused)} alone, and the run asks for "
                f"{_texts(asked, refused)}; its owner changes that in --node-config"
            )
        known = [term for term in _free(asked, self.pinned) if term in self.kept]
        other = [term for term in known if not _allows(term, self.kept[term], asked[term])]
        if other:
            raise ContractError(
                f"this device has served {_texts(self.kept, other)} since its first run, and the run asks for "
                f"{_texts(asked, other)}. To allow it, the owner of the device adds {_pins(asked, other)} to "
                f"--node-config, or deletes {self.file}"
            )
        if undecided is not None:
            self._check_undecided(asked, undecided)

    def _check_undecided(self, asked: Terms, undecided: Terms) -> None:
        of_data = [term for term in _free(asked, self.pinned) if term == KIND or term.startswith(OF_DATA)]
        wanted = [term for term in of_data if undecided.get(term) != asked[term]]
        if wanted:
            raise ContractError(
                "under privacy no server chooses what this device reads as images and labels. If the owner of the "
                f"device agrees with the run, add to --node-config: {_pins(asked, wanted)}"
            )

    def to_keep(self, asked: Terms) -> dict[str, str]:
        """Return the terms of a served request that are new, and that later requests must not change."""
        return {term: asked[term] for term in _free(asked, self.pinned) if term not in {*self.kept, *_ANEW}}

    def described(self, new: Terms) -> str:
        """Return the contract as text for the owner.

        Args:
            new: the terms that are kept from now on.
        """
        parts = [f"{_text(term, value)} (pinned)" for term, value in self.pinned.items()]
        for term, value in {**self.kept, **new}.items():
            if term not in self.pinned:
                parts.append(f"{_text(term, value)} ({'from now on' if term in new else 'since its first run'})")
        return ", ".join(parts)


def _allows(term: str, allowed: str, value: str) -> bool:
    """Return whether a term's value may be served where another one is pinned or kept."""
    if term == METHODS:
        return value in items(allowed)
    if term == CLIENTS:
        return set(items(value)) <= set(items(allowed))
    if term == EPOCHS:
        return int(value) <= int(allowed)
    if term == UNIT:
        return UNITS.index(value) >= UNITS.index(allowed)
    return items(value) == items(allowed)


def items(value: str) -> list[str]:
    """Return the items of a term's value."""
    return [item.strip() for item in value.split(",")]


def text_of(value: object) -> str:
    """Return the value of a setting as a term's."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return str(value)


def _free(asked: Terms, pinned: Terms) -> list[str]:
    """Return the terms that the first request decides: none of data that are generated, except of public images."""
    free = [term for term in asked if is_kept(term) and term not in pinned]
    if ROOT not in asked:
        return [term for term in free if term == PUBLIC]
    return free


def _pins(asked: Terms, terms: Sequence[str]) -> str:
    return " ".join(f'{term}="{printable(asked[term])}"' for term in terms)


def _texts(values: Terms, terms: Sequence[str]) -> str:
    return ", ".join(_text(term, values[term]) for term in terms)


def _text(term: str, value: str) -> str:
    return f"{term}={printable(value)[:200] or 'none'}"
