"""Drills: real processes and real faults against an authority and a guard, recorded, checked and shown.

`command` is the command line, `pause`, `storm` and `late_renewal` are the scenarios, `worker` is the
process that plays a holder, `history` holds what was recorded and the pure check of it.
"""
