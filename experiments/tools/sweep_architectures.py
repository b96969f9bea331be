"""Every architecture of transformers with attn_implementation="decayattn", compared with its own eager attention.

    python experiments/tools/sweep_architectures.py --output results/architectures.json
    python experiments/tools/sweep_architectures.py --only LlamaForCausalLM T5ForConditionalGeneration

Each architecture is built small, with random weights, on the CPU. Its outcome is one of these:

* right: the outputs equal those of eager attention, but for those of padding. Batches of 1 and 2 have no mask, a mask
  of ones, or padding on either side. Without a mask, outputs of eager attention with a mask of ones are right, too.
  Another last token must change what it changes with eager attention. A decoder is padded, too, and tokens are
  generated with a dynamic and with a static cache.
* refused: the model raises an error of decayattn that names the reason.
* wrong: anything else.
* not judged: no small model could be built or run with eager attention, or its outputs hardly depend on other tokens.

The exit status is 1 if an architecture is wrong.
"""

import argparse
import copy
import inspect
import json
import os
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from shared import workers
from shared.provenance import provenance
from shared.report import write
from torch import Tensor
from torch.utils._pytree import tree_leaves
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

import decayattn
from decayattn.integrations.attention_interface import NAME

SCRIPT = "experiments/tools/sweep_architectures.py"
# models with a head; the bare model only of a configuration that has none of these
HEADS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT")
TOKENS, PADDING, VOCABULARY, PARAMETERS = 12, 4, 128, 4_000_000
# relative to the largest output: far above rounding in float32, far below the effect of a token that is seen in error
TOLERANCE, DEPENDENCE = 1e-4, 1e-3
# "largest": value of an integer of a configuration, by its name; the first pattern that is found counts. "variants":
# values that replace those, one set after the other until eager attention runs
SMALL = json.loads(Path(__file__).with_name("small_models.json").read_text())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep; the exit status is 1 if an architecture is wrong."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="CLASS", help="these model classes")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: one per core")
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    began = time.monotonic()
    found, names = {}, options.only or architectures()
    for name, outcome in tqdm(sweep(names, options.processes), total=len(names), disable=not sys.stderr.isatty()):
        found[name] = outcome
        if options.only or outcome["outcome"] == "wrong":
            tqdm.write(f"{name} {json.dumps(outcome)}")
    counts = Counter(outcome["outcome"] for outcome in found.values())
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    if options.output is not None:
        about = {"transformers": transformers.__version__, "seconds": round(time.monotonic() - began, 1),
                 "counts": counts, "architectures": dict(sorted(found.items()))}
        write(provenance(SCRIPT, argv) | about, options.output)
    return int("wrong" in counts)


def architectures() -> list[str]:
    """Names of the model classes to judge, a few of each configuration."""
    tables = [getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES") for head in HEADS]
    with_head = {kind for table in tables for kind in table}
    bare = {kind: names for kind, names in modeling_auto.MODEL_MAPPING_NAMES.items() if kind not in with_head}
    # the model of decayattn itself is listed once its integration is imported
    found = (names for table in (*tables, bare) for kind, names in table.items() if kind != NAME)
    return sorted({names if isinstance(names, str) else names[0] for names in found})


def sweep(names: Sequence[str], processes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, outcome) of every model class, in the order in which processes finish."""
    tasks = [range(first, min(first + 10, len(names))) for first in range(0, len(names), 10)]
    for number, result in workers.calls(_work, (list(names),), tasks, processes, limit=120.0):
        yield names[number], result if isinstance(result, dict) else {"outcome": "wrong", "reason": str(result)}


def _work(number: int, names: list[str]) -> tuple[dict[str, Any], bool]:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    return judge(names[number]), True


def judge(name: str) -> dict[str, Any]:
    """Outcome of one model class, with its reason, or with its largest error and what was compared."""
    outcome, compared = "not judged", dict[str, float]()
    try:
        kind = getattr(transformers, name)
        check_refusal(kind)
        eager, inputs = runnable(kind)
        if not depends_on_others(eager, inputs):
            return {"outcome": outcome, "reason": "its outputs hardly depend on other tokens"}
        outcome = "wrong"
        ours = build(kind, eager.config, NAME)
        ours.load_state_dict(eager.state_dict())
        for case, error in cases(eager, ours, inputs):
            compared[case] = error
            if not error <= TOLERANCE:
                return {"outcome": outcome, "reason": f"{case}: relative error {error:.1e}"}
    except Exception as error:
        after = f"after {', '.join(compared)}: " if compared else ""
        reason = f"{after}{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return {"outcome": "refused" if is_refusal(error) else outcome, "reason": reason}
    return {"outcome": "right", "error": float(f"{max(compared.values()):.0e}"), "compared": " ".join(compared)}


def small_config(kind: type[PreTrainedConfig], values: dict[str, Any]) -> PreTrainedConfig:
    """The default configuration with small integers, and with values where it has them; parts of it likewise."""
    # an argument of these that is no attribute: of its default, 512, no head can be
    wide = kind.model_type in ("embedding_gemma2_text", "gemma4_text", "gemma4_unified_text")
    changed: dict[str, Any] = {"global_head_dim": 16} if wide else {}
    token = VOCABULARY
    for name, value in vars(kind()).items():
        if isinstance(value, PreTrainedConfig):
            changed[name] = small_config(type(value), values)
        elif name in values:
            changed[name] = values[name]
        elif re.search(r"_token_(id|index)$", name) and isinstance(value, int) and value >= VOCABULARY // 2:
            token -= 1
            changed[name] = token
        elif name == "rope_parameters" and isinstance(value, dict):
            changed[name] = small_rope(value, values.get("mrope_section"))
        elif name in ("image_size", "conv_dim") and isinstance(value, (list, tuple)):
            changed[name] = type(value)([32] * len(value))
        elif type(value) is int and not name.startswith("_"):
            largest = next((x for pattern, x in SMALL["largest"].items() if re.search(pattern, name)), value)
            if largest < value:
                changed[name] = largest
    return kind(**changed)


def small_rope(parameters: dict[str, Any], section: list[int] | None) -> dict[str, Any]:
    """rope_parameters, also those by layer type, with a section for small heads."""
    changed = {name: small_rope(x, section) if isinstance(x, dict) else x for name, x in parameters.items()}
    return changed | {"mrope_section": section} if section and "rope_type" in parameters else changed


def build(kind: Any, config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return kind._from_config(copy.deepcopy(config), attn_implementation=attention).eval()


def check_refusal(kind: Any) -> None:
    """Raise the error of decayattn that a model raises when it is created, without memory for its weights."""
    try:
        with torch.device("meta"):
            build(kind, kind.config_class(), NAME)
    except Exception as error:
        if is_refusal(error):
            raise


def is_refusal(error: Exception) -> bool:
    """True for a ValueError that decayattn itself raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return isinstance(error, ValueError) and Path(last.filename).is_relative_to(Path(decayattn.__file__).parent)


def runnable(kind: Any) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A small model with eager attention, and inputs of a batch of 2 that it runs on."""
    errors: list[Exception] = []
    for values in SMALL["variants"]:
        try:
            config = small_config(kind.config_class, values)
            with torch.device("meta"):
                count = sum(p.numel() for p in build(kind, config, "eager").parameters())
            if count > PARAMETERS:
                raise ValueError(f"the smallest model has {count} parameters")
            model = build(kind, config, "eager")
            randomise(model)
        except ImportError:
            raise
        except Exception as error:
            errors.append(error)
            continue
        for inputs in candidates(model):
            try:
                if torch.isfinite(run(model, inputs)).all():
                    return model, inputs
            except Exception as error:
                errors.append(error)
    raise errors[0] if errors else ValueError("no inputs are known for it")


@torch.no_grad()
def randomise(model: PreTrainedModel) -> None:
    """Weights large enough for attention to matter; transformers' own leave its probabilities nearly equal."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1 and len(parameter):
            parameter.copy_(noise * (1.5 / max(1, parameter[0].numel()) ** 0.5))
        else:
            parameter.add_(0.1 * noise)


def candidates(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Inputs of a batch of 2 that a model may take."""
    names = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def tokens(count: int) -> Tensor:
        return torch.randint(5, VOCABULARY // 2 - 4, (2, count), generator=generator)

    def of(*settings: str, default: int) -> int:
        """The first integer of these names in the configuration or its parts; the first of several."""
        parts = (model.config, *(getattr(model.config, name, None) for name in model.config.sub_configs))
        values = (getattr(part, name, None) for part in parts for name in settings)
        firsts = (value[0] if isinstance(value, (list, tuple)) else value for value in values)
        return next((value for value in firsts if isinstance(value, int)), default)

    image = of("num_channels", "in_channels", default=3), *[of("image_size", default=32)] * 2
    pixels = {"pixel_values": random(2, *image)}
    if "input_ids" in names:
        text = {"input_ids": tokens(TOKENS)}
        if "bbox" in names:
            text["bbox"] = torch.randint(0, 10, (2, TOKENS, 4), generator=generator).sort(-1).values
        if "decoder_input_ids" in names and model.config.is_encoder_decoder:
            text["decoder_input_ids"] = tokens(7)
        yield from (text, text | pixels) if "pixel_values" in names else (text,)
        return
    decoder = {"decoder_input_ids": tokens(7)} if "decoder_input_ids" in names else {}
    if "grid_thw" in names:
        width = image[0] * of("temporal_patch_size", default=1) * of("patch_size", default=8) ** 2
        yield {next(iter(names)): random(40, width), "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 6]])}
    shapes: dict[str, list[tuple[int, ...]]] = {
        "pixel_values": [image, (of("num_frames", default=2), *image)],
        "pixel_values_videos": [(of("frames_per_clip", "num_frames", default=2), *image)],
        "input_values": [(3200,), (of("max_length", default=64), of("num_mel_bins", default=32))],
        "input_features": [shape for bins in (of("num_mel_bins", "feature_size", "input_dim", default=80), 80, 160)
                           for shape in ((bins, 64), (64, bins), (bins, 2 * VOCABULARY))],
    }
    for name, of_name in shapes.items():
        yield from ({name: random(2, *shape)} | decoder for shape in of_name if name in names)


@torch.no_grad()
def run(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    """Logits, or the first floating-point output."""
    torch.manual_seed(3)  # some models draw noise
    names = inspect.signature(model.forward).parameters
    outputs = model(**inputs, **({"use_cache": False} if "use_cache" in names else {}))
    named = outputs if isinstance(outputs, dict) else {}
    found = (named.get("logits"), named.get("last_hidden_state"), *tree_leaves(outputs))
    return next(x for x in found if isinstance(x, Tensor) and x.is_floating_point())


def depends_on_others(model: PreTrainedModel, inputs: dict[str, Tensor]) -> bool:
    """True if another token, or another quarter of an image or a sound, changes the last output."""
    changed = {name: value.clone() for name, value in inputs.items()}
    first = next(iter(changed.values()))
    if first.is_floating_point():
        first[..., : max(1, first.shape[-1] // 4)] += 1
    else:
        first[:, -3] += 1
    after, before = run(model, changed), run(model, inputs)
    return difference(*((x[:, -1:] if x.ndim > 2 else x) for x in (after, before))) > DEPENDENCE


def difference(found: Tensor, expected: Tensor, real: Tensor | None = None) -> float:
    """Largest difference of the outputs of real tokens, relative to the largest value; infinite for NaN."""
    if found.shape != expected.shape:
        return float("inf")
    if real is not None:
        found, expected = found[real], expected[real]
    error = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    return float(error) if error.isfinite() else float("inf")


def cases(eager: Any, ours: Any, inputs: dict[str, Tensor]) -> Iterator[tuple[str, float]]:
    """(case, error) of everything that eager attention can run; an error of `ours` alone is raised."""
    text, runs = inputs.get("input_ids"), [("batch-2", inputs, None)]
    if text is not None:
        changed = torch.cat([text[:, :-1], text[:, -1:] + 1], 1)
        runs.append(("last-token", inputs | {"input_ids": changed}, None))
    for batch in (1, 2) if "grid_thw" not in inputs else ():  # rows of patches are no batch
        first = {name: value[:batch] for name, value in inputs.items()}
        runs += [("batch-1", first, None)] * (batch == 1)
        for name, mask in masks(batch, TOKENS).items() if text is not None else ():
            runs.append((f"{name}-{batch}", first | {"attention_mask": mask}, mask.bool()))
        if "decoder_input_ids" in inputs:
            mask = masks(batch, 7)["right"]
            runs.append((f"decoder-{batch}", first | {"decoder_attention_mask": mask}, mask.bool()))
    takes_mask = text is not None and "attention_mask" in inspect.signature(eager.forward).parameters
    for name, given, real in runs:
        try:
            expected = run(eager, given)
        except Exception:  # not every model takes a mask
            continue
        if real is not None and expected.shape[:2] != real.shape:  # padding may be what was pooled
            continue
        error = difference(run(ours, given), expected, real)
        if error > TOLERANCE and real is None and takes_mask:
            # eager Moshi of transformers 5.17 is causal only with a mask
            ones = {"attention_mask": torch.ones_like(given["input_ids"])}
            error = difference(run(ours, given), run(eager, given | ones))
        if error > TOLERANCE and real is not None and name[:7] != "decoder":
            others = given | {"input_ids": given["input_ids"].where(real, given["input_ids"] + 1)}
            if difference(run(eager, others), expected, real) > TOLERANCE:  # what padding holds matters to the model
                continue
        yield name, error
    if text is not None and eager.can_generate():
        yield from generations(eager, ours, inputs)


def masks(batch: int, tokens: int) -> dict[str, Tensor]:
    made = {name: torch.ones(batch, tokens, dtype=torch.long) for name in ("ones", "left", "right")}
    made["left"][0, :PADDING] = 0
    made["right"][0, -PADDING:] = 0
    return made


def generations(eager: Any, ours: Any, inputs: dict[str, Tensor]) -> Iterator[tuple[str, float]]:
    """Share of generated tokens that differ, without padding and with, and with a static cache."""
    for name, batch, mask, cache in (("generate", 1, "ones", None), ("generate-left", 2, "left", None),
                                     ("generate-static", 2, "left", "static")):
        options = {key: value[:batch] for key, value in inputs.items() if key != "decoder_input_ids"} | dict(
            attention_mask=masks(batch, TOKENS)[mask], cache_implementation=cache, max_new_tokens=5, do_sample=False,
            pad_token_id=0, decoder_start_token_id=1,
        )

        def texts(model: Any, options: dict[str, Any] = options) -> Tensor:
            model.generation_config.eos_token_id = None
            torch.manual_seed(3)
            return model.generate(**options)

        try:
            expected = texts(eager)
        except Exception:
            continue
        found = texts(ours)
        yield name, float(found.shape != expected.shape or (found != expected).double().mean())


if __name__ == "__main__":
    sys.exit(main())
