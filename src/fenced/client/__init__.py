"""Client and AsyncClient over the core, small values under names, and which class serves which URL."""
