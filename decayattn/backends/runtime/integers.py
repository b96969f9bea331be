"""Integer arithmetic for grids and tiles on the host, where triton.cdiv takes five microseconds."""

def cdiv(number: int, divisor: int) -> int:
    """Return the quotient, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Return the least power of 2 that is at least `number`, for a number of at least 1."""
    return 1 << (number - 1).bit_length()
