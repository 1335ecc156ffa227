"""Addresses of etcd clusters: the members and our credentials."""

from __future__ import annotations

from fenced.errors import Misuse
from fenced.net.address import AddressForm, ServerAddress


class EtcdAddress(ServerAddress):
    """Where the members are and how to connect to them."""

    form = AddressForm(
        kind="an etcd cluster",
        example="etcd://user:password@host:2379,host2,host3",
        schemes={"etcd": False, "etcds": True},
        port=2379,
    )
    alpn = ("h2",)

    def __init__(self, url: str) -> None:
        super().__init__(url)
        if self.path not in ("", "/"):
            raise self.wrong()
        if bool(self.user) != bool(self.password):
            raise Misuse(
                f"an address of an etcd cluster has both a user and a password, as in {self.form.example}"
            )
