"""Domains that nobody trains on: how a federation does on a camera, a country or a scanner it has never seen."""

from typing import Literal

from common.config import Names, check, checked
from common.data.domain import DataSource, Domain, Split
from common.data.protocols import ClientSpec, OneClientPerDomain
from common.errors import ConfigError, nearest


@checked
class LeaveOut(OneClientPerDomain):
    """One client for each domain but those left out, which are scored all the same.

    Attributes:
        leave_out: the unseen domains; empty leaves out the data's last one.
        score: ``unseen`` scores the domains that were left out, ``all`` the others as well.
        unseen: what is scored of an unseen domain: its ``test`` split, or the ``whole`` domain.
    """

    leave_out: Names = ()
    score: Literal["unseen", "all"] = "all"
    unseen: Literal["test", "whole"] = "test"

    def __post_init__(self) -> None:
        check(self.unseen == "test" or bool(self.leave_out), "unseen=whole needs leave_out to name the domains")

    def left_out(self, data: DataSource) -> tuple[str, ...]:
        """The unseen domains.

        Raises:
            ConfigError: one is not a domain of ``data``, or none is left to train on.
        """
        for domain in self.leave_out:
            if domain not in data.domains:
                close = nearest(domain, data.domains)
                raise ConfigError(f"protocol.leave_out: {domain!r} is not in data.domains of {data.name}; {close}")
        chosen = self.leave_out or data.domains[-1:]
        if len(chosen) == len(data.domains):
            raise ConfigError(f"protocol.leave_out: no domain is left to train on beside {', '.join(chosen)}")
        return chosen

    def clients(self, data: DataSource) -> tuple[ClientSpec, ...]:
        """One client for each domain that is not left out."""
        unseen = self.left_out(data)
        return tuple(ClientSpec(domain, 0) for domain in data.domains if domain not in unseen)

    def test_domains(self, data: DataSource) -> tuple[str, ...]:
        """See ``score``."""
        return self.left_out(data) if self.score == "unseen" else data.domains

    def test_split(self, domain: Domain) -> Split:
        """See ``unseen``."""
        return domain.whole if self.unseen == "whole" and domain.name in self.leave_out else domain.test
