"""`python -m decayattn.check`: is decayattn right and fast on this machine? Its output can be pasted into an issue.

Each section is a module with functions that return data, and a `report` that prints it line by line and returns the
faults. versions: the software and the GPUs. choice: the backend for an ordinary call, and reasons against faster ones.
errors: errors of calls against float64, as fractions of the error budget (`decayattn.testing`), and private names of
PyTorch and Triton that public ones replace. speed: times compared with other attention kernels. __main__ is the
program. On a GPU its processes compile and judge from the start, while it prints the first sections.
"""
