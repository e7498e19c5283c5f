"""Which images are for training and which for validation: all images of a photograph are on the same side."""

from __future__ import annotations

from collections.abc import Sequence

from bltoolbox.restoration.roles import Data


def hold_out(data: Data, count: int) -> tuple[Sequence[int], Sequence[int]]:
    """Ids for training and for validation: the last ``count`` images, and all others of their groups."""
    n = len(data)
    if not data.offers("group"):
        return range(n - count), range(n - count, n)
    members: dict[str, list[int]] = {}
    groups = [data.group(i) for i in range(n)]
    for i, group in enumerate(groups):
        if group is not None:
            members.setdefault(group, []).append(i)
    held: set[int] = set()
    for i in reversed(range(n)):
        if len(held) >= count:
            break
        group = groups[i]
        held.update([i] if group is None else members[group])
    return [i for i in range(n) if i not in held], sorted(held)


def shared(training: Data, other: Data) -> list[int]:
    """Ids of ``other`` that share a group with ``training``, as far as groups are known."""
    known = {training.group(i) for i in range(len(training))} - {None}
    return [i for i in range(len(other)) if other.group(i) in known] if known else []
