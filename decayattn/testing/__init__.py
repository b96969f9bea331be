"""The error budget: what a kernel's results may differ from float64, and the gradient validation built on it.

Three evaluations of the same problem decide, per tensor and head, in the Frobenius norm and in the maximum norm::

    ‖x − x64‖  ≤  2 ‖eager − x64‖ + eps(dtype of x) ‖x64‖ + 4 eps(accumulator) ‖A‖

* x64: `decay_attention(backend="reference")` on float64 inputs, gradients by autograd. Sequences that are packed or
  padded are cut out and evaluated one by one, here and below, so that nothing can cross a boundary.
* eager: `explicit_attention`, the formulas written out by hand, with the operands of matrix products, P, dS and the
  results rounded to the inputs' dtype and everything else in the accumulator dtype: what that precision costs anyone.
* A: `explicit_attention` over absolute values: the size of what was added up. It gives a result that cancels, such as a
  gradient that is zero in exact arithmetic, a scale.

eps(accumulator) is float32's, and the last term stays far below the first two for 16-bit inputs. For float64 inputs the
oracle is no more exact than what it judges, so eps is float64's and A is multiplied by 1 + max |S|: both sides round
their scores, and exp turns an absolute error of eps·|S| in a score into a relative one. One rounding is a matter of
chance where a norm is over few independent entries (a constant decay's gradient is one number per head), so ‖eager −
x64‖ is the largest of up to 16 roundings of the same values (`DRAWS`; of as many as it takes). Their scores add up the
products q·k in orders of their own: A has no part in how exp magnifies the rounding of a score. So do, above 16 bits,
P·V, the sum of P and dv, whose terms may all have one sign. For 16-bit inputs P is rounded relative to a number per
row, as an online softmax rounds it, the decay is added in two parts, of a key inside its block of tokens and of the
blocks (DERIVATION.md, section 8), and half of the roundings cut scores off, as tensor cores do: all scores become a
little smaller, and a sum over rows, such as a sink's gradient, has that in full. What is outside of that budget by less
than a factor of 2 is held to 64 roundings (`MORE_DRAWS`). Nothing is tuned by hand, and nothing needs Triton.
"""

from decayattn.testing.attention import assert_within_budget, verify_attention, verify_attention_varlen
from decayattn.testing.call import Comparison
from decayattn.testing.formulas import explicit_attention
from decayattn.testing.models import GradientRow, compare_model_gradients
from decayattn.testing.table import format_table

__all__ = [
    "Comparison",
    "GradientRow",
    "assert_within_budget",
    "compare_model_gradients",
    "explicit_attention",
    "format_table",
    "verify_attention",
    "verify_attention_varlen",
]
