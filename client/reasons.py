"""What a private device tells the server when it cannot do what was asked: one of a few sentences, and nothing else.

The text of an error may name files, and depend on images. A device without differential privacy sends it with its
traceback once all that it reads is decided, so that the server can record both. Before, and under privacy, both go to
the device's own log alone.

This module imports neither torch nor flwr, because the ClientApp process imports it again for every message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from common.errors import (
    BUDGET_SPENT,
    BudgetSpentError,
    ConfigError,
    ContractError,
    DataError,
    EngineError,
    ImageSideError,
    PayloadError,
    PrivacyError,
    RepeatedImageError,
)

OWN_KEYS = "privacy-"
"""How the keys of ``--node-config`` begin that make a device private in every run."""

LOG = "the log of the device says more"

REASONS: Mapping[type[Exception], str] = {
    BudgetSpentError: f"{BUDGET_SPENT}; nothing was sent, and {LOG}",
    ContractError: (
        "the device's owner has not allowed what the run reads or computes; nothing was sent, and the log of the "
        "device says what to allow"
    ),
    ImageSideError: (
        "the run would score images that were trained on under privacy, or train on images that were scored; nothing "
        f"was sent, and {LOG}"
    ),
    RepeatedImageError: (
        "the device's data name a training image more than once, so privacy.unit=sample would not cover it; choose "
        f"privacy.unit=group with data.group=COLUMN, or privacy.unit=client; nothing was sent, and {LOG}"
    ),
    PrivacyError: f"the device's own configuration forbids the run; nothing was sent, and {LOG}",
    ConfigError: f"the device cannot use the run's settings, or lacks a library; {LOG}",
    DataError: f"the device's data or state cannot be used; {LOG}",
    PayloadError: f"the message does not fit this device's code, settings, client or privacy; {LOG}",
    EngineError: f"the device's resident trainer failed; {LOG}",
    Exception: f"the device failed; {LOG}",
}
"""The reason for each class of errors; that of the first class that an error belongs to."""


def reason_for(error: Exception) -> str:
    """Return the reason that a private device sends for ``error``: a value of :data:`REASONS`."""
    for kind, reason in REASONS.items():
        if isinstance(error, kind):
            return reason
    return REASONS[Exception]


def says_private(run_config: Mapping[str, Any], configuration: Mapping[str, Any]) -> bool:
    """Return whether a run's or a node's configuration asks for privacy, without composing the run's.

    Args:
        run_config: Flower's configuration of the run, see :func:`common.settings.settings_in`. A composed one names the
            class of ``privacy=gaussian``, and one of overrides names the choice.
        configuration: the node's configuration.
    """
    if any(str(key).startswith(OWN_KEYS) for key in configuration):
        return True
    return "gaussian" in json.dumps(dict(run_config), default=str).lower()
