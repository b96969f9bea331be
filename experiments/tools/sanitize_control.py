"""The smallest kernel whose warps hand something over as those of the Hopper backend do (see sanitize_kernels.py)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from decayattn.backends.hopper.common.pipelines import allocate_words, load_word, store_word


@gluon.jit
def _read(words, ready, out):
    mbarrier.wait(ready, 0)
    gl.store(out, load_word(words, 0))


@gluon.jit
def _write(words, ready, out):
    store_word(words, 0, 7)
    mbarrier.arrive(ready, count=1)


@gluon.jit
def control_kernel(out, num_warps: gl.constexpr):
    words = allocate_words(1)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    gl.warp_specialize([(_read, (words, ready, out)), (_write, (words, ready, out))], [1], [24])
