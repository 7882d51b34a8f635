"""The contract of this device, of its node's configuration and of what earlier requests decided.

:mod:`common.contract` has its terms. What requests decided is kept in ``contract.json`` in the private folder, by
domain. It is kept before the first registration leaves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client.private_folder import PrivateFolder
from common.contract import (
    CLIENTS,
    EPOCHS,
    KIND,
    MECHANISM,
    METHODS,
    OF_DATA,
    PUBLIC,
    ROOT,
    UNIT,
    UNITS,
    Contract,
    Terms,
    is_pin,
    text_of,
)
from common.data.domain import DataSource
from common.data.public import PublicImages
from common.errors import ConfigError, ContractError, DataError
from common.privacy import GaussianPrivacy
from common.settings import RunSettings
from common.versions import OURS

FOLDER = ".contract"
"""Folder of the kept terms, beside the ledgers of domains. No domain's name begins with a dot."""

KEPT = "contract.json"

PATH = OF_DATA + "path"
"""The term of where data are, below their root."""

NONE = "none"
"""The value of a setting of a table for no such column."""


class KeptTerms(PrivateFolder):
    """The terms that earlier requests decided, by domain, in ``contract.json``.

    Args:
        folder: one for all domains of the device; created with the first file.
    """

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / KEPT

    def of(self, domain: str) -> dict[str, str]:
        """Return the terms of a domain; empty before its first request.

        Raises:
            DataError: the file is damaged, or cannot be read.
        """
        return self._read().get(domain, {})

    def keep(self, domain: str, terms: Terms) -> None:
        """Add terms to those of a domain.

        Raises:
            ContractError: a request of another run has decided one in the meantime.
            DataError: as in :meth:`of`, or the file cannot be written.
        """
        if not terms:
            return
        with self._locked():
            content = self._read()
            entry = content.setdefault(domain, {})
            for term, value in terms.items():
                if entry.setdefault(term, value) != value:
                    raise ContractError(f"another run has just begun with another {term}; {self.path} says with which")
            self._write(KEPT, json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n")

    def _read(self) -> dict[str, dict[str, str]]:
        written = self._content(KEPT, "what this device serves")
        if written is None:
            return {}
        try:
            content: Any = json.loads(written)
            domains: dict[str, dict[str, str]] = {}
            for domain, terms in content.items():
                domains[str(domain)] = {str(term): str(value) for term, value in terms.items()}
            return domains
        except (ValueError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{self.path} is damaged, so it is not known what this device serves, and nothing is sent: restore it; "
                "deleting it lets the next run decide"
            ) from error


@dataclass
class NewTerms:
    """Terms of a request that are neither pinned nor kept: they are kept once the request was served.

    Args:
        kept: what earlier requests decided; ``None`` in a simulation, where nothing is kept.
        terms: the new ones, by the entry that has them.
    """

    kept: KeptTerms | None
    terms: dict[str, dict[str, str]]

    def keep(self) -> None:
        """Keep the terms, which are not new from then on.

        Raises:
            ContractError, DataError: as in :meth:`KeptTerms.keep`.
        """
        if self.kept is not None:
            for name, terms in self.terms.items():
                self.kept.keep(name, terms)
        self.terms.clear()


def pinned_terms(configuration: Mapping[str, object]) -> dict[str, str]:
    """Return the terms that a node's configuration pins.

    Raises:
        ConfigError: a value is none of its term.
    """
    pinned: dict[str, str] = {}
    for key, value in configuration.items():
        if not is_pin(key) or key == ROOT:
            continue
        text = text_of(value)
        valid = bool(text) or key.startswith(OF_DATA)
        expected = "a text"
        if key == EPOCHS:
            valid, expected = type(value) is int and value >= 1, "a whole number, at least 1"
        elif key == MECHANISM:
            valid, expected = text in ("none", "gaussian"), "none or gaussian"
        elif key == UNIT:
            valid, expected = text in UNITS, " or ".join(UNITS)
        if not valid:
            raise ConfigError(f"--node-config: {key} must be {expected}; got {value!r}")
        pinned[key] = text
    return pinned


def asked_terms(settings: RunSettings, domain: str, root: str | None, clients: Sequence[str]) -> dict[str, str]:
    """Return every term of a run as this device would serve it. The data are opened for those that they decide.

    Args:
        settings: the run's settings.
        domain: the domain whose data are read.
        root: folder of the data on this device; ``None`` is the one that the settings name.
        clients: the domains whose images the node trains on or scores.

    Raises:
        DataError: the data do not decide which columns are read.
    """
    terms = _terms_of_computing(settings, clients)
    if (public := _public_of(settings)) is not None:
        terms[PUBLIC] = _public_text(data_terms(public.source, public.domain, root), public.domain)
    return terms | data_terms(settings.data, domain, root)


def settled_terms(
    settings: RunSettings, domain: str, root: str | None, clients: Sequence[str], contract: Contract
) -> dict[str, str]:
    """Return the same terms as :func:`asked_terms` by the settings alone, before any data are opened.

    A term that the data decide is as the contract allows it.

    Args:
        settings: the run's settings.
        domain: the domain whose data are read.
        root: as in :func:`asked_terms`.
        clients: likewise.
        contract: the device's.
    """
    allowed = {**contract.kept, **contract.pinned}
    terms = _terms_of_computing(settings, clients)
    if (public := _public_of(settings)) is not None:
        read = _settled_data(public.source, public.domain, root, {})
        terms[PUBLIC] = _public_text(read, public.domain)
        if "" in read.values():  # the public data may decide more of it
            terms[PUBLIC] = allowed.get(PUBLIC, terms[PUBLIC])
    return terms | _settled_data(settings.data, domain, root, allowed)


def _terms_of_computing(settings: RunSettings, clients: Sequence[str]) -> dict[str, str]:
    """Return the terms that are not of data."""
    privacy, method = settings.privacy, settings.method
    private = isinstance(privacy, GaussianPrivacy)
    return {
        METHODS: _name_of(method, "strategies", method.name),
        EPOCHS: str(method.local_epochs(settings.train.epochs)),
        MECHANISM: "gaussian" if private else "none",
        UNIT: privacy.unit if isinstance(privacy, GaussianPrivacy) else "none",
        CLIENTS: text_of(clients),
    }


def _public_of(settings: RunSettings) -> PublicImages | None:
    public: PublicImages | None = getattr(settings.method, "public", None)
    return public


def _public_text(read: Terms, domain: str) -> str:
    return " ".join([f"{term}={value}" for term, value in read.items()] + [domain])


def data_terms(data: DataSource, domain: str, root: str | None) -> dict[str, str]:
    """Return the terms that decide what is read as images and labels.

    Raises:
        DataError: the data do not decide which columns are read.
    """
    return _source_terms(data, root) | _named(data.read_as(domain, root))


def _settled_data(data: DataSource, domain: str, root: str | None, allowed: Terms) -> dict[str, str]:
    """Return the terms of data by the settings alone; one that the data decide is the ``allowed`` one, else empty.

    The data decide a setting that is empty, or ``none``, but not where they are: an empty path is the folder itself.
    """
    terms = _named(DataSource.read_as(data, domain, root))
    for term, value in terms.items():
        if value in ("", NONE) and term != PATH:
            terms[term] = allowed.get(term, "")
    return _source_terms(data, root) | terms


def _source_terms(data: DataSource, root: str | None) -> dict[str, str]:
    terms = {KIND: _kind_of(data)}
    if not data.generated:
        terms[ROOT] = text_of(root or data.root)
    return terms


def _named(values: Mapping[str, object]) -> dict[str, str]:
    return {OF_DATA + name.replace("_", "-"): text_of(value) for name, value in values.items()}


def undecided_terms(data: DataSource, domain: str, root: str | None, pinned: Terms) -> dict[str, str]:
    """Return the terms of data as no server chose them: those that the data and the owner alone decide.

    The class list stays the server's: every label of the data must be in it, so that it selects nothing.

    Args:
        data: the data set as a run asks for it.
        domain: the domain whose data are read.
        root: as in :func:`asked_terms`.
        pinned: the terms that the owner pinned.
    """
    decided = {term.removeprefix(OF_DATA).replace("-", "_") for term in pinned} | {"classes"}
    try:
        terms = data_terms(data.undecided(domain, decided), domain, root)
    except (DataError, ConfigError):  # the data do not decide: the owner must
        return {}
    ours = type(data).__module__.partition(".")[0] in OURS
    if not ours or (data.owner_decides and not data.generated):
        del terms[KIND]
    if root is None:
        terms.pop(ROOT, None)  # the server's choice
    return terms


def _kind_of(data: DataSource) -> str:
    """Return the name of a data set, or of the class of one that is not Goldfinch's."""
    return _name_of(data, "common", data.name)


def _name_of(value: object, package: str, name: str) -> str:
    kind = type(value)
    if kind.__module__.partition(".")[0] == package:
        return name
    return f"{kind.__module__}.{kind.__qualname__}"


def contract_of(
    configuration: Mapping[str, object], kept: KeptTerms, names: Sequence[str], root: str | None, *, allows_keyed: bool
) -> Contract:
    """Return the contract of a node for one of its domains, without the budget.

    Args:
        configuration: the node's.
        kept: what earlier requests decided.
        names: entries of ``kept``: the domain's, and one of the node if its configuration names no domain.
        root: folder of the data that the owner named; ``None`` if the run's settings name it.
        allows_keyed: see :class:`~common.contract.Contract`.

    Raises:
        ConfigError: as in :func:`pinned_terms`.
        DataError: as in :meth:`KeptTerms.of`.
    """
    pinned = pinned_terms(configuration)
    if CLIENTS in configuration:
        pinned[CLIENTS] = text_of(configuration[CLIENTS])
    if root is not None:
        pinned[ROOT] = root
    terms: dict[str, str] = {}
    for name in names:
        terms |= kept.of(name)
    return Contract(pinned, terms, str(kept.path), allows_keyed=allows_keyed)
