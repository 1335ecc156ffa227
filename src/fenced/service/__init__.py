"""`fenced serve`: any authority behind HTTP, for programs in any language. docs/service.md describes it."""
