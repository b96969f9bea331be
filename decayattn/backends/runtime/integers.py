"""Numbers of programs and tiles, for who launches.

triton.cdiv and triton.next_power_of_2 are made for kernels: from Python, each takes five microseconds.
"""

def cdiv(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The least power of 2 that is not below a number of at least 1."""
    return 1 << (number - 1).bit_length()
