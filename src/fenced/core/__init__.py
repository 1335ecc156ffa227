"""The algorithms, once: holding, keeping, acquiring. They import no runtime and no backend."""
