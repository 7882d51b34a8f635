"""The contract of this device, of its node's configuration and of what earlier requests decided.

:mod:`common.contract` has its terms. What requests decided is kept in ``contract.json`` in the private folder, by
domain. It is kept before the first registration leaves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
from common.errors import ConfigError, ContractError, DataError
from common.privacy import GaussianPrivacy
from common.settings import RunSettings
from common.versions import OURS

FOLDER = ".contract"
"""Folder of the kept terms, beside the ledgers of domains. No domain's name begins with a dot."""

KEPT = "contract.json"


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
        try:
            content: Any = json.loads(self.path.read_text(encoding="utf-8"))
            domains: dict[str, dict[str, str]] = {}
            for domain, terms in content.items():
                domains[str(domain)] = {str(term): str(value) for term, value in terms.items()}
            return domains
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise DataError(f"{self.path}, what this device serves, cannot be read: {error.strerror}") from error
        except (ValueError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{self.path} is damaged, so it is not known what this device serves, and nothing is sent: restore it; "
                "deleting it lets the next run decide"
            ) from error


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
    """Return every term of a run as this device would serve it.

    Args:
        settings: the run's settings.
        domain: the domain whose data are read.
        root: folder of the data on this device; ``None`` is the one that the settings name.
        clients: the domains whose images the node trains on or scores.

    Raises:
        DataError: the data do not decide which columns are read.
    """
    privacy, method = settings.privacy, settings.method
    private = isinstance(privacy, GaussianPrivacy)
    terms = {
        METHODS: _name_of(method, "strategies", method.name),
        EPOCHS: str(sum(phase.epochs for phase in method.phases(settings.train.epochs))),
        MECHANISM: "gaussian" if private else "none",
        UNIT: privacy.unit if isinstance(privacy, GaussianPrivacy) else "none",
        CLIENTS: text_of(clients),
    }
    if (public := getattr(method, "public", None)) is not None:
        read = data_terms(public.source, public.domain, root)
        terms[PUBLIC] = " ".join([f"{term}={value}" for term, value in read.items()] + [public.domain])
    return terms | data_terms(settings.data, domain, root)


def data_terms(data: DataSource, domain: str, root: str | None) -> dict[str, str]:
    """Return the terms that decide what is read as images and labels.

    Raises:
        DataError: the data do not decide which columns are read.
    """
    terms = {KIND: _kind_of(data)}
    if not data.generated:
        terms[ROOT] = text_of(root or data.root)
    for name, value in data.read_as(domain, root).items():
        terms[OF_DATA + name.replace("_", "-")] = text_of(value)
    return terms


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
