"""`python -m decayattn.check`: is decayattn right and fast on this machine? What it prints is to be pasted into issues.

A module for each section, with functions that return data, and a `report` that prints it line by line as it comes and
returns what is wrong: the versions; which backend takes an ordinary call, and why not a faster one (choice); errors of
calls against float64, as fractions of the error budget (`decayattn.testing`), and for which private names of PyTorch
and Triton public ones are used instead (errors); times beside other attention kernels (speed). __main__ is the
program: on a GPU its processes compile and judge from the beginning, while the first sections are printed.
"""
