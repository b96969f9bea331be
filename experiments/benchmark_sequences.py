"""Speed of packed sequences, sliding windows, decoding and generation; correct first.

    python experiments/benchmark_sequences.py                              # on a GPU: all of it
    python experiments/benchmark_sequences.py --what decode --decode-batch 16       # part of it, smaller

* packed: decay_attention_varlen on documents of mixed length, and decay_attention with a sliding window, beside
  decay_attention on a dense batch: TFLOP/s of the pairs of query and key that are visible, forward and backward.
* decode: one new token over a long cache; bytes read per second, beside those of a copy on the same device.
* generate: tokens (bytes) per second that a small language model writes without a cache, with one, with its step
  captured in a CUDA graph, and so with a cache that evicts; and the length of the latter while it writes a long text.

Whatever leaves its error budget gets no speed, and the exit status is 1. Without a GPU the kernels run in Triton's
interpreter on small shapes: packed and decode are checked and not timed, and generate, which is timed by the clock, is
that CPU's. The JSON is written after every part, so that a run cut short keeps what it has.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sequence_benchmark import decoding, figure, generation, packed
from sequence_benchmark.report import new_report
from shared.cases import DTYPES
from shared.options import declare, declare_output, positive
from shared.provenance import ROOT, provenance
from shared.report import write
from shared.timing import device_and_timer

from decayattn.backends import registry
from decayattn.problem import MAX_HEAD_DIM

PARTS = {"packed": packed.run, "decode": decoding.run, "generate": generation.run}

# What a call without options does: the first on a GPU; the second is what a CPU does in seconds
GPU_DEFAULTS = {
    "dtype": "bfloat16", "backend": "auto", "rounds": 5, "output": ROOT / "results/benchmark_sequences.json",
    "packed_head_dims": [64, 128], "packed_heads": 16, "packed_documents": 64, "packed_document_lengths": [64, 4096],
    "packed_batch": 4, "packed_length": 8192, "packed_window": 1024,
    "decode_batch": 64, "decode_heads": 32, "decode_kv_heads": 8, "decode_head_dim": 128, "decode_tokens": 32768,
    "generate_layers": 4, "generate_width": 256, "generate_heads": 4, "generate_half_lives": [4.0, 64.0],
    "generate_prompt": 8192, "generate_timed": 512, "generate_evict_every": 128, "generate_stream": 100_000,
}
CPU_DEFAULTS = {
    "dtype": "float32", "backend": "triton", "rounds": 2,
    "packed_head_dims": [16], "packed_heads": 2, "packed_documents": 5, "packed_document_lengths": [3, 70],
    "packed_batch": 1, "packed_length": 140, "packed_window": 40,
    "decode_batch": 2, "decode_heads": 4, "decode_kv_heads": 2, "decode_head_dim": 16, "decode_tokens": 150,
    "generate_layers": 2, "generate_width": 32, "generate_heads": 2, "generate_half_lives": [1.0, 2.0],
    "generate_prompt": 128, "generate_timed": 32, "generate_evict_every": 16, "generate_stream": 400,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 1 if anything is wrong or fails."""
    argv = sys.argv[1:] if argv is None else list(argv)
    options = parse(argv, torch.cuda.is_available())
    without_gpu = "No GPU, so no speeds of kernels: their errors in Triton's interpreter. Text is timed on this CPU."
    return run(options, argv, *device_and_timer(options.round_ms, without_gpu))


def run(
    options: argparse.Namespace, argv: Sequence[str], device: str, timer: Callable[[Callable[[], object]], float] | None
) -> int:
    """Every part that was asked for; without a timer, no speeds of kernels."""
    report: dict[str, Any] = provenance("experiments/benchmark_sequences.py", argv, options.commit)
    report |= new_report(options.rounds)
    print(" · ".join(f"{key} {report[key]}" for key in ("device", "driver", "torch", "commit")), flush=True)
    for part in dict.fromkeys(options.what):
        PARTS[part](options, device, timer, report)
        if device == "cuda":
            torch.cuda.empty_cache()
        if options.output:
            write(report, options.output)
            print(f"\nwrote {options.output}", flush=True)
    if options.plot and any(report[key] for key in ("packed", "decode", "generate", "stream")):
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        figure.draw(report).savefig(options.plot)
        print(f"wrote {options.plot}")
    if report["missing"]:
        print("\nFAILED: " + "; ".join(f"{entry['case']}: {entry['reason']}" for entry in report["missing"]))
    return int(bool(report["missing"]))


def parse(argv: Sequence[str], cuda: bool) -> argparse.Namespace:
    """The options, checked, defaults filled in for this machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = declare(parser, GPU_DEFAULTS if cuda else CPU_DEFAULTS)
    option("--what", "parts to run", choices=tuple(PARTS), nargs="+", default=list(PARTS))
    option("--dtype", "dtype of the keys and of the model", choices=tuple(DTYPES))
    option("--mean-log-decay", "mean log-decay per token, natural log (drawn from [2m, 0])", type=float, default=-0.01)
    option("--rounds", "interleaved rounds", type=positive)
    option("--round-ms", "milliseconds that a round gives every kernel call", type=float, default=30.0)
    option("--seed", "seed of all random numbers", type=int, default=0)
    declare_output(option, "JSON file; None writes none", plot=True)
    option("--backend", "our backend in the packed part", choices=registry.NAMES)
    option("--packed-head-dims", "head dimensions D = D_v", type=positive, nargs="+", metavar="D")
    option("--packed-heads", "heads H", type=positive)
    option("--packed-documents", "packed documents", type=positive)
    lengths = "least and largest length of a document, drawn uniformly in the logarithm"
    option("--packed-document-lengths", lengths, type=positive, nargs=2, metavar=("LEAST", "LARGEST"))
    option("--packed-batch", "sequences of the dense batch", type=positive)
    option("--packed-length", "their length", type=positive)
    option("--packed-window", "tokens to the left that the sliding window shows", type=positive)
    option("--decode-batch", "cache entries B", type=positive)
    option("--decode-heads", "query heads H", type=positive)
    option("--decode-kv-heads", "key heads H_kv", type=positive)
    option("--decode-head-dim", "head dimension D = D_v", type=positive)
    option("--decode-tokens", "tokens in the cache, the new one among them", type=positive)
    option("--generate-layers", "blocks of the model", type=positive)
    option("--generate-width", "width of the model", type=positive)
    option("--generate-heads", "heads of the model", type=positive)
    lives = "half-lives in tokens, from the fastest head to the slowest"
    option("--generate-half-lives", lives, type=float, nargs=2, metavar=("SHORT", "LONG"))
    option("--generate-tolerance", "probability that evictions may cost a row", type=float, default=2.0**-24)
    option("--generate-evict-every", "tokens between two evictions", type=positive)
    option("--generate-prompt", "tokens (bytes) of the prompt", type=positive)
    option("--generate-timed", "tokens written after it per mode and round", type=positive)
    option("--generate-stream", "tokens of the long text, written with evictions", type=positive)
    options = parser.parse_args(argv)
    for name, expected in _refusals(options, cuda):
        got = getattr(options, name.replace("-", "_"))
        parser.error(f"--{name}: expected {expected}, got {' '.join(map(str, got)) if isinstance(got, list) else got}")
    if options.output and not options.plot:
        options.plot = options.output.with_suffix(".png")
    return options


def _refusals(options: argparse.Namespace, cuda: bool) -> list[tuple[str, str]]:
    """(option, what was expected) of every option that cannot be."""
    shortest, longest = options.packed_document_lengths
    short, long = options.generate_half_lives
    heads, width, every = options.generate_heads, options.generate_width, options.generate_evict_every
    rules = [
        ("dtype", "float16 or float32, because Triton's interpreter multiplies bfloat16 wrongly",
         cuda or options.dtype != "bfloat16"),
        ("round-ms", "a number above 0", options.round_ms > 0),
        ("packed-head-dims", f"at most {MAX_HEAD_DIM}", max(options.packed_head_dims) <= MAX_HEAD_DIM),
        ("packed-document-lengths", "the least before the largest", shortest <= longest),
        ("decode-heads", f"a multiple of --decode-kv-heads {options.decode_kv_heads}",
         options.decode_heads % options.decode_kv_heads == 0),
        ("decode-head-dim", f"at most {MAX_HEAD_DIM}", options.decode_head_dim <= MAX_HEAD_DIM),
        ("generate-width", f"a multiple of --generate-heads {heads}, at most {MAX_HEAD_DIM} times it",
         width % heads == 0 and width <= MAX_HEAD_DIM * heads),
        ("generate-half-lives", "two numbers above 0, the shorter one first", 0 < short <= long < float("inf")),
        ("generate-tolerance", "a number between 0 and 1", 0 < options.generate_tolerance < 1),
        ("generate-timed", f"at least --generate-evict-every {every}, or no eviction is timed",
         options.generate_timed >= every),
        ("generate-stream", f"at least --generate-evict-every {every}", options.generate_stream >= every),
    ]
    return [(name, expected) for name, expected, right in rules if not right]


if __name__ == "__main__":
    sys.exit(main())
