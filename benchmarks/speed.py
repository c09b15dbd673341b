"""How fast are the game, the game with its players' networks, and a whole iteration; where does the time go?

    python benchmarks/speed.py                           # the cases of the docs, on the GPU if there is one
    python benchmarks/speed.py --cases commands          # whole commands, also beside another program
    python benchmarks/speed.py --cases growth            # how the cost grows with games, board, players, seeds, trees
    python benchmarks/speed.py --flags="--method ppo --num-envs 4096"     # one case of your own

Iterations: medians of `--repeats` after warm-up, without logging. The models are not pretrained: a step costs the same.
Writes `docs.csv`, `commands.csv`, `growth.csv` (with a picture) or `own.csv` to `--folder`.
"""

import csv
import dataclasses
import functools
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from stag_hunt_env import NUM_ACTIONS, Count, UserError, check_ranges, command_line, parse, resolve_device, seats_table

import torch

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"ppo": "hopplus_ppo", "mcts": "hopplus_mcts"}
FAST = "--compile --precision bf16"
HALF_REAL = f"{FAST} --ppo-real-ratio 0.5"
CASES = {  # name: (script, flags)
    "cuda": {
        "PPO, width 64, 16384 games, bf16": ("ppo", f"--method ppo {FAST} --num-envs 16384 --policy-hidden 64"),
        "PPO, width 128, 16384 games, bf16": ("ppo", f"--method ppo {FAST} --num-envs 16384"),
        "PPO, defaults": ("ppo", "--method ppo"),
        "PPO, defaults, compiled": ("ppo", "--method ppo --compile"),
        "HOP+, defaults": ("ppo", ""),
        "HOP+, defaults, compiled": ("ppo", "--compile"),
        "HOP+, defaults, 8x8": ("ppo", "--height 8 --width 8"),
        "HOP+, 16384 games, half real, bf16": ("ppo", f"{HALF_REAL} --num-envs 16384"),
        "PPO, 1024 games, 1 seed": ("ppo", f"--method ppo {FAST} --num-envs 1024"),
        "PPO, 1024 games, 16 seeds": ("ppo", f"--method ppo {FAST} --num-envs 1024 --num-seeds 16"),
        "HOP+, 1024 games, 1 seed": ("ppo", f"{HALF_REAL} --num-envs 1024"),
        "HOP+, 1024 games, 16 seeds": ("ppo", f"{HALF_REAL} --num-envs 1024 --num-seeds 16"),
        "HOP+ MCTS, defaults": ("mcts", ""),
    },
    "cpu": {
        "PPO, defaults": ("ppo", "--method ppo"),
        "HOP+, defaults": ("ppo", ""),
        "HOP+ MCTS, defaults": ("mcts", ""),
    },
}
GROWTH = {  # what grows: (script, flags, values)
    "games": ("ppo", "--num-envs", {"cuda": (256, 1024, 4096), "cpu": (32, 128, 512)}),
    "board height": ("ppo", "--width 8 --height", {"cuda": (4, 6, 8), "cpu": (4, 6, 8)}),
    "players": ("ppo", "--num-players", {"cuda": (2, 4, 6), "cpu": (2, 4, 6)}),
    "seeds": ("ppo", "--num-seeds", {"cuda": (1, 4, 16), "cpu": (1, 2, 4)}),
    "imagination horizon": ("ppo", "--imagination-horizon", {"cuda": (2, 8, 32), "cpu": (2, 5, 16)}),
    "simulations": ("mcts", "--num-simulations", {"cuda": (4, 16), "cpu": (4, 8, 16)}),
}
BRIEF = "--method ppo --total-timesteps 150000"
COMMANDS = {  # name: (script, flags, how many at once, beside a program that keeps one core busy?)
    "HOP+": ("ppo", "", 1, False),
    "PPO": ("ppo", "--method ppo", 1, False),
    "HOP+ MCTS": ("mcts", "", 1, False),
    "HOP+ beside a busy program": ("ppo", "", 1, True),
    "PPO, 150000 steps": ("ppo", BRIEF, 1, False),
    "PPO, 150000 steps, two at once": ("ppo", BRIEF, 2, False),
}


@dataclasses.dataclass
class Args:
    cases: Literal["docs", "commands", "growth"] = "docs"
    """iterations of the cases of the docs; whole commands; series in which one number grows"""
    only: str = ""
    """only cases whose name begins with this"""
    flags: str | None = None
    """measure only a script with these flags"""
    script: Literal["ppo", "mcts"] = "ppo"
    """--flags: of hopplus_ppo.py or of hopplus_mcts.py"""
    repeats: Count = 10
    """iterations to take the median of (where rule-based games are watched only before every k-th one: groups of k)"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where; auto: on the GPU if there is one"""
    folder: str = "runs/speed"
    """where the table and the picture go"""


def median_seconds(function, repeats: int, device) -> float:
    times = []
    for _ in range(repeats + 3):
        begun = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[3:])


def prepare(script, flags: str, device):
    """The script's TrainState, games and fresh networks, as a run with these flags has them"""
    args = script.parse_args([*flags.split(), "--device", device.type])
    args = dataclasses.replace(args, compile=args.compile and device.type == "cuda")
    config = script.validate(args)
    torch.backends.cuda.matmul.allow_tf32 = args.precision != "fp32"
    if args.compile:
        torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seeds = list(range(args.seed, args.seed + args.num_seeds))
    tables = [seats_table(args.seats, config.num_players)] * len(seeds)
    return script.make_train_state(args, tables, seeds, device)


def measure(script, flags: str, repeats: int, device) -> dict[str, float | str]:
    """One iteration, its stages, and the game in it"""
    begun = time.perf_counter()
    state = prepare(script, flags, device)
    args = state.args
    config = args.config
    env = state.games.env
    run = {}
    cycle = 1
    if state.watched is not None:  # first: the models learn from these games
        run["watch"] = functools.partial(script.watch_rule_based, state)
        cycle = args.replay_rollouts  # iterations between two that are watched
    run["train"] = functools.partial(script.train_iteration, state)
    script.fuse(args.compile)
    if device.type == "cuda" and args.cudagraphs:
        run = script.capture_graphs(state, run)
    ready = time.perf_counter() - begun
    stages = []

    def train():
        times = []
        for k in range(cycle):
            if k == 0 and "watch" in run:
                run["watch"]()
            times.append(run["train"]()["timer"].seconds())
        stages.append({name: sum(stage[name] for stage in times) / cycle for name in times[0]})

    full = median_seconds(train, repeats, device) / cycle
    shape = args.num_steps, env.num_envs, config.num_players
    actions = torch.randint(NUM_ACTIONS, shape, device=device)

    def play_at_random():
        for step in range(args.num_steps):
            env.advance(actions[step])

    def play():
        script.rollout(args, state.games, state.networks, args.num_steps)

    play_at_random()
    game_seconds, policy_seconds = (
        median_seconds(script.capture(call, env, args.cudagraphs), repeats, device) for call in (play_at_random, play)
    )
    steps = args.num_steps * env.num_envs
    row = {
        "env_steps_per_s": steps / full,
        "agent_steps_per_s": steps * config.num_players / full,
        "game_only_env_steps_per_s": steps / game_seconds,
        "game_and_policy_env_steps_per_s": steps / policy_seconds,
        "iteration_ms": 1000 * full,
        "ready_s": ready,
    }
    for name in stages[0]:
        stage = name.removeprefix("time/")
        row[f"{stage}_ms"] = 1000 * statistics.median(times[name] for times in stages[3:])
    if device.type == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    script.fuse(False)
    return row


def run_commands(commands: list[list[str]], busy: bool) -> float:
    """Side by side. -> seconds until the last one ends; none of them outlives this one"""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    processes = []
    try:
        if busy:
            processes.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
        begun = time.perf_counter()
        runs = [subprocess.Popen(command, **quiet) for command in commands]
        processes += runs
        failed = [run.args for run in runs if run.wait()]
        seconds = time.perf_counter() - begun
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if failed:
        raise UserError(f"this command fails: {' '.join(failed[0])}")
    return seconds


def measure_command(script: str, flags: str, at_once: int, busy: bool, device) -> dict[str, float]:
    """Whole commands from their start to their end; the slowest counts"""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, str(ROOT / f"{SCRIPTS[script]}.py"), *flags.split()]
        words += ["--device", device.type, "--run-dir"]
        commands = [[*words, f"{folder}/{number}"] for number in range(at_once)]
        seconds = run_commands(commands, busy)
        metrics = min(Path(folder).glob("*/*/metrics.jsonl"))
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    ended = [row for row in rows if row["charts/episodic_return"] is not None]  # with games that ended
    last_fifth = [row["charts/episodic_return"] for row in ended if row["steps"] > 0.8 * rows[-1]["steps"]]
    learned = [row["time/ready"] + row["time/training"] for row in ended if row["charts/episodic_return"] >= 2.8]
    return {
        "seconds": seconds,
        "ready_s": rows[-1]["time/ready"],
        "training_s": rows[-1]["time/training"],
        "seconds_to_2.8": learned[0] if learned else math.nan,
        "return_last_fifth": statistics.mean(last_fifth) if last_fifth else math.nan,
    }


def describe(row: dict) -> str:
    """A row of iterations as a line"""
    stages = []
    for name, ms in row.items():
        if name.endswith("_ms") and name != "iteration_ms" and ms > 0.005:
            stages.append(f"{name.removesuffix('_ms')} {ms:.2f}")
    parts = [
        f"{row['agent_steps_per_s'] / 1e6:.3f} M agent-steps/s",
        f"{row['iteration_ms']:.2f} ms an iteration ({', '.join(stages)})",
        f"game and policy {row['game_and_policy_env_steps_per_s']:,.0f} env-steps/s",
        f"game only {row['game_only_env_steps_per_s']:,.0f} env-steps/s",
    ]
    if "peak_gib" in row:
        parts.append(f"{row['peak_gib']:.2f} GiB used, {row['reserved_gib']:.2f} GiB reserved")
    parts.append(f"ready after {row['ready_s']:.1f} s")
    return "; ".join(parts)


def choose_cases(args: Args, device) -> dict[str, tuple]:
    if args.flags is not None:
        return {"": (args.script, args.flags)}
    cases = COMMANDS if args.cases == "commands" else CASES[device.type]
    if args.cases == "growth":
        cases = {}
        for what, (script, flags, values) in GROWTH.items():
            for value in values[device.type]:
                cases[f"{what} {value}"] = (script, f"{flags} {value}")
    chosen = {case: given for case, given in cases.items() if case.startswith(args.only)}
    if not chosen:
        raise UserError(f"--only {args.only}: no case begins so; there are {', '.join(cases)}")
    return chosen


def write_table(path: Path, rows: list[dict]) -> None:
    names = list(dict.fromkeys(key for row in rows for key in row))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def main(args: Args) -> list[dict]:
    check_ranges(args)
    device = resolve_device(args.device)
    cases = choose_cases(args, device)
    machine = f"{os.cpu_count()} CPU cores, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        machine = torch.cuda.get_device_name()
    print(f"{machine}, torch {torch.__version__}")
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / (f"{args.cases}.csv" if args.flags is None else "own.csv")
    rows = []
    for case, (script, flags, *how) in cases.items():
        row = {"case": case, "script": script, "flags": flags, "machine": machine, "torch": torch.__version__}
        if how:
            row |= measure_command(script, flags, *how, device)
            ends = f"ends at {row['return_last_fifth']:.3f}"
            print(f"{case}: {row['seconds']:.1f} s, 2.8 after {row['seconds_to_2.8']:.1f} s, {ends}", flush=True)
        else:
            row |= measure(importlib.import_module(SCRIPTS[script]), flags, args.repeats, device)
            print(f"{case or flags}: {describe(row)}", flush=True)
        rows.append(row)
        write_table(table, rows)
    if args.cases == "growth" and args.flags is None:
        draw(folder, rows, {what: values[device.type] for what, (_, _, values) in GROWTH.items()})
    print(f"table in {table}")
    return rows


def draw(folder: Path, rows: list[dict], series: dict[str, tuple[int, ...]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.style.use(Path(__file__).resolve().parent / "plots.mplstyle")
    times = {row["case"]: row["iteration_ms"] for row in rows}
    shown = {what: values for what, values in series.items() if all(f"{what} {value}" in times for value in values)}
    if not shown:
        return
    figure, axes = plt.subplots(1, len(shown), figsize=(0.6 + 2.3 * len(shown), 2.6), sharey=True, squeeze=False)
    for axis, (what, values) in zip(axes[0], shown.items(), strict=True):
        own = [times[f"{what} {value}"] for value in values]
        axis.plot(values, own, "o-")
        for value, ms in zip(values, own, strict=True):
            text = f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}"
            axis.annotate(text, (value, ms), (0, 6), textcoords="offset points", ha="center")
        axis.set(xscale="log", yscale="log", xlabel=what, xticks=values, xticklabels=values)
        axis.set_xlim(values[0] / 1.5, values[-1] * 1.5)
        axis.set_ylim(0.6 * min(times.values()), 1.8 * max(times.values()))
        axis.minorticks_off()
        axis.set_yticks([])
    axes[0][0].set_ylabel("ms an iteration")
    figure.tight_layout()
    figure.savefig(folder / "growth.png")
    plt.close(figure)


if __name__ == "__main__":
    command_line(lambda words: parse(Args, {"speed": Args}, Args(), words), main)
