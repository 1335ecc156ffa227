"""Addresses of ZooKeeper ensembles: the members, credentials, and a path below which everything is (a chroot)."""

from __future__ import annotations

from urllib.parse import quote, unquote

from fenced.errors import Misuse
from fenced.net.address import AddressForm, ServerAddress


class ZooKeeperAddress(ServerAddress):
    """Where an ensemble is and how to connect to it."""

    form = AddressForm(
        kind="a ZooKeeper ensemble",
        example="zookeeper://user:password@host:2181,host2,host3/chroot",
        schemes={"zookeeper": False, "zookeepers": True},
        port=2181,
    )

    def __init__(self, url: str) -> None:
        super().__init__(url)
        segments = [unquote(each) for each in self.path.split("/")[1:]]
        if segments == [""]:
            segments = []
        if any(each in ("", ".", "..", "zookeeper") or not each.isprintable() for each in segments):
            raise Misuse("the chroot of a ZooKeeper address is a path like /a/b, and not ZooKeeper's own")
        self.chroot = "".join(f"/{each}" for each in segments)
        if self.user and not self.password:
            raise Misuse(
                f"ZooKeeper's digest credentials are a user and a password, as in {self.form.example}"
            )
        self.credentials = f"{self.user}:{self.password}" if self.password else None
        """For ZooKeeper's digest scheme."""
        self.url += quote(self.chroot)

    @property
    def authenticated(self) -> bool:
        """Whether the server knows who we are, so that our nodes can be ours alone."""
        return self.credentials is not None or "ssl_certfile" in self.options
