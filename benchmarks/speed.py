"""How fast are the game, the game with its players' networks, and a whole iteration; where does the time go?

    python benchmarks/speed.py                           # the cases of the docs, on the GPU if there is one
    python benchmarks/speed.py --cases growth            # how the cost grows with games, board, players, seeds, trees
    python benchmarks/speed.py --flags="--method ppo --num-envs 4096"     # one case of your own

Medians of `--repeats` iterations after warm-up, without logging. The models are not pretrained: a step costs the same.
Writes `docs.csv` or `growth.csv` (with a picture), or `own.csv`, to `--folder`.
"""

import csv
import dataclasses
import functools
import importlib
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from stag_hunt_env import NUM_ACTIONS, Count, UserError, check_ranges, command_line, parse, resolve_device, seats_table

import torch

SCRIPTS = {"ppo": "hopplus_ppo", "mcts": "hopplus_mcts"}
PPO, LARGE = "--compile --method ppo --num-envs", "--compile --precision bf16 --ppo-real-ratio 0.5 --num-envs"
CASES = {  # name: (script, flags)
    "cuda": {
        "PPO, width 64, 16384 games, bf16": ("ppo", f"{PPO} 16384 --policy-hidden 64 --precision bf16"),
        "PPO, width 128, 16384 games, bf16": ("ppo", f"{PPO} 16384 --precision bf16"),
        "PPO, defaults": ("ppo", "--method ppo"),
        "PPO, defaults, compiled": ("ppo", "--method ppo --compile"),
        "HOP+, defaults": ("ppo", ""),
        "HOP+, defaults, compiled": ("ppo", "--compile"),
        "HOP+, 16384 games, half real, bf16": ("ppo", f"{LARGE} 16384"),
        "PPO, 1024 games, 1 seed": ("ppo", f"{PPO} 1024 --precision bf16"),
        "PPO, 1024 games, 16 seeds": ("ppo", f"{PPO} 1024 --precision bf16 --num-seeds 16"),
        "HOP+, 1024 games, 1 seed": ("ppo", f"{LARGE} 1024"),
        "HOP+, 1024 games, 16 seeds": ("ppo", f"{LARGE} 1024 --num-seeds 16"),
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


@dataclasses.dataclass
class Args:
    cases: Literal["docs", "growth"] = "docs"
    """the cases of the docs, or series in which one number grows"""
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


def measure(script, flags: str, repeats: int, device) -> dict[str, float | str]:
    args = script.parse_args([*flags.split(), "--device", device.type])
    args = dataclasses.replace(args, compile=args.compile and device.type == "cuda")
    config = script.validate(args)
    torch.backends.cuda.matmul.allow_tf32 = args.precision != "fp32"
    if args.compile:
        torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    seeds = list(range(args.seed, args.seed + args.num_seeds))
    tables = [seats_table(args.seats, config.num_players)] * len(seeds)
    state = script.make_train_state(args, tables, seeds, device)
    env = state.games.env
    run = {"train": functools.partial(script.train_iteration, state)}
    cycle = 1
    if state.watched is not None:
        run["watch"] = functools.partial(script.watch_rule_based, state)
        cycle = args.replay_rollouts  # iterations between two that are watched
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
    actions = torch.randint(NUM_ACTIONS, (args.num_steps, env.num_envs, config.num_players), device=device)

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
        row["busy"] = busy(train) / cycle / full
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return row


def busy(function) -> float:
    """seconds in which kernels ran, in one call"""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        function()
        torch.cuda.synchronize()
    events = (event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    kernels = [event.time_range for event in events if not getattr(event, "is_user_annotation", False)]
    return covered([(span.start, span.end) for span in kernels]) / 1e6


def covered(spans: list[tuple[float, float]]) -> float:
    """how long at least one of them lasted: kernels of two streams run at the same time"""
    total, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        total, until = total + max(0.0, end - max(begin, until)), max(until, end)
    return total


def main(args: Args) -> list[dict]:
    device, folder, rows = resolve_device(args.device), Path(args.folder), []
    check_ranges(args)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    cases = {"": (args.script, args.flags)} if args.flags is not None else CASES[device.type]
    if args.cases == "growth" and args.flags is None:
        cases = {f"{what} {v}": (script, f"{flags} {v}")
                 for what, (script, flags, values) in GROWTH.items() for v in values[device.type]}  # fmt: skip
    names = ", ".join(cases)
    cases = {case: given for case, given in cases.items() if case.startswith(args.only)}
    if not cases:
        raise UserError(f"--only {args.only}: no case begins so; there are {names}")
    print(f"{name}, torch {torch.__version__}; medians of {args.repeats} iterations after warm-up")
    folder.mkdir(parents=True, exist_ok=True)
    for case, (script, flags) in cases.items():
        row = {"case": case, "script": script, "flags": flags, "machine": name, "torch": torch.__version__}
        row |= measure(importlib.import_module(SCRIPTS[script]), flags, args.repeats, device)
        rows.append(row)
        stages = [
            f"{k[:-3]} {v:.2f}" for k, v in row.items() if k.endswith("_ms") and k != "iteration_ms" and v > 0.005
        ]
        print(f"{case or flags}: {row['agent_steps_per_s'] / 1e6:.3f} M agent-steps/s "
              f"({row['iteration_ms']:.2f} ms an iteration: {', '.join(stages)}); game and policy "
              f"{row['game_and_policy_env_steps_per_s']:,.0f}, "
              f"game only {row['game_only_env_steps_per_s']:,.0f} env-steps/s"
              + (f"; {row['peak_gib']:.2f} GiB, busy {row['busy']:.0%}" if "busy" in row else "")
              + f"; ready after {row['ready_s']:.1f} s", flush=True)  # fmt: skip
        names = list(dict.fromkeys(key for found in rows for key in found))
        with open(folder / f"{args.cases if args.flags is None else 'own'}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)
    if args.cases == "growth" and args.flags is None:
        draw(folder, rows, {what: values[device.type] for what, (_, _, values) in GROWTH.items()})
    print(f"table in {folder}")
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
