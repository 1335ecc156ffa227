"""Guards sit at the resource and decide; each agrees with `fenced.decision`."""
