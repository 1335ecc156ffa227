"""Failures of an authority that its callers tell apart: other kinds of Misconfigured."""

from __future__ import annotations

from fenced.errors import Misconfigured


class FileInUse(Misconfigured):
    """Another process has this file for itself, until it ends."""


class NoNamespace(Misconfigured):
    """The store is as it should be, but nobody has created this namespace."""
