"""A tree of files as a sorted list of paths.

Sorted with "/" below every other character, each directory is followed by all that lies in it, so a
directory is a range of the list and a node is its place in it. Place 0 is the root.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from fsmount.errors import FormatError

C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)

_SLASH = "\0"  # stands for "/" in the list; no path component contains it


class Tree(Protocol[C_co]):
    """What is asked of a tree of files; a node is a place, the root 0."""

    def __len__(self) -> int: ...
    def __contains__(self, place: int) -> bool: ...

    def path(self, place: int) -> str:
        """The path of a place, "" for the root."""
        ...

    def name(self, place: int) -> str:
        """The last component of a place's path."""
        ...

    def content(self, place: int) -> C_co | None:
        """What the file at a place holds; None for a directory."""
        ...

    def size(self, place: int) -> int | None:
        """The size in bytes of the file at a place; None for a directory."""
        ...

    def is_directory(self, place: int) -> bool: ...

    def subdirectories(self, place: int) -> int:
        """How many directories lie directly in the directory at `place`."""
        ...

    def parent(self, place: int) -> int:
        """The place of the directory that a place lies in; the root's is itself."""
        ...

    def child(self, place: int, name: str) -> int | None:
        """The place of `name` in the directory at `place`; None if there is none."""
        ...

    def children(self, place: int, start: int = 0) -> Iterator[tuple[int, int]]:
        """The places directly in a directory, each with the `start` that goes on behind it."""
        ...


def _directories(files: Mapping[str, object], more: tuple[str, ...]) -> set[str]:
    found = {""}
    for path in (*files, *(f"{directory}/_" for directory in more)):
        above = path.rpartition("/")[0]
        while above not in found:
            found.add(above)
            above = above.rpartition("/")[0]
    return found


class PathTree(Generic[C]):
    """An immutable tree with a content of type C at each file; a node is a place, the root 0."""

    def __init__(self, files: Mapping[str, C], directories: tuple[str, ...] = ()) -> None:
        """Lay out `files` (relative path to content) and perhaps empty `directories`.

        Raises FormatError if a path would be a file and a directory at once.
        """
        above = _directories(files, directories)
        clash = next((path for path in above if path in files), None)
        if clash is not None:
            raise FormatError(f"{clash!r} would be a file and a directory")
        paths = [path.replace("/", _SLASH) for path in (*above, *files)]
        paths.sort()
        self._paths = paths
        self._contents = [files.get(path.replace(_SLASH, "/")) for path in paths]
        self._ends = array("q", bytes(8 * len(paths)))  # one past all that lies below a place
        self._subdirectories = array("q", bytes(8 * len(paths)))
        self._measure()

    def _measure(self) -> None:
        open_: list[int] = []  # the directories that the current place lies in
        for place, path in enumerate(self._paths):
            while open_ and not self._below(open_[-1], path):
                self._ends[open_.pop()] = place
            self._ends[place] = place + 1
            if self._contents[place] is None:
                if open_:
                    self._subdirectories[open_[-1]] += 1
                open_.append(place)
        for place in open_:
            self._ends[place] = len(self._paths)

    def _below(self, place: int, path: str) -> bool:
        return place == 0 or path.startswith(self._paths[place] + _SLASH)

    def __len__(self) -> int:
        return len(self._paths)

    def __contains__(self, place: int) -> bool:
        return 0 <= place < len(self._paths)

    def path(self, place: int) -> str:
        """The path of a place, "" for the root."""
        return self._paths[place].replace(_SLASH, "/")

    def name(self, place: int) -> str:
        """The last component of a place's path."""
        return self._paths[place].rpartition(_SLASH)[2]

    def content(self, place: int) -> C | None:
        """What the file at a place holds; None for a directory."""
        return self._contents[place]

    def is_directory(self, place: int) -> bool:
        return self._contents[place] is None

    def end(self, place: int) -> int:
        """One past the last place below `place`."""
        return self._ends[place]

    def subdirectories(self, place: int) -> int:
        """How many directories lie directly in the directory at `place`."""
        return self._subdirectories[place]

    def parent(self, place: int) -> int:
        """The place of the directory that a place lies in; the root's is itself."""
        return bisect_left(self._paths, self._paths[place].rpartition(_SLASH)[0])

    def child(self, place: int, name: str) -> int | None:
        """The place of `name` in the directory at `place`; None if there is none."""
        if _SLASH in name or "/" in name or not name:
            return None
        wanted = f"{self._paths[place]}{_SLASH}{name}" if place else name
        found = bisect_left(self._paths, wanted, place + 1, self._ends[place])
        return found if found < self._ends[place] and self._paths[found] == wanted else None

    def children(self, place: int, start: int = 0) -> Iterator[tuple[int, int]]:
        """The places directly in a directory, each with the `start` that goes on behind it."""
        here, end = max(place + 1, start), self._ends[place]
        while here < end:
            behind = self._ends[here]
            yield here, behind
            here = behind

    def files(self) -> Iterator[tuple[str, C]]:
        """All files in order: path and content."""
        for place, content in enumerate(self._contents):
            if content is not None:
                yield self.path(place), content
