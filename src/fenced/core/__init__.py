"""The client's algorithms, written once. They import no runtime and no backend."""
