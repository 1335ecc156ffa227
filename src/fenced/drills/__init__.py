"""Drills: real processes and real faults against an authority and a guard, recorded, checked and shown.

`command` is the command line; `pause`, `storm` and `late_renewal` are the scenarios; `worker` is the program of a
holder process; `history` has the records and the pure check of them.
"""
