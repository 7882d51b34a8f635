"""Which runs are seeds of one configuration, and which may be compared."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from server.results.run import Run
from server.results.seeds import Group


@dataclass
class Board:
    """Groups that may be compared: same data, protocol and model."""

    data: str
    protocol: str
    model: str
    groups: list[Group] = field(default_factory=list)

    @property
    def title(self) -> str:
        """What the groups share."""
        return ", ".join(part for part in (self.data, self.protocol.replace("_", " "), self.model) if part)

    @property
    def domains(self) -> list[str]:
        """Domains of all groups, in the first one's order."""
        return list(dict.fromkeys(name for group in self.groups for run in group.runs for name in run.domains))

    @property
    def runs(self) -> list[Run]:
        """All runs, group by group."""
        return [run for group in self.groups for run in group.runs]

    @property
    def named_runs(self) -> list[tuple[str, Run]]:
        """The same with what each is called on the page."""
        return [(run_name(group, run), run) for group in self.groups for run in group.runs]

    @property
    def clients(self) -> int:
        """The most clients of a run."""
        return max((len(run.registrations) for run in self.runs), default=0)


def run_name(group: Group, run: Run) -> str:
    """What a run is called on the page."""
    twins = [other for other in group.runs if other.seed == run.seed]
    name = f"{group.label}, seed {run.seed}" if len(group.runs) > 1 else group.label
    return f"{name} ({run.folder.name})" if len(twins) > 1 else name


def arrange(records: Sequence[Run]) -> list[Board]:
    """Boards of groups of runs; groups in the order of their first run, labels unique within a board."""
    boards: dict[tuple[str, str, str], Board] = {}
    groups: dict[str, Group] = {}
    for record in records:
        board = boards.setdefault(record.board, Board(*record.board))
        key = json.dumps([record.board, record.options], sort_keys=True, default=str)
        if key not in groups:
            groups[key] = Group(record.title)
            board.groups.append(groups[key])
        groups[key].runs.append(record)
    for board in boards.values():
        for group in board.groups:
            group.runs.sort(key=lambda run: (run.seed, str(run.folder)))
        _tell_apart(board.groups)
    return list(boards.values())


def _tell_apart(groups: Sequence[Group]) -> None:
    for label in {group.label for group in groups}:
        namesakes = [group for group in groups if group.label == label]
        if len(namesakes) < 2:
            continue
        settings = [group.runs[0].options for group in namesakes]
        keys = [key for key in settings[0] if len({json.dumps(other.get(key), default=str) for other in settings}) > 1]
        for index, group in enumerate(namesakes):
            parts = [f"{key.rpartition('.')[2].replace('_', ' ')} {group.runs[0].options.get(key)}" for key in keys[:3]]
            group.label = f"{label}, {', '.join(parts)}" if parts else f"{label} ({index + 1})"
