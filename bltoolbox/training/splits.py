"""Which images are for training and which for validation: all images of a photograph are on the same side.

A set may have millions of images, so their groups are asked for one after the other and not kept.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from bltoolbox.restoration.roles import Data


def hold_out(data: Data, count: int) -> tuple[Sequence[int], Sequence[int]]:
    """Ids for training and for validation: the last ``count`` images, and all others of their groups, of which those
    that are derived from others are neither."""
    n = len(data)
    if not data.offers("group"):
        return range(n - count), range(n - count, n)
    # Each of the images looked at below is held out itself, so no group matters but those of the last ``count`` images.
    last = {i: data.group(i) for i in range(n - count, n)}
    members = {group: array("q") for group in last.values() if group is not None}
    if members:
        for i in range(n):
            group = data.group(i)
            if group in members:
                members[group].append(i)
    held: set[int] = set()
    left_out: set[int] = set()
    for i in reversed(range(n - count, n)):
        if len(held) >= count:
            break
        group = last[i]
        for member in [i] if group is None else members[group]:
            (left_out if data.derived(member) else held).add(member)
    if not left_out and (not held or min(held) == n - len(held)):
        return range(n - len(held)), range(n - len(held), n)
    return array("q", (i for i in range(n) if i not in held and i not in left_out)), sorted(held)


def shared(training: Data, other: Data) -> list[int]:
    """Ids of ``other`` that share a group with ``training``, as far as groups are known."""
    if not (training.offers("group") and other.offers("group")):
        return []
    # The set with fewer images is usually the other one.
    groups = {other.group(i) for i in range(len(other))} - {None}
    training_groups = (
        {group for i in range(len(training)) if (group := training.group(i)) in groups} if groups else set()
    )
    return [i for i in range(len(other)) if other.group(i) in training_groups]
