"""A holder in Java: how it is started. It speaks the protocol of our own holders, over HTTP and JDBC."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from urllib.parse import unquote, urlsplit

from fenced.drills.bound import bound
from fenced.drills.processes import Start
from fenced.drills.programs import NotShown
from fenced.drills.served import SCHEMES
from fenced.drills.worker import HolderSetup

JDBC = "/usr/share/java/postgresql.jar"
"""Where Debian's libpostgresql-jdbc-java puts it; FENCED_DRILL_JDBC names another one."""
_OPTIONS = ("-XX:+UseSerialGC", "-Xms3g", "-Xmx3g", "-XX:TieredStopAtLevel=1")
"""One thread collects, and the whole program waits for it."""


def start(setup: HolderSetup) -> Start:
    if shutil.which("java") is None:
        raise NotShown("this drill needs a JDK: apt-get install default-jdk-headless")
    assert setup.guard is not None
    jar, environment = os.environ.get("FENCED_DRILL_JDBC", JDBC), {}
    if setup.guard.partition(":")[0] in ("postgresql", "postgres"):
        if not Path(jar).exists():
            raise NotShown(
                f"this drill needs the JDBC driver of PostgreSQL in {jar}: apt-get install libpostgresql-jdbc-java"
            )
        environment = _jdbc(setup.guard)
    elif setup.guard.partition(":")[0] not in SCHEMES:
        raise NotShown("the Java holder writes to PostgreSQL, or to the values of a service")
    source = str(Path(__file__).with_name("Holder.java"))
    return Start(bound(["java", *_OPTIONS, "-cp", jar, source]), environment)


def _jdbc(url: str) -> dict[str, str]:
    parts = urlsplit(url)
    if not parts.hostname:
        raise NotShown("JDBC needs an address with a host, such as postgresql://user@host:port/database")
    place = f"{parts.hostname}:{parts.port or 5432}{parts.path}"
    return {
        "FENCED_DRILL_JDBC_URL": f"jdbc:postgresql://{place}",
        "FENCED_DRILL_JDBC_USER": unquote(parts.username or "postgres"),
        "FENCED_DRILL_JDBC_PASSWORD": unquote(parts.password or ""),
    }
