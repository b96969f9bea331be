"""`python -m decayattn.check`: is decayattn right and fast on this machine? Its output can be pasted into an issue.

Each backend has a process of its own, so that a kernel that crashes or hangs costs one row of the table.
"""
