"""The error budget: how far a kernel's results may be from float64, and the gradient validation built on it.

Three evaluations of the same problem decide, per tensor and head, in the Frobenius norm and in the maximum norm::

    ‖x − x64‖  ≤  2 ‖eager − x64‖ + eps(dtype of x) ‖x64‖ + 4 eps(accumulator) ‖A‖

* x64: `decay_attention(backend="reference")` on float64 inputs, gradients by autograd. Packed or padded sequences are
  cut out and evaluated one by one, here and below, so that nothing can cross a boundary.
* eager: `explicit_attention`, the formulas written out by hand: the error that this precision costs in any program. It
  rounds the operands of matrix products, P, dS and the results to the inputs' dtype, and nothing else.
* A: `explicit_attention` over absolute values: the size of all terms of a sum. It gives a scale to a result that
  cancels, such as a gradient that is zero in exact arithmetic.

eps(accumulator) is float32's. For float64 inputs the oracle is no more exact than the tested results, so eps is
float64's and A is multiplied by 1 + max |S|: exp turns an absolute error of eps·|S| in a score into a relative one.

One rounding of a few independent entries, such as the gradient of a constant decay, is a matter of chance. So ‖eager −
x64‖ is the largest of up to 16 roundings of the same values (`DRAWS`), each as a kernel may round. A result that
exceeds its budget by less than a factor of 2 gets 64 (`MORE_DRAWS`). Nothing is tuned by hand.

The verdict of a comparison is "ok", "wrong", or "cannot tell": the budget is no smaller than the result, so zeros would
pass. Results that are 0 by contract must be exactly 0: the gradients of a first λ and of a reset, of rows that see no
key and of keys that no row sees, and everything outside of the sequences. The dtype decides which other errors show.
This is the smallest relative error of one head that is found wrong (256 tokens, D = 64, normal inputs)::

              out, dv   dq, dk   dscale, dbias   dlog_decay   dsink   lse
    float32   2e-6      2e-5     4e-5            1e-3         2e-4    3e-6
    float16   0.2 %     0.2 %    0.2 %           0.7 %        0.3 %   3e-6
    bfloat16  1.2 %     1.5 %    1.1 %           3 %          3 %     3e-6

Judge formulas in float32. Judge kernels that take only 16 bits in float16.
"""

from decayattn.testing.attention import assert_within_budget, verify_attention, verify_attention_varlen
from decayattn.testing.call import Comparison, format_table
from decayattn.testing.formulas import explicit_attention
from decayattn.testing.models import GradientRow, compare_model_gradients

__all__ = [
    "Comparison", "GradientRow", "assert_within_budget", "compare_model_gradients", "explicit_attention",
    "format_table", "verify_attention", "verify_attention_varlen",
]
