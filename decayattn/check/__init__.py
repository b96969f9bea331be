"""`python -m decayattn.check`: is decayattn right and fast on this machine? Its output can be pasted into an issue.

machine: the software, the GPUs, the backends that run here, and the choice of "auto". calls: calls of every backend
compared with float64 (`decayattn.testing`), and the time of one compared with SDPA. processes: a process for each
backend, so that a kernel that crashes or hangs costs one row of the table. __main__: the program.
"""
