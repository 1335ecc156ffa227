"""What Linux says about this machine: its file systems, and its boot. And what this process runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fenced.errors import Misconfigured

NETWORK = frozenset(
    "9p afs beegfs ceph cifs coda fuse.ceph fuse.gcsfuse fuse.glusterfs fuse.juicefs fuse.rclone fuse.s3fs fuse.sshfs "
    "fuse.vmhgfs-fuse gfs2 glusterfs gpfs lustre "
    "ncpfs nfs nfs4 ocfs2 orangefs pvfs2 smb3 smbfs vboxsf".split()
)
"""File systems that several machines may use at the same time."""
IN_MEMORY = frozenset(("tmpfs", "ramfs", "devtmpfs", "rootfs"))
"""File systems that keep their files in memory: they are empty after a reboot."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS = Path("/proc/self/mountinfo")


def mount_of(path: Path) -> tuple[str, str]:
    """The mount point below which a path lies, or which it is, and the kind of its file system."""
    found = ("", "")
    for point, kind in _mounts():
        inside = str(path) == point or str(path).startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(found[0]):  # of mounts on one point the last covers the others
            found = (point, kind)
    return found


def _mounts() -> list[tuple[str, str]]:
    """(mount point, file system) of every mount that this process sees."""
    try:
        lines = os.fsdecode(_MOUNTS.read_bytes()).splitlines()
    except OSError:
        return []
    mounts = []
    for line in lines:
        left, _, right = line.partition(" - ")
        point = left.split(" ")[4]
        for code in ("040", "011", "012", "134"):
            point = point.replace(f"\\{code}", chr(int(code, 8)))
        mounts.append((point, right.split(" ")[0]))
    return mounts


def boot_id() -> str:
    """The kernel's id of this boot: times of another boot mean nothing."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError as error:
        raise Misconfigured(f"{_BOOT_ID} cannot be read ({error}); fenced needs Linux's /proc") from error


def program() -> str:
    """What this process runs, for people: `report.py`, `billing` of `python -m billing`, or `python`."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        return str(spec.name.removesuffix(".__main__"))[:200]
    script = os.path.basename(sys.argv[0]) if sys.argv else ""
    return script[:200] if script not in ("", "-", "-c") else "python"
