"""Requirements of Triton's interpreter, which runs kernels on a CPU. Nothing here imports Triton."""

import functools
import importlib.metadata


@functools.cache
def fails() -> str | None:
    """Reason why it cannot run kernels with the installed packages, or None."""
    triton, numpy = _installed("triton"), _installed("numpy")
    if numpy is None:
        return "Triton's interpreter needs numpy, which is not installed"
    # it converts an array of one element by int(array), which raises from numpy 2.4 on
    if triton is not None and _release(triton) < (3, 7) and _release(numpy) >= (2, 4):
        return f"the interpreter of Triton {triton} needs numpy below 2.4, not {numpy}: pip install 'numpy<2.4'"
    return None


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """Return the major and the minor version."""
    return tuple(int(number) for number in version.split(".")[:2] if number.isdigit())
