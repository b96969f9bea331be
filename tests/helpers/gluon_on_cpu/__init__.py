"""Gluon kernels on a CPU: warps that wait for each other, copies that arrive late, and accesses that race.

Triton's interpreter runs no Gluon, so without a GPU nothing but a compiler would look at the Hopper kernels. Here they
run as Python: `Kernel(forward_kernel)[(programs,)](...)` translates a kernel and its functions (translation.py), with
its own tensors (arrays.py) and Gluon's operations (language.py). The warps of all programs run one at a time in an
order that is drawn from a seed. So are asynchronous copies, at any time between their start and the end of a wait for
them (machine.py). Shared memory records the writer and the readers of every place. An access is an error where nothing
orders it after those before (shared_memory.py): a race is found even if it did no harm this time.

Not here: layouts in registers, which the compiler checks (experiments/tools/compile_kernels.py); what single warps of a
warpgroup do to each other in shared memory, where the compiler inserts barriers; races in global memory.
"""

from gluon_on_cpu.machine import Deadlock, Race
from gluon_on_cpu.translation import Kernel, python_of

__all__ = ["Deadlock", "Kernel", "Race", "python_of"]
