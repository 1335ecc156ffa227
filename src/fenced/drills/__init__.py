"""Drills: real processes and real faults against an authority and a guard, recorded, checked and shown.

`declared` says what a drill is; `pauses`, `network`, `tokens` and `storm` have them, `play` has the verbs of their
stories. `worker` is the program of a holder process, `outside` runs somebody else's; `history` has the records and
the pure check of them.
"""
