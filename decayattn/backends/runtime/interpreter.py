"""What Triton's interpreter, in which kernels run on a CPU, needs besides Triton. Nothing here imports Triton."""

import functools
import importlib.metadata
import importlib.util


@functools.cache
def fails() -> str | None:
    """Why it cannot run kernels with what is installed; None if it can."""
    if importlib.util.find_spec("numpy") is None:
        return "Triton's interpreter needs numpy, which is not installed"
    triton, numpy = _installed("triton"), _installed("numpy")
    # it reads an integer as int(array of one element), which numpy 2.4 refuses
    if triton is not None and numpy is not None and _release(triton) < (3, 7) and _release(numpy) >= (2, 4):
        return f"the interpreter of Triton {triton} needs numpy below 2.4, not {numpy}: pip install 'numpy<2.4'"
    return None


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """Major and minor."""
    return tuple(int(number) for number in version.split(".")[:2] if number.isdigit())
