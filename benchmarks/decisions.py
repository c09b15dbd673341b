"""How long do the learners of a game take to decide, with one game and with many at once?

    python benchmarks/decisions.py                                # on the GPU if there is one
    python benchmarks/decisions.py --only PPO search --games 1 --repeats 3
    python benchmarks/decisions.py --only HOP --flags="--num-simulations 200"
    python benchmarks/decisions.py --csv docs/data/decisions_gpu.csv    # for the table of section `time`

A decision is one step of the game: all its learners perceive, infer, perhaps search, and act. The
methods are those of section `time` of experiments.py, with the defaults of the device and fresh
networks: a step costs the same.
"""

import dataclasses
import importlib
import itertools
import os
import sys
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.sections import TIMED, Timed
from benchmarks.speed import median_seconds, prepare, write_table
from stag_hunt_env import Count, check_ranges, command_line, parse, refuse, resolve_device

import torch

GAMES = {"cuda": (1, 4096), "cpu": (1, 64)}


@dataclasses.dataclass
class Args:
    only: tuple[str, ...] = ()
    """only these methods"""
    games: tuple[int, ...] = ()
    """games at once (none given: 1 and 4096, on a CPU 1 and 64)"""
    flags: str = ""
    """further flags for all of them"""
    steps: Count = 8
    """decisions that are measured together; then policy and value look once more, as in training"""
    repeats: Count = 10
    """how often, to take the median of"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where; auto: on the GPU if there is one"""
    csv: str | None = None
    """also write the table to this file"""


def measure(args: Args, method: Timed, games: int, device) -> float:
    """Milliseconds of a decision"""
    script = importlib.import_module(Path(method.script).stem)
    state = prepare(script, f"{method.flags} --num-envs {games} {args.flags}", device)
    flags = state.args

    def decide():
        return script.rollout(flags, state.games, state.networks, args.steps)

    script.fuse(flags.compile)
    decide()
    call = script.capture(decide, state.games.env, flags.cudagraphs)
    seconds = median_seconds(call, args.repeats, device)
    script.fuse(False)
    return 1000 * seconds / args.steps


def main(args: Args) -> list[dict]:
    check_ranges(args)
    device = resolve_device(args.device)
    for name in args.only:
        refuse(name not in TIMED, f"--only {name}: the methods are {', '.join(TIMED)}")
    methods = {name: TIMED[name] for name in args.only or TIMED}
    sizes = args.games or GAMES[device.type]
    refuse(min(sizes) < 1, f"--games must be >= 1, not {min(sizes)}")
    machine = f"{os.cpu_count()} CPU cores, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        machine = torch.cuda.get_device_name()
    print(f"{machine}, torch {torch.__version__}, medians of {args.repeats}; milliseconds a decision")
    rows = []
    for (name, method), games in itertools.product(methods.items(), sizes):
        row = {
            "run": name,
            "games": games,
            "milliseconds": measure(args, method, games, device),
            "script": method.script,
            "flags": method.flags,
            "machine": machine,
            "torch": torch.__version__,
        }
        rows.append(row)
        print(f"{name:<28} {games:>5} game(s) {row['milliseconds']:10.3f}", flush=True)
        if args.csv:
            write_table(Path(args.csv), rows)
    return rows


def parse_args(words: list[str]) -> Args:
    return parse(Args, {"decisions": Args}, Args(), words)


if __name__ == "__main__":
    command_line(parse_args, main)
