"""Which findings have a runbook page."""

BASE = "docs/runbooks"
PAGES = frozenset(
    {
        "authority-stopped",
        "bypass",
        "clock",
        "cooperative",
        "guard-wrong",
        "mark-above-counter",
        "marks-could-be-lost",
        "override",
        "pooler",
        "proofs-without-key",
        "realm",
        "refusal-retried",
        "replication",
        "reused-token",
        "same-realm",
        "stage",
        "tokens-could-repeat",
        "unstamped-writer",
    }
)
