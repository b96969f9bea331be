#!/usr/bin/env python3
"""Run on GPUs what a changed kernel needs, then the benchmarks and the studies, the most important ones first. Usage::

    .ci/on_gpus.py --output out                     # all of it; planned for more than an hour on two H100
    .ci/on_gpus.py --output out --minutes 25        # no step that would end later; the next call goes on
    .ci/on_gpus.py --output out --steps suite fuzz  # part of it
    .ci/on_gpus.py --output out --triton folder     # the tests of Hopper and of launches with the Triton there, too
    .ci/on_gpus.py --output out --before tree       # and speed compared with another version
    .ci/on_gpus.py --list

out/ gets a log of every command, the JSON of the benchmarks, and steps.json: command, exit status, seconds and last
lines of each. A step that ended with status 0 at this commit is not run again, except those that go on where they
stopped. With several GPUs the steps that check share the last one, while those that time have the first. The suite,
the fuzzer, and steps over several GPUs have all. Where git does not know the commit, as in a copy, DECAYATTN_COMMIT
names it. Exit status: 1 if any step failed, 2 if something that the steps need is not installed.
"""

import argparse
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = "{python} experiments/"
# what the suite and the scripts import, peers of the benchmarks aside
PACKAGES = (
    "torch", "triton", "einops", "pytest", "xdist", "hypothesis", "lightning", "jsonargparse", "matplotlib", "numpy",
    "yaml", "transformers", "accelerate", "tqdm",
)
GRACE = 10.0  # seconds between asking a command to end and ending it


@dataclass(frozen=True)
class Step:
    """Commands of one purpose, which run at the same time.

    kind: "whole" has all GPUs, "timed" the first one, "check" the last one.
    minutes: limit, after which it is ended, and has failed.
    each: one command for each GPU, with its number as {gpu}.
    least: number of GPUs that it needs.
    path: first entry of PYTHONPATH.
    goes_on: a call continues from its output for its own minutes; so it is begun even if it ended well.
    """

    name: str
    kind: str
    minutes: float
    command: str
    each: bool = False
    least: int = 1
    path: str = ""
    goes_on: bool = False


STEPS = (
    Step("suite", "whole", 14, "{python} -m pytest -v -n {cores} -p no:cacheprovider"),
    Step("fuzz", "whole", 8, EXPERIMENTS + "tools/fuzz_kernels.py --seed {seed} --family 200 --backends triton hopper"
         " --calls {calls} --processes {share} --minutes 7", each=True),
    Step("slices", "whole", 6, EXPERIMENTS + "tools/fuzz_context.py --ranks {gpus} --seed {seed} --family 100"
         " --calls {calls} --minutes 5", least=2),
    Step("sustained", "timed", 9, EXPERIMENTS + "benchmarks/attention.py --peers cudnn flash_attn flex fla fox"
         " --decays scalar none constant --output {out}/benchmark_sustained.json"),
    Step("memcheck", "check", 6, EXPERIMENTS + "tools/sanitize_kernels.py"),
    Step("toy", "check", 5, EXPERIMENTS + "train_toy_lm.py --devices 1 --run {out}/toy"),
    Step("triton", "check", 9, "{python} -m pytest -q -n {half} -p no:cacheprovider tests/backends/hopper"
         " tests/backends/runtime tests/backends/test_registry.py tests/test_autograd.py tests/test_compatibility.py",
         path="{triton}"),
    Step("before", "timed", 9, EXPERIMENTS + "benchmarks/attention.py --regime captured --before {before} --peers cudnn"
         " --decays scalar constant none --rounds 5 --seconds 0.2 --output {out}/before.json"),
    Step("before_triton", "timed", 6, EXPERIMENTS + "benchmarks/attention.py --regime captured --before {before}"
         " --peers cudnn --backends triton --decays scalar constant none --rounds 5 --seconds 0.15"
         " --shapes 16,2048,16,64 4,8192,16,64 16,2048,16,128 4,8192,16,128 --output {out}/before_triton.json"),
    Step("sequences", "timed", 4, EXPERIMENTS + "benchmarks/sequences.py --rounds 3 --generate-stream 2000"
         " --output {out}/benchmark_sequences.json"),
    Step("overhead", "timed", 3, EXPERIMENTS + "benchmarks/overhead.py --rounds 9 --packed"
         " --output {out}/benchmark_overhead.json"),
    Step("logits", "timed", 2, EXPERIMENTS + "benchmarks/attention.py --deviation 16 --peers cudnn --decays scalar none"
         " --shapes 4,8192,16,64 4,8192,16,128 --output {out}/large_logits.json"),
    Step("skipping", "timed", 4, EXPERIMENTS + "benchmarks/skipping.py --head-dims 64 128 --rounds 3"
         " --output {out}/benchmark_skipping.json"),
    Step("context", "whole", 6, EXPERIMENTS + "benchmarks/context.py --ranks {gpus} --rounds 2"
         " --lengths 32768 131072 262144 524288 --decays -0.01 -0.1 alibi none --output {out}/benchmark_context.json",
         least=2),
    Step("strategies", "whole", 7, EXPERIMENTS + "benchmarks/training.py --strategies all --devices {gpus}"
         " --minutes 6.5 --output {out}/benchmark_strategies.json", least=2, goes_on=True),
    Step("training", "timed", 8, EXPERIMENTS + "benchmarks/training.py --minutes 7.5"
         " --output {out}/benchmark_training.json", goes_on=True),
    Step("recall", "whole", 9, EXPERIMENTS + "studies/recall.py --devices {gpus} --processes 2"
         " --minutes 8.5 --output {out}/recall.json", goes_on=True),
    Step("extrapolation", "whole", 9, EXPERIMENTS + "studies/length_extrapolation.py --devices {gpus}"
         " --minutes 8.5 --folder {out}/extrapolation --output {out}/length_extrapolation.json", goes_on=True),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps; the exit status is 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [step.name for step in STEPS]
    parser.add_argument("--output", type=Path, help="folder of the logs and figures")
    parser.add_argument("--minutes", type=float, help="begin no step that may end later; default: no limit")
    parser.add_argument("--steps", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--triton", type=Path, help="folder of another Triton, for the step of that name")
    parser.add_argument("--before", type=Path, help="tree of another version, for the steps of that name")
    parser.add_argument("--seed", type=int, default=0, help="of the fuzzer on the first GPU; the next has the next")
    parser.add_argument("--again", action="store_true", help="what ended well before, too")
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    options = parser.parse_args(argv)
    given = {name: path.resolve() for name in ("triton", "before") if (path := getattr(options, name)) is not None}
    lacking = {"triton", "before"} - given.keys()
    able = [step for step in STEPS if not any(f"{{{name}}}" in step.command + step.path for name in lacking)]
    steps = [step for step in able if step.name in options.steps]
    gpus = gpu_count()
    if options.list:
        for step in steps:
            print(f"{step.name:13}  {step.kind:5}  at most {step.minutes:g} minutes")
            for command, _, path in commands(step, gpus, Path("out"), given, options.seed):
                print(f"    {f'PYTHONPATH={path} ' if path else ''}{shlex.join(command)}")
        return 0
    if options.output is None:
        parser.error("--output: expected a folder")
    absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if absent or not gpus:
        what = f"not installed: {', '.join(absent)} (pip install -e '.[test]')" if absent else "there is no GPU here"
        print(what, file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    record = Record(options.output / "steps.json", os.environ.get("DECAYATTN_COMMIT") or head(), options.again)
    end = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    prepared = {step.name: list(commands(step, gpus, options.output, given, options.seed)) for step in steps}
    for together in stages(steps, gpus):
        with ThreadPoolExecutor(len(together)) as pool:
            list(pool.map(lambda queue: run_in_turn(queue, prepared, options.output, record, end), together))
    print(record.summary(steps))
    return int(any(record.failed(step.name) for step in steps))


def gpu_count() -> int:
    """GPUs of this machine, or those that CUDA_VISIBLE_DEVICES leaves."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return 0
    return len(re.findall(r"^GPU \d+", listed, re.MULTILINE))


def head() -> str | None:
    """The commit, with a "+" where files differ from it; None where git does not know."""
    def git(*arguments: str) -> str | None:
        ended = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
        return None if ended.returncode else ended.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
    except FileNotFoundError:
        return None
    return commit and commit + "+" * bool(git("status", "--porcelain", "--untracked-files=no"))


def stages(steps: Sequence[Step], gpus: int) -> Iterator[list[list[Step]]]:
    """The queues that run side by side, one such list after the other; the steps of a queue run in turn."""
    able = [step for step in steps if step.least <= gpus]
    for whole, group in groupby(able, lambda step: step.kind == "whole" or gpus == 1):
        some = list(group)
        if whole:
            yield [some]
        else:
            queues = [[step for step in some if step.kind == kind] for kind in ("timed", "check")]
            yield [queue for queue in queues if queue]


def commands(
    step: Step, gpus: int, out: Path, given: Mapping[str, Path], seed: int = 0
) -> Iterator[tuple[list[str], str, str]]:
    """(command, the GPUs that it sees, what Python looks into first) of a step."""
    cores = len(os.sched_getaffinity(0))  # not nproc, which prints OMP_NUM_THREADS
    every = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))).split(",")
    share = every if step.each else ["all"]
    for number, gpu in enumerate(share):
        values = dict(python=sys.executable, cores=cores, half=max(1, cores // 2), gpus=gpus, out=out.resolve(),
                      gpu=number, seed=seed + number, calls=-(-5000 // len(share)), share=max(1, cores // len(share)),
                      **given)
        seen = {"whole": every, "timed": every[:1], "check": every[-1:]}[step.kind]
        command = [part.format(**values) for part in shlex.split(step.command)]
        yield command, gpu if step.each else ",".join(seen), step.path.format(**values)


class Record:
    """Results of every step, kept in a file."""

    def __init__(self, path: Path, commit: str | None, again: bool) -> None:
        self.path, self.commit, self.again = path, commit, again
        self.steps: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
        self.lock = threading.Lock()

    def done(self, name: str) -> bool:
        """True if the step succeeded at this commit, and need not run."""
        known = self.commit is not None and not self.commit.endswith("+")
        return known and bool(self.ended(name)) and not self.again and not self.failed(name)

    def ended(self, name: str) -> list[dict[str, Any]]:
        """Its commands, if they ran at this commit."""
        found = self.steps.get(name, {})
        return found["commands"] if found and found["commit"] == self.commit else []

    def failed(self, name: str) -> bool:
        """True if one of the step's commands ended with a status other than 0."""
        return any(command["status"] for command in self.ended(name))

    def add(self, name: str, ended: list[dict[str, Any]]) -> None:
        with self.lock:
            self.steps[name] = {"commit": self.commit, "commands": ended}
            self.path.write_text(json.dumps(self.steps, indent=1, ensure_ascii=False) + "\n")

    def summary(self, steps: Sequence[Step]) -> str:
        """A line per command, with the last line that it printed."""
        lines = []
        for step in steps:
            if not self.ended(step.name):
                lines.append(f"{step.name}: not run")
            for command in self.ended(step.name):
                last = command["last_lines"][-1] if command["last_lines"] else ""
                lines.append(f"{step.name}: status {command['status']}, {command['seconds']} s: {last}")
        return "\n".join(lines)


def run_in_turn(
    steps: Sequence[Step], prepared: Mapping[str, list[tuple[list[str], str, str]]], out: Path, record: Record,
    end: float | None,
) -> None:
    """One step after the other, those left out that are done or may end too late."""
    for step in steps:
        if record.done(step.name) and not step.goes_on:
            continue
        if end is not None and time.monotonic() + 60 * step.minutes > end:
            print(f"{step.name}: may take {step.minutes:g} minutes, left for the next call", flush=True)
            continue
        print(f"{step.name} begins", flush=True)
        each = prepared[step.name]
        logs = [out / f"{step.name}{f'_{n}' if step.each else ''}.log" for n in range(len(each))]
        with ThreadPoolExecutor(len(each)) as pool:
            seconds = [60 * step.minutes] * len(each)
            ended = list(pool.map(run, *zip(*each, strict=True), logs, seconds))
        record.add(step.name, ended)
        print(f"{step.name} ended: {', '.join(str(command['status']) for command in ended)}", flush=True)


def run(command: list[str], gpus: str, path: str, log: Path, seconds: float) -> dict[str, Any]:
    """Run one command on some GPUs; what it prints goes to a file. Its processes are ended after `seconds`."""
    paths = os.pathsep.join(filter(None, [path, str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ, "CUDA_VISIBLE_DEVICES": gpus, "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
    }
    began = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = f"ended after {seconds:.0f} s"
            for signum in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, signum)
                    process.wait(GRACE)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    continue
    lines = log.read_text(errors="replace").replace("\r", "\n").splitlines()
    return {
        "command": shlex.join(["python" if part == sys.executable else part for part in command]), "gpus": gpus,
        "status": status, "seconds": round(time.monotonic() - began, 1),
        "last_lines": [line for line in lines if line.strip()][-8:],
    }


if __name__ == "__main__":
    sys.exit(main())
