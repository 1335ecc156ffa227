"""What has happened in this instance, in the text format of Prometheus. No label holds a name: there are too many."""

from __future__ import annotations

from fenced import __version__
from fenced.errors import REFUSALS, MissingStamp, Refused, StaleToken
from fenced.events import Event, GuardDecided
from fenced.metrics.alerts import WINDOWS
from fenced.metrics.numbers import Numbers, exposition
from fenced.net.problems import PROBLEM_TYPES
from fenced.service import answers
from fenced.service.routes import ROUTES

VALUES = "values"
"""The label of the guard of the values."""
CERTIFICATE_SECONDS = float(WINDOWS["certificate"])


class ServiceNumbers(Numbers):
    """Counters of one instance. Used in the loop's thread only, unless a method says otherwise."""

    def __init__(self) -> None:
        super().__init__("service")
        self.requests, self.answers = (
            self.counts("fenced_requests_total"),
            self.counts("fenced_answers_total"),
        )
        # Every counter has a sample from the start: `increase()` sees no first event of one that begins with it.
        for metric in ("grants_total", "contended_total", "acquire_seconds"):
            self.start(f"fenced_{metric}", ("",))
        self.start("fenced_store_seconds")
        self.start("fenced_token_gap", (VALUES,))
        self.start("fenced_refusals_total", *((VALUES, kind) for kind in REFUSALS))
        self.start("fenced_unstamped_total", (VALUES, "refuse"), (VALUES, "pass"))
        self.start("fenced_errors_total", ("blank",), *((each.kind,) for each in PROBLEM_TYPES))
        self.start("fenced_answers_total", *(sent.label for sent in answers.SENT.values()))
        self.start(
            "fenced_requests_total", *((each.path, str(status)) for each in ROUTES for status in each.answers)
        )
        self.set("fenced_build_info", 1, __version__)

    def granted(self, seconds: float, count: int, waited: list[float]) -> None:
        """So many asks of a request were granted, and the store took this long; of those that had queued, how long."""
        self.counts("fenced_grants_total")["",] += count
        self.observe("fenced_store_seconds", seconds, times=count)
        if count > len(waited):
            self.observe("fenced_acquire_seconds", seconds, "", times=count - len(waited))
        for each in waited:
            self.observe("fenced_acquire_seconds", each + seconds, "")

    def refused(self, error: Refused) -> None:
        """The guard of the values has refused an operation."""
        self.add("fenced_refusals_total", VALUES, error.kind)
        if isinstance(error, MissingStamp):
            self.unstamped("refuse")
        if isinstance(error, StaleToken) and error.stamp is not None and error.mark is not None:
            self.observe("fenced_token_gap", error.stamp.token - error.mark, VALUES)

    def decided(self, event: Event) -> None:
        """The guard of the values, the only one in this process, has raised a mark. In any thread."""
        if isinstance(event, GuardDecided) and event.verdict == "admit" and event.token and event.mark:
            self.observe("fenced_token_gap", event.token - event.mark, VALUES)

    def unstamped(self, ruling: str) -> None:
        self.add("fenced_unstamped_total", VALUES, ruling)

    def alerts(self, certificate: tuple[str, float] | None) -> list[str]:
        """What needs attention, for a page that has no Prometheus behind it."""
        found = []
        if certificate is not None and certificate[1] < CERTIFICATE_SECONDS:
            file, left = certificate
            when = f"ends in {left / 86400:.0f} days" if left > 0 else "has ended"
            found.append(f"The certificate {file} {when}: replace it, then send SIGHUP")
        if passed := self.counts("fenced_unstamped_total")[VALUES, "pass"]:
            found.append(f"Values: {passed:,} admitted without a stamp since this instance started")
        return found

    def text(self, held: int, expired: int, contended: int, certificate: tuple[str, float] | None) -> str:
        """`held` requests are held now; `expired` leases ended while they were used; `contended` asks had to queue."""
        self.set("fenced_held_requests", held)
        self.set("fenced_contended_total", contended, "")
        self.set("fenced_lost_total", expired, "", "expired")
        if certificate is not None:
            self.set("fenced_certificate_seconds", certificate[1], certificate[0])
        return exposition(self.samples())
