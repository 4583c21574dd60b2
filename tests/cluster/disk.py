"""A disk that loses at a power failure what was not synced: a file system in a file, copied at that moment.

In: a directory, a size. Out: the directory as a file system; after `lose_power`, with what a disk has then.
"""

from __future__ import annotations

from pathlib import Path

from tests.cluster.network import ClusterError, command


class Disk:
    """An ext4 file system that is mounted at a directory. Needs root and loop devices."""

    def __init__(self, place: Path, size_mb: int) -> None:
        """Make it and mount it; raises ClusterError."""
        self.place = place
        self._image = place.with_name(f"{place.name}.img")
        with self._image.open("wb") as file:
            file.truncate(size_mb << 20)
        command("mkfs.ext4", "-q", "-m", "0", "-N", "8192", str(self._image))
        self._mount()

    def lose_power(self) -> None:
        """Forget what was not synced; no process may use it any more. Raises ClusterError."""
        copy = self._image.with_suffix(".copy")
        command("cp", "--sparse=always", str(self._image), str(copy))
        self.unmount()
        copy.replace(self._image)
        self._mount()

    def unmount(self) -> None:
        """Unmount it; raises ClusterError."""
        command("umount", str(self.place))

    def _mount(self) -> None:
        # The kernel writes by itself what nobody has synced, but not for a while.
        command("mount", "-o", "loop,commit=300", str(self._image), str(self.place))
        self.place.chmod(0o700)


def obstacle(place: Path) -> str:
    """Return why there can be no such disk here, "" if there can."""
    try:
        place.mkdir()
        Disk(place, 8).unmount()
    except (ClusterError, OSError) as error:
        return f"no disk that loses its cache: {error}"
    return ""
